"""Choose batch sizes, pack rows, let windows grow.

By task:

* `split_global_batch(rows, most, devices)`,
  `token_microbatches(lengths, max_tokens)`: split a batch by rows, or by
  tokens.
* `every_by_weight(4096)`: pass it as `every`, and a window has so many
  examples, or tokens.
* `every_by_tokens({0: 768, 250e9: 1536})`, `every_by_noise(4, 64)`: pass
  them as `every`, and windows grow.
* `advise(...)`, `rescale_decay(b2, batch_from, batch_to)`: ask whether to
  accumulate at all; experimental. docs/when_not.md.
"""

from optax_accum._batches.advise import Advice, advise, rescale_decay
from optax_accum._batches.packing import TokenPacking, token_microbatches
from optax_accum._batches.rows import BatchSplit, split_global_batch
from optax_accum._batches.schedules import every_by_noise, every_by_tokens, every_by_weight

__all__ = [
    "Advice",
    "BatchSplit",
    "TokenPacking",
    "advise",
    "every_by_noise",
    "every_by_tokens",
    "every_by_weight",
    "rescale_decay",
    "split_global_batch",
    "token_microbatches",
]
