"""For Flax NNX: an optimizer and a train step.

Beside `Optimizer` and `train_step` there are `value_and_grad` and
`accumulate`.
"""

from optax_accum.flax._nnx import accumulate, value_and_grad
from optax_accum.flax._nnx_optimizer import Optimizer
from optax_accum.flax._nnx_step import train_step

__all__ = ["Optimizer", "accumulate", "train_step", "value_and_grad"]
