"""The sum of a window: what the state holds of it, with `every=1` nothing, and what divides it, a mean or a sum."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from optax_accum._across.schedules import Schedule
from optax_accum._core import arithmetic, compilers, matching
from optax_accum._core.state import AccumulationState, holds_sum
from optax_accum._core.types import Flag, Tree, Weight
from optax_accum._shared.checks import one_of


def check(schedule: Schedule, state: AccumulationState, grads: Tree) -> None:
    """Raises for gradients of another tree, and for a window of several micro-steps without a sum."""
    if holds_sum(state):
        matching.check(state.acc_grads, grads)
    elif schedule.holds and jax.tree.leaves(grads):
        raise ValueError(
            f"Only every=1 works without an accumulator: every={schedule.text}, and the state was made for "
            "every=1. Add one with state._replace(acc_grads=tx.init(params).acc_grads)."
        )


def so_far(state: AccumulationState) -> Tree | None:
    """The sum, fetched if it lies in the memory of the host; None where each micro-step closes its window."""
    return compilers.on_device(state.acc_grads) if holds_sum(state) else None


def with_sum(state: AccumulationState, total: Tree) -> AccumulationState:
    return state._replace(acc_grads=compilers.to_memory_of(total, state.acc_grads)) if holds_sum(state) else state


def weight_with(state: AccumulationState, weight: Weight) -> Weight:
    """The weight of the window with this micro-batch in it; known when tracing, where it is alone and its weight is."""
    return state.weight + weight if holds_sum(state) else weight


class Divisor(NamedTuple):
    """Divides the sum of a window.

    Attributes:
      is_mean: whether the divisor is the sum of the weights, of which each device holds a part.
      divides: `weight -> flag`: whether a window of this weight makes an update.
      factor: `weight -> number`: multiplies the sum.
      unweighed: `rows -> weight`: for a micro-batch without a weight; `rows` may be the denominator of its loss.
    """

    is_mean: bool
    divides: Callable[[Weight], Flag]
    factor: Callable[[Weight], Weight]
    unweighed: Callable[[Any], Weight]


TABLE = {
    "mean": Divisor(True, arithmetic.divides, arithmetic.reciprocal, lambda rows: rows * 1.0),
    "sum": Divisor(False, lambda weight: weight != 0, lambda weight: 1.0, lambda rows: 1.0),
}


def as_divisor(reduction: str) -> Divisor:
    return TABLE[one_of("reduction", reduction, tuple(TABLE))]
