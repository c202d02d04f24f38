"""Within a call: `value_and_grad`, `microbatched`, `accumulate`. A batch is cut, run, and put together again."""
