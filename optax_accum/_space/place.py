"""Owns where the sum of partial gradients belongs: with all devices, or with each its shard. Adds nothing."""

import dataclasses

from optax_accum._core.arithmetic import Tree
from optax_accum._space import meshes, mismatch
from optax_accum._space.meshes import Axes


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a sum over the axes belongs: with every device, or with each its shard, as `to` says."""

    axes: Axes = ()
    to: Tree = None

    def shardings(self, params: Tree) -> Tree | None:
        """Returns how the sum is sharded over the devices, if it is."""
        return None if self.to is None else meshes.shardings(self.to, params, self.axes)

    def shard(self, params: Tree) -> Tree:
        """Returns the parameters sharded as the update is to be."""
        return params if self.to is None else meshes.place(params, self.shardings(params))

    def gather(self, tree: Tree, params: Tree) -> Tree:
        """Undoes `shard`."""
        return tree if self.to is None else meshes.gather(tree, self.to, params, self.axes)

    def check(self, params: Tree) -> None:
        """Raises where parameters would be gathered unasked."""
        if self.to is None:
            mismatch.check_replicated(params, self.axes)
