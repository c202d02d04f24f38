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

from optax_accum._core import compilers, evaluation
from optax_accum._core.dtypes import is_narrow
from optax_accum._core.equations import CALLS, is_checkpoint, needed, programs_of
from optax_accum._rows import locality


class NotASumError(Exception):
    """What a loop carries is no running sum."""


class Carried(NamedTuple):
    """What a loop carries, at this place, with what was added to it."""

    place: int
    added: Sequence[Any] = ()


def rewrite_running_sums(equation: Any) -> tuple[Callable[..., list[Any]], Sequence[Any]] | None:
    """A scan over rows as a function, and the values that it takes; None unless it adds to all that it carries."""
    single, double = equation.single, equation.double
    if equation.name != "scan" or single.params["length"] == double.params["length"] or single.effects:
        return None
    consts, carried = compilers.sizes_of_scan(single)
    along = [value.axis for value in equation.ins]
    is_over_rows = all(axis == 0 for axis in along[consts + carried :]) and len(along) > consts + carried
    if not carried or not is_over_rows or any(axis is not None for axis in along[: consts + carried]):
        return None
    if not _are_small(single, consts, carried):
        return None
    if not locality.are_rowless(single.params["jaxpr"], double.params["jaxpr"], equation.rows):
        return None
    shapes = [value.aval.shape for value in equation.ins]
    starts, rows = shapes[consts : consts + carried], shapes[consts + carried :]
    if max(map(math.prod, starts)) > max(math.prod(shape[1:]) for shape in rows):
        return None  # what is added would be kept for each row
    if any(is_narrow(value.aval.dtype) for value in equation.ins[consts : consts + carried]):
        return None  # a running sum in bfloat16 is rounded at each step
    fun = functools.partial(_run, single, consts, carried)
    try:
        jax.eval_shape(fun, *(jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype) for value in equation.ins))
    except NotASumError:
        return None
    return fun, equation.ins


def _are_small(scan: Any, consts: int, carried: int) -> bool:
    """Whether sums of so many rows are no larger than what the loop takes: a row of the gradient of a parameter is."""
    sizes = [math.prod(var.aval.shape) for var in scan.invars]
    return scan.params["length"] * sum(sizes[consts : consts + carried]) <= sum(sizes[consts + carried :])


def _run(scan: Any, consts: int, carried: int, *values: Any) -> list[Any]:
    fixed, start, rows = values[:consts], values[consts : consts + carried], values[consts + carried :]
    body, _ = compilers.opened(scan.params["jaxpr"])
    results = list(range(len(body.outvars)))

    def run_rows(wanted: Sequence[int]) -> list[Any]:
        """The sums, and the other results, at these places among the results of the loop."""

        def run_row(row: Sequence[Any]) -> list[Any]:
            found = _evaluated(scan.params["jaxpr"], [*fixed, *map(Carried, range(carried)), *row], wanted)
            return [added(value, place, body.outvars[place].aval) for place, value in zip(wanted, found, strict=True)]

        def summed(value: Any, place: int) -> Any:
            return value if place >= carried else start[place] + jnp.sum(value, 0, dtype=start[place].dtype)

        return list(map(summed, jax.lax.map(run_row, list(rows)), wanted))

    def added(value: Any, place: int, aval: Any) -> Any:
        if isinstance(value, Carried) != (place < carried) or (place < carried and value.place != place):
            raise NotASumError
        return sum(value.added, jnp.zeros(aval.shape, aval.dtype)).astype(aval.dtype) if place < carried else value

    # A count of tokens, which takes no parameters, is a loop of its own: the batch alone decides it.
    of_batch = [place for place in results if needed(body, [place])[1].isdisjoint(body.invars[:consts])]
    others = [place for place in results if place not in of_batch]
    found = {}
    for wanted in filter(None, (of_batch, others)):
        found.update(zip(wanted, run_rows(wanted), strict=True))
    return [found[place] for place in results]


def _evaluated(program: Any, values: Sequence[Any], wanted: Sequence[int] | None = None) -> list[Any]:
    """Evaluates results of a program in which nothing but a sum takes what a loop carries."""
    jaxpr, consts = compilers.opened(program)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
    places = range(len(jaxpr.outvars)) if wanted is None else wanted
    results = [jaxpr.outvars[place] for place in places]
    return evaluation.in_order(needed(jaxpr, places)[0], env, results, _evaluate_equation)


def _evaluate_equation(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    carried = [value for value in values if isinstance(value, Carried)]
    if not carried:
        return evaluation.bind(equation, values)
    name = equation.primitive.name
    if name in ("add", "add_any") and len(carried) == 1:
        (other,) = (value for value in values if value is not carried[0])
        return [carried[0]._replace(added=[*carried[0].added, other])]
    if name == "convert_element_type" and equation.params["new_dtype"] == equation.invars[0].aval.dtype:
        return carried  # what was a Python number
    if name in CALLS:
        return _evaluated(programs_of(equation)[0].program, values)
    if is_checkpoint(equation):
        return _checkpointed(equation, values)
    raise NotASumError


def _checkpointed(equation: Any, values: Sequence[Any]) -> list[Any]:
    """The same under `jax.checkpoint`, which takes and returns arrays alone."""
    indices: list[int | None] = []

    def inner(arrays: Sequence[Any]) -> list[Any]:
        rest = iter(arrays)
        mixed = [Carried(v.place) if isinstance(v, Carried) else next(rest) for v in values]
        results = _evaluated(programs_of(equation)[0].program, mixed)
        indices[:] = [result.place if isinstance(result, Carried) else None for result in results]
        return [list(result.added) if isinstance(result, Carried) else result for result in results]

    arrays = [v for v in values if not isinstance(v, Carried)]
    results = evaluation.checkpointed(equation, inner)(arrays)
    before = {value.place: value.added for value in values if isinstance(value, Carried)}
    return [
        result if index is None else Carried(index, [*before[index], *result])
        for index, result in zip(indices, results, strict=True)
    ]
