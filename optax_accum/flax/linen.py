"""For Flax Linen: a train state and a train step.

The train state also holds the window. The train step splits its batch into
micro-batches.
"""

from optax_accum.flax._linen import TrainState
from optax_accum.flax._linen_step import train_step

__all__ = ["TrainState", "train_step"]
