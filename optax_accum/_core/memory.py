"""Arrays in the host's memory: moved to the device for use, and back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._core import compilers
from optax_accum._core.types import Tree


def to_device(tree: Tree) -> Tree:
    """Moves leaves that lie in host memory to the device."""
    return jax.tree.map(lambda leaf: compilers.moved(leaf, to_host=False) if compilers.on_host(leaf) else leaf, tree)


def to_memory_of(tree: Tree, like: Tree) -> Tree:
    """Moves leaves to host memory where the leaf of `like` lies there."""
    move = lambda leaf, old: compilers.moved(leaf, to_host=True) if compilers.on_host(old) else leaf
    return jax.tree.map(move, tree, like)


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
            return jax.device_put(data.copy(), leaf.sharding) if leaf.committed else jnp.array(data)
        key = jax.random.wrap_key_data(jnp.array(data), impl=jax.random.key_impl(leaf))
        return jax.device_put(key, leaf.sharding) if leaf.committed else key

    return again
