"""A call of a function of a batch, traced: its program of rows, and how they go into micro-batches."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._arguments.roles import Call
from optax_accum._arguments.rows import count_known_rows, is_split
from optax_accum._core import compilers
from optax_accum._core.leaves import is_array, parted
from optax_accum._core.traced import Traced, trace
from optax_accum._core.types import Name, Tree
from optax_accum._rows.leveling import levels_of
from optax_accum._rows.levels import Crossing, Levels
from optax_accum._rows.program import paired
from optax_accum._rows.traces import OtherProgramError
from optax_accum._rows.units import Units
from optax_accum._space.device import Device
from optax_accum._within.splitting import Sizes, split_rows


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """A call, traced for the rows of all devices and for twice as many, abstractly: an axis that grows has rows.

    Attributes:
      traced: the function, for all rows.
      levels: how its program runs.
      units: how the rows of this device go into micro-batches.
      device: that runs it.
      call: with its arrays.
      values: the arrays of the call, in the order of the program's inputs.
    """

    traced: Traced
    levels: Levels
    units: Units
    device: Device
    call: Call
    values: Sequence[Any]

    def returned(self, outputs: Sequence[Any]) -> Tree:
        """The program's outputs in the tree that the function returns."""
        return jax.tree.unflatten(jax.tree.structure(self.traced.shapes), outputs)


def number_of_microbatches(sizes: Sizes, batch: Tree, devices: int) -> int:
    """The number of micro-batches on each device."""
    return split_rows(batch, sizes, devices).parts


def trace_call(
    fun: Callable[..., Any],
    call: Call,
    sizes: Sizes,
    model: Sequence[Name],
    device: Device | None = None,
    crossing: Crossing = Crossing.SAVE,
) -> TracedCall:
    """Traces a call that has one device's rows; `model` names the arguments by which it may be differentiated.

    Raises:
      TypeError, ValueError: `fun` is another program for twice as many rows, or fails for them; a group of rows is on
        two devices.
    """
    device = device or Device()
    devices = device.count
    rows_here = count_known_rows(call[call.batch])
    rows = devices * rows_here
    of_arrays, arrays = _of_arrays(fun, call)
    arguments = call.arguments.items()
    owner = [name for name, arg in arguments for leaf in jax.tree.leaves(arg) if is_array(leaf)]

    in_batch = [name in call.batch for name in owner]

    def types(times: int) -> list[Any]:
        return [type_of(leaf, times if is_cut else 1) for leaf, is_cut in zip(arrays, in_batch, strict=True)]

    single = trace(of_arrays, types(devices))
    try:
        program = paired(single.program, jax.make_jaxpr(of_arrays)(types(2 * devices)), (rows, 2 * rows))
    except OtherProgramError as error:
        raise ValueError(f"{_OTHER} {error}. {_REMEDY}") from error
    except (TypeError, ValueError) as error:
        call.check_shared(rows, of_whole_batch=True)  # an argument with as many rows as the batch may be why
        error.add_note(f"{_OTHER} {_REMEDY}")
        raise
    if program.units % devices:
        raise ValueError(
            f"A group of rows must be on one device: the loss takes {rows // program.units} rows together, and each of "
            f"{devices} devices has {rows_here}. Deal out whole groups, or take fewer devices."
        )
    units = program.units // devices
    parts = min(number_of_microbatches(sizes, list(call[call.batch]), devices), units)
    levels = levels_of(program, [name in model for name in owner], crossing)
    names = tuple(call.arguments)
    _, filled = parted(call[names], is_array)
    arrays = device.vary(arrays)
    call = call.with_values(names, filled(arrays))
    units = Units(units, parts, rows_here // units, devices, device.index)
    return TracedCall(single, levels, units, device, call, arrays)


def shapes_of(fun: Callable[..., Any], call: Call) -> Tree:
    of_arrays, arrays = _of_arrays(fun, call)
    return jax.eval_shape(of_arrays, arrays)


def _of_arrays(fun: Callable[..., Any], call: Call) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
    """The call as a function of its arrays, and the arrays."""
    names = tuple(call.arguments)
    arrays, filled = parted(call[names], is_array)
    return lambda arrays: call.with_values(names, filled(arrays)).apply(fun), arrays


def type_of(leaf: Any, times: int = 1) -> Any:
    """The type of an array with `times` times its rows."""
    shape = jnp.shape(leaf)
    shape = (times * shape[0], *shape[1:]) if is_split(leaf) and times > 1 else shape
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(
        shape, jnp.result_type(leaf), weak_type=weak, sharding=compilers.explicit_sharding(leaf)
    )


_OTHER = (
    "A loss is traced for its rows and for twice as many, to see which axes hold rows: there it is another program."
)
_REMEDY = "Take sizes from the batch (x.shape[0], -1), not from a constant."
