"""Owns the runs of a step that `verify_step` compares, whole and cut, and one probe for each cause. Checks no input."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._core.arithmetic import Tree
from optax_accum._core.roles import is_key
from optax_accum._tools import carries
from optax_accum._tools.carries import Leaf, Numbers
from optax_accum._tools.explanations import Change, Explanations
from optax_accum._tools.loss import largest
from optax_accum._tools.report import Cause, order
from optax_accum._tools.steps import Steps, nudged, spoilt
from optax_accum._within import splitting

Rows = list[np.ndarray]  # the rows of each micro-batch of a window
Errors = dict[str, tuple[float, float]]  # each leaf -> its relative error, and the largest allowed
DRAWS = 64  # keys over which a random step is averaged
LONG = 16  # a long window holds so many others
SUMS = 2**-16  # the error beyond which sums have lost something: 128 roundings of float32


@dataclasses.dataclass(frozen=True)
class StepProbes:
    """A step for the whole batch and one for micro-batches, and one probe for each cause."""

    one: Steps
    cut: Steps
    longer: Callable[[], Steps]
    batch: Tree
    count: int  # rows, or groups of them
    group_size: int
    within_call: bool
    epsilon: float  # of the narrowest float in the step
    rtol: float
    leaves: dict[str, Leaf]

    # One probe for each cause.

    def closing(self) -> list[Cause]:
        """The parameters never move, or not when the window ends."""
        k = self.cut.every
        if not self.moved:
            says = f"Two windows of {k} micro-batches changed no parameter; make_step(1) did on the whole batch."
            return [Cause("never closes", says)]
        if self.within_call or k in self.moved:
            return []
        says = f"A window of {k} is to move the parameters at micro-step {k}; they moved at {self.moved} of {2 * k}."
        return [Cause("never closes", says)]

    def counters(self) -> list[Cause]:
        """What transformations of Optax call `count` goes up by more than one in a window."""
        runs = [self.one.run(*([self.of(rows)] for rows in self.even_rows)), self.seen]
        for path, other in carries.aligned(*(carries.counters(steps.carry) for steps in (self.one, self.cut))).items():
            once, often = (int(run[-1][at] - run[0][at]) for run, at in zip(runs, (path, other), strict=True))
            if 0 < once < often:
                says = f"{'/'.join(other)} counted {often} in two windows, where it is to count {once}."
                return [Cause("optimizer at each micro-step", says)]
        return []

    def held(self) -> list[Cause]:
        """The parameters move at micro-steps that hold."""
        early = [] if self.within_call else [n for n in self.moved if n % self.cut.every]
        if not early or self.cut.every not in self.moved or self.counters():
            return []
        cause = self.explanations.cause(_mean(self.ends[0]), self.one_by_one)
        if cause and cause.kind == "optimizer at each micro-step":
            return [cause]
        return [Cause("moves while held", f"The parameters moved at micro-steps {early} of {2 * self.cut.every}.")]

    def window(self) -> list[Cause]:
        """Two even windows do not change what the whole batches do."""
        if within(self.errors):
            return []
        if within(self.compared(self.ends[:1], self.even_rows[:1], self.ones[:1])):
            return [self.explanations.second(*(list(map(_mean, runs)) for runs in (self.ends, self.ones))) or _unexplained(self.errors, "the second window")]
        cause = self.explanations.cause(_mean(self.ends[0]), self.one_by_one)
        if cause is None or cause.kind == "low-precision sum":
            return self.low_precision() or [_unexplained(self.errors, "a window")]
        return [cause]

    def other(self, parts: Rows, *, last: bool = False) -> tuple[Errors, list[Cause]]:
        """A window of other micro-batches: of unequal ones, or fewer, of which the last one ends it."""
        (found,) = self.changes(self.cut, self.calls(parts), last=last)
        if not any(np.any(found[name]) for name, leaf in self.leaves.items() if leaf.slot == "params"):
            says = f"A window that ends after {len(parts)} of {self.cut.every} micro-batches changed no parameter."
            return {}, [Cause("never closes", says)]
        errors = self.compared([found], [np.concatenate(parts)])
        if within(errors):
            return errors, []
        explanations = self.explained(parts)
        cause = explanations.cause(_mean(found), None, self.explanations.linear)
        for slot in self.explanations.linear:
            factor = explanations.factor(_mean(found), slot)
            if last and factor and abs(factor * self.cut.every / len(parts) - 1) < explanations.near:
                says = f"A window that ends after {len(parts)} of {self.cut.every} gives {factor:.3g} of its mean."
                cause = Cause("divided by the full k", says)
        sizes = ", ".join(str(len(part) * self.group_size) for part in parts)
        return errors, [cause or _unexplained(errors, f"a window of micro-batches of {sizes} rows")]

    def shared_key(self) -> list[Cause]:
        """A mean over k equal micro-batches varies with the key as one of them does, and not k times less."""
        if not self.random:
            return []
        k, rows = self.cut.every, self.even()[0]
        equal = [np.full_like(rows, rows[0]) if self.within_call else rows] * k
        (one,), (cut,) = self.changes(self.one, [self.of(equal[0])]), self.changes(self.cut, self.calls(equal))
        names = [name for slot in self.explanations.linear for name in self.explanations.slots[slot]]
        before, after = (sum(np.sum(np.var(c[n] / self.scales[n], 0)) for n in names) for c in (one, cut))
        if not after > before * k**-0.5:
            return []
        says = f"Over {DRAWS} keys {k} equal micro-batches vary {after / before:.2f} times as much as one of them."
        return [Cause("shared key", says)]

    def low_precision(self) -> list[Cause]:
        """A window of many micro-batches, the same ones again and again, does not change what one round of them does."""
        names = [name for slot in self.explanations.linear for name in self.explanations.slots[slot]]
        if self.random:
            return []
        limits = {name: SUMS * self.scales[name] + slack for name, slack in self.slack(self.even_rows[:1])[0].items()}
        beyond = lambda a, b: max(
            (largest(np.maximum(np.abs(a[n] - b[n])[0] - limits[n], 0)) / self.scales[n] for n in names), default=0.0
        )
        if self.epsilon < 1e-6 and not beyond(self.ends[0], self.ones[0]):
            return []
        k, many = self.cut.every, self.even() * LONG
        error = beyond(*self.changes(self.longer(), self.calls(many)), self.ends[0])
        says = f"{LONG * k} micro-batches, the same {k} again and again, give another mean than {k}: off by {error:.1e}."
        return [Cause("low-precision sum", says)] if error else []

    def poison(self) -> list[Cause]:
        """After a NaN whole batches go on training, and windows do not."""
        parts, at = self.even(), self.cut.every // 2
        calls, whole = self.calls(parts), self.of(np.concatenate(parts))
        size = len(parts[at]) * self.group_size
        bad = spoilt(whole, slice(at * size, (at + 1) * size))
        first = [bad] if self.within_call else [*calls[:at], spoilt(calls[at], slice(None)), *calls[at + 1 :]]
        one, cut = self.one.run([bad], [whole, whole]), self.cut.run(first, [*calls, *calls])
        params = [leaf for leaf in self.leaves.values() if leaf.slot == "params"]

        def trains(seen: list[Numbers], paths: list[carries.Path]) -> bool:
            finite = all(np.all(np.isfinite(seen[-1][path])) for path in paths)
            return finite and any(not np.array_equal(seen[-1][path], seen[1][path]) for path in paths)

        if trains(cut, [leaf.cut for leaf in params]) or not trains(one, [leaf.one for leaf in params]):
            return []
        says = "After one micro-batch of NaN, two clean windows do not train: the parameters are NaN, or stand still. Whole batches do."
        return [Cause("NaN poison", says)]

    # The windows, and what is seen of them.

    def even(self, number: int = 0) -> Rows:
        """The rows of a window of equal micro-batches; in the next window others stand together."""
        k = self.cut.every
        return np.split(np.roll(np.arange(self.count), -number)[: self.count // k * k], k)

    def of(self, rows: np.ndarray) -> Tree:
        """Returns rows of the batch; where a row is a group, all that are in it."""
        rows = (rows[:, None] * self.group_size + np.arange(self.group_size)[None]).reshape(-1)
        cut = lambda leaf: leaf[rows] if is_key(leaf) else jnp.asarray(np.asarray(leaf)[rows])
        return jax.tree.map(lambda leaf: cut(leaf) if splitting.is_split(leaf) else leaf, self.batch)

    def calls(self, parts: Rows) -> list[Tree]:
        """Returns what the step is called with in a window."""
        return [self.of(np.concatenate(parts))] if self.within_call else list(map(self.of, parts))

    def changes(self, steps: Steps, *windows: list[Tree], draws: int = DRAWS, last: bool = False) -> list[Change]:
        """Returns what was changed after each window: of each leaf [draws, ...]."""
        numbers = range(1, draws + 1) if self.random else [None]
        runs = [steps.run(*windows, last=last, draw=draw) for draw in numbers]
        paths = {name: leaf.one if steps is self.one else leaf.cut for name, leaf in self.leaves.items()}
        with np.errstate(all="ignore"):
            change = lambda at: {n: np.stack([run[at][path] - run[0][path] for run in runs]) for n, path in paths.items()}
            return [change(at) for at in range(1, len(windows) + 1)]

    @functools.cached_property
    def random(self) -> bool:
        """Whether the step changes with a random key that is in the carry or in the batch."""
        if not (carries.has_keys(self.one.carry) or carries.has_keys(self.batch)):
            return False
        runs = [self.one.run([self.of(np.arange(self.count))], draw=draw) for draw in range(1, 9)]
        change = lambda run, leaf: run[1][leaf.one] - run[0][leaf.one]
        return any(not np.array_equal(change(runs[0], leaf), change(run, leaf)) for leaf in self.leaves.values() for run in runs)

    @functools.cached_property
    def seen(self) -> list[Numbers]:
        """The carry in two windows, before and after each call."""
        return self.cut.run(*([call] for number in (0, 1) for call in self.calls(self.even(number))))

    @functools.cached_property
    def moved(self) -> list[int]:
        """The calls of two windows at which parameters changed."""
        params = [leaf.cut for leaf in self.leaves.values() if leaf.slot == "params"]
        pairs = enumerate(zip(self.seen, self.seen[1:], strict=False), start=1)
        return [n for n, (a, b) in pairs if any(not np.array_equal(a[path], b[path]) for path in params)]

    @functools.cached_property
    def slots(self) -> dict[str, list[str]]:
        """The parameters, and what mirrors them in the optimizer's state: not what changes while held, as sums do."""
        first = self.seen[: 1 if self.within_call else self.cut.every]
        held = lambda leaf: all(np.array_equal(first[0][leaf.cut], later[leaf.cut]) for later in first)
        found: dict[str, list[str]] = {}
        for name, leaf in self.leaves.items():
            if leaf.slot == "params" or held(leaf):
                found.setdefault(leaf.slot, []).append(name)
        return found

    @property
    def judged(self) -> list[str]:
        """The leaves in which whole and cut must agree; of means over keys those that are linear in the gradient."""
        return [name for slot in (self.explanations.linear if self.random else self.slots) for name in self.slots[slot]]

    @functools.cached_property
    def even_rows(self) -> Rows:
        """The rows of two windows."""
        return [np.concatenate(self.even(number)) for number in (0, 1)]

    @functools.cached_property
    def ones(self) -> list[Change]:
        """What two whole batches changed, one after the other."""
        return self.changes(self.one, *([self.of(rows)] for rows in self.even_rows))

    @functools.cached_property
    def ends(self) -> list[Change]:
        """What two windows changed, one after the other."""
        return self.changes(self.cut, *(self.calls(self.even(number)) for number in (0, 1)))

    @functools.cached_property
    def one_by_one(self) -> Change:
        """What the reference changes with each micro-batch, one after the other."""
        return _mean(*self.changes(self.one, list(map(self.of, self.even()))))

    @functools.cached_property
    def scales(self) -> dict[str, float]:
        """The size of each leaf's change: 1 % of the largest of its slot at least."""
        sizes = {name: max(largest(_mean(change)[name]) for change in self.ones) for name in self.leaves}
        most = lambda slot: max(sizes[name] for name, leaf in self.leaves.items() if leaf.slot == slot)
        return {name: max(sizes[name], 0.01 * most(leaf.slot)) or 1.0 for name, leaf in self.leaves.items()}

    @functools.cached_property
    def explanations(self) -> Explanations:
        """What the micro-batches of an even window would change, each alone."""
        return self.explained(self.even())

    def explained(self, parts: Rows) -> Explanations:
        """Returns what some micro-batches would change, together and each alone."""
        alone = lambda rows: _mean(*self.changes(self.one, [self.of(rows)], draws=DRAWS // 2))
        drift = {name: leaf.drift for name, leaf in self.leaves.items()}
        near = max(0.25 if self.random else 0.02, self.rtol)
        return Explanations(self.slots, self.scales, drift, alone(np.concatenate(parts)), list(map(alone, parts)), near)

    def settle(self) -> None:
        """Finds out for both steps whether they can be run again."""
        parts = self.even()
        self.one.settle([self.of(np.concatenate(parts))])
        self.cut.settle(self.calls(parts))

    def ordered(self) -> bool:
        """Whether the update of the whole batch changes with the order of its rows."""
        rows = np.concatenate(self.even())
        other = _mean(*self.changes(self.one, [self.of(np.random.default_rng(0).permutation(rows))]))
        first, e = _mean(self.ones[0]), self.explanations
        return min(e.distance(other, first, slot) for slot in e.slots) > e.near

    def repeats(self) -> bool:
        """Whether a window of equal micro-batches changes what one of them alone does."""
        parts = [self.even()[0]] * self.cut.every
        e, found = self.explanations, _mean(*self.changes(self.cut, self.calls(parts)))
        return all(e.distance(found, e.parts[0], slot) < e.near for slot in e.slots)

    # How nearly two changes agree.

    @functools.cached_property
    def errors(self) -> Errors:
        """The error and the limit of each leaf, in two even windows."""
        return self.compared(self.ends, self.even_rows, self.ones)

    def compared(self, found: list[Change], windows: Rows, whole: list[Change] | None = None) -> Errors:
        """Returns for each leaf its relative error and limit, where it is worst.

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
                limit = np.nan_to_num(self.rtol + (slack[name] + spread) / self.scales[name])
                worst = np.unravel_index(np.argmax(off / limit), off.shape)
                pair = (float(off[worst]), float(limit[worst]))
                errors[name] = max(errors.get(name, pair), pair, key=lambda pair: order(pair[0] / pair[1]))
        return errors

    def slack(self, windows: Rows) -> list[Change]:
        """Returns how far rounding moves each entry in the reference, window by window.

        Inputs are nudged by a few last digits, and rows come in other orders: an entry may be off by ten times that,
        and by four roundings of what it is.
        """

        def run(number: int) -> list[Change]:
            random = np.random.default_rng(number)
            orders = [rows if self.random or not number else random.permutation(rows) for rows in windows]
            seen = self.one.run(*([nudged(self.of(rows), number)] for rows in orders), draw=1 if self.random else None)
            return [{n: later[leaf.one] - seen[0][leaf.one] for n, leaf in self.leaves.items()} for later in seen[1:]]

        plain, *others = map(run, range(5))
        slacks: list[Change] = [{} for _ in windows]
        for at, slack in enumerate(slacks):
            for name, leaf in self.leaves.items():
                off = np.abs(np.stack([other[at][name] for other in others]) - plain[at][name])
                size = np.abs(leaf.start) + np.abs(plain[at][name])
                slack[name] = 10 * np.max(off, 0) + 3 * np.sqrt(np.mean(off**2)) + 4 * leaf.epsilon * size
        return slacks


def within(errors: Errors) -> bool:
    """Returns whether no error is beyond its limit."""
    return all(error <= limit for error, limit in errors.values())


def _unexplained(errors: Errors, where: str) -> Cause:
    name, (error, _) = max(errors.items(), key=lambda item: order(item[1][0] / item[1][1]))
    return Cause("another difference", f"In {where} {name} is off by {error:.1e} of its change.")


def _mean(change: Change) -> Change:
    return {name: np.mean(leaf, 0) for name, leaf in change.items()}
