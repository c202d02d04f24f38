"""The numbers of a batch, and how a run changes them."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._arguments.rows import is_split
from optax_accum._core.types import Tree


def floats(batch: Tree) -> Iterator[tuple[str, np.ndarray, Callable[[np.ndarray], Tree]]]:
    """Yields for each leaf of real numbers in rows its path, its numbers, and what puts others in their place."""
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(batch)):
        dtype = getattr(leaf, "dtype", jnp.result_type(leaf))
        if is_split(leaf) and np.size(leaf) and jnp.issubdtype(dtype, jnp.floating):
            as_it_came = functools.partial((np if isinstance(leaf, np.ndarray) else jnp).asarray, dtype=dtype)

            def put(new: Any, number: Any = number, as_it_came: Any = as_it_came) -> Any:
                return _put(batch, number, as_it_came(new))

            yield jax.tree_util.keystr(path), wide(leaf), put


def _put(batch: Tree, number: int, leaf: Any) -> Tree:
    """Returns a batch with another leaf in one place."""
    leaves, treedef = jax.tree.flatten(batch)
    return jax.tree.unflatten(treedef, [*leaves[:number], leaf, *leaves[number + 1 :]])


def moved(leaf: np.ndarray) -> list[np.ndarray]:
    """Returns a leaf moved by two constants, to means of one and three standard deviations.

    There weights of rows, though nearly alike before, are not: moved they change what they weigh.
    """
    return [leaf - np.mean(leaf) + deviations * np.std(leaf) for deviations in (1, 3)]


def moved_apart(leaf: np.ndarray) -> np.ndarray:
    """Returns a leaf with each row moved by a number of its own."""
    return leaf + np.std(leaf) * numbers_by_row(leaf)


def numbers_by_row(leaf: np.ndarray) -> np.ndarray:
    """Returns a number of its own for each row of a leaf."""
    return np.random.default_rng(0).uniform(0.5, 2, (len(leaf), *[1] * (leaf.ndim - 1)))


def wide(leaf: Any) -> np.ndarray:
    """Returns an array of 64-bit numbers."""
    return np.asarray(leaf).astype(np.complex128 if jnp.iscomplexobj(leaf) else np.float64)


def largest(leaf: np.ndarray) -> float:
    """Returns the largest absolute value."""
    return float(np.max(np.abs(leaf), initial=0))


def epsilons(text: str) -> list[float]:
    """Returns the machine epsilons of the floats in the text of a traced program."""
    known = {"f64": 2**-52, "c128": 2**-52, "f32": 2**-23, "c64": 2**-23, "f16": 2**-10, "bf16": 2**-7}
    return [known[name] for name in re.findall(r"\b(\w+)\[", text) if name in known]
