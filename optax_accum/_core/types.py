"""The types of type hints: a tree, a weight, a flag, an index, a name, axes."""

from typing import Any

import jax

Tree = Any
Weight = float | jax.Array  # a Python float is known when tracing, an array when running
Flag = bool | jax.Array  # so is a Python bool
Index = int | jax.Array  # of a micro-batch; the remainder is the last
Name = int | str  # of an argument: its position, or the name of its parameter
Axes = tuple[str, ...]  # names of mesh axes
