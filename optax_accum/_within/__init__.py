"""Within a call: `value_and_grad`, `microbatched`, `reduce_microbatches`. A batch is split, run, and joined again.

A loss is read off its trace (`whole_batch`, then `by_level`); any other function runs micro-batch by
micro-batch (`cut`: `microbatches`, `weights`, `loops`, `reductions`).
"""
