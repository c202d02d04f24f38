"""The outputs of a function over devices: a device's own rows (logits), and what all devices have alike (the loss)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core.types import Tree
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
