"""Owns weighted sums over a window: of mean arguments, metrics, moments of BatchNorm. All begin anew in one way."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any


class WeightedSum(NamedTuple):
    """`sum(w x)` and `sum(w)` over the window.

    While `mini_step` is 0 they are those of the window before, which the next micro-step overwrites.
    """

    total: Tree
    weight: jax.Array


def add(sums: WeightedSum, values: Tree, weight: Any, first: Any) -> WeightedSum:
    """Returns the sums with `values` in them, or only these where `first`. A weight of 0 adds nothing, not a NaN."""

    def added(total: jax.Array, value: Any) -> jax.Array:
        share = jnp.where(weight == 0, 0, weight * value)
        return jnp.where(first, 0, total) + share.astype(total.dtype)

    return WeightedSum(jax.tree.map(added, sums.total, values), added(sums.weight, jnp.ones_like(sums.weight)))


def mean(sums: WeightedSum, empty: Any = 0.0) -> Tree:
    """Returns the mean of what has been added, `empty` if that weighs nothing."""
    nothing = sums.weight == 0
    divisor = jnp.where(nothing, 1, sums.weight)
    return jax.tree.map(lambda total: jnp.where(nothing, empty, total / divisor), sums.total)
