"""A count of all samples trained on, exact where a float32 would stall."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_UNIT = 2**20  # below this, float32 counts in sixteenths


class Seen(NamedTuple):
    """The total weight of all emitted windows, as `2**20 * units + rest`.

    A float32 alone would stall at 2**24 examples; this counts whole numbers to 2**51, in windows below 15 million.
    """

    units: jax.Array  # int32 []
    rest: jax.Array  # float [], below 2**20


def new_seen() -> Seen:
    """Returns the count of nothing."""
    return Seen(jnp.zeros([], jnp.int32), jnp.zeros([]))


def as_number(seen: Seen) -> jax.Array:
    """Returns the count as one float, for a log."""
    return _UNIT * seen.units.astype(seen.rest.dtype) + seen.rest


def see(seen: Seen, weight: jax.Array) -> Seen:
    """Returns the count with a window's weight in it, if that is a number."""
    rest = seen.rest + jnp.where(jnp.isfinite(weight), weight, 0)
    units = jnp.floor(rest / _UNIT)
    return Seen(seen.units + units.astype(jnp.int32), rest - units * _UNIT)


def has_seen(seen: Seen, weight: float) -> jax.Array:
    """Returns whether so much has been seen."""
    units, rest = divmod(weight, _UNIT)
    units = int(min(units, 2**31 - 1))
    return (seen.units > units) | ((seen.units == units) & (seen.rest >= rest))
