"""Choose batch sizes, pack rows, let windows grow.

By task:

* `split_global_batch(rows, most, devices)`,
  `token_microbatches(lengths, max_tokens)`: split a batch by rows, or by
  tokens.
* `every_by_weight(4096)`: pass it as `every`, and a window has so many
  examples, or tokens.
* `every_by_tokens({0: 768, 250e9: 1536})`, `every_by_noise(4, 64)`: pass
  them as `every`, and windows grow.
"""

from optax_accum.batching._packing import TokenPacking, token_microbatches
from optax_accum.batching._sizes import BatchSplit, every_by_noise, every_by_tokens, every_by_weight, split_global_batch

__all__ = [
    "BatchSplit",
    "TokenPacking",
    "every_by_noise",
    "every_by_tokens",
    "every_by_weight",
    "split_global_batch",
    "token_microbatches",
]
