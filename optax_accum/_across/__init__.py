"""Across calls: `accumulate_gradients`, its window, schedules and policies, and the micro-steps that users call.

`window.micro_step` is the algorithm. `schedules`, `policy` and `divisor` are its tables.
"""
