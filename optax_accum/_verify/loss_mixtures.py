"""Owns mixed batches: with one random key, is `loss(batch)`, or `weight * loss`, a sum over rows? Runs no cut."""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_accum._arguments.rows import is_split
from optax_accum._core.types import Tree
from optax_accum._verify.loss import Loss, largest, scaled, take, wide

FACTORS = np.array([1.0, 0.7], np.float32)  # of the parameters: a second point, for those of few numbers
LEAST = 1e-3  # the smallest weight of a mixed batch

Mixtures = list[np.ndarray]  # [4, entries]: other rows in none, some, the other and all places; one for each design


class Mixed(NamedTuple):
    """The loss and gradient of mixed batches at one key, so that places draw what they drew, for each term."""

    plain: list[Mixtures]
    weighted: list[Mixtures]  # times the weight of the batch


def mixed(loss: Loss, batch: Tree, count: int, scales: list[float]) -> Mixed:
    """Returns the loss and the gradient, in units of `scales`, of batches with other rows in some of their places."""
    designs = _orders(count)
    leaves = len(jax.tree.leaves(batch))
    return _run(loss, batch, scales, np.stack([designs] * leaves, axis=2))


def alone(loss: Loss, batch: Tree, count: int, scales: list[float]) -> dict[str, list[Mixtures]]:
    """Returns for each leaf, by its path, the same with other rows in that leaf; all others stay as they were."""
    designs, leaves = _orders(count), jax.tree.leaves_with_path(batch)
    stay = np.broadcast_to(np.arange(count), designs.shape)
    cut = [number for number, (_, leaf) in enumerate(leaves) if is_split(leaf)]
    orders = [np.stack([designs if n == number else stay for n in range(len(leaves))], axis=2) for number in cut]
    run = _run(loss, batch, scales, np.concatenate(orders)).plain  # one program for all leaves
    of = lambda place: [term[place * len(designs) : (place + 1) * len(designs)] for term in run]
    return {jax.tree_util.keystr(leaves[number][0]): of(place) for place, number in enumerate(cut)}


def _run(loss: Loss, batch: Tree, scales: list[float], orders: np.ndarray) -> Mixed:
    """Runs batches of which each leaf has rows of its own: `orders` [designs, 4, leaves, n]."""
    shapes = loss.shapes(batch)
    names = list(shapes) if isinstance(shapes, dict) else [None]
    leaves, treedef = jax.tree.flatten(batch)

    def one(order: jax.Array, factor: jax.Array) -> tuple[list[Any], list[Any]]:
        args = loss.draw(0)
        rows = jax.tree.unflatten(treedef, [take(leaf, rows) for leaf, rows in zip(leaves, order, strict=True)])
        params = jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), loss.params)
        run = lambda name: jax.value_and_grad(functools.partial(loss.total, term=name))
        share = loss.share(params, rows, batch, *args)
        shares = [share[name] if isinstance(share, dict) else share for name in names]
        return [jax.tree.leaves(run(name)(params, rows, *args)) for name in names], shares

    each = np.repeat(orders.reshape(-1, *orders.shape[2:]), len(FACTORS), 0)
    factors = np.tile(FACTORS, len(each) // len(FACTORS))
    terms, shares = jax.jit(lambda *rows: jax.lax.map(lambda row: one(*row), rows))(each, factors)

    of = lambda leaves, share: list((scaled(list(map(wide, leaves)), scales) * share).reshape(len(orders), 4, -1))
    return Mixed(
        plain=[of(leaves, 1.0) for leaves in terms],
        weighted=[of(leaves, wide(share)[:, None]) for leaves, share in zip(terms, shares, strict=True)],
    )


def defect(terms: list[Mixtures]) -> float:
    """Returns by how much the changes of two sets of rows do not add up."""
    return max((largest(_missing(mixture)) / max(1, largest(mixture)) for mixture in _finite(terms)), default=0.0)


def reweighting(terms: list[Mixtures], limit: float) -> float | None:
    """Returns what a mixed batch counts, the batch counting 1, if some weights make all changes add up."""
    factors = [_reweighted(mixture, limit) for mixture in _finite(terms)]
    if not all(factors):
        return None
    return max((factor for factor in factors if factor), key=lambda factor: abs(math.log(factor)), default=1.0)


def couples(terms: list[Mixtures], limit: float) -> bool:
    """Whether no positive weights whatever make the changes of some mixture add up."""
    return any(_missed(mixture) > limit or _reweighted(mixture, limit) == 0 for mixture in _finite(terms))


def _finite(terms: list[Mixtures]) -> list[np.ndarray]:
    return [mixture for term in terms for mixture in term if np.all(np.isfinite(mixture))]


def _orders(count: int) -> np.ndarray:
    """Returns for each design the rows in no, some, the other and all places of others [designs, 4, n]."""
    random, rows, designs = np.random.default_rng(0), np.arange(count), list[list[np.ndarray]]()
    for _ in range(3):
        others, some = (rows + random.integers(1, count, count)) % count, random.permutation(count) < count // 2
        designs.append([rows, np.where(some, others, rows), np.where(some, rows, others), others])
    return np.array(designs)


def _missing(mixture: np.ndarray) -> np.ndarray:
    none, some, others, every = mixture
    return some + others - none - every


def _sides(mixture: np.ndarray) -> np.ndarray:
    _, some, others, every = mixture
    return np.stack([every - some, every - others], axis=1)


def _missed(mixture: np.ndarray) -> float:
    """Returns by how much the changes do not add up with the best of weights."""
    sides, missing = _sides(mixture), _missing(mixture)
    more = np.linalg.lstsq(sides, missing, rcond=None)[0]
    return largest(sides @ more - missing) / max(1, largest(mixture))


def _reweighted(mixture: np.ndarray, limit: float) -> float | None:
    """Returns the weight of a mixed batch, that of the batch being 1, if weights make the changes add up; or else None.

    With weights 1, a, b and a + b - 1, (a + b - 1) every + none = a some + b others, which is linear in a and b. It is
    0 if one of the weights would be so, or nearly, or less.
    """
    if _missed(mixture) > limit:
        return None
    more, _, _, spread = np.linalg.lstsq(_sides(mixture), _missing(mixture), rcond=None)
    if spread[-1] <= 1e-3 * spread[0]:  # a and b cannot be told apart: some weights would explain this mixture
        return 1.0 if largest(_missing(mixture)) <= limit * max(1, largest(mixture)) else None
    weights = [*(1 + more), 1 + sum(more)]
    return float(max(weights, key=lambda weight: abs(weight - 1))) if min(weights) > LEAST else 0.0
