"""Across calls: `accumulate_gradients`, its window, schedules and policies, and the micro-steps that users call."""
