"""The change that each fault foretells of a window. The nearest is the cause; of ties, the first in the order below."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

from optax_accum.verify import _running as running
from optax_accum.verify._explanations import MORE, Change, Explanations
from optax_accum.verify._shares import TIE, Said, Shares, listed

Foretold = tuple[str, float, str]  # the fault, the distance between its update and the observed one, the evidence
MEAN = "What came out is a mean of what each micro-batch alone would give"
NO_COMBINATION = "the whole batch's gradient is no combination of theirs"
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
    reversed: Callable[[], Change] | None = None  # the change by the same micro-batches in the opposite order

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
        """The same without what a clip by value holds; None if the rest shows nothing wrong."""
        seen = self.e.unclipped(self.found)
        return self._seen(seen[0], *seen[1]) if seen else None

    @functools.cached_property
    def by_leaf(self) -> "WindowView | None":
        """The same, leaf by leaf: an optimizer may make each leaf's gradient as long as the others'."""
        return None if self.linear or self.e.few else self._seen(self.e.by_leaf, self.found)

    def _seen(self, e: Explanations, found: Change) -> "WindowView | None":
        window = dataclasses.replace(self, e=e, found=found, linear=e.linear, one_by_one=None, averaged=None)
        return window if window.linear and not window.right else None

    @functools.cached_property
    def opposite(self) -> Change | None:
        """The change by the same micro-batches in the opposite order; None if it is the same, or not known."""
        slots = self.gradients or list(self.e.slots)
        if self.reversed is None or self.e.far(self.found, change := self.reversed(), slots) < self.e.near:
            return None
        return change

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
    near = [(kind, says) for kind, distance, says in faults if distance <= max(2 * best, TIE)]  # the first of them wins
    if best > 10 * TIE and off and all(w.e.combined(slot, of=w.found)[1] < TIE for slot in off):
        near = list(fitted(w))[:1] + near  # shares that fit to rounding
    views = filter(None, (w.unclipped, w.by_leaf)) if not w.e.partial else ()
    return next(iter(near), None) or next(fitted(w), None) or next(filter(None, map(explained, views)), None)


def _beside_the_gradient(w: WindowView) -> Iterator[Said]:
    """Yields faults of a window whose gradient is nearly right."""
    if says := rate(w):
        yield "optimizer at each micro-step", says
    if says := w.rounded():
        yield "low-precision sum", says
    far = lambda change, slot: w.e.distance(w.found, change, slot)
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
    yield from in_a_running_sum(w)
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


def in_a_running_sum(w: WindowView) -> Iterator[Foretold]:
    """Yields the sum that is clipped each time, if the order of the micro-batches counts."""
    if w.opposite is not None and not w.e.few and not w.e.partial:
        far = [running.distance(w.e, slot, w.found, w.opposite) for slot in w.gradients]
        says = "What came out is the sum, clipped each time that a micro-batch was added to it."
        if max(far, default=1.0) < w.e.near / 10:  # a scale is fitted
            yield "clipping the running sum", max(far), says


def why_a_mean(w: WindowView, slots: list[str]) -> Said | None:
    """Why the plain mean over the micro-batches is not the whole batch's change; None if that is not known."""
    e = w.e
    if says := w.coupling():
        return "coupled examples", says
    # The first change of Adam's parameters, whose entries are all alike, looks as if it were clipped, too.
    saturates = any(map(e.saturates, slots)) or (not e.few and "params" in slots and bool(e.decay(w.found)))
    if e.few:
        return None if saturates else ("mean of means", f"{MEAN}; in the whole batch they count unlike.")
    slot = max(slots, key=lambda slot: e.distance(w.found, e.whole, slot))
    shares, off = e.combined(slot)
    if e.partial and not shares:
        return None
    only_one = saturates and max(shares, default=0) > 1 - e.near  # all entries clipped: as if one alone counted
    if _positive(w, (shares, off)) and abs(sum(shares) - 1) < e.near and not only_one:
        return "mean of means", f"{MEAN}; in the whole batch they count for {listed(shares)}."
    leaves = [e.combined(slot, [name]) for name in e.names(slot) if e.size(name) > len(e.parts) + MORE]
    if saturates or _positive(w, (shares, off)) or (leaves and all(_positive(w, leaf) for leaf in leaves)):
        return "clipping at each micro-step", f"{MEAN}: {CLIPPED}."
    return "coupled examples", f"{MEAN}, and {NO_COMBINATION}."


def _positive(w: WindowView, fit: tuple[list[float], float]) -> bool:
    return fit[1] < w.e.near and _count(w, fit[0])


def _count(w: WindowView, shares: list[float]) -> bool:
    """Whether no micro-batch counts against the others.

    If a window led, each change holds its gradient, which is the first micro-batch's: in a clipped window, whose
    shares add up to more than 1, the first's may be below 0.
    """
    return min(shares[w.leads :]) > -w.e.near * max(shares)


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
        shares = Shares(came, right, e.counts, near, off)
        if off >= near or not _count(w, came) or e.distance(w.found, e.whole, slot) < near:
            continue
        if fits >= near:
            if shares.whole and shares.positive and (said := why_a_mean(dataclasses.replace(w, linear=[slot]), [slot])):
                yield said
            elif sum(came) > 1 + near and not e.saturates(slot):  # behind a clip by norm
                yield "coupled examples", f"{shares.says}, and {NO_COMBINATION}."
        elif w.coupling():
            yield "coupled examples", w.coupling()
        elif shares.alike and abs(shares.factor - 1) > near:
            yield _divisor(w, shares.factor), f"{shares.says}, {shares.factor:.3g} times as much as in the whole batch."
        elif shares.missing:
            yield shares.why_missing()
        elif shares.whole and shares.clipped:
            yield (
                "clipping at each micro-step",
                f"{shares.says}; the whole batch counts them for {listed(right)}: {CLIPPED}.",
            )
        elif w.linear or shares.whole:
            yield shares.why_unequal(by_place=w.opposite is not None)
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
