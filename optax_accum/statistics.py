"""Experimental: what the gradients of a window tell, and what to make of it.

* `accumulate_gradients(..., statistics=True)`, or `statistics=Options(decay, groups)`: each micro-step reads its
  gradient once more, and each update. `metrics(state)` has norms, noise and signal by name.
* `value_and_grad(..., statistics=True)` returns `((value, statistics), gradient)`, where `value` is what it is without;
  `smooth(old, new, decay)` smooths statistics from one call to the next.
* `gradient_noise_scale(state_or_statistics)`: noise, signal and their ratio, in examples or tokens.
* `rescale_decay(b2, batch_from, batch_to)`, `advise(...)`: before you accumulate.

A backward pass that adds in place writes no gradient that could be measured: with statistics, `value_and_grad` and
`value_and_apply_gradients` add after it. docs/noise_scale.md, docs/when_not.md and
docs/growing_batches.md have sources and examples.
"""

from optax_accum._across.noise_scale import gradient_noise_scale
from optax_accum._batches.advise import Advice, advise, rescale_decay
from optax_accum._core.meter import Options
from optax_accum._core.noise import NoiseScale, Statistics, smooth

__all__ = [
    "Advice",
    "NoiseScale",
    "Options",
    "Statistics",
    "advise",
    "gradient_noise_scale",
    "rescale_decay",
    "smooth",
]
