"""Collectives inside `jax.shard_map`: float32 sums that cross the network in bfloat16, shards of them, slices."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from optax_accum._core.types import Axes
from optax_accum._space import mapped, meshes

CHIPS = 8  # of a TPU: over more, one reduce-scatter may become an all-reduce and a slice
SLICES, LARGE = 16, 32 << 20  # bytes; an all-reduce of less is mostly waiting


def add_up(leaf: jax.Array, axes: Axes, dtype: Any = None) -> jax.Array:
    """Adds a leaf over devices, for all of them, inside `jax.shard_map`.

    With a dtype, each device rounds its leaf to it and sends every other device one part, adds the parts that it
    receives in the dtype of the leaf, and sends their sum, rounded, to all. A leaf of which no dimension can be dealt
    out is added as it is.
    """
    wide = lambda leaf: add_wide(leaf, axes)
    dim = dealt(leaf.shape, axes)
    if dim is None or not _is_wider(leaf, dtype):
        return wide(leaf)

    def add(leaf: jax.Array) -> jax.Array:
        part = _scattered(leaf, axes, dim, dtype)
        return _read(jax.lax.all_gather(_sent(part, dtype), axes, axis=dim, tiled=True), leaf.dtype, dtype)

    return _derived_as(wide, add, axes)(leaf)


def add_wide(leaf: jax.Array, axes: Axes) -> jax.Array:
    """Adds a leaf over devices. Complex numbers are added in two parts: constant ones crash XLA on a CPU."""
    if jnp.iscomplexobj(leaf):
        return jax.lax.complex(jax.lax.psum(leaf.real, axes), jax.lax.psum(leaf.imag, axes))
    return jax.lax.psum(leaf, axes)


def dealt(shape: Sequence[int], axes: Axes) -> int | None:
    """The first dimension that can be dealt out to the devices, inside `jax.shard_map`; None without one."""
    devices = jax.lax.psum(1, axes)
    return next((dim for dim, size in enumerate(shape) if size and size % devices == 0), None)


def scatter(leaf: jax.Array, axes: Axes, dim: int, dtype: Any = None) -> jax.Array:
    """The part for this device, along a dimension, of the sum of a leaf over devices."""
    wide = functools.partial(jax.lax.psum_scatter, axis_name=axes, scatter_dimension=dim, tiled=True)
    if not _is_wider(leaf, dtype):
        return wide(leaf)
    return _derived_as(wide, lambda leaf: _scattered(leaf, axes, dim, dtype), axes)(leaf)


def _scattered(leaf: jax.Array, axes: Axes, dim: int, dtype: Any) -> jax.Array:
    parts = jax.lax.all_to_all(_sent(leaf, dtype), axes, split_axis=dim, concat_axis=dim, tiled=True)
    parts = parts.reshape(*leaf.shape[:dim], jax.lax.psum(1, axes), -1, *leaf.shape[dim + 1 :])
    return jnp.sum(_read(parts, leaf.dtype, dtype), axis=dim)


def _derived_as(wide: Callable[[jax.Array], jax.Array], add: Callable[[jax.Array], jax.Array], axes: Axes) -> Any:
    """`add` with the derivative of `wide`: integers, through which `add` sends, have none."""
    run = jax.custom_jvp(add)

    @run.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        total = run(*primals)
        return total, mapped.varying(wide(*tangents), tuple(axis for axis in axes if mapped.differs(total, (axis,))))

    return run


def check_narrow(dtype: Any, acc: Any) -> None:
    """Raises if sums of this tree are narrower than the dtype in which they are to cross the network."""
    for leaf in jax.tree.leaves(acc):
        added = dtype is not None and jnp.issubdtype(leaf.dtype, jnp.inexact)
        if added and jnp.finfo(leaf.dtype).bits < jnp.finfo(dtype).bits:
            raise ValueError(
                f"Devices(dtype=) must not be wider than the sums: dtype={jnp.dtype(dtype).name}, and sums are in "
                f"{leaf.dtype.name}. Leave it out."
            )


# As integers: a compiler may send a narrow float as a wide one, or move the rounding behind the network.


def _sent(leaf: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(leaf.astype(dtype), f"uint{jnp.finfo(dtype).bits}")


def _read(bits: jax.Array, wide: Any, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, dtype).astype(wide)


def _is_wider(leaf: jax.Array, dtype: Any) -> bool:
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return dtype is not None and floating and jnp.finfo(leaf.dtype).bits > jnp.finfo(dtype).bits


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of a leaf that each device keeps: `to` shards it over some of the axes over which it is added.

    It crosses the network in `dtype`, if at most one dimension is scattered.
    """

    to: NamedSharding
    axes: Axes
    dtype: Any = None

    @property
    def dims(self) -> dict[int, Axes]:
        """The axes over which each dimension is scattered."""
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
        """The shard for this device of the sum of a leaf, or of a slice along its first dimensions."""
        dims = {dim - sliced: names for dim, names in self.dims.items()}
        scattered = {name for names in dims.values() for name in names}
        unsharded = tuple(axis for axis in self.axes if axis not in scattered)
        if not dims:
            return add_up(leaf, self.axes, self.dtype)
        if self.dtype is not None and len(dims) == 1:
            ((dim, names),) = dims.items()
            leaf = scatter(leaf, names, dim, self.dtype)
            return jax.lax.psum(leaf, unsharded) if unsharded else leaf
        leaf = jax.lax.psum(leaf, unsharded) if unsharded else leaf
        for dim, names in dims.items():
            for name, groups in stages(self.to.mesh, names):
                leaf = jax.lax.psum_scatter(leaf, name, scatter_dimension=dim, axis_index_groups=groups, tiled=True)
        return leaf

    def in_front(self, leaf: jax.Array, ndim: int) -> jax.Array | None:
        """A leaf with its shard of the sum in front; None for a slice along a dimension that is scattered."""
        sliced = ndim - leaf.ndim
        if any(dim < sliced for dim in self.dims):
            return None
        return jax.lax.dynamic_update_slice(leaf, self.scattered(leaf, sliced), [0] * leaf.ndim)

    def front(self, leaf: jax.Array) -> jax.Array:
        """The shard that `in_front` has put there."""
        parts = {dim: meshes.num_devices(self.to.mesh, names) for dim, names in self.dims.items()}
        return leaf[tuple(slice(size // parts.get(dim, 1)) for dim, size in enumerate(leaf.shape))]


# In the forms that a TPU runs well.


def stages(mesh: meshes.Mesh, names: Axes) -> list[tuple[Any, list[list[int]] | None]]:
    """The axes, and groups of devices along them, over which to scatter one after the other.

    All axes are one stage; on a TPU each axis is, and one of many devices is two.
    """
    if not meshes.is_tpu(meshes.device_kind(mesh)):
        return [(names, None)] if names else []
    return [(name, groups) for name in names for groups in scatter_stages(mesh.shape[name])]


def scatter_stages(size: int) -> list[list[list[int]] | None]:
    """The groups of devices over which a TPU scatters, one after the other; None for all at once.

    In two stages: every other device, then neighbours. Each device gets the part of its index.
    """
    if size <= CHIPS or size % 2:
        return [None]
    index = np.arange(size).reshape(-1, 2)
    return [index.T.tolist(), index.tolist()]


def by_slices(reduce: Callable[[jax.Array], jax.Array], leaf: jax.Array) -> jax.Array:
    """Reduces a leaf, a large one slice by slice in its place: a TPU's all-reduce is not in place."""
    slices = math.gcd(leaf.shape[0], SLICES) if leaf.ndim and leaf.nbytes >= LARGE else 1

    def add(index: jax.Array, leaf: jax.Array) -> jax.Array:
        size = leaf.shape[0] // slices
        part = reduce(jax.lax.dynamic_slice_in_dim(leaf, index * size, size))
        return jax.lax.dynamic_update_slice_in_dim(leaf, part, index * size, axis=0)

    return reduce(leaf) if slices == 1 else jax.lax.fori_loop(0, slices, add, leaf)
