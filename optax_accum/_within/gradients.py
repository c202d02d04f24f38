"""Gradients of micro-batches added into one tree, in place or not; or replaced by the last."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, compilers
from optax_accum._core.types import Tree
from optax_accum._loss.backward import Backward
from optax_accum._space.ending import Reduced
from optax_accum._space.space import Space

# For some leaves (fp8 scales) the backward pass returns a new value, not a gradient: of the micro-batches' values the
# largest counts, or the last. Gradients travel as two parallel lists, references and totals; each has None where the
# other has the leaf.
REPLACED: dict[str, Callable[[Any, Any], Any]] = {"max": jnp.maximum, "last": lambda _, new: new}
NAMES = ("mean", *REPLACED)
Leaves = list[Any]


def start(acc: Tree, names: Tree, *, in_place: bool) -> tuple[Leaves, Leaves]:
    """References for leaves that are added to in place, and sums for the others."""
    leaves = list(zip(jax.tree.leaves(names), jax.tree.leaves(acc), strict=True))
    refs = [jax.new_ref(leaf) if in_place and name not in REPLACED else None for name, leaf in leaves]

    def empty(name: Any, leaf: Any) -> Any:
        return jnp.full_like(leaf, -jnp.inf) if name in REPLACED else leaf

    return refs, [empty(*pair) if ref is None else None for ref, pair in zip(refs, leaves, strict=True)]


def add(refs: Leaves, totals: Leaves, backward: Backward, names: Tree) -> tuple[Leaves, list[jax.Array]]:
    """Runs the backward pass; returns the totals with its gradients, and their `|g|^2` if the pass takes it itself."""
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
    leaves = [total if ref is None else jax.freeze(ref) for ref, total in zip(refs, totals, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(acc), leaves)


def added(tree: Tree, names: Tree) -> Tree:
    """The tree with None in place of leaves that get new values instead of gradients."""
    return jax.tree.map(lambda leaf, name: None if name in REPLACED else leaf, tree, names)


def are_added(names: Tree) -> bool:
    """Whether all leaves have gradients, and none gets a new value."""
    return REPLACED.keys().isdisjoint(jax.tree.leaves(names))


def over_devices(names: Tree, space: Space, local: Tree | Reduced, grads: Tree, params: Tree) -> Tree:
    """The gradients of the whole batch; a new value is joined over devices, or the parameter's if none was given."""
    if isinstance(local, Reduced):
        return grads

    def leaf(name: str, local: Any, grad: Any, param: Any) -> Any:
        if name not in REPLACED:
            return grad
        value = space.output(name, local)
        return jnp.where(jnp.isneginf(value), jnp.broadcast_to(param, value.shape).astype(value.dtype), value)

    return jax.tree.map(leaf, names, local, grads, params)
