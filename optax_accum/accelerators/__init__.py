"""Experimental: compile for an absent accelerator.

Compile for a GPU or a TPU that you do not have, and read memory, traffic
and collectives:

* `target("h100")`, `target("v5e:4x4")`: the devices of an accelerator, to
  compile for, and its memory.
* `count_traffic(compiled)`: the bytes that each part of a program moves,
  copies, temporary memory.
* `optax_accum.sharding.count_collectives(compiled)`: the communication
  between its devices.
"""

from optax_accum.accelerators._targets import Target, target
from optax_accum.accelerators._traffic import Part, Traffic, count_traffic

__all__ = ["Part", "Target", "Traffic", "count_traffic", "target"]
