"""Owns the partial sums of several devices: over a mesh, or in a `jax.shard_map` of the user.

A tree of them has leaves [d, ...], one partial sum for each of the d devices along the axes, each on its device; inside
`jax.shard_map` [1, ...], this device's own.
"""

from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, checks
from optax_accum._core.arithmetic import Tree, Weight
from optax_accum._core.roles import Call
from optax_accum._core.state import default_float
from optax_accum._space import mapped, meshes, mismatch, partials, place
from optax_accum._space.device import Among, Device
from optax_accum._space.meshes import Axes
from optax_accum._space.place import Place
from optax_accum._space.space import PARTIAL, Local, Space


class Several(Space):
    """Partial sums on several devices. Below are those of a mesh, and those inside a `jax.shard_map`."""

    communicates = True

    def __init__(self, axes: Axes, to: Tree):
        self.axes, self.keeps = axes, to == PARTIAL
        super().__init__(self._place(to))

    def total(self, sums: Tree) -> Tree:
        return self.as_own(sums) if self.keeps else self._sum(sums)

    def output(self, reduction: str, leaf: Any) -> Any:
        if reduction not in ("mean", "sum", "max", "concat"):
            raise ValueError(
                f'With reduce_axes, each device has micro-batches of its own, and "{reduction}" of them is not one '
                'output. Take "mean", "sum", "max" or "concat".'
            )
        if reduction == "concat":
            return self._joined(leaf)
        return self._max(leaf) if reduction == "max" and not self.keeps else self.total(leaf)

    def nonfinite(self, tree: Tree, weight: Weight) -> jax.Array:
        sums = [leaf for leaf in jax.tree.leaves((tree, weight)) if not arithmetic.is_float0(leaf)]
        flags = ~jax.vmap(arithmetic.all_finite)(sums) & (weight != 0)
        return self._sum(flags.astype(jnp.int32)) > 0  # one number from each device

    def _shapes(self, params: Tree, dtype: Any) -> Tree:
        return jax.eval_shape(lambda: arithmetic.zeros(params, dtype))

    def _device(self) -> Device:
        return Among(self.axes, one_batch=not self.keeps)

    def _place(self, to: Tree) -> Place:
        raise NotImplementedError

    def _sum(self, sums: Tree) -> Tree:
        raise NotImplementedError

    def _max(self, each: jax.Array) -> jax.Array:
        raise NotImplementedError

    def _joined(self, each: jax.Array) -> jax.Array:
        raise NotImplementedError


class OverMesh(Several):
    """Partial sums over a mesh: arrays [d, ...], which pass `jit`, branches and checkpoints like any others."""

    def zeros(self, params: Tree, dtype: Any) -> Tree:
        return partials.zeros_for(self._shapes(params, dtype), params, self.axes)

    def scalar(self, params: Tree) -> jax.Array:
        return partials.zero_scalars(params, self.axes)

    def grads(self, grads: Tree, acc: Tree) -> Tree:
        mismatch.check_partials(grads, acc)
        return grads

    def weight(self, weight: Any, like: jax.Array, *, share: bool) -> Weight:
        weight = checks.as_weight(weight, mismatch.num_devices_of(like, self.axes))
        part = weight / like.shape[0] if share and not jnp.ndim(weight) else weight
        return partials.beside(jnp.broadcast_to(jnp.asarray(part, like.dtype), like.shape), like, self.axes)

    def run(self, fun: Local, call: Call, *sums: Any, sharded: int | None = None) -> tuple[Tree, Tree]:
        device, names, shards = self._device(), tuple(call.arguments), {}
        if sharded is not None and (to := self.place.shardings(call.arguments[sharded])) is not None:
            meshes.check_shards(to, call.arguments[sharded], self.axes)
            device, shards = Among(self.axes, shards={sharded: to}), {names.index(sharded): to}

        def local(*args: Any) -> tuple[Tree, Tree]:
            own = call.with_arguments(dict(zip(names, args, strict=False)))
            return fun(device, own, *args[len(names) :])

        split = [*map(names.index, call.batch), *range(len(names), len(names) + len(sums))]
        return mapped.per_device(local, self.axes, split, (*call[names], *sums), shards)

    def check_state(self, weight: jax.Array, *trees: Tree) -> None:
        mismatch.check_num_devices(weight, meshes.num_devices(meshes.mesh_of(self.axes, *trees), self.axes))

    def _place(self, to: Tree) -> Place:
        if to is None:
            return place.OverMesh(self.axes, self.total)
        return place.Total(self.axes, self.total) if self.keeps else place.Shards(self.axes, self.total, to)

    def _sum(self, sums: Tree) -> Tree:
        return jax.tree.map(partials.sum_over, sums)

    def _max(self, each: jax.Array) -> jax.Array:
        return jnp.max(each, axis=0)

    def _joined(self, each: jax.Array) -> jax.Array:
        return each.reshape(-1, *each.shape[2:])


class InShardMap(Several):
    """Partial sums in a user's `jax.shard_map` over the axes: leaves [1, ...], this device's own."""

    def zeros(self, params: Tree, dtype: Any) -> Tree:
        zeros = lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype)
        return mapped.varying(jax.tree.map(zeros, self._shapes(params, dtype)), self.axes)

    def scalar(self, params: Tree) -> jax.Array:
        return mapped.varying(jnp.zeros([1], default_float()), self.axes)

    def grads(self, grads: Tree, acc: Tree) -> Tree:
        mismatch.check_own(grads, self.axes)
        return self.as_partial(grads)

    def weight(self, weight: Any, like: jax.Array, *, share: bool) -> Weight:
        weight = checks.as_weight(weight, mismatch.num_devices_of(like, self.axes))
        own = jnp.ndim(weight) or (isinstance(weight, jax.Array) and mapped.differs(weight, self.axes))
        part = weight / jax.lax.psum(1, self.axes) if share and not own else weight
        return jnp.broadcast_to(jnp.asarray(part, like.dtype), like.shape)

    def run(self, fun: Local, call: Call, *sums: Any, sharded: int | None = None) -> tuple[Tree, Tree]:
        own, same = fun(self._device(), call, *sums)
        return self.as_partial(own), same

    def as_own(self, sums: Tree) -> Tree:
        return jax.tree.map(lambda leaf: leaf if arithmetic.is_float0(leaf) else leaf[0], sums)

    def as_partial(self, own: Tree) -> Tree:
        return mapped.as_row(own)

    def _place(self, to: Tree) -> Place:
        return place.Total(self.axes, self.total) if self.keeps else place.InShardMap(self.axes, self.total)

    def _sum(self, sums: Tree) -> Tree:
        return jax.tree.map(lambda leaf: jax.lax.psum(leaf[0], self.axes), sums)

    def _max(self, each: jax.Array) -> jax.Array:
        return jax.lax.pmax(each[0], self.axes)

    def _joined(self, each: jax.Array) -> jax.Array:
        return each[0]

    def check_state(self, weight: jax.Array, *trees: Tree) -> None:
        mismatch.check_num_devices(weight, 1)
