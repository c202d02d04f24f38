"""A loss that takes something from the other devices: it runs micro-batch by micro-batch, and what joins its aux.

Its program says nothing of the whole batch where other devices' rows come in: the loss counts by its rows, with a
warning. An auxiliary output that no collective reaches is joined as it was made, and any other is refused by name.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import messages
from optax_accum._core.equations import every_equation
from optax_accum._core.leaves import by_path, is_array
from optax_accum._core.types import Tree
from optax_accum._loss.parts import Returns
from optax_accum._rows.denominators import denominators_of
from optax_accum._rows.forms import ROWS
from optax_accum._rows.operations import rule_of
from optax_accum._rows.places import place_of
from optax_accum._rows.program import Value
from optax_accum._rows.reading import Reading
from optax_accum._space.device import Device
from optax_accum._within.traced_call import TracedCall


class UnreadableError(Exception):
    """The trace does not tell how micro-batches belong together: the loss takes something from the other devices."""

    def __init__(self, loss: TracedCall, collectives: Sequence[Any], device: Device, returns: Returns):
        super().__init__()
        self.loss, self.returns, self.collectives = loss, returns, collectives
        (first, *_) = collectives
        others = f"the other devices of {device.axes}"
        self.text = f"takes something from {others} ({first.primitive.name}, {place_of(first)})"

    def warn(self) -> None:
        messages.warn(
            f"A loss that {self.text} runs micro-batch by micro-batch, and each counts by its rows. Leave that out: "
            "with devices, the rows of all devices are one batch. Or say how micro-batches count: "
            "jax.value_and_grad(optax_accum.accumulate(loss, k, weight_fn=..., devices=...))."
        )

    def reductions(self, part: Callable[[Tree], Tree] = lambda aux: aux) -> Tree:
        """What joins each auxiliary output, or those of a part of them.

        Raises:
          ValueError: nothing shows what joins one.
        """
        places = self.loss.returned(range(len(self.loss.levels.program.outputs)))
        aux = part(self.returns.taken_apart(places).aux)
        names = [self._reduction(path, place) for path, place in by_path(aux)]
        return jax.tree.unflatten(jax.tree.structure(aux), names) if names else "mean"

    def _reduction(self, path: str, place: int) -> str:
        output = self.loss.levels.program.outputs[place]
        name, why_not = (None, "it depends on that") if self._takes(output) else self._found(output, place)
        if name is None:
            raise ValueError(
                f"An auxiliary output must be known for the whole batch: at {path} nothing tells how those of "
                f"micro-batches are joined ({why_not}), for the loss {self.text}. Leave that out: with devices, the "
                "rows of all devices are one batch. Or return sums over rows, means over rows, or one row for each "
                "example."
            )
        return name

    def _takes(self, output: Value) -> bool:
        """Whether an output depends on what comes from other devices."""
        taken: set[Value] = set()
        sources = set(map(id, self.collectives))
        for equation in self.loss.levels.program.equations:
            is_source = not sources.isdisjoint(map(id, every_equation(equation.single)))
            if is_source or not taken.isdisjoint(equation.ins):
                taken.update(equation.outs)
        return output in taken

    def _found(self, output: Value, place: int) -> tuple[str | None, str]:
        """The reduction that gives an output for the whole batch; or None, and why there is none."""
        levels, call = self.loss.levels, self.loss.call
        form = Reading(levels, rule_of).form(output)
        if form.reasons:
            return None, str(form.reasons[0])
        if output.axis is not None:
            has_rows = form.is_plain and output.axis == 0 and output.aval.shape[0] == levels.program.rows[0]
            return ("concat", "") if has_rows else (None, "it has no row for each example along its first axis")
        if form.is_plain:
            return "max", ""  # the same for each micro-batch
        arguments = call.arguments.items()
        others = [None if name in call.batch else str(name) for name, arg in arguments for _ in _arrays(arg)]
        found = denominators_of(levels, others, place)
        by = {one.by for one in found.denominators}
        if found.reasons or len(by) != 1:
            return None, str(found.reasons[0]) if found.reasons else "its terms are divided by different counts"
        if by == {None}:
            return "sum", ""
        if by == {ROWS} and jnp.issubdtype(output.aval.dtype, jnp.inexact):
            return "mean", ""
        return None, "it is divided by a count of its own"


def _arrays(arg: Tree) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(arg) if is_array(leaf)]
