"""Sums over micro-batches: weighted ones over a window, and the count of all samples trained on."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic
from optax_accum._core.types import Flag, Tree, Weight


class WeightedSum(NamedTuple):
    """`sum(w x)` and `sum(w)` over the window.

    While `mini_step` is 0 they still hold the last window, which the next micro-step overwrites.
    """

    total: Tree
    weight: jax.Array

    @property
    def mean(self) -> Tree:
        """The weighted mean over the window and all its devices; NaN if nothing has been added."""
        devices = tuple(range(jnp.ndim(self.weight)))
        return mean(jax.tree.map(lambda leaf: jnp.sum(leaf, axis=devices), self), empty=jnp.nan)


def add(
    sums: WeightedSum, values: Tree, weight: Weight, first: Flag, value_weight: Weight | None = None
) -> WeightedSum:
    """Adds `values` times their weight, or begins with them where `first`; a weight of theirs may differ from it.

    A weight of 0 adds nothing, not a NaN.
    """
    total = arithmetic.add(sums.total, values, weight if value_weight is None else value_weight, first)
    return WeightedSum(total, arithmetic.add(sums.weight, jnp.ones_like(sums.weight), weight, first))


def mean(sums: WeightedSum, empty: Any = 0.0) -> Tree:
    """The mean of the added values, `empty` if they weigh nothing."""
    nothing = sums.weight == 0
    divisor = jnp.where(nothing, 1, sums.weight)
    return jax.tree.map(lambda total: jnp.where(nothing, empty, total / divisor), sums.total)


_UNIT = 2**20  # below this, float32 counts in sixteenths


class Seen(NamedTuple):
    """The total weight of all emitted windows, as `2**20 * units + rest`.

    A float32 alone would stall at 2**24 examples; this counts whole numbers to 2**51, in windows below 15 million.
    """

    units: jax.Array  # int32 []
    rest: jax.Array  # float [], below 2**20


def as_number(seen: Seen) -> jax.Array:
    return _UNIT * seen.units.astype(seen.rest.dtype) + seen.rest


def see(seen: Seen, weight: jax.Array) -> Seen:
    """Adds the weight of a window, if it is finite."""
    rest = seen.rest + jnp.where(jnp.isfinite(weight), weight, 0)
    units = jnp.floor(rest / _UNIT)
    return Seen(seen.units + units.astype(jnp.int32), rest - units * _UNIT)


def has_seen(seen: Seen, weight: float) -> jax.Array:
    units, rest = divmod(weight, _UNIT)
    units = int(min(units, 2**31 - 1))
    return (seen.units > units) | ((seen.units == units) & (seen.rest >= rest))
