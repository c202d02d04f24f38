"""The step that was planned: it runs, with more micro-batches where the device has less room than was told."""

from collections.abc import Callable
from typing import Any

import jax

from optax_accum._shared.arrays import copied_to_host
from optax_accum._shared.checks import counted
from optax_accum.plan._plan import Plan
from optax_accum.plan._steps import Steps


class Fitted:
    """A step with the fewest micro-batches that fit, which `fit` returns.

    Attributes:
      num_microbatches: with how many it runs: those of the plan, or more if
        the first call was out of memory.
      plan: the `Plan`, with the table.
      step: the jitted step.
    """

    def __init__(self, steps: Steps, plan: Plan, more: list[int], progress: bool):
        self.plan, self.num_microbatches = plan, plan.num_microbatches or 0
        self.step = steps.step(self.num_microbatches)
        self._donates = _donated(steps.lowered(self.num_microbatches))
        self._steps, self._more, self._progress, self._has_run = steps, more, progress, False
        steps.forget()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; the first time with more micro-batches, if the device has too little memory."""
        return self.step(*args, **kwargs) if self._has_run else self._first(args, kwargs)

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        restored = _keep(self.step, self._donates, args, kwargs) if self._more else _nothing
        while True:
            try:
                out = self.step(*args, **kwargs)
                _wait((out, args, kwargs))
                self._has_run = True
                return out
            except jax.errors.JaxRuntimeError as error:
                if not _is_out_of_memory(error) or not self._more or (again := restored()) is None:
                    raise
            args, kwargs = again
            self._take_next()

    def _take_next(self) -> None:
        before, self.num_microbatches = self.num_microbatches, self._more.pop(0)
        self.step = self._steps.step(self.num_microbatches)
        if self._progress:
            print(f"Out of memory with {counted(before, 'micro-batch')}: now {self.num_microbatches}.")


_Call = tuple[tuple[Any, ...], dict[str, Any]]


def _keep(step: Any, donates: list[bool] | None, *call: Any) -> Callable[[], _Call | None]:
    """Copies the arguments that a call donates; returns a function that gives them again, or None if it cannot."""
    leaves, tree = jax.tree.flatten(call)
    if any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves):
        return _nothing
    if keep := getattr(step, "keep", None):  # a step that changes modules
        restore = keep(*call[0])
        return lambda: restore() or call
    if donates is None:
        return _nothing
    if len(donates) != len(leaves):  # of a call that was not planned
        donates = [True] * len(leaves)
    copies = [
        copied_to_host(leaf) if given else lambda leaf=leaf: leaf for leaf, given in zip(leaves, donates, strict=True)
    ]
    return lambda: tree.unflatten([again() for again in copies])


def _nothing() -> None:
    """Gives no arguments for another try."""


def _donated(lowered: Any) -> list[bool] | None:
    """Whether the step donates each argument, in order; None for a step that changes modules in place."""
    if hasattr(lowered, "lowered"):  # of nnx.jit
        return None
    return [info.donated for info in jax.tree.leaves(lowered.args_info)]


def _wait(tree: Any) -> None:
    """Waits for the results, and raises their error: a call returns before they are there."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) and not leaf.is_deleted()]
    jax.block_until_ready(arrays)


def _is_out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
