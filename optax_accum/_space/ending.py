"""The ending of a window: its last backward pass adds a layer's sum over the devices while it computes the next."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core.adding import Finish
from optax_accum._core.types import Tree
from optax_accum._space.collectives import Shard

WORTH_HIDING = 64 << 20  # bytes


class Reduced(NamedTuple):
    """Sums that a backward pass has added over the devices: each has the sum, or its shard of it."""

    sums: Tree


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a last backward pass adds sums over the devices.

    Attributes:
      finish: for each leaf the function that adds it over the devices in place. Where each device keeps a shard, it is
        called with slices, and returns None for one that has to wait for the others.
      shards: which shard of each leaf a device keeps; None where all get the sum.
    """

    finish: Sequence[Finish]
    shards: Sequence[Shard] | None = None

    def reduced(self, sums: Tree) -> Reduced:
        """One device's part of the sums, which are finished."""
        if self.shards is None:
            return Reduced(sums)
        leaves, treedef = jax.tree.flatten(sums)
        return Reduced(treedef.unflatten([shard.front(leaf) for shard, leaf in zip(self.shards, leaves, strict=True)]))


@dataclasses.dataclass(frozen=True)
class Endings:
    """Whether windows have such an ending: by the option, by what this device can do, by what pays.

    Attributes:
      asked: the option `overlap`; None where it pays.
      missing: a condition, in words, that is not met here; None if all are.
      hides: whether devices communicate and multiply at the same time.
      shards_of: `sums -> shards`, which shard of each a device keeps; None where all get the sum.
    """

    asked: bool | None = None
    missing: str | None = "a sum over devices"
    hides: bool = False
    shards_of: Callable[[Tree], Sequence[Shard]] | None = None

    def ending(self, sums: Tree, add_up: Callable[[Any], Any], missing: str | None) -> Ending | None:
        """The ending of a window with these sums, if it has one; raises if it is asked for in vain.

        `add_up` adds a leaf over the devices, `missing` is a condition, in words, that the caller does not meet.
        """
        missing, shards = self.missing or missing, None
        if missing is None and self.shards_of is not None:
            shards = self.shards_of(sums)
            if not all(shard.is_separable for shard in shards):
                missing = "Devices(to=) that shards no dimension over other axes, too, on a mesh where these are Auto"
        if self.asked and missing:
            raise ValueError(f"overlap=True needs {missing}. Leave overlap=None.")
        if missing is not None or not (self._pays(sums) if self.asked is None else self.asked):
            return None
        leaves = jax.tree.leaves(sums)
        if shards is None:
            return Ending([add_up] * len(leaves))
        pairs = zip(shards, leaves, strict=True)
        return Ending([functools.partial(shard.in_front, ndim=jnp.ndim(leaf)) for shard, leaf in pairs], shards)

    def _pays(self, sums: Tree) -> bool:
        return self.hides and sum(leaf.nbytes for leaf in jax.tree.leaves(sums)) >= WORTH_HIDING
