"""Why the second of two windows is wrong, of which the first is right: what the first leaves behind for it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np

from optax_accum.verify._explanations import MORE, ROOT, Change, Explanations
from optax_accum.verify._shares import TIE, Said, Shares
from optax_accum.verify._windows import Foretold

LEFT = {False: "not emptied", True: "counter not emptied"}  # what makes a gradient larger, and smaller


@dataclasses.dataclass(frozen=True)
class Second:
    """The change of the second window, and what may explain it."""

    e: Explanations
    found: Change
    first: Change  # the first window's change
    right: Change  # the second window's right change
    at_first: Change  # the right change by its micro-batches if no window comes before it
    alone: Callable[[], bool]  # whether it is right if it begins there, and no window came before it
    parts: Callable[[], list[Change]]  # the change by each of its micro-batches alone, after the first window

    @functools.cached_property
    def slots(self) -> list[str]:
        """The slots that are linear in the gradient, or in its square."""
        return list(dict.fromkeys((*self.e.linear, *(slot.removeprefix(ROOT) for slot in self.e.linear))))

    def fit(self, slot: str, changes: list[Change], of: Change | None = None) -> tuple[list[float], float]:
        """How much of some changes is in the second window's, beside any of the first one's; how much is in none.

        The first window's share comes last. Where a clip by value hides entries, the half that fits best is asked.
        """
        columns = np.stack([self.e.vector(change, slot) for change in (*changes, self.first)], 1)
        found = self.e.vector(of or self.found, slot)
        least = 2 * len(changes) + MORE if self.e.partial else 0
        known = np.isfinite(found) & np.all(np.isfinite(columns), 1)
        if not (self.e.partial or np.all(known)) or np.sum(known) <= least:
            return [0.0] * (len(changes) + 1), 1.0
        columns, found = columns[known], found[known]
        shares, off = _shares(columns, found)
        for _ in range(9 if self.e.partial else 0):
            best = np.argsort(np.abs(found - columns @ shares))[: max(len(found) // 2, least)]
            shares, off = _shares(columns[best], found[best])
        return shares.tolist(), off

    def size(self, change: Change, slot: str) -> float:
        """The length of a change."""
        return float(np.sqrt(np.nansum(self.e.vector(change, slot) ** 2)))


def _shares(columns: np.ndarray, found: np.ndarray) -> tuple[np.ndarray, float]:
    shares = np.linalg.lstsq(columns, found, rcond=1e-6)[0]
    return shares, float(np.linalg.norm(found - columns @ shares) / max(np.linalg.norm(found), 1e-300))


def explained_second(w: Second) -> Said | None:
    """The fault that explains the second window best; None if none does."""
    if w.e.silent:
        return None
    kind, distance, says = min(_foretold(w), key=lambda one: one[1], default=("", 1.0, ""))
    said = (kind, says) if distance < w.e.near else next(_missing(w), None)
    return said or next(filter(None, map(explained_second, _views(w))), None)


def _views(w: Second) -> Iterator[Second]:
    """Yields the same without what a clip by value holds, and leaf by leaf, if nothing is linear in the gradient."""
    if w.e.linear or w.e.few or w.e.partial:
        return
    if seen := w.e.unclipped(w.found, w.first, w.right, w.at_first):
        e, (found, first, right, at_first) = seen
        yield dataclasses.replace(w, e=e, found=found, first=first, right=right, at_first=at_first)
    if (e := w.e.by_leaf).linear:
        yield dataclasses.replace(w, e=e)


def _foretold(w: Second) -> Iterator[Foretold]:
    """Yields what a first window may leave behind, the plainest first."""
    for slot in w.slots:
        (share, rest), distance = w.fit(slot, [w.right])  # behind a clip both are less than 1
        counts = share > w.e.near
        if counts and share < 1 + w.e.near and rest * w.size(w.first, slot) > w.e.near * w.size(w.right, slot):
            yield "not emptied", distance, "The first window's sum is in the second window, too."
        elif counts and abs(share - 1) > max(4 * distance, TIE) and (slot != "params" or _halved(w, share)):
            yield _foretell_factor(w, share, distance)
        (share, *_), distance = w.fit(slot, [w.right, w.at_first])
        if abs(share) < w.e.near and 1 / 2 < w.size(w.found, slot) / max(w.size(w.right, slot), 1e-300) < 2:
            yield (
                "stale parameters",
                distance,
                "The second window's gradient is taken at the parameters of the first one.",
            )
    factor, distance = dataclasses.replace(w.e, whole=w.right).fit(w.found, "params")
    if abs(factor - 1) > w.e.near:
        says = f"The second window's update is {factor:.3g} times the whole batch's; the first is right."
        yield "optimizer at each micro-step", distance, says


def _halved(w: Second, factor: float) -> bool:
    """Whether a factor of parameters is a counter's: of moments none is a rate's."""
    return abs(factor - 1 / 2) < w.e.near and w.alone()


def _foretell_factor(w: Second, factor: float, distance: float) -> Foretold:
    """The fault that makes a gradient larger or smaller in the second window alone."""
    says = f"The second window's gradient is {factor:.3g} times the whole batch's"
    if w.alone():
        return LEFT[factor < 1], distance, f"{says}; without a window before it, it is right."
    return "sum for a mean" if factor > 1 else "divided twice", distance, f"{says}; in the first a clip hid it."


def _missing(w: Second) -> Iterator[Said]:
    """Yields the fault that leaves micro-batches out of the second window."""
    if w.e.few or w.e.partial:
        return
    for slot in filter(w.e.large, w.e.linear):
        (*came, _), off = w.fit(slot, w.parts())
        (*right, _), fits = w.fit(slot, w.parts(), of=w.right)
        shares = Shares(came, right, [], w.e.near, max(off, fits))
        if max(off, fits) < w.e.near and not shares.negative and shares.missing:
            yield shares.why_missing()
