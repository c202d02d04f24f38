"""A call of a function of a batch, traced: its program of rows, and how they go into micro-batches."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._arguments.roles import Call
from optax_accum._arguments.rows import count_known_rows, is_split
from optax_accum._core import compilers, evaluation, messages, tracing
from optax_accum._core.leaves import is_array
from optax_accum._core.traced import Traced, trace
from optax_accum._core.types import Name, Tree
from optax_accum._rows.dealing import dealt_out
from optax_accum._rows.leveling import levels_of
from optax_accum._rows.levels import Levels
from optax_accum._rows.pairing import paired
from optax_accum._rows.places import place_of_error
from optax_accum._rows.program import Program
from optax_accum._rows.traces import OtherProgramError
from optax_accum._rows.units import Units
from optax_accum._space.device import Device
from optax_accum._within.splitting import Sizes, split_rows


class UndividedError(ValueError):
    """No trace tells how the rows of a function go into micro-batches: all of them must run at once."""


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


def trace_call(
    fun: Callable[[Call], Any],
    call: Call,
    sizes: Sizes,
    params: Sequence[Name],
    device: Device | None = None,
    outputs: Callable[[Tree], int] | None = None,
    **options: Any,
) -> TracedCall:
    """Traces a function of a call that has one device's rows; `params` names the arguments that are no data.

    `outputs` counts the function's own, of a gradient's shapes. The options are those of `levels_of`.

    Raises:
      UndividedError: `fun` is another program for twice as many rows, has references of its own, or looks at values.
      Exception: what `fun` raises for twice as many rows.
      ValueError: a group of rows is on two devices.
    """
    device = device or Device()
    rows_here = count_known_rows(call[call.batch])
    rows = device.count * rows_here
    with_arrays, arrays = call.of_arrays(lambda call: call)
    owner = [name for name, arg in call.arguments.items() for leaf in jax.tree.leaves(arg) if is_array(leaf)]
    are_rows = [name in call.batch for name in owner]

    def types(rows: int) -> list[Any]:
        """With the axes of `jax.shard_map` along which each varies, but for the devices': here are the rows of all."""
        times = [rows / rows_here if has_rows else 1 for has_rows in are_rows]
        pairs = zip(map(type_of, arrays, times), arrays, strict=True)
        return [evaluation.varying_type(aval, device.other_axes(leaf)) for aval, leaf in pairs]

    single, program = _paired(lambda arrays: fun(with_arrays(arrays)), types, rows, call)
    program = dealt_out(program, device.count)
    levels = levels_of(program, [name in params for name in owner], own=outputs and outputs(single.shapes), **options)
    count = program.units // device.count
    microbatches = min(split_rows(list(call[call.batch]), sizes, device.count).microbatches, count)
    arrays = device.vary(arrays)
    units = Units(count, microbatches, rows_here // count, device.count, device.index)
    return TracedCall(single, levels, units, device, with_arrays(arrays), arrays)


def _paired(
    run: Callable[[list[Any]], Any], types: Callable[[int], list[Any]], rows: int, call: Call
) -> tuple[Traced, Program]:
    """A function of arrays, traced for n rows; and its program of rows, from that trace and one for twice as many."""
    try:
        single = trace(run, types(rows))
    except tracing.NEEDS_VALUES as error:
        if tracing.is_staged():
            raise
        raise UndividedError(f"The loss looks at values, which no trace has, at {place_of_error(error)}.") from error
    try:
        other, double = 2 * rows, jax.make_jaxpr(run)(types(2 * rows))
    except Exception as error:
        call.check_shared(rows, of_whole_batch=True)  # an argument with as many rows as the batch may be why
        try:  # a table in the parameters may have no 2 n rows
            other, double = rows // 2, jax.make_jaxpr(run)(types(rows // 2))
        except Exception:
            error.add_note(f"{_TWICE} {_REMEDY}")
            raise error from None
    try:
        program = paired(single.program, double, (rows, other))
    except OtherProgramError as error:
        raise UndividedError(f"{_TWICE} The two have nothing in common: {error}.") from error
    for equation in program.equations:
        if compilers.makes_reference(equation.single):
            raise UndividedError(f"The loss has a mutable array of its own, at {equation.place}.")
    return single, program


def on_device(call: Call) -> Call:
    """The call with all rows in the memory of the device, for all to run at once."""
    return call.with_values(call.batch, compilers.on_device(call[call.batch]))


def warn_undivided(error: UndividedError) -> None:
    messages.warn(f"{error} {_AT_ONCE}")


def type_of(leaf: Any, times: float = 1) -> Any:
    """The type of an array with `times` times its rows."""
    shape = jnp.shape(leaf)
    shape = (int(times * shape[0]), *shape[1:]) if is_split(leaf) and times != 1 else shape
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(
        shape, jnp.result_type(leaf), weak_type=weak, sharding=compilers.explicit_sharding(leaf)
    )


_TWICE = "A loss is traced for n rows and for 2n rows, to find the axes that hold rows."
_REMEDY = (
    "It raises for 2n rows. Write it for any number of rows: take sizes from the batch (x.shape[0], -1), not from a "
    "constant. Pass an array that has no rows, but by chance as many entries, as an argument of its own. Or take "
    "jax.value_and_grad: a loss of one number of rows has no micro-batches."
)
_AT_ONCE = "All rows run at once: the numbers are right, and no memory is saved."
