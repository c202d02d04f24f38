"""The change that each fault foretells of a window. The nearest is the cause; of ties, the first in the order below."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from optax_accum.verify._explanations import MORE, ROOT, Change, Explanations

Said = tuple[str, str]  # the name of a fault, and the evidence
Foretold = tuple[str, float, str]  # the fault, the distance between its update and the observed one, the evidence
TIE = 1e-4  # distances below it are rounding: the first fault wins
MEAN = "What came out is a mean of what each micro-batch alone would give"
CLIPPED = "each is clipped, or normalised, before it is added"


@dataclasses.dataclass(frozen=True)
class WindowView:
    """A window's change, and the changes that its micro-batches would have made. Facts that need runs are functions."""

    e: Explanations
    found: Change
    linear: list[str]  # the slots known to be linear in the gradient
    coupling: Callable[[], str]  # says that a leaf of the batch is normalised over its rows, or ""
    rounded: Callable[[], str]  # says that sums are rounded, or ""
    leads: bool = False  # whether a window of only the first micro-batch, repeated, came before
    one_by_one: Change | None = None  # the reference's change by an update with each micro-batch
    averaged: Callable[[], Change] | None = None  # the mean of those updates, each from the first parameters

    @property
    def right(self) -> bool:
        """Whether the slots that are linear in the gradient changed as the whole batch changes them."""
        return bool(self.linear) and self.e.far(self.found, self.e.whole, self.linear) < self.e.near

    @property
    def gradients(self) -> list[str]:
        """The slots whose changes are proportional to the gradient: linear ones, or roots."""
        return self.linear or self.e.roots

    def far(self, change: Change, factor: float) -> float:
        """The distance of the window's change from `factor` times a change, in the slots of gradients."""
        times = self.e.sum([change], factor)
        return max((self.e.distance(self.found, times, slot) for slot in self.gradients), default=1.0)

    def multiples(self) -> Iterator[float]:
        """Yields the factor between the window's gradient and the whole batch's, for each slot that has one."""
        yield from filter(None, (self.e.factor(self.found, slot) for slot in self.gradients))

    @functools.cached_property
    def unclipped(self) -> "WindowView | None":
        """The same without the entries that a clip by value holds; None if the others show nothing wrong."""
        if (seen := self.e.unclipped(self.found)) is None:
            return None
        e, found = seen
        window = dataclasses.replace(self, e=e, found=found, linear=e.linear, one_by_one=None, averaged=None)
        return window if window.linear and not window.right else None

    def nearer(self) -> "WindowView | None":
        """The same, seen from near enough to tell it from the whole batch's; None if that is rounding."""
        near = max(self.e.fine, self.e.far(self.found, self.e.whole, self.linear) / 4)
        if self.e.few or near >= self.e.near:
            return None
        e = dataclasses.replace(self.e, loose=near)
        return dataclasses.replace(self, e=e, linear=e.linear)


def explained(w: WindowView) -> Said | None:
    """The fault that explains a window best; None if none does."""
    if w.e.silent:
        return None
    if w.right:
        return next(_beside_the_gradient(w), None) or ((nearer := w.nearer()) and explained(nearer))
    off = [slot for slot in w.linear if w.e.distance(w.found, w.e.whole, slot) >= w.e.near]
    w = dataclasses.replace(w, linear=off)  # one of two optimizers may be right
    faults = [one for one in foretold(w) if one[1] < w.e.near]
    best = min((distance for _, distance, _ in faults), default=0.0)
    near = [(kind, says) for kind, distance, says in faults if distance <= max(2 * best, TIE)]
    return next(iter(near), None) or next(fitted(w), None) or (w.unclipped and explained(w.unclipped))


def _beside_the_gradient(w: WindowView) -> Iterator[Said]:
    """Yields faults of a window whose gradient is nearly right."""
    if says := rate(w):
        yield "optimizer at each micro-step", says
    if says := w.rounded():
        yield "low-precision sum", says

    def far(change: Any, slot: Any) -> Any:
        return w.e.distance(w.found, change, slot)

    if any(far(w.e.mean, slot) < min(w.e.near, far(w.e.whole, slot) / 4) for slot in w.e.slots) and w.coupling():
        yield "coupled examples", w.coupling()


def foretold(w: WindowView) -> Iterator[Foretold]:
    """Yields the changes that the faults foretell, the plainest fault first."""
    e, k = w.e, len(w.e.parts)
    for kind, n in (("only the first gradient", 0), ("only the last gradient", -1)):
        says = f"Micro-batch {n % k + 1} of {k} alone gives what came out%s: the others count for nothing."
        yield kind, e.far(w.found, e.parts[n], e.slots), says % ""
        yield kind, w.far(e.parts[n], 1 / k), says % f", divided by {k}"
    yield from one_after_another(w)
    distance = e.far(w.found, e.whole, e.slots)
    if distance < e.near and (says := w.rounded()):
        yield "low-precision sum", distance, says
    for kind, factor, words in (("sum for a mean", k, f"{k} times"), ("divided twice", 1 / k, f"1/{k} of")):
        says = f"What came out is {words} what the whole batch gives."
        yield kind, w.far(e.whole, factor), says
        if w.linear:
            yield kind, w.far(e.mean, factor), says
    distance = e.far(w.found, e.mean, w.linear) if w.linear else 1.0
    if distance < e.near and (said := why_a_mean(w, w.linear)):
        yield said[0], distance, said[1]
    yield from in_the_mean(w)
    off, before = e.sum([w.found, e.sum([e.whole], -1)], 1), dataclasses.replace(e, whole=e.parts[0])
    for slot in w.linear if w.leads else ():
        factor, distance = before.fit(off, slot)
        if factor > e.near:
            yield "not emptied", distance, "The sum of the window before is in this one, too."


def one_after_another(w: WindowView) -> Iterator[Foretold]:
    """Yields the change by one update for each micro-batch, one after the other."""
    if w.one_by_one is not None:
        says = f"What came out is {len(w.e.parts)} updates, one for each micro-batch, one after the other."
        yield "optimizer at each micro-step", w.e.far(w.found, w.one_by_one, ["params"]), says


def in_the_mean(w: WindowView) -> Iterator[Foretold]:
    """Yields the mean of one update for each micro-batch, unless the optimizer keeps nothing between them."""
    if w.averaged is not None and w.e.far(updates := w.averaged(), w.e.mean, ["params"]) >= w.e.near:
        says = f"What came out is the mean of {len(w.e.parts)} updates, one for each micro-batch."
        yield "optimizer at each micro-step", w.e.far(w.found, updates, ["params"]), says


def why_a_mean(w: WindowView, slots: list[str]) -> Said | None:
    """Why the plain mean over the micro-batches is not the whole batch's change; None if that is not known."""
    e = w.e
    if says := w.coupling():
        return "coupled examples", says
    saturates = any(map(e.saturates, slots))
    if e.few:
        return None if saturates else ("mean of means", f"{MEAN}; in the whole batch they count unlike.")
    slot = max(slots, key=lambda slot: e.distance(w.found, e.whole, slot))
    shares, off = e.combined(slot)
    only_one = saturates and max(shares, default=0) > 1 - e.near  # all entries clipped: as if one alone counted
    if _positive(e, (shares, off)) and abs(sum(shares) - 1) < e.near and not only_one:
        return "mean of means", f"{MEAN}; in the whole batch they count for {_listed(shares)}."
    leaves = [e.combined(slot, [name]) for name in e.names(slot) if e.size(name) > len(e.parts) + MORE]
    if saturates or _positive(e, (shares, off)) or (leaves and all(_positive(e, leaf) for leaf in leaves)):
        return "clipping at each micro-step", f"{MEAN}: {CLIPPED}."
    return "coupled examples", f"{MEAN}, and the whole batch's gradient is no combination of theirs."


def _positive(e: Explanations, fit: tuple[list[float], float]) -> bool:
    return fit[1] < e.near and min(fit[0]) > -e.near


def fitted(w: WindowView) -> Iterator[Said]:
    """Yields faults read off one fit of the micro-batches' changes, where nothing was foretold."""
    e, near, k = w.e, w.e.near, len(w.e.parts)
    if says := rate_alone(w):
        yield "optimizer at each micro-step", says
    for factor in w.multiples():
        if abs(factor - 1) > near:
            yield _divisor(w, factor), f"What came out is {factor:.3g} times what the whole batch gives."
    slots = [] if e.few or k == 1 else [*w.linear, *e.roots, *([] if w.linear else filter(e.large, e.slots))]
    for slot in slots:
        (right, fits), (came, off) = e.combined(slot), e.combined(slot, of=w.found)
        if off >= near or min(came) < -near or e.distance(w.found, e.whole, slot) < near:
            continue
        text = f"The micro-batches count for {_listed(came)}"
        whole, factor = abs(sum(came) - 1) < near, sum(came) / max(sum(right), near)
        alike = all(abs(share - factor * of) < near for share, of in zip(came, right, strict=True))
        if fits >= near:
            if whole and min(came) > near and (said := why_a_mean(dataclasses.replace(w, linear=[slot]), [slot])):
                yield said
        elif w.coupling():
            yield "coupled examples", w.coupling()
        elif alike and abs(factor - 1) > near:
            yield _divisor(w, factor), f"{text}, {factor:.3g} times as much as in the whole batch."
        elif whole and sum(right) > 1 + near:
            yield "clipping at each micro-step", f"{text}; the whole batch counts them for {_listed(right)}: {CLIPPED}."
        elif w.linear or whole:
            yield "mean of means", f"{text}; in the whole batch for {_listed(right)}."
    if w.coupling():
        yield "coupled examples", w.coupling()


def _divisor(w: WindowView, factor: float) -> str:
    """The name of a wrong factor. Behind a clip that acts, dividing twice loses less than k times."""
    clipped = any(sum(w.e.combined(slot)[0]) > 1 + w.e.near for slot in w.linear)
    return "divided twice" if clipped and factor < 1 else "wrong divisor"


def rate(w: WindowView) -> str:
    """Says that the parameters change by a multiple of what they should, though the gradient is right; or ""."""
    factor = w.e.factor(w.found, "params", decay=False)
    if not factor or abs(factor - 1) < w.e.near:
        return ""
    return f"The gradient is right, its update {factor:.4g} times what it is to be: does the rate count micro-steps?"


def rate_alone(w: WindowView) -> str:
    """The same without first moments, which would show the gradient.

    Sums and means have other factors, and with another gradient second moments are wrong.
    """
    others = [slot for slot in w.e.slots if slot != "params"]
    alone = w.linear == ["params"] or (bool(others) and not w.linear)
    right = not others or w.linear or w.e.far(w.found, w.e.whole, others) < w.e.near
    said = rate(w) if alone and right else ""
    if said and not others:
        return f"{said} Or is the sum of the gradients divided by another number? With plain SGD both look the same."
    return said


def _listed(shares: list[float]) -> str:
    return ", ".join(f"{share:.3g}" for share in shares)


class Second(NamedTuple):
    """The change of the second of two windows, of which the first is right."""

    e: Explanations
    found: Change
    first: Change  # the first window's change
    right: Change  # the second window's right change


def explained_second(w: Second) -> Said | None:
    """Why the second window is wrong: the first one's sum in it, a factor that a clip hid, or another rate."""
    faults: list[Foretold] = []
    for slot in dict.fromkeys((*w.e.linear, *(slot.removeprefix(ROOT) for slot in w.e.linear))):
        right, first, found = (w.e.vector(change, slot) for change in (w.right, w.first, w.found))
        columns = np.stack([right, first], 1)
        shares = np.linalg.lstsq(columns, found, rcond=1e-6)[0]  # behind a clip both are less than 1
        distance = float(np.linalg.norm(found - columns @ shares) / max(np.linalg.norm(found), 1e-300))
        if shares[0] < 1 + w.e.near and shares[1] * np.linalg.norm(first) > w.e.near * np.linalg.norm(right):
            faults.append(("not emptied", distance, "The first window's sum is in the second window, too."))
        elif slot != "params" and abs(shares[0] - 1) > max(4 * distance, TIE):  # of moments: no rate is in it
            kind = "sum for a mean" if shares[0] > 1 else "divided twice"
            says = (
                f"The second window's gradient is {shares[0]:.3g} times the whole batch's; in the first a clip hid it."
            )
            faults.append((kind, distance, says))
    factor, distance = dataclasses.replace(w.e, whole=w.right).fit(w.found, "params")
    if abs(factor - 1) > w.e.near:
        says = f"The second window's update is {factor:.3g} times the whole batch's; the first is right."
        faults.append(("optimizer at each micro-step", distance, says))
    kind, distance, says = min(faults, key=lambda one: one[1], default=("", 1.0, ""))
    return (kind, says) if distance < w.e.near and not w.e.silent else None
