"""Weighted sums over a window: mean arguments, metrics, moments of BatchNorm."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic
from optax_accum._core.types import Tree


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


def add(sums: WeightedSum, values: Tree, weight: Any, first: Any) -> WeightedSum:
    """Returns the sums with `values` in them, or only these where `first`. A weight of 0 adds nothing, not a NaN."""
    return arithmetic.add(sums, WeightedSum(values, jnp.ones_like(sums.weight)), weight, first)


def mean(sums: WeightedSum, empty: Any = 0.0) -> Tree:
    """Returns the mean of the added values, `empty` if they weigh nothing."""
    nothing = sums.weight == 0
    divisor = jnp.where(nothing, 1, sums.weight)
    return jax.tree.map(lambda total: jnp.where(nothing, empty, total / divisor), sums.total)
