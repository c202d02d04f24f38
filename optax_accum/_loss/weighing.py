"""How much a micro-batch of a window counts: by a weight known before (8 rows), or the count of its `Ratio` (tokens).

`_explain/weigher.py` reads the weight of any other loss off its trace.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core import dtypes
from optax_accum._core.types import Flag, Weight
from optax_accum._loss import ratio

MeanAndFactor = Callable[[Weight], tuple[Weight, Weight]]  # see `Device.mean_and_factor`


class Amount(NamedTuple):
    """What a micro-batch adds to a window, whose gradient is `sum(grad_weight * gradient) / kept(sum(weight))`.

    Both numbers are the denominator of its loss, unless the loss keeps that from zero: `total / maximum(count, 1)` has
    `weight=count` and `grad_weight=kept(count)`, so that its total is added where the count is 0, too.

    Attributes:
      kept: the denominator as a function of the count; None for the count itself.
    """

    weight: Weight
    grad_weight: Weight
    kept: jax.tree_util.Partial | None = None

    @classmethod
    def of(cls, weight: Weight) -> "Amount":
        """That of a micro-batch whose loss is divided by its weight."""
        return cls(weight, weight)

    @classmethod
    def given(cls, weight: Weight, multiplies: Any) -> "Amount":
        """That of a micro-batch whose gradient is multiplied by a number, or by `kept(weight)`; None: by its weight."""
        if not callable(multiplies):
            return cls(weight, weight if multiplies is None else multiplies)
        kept: Any = jax.tree_util.Partial(multiplies)
        return cls(weight, kept(jnp.asarray(weight)), kept)

    @classmethod
    def of_ratio(cls, total: Any, count: Any) -> "Amount":
        """That of a `Ratio`: if its count is 0, a finite total is added, and one of 0 * (0 / 0) is left out."""
        adds = (count != 0) | jnp.isfinite(total)
        return cls(count, jnp.where(adds, ratio.kept_from_zero(count), 0))

    @property
    def numbers(self) -> tuple[Weight, ...]:
        """The two; the one if they are the same."""
        return (self.weight,) if self.grad_weight is self.weight else (self.weight, self.grad_weight)

    @property
    def counts(self) -> Flag:
        """Whether one of them is not 0."""
        return functools.reduce(operator.or_, (number != 0 for number in self.numbers))

    def map(self, fun: Callable[[Weight], Weight]) -> "Amount":
        mapped = list(map(fun, self.numbers))
        return Amount(mapped[0], mapped[-1], self.kept)

    @property
    def multiplies(self) -> Any:
        """What multiplies its gradient if that is not its weight: a number, or a function of the weight; or None."""
        return self.kept or (None if self.grad_weight is self.weight else self.grad_weight)

    def divides(self, weight: Weight) -> Any:
        """What divides the sum of a window of this weight."""
        return self.kept(jnp.asarray(weight)) if self.kept else weight


@dataclasses.dataclass(frozen=True)
class ByWeight:
    """A micro-batch of a window, whose amount is known beforehand; `factor` also scales its loss."""

    amount: Amount
    factor: Weight = 1.0

    def scaled(self, loss: Any) -> jax.Array:
        """The loss that is differentiated, []."""
        wide, factor = _wide(loss), self.factor
        is_one = isinstance(factor, float) and factor == 1.0
        return wide if is_one else wide * jnp.asarray(factor, wide.dtype)

    def counted(self, loss: Any) -> Amount:
        """How much it counts."""
        return self.amount

    def value(self, loss: Any) -> Any:
        """The loss as the user gets it."""
        return loss


@dataclasses.dataclass(frozen=True)
class ByCount:
    """A micro-batch of a window whose loss is a `Ratio`: its count is its weight.

    If the loss communicates between devices, its weight is the mean of their counts. In a window a count of 0 leaves
    its total; elsewhere the loss and its gradient are then 0.
    """

    mean_and_factor: MeanAndFactor
    in_window: bool
    amount: None = None  # known only after the loss has run

    def scaled(self, loss: ratio.Ratio) -> jax.Array:
        count = jnp.asarray(self.counted(loss).weight)
        return _wide(ratio.divided(jnp.asarray(loss.total), ratio.kept_from_zero(count) if self.in_window else count))

    def counted(self, loss: ratio.Ratio) -> Amount:
        return Amount.of_ratio(loss.total, self.mean_and_factor(loss.count)[0])

    def value(self, loss: ratio.Ratio) -> jax.Array:
        return ratio.divided(jnp.asarray(loss.total), loss.count)


def _wide(loss: Any) -> jax.Array:
    """A loss in at least float32: the backward pass of a loss below 32 bits would round what multiplies it."""
    loss = jnp.asarray(loss)
    return loss.astype(dtypes.accumulator_dtype(loss.dtype, None))
