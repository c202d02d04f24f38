"""Reductions of rows, in parts: each micro-batch's part."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import dtypes
from optax_accum._rows.program import Equation
from optax_accum._rows.registry import Reduction, known
from optax_accum._rows.units import Units


def reduction_of(equation: Equation) -> Reduction:
    return known(equation.name).partial


def part_of(equation: Equation, units: Units, values: list[Any], numbers: jax.Array) -> jax.Array:
    """One micro-batch's part of a reduction of rows, in at least float32 if it is a sum."""
    reduction = reduction_of(equation)

    def filled(value: Any, axis: int | None) -> Any:
        if axis is None or not units.fills:
            return value
        counts = units.counts(numbers, value.shape[axis])
        counts = jnp.expand_dims(counts, [dim for dim in range(value.ndim) if dim != axis])
        return jnp.where(counts, value, jnp.asarray(reduction.fold.nothing(value.dtype), value.dtype))

    pairs = zip(values, (value.axis for value in equation.ins), strict=True)
    return reduction.part(equation.single, [filled(*pair) for pair in pairs], dtypes.of_sum, reduction.fold.along)
