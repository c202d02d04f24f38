"""Owns what a tree, a weight and a flag are, for type hints. Does nothing."""

from typing import Any

import jax

Tree = Any
Weight = float | jax.Array  # a Python float is known when tracing, an array when running
Flag = bool | jax.Array  # so is a Python bool
