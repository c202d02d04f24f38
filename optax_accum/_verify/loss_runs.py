"""Owns the runs of a loss that `verify` compares, whole, cut, of rows and of mixed batches. Knows no fault."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._arguments.rows import of_rows
from optax_accum._core.leaves import is_key
from optax_accum._core.types import Name, Tree
from optax_accum._verify import loss_mixtures as mixtures
from optax_accum._verify.loss import Loss, largest, take, uneven, wide
from optax_accum._verify.report import DRAWS, Errors, badness, within

APART = 1e3  # rows alone whose mean is so many times the whole are no terms of it: what one row is divided by is near 0


@dataclasses.dataclass(frozen=True)
class LossRuns:
    """The runs that are compared, each made when it is first asked for."""

    loss: Loss
    batch: Tree
    count: int
    num_microbatches: int
    dtype: Any
    rtol: float
    sums_rtol: float  # the same between two accumulators, which differ in nothing else
    shared: tuple[Name, ...]  # the arguments that every micro-batch gets whole on purpose
    _cuts: dict[Any, list[list[np.ndarray]]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def as_asked(self) -> Errors:
        """Each leaf's error and limit, of the worse of the two cuts, with the options asked for."""
        return self._agreement(dtype=True, threaded=True)

    @functools.cached_property
    def as_sound(self) -> Errors:
        """The same, with the default accumulator and the carry held fixed."""
        return self._agreement()

    @functools.cached_property
    def broken(self) -> bool:
        """Whether a random loss times its weight is, at one key, no sum over rows: a mean over keys may hide it."""
        return self.random and mixtures.defect(self.mixed.weighted) > self.rtol

    @functools.cached_property
    def mixed(self) -> mixtures.Mixed:
        """Mixed batches."""
        return mixtures.mixed(self.loss, self.batch, self.count, self.scales)

    @functools.cached_property
    def alone(self) -> dict[str, list[mixtures.Mixtures]]:
        """Batches that are mixed in one leaf alone, by its path."""
        return mixtures.alone(self.loss, self.batch, self.count, self.scales)

    @functools.cached_property
    def factor(self) -> float | None:
        """What a mixed batch counts, the batch counting 1, if some weights make the loss a sum over rows."""
        return mixtures.reweighting(self.mixed.plain, self.rtol)

    @functools.cached_property
    def grows(self) -> bool:
        """Whether the batch with each row twice gives more, as a sum does, and a mean or the largest row does not."""
        twice = take(self.batch, np.tile(np.arange(self.count), 2))
        return not within(self.differences(self.measure(jax.value_and_grad(self.loss.total))(twice)))

    @property
    def holds(self) -> bool:
        """Whether the batch cut with the options asked for gives what the whole gives."""
        return within(self.as_asked) and not self.broken

    @property
    def sound_formula(self) -> bool:
        """Whether it does with a sound accumulator and a fixed carry: else the formula of the loss is wrong."""
        return self.holds or (within(self.as_sound) and not self.broken)

    @functools.cached_property
    def random(self) -> bool:
        """Whether the loss changes with a key among its arguments."""
        return any(np.ptp(run[0]) > 0 for run in (self.whole, *self.cut(dtype=True, threaded=True)))  # False of NaN

    @functools.cached_property
    def whole(self) -> list[np.ndarray]:
        """The loss and the gradient of the whole batch."""
        found = self.measure(jax.value_and_grad(self.loss.total))(self.batch)
        if not all(np.all(np.isfinite(leaf)) for leaf in found):
            raise ValueError("The whole batch must have a finite loss and gradient to compare with. Look for the NaN.")
        if not any(np.any(leaf) for leaf in found[1:]):
            raise ValueError("The whole batch must have a gradient: it is 0 everywhere. Pass freshly made parameters.")
        return found

    @functools.cached_property
    def rows(self) -> list[np.ndarray] | None:
        """The loss and the gradient of each row alone [n, draws, ...], if `fun` takes one."""
        if self.loss.refusal(self.batch, 1):
            return None
        function = jax.value_and_grad(self.loss.total)

        def row(n: jax.Array) -> Any:
            batch = of_rows(lambda leaf: leaf[n][None], self.batch)
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
    def sizes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of the two cuts."""
        size = uneven(self.count, self.num_microbatches)
        return {"num_microbatches": self.num_microbatches}, {"microbatch_size": size}

    @property
    def rows_of_cuts(self) -> set[int]:
        """The sizes of their micro-batches."""
        size = uneven(self.count, self.num_microbatches)
        return {-(-self.count // self.num_microbatches), size, self.count % size}

    def cut(self, *, dtype: bool = False, threaded: bool = False, own_keys: bool = True) -> list[list[np.ndarray]]:
        """Returns the loss and the gradient of the cut batch, of equal and of unequal micro-batches.

        Sums are in the `dtype` asked for, or in the default one; the carry is `threaded`, or held fixed.
        """
        kind = dtype and self.dtype is not None, threaded and self.loss.carry_argnum is not None, own_keys
        if kind not in self._cuts:
            options = {"held": not threaded, "own_keys": own_keys, "accumulator_dtype": self.dtype if dtype else None}
            self._cuts[kind] = [
                self.measure(self.loss.accumulated(**options, **size))(self.batch) for size in self.sizes
            ]
        return self._cuts[kind]

    def _agreement(self, **options: bool) -> Errors:
        """Returns the errors of `cuts`; or, where these are too large, of cuts in which all draw what the whole drew.

        Keys of their own vary too much where few draws decide (a layer dropped for all rows), one key for all where
        each row draws (rows of equal place draw the same). A loss with a wrong formula fails in both ways.
        """
        found = self._errors(self.cut(**options))
        if within(found) or self.loss.rng_argnum is None:
            return found
        again = self._errors(self.cut(**options, own_keys=False))
        return again if within(again) else found

    def _errors(self, cuts: list[list[np.ndarray]]) -> Errors:
        """Returns for the loss and each leaf the error of the worse of the cuts, and its limit."""
        found = [self.differences(cut) for cut in cuts]
        return {path: max((errors[path] for errors in found), key=badness) for path in found[0]}

    def differences(self, cut: list[np.ndarray]) -> Errors:
        """Returns for the loss and each leaf its relative error and the largest that is rounding or noise."""
        found = {}
        leaves = jax.tree.leaves_with_path(self.loss.params)
        paths = ["loss", *(f"params{jax.tree_util.keystr(path)}" for path, _ in leaves)]
        for path, a, b, scale in zip(paths, self.whole, cut, self.scales, strict=True):
            noise = 6 * largest(np.std(b - a, axis=0)) / math.sqrt(len(a))
            error = largest(np.mean(b - a, axis=0))
            found[path] = (error / scale, self.rtol + float(np.nan_to_num(noise)) / scale)
        return found

    def change(self, before: list[list[np.ndarray]], after: list[list[np.ndarray]], rtol: float) -> float:
        """Returns by how much cuts that draw the same differ, or 0 where that is rounding."""
        runs = [zip(one, other, self.scales, strict=True) for one, other in zip(before, after, strict=True)]
        size = lambda a, b: largest(np.sqrt(np.mean(np.abs(b - a) ** 2, axis=0)))
        error = float(np.max([size(a, b) / scale for run in runs for a, b, scale in run]))
        return 0.0 if error <= rtol else error

    def measure(self, function: Callable[..., tuple[Any, Any]]) -> Callable[[Tree], list[np.ndarray]]:
        """Returns what measures a batch: the loss [draws] and the leaves of the gradient [draws, ...]."""
        draws = jnp.arange(DRAWS)
        run = jax.jit(lambda p, batch: jax.lax.map(lambda n: function(p, batch, *self.loss.draw(n)), draws))
        if not self.keyed:
            run = jax.jit(lambda p, batch: jax.tree.map(lambda leaf: leaf[None], function(p, batch, *self.loss.args)))
        return lambda batch: [wide(leaf) for leaf in jax.tree.leaves(run(self.loss.params, batch))]


def _mean_size(rows: np.ndarray) -> np.ndarray:
    """Returns the mean absolute value of the rows in which it is finite."""
    finite = np.isfinite(rows)
    return np.sum(np.abs(np.where(finite, rows, 0)), 0) / np.maximum(np.sum(finite, 0), 1)
