"""The rows of a batch: how many there are, which leaves have them, which belong together."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core.types import Tree


def count_rows(batch: Tree) -> int:
    """The length of the leading axes, which must be equal and not 0."""
    leaves = jax.tree.leaves_with_path(batch)
    sizes = {jax.tree_util.keystr(path): leaf.shape[0] for path, leaf in leaves if is_split(leaf)}
    if not sizes:
        raise ValueError(
            "A batch must have a leaf with rows to split: the batch arguments hold scalars only. Check batch_argnums."
        )
    (first, rows), *others = sizes.items()
    for path, size in others:
        if size != rows:
            raise ValueError(
                f"All leaves of a batch must have the same number of rows: {_named(first)} has {rows}, {_named(path)} "
                f"has {size}. If that is meant, pass what has no rows as another argument, outside batch_argnums."
            )
    if not rows:
        raise ValueError(f"A batch must have rows: {_named(first)} has shape[0]=0. Skip empty batches.")
    return rows


def count_known_rows(batch: Tree) -> int:
    """Counts rows; raises for a symbolic dimension of `jax.export`."""
    rows: Any = count_rows(batch)
    if not isinstance(rows, int):
        raise ValueError(
            f"The number of rows must be known when tracing: it is the symbolic dimension {rows}. Export a program for "
            "each number of rows; or, in value_and_apply_gradients, pass weight_fn."
        )
    return rows


def is_split(leaf: Any) -> bool:
    """Whether a leaf of a batch is split: arrays are, along their first axis; scalars stay whole."""
    return jnp.ndim(leaf) > 0


def map_rows(fun: Callable[[Any], Any], batch: Tree) -> Tree:
    """Applies a function to each leaf that is split; scalars stay whole."""
    return jax.tree.map(lambda leaf: fun(leaf) if is_split(leaf) else leaf, batch)


def _named(path: str) -> str:
    return f"the leaf {path}" if path else "the batch"
