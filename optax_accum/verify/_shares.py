"""How much each micro-batch counts in a window's change, compared with the whole batch; which fault counts so."""

from typing import NamedTuple

import numpy as np

from optax_accum.verify._explanations import EDGE

Said = tuple[str, str]  # the name of a fault, and the evidence
TIE = 1e-4  # a distance below it is rounding
AS_LONG = "Each is made as long as the others before it is added."


class Shares(NamedTuple):
    """The shares that came out, and the right ones. They are compared by their ratios: one of 50 is small, too."""

    came: list[float]
    right: list[float]
    counts: list[list[float]]  # what a loss may divide by: the rows of the micro-batches, and counts in the batch
    near: float
    off: float  # how far the change that came out is from a sum of these shares

    @property
    def says(self) -> str:
        """The shares that came out."""
        return f"The micro-batches count for {listed(self.came)}"

    @property
    def factor(self) -> float:
        """How many times as much as in the whole batch all of them count."""
        return sum(self.came) / max(sum(self.right), self.near)

    @property
    def negative(self) -> bool:
        """Whether a micro-batch counts against the others."""
        return min(self.came) < -self.near * max(self.came)

    @property
    def positive(self) -> bool:
        """Whether each of them counts."""
        return min(self.came) > self.near * max(self.came)

    @property
    def whole(self) -> bool:
        """Whether they add up to 1, as in a mean."""
        return abs(sum(self.came) - 1) < self.near

    @property
    def clipped(self) -> bool:
        """Whether a clip makes the gradients of micro-batches shorter than they are."""
        return sum(self.right) > 1 + self.near

    @property
    def alike(self) -> bool:
        """Whether all count the same multiple of what they should."""
        return _equal(list(self._ratios.values()), self.near)

    @property
    def missing(self) -> list[int]:
        """The micro-batches that should count, and do not."""
        most = max(self._ratios.values(), default=0.0)
        least = 10 * TIE if self.off < TIE else self.near
        return [n for n, ratio in self._ratios.items() if ratio < least * most]

    @property
    def _ratios(self) -> dict[int, float]:
        """What each that should count counts, divided by what it should."""
        pairs = enumerate(zip(self.came, self.right, strict=True))
        return {n: came / right for n, (came, right) in pairs if right > EDGE * max(self.right)}

    def why_missing(self) -> Said:
        """The fault that makes some of them count for nothing."""
        counted = [n for n in self._ratios if n not in self.missing]
        first, last = min(self._ratios), max(self._ratios)
        kind = "rows left out"
        if counted == [first]:
            kind = "only the first gradient"
        elif counted == [last]:
            kind = "only the last gradient"
        elif max(self.missing) < min(counted):
            kind = "emptied in mid-window"
        return kind, f"{self.says}; in the whole batch for {listed(self.right)}."

    def why_unequal(self, *, by_place: bool) -> Said:
        """The fault that makes some of them count more than others."""
        kind, says = "wrong weights", f"{self.says}; in the whole batch for {listed(self.right)}."
        if by_place:
            kind, says = "weighed by place", f"{says} In the opposite order they count otherwise."
        elif self._as_counts if self.clipped else _equal(self.came, self.near) or self._as_rows:
            kind = "mean of means"
        elif self.clipped and _equal(self.came, self.near):
            kind, says = "clipping at each micro-step", f"{says} {AS_LONG}"
        return kind, says

    @property
    def _as_rows(self) -> bool:
        return any(self._goes_with(self.came, rows) for rows in self.counts[:1])

    @property
    def _as_counts(self) -> bool:
        """Whether they are as if each counted the same, and in the whole batch as a count in the batch.

        Behind a clip that makes all gradients equally long, those that count the same look unequal. What they should
        count, divided by that, is their number of rows or tokens.
        """
        if not self.positive:
            return False
        should = [right / came for came, right in zip(self.came, self.right, strict=True)]
        return any(self._goes_with(should, count) for count in self.counts)

    def _goes_with(self, numbers: list[float], count: list[float]) -> bool:
        return min(count) > 0 and _equal(
            [number / each for number, each in zip(numbers, count, strict=True)], self.near
        )


def compare_places(places: list[Shares]) -> Said | None:
    """The fault that counts one micro-batch otherwise than the others, or than at another place; None if none does.

    At each place are the shares of the others together, and of the one.
    """
    (of, *_), near = places, places[0].near
    came, right = (
        [pair[1] / sum(pair) for pair in pairs] for pairs in zip(*(place[:2] for place in places), strict=True)
    )
    by_place = Shares(came, right, [], near, max(place.off for place in places))
    if not by_place.alike:
        return by_place.why_missing() if by_place.missing else by_place.why_unequal(by_place=True)
    return None if of.alike else of.why_unequal(by_place=False)


def _equal(numbers: list[float], near: float) -> bool:
    return bool(np.ptp(numbers) < 2 * near * max(map(abs, numbers), default=0.0)) if numbers else True


def listed(shares: list[float]) -> str:
    """The shares, for a report."""
    return ", ".join(f"{share:.3g}" for share in shares)
