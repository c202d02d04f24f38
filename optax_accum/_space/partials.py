"""How partial sums are made, placed and added on a mesh.

A gradient that has not been reduced is a leaf [d, ...], one partial sum for each of the d devices along the reduced
axes, each on its device. On every mesh that is an ordinary array: it passes jit boundaries and branches, can be added,
compared, saved and loaded, and adding two of them moves nothing.
"""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_accum._core import compilers, tracing
from optax_accum._core.types import Axes, Tree
from optax_accum._space import mapped, meshes, mismatch, narrow
from optax_accum._space.shards import Shard


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
    mismatch.check_shared(params, axes)
    return mapped.varying(params, axes)


def zeros_for(acc: Tree, params: Tree, axes: Axes) -> Tree:
    """Returns an empty accumulator [d, ...] for each leaf [...] of `acc`, each device's on that device."""
    mesh = meshes.mesh_of(axes, params)
    totals = jax.tree.structure(params).flatten_up_to(acc)  # MaskedNode where a parameter has no gradient
    placed = [
        (total, meshes.spec_of(param))
        for param, total in zip(jax.tree.leaves(params), totals, strict=True)
        if hasattr(total, "dtype")
    ]
    known = all(spec is not None for _, spec in placed) or not tracing.is_staged()
    free = None if known or meshes.explicit_axes(mesh) else PartitionSpec.UNCONSTRAINED

    def zeros() -> Any:
        return [_placed_zeros(total, mesh, axes, spec, free) for total, spec in placed]

    return jax.tree.structure(acc).unflatten(jax.jit(zeros)() if known else zeros())  # one program for all leaves


def zeros_of(shapes: Tree, params: Tree, axes: Axes) -> Tree:
    """Returns zeros [d, ...] for each shape [...], each device's on that device."""
    mesh = meshes.mesh_of(axes, params)
    return jax.tree.map(lambda shape: _zeros_over(shape, mesh, axes, PartitionSpec()), shapes)


def placed_like(sums: jax.Array, like: jax.Array, axes: Axes) -> jax.Array:
    """Places sums [d] on the devices that hold the parts of `like`, where those are known."""
    spec = meshes.spec_of(like)
    return meshes.place(sums, NamedSharding(cast(Any, meshes.mesh_of(axes, like)), spec)) if spec else sums


def sum_in_place(acc: Tree, axes: Axes, dtype: Any) -> tuple[Tree, Tree]:
    """Adds the partial sums [d, ...] of each leaf, everywhere: the sums [...], and the same on each device [d, ...].

    Whoever keeps the latter in the place of the partial sums lets the all-reduce write where it reads.
    """
    mesh = meshes.mesh_of(axes, acc)
    if meshes.num_devices(mesh, axes) == 1:
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), acc), acc  # XLA partitions no all-reduce of one device
    # No other axis shards what is sliced.
    sliced = compilers.is_tpu(meshes.device_kind(mesh)) and set(mesh.axis_names) == set(axes)

    def sum_leaf(row: jax.Array) -> jax.Array:
        def sum_up(leaf: Any) -> Any:
            return narrow.add_up(leaf, axes, dtype)

        wide_in_slices = dtype is not None and narrow.dealt(row.shape[2:], axes) is None
        return compilers.by_slices(sum_up, row[0]) if sliced and not wide_in_slices else sum_up(row[0])

    def add(acc: Tree) -> tuple[Tree, Tree]:
        total = jax.tree.map(sum_leaf, acc)
        return total, mapped.as_row(total) if sliced else mapped.varying(mapped.as_row(total), axes)

    run = mapped.over_axes(
        add,
        mesh,
        axes,
        in_specs=(jax.tree.map(lambda _: PartitionSpec(axes), acc),),
        out_specs=(PartitionSpec(), PartitionSpec(axes)),
        # There is no type of an array that is the same everywhere so far as it has been added, or gathered.
        check_vma=not sliced and dtype is None,
    )
    return run(acc)


def scatter(leaf: jax.Array, to: NamedSharding, axes: Axes, dtype: Any = None) -> jax.Array:
    """Adds rows [d, ...] into a leaf that is sharded as `to`: each device gets the part that it keeps.

    A `dtype` is that in which they cross the network, where at most one dimension is scattered.
    """
    shard = Shard(to, axes, dtype)
    shard.check()
    in_specs = PartitionSpec(*meshes.names_over_devices(axes, to.spec))
    explicit = meshes.over(NamedSharding(to.mesh, in_specs), AxisType.Explicit)
    leaf = leaf if explicit is None else jax.sharding.reshard(leaf, explicit)  # parameters may be whole over the others

    def on_device(row: Any) -> Any:
        return shard.scattered(row[0])

    typed = dtype is None  # as in `sum_in_place`
    return jax.shard_map(on_device, mesh=to.mesh, in_specs=in_specs, out_specs=to.spec, check_vma=typed)(leaf)


def _placed_zeros(leaf: jax.ShapeDtypeStruct, mesh: meshes.Mesh, axes: Axes, spec: Any, free: Any = None) -> jax.Array:
    """Returns zeros [d, ...] with the first axis over the devices and the others as in `spec`, or `free`."""
    others = [free] * len(leaf.shape) if spec is None else [meshes.without(entry, axes) for entry in spec]
    sharding = NamedSharding(cast(Any, mesh), PartitionSpec(axes, *others))
    return meshes.place(jnp.zeros((meshes.num_devices(mesh, axes), *leaf.shape), leaf.dtype), sharding)


# JAX finds the program of one scalar for the next: each has the same shape on the same devices.
_zeros_over = jax.jit(_placed_zeros, static_argnums=(0, 1, 2, 3))
