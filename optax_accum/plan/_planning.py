"""`plan_microbatches`: the fewest micro-batches that fit, asked of compiled programs that never run."""

import importlib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from optax_accum._arguments import callables, checks
from optax_accum._arguments.signature import signature_of
from optax_accum._core.messages import counted, there_are
from optax_accum.accelerators._footprint import shards_of
from optax_accum.accelerators._targets import Target
from optax_accum.accelerators._targets import target as find_target
from optax_accum.plan import _budgets as budgets
from optax_accum.plan import _search as search
from optax_accum.plan._plan import NothingFitsError, Plan
from optax_accum.plan._search import PASS_ON, Candidate, MakeStep, Trial
from optax_accum.plan._steps import Builder


def plan_microbatches(
    make_step: MakeStep,
    global_batch: int | None = None,
    *,
    target: str | Target | None = None,
    budget: int | float | str | None = None,
    num_devices: int | None = None,
    options: Sequence[Any] | None = None,
    candidates: Iterable[int] | None = None,
    safety: float = 0.9,
    progress: bool = True,
) -> Plan:
    """Returns the fewest micro-batches with which a step fits in memory.

        k = plan_microbatches(make_step, 256).num_microbatches

    Nothing is allocated: the step is compiled from shapes, for this
    machine's accelerator or an absent one, and the compiler reports its
    peak memory:

        arguments + outputs
        - donated arguments whose memory outputs reuse
        + temporary memory + the program

    which grows almost linearly with the rows of a micro-batch. The search
    bisects between a size that fits and one that does not. A linear fit
    proposes the next size, and a compilation decides: the result was
    compiled, and fits.

    Args:
      make_step: `make_step(num_microbatches)` returns
        `jax.jit(step).lower(*shapes)`, of any step: ours, or one of your
        own. With a parameter `target` it is given the `Target` to lower
        for. `optax_accum.plan.of_loss` and `optax_accum.plan.of_step` make
        one.
      global_batch: the rows of one update, over all devices.
      target: an accelerator, by its name or as
        `optax_accum.accelerators.target` returns it; None for the devices
        here.
      budget: the memory of one device: bytes, or text ("80GB", "7.5 GiB").
        By default the target's own: of a CPU what is free, of a GPU that is
        not here the 75 % that JAX takes by default.
      num_devices: how many devices share a micro-batch. None: those of a
        `Target` or a topology, else 1.
      options: the step is planned with each, as
        `make_step(num_microbatches, option)`: policies of `jax.checkpoint`,
        offload, lengths. The first option that fits is chosen, with any
        number of micro-batches: pass the one that you like best first, such
        as the one that computes nothing twice.
      candidates: the numbers of micro-batches to choose from; by default
        the divisors of the rows. Pass `range(1, rows + 1)` for all numbers,
        if the step allows a smaller last micro-batch. Numbers that give the
        same micro-batch size are one candidate: the smallest is tried.
      safety: the fraction of the budget to use. The compiler does not count
        other processes, fragmentation, and what the runtime keeps for
        itself.
      progress: whether to show a bar over the compilations, with tqdm if it
        is installed.

    Returns:
      A `Plan`. Printed it is a table; it has `num_microbatches`, `sizes`,
      `option`, `rows` and `plot()`. To find it, at most 6 programs are
      compiled for each option, if the batch has up to 17 divisors (1024
      rows have 11), and one more each time that the divisors double.

    Raises:
      ValueError: nothing fits; an `optax_accum.plan.NothingFitsError` says
        the smallest peak, the budget and what to try, and its `plan` what
        was compiled. An invalid budget or number. A `make_step` that raises
        for every number, ignores it, takes it for the rows of a
        micro-batch, has a batch of other rows, or lowers a step for other
        devices, for only some of them, or so that each computes all rows.
      TypeError: `make_step` is no function, or returns no lowered step.
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
      * A number or an option that does not lower: the others are planned,
        and the table says so.
      * A compiler that stops for want of memory (TPU): the step does not
        fit; its bytes are what the compiler says.
      * An option whose arguments alone are more than the budget: one
        compilation; the others are planned.
      * Several options: each is planned and shown; the first that fits is
        chosen.
      * Several devices: the bytes of one device; the rows of one shard of
        the batch, on a mesh of several axes, too.
      * A CPU: the budget is what is free, or what its control groups leave;
        as several devices, each has its share.

    Example:
      >>> import jax, jax.numpy as jnp, optax_accum
      >>> loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> w = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> batch = jax.ShapeDtypeStruct((1024, 64), "float32")
      >>> def make_step(num_microbatches):
      ...     step = optax_accum.value_and_grad(loss, num_microbatches)
      ...     return jax.jit(step).lower(w, batch)
      >>> plan = optax_accum.plan_microbatches(
      ...     make_step, 1024, budget="1GB", progress=False)
      >>> plan.num_microbatches, plan.sizes
      (1, (1024,))
    """
    callables.as_function(make_step, "make_step", _REMEDY)
    if options is None and "target" not in signature_of(make_step).keywords:
        callables.check_takes("make_step", make_step, "the number of micro-batches", _REMEDY)
    rows = checks.as_count("global_batch", global_batch)
    builder = make_step if isinstance(make_step, Builder) else None
    if builder:
        _check_builder(builder, rows, options)
    _check_safety(safety)
    on, devices = _target(target, num_devices)
    size = budgets.memory_of(on, here=target is None, devices=devices) if budget is None else budgets.as_bytes(budget)
    limit = safety * size
    numbers = as_numbers(candidates)
    trials = [Trial(make_step, on, place, given) for place, given in enumerate(_options(options))]
    shards = _shards(trials, rows, min(numbers or [1])) if devices > 1 else 1
    local_rows = -(-rows // shards)
    for trial in trials:  # all are lowered before one is compiled
        trial.prepare(_candidates(local_rows, numbers))
    lowered = [trial for trial in trials if trial.every]
    if not lowered:
        raise next(iter(trials[0].errors.values()))
    with _bar(progress, sum(search.enough(trial.every) for trial in lowered)) as advance:
        for trial in lowered:
            trial.search(limit, advance)
    copy, summed = (builder.copy, builder.sum) if builder else (None, None)
    loops = any(c.number > 1 for trial in lowered for c in trial.found)
    kept = -(-(builder.kept() or 0) // shards) if builder and loops else 0
    skipped = tuple(why for trial in trials for why in trial.skipped)
    compiled = tuple(one for trial in lowered for one in trial.compiled(limit))
    monotone = all(search.grows(trial.peaks) for trial in lowered)
    fits = next((one for one in compiled if one.fits), None)  # the fewest with the first option that fits
    number, option, place = (fits.candidate.number, fits.option, fits.place) if fits else (None, None, 0)
    given = rows, devices, on.name, size, limit
    plan = Plan(number, option, *given, compiled, copy, summed, place, monotone, shards, skipped, kept)
    if fits is None:
        raise NothingFitsError(_nothing_fits(lowered, plan), plan)
    return plan


_REMEDY = (
    "Pass lambda k: jax.jit(step_of(k)).lower(*shapes), or what of_loss and of_step return: "
    "plan_microbatches(of_loss(loss, tx, params, batch), global_batch)."
)
_WAYS_FOR_ARGUMENTS = (
    "Donate parameters and state (donate_argnums), shard them (FSDP, or ZeRO-1 with Devices(to=)), or keep the moments "
    'on the host (state_sharding(tx, params, offload="inner_opt_state")).'
)
_WAYS = (
    "Recompute activations (jax.checkpoint, and its policies as options=), offload them, shard the parameters (FSDP), "
    "or cut layer by layer (microbatched): docs/planning.md."
)


def _nothing_fits(trials: Sequence[Trial], plan: Plan) -> str:
    small = f'The budget is {plan.budget} bytes: for more pass text, such as "80GB". ' * (plan.budget < 2**20)
    if all(trial.least > plan.limit for trial in trials):
        footprint = min(plan.compiled, key=lambda one: one.footprint.arguments + one.footprint.unaliased).footprint
        return (
            f"The budget must hold what the step is given and returns: {budgets.as_text(footprint.arguments)} of "
            f"arguments and {budgets.as_text(footprint.unaliased)} of outputs that replace none, limit="
            f"{budgets.as_text(plan.limit)}. No number of micro-batches changes that. {small}{_WAYS_FOR_ARGUMENTS}"
        )
    least = min(plan.compiled, key=lambda one: one.footprint.peak)
    ignored = f"make_step must cut the batch as it is told, and all numbers cost the same. {PASS_ON} "
    number = counted(least.candidate.number, "micro-batch")
    return (
        f"Nothing fits: the smallest peak is {budgets.as_text(least.footprint.peak)}, with {number}, and the limit "
        f"{budgets.as_text(plan.limit)}, of a budget of {budgets.as_text(plan.budget)}. "
        f"{ignored * any(trial.ignores_number for trial in trials)}{small}{_WAYS}"
    )


def _target(target: str | Target | None, num_devices: int | None) -> tuple[Target, int]:
    """The accelerator, and how many of its devices share a micro-batch."""
    number = checks.as_positive("num_devices", num_devices)
    if isinstance(target, Target):
        on = target
    elif target is None:
        on = find_target(None, number or 1)
    else:
        on = find_target(target, number)
    if number and number != len(on.devices):
        raise ValueError(
            f"num_devices must be the number of devices of the target: num_devices={number}, and {on.name} has "
            f"{len(on.devices)}. Leave it out."
        )
    return on, len(on.devices)


def _check_safety(safety: Any) -> None:
    rule = f"safety must be a number above 0 and at most 1: safety={safety!r}. Pass 0.9 to use 90 % of the budget."
    if isinstance(safety, bool) or not isinstance(safety, int | float | np.integer | np.floating):
        raise TypeError(rule)
    if not 0 < safety <= 1:
        raise ValueError(rule)


def as_numbers(candidates: Any) -> list[int] | None:
    """Checks numbers of micro-batches; None stands for the divisors of the rows."""
    if candidates is None:
        return None
    if not isinstance(candidates, Iterable):
        raise TypeError(f"candidates must be several numbers of micro-batches: {candidates=!r}. Pass [1, 2, 4].")
    return [checks.as_count("candidates", number) for number in candidates]


def _candidates(rows: int, numbers: list[int] | None) -> list[Candidate]:
    if numbers is not None and (not numbers or max(numbers) > rows):
        asked = f"{min(numbers)} to {max(numbers)}" if len(numbers) > 8 else numbers
        raise ValueError(
            f"There must be a row for each micro-batch on each device: candidates={asked}, and "
            f"{there_are(rows, 'row')}. Pass numbers from 1 to {rows}."
        )
    return search.candidates(rows, numbers)


def _shards(trials: Sequence[Trial], rows: int, number: int) -> int:
    """The number of shards among which a step deals the rows: its batch's, else one for each device."""
    for trial in trials:
        lowered = trial.lowered(number)
        for dealt in (rows, -(-rows // number)):  # the whole batch, or one micro-batch of it
            if lowered and (shards := shards_of(lowered, dealt)):
                return shards
    return len(trials[0].target.devices)


def _options(options: Any) -> list[tuple[Any, ...]]:
    """The arguments that `make_step` gets after the number, for each option."""
    if options is None:
        return [()]
    if isinstance(options, str) or not isinstance(options, Iterable) or not (tuples := [(each,) for each in options]):
        raise ValueError(f'options must be a sequence of what make_step takes second: options={options!r}. Pass ["a"].')
    return tuples


def _check_builder(builder: Builder, rows: int, options: Sequence[Any] | None) -> None:
    if builder.rows not in (None, rows):
        raise ValueError(
            f"global_batch must be the rows of the batch that the builder was given: global_batch={rows}, and it has "
            f"{builder.rows}. Pass {builder.rows}, or of_loss and of_step a batch of {counted(rows, 'row')}."
        )
    if options is not None:
        raise ValueError(
            f"What of_loss and of_step return takes no option: options={options!r}. Write a function around it: "
            "make_step=lambda k, option, target: of_loss(losses[option], tx, params, batch)(k, target)."
        )


@contextmanager
def _bar(progress: bool, total: int) -> Generator[Callable[[str, int], None]]:
    """Yields `advance(what, done)`: the next program, and how many are done; it draws a bar, if tqdm is there."""
    try:
        bar_of = importlib.import_module("tqdm.auto").tqdm if progress else None
    except ImportError:
        bar_of = None
    if bar_of is None:
        yield lambda what, done: None
        return
    with bar_of(total=total, desc="compiling", unit="program") as bar:

        def advance(what: str, done: int) -> None:
            bar.set_postfix_str(what, refresh=bool(what))
            bar.update(done)

        yield advance
        bar.total = bar.n  # fewer were needed
        bar.refresh()
