"""Owns the search for the fewest micro-batches that fit: a line proposes, a measurement decides. Compiles nothing."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """A number of micro-batches, and the rows of the largest on one device."""

    number: int
    rows: int
    ragged: bool  # the last is smaller, which is a second program beside the loop


Peaks = dict[Candidate, float]  # bytes of what was measured; infinity where it is not known


def candidates(rows: int, numbers: Iterable[int] | None = None) -> list[Candidate]:
    """Returns what `rows` can be cut into, fewest first: of the numbers that give the same size, the smallest."""
    size_of = lambda number: -(-rows // number)
    fewest = {size_of(number): number for number in sorted(numbers or range(1, rows + 1), reverse=True)}
    return sorted(Candidate(number, size, rows % size > 0) for size, number in fewest.items())


def search(every: Sequence[Candidate], measure: Callable[[Candidate], float], limit: float, most: int) -> Peaks:
    """Measures at most `most` candidates, and returns what they need; the fewest that fits is among them."""
    peaks: Peaks = {}
    while len(peaks) < most and (candidate := proposed(every, peaks, limit)):
        peaks[candidate] = measure(candidate)
    return peaks


def best(peaks: Peaks, limit: float) -> Candidate | None:
    """Returns the fewest micro-batches of those measured that fit."""
    return min((candidate for candidate, peak in peaks.items() if peak <= limit), default=None)


def proposed(every: Sequence[Candidate], peaks: Peaks, limit: float) -> Candidate | None:
    """Returns what to measure next, or None: both ends, then the fewest that are foretold to fit."""
    fits = best(peaks, limit)
    for end in (every[0], every[-1]):
        if fits != every[0] and end not in peaks:
            return end
    still = [c for c in every if c not in peaks and (fits is None or c < fits)]
    if not still or fits == every[0]:
        return None
    if not grows(peaks):  # then nothing is foretold, and the widest gap is halved
        return _middle_of_widest_gap(every, still, peaks)
    if fits is None:  # not even one row: one look in the middle tells whether memory grows with rows at all
        return still[len(still) // 2] if len(peaks) == 2 else None
    still = [c for c in still if not _hopeless(c, peaks, limit)]
    if not still:
        return None
    foretold = {c: predicted(c, peaks) for c in still}
    if any(math.isnan(peak) for peak in foretold.values()):
        return still[len(still) // 2]
    likely = [c for c in still if foretold[c] <= limit]
    nearest = min(still, key=lambda c: foretold[c])
    near = 1.05 if len(_points(peaks, nearest.ragged)) > 1 else 1.25  # foretold by its own kind, or by others
    return min(likely, default=nearest if foretold[nearest] <= near * limit else None)


def predicted(candidate: Candidate, peaks: Peaks) -> float:
    """Returns the peak on the line through the nearest measured of its kind, NaN where there is no line yet.

    An even cut, a ragged cut and the whole batch, which is in no loop, are three kinds of programs: their lines are
    parallel. Where a kind has one point, or none, the slope is that of another.
    """
    own, others = _points(peaks, candidate.ragged), _points(peaks, not candidate.ragged)
    if len(own) > 1:
        return _on_line(own, candidate.rows)
    slopes = others if len(others) > 1 else sorted(_points(peaks, False) + _points(peaks, None))
    if len(slopes) < 2:
        return math.nan
    if not own:
        return _on_line(slopes, candidate.rows)
    ((rows, peak),) = own
    return peak + _on_line(slopes, candidate.rows) - _on_line(slopes, rows)


def grows(peaks: Peaks) -> bool:
    """Returns whether more rows need more memory, to 2 %; a ragged cut may need more than a larger even one."""
    loops = [c for c in peaks if c.number > 1]
    pairs = [(a, b) for a in loops for b in loops if a.rows < b.rows and a.ragged <= b.ragged]
    return all(peaks[b] >= 0.98 * peaks[a] for a, b in pairs)


def _points(peaks: Peaks, ragged: bool | None) -> list[tuple[int, float]]:
    """Returns rows and peak of what was measured of a kind, None for the whole batch, by rows."""
    kind = lambda c: None if c.number == 1 else c.ragged
    return sorted((c.rows, peak) for c, peak in peaks.items() if kind(c) == ragged and math.isfinite(peak))


def _on_line(points: list[tuple[int, float]], rows: int) -> float:
    """Returns the value at `rows` of the line through the two points nearest to it."""
    (a, low), (b, high) = sorted(sorted(points, key=lambda point: abs(point[0] - rows))[:2])
    return low if a == b else low + (high - low) * (rows - a) / (b - a)


def _hopeless(candidate: Candidate, peaks: Peaks, limit: float) -> bool:
    """Returns whether a cut with no more rows did not fit; one that is even says so of ragged ones, too."""
    return any(
        peak > limit and c.number > 1 and c.rows <= candidate.rows and c.ragged <= candidate.ragged
        for c, peak in peaks.items()
    )


def _middle_of_widest_gap(every: Sequence[Candidate], still: list[Candidate], peaks: Peaks) -> Candidate:
    known = sorted(every.index(c) for c in peaks)
    low, high = max(itertools.pairwise(known), key=lambda gap: sum(c in still for c in every[gap[0] : gap[1]]))
    inside = [c for c in every[low:high] if c in still]
    return inside[len(inside) // 2]
