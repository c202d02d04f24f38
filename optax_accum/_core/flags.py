"""Flags: a Python bool where tracing knows it (flush=False), an array where only the running program does (a NaN)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_accum._core.types import Flag


def known(flag: Flag) -> Flag:
    """A Python bool where the value is known: outside `jit`, a branch would be compiled at every call."""
    return flag if isinstance(flag, Tracer) else bool(flag)


def either(flag: Flag, other: Flag) -> Flag:
    if isinstance(flag, bool):
        return flag or other
    return other or flag if isinstance(other, bool) else flag | other


def both(flag: Flag, other: Flag) -> Flag:
    if isinstance(flag, bool):
        return flag and other
    return other and flag if isinstance(other, bool) else flag & other


def negated(flag: Flag) -> Flag:
    return not flag if isinstance(flag, bool) else jnp.logical_not(flag)


def selected(flag: Flag, on_true: Any, on_false: Any) -> Any:
    if isinstance(flag, bool):
        return on_true if flag else on_false
    return jax.tree.map(lambda leaf, other: jnp.where(flag, leaf, other), on_true, on_false)
