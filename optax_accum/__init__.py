"""Gradient accumulation for JAX, Optax and Flax: the update equals the update of the whole batch."""

from optax_accum._microbatch import value_and_grad
from optax_accum._recompute import microbatched_apply
from optax_accum._report import Cause, Report
from optax_accum._state import AccumulationState, WeightedSum, from_multi_steps, has_updated, metrics
from optax_accum._transformation import accumulate_gradients, apply_gradients, value_and_apply_gradients
from optax_accum._verify import verify

__version__ = "0.1.0"

__all__ = [
    "AccumulationState",
    "Cause",
    "Report",
    "WeightedSum",
    "accumulate_gradients",
    "apply_gradients",
    "from_multi_steps",
    "has_updated",
    "metrics",
    "microbatched_apply",
    "value_and_apply_gradients",
    "value_and_grad",
    "verify",
]
