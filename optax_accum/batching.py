"""The sizes of batches: rows and tokens dealt out over micro-batches and devices, and windows that grow.

* `split_global_batch`, `token_microbatches`: how the rows of one update are split, by rows or by tokens.
* `every_by_tokens({0: 768, 250e9: 1536})`, `every_by_noise(4, 64)`: windows that grow, for `every`.
"""

from optax_accum._batches.packing import TokenPacking, token_microbatches
from optax_accum._batches.rows import BatchSplit, split_global_batch
from optax_accum._batches.schedules import every_by_noise, every_by_tokens

__all__ = [
    "BatchSplit",
    "TokenPacking",
    "every_by_noise",
    "every_by_tokens",
    "split_global_batch",
    "token_microbatches",
]
