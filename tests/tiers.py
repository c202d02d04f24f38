"""Which cases the README's command leaves to the sweep: of a test that has many, each run has those of each kind."""

import pytest


def sweep(cases, but=()):
    """Returns the cases of a test, all marked `sweep` but for some: these find faults of each kind in every run.

    What is marked already keeps its marks. `but` must be among the cases: one that was renamed is not lost.
    """
    cases = list(cases)
    values = [value_of(case) for case in cases]
    assert all(kept in values for kept in but), f"no such cases: {[kept for kept in but if kept not in values]}"
    return [case if value in but else marked(case) for case, value in zip(cases, values, strict=True)]


def value_of(case):
    """Returns its one value, or a tuple of several."""
    if not hasattr(case, "marks"):
        return case
    return case.values[0] if len(case.values) == 1 else tuple(case.values)


def marked(case):
    """Returns the case, in the sweep."""
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.sweep], id=case.id)
    return pytest.param(*(case if type(case) is tuple else [case]), marks=pytest.mark.sweep)


def one_of_each(cases):
    """Returns the fewest cases that a greedy search finds in which each value stands, for `but`."""
    wanted, taken = {part for case in cases for part in enumerate(map(str, case))}, []
    while wanted:
        taken.append(max(cases, key=lambda case: len(wanted.intersection(enumerate(map(str, case))))))
        wanted -= set(enumerate(map(str, taken[-1])))
    return taken
