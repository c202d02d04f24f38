"""Partial sums of several devices: over a mesh, or in a `jax.shard_map` of the user.

A tree of them has leaves [d, ...], one partial sum for each of the d devices along the axes, each on its device; inside
`jax.shard_map` [1, ...], this device's own. Where their sum goes is a class: to all, to shards, or nowhere.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_accum._arguments import checks
from optax_accum._arguments.roles import Call
from optax_accum._core import arithmetic, compilers, dtypes, tracing
from optax_accum._core.types import Axes, Name, Tree, Weight
from optax_accum._space import mapped, meshes, mismatch, narrow, partials
from optax_accum._space.device import Device
from optax_accum._space.devices import Devices
from optax_accum._space.shards import Shard
from optax_accum._space.space import Local, Reduced, Space

_SUMS = ("mean", "sum")
_EXTREMES = {"max": (jnp.max, jax.lax.pmax), "min": (jnp.min, jax.lax.pmin)}


class Several(Space):
    """Partial sums on several devices, whose sum goes to all. Below: over a mesh, and inside a `jax.shard_map`."""

    communicates = True
    inside: Axes = ()  # the axes of the `jax.shard_map` that this runs in

    def __init__(self, devices: Devices):
        self.axes, self.dtype = devices.axes, devices.dtype
        one_batch = not devices.is_partial
        self.device = Device(self.axes, one_batch=one_batch, dtype=self.dtype, overlap=devices.overlap)

    def weight(self, weight: Any, like: jax.Array, *, spread: bool) -> jax.Array:
        mismatch.check_num_devices(like)
        weight = checks.as_weight(weight, len(like))
        is_per_device = jnp.ndim(weight) or mapped.differs(weight, self.axes)
        part = weight / (len(like) * jax.lax.psum(1, self.inside)) if spread and not is_per_device else weight
        return jnp.broadcast_to(jnp.asarray(part, like.dtype), like.shape)

    def like(self, grads: Tree) -> Tree:
        return arithmetic.zeros_of(jax.eval_shape(lambda: self.total(grads)))

    def total(self, sums: Tree) -> Tree:
        return self._sum(sums)

    def output(self, reduction: str, leaf: Any) -> Any:
        if reduction == "concat":
            return jax.lax.collapse(leaf, 0, 2)
        if reduction in _EXTREMES:
            return self._extreme(reduction, leaf)
        if reduction in _SUMS:
            return self.total(leaf)
        raise ValueError(
            f'With devices, each device has micro-batches of its own, and "{reduction}" of them is not one output. '
            'Take "mean", "sum", "max", "min" or "concat".'
        )

    def nonfinite(self, tree: Tree, weight: Weight) -> jax.Array:
        sums = [leaf for leaf in jax.tree.leaves((tree, weight)) if not dtypes.is_float0(leaf)]
        # A device keeps a shard of a sum of others, too.
        counts = True if isinstance(tree, Reduced) else weight != 0
        flags = ~jax.vmap(arithmetic.all_finite)(sums) & counts
        return self._sum(flags.astype(jnp.int32)) > 0  # one number from each device

    def check_params(self, params: Tree) -> None:
        mismatch.check_replicated(params, self.axes)

    def _sums_like(self, params: Tree, dtype: Any) -> Tree:
        """Returns the shapes of a device's sums; raises for a `Devices(dtype=)` that is wider."""
        shapes = jax.eval_shape(lambda: arithmetic.zeros(params, dtype))
        narrow.check(self.dtype, shapes)
        return shapes

    def _sum(self, sums: Tree) -> Tree:
        """Adds partial sums, everywhere: an all-reduce."""

        def add(leaf: Any) -> Any:
            return jax.lax.psum(jnp.sum(leaf, axis=0, dtype=leaf.dtype), self.inside)

        return jax.tree.map(lambda leaf: leaf if dtypes.is_float0(leaf) else add(leaf), sums)

    def _extreme(self, reduction: str, leaf: Any) -> Any:
        extreme, over = _EXTREMES[reduction]
        return over(extreme(leaf, axis=0), self.inside)

    def _lacks(self) -> str | None:
        """Returns why a backward pass cannot add gradients over the devices; None if it can."""
        return compilers.lacks_overlap() if tracing.is_staged() else "jax.jit"

    def _device(self, call: Call, sharded: Name | None = None) -> Device:
        return dataclasses.replace(self.device, lacks=self._lacks())


class OverMesh(Several):
    """Partial sums over a mesh: arrays [d, ...], which pass `jit`, branches and checkpoints like any others."""

    def zeros(self, params: Tree, dtype: Any) -> Tree:
        return partials.zeros_for(self._sums_like(params, dtype), params, self.axes)

    def sums(self, shapes: Tree, params: Tree) -> Tree:
        return partials.zeros_of(shapes, params, self.axes)

    def grads(self, grads: Tree, acc: Tree, params: Tree) -> Tree:
        devices = meshes.num_devices(meshes.mesh_of(self.axes, acc, grads), self.axes)

        def row(param: Any) -> Any:
            return jax.ShapeDtypeStruct((devices, *jnp.shape(param)), jnp.result_type(param))

        sums = jax.tree.map(row, params) if isinstance(acc, tuple) and not acc else acc
        mismatch.check_partials(grads, sums, self.axes, devices)
        return grads

    def weight(self, weight: Any, like: jax.Array, *, spread: bool) -> jax.Array:
        return partials.placed_like(super().weight(weight, like, spread=spread), like, self.axes)

    def _reduced(self, acc: Tree) -> tuple[Tree, dict[str, Tree]]:
        narrow.check(self.dtype, acc)
        if not self._is_in_place(acc):
            return self.total(acc), {}
        total, left = partials.sum_in_place(acc, self.axes, self.dtype)
        return total, {"acc_grads": left}

    def _joined(self, local: Tree) -> Tree:
        return mapped.joined(local, self.axes, jax.tree.map(lambda _: PartitionSpec(), local))

    def _held(self, acc: Tree) -> dict[str, Tree]:
        return {"acc_grads": acc} if self._is_in_place(acc) else {}

    def check_state(self, weight: jax.Array, *trees: Tree) -> None:
        mismatch.check_num_devices(weight, meshes.num_devices(meshes.mesh_of(self.axes, *trees), self.axes))

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
        return dataclasses.replace(super()._device(call), hides=compilers.is_gpu(meshes.device_kind(mesh)))

    def _is_in_place(self, acc: Tree) -> bool:
        """Returns whether a sum that belongs with every device is written where the partial sums lie."""
        return self.dtype is not None or (tracing.is_staged() and meshes.in_reach(acc) is not None)


class ToShards(OverMesh):
    """Partial sums over a mesh whose sum is sharded as `Devices(to=)` says: each device gets what it keeps of it."""

    def __init__(self, devices: Devices):
        super().__init__(devices)
        self.to = devices.to

    def outputs(self, reductions: Tree, leaves: Tree) -> Tree:
        sums = jax.tree.map(lambda name, leaf: leaf if name in _SUMS else None, reductions, leaves)
        others = jax.tree.map(lambda name, leaf: None if name in _SUMS else self.output(name, leaf), reductions, leaves)

        def either(total: Any, other: Any) -> Any:
            return other if total is None else total

        return jax.tree.map(either, self.reduced(sums)[0], others, is_leaf=lambda leaf: leaf is None)

    def _reduced(self, acc: Tree) -> tuple[Tree, dict[str, Tree]]:
        narrow.check(self.dtype, acc)
        shardings = self._shardings(acc)

        def shape(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)

        meshes.check_divisible(shardings, jax.tree.map(shape, acc))

        def scatter(leaf: Any, to: Any) -> Any:
            return partials.scatter(leaf, to, self.axes, self.dtype)

        return jax.tree.map(scatter, acc, shardings), {}

    def _joined(self, local: Tree) -> Tree:
        to = self._shardings(local)
        return meshes.place(mapped.joined(local, self.axes, jax.tree.map(lambda sharding: sharding.spec, to)), to)

    def _held(self, acc: Tree) -> dict[str, Tree]:
        return {}

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
            return Device(self.axes, shards={sharded: to})

        def shards(params: Any) -> Any:
            return [Shard(to, self.axes, self.dtype) for to in jax.tree.leaves(self._shardings(params))]

        # Unrolled, XLA combines what is scattered at the end.
        return dataclasses.replace(super()._device(call), hides=False, shards_of=shards)

    def _shardings(self, params: Tree) -> Tree:
        """Returns how the sum of their gradients is sharded."""
        return meshes.shardings(self.to, params, self.axes)


class InShardMap(Several):
    """Partial sums in a user's `jax.shard_map` over the axes: leaves [1, ...], this device's own."""

    def __init__(self, devices: Devices):
        super().__init__(devices)
        self.inside = self.axes
        if self.dtype is not None and mapped.tells_apart(self.axes):
            raise ValueError(
                "Devices(dtype=) inside jax.shard_map needs check_vma=False: to JAX, what devices gather differs "
                f"between them. Pass that, or leave out dtype={self.dtype.name}."
            )

    def zeros(self, params: Tree, dtype: Any) -> Tree:
        def rows(leaf: Any) -> Any:
            return jnp.zeros((1, *leaf.shape), leaf.dtype)

        return mapped.varying(jax.tree.map(rows, self._sums_like(params, dtype)), self.axes)

    def sums(self, shapes: Tree, params: Tree) -> Tree:
        return mapped.varying(mapped.as_row(arithmetic.zeros_of(shapes)), self.axes)

    def grads(self, grads: Tree, acc: Tree, params: Tree) -> Tree:
        mismatch.check_local(grads, self.axes)
        return self.as_partial(grads)

    def check_shared(self, params: Tree) -> None:
        mismatch.check_shared(params, self.axes)

    def check_gradients(self, params: Tree, results: Tree) -> None:
        mismatch.check_shared(params, self.axes, results)

    def _lacks(self) -> str | None:
        # Types know of no sum over devices that is written where partial sums lie, and is the same on all.
        return super()._lacks() or ("check_vma=False in jax.shard_map" if mapped.tells_apart(self.axes) else None)

    def _joined(self, local: Tree) -> Tree:
        return self.as_local(local)

    def _reduced(self, acc: Tree) -> tuple[Tree, dict[str, Tree]]:
        narrow.check(self.dtype, acc)

        def add(leaf: Any) -> Any:
            return leaf if dtypes.is_float0(leaf) else narrow.add_up(leaf[0], self.axes, self.dtype)

        total = jax.tree.map(add, acc)
        return total, {"acc_grads": mapped.varying(mapped.as_row(total), self.axes)}

    def as_local(self, sums: Tree) -> Tree:
        return mapped.as_local(sums)

    def as_partial(self, local: Tree) -> Tree:
        return mapped.as_row(local)

    def check_state(self, weight: jax.Array, *trees: Tree) -> None:
        mismatch.check_num_devices(weight, 1)


class Partial(Several):
    """Partial sums that stay: each device has its own, and their sum goes nowhere."""

    def total(self, sums: Tree) -> Tree:
        return self.as_local(sums)

    def _reduced(self, acc: Tree) -> tuple[Tree, dict[str, Tree]]:
        return self.as_local(acc), {}

    def _extreme(self, reduction: str, leaf: Any) -> Any:
        return self.as_local(leaf)

    def _lacks(self) -> str | None:
        return 'a sum over the devices, not Devices(to="partial")'


class PartialOverMesh(Partial, OverMesh):
    """Partial sums over a mesh that stay: [d, ...]."""


class PartialInShardMap(Partial, InShardMap):
    """Partial sums inside a `jax.shard_map` that stay: [...] on each device, whose parameters may be its own."""

    def check_shared(self, params: Tree) -> None:
        pass

    def check_gradients(self, params: Tree, results: Tree) -> None:
        pass
