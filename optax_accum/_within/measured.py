"""For statistics: which sums of a program are gradients, and `|g_i|^2` of what micro-batch i adds to each."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core import dtypes
from optax_accum._core.folds import SUM
from optax_accum._core.leaves import by_path
from optax_accum._loss.meter import Meter
from optax_accum._rows.levels import Levels
from optax_accum._rows.program import Equation, Number, Value, needed
from optax_accum._within.fold import Result, Sampled
from optax_accum._within.traced_call import TracedCall


def sums_of(levels: Levels) -> set[Value]:
    """The values that loops add up; of an extreme, as the rule of a parameter may return it, there is no sum."""
    return {value for loop in levels.loops for value, fold in loop.sums.items() if fold is SUM}


class Scaled(NamedTuple):
    """A value whose squared norm is `scale` times that of a sum, of any micro-batch's part as of the whole."""

    of: Value
    scale: float = 1


def sum_of(value: Value, levels: Levels, *, in_order: bool) -> Scaled | None:
    """The sum of a loop whose entries a value has, scaled by numbers of the program; also repeated, or reordered.

    `in_order`: neither repeated nor reordered. None if the value takes no sum; if it is none of these, the value.
    """
    made_by, sums = levels.program.made_by, sums_of(levels)
    if not takes_a_sum(value, levels):
        return None
    found = Scaled(value)
    while found.of not in sums:
        equation = made_by[found.of]
        before = _before(found, equation) if not in_order or equation.name in _IN_ORDER else None
        if before is None:
            return Scaled(value)
        found = before
    return found


def _before(found: Scaled, equation: Equation) -> Scaled | None:
    """What an equation has made a value of, if it only orders, repeats or scales the entries."""
    value, *others = equation.ins
    if equation.name in _SAME_ENTRIES:
        return Scaled(value, found.scale)
    if equation.name == "broadcast_in_dim":
        return Scaled(value, found.scale * found.of.aval.size / value.aval.size)
    if equation.name == "mul" and isinstance(value, Number):
        value, others = others[0], [value]
    if equation.name not in ("mul", "div") or not isinstance(others[0], Number):
        return None
    return Scaled(value, found.scale * float(others[0].number) ** (2 if equation.name == "mul" else -2))


_IN_ORDER = frozenset(["convert_element_type", "copy", "div", "mul", "neg"])
_SAME_ENTRIES = frozenset(["convert_element_type", "copy", "neg", "pad", "reshape", "rev", "squeeze", "transpose"])


def takes_a_sum(value: Value, levels: Levels) -> bool:
    """Whether a value is made of a sum of a loop."""
    sums = sums_of(levels)
    takes = (equation.ins for equation in needed([value], levels.program.made_by, there=sums))
    return value in sums or not sums.isdisjoint(itertools.chain(*takes))


def measured(
    meter: Meter, program: TracedCall, gradient: Sequence[Value], asked: dict[Value, Result]
) -> tuple[dict[Value, Result], Sampled]:
    """The gradients, each with the square of what a micro-batch adds to it, and how squares are sampled."""
    params, units, rows = program.call[program.call.params], program.units, program.levels.program.rows[0]
    if units.devices * units.microbatches == 1:
        meter.warn_of_one_sample()
    squares = meter.zero_squares(params)
    pairs = zip(gradient, squares, strict=True)  # [l] squares: of each layer that a leaf stacks, so their order matters
    found = [sum_of(value, program.levels, in_order=square.ndim > 0) for value, square in pairs]
    sums = [one.of for one in found if one is not None]
    loops = [loop for loop in program.levels.loops if set(sums) <= loop.sums.keys()]
    if not loops:
        named = [f"argnums{path}" for path, _ in by_path(params)]
        ready = sums_of(program.levels)
        missing = [name for name, one in zip(named, found, strict=True) if one and one.of not in ready] or named
        meter.refuse(
            "Statistics take the gradient of each micro-batch, and of this loss micro-batches have none of their own: "
            f"that of {', '.join(missing)} is there only for all rows, or in another loop (rows are taken together, or "
            "parameters scale the sum of all rows). Leave statistics out, or take those of accumulate_gradients, for "
            "micro-batches that count each by itself."
        )
    asked = dict(asked)
    for one, square, value in zip(found, squares, gradient, strict=True):
        if one is not None:
            asked[one.of] = dataclasses.replace(asked.get(one.of) or asked.get(value) or Result(SUM), square=square)

    order = [value for loop in loops[:1] for value in loop.sums if value in sums]

    def sample(samples: Any, parts: list[Any], index: Any) -> Any:
        """A micro-batch's gradient is its part of the sum, times all rows, divided by its own."""
        by_sum = dict(zip(order, parts, strict=True))
        pairs = zip(found, squares, strict=True)
        each = [square if one is None else one.scale * by_sum[one.of] for one, square in pairs]
        weight = jnp.sum(units.indices(index) < units.count) * units.block
        weight = weight.astype(dtypes.default_float())
        each = [square * (rows / jnp.maximum(weight, 1)) ** 2 for square in each]
        groups = meter.by_group(jax.tree.unflatten(jax.tree.structure(params), each))
        return meter.sample(samples, groups, weight, False)

    scalar = lambda: program.device.vary(jnp.zeros([], dtypes.default_float()))
    return asked, (meter.samples(params, scalar), sample)
