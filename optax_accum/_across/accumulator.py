"""What the state holds of a window in flight: the sum of its gradients; with `every=1` nothing."""

import jax

from optax_accum._across.schedules import Schedule
from optax_accum._core import arithmetic, compilers, matching
from optax_accum._core.state import AccumulationState, holds_sum
from optax_accum._core.types import Flag, Tree, Weight


class Accumulator:
    """The sum of a window in flight, which a state holds."""

    adds_inside = True  # whether a backward pass may add to it

    def check(self, schedule: Schedule, state: AccumulationState, grads: Tree) -> None:
        matching.check(state.acc_grads, grads)

    def on_device(self, state: AccumulationState) -> Tree:
        """The sum; fetched if it lies in the memory of the host."""
        return compilers.on_device(state.acc_grads)

    def plus(self, state: AccumulationState, grads: Tree, weight: Weight, first: Flag, skip: Flag) -> Tree:
        return arithmetic.add(self.on_device(state), grads, weight, first, skip)

    def weight(self, state: AccumulationState, weight: Weight) -> Weight:
        """The weight of the window with this micro-batch in it."""
        return state.weight + weight

    def with_sum(self, state: AccumulationState, total: Tree) -> AccumulationState:
        return state._replace(acc_grads=compilers.to_memory_of(total, state.acc_grads))


class NoAccumulator(Accumulator):
    """A state that holds no sum: each micro-step closes its window."""

    adds_inside = False

    def check(self, schedule: Schedule, state: AccumulationState, grads: Tree) -> None:
        if schedule.holds and jax.tree.leaves(grads):
            raise ValueError(
                f"Only every=1 works without an accumulator: every={schedule.text}, and the state was made for "
                "every=1. Add one with state._replace(acc_grads=tx.init(params).acc_grads)."
            )

    def plus(self, state: AccumulationState, grads: Tree, weight: Weight, first: Flag, skip: Flag) -> Tree:
        return arithmetic.add(None, grads, weight, first, skip)

    def weight(self, state: AccumulationState, weight: Weight) -> Weight:
        return weight  # known when tracing, where the weight is: no branch is compiled

    def with_sum(self, state: AccumulationState, total: Tree) -> AccumulationState:
        return state


def accumulator_of(state: AccumulationState) -> Accumulator:
    return Accumulator() if holds_sum(state) else NoAccumulator()
