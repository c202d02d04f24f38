"""How parts of a value are joined: a sum, or an extreme.

The maximum over a batch begins with -inf, and is the larger one of the maxima of two micro-batches.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import dtypes


@dataclasses.dataclass(frozen=True)
class Fold:
    """A way to join parts.

    Attributes:
      nothing: `nothing(dtype)` is the number that changes no result.
      join: joins two parts.
      along: `along(array, axis=)` joins all parts along an axis.
    """

    nothing: Callable[[Any], Any]
    join: Callable[[jax.Array, jax.Array], jax.Array]
    along: Callable[..., jax.Array]


def _sum_along(parts: jax.Array, axis: Any) -> jax.Array:
    return jnp.sum(parts, axis=axis, dtype=parts.dtype)  # integers stay small, and overflow, as in the loss


SUM = Fold(lambda dtype: 0, jnp.add, _sum_along)
MAX = Fold(dtypes.lowest, jnp.maximum, jnp.max)
MIN = Fold(dtypes.highest, jnp.minimum, jnp.min)
