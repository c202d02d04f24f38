"""Accumulation over devices: where the state lives, what is reduced when, and what a compiled program sends."""

from optax_accum._space.partials import defer_reduction
from optax_accum._tools.collectives import Collective, Collectives, count_collectives
from optax_accum._tools.placement import shard_over, state_sharding

__all__ = ["Collective", "Collectives", "count_collectives", "defer_reduction", "shard_over", "state_sharding"]
