"""How far windows are from the reference, compared with rounding."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from optax_accum._shared.arrays import Tree
from optax_accum.verify._calls import nudged, nudged_at
from optax_accum.verify._carries import floats, largest, moved, moved_apart
from optax_accum.verify._explanations import Change
from optax_accum.verify._report import Errors, badness, within
from optax_accum.verify._runs import Rows, StepRuns, mean

LONG = 16  # windows in a long window
SUMS = 2**-16  # the error beyond which a sum is imprecise: 128 roundings of float32


@dataclasses.dataclass(frozen=True)
class StepErrors(StepRuns):
    """The runs of a step, and the distances between them."""

    @property
    def judged(self) -> list[str]:
        """The leaves in which whole and cut must agree; in means over keys, only leaves linear in the gradient."""
        return [name for slot in (self.explanations.linear if self.random else self.slots) for name in self.slots[slot]]

    @functools.cached_property
    def normalised(self) -> str:
        """The path of a leaf of the batch that is normalised over its rows, or "".

        Moved by a constant, it changes nothing; moved row by row, it does.
        """
        rows = self.even_rows[0]

        def same(batch: Tree) -> bool:
            errors = self.compared(self.changes(self.one, [batch]), [rows], self.ones[:1])
            return bool(errors) and within(errors)

        for path, leaf, put in floats(self.of(rows)):
            if np.ptp(leaf) and all(same(put(new)) for new in moved(leaf)) and not same(put(moved_apart(leaf))):
                return path
        return ""

    @functools.cached_property
    def rounded(self) -> float:
        """The error, beyond limits, of a window that repeats the same micro-batches `LONG` times; 0.0 without one.

        It is compared with one round of them. If the loss is a sum, the reference changes `LONG` times as much, and so
        should the window: its change is then divided by `LONG`, and decay is left out.
        """
        e = self.explanations
        if self.random or not e.rounds(mean(self.ends[0])):
            return 0.0
        names = [name for slot in e.sums for name in e.slots[slot]]
        limits = {name: SUMS * self.scales[name] + slack for name, slack in self.slack(self.even_rows[:1])[0].items()}

        def beyond(a: Any, b: Any) -> Any:
            return max(
                (largest(np.maximum(np.abs(a[n] - b[n])[0] - limits[n], 0)) / self.scales[n] for n in names),
                default=0.0,
            )

        if self.epsilon < 1e-6 and not beyond(self.ends[0], self.ones[0]):
            return 0.0
        many = self.even() * LONG
        (again,) = self.changes(self.one, [self.of(np.concatenate(many))])
        (found,) = self.changes(self.cut.longer(LONG), self.calls(many))
        if max(e.fit(mean(again), slot)[0] for slot in e.sums) > LONG**0.5:
            found = {name: _along(self.ends[0][name], leaf / LONG, e.drift[name]) for name, leaf in found.items()}
        return beyond(found, self.ends[0])

    def ordered(self) -> bool:
        """Whether the update of the whole batch changes with the order of its rows."""
        rows = np.concatenate(self.even())
        other = mean(*self.changes(self.one, [self.of(np.random.default_rng(0).permutation(rows))]))
        first, e = mean(self.ones[0]), self.explanations
        return min(e.distance(other, first, slot) for slot in e.slots) > e.loose

    def jumps(self) -> str:
        """Says that rounding alone moves the whole batch's update so far; or ""."""
        first, rows, e = mean(self.ones[0]), self.even_rows[0], self.explanations

        def nudge(number: int) -> float:
            (other,) = self.changes(self.one, [nudged(self.of(rows), number)])
            return min(e.distance(mean(other), first, slot) for slot in e.slots)

        off = max(map(nudge, range(1, 5)))
        says = f"The whole batch's own update is off by {off:.2g} if its inputs are off by a few last digits."
        return says if off > e.loose else ""

    def repeats(self) -> bool:
        """Whether a window of equal micro-batches changes the carry as one of them alone does."""
        parts = [self.even()[0]] * self.cut.every
        e, found = self.explanations, mean(*self.changes(self.cut, self.calls(parts)))
        return all(e.distance(found, e.parts[0], slot) < e.loose for slot in e.slots)

    @functools.cached_property
    def keys_vary(self) -> float:
        """How much a mean over k equal micro-batches varies with the key: below 1 if each has a key of its own.

        Its variance is then 1/k of a single micro-batch's; with one key for all, it is the same. A sum is first divided
        by its size, which is that of the reference's change for k times the rows. Behind a clip the variance of a sound
        step falls by less: as the reference's does, unless its rows share their outcomes.
        """
        k, rows, times = self.cut.every, self.even()[0], self.more
        equal = [np.full_like(rows, rows[0]) if self.within_call else rows] * k
        changes = lambda steps, calls: self.changes(steps, calls, times=times)[0]
        one, whole = (changes(self.one, [self.of(rows)]) for rows in (equal[0], np.concatenate(equal)))
        cut = changes(self.cut, self.calls(equal))
        names = [name for slot in self.explanations.linear for name in self.slots[slot]]
        first, both = (np.concatenate([mean(c)[n].ravel() / self.scales[n] for n in names]) for c in (one, whole))
        size = k if abs(np.vdot(first, both)) > k**0.5 * np.vdot(first, first).real else 1
        before, after, apart = (sum(np.sum(np.var(c[n] / self.scales[n], 0)) for n in names) for c in (one, cut, whole))
        after, apart = after / size**2, apart / size**2
        sound = max(1 / k, apart / before) if apart < 0.95 * before else 1 / k
        return float(after / (before * sound**0.5))

    def draws_by_row(self) -> bool:
        """Whether more copies of one row change the update: with a draw for each row they do, with mixed rows not."""
        row = np.zeros(self.count, int)
        few, many = (mean(*self.changes(self.one, [self.of(rows)])) for rows in (row[: len(self.even()[0])], row))
        e = dataclasses.replace(self.explanations, whole=many)
        return max(e.fit(few, slot)[1] for slot in e.slots) > e.loose

    @functools.cached_property
    def errors(self) -> Errors:
        """The error and the limit of each leaf, in two even windows."""
        return self.compared(self.ends, self.even_rows, self.ones)

    def compared(self, found: list[Change], windows: Rows, whole: list[Change] | None = None) -> Errors:
        """Each leaf's relative error and limit, at its worst entry.

        In the mean over keys an entry may be off by six standard errors, too.
        """
        errors: Errors = {}
        whole = whole or self.changes(self.one, *([self.of(rows)] for rows in windows))
        slacks = self.slack(windows)
        for name in self.judged:
            for one, cut, slack in zip(whole, found, slacks, strict=False):
                with np.errstate(all="ignore"):
                    spread = 6 * np.std(cut[name] - one[name], 0) / math.sqrt(len(one[name])) if self.random else 0.0
                    off = np.nan_to_num(np.abs(np.mean(cut[name] - one[name], 0)), nan=np.inf) / self.scales[name]
                off = np.where(self.rounding_alone(name, one, cut, slack), 0, off)
                limit = np.nan_to_num(self.rtol + (slack[name] + spread) / self.scales[name])
                worst = np.unravel_index(np.argmax(off / limit), off.shape)
                pair = (float(off[worst]), float(limit[worst]))
                errors[name] = max(errors.get(name, pair), pair, key=badness)
        return errors

    def rounding_alone(self, name: str, whole: Change, cut: Change, slack: Change) -> np.ndarray:
        """A mask of a parameter's entries whose gradient is only rounding of the terms that it adds.

        Adam moves them all the same, as the bias of keys in attention: they are judged by their moments.
        """
        same = lambda leaf: leaf.param == name and leaf.start.shape == slack[name].shape
        moments = [n for n in self.judged if same(self.leaves[n]) and (np.any(whole[n]) or np.any(cut[n]))]
        rounds = [np.all(np.abs(whole[n]) <= slack[n], 0) for n in moments]
        return np.all(rounds, 0) if rounds else np.zeros(slack[name].shape, bool)

    def slack(self, windows: Rows) -> list[Change]:
        """How far rounding moves each entry in the reference, window by window.

        Inputs and parameters are nudged by a few last digits, and rows come in other orders: an entry may be off by
        ten times the largest difference, and by four roundings of its size.
        """

        def run(number: int) -> list[Change]:
            random = np.random.default_rng(number)
            orders = [rows if self.random or not number else random.permutation(rows) for rows in windows]
            lead = self.lead(self.one)
            nudges = [[nudged(self.of(rows), number)] for rows in orders]
            params = {leaf.one for leaf in self.params.values()}
            off = functools.partial(nudged_at, paths=params, number=number)
            start, *seen = self.one.run(*lead, *nudges, draw=1 if self.random else None, start=off)
            change = lambda later: {n: later[leaf.one] - start[leaf.one] for n, leaf in self.leaves.items()}
            return list(map(change, seen[len(lead) :]))

        plain, *others = map(run, range(5))
        slacks: list[Change] = [{} for _ in windows]
        for at, slack in enumerate(slacks):
            for name, leaf in self.leaves.items():
                off = np.abs(np.stack([other[at][name] for other in others]) - plain[at][name])
                size = np.abs(leaf.start) + np.abs(plain[at][name])
                slack[name] = 10 * np.max(off, 0) + 3 * np.sqrt(np.mean(off**2)) + 4 * leaf.epsilon * size
        return slacks


def _along(goal: np.ndarray, found: np.ndarray, drift: np.ndarray) -> np.ndarray:
    """The observed change, moved along the drift as near to a goal as possible."""
    return found + drift * np.sum((goal - found) * drift) / max(float(np.sum(drift * drift)), 1e-300)
