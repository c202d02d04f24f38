"""Random bits of the whole batch, of which each micro-batch draws its own rows.

The n-th number that `jax.random` draws from a threefry key depends on the key and n alone, so a micro-batch draws the
numbers that its rows have in the whole batch, and the whole batch's are never there at once.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import random

from optax_accum._rows.traces import COUPLED, View

_DTYPES = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def is_drawn_by_rows(view: View) -> bool:
    """Whether an equation draws random bits, and each row can be drawn alone."""
    if view.name != "random_bits" or view.has_rows or view.outs[0] in (None, COUPLED):
        return False
    key = view.single.invars[0].aval
    small = math.prod(view.params["shape"]) < 2**32 and view.params["bit_width"] in _DTYPES
    return is_threefry(key) and small and key.shape == () and bool(jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]


def is_threefry(key: Any) -> bool:
    """Whether each of several keys draws as it does alone: others draw for all keys at once."""
    return "fry" in str(key.dtype)


def at(equation: Any, values: Sequence[Any], axis: int, places: jax.Array) -> jax.Array:
    """The random bits of an equation at these places along an axis."""
    params = equation.params
    return bits(values[0], params["shape"], axis, places, params["bit_width"])


def bits(key: jax.Array, shape: tuple[int, ...], axis: int, rows: jax.Array, bit_width: int) -> jax.Array:
    """Draws some of the numbers that `random_bits` draws in this shape: at these places along the axis.

    `rows` [m] holds the places. The result has length m along the axis.
    """
    places = [jnp.arange(size, dtype=jnp.uint32) for size in shape]
    places[axis] = rows.astype(jnp.uint32)
    number = jnp.zeros((1,) * len(shape), jnp.uint32)
    for dim, place in enumerate(places):
        stride = math.prod(shape[dim + 1 :])
        number = number + jnp.expand_dims(place * jnp.uint32(stride), [d for d in range(len(shape)) if d != dim])
    counts = number.reshape(-1)
    words = random.threefry_2x32(jax.random.key_data(key), jnp.concatenate([jnp.zeros_like(counts), counts]))
    high, low = jnp.split(words, 2)
    return (high ^ low).astype(_DTYPES[bit_width]).reshape(number.shape)
