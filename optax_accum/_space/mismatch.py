"""Errors where a state or gradients do not fit the devices."""

import jax
import jax.numpy as jnp

from optax_accum._core import compilers
from optax_accum._core.dtypes import is_float0
from optax_accum._core.leaves import by_path, is_array
from optax_accum._core.types import Axes, Tree
from optax_accum._loss.meter import Meter
from optax_accum._space import mapped, meshes


def check_num_devices(weight: jax.Array, devices: int | None = None) -> None:
    """Raises unless a state has partial sums, `weight` being its: one for each device, where their number is known."""
    if not weight.ndim or devices not in (None, len(weight)):
        raise ValueError(_other_devices(weight.shape, devices))


def check_local(grads: Tree, axes: Axes) -> None:
    """Raises for gradients that have been reduced already, inside `jax.shard_map`."""
    if not mapped.tells_apart(axes):
        return
    for path, leaf in by_path(grads):
        if not is_float0(leaf) and not set(axes) <= compilers.varying_axes(leaf):
            raise ValueError(
                f"With devices, gradients must not be reduced before the window closes: at {path} the gradient is "
                f"the same on all devices of {axes}. Differentiate with respect to "
                "defer_reduction(params, axes)."
            )


def check_replicated(params: Tree, axes: Axes) -> None:
    """Raises where a parameter is known to be sharded over the reduced axes: it would be gathered unasked."""
    for path, leaf in by_path(params):
        spec = meshes.spec_of(leaf) or ()
        if any(set(meshes.names_of(entry)) & set(axes) for entry in spec):
            raise ValueError(
                f"Parameters must be replicated over devices, unless Devices(to=) says where their gradients go: at "
                f"{path} the sharding is {spec}. To gather them before each gradient and keep a whole accumulator on "
                "each device, pass Devices(axes, to=shard_over(params, axes)); to reduce every micro-batch instead, "
                "leave out devices."
            )


def check_shared(params: Tree, axes: Axes, results: Tree | None = None) -> None:
    """Raises, inside `jax.shard_map`, where devices have parameters of their own: their gradients would be added.

    With the `results` of a function on each device, [1, ...], only where one has the shape of such a parameter.
    """
    shapes = None if results is None else {jnp.shape(leaf)[1:] for leaf in jax.tree.leaves(results)}
    for path, leaf in by_path(params):
        if mapped.differs(leaf, axes) and (shapes is None or (jnp.shape(leaf) and jnp.shape(leaf) in shapes)):
            raise ValueError(
                f"Inside jax.shard_map, parameters must be the same on all devices along {axes}, where their "
                f"gradients are added: at {path} each device may have a shard of its own. Let the parameter in with "
                'P(), which gathers it, and without defer_reduction; or take Devices(to="partial"), and add up there '
                "the gradients of the parameters that are shared (jax.lax.psum): a shard's own is the sum already."
            )


def refuse_shards(meter: Meter, params: Tree, axes: Axes) -> None:
    """Raises where gradients are measured of which each device has a shard, over other axes of a `jax.shard_map`."""
    for path, leaf in by_path(params):
        if is_array(leaf) and (others := tuple(sorted(compilers.varying_axes(leaf) - set(axes)))):
            meter.refuse(
                f"Statistics are of whole gradients: at {path} each device of {others} may have a shard of its own. "
                f"Leave {others} out of the axis_names of jax.shard_map, that is to the partitioner; or leave out "
                "statistics."
            )


def _other_devices(had: tuple[int, ...], devices: int | None) -> str:
    sums = f"partial sums for {had[0]} devices" if had else "no partial sums"
    there = f", and there are {devices} devices" if devices else ""
    return (
        f"The state must have one partial sum for each device: it has {sums}{there}. Call "
        f"redistribute(state, {devices or 'devices'}), or init again."
    )


def check_partials(grads: Tree, sums: Tree, axes: Axes, devices: int) -> None:
    """Raises where gradients are whole, or partial sums of other devices than `sums`, or than there are."""
    try:
        totals = jax.tree.structure(grads).flatten_up_to(sums)
    except ValueError:
        return
    for (path, grad), total in zip(by_path(grads), totals, strict=True):
        old, new = getattr(total, "shape", ()), jnp.shape(grad)
        if len(old) == len(new) and old[1:] == new[1:] and old != new:
            if old[:1] != (devices,):
                raise ValueError(_other_devices(old[:1], devices))
            raise ValueError(
                f"Gradients must be partial sums over the devices of the optimizer, {axes}: at {path} they are of "
                f"{new[0]} devices, and there are {devices} along these axes. Pass devices={axes} to "
                "value_and_grad, too."
            )
        if old != new and new == old[1:]:
            raise ValueError(
                f"With devices, gradients come as partial sums [d, ...]: at {path} the gradient has shape {new}, "
                f"and partial sums have {old}, so it has been reduced already. Take it from value_and_grad or "
                'accumulate with devices=Devices(..., to="partial"), or call value_and_apply_gradients, with an '
                "optimizer that is in no chain: accumulate_gradients(optax.chain(...), devices=...)."
            )
