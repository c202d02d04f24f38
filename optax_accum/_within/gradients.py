"""Gradients of micro-batches added into one tree, in place or not; or replaced by the last."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, compilers
from optax_accum._core.types import Tree
from optax_accum._loss.backward import Backward
from optax_accum._space.space import Reduced, Space

# For some leaves (fp8 scales) the backward pass returns a new value, not a gradient: of those of all micro-batches the
# largest counts, or the last. Gradients travel as two parallel lists, references and totals; each has None where the
# other has the leaf.
REPLACED: dict[str, Callable[[Any, Any], Any]] = {"max": jnp.maximum, "last": lambda _, new: new}
NAMES = ("mean", *REPLACED)
Leaves = list[Any]


def start(acc: Tree, names: Tree, *, in_place: bool) -> tuple[Leaves, Leaves]:
    """Returns references to add to, where that is done in place, and sums for the other leaves."""
    leaves = list(zip(jax.tree.leaves(names), jax.tree.leaves(acc), strict=True))
    refs = [jax.new_ref(leaf) if in_place and name not in REPLACED else None for name, leaf in leaves]

    def empty(name: Any, leaf: Any) -> Any:
        return jnp.full_like(leaf, -jnp.inf) if name in REPLACED else leaf

    return refs, [empty(*pair) if ref is None else None for ref, pair in zip(refs, leaves, strict=True)]


def add(refs: Leaves, totals: Leaves, backward: Backward, names: Tree) -> tuple[Leaves, list[jax.Array]]:
    """Runs the backward pass; returns the totals with its gradients, and their `|g|^2` if that is taken inside it."""
    squares: list[jax.Array] = []
    if backward.inside is None:
        grads = jax.tree.leaves(backward.gradient())
    else:
        new = [
            None if total is None else jax.new_ref(compilers.on_mesh_of(total, jnp.zeros_like(total)))
            for total in totals
        ]
        squares = backward.add_to([value if ref is None else ref for ref, value in zip(refs, new, strict=True)])
        grads = [None if value is None else jax.freeze(value) for value in new]

    def joined(name: str, total: Any, grad: Any) -> Any:
        if name in REPLACED:
            return REPLACED[name](total, grad.astype(total.dtype))
        return None if total is None else arithmetic.add(total, grad, 1.0, False)

    return list(map(joined, jax.tree.leaves(names), totals, grads)), squares


def finish(refs: Leaves, totals: Leaves, acc: Tree) -> Tree:
    """Returns the tree of sums and new values."""
    leaves = [total if ref is None else jax.freeze(ref) for ref, total in zip(refs, totals, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(acc), leaves)


def added(tree: Tree, names: Tree) -> Tree:
    """Returns a tree with the leaves that have gradients, not new values."""
    return jax.tree.map(lambda leaf, name: None if name in REPLACED else leaf, tree, names)


def are_added(names: Tree) -> bool:
    """Returns whether all leaves have gradients, and none has new values."""
    return REPLACED.keys().isdisjoint(jax.tree.leaves(names))


def over_devices(names: Tree, space: Space, local: Tree | Reduced, grads: Tree, params: Tree) -> Tree:
    """Returns the gradients of the whole batch; replaced leaves have all devices' values, or the parameter's."""
    if isinstance(local, Reduced):
        return grads

    def leaf(name: str, local: Any, grad: Any, param: Any) -> Any:
        if name not in REPLACED:
            return grad
        value = space.output(name, local)
        return jnp.where(jnp.isneginf(value), jnp.broadcast_to(param, value.shape).astype(value.dtype), value)

    return jax.tree.map(leaf, names, local, grads, params)
