"""The known values of a program: whole (parameters), as micro-batches (activations), as parts of sums (gradients)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from optax_accum._core import compilers
from optax_accum._core.folds import SUM
from optax_accum._rows.program import Constant, Number, Value
from optax_accum._rows.traces import COUPLED
from optax_accum._rows.units import Units
from optax_accum._space import meshes
from optax_accum._space.device import Device
from optax_accum._within import shared
from optax_accum._within.fold import NOTHING, Result, Sampled


@dataclasses.dataclass
class Store:
    """The values of a program that are known: whole, or as micro-batches [k, ...] as a loop has left them.

    Each of several devices has its own rows; all other values are the same on all.
    """

    units: Units
    device: Device
    values: dict[Value, Any]
    slices: dict[Value, Any] = dataclasses.field(default_factory=dict)
    sums: dict[Value, Any] = dataclasses.field(default_factory=dict)  # this device's parts of sums over devices
    widened: dict[Value, Any] = dataclasses.field(default_factory=dict)  # shared values, widened
    asked: Mapping[Value, Result] = dataclasses.field(default_factory=dict)  # what becomes of some sums
    sampled: Sampled = NOTHING  # what is measured of them
    samples: Any = ()

    def whole(self, value: Value) -> Any:
        return compilers.on_device(self._resolved(value))

    def _resolved(self, value: Value) -> Any:
        """The value, found when it is first asked for: partial sums are added over the devices, micro-batches joined.

        It stays in the memory in which it lies: a batch may be on the host.
        """
        if isinstance(value, Constant | Number):
            return value.array
        if shared.is_widened(self.values.get(value)):
            return shared.narrowed(self.values[value])
        if value not in self.values and value in self.sums:
            self.values[value] = self.device.joined(SUM, self.sums[value]).astype(value.aval.dtype)
        if value not in self.values and value.axis is None:
            self.values[value] = self.slices[value][0]  # the same for each micro-batch
        if value not in self.values:
            slices = meshes.splittable(self.slices[value], 1, axis_of(value) + 1)  # else Explicit axes cannot join them
            joined = self.units.joined(slices, axis_of(value))
            self.values[value] = compilers.sharded_as(value.aval, joined)
        return self.values[value]

    def part(self, value: Value) -> Any:
        """The part that this device has of a value that is a sum over devices; its dtype may be wider."""
        return self.sums[value] if value in self.sums else self.device.part(self.whole(value))

    def shared(self, value: Value) -> Any:
        """A value that all micro-batches share, widened once for all loops.

        Widened by each loop, a bfloat16 parameter would have a float32 gradient of each, in a buffer of its own.
        """
        if shared.is_widened(self.values.get(value)):
            return self.values[value]
        if value not in self.widened:
            self.widened[value] = shared.widened(self.whole(value))
        return self.widened[value]

    def splittable(self, value: Value) -> Any:
        """The value for all rows, sharded so that Explicit axes let it be split."""
        units = self.units
        return meshes.splittable(jnp.asarray(self._resolved(value)), 1 if units.fills else units.size, axis_of(value))

    def split(self, value: Value) -> Any:
        if value not in self.slices:
            self.slices[value] = self.units.split(self.splittable(value), axis_of(value))
        return self.slices[value]


def axis_of(value: Value) -> int:
    assert value.axis is not None
    return value.axis


def has_own_rows(value: Value) -> bool:
    """Whether each device has its own rows of a value; not where rows are along two axes."""
    return value.axis not in (None, COUPLED)
