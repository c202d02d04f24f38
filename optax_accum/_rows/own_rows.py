"""Gathers in which each row reads itself, `logits[jnp.arange(n), labels]`: the same without the numbers of rows."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._rows.traces import COUPLED, Rows

Made = Mapping[Any, Any]  # from a value to the equation that makes it


class OwnRows(NamedTuple):
    """The same gather as a function of its operand and of the indices along other axes."""

    fun: Callable[..., Any]
    ins: Sequence[Any]


def of_own_rows(gather: Any, before: Sequence[Any]) -> OwnRows | None:
    """A gather without the indices of rows; None unless each row reads itself. `before`: the equations before it."""
    operand, indices = gather.ins
    if operand.axis in (None, COUPLED) or indices.axis in (None, COUPLED):
        return None
    made = {value: equation for equation in before for value in equation.outs}
    params, columns = gather.single.params, _columns(indices, made)
    numbers = params["dimension_numbers"]
    if numbers.operand_batching_dims or len(columns) != len(numbers.start_index_map):
        return None
    if operand.axis not in numbers.start_index_map or operand.axis not in numbers.collapsed_slice_dims:
        return None
    place = numbers.start_index_map.index(operand.axis)
    others = [column for column in columns if column is not columns[place]]
    if not others or not _numbers_rows(columns[place], operand.aval.shape[operand.axis], gather.rows, made):
        return None
    along = numbers._replace(
        collapsed_slice_dims=tuple(dim for dim in numbers.collapsed_slice_dims if dim != operand.axis),
        start_index_map=tuple(dim for dim in numbers.start_index_map if dim != operand.axis),
        operand_batching_dims=(operand.axis,),
        start_indices_batching_dims=(indices.axis,),
    )
    options = {key: params[key] for key in ("slice_sizes", "mode", "fill_value", "unique_indices")}
    return OwnRows(functools.partial(_gather, along, options), [operand, *others])


def _gather(numbers: Any, options: Mapping[str, Any], operand: jax.Array, *columns: jax.Array) -> jax.Array:
    indices = jnp.concatenate(columns, axis=-1)
    return jax.lax.gather(operand, indices, numbers, **options)


def _columns(indices: Any, made: Made) -> list[Any]:
    """The indices along each axis, [..., 1], before they were concatenated; empty if they were not."""
    equation = made.get(indices)
    if (
        equation is None
        or equation.name != "concatenate"
        or equation.single.params["dimension"] != indices.aval.ndim - 1
    ):
        return []
    columns = list(equation.ins)
    return columns if all(column.aval.shape[-1] == 1 for column in columns) else []


def _numbers_rows(value: Any, length: int, rows: Rows, made: Made) -> bool:
    """Whether a value numbers the rows: row i is i, and it has as many rows as the axis that it indexes."""
    equation = made.get(value)
    if equation is None or value.axis in (None, COUPLED):
        return False
    name, params = equation.name, equation.single.params
    goes_on = functools.partial(_numbers_rows, length=length, rows=rows, made=made)
    if name == "iota":
        return params["dimension"] == value.axis and value.aval.shape[value.axis] == length
    if name in ("broadcast_in_dim", "convert_element_type", "reshape", "expand_dims"):
        return value.aval.shape[value.axis] == length and goes_on(equation.ins[0])
    if name == "select_n":  # index + length, if an index is negative
        test = made.get(equation.ins[0])
        if test is None or test.name != "lt" or getattr(test.ins[1], "number", None) != 0:
            return False
        return goes_on(test.ins[0]) and goes_on(equation.ins[1])
    return False
