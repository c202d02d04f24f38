"""Owns the cut: which rows are in which micro-batch, and how much each counts. Runs no loss, adds no gradient."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, checks
from optax_accum._core.rows import check_groups, count_rows, is_split
from optax_accum._core.state import default_float
from optax_accum._core.tracing import Flag

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


class Sizes(NamedTuple):
    """What was asked for: so many micro-batches, or so many rows in each; and so many rows that stay together."""

    num_microbatches: int | None
    microbatch_size: int | None
    group: int


def as_sizes(num_microbatches: Any, microbatch_size: Any, group_size: Any) -> Sizes:
    """Returns what was asked for, if that is one of the two."""
    if (num_microbatches is None) == (microbatch_size is None):
        raise ValueError(
            "Exactly one of num_microbatches and microbatch_size must be given: "
            f"num_microbatches={num_microbatches}, microbatch_size={microbatch_size}. Pass one of them."
        )
    number = checks.as_positive("num_microbatches", num_microbatches)
    size = checks.as_positive("microbatch_size", microbatch_size)
    return Sizes(number, size, checks.as_positive("group_size", group_size) or 1)


def split_rows(batch: Tree, sizes: Sizes, devices: int) -> Split:
    """Returns how the rows of `batch` are cut, from its shapes alone: those of one of the `devices`."""
    rows, (num_microbatches, microbatch_size, group) = count_rows(batch), sizes
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
                f"The rows of a micro-batch must divide over the devices of reduce_axes: microbatch_size="
                f"{microbatch_size}, {devices} devices. Pass a multiple of {devices}."
            )
        size = microbatch_size // devices
        check_groups("a micro-batch on one device has", size, group)
        size = min(rows, size)
    else:
        size = -(-rows // group // (num_microbatches or 1)) * group
    return Split(rows, size, rows // size, rows % size, group)


def stacked(split: Split, batch: Tree) -> Tree:
    """Returns the whole micro-batches with their index as the second axis: leaves [b, k, ...] and scalars.

    A reshape: interleaving leaves each row on the device where it is. With groups of g rows, [b / g, k, g, ...].
    """
    count, together = split.size // split.group, () if split.group == 1 else (split.group,)

    def stack(leaf: jax.Array) -> jax.Array:
        rows = leaf if not split.rest else leaf[: split.whole * split.size]
        return rows.reshape(count, split.whole, *together, *leaf.shape[1:])

    return _of_rows(stack, _arrays(batch))


def micro_batch(split: Split, stacked_batch: Tree, index: int | jax.Array) -> Tree:
    """Returns whole micro-batch `index`: leaves [b, ...]."""
    take = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, axis=1, keepdims=False)
    return ungrouped(split, _of_rows(take, stacked_batch))


def ungrouped(split: Split, micro_batch: Tree) -> Tree:
    """Returns a micro-batch [b / g, g, ...] as [b, ...]."""
    if split.group == 1:
        return micro_batch
    return _of_rows(lambda leaf: jax.lax.collapse(leaf, 0, 2), micro_batch)


def in_order(split: Split, rows: jax.Array) -> jax.Array:
    """Returns what the whole micro-batches gave for their rows, [k, b, ...], in the order of the batch."""
    rows = rows.reshape(split.whole, split.size // split.group, split.group, *rows.shape[2:])
    return jax.lax.collapse(jnp.moveaxis(rows, 0, 1), 0, 3)


def remainder(split: Split, batch: Tree) -> Tree:
    """Returns the micro-batch of the rows that are left: leaves [r, ...]."""
    return _of_rows(lambda leaf: leaf[split.rows - split.rest :], _arrays(batch))


def shares(
    split: Split, batches: Sequence[Tree], weight_fn: Callable[..., Any] | None, whole_of: Callable[[Any], Any]
) -> tuple[Shares, Shares, Any]:
    """Returns `w_i / sum(w)` of the whole micro-batches ([k], or a number for all) and of the remainder ([]); `sum(w)`.

    The weights are added in the default float dtype, so that counts of tokens cannot overflow; and by `whole_of` over
    the devices that have parts of one batch.
    """
    if weight_fn is None:
        rows = split.rows * whole_of(1)
        return split.size / rows, split.rest / rows, rows
    cut = [stacked(split, batch) for batch in batches]
    axes = jax.tree.map(lambda leaf: 1 if is_split(leaf) else None, cut)
    weigh = lambda *micro: _weights(weight_fn(*(ungrouped(split, rows) for rows in micro)))
    parts = [jax.vmap(weigh, in_axes=axes, axis_size=split.whole)(*cut)]
    if split.rest:
        parts.append(_weights(weight_fn(*(remainder(split, batch) for batch in batches))))
    total = jax.tree.map(lambda *parts: whole_of(sum(map(jnp.sum, parts))), *parts)
    share = lambda w, t: jnp.where(t == 0, 0, w * arithmetic.reciprocal(t))
    whole, *rest = (jax.tree.map(share, part, total) for part in parts)
    return whole, rest[0] if rest else 0.0, total


def live_rows(split: Split, alive: tuple[Flag, Flag], whole_of: Callable[[Any], Any]) -> Any:
    """Returns the rows of all micro-batches of the batch that are run, at least 1."""
    return jnp.maximum(whole_of(jnp.sum(alive[0]) * split.size + alive[1] * split.rest), 1)


def live(shares: Shares) -> Flag:
    """Returns which micro-batches count: a bool of the shape of their shares. The others are not run."""
    if isinstance(shares, float):
        return bool(shares)
    return jnp.any(jnp.stack([jnp.asarray(share) != 0 for share in jax.tree.leaves(shares)]), axis=0)


def _weights(weights: Any) -> Any:
    """Returns what `weight_fn` gave, checked, in the dtype in which weights are added."""
    if isinstance(weights, Mapping):
        return {str(key): _weight(weight, f"weight_fn's {key!r}") for key, weight in weights.items()}
    return _weight(weights, "weight_fn's result")


def _weight(weight: Any, name: str) -> jax.Array:
    return jnp.asarray(checks.as_weight(weight, name=name), default_float())


def _of_rows(fun: Callable[[jax.Array], jax.Array], batch: Tree) -> Tree:
    """Applies a function to each leaf that is cut; scalars stay whole."""
    return jax.tree.map(lambda leaf: fun(leaf) if is_split(leaf) else leaf, batch)


def _arrays(batch: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf), batch)
