"""The sizes of batches: how the rows of one update are split over micro-batches and devices."""

from optax_accum._tools.batches import BatchSplit, split_global_batch

__all__ = ["BatchSplit", "split_global_batch"]
