"""Across calls: `accumulate_gradients`, its window, schedules and policies, and the micro-steps that users call.

`window.micro_step` is the algorithm. `schedules`, `policy` and `accumulator` are its tables.
"""
