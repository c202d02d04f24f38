"""Owns one probe for each fault of a loss: each returns its evidence, or "". Runs what `loss_runs` offers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._arguments.draws import hidden_draws
from optax_accum._core import equations
from optax_accum._core.leaves import by_path, is_key
from optax_accum._core.types import Tree
from optax_accum._verify import loss_mixtures as mixtures
from optax_accum._verify.loss import Loss, floats, moved, moved_apart, numbers_by_row, scaled, take, wide
from optax_accum._verify.loss_runs import LossRuns
from optax_accum._verify.report import DRAWS, within


def shared_key(runs: LossRuns) -> str:
    """The loss changes with a key that all micro-batches get."""
    roles = (runs.loss.rng_argnum, runs.loss.carry_argnum, *runs.shared)
    for number, arg in enumerate(runs.loss.args, start=2):
        if number not in roles and any(map(is_key, jax.tree.leaves(arg))) and _changes_with(runs, number):
            name = runs.loss.argnums[number - 2]
            return f"The loss changes with the key in argument {name!r}, of which all micro-batches get the same."
    return ""


def _changes_with(runs: LossRuns, number: int) -> bool:
    """Whether the loss changes with the keys in an argument: an outcome may be rare, so many are drawn."""
    loss = lambda n: runs.loss.total(runs.loss.params, runs.batch, *runs.loss.draw(n, (number,)))
    losses = jax.jit(lambda draws: jax.lax.map(loss, draws))
    return any(np.ptp(wide(losses(jnp.arange(draws)))) for draws in (DRAWS, 32 * DRAWS))


def hidden_key(runs: LossRuns) -> str:
    """Numbers for each row are drawn from a key that is no argument: fewer rows draw fewer of them."""
    draws = lambda batch: hidden_draws(runs.loss.total, runs.loss.params, batch, *runs.loss.args)
    less = -(-runs.count // runs.num_microbatches)
    all_rows, some = draws(runs.batch), draws(take(runs.batch, np.arange(less)))
    of_rows = [shape for shape, fewer in zip(all_rows, some, strict=False) if shape != fewer]
    if not of_rows:
        return ""
    shape = list(of_rows[0])
    return f"Numbers {shape} are drawn from a key that is no argument: every micro-batch draws what the first one does."


def low_precision(runs: LossRuns) -> str:
    """The default accumulator gives another gradient than the one asked for."""
    error = runs.change(runs.cut(), runs.cut(dtype=True), runs.sums_rtol) if runs.dtype else 0.0
    dtypes = " and ".join(sorted({str(jnp.dtype(dtype)) for dtype in jax.tree.leaves(runs.dtype)}))
    return f"Added in {dtypes}, the gradient is off by {error:.1e}; added in float32 it is not." if error else ""


def state(runs: LossRuns) -> str:
    """The gradient is another one when each micro-batch starts from the first carry."""
    error = runs.change(runs.cut(), runs.cut(threaded=True), runs.rtol) if runs.loss.carry_argnum is not None else 0.0
    says = "What earlier micro-batches leave in the carry changes the gradient of later ones"
    return f"{says}, by {error:.1e}." if error else ""


def nonlinear(runs: LossRuns) -> str:
    """A part of the loss does not have the same part of the gradient, because the user wrote the backward pass."""
    if not equations.has_rule(jax.make_jaxpr(runs.loss.total)(runs.loss.params, runs.batch, *runs.loss.args).jaxpr):
        return ""
    k = runs.num_microbatches
    part = runs.measure(jax.value_and_grad(lambda *args: runs.loss.total(*args) / k))
    errors = runs.differences([k * leaf for leaf in part(runs.batch)])
    wrong = [path for path, (error, limit) in errors.items() if error > limit]
    return f"The loss divided by {k} does not have the gradient divided by {k}, at {wrong[0]}." if wrong else ""


def not_rows(runs: LossRuns) -> str:
    """A leaf of the batch kept whole gives the gradient of the whole batch, and a loss that has others."""
    for path, loss, batch in runs.loss.holding(runs.batch):
        sizes = {2, *runs.rows_of_cuts}  # a loss that shifts rows takes 2 where their rest broadcasts
        if within(runs.as_sound) or any(loss.refusal(batch, n) for n in sizes) or not _depends(runs, loss, batch):
            continue
        cuts = (loss.accumulated(held=True, own_keys=True, **size) for size in runs.sizes)
        if all(within(runs.differences(runs.measure(cut)(batch))) for cut in cuts):
            return f"The leaf {path} of the batch is cut like rows. Kept whole, it gives the whole batch's gradient."
    return ""


def _depends(runs: LossRuns, loss: Loss, batch: Tree) -> bool:
    """Whether the loss changes with the rows of a batch."""
    pairs = np.stack([np.arange(runs.count), np.roll(np.arange(runs.count), 1)], axis=1)  # [n, 2]
    of = lambda rows: loss.total(loss.params, take(batch, rows), *loss.draw(0))
    losses = jax.jit(lambda pairs: jax.lax.map(of, pairs))(pairs)
    return bool(np.ptp(wide(losses)) > runs.rtol * runs.scales[0])


def coupled(runs: LossRuns) -> str:
    """One row changes another row's term, by more than a denominator."""
    if says := _normalised(runs):
        return says
    if _rows_added(runs):
        return ""
    weighed = runs.factor is not None and abs(runs.factor - 1) > 0.01
    if runs.factor is not None and not weighed:
        says = "All rows count the same, the whole is not the mean over its parts, and each row twice gives the same."
        return "" if runs.grows or _rows_averaged(runs) else says
    may_weigh = set() if weighed else _weights(runs.batch)  # what weighs rows together does so alone
    for path, terms in runs.alone.items():
        if path not in may_weigh and mixtures.couples(terms, runs.rtol):
            leaf = _leaf(path)
            says = f"Replacing some rows of the {leaf}, the others, and all of them gives changes that do not add up"
            return f"{says} (off by {mixtures.defect(terms):.1e}): one row's input changes another row's term."
    if weighed:
        return ""
    if all(mixtures.defect(terms) <= runs.rtol for terms in runs.alone.values()):
        return "Replacing rows of one leaf gives changes that add up, of several it does not: one row meets another."
    return ""


def _weights(batch: Tree) -> set[str]:
    """Returns the leaves that may weigh rows: of one number each, or all 0 or 1, and never below 0."""
    leaves = {path: wide(leaf) for path, leaf in by_path(batch, "") if not is_key(leaf)}
    flags = lambda leaf: bool(np.all((leaf == 0) | (leaf == 1)))
    return {path for path, leaf in leaves.items() if np.all(leaf >= 0) and (leaf.ndim < 3 or flags(leaf))}


def _normalised(runs: LossRuns) -> str:
    """A leaf of the batch, moved or stretched as a whole, changes nothing; moved apart, row by row, it does.

    What each row normalises, as LayerNorm does, or nobody reads, does not matter in either way. What weighs rows
    may be stretched, too: it has one sign.
    """
    run = runs.measure(jax.value_and_grad(runs.loss.total))
    of_gradients = lambda errors: {path: pair for path, pair in errors.items() if path != "loss"}  # that may cancel
    same = lambda batch: within(of_gradients(runs.differences(run(batch))))
    for path, leaf, put in floats(runs.batch):
        if not np.ptp(leaf):
            continue  # weights that are all the same may be moved, too
        constant = all(same(put(new)) for new in moved(leaf)) and not same(put(moved_apart(leaf)))
        signed, apart = np.min(leaf) < 0 < np.max(leaf), numbers_by_row(leaf)
        if constant or (signed and same(put(2 * leaf)) and not same(put(apart * leaf))):
            how = "moved by a constant" if constant else "doubled"
            return f"The {_leaf(path)} is normalised over its rows: {how}, it changes nothing."
    return ""


def _leaf(path: str) -> str:
    """Names a leaf of the batch, which may be its only one."""
    return f"leaf {path} of the batch" if path else "batch"


def total(runs: LossRuns) -> str:
    """The whole is its rows added up, and not their mean."""
    if _rows_added(runs):
        return "The whole is its rows added up, where their mean was needed."
    alike = runs.factor is not None and abs(runs.factor - 1) <= 0.01
    says = "All rows count the same, and the whole is not the mean over its parts."
    return says if alike and runs.loss.weight_fn is None and not _rows_averaged(runs) else ""


def _rows_added(runs: LossRuns) -> bool:
    return _of_rows(runs, np.sum, 0.3) and runs.grows


def _rows_averaged(runs: LossRuns) -> bool:
    return _of_rows(runs, np.mean, 0.3 if runs.keyed else 10 * runs.rtol)  # rows alone draw other numbers


def _of_rows(runs: LossRuns, reduced: Callable[..., np.ndarray], near: float) -> bool:
    """Whether the whole is what its rows alone give, added or averaged."""
    if runs.rows is None:
        return False
    whole, rows = (
        scaled([leaf[None] for leaf in leaves], runs.scales)[0]
        for leaves in (
            [np.mean(leaf, 0) for leaf in runs.whole],
            [reduced(np.mean(leaf, 1), 0) for leaf in runs.rows],
        )
    )
    return bool(np.linalg.norm(whole - rows) < near * np.linalg.norm(whole))


def weights(runs: LossRuns) -> str:
    """Some weight for each batch makes a sum over rows of the loss times the weight; or several do, one for a term."""
    if runs.factor is None:
        return (
            "Examples act on the loss one by one, but no weight per micro-batch explains it: several denominators, or "
            "weights of rows that the loss normalises, by their maximum, say."
        )
    if abs(runs.factor - 1) > 0.01:
        return (
            "The loss divides by a count of its rows or tokens, and micro-batches are not weighted by that count: when "
            f"some rows were replaced by others, it became {runs.factor:.2f} times as large."
        )
    return "All rows count the same in the loss, and micro-batches do not count by their rows."
