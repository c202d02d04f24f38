"""The plan of a step: the fewest micro-batches that fit, asked of compiled programs that never run."""

import importlib
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import numpy as np

from optax_accum._shared import checks
from optax_accum._shared.checks import counted, there_are
from optax_accum.accelerators._footprint import shards_of
from optax_accum.accelerators._targets import Target
from optax_accum.plan import _budgets as budgets
from optax_accum.plan import _search as search
from optax_accum.plan._plan import NothingFitsError, Plan
from optax_accum.plan._search import PASS_ON, Candidate, Trial
from optax_accum.plan._steps import Steps


def planned(
    steps: Steps, on: Target, rows: int, budget: int, limit: float, numbers: list[int] | None, progress: bool
) -> Plan:
    """The fewest micro-batches that fit into `limit` bytes of each device of `on`."""
    devices = len(on.devices)
    trial = Trial(steps, on)
    shards = _shards(trial, rows, min(numbers or [1])) if devices > 1 else 1
    trial.prepare(_candidates(-(-rows // shards), numbers))
    if not trial.every:
        raise next(iter(trial.errors.values()))
    with _bar(progress, search.enough(trial.every)) as advance:
        trial.search(limit, advance)
    compiled = tuple(trial.compiled(limit))
    number = next((one.candidate.number for one in compiled if one.fits), None)
    plan = Plan(
        number,
        rows,
        devices,
        on.name,
        budget,
        limit,
        compiled,
        monotone=search.grows(trial.peaks),
        shards=shards,
        skipped=tuple(map(str, trial.errors.values())),
        **steps.known(shards, in_loops=any(c.number > 1 for c in trial.found)),
    )
    if number is None:
        raise NothingFitsError(_nothing_fits(trial, plan), plan)
    return plan


_WAYS_FOR_ARGUMENTS = (
    "Donate parameters and state (donate_argnums), shard them (FSDP, or ZeRO-1 with Devices(to=)), or keep the moments "
    'on the host (state_sharding(tx, params, offload="inner_opt_state")).'
)
_WAYS = (
    "Recompute activations (jax.checkpoint, and its policies), offload them, shard the parameters (FSDP), "
    "or split each layer (microbatched): docs/planning.md."
)


def _nothing_fits(trial: Trial, plan: Plan) -> str:
    small = f'The budget is {plan.budget} bytes: for more pass text, such as "80GB". ' * (plan.budget < 2**20)
    if trial.least > plan.limit:
        footprint = min(plan.compiled, key=lambda one: one.footprint.arguments + one.footprint.unaliased).footprint
        return (
            f"The budget must hold what the step is given and returns: {budgets.as_text(footprint.arguments)} of "
            f"arguments and {budgets.as_text(footprint.unaliased)} of outputs that replace none, limit="
            f"{budgets.as_text(plan.limit)}. No number of micro-batches changes that. {small}{_WAYS_FOR_ARGUMENTS}"
        )
    least = min(plan.compiled, key=lambda one: one.footprint.peak)
    ignored = f"The step must split the batch as it is told, and all numbers cost the same. {PASS_ON} "
    number = counted(least.candidate.number, "micro-batch")
    skipped = "".join(f"Not planned: {why.splitlines()[0]} " for why in plan.skipped[:1])
    return (
        f"Nothing fits: the smallest peak is {budgets.as_text(least.footprint.peak)}, with {number}, and the limit "
        f"{budgets.as_text(plan.limit)}, of a budget of {budgets.as_text(plan.budget)}. "
        f"{skipped}{ignored * trial.ignores_number}{small}{_WAYS}"
    )


def check_safety(safety: Any) -> None:
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


def _shards(trial: Trial, rows: int, number: int) -> int:
    """The number of shards among which a step deals the rows: its batch's, else one for each device."""
    lowered = trial.lowered(number)
    for dealt in (rows, -(-rows // number)):  # the whole batch, or one micro-batch of it
        if lowered and (shards := shards_of(lowered, dealt)):
            return shards
    return len(trial.target.devices)


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
