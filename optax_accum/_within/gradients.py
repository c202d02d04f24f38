"""Owns the gradients of micro-batches on their way into one tree: added, in place or not; of some leaves kept."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic
from optax_accum._core.arithmetic import Tree
from optax_accum._core.backward import Backward
from optax_accum._space.space import Space

# What becomes of the gradients of a leaf. Those that are not added are new values, which a backward pass returns in the
# place of gradients. Leaves are numbered as in the parameters; None stands where the other list has the leaf.
KEPT = {"max": jnp.maximum, "last": lambda _, new: new}
NAMES = ("mean", *KEPT)
Leaves = list[Any]


def start(acc: Tree, names: list[str], *, in_place: bool) -> tuple[Leaves | None, Leaves]:
    """Returns references to add to, if that is done in place, and what is added to beside them."""
    leaves = list(zip(names, jax.tree.leaves(acc), strict=True))
    empty = lambda name, leaf: leaf if name == "mean" else jnp.full_like(leaf, -jnp.inf)
    if not in_place:
        return None, [empty(*pair) for pair in leaves]
    refs = [None if name in KEPT else jax.new_ref(leaf) for name, leaf in leaves]
    return refs, [empty(*pair) if pair[0] in KEPT else None for pair in leaves]


def add(refs: Leaves | None, totals: Leaves, backward: Backward, names: list[str]) -> Leaves:
    """Runs the backward pass, and returns the totals with its gradients."""
    if refs is None:
        grads = jax.tree.leaves(backward.gradient())
    else:
        own = [
            jax.new_ref(jnp.zeros_like(total)) if ref is None else ref for ref, total in zip(refs, totals, strict=True)
        ]
        backward.add_to(jax.tree.unflatten(jax.tree.structure(backward.params), own))
        grads = [jax.freeze(mine) if ref is None else None for ref, mine in zip(refs, own, strict=True)]
    never = jnp.array(False)
    joined = lambda name, total, grad: (
        KEPT[name](total, grad.astype(total.dtype)) if name in KEPT else arithmetic.add(total, grad, 1.0, never)
    )
    return [
        None if total is None else joined(name, total, grad)
        for name, total, grad in zip(names, totals, grads, strict=True)
    ]


def finish(refs: Leaves | None, totals: Leaves, acc: Tree) -> Tree:
    """Returns the tree of what was added, and kept."""
    refs = refs or [None] * len(totals)
    leaves = [total if ref is None else jax.freeze(ref) for ref, total in zip(refs, totals, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(acc), leaves)


def added(tree: Tree, names: list[str]) -> Tree:
    """Returns a tree with the leaves that are added, and not kept."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([None if name in KEPT else leaf for name, leaf in zip(names, leaves, strict=True)])


def over_devices(names: list[str], space: Space, own: Tree, grads: Tree, params: Tree) -> Tree:
    """Returns the gradients of the whole batch, with what was kept of all devices; parameters where nothing was run."""

    def leaf(name: str, own: Any, grad: Any, param: Any) -> Any:
        if name == "mean":
            return grad
        value = space.output(name, own)
        return jnp.where(jnp.isneginf(value), jnp.broadcast_to(param, value.shape).astype(value.dtype), value)

    treedef = jax.tree.structure(grads)
    return treedef.unflatten(map(leaf, names, *map(jax.tree.leaves, (own, grads, params))))
