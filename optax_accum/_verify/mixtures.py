"""Owns mixed batches: whether a loss is at one key a sum over rows, or times some weight. Runs no cut."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._core.arithmetic import Tree
from optax_accum._verify.loss import Loss, largest, take, wide

FACTORS = np.array([1.0, 0.7], np.float32)  # of the parameters: a second point, for those of few numbers

Mixtures = list[np.ndarray]  # [4, entries]: other rows in none, some, the other and all places; one for each design


class Mixed(NamedTuple):
    """The loss and gradient of mixed batches at one key, so that places draw what they drew, for each term."""

    plain: list[Mixtures]
    weighted: list[Mixtures]  # times the weight of the batch
    inputs: list[Mixtures]  # what looks like a weight of rows stayed as it was


def mixed(loss: Loss, batch: Tree, count: int, scales: list[float]) -> Mixed:
    """Returns the loss and the gradient, in units of `scales`, of batches with other rows in some of their places."""
    shapes, inputs = loss.shapes(batch), _inputs(batch)
    names = list(shapes) if isinstance(shapes, dict) else [None]

    def one(order: jax.Array, weights: jax.Array, factor: jax.Array) -> tuple[list[Any], list[Any]]:
        rows = jax.tree.map(lambda leaf, is_input: take(leaf, order if is_input else weights), batch, inputs)
        params = jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), loss.params)
        run = lambda name: jax.value_and_grad(functools.partial(loss.total, term=name))
        share = loss.share(rows, batch)
        shares = [share[name] if isinstance(share, dict) else share for name in names]
        return [jax.tree.leaves(run(name)(params, rows, *loss.draw(0))) for name in names], shares

    orders = np.stack(list(_orders(count)))  # [designs, 4, n]
    each = lambda orders: np.repeat(orders.reshape(-1, count), len(FACTORS), 0)
    factors = np.tile(FACTORS, orders.shape[0] * orders.shape[1])
    run = jax.jit(lambda *rows: jax.lax.map(lambda row: one(*row), (*rows, factors)))
    terms, shares = run(each(orders), each(orders))
    held, _ = run(each(orders), each(np.broadcast_to(np.arange(count), orders.shape)))
    numbers = lambda leaves, share: scaled(list(map(wide, leaves)), scales) * share
    designs = lambda leaves, share: numbers(leaves, share).reshape(len(orders), 4, -1)
    finite = lambda term: [mixture for mixture in term if np.all(np.isfinite(mixture))]
    return Mixed(
        plain=[finite(designs(leaves, 1.0)) for leaves in terms],
        weighted=[finite(designs(leaves, wide(w)[:, None])) for leaves, w in zip(terms, shares, strict=True)],
        inputs=[finite(designs(leaves, 1.0)) for leaves in held],
    )


def scaled(leaves: list[np.ndarray], scales: list[float]) -> np.ndarray:
    """Returns the loss and the leaves of a gradient, one of each [m, ...], as one row of numbers [m, entries]."""
    flat = [leaf.reshape(len(leaf), -1) / scale for leaf, scale in zip(leaves, scales, strict=True)]
    return np.concatenate([part for leaf in flat for part in (leaf.real, leaf.imag)], axis=1)


def defect(terms: list[Mixtures]) -> float:
    """Returns by how much the changes of two sets of rows do not add up."""
    mixtures = [mixture for term in terms for mixture in term]
    return max((largest(_missing(mixture)) / max(1, largest(mixture)) for mixture in mixtures), default=0.0)


def reweighting(terms: list[Mixtures], limit: float) -> float | None:
    """Returns what a mixed batch counts, the batch counting 1, if some weights make all changes add up."""
    factors = [_reweighted(mixture, limit) for term in terms for mixture in term]
    if not all(factors):
        return None
    return max((factor for factor in factors if factor), key=lambda factor: abs(math.log(factor)), default=1.0)


def _inputs(batch: Tree) -> Tree:
    """Returns which leaves are inputs, not weights of rows: with more than one number, not all 0 or 1; or else all."""
    weight = lambda leaf: jnp.ndim(leaf) < 3 or bool(jnp.all((leaf == 0) | (leaf == 1)))
    alone = all(weight(leaf) for leaf in jax.tree.leaves(batch))
    return jax.tree.map(lambda leaf: alone or not weight(leaf), batch)


def _orders(count: int) -> Iterator[np.ndarray]:
    """Yields for each design the rows [4, n] in no, some, the other and all places of others."""
    random, rows = np.random.default_rng(0), np.arange(count)
    for _ in range(3):
        others, some = (rows + random.integers(1, count, count)) % count, random.permutation(count) < count // 2
        yield np.stack([rows, np.where(some, others, rows), np.where(some, rows, others), others])


def _missing(mixture: np.ndarray) -> np.ndarray:
    none, some, others, every = mixture
    return some + others - none - every


def _reweighted(mixture: np.ndarray, limit: float) -> float | None:
    """Returns the weight of a mixed batch, that of the batch being 1, if weights make the changes add up.

    With weights 1, a, b and a + b - 1, (a + b - 1) every + none = a some + b others, which is linear in a and b.
    """
    _, some, others, every = mixture
    sides = np.stack([every - some, every - others], axis=1)
    more, _, _, spread = np.linalg.lstsq(sides, _missing(mixture), rcond=None)
    if largest(sides @ more - _missing(mixture)) > limit * max(1, largest(mixture)):
        return None
    if spread[-1] <= 1e-3 * spread[0]:  # a and b cannot be told apart: some weights would explain this mixture
        return 1.0 if largest(_missing(mixture)) <= limit * max(1, largest(mixture)) else None
    weights = [*(1 + more), 1 + sum(more)]
    return float(max(weights, key=lambda weight: abs(weight - 1))) if min(weights) > 0 else None
