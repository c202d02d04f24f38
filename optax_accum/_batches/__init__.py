"""Batches: rows and tokens dealt out over micro-batches and devices, and how many of them pay."""
