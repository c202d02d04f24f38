"""The sizes of batches: how the rows of one update are split over micro-batches and devices, and how many rows pay.

* `split_global_batch(rows, most, devices)`, `token_microbatches(lengths, max_tokens)`: the split, by rows or by tokens.
* `advise(...)`, `rescale_decay(b2, batch_from, batch_to)`: before you accumulate; experimental. docs/when_not.md.
"""

from optax_accum._batches.advise import Advice, advise, rescale_decay
from optax_accum._batches.packing import TokenPacking, token_microbatches
from optax_accum._batches.rows import BatchSplit, split_global_batch

__all__ = [
    "Advice",
    "BatchSplit",
    "TokenPacking",
    "advise",
    "rescale_decay",
    "split_global_batch",
    "token_microbatches",
]
