"""The search for the fewest micro-batches that fit: by halving, where a line proposes."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Candidate(NamedTuple):
    """A number of micro-batches, and the rows of the largest on one device."""

    number: int
    rows: int
    ragged: bool  # the last is smaller, which is a second program beside the loop


Peaks = dict[Candidate, float]  # bytes of what was measured; infinity where it is not known


def candidates(rows: int, numbers: Iterable[int] | None = None) -> list[Candidate]:
    """Returns what `rows` can be cut into, fewest first: of the numbers that give the same size, the smallest.

    Without numbers those are the divisors of `rows`.
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
      every: what there is to choose from, fewest first.
      measure: returns the bytes of a candidate; None for one that is not to be had, which is left out.
      limit: what fits.
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
    """Returns how many measurements always close the search where memory grows with the rows: 6, or by halving more."""
    return max(6, 1 + _halvings(_groups(every[1:])))


def best(peaks: Peaks, limit: float) -> Candidate | None:
    """Returns the fewest micro-batches of those measured that fit."""
    return min((candidate for candidate, peak in peaks.items() if peak <= limit), default=None)


def proposed(
    every: Sequence[Candidate],
    peaks: Peaks,
    limit: float,
    at_no_rows: Callable[[], float] = lambda: 0.0,
) -> Candidate | None:
    """Returns what to measure next, None when the fewest that fit are known: the whole batch first, one row last.

    Between what did not fit and what does, the line proposes the fewest that should fit, but nothing that leaves more
    than the remaining measurements can halve.
    """
    if every and every[0] not in peaks:
        return every[0]
    if (least := at_no_rows()) > limit:
        return None
    fits = best(peaks, limit)
    fewer = [c for c in every if c not in peaks and (fits is None or c < fits)]
    between = [c for c in fewer if not _hopeless(c, peaks, limit)]
    if not between:  # what did not fit says nothing of other sizes where memory does not grow
        return None if grows(peaks) or not fewer else fewer[len(fewer) // 2]
    now, *later = _groups(between)
    left = enough(every) - len(peaks) - _halvings(later)
    if left < 1:  # where memory does not grow: what needs least is the last
        return between[-1] if fits is None else now[len(now) // 2]
    known = 2 ** (left - 1) - 1  # so many can be told apart after this one
    low, high = len(now) - 1 - known, known
    return now[len(now) // 2 if low > high else min(max(_foretold(now, peaks, limit, least), low), high)]


def grows(peaks: Peaks) -> bool:
    """Returns whether more rows need more memory, to 2 %; a ragged cut may need more than a larger even one.

    The whole batch, which is in no loop, says nothing of that.
    """
    loops = [c for c in peaks if c.number > 1]
    pairs = [(a, b) for a in loops for b in loops if a.rows < b.rows and a.ragged <= b.ragged]
    return all(peaks[b] >= 0.98 * peaks[a] for a, b in pairs)


def _groups(every: Sequence[Candidate]) -> list[list[Candidate]]:
    """Returns even cuts, ragged cuts and rows of one, in each of which memory grows with the rows."""

    def kind(c: Any) -> Any:
        return 2 if c.rows == 1 else int(c.ragged)

    return [group for wanted in range(3) if (group := [c for c in every if kind(c) == wanted])]


def _halvings(groups: Sequence[Sequence[Candidate]]) -> int:
    return sum(len(group).bit_length() for group in groups)


def _foretold(group: Sequence[Candidate], peaks: Peaks, limit: float, at_no_rows: float) -> int:
    """Returns the place of the fewest that should fit, by the line through the measurements; else the last."""
    points = sorted({(c.rows, peak) for c, peak in peaks.items() if math.isfinite(peak)} | {(0, at_no_rows)})
    if len(points) == 1:
        return len(group) // 2
    if len(points) > 2:  # two that were measured
        points = points[1:]
    fits = (place for place, c in enumerate(group) if _on_line(points, c.rows) <= limit)
    return next(fits, len(group) - 1)


def _on_line(points: list[tuple[int, float]], rows: int) -> float:
    """Returns the value at `rows` of the line through the two points nearest to it."""
    (a, low), (b, high) = sorted(sorted(points, key=lambda point: abs(point[0] - rows))[:2])
    return low + (high - low) * (rows - a) / (b - a)


def _hopeless(candidate: Candidate, peaks: Peaks, limit: float) -> bool:
    """Returns whether a cut with no more rows did not fit; one that is even says so of ragged ones, too.

    Rows of one say nothing of more.
    """
    return any(
        peak > limit and 1 < c.rows <= candidate.rows and c.ragged <= candidate.ragged and c.number > 1
        for c, peak in peaks.items()
    )
