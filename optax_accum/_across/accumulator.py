"""What the state holds of a window in flight: the sum of its gradients; with `every=1` nothing."""

import jax

from optax_accum._across.schedules import Schedule
from optax_accum._core import compilers, matching
from optax_accum._core.state import AccumulationState, holds_sum
from optax_accum._core.types import Tree, Weight


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
