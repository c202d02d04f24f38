"""Owns the runs that `verify` compares, and one probe for each cause. Draws no conclusion about the loss as a whole."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._core.arithmetic import Tree
from optax_accum._core.leaves import is_key
from optax_accum._core.signature import Name
from optax_accum._verify import mixtures
from optax_accum._verify.loss import Loss, largest, take, uneven, wide
from optax_accum._verify.report import DRAWS, Cause, order
from optax_accum._within import splitting

APART = 1e3  # rows alone whose mean is so many times the whole are no terms of it: what one row is divided by is near 0
Errors = dict[str, tuple[float, float]]  # "loss" and each leaf's path -> the relative error, and the largest allowed


@dataclasses.dataclass(frozen=True)
class Probes:
    """The runs that are compared, and one probe for each cause."""

    loss: Loss
    batch: Tree
    count: int
    num_microbatches: int
    dtype: Any
    rtol: float
    sums_rtol: float  # the same between two accumulators, which differ in nothing else

    def shared_key(self, whole_argnums: tuple[Name, ...]) -> list[Cause]:
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
        return any(np.ptp(wide(losses(jnp.arange(draws)))) for draws in (DRAWS, 32 * DRAWS))

    def low_precision(self) -> list[Cause]:
        """The default accumulator gives another gradient than the one asked for."""
        error = self._change(self.sound, self._held, self.sums_rtol) if self.dtype else 0.0
        dtypes = " and ".join(sorted({str(jnp.dtype(dtype)) for dtype in jax.tree.leaves(self.dtype)}))
        sums = f"Added in {dtypes}, the gradient is off by {error:.1e}; added in float32 it is not."
        return [Cause("low-precision accumulator", sums)] if error else []

    def state(self) -> list[Cause]:
        """The gradient is another one when each micro-batch starts from the first carry."""
        if self.loss.carry_argnum is None:
            return []
        error = self._change(self.sound, self._threaded, self.rtol)
        says = f"What earlier micro-batches leave in the carry changes the gradient of later ones, by {error:.1e}."
        return [Cause("mutable state", says)] if error else []

    def formula(self) -> list[Cause]:
        """What is wrong with a sound accumulator and a fixed carry lies in the formula of the loss."""
        if within(self.as_sound) and not self.broken:
            return []
        return self._not_rows() or self._normalised() or self._sum() or self._weights() or self._coupled()

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
        return self.random and mixtures.defect(self.mixed.weighted) > self.rtol

    @functools.cached_property
    def mixed(self) -> mixtures.Mixed:
        """Mixed batches."""
        return mixtures.mixed(self.loss, self.batch, self.count, self.scales)

    @functools.cached_property
    def random(self) -> bool:
        """Whether the loss changes with a key among its arguments."""
        return any(np.ptp(run[0]) for run in (self.whole, *self.asked))

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
    def rows(self) -> list[np.ndarray] | None:
        """The loss and the gradient of each row alone [n, draws, ...], if `fun` takes one."""
        if self.loss.refusal(self.batch, 1):
            return None
        function = jax.value_and_grad(self.loss.total)

        def row(n: jax.Array) -> Any:
            batch = jax.tree.map(lambda leaf: leaf[n][None] if splitting.is_split(leaf) else leaf, self.batch)
            of = lambda draw: function(self.loss.params, batch, *self.loss.draw(DRAWS * n + draw))
            return jax.lax.map(of, jnp.arange(16 if self.keyed else 1))

        return list(map(wide, jax.tree.leaves(jax.jit(lambda: jax.lax.map(row, jnp.arange(self.count)))())))

    @functools.cached_property
    def scales(self) -> list[float]:
        """The size of what is averaged: of the rows' losses and of each leaf of their gradients, which may cancel.

        That of a leaf is 1 % of the largest leaf's at least, and that of the loss 1 % of what the parameters move.
        """
        rows = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in self.rows or []]
        of = lambda leaves: max((largest(np.mean(leaf, 0)) for leaf in leaves), default=0.0)
        if not rows or not of(rows[1:]) <= APART * of(self.whole[1:]):
            rows = self.whole
        pairs = zip(self.whole, rows, strict=True)
        loss, *leaves = [max(largest(np.mean(whole, 0)), largest(_mean_size(row))) for whole, row in pairs]
        params = map(wide, jax.tree.leaves(self.loss.params))
        moves = sum(leaf * largest(param) for leaf, param in zip(leaves, params, strict=True))
        return [max(loss, 0.01 * moves) or 1.0, *(max(leaf, 0.01 * max(leaves)) for leaf in leaves)]

    @property
    def keyed(self) -> bool:
        """Whether there are keys to draw with."""
        return any(map(is_key, jax.tree.leaves(self.loss.args)))

    @property
    def _held(self) -> list[list[np.ndarray]]:
        return self.asked if self.loss.carry_argnum is None else self._cut(self.dtype, held=True)

    @property
    def _threaded(self) -> list[list[np.ndarray]]:
        return self.asked if self.dtype is None else self._cut(None, held=False)

    @property
    def _plain(self) -> bool:
        return self.dtype is None and self.loss.carry_argnum is None

    @property
    def _sizes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        size = uneven(self.count, self.num_microbatches)
        return {"num_microbatches": self.num_microbatches}, {"microbatch_size": size}

    def _cut(self, dtype: Any, *, held: bool, own_keys: bool = True) -> list[list[np.ndarray]]:
        """Returns the loss and the gradient of the cut batch, of equal and of unequal micro-batches."""
        cut = lambda size: self.loss.accumulated(held=held, own_keys=own_keys, accumulator_dtype=dtype, **size)
        return [self._measure(cut(size))(self.batch) for size in self._sizes]

    def _agreement(self, cuts: list[list[np.ndarray]], dtype: Any, *, held: bool) -> Errors:
        """Returns the errors of `cuts`; or, where these are too large, of cuts in which all draw what the whole drew.

        Keys of their own vary too much where few draws decide (a layer dropped for all rows), one key for all where
        each row draws (rows of equal place draw the same). A loss with a wrong formula fails in both ways.
        """
        found = self._errors(cuts)
        if within(found) or self.loss.rng_argnum is None:
            return found
        again = self._errors(self._cut(dtype, held=held, own_keys=False))
        return again if within(again) else found

    def _errors(self, cuts: list[list[np.ndarray]]) -> Errors:
        """Returns for the loss and each leaf the error of the worse of the cuts, and its limit."""
        found = [self._differences(cut) for cut in cuts]
        return {path: max((errors[path] for errors in found), key=lambda e: order(e[0] / e[1])) for path in found[0]}

    def _differences(self, cut: list[np.ndarray]) -> Errors:
        """Returns for the loss and each leaf its relative error and the largest that is rounding or noise."""
        found = {}
        leaves = jax.tree.leaves_with_path(self.loss.params)
        paths = ["loss", *(f"params{jax.tree_util.keystr(path)}" for path, _ in leaves)]
        for path, a, b, scale in zip(paths, self.whole, cut, self.scales, strict=True):
            noise = 6 * largest(np.std(b - a, axis=0)) / math.sqrt(len(a))
            error = largest(np.mean(b - a, axis=0))
            found[path] = (error / scale, self.rtol + float(np.nan_to_num(noise)) / scale)
        return found

    def _change(self, before: list[list[np.ndarray]], after: list[list[np.ndarray]], rtol: float) -> float:
        """Returns by how much cuts that draw the same differ, or 0 where that is rounding."""
        runs = [zip(one, other, self.scales, strict=True) for one, other in zip(before, after, strict=True)]
        size = lambda a, b: largest(np.sqrt(np.mean(np.abs(b - a) ** 2, axis=0)))
        error = max((size(a, b) / scale for run in runs for a, b, scale in run), key=order)
        return 0.0 if error <= rtol else error

    def _measure(self, function: Callable[..., tuple[Any, Any]]) -> Callable[[Tree], list[np.ndarray]]:
        """Returns what measures a batch: the loss [draws] and the leaves of the gradient [draws, ...]."""
        draws = jnp.arange(DRAWS)
        run = jax.jit(lambda p, batch: jax.lax.map(lambda n: function(p, batch, *self.loss.draw(n)), draws))
        if not self.keyed:
            run = jax.jit(lambda p, batch: jax.tree.map(lambda leaf: leaf[None], function(p, batch, *self.loss.args)))
        return lambda batch: [wide(leaf) for leaf in jax.tree.leaves(run(self.loss.params, batch))]

    def _not_rows(self) -> list[Cause]:
        """A leaf of the batch kept whole gives the gradient of the whole batch, and a loss that has others."""
        for path, loss, batch in self.loss.holding(self.batch):
            if within(self.as_sound) or loss.refusal(batch, 2) or not self._depends(loss, batch):
                continue
            cuts = (loss.accumulated(held=True, own_keys=True, **size) for size in self._sizes)
            if all(within(self._differences(self._measure(cut)(batch))) for cut in cuts):
                says = (
                    f"The leaf {path} of the batch is cut like rows. Kept whole, it gives the whole batch's gradient."
                )
                return [Cause("not rows", says)]
        return []

    def _normalised(self) -> list[Cause]:
        """A leaf of the batch, moved or stretched as a whole, changes nothing; moved apart, row by row, it does.

        What each row normalises, as LayerNorm does, or nobody reads, does not matter in either way. What weighs rows
        may be stretched, too: it has one sign.
        """
        run = self._measure(jax.value_and_grad(self.loss.total))
        same = lambda batch: within(self._differences(run(batch)))
        for path, leaf, put in self.loss.floats(self.batch):
            apart = np.random.default_rng(0).uniform(0.5, 2, (len(leaf), *[1] * (leaf.ndim - 1)))
            moves = {"moved by a constant": lambda by, leaf=leaf: leaf + by * (np.std(leaf) or 1)}
            if np.min(leaf) < 0 < np.max(leaf):
                moves["doubled"] = lambda by, leaf=leaf: leaf * by
            for how, move in moves.items():
                if same(put(move(2))) and not same(put(move(apart))):
                    says = f"The leaf {path} of the batch is normalised over its rows: {how}, it changes nothing."
                    return [Cause("coupled examples", says)]
        return []

    def _depends(self, loss: Loss, batch: Tree) -> bool:
        """Whether the loss changes with the rows of a batch."""
        pairs = np.stack([np.arange(self.count), np.roll(np.arange(self.count), 1)], axis=1)  # [n, 2]
        of = lambda rows: loss.total(loss.params, take(batch, rows), *loss.draw(0))
        losses = jax.jit(lambda pairs: jax.lax.map(of, pairs))(pairs)
        return bool(np.ptp(wide(losses)) > self.rtol * self.scales[0])

    def _sum(self) -> list[Cause]:
        """The whole is its rows added up, and not their mean."""
        if self.rows is None:
            return []
        whole, total = (
            mixtures.scaled([leaf[None] for leaf in leaves], self.scales)[0]
            for leaves in (
                [np.mean(leaf, 0) for leaf in self.whole],
                [np.sum(np.mean(leaf, 1), 0) for leaf in self.rows],
            )
        )
        if not np.linalg.norm(whole - total) < 0.3 * np.linalg.norm(whole) or not self._grows:
            return []
        return [Cause("sum", "The whole is its rows added up, where their mean was needed.")]

    @functools.cached_property
    def _grows(self) -> bool:
        """Whether the batch with each row twice gives more, as a sum does, and a mean or the largest row does not."""
        twice = take(self.batch, np.tile(np.arange(self.count), 2))
        return not within(self._differences(self._measure(jax.value_and_grad(self.loss.total))(twice)))

    def _weights(self) -> list[Cause]:
        """Some weight for each batch makes a sum over rows of the loss times the weight."""
        factor = mixtures.reweighting(self.mixed.plain, self.rtol)
        if factor is None:
            return []
        if abs(factor - 1) > 0.01:
            says = f"With other rows in some places, the batch counts for {factor:.2f} of what it did."
            return [Cause("weights", says)]
        if not self._grows:
            says = (
                "All rows count the same, the whole is not the mean over its parts, and each row twice gives the same."
            )
            return [Cause("coupled examples", says)]
        if self.loss.weight_fn is None:
            return [Cause("sum", "All rows count the same, and the whole is not the mean over its parts.")]
        return [Cause("weights", "All rows count the same in the loss, but not in weight_fn.")]

    def _coupled(self) -> list[Cause]:
        """With the weights of all rows as they are, the changes of two sets of rows do not add up."""
        if (defect := mixtures.defect(self.mixed.inputs)) > self.rtol:
            says = "Other rows were put in some places, in the others, and in all: the changes do not add up, by"
            return [Cause("coupled examples", f"{says} {defect:.1e}. One row's input changes another row's term.")]
        says = "Examples act on the loss one by one, but no weight per micro-batch explains it: several denominators."
        return [Cause("weights", says)]


def within(errors: Errors) -> bool:
    """Returns whether no error is beyond its limit; a NaN is."""
    return all(error <= limit for error, limit in errors.values())


def _mean_size(rows: np.ndarray) -> np.ndarray:
    """Returns the mean absolute value of the rows in which it is finite."""
    finite = np.isfinite(rows)
    return np.sum(np.abs(np.where(finite, rows, 0)), 0) / np.maximum(np.sum(finite, 0), 1)
