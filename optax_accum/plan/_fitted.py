"""A step that fits: planned from the arguments it will run on, with a second try where the device has less room."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from optax_accum._arguments import callables
from optax_accum._core.memory import copied_to_host
from optax_accum._core.messages import counted
from optax_accum.accelerators._targets import Target, of_devices
from optax_accum.plan import _budgets as budgets
from optax_accum.plan import _search as search
from optax_accum.plan._plan import Plan
from optax_accum.plan._planning import as_numbers, plan_microbatches
from optax_accum.plan._steps import Builder, positions, rows_of


def fit(
    step_of_k: Callable[[int], Any],
    *args: Any,
    batch_argnums: int | Sequence[int] = 1,
    budget: int | float | str | None = None,
    candidates: Iterable[int] | None = None,
    safety: float = 0.9,
    progress: bool = True,
    **kwargs: Any,
) -> "Fitted":
    """Returns the jitted step with the fewest micro-batches that fit here.

        step = plan.fit(step_of_k, params, state, batch, batch_argnums=2)
        for batch in batches:
            params, state, loss = step(params, state, batch)

    It plans for the devices that the arguments lie on, as
    `plan_microbatches` does, and prints the table. The program that was
    chosen is the one that runs: it is not compiled again.

    Args:
      step_of_k: `step_of_k(num_microbatches)` returns the jitted step, of
        any kind: `jax.jit` of a function that you wrote, or a `train_step`
        of `optax_accum.flax`.
      *args: the arguments of the step, as you will pass them. Nothing runs
        on them yet.
      batch_argnums: which of them hold the batch, counted from 0.
      budget: the memory of one device; by default all that JAX may take
        there, of a CPU what is free.
      candidates: the numbers of micro-batches to choose from; by default
        the divisors of the rows.
      safety: the fraction of the budget to use.
      progress: whether to show a bar, print the table, and say when a
        number of micro-batches was too small.
      **kwargs: the arguments of the step that come by keyword, static ones
        among them, as you will pass them; none that holds the batch.

    Returns:
      A `Fitted`: call it as the step. It has `num_microbatches`, `plan` and
      `step`.

    Raises:
      ValueError: nothing fits (`NothingFitsError`); arrays of the batch
        with different numbers of rows; and what `plan_microbatches` raises.
      TypeError: `step_of_k` is no function, or returns no jitted step, or
        one of `jit_step`: `plan_microbatches` takes these.

    Guarantees:
      * The device is out of memory at the first call all the same: the step
        runs with the next candidate, and so on. Only the last error is
        raised.
      * Arguments that a failed call has donated are restored: until the
        first call has succeeded, a copy of them is kept in the host's
        memory. Those not donated are not copied.
      * NNX: `train_step` of `optax_accum.flax.nnx` gets back the values of
        model and optimizer. Another step that changes modules is not
        repeated: the error is raised.
      * Several processes: the error is raised.
      * Later calls go straight to the jitted step.

    Example:
      >>> import jax, jax.numpy as jnp, optax_accum
      >>> loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> w, batch = jnp.ones((8, 8)), jnp.ones((64, 8))
      >>> step_of_k = lambda k: jax.jit(optax_accum.value_and_grad(loss, k))
      >>> step = optax_accum.plan.fit(
      ...     step_of_k, w, batch, budget="1GB", progress=False)
      >>> value, grads = step(w, batch)
      >>> step.num_microbatches
      1
    """
    callables.as_function(
        step_of_k, "step_of_k", "Pass a function that returns the jitted step: fit(step_of_k, *args)."
    )
    rows = rows_of(args, positions(batch_argnums, len(args)))
    if rows is None:
        raise ValueError(
            f"The arguments that hold the batch must be arrays with the same rows: {batch_argnums=}. Pass the "
            "positions of those that do, fit(step_of_k, params, state, batch, batch_argnums=2)."
        )
    numbers = as_numbers(candidates)
    steps = PlannedSteps(step_of_k, args, kwargs)
    steps.lowered(min(numbers or [1]))  # an error of the step is raised as it is
    target = _devices_of((args, kwargs))
    if budget is None:
        budget = budgets.memory_of(target, here=True, devices=len(target.devices))
    how: Any = {"target": target, "budget": budget, "candidates": numbers, "safety": safety, "progress": progress}
    found = plan_microbatches(Builder(lambda number, target: steps.lowered(number), rows), rows, **how)
    if progress:
        print(found)
    later = [c.number for c in search.candidates(-(-rows // (found.shards or 1)), numbers)]
    return Fitted(steps, found, [number for number in later if number > (found.num_microbatches or 0)], progress)


class PlannedSteps:
    """The jitted steps by their number of micro-batches: each is made once, lowered once, and is the one that runs."""

    def __init__(self, step_of_k: Callable[[int], Any], args: Sequence[Any], kwargs: dict[str, Any]):
        self._step_of_k, self._args, self._kwargs = step_of_k, args, kwargs
        self._steps: dict[int, Any] = {}
        self._lowered: dict[int, Any] = {}

    def step(self, number: int) -> Any:
        if number not in self._steps:
            step = self._step_of_k(number)
            if not hasattr(step, "lower"):
                raise TypeError(f"step_of_k must return a jitted step: it returned {step!r}. Pass it to jax.jit.")
            if hasattr(step, "one_program"):
                raise TypeError(
                    "step_of_k must return a step that is one program: it returned that of jit_step, which runs another"
                    " when it updates. Plan it with plan_microbatches(of_step(...)), or pass the step to jax.jit."
                )
            self._steps[number] = step
        return self._steps[number]

    def lowered(self, number: int) -> Any:
        """The step lowered for the arguments: its first call compiles the same program."""
        if number not in self._lowered:
            self._lowered[number] = self.step(number).lower(*self._args, **self._kwargs)
        return self._lowered[number]

    def forget(self) -> None:
        """Drops the arguments and all that was lowered."""
        self._args, self._kwargs, self._lowered = (), {}, {}


class Fitted:
    """A step with the fewest micro-batches that fit, which `fit` returns.

    Attributes:
      num_microbatches: with how many it runs: those of the plan, or more if
        the first call was out of memory.
      plan: the `Plan`, with the table.
      step: the jitted step.
    """

    def __init__(self, steps: PlannedSteps, plan: Plan, more: list[int], progress: bool):
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


def _devices_of(args: Any) -> Target:
    shardings = [
        leaf.sharding
        for leaf in jax.tree.leaves(args)
        if isinstance(getattr(leaf, "sharding", None), jax.sharding.Sharding)
    ]
    sets = [sharding.device_set for sharding in shardings] or [{jax.devices()[0]}]
    return of_devices(sorted(max(sets, key=len), key=lambda device: device.id))
