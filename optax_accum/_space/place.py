"""Owns where the sum of partial gradients belongs: with all devices, with each its shard. Adds once for each window."""

from collections.abc import Callable
from typing import Any

import jax

from optax_accum._core import arithmetic, tracing
from optax_accum._core.arithmetic import Tree
from optax_accum._space import mapped, meshes, mismatch, partials
from optax_accum._space.meshes import Axes


class Place:
    """Where a sum of gradients belongs. On one device it is there."""

    def reduced(self, acc: Tree) -> tuple[Tree, Tree]:
        """Returns the sum over all devices: the one reduction of a window.

        Beside it comes what then lies where the partial sums lay: None if these do.
        """
        return acc, None

    def held(self, acc: Tree) -> Tree:
        """Returns what lies there where nothing was reduced: partial sums, or None as `reduced` does."""
        return None

    def like(self, grads: Tree) -> Tree:
        """Returns leaves of the shapes and dtypes of the gradient of the whole batch."""
        return grads

    def shardings(self, params: Tree) -> Tree | None:
        """Returns how the sum is sharded over the devices, if it is."""
        return None

    def shard(self, params: Tree) -> Tree:
        """Returns the parameters sharded as the update is to be."""
        return params

    def gather(self, tree: Tree, params: Tree) -> Tree:
        """Undoes `shard`."""
        return tree

    def check(self, params: Tree) -> None:
        """Raises where parameters would be gathered unasked."""


class Total(Place):
    """The sum as `total` makes it: with every device; or with each what it has of it."""

    def __init__(self, axes: Axes, total: Callable[[Tree], Tree]):
        self.axes, self.total = axes, total

    def reduced(self, acc: Tree) -> tuple[Tree, Tree]:
        return self.total(acc), None

    def like(self, grads: Tree) -> Tree:
        return arithmetic.zeros_of(jax.eval_shape(lambda: self.total(grads)))

    def check(self, params: Tree) -> None:
        mismatch.check_replicated(params, self.axes)


class InShardMap(Total):
    """The sum with every device, in a `jax.shard_map` of the user."""

    def reduced(self, acc: Tree) -> tuple[Tree, Tree]:
        total = self.total(acc)
        return total, mapped.varying(mapped.as_row(total), self.axes)

    def held(self, acc: Tree) -> Tree:
        return acc


class OverMesh(Total):
    """The sum with every device of a mesh: in place, where the mesh is known."""

    def reduced(self, acc: Tree) -> tuple[Tree, Tree]:
        return partials.sum_in_place(acc, self.axes) if self._is_known(acc) else super().reduced(acc)

    def held(self, acc: Tree) -> Tree:
        return acc if self._is_known(acc) else None

    def _is_known(self, acc: Tree) -> bool:
        return tracing.is_staged() and meshes.in_reach(acc) is not None


class Shards(Total):
    """The sum with each device its shard: a reduce-scatter, as `to` says."""

    def __init__(self, axes: Axes, total: Callable[[Tree], Tree], to: Any):
        super().__init__(axes, total)
        self.to = to

    def reduced(self, acc: Tree) -> tuple[Tree, Tree]:
        scatter = lambda leaf, to: partials.scatter(leaf, to, self.axes)
        return jax.tree.map(scatter, acc, self.shardings(acc)), None

    def shardings(self, params: Tree) -> Tree | None:
        return meshes.shardings(self.to, params, self.axes)

    def shard(self, params: Tree) -> Tree:
        return meshes.place(params, self.shardings(params))

    def gather(self, tree: Tree, params: Tree) -> Tree:
        return meshes.gather(tree, self.to, params, self.axes)

    def check(self, params: Tree) -> None:
        """Passes: they are gathered where they are asked for."""
