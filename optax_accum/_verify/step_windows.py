"""Owns what each fault would make of a window's micro-batches, and how far that is from what came out. Runs nothing."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from optax_accum._verify.step_explanations import Change, Explanations

Foretold = Iterator[tuple[float, str]]  # how far what a fault would make is from what came out, and what is said of it
MEAN = "What came out is a mean of what each micro-batch alone would give"


@dataclasses.dataclass(frozen=True)
class Window:
    """What a window changed, beside what its micro-batches would have changed. Asked once for what takes runs."""

    e: Explanations
    found: Change
    linear: list[str]  # the slots known to be linear in the gradient
    coupling: Callable[[], str]  # says that a leaf of the batch is normalised over its rows
    rounded: Callable[[], str]  # says that sums are rounded
    leads: bool = False  # whether a window of the first micro-batch, again and again, came before
    one_by_one: Change | None = None  # what the reference changes with each micro-batch, one after the other

    @property
    def right(self) -> bool:
        """Whether what is linear in the gradient came out as in the whole batch."""
        return bool(self.linear) and self.e.far(self.found, self.e.whole, self.linear) < self.e.near

    @functools.cached_property
    def means(self) -> list[str]:
        """The slots in which a plain mean came out."""
        return self.e.mean_slots(self.found)

    @functools.cached_property
    def powers(self) -> dict[str, int]:
        """The slots that change with a power of the gradient: those linear in it, or without them second moments."""
        e = self.e
        squares = [slot for slot in e.slots if slot not in ("params", *self.linear) and not e.falls(slot)]
        return dict.fromkeys(self.linear, 1) or dict.fromkeys(squares, 2)

    def far(self, change: Change, factor: float) -> float:
        """Returns how far what came out is from a change by so many times its gradient."""
        e = self.e
        times = lambda slot: e.sum([change], factor ** self.powers[slot])
        return max((e.distance(self.found, times(slot), slot) for slot in self.powers), default=1.0)

    def multiples(self) -> Iterator[float]:
        """Yields in each slot that tells which multiple of the whole batch's gradient came out, if one did."""
        for slot, power in self.powers.items():
            if factor := (self.e.factor(self.found, slot) or 0.0) ** (1 / power):
                yield factor

    def nearer(self) -> "Window | None":
        """Returns the same, looked at from as near as tells it from the whole batch's, unless that is rounding."""
        near = max(self.e.fine, self.e.far(self.found, self.e.whole, self.linear) / 4)
        if self.e.few or near >= self.e.near:
            return None
        e = dataclasses.replace(self.e, loose=near)
        return dataclasses.replace(self, e=e, linear=e.linear)

    def plainest(self) -> str:
        """Returns the slot that tells most of a mean."""
        e = self.e
        slots = self.means or self.linear or list(filter(e.large, e.slots)) or list(e.slots)
        return max(slots, key=lambda slot: (e.large(slot), e.distance(self.found, e.whole, slot)))


class Second(NamedTuple):
    """What the second of two windows changed, of which the first is right."""

    e: Explanations
    found: Change
    first: Change  # what the first changed
    right: Change  # what the second is to change


def alone(w: Window, place: int) -> Foretold:
    """Yields what one micro-batch makes alone, also divided by their number."""
    k, part = len(w.e.parts), w.e.parts[place]
    says = f"Micro-batch {place % k + 1} of {k} alone gives what came out%s: the others count for nothing."
    yield w.e.far(w.found, part, w.e.slots), says % ""
    yield w.far(part, 1 / k), says % f", divided by {k}"


def one_after_another(w: Window) -> Foretold:
    """Yields what an update for each micro-batch makes."""
    if w.one_by_one is not None:
        says = f"What came out is {len(w.e.parts)} updates, one for each micro-batch, one after the other."
        yield w.e.far(w.found, w.one_by_one, ["params"]), says


def rounded_sum(w: Window) -> Foretold:
    """Yields what the whole batch makes: what is nearly that may be a rounded sum."""
    distance = w.e.far(w.found, w.e.whole, w.e.slots)
    if distance < w.e.near and (says := w.rounded()):
        yield distance, says


def times(w: Window, factor: float, words: str) -> Foretold:
    """Yields so many times the whole batch's change, and so many times the mean over micro-batches."""
    for change in (w.e.sum([w.e.whole], factor), w.e.sum([w.e.mean], factor)) if w.linear else ():
        yield w.e.far(w.found, change, w.linear), f"What came out is {words} what the whole batch gives."


def kept_lead(w: Window) -> Foretold:
    """Yields the sum of the window that came before on top of what the whole batch makes."""
    off = w.e.sum([w.found, w.e.sum([w.e.whole], -1)], 1)
    before = dataclasses.replace(w.e, whole=w.e.parts[0])
    for slot in w.linear if w.leads else ():
        factor, distance = before.fit(off, slot)
        if factor > w.e.near:
            yield distance, "The sum of the window before is in this one, too."


def plain_mean(why: Callable[[Window], str]) -> Callable[[Window], Foretold]:
    """Returns what yields the plain mean over micro-batches, where `why` says whose fault that is."""

    def foretold(w: Window) -> Foretold:
        distance = w.e.far(w.found, w.e.mean, w.linear) if w.linear else 1.0
        if distance < w.e.near and (says := why(w)):
            yield distance, says

    return foretold


# Why a plain mean over the micro-batches is not the whole batch's: one of three.


def unequal(w: Window) -> str:
    """The whole batch's change is another mean of theirs."""
    e = w.e
    if w.coupling():
        return ""
    if e.few:
        plain = bool(w.linear) and not any(map(e.saturates, w.linear))
        return f"{MEAN}; in the whole batch they count unlike." if plain else ""
    slot = w.plainest()
    shares, far = e.combined(slot)
    if far >= e.near or abs(sum(shares) - 1) >= e.near or min(shares) < -e.near:
        return ""
    if e.saturates(slot) and max(shares) > 1 - e.near:
        return ""
    return f"{MEAN}; in the whole batch they count for {_listed(shares)}."


def clipped(w: Window) -> str:
    """The whole batch's change is a multiple of a mean of theirs, leaf by leaf, or as far as none is the largest."""
    e = w.e
    if e.few or w.coupling() or unequal(w):
        return ""
    slot = w.plainest()
    positive = lambda of: of[1] < e.near and min(of[0]) > -e.near
    leaves = [e.combined(slot, [name]) for name in e.slots[slot] if e.size(name) > len(e.parts) + 3]
    is_clip = positive(e.combined(slot)) or (leaves and all(map(positive, leaves))) or e.saturates(slot)
    return f"{MEAN}: each is clipped, or normalised, before it is added." if is_clip else ""


def coupled(w: Window) -> str:
    """The whole batch's change is nothing that could be made of theirs."""
    if w.coupling() or w.e.few or unequal(w) or clipped(w):
        return w.coupling()
    return f"{MEAN}, and the whole batch's gradient is no combination of theirs."


def normalised_mean(w: Window) -> str:
    """A leaf is normalised over its rows, and the plain mean came out, though that is nearly the whole batch's."""
    far = lambda change, slot: w.e.distance(w.found, change, slot)
    mean_came = any(far(w.e.mean, slot) < min(w.e.near, far(w.e.whole, slot) / 4) for slot in w.e.slots)
    return w.coupling() if mean_came else ""


# What is said where nothing was foretold.


def mean_somewhere(why: Callable[[Window], str]) -> Callable[[Window], str]:
    """Returns what says `why` a plain mean came out in some slots, though the whole batch gives something else."""
    return lambda w: why(w) if w.means else ""


def rate(w: Window) -> str:
    """The parameters change by a multiple of what they should, and the gradient is right."""
    factor = w.e.factor(w.found, "params")
    if not factor or abs(factor - 1) < w.e.near:
        return ""
    return f"The gradient is right, its update {factor:.4g} times what it is to be: does the rate count micro-steps?"


def rate_alone(w: Window) -> str:
    """The same without first moments, which tell: sums and means have other factors, and second moments are wrong."""
    others = [slot for slot in w.e.slots if slot != "params"]
    alone = w.e.unclipped() if w.linear == ["params"] else bool(others) and not w.linear
    right = not others or w.linear or w.e.far(w.found, w.e.whole, others) < w.e.near
    said = rate(w) if alone and right and not w.means else ""
    if said and not others:
        return f"{said} Or is the sum of the gradients divided by another number? With plain SGD both look the same."
    return said


def multiple(w: Window, of: Callable[[float], bool]) -> str:
    """A multiple of the whole batch's gradient came out, or a part of it."""
    factor = next((factor for factor in w.multiples() if abs(factor - 1) > w.e.near), 1.0)
    return f"What came out is {factor:.3g} times what the whole batch gives." if of(factor) and not w.means else ""


def weighed(w: Window) -> str:
    """Micro-batches count, but not as much as in the whole batch: both may be clipped afterwards."""
    for slot in [] if w.e.few or w.coupling() else w.linear:
        (right, _), (shares, far) = w.e.combined(slot), w.e.combined(slot, of=w.found)
        if far < w.e.near and sum(right) < 1 + w.e.near:  # more than all: each is made smaller before it is added
            return f"The micro-batches count for {_listed(shares)}; in the whole batch for {_listed(right)}."
    return ""


def _listed(shares: list[float]) -> str:
    return ", ".join(f"{share:.3g}" for share in shares)


def clipped_weighed(w: Window) -> str:
    """What they were weighed by came out, and the whole batch's change is a larger combination of theirs."""
    for slot in [] if w.e.few or w.coupling() else w.linear:
        (right, fits), (shares, far) = w.e.combined(slot), w.e.combined(slot, of=w.found)
        if max(far, fits) < w.e.near < sum(right) - 1 and min(*shares, *right) > 0:
            return (
                f"The micro-batches count for {_listed(shares)}. The whole batch counts them for {_listed(right)}, in "
                "all more than 1: each is clipped, or normalised, before it is added."
            )
    return ""


def combined(why: Callable[[Window], str]) -> Callable[[Window], str]:
    """Returns what says `why` a weighted mean of theirs came out, where the whole batch's change is none."""

    def says(w: Window) -> str:
        for slot in [] if w.e.few else filter(w.e.large, w.e.slots):
            (_, right), (shares, far) = w.e.combined(slot), w.e.combined(slot, of=w.found)
            if far < w.e.near <= right and abs(sum(shares) - 1) < w.e.near and min(shares) > 0:
                return why(dataclasses.replace(w, linear=[slot]))
        return w.coupling() if why is coupled else ""

    return says


# What is said of the second window, where the first is right.


def kept(w: Second) -> Foretold:
    """Yields the first window's sum on top of the second's."""
    off = {name: w.found[name] - w.right[name] for name in w.found}
    before = dataclasses.replace(w.e, whole=w.first)
    for slot in w.e.linear:
        size = np.linalg.norm(w.e.vector(off, slot)) / max(np.linalg.norm(w.e.vector(w.right, slot)), 1e-300)
        if size > w.e.near:
            yield before.fit(off, slot)[1], "The first window's sum is in the second window, too."


def later_rate(w: Second) -> Foretold:
    """Yields a multiple of the second window's update."""
    factor, distance = dataclasses.replace(w.e, whole=w.right).fit(w.found, "params")
    if abs(factor - 1) > w.e.near:
        yield distance, f"The second window's update is {factor:.3g} times the whole batch's; the first is right."
