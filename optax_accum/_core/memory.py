"""Owns what lies in the memory of the host: moved to the device where it is used, and back."""

from typing import Any

import jax

Tree = Any


def to_device(tree: Tree) -> Tree:
    """Returns `tree` with the leaves that lie in host memory moved to the device."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if on_host(leaf) else leaf, tree)


def to_memory_of(tree: Tree, like: Tree) -> Tree:
    """Returns `tree` with the leaves moved to host memory that lie there in `like`."""
    move = lambda leaf, old: jax.device_put(leaf, jax.memory.Space.Host) if on_host(old) else leaf
    return jax.tree.map(move, tree, like)


def on_host(leaf: Any) -> bool:
    """Returns whether an array, or a value inside jit, lies in host memory."""
    return isinstance(leaf, jax.Array) and jax.typeof(leaf).memory_space == jax.memory.Space.Host
