"""Experimental: what a program becomes on a GPU or a TPU, asked of its own compiler: here, without one.

* `target("h100")`, `target("v5e:4x4")`: the devices of an accelerator, to compile for, and its memory.
* `count_traffic(compiled)`: the bytes that each part of a program moves, copies, temporary memory.
* `optax_accum.sharding.count_collectives(compiled)`: what its devices say to each other.
"""

from optax_accum._compiled.targets import Target, target
from optax_accum._compiled.traffic import Part, Traffic, count_traffic

__all__ = ["Part", "Target", "Traffic", "count_traffic", "target"]
