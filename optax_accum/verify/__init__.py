"""Check a train step against the whole batch.

* `optax_accum.verify_step(make_step, batch)`: runs a step on a small batch,
  whole and in micro-batches, and compares the updates.
* `Report`: what it found. `Cause`: why the updates differ.

It sees a step from outside: one of JAX, of NumPy's arrays, of PyTorch.
"""

from optax_accum.verify._report import Cause, Report
from optax_accum.verify._verify_step import verify_step

__all__ = ["Cause", "Report", "verify_step"]
