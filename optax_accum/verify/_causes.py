"""Why the runs of a step differ: the faults of the table, asked in its order."""

import dataclasses

import numpy as np

from optax_accum.verify import _windows as windows
from optax_accum.verify._errors import StepErrors
from optax_accum.verify._explanations import Change
from optax_accum.verify._faults import FAULTS
from optax_accum.verify._probes import Off, Other, window_of
from optax_accum.verify._report import Cause, Errors, found, within
from optax_accum.verify._runs import Rows, mean
from optax_accum.verify._second import Second, explained_second
from optax_accum.verify._shares import Shares, compare_places
from optax_accum.verify._windows import WindowView


def causes_of_moves(runs: StepErrors) -> list[Cause]:
    """The causes of parameters that move at the wrong calls; the first alone if they never move: the rest follows."""
    causes = found(FAULTS, "moves", runs)
    return list(causes) if runs.moved else [next(causes)]


def causes_of_a_window(runs: StepErrors) -> list[Cause]:
    """Why two even windows change the parameters otherwise than two whole batches; empty if they do not."""
    if within(runs.errors):
        return []
    first = runs.compared(runs.ends[:1], runs.even_rows[:1], runs.ones[:1])
    cause, where = (_explain_second(runs), "the second window") if within(first) else (_explain_first(runs), "a window")
    return [cause or _unexplained(runs, runs.errors, where)]


def cause_of_another(runs: StepErrors, parts: Rows, *, last: bool = False) -> tuple[Errors, Cause | None]:
    """The errors of a window of other micro-batches, and the cause if it is wrong."""
    (change,) = runs.changes(runs.cut, runs.calls(parts), last=last)
    moved = runs.moves(change)
    errors = runs.compared([change], [np.concatenate(parts)])
    if moved and within(errors):
        return errors, None
    window = window_of(runs, runs.explained(parts), change, runs.explanations.linear)
    other = Other(runs, parts, last, moved, window)
    cause = next(found(FAULTS, "other", other), None) or _explained(window)
    cause = cause or _dealt(runs, parts, change) or (None if last else _by_pairs(runs, parts))
    sizes = ", ".join(str(len(part) * runs.group_size) for part in parts)
    return errors, cause or _unexplained(runs, errors, f"a window of micro-batches of {sizes} rows")


def _explain_first(runs: StepErrors) -> Cause | None:
    window = window_of(runs, runs.explanations, runs.ends[0])
    window = dataclasses.replace(
        window, one_by_one=runs.one_by_one, averaged=lambda: runs.averaged, reversed=lambda: runs.reversed
    )
    return _explained(window) or _dealt(runs, runs.even(), runs.ends[0]) or _by_pairs(runs, runs.even())


def _explain_second(runs: StepErrors) -> Cause | None:
    later = lambda ends: runs.rooted({name: mean(ends[1])[name] - mean(ends[0])[name] for name in ends[0]})
    changes_of = lambda *windows: runs.changes(runs.one, *([runs.of(rows)] for rows in windows))
    first, rows = runs.even_rows
    at_first = changes_of(rows)

    def alone() -> bool:
        calls = [runs.of(rows)], runs.calls(runs.even(1))
        one, cut = map(runs.from_later, (runs.one, runs.cut), calls)
        return within(runs.compared([cut], [rows], [one]))

    parts = lambda: [later(changes_of(first, part)) for part in runs.even(1)]
    changes = later(runs.ends), runs.rooted(mean(runs.ones[0])), later(runs.ones), runs.rooted(mean(*at_first))
    return _cause(explained_second(Second(runs.explanations, *changes, alone, parts)))


def _explained(window: WindowView) -> Cause | None:
    return _cause(windows.explained(window))


def _cause(said: windows.Said | None) -> Cause | None:
    return Cause(next(fault for fault in FAULTS if fault.name == said[0]), said[1]) if said else None


def _by_pairs(runs: StepErrors, parts: Rows) -> Cause | None:
    """Explains a window by others, in which one micro-batch stands among copies of another, at each place in turn.

    Where a clip by value leaves few entries free in all micro-batches of a window, more are free in two of them.
    """
    pairs = [] if runs.random or runs.few else [(parts[0], other) for other in parts[1:]]
    return next(filter(None, (_cause(_explain_pair(runs, *pair)) for pair in pairs)), None)


def _explain_pair(runs: StepErrors, copied: np.ndarray, one: np.ndarray) -> windows.Said | None:
    k = runs.cut.every
    e = runs.explained([np.concatenate([copied] * (k - 1)), one])

    def shares(place: int) -> Shares | None:
        parts = [*[copied] * place, one, *[copied] * (k - 1 - place)]
        change = runs.rooted(mean(*runs.changes(runs.cut, runs.calls(parts))))
        seen, (found,) = e.unclipped(change) or (e, [change])
        for slot in seen.linear:
            (came, off), (right, fits) = seen.combined(slot, of=found), seen.combined(slot)
            if max(off, fits) < seen.near:
                return Shares(came, right, e.counts, seen.near, max(off, fits))
        return None

    places = list(filter(None, map(shares, range(k))))
    return compare_places(places) if len(places) == k else None


def _dealt(runs: StepErrors, parts: Rows, change: Change) -> Cause | None:
    """Explains a step that deals out the rows of a batch to its micro-batches one by one, like cards."""
    if not runs.within_call:
        return None
    rows, k = np.concatenate(parts), len(parts)
    return _explained(window_of(runs, runs.explained([rows[number::k] for number in range(k)]), change))


def _unexplained(runs: StepErrors, errors: Errors, where: str) -> Cause:
    return next(found(FAULTS, "unexplained", Off(runs, errors, where)))
