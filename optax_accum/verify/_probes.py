"""Probes, one for each fault that runs of its own reveal. Each returns its evidence, or an empty string."""

import dataclasses
from typing import NamedTuple

import numpy as np

from optax_accum.verify import _carries as carries
from optax_accum.verify._calls import spoilt
from optax_accum.verify._carries import Numbers, Path
from optax_accum.verify._errors import LONG, StepErrors
from optax_accum.verify._explanations import Change, Explanations
from optax_accum.verify._report import Errors, badness
from optax_accum.verify._runs import Rows, mean
from optax_accum.verify._windows import WindowView, one_after_another

BLIND = 0.1  # the error that must be seen


def window_of(runs: StepErrors, e: Explanations, found: Change, linear: list[str] | None = None) -> WindowView:
    """A window's change, with the questions about it that need runs."""
    linear = e.linear if linear is None else linear
    return WindowView(e, runs.rooted(mean(found)), linear, lambda: normalised(runs), lambda: rounded(runs), runs.leads)


# At which calls the parameters move.


def stays(runs: StepErrors) -> str:
    """The parameters never move."""
    k = runs.cut.every
    says = f"Two windows of {k} micro-batches changed no parameter; two updates with the whole batch did."
    return "" if runs.moved or _cancels(runs) else says


def ends_elsewhere(runs: StepErrors) -> str:
    """The parameters move, and not when the window ends."""
    return "" if not runs.moved or _cancels(runs) else _elsewhere(runs)


def goes_on_counting(runs: StepErrors) -> str:
    """The first window closes in time, then each micro-step does, or none."""
    k = runs.cut.every
    then = {(k,): "none", (*range(k, 2 * k + 1),): "each"}.get(tuple(runs.moved), "")
    finite = all(np.all(np.isfinite(runs.seen[-1][leaf.cut])) for leaf in runs.params.values())
    if runs.within_call or not then or not runs.moves_first or not finite:
        return ""
    return f"The first window closes at micro-step {k}; then {then} of the micro-steps makes an update."


def _elsewhere(runs: StepErrors) -> str:
    k = runs.cut.every
    if runs.within_call or k in runs.moved or not runs.moves_first:
        return ""
    return f"A window of {k} is to move the parameters at micro-step {k}; they moved at {runs.moved} of {2 * k}."


def _cancels(runs: StepErrors, length: int = 0, *, last: bool = False) -> bool:
    """Whether a window of equal micro-batches closes: where entries are few, updates of others may cancel."""
    calls = runs.calls([runs.even()[0]] * (length or runs.cut.every))
    return runs.few and any(np.any(runs.changes(runs.cut, calls, last=last)[0][name]) for name in runs.params)


def counts(runs: StepErrors) -> str:
    """A counter of Optax's transformations, named `count`, goes up by more than one in a window."""
    both = runs.seen_whole, runs.seen
    for path, other in carries.aligned(*(carries.counters(steps.carry) for steps in (runs.one, runs.cut))).items():
        once, often = (int(run[-1][at] - run[0][at]) for run, at in zip(both, (path, other), strict=True))
        if 0 < once < often:
            return f"{'/'.join(other)} counted {often} in two windows, where it is to count {once}."
    return ""


def _early(runs: StepErrors) -> list[int]:
    """The micro-steps that only accumulate, yet move the parameters, where nothing else is wrong."""
    early = [] if runs.within_call else [n for n in runs.moved if n % runs.cut.every]
    return [] if early and (_elsewhere(runs) or goes_on_counting(runs) or counts(runs)) else early


def updates(runs: StepErrors) -> str:
    """Each micro-step updates: its counters say so, or the window's change."""
    if not goes_on_counting(runs) and (says := counts(runs)):
        return says
    if not _early(runs):
        return ""
    w = dataclasses.replace(window_of(runs, runs.explanations, runs.ends[0]), one_by_one=runs.one_by_one)
    near = 0.0 if w.e.silent else min(w.e.near, w.e.far(w.found, w.e.whole, ["params"]))
    return next((says for _, distance, says in one_after_another(w) if distance < near), "")


def moves(runs: StepErrors) -> str:
    """The parameters move at micro-steps that hold, or an average of them does."""
    if early := _early(runs):
        says = f"The parameters moved at micro-steps {early} of {2 * runs.cut.every}."
        return "" if updates(runs) or runs.explanations.silent else says
    return _averages(runs)


def _averages(runs: StepErrors) -> str:
    """A mirror of the parameters moves at a held micro-step, whatever the micro-batch: it is no sum of gradients.

    An average that starts as the parameters moves from the second window on. Of a sum of clipped gradients, one leaf
    may move by the same whatever the micro-batch; of an average, all leaves do.
    """
    if runs.within_call or any(n % runs.cut.every for n in runs.moved):
        return ""
    k, (_, *others) = runs.cut.every, runs.calls(runs.even(1))
    start, here = runs.seen[k : k + 2]
    moved: dict[str, dict[str, Path]] = {}
    for name, leaf in runs.leaves.items():
        if not np.array_equal(start[leaf.cut], here[leaf.cut]):
            moved.setdefault(leaf.slot, {})[name] = leaf.cut
    for other in others if moved else ():
        there = runs.cut.run(*runs.lead(runs.cut), runs.calls(runs.even()), [other])[-1]
        same = lambda paths, there=there: all(np.array_equal(here[path], there[path]) for path in paths.values())
        moved = {slot: paths for slot, paths in moved.items() if same(paths)}
    names = sorted(name for paths in moved.values() for name in paths)
    says = f"{', '.join(names[:3])} moved at micro-step {k + 1}, which holds, by the same whatever the micro-batch."
    return says if names else ""


def moves_somehow(runs: StepErrors) -> str:
    """Parameters move at the wrong micro-step, where entries are too few to say more."""
    if (says := _elsewhere(runs)) and _cancels(runs):
        return says
    early = _early(runs)
    named = not early or updates(runs) or not runs.explanations.silent
    return "" if named else f"The parameters moved at micro-steps {early} of {2 * runs.cut.every}."


# What shows in other windows.


class Other(NamedTuple):
    """A window of other micro-batches: of unequal ones, or of fewer, ended by the last."""

    runs: StepErrors
    parts: Rows
    last: bool
    moved: bool  # whether it moved the parameters
    w: WindowView


def stays_open(o: Other, *, somehow: bool = False) -> str:
    """A window of other micro-batches changes no parameter; or `somehow`, where entries are too few to say more."""
    if o.moved or (o.last and not somehow) or _cancels(o.runs, len(o.parts), last=o.last) != somehow:
        return ""
    return f"A window of {len(o.parts)} micro-batches changed no parameter."


def dropped(o: Other) -> str:
    """A window that ends early changes no parameter."""
    if o.moved or not o.last or _cancels(o.runs, len(o.parts), last=True):
        return ""
    return f"A window that ends after {len(o.parts)} of {o.runs.cut.every} micro-batches changed no parameter."


def by_the_full_k(o: Other) -> str:
    """A window that ends early gives a part of its mean."""
    factors = [factor for w in (o.w, o.w.unclipped) if w and o.last for factor in w.multiples()]
    for factor in factors:
        if abs(factor * o.runs.cut.every / len(o.parts) - 1) < o.w.e.near:
            return f"A window that ends after {len(o.parts)} of {o.runs.cut.every} gives {factor:.3g} of its mean."
    return ""


def left_out(o: Other) -> str:
    """The update is that of only as many rows as the micro-batches divide."""
    runs, e, rows, k = o.runs, o.w.e, np.concatenate(o.parts), len(o.parts)
    kept = rows[: len(rows) // k * k]
    if not runs.within_call or len(kept) == len(rows):
        return ""
    (of_kept,) = runs.changes(runs.one, [runs.of(kept)])
    far = lambda other: e.far(o.w.found, other, o.w.linear or list(e.slots))
    if not far(runs.rooted(mean(of_kept))) < min(e.near, far(e.whole) / 4):
        return ""
    rest = (len(rows) - len(kept)) * runs.group_size
    return f"What came out of {len(rows) * runs.group_size} rows is the update without the last {rest}."


def shared_key(runs: StepErrors) -> str:
    """The mean over equal micro-batches varies with the key as if all drew the same."""
    if not runs.random or (vary := runs.keys_vary) <= 1:
        return ""
    k, keys = runs.cut.every, runs.draws * runs.more
    return f"Over {keys} keys {k} equal micro-batches vary {vary:.2f} times as much as keys of their own allow."


def rounded(runs: StepErrors) -> str:
    """A window that repeats the same micro-batches many times changes something else than one round of them."""
    k, says = runs.cut.every, "micro-batches {} times over give another mean than once: it is off by"
    return f"The same {k} {says.format(LONG)} {runs.rounded:.1e}." if runs.rounded else ""


def normalised(runs: StepErrors) -> str:
    """A leaf of the batch, moved by a constant, changes nothing in the reference; moved row by row, it does."""
    says = "of the batch is normalised over its rows: moved by a constant, it changes nothing."
    return f"The leaf {runs.normalised} {says}" if runs.normalised else ""


def poison(runs: StepErrors) -> str:
    """After a NaN whole batches go on training, and windows do not."""
    parts, at = runs.even(), runs.cut.every // 2
    calls, whole = runs.calls(parts), runs.of(np.concatenate(parts))
    size = len(parts[at]) * runs.group_size
    bad = spoilt(whole, slice(at * size, (at + 1) * size))
    first = [bad] if runs.within_call else [*calls[:at], spoilt(calls[at], slice(None)), *calls[at + 1 :]]
    one, cut = runs.one.run([bad], [whole, whole]), runs.cut.run(first, [*calls, *calls])

    def trains(seen: list[Numbers], paths: list[Path]) -> bool:
        finite = all(np.all(np.isfinite(seen[-1][path])) for path in paths)
        return finite and any(not np.array_equal(seen[-1][path], seen[1][path]) for path in paths)

    params = runs.params.values()
    if trains(cut, [leaf.cut for leaf in params]) or not trains(one, [leaf.one for leaf in params]):
        return ""
    return "After a micro-batch of NaN two clean windows train nothing, or make NaN. Whole batches do train."


# What no probe explains.


class Off(NamedTuple):
    """Errors beyond their limits, and where they were seen."""

    runs: StepErrors
    errors: Errors
    where: str

    @property
    def says(self) -> str:
        """How far off the worst leaf is."""
        name, (error, _) = max(self.errors.items(), key=lambda item: badness(item[1]))
        if not np.isfinite(error):
            why = "Has a micro-batch no tokens? 0 / 0 is NaN: divide by max(tokens, 1)."
            return f"In {self.where} {name} is not finite, which the update of the whole batch is. {why}"
        off = [name for name, pair in self.errors.items() if badness(pair) > 1]
        alone = f" alone, of {len(self.errors)} leaves," if len(off) == 1 < len(self.errors) else ""
        return f"In {self.where} {name}{alone} is off by {error:.1e} of its change."


def unclear(off: Off) -> str:
    """A difference only in leaves that rounding moves by much, too."""
    beyond = [pair for pair in off.errors.values() if badness(pair) > 1]
    if not all(np.isfinite(error) and limit > BLIND + 2 * off.runs.rtol for error, limit in beyond):
        return ""
    return f"{off.says} Rounding alone may move it by {max(limit for _, limit in beyond):.2g}."


def unexplained(off: Off) -> str:
    """A difference that no fault explains."""
    return "" if off.runs.few else off.says


def unknown(off: Off) -> str:
    """A difference in too few numbers to tell its cause."""
    k = off.runs.cut.every
    return f"{off.says} Fewer numbers change than tell {k} micro-batches apart." if off.runs.few else ""


def blind(runs: StepErrors, errors: Errors) -> str:
    """No leaf is seen finely enough, or one is off by much, and only rounding allows for that."""
    most = BLIND + 2 * runs.rtol
    over = {name: pair for name, pair in errors.items() if pair[1] > most}
    if runs.random or not (len(over) == len(errors) or any(error > most for error, _ in over.values())):
        return ""
    name, (error, limit) = max(over.items(), key=lambda item: item[1])
    return f"{name} is off by {error:.2g} of its change, and rounding alone may move it by {limit:.2g}."


# What was not tried.


def uncompared(runs: StepErrors) -> list[str]:
    """Leaves that the reference changes and that are not compared with the windows: sums, statistics, metrics."""
    compared = {runs.leaves[name].one for names in runs.slots.values() for name in names}
    before, *_, after = runs.seen_whole
    changed = lambda path: path not in compared and not np.array_equal(before[path], after[path])
    leaves = carries.leaves_of(runs.one.carry)
    missed = [carries.named(path) for path, leaf in leaves if carries.is_inexact(leaf) and changed(path)]
    more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
    where = "in the carry, which changes and belongs to no parameter; if your updates depend on it, compare it yourself"
    return [f"{', '.join(missed[:3])}{more} {where}"] if missed else []


def asked(runs: StepErrors) -> list[str]:
    """A step that updates at each call may be one that splits the batch of a call itself."""
    if runs.within_call or runs.moved != list(range(1, 2 * runs.cut.every + 1)):
        return []
    return ["within_call=True, which a step needs that gets the whole batch in one call: this one moves at each call"]
