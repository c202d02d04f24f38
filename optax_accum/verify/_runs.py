"""The windows of a step, whole and cut, and their changes."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import numpy as np

from optax_accum._shared.arrays import Tree
from optax_accum.verify import _carries as carries
from optax_accum.verify import _params as step_params
from optax_accum.verify._calls import StepRunner, as_is, put_back
from optax_accum.verify._carries import Numbers, largest
from optax_accum.verify._explanations import MORE, NEAR, ROOT, Change, Explanations
from optax_accum.verify._params import Find, Leaf

Rows = list[np.ndarray]  # the rows of each micro-batch of a window
FEW_DRAWS = 16  # keys over which a random step is averaged at first
DRAWS = 64  # and where these do not decide


@dataclasses.dataclass(frozen=True)
class StepRuns:
    """A step for the whole batch and one for micro-batches, and the changes of their windows."""

    one: StepRunner
    cut: StepRunner
    batch: Tree  # of NumPy arrays, and keys
    count: int  # rows, or groups of them
    group_size: int
    within_call: bool
    given_rtol: float | None
    finds: tuple[Find, Find]  # a user's function that finds the parameters, for the carry of each
    draws: int = DRAWS  # keys over which a random step is averaged

    def even(self, number: int = 0) -> Rows:
        """The rows of a window of equal micro-batches; the next window groups others together."""
        k = self.cut.every
        return np.split(np.roll(np.arange(self.count), -number)[: self.count // k * k], k)

    def of(self, rows: np.ndarray) -> Tree:
        """Rows of the batch; where a row is a group, all rows of the group."""
        rows = (rows[:, None] * self.group_size + np.arange(self.group_size)[None]).reshape(-1)
        return jax.tree.map(lambda leaf: leaf[rows] if np.ndim(leaf) else leaf, self.batch)

    def calls(self, parts: Rows) -> list[Tree]:
        """The arguments of the step in a window: the whole batch if it cuts within the call, else each micro-batch."""
        return [self.of(np.concatenate(parts))] if self.within_call else list(map(self.of, parts))

    def changes(
        self, steps: StepRunner, *windows: list[Tree], times: int = 1, last: bool = False, back: bool = False
    ) -> list[Change]:
        """The changes from the start to each window's end: of each leaf [draws, ...], or `times` as many draws.

        With `back`, parameters are put back after each window: their change is that of this window alone.
        """
        numbers = range(1, times * self.draws + 1) if self.random else [None]
        windows = (*self.lead(steps), *windows)
        params = [leaf.one if steps is self.one else leaf.cut for leaf in self.params.values()] if back else []
        runs = [steps.run(*windows, last=last, draw=draw, back=params) for draw in numbers]
        paths = {name: leaf.one if steps is self.one else leaf.cut for name, leaf in self.leaves.items()}
        with np.errstate(all="ignore"):

            def change(at: Any) -> Any:
                return {n: np.stack([run[at][path] - run[0][path] for run in runs]) for n, path in paths.items()}

            return [change(at) for at in range(1, len(windows) + 1)][len(self.lead(steps)) :]

    def lead(self, steps: StepRunner) -> list[list[Tree]]:
        """A window before all others, where the first moves nothing, at a rate that grows from 0; else none.

        Its micro-batches are equal, so that no weight, clip or coupling of theirs can be wrong in it.
        """
        if not self.leads:
            return []
        parts = [self.even()[0]] * self.cut.every
        if steps is self.one:
            return [[self.of(np.concatenate(parts))]]
        return [self.calls(parts * (steps.every // len(parts)))]

    @functools.cached_property
    def epsilon(self) -> float:
        """The machine epsilon of the narrowest float in the reference."""
        return self.one.rounding(self.batch)

    @property
    def rtol(self) -> float:
        """The largest relative error that counts as rounding."""
        return self.given_rtol or math.sqrt(self.epsilon)

    @functools.cached_property
    def leaves(self) -> dict[str, Leaf]:
        """The leaves to compare, by name."""
        return step_params.common(self.one.carry, self.cut.carry, *self.finds)

    @functools.cached_property
    def leads(self) -> bool:
        """Whether the reference's first update moves no parameter."""
        before, after = self.one.run([self.of(np.arange(self.count))])
        return all(np.array_equal(before[leaf.one], after[leaf.one]) for leaf in self.params.values())

    @functools.cached_property
    def random(self) -> bool:
        """Whether a random key in the carry or in the batch changes the update."""
        if not (carries.has_keys(self.one.carry) or carries.has_keys(self.batch)):
            return False
        windows = *self.lead(self.one), [self.of(np.arange(self.count))]
        runs = [self.one.run(*windows, draw=draw) for draw in range(1, 9)]
        change = lambda run, leaf: run[-1][leaf.one] - run[0][leaf.one]
        return any(
            not np.array_equal(change(runs[0], leaf), change(run, leaf))
            for leaf in self.leaves.values()
            for run in runs
        )

    @property
    def params(self) -> dict[str, Leaf]:
        return {name: leaf for name, leaf in self.leaves.items() if leaf.slot == "params"}

    @functools.cached_property
    def entries(self) -> int:
        """How many entries of the parameters whole batches change."""
        before, *_, after = self.seen_whole
        return sum(int(np.sum(after[leaf.one] != before[leaf.one])) for leaf in self.params.values())

    @property
    def few(self) -> bool:
        """Whether too few entries change to tell one combination of micro-batches from another."""
        return self.entries <= self.cut.every + MORE

    @property
    def more(self) -> int:
        """The factor by which few entries need more keys, to show how they vary."""
        return 4 if self.few else 1

    @functools.cached_property
    def seen_whole(self) -> list[Numbers]:
        """The carry of the reference before, between and after two whole batches."""
        return self.one.run(*([self.of(rows)] for rows in self.even_rows), draw=1 if self.random else None)

    @functools.cached_property
    def seen(self) -> list[Numbers]:
        """The carry at first and after each call of two windows."""
        lead, windows = self.lead(self.cut), (self.calls(self.even(number)) for number in (0, 1))
        return self.cut.run(*lead, *([call] for window in windows for call in window))[len(lead) :]

    @functools.cached_property
    def moved(self) -> list[int]:
        """The calls of two windows at which parameters changed."""
        pairs = enumerate(itertools.pairwise(self.seen), start=1)
        same = lambda a, b, leaf: np.array_equal(a[leaf.cut], b[leaf.cut], equal_nan=True)
        return [n for n, (a, b) in pairs if not all(same(a, b, leaf) for leaf in self.params.values())]

    @functools.cached_property
    def slots(self) -> dict[str, list[str]]:
        """The parameters, and their mirrors in the optimizer's state; no leaf that changes while held, as sums do."""
        first = self.seen[: 1 if self.within_call else self.cut.every]
        held = lambda leaf: all(np.array_equal(first[0][leaf.cut], later[leaf.cut]) for later in first)
        slots: dict[str, list[str]] = {}
        for name, leaf in self.leaves.items():
            if leaf.slot == "params" or held(leaf):
                slots.setdefault(leaf.slot, []).append(name)
        return slots

    @functools.cached_property
    def even_rows(self) -> Rows:
        """The rows of two windows."""
        return [np.concatenate(self.even(number)) for number in (0, 1)]

    @functools.cached_property
    def ones(self) -> list[Change]:
        """The changes after one and after two whole batches."""
        return self.changes(self.one, *([self.of(rows)] for rows in self.even_rows))

    @functools.cached_property
    def ends(self) -> list[Change]:
        """The changes after one and after two windows."""
        return self.changes(self.cut, *(self.calls(self.even(number)) for number in (0, 1)))

    @functools.cached_property
    def moves_first(self) -> bool:
        """Whether the first whole batch moves the parameters; if the rate grows from 0, only a later one does."""
        return any(np.any(self.ones[0][name]) for name in self.params)

    def moves(self, change: Change) -> bool:
        """Whether a window moved the parameters, or its rate was still 0."""
        return not self.moves_first or any(np.any(change[name]) for name in self.params)

    @functools.cached_property
    def one_by_one(self) -> Change:
        """The reference's change by an update with each micro-batch, one after the other."""
        return mean(*self.changes(self.one, list(map(self.of, self.even()))))

    @functools.cached_property
    def averaged(self) -> Change:
        """The mean of the reference's changes by each micro-batch: parameters are put back, its state goes on.

        Where parameters cannot be put back, the change by all, one after the other.
        """
        if not self.one.puts_back:
            return self.one_by_one
        each = [
            mean(change) for change in self.changes(self.one, *([self.of(rows)] for rows in self.even()), back=True)
        ]
        return Explanations.sum(each, 1 / len(each))

    def from_later(self, steps: StepRunner, calls: list[Tree]) -> Change:
        """The change by a first window that begins at the parameters after one, where these can be put there."""
        change, first = mean(self.ones[0]), steps is self.one
        paths = {name: leaf.one if first else leaf.cut for name, leaf in self.leaves.items()}
        later = {paths[name]: leaf.start + change[name] for name, leaf in self.params.items()}
        start = functools.partial(put_back, numbers=later) if steps.puts_back else as_is
        before, after = steps.run(calls, draw=1 if self.random else None, start=start)
        return {name: (after[path] - before[path])[None] for name, path in paths.items()}

    @functools.cached_property
    def reversed(self) -> Change:
        """The change by the micro-batches of a window in the opposite order."""
        return self.rooted(mean(*self.changes(self.cut, self.calls(self.even()[::-1]))))

    def rooted(self, change: Change) -> Change:
        """Adds the roots of the parameters' mirrors to a change, with the gradient's sign: minus the parameter's."""
        mirrors = {} if self.random else {name: leaf for name, leaf in self.leaves.items() if leaf.slot != "params"}
        alike = lambda name, leaf: leaf.param and change[leaf.param].shape == change[name].shape
        sign = lambda name, leaf: -np.sign(change[leaf.param]) if alike(name, leaf) else 1
        roots = {ROOT + n: sign(n, leaf) * np.sqrt(np.abs(change[n])) for n, leaf in mirrors.items()}
        return change | roots

    @functools.cached_property
    def scales(self) -> dict[str, float]:
        """The size of each leaf's change, at least 1 % of the largest in its slot."""
        sizes = {name: max(largest(mean(change)[name]) for change in self.ones) for name in self.leaves}
        most = lambda slot: max(sizes[name] for name, leaf in self.leaves.items() if leaf.slot == slot)
        return {name: max(sizes[name], 0.01 * most(leaf.slot)) or 1.0 for name, leaf in self.leaves.items()}

    @functools.cached_property
    def explanations(self) -> Explanations:
        """The changes that the micro-batches of an even window would make, each alone."""
        return self.explained(self.even())

    def explained(self, parts: Rows) -> Explanations:
        """The changes that these micro-batches would make, together and each alone."""
        alone = lambda rows: self.rooted(mean(*self.changes(self.one, [self.of(rows)], times=2 if self.few else 1)))
        drift = {name: leaf.drift for name, leaf in self.leaves.items()}
        drift |= {ROOT + name: np.zeros_like(leaf.drift) for name, leaf in self.leaves.items()}
        scales = self.scales | {ROOT + name: scale**0.5 for name, scale in self.scales.items()}
        whole, each = alone(np.concatenate(parts)), list(map(alone, parts))
        between = lambda: [alone(np.concatenate(parts[:number])) for number in range(2, len(parts))]
        loose, fine = (max(near, self.rtol) for near in ((0.25, 0.25) if self.random else (NEAR, 0.0)))
        unions = lambda: [each[0], *between(), whole]
        return Explanations(self.slots, scales, drift, whole, each, unions, self.few, loose, fine, self._counts(parts))

    def _counts(self, parts: Rows) -> list[list[float]]:
        """What losses divide by, for each micro-batch: its rows, sums of masks, and numbers of entries that count."""
        leaves = zip(*(jax.tree.leaves(self.of(rows)) for rows in parts), strict=True)
        counts = [[float(len(rows)) for rows in parts]]
        for leaf in leaves:
            if all(isinstance(each, np.ndarray) and each.dtype.kind in "biuf" for each in leaf):  # keys are not
                is_mask = all(np.all(each >= 0) for each in leaf)
                counts += [[float(np.sum(each)) for each in leaf]] if is_mask else []
                counts += [[float(np.sum(each > 0)) for each in leaf], [float(np.sum(each >= 0)) for each in leaf]]
        return counts

    def settle(self) -> None:
        """Finds out for both steps whether they can be run again."""
        parts = self.even()
        self.one.settle([self.of(np.concatenate(parts))])
        self.cut.settle(self.calls(parts))


def mean(change: Change) -> Change:
    """The mean over draws."""
    return {name: np.mean(leaf, 0) for name, leaf in change.items()}
