"""Partial sums of several devices: their base class, and partial sums in a `jax.shard_map` of the user.

A tree of them has leaves [d, ...], one partial sum for each of the d devices along the axes, each on its device; inside
`jax.shard_map` [1, ...], this device's own. Where their sum goes is a class: to all, to shards, or nowhere.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._arguments import checks
from optax_accum._arguments.roles import Call
from optax_accum._core import arithmetic, compilers, dtypes, tracing
from optax_accum._core.types import Axes, Flag, Name, Tree
from optax_accum._space import collectives, mapped, meshes
from optax_accum._space.device import Device
from optax_accum._space.devices import Devices, check_local, check_num_devices, check_replicated, check_shared
from optax_accum._space.ending import Endings
from optax_accum._space.space import Space


class Several(Space):
    """Partial sums on several devices, whose sum goes to all: inside a `jax.shard_map` (below), and over a mesh."""

    communicates = True
    manual_axes: Axes = ()  # the axes of the `jax.shard_map` that this runs in

    def __init__(self, devices: Devices):
        self.axes, self.dtype = devices.axes, devices.dtype
        one_batch = not devices.is_partial
        self.device = Device(self.axes, one_batch, self.dtype, Endings(devices.overlap))

    def weight(self, weight: Any, like: jax.Array, *, spread: bool) -> jax.Array:
        check_num_devices(like)
        weight = checks.as_weight(weight, len(like))
        is_per_device = jnp.ndim(weight) or mapped.differs(weight, self.axes)
        part = weight / (len(like) * jax.lax.psum(1, self.manual_axes)) if spread and not is_per_device else weight
        return jnp.broadcast_to(jnp.asarray(part, like.dtype), like.shape)

    def like(self, grads: Tree) -> Tree:
        return arithmetic.zeros_of(jax.eval_shape(lambda: self.total(grads)))

    def total(self, sums: Tree) -> Tree:
        return self._sum(sums)

    def output(self, over: str, leaf: Any) -> Any:
        if dtypes.is_float0(leaf):
            return leaf  # no number to join
        joins = {
            "sum": self.total,
            "max": functools.partial(self._extreme, jnp.max, jax.lax.pmax),
            "min": functools.partial(self._extreme, jnp.min, jax.lax.pmin),
            "concat": lambda rows: jax.lax.collapse(rows, 0, 2),
        }
        if over not in joins:
            raise ValueError(
                f'With devices, each device has micro-batches of its own, and "{over}" of them is not one output. '
                'Take "mean", "sum", "max", "min" or "concat".'
            )
        return joins[over](leaf)

    def nonfinite(self, tree: Tree, counts: Flag) -> jax.Array:
        sums = [leaf for leaf in jax.tree.leaves(tree) if not dtypes.is_float0(leaf)]
        flags = ~jax.vmap(arithmetic.all_finite)(sums) & counts
        return self._sum(flags.astype(jnp.int32)) > 0  # one number from each device

    def check_params(self, params: Tree) -> None:
        check_replicated(params, self.axes)

    def _sums_like(self, params: Tree, dtype: Any) -> Tree:
        """The shapes of a device's sums; raises for a `Devices(dtype=)` that is wider."""
        shapes = jax.eval_shape(lambda: arithmetic.zeros(params, dtype))
        collectives.check_narrow(self.dtype, shapes)
        return shapes

    def _sum(self, sums: Tree) -> Tree:
        """Adds partial sums, everywhere: an all-reduce."""
        add = lambda leaf: jax.lax.psum(jnp.sum(leaf, axis=0, dtype=leaf.dtype), self.manual_axes)
        return jax.tree.map(lambda leaf: leaf if dtypes.is_float0(leaf) else add(leaf), sums)

    def _extreme(self, local: Callable[..., Any], over_devices: Callable[..., Any], leaf: Any) -> Any:
        return over_devices(local(leaf, axis=0), self.manual_axes)

    def _overlap_needs(self) -> str | None:
        """Why a backward pass cannot add gradients over the devices; None if it can."""
        return None if tracing.is_staged() else "jax.jit"

    def _device(self, call: Call, sharded: Name | None = None) -> Device:
        return self.device.with_endings(missing=self._overlap_needs())


class InShardMap(Several):
    """Partial sums in a user's `jax.shard_map` over the axes: leaves [1, ...], this device's own."""

    def __init__(self, devices: Devices):
        super().__init__(devices)
        self.manual_axes = self.axes
        if self.dtype is not None and mapped.types_track_devices(self.axes):
            raise ValueError(
                "Devices(dtype=) inside jax.shard_map needs check_vma=False: to JAX, what devices gather differs "
                f"between them. Pass that, or leave out dtype={self.dtype.name}."
            )

    def zeros(self, params: Tree, dtype: Any) -> Tree:
        def rows(param: Any, total: Any) -> Any:
            if not hasattr(total, "dtype"):
                return total  # MaskedNode where a parameter has no gradient
            others = compilers.varying_axes(param) - {*self.axes}  # over which each device has a shard of it
            return mapped.varying(jnp.zeros((1, *total.shape), total.dtype), (*self.axes, *sorted(others)))

        params = jax.tree.map(jnp.asarray, params)
        return jax.tree.map(rows, params, self._sums_like(params, dtype))

    def sums(self, shapes: Tree, params: Tree) -> Tree:
        return mapped.varying(mapped.as_row(arithmetic.zeros_of(shapes)), self.axes)

    def grads(self, grads: Tree, acc: Tree, params: Tree) -> Tree:
        check_local(grads, self.axes)
        return self.as_partial(grads)

    def check_shared(self, params: Tree, results: Tree | None = None) -> None:
        check_shared(params, self.axes, results)

    def _overlap_needs(self) -> str | None:
        # No type of JAX says that a sum, written in the place of partial sums, is the same on all devices.
        return super()._overlap_needs() or (
            "check_vma=False in jax.shard_map" if mapped.types_track_devices(self.axes) else None
        )

    def _joined(self, local: Tree) -> Tree:
        return self.as_local(local)

    def _reduced(self, acc: Tree) -> tuple[Tree, dict[str, Tree]]:
        collectives.check_narrow(self.dtype, acc)
        add = lambda leaf: leaf if dtypes.is_float0(leaf) else collectives.add_up(leaf[0], self.axes, self.dtype)
        total = jax.tree.map(add, acc)
        return total, {"acc_grads": mapped.varying(mapped.as_row(total), self.axes)}

    def as_local(self, sums: Tree) -> Tree:
        return mapped.as_local(sums)

    def as_partial(self, local: Tree) -> Tree:
        return mapped.as_row(local)

    def check_state(self, weight: jax.Array, *trees: Tree) -> None:
        check_num_devices(weight, 1)


class Partial(Several):
    """Partial sums that stay: each device has its own, and their sum goes nowhere."""

    def total(self, sums: Tree) -> Tree:
        return self.as_local(sums)

    def _reduced(self, acc: Tree) -> tuple[Tree, dict[str, Tree]]:
        return self.as_local(acc), {}

    def _extreme(self, local: Callable[..., Any], over_devices: Callable[..., Any], leaf: Any) -> Any:
        return self.as_local(leaf)

    def _overlap_needs(self) -> str | None:
        return 'a sum over the devices, not Devices(to="partial")'


class PartialInShardMap(Partial, InShardMap):
    """Partial sums inside a `jax.shard_map` that stay: [...] on each device, whose parameters may be its own."""

    def check_shared(self, params: Tree, results: Tree | None = None) -> None:
        pass


def defer_reduction(params: Tree, axes: str | Sequence[str]) -> Tree:
    """Inside `jax.shard_map`, leaves each device the gradient of its rows.

    If all devices share a parameter, JAX adds up its gradient over these
    devices at once. Differentiate with respect to what this function
    returns instead: each device then gets a gradient of its own, and
    `accumulate_gradients(..., devices=...)` adds these gradients at the
    end of the window.

    Args:
      params: the parameters, replicated over `axes`.
      axes: the name of an axis of the mesh, or several: those of
        `accumulate_gradients`.

    Returns:
      The same values, of a type that varies over `axes`.

    Raises:
      ValueError: outside a `jax.shard_map` over these axes. There,
        `value_and_grad(..., devices=Devices(axes, to="partial"))` and
        `value_and_apply_gradients` do all of it. A parameter of which each
        device has a shard, which types tell only with `check_vma=True`:
        gradients of different shards would be added.

    Example:
      >>> import jax, jax.numpy as jnp, optax_accum
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",),
      ...     axis_types=(jax.sharding.AxisType.Auto,))
      >>> @jax.shard_map(
      ...     mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
      ... def gradients(w, x):
      ...     local = optax_accum.sharding.defer_reduction(w, "data")
      ...     return jax.grad(lambda w: jnp.mean(x) * w)(local)[None]
      >>> devices = jax.device_count()
      >>> gradients(jnp.float32(1.0), jnp.ones(devices)).shape == (devices,)
      True
    """
    axes = meshes.as_axes(axes)
    if not meshes.is_manual(axes):
        raise ValueError(
            f"defer_reduction works inside jax.shard_map over {axes}. Outside, use value_and_grad(..., "
            'devices=Devices(..., to="partial")), which returns the gradient of each device, [d, ...].'
        )
    check_shared(params, axes)
    return mapped.varying(params, axes)
