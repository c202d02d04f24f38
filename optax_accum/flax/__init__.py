"""Flax train steps with accumulation: a Linen `TrainState`, NNX functions, and BatchNorm that steps once per update.

Imported as `optax_accum.flax`; `optax_accum` itself loads it when it is first asked for.
"""

from importlib.util import find_spec as _find_spec

if _find_spec("flax") is None:
    raise ImportError(
        'optax_accum.flax needs Flax, which is not installed. Run pip install "optax_accum[flax]".', name="flax"
    )

from optax_accum.flax._batch_norm import batch_moments, merge_batch_stats
from optax_accum.flax._linen import TrainState
from optax_accum.flax._linen_step import train_step
from optax_accum.flax._loss_scale import next_scale, unscale
from optax_accum.flax._nnx import value_and_grad
from optax_accum.flax._nnx_optimizer import Optimizer
from optax_accum.flax._nnx_step import nnx_train_step

__all__ = [
    "Optimizer",
    "TrainState",
    "batch_moments",
    "merge_batch_stats",
    "next_scale",
    "nnx_train_step",
    "train_step",
    "unscale",
    "value_and_grad",
]
