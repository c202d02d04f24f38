"""Flax train steps with accumulation.

`linen` has them for Flax Linen, `nnx` for Flax NNX. The functions here
serve both.

`import optax_accum` does not load Flax; the first use of
`optax_accum.flax` does.
"""

from importlib.util import find_spec as _find_spec

if _find_spec("flax") is None:
    raise ImportError(
        'optax_accum.flax needs Flax, which is not installed. Run pip install "flax>=0.11.2".', name="flax"
    )

from optax_accum.flax import _versions as _versions  # first: an old Flax has no names to import
from optax_accum.flax import linen, nnx
from optax_accum.flax._batch_norm import batch_moments, merge_batch_stats
from optax_accum.flax._loss_scale import next_scale, unscale

__all__ = ["batch_moments", "linen", "merge_batch_stats", "next_scale", "nnx", "unscale"]
