"""Across calls: the window, its policies, and the micro-steps that users call."""
