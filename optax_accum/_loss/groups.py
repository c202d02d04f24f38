"""Groups of leaves that are measured apart: their names, and the squared norm of each."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, compilers
from optax_accum._core.dtypes import default_float
from optax_accum._core.leaves import by_path, for_each_leaf
from optax_accum._core.types import Tree
from optax_accum._loss import sinks

ALL = "all"  # the one group, where none are named
ByGroup = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Layers:
    """A group for leaves that stack layers along their first axis.

    Layer i is measured separately, as `name/i`.
    """

    name: str


Group = str | Layers


def names_of(groups: Tree, params: Tree) -> list[str]:
    """Returns the names of the groups; of all where parameters have no leaves, as those that Optax's tools make."""
    if not jax.tree.leaves(params):
        return [ALL] if groups is None else jax.tree.leaves(groups)
    names: dict[str, Group] = {}
    for group, leaf in _with_group(groups, params):
        for name in _names(group, jnp.shape(leaf)):
            if names.setdefault(name, group) != group:
                raise ValueError(
                    f"Two groups must not have one name: {name!r} is {names[name]!r} and {group!r}. Rename one."
                )
    return list(names)


def no_squares(groups: Tree, params: Tree) -> list[jax.Array]:
    """Returns zeros for the squares of each leaf that has a gradient: [], or [n] of so many layers."""
    leaves: dict[Any, Any] = {}  # those whose squares are of one type begin with the same zeros: to trace is dear
    kinds = []
    for group, leaf in _with_group(groups, params):
        kinds.append((jnp.shape(leaf)[:1] if isinstance(group, Layers) else (), compilers.varying_axes(leaf)))
        leaves.setdefault(kinds[-1], leaf)
    zeros = {kind: sinks.empty(leaf, kind[0], default_float()) for kind, leaf in leaves.items()}
    return [zeros[kind] for kind in kinds]


def squared_norms(groups: Tree, tree: Tree, like: jax.Array) -> ByGroup:
    """Returns `|g|^2` of each group: one number, or one for each row where `like` is [d], of leaves [d, ...]."""

    def squared_norm(group: Group, leaf: Any) -> jax.Array:
        return arithmetic.squared_norm(jnp.asarray(leaf), like.dtype, like.ndim + isinstance(group, Layers))

    return _added((group, squared_norm(group, leaf)) for group, leaf in _with_group(groups, tree))


def by_group(groups: Tree, squares: Tree) -> ByGroup:
    """Returns the squares of leaves, added by group."""
    return _added(_with_group(groups, squares))


def _added(squares: Iterable[tuple[Group, jax.Array]]) -> ByGroup:
    """Returns the squares of leaves, added by group: [], or [d]; of layers they come with one more axis, the last."""
    sums: ByGroup = {}
    for group, square in squares:
        for layer, name in enumerate(_names(group, square.shape[-1:])):
            part = square[..., layer] if isinstance(group, Layers) else square
            sums[name] = sums[name] + part if name in sums else part
    return sums


def _names(group: Group, shape: tuple[int, ...]) -> list[str]:
    """Returns the names of the groups that a leaf belongs to: one, or one for each of its layers."""
    return [f"{group.name}/{layer}" for layer in range(shape[0])] if isinstance(group, Layers) else [group]


def _with_group(groups: Tree, tree: Tree) -> list[tuple[Group, Any]]:
    """Returns each leaf that has a gradient with its group."""
    groups = ALL if groups is None else groups
    of_leaves = jax.tree.leaves(
        for_each_leaf("groups", groups, tree, "Name one group for each branch; of a module of NNX, in an nnx.State.")
    )
    pairs = list(zip(of_leaves, by_path(tree), strict=True))
    for group, (path, leaf) in pairs:
        if not isinstance(group, Group):
            raise TypeError(f'groups must have strings as leaves: {group!r}. Name a group, such as "embedding".')
        if isinstance(group, Layers) and not jnp.ndim(leaf):
            raise ValueError(
                f"Layers are stacked along the first axis of a leaf: {group!r} has {path}, one number. Name a string "
                "for it."
            )
    return [(group, leaf) for group, (_, leaf) in pairs if jnp.issubdtype(getattr(leaf, "dtype", float), jnp.inexact)]
