"""The option `devices`, `Devices("data", to=shardings)` say, and errors where a state or gradients do not fit it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_accum._arguments import checks
from optax_accum._core import compilers, dtypes
from optax_accum._core.dtypes import is_float0
from optax_accum._core.leaves import by_path, is_array
from optax_accum._core.state import AccumulationState, holds_partial_sums, holds_sum
from optax_accum._core.types import Axes, Tree
from optax_accum._loss.meter import Meter
from optax_accum._space import mapped, meshes

PARTIAL = "partial"  # as `to`: the sum goes nowhere


@dataclasses.dataclass(frozen=True, init=False)
class Devices:
    """Which devices have the rows of a batch, and how gradients are added.

        value_and_grad(loss, 8, devices=Devices("data", dtype=jnp.bfloat16))

    Where the defaults serve, the axis alone is enough: `devices="data"`.
    `optax_accum.sharding` has what follows from it.

    Attributes:
      axes: the mesh axis over which the batch is sharded, or several; None
        on one device, kept as `()`.
      to: where the sum goes: to all devices (None); as `PartitionSpec`s or
        `NamedSharding`s say, a prefix of the parameters' tree, such as
        `shard_over(params, "data")` (ZeRO-1); `"partial"`, in
        `value_and_grad` and `reduce_microbatches`, leaves each device its
        own sum.
      dtype: in which gradients cross the network: bfloat16 halves the
        bytes. By default the dtype of the sums.
      overlap: whether the backward pass of the last micro-batch adds the
        gradients over the devices, so that communication overlaps the
        matrix products that follow. That micro-batch is compiled
        separately. By default on GPUs, from 64 MiB of gradients on, without
        `to`.

    Raises:
      TypeError, ValueError: no axis, or one twice; `to` is no spec; a dtype
        without the range of float32; `overlap` is no bool.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> devices = optax_accum.Devices("data", dtype=jnp.bfloat16)
      >>> tx = optax_accum.accumulate_gradients(
      ...     optax.adam(1e-3), every=4, devices=devices)
      >>> devices.axes
      ('data',)
    """

    axes: Axes
    to: Tree
    dtype: Any
    overlap: bool | None

    def __init__(
        self, axes: str | Sequence[str] | None, *, to: Tree = None, dtype: Any = None, overlap: bool | None = None
    ):
        checks.check_flag("overlap", overlap)
        fields = {"axes": meshes.as_axes(axes), "to": to, "dtype": _as_dtype(dtype), "overlap": overlap}
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        options = {name: value for name, value in vars(self).items() if name != "axes" and value is not None}
        if options and not self.axes:
            raise ValueError(
                f"Devices says how gradients are added over mesh axes: axes=None, and {', '.join(options)} given. Name "
                "the axes, too, or leave it out."
            )
        if isinstance(self.to, str) and not self.is_partial:
            raise ValueError(f'to must be None, specs for the tree of the parameters, or "{PARTIAL}": to={self.to!r}.')
        if not self.is_partial:
            meshes.check_specs(self.to)
        if self.is_partial and self.dtype is not None:
            raise ValueError(
                f'dtype is the dtype in which gradients cross the network, and with to="{PARTIAL}" none do: '
                f"dtype={self.dtype.name}. Leave it out."
            )

    @property
    def is_partial(self) -> bool:
        """Whether each device keeps its own sum."""
        return isinstance(self.to, str) and self.to == PARTIAL


def _as_dtype(dtype: Any) -> Any:
    dtype = checks.as_float_dtype("dtype", dtype)
    if dtype is not None and dtypes.is_short(dtype):
        raise ValueError(
            "dtype must have the range of float32, for a sum beyond it would be lost: "
            f"dtype={dtype.name} ends at {float(jnp.finfo(dtype).max):g}. Pass jnp.bfloat16."
        )
    return dtype


def as_devices(devices: Any, *, partial: bool = False, of_gradients: bool = True) -> Devices:
    """Checks an option `devices`; names of axes, or None for one device, become `Devices`.

    `partial` allows `to="partial"`, `of_gradients` the options of gradients alone: a dtype, and overlap.
    """
    devices = devices if isinstance(devices, Devices) else Devices(devices)
    if devices.is_partial and not partial:
        raise ValueError(f'The sum must go somewhere here: devices has to="{PARTIAL}". Leave it out, or pass specs.')
    if not of_gradients and not (devices.dtype is devices.overlap is None):
        raise ValueError(
            "Devices(dtype=, overlap=) are for gradients of value_and_grad and accumulate_gradients: "
            f"devices={devices}. Leave them out."
        )
    return devices


def with_replicated(devices: Devices) -> Devices:
    """The devices of a pair of sums, of which the second goes to all of them."""
    if devices.to is None or devices.is_partial:
        return devices
    return dataclasses.replace(devices, to=(devices.to, PartitionSpec()))


def check_num_devices(weight: jax.Array, devices: int | None = None) -> None:
    """Raises unless a state of this weight has partial sums, one for each device (if their number is known)."""
    if not weight.ndim or devices not in (None, len(weight)):
        raise ValueError(_other_devices(weight.shape, devices))


def has_several(state: AccumulationState) -> bool:
    """Whether a window has several micro-batches: of several calls, or, with `every=1`, one on each device."""
    on_several = holds_partial_sums(state) and (len(state.weight) > 1 or bool(meshes.manual_axes()))
    return on_several or holds_sum(state)


def check_local(grads: Tree, axes: Axes) -> None:
    """Raises for gradients that have been reduced already, inside `jax.shard_map`."""
    if not mapped.types_track_devices(axes):
        return
    for path, leaf in by_path(grads):
        if not is_float0(leaf) and not set(axes) <= compilers.varying_axes(leaf):
            raise ValueError(
                f"With devices, gradients must not be reduced before the window closes: at {path} the gradient is "
                f"the same on all devices of {axes}. Differentiate with respect to "
                "defer_reduction(params, axes)."
            )


def check_replicated(params: Tree, axes: Axes) -> None:
    """Raises if a parameter is known to be sharded over the reduced axes: it would be gathered unasked."""
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
    """Raises, inside `jax.shard_map`, if devices have parameters of their own: their gradients would be added.

    With the `results` of a function on each device, [1, ...], only if one has the shape of such a parameter.
    """
    shapes = None if results is None else {jnp.shape(leaf)[1:] for leaf in jax.tree.leaves(results)}
    for path, leaf in by_path(params):
        if mapped.differs(leaf, axes) and (shapes is None or (jnp.shape(leaf) and jnp.shape(leaf) in shapes)):
            raise ValueError(
                f"Inside jax.shard_map, parameters must be the same on all devices along {axes}, where their "
                f"gradients are added: at {path} each device may have a shard of its own. Let the parameter in with "
                "P(), which gathers it, and without defer_reduction; or take reduce_microbatches(jax.grad(loss), ...) "
                'with Devices(to="partial"), and add up there the gradients of the parameters that are shared '
                "(jax.lax.psum): a shard's own is the sum already."
            )


def refuse_shards(meter: Meter, params: Tree, axes: Axes) -> None:
    """Raises if gradients are measured and each device has a shard of one, over other axes of a `jax.shard_map`."""
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
    """Raises for whole gradients, and for partial sums of another number of devices than `sums` or the mesh has."""
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
                'reduce_microbatches with devices=Devices(..., to="partial"), or call value_and_apply_gradients or, in '
                "Flax, optax_accum.flax.linen.train_step or optax_accum.flax.nnx.train_step, with an optimizer that is "
                "in no chain: accumulate_gradients(optax.chain(...), devices=...)."
            )
