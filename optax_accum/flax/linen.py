"""For Flax Linen: a train state with a window, and the usual train step over micro-batches."""

from optax_accum.flax._linen import TrainState
from optax_accum.flax._linen_step import train_step

__all__ = ["TrainState", "train_step"]
