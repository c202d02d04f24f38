"""Loops over rows that add to what they carry, as a loss in chunks of tokens does: a map over rows, and a sum.

    carry, _ = lax.scan(lambda c, x: (c + f(x), None), start, rows)

is `start + sum(lax.map(f, rows))`: the map treats rows one by one, and the sum is taken in parts.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from optax_accum._core import compilers
from optax_accum._core.equations import is_checkpoint
from optax_accum._rows import locality


class NotASumError(Exception):
    """What a loop carries is no running sum."""


class Carried(NamedTuple):
    """What a loop carries, at this place, with what was added to it."""

    place: int
    added: Sequence[Any] = ()


def of_running_sums(equation: Any) -> tuple[Callable[..., list[Any]], Sequence[Any]] | None:
    """A scan over rows as a function, and the values that it takes; None unless it adds to all that it carries."""
    single, double = equation.single, equation.double
    if equation.name != "scan" or single.params["length"] == double.params["length"]:
        return None
    consts, carried = compilers.sizes_of_scan(single)
    along = [value.axis for value in equation.ins]
    is_over_rows = all(axis == 0 for axis in along[consts + carried :]) and len(along) > consts + carried
    if not carried or not is_over_rows or any(axis is not None for axis in along[: consts + carried]):
        return None
    if not locality.are_free(single.params["jaxpr"], double.params["jaxpr"], equation.rows):
        return None
    shapes = [value.aval.shape for value in equation.ins]
    starts, rows = shapes[consts : consts + carried], shapes[consts + carried :]
    if max(map(math.prod, starts)) > max(math.prod(shape[1:]) for shape in rows):
        return None  # what is added would be kept for each row
    fun = functools.partial(_run, single, consts, carried)
    try:
        jax.eval_shape(fun, *(jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype) for value in equation.ins))
    except NotASumError:
        return None
    return fun, equation.ins


def _run(scan: Any, consts: int, carried: int, *values: Any) -> list[Any]:
    fixed, start, rows = values[:consts], values[consts : consts + carried], values[consts + carried :]
    body, held = compilers.opened(scan.params["jaxpr"])

    def of_row(row: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results = _evaluated(body, held, [*fixed, *map(Carried, range(carried)), *row])
        carry, ys = results[:carried], results[carried:]
        if any(not isinstance(c, Carried) or c.place != i for i, c in enumerate(carry)):
            raise NotASumError
        if any(isinstance(y, Carried) for y in ys):
            raise NotASumError
        pairs = zip(carry, start, strict=True)
        return [sum(c.added, jnp.zeros(s.shape, s.dtype)).astype(s.dtype) for c, s in pairs], ys

    added, ys = jax.lax.map(of_row, list(rows))
    return [*(s + jnp.sum(a, 0, dtype=s.dtype) for s, a in zip(start, added, strict=True)), *ys]


def _evaluated(program: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Evaluates a program in which nothing but a sum takes what a loop carries."""
    env: dict[Any, Any] = dict(zip((*program.constvars, *program.invars), (*consts, *values), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for equation in program.eqns:
        operands = list(map(read, equation.invars))
        env.update(zip(equation.outvars, _of_equation(equation, operands), strict=True))
    return list(map(read, program.outvars))


def _of_equation(equation: Any, operands: list[Any]) -> Sequence[Any]:
    carried = [value for value in operands if isinstance(value, Carried)]
    if not carried:
        return compilers.bind(equation, operands)
    name = equation.primitive.name
    if name in ("add", "add_any") and len(carried) == 1:
        (other,) = (value for value in operands if value is not carried[0])
        return [carried[0]._replace(added=[*carried[0].added, other])]
    if name == "convert_element_type" and equation.params["new_dtype"] == equation.invars[0].aval.dtype:
        return carried  # what was a Python number
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if name in ("jit", "pjit", "closed_call"):
        return _evaluated(*compilers.opened(inner), operands)
    if is_checkpoint(equation):
        return _checkpointed(equation, *compilers.opened(inner), operands)
    raise NotASumError


def _checkpointed(equation: Any, program: Any, consts: Sequence[Any], operands: list[Any]) -> list[Any]:
    """The same under `jax.checkpoint`, which takes and returns arrays alone."""
    indices: list[int | None] = []

    def inner(values: Sequence[Any]) -> list[Any]:
        rest = iter(values)
        mixed = [Carried(v.place) if isinstance(v, Carried) else next(rest) for v in operands]
        results = _evaluated(program, consts, mixed)
        indices[:] = [result.place if isinstance(result, Carried) else None for result in results]
        return [list(result.added) if isinstance(result, Carried) else result for result in results]

    options = {key: equation.params[key] for key in ("policy", "prevent_cse") if key in equation.params}
    results = jax.checkpoint(inner, **options)([v for v in operands if not isinstance(v, Carried)])
    before = {value.place: value.added for value in operands if isinstance(value, Carried)}
    return [
        result if index is None else Carried(index, [*before[index], *result])
        for index, result in zip(indices, results, strict=True)
    ]
