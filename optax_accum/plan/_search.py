"""The search for the fewest micro-batches that fit, by halving where a line proposes, and its compilations."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax

from optax_accum._shared.checks import counted
from optax_accum.accelerators._footprint import Footprint, footprint, largest_product, text_key
from optax_accum.accelerators._targets import Target
from optax_accum.plan._steps import Steps


class Candidate(NamedTuple):
    """A number of micro-batches, and the rows of the largest on one device."""

    number: int
    rows: int
    ragged: bool  # the last is smaller, which is a second program beside the loop


Peaks = dict[Candidate, float]  # the measured bytes; infinity where they are not known


def candidates(rows: int, numbers: Iterable[int] | None = None) -> list[Candidate]:
    """The ways to cut `rows`, fewest micro-batches first: of numbers that give the same size, the smallest.

    Without numbers, the divisors of `rows` are used.
    """
    asked = [n for n in range(1, rows + 1) if rows % n == 0] if numbers is None else numbers
    fewest = {-(-rows // number): number for number in sorted(asked, reverse=True)}
    return sorted(Candidate(number, size, rows % size > 0) for size, number in fewest.items())


def search(
    every: Sequence[Candidate],
    measure: Callable[[Candidate], float | None],
    limit: float,
    at_no_rows: Callable[[], float] = lambda: 0.0,
) -> Peaks:
    """Measures candidates until the fewest that fits is among them, and returns their memory.

    Args:
      every: the candidates, fewest first.
      measure: returns the bytes of a candidate; None for one that is not to be had, which is left out.
      limit: the most bytes that fit.
      at_no_rows: returns the bytes that every candidate holds at least; asked when something was measured.
    """
    peaks: Peaks = {}
    every, most = [*every], enough(every)
    while len(peaks) < most and (candidate := proposed(every, peaks, limit, at_no_rows)):
        if (peak := measure(candidate)) is None:
            every.remove(candidate)
        else:
            peaks[candidate] = peak
    return peaks


def enough(every: Sequence[Candidate]) -> int:
    """How many measurements always suffice if memory grows with the rows: 6, or more if halving takes more."""
    return max(6, 1 + _halvings(_groups(every[1:])))


def best(peaks: Peaks, limit: float) -> Candidate | None:
    """The fewest micro-batches that were measured and fit."""
    return min((candidate for candidate, peak in peaks.items() if peak <= limit), default=None)


def proposed(
    every: Sequence[Candidate],
    peaks: Peaks,
    limit: float,
    at_no_rows: Callable[[], float] = lambda: 0.0,
) -> Candidate | None:
    """The candidate to measure next, None when the fewest that fit are known: the whole batch first, one row last.

    Between a candidate that did not fit and one that does, the line proposes the fewest that should fit, but none that
    leaves more candidates than the remaining measurements can halve.
    """
    if every and every[0] not in peaks:
        return every[0]
    if (least := at_no_rows()) > limit:
        return None
    fits = best(peaks, limit)
    fewer = [c for c in every if c not in peaks and (fits is None or c < fits)]
    between = [c for c in fewer if not _hopeless(c, peaks, limit)]
    if not between:  # where memory does not grow, a misfit says nothing of other sizes
        return None if grows(peaks) or not fewer else fewer[len(fewer) // 2]
    now, *later = _groups(between)
    left = enough(every) - len(peaks) - _halvings(later)
    if left < 1:  # memory does not grow: the last needs least
        return between[-1] if fits is None else now[len(now) // 2]
    known = 2 ** (left - 1) - 1  # as many can be told apart by the measurements after this one
    low, high = len(now) - 1 - known, known
    return now[len(now) // 2 if low > high else min(max(_foretold(now, peaks, limit, least), low), high)]


def grows(peaks: Peaks) -> bool:
    """Whether more rows need more memory, to 2 %; a ragged cut may need more than a larger even one.

    The whole batch runs in no loop, and is not compared.
    """
    loops = [c for c in peaks if c.number > 1]
    pairs = [(a, b) for a in loops for b in loops if a.rows < b.rows and a.ragged <= b.ragged]
    return all(peaks[b] >= 0.98 * peaks[a] for a, b in pairs)


def _groups(every: Sequence[Candidate]) -> list[list[Candidate]]:
    """Even cuts, ragged cuts and rows of one: in each group, memory grows with the rows."""
    kind = lambda c: 2 if c.rows == 1 else int(c.ragged)
    return [group for wanted in range(3) if (group := [c for c in every if kind(c) == wanted])]


def _halvings(groups: Sequence[Sequence[Candidate]]) -> int:
    return sum(len(group).bit_length() for group in groups)


def _foretold(group: Sequence[Candidate], peaks: Peaks, limit: float, at_no_rows: float) -> int:
    """The index of the fewest that should fit, by the line through the measurements; of the last if none should."""
    points = sorted({(c.rows, peak) for c, peak in peaks.items() if math.isfinite(peak)} | {(0, at_no_rows)})
    if len(points) == 1:
        return len(group) // 2
    if len(points) > 2:  # two that were measured
        points = points[1:]
    fits = (place for place, c in enumerate(group) if _on_line(points, c.rows) <= limit)
    return next(fits, len(group) - 1)


def _on_line(points: list[tuple[int, float]], rows: int) -> float:
    """The value at `rows` of the line through the two points nearest to it."""
    (a, low), (b, high) = sorted(sorted(points, key=lambda point: abs(point[0] - rows))[:2])
    return low + (high - low) * (rows - a) / (b - a)


def _hopeless(candidate: Candidate, peaks: Peaks, limit: float) -> bool:
    """Whether a cut with no more rows did not fit; an even cut answers for ragged ones, too.

    Micro-batches of one row say nothing of larger ones.
    """
    return any(
        peak > limit and 1 < c.rows <= candidate.rows and c.ragged <= candidate.ragged and c.number > 1
        for c, peak in peaks.items()
    )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One number of micro-batches that was compiled, and its memory."""

    candidate: Candidate
    footprint: Footprint
    fits: bool


class Trial:
    """The steps with different numbers of micro-batches, and their compiled programs.

    Attributes:
      every: the numbers of micro-batches to choose from, without those that do not lower.
      peaks: the bytes of each compiled number.
      errors: the errors of numbers that do not lower.
    """

    def __init__(self, steps: Steps, target: Target):
        self.steps, self.target = steps, target
        self.every: list[Candidate] = []
        self.errors: dict[int, ValueError] = {}
        self._lowered: dict[int, jax.stages.Lowered] = {}
        self.found: dict[Candidate, Footprint] = {}
        self.keys: dict[Candidate, str] = {}
        self.peaks: Peaks = {}

    def prepare(self, every: Sequence[Candidate]) -> None:
        """Lowers the fewest micro-batches that lower, and the next, before anything is compiled."""
        self.every = [*every]
        for place in (0, 1):
            while len(self.every) > place and self.lowered(self.every[place].number) is None:
                del self.every[place]
        if len(self.every) > 1:
            self._check_number(*self.every[:2])

    def search(self, limit: float, advance: Callable[[str, int], None]) -> None:
        """Compiles the numbers that the search proposes; the whole batch alone, if no cut can help."""

        def measure(candidate: Candidate) -> float | None:
            advance(f"{counted(candidate.number, 'micro-batch')} of {counted(candidate.rows, 'row')}", 0)
            if self.lowered(candidate.number) is None:
                return None
            self._compile(candidate)
            advance("", 1)
            return self.found[candidate].peak

        self.peaks = search(self.every, measure, limit, lambda: self.least)
        self.every = [c for c in self.every if c.number not in self.errors]

    def lowered(self, number: int) -> jax.stages.Lowered | None:
        """The step as it is lowered with so many micro-batches; None if that raises."""
        if number not in self._lowered and number not in self.errors:
            try:
                self._lowered[number] = self._lower(number)
            except ValueError as error:
                self.errors[number] = error
        return self._lowered.get(number)

    def _lower(self, number: int) -> jax.stages.Lowered:
        try:
            lowered = self.steps.lowered(number)
        except Exception as error:
            raise ValueError(
                f"step_of_k({number}) must return a step that can be lowered: it raised {type(error).__name__}: "
                f"{str(error).rstrip('.?')}.{_SOME_NUMBERS * (number > 1)}"
            ) from error
        lowered = getattr(lowered, "lowered", lowered)  # of a step in two programs, or of nnx.jit
        if not isinstance(lowered, jax.stages.Lowered):
            raise TypeError(
                f"The method lower of step_of_k({number}) must return a jax.stages.Lowered, as that of jax.jit(step) "
                f"does: it returned {type(lowered).__name__}."
            )
        return lowered

    def compiled(self, limit: float) -> list[Compiled]:
        """The compiled programs, fewest micro-batches first."""
        return [Compiled(c, self.found[c], self.peaks[c] <= limit) for c in sorted(self.found)]

    @property
    def least(self) -> float:
        """The bytes of arguments, and of outputs that replace none; 0 where they shrink with the micro-batches."""
        shapes = {_shapes(self._lowered[candidate.number]) for candidate in self.every[:2]}
        found = self.found[min(self.found)]
        return found.arguments + found.unaliased if len(shapes) == 1 else 0.0

    @property
    def ignores_number(self) -> bool:
        """Whether micro-batches of all sizes cost the same."""
        known = {c.rows: peak for c, peak in self.peaks.items() if math.isfinite(peak)}
        return len(known) > 1 and len(set(known.values())) == 1

    def _compile(self, candidate: Candidate) -> None:
        lowered = self._lowered[candidate.number]
        self.keys[candidate] = text_key(lowered, self.target)
        self._check_differs(candidate)
        self.found[candidate] = footprint(lowered, self.target)

    def _check_number(self, *two: Candidate) -> None:
        """Raises if fewer micro-batches have the smaller products: `step_of_k` then takes their rows."""
        large, small = (largest_product(self._lowered[candidate.number]) for candidate in two)
        if 1.5 * large < small:
            raise ValueError(
                "step_of_k must take the number of micro-batches, and seems to take their rows: the largest product of "
                f"step_of_k({two[0].number}) has {large:.2e} FLOPs, that of step_of_k({two[1].number}) {small:.2e}. "
                f"{PASS_ON}"
            )

    def _check_differs(self, candidate: Candidate) -> None:
        same = [c for c, key in self.keys.items() if c.rows != candidate.rows and key == self.keys[candidate]]
        if same:
            raise ValueError(
                f"The step must split the batch as it is told: {same[0].number} and {candidate.number} micro-batches "
                f"are the same program, so all cost the same. {PASS_ON}"
            )


PASS_ON = "Pass its number on, value_and_grad(loss, num_microbatches=num_microbatches)."
_SOME_NUMBERS = " If it takes only some numbers, pass them as candidates=, such as the divisors of the batch."


def _shapes(lowered: jax.stages.Lowered) -> tuple[tuple[int, ...], ...]:
    return tuple(leaf.shape for leaf in jax.tree.leaves((lowered.args_info, lowered.out_info)))
