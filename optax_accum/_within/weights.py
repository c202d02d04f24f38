"""How much each micro-batch of a call counts, known from the data before the first one runs."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._arguments import checks
from optax_accum._arguments.rows import is_split
from optax_accum._core import dtypes
from optax_accum._core.traced import Traced
from optax_accum._core.types import Flag
from optax_accum._loss import ratio
from optax_accum._loss.weighing import ByCounts, ByRatio, ByShare, ByTerms, Shares
from optax_accum._within import splitting
from optax_accum._within.microbatches import Alive, Flags, MicroBatches


def weigh(
    micro_batches: MicroBatches,
    weight_fn: Callable[..., Any] | None,
    loss: Any,
    traced: Traced,
    count: Callable[[Alive], dict[str, jax.Array]],
) -> tuple[ByShare, Alive]:
    """How micro-batches are weighed, and which of them run; `loss` has the shapes of their loss.

    `traced` is `fun` for one micro-batch; `count` runs the live ones for the counts of a dict of `Ratio`s.
    """
    device = micro_batches.device
    full, rest, total = _shares(micro_batches, weight_fn)
    ratio.check_loss(loss, None if weight_fn is None else full)
    local = _live(full), _live(rest)
    if weight_fn is not None or ratio.is_ratio(loss):
        local = device.agreed(traced, local)
    together = device.runs_together(traced)
    alone = micro_batches.call.carry is None and not together
    alive = Alive(local, local if alone else device.any_of(local), together)
    known: dict[str, Any] = {"shares": full, "rest": rest, "weight": total, "full": micro_batches.split.full}
    if isinstance(full, dict):
        return ByTerms(**known, rows=_live_rows(micro_batches, local)), alive
    if ratio.are_terms(loss):
        reciprocals = {name: ratio.reciprocal(device.total(counts)) for name, counts in count(alive).items()}
        return ByCounts(**known, reciprocals=reciprocals), alive
    return (ByRatio if ratio.is_ratio(loss) else ByShare)(**known), alive


def _shares(micro_batches: MicroBatches, weight_fn: Callable[..., Any] | None) -> tuple[Shares, Shares, Any]:
    """`w_i / sum(w)` of the full micro-batches ([k], or a number for all) and of the remainder ([]); `sum(w)`.

    The weights are added in the default float dtype, so that counts of tokens cannot overflow; and over the devices
    that have parts of one batch.
    """
    split, interleaved, total_of = micro_batches.split, micro_batches.interleaved, micro_batches.device.total
    if weight_fn is None:
        rows = split.rows * total_of(1)
        return split.size / rows, split.rest / rows, rows
    axes = jax.tree.map(lambda leaf: 1 if is_split(leaf) else None, interleaved)

    def weigh(*rows: Any) -> Any:
        return _weights(weight_fn(*(splitting.ungrouped(split, leaf) for leaf in rows)))

    try:
        parts = [jax.vmap(weigh, in_axes=axes, axis_size=split.full)(*interleaved)]
    except jax.errors.ConcretizationTypeError as error:
        error.add_note("weight_fn must return the traced number: leave out int(), float() and .item().")
        raise
    if split.rest:
        parts.append(_weights(weight_fn(*micro_batches.rest)))
    total = jax.tree.map(lambda *parts: total_of(sum(map(jnp.sum, parts))), *parts)
    full, *rest = (jax.tree.map(_share, part, total) for part in parts)
    return full, rest[0] if rest else 0.0, total


def _share(weight: jax.Array, total: jax.Array) -> jax.Array:
    """`weight / total`: 0 if the total is 0, and NaN, which shows, if it overflowed."""
    return jnp.where(jnp.isinf(total), jnp.nan, weight / jnp.where(total == 0, jnp.inf, total))


def _live_rows(micro_batches: MicroBatches, alive: Flags) -> Any:
    """The number of rows in all micro-batches that run, at least 1."""
    split = micro_batches.split
    return jnp.maximum(micro_batches.device.total(jnp.sum(alive[0]) * split.size + alive[1] * split.rest), 1)


def _live(shares: Shares) -> Flag:
    """Whether each micro-batch counts, a bool of the shape of its share; the others are not run."""
    if isinstance(shares, float):
        return bool(shares)
    return jnp.any(jnp.stack([jnp.asarray(share) != 0 for share in jax.tree.leaves(shares)]), axis=0)


def _weights(weights: Any) -> Any:
    """Checks the weights of `weight_fn`, and casts them to the dtype in which they are added."""
    if isinstance(weights, Mapping):
        return {key: _weight(weight, f"weight_fn's {key!r}") for key, weight in weights.items()}
    return _weight(weights, "weight_fn's result")


def _weight(weight: Any, name: str) -> jax.Array:
    return jnp.asarray(checks.as_weight(weight, name=name), dtypes.default_float())
