"""Gathers and scatters in which each row takes itself, `logits[jnp.arange(n), labels]`: without the rows' numbers."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._rows.rules import reshape as in_blocks
from optax_accum._rows.traces import COUPLED, Rows

MadeBy = Mapping[Any, Any]  # from a value to the equation that makes it


def rewrite_own_rows(equation: Any, before: Sequence[Any]) -> tuple[Callable[..., Any], Sequence[Any]] | None:
    """A gather or a scatter as a batched one, a function, and the values that it takes.

    None unless each row takes itself. `before`: the equations before it.
    """
    if equation.name not in ("gather", *_SCATTERS) or None in (value.axis for value in equation.ins):
        return None
    operand, indices, *updates = equation.ins
    if COUPLED in (operand.axis, indices.axis):
        return None
    made_by = {value: equation for equation in before for value in equation.outs}
    numbers, columns = equation.single.params["dimension_numbers"], _columns(indices, made_by)
    named, gone = (getattr(numbers, field) for field in _FIELDS[bool(updates)][:2])
    if numbers.operand_batching_dims or len(columns) != len(named):
        return None
    if operand.axis not in named or operand.axis not in gone:
        return None
    rows = columns[named.index(operand.axis)]
    others = [column for column in columns if column is not rows]
    if not others or not _numbers_rows(rows, operand.aval.shape[operand.axis], equation.rows, made_by):
        return None
    along = _batched(numbers, operand.axis, indices.axis, _FIELDS[bool(updates)])
    return functools.partial(_run, equation, along), [operand, *updates, *others]


_FIELDS = (  # of a gather's, and of a scatter's dimension numbers
    ("start_index_map", "collapsed_slice_dims", "start_indices_batching_dims"),
    ("scatter_dims_to_operand_dims", "inserted_window_dims", "scatter_indices_batching_dims"),
)
_SCATTERS: dict[str, Callable[..., Any]] = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-max": jax.lax.scatter_max,
    "scatter-min": jax.lax.scatter_min,
}


def _batched(numbers: Any, axis: int, indices_axis: int, fields: Sequence[str]) -> Any:
    """Dimension numbers with an axis as a batch in place of an index."""
    named, gone, batching = fields
    rest = {field: tuple(dim for dim in getattr(numbers, field) if dim != axis) for field in (named, gone)}
    return numbers._replace(operand_batching_dims=(axis,), **{batching: (indices_axis,)}, **rest)


def _run(equation: Any, numbers: Any, operand: jax.Array, *others: jax.Array) -> jax.Array:
    params = equation.single.params
    options = {key: params[key] for key in ("mode", "unique_indices")}
    if equation.name == "gather":
        indices = jnp.concatenate(others, axis=-1)
        options |= {key: params[key] for key in ("slice_sizes", "fill_value")}
        return jax.lax.gather(operand, indices, numbers, **options)
    updates, *columns = others
    return _SCATTERS[equation.name](operand, jnp.concatenate(columns, axis=-1), updates, numbers, **options)


def _columns(indices: Any, made_by: MadeBy) -> list[Any]:
    """The indices along each axis, [..., 1], before they were concatenated; empty if they were not."""
    equation = made_by.get(indices)
    if (
        equation is None
        or equation.name != "concatenate"
        or equation.single.params["dimension"] != indices.aval.ndim - 1
    ):
        return []
    columns = list(equation.ins)
    return columns if all(column.aval.shape[-1] == 1 for column in columns) else []


def _holds(dtype: Any, number: int) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) and number <= jnp.iinfo(dtype).max


def _numbers_rows(value: Any, length: int, rows: Rows, made_by: MadeBy) -> bool:
    """Whether a value numbers the rows: row i is i, and it has as many rows as the axis that it indexes."""
    equation = made_by.get(value)
    if equation is None or value.axis in (None, COUPLED) or not _holds(value.aval.dtype, length - 1):
        return False
    name, params = equation.name, equation.single.params
    goes_on = functools.partial(_numbers_rows, length=length, rows=rows, made_by=made_by)
    if name == "iota":
        return params["dimension"] == value.axis and value.aval.shape[value.axis] == length
    if name in ("broadcast_in_dim", "convert_element_type", "reshape"):
        if name == "reshape" and not in_blocks(equation.view):
            return False
        return value.aval.shape[value.axis] == length and goes_on(equation.ins[0])
    if name == "select_n":  # index + length, if an index is negative
        test = made_by.get(equation.ins[0])
        if test is None or test.name != "lt" or getattr(test.ins[1], "number", None) != 0:
            return False
        return goes_on(test.ins[0]) and goes_on(equation.ins[1])
    return False
