"""Where the partial sums of devices live in this trace: `here` chooses; over a mesh they are arrays [d, ...].

A gradient that has not been reduced is a leaf [d, ...], one partial sum for each of the d devices along the reduced
axes, each on its device. On every mesh that is an ordinary array: it passes jit boundaries and branches, can be added,
compared, saved and loaded, and adding two of them moves nothing.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_accum._arguments.roles import Call
from optax_accum._core import tracing, versions
from optax_accum._core.types import Axes, Name, Tree
from optax_accum._loss.meter import Meter
from optax_accum._space import collectives, mapped, meshes
from optax_accum._space.collectives import Shard
from optax_accum._space.device import Device
from optax_accum._space.devices import Devices, check_num_devices, check_partials, refuse_shards
from optax_accum._space.several import InShardMap, Partial, PartialInShardMap, Several
from optax_accum._space.space import Local, Space


def here(devices: Devices) -> Space:
    """The space of this trace: one device, a mesh, or a `jax.shard_map` of the user."""
    versions.warn_of_stale_products()
    axes = devices.axes
    if not axes:
        return Space()
    inside = meshes.is_manual(axes)
    if not inside:
        meshes.check_no_other_map(axes)
    if devices.is_partial:
        return (PartialInShardMap if inside else PartialOverMesh)(devices)
    if devices.to is None:
        return (InShardMap if inside else OverMesh)(devices)
    if inside:
        raise ValueError(
            f"Inside jax.shard_map over {axes} the sum goes everywhere: to={devices.to!r}. Leave it out; gather there "
            "what came in sharded (jax.lax.all_gather), and shard what comes out of the shard_map."
        )
    return ToShards(devices)


def here_for(devices: Devices, meter: Meter, params: Tree) -> Space:
    """The space of this trace, which can add up, and measure, the gradients of these parameters."""
    space = here(devices)
    space.check_params(params)
    space.check_shared(params)
    refuse_shards(meter, params, devices.axes)
    return space


class OverMesh(Several):
    """Partial sums over a mesh: arrays [d, ...], which pass `jit`, branches and checkpoints like any others."""

    def __init__(self, devices: Devices):
        super().__init__(devices)
        self.device = dataclasses.replace(self.device, alike=self.axes)

    def zeros(self, params: Tree, dtype: Any) -> Tree:
        acc, mesh = self._sums_like(params, dtype), meshes.mesh_of(self.axes, params)
        totals = jax.tree.structure(params).flatten_up_to(acc)  # MaskedNode where a parameter has no gradient
        placed = [
            (total, meshes.spec_of(param))
            for param, total in zip(jax.tree.leaves(params), totals, strict=True)
            if hasattr(total, "dtype")
        ]
        known = all(spec is not None for _, spec in placed) or not tracing.is_staged()
        free = None if known or meshes.explicit_axes(mesh) else PartitionSpec.UNCONSTRAINED
        zeros = lambda: [_placed_zeros(total, mesh, self.axes, spec, free) for total, spec in placed]
        return jax.tree.structure(acc).unflatten(jax.jit(zeros)() if known else zeros())  # one program for all leaves

    def sums(self, shapes: Tree, params: Tree) -> Tree:
        mesh = meshes.mesh_of(self.axes, params)
        return jax.tree.map(lambda shape: _zeros_over(shape, mesh, self.axes, PartitionSpec()), shapes)

    def grads(self, grads: Tree, acc: Tree, params: Tree) -> Tree:
        devices = meshes.num_devices(meshes.mesh_of(self.axes, acc, grads), self.axes)
        row = lambda param: jax.ShapeDtypeStruct((devices, *jnp.shape(param)), jnp.result_type(param))
        sums = jax.tree.map(row, params) if isinstance(acc, tuple) and not acc else acc
        check_partials(grads, sums, self.axes, devices)
        return grads

    def weight(self, weight: Any, like: jax.Array, *, spread: bool) -> jax.Array:
        sums, spec = super().weight(weight, like, spread=spread), meshes.spec_of(like)
        return meshes.place(sums, NamedSharding(cast(Any, meshes.mesh_of(self.axes, like)), spec)) if spec else sums

    def _reduced(self, acc: Tree) -> tuple[Tree, dict[str, Tree]]:
        collectives.check_narrow(self.dtype, acc)
        if not self._is_in_place(acc):
            return self.total(acc), {}
        total, left = sum_in_place(acc, self.axes, self.dtype)
        return total, {"acc_grads": left}

    def _joined(self, local: Tree) -> Tree:
        return mapped.joined(local, self.axes, jax.tree.map(lambda _: PartitionSpec(), local))

    def check_state(self, weight: jax.Array, *trees: Tree) -> None:
        check_num_devices(weight, meshes.num_devices(meshes.mesh_of(self.axes, *trees), self.axes))

    def run(self, fun: Local, call: Call, *sums: Any, sharded: Name | None = None) -> tuple[Tree, Tree]:
        device, names = self._device(call, sharded), tuple(call.arguments)

        def on_device(*args: Any) -> tuple[Tree, Tree]:
            call_here = call.with_arguments(dict(zip(names, args, strict=False)))
            return fun(device, call_here, *mapped.as_local(args[len(names) :]))

        split = [*map(names.index, call.batch), *range(len(names), len(names) + len(sums))]
        shards = {names.index(name): to for name, to in device.shards.items()}
        return mapped.per_device(on_device, self.axes, split, (*call[names], *sums), shards)

    def _device(self, call: Call, sharded: Name | None = None) -> Device:
        mesh = meshes.mesh_of(self.axes, call[tuple(call.arguments)])
        return super()._device(call).with_endings(hides=meshes.is_gpu(meshes.device_kind(mesh)))

    def _is_in_place(self, acc: Tree) -> bool:
        return self.dtype is not None or (tracing.is_staged() and meshes.in_reach(acc) is not None)


class ToShards(OverMesh):
    """Partial sums over a mesh whose sum is sharded as `Devices(to=)` says: each device gets its shard alone."""

    def __init__(self, devices: Devices):
        super().__init__(devices)
        self.to = devices.to

    def outputs(self, over: Tree, leaves: Tree) -> Tree:
        sums = jax.tree.map(lambda name, leaf: leaf if name == "sum" else None, over, leaves)
        others = jax.tree.map(lambda name, leaf: None if name == "sum" else self.output(name, leaf), over, leaves)
        either = lambda total, other: other if total is None else total
        return jax.tree.map(either, self.reduced(sums)[0], others, is_leaf=lambda leaf: leaf is None)

    def _reduced(self, acc: Tree) -> tuple[Tree, dict[str, Tree]]:
        collectives.check_narrow(self.dtype, acc)
        shardings = self._shardings(acc)
        shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        meshes.check_divisible(shardings, jax.tree.map(shape, acc))
        scattered = lambda leaf, to: scatter(leaf, to, self.axes, self.dtype)
        return jax.tree.map(scattered, acc, shardings), {}

    def _joined(self, local: Tree) -> Tree:
        to = self._shardings(local)
        return meshes.place(mapped.joined(local, self.axes, jax.tree.map(lambda sharding: sharding.spec, to)), to)

    def _is_in_place(self, acc: Tree) -> bool:
        return False

    def shard(self, params: Tree) -> Tree:
        return meshes.place(params, self._shardings(params))

    def gather(self, updates: Tree, params: Tree) -> Tree:
        return meshes.gather(updates, self._shardings(params), params, self.axes)

    def check_params(self, params: Tree) -> None:
        meshes.check_divisible(self._shardings(params), params)

    def _device(self, call: Call, sharded: Name | None = None) -> Device:
        if sharded is not None:
            to = self._shardings(call.arguments[sharded])
            meshes.check_shards(to, self.axes)
            return Device(self.axes, shards={sharded: to}, alike=self.axes)
        shards = lambda params: [Shard(to, self.axes, self.dtype) for to in jax.tree.leaves(self._shardings(params))]
        # Unrolled, XLA combines the scatters at the end.
        return super()._device(call).with_endings(hides=False, shards_of=shards)

    def _shardings(self, params: Tree) -> Tree:
        return meshes.shardings(self.to, params, self.axes)


class PartialOverMesh(Partial, OverMesh):
    """Partial sums over a mesh that stay: [d, ...]."""


def sum_in_place(acc: Tree, axes: Axes, dtype: Any) -> tuple[Tree, Tree]:
    """Adds the partial sums [d, ...] of each leaf, everywhere: the sums [...], and the same on each device [d, ...].

    If the latter take the place of the partial sums, the all-reduce writes where it reads.
    """
    mesh = meshes.mesh_of(axes, acc)
    if meshes.num_devices(mesh, axes) == 1:
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), acc), acc  # XLA partitions no all-reduce of one device
    # A leaf is sliced only if no other axis shards it.
    sliced = meshes.is_tpu(meshes.device_kind(mesh)) and set(mesh.axis_names) == set(axes)

    def sum_leaf(row: jax.Array) -> jax.Array:
        sum_up = lambda leaf: collectives.add_up(leaf, axes, dtype)
        wide_in_slices = dtype is not None and collectives.dealt(row.shape[2:], axes) is None
        return collectives.by_slices(sum_up, row[0]) if sliced and not wide_in_slices else sum_up(row[0])

    def add(acc: Tree) -> tuple[Tree, Tree]:
        total = jax.tree.map(sum_leaf, acc)
        return total, mapped.as_row(total) if sliced else mapped.varying(mapped.as_row(total), axes)

    run = mapped.over_axes(
        add,
        mesh,
        axes,
        in_specs=(jax.tree.map(lambda _: PartitionSpec(axes), acc),),
        out_specs=(PartitionSpec(), PartitionSpec(axes)),
        # No type of JAX says that an array is the same on all devices in the slices that were added, or gathered.
        check_vma=not sliced and dtype is None,
    )
    return run(acc)


def scatter(leaf: jax.Array, to: NamedSharding, axes: Axes, dtype: Any = None) -> jax.Array:
    """Adds rows [d, ...] into a leaf that is sharded as `to`: each device gets the part that it keeps.

    Rows cross the network in `dtype`, if at most one dimension is scattered.
    """
    shard = Shard(to, axes, dtype)
    shard.check()
    in_specs = PartitionSpec(*meshes.names_over_devices(axes, to.spec))
    explicit = meshes.over(NamedSharding(to.mesh, in_specs), AxisType.Explicit)
    leaf = leaf if explicit is None else jax.sharding.reshard(leaf, explicit)  # parameters may be whole over the others
    on_device = lambda row: shard.scattered(row[0])
    typed = dtype is None  # as in `sum_in_place`
    return jax.shard_map(on_device, mesh=to.mesh, in_specs=in_specs, out_specs=to.spec, check_vma=typed)(leaf)


def _placed_zeros(leaf: jax.ShapeDtypeStruct, mesh: meshes.Mesh, axes: Axes, spec: Any, free: Any = None) -> jax.Array:
    """Zeros [d, ...] with the first axis over the devices and the others as in `spec`, or `free`."""
    others = [free] * len(leaf.shape) if spec is None else [meshes.without(entry, axes) for entry in spec]
    sharding = NamedSharding(cast(Any, mesh), PartitionSpec(axes, *others))
    return meshes.place(jnp.zeros((meshes.num_devices(mesh, axes), *leaf.shape), leaf.dtype), sharding)


# One compiled program serves all scalars on the same devices.
_zeros_over = jax.jit(_placed_zeros, static_argnums=(0, 1, 2, 3))
