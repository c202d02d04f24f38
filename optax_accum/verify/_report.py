"""What `verify_step` reports: what a row of its tables of faults is, the causes found, how they print."""

import dataclasses
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from optax_accum._shared.checks import counted

Errors = dict[str, tuple[float, float]]  # "loss" and each leaf's path -> the relative error, and the largest allowed


class Fault(NamedTuple):
    """One way to break the law: a row that the report, docs/check_your_step.md, tests and benchmarks read."""

    name: str
    makes: str  # its effect on the micro-batches
    told: str  # the sign that other faults do not show
    remedy: str  # what to change, in this library
    probes: Mapping[str, Callable[..., Any]]  # by phase of the check: each returns a sentence of evidence, or ""
    elsewhere: str = ""  # the remedy in a loop that is not JAX's, where it differs


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why an update changes when its batch is split.

    Attributes:
      fault: the fault, with its name and its remedies.
      evidence: what the check saw, a sentence.
      of_jax: whether the step is JAX's.
    """

    fault: Fault
    evidence: str
    of_jax: bool = True

    @property
    def kind(self) -> str:
        """The name of the fault."""
        return self.fault.name

    @property
    def remedy(self) -> str:
        """What to change, in this library, or in a loop that is not JAX's."""
        return self.fault.remedy if self.of_jax else self.fault.elsewhere or self.fault.remedy


def found(faults: Iterable[Fault], when: str, *args: Any) -> Iterator[Cause]:
    """Asks each fault's probe of a phase, in the order of the table, and yields the causes found."""
    for fault in faults:
        if when in fault.probes and (evidence := fault.probes[when](*args)):
            yield Cause(fault, evidence)


@dataclasses.dataclass(frozen=True)
class Report:
    """What `verify_step` found: whether the law holds, how nearly, if not why.

    As a bool it is `holds`, so `assert verify_step(...)` says what it seems
    to; `check()` shows the report, too. It prints errors, causes, remedies.

    Attributes:
      holds: whether the update of micro-batches is that of the whole batch.
      errors: by the path of each leaf, and "loss": the largest error,
        relative to the largest entry of what is averaged.
      limits: by the same paths: the largest error that counts as rounding,
        or as noise.
      causes: why the updates differ; none if they do not.
      rows: the rows of the whole batch.
      num_microbatches: how many micro-batches it was split into.
      random: whether the step is random.
      draws: the keys over which the updates of a random step are averaged.
      notes: what was not tried, and why.
      told: whether holding could be told from not holding.
    """

    holds: bool
    errors: dict[str, float]
    limits: dict[str, float]
    causes: tuple[Cause, ...]
    rows: int
    num_microbatches: int
    random: bool
    draws: int
    notes: tuple[str, ...] = ()
    told: bool = True

    def check(self) -> None:
        """Raises an AssertionError with the report, unless the law holds."""
        if not self.holds:
            raise AssertionError(str(self))

    def __bool__(self) -> bool:
        return self.holds

    def __str__(self) -> str:
        is_ = "the update of micro-batches is"
        says = f"Holds: {is_}" if self.holds else f"Differs: {is_} not" if self.told else f"Cannot tell whether {is_}"
        lines = [f"{says} that of the whole batch ({self.rows} rows, {self.num_microbatches} micro-batches)."]
        if self.random:
            lines.append(f"The step is random: means over {self.draws} keys were compared, within six standard errors.")
        blind = max(self.limits.values(), default=0.0)
        if self.holds and not self.random and blind > 0.01:
            where = max(self.limits, key=lambda path: self.limits[path])
            seen = f"an error of {blind:.0%} would not be seen" if blind < 1 else "no error would be seen"
            lines.append(f"In this precision {seen} in {where}. Check once in float32.")
        if self.errors and not self.holds and all(self.errors[path] <= self.limits[path] for path in self.errors):
            lines.append("The errors below are all within their limits: the cause shows in other runs than theirs.")
        ends = [f"Not tried: {note}" for note in self.notes]
        for cause in self.causes:
            ends += [f"Cause: {cause.kind}. {cause.evidence}", f"Remedy: {cause.remedy}"]
        fill = textwrap.TextWrapper(80, subsequent_indent="  ", replace_whitespace=False, break_on_hyphens=False).fill
        return "\n".join([*map(fill, lines), *self._table(), *map(fill, ends)])

    def _table(self) -> list[str]:
        worst = sorted(self.errors, key=lambda path: -badness((self.errors[path], self.limits[path])))
        lines = [f"  {'error':>9}  {'limit':>9}  (relative to the largest entry)"] if worst else []
        lines += [f"  {self.errors[path]:9.1e}  {self.limits[path]:9.1e}  {path}" for path in worst[:8]]
        return lines + ([f"  and {counted(len(worst) - 8, 'other')}, nearer"] if len(worst) > 8 else [])


def within(errors: Errors) -> bool:
    """Whether no error is beyond its limit; a NaN is."""
    return all(error <= limit for error, limit in errors.values())


def badness(pair: tuple[float, float]) -> float:
    """An error in units of its limit, to sort by: a NaN is larger than anything."""
    error, limit = pair
    return math.inf if math.isnan(error) else error / limit
