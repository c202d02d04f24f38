"""The sizes of batches: how the rows of one update are split over micro-batches and devices, by rows or by tokens."""

from optax_accum._tools.batches import BatchSplit, split_global_batch
from optax_accum._tools.packing import TokenPacking, token_microbatches

__all__ = ["BatchSplit", "TokenPacking", "split_global_batch", "token_microbatches"]
