"""What a batch and a reference must be, so that a window can be compared with them."""

from typing import Any

import jax
import numpy as np

from optax_accum._shared import checks
from optax_accum._shared.arrays import Tree
from optax_accum.verify._errors import StepErrors
from optax_accum.verify._faults import NOT_TOLD, SHARED_KEY
from optax_accum.verify._report import Cause

LEAST = 3  # entries of the parameters that must change


def check_batch(batch: Tree, every: Any, group_size: Any) -> tuple[int, int]:
    """The length of the window and the number of rows, or groups; raises if nothing can be cut."""
    every = checks.as_count("every", every)
    if every < 2:
        raise ValueError(f"There must be a window to compare: every={every}. Pass 2 or more.")
    checks.as_count("group_size", group_size)
    rows, needed = _count_rows(batch), 2 * every * group_size
    if rows < needed:
        raise ValueError(
            f"verify_step needs {needed} rows or more, two{' groups' if group_size > 1 else ''} for each of every="
            f"{every} micro-batches: the batch has {rows}. Pass a batch of {needed}."
        )
    checks.check_groups("the batch has", rows, group_size)
    return every, rows // group_size


def _count_rows(batch: Tree) -> int:
    """The rows that all leaves with an axis have; scalars stay whole."""
    sizes = {jax.tree_util.keystr(path): len(leaf) for path, leaf in jax.tree.leaves_with_path(batch) if np.ndim(leaf)}
    if not sizes:
        raise ValueError("A batch must have a leaf with rows, and it holds scalars only. Pass an array of examples.")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"All leaves of a batch must have the same number of rows: {sizes}. Close over any other.")
    if not (rows := max(sizes.values())):
        raise ValueError(f"A batch must have rows: there are 0 in {', '.join(sizes)}. Pass some.")
    return rows


def check_reference(runs: StepErrors) -> Cause | None:
    """Raises for a reference that nothing can be compared with; the cause if it keeps a key to itself."""
    ones = runs.ones[-1]
    if not all(np.all(np.isfinite(change)) for change in ones.values()):
        raise ValueError("The whole batch must have a finite update to compare with. Look for the NaN.")
    if not any(np.any(ones[name]) for name in runs.params):
        raise ValueError(
            "The reference must move the parameters: two updates of make_step(1) with the whole batch did not. Return "
            "the new parameters from the step, in the carry: what a function under jax.jit changes in place is lost "
            "(for NNX modules take nnx.jit). Start from a learning rate and a gradient that are not 0."
        )
    if runs.entries < LEAST:
        raise ValueError(
            f"The batch must move {LEAST} numbers among the parameters, or more, to tell faults apart: it moves "
            f"{runs.entries}. Pass a wider model."
        )
    if runs.random and not runs.judged:
        raise ValueError(
            "Of a random step what is linear in the gradient is compared, in the mean over keys: nothing in this carry "
            "is. Make the step with optax.sgd, or with an optimizer that keeps a first moment; if its examples are "
            "coupled, as by BatchNorm, without what is random."
        )
    return _cause_of_order(runs) if not runs.random and runs.ordered() else None


def _cause_of_order(runs: StepErrors) -> Cause:
    """Why the update of the whole batch changes with the order of its rows; raises if that is no fault of windows."""
    if says := runs.jumps():
        return Cause(NOT_TOLD, says)
    drawn, rule = runs.draws_by_row(), "The update of the whole batch changes with the order of its rows"
    if drawn and runs.one.may_hide_a_key(runs.of(np.arange(runs.count))) and runs.repeats():
        says = "The update changes with the order of rows, as dropout makes it; equal micro-batches give the same."
        return Cause(SHARED_KEY, says)
    why = (
        ". If that is by a random key, let make_step put the key into the carry (in PyTorch torch.default_generator), "
        "so that each run can draw anew."
        if drawn
        else ", and nothing is drawn: equal rows change nothing. Mix rows, as mixup by x[::-1] does, before the batch "
        "is split, or leave mixing out of this check."
    )
    raise ValueError(
        f"{rule}{why} On several devices make_step(1) may average devices as equals: run it on one, or pass optimizer= "
        "and loss= as the reference. If rows belong together, or are mixed with their neighbours, pass group_size."
    )
