"""The cut: which rows are in which micro-batch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._arguments import checks
from optax_accum._arguments.rows import check_groups, count_known_rows, of_rows
from optax_accum._core import compilers
from optax_accum._core.leaves import by_path
from optax_accum._core.types import Tree
from optax_accum._space import meshes

# n rows, k full micro-batches of b rows, and one of the r rows that are left; m = k + (r > 0) in all.


class Split(NamedTuple):
    """How `rows = full * size + rest` rows are cut.

    Group j of `group` consecutive rows is in micro-batch `j mod full`; the last `rest` rows are in one of their own.
    """

    rows: int
    size: int
    full: int
    rest: int
    group: int = 1
    stacked: bool = False  # the batch came cut

    @property
    def parts(self) -> int:
        """The number of micro-batches."""
        return self.full + (self.rest > 0)

    def is_rest(self, index: int | jax.Array) -> bool:
        return isinstance(index, int) and index == self.full


class Sizes(NamedTuple):
    """The sizes that a user asked for: the number of micro-batches or their rows, and the rows of a group.

    If `stacked`, the batch comes cut: [k, m, ...].
    """

    num_microbatches: int | None
    microbatch_size: int | None
    group: int
    stacked: bool = False


def as_sizes(num_microbatches: Any, microbatch_size: Any, group_size: Any, stacked: bool = False) -> Sizes:
    """Checks the sizes: exactly one of the two numbers, or neither for a stacked batch."""
    if stacked:
        if (num_microbatches, microbatch_size, group_size) != (None, None, 1):
            raise ValueError(
                "A stacked batch is cut already: stacked=True, and num_microbatches, microbatch_size or group_size is "
                "given. Leave those out."
            )
        return Sizes(None, None, 1, stacked=True)
    if (num_microbatches is None) == (microbatch_size is None):
        whole = " To accumulate across calls alone, pass num_microbatches=1." if num_microbatches is None else ""
        raise ValueError(
            "Exactly one of num_microbatches and microbatch_size must be given: "
            f"num_microbatches={num_microbatches}, microbatch_size={microbatch_size}. Pass one of them.{whole}"
        )
    number = checks.as_positive("num_microbatches", num_microbatches)
    size = checks.as_positive("microbatch_size", microbatch_size)
    return Sizes(number, size, checks.as_positive("group_size", group_size) or 1)


def rows_first(batch: Tree) -> Tree:
    """Turns a stacked batch [k, m, ...] into [m, k, ...], whose rows can be dealt out to devices.

    Leaves may differ in m, as the nodes and edges of graphs do; all have one k.
    """
    counts = set()
    for path, leaf in by_path(batch, "it"):
        if jnp.ndim(leaf) < 2:
            raise ValueError(
                "A stacked batch has leaves [k, m, ...], m rows for each of k micro-batches: "
                f"{path} has shape {jnp.shape(leaf)}. Stack a list of micro-batches "
                "(padded to one length): jax.tree.map(lambda *leaves: jnp.stack(leaves), *micro_batches). Give a leaf "
                "with one number for each micro-batch a second axis, of 1."
            )
        if leaf.shape[0] and not leaf.shape[1]:
            raise ValueError(
                f"Each micro-batch of a stacked batch [k, m, ...] must have rows: {path} has shape {jnp.shape(leaf)}. "
                "Skip empty micro-batches, or pad them and give them a weight of zero."
            )
        counts.add(leaf.shape[0])
    if counts == {0}:
        raise ValueError("A stacked batch must hold a micro-batch: k=0 in [k, m, ...]. Skip empty batches.")
    if len(counts) != 1:
        raise ValueError(
            f"The leaves of a stacked batch [k, m, ...] have one k: they have {sorted(counts)}. Stack as many "
            "micro-batches in each."
        )
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), batch)


def split_rows(batch: Tree, sizes: Sizes, devices: int) -> Split:
    """How one device's rows of `batch` are cut, from shapes alone."""
    if sizes.stacked:
        size, number, *_ = jax.tree.leaves(batch)[0].shape  # of `rows_first`: [m, k, ...]
        return Split(size * number, size, number, 0, stacked=True)
    rows, (num_microbatches, microbatch_size, group, _) = count_known_rows(batch), sizes
    where = "the batch has" if devices == 1 else f"each of {devices} devices has"
    check_groups(where, rows, group)
    if num_microbatches is not None and num_microbatches > rows // group:
        what, has = ("row", f"{rows} rows") if group == 1 else ("group", f"{rows // group} groups of {group} rows")
        raise ValueError(
            f"There must be a {what} for each micro-batch: num_microbatches={num_microbatches}, and {where} {has}. "
            f"Pass num_microbatches={rows // group} at most."
        )
    if microbatch_size is not None:
        if microbatch_size % devices:
            raise ValueError(
                f"The rows of a micro-batch must divide over the devices: microbatch_size="
                f"{microbatch_size}, {devices} devices. Pass a multiple of {devices}."
            )
        size = microbatch_size // devices
        check_groups("a micro-batch on one device has", size, group)
        size = min(rows, size)
    else:
        size = -(-rows // group // (num_microbatches or 1)) * group
    return Split(rows, size, rows // size, rows % size, group)


def interleaved(split: Split, batch: Tree) -> Tree:
    """The full micro-batches with their index as the second axis: leaves [b, k, ...] and scalars.

    A reshape: interleaving leaves each row on the device where it is. With groups of g rows, [b / g, k, g, ...].
    """
    count, together = split.size // split.group, () if split.group == 1 else (split.group,)

    def stack(leaf: jax.Array) -> jax.Array:
        rows = meshes.cuttable(leaf, count)
        rows = rows if not split.rest else rows[: split.full * split.size]
        return compilers.reshaped(rows, count, split.full, *together, *rows.shape[1:])

    return of_rows(stack, _arrays(batch))


def micro_batch(split: Split, batch: Tree, index: int | jax.Array) -> Tree:
    """Full micro-batch `index`: leaves [b, ...]."""
    take = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, axis=1, keepdims=False)
    return ungrouped(split, of_rows(take, batch))


def ungrouped(split: Split, micro_batch: Tree) -> Tree:
    """Merges the axes of a micro-batch [b / g, g, ...] to [b, ...]."""
    if split.group == 1:
        return micro_batch
    return of_rows(lambda leaf: jax.lax.collapse(leaf, 0, 2), micro_batch)


def remainder(split: Split, batch: Tree) -> Tree:
    """The micro-batch of the remaining rows: leaves [r, ...]."""
    return of_rows(lambda leaf: meshes.cuttable(leaf, split.rest)[split.rows - split.rest :], _arrays(batch))


def _arrays(batch: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf), batch)
