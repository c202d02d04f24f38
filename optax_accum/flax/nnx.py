"""For Flax NNX: an optimizer and a train step.

Beside `Optimizer` and `train_step` there is `value_and_grad`.
"""

from optax_accum.flax._nnx import value_and_grad
from optax_accum.flax._nnx_optimizer import Optimizer
from optax_accum.flax._nnx_step import train_step

__all__ = ["Optimizer", "train_step", "value_and_grad"]
