"""The outputs of a function over devices: a device's own rows (logits), and what all devices have alike (the loss).

Values that devices do not have alike may meet rows, and no result of all rows may depend on them otherwise. With a
scale `s` of each device's own, `mean(s * x)` is a mean of all rows, each scaled by its device; `s * mean(x)` is another
number on each device.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._arguments.roles import Call
from optax_accum._core.equations import every_equation
from optax_accum._core.leaves import by_path, is_array
from optax_accum._core.types import Tree
from optax_accum._rows.program import Constant, Equation, Value
from optax_accum._space.device import Device
from optax_accum._space.space import Space
from optax_accum._within.store import axis_of, has_own_rows
from optax_accum._within.traced_call import TracedCall


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Along:
    """One device's rows of an output, [n, ...], and the axis along which they belong."""

    rows: jax.Array
    axis: int = dataclasses.field(metadata={"static": True})


def placed(device: Device, loss: TracedCall, outputs: Tree) -> tuple[Tree, Tree]:
    """Splits outputs: one device's own, and the ones that all have alike; None stands for the others."""
    leaves, treedef = jax.tree.flatten(outputs)
    if device.is_alone:
        return treedef.unflatten([None] * len(leaves)), outputs
    values = loss.levels.program.outputs[: len(leaves)]
    mine: list[Any] = [None] * len(leaves)
    same: list[Any] = [None] * len(leaves)
    for place, (value, leaf) in enumerate(zip(values, leaves, strict=True)):
        if has_own_rows(value):
            mine[place] = Along(jnp.moveaxis(leaf, axis_of(value), 0), axis_of(value))
        elif device.one_batch:
            same[place] = device.from_first(leaf)
        else:
            mine[place] = leaf
    return treedef.unflatten(mine), treedef.unflatten(same)


def joined(space: Space, local: Tree, outputs: Tree) -> Tree:
    """The outputs as `fun` returns them, from the devices' own parts and from outputs that all have alike."""

    def join(mine: Any, same: Any) -> Any:
        if mine is None:
            return same
        if isinstance(mine, Along):
            return jnp.moveaxis(space.output("concat", mine.rows), 0, mine.axis)
        return space.total(mine)

    return jax.tree.map(join, local, outputs, is_leaf=lambda node: node is None or isinstance(node, Along))


# Values that devices do not have alike


def check_alike(loss: TracedCall, device: Device, call: Call, outputs: int | None = None) -> None:
    """Raises where types tell that an argument differs between devices, and a result without rows takes it."""
    own = dict(zip(loss.levels.program.inputs, _names(device, call), strict=True))
    own = {value: name for value, name in own.items() if name and value.axis is None}
    for equation in loss.levels.program.equations:
        name = next(filter(None, (own.get(value) or _name_of(device, value) for value in equation.ins)), None)
        name = name or _index(device, equation)
        own.update((value, name) for value in equation.outs if name and not has_own_rows(value))
    for value in loss.levels.program.outputs[:outputs]:
        if name := own.get(value):
            raise ValueError(
                f"With devices, a loss and its aux are those of all rows: {name} differs between the devices of "
                f"{device.axes}, and is used after a sum over rows, where one number must stand for all. Use it "
                "before the sum, where each row is; or make it the same on all devices, by "
                f"jax.lax.pmean(..., {device.axes})."
            )


def _names(device: Device, call: Call) -> list[str | None]:
    """For each array of a call, its name if it differs between devices."""
    names: list[str | None] = []
    for name, argument in call.arguments.items():
        for path, leaf in by_path(argument, ""):
            if is_array(leaf):
                names.append(f"argument {name!r}{path and f' at {path}'}" if device.has_own(leaf) else None)
    return names


def _name_of(device: Device, value: Value) -> str | None:
    is_own = isinstance(value, Constant) and device.has_own(value.array)
    return "an array that the loss closes over" if is_own else None


def _index(device: Device, equation: Equation) -> str | None:
    indices: list[Any] = [each for each in every_equation(equation.single) if each.primitive.name == "axis_index"]
    is_own = any(index.params["axis_name"] in device.axes for index in indices)
    return f"the device's index, {equation.place}," if is_own else None
