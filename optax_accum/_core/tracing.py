"""Whether a call is traced, differentiated, or batched."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_accum._core import compilers
from optax_accum._core.leaves import parted
from optax_accum._core.types import Tree

NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def is_staged() -> bool:
    """Whether a program is being traced, as inside `jit`, rather than run."""
    return isinstance(jnp.zeros([]), Tracer)


def is_again(args: Tree) -> bool:
    """Whether JAX may differentiate this computation from `args` again, with no `jit` between.

    Outside `jit` it may also differentiate by values that functions close over, so there it always may.
    """
    return not is_staged() or is_differentiated(args)


def is_differentiated(tree: Tree) -> bool:
    """Whether JAX is differentiating this computation from `tree`, with no `jit` between."""
    seen: list[bool] = []
    _watched(tree, Tracer, lambda: seen.append(True))
    return bool(seen)


def refuse_differentiation(tree: Tree, message: str) -> Tree:
    """The same tree; differentiating it after this call, through a `jit` between, raises the message."""

    def refuse() -> None:
        raise ValueError(message)

    return _watched(tree, jax.Array, refuse)


def _watched(tree: Tree, kind: type, differentiated: Callable[[], None]) -> Tree:
    """The same tree; JAX calls a function when it differentiates the tree's leaves of a kind."""

    @jax.custom_jvp
    def identity(leaves: list[Any]) -> list[Any]:
        return leaves

    @identity.defjvp
    def _(leaves: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        differentiated()
        return leaves[0], tangents[0]

    def is_watched(leaf: Any) -> bool:
        is_inexact = isinstance(leaf, kind) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        return is_inexact and not compilers.is_reference(leaf)

    inexact, filled = parted(tree, is_watched)
    return filled(identity(inexact)) if inexact else tree
