"""Loops over rows that add to what they carry, as a loss in chunks of tokens does: a map over rows, and a sum.

    carry, _ = lax.scan(lambda c, x: (c + f(x), None), start, rows)

is `start + sum(lax.map(f, rows))`: the map treats rows one by one, and the sum is taken in parts.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import compilers, evaluation
from optax_accum._core.dtypes import is_narrow
from optax_accum._core.equations import CALLS, CHECKPOINTS, needed, programs_of
from optax_accum._rows import locality

# For each value, the place of what a loop carries that it is, with something added; None for what is not made of it.
Places = list[int | None]
OTHERWISE = -1  # made of it in another way


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
    body = compilers.opened(single.params["jaxpr"])[0]
    begun: Places = [None] * len(body.invars)
    begun[consts : consts + carried] = range(carried)
    if _followed(body, begun) != [*range(carried), *[None] * (len(body.outvars) - carried)]:
        return None
    fun = functools.partial(_run, single, consts, carried)
    return fun, equation.ins


def _are_small(scan: Any, consts: int, carried: int) -> bool:
    """Whether sums of so many rows are no larger than what the loop takes: a row of the gradient of a parameter is."""
    sizes = [math.prod(var.aval.shape) for var in scan.invars]
    return scan.params["length"] * sum(sizes[consts : consts + carried]) <= sum(sizes[consts + carried :])


def _run(scan: Any, consts: int, carried: int, *values: Any) -> list[Any]:
    fixed, start, rows = values[:consts], values[consts : consts + carried], values[consts + carried :]
    closed = scan.params["jaxpr"]
    body, _ = compilers.opened(closed)
    results = list(range(len(body.outvars)))

    def run_rows(wanted: Sequence[int]) -> list[Any]:
        """The sums, and the other results, at these places among the results of the loop."""
        outvars = [body.outvars[place] for place in wanted]
        program = closed.replace(jaxpr=body.replace(eqns=needed(body, wanted)[0], outvars=outvars))
        nothing = [jnp.zeros_like(leaf) for leaf in start]
        found = jax.lax.map(lambda row: evaluation.run(program, [*fixed, *nothing, *row]), list(rows))
        add_up = lambda at, leaf: leaf if at >= carried else start[at] + jnp.sum(leaf, 0, dtype=start[at].dtype)
        return list(map(add_up, wanted, found))

    # A count of tokens, which takes no parameters, is a loop of its own: the batch alone decides it.
    of_batch = [place for place in results if needed(body, [place])[1].isdisjoint(body.invars[:consts])]
    others = [place for place in results if place not in of_batch]
    found = {}
    for wanted in filter(None, (of_batch, others)):
        found.update(zip(wanted, run_rows(wanted), strict=True))
    return [found[place] for place in results]


def _followed(program: Any, begun: Places) -> Places:
    """The places of a program's results, from those of what it takes."""
    jaxpr = compilers.opened(program)[0]
    env = dict.fromkeys(jaxpr.constvars) | dict(zip(jaxpr.invars, begun, strict=True))
    return evaluation.in_order(jaxpr.eqns, env, jaxpr.outvars, _follow, literal=lambda _: None)


def _follow(equation: Any, begun: Sequence[int | None]) -> Places:
    found: Places = [place for place in begun if place is not None]
    if not found:
        return [None] * len(equation.outvars)
    name = equation.primitive.name
    if name in (*CALLS, *CHECKPOINTS):
        return _followed(programs_of(equation)[0].program, [*begun])
    is_same = name == "convert_element_type" and equation.params["new_dtype"] == equation.invars[0].aval.dtype
    if len(found) == 1 and (name in ("add", "add_any") or is_same):
        return found
    return [OTHERWISE] * len(equation.outvars)
