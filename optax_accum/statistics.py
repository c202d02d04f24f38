"""Experimental: measures the noise of gradients.

Gradients are measured while they are accumulated:

* `accumulate_gradients(..., statistics=True)`, or
  `statistics=Options(decay, groups)`: `metrics(state)` has norms, noise and
  signal by name. `Layers` measures stacked layers one by one.
* `value_and_grad(..., statistics=True)` returns
  `((value, statistics), gradient)`, with the usual `value`;
  `smooth(old, new, decay)` smooths statistics from one call to the next.
* `gradient_noise_scale(state_or_statistics)`: noise, signal and their
  ratio, in examples or tokens.

`value_and_grad` and `value_and_apply_gradients` measure each gradient
inside the backward pass, where it is added; `tx.update` and
`apply_gradients` read it once more. In a `jax.shard_map` of yours whose
devices have shards of the parameters over another axis: an error (with
`check_vma=False` nothing tells, and norms are those of shards).
docs/when_not.md has sources and examples.
`optax_accum.batching` acts on the results.
"""

from optax_accum._across.metrics import gradient_noise_scale
from optax_accum._loss.meter import Layers, Options
from optax_accum._loss.noise import NoiseScale, Statistics, smooth

__all__ = [
    "Layers",
    "NoiseScale",
    "Options",
    "Statistics",
    "gradient_noise_scale",
    "smooth",
]
