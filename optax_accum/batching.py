"""The sizes of batches: how the rows of one update are split over micro-batches and devices, by rows or by tokens."""

from optax_accum._batches.packing import TokenPacking, token_microbatches
from optax_accum._batches.rows import BatchSplit, split_global_batch

__all__ = ["BatchSplit", "TokenPacking", "split_global_batch", "token_microbatches"]
