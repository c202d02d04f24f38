"""How much of its loss a micro-batch contributes: one class for each kind of weight."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from optax_accum._arguments.rows import first_rows
from optax_accum._core import arithmetic, dtypes
from optax_accum._core.types import Index, Weight
from optax_accum._loss import ratio
from optax_accum._loss.meter import Meter

Shares = jax.Array | float | dict[str, jax.Array]  # of each micro-batch [m], or one number for all; or of each term
MeanAndFactor = Callable[[Weight], tuple[Weight, Weight]]  # see `Device.mean_and_factor`


@dataclasses.dataclass(frozen=True)
class Weighing:
    """How much of its loss a micro-batch contributes: the interface of all ways to weigh.

    A micro-batch is named by its index. The remainder's index is the number of full micro-batches, a Python integer.
    """

    nothing: Any = dataclasses.field(default=(), init=False)  # the count before the first micro-batch

    def scaled(self, loss: Any, index: Index) -> jax.Array:
        """The micro-batch's part of the whole loss, to be differentiated."""
        raise NotImplementedError

    def counted(self, loss: Any) -> Any:
        """The count that comes with a loss; () without one."""
        return ()


@dataclasses.dataclass(frozen=True)
class ByWeight(Weighing):
    """A micro-batch of a window, whose weight is known beforehand; `factor` also scales its loss."""

    weight: Weight = 1.0
    factor: Weight = 1.0

    def scaled(self, loss: Any, index: Index) -> jax.Array:
        return _times(loss, self.factor)

    def counted(self, loss: Any) -> Weight:
        return self.weight

    def value(self, loss: Any) -> Any:
        """The loss as the user gets it."""
        return loss


@dataclasses.dataclass(frozen=True)
class ByCount(Weighing):
    """A micro-batch of a window whose loss is a `Ratio`: its count is its weight.

    If the loss communicates between devices, its weight is the mean of their counts.
    """

    mean_and_factor: MeanAndFactor
    weight: None = None  # nobody knows it beforehand

    def scaled(self, loss: ratio.Ratio, index: Index) -> jax.Array:
        return _times(ratio.divided(jnp.asarray(loss.total), jnp.asarray(self.counted(loss))), 1.0)

    def counted(self, loss: ratio.Ratio) -> Weight:
        return self.mean_and_factor(loss.count)[0]

    def value(self, loss: ratio.Ratio) -> jax.Array:
        return ratio.divided(jnp.asarray(loss.total), loss.count)


@dataclasses.dataclass(frozen=True)
class ByShare(Weighing):
    """A mean: the shares `w_i / sum(w)` are known before the first micro-batch runs."""

    shares: Shares = 1.0  # of the full micro-batches
    rest: Shares = 0.0  # of the remainder
    weight: Any = 1.0  # sum(w); by term for a dict of weights
    full: int = 0  # the number of full micro-batches
    counts_outputs: ClassVar[bool] = False  # whether `of_output` is a weight, by whose sum outputs are divided

    def share(self, index: Index) -> Any:
        """The share of a micro-batch, or of each term."""
        if isinstance(index, int) and index == self.full:
            return self.rest
        return self.shares if isinstance(self.shares, float) else jax.tree.map(lambda s: s[index], self.shares)

    def scaled(self, loss: Any, index: Index) -> jax.Array:
        return _times(loss, self.share(index))

    def of_output(self, loss: Any, index: Index, rows: Any) -> Any:
        """The weight of an output in the `"mean"` of outputs; `rows` is the micro-batch's number of rows."""
        return self.share(index)

    def of_sample(self, loss: Any, index: Index) -> jax.Array:
        """The factor of the scaled gradient's square in the statistics: `w / share^2`; 0 for a share of 0."""
        share = jnp.asarray(self.share(index))
        return jnp.where(share == 0, 0, self.weight * arithmetic.reciprocal(share))

    def weight_of(self, counted: Any, devices: int) -> jax.Array:
        """The part that this device has of the weight of all micro-batches."""
        return jnp.asarray(self.weight / devices)

    def finished(self, loss: jax.Array, dtype: Any) -> jax.Array:
        """Casts the summed loss to the dtype that `fun` returned."""
        return loss.astype(dtype)

    def check_meter(self, meter: Meter) -> None:
        """Raises where the meter cannot measure: it takes one weight for each micro-batch."""


@dataclasses.dataclass(frozen=True)
class Terms(ByShare):
    """A loss of several terms, each weighed for itself."""

    def weight_of(self, counted: Any, devices: int) -> jax.Array:
        return jnp.ones([])  # there is no one weight, and none is asked for

    def check_meter(self, meter: Meter) -> None:
        meter.refuse(
            "Statistics take one weight for each micro-batch: here each term of the loss has its own. Leave "
            "statistics out, or return a loss of one term."
        )


@dataclasses.dataclass(frozen=True)
class ByTerms(Terms):
    """A sum of means, each with shares of its own; outputs are weighed by rows."""

    rows: Any = 1  # of all micro-batches that are run

    def scaled(self, loss: Any, index: Index) -> jax.Array:
        share = self.share(index)
        return sum(jnp.where(share[key] != 0, _times(loss[key], share[key]), 0) for key in share)  # type: ignore[return-value]

    def of_output(self, loss: Any, index: Index, rows: Any) -> Any:
        return first_rows(rows) / self.rows


@dataclasses.dataclass(frozen=True)
class ByRatio(ByShare):
    """A `Ratio`: totals and counts are added, and divided once, and so are outputs."""

    counts_outputs = True
    nothing: Any = dataclasses.field(default_factory=lambda: jnp.zeros([], dtypes.default_float()), init=False)

    def scaled(self, loss: ratio.Ratio, index: Index) -> jax.Array:
        return _times(loss.total, 1.0)

    def counted(self, loss: ratio.Ratio) -> jax.Array:
        return loss.count

    def of_output(self, loss: ratio.Ratio, index: Index, rows: Any) -> jax.Array:
        return loss.count

    def of_sample(self, loss: ratio.Ratio, index: Index) -> jax.Array:
        return jnp.where(loss.count == 0, 0, arithmetic.reciprocal(loss.count))

    def weight_of(self, counted: Any, devices: int) -> jax.Array:
        return counted

    def finished(self, loss: jax.Array, dtype: Any) -> jax.Array:
        return loss.astype(dtypes.accumulator_dtype(dtype, None))  # a sum, which is yet to be divided


@dataclasses.dataclass(frozen=True)
class ByCounts(Terms):
    """A sum of `Ratio`s, each times the reciprocal of its count: an earlier forward pass has computed the counts."""

    reciprocals: Any = None  # of the sums of counts, by term

    def scaled(self, loss: dict[str, ratio.Ratio], index: Index) -> jax.Array:
        parts = (jnp.where(scale != 0, _times(loss[name].total, scale), 0) for name, scale in self.reciprocals.items())
        return sum(parts)  # type: ignore[return-value]


def divided(sums: Any, counted: Any) -> Any:
    """Divides sums over all micro-batches by the sum of their counts, if there are counts."""
    return ratio.divided(sums, counted) if jax.tree.leaves(counted) else sums


def _times(loss: Any, factor: Any) -> jax.Array:
    """A loss, or the sum of its terms, times a number, in at least float32.

    The backward pass of a loss below 32 bits rounds the number.
    """

    def term(loss: Any) -> jax.Array:
        loss = loss if isinstance(loss, jax.Array) else jnp.asarray(loss)  # a number: a term that is switched off
        dtype = dtypes.accumulator_dtype(loss.dtype, None)
        wide = loss if loss.dtype == dtype else loss.astype(dtype)
        is_one = isinstance(factor, float) and factor == 1.0
        return wide if is_one else wide * jnp.asarray(factor, wide.dtype)

    return functools.reduce(jnp.add, map(term, jax.tree.leaves(loss)))
