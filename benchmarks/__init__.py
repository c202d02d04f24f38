"""Benchmarks: `python -m benchmarks.micro_step` and its neighbours. They assert results, and print times."""
