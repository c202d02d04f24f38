"""Arrays in the host's memory: moved to the device for use, and back."""

import jax

from optax_accum._core import compilers
from optax_accum._core.types import Tree


def to_device(tree: Tree) -> Tree:
    """Moves leaves that lie in host memory to the device."""
    return jax.tree.map(lambda leaf: compilers.moved(leaf, to_host=False) if compilers.on_host(leaf) else leaf, tree)


def to_memory_of(tree: Tree, like: Tree) -> Tree:
    """Moves leaves to host memory where the leaf of `like` lies there."""
    move = lambda leaf, old: compilers.moved(leaf, to_host=True) if compilers.on_host(old) else leaf
    return jax.tree.map(move, tree, like)
