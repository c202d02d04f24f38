"""Arrays: how a message describes one, which are random keys, and copies of them on the host."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any


def short(leaf: Any) -> str:
    """Describes an array by its dtype and shape, anything else by the beginning of its text."""
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    text = repr(leaf)
    return f"{text[:57]}..." if len(text) > 60 else text


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a random key, or an array of them; of the old style, one key."""
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    if dtype is None:
        return False
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == jnp.uint32 and shape == _shape_of_old_keys())


def _shape_of_old_keys() -> tuple[int, ...]:
    return (4,) if jax.config.jax_default_prng_impl in ("rbg", "unsafe_rbg") else (2,)  # type: ignore[attr-defined]


def copied_to_host(leaf: Any) -> Callable[[], Any]:
    """Copies an array to the host; returns a function that gives the array, or its copy once it was donated."""
    if not isinstance(leaf, jax.Array):
        return lambda: leaf
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    data = np.array(jax.random.key_data(leaf) if is_key else leaf)

    def again() -> jax.Array:
        if not leaf.is_deleted():
            return leaf
        if not is_key:  # each device gets its part: the whole may not fit on one
            return placed_like(leaf, data.copy())
        return placed_like(leaf, jax.random.wrap_key_data(jnp.array(data), impl=jax.random.key_impl(leaf)))

    return again


def placed_like(leaf: jax.Array, numbers: Any) -> jax.Array:
    """Returns an array of numbers that lies where another does: on its devices, if somebody put it there.

    If nobody did, nobody puts these anywhere, either: for what is put on a device, `jax.jit` compiles again.
    """
    return jax.device_put(numbers, leaf.sharding) if leaf.committed else jnp.asarray(numbers)
