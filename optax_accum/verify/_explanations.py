"""A window's change, explained by the changes that each of its micro-batches alone would have made."""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import numpy as np

from optax_accum.verify._carries import largest

Change = dict[str, np.ndarray]  # what a run adds to each leaf
MORE = 3  # more entries than this beyond the micro-batches tell these apart
NEAR = 0.02  # the relative distance within which one change explains another
FINE = 0.01  # the distance beyond which nothing is said of a change of few entries
EDGE = 1e-3  # the least share of a micro-batch that counts
BFLOAT = 2**-7  # two roundings of bfloat16
ROOT = "root of "  # before the name of a second moment


@dataclasses.dataclass(frozen=True)
class Explanations:
    """The changes of the whole window and of each micro-batch alone, by the reference, from the same beginning.

    A slot is the parameters, or a mirror of them in the optimizer's state. It is linear in the gradient if the whole
    window's change is a linear combination of the micro-batches' changes: with SGD the parameters, with Adam the first
    moment. There, sums and multiples can be foretold without knowing the optimizer. If it keeps second moments alone,
    their roots are linear, with the signs of the parameters' changes: changes hold these, too.

    If fewer entries change than there are micro-batches, any change is some combination of theirs. Then only a change
    that is foretold to rounding names a cause, and a slot is linear if each union of micro-batches lies between its two
    parts.
    """

    slots: dict[str, list[str]]  # "params" and each mirror -> the leaves in it
    scales: dict[str, float]  # of each leaf
    drift: Change  # each leaf's parameter at first: decay moves along it, whatever the gradient
    whole: Change
    parts: list[Change]
    unions: Callable[[], list[Change]]  # of the first micro-batch, the first two, ..., all
    few: bool  # whether too few entries change to tell one combination of micro-batches from another
    loose: float = NEAR
    fine: float = 0.0  # the distance that rounding may make
    counts: list[list[float]] = dataclasses.field(default_factory=list)  # of rows in each micro-batch, of tokens, ...
    partial: bool = False  # whether NaN stands for what a clip hides: only the rest is compared

    @property
    def near(self) -> float:
        """The relative distance within which one change explains another."""
        return self.fine if self.few else self.loose

    @property
    def silent(self) -> bool:
        """Whether nothing can be said: few entries change, and they are only nearly known."""
        return self.few and self.fine > FINE

    @functools.cached_property
    def linear(self) -> list[str]:
        """The slots that are linear in the gradient: moments, or else the parameters."""
        moves = [slot for slot in self.slots if np.any(self.vector(self.whole, slot))]
        if not self.few:
            moves = list(filter(self.large, moves)) or moves  # a small one is always some combination
        fits = self._between if self.few or self.partial else lambda slot: self.combined(slot)[1] < self.near
        found = list(filter(fits, moves))
        found = [slot for slot in found if slot != "params"] or found
        return list(filter(self.falls, found)) or list(filter(fits, self.roots)) or found

    @functools.cached_property
    def roots(self) -> list[str]:
        """The roots of second moments, which never fall."""
        squares = [slot for slot in self.slots if slot != "params" and not self.falls(slot)]
        rooted = lambda slot: all(ROOT + name in self.whole for name in self.slots[slot])
        roots = [ROOT + slot for slot in squares if rooted(slot)]
        return roots if self.few else list(filter(self.large, roots))

    def names(self, slot: str) -> list[str]:
        """The leaves in a slot, or the roots of leaves."""
        return self.slots.get(slot) or [ROOT + name for name in self.slots[slot.removeprefix(ROOT)]]

    def factor(self, found: Change, slot: str, *, decay: bool = True) -> float | None:
        """The multiple of the whole batch's change that was found; None if it is none."""
        factor, distance = self.fit(found, slot, decay=decay)
        return factor if distance < self.near and not self.silent else None

    def fit(self, found: Change, slot: str, *, decay: bool = False) -> tuple[float, float]:
        """The multiple of the whole batch's change that is nearest to the one found, and its distance.

        With `decay` any decay fits, too: no divisor of the gradient changes it, and a rate does.
        """
        a, b, drift = self.vector(found, slot), self.vector(self.whole, slot), self.vector(self.drift, slot)
        if self.partial:
            known = np.isfinite(a) & np.isfinite(b)
            a, b, drift = a[known], b[known], drift[known]
        if not (decay and np.any(drift) and np.all(np.isfinite([a, b])) and not self.few):
            factor = float(a @ b / max(b @ b, 1e-300))
            return factor, self._off(a, factor * b, None)
        columns = np.stack([b, drift], 1)
        shares = np.linalg.lstsq(columns, a, rcond=1e-6)[0]
        return float(shares[0]), self._off(a, columns @ shares, None)

    @property
    def by_leaf(self) -> "Explanations":
        """The same with a slot for each leaf of the optimizer's state, or of the parameters if it has none."""
        slots = {slot: names for slot, names in self.slots.items() if slot != "params"} or self.slots
        leaves = {name: [name] for names in slots.values() for name in names}
        return dataclasses.replace(self, slots={"params": self.slots["params"], **leaves})

    def distance(self, found: Change, other: Change, slot: str) -> float:
        """How far two changes are from one another, relative to the larger, but for decay."""
        return self._off(self.vector(found, slot), self.vector(other, slot), self.vector(self.drift, slot))

    def far(self, found: Change, other: Change, slots: Iterable[str]) -> float:
        """The distance of two changes in the worst of these slots."""
        return max(self.distance(found, other, slot) for slot in slots)

    @functools.cached_property
    def mean(self) -> Change:
        return self.sum(self.parts, 1 / len(self.parts))

    def combined(
        self, slot: str, names: list[str] | None = None, of: Change | None = None
    ) -> tuple[list[float], float]:
        """How much each micro-batch counts in a change (the whole's by default), and how far it is from their sum."""
        vector = lambda change: self.vector(change, slot, names)
        columns, whole = np.stack([*map(vector, self.parts), vector(self.drift)], axis=1), vector(of or self.whole)
        if self.partial:
            known = np.isfinite(whole) & np.all(np.isfinite(columns), 1)
            columns, whole = columns[known], whole[known]
        if not np.all(np.isfinite(columns)) or (self.partial and len(whole) <= len(self.parts) + MORE):
            return [], float("inf")
        shares = np.linalg.lstsq(columns, whole, rcond=1e-6)[0]
        return [float(share) for share in shares[:-1]], self._off(whole, columns @ shares, None)

    def unclipped(self, *found: Change) -> "tuple[Explanations, list[Change]] | None":
        """The same, and other changes, with NaN for entries that a clip by value holds; None without such a clip.

        Behind such a clip the others are linear in the gradient. A decay that hides it is taken away first.
        """
        if self.few:
            return None
        if decay := self.decay(found[0]):
            less = functools.partial(self._less, decay)
            return self._with(less).unclipped(*map(less, found))
        most = {
            name: max(largest(part[n]) for part in self.parts for n in self.names(slot))
            for slot in filter(self.saturates, (*self.slots, *self.roots))
            for name in self.names(slot)
        }
        if not most or not all(np.all(np.isfinite(change[name])) for name in most for change in found):
            return None

        def inside(change: Change) -> Change:
            held = {name: np.abs(change[name]) >= 0.999 * limit for name, limit in most.items()}
            return change | {name: np.where(at, np.nan, change[name]) for name, at in held.items()}

        return dataclasses.replace(self._with(inside), partial=True), list(map(inside, found))

    def _with(self, do: Callable[[Change], Change]) -> "Explanations":
        """The same with other changes."""
        parts, unions = list(map(do, self.parts)), self.unions
        return dataclasses.replace(self, whole=do(self.whole), parts=parts, unions=lambda: list(map(do, unions())))

    def decay(self, found: Change) -> float:
        """How much of the parameters is in each change, if a clip by value holds the gradients; 0.0 if it is not known.

        Entries that are held alike in several changes are the same in these: a constant, and decay.
        """
        changes = (self.drift, self.whole, *self.parts, found)
        p, *values = [np.concatenate([of[name].reshape(-1) for name in self.slots["params"]]) for of in changes]
        values = np.sort(values, 0)
        gaps = np.diff(values, axis=0)
        held, size = np.min(gaps, 0) < 1e-5 * largest(values), values[np.argmin(gaps, 0), np.arange(len(p))]
        columns = np.stack([np.sign(size), p], 1)[held]
        if np.sum(held) <= MORE or not np.any(p):
            return 0.0
        limit, decay = np.linalg.lstsq(columns, size[held], rcond=1e-6)[0]
        off = largest(columns @ [limit, decay] - size[held])
        return float(decay) if off < 1e-3 * abs(limit) and largest(decay * p) > 1e-2 * abs(limit) else 0.0

    def _less(self, decay: float, change: Change) -> Change:
        """A change without decay."""
        return change | {name: change[name] - decay * self.drift[name] for name in self.slots["params"]}

    def saturates(self, slot: str) -> bool:
        """Whether many entries of several micro-batches' changes equal the largest, as behind a clip by value."""
        values = np.abs([np.concatenate([part[name].reshape(-1) for name in self.names(slot)]) for part in self.parts])
        at_most = values > 0.999 * np.max(values)
        return bool(np.sum(at_most) > (1 if self.few else 3) and np.sum(np.any(at_most, 1)) > 1)

    @property
    def sums(self) -> list[str]:
        """The slots that show a sum in few digits: linear ones, or else the optimizer's, or else the parameters."""
        found = [slot for slot in self.linear if slot in self.slots]
        return found or [slot for slot in self.slots if slot != "params"] or ["params"]

    def rounds(self, found: Change) -> bool:
        """Whether a sum of these micro-batches in bfloat16 could be as far from the whole batch's."""
        sizes = lambda slot: np.sum([np.abs(self.vector(part, slot)) for part in self.parts], axis=0)
        off = lambda slot: np.abs(self.vector(found, slot) - self.vector(self.whole, slot))
        return all(largest(off(slot)) <= BFLOAT * largest(sizes(slot)) for slot in self.sums)

    def _between(self, slot: str) -> bool:
        """Whether each union lies between the union before and the micro-batch that it adds, or each is their sum."""
        unions = [self.vector(union, slot) for union in self.unions()]
        steps = [
            (before, self.vector(part, slot), union)
            for before, part, union in zip(unions, self.parts[1:], unions[1:], strict=False)
        ]

        def between(before: np.ndarray, part: np.ndarray, union: np.ndarray) -> bool:
            step = part - before
            share = float(
                np.nansum((union - before) * step) / max(np.nansum(np.where(np.isfinite(union), step, 0) ** 2), 1e-300)
            )
            same = self._off(before, part, None) < self.near
            return self._off(union, before + share * step, None) < self.near and (same or EDGE < share < 1 - EDGE)

        drift = self.vector(self.drift, slot)
        added = lambda before, part, union: self._off(union, before + part, drift) < self.near
        return all(between(*step) for step in steps) or all(added(*step) for step in steps)

    def falls(self, slot: str) -> bool:
        """Whether some entry of some change is negative: second moments never fall."""
        return any(np.any(self.vector(change, slot) < 0) for change in (self.whole, *self.parts))

    def size(self, name: str) -> int:
        """How many entries of a leaf change at all."""
        return int(np.sum(np.any([change[name] != 0 for change in (self.whole, *self.parts)], axis=0)))

    def large(self, slot: str) -> bool:
        """Whether enough entries of a slot change to tell the micro-batches apart."""
        return sum(map(self.size, self.names(slot))) > len(self.parts) + MORE

    def vector(self, change: Change, slot: str, names: list[str] | None = None) -> np.ndarray:
        """A slot's entries, or some leaves' entries, in units of their scales; imaginary parts follow the real ones."""
        leaves = [change[name].reshape(-1) / self.scales[name] for name in names or self.names(slot)]
        vector = np.concatenate(leaves)
        return np.concatenate([vector.real, vector.imag]) if np.iscomplexobj(vector) else vector

    @staticmethod
    def sum(changes: list[Change], factor: float) -> Change:
        return {name: factor * np.sum([change[name] for change in changes], axis=0) for name in changes[0]}

    def _off(self, a: np.ndarray, b: np.ndarray, drift: np.ndarray | None) -> float:
        """The distance of two vectors relative to the larger, but for a multiple of the drift; infinite for NaN."""
        if self.partial:
            known = np.isfinite(a) & np.isfinite(b)
            a, b, drift = a[known], b[known], drift[known] if drift is not None else None
            if np.count_nonzero(a) <= MORE:
                return 1.0
        off, size = a - b, max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
        if drift is not None and largest(drift):
            off = off - drift * (off @ drift) / (drift @ drift)
        return 0.0 if not size else float(np.nan_to_num(np.linalg.norm(off) / size, nan=np.inf))
