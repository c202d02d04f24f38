"""For statistics: which sums of a program are gradients, and `|g_i|^2` of what micro-batch i adds to each."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from optax_accum._core import dtypes
from optax_accum._core.folds import SUM
from optax_accum._core.leaves import is_inexact, parted
from optax_accum._loss.meter import Meter
from optax_accum._rows.levels import Levels
from optax_accum._rows.program import Equation, Value
from optax_accum._within.fold import Result, Sampled
from optax_accum._within.traced_call import TracedCall


def sums_of(levels: Levels) -> set[Value]:
    """The values that loops add up; of an extreme, as the rule of a parameter may return it, there is no sum."""
    return {value for loop in levels.loops for value, fold in loop.sums.items() if fold is SUM}


def sum_of(value: Value, levels: Levels) -> Value | None:
    """The sum of a loop whose entries a value has, in another order perhaps; the value itself if there is none.

    None if it takes no sum.
    """
    made_by, sums = levels.program.made_by, sums_of(levels)
    if not _takes(value, made_by, sums):
        return None
    while value not in sums and made_by[value].name in _SAME_ENTRIES:
        value = made_by[value].ins[0]
    return value


_SAME_ENTRIES = frozenset(["convert_element_type", "copy", "neg", "pad", "reshape", "rev", "squeeze", "transpose"])


def _takes(value: Value, made_by: dict[Value, Equation], sources: set[Value]) -> bool:
    """Whether a value is made of one of the sources."""
    todo, seen = [value], set()
    while todo:
        value = todo.pop()
        if value in sources:
            return True
        if value in made_by and value not in seen:
            seen.add(value)
            todo += made_by[value].ins
    return False


def rows_of(program: TracedCall) -> int:
    """The rows of all devices."""
    units = program.units
    return units.count * units.block * units.devices


def measured(
    meter: Meter, program: TracedCall, gradient: Sequence[Value], asked: dict[Value, Result]
) -> tuple[dict[Value, Result], Sampled]:
    """The gradients, each with the square of what a micro-batch adds to it, and how squares are sampled."""
    params, units = program.call[program.call.params], program.units
    if units.devices * units.microbatches == 1:
        meter.warn_of_one_sample()
    found = [sum_of(value, program.levels) for value in gradient]
    sums = [value for value in found if value is not None]
    loops = [loop for loop in program.levels.loops if set(sums) <= loop.sums.keys()]
    if not loops:
        meter.refuse(
            "Statistics take the gradient of each micro-batch, and of this loss micro-batches have none of their own: "
            "it takes rows together, or what its gradient is made of is there only for all rows. Leave statistics out."
        )
    squares = meter.no_squares(params)
    asked = dict(asked)
    for value, square, of in zip(found, squares, gradient, strict=True):
        if value is not None:
            asked[value] = dataclasses.replace(asked.get(value) or asked.get(of) or Result(SUM), square=square)

    order = [value for loop in loops[:1] for value in loop.sums if value in sums]

    def sample(samples: Any, parts: list[Any], index: Any) -> Any:
        """A micro-batch's gradient is its part of the sum, times all rows, divided by its own."""
        by_sum = dict(zip(order, parts, strict=True))
        pairs = zip(found, squares, strict=True)
        each = [square if value is None else by_sum[value] for value, square in pairs]
        weight = jnp.sum(units.indices(index) < units.count) * units.block
        weight = weight.astype(dtypes.default_float())
        each = [square * (rows_of(program) / jnp.maximum(weight, 1)) ** 2 for square in each]
        return meter.sample(samples, meter.by_group(parted(params, is_inexact)[1](each)), weight, False)

    scalar = lambda: program.device.vary(jnp.zeros([], dtypes.default_float()))
    return asked, (meter.samples(params, scalar), sample)
