"""How much each micro-batch of a call counts, known from the data before the first one runs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._arguments import checks
from optax_accum._arguments.rows import is_split
from optax_accum._core import dtypes
from optax_accum._core.traced import Traced
from optax_accum._core.types import Flag, Index
from optax_accum._within import splitting
from optax_accum._within.microbatches import Alive, MicroBatches


@dataclasses.dataclass(frozen=True)
class Shares:
    """`w_i / sum(w)` of the full micro-batches ([k], or a number for all), and of the remainder ([])."""

    full: Any
    rest: Any
    split: splitting.Split

    def of(self, index: Index) -> Any:
        if self.split.is_rest(index):
            return self.rest
        return self.full if isinstance(self.full, float) else self.full[index]


def weigh(micro_batches: MicroBatches, weight_fn: Callable[..., Any] | None, traced: Traced) -> tuple[Shares, Alive]:
    """How micro-batches are weighed, and which of them run; `traced` is `fun` for one micro-batch."""
    device = micro_batches.device
    shares = _shares(micro_batches, weight_fn)
    local = _live(shares.full), _live(shares.rest)
    if weight_fn is not None:
        local = device.agreed(traced, local)
    together = device.runs_together(traced)
    alone = micro_batches.call.carry is None and not together
    return shares, Alive(local, local if alone else device.any_of(local), together)


def _shares(micro_batches: MicroBatches, weight_fn: Callable[..., Any] | None) -> Shares:
    """The weights are added in the default float dtype, so that counts of tokens cannot overflow, and over the devices
    that have parts of one batch.
    """
    split, interleaved, total_of = micro_batches.split, micro_batches.interleaved, micro_batches.device.total
    if weight_fn is None:
        rows = split.rows * total_of(1)
        return Shares(split.size / rows, split.rest / rows, split)
    axes = jax.tree.map(lambda leaf: 1 if is_split(leaf) else None, interleaved)
    weigh = lambda *rows: _weight(weight_fn(*rows))
    try:
        parts = [jax.vmap(weigh, in_axes=axes, axis_size=split.full)(*interleaved)]
    except jax.errors.ConcretizationTypeError as error:
        error.add_note("weight_fn must return the traced number: leave out int(), float() and .item().")
        raise
    if split.rest:
        parts.append(_weight(weight_fn(*micro_batches.rest)))
    total = total_of(sum(map(jnp.sum, parts)))
    full, *rest = (_share(part, total) for part in parts)
    return Shares(full, rest[0] if rest else 0.0, split)


def _share(weight: jax.Array, total: jax.Array) -> jax.Array:
    """`weight / total`: 0 if the total is 0, and NaN, which shows, if it overflowed."""
    return jnp.where(jnp.isinf(total), jnp.nan, weight / jnp.where(total == 0, jnp.inf, total))


def _live(share: Any) -> Flag:
    """Whether each micro-batch counts; the others are not run."""
    return bool(share) if isinstance(share, float) else share != 0


def _weight(weight: Any) -> jax.Array:
    """The weight, in the dtype in which they are added."""
    if isinstance(weight, Mapping):
        raise TypeError(
            f"weight_fn returns one number for a micro-batch: it returned {sorted(weight)}. For terms with "
            "denominators of their own take value_and_grad of their sum."
        )
    return jnp.asarray(checks.as_weight(weight, name="weight_fn's result"), dtypes.default_float())
