"""What `explain` returns: facts that a program can read, and a text."""

import dataclasses
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from optax_accum._rows.places import Place
from optax_accum._shared.checks import counted

WIDTH = 80
PLAIN = "1"  # what divides a plain sum
EXACT, NOT_EXACT, CANNOT_BE_READ = "exact", "not exact", "cannot be read"


@dataclasses.dataclass(frozen=True)
class Coupling:
    """A line of code that takes rows together.

    Attributes:
      place: its file, line and function.
      primitives: the operations of JAX on this line that take rows
        together.
      in_parts: whether micro-batches do it in parts, which are added (or
        whose extremes are taken). Else it runs once, on all rows.
      shape: the shape of its largest result.
      dtype: the dtype of that.
      kept_bytes: what a forward pass keeps for all rows, of what it takes
        and returns.
      times: how often it runs: more than once in a loop over layers.
      unknown: those of the primitives, here or in functions called here,
        of which it is not known whether they treat rows one by one.
      of_batch: whether the batch alone decides its results: it runs once,
        before the loops, as the sum of a mask does. Such a line is among
        the couplings where the weight, or a reason against one, names it.
    """

    place: Place
    primitives: tuple[str, ...]
    in_parts: bool
    shape: tuple[int, ...]
    dtype: str
    kept_bytes: int
    times: int = 1
    unknown: tuple[str, ...] = ()
    of_batch: bool = False


@dataclasses.dataclass(frozen=True)
class Weight:
    """How much a micro-batch counts: the denominator of a loss, or of one of its terms.

    Attributes:
      text: what it is, in words.
      term: the name of the term, where the loss is a dict.
      place: the line of the sum; None for the number of rows.
      of: the arrays of the batch that it is computed from.
      guard: the line that keeps it from zero, if there is one.
      sums: the lines of the sums over rows that it divides.
      guarded_by: the operation at `guard`, if it divides the window, too;
        else "", as beside another term.
      lost: the lines of the sums that may be other than 0 where the weight
        is 0; such a micro-batch is left out.
    """

    text: str
    term: str | None = None
    place: Place | None = None
    of: tuple[str, ...] = ()
    guard: Place | None = None
    sums: tuple[Place, ...] = ()
    guarded_by: str = ""
    lost: tuple[Place, ...] = ()

    def __str__(self) -> str:
        return f"{self.text}, computed from {' and '.join(self.of)}" if self.of else self.text


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How a loss is computed micro-batch by micro-batch. It prints.

    Attributes:
      rows: the number of rows of the batch.
      group: so many consecutive rows always stay in one micro-batch.
      couplings: where rows are taken together, by line.
      loops: how many times the micro-batches are gone through, forward or
        backward.
      one_pass: whether one loop is enough: each micro-batch runs once,
        forward and backward.
      kept_bytes: what is kept for all rows between the loops, at most at
        the same time.
      weight: a `weight_fn` for accumulation across calls. It returns a
        number; a dict where the loss is a dict of terms; a list where the
        loss is a sum of terms with a denominator each. None where no weight
        is right.
      weights: what that is, for each term; none where the loss takes no
        rows.
      reduction: the `reduction` across calls: "sum" if nothing divides.
      verdict: what micro-batches across calls give: `"exact"`, the gradient
        of the whole batch; `"not exact"`, another one, whatever they weigh;
        or `"cannot be read"`, where nothing shows that they add up.
      reasons: why there is no weight, with lines.
    """

    rows: int
    group: int
    couplings: tuple[Coupling, ...]
    loops: int
    one_pass: bool
    kept_bytes: int
    weight: Callable[..., Any] | None
    weights: tuple[Weight, ...]
    reduction: str
    verdict: str
    reasons: tuple[str, ...]

    @property
    def whole(self) -> tuple[Coupling, ...]:
        """The lines that run once, on all rows, between the loops."""
        return tuple(coupling for coupling in self.couplings if not (coupling.in_parts or coupling.of_batch))

    def __str__(self) -> str:
        return "\n".join([*self._within(), "", *self._across()])

    def _within(self) -> Iterator[str]:
        yield from _filled(f"{self._split()} {self._passes()}")
        if self.couplings:
            yield ""
            yield "Rows are taken together at"
            yield from _table(self.couplings)
        yield from _filled(self._memory())
        unknown = [(name, coupling.place) for coupling in self.couplings for name in coupling.unknown]
        for name, place in dict.fromkeys(unknown):
            yield from _filled(f"{name} ({place}) runs on all rows: it is not known to treat rows one by one.")

    def _split(self) -> str:
        together = f", {self.group} consecutive ones together" if self.group > 1 else ""
        return f"{counted(self.rows, 'row')}{together}."

    def _passes(self) -> str:
        if not self.couplings:
            return "No rows are taken together."
        if self.one_pass:
            return "Each micro-batch runs once, forward and backward."
        return f"{counted(self.loops, 'loop')} go through the micro-batches, one after the other."

    def _memory(self) -> str:
        if not self.kept_bytes:
            return "Nothing is kept for all rows."
        return f"Between loops up to {_bytes(self.kept_bytes)} are kept for all rows."

    def _across(self) -> Iterator[str]:
        if self.weight is None:
            yield _BEFORE[self.verdict]
            for reason in self.reasons:
                yield from _filled(reason, "  ")
            yield from _filled(_AFTER[self.verdict])
        elif not self.weights:
            yield from _filled("Across calls any weight is right: the loss takes no rows.")
        elif self.reduction == "sum":
            yield from _filled('Across calls gradients are added, not averaged: pass reduction="sum".')
        elif len({(weight.text, weight.of) for weight in self.weights}) == 1:
            yield from _filled(f"Across calls the weight of a micro-batch is {self.weights[0]}.")
        else:
            yield from _filled("Across calls one weight is not enough, since terms have denominators of their own:")
            for weight in self.weights:
                divided = weight.term or " and ".join(map(str, weight.sums))
                yield from _filled(f"{divided}: {weight}", "  ")
            yield from _filled(f"Within a call value_and_grad takes them all. {BY_ITSELF}")
        for by, guard in dict.fromkeys(
            (weight.guarded_by, weight.guard) for weight in self.weights if weight.guarded_by
        ):
            yield from _filled(
                f"A function of the sum divides the loss: {by}, {guard}. A step by hand takes it as grad_weight=: else "
                "micro-batches in which the sum is small would count too little."
            )

        yield from (line for weight in self.weights if weight.lost for line in _filled(f"{lost_where(weight)} {LOST}"))


# The error of a step across calls says these, too.
WITHIN = "Within a call value_and_grad is exact."
BY_ITSELF = (
    "If each micro-batch is to count by itself, as with optax.MultiSteps, build the step with exact=False; then each "
    "counts by its rows: pass weight= if rows are padded."
)
LOST = (
    "If that sum is 0 there, multiply its terms by what is counted, or pass weight_fn=. Else return a Ratio, with "
    "other terms times the count: Ratio(total + count * decay, count)."
)


def lost_where(weight: Weight) -> str:
    sums = " and ".join(f"the sum over rows at {place}" for place in weight.lost)
    return f"Where {weight} is 0, a micro-batch is left out, and nothing shows that {sums} is 0, too."


_BEFORE = {
    NOT_EXACT: "Across calls no weight gives the whole batch's gradient:",
    CANNOT_BE_READ: "Across calls it cannot be read how much a micro-batch counts:",
}
_AFTER = {
    NOT_EXACT: f"{WITHIN} {BY_ITSELF}",
    CANNOT_BE_READ: f"If micro-batches add up, pass weight= or weight_fn=. {WITHIN}",
}


def _table(couplings: tuple[Coupling, ...]) -> Iterator[str]:
    head = ("line", "operation", "how", "result", "kept")
    rows = [head, *map(_row, couplings)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        yield f"  {'  '.join([*cells, row[-1].rjust(widths[-1])])}".rstrip()


def _row(coupling: Coupling) -> tuple[str, ...]:
    dims = " x ".join(map(str, coupling.shape))
    times = f", {coupling.times} times" if coupling.times > 1 else ""
    how = "once, before" if coupling.of_batch else "in parts" if coupling.in_parts else "on all rows"
    kept = _bytes(coupling.kept_bytes) if coupling.kept_bytes else "-"
    operations = textwrap.shorten(", ".join(coupling.primitives), 24, placeholder=" ...")
    return str(coupling.place), operations, how + times, f"{coupling.dtype}[{dims}]", kept


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return counted(count, "byte")


def _filled(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  " * bool(indent), break_on_hyphens=False
    )
