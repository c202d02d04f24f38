"""The leaves of trees: arrays, keys, their paths, and how errors describe them."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._core.types import Tree
from optax_accum._shared.arrays import short

NOT_ARRAYS = "Pass the arrays alone, such as eqx.partition(model, eqx.is_inexact_array)[0] of Equinox."
NOT_GRADIENTS = "Pass what the gradient function returns: jax.grad(loss)(params, batch)."


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array that JAX can hold: NumPy has arrays of strings and of objects, too."""
    if isinstance(leaf, np.ndarray | np.generic):
        return jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype in (np.bool_, jax.dtypes.float0)
    return isinstance(leaf, jax.Array)


def unwrapped(tree: Tree) -> Tree:
    """The same with the array itself in place of what holds one, such as a variable of NNX."""
    holds = lambda node: callable(getattr(node, "__jax_array__", None))
    return jax.tree.map(lambda leaf: leaf.__jax_array__() if holds(leaf) else leaf, tree, is_leaf=holds)


def is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def parted(tree: Tree, is_chosen: Callable[[Any], bool]) -> tuple[list[Any], Callable[[Iterable[Any]], Tree]]:
    """The chosen leaves of a tree, and a function that puts others in their place."""
    leaves, treedef = jax.tree.flatten(tree)
    chosen = list(map(is_chosen, leaves))

    def filled(others: Iterable[Any]) -> Tree:
        rest = iter(others)
        return treedef.unflatten([next(rest) if taken else leaf for leaf, taken in zip(leaves, chosen, strict=True)])

    return [leaf for leaf, taken in zip(leaves, chosen, strict=True) if taken], filled


def own_buffers(state: Tree, params: Tree) -> Tree:
    """Copies arrays that a new state shares with the parameters or holds twice: a buffer can be donated only once."""
    seen = set(map(id, jax.tree.leaves(params)))

    def own(leaf: Any) -> Any:
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, state)


def for_each_leaf(
    name: str, option: Tree, tree: Tree, remedy: str, tree_of: str = "the parameters", is_leaf: Any = None
) -> Tree:
    """The value of an option for each leaf of a tree; the option is a prefix of the tree."""
    try:
        return jax.tree.broadcast(option, tree, is_leaf=is_leaf)
    except ValueError as error:
        raise ValueError(
            f"{name} must be a prefix of the tree of {tree_of}: {name} has "
            f"{_start_of(jax.tree.structure(option, is_leaf=is_leaf))}, and the tree is "
            f"{_start_of(jax.tree.structure(tree))}. {remedy}"
        ) from error


def _start_of(structure: Any) -> str:
    text = str(structure)
    return f"{text[:297]}..." if len(text) > 300 else text


def by_path(tree: Tree, only: str = "the only leaf") -> list[tuple[str, Any]]:
    """Each leaf with its path, as an error names it: `only` for a tree that is one leaf."""
    return [(jax.tree_util.keystr(path) or only, leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def check_arrays(what: str, tree: Tree, remedy: str) -> None:
    """Raises for a leaf that is neither an array nor a number, naming its path."""
    for path, leaf in by_path(tree):
        is_number = isinstance(leaf, bool | int | float | complex | jax.ShapeDtypeStruct)
        if not (is_array(leaf) or is_number or hasattr(leaf, "__jax_array__")):
            raise TypeError(f"{what} must hold arrays: at {path} there is {short(leaf)}. {remedy}")
