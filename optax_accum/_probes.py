"""Owns the runs that `verify` compares, and one probe for each cause. Draws no conclusion about the loss as a whole."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum import _split
from optax_accum._accumulator import Tree
from optax_accum._microbatch import value_and_grad
from optax_accum._report import DRAWS, Cause, order

Errors = dict[str, tuple[float, float]]  # "loss" and each leaf's path -> the relative error, and the largest allowed

# A row here is what is never cut: an example, or with group_size a group of g. Batches have leaves [n, g, ...].


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss in one form, over rows [n, g, ...], whatever stands beside it."""

    fun: Callable[..., Any]
    params: Tree
    args: tuple[Any, ...]
    has_aux: bool
    weight_fn: Callable[..., Any] | None
    rng_argnum: int | None
    carry_argnum: int | None

    def terms(self, params: Tree, batch: Tree, *args: Any) -> Any:
        """Returns the loss, or the dict of its terms."""
        out = self.fun(params, _flat(batch), *args)
        return out[0] if self.has_aux or self.carry_argnum is not None else out

    def total(self, params: Tree, batch: Tree, *args: Any, term: str | None = None) -> jax.Array:
        """Returns the sum of all terms, or one of them."""
        terms = self.terms(params, batch, *args)
        return sum(jax.tree.leaves(terms)) if term is None else terms[term]  # type: ignore[return-value]

    def threaded(self, params: Tree, batch: Tree, *args: Any) -> Any:
        """Returns the loss, or the dict of its terms, with the carry beside it."""
        out = self.fun(params, _flat(batch), *args)
        return (out[0], out[1][1]) if self.has_aux else out

    def weights(self, batch: Tree) -> Any:
        """Returns what `weight_fn` says that a batch counts."""
        return self.weight_fn(_flat(batch))  # type: ignore[misc]

    def share(self, batch: Tree, of: Tree) -> Any:
        """Returns what a batch counts as a part of what another of as many rows counts."""
        return 1.0 if self.weight_fn is None else jax.tree.map(jnp.divide, self.weights(batch), self.weights(of))

    def draw(self, number: Any, among: tuple[int, ...] | None = None) -> tuple[Any, ...]:
        """Returns the arguments with keys that are `number`'s own: all, or those of the arguments `among`."""
        own = lambda leaf: jax.random.fold_in(leaf, number) if is_key(leaf) else leaf
        return tuple(
            jax.tree.map(own, arg) if among is None or n in among else arg for n, arg in enumerate(self.args, start=2)
        )

    def accumulated(self, *, held: bool, own_keys: bool, **options: Any) -> Callable[..., tuple[Any, Any]]:
        """Returns `value_and_grad` of the loss, the carry held or threaded, a key for each micro-batch or for all."""
        fun, carry = (self.terms, None) if held or self.carry_argnum is None else (self.threaded, self.carry_argnum)
        rng = self.rng_argnum if own_keys else None
        whole = tuple(n for n in range(2, 2 + len(self.args)) if n not in (rng, carry))
        if whole and "whole_argnums" in inspect.signature(value_and_grad).parameters:
            options["whole_argnums"] = whole
        weights = None if self.weight_fn is None else self.weights
        cut = value_and_grad(fun, weight_fn=weights, rng_argnum=rng, carry_argnum=carry, **options)

        def loss_and_grads(*args: Any) -> tuple[Any, Any]:
            out, grads = cut(*args)
            return (out if carry is None else out[0]), grads

        return loss_and_grads

    def refusal(self, batch: Tree, rows: int) -> Exception | None:
        """Returns what `fun` raises for the first rows of a batch, if it does."""
        try:
            jax.eval_shape(self.terms, self.params, take(batch, np.arange(rows)), *self.args)
        except Exception as error:  # whatever a user's function raises
            return error
        return None

    def holding(self, batch: Tree) -> Iterator[tuple[str, "Loss", Tree]]:
        """Yields for each leaf the loss and its batch with that leaf as a constant, which is not cut."""
        leaves, treedef = jax.tree.flatten(batch)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(batch)]
        for number, leaf in enumerate(leaves):
            rest = [*leaves[:number], 0.0, *leaves[number + 1 :]]
            if _split.is_split(leaf) and any(map(_split.is_split, rest)):
                loss = self._with_leaf(number, _flat(leaf))
                yield paths[number], loss, jax.tree.unflatten(treedef, rest)

    def _with_leaf(self, number: int, leaf: Any) -> "Loss":
        def put(batch: Tree) -> Tree:
            leaves, treedef = jax.tree.flatten(batch)
            return jax.tree.unflatten(treedef, [*leaves[:number], leaf, *leaves[number + 1 :]])

        fun = lambda params, batch, *args: self.fun(params, put(batch), *args)
        weight_fn = None if self.weight_fn is None else lambda batch: self.weight_fn(put(batch))  # type: ignore[misc]
        return dataclasses.replace(self, fun=fun, weight_fn=weight_fn)


@dataclasses.dataclass(frozen=True)
class Probes:
    """The runs that are compared, and one probe for each cause."""

    loss: Loss
    batch: Tree
    count: int
    num_microbatches: int
    dtype: Any
    rtol: float

    def shared_key(self, whole_argnums: tuple[int, ...]) -> list[Cause]:
        """The loss changes with a key that all micro-batches get."""
        roles = (self.loss.rng_argnum, self.loss.carry_argnum, *whole_argnums)
        for number, arg in enumerate(self.loss.args, start=2):
            if number in roles or not any(map(is_key, jax.tree.leaves(arg))):
                continue
            if self._changes_with(number):
                says = f"The loss changes with the key in argument {number}, of which all micro-batches get the same."
                return [Cause("shared key", says)]
        return []

    def _changes_with(self, number: int) -> bool:
        """Whether the loss changes with the keys in an argument: an outcome may be rare, so many are drawn."""
        loss = lambda n: self.loss.total(self.loss.params, self.batch, *self.loss.draw(n, (number,)))
        losses = jax.jit(lambda draws: jax.lax.map(loss, draws))
        return any(np.ptp(_wide(losses(jnp.arange(draws)))) for draws in (DRAWS, 32 * DRAWS))

    def low_precision(self) -> list[Cause]:
        """The default accumulator gives another gradient than the one asked for."""
        error = self._worst(self.sound, self._cut(self.dtype, held=True)) if self.dtype else 0.0
        sums = f"Added in {jnp.dtype(self.dtype)}, the gradient is off by {error:.1e}; added in float32 it is not."
        return [Cause("low-precision accumulator", sums)] if error else []

    def state(self) -> list[Cause]:
        """The gradient is another one when each micro-batch starts from the first carry."""
        if self.loss.carry_argnum is None:
            return []
        error = self._worst(self.sound, self._cut(None, held=False))
        says = f"What earlier micro-batches leave in the carry changes the gradient of later ones, by {error:.1e}."
        return [Cause("mutable state", says)] if error else []

    def formula(self) -> list[Cause]:
        """What is wrong with a sound accumulator and a fixed carry lies in the formula of the loss."""
        if within(self.as_sound) and not self.broken:
            return []
        return self._not_rows() or self._sum() or self._weights() or self._coupled()

    @functools.cached_property
    def as_asked(self) -> Errors:
        """Each leaf's error and limit, of the worse of the two cuts, with the options asked for."""
        return self._agreement(self.asked, self.dtype, held=False)

    @functools.cached_property
    def as_sound(self) -> Errors:
        """The same, with the default accumulator and the carry held fixed."""
        return self.as_asked if self._plain else self._agreement(self.sound, None, held=True)

    @functools.cached_property
    def broken(self) -> bool:
        """Whether a random loss times its weight is, at one key, no sum over rows: a mean over keys may hide it."""
        return self.random and self._defect("weighted") > self.rtol

    @functools.cached_property
    def random(self) -> bool:
        """Whether the loss changes with a key among its arguments."""
        return bool(np.ptp(self.whole[0]))

    @functools.cached_property
    def whole(self) -> list[np.ndarray]:
        """The loss and the gradient of the whole batch."""
        found = self._measure(jax.value_and_grad(self.loss.total))(self.batch)
        if not all(np.all(np.isfinite(leaf)) for leaf in found):
            raise ValueError("The whole batch must have a finite loss and gradient to compare with. Look for the NaN.")
        if not any(np.any(leaf) for leaf in found[1:]):
            raise ValueError("The whole batch must have a gradient: it is 0 everywhere. Pass freshly made parameters.")
        return found

    @functools.cached_property
    def asked(self) -> list[list[np.ndarray]]:
        """The cut batch, with the options asked for."""
        return self._cut(self.dtype, held=False)

    @functools.cached_property
    def sound(self) -> list[list[np.ndarray]]:
        """The cut batch, with the default accumulator and the carry held fixed."""
        return self.asked if self._plain else self._cut(None, held=True)

    @functools.cached_property
    def scales(self) -> list[float]:
        """The size of what is averaged: of the rows' losses and of each leaf of their gradients, which may cancel.

        That of a leaf is 1 % of the largest leaf's at least, and that of the loss 1 % of what the parameters move.
        """

        def row(n: jax.Array) -> tuple[Any, Any]:
            batch = jax.tree.map(lambda leaf: leaf[n][None] if _split.is_split(leaf) else leaf, self.batch)
            return jax.value_and_grad(self.loss.total)(self.loss.params, batch, *self.loss.draw(n))

        rows = jax.jit(lambda: jax.lax.map(row, jnp.arange(self.count)))()
        pairs = zip(self.whole, jax.tree.leaves(rows), strict=True)
        loss, *leaves = [max(_largest(np.mean(whole, 0)), _largest(_mean_size(_wide(row)))) for whole, row in pairs]
        params = map(_wide, jax.tree.leaves(self.loss.params))
        moves = sum(leaf * _largest(param) for leaf, param in zip(leaves, params, strict=True))
        return [max(loss, 0.01 * moves) or 1.0, *(max(leaf, 0.01 * max(leaves)) for leaf in leaves)]

    @property
    def _plain(self) -> bool:
        return self.dtype is None and self.loss.carry_argnum is None

    def _cut(self, dtype: Any, *, held: bool, own_keys: bool = True) -> list[list[np.ndarray]]:
        """Returns the loss and the gradient of the cut batch, of equal and of unequal micro-batches."""
        size = uneven(self.count, self.num_microbatches)
        cut = functools.partial(self.loss.accumulated, held=held, own_keys=own_keys, accumulator_dtype=dtype)
        functions = cut(num_microbatches=self.num_microbatches), cut(microbatch_size=size)
        return [self._measure(function)(self.batch) for function in functions]

    def _agreement(self, cuts: list[list[np.ndarray]], dtype: Any, *, held: bool) -> Errors:
        """Returns the errors of `cuts`; or, where these are too large, of cuts in which all draw what the whole drew.

        Keys of their own vary too much where few draws decide (a layer dropped for all rows), one key for all where
        each row draws (rows of equal place draw the same). A loss with a wrong formula fails in both ways.
        """
        found = self._errors(cuts)
        if within(found) or not self.random or self.loss.rng_argnum is None:
            return found
        again = self._errors(self._cut(dtype, held=held, own_keys=False))
        return again if within(again) else found

    def _errors(self, cuts: list[list[np.ndarray]]) -> Errors:
        """Returns for the loss and each leaf the error of the worse of the cuts, and its limit."""
        found = [self._differences(self.whole, cut) for cut in cuts]
        return {path: max((errors[path] for errors in found), key=lambda e: order(e[0] / e[1])) for path in found[0]}

    def _differences(self, whole: list[np.ndarray], cut: list[np.ndarray]) -> Errors:
        """Returns for the loss and each leaf its relative error and the largest that is rounding or noise."""
        found = {}
        leaves = jax.tree.leaves_with_path(self.loss.params)
        paths = ["loss", *(f"params{jax.tree_util.keystr(path)}" for path, _ in leaves)]
        for path, a, b, scale in zip(paths, whole, cut, self.scales, strict=True):
            noise = 6 * _largest(np.std(b - a, axis=0)) / math.sqrt(len(a))
            error = _largest(np.mean(b - a, axis=0))
            found[path] = (error / scale, self.rtol + float(np.nan_to_num(noise)) / scale)
        return found

    def _worst(self, wholes: list[list[np.ndarray]], cuts: list[list[np.ndarray]]) -> float:
        """Returns the largest error that is neither rounding nor noise, or 0."""
        pairs = zip(wholes, cuts, strict=True)
        found = [pair for whole, cut in pairs for pair in self._differences(whole, cut).values()]
        return max((error for error, limit in found if not error <= limit), key=order, default=0.0)

    def _measure(self, function: Callable[..., tuple[Any, Any]]) -> Callable[[Tree], list[np.ndarray]]:
        """Returns what measures a batch: the loss [draws] and the leaves of the gradient [draws, ...]."""
        draws = jnp.arange(DRAWS)
        run = jax.jit(lambda p, batch: jax.lax.map(lambda n: function(p, batch, *self.loss.draw(n)), draws))
        if not any(map(is_key, jax.tree.leaves(self.loss.args))):
            run = jax.jit(lambda p, batch: jax.tree.map(lambda leaf: leaf[None], function(p, batch, *self.loss.args)))
        return lambda batch: [_wide(leaf) for leaf in jax.tree.leaves(run(self.loss.params, batch))]

    def _scaled(self, leaves: list[np.ndarray]) -> np.ndarray:
        """Returns the loss and the leaves of a gradient, one of each [m, ...], as one row of numbers [m, entries]."""
        flat = [leaf.reshape(len(leaf), -1) / scale for leaf, scale in zip(leaves, self.scales, strict=True)]
        return np.concatenate([part for leaf in flat for part in (leaf.real, leaf.imag)], axis=1)

    def _not_rows(self) -> list[Cause]:
        """A leaf of the batch kept whole gives the gradient of the whole batch, and a loss that has others."""
        size = uneven(self.count, self.num_microbatches)  # equal micro-batches may hide a wrong weight
        for path, loss, batch in self.loss.holding(self.batch):
            if within(self.as_sound) or loss.refusal(batch, 2) or not self._depends(loss, batch):
                continue
            cut = loss.accumulated(held=True, own_keys=True, microbatch_size=size)
            if within(self._differences(self.whole, self._measure(cut)(batch))):
                says = (
                    f"The leaf {path} of the batch is cut like rows. Kept whole, it gives the whole batch's gradient."
                )
                return [Cause("not rows", says)]
        return []

    def _depends(self, loss: Loss, batch: Tree) -> bool:
        """Whether the loss changes with the rows of a batch."""
        pairs = np.stack([np.arange(self.count), np.roll(np.arange(self.count), 1)], axis=1)  # [n, 2]
        of = lambda rows: loss.total(loss.params, take(batch, rows), *loss.draw(0))
        losses = jax.jit(lambda pairs: jax.lax.map(of, pairs))(pairs)
        return bool(np.ptp(_wide(losses)) > self.rtol * self.scales[0])

    def _sum(self) -> list[Cause]:
        """The whole is its two halves added up, and not their mean."""
        measure = self._measure(jax.value_and_grad(self.loss.total))
        mean = lambda leaves: np.mean(self._scaled(leaves), axis=0)
        whole, rows = mean(self.whole), np.arange(self.count)
        for arranged in (rows, np.argsort(rows % 2, kind="stable"), np.roll(rows, 1)):
            halves = arranged[: self.count // 2], arranged[self.count // 2 :]
            both = sum(mean(measure(take(self.batch, half))) for half in halves)
            times = np.vdot(both, whole) / (np.vdot(both, both) or 1)
            if not times > 0.8 or not _norm(whole - times * both) < 0.5 * _norm(whole - both / 2):
                return []
        return [Cause("sum", "The whole is its two halves added up, where their mean was needed.")]

    def _weights(self) -> list[Cause]:
        """Some weight for each batch makes a sum over rows of the loss times the weight."""
        factors = [_reweighted(mixture, self.rtol) for term in self._mixtures["plain"] for mixture in term]
        if not all(factors):
            return []
        factor = max((factor for factor in factors if factor), key=lambda factor: abs(math.log(factor)), default=1.0)
        if abs(factor - 1) > 0.01:
            says = f"With other rows in some places, the batch counts for {factor:.2f} of what it did."
            return [Cause("weights", says)]
        if self.loss.weight_fn is None:
            return [Cause("sum", "All rows count the same, and the whole is not the mean over its parts.")]
        return [Cause("weights", "All rows count the same in the loss, but not in weight_fn.")]

    def _coupled(self) -> list[Cause]:
        """With the weights of all rows as they are, the changes of two sets of rows do not add up."""
        if (defect := self._defect("inputs")) > self.rtol:
            says = "Other rows were put in some places, in the others, and in all: the changes do not add up, by"
            return [Cause("coupled examples", f"{says} {defect:.1e}. One row's input changes another row's term.")]
        says = "Examples act on the loss one by one, but no weight per micro-batch explains it: several denominators."
        return [Cause("weights", says)]

    def _defect(self, kind: str) -> float:
        """Returns by how much the changes of two sets of rows do not add up."""
        mixtures = [mixture for term in self._mixtures[kind] for mixture in term]
        return max((_largest(_missing(mixture)) / max(1, _largest(mixture)) for mixture in mixtures), default=0.0)

    @functools.cached_property
    def _mixtures(self) -> dict[str, list[list[np.ndarray]]]:
        """The loss and gradient [4, entries] of mixed batches, for each term of the loss and each mixture.

        The four have other rows in none, some, the other and all places; at one key, so that places draw what they
        drew. Under "weighted" they are multiplied by the weight of the batch; under "inputs" what looks like a weight
        of rows stays as it is.
        """
        shape = jax.eval_shape(self.loss.terms, self.loss.params, self.batch, *self.loss.args)
        names, inputs = list(shape) if isinstance(shape, dict) else [None], _inputs(self.batch)

        def mixed(order: jax.Array, weights: jax.Array, factor: jax.Array) -> tuple[list[Any], list[Any]]:
            batch = jax.tree.map(lambda leaf, is_input: take(leaf, order if is_input else weights), self.batch, inputs)
            params = jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), self.loss.params)
            run = lambda name: jax.value_and_grad(functools.partial(self.loss.total, term=name))
            share = self.loss.share(batch, self.batch)
            shares = [share[name] if isinstance(share, dict) else share for name in names]
            return [jax.tree.leaves(run(name)(params, batch, *self.loss.draw(0))) for name in names], shares

        orders, factors = np.stack(list(_orders(self.count))), np.array([1.0, 0.7], np.float32)  # [designs, 4, n], [2]
        each = lambda orders: np.repeat(orders.reshape(-1, self.count), 2, 0)
        run = jax.jit(lambda *rows: jax.lax.map(lambda row: mixed(*row), (*rows, np.tile(factors, 4 * len(orders)))))
        terms, shares = run(each(orders), each(orders))
        held, _ = run(each(orders), each(np.broadcast_to(np.arange(self.count), orders.shape)))
        entries = lambda leaves, share: (self._scaled(list(map(_wide, leaves))) * share).reshape(len(orders), 4, -1)
        finite = lambda term: [mixture for mixture in term if np.all(np.isfinite(mixture))]
        return {
            "plain": [finite(entries(leaves, 1.0)) for leaves in terms],
            "weighted": [finite(entries(leaves, _wide(w)[:, None])) for leaves, w in zip(terms, shares, strict=True)],
            "inputs": [finite(entries(leaves, 1.0)) for leaves in held],
        }


def within(errors: Errors) -> bool:
    """Returns whether no error is beyond its limit; a NaN is."""
    return all(error <= limit for error, limit in errors.values())


def uneven(rows: int, parts: int) -> int:
    """Returns the smallest size above that of `parts` equal micro-batches which leaves a remainder."""
    return next(size for size in range(-(-rows // parts) + 1, rows) if rows % size)


def take(batch: Tree, rows: Any) -> Tree:
    """Returns these rows of a batch."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[rows] if _split.is_split(leaf) else leaf, batch)


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf is a random key, new or old style."""
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    return dtype is not None and (
        (shape == () and jnp.issubdtype(dtype, jax.dtypes.prng_key)) or (shape == (2,) and dtype == jnp.uint32)
    )


def grouped(batch: Tree, size: int) -> Tree:
    """Returns a batch of rows [n * size, ...] as one of groups [n, size, ...]."""
    group = lambda leaf: jnp.asarray(leaf).reshape(-1, size, *jnp.shape(leaf)[1:])
    return jax.tree.map(lambda leaf: group(leaf) if _split.is_split(leaf) else leaf, batch)


def _flat(batch: Tree) -> Tree:
    """Returns a batch of groups as one of rows."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]) if _split.is_split(leaf) else leaf, batch)


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
    more, *_ = np.linalg.lstsq(sides, _missing(mixture), rcond=None)
    if _largest(sides @ more - _missing(mixture)) > limit * max(1, _largest(mixture)):
        return None
    weights = [*(1 + more), 1 + sum(more)]
    return float(max(weights, key=lambda weight: abs(weight - 1))) if min(weights) > 0 else None


def _wide(leaf: Any) -> np.ndarray:
    return np.asarray(leaf).astype(np.complex128 if jnp.iscomplexobj(leaf) else np.float64)


def _mean_size(rows: np.ndarray) -> np.ndarray:
    """Returns the mean absolute value of the rows in which it is finite."""
    finite = np.isfinite(rows)
    return np.sum(np.abs(np.where(finite, rows, 0)), 0) / np.maximum(np.sum(finite, 0), 1)


def _largest(leaf: np.ndarray) -> float:
    return float(np.max(np.abs(leaf), initial=0))


def _norm(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector))
