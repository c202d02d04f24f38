"""`fit`: the one door to planning. It returns the step with the fewest micro-batches that fit, or the plan of it."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, overload

import jax

from optax_accum.accelerators._targets import Target, as_target
from optax_accum.accelerators._targets import target as find_target
from optax_accum.plan import _budgets as budgets
from optax_accum.plan import _search as search
from optax_accum.plan._fitted import Fitted
from optax_accum.plan._plan import Plan
from optax_accum.plan._planning import as_numbers, check_safety, planned
from optax_accum.plan._steps import Steps, positions, rows_of


@overload
def fit(step_of_k: Callable[[int], Any], *args: Any, run: Literal[True] = True, **options: Any) -> Fitted: ...


@overload
def fit(step_of_k: Callable[[int], Any], *args: Any, run: Literal[False], **options: Any) -> Plan: ...


def fit(
    step_of_k: Callable[[int], Any],
    *args: Any,
    batch_argnums: int | Sequence[int] = 1,
    run: bool = True,
    target: str | Target | None = None,
    budget: int | float | str | None = None,
    candidates: Iterable[int] | None = None,
    safety: float = 0.9,
    progress: bool = True,
    **kwargs: Any,
) -> Fitted | Plan:
    """Returns the jitted step with the fewest micro-batches that fit.

        step = plan.fit(step_of_k, params, state, batch, batch_argnums=2)
        for batch in batches:
            params, state, loss = step(params, state, batch)

    With `run=False` it returns the plan alone: for shapes in place of
    arrays, and for an accelerator that is not here.

    Nothing is allocated: the step is compiled with several numbers of
    micro-batches, and the compiler reports its peak memory:

        arguments + outputs
        - donated arguments whose memory outputs reuse
        + temporary memory + the program

    which grows almost linearly with the rows of a micro-batch. The search
    bisects between a size that fits and one that does not. A linear fit
    proposes the next size, and a compilation decides: the result was
    compiled, and fits. The program that was chosen is the one that runs:
    it is not compiled again.

    Args:
      step_of_k: `step_of_k(num_microbatches)` returns the jitted step, of
        any kind: `jax.jit` of a function that you wrote, or a `train_step`
        of `optax_accum.flax`; or anything with a method `lower(*args)` that
        returns a `jax.stages.Lowered`. `plan.of_loss` makes one of a loss
        and an optimizer, to plan.
      *args: the arguments of the step, as you will pass them; with
        `run=False` their shapes do. Nothing runs on them yet.
      batch_argnums: which of them hold the batch, counted from 0.
      run: whether to return the step, which can run, or its plan.
      target: with `run=False`, an accelerator by its name or as
        `optax_accum.accelerators.target` returns it. Rows of the batch are
        dealt over its devices; all else is on each device whole, unless it
        lies on the target's mesh already (FSDP). By default the devices
        that the arguments lie on.
      budget: the memory of one device: bytes, or text ("80GB", "7.5 GiB").
        By default the device's own: of a CPU what is free, of a GPU that is
        not here the 75 % that JAX takes by default.
      candidates: the numbers of micro-batches to choose from; by default
        the divisors of the rows. Pass `range(1, rows + 1)` for all numbers,
        if the step allows a smaller last micro-batch. Numbers that give the
        same micro-batch size are one candidate: the smallest is tried.
      safety: the fraction of the budget to use. The compiler does not count
        other processes, fragmentation, and what the runtime keeps for
        itself.
      progress: whether to show a bar over the compilations, with tqdm if it
        is installed; with `run=True` also whether to print the table, and
        say when a number of micro-batches was too small.
      **kwargs: the arguments of the step that come by keyword, static ones
        among them, as you will pass them; none that holds the batch.

    Returns:
      A `Fitted`: call it as the step. It has `num_microbatches`, `plan` and
      `step`. With `run=False` a `Plan`: printed it is a table; it has
      `num_microbatches`, `sizes`, `rows` and `plot()`. To find it, at most
      6 programs are compiled if the batch has up to 17 divisors (1024 rows
      have 11), and one more each time that the divisors double.

    Raises:
      ValueError: nothing fits; an `optax_accum.plan.NothingFitsError` says
        the smallest peak, the budget and what to try, and its `plan` what
        was compiled. An invalid budget or number; arrays of the batch with
        different numbers of rows. A step that does not lower with any
        number, ignores it, takes it for the rows of a micro-batch, or is
        lowered for other devices, for only some of them, or so that each
        computes all rows.
      TypeError: `step_of_k` is no function, or returns no jitted step, or
        one of `jit_step`, which is planned with `run=False` alone.
      RuntimeError: the target's compiler is not installed, or tells nothing
        about memory.

    Guarantees:
      * The whole batch fits: one micro-batch, one compilation.
      * Memory grows with the rows of a micro-batch: the candidate with the
        next fewer micro-batches was compiled too, and does not fit.
      * Memory does not grow with them: the remaining candidates are
        bisected while compilations are left; the table says so, and
        `Plan.monotone`.
      * Micro-batches of one row: tried last, because their products are
        others, and so is their memory.
      * A number above 1 that does not lower: the others are planned, and
        the table says so.
      * A compiler that stops for want of memory (TPU): the step does not
        fit; its bytes are what the compiler says.
      * Several devices: the bytes of one device; the rows of one shard of
        the batch, on a mesh of several axes, too.
      * A CPU: the budget is what is free, or what its control groups leave;
        as several devices, each has its share.
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

      From shapes, without running:

      >>> batch = jax.ShapeDtypeStruct((1024, 8), "float32")
      >>> plan = optax_accum.plan.fit(
      ...     step_of_k, w, batch, run=False, budget="1GB", progress=False)
      >>> plan.num_microbatches, plan.sizes
      (1, (1024,))
    """
    _check_function(step_of_k)
    check_safety(safety)
    if run and target is not None:
        raise ValueError(
            f"A step runs where its arguments lie: target={target!r}. Pass run=False to plan for that target, or leave "
            "it out."
        )
    batch = positions(batch_argnums, len(args))
    rows = rows_of(args, batch)
    if rows is None:
        raise ValueError(
            f"The arguments that hold the batch must be arrays with the same rows: {batch_argnums=}. Pass the "
            "positions of those that do, fit(step_of_k, params, state, batch, batch_argnums=2)."
        )
    numbers = as_numbers(candidates)
    if target is None:
        on = _devices_of((args, kwargs))
    else:
        on = target if isinstance(target, Target) else find_target(target)
    free = functools.partial(budgets.memory_of, on, here=target is None, devices=len(on.devices))
    size = free() if budget is None else budgets.as_bytes(budget)
    steps = Steps(step_of_k, args, kwargs, batch, None if run else on)
    if 1 in (numbers or [1]):
        steps.lowered(1)  # an error of the step is raised as it is
    found = planned(steps, on, rows, size, safety * size, numbers, progress)
    if not run:
        return found
    if progress:
        print(found)
    later = [c.number for c in search.candidates(-(-rows // (found.shards or 1)), numbers)]
    return Fitted(steps, found, [number for number in later if number > (found.num_microbatches or 0)], progress)


def _check_function(step_of_k: Any) -> None:
    remedy = "Pass a function that returns the jitted step: fit(step_of_k, *args); of a loss, fit(of_loss(loss, tx), "
    remedy += "params, batch, run=False)."
    if not callable(step_of_k):
        raise TypeError(f"step_of_k must be a function: step_of_k={step_of_k!r}. {remedy}")
    try:
        signature = inspect.signature(step_of_k)
    except ValueError:  # of a builtin
        return
    try:
        signature.bind(1)
    except TypeError:
        raise TypeError(
            f"step_of_k is called with the number of micro-batches alone: it takes {signature}. {remedy}"
        ) from None


def _devices_of(args: Any) -> Target:
    shardings = [
        leaf.sharding
        for leaf in jax.tree.leaves(args)
        if isinstance(getattr(leaf, "sharding", None), jax.sharding.Sharding)
    ]
    sets = [sharding.device_set for sharding in shardings] or [{jax.devices()[0]}]
    return as_target(sorted(max(sets, key=len), key=lambda device: device.id))
