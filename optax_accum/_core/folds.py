"""How parts of a value are joined: a sum, or an extreme."""

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import dtypes


def _sum_along(parts: jax.Array, axis: Any) -> jax.Array:
    return jnp.sum(parts, axis=axis, dtype=parts.dtype)  # integers stay small, and overflow, as in the loss


class Fold(enum.Enum):
    """A way to join the parts of a value: `SUM`, `MAX` or `MIN`.

    The maximum over a batch begins with -inf, and is the larger one of the
    maxima of two micro-batches.

    Attributes:
      nothing: `nothing(dtype)` is the number that changes no result.
      join: joins two parts.
      along: `along(array, axis=)` joins all parts along an axis.
    """

    SUM = (lambda dtype: 0, jnp.add, _sum_along)
    MAX = (lambda dtype: dtypes.extreme(dtype, -1), jnp.maximum, jnp.max)
    MIN = (lambda dtype: dtypes.extreme(dtype, 1), jnp.minimum, jnp.min)

    def __init__(
        self,
        nothing: Callable[[Any], Any],
        join: Callable[[jax.Array, jax.Array], jax.Array],
        along: Callable[..., jax.Array],
    ):
        self.nothing, self.join, self.along = nothing, join, along


SUM, MAX, MIN = Fold.SUM, Fold.MAX, Fold.MIN
