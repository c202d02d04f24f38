"""For Flax NNX: an optimizer and a train step.

For a train step of your own, use `value_and_grad` or
`reduce_microbatches`, and compile it with `nnx.jit` or `jit_step`.
"""

from optax_accum.flax._nnx import reduce_microbatches, value_and_grad
from optax_accum.flax._nnx_jit import jit_step
from optax_accum.flax._nnx_optimizer import Optimizer
from optax_accum.flax._nnx_step import train_step

__all__ = ["Optimizer", "jit_step", "reduce_microbatches", "train_step", "value_and_grad"]
