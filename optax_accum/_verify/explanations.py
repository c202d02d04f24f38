"""Owns how a window's change is made of what each of its micro-batches alone would have changed. Runs nothing."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from optax_accum._verify.loss import largest
from optax_accum._verify.report import Cause

Change = dict[str, np.ndarray]  # what a run added to each leaf
MORE = 3  # entries beyond the micro-batches, from which on these can be told apart
NEAR = 0.02  # the relative distance within which one change explains another
FINE = 0.01  # that beyond which nothing is said of a change of few entries
EDGE = 1e-3  # the least that a micro-batch counts where it counts
BFLOAT = 2**-7  # two roundings of bfloat16

MEAN = "What came out is a mean of what each micro-batch alone would give"
ORDINARY = "Micro-batch {} of {} alone gives what came out{}: the others count for nothing."


@dataclasses.dataclass(frozen=True)
class Explanations:
    """The changes of the whole window and of each micro-batch alone, by the reference, from the same beginning.

    A slot is the parameters, or what mirrors them in the optimizer's state. Where the whole window's change is a linear
    combination of those of the micro-batches, a slot is linear in the gradient: with SGD the parameters, with Adam the
    first moment. There, sums and multiples can be foretold without knowing the optimizer.

    Where fewer entries change than there are micro-batches, any change is some combination of theirs. There only what
    is foretold to rounding is a cause, and a slot is linear if each union of micro-batches lies between its two parts.
    """

    slots: dict[str, list[str]]  # "params" and each mirror -> the leaves in it
    scales: dict[str, float]  # of each leaf
    drift: Change  # where each leaf's parameter began: decay moves it along this, whatever the gradient
    whole: Change
    parts: list[Change]
    unions: Callable[[], list[Change]]  # of the first micro-batch, the first two, ..., all
    few: bool  # whether too few entries change to tell one combination of micro-batches from another
    loose: float = NEAR
    fine: float = 0.0  # what rounding may do

    @property
    def near(self) -> float:
        """The relative distance within which one change explains another."""
        return self.fine if self.few else self.loose

    @property
    def silent(self) -> bool:
        """Whether nothing can be said, of few entries that are only nearly known."""
        return self.few and self.fine > FINE

    @functools.cached_property
    def linear(self) -> list[str]:
        """The slots that are linear in the gradient: moments, or else the parameters."""
        moves = [slot for slot in self.slots if np.any(self._vector(self.whole, slot))]
        if self.few:
            found = [slot for slot in moves if self._between(slot)]
        else:
            large = [slot for slot in moves if self._large(slot)] or moves  # a small one is always some combination
            found = [slot for slot in large if self._combined(slot)[1] < self.near]
        found = [slot for slot in found if slot != "params"] or found
        return list(filter(self._falls, found)) or found

    def cause(self, found: Change, one_by_one: Change | None = None, linear: list[str] | None = None) -> Cause | None:
        """Returns the cause that explains a change best, if one does; `linear` are the slots known to be so."""
        if self.silent:
            return None
        linear = self.linear if linear is None else linear
        if linear and self._far(found, self.whole, linear) < self.near:
            return self._rate(found) or Cause("low-precision sum", "")
        candidates = list(self._candidates(found, linear, one_by_one))
        if candidates:
            distance, cause = min(candidates, key=lambda candidate: candidate[0])
            if distance < self.near:
                return self._refined(found, linear) if cause.kind == "mean of means" else cause
        if self._mean_slots(found):
            return self._refined(found, linear)
        return self._multiple(found, linear) or self._weighted(found, linear) or self._coupled(found)

    def second(self, cut: list[Change], whole: list[Change]) -> Cause | None:
        """Returns the cause that explains why only the second of two windows is wrong."""
        later = lambda ends: {name: ends[1][name] - ends[0][name] for name in ends[0]}
        found, right = later(cut), later(whole)
        off = {name: found[name] - right[name] for name in found}
        kept = dataclasses.replace(self, whole=whole[0])
        again = dataclasses.replace(self, whole=right)
        candidates: list[tuple[float, Cause]] = []
        for slot in [] if self.silent else self.linear:
            size = np.linalg.norm(self._vector(off, slot)) / max(np.linalg.norm(self._vector(right, slot)), 1e-300)
            says = "The first window's sum is in the second window, too."
            candidates.append((kept.fit(off, slot)[1] if size > self.near else 1.0, Cause("not emptied", says)))
        factor, distance = again.fit(found, "params")
        if abs(factor - 1) > self.near and not self.silent:
            says = f"The second window's update is {factor:.3g} times the whole batch's; the first is right."
            candidates.append((distance, Cause("optimizer at each micro-step", says)))
        distance, cause = min(candidates, key=lambda candidate: candidate[0], default=(1.0, None))
        return cause if distance < self.near else None

    def _candidates(self, found: Change, linear: list[str], one_by_one: Change | None) -> Iterator[tuple[float, Cause]]:
        k, every = len(self.parts), list(self.slots)
        mean, total = self._sum(self.parts, 1 / k), self._sum(self.parts, 1)
        for place, which in ((0, "first"), (-1, "last")):
            alone, kind = self.parts[place], f"only the {which} gradient"
            number = k if place else 1
            yield self._far(found, alone, every), Cause(kind, ORDINARY.format(number, k, ""))
            if linear:
                says = ORDINARY.format(number, k, f", divided by {k}")
                yield self._far(found, self._sum([alone], 1 / k), linear), Cause(kind, says)
        if one_by_one is not None:
            says = f"What came out is {k} updates, one for each micro-batch, one after the other."
            yield self._far(found, one_by_one, ["params"]), Cause("optimizer at each micro-step", says)
        yield self._far(found, self.whole, every), Cause("low-precision sum", "")
        if linear:
            says = f"What came out is {k} times what the whole batch gives."
            for change in (self._sum([self.whole], k), total):
                yield self._far(found, change, linear), Cause("sum for a mean", says)
            says = f"What came out is 1/{k} of what the whole batch gives."
            for change in (self._sum([self.whole], 1 / k), self._sum([mean], 1 / k)):
                yield self._far(found, change, linear), Cause("divided twice", says)
            yield self._far(found, mean, linear), Cause("mean of means", "")

    def _refined(self, found: Change, linear: list[str]) -> Cause | None:
        """Says why a plain mean over the micro-batches is not the whole batch's."""
        if self.few:
            plain = linear and not any(map(self._saturates, linear))
            return Cause("mean of means", f"{MEAN}; in the whole batch they count unlike.") if plain else None
        slots = self._mean_slots(found) or linear
        slot = max(slots, key=lambda slot: (self._large(slot), self.distance(found, self.whole, slot)))
        shares, far = self._combined(slot)
        saturates = self._saturates(slot)
        corner = saturates and (max(shares, default=1.0) > 1 - self.near or min(shares, default=0.0) < -self.near)
        if far < self.near and abs(sum(shares) - 1) < self.near and not corner:
            says = ", ".join(f"{share:.3g}" for share in shares)
            return Cause("mean of means", f"{MEAN}; in the whole batch they count for {says}.")
        leaves = [self._combined(slot, [name]) for name in self.slots[slot] if self._size(name) > len(self.parts) + 3]
        clipped = leaves and all(far < self.near for _, far in leaves)
        if far < self.near or clipped or saturates:
            return Cause("clipping at each micro-step", f"{MEAN}: each is clipped, or normalised, before it is added.")
        return Cause("coupled examples", f"{MEAN}, and the whole batch's gradient is no combination of theirs.")

    def _multiple(self, found: Change, linear: list[str]) -> Cause | None:
        """Says that a change is a multiple of the whole batch's, and whose fault that is."""
        if linear == ["params"] and self._unclipped() and (cause := self._rate(found)):
            return cause  # no moments tell: sums and means have other factors
        squares = [slot for slot in self.slots if slot not in ("params", *linear) and not self._falls(slot)]
        powers = dict.fromkeys(linear, 1) or dict.fromkeys(squares, 2)  # second moments tell where no first do
        for slot, power in powers.items():
            factor = (self.factor(found, slot) or 0.0) ** (1 / power)
            if factor and abs(factor - 1) > self.near:
                says = f"What came out is {factor:.3g} times what the whole batch gives."
                return Cause("divided twice" if factor < 1 else "sum for a mean", says)
        return None

    def _rate(self, found: Change) -> Cause | None:
        """Says that the parameters change by a multiple of what they should, and the gradient is right."""
        rate = self.factor(found, "params")
        if not rate or abs(rate - 1) < self.near:
            return None
        says = f"The gradient is right, its update {rate:.3g} times what it is to be: does the rate count micro-steps?"
        return Cause("optimizer at each micro-step", says)

    def _weighted(self, found: Change, linear: list[str]) -> Cause | None:
        """Says that micro-batches count, but not as much as in the whole batch: both may be clipped afterwards."""
        for slot in [] if self.few else linear:
            (right, _), (shares, far) = self._combined(slot), self._combined(slot, of=found)
            if far < self.near:
                each = [", ".join(f"{share:.3g}" for share in counts) for counts in (shares, right)]
                return Cause(
                    "mean of means", f"The micro-batches count for {each[0]}; in the whole batch for {each[1]}."
                )
        return None

    def _coupled(self, found: Change) -> Cause | None:
        """Says that a weighted mean of what micro-batches give came out, where the whole batch's is none of theirs."""
        for slot in [] if self.few else filter(self._large, self.slots):
            (_, right), (shares, far) = self._combined(slot), self._combined(slot, of=found)
            if far < self.near <= right and abs(sum(shares) - 1) < self.near and min(shares) > 0:
                return self._refined(found, [slot])
        return None

    def factor(self, found: Change, slot: str) -> float | None:
        """Returns which multiple of the whole batch's change was found, if it is one."""
        factor, distance = self.fit(found, slot)
        return factor if distance < self.near and not self.silent else None

    def fit(self, found: Change, slot: str) -> tuple[float, float]:
        """Returns the multiple of the whole batch's change that is nearest to what was found, and how far that is."""
        a, b = self._vector(found, slot), self._vector(self.whole, slot)
        factor = float(a @ b / max(b @ b, 1e-300))
        return factor, self._off(a, factor * b, None)

    def distance(self, found: Change, other: Change, slot: str) -> float:
        """Returns how far two changes are from one another, relative to the larger."""
        return self._off(self._vector(found, slot), self._vector(other, slot), self._vector(self.drift, slot))

    def _far(self, found: Change, other: Change, slots: Iterable[str]) -> float:
        return max(self.distance(found, other, slot) for slot in slots)

    def _mean_slots(self, found: Change) -> list[str]:
        """Returns the slots in which a plain mean came out, and not what the whole batch gives as well."""
        mean = self._sum(self.parts, 1 / len(self.parts))
        means = lambda slot: self.distance(found, mean, slot) < self.near <= self.distance(found, self.whole, slot)
        return list(filter(means, self.slots))

    def _combined(
        self, slot: str, names: list[str] | None = None, of: Change | None = None
    ) -> tuple[list[float], float]:
        """Returns how much each micro-batch counts in a change, the whole's by default, and how far that is from it."""
        vector = lambda change: self._vector(change, slot, names)
        columns = np.stack([*map(vector, self.parts), vector(self.drift)], axis=1)
        if not np.all(np.isfinite(columns)):
            return [], float("inf")
        whole = vector(of or self.whole)
        shares = np.linalg.lstsq(columns, whole, rcond=1e-6)[0]
        return [float(share) for share in shares[:-1]], self._off(whole, columns @ shares, None)

    def _saturates(self, slot: str) -> bool:
        """Whether many entries of several micro-batches' changes are the same, and the largest."""
        values = np.abs([np.concatenate([part[name].reshape(-1) for name in self.slots[slot]]) for part in self.parts])
        at_most = values > 0.999 * np.max(values)
        return bool(np.sum(at_most) > (1 if self.few else 3) and np.sum(np.any(at_most, 1)) > 1)

    def rounds(self, found: Change) -> bool:
        """Whether a sum of these micro-batches in bfloat16 could be as far from the whole batch's."""
        sizes = lambda slot: np.sum([np.abs(self._vector(part, slot)) for part in self.parts], axis=0)
        off = lambda slot: np.abs(self._vector(found, slot) - self._vector(self.whole, slot))
        slots = self.linear or [slot for slot in self.slots if slot != "params"] or ["params"]
        return all(largest(off(slot)) <= BFLOAT * largest(sizes(slot)) for slot in slots)

    def _between(self, slot: str) -> bool:
        """Whether each union of micro-batches lies between those before it and the last one, or all are sums."""
        unions = [self._vector(union, slot) for union in self.unions()]
        steps = [
            (before, self._vector(part, slot), union)
            for before, part, union in zip(unions, self.parts[1:], unions[1:], strict=False)
        ]

        def between(before: np.ndarray, part: np.ndarray, union: np.ndarray) -> bool:
            step = part - before
            share = float((union - before) @ step / max(step @ step, 1e-300))
            same = self._off(before, part, None) < self.near
            return self._off(union, before + share * step, None) < self.near and (same or EDGE < share < 1 - EDGE)

        drift = self._vector(self.drift, slot)
        added = lambda before, part, union: self._off(union, before + part, drift) < self.near
        return all(between(*step) for step in steps) or all(added(*step) for step in steps)

    def _falls(self, slot: str) -> bool:
        """Whether some entry becomes less somewhere: second moments never do."""
        return any(np.any(self._vector(change, slot) < 0) for change in (self.whole, *self.parts))

    def _unclipped(self) -> bool:
        return self.few or abs(sum(self._combined("params")[0]) - 1) < self.near

    def _size(self, name: str) -> int:
        """Returns how many entries of a leaf change at all."""
        return int(np.sum(np.any([change[name] != 0 for change in (self.whole, *self.parts)], axis=0)))

    def _large(self, slot: str) -> bool:
        return sum(map(self._size, self.slots[slot])) > len(self.parts) + MORE

    def _vector(self, change: Change, slot: str, names: list[str] | None = None) -> np.ndarray:
        leaves = [change[name].reshape(-1) / self.scales[name] for name in names or self.slots[slot]]
        vector = np.concatenate(leaves)
        return np.concatenate([vector.real, vector.imag]) if np.iscomplexobj(vector) else vector

    @staticmethod
    def _sum(changes: list[Change], factor: float) -> Change:
        return {name: factor * np.sum([change[name] for change in changes], axis=0) for name in changes[0]}

    @staticmethod
    def _off(a: np.ndarray, b: np.ndarray, drift: np.ndarray | None) -> float:
        """Returns the distance of two vectors relative to the larger, but for a multiple of the drift."""
        off, size = a - b, max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
        if drift is not None and largest(drift):
            off = off - drift * (off @ drift) / (drift @ drift)
        return 0.0 if not size else float(np.nan_to_num(np.linalg.norm(off) / size, nan=np.inf))
