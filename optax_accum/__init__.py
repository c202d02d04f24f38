"""Gradient accumulation for JAX, Optax and Flax: the update equals the update of the whole batch."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from optax_accum._collectives import Collective, Collectives, count_collectives
from optax_accum._microbatch import value_and_grad
from optax_accum._placement import shard_over, state_sharding
from optax_accum._planning import BatchSplit, split_global_batch
from optax_accum._recompute import microbatched_apply
from optax_accum._report import Cause, Report
from optax_accum._resume import check_processes, checkpoint_target, redistribute
from optax_accum._sharding import defer_reduction
from optax_accum._state import AccumulationState, WeightedSum, from_multi_steps, has_updated, metrics
from optax_accum._train_step import value_and_apply_gradients
from optax_accum._transformation import accumulate_gradients, apply_gradients
from optax_accum._verify import verify

if _TYPE_CHECKING:
    from optax_accum import flax as flax

__version__ = "0.1.0"

__all__ = [
    "AccumulationState",
    "BatchSplit",
    "Cause",
    "Collective",
    "Collectives",
    "Report",
    "WeightedSum",
    "accumulate_gradients",
    "apply_gradients",
    "check_processes",
    "checkpoint_target",
    "count_collectives",
    "defer_reduction",
    "from_multi_steps",
    "has_updated",
    "metrics",
    "microbatched_apply",
    "redistribute",
    "shard_over",
    "split_global_batch",
    "state_sharding",
    "value_and_apply_gradients",
    "value_and_grad",
    "verify",
]


def __getattr__(name: str) -> _Any:
    """Loads `optax_accum.flax` when it is first asked for: Flax takes a second, and need not be installed."""
    if name == "flax":
        return _importlib.import_module("optax_accum.flax")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "flax"})
