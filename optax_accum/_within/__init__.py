"""Within a call: `value_and_grad`, `microbatched`, `reduce_microbatches`. A batch is split, run, and joined again.

A loss is traced with its gradient (`whole_batch`), and that program runs (`by_level`, `fold`); any other function runs
micro-batch by micro-batch (`microbatches`, `loops`, `reductions`).
"""
