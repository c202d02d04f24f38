"""When a window closes: a table of schedules, one for each kind of `every`: 4, a function of the update, None."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_accum._arguments import checks
from optax_accum._core import flags
from optax_accum._core.state import AccumulationState
from optax_accum._core.types import Flag, Weight
from optax_accum._shared.arrays import short
from optax_accum._shared.checks import as_integer


class Schedule(NamedTuple):
    """When a window closes: what `optax_accum.batching.every_by_tokens` and `every_by_noise` return, for `every`.

    Attributes:
      due: `(state, weight, counts) -> flag`, whether the micro-step that the state has just counted closes its window
        if the caller does not. `weight()` is the weight of the window, on all devices; `counts` says whether it was a
        micro-step, and not left out.
      holds: whether a gradient is ever kept from one micro-step to the next.
      needs: fields of the state that it reads, which a meter fills.
      text: what `every` was, for a message.
      on_host: `(number, asked) -> bool`, the same of micro-step `number` (from 1), where no device need be asked; None
        where only the device knows it.
      by_caller: whether the caller alone closes the window.
    """

    due: Callable[[AccumulationState, Callable[[], Weight], Flag], Flag]
    holds: bool = True
    needs: tuple[str, ...] = ()
    text: str = "a schedule"
    on_host: Callable[[int, bool], bool] | None = None
    by_caller: bool = False

    def closes(self, state: AccumulationState, weight: Callable[[], Weight], counts: Flag, flush: Any) -> Flag:
        """Whether a micro-step closes its window; `flush` is what the caller said, or None."""
        asked = self.asked(flush)
        return asked if asked is True else flags.known(flags.either(self.due(state, weight, counts), asked))

    def asked(self, flush: Any) -> Flag:
        """Whether the caller closes the window; raises if nobody else does, and the caller does not say it."""
        if flush is None and self.by_caller:
            raise ValueError(
                "With every=None the caller closes the window: flush=None. Pass flush=False to go on, flush=True to "
                "close it."
            )
        return False if flush is None else as_flush(flush)


Every = int | Callable[[Any], Any] | Schedule | None


def as_schedule(every: Any) -> Schedule:
    if isinstance(every, Schedule):
        return every
    if every is None:
        return Schedule(lambda *_: False, text="None", on_host=lambda number, asked: asked, by_caller=True)
    if callable(every):
        return by_count(lambda state: every(state.gradient_step))
    count = _as_int(every)
    if count == 1:
        return Schedule(lambda state, weight, counts: counts, holds=False, text="1")
    on_host = lambda number, asked: asked or number >= count
    return Schedule(lambda state, *_: state.mini_step >= count, text=str(count), on_host=on_host)


def by_count(count: Callable[[AccumulationState], Any], **fields: Any) -> Schedule:
    """Windows of `count(state)` micro-steps; a number below 1 acts as 1."""
    return Schedule(lambda state, *_: state.mini_step >= _as_count(count(state)), **fields)


def by_weight(least: float, text: str) -> Schedule:
    """Windows that close at a weight of `least`; a NaN closes its window, and shows."""
    return Schedule(lambda state, weight, counts: jnp.logical_not(weight() < least), text=text)


def _as_int(every: Any) -> int:
    rule = "every must be an integer >= 1, a callable of gradient_step, or None"
    if isinstance(every, Tracer):
        raise TypeError(f"{rule}: every={every}. A value known only at run time goes into a callable, or use flush.")
    number = as_integer(rule, "every", every, "Use every=1 for an update at every micro-step.")
    if number > jnp.iinfo(jnp.int32).max:
        raise ValueError(
            f"{rule}, below 2**31, as micro-steps are counted in int32: every={number}. Use every=None and flush for a "
            "window that only the caller closes."
        )
    return number


def _as_count(count: Any) -> jax.Array:
    """The number of micro-steps in a window, from a callable: an integer scalar, at least 1."""
    dtype, shape = checks.dtype_and_shape(count)
    if not jnp.issubdtype(dtype, jnp.integer) or shape:
        raise TypeError(
            f"A callable every must return an integer scalar: it returned {short(count)}. "
            "Wrap a schedule of floats: lambda step: jnp.asarray(schedule(step), int)."
        )
    count = jnp.asarray(count, None if dtype.itemsize >= 4 else jnp.int32)  # the bound of an int32 does not fit an int8
    return jnp.clip(count, 1, jnp.iinfo(jnp.int32).max).astype(jnp.int32)


def as_flush(flush: Any) -> Flag:
    """`flush` as a JAX scalar if it is one, else as a Python bool."""
    if checks.dtype_and_shape(flush) != (jnp.bool_, ()):
        raise TypeError(
            f"flush must be a bool, or a bool scalar: flush={short(flush)}. Pass flush=(step == last), say."
        )
    return flush if isinstance(flush, jax.Array) else bool(flush)
