"""Gradients of micro-batches added into one tree, in place or not; or replaced by the last."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic
from optax_accum._core.types import Tree
from optax_accum._loss.backward import Adding, Backward
from optax_accum._space.ending import Reduced
from optax_accum._space.space import Space

# For some leaves (fp8 scales) the backward pass returns a new value, not a gradient: of the micro-batches' values the
# largest counts, or the last.
REPLACED: dict[str, Callable[[Any, Any], Any]] = {"max": jnp.maximum, "last": lambda _, new: new}
NAMES = ("mean", *REPLACED)
Leaves = list[Any]


def start(acc: Tree, names: Tree) -> Leaves:
    """The sums of gradients before the first micro-batch, leaf by leaf."""
    pairs = zip(jax.tree.leaves(names), jax.tree.leaves(acc), strict=True)
    return [jnp.full_like(leaf, -jnp.inf) if name in REPLACED else leaf for name, leaf in pairs]


def add(totals: Leaves, backward: Backward, names: Tree, how: Adding | None) -> tuple[Leaves, list[jax.Array]]:
    """Runs the backward pass; returns the totals with its gradients, and their `|g|^2` if the pass takes it itself."""
    kinds = jax.tree.leaves(names)
    if how is None:
        grads, added, squares = jax.tree.leaves(backward.gradient()), totals, []
    else:
        sums = [None if name in REPLACED else total for name, total in zip(kinds, totals, strict=True)]
        added, squares, grads = backward.add_to(sums, how)

    def joined(name: str, total: Any, done: Any, grad: Any) -> Any:
        if name in REPLACED:
            return REPLACED[name](total, grad.astype(total.dtype))
        return done if how is not None else arithmetic.add(total, grad, 1.0, False)

    return list(map(joined, kinds, totals, added, grads)), squares


def finish(totals: Leaves, acc: Tree) -> Tree:
    return jax.tree.unflatten(jax.tree.structure(acc), totals)


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
