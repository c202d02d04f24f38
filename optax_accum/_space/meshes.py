"""The mesh: its axes, and how a leaf is sharded over them: a kernel over "model", its partial sums over "data", too."""

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_accum._core import compilers
from optax_accum._core.leaves import by_path, for_each_leaf
from optax_accum._core.types import Axes, Tree
from optax_accum._shared.arrays import short

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def as_axes(names: Any) -> Axes:
    """The names of the axes, checked: `()` for None."""
    axes = (names,) if isinstance(names, str) else names
    if axes is None:
        return ()
    if not isinstance(axes, Sequence) or not axes or not all(isinstance(axis, str) and axis for axis in axes):
        raise TypeError(
            f"devices must be the name of a mesh axis, a tuple of names, or Devices(names, ...): devices={names!r}. "
            'Pass "data", say, or None on one device.'
        )
    if len(set(axes)) < len(axes):
        raise ValueError(f"devices must name each axis once: devices={names!r}.")
    return tuple(axes)


def is_manual(axes: Axes) -> bool:
    """Whether this runs inside a `jax.shard_map` over the axes: per device, not on whole arrays."""
    manual = set(jax.sharding.get_abstract_mesh().manual_axes) & set(axes)
    if manual and manual != set(axes):
        raise ValueError(
            f"The axes of devices must be all inside jax.shard_map, or none: of {axes} only {tuple(sorted(manual))} "
            "are here. Name all of them in the axis_names of the shard_map, or fewer in devices."
        )
    return bool(manual)


def check_no_other_map(axes: Axes) -> None:
    """Raises where `jax.pmap` or `jax.vmap` runs over an axis of this name."""
    for axis in axes:
        with contextlib.suppress(NameError):
            jax.lax.axis_index(axis)
            raise ValueError(
                f"devices must name axes of a mesh: {axis!r} is that of jax.pmap or jax.vmap here. Take jax.jit on "
                "a mesh, or jax.shard_map, in place of jax.pmap; under jax.vmap, leave out devices."
            )


def manual_axes() -> Axes:
    """The axes of the `jax.shard_map` that this runs in; outside of any, none."""
    return tuple(sorted(jax.sharding.get_abstract_mesh().manual_axes))


def partitioned_axes() -> Axes:
    """The axes over which the partitioner shards here: of several devices, and outside of any `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in mesh.axis_names if axis not in mesh.manual_axes and mesh.shape[axis] > 1)


def mesh_of(axes: Axes, *trees: Tree) -> Mesh:
    """The mesh in reach; raises where there is none, or one without these axes."""
    mesh = in_reach(*trees)
    if mesh is None:
        needs = f"devices needs a mesh in reach: devices={axes}" if axes else "Parameters must lie on a mesh"
        raise ValueError(
            f"{needs}, and the arguments are on none (inside jit, JAX does not tell). Place them on one, or call it "
            "under `with jax.set_mesh(mesh):`."
        )
    missing = [axis for axis in axes if axis not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"devices must name axes of the mesh: {missing[0]!r} is none of {mesh.axis_names}. Name one of these."
        )
    return mesh


def in_reach(*trees: Tree) -> Mesh | None:
    """The mesh on which the arrays of `trees` lie, or `jax.set_mesh`'s, if there is one."""
    meshes = [getattr(sharding_of(leaf), "mesh", None) for leaf in jax.tree.leaves(trees)]
    meshes.append(jax.sharding.get_abstract_mesh())
    return next((mesh for mesh in meshes if mesh is not None and not mesh.empty), None)


def num_devices(mesh: Mesh, axes: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def device_kind(mesh: Mesh) -> str:
    """The kind of the devices of a mesh; "cpu" where it does not tell."""
    device = mesh.abstract_mesh.abstract_device
    return "cpu" if device is None else device.device_kind


def is_tpu(device_kind: str) -> bool:
    """Whether the kind of a device is a TPU, whose compiler wants other forms of some collectives."""
    return device_kind.startswith("TPU")  # an abstract device has no `platform` before JAX 0.10.2


def is_gpu(device_kind: str) -> bool:
    """Whether the kind of a device is a GPU, whose compiler runs collectives beside products."""
    return not is_tpu(device_kind) and device_kind != "cpu"


def shardings(to: Tree, params: Tree, axes: Axes) -> Tree:
    """One `NamedSharding` for each leaf of `params`: `to` is a prefix made of `PartitionSpec`s or shardings."""
    named = lambda to: to if isinstance(to, NamedSharding) else NamedSharding(cast(Any, mesh_of(axes, params)), to)
    specs = for_each_leaf("Devices(to=)", to, params, "shard_over(params, axes) makes one.", is_leaf=is_spec)
    return jax.tree.map(named, specs, is_leaf=is_spec)


def check_specs(to: Tree) -> None:
    for leaf in jax.tree.leaves(to, is_leaf=is_spec):
        if not is_spec(leaf):
            raise TypeError(
                f"Devices(to=) must hold a jax.sharding.PartitionSpec or NamedSharding: it holds {short(leaf)}. "
                "shard_over(params, axes) makes them."
            )


def check_shards(to: Tree, axes: Axes) -> None:
    """Raises unless `to` shards some parameters over the axes."""
    parts = [only(sharding.spec, axes) for sharding in jax.tree.leaves(to, is_leaf=is_spec)]
    if not any(names_of(entry) for spec in parts for entry in spec):
        raise ValueError(
            f"Devices(to=) must shard parameters over its axes: axes={axes}, and no spec names them. Pass "
            "shard_over(params, axes), or leave out to where parameters are replicated."
        )


def check_divisible(to: Tree, params: Tree) -> None:
    """Raises unless `params` can be sharded as `to` says."""
    for (path, leaf), sharding in zip(by_path(params), jax.tree.leaves(to), strict=True):
        shape, spec = jnp.shape(leaf), sharding.spec
        counts = [num_devices(sharding.mesh, names_of(entry)) for entry in spec]
        if len(counts) > len(shape) or any(size % count for size, count in zip(shape, counts, strict=False)):
            raise ValueError(
                f"Devices(to=) must shard each parameter evenly: at {path} the shape is {shape}, and to says "
                f"{spec} over {counts} devices. shard_over(params, axes) leaves such a parameter whole. Inside "
                "a scan over layers, give the specs of one layer, without the axis of the layers."
            )


def splittable(leaf: jax.Array, rows: int, axis: int = 0) -> jax.Array:
    """A leaf of a batch, gathered along its rows if Explicit axes cannot cut that many evenly."""
    sharding = sharding_of(leaf)
    whole = sharding if spec_of(leaf) is None else compilers.splittable_sharding(sharding, axis, rows)
    unsharded = None if whole is sharding else over(whole, AxisType.Explicit)
    return leaf if unsharded is None else jax.sharding.reshard(leaf, unsharded)


def filled(sizes: Sequence[int], row: jax.ShapeDtypeStruct, number: Any, dtype: Any = None) -> jax.Array:
    """An array of one number for rows along axes of these sizes, on the Explicit axes of a row."""
    leaf = jnp.full((*sizes, *row.shape), number, dtype or row.dtype)
    sharding = compilers.explicit_sharding(row)
    if sharding is None:
        return leaf
    spec = PartitionSpec(*[None] * len(sizes), *sharding.spec)
    return jax.sharding.reshard(leaf, NamedSharding(sharding.mesh, spec))


def place(tree: Tree, to: Tree) -> Tree:
    """Puts `tree` into the given shardings, inside or outside jit, on either kind of mesh."""

    def move(leaf: Any, sharding: NamedSharding) -> Any:
        auto, explicit = (over(sharding, kind) for kind in (AxisType.Auto, AxisType.Explicit))
        if explicit is not None:
            leaf = jax.sharding.reshard(leaf, explicit)
        return leaf if auto is None else jax.lax.with_sharding_constraint(leaf, auto)

    return jax.tree.map(move, tree, to)


def explicit_axes(mesh: Mesh) -> Axes:
    """The axes over which shardings are part of a type."""
    return tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)


def over(sharding: NamedSharding, kind: AxisType) -> NamedSharding | None:
    """The part of a sharding that is over the axes of one kind; None if the mesh has no such axes."""
    mesh = sharding.mesh
    others = tuple(name for name, other in zip(mesh.axis_names, mesh.axis_types, strict=True) if other != kind)
    if len(others) == len(mesh.axis_names):
        return None
    free = PartitionSpec.UNCONSTRAINED
    entries = [entry if entry is free else without(entry, others) for entry in sharding.spec]
    return NamedSharding(mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind)


def gather(tree: Tree, to: Tree, params: Tree, axes: Axes) -> Tree:
    """Reshards a tree from `to` to the parameters' sharding; if that is unknown, whole over the reduced axes."""

    def like_param(param: Any, to: NamedSharding) -> NamedSharding:
        spec = spec_of(param)
        spec = PartitionSpec(*(without(entry, axes) for entry in to.spec)) if spec is None else spec
        return NamedSharding(to.mesh, spec)

    return place(tree, jax.tree.map(like_param, params, to))


def spec_of(leaf: Any) -> PartitionSpec | None:
    """The spec of a leaf; None where it is not known, as while tracing without Explicit axes."""
    sharding = sharding_of(leaf)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    unknown = isinstance(leaf, Tracer) and not explicit_axes(sharding.mesh)
    return None if unknown else sharding.spec


def names_of(entry: Any) -> tuple[str, ...]:
    """The axes that one dimension is sharded over."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def names_over_devices(axes: Axes, names: Iterable[Any]) -> tuple[Any, ...]:
    """The spec of partial sums [d, ...], from the entries of the spec of a leaf [...]."""
    return (axes[0] if len(axes) == 1 else axes, *(without(entry, axes) for entry in names))


def is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec | NamedSharding)


def only(spec: PartitionSpec, axes: Axes) -> PartitionSpec:
    """The part of a spec that is over the given axes."""
    kept = [tuple(name for name in names_of(entry) if name in axes) for entry in spec]
    return PartitionSpec(*(names or None for names in kept))


def without(entry: Any, axes: Axes) -> Any:
    """The sharding of one dimension, less the given axes."""
    kept = tuple(name for name in names_of(entry) if name not in axes)
    return kept if len(kept) > 1 else (kept[0] if kept else None)


def sharding_of(leaf: Any) -> Any:
    """The sharding of an array: its own, or while tracing its type's."""
    told_by = jax.typeof(leaf) if isinstance(leaf, Tracer) else leaf
    return getattr(told_by, "sharding", None)
