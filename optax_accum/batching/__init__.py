"""Choose batch sizes, pack rows, let windows grow.

By task:

* `token_microbatches(lengths, max_tokens)`: split a batch by tokens.
* `every_by_weight(4096)`: pass it as `every`, and a window has so many
  examples, or tokens.
* `every_by_tokens({0: 768, 250e9: 1536})`, `every_by_noise(4, 64)`: pass
  them as `every`, and windows grow.
"""

from optax_accum.batching._packed import TokenPacking
from optax_accum.batching._packing import token_microbatches
from optax_accum.batching._sizes import every_by_noise, every_by_tokens, every_by_weight

__all__ = [
    "TokenPacking",
    "every_by_noise",
    "every_by_tokens",
    "every_by_weight",
    "token_microbatches",
]
