"""Owns the cut: which rows are in which micro-batch, and how much each counts. Runs no loss, adds no gradient."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum import _accumulator, _arguments
from optax_accum._state import default_float

Tree = Any
Shares = jax.Array | float | dict[str, jax.Array]  # of each micro-batch [m], or one number for all

# n rows, k whole micro-batches of b rows, and one of the r rows that are left; m = k + (r > 0) in all.


class Split(NamedTuple):
    """How `rows = whole * size + rest` rows are cut.

    Group j of `group` consecutive rows is in micro-batch `j mod whole`; the last `rest` rows are in one of their own.
    """

    rows: int
    size: int
    whole: int
    rest: int
    group: int = 1

    @property
    def parts(self) -> int:
        """The number of micro-batches."""
        return self.whole + (self.rest > 0)


def split_rows(
    batch: Tree,
    num_microbatches: int | None,
    microbatch_size: int | None,
    devices: int | None = None,
    group: int = 1,
) -> Split:
    """Returns how the rows of `batch` are cut, from its shapes alone: those of one of the `devices`, if given."""
    rows = count_rows(batch)
    where = "the batch has" if devices is None else f"each of {devices} devices has"
    check_groups(where, rows, group)
    if num_microbatches is not None and num_microbatches > rows // group:
        what, has = ("row", f"{rows} rows") if group == 1 else ("group", f"{rows // group} groups of {group} rows")
        raise ValueError(
            f"There must be a {what} for each micro-batch: num_microbatches={num_microbatches}, and {where} {has}. "
            f"Pass num_microbatches={rows // group} at most."
        )
    if microbatch_size is not None and devices is not None:
        if microbatch_size % devices:
            raise ValueError(
                f"The rows of a micro-batch must divide over the devices of reduce_axes: microbatch_size="
                f"{microbatch_size}, {devices} devices. Pass a multiple of {devices}."
            )
        microbatch_size //= devices
    if microbatch_size is not None:
        check_groups("a micro-batch on one device has", microbatch_size, group)
        size = min(rows, microbatch_size)
    else:
        size = -(-rows // group // (num_microbatches or 1)) * group
    return Split(rows, size, rows // size, rows % size, group)


def check_groups(where: str, rows: int, group: int) -> None:
    """Raises unless so many rows are whole groups."""
    if rows % group:
        raise ValueError(
            f"group_size must divide the rows that are together: group_size={group}, and {where} {rows} rows. Pass "
            f"{rows - rows % group or group} or {rows - rows % group + group} rows."
        )


def count_rows(batch: Tree) -> int:
    """Returns the length that the leading axes of the leaves have in common."""
    sizes = {jax.tree_util.keystr(path): leaf.shape[0] for path, leaf in _leaves(batch) if is_split(leaf)}
    if not sizes:
        raise ValueError(
            "A batch must have a leaf with rows to cut: the batch arguments hold scalars only. Check batch_argnums and "
            "batch_argnames."
        )
    (first, rows), *others = sizes.items()
    for path, size in others:
        if size != rows:
            raise ValueError(
                f"The leaves of a batch must have as many rows: {_named(first)} has {rows}, {_named(path)} has {size}. "
                "Pass what is not cut as another argument, outside batch_argnums."
            )
    if not rows:
        raise ValueError(f"A batch must have rows: {_named(first)} has shape[0]=0. Skip empty batches.")
    return rows


def is_split(leaf: Any) -> bool:
    """Returns whether a leaf of a batch is cut: arrays are, along their first axis; scalars stay whole."""
    return jnp.ndim(leaf) > 0


def stacked(split: Split, batch: Tree) -> Tree:
    """Returns the whole micro-batches with their index as the second axis: leaves [b, k, ...] and scalars.

    A reshape: interleaving leaves each row on the device where it is. With groups of g rows, [b / g, k, g, ...].
    """
    count, together = split.size // split.group, () if split.group == 1 else (split.group,)

    def stack(leaf: Any) -> Any:
        if not is_split(leaf):
            return leaf
        rows = leaf if not split.rest else leaf[: split.whole * split.size]
        return rows.reshape(count, split.whole, *together, *leaf.shape[1:])

    return jax.tree.map(stack, _arrays(batch))


def micro_batch(split: Split, stacked_batch: Tree, index: int | jax.Array) -> Tree:
    """Returns whole micro-batch `index`: leaves [b, ...]."""

    def take(leaf: Any) -> Any:
        return jax.lax.dynamic_index_in_dim(leaf, index, axis=1, keepdims=False) if is_split(leaf) else leaf

    return ungrouped(split, jax.tree.map(take, stacked_batch))


def ungrouped(split: Split, micro_batch: Tree) -> Tree:
    """Returns a micro-batch [b / g, g, ...] as [b, ...]."""
    if split.group == 1:
        return micro_batch
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]) if is_split(leaf) else leaf, micro_batch)


def in_order(split: Split, rows: jax.Array) -> jax.Array:
    """Returns what the whole micro-batches gave for their rows, [k, b, ...], in the order of the batch."""
    shape = rows.shape[2:]
    rows = rows.reshape(split.whole, split.size // split.group, split.group, *shape)
    return jnp.moveaxis(rows, 0, 1).reshape(-1, *shape)


def remainder(split: Split, batch: Tree) -> Tree:
    """Returns the micro-batch of the rows that are left: leaves [r, ...]."""
    return jax.tree.map(lambda leaf: leaf[split.rows - split.rest :] if is_split(leaf) else leaf, _arrays(batch))


def shares(
    split: Split, batches: Sequence[Tree], weight_fn: Callable[..., Any] | None, over: tuple[str, ...] = ()
) -> tuple[Shares, Shares]:
    """Returns `w_i / sum(w)` of the whole micro-batches ([k], or a number for all) and of the remainder ([]).

    The weights are added in the default float dtype, so that counts of tokens cannot overflow; and `over` those axes of
    the mesh, where each device has a batch of its own.
    """
    if weight_fn is None:
        rows = split.rows * jax.lax.psum(1, over)
        return split.size / rows, split.rest / rows
    whole = rest = None
    if split.whole:
        cut = [stacked(split, batch) for batch in batches]
        axes = jax.tree.map(lambda leaf: 1 if is_split(leaf) else None, cut)
        weigh = lambda *micro: _weights(weight_fn(*(ungrouped(split, rows) for rows in micro)))
        whole = jax.vmap(weigh, in_axes=axes, axis_size=split.whole)(*cut)
    if split.rest:
        rest = _weights(weight_fn(*(remainder(split, batch) for batch in batches)))
    return _normalised(whole, rest, over)


def _normalised(whole: Any, rest: Any, over: tuple[str, ...]) -> tuple[Any, Any]:
    present = [part for part in (whole, rest) if part is not None]
    total = jax.tree.map(lambda *parts: jax.lax.psum(sum(jnp.sum(part) for part in parts), over), *present)
    share = lambda part: jax.tree.map(lambda w, t: jnp.where(t == 0, 0, w * _accumulator.reciprocal(t)), part, total)
    return tuple(part if part is None else share(part) for part in (whole, rest))  # type: ignore[return-value]


def live_rows(split: Split, whole: Shares | None, rest: Shares | None, over: tuple[str, ...] = ()) -> Any:
    """Returns the rows of all micro-batches that are run, at least 1; `over` those axes of the mesh, too."""
    if isinstance(whole, float):
        return split.rows * jax.lax.psum(1, over)
    count = 0 if whole is None else jnp.sum(live(whole)) * split.size
    count += 0 if rest is None else live(rest) * split.rest
    return jnp.maximum(jax.lax.psum(count, over), 1)


def live(shares: Shares) -> jax.Array:
    """Returns which micro-batches count: a bool of the shape of their shares. The others are not run."""
    return jnp.any(jnp.stack([jnp.asarray(share) != 0 for share in jax.tree.leaves(shares)]), axis=0)


def _weights(weights: Any) -> Any:
    """Returns what `weight_fn` gave, checked, in the dtype in which weights are added."""
    if isinstance(weights, Mapping):
        return {str(key): _weight(weight, f"weight_fn's {key!r}") for key, weight in weights.items()}
    return _weight(weights, "weight_fn's result")


def _weight(weight: Any, name: str) -> jax.Array:
    return jnp.asarray(_arguments.as_weight(weight, name=name), default_float())


def _arrays(batch: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf), batch)


def _leaves(batch: Tree) -> list[tuple[Any, Any]]:
    return jax.tree.leaves_with_path(batch)


def _named(path: str) -> str:
    return f"the leaf {path}" if path else "the batch"
