"""Reductions of rows, in parts: each micro-batch's part, and how parts are joined."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import dtypes
from optax_accum._rows.program import Equation
from optax_accum._rows.units import Units


def type_of_part(equation: Equation) -> Any:
    result = equation.outs[0].aval
    adds_up = REDUCTIONS[equation.name].name == "sum"
    return result.update(dtype=_wide(result.dtype)) if adds_up else result


def part_of(equation: Equation, units: Units, values: list[Any], numbers: jax.Array) -> jax.Array:
    """One micro-batch's part of a reduction of rows, in at least float32 if it is a sum."""
    name, axes = equation.name, [value.axis for value in equation.ins]

    def filled(value: Any, axis: int, nothing: Any) -> Any:
        if not units.fills:
            return value
        counts = units.counts(numbers, value.shape[axis])
        counts = jnp.expand_dims(counts, [dim for dim in range(value.ndim) if dim != axis])
        return jnp.where(counts, value, jnp.asarray(nothing, value.dtype))

    if name == "dot_general":
        left, right = filled(values[0], axes[0] or 0, 0), filled(values[1], axes[1] or 0, 0)
        wide = _wide(equation.outs[0].aval.dtype)
        params = equation.single.params
        return jax.lax.dot_general(
            left, right, params["dimension_numbers"], params["precision"], preferred_element_type=wide
        )
    if name.startswith("scatter"):
        operand = jnp.zeros(values[0].shape, _wide(values[0].dtype))
        updates = filled(values[2], axes[2] or 0, 0).astype(operand.dtype)
        options = {key: equation.single.params[key] for key in ("dimension_numbers", "unique_indices", "mode")}
        return jax.lax.scatter_add(operand, values[1], updates, **options)  # rows that fill up are not in order
    operand = filled(values[0], axes[0] or 0, REDUCTIONS[name].nothing(values[0].dtype))
    operand = operand.astype(_wide(operand.dtype)) if name == "reduce_sum" else operand
    return REDUCTIONS[name].over(operand, axis=equation.single.params["axes"])


def _sum(rows: jax.Array, axis: Any) -> jax.Array:
    return jnp.sum(rows, axis=axis, dtype=rows.dtype)  # integers stay small, and overflow, as in the loss


@dataclasses.dataclass(frozen=True)
class _Reduction:
    name: str  # of the reduction that joins parts
    over: Callable[..., jax.Array] = _sum
    nothing: Callable[[Any], Any] = lambda _: 0  # of a dtype: the value that changes no result


REDUCTIONS = {
    "reduce_sum": _Reduction("sum"),
    "dot_general": _Reduction("sum"),
    "scatter-add": _Reduction("sum"),
    "reduce_max": _Reduction("max", jnp.max, dtypes.lowest),
    "reduce_min": _Reduction("min", jnp.min, dtypes.highest),
    "reduce_and": _Reduction("min", jnp.all, dtypes.highest),
    "reduce_or": _Reduction("max", jnp.any, dtypes.lowest),
}


def _wide(dtype: Any) -> Any:
    return dtypes.accumulator_dtype(dtype, None) if jnp.issubdtype(dtype, jnp.inexact) else dtype
