"""For Flax NNX: an optimizer with a window, the gradient of a module, and the usual train step."""

from optax_accum.flax._nnx import value_and_grad
from optax_accum.flax._nnx_optimizer import Optimizer
from optax_accum.flax._nnx_step import train_step

__all__ = ["Optimizer", "train_step", "value_and_grad"]
