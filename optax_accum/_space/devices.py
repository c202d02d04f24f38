"""The option `devices`: over which mesh axes gradients are added, where their sum goes, in which dtype, and when."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_accum._arguments import checks
from optax_accum._core import dtypes
from optax_accum._core.types import Axes, Tree
from optax_accum._space import meshes

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
        `value_and_grad` and `accumulate`, leaves each device its own sum.
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
        said = {name: value for name, value in vars(self).items() if name != "axes" and value is not None}
        if said and not self.axes:
            raise ValueError(
                f"Devices says how gradients are added over mesh axes: axes=None, and {', '.join(said)} given. Name "
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
    """Returns an option `devices`, checked: names of axes, or None for one device, stand for the `Devices` of them.

    `partial` allows `to="partial"`, and `of_gradients` what only gradients have: a dtype, and a backward pass.
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
    """Returns the devices of a pair of sums: the second goes to all of them."""
    if devices.to is None or devices.is_partial:
        return devices
    return dataclasses.replace(devices, to=(devices.to, PartitionSpec()))
