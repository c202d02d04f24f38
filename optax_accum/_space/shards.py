"""The shard that one device keeps of a sum over devices, inside `jax.shard_map`."""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding

from optax_accum._core.types import Axes
from optax_accum._space import meshes, narrow


@dataclasses.dataclass(frozen=True)
class Shard:
    """Which part of a leaf each device keeps: `to` shards it over some of the axes that it is added over.

    A `dtype` is that in which it crosses the network, where at most one dimension is scattered.
    """

    to: NamedSharding
    axes: Axes
    dtype: Any = None

    @property
    def dims(self) -> dict[int, Axes]:
        """The axes that each dimension is scattered over."""
        entries = enumerate(meshes.only(self.to.spec, self.axes))
        return {dim: meshes.names_of(entry) for dim, entry in entries if entry is not None}

    def check(self) -> None:
        """Raises unless the reduced axes come last in each dimension."""
        for dim, names in self.dims.items():
            if meshes.names_of(self.to.spec[dim])[-len(names) :] != names:
                raise ValueError(
                    f"Devices(to=) must name the reduced axes last in each dimension: {self.to.spec}, and axes="
                    f"{self.axes}."
                )

    @property
    def is_separable(self) -> bool:
        """Whether no dimension is over these axes and others, too: only then can the partitioner slice it."""
        others = set(meshes.explicit_axes(self.to.mesh)) - set(self.axes)
        return not others and all(meshes.names_of(self.to.spec[dim]) == names for dim, names in self.dims.items())

    def scattered(self, leaf: jax.Array, sliced: int = 0) -> jax.Array:
        """Returns this device's shard of the sum of a leaf, or of a slice along its first dimensions."""
        dims = {dim - sliced: names for dim, names in self.dims.items()}
        scattered = {name for names in dims.values() for name in names}
        unsharded = tuple(axis for axis in self.axes if axis not in scattered)
        if not dims:
            return narrow.add_up(leaf, self.axes, self.dtype)
        if self.dtype is not None and len(dims) == 1:
            ((dim, names),) = dims.items()
            leaf = narrow.scatter(leaf, names, dim, self.dtype)
            return jax.lax.psum(leaf, unsharded) if unsharded else leaf
        leaf = jax.lax.psum(leaf, unsharded) if unsharded else leaf
        for dim, names in dims.items():
            for name, groups in meshes.stages(self.to.mesh, names):
                leaf = jax.lax.psum_scatter(leaf, name, scatter_dimension=dim, axis_index_groups=groups, tiled=True)
        return leaf

    def in_front(self, leaf: jax.Array, ndim: int) -> jax.Array | None:
        """Returns a leaf with its shard of the sum in front; None for a slice along a dimension that is scattered."""
        sliced = ndim - leaf.ndim
        if any(dim < sliced for dim in self.dims):
            return None
        return jax.lax.dynamic_update_slice(leaf, self.scattered(leaf, sliced), [0] * leaf.ndim)

    def front(self, leaf: jax.Array) -> jax.Array:
        """Returns the shard that `in_front` has put there."""
        parts = {dim: meshes.num_devices(self.to.mesh, names) for dim, names in self.dims.items()}
        return leaf[tuple(slice(size // parts.get(dim, 1)) for dim, size in enumerate(leaf.shape))]
