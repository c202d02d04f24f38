"""Which rows are in which micro-batch: every k-th row is in the same one, and the last ones are in one of their own.

Of 10 rows in micro-batches of 3, rows 0, 3 and 6 are in the first, and row 9 in a fourth.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._arguments.rows import count_known_rows, map_rows
from optax_accum._core import compilers
from optax_accum._core.types import Tree
from optax_accum._shared.checks import as_positive
from optax_accum._space import meshes

# n rows, k full micro-batches of b rows, and one of the r rows that are left; m = k + (r > 0) in all.


class Split(NamedTuple):
    """How `rows = full * size + rest` rows are split.

    Row j is in micro-batch `j mod full`; the last `rest` rows are in one of their own.
    """

    rows: int
    size: int
    full: int
    rest: int

    @property
    def microbatches(self) -> int:
        """The number of micro-batches."""
        return self.full + (self.rest > 0)

    def is_rest(self, index: int | jax.Array) -> bool:
        return isinstance(index, int) and index == self.full


class Sizes(NamedTuple):
    """The size that a user asked for: the number of micro-batches, or their rows."""

    num_microbatches: int | None
    microbatch_size: int | None


def as_sizes(num_microbatches: Any, microbatch_size: Any) -> Sizes:
    """Checks the sizes: exactly one of the two numbers."""
    if (num_microbatches is None) == (microbatch_size is None):
        whole = " To accumulate across calls alone, pass num_microbatches=1." if num_microbatches is None else ""
        raise ValueError(
            "Exactly one of num_microbatches and microbatch_size must be given: "
            f"num_microbatches={num_microbatches}, microbatch_size={microbatch_size}. Pass one of them.{whole}"
        )
    return Sizes(as_positive("num_microbatches", num_microbatches), as_positive("microbatch_size", microbatch_size))


def split_rows(batch: Tree, sizes: Sizes, devices: int) -> Split:
    """How one device's rows of `batch` are split, from shapes alone."""
    rows, (num_microbatches, microbatch_size) = count_known_rows(batch), sizes
    if num_microbatches is not None and num_microbatches > rows:
        where = "the batch has" if devices == 1 else f"each of {devices} devices has"
        raise ValueError(
            f"There must be a row for each micro-batch: num_microbatches={num_microbatches}, and {where} {rows} rows. "
            f"Pass num_microbatches={rows} at most."
        )
    if microbatch_size is not None:
        if microbatch_size % devices:
            raise ValueError(
                f"The rows of a micro-batch must divide over the devices: microbatch_size="
                f"{microbatch_size}, {devices} devices. Pass a multiple of {devices}."
            )
        size = min(rows, microbatch_size // devices)
    else:
        size = -(-rows // (num_microbatches or 1))
    return Split(rows, size, rows // size, rows % size)


def interleaved(split: Split, batch: Tree) -> Tree:
    """The full micro-batches with their index as the second axis: leaves [b, k, ...] and scalars.

    A reshape: interleaving leaves each row on the device where it is.
    """

    def stack(leaf: jax.Array) -> jax.Array:
        rows = meshes.splittable(leaf, split.size)
        rows = rows if not split.rest else rows[: split.full * split.size]
        return compilers.reshaped(rows, split.size, split.full, *rows.shape[1:])

    return map_rows(stack, _arrays(batch))


def micro_batch(batch: Tree, index: int | jax.Array) -> Tree:
    """Full micro-batch `index`: leaves [b, ...]."""
    return map_rows(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, axis=1, keepdims=False), batch)


def remainder(split: Split, batch: Tree) -> Tree:
    """The micro-batch of the remaining rows: leaves [r, ...]."""
    return map_rows(lambda leaf: meshes.splittable(leaf, split.rest)[split.rows - split.rest :], _arrays(batch))


def _arrays(batch: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf), batch)
