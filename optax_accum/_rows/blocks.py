"""Maps over rows in blocks, with a remainder: `jax.lax.map(f, rows, batch_size=3)` of eight rows.

JAX maps two blocks of three rows in a loop, calls the function once more for the last two rows, and joins the results.
Rows are separate if the two programs are one function, for three rows and for two, that treats rows one by one. The
sizes of the two programs tell where it has rows, as those of n and 2 n rows do for a loss; and as anybody may join
anything, each value must be made by the same operations in both.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend import core

from optax_accum._core import compilers
from optax_accum._rows import locality
from optax_accum._rows.pairing import paired_inside
from optax_accum._rows.program import Constant, Equation, Number, Value
from optax_accum._rows.traces import Rows, View, axis_of, pair_key, view_of

MadeBy = Mapping[Any, Equation]
Pair = tuple[Any, Any]


def mapped_in_blocks(joined: Equation, made_by: MadeBy) -> tuple[Sequence[Value], Sequence[Value]] | None:
    """The values that a map in blocks takes, those that all rows share, and those with rows.

    `joined`: the equation that may join the results for the blocks and for the remainder. None if it does not.
    """
    if joined.differs or joined.name != "concatenate" or joined.single.params["dimension"] or len(joined.ins) != 2:
        return None
    blocks, rest = joined.ins
    merge = _maker("reshape", blocks, made_by)
    loop = _maker("scan", merge.ins[0], made_by) if merge else None
    if merge is None or loop is None or not _is_merged(merge.ins[0], blocks) or not _is_map(loop):
        return None
    consts, _ = compilers.sizes_of_scan(loop.single)
    shared, taken = loop.ins[:consts], loop.ins[consts:]
    end, length = blocks.aval.shape[0], joined.outs[0].aval.shape[0]
    rows = [_source(value, end, length, made_by) for value in taken]
    found = [value for value in rows if value is not None]
    if len(found) < len(rows) or not found or any(value.axis is not None for value in shared):
        return None
    (body,) = paired_inside(loop)
    result = body.outputs[loop.outs.index(merge.ins[0])]
    given = [*zip(shared, body.inputs, strict=False)]
    for source, block in zip(found, body.inputs[consts:], strict=True):
        given += [(value, block) for value, made in made_by.items() if _is_slice(made, source, end, length)]
    sizes = (rest.aval.shape[0], taken[0].aval.shape[1])
    if axis_of(rest.aval, result.aval, sizes) != 0 or any(axis_of(a.aval, b.aval, sizes) for a, b in given):
        return None
    return (shared, found) if _are_one_function([(rest, result)], given, made_by, body.made_by, sizes) else None


def _maker(name: str, value: Value, made_by: MadeBy) -> Equation | None:
    made = made_by.get(value)
    return made if made is not None and made.name == name and not made.differs else None


def _is_map(loop: Equation) -> bool:
    _, carried = compilers.sizes_of_scan(loop.single)
    programs = (loop.single.params["jaxpr"], loop.double.params["jaxpr"])
    return not carried and not loop.single.params["reverse"] and locality.are_rowless(*programs, loop.rows)


def _is_merged(apart: Value, merged: Value) -> bool:
    """Whether two values that a reshape makes of each other are blocks of rows, and these rows."""
    shape = apart.aval.shape
    return len(shape) > 1 and merged.aval.shape == (shape[0] * shape[1], *shape[2:])


def _source(blocks: Value, end: int, length: int, made_by: MadeBy) -> Value | None:
    """The value, of so many rows, of which these are the rows before `end`, in blocks."""
    cut = _maker("reshape", blocks, made_by)
    part = _maker("slice", cut.ins[0], made_by) if cut else None
    if cut is None or part is None or not _is_merged(blocks, cut.ins[0]):
        return None
    source = part.ins[0]
    return source if source.aval.shape[0] == length and _is_slice(part, source, 0, end) else None


def _is_slice(made: Equation, source: Value, begin: int, end: int) -> bool:
    """Whether an equation takes these rows of a value, and all of each."""
    if made.name != "slice" or made.differs or made.ins[0] is not source:
        return False
    params, (_, *rest) = made.single.params, source.aval.shape
    begins, ends = (begin, *(0 for _ in rest)), (end, *rest)
    is_dense = params["strides"] is None or set(params["strides"]) == {1}
    return is_dense and tuple(params["start_indices"]) == begins and tuple(params["limit_indices"]) == ends


def _are_one_function(
    pairs: Iterable[Pair], given: Iterable[Pair], ours: MadeBy, others: MadeBy, sizes: Rows, asks_rules: bool = True
) -> bool:
    """Whether the same operations make two values of each pair, from what is given; all treat rows one by one.

    `ours` and `others`: what makes the values of a program for the first number of rows, and for the second.
    """
    known, todo = set(given), list(pairs)
    while todo:
        a, b = todo.pop()
        if isinstance(a, _LITERALS) or isinstance(b, _LITERALS):
            if not _is_same_number(a, b):
                return False
        elif (a, b) not in known:
            known.add((a, b))
            mine, other = ours.get(a), others.get(b)
            if mine is None or other is None or mine.differs or other.differs:
                return False
            if mine.outs.index(a) != other.outs.index(b) or pair_key(mine.single) != pair_key(other.single):
                return False
            if not _is_same_step(view_of(mine.single, other.single, sizes, asks_rules)):
                return False
            todo += zip(mine.ins, other.ins, strict=True)
    return True


def _is_same_step(view: View) -> bool:
    """Whether two equations do the same, and treat rows one by one: with the programs and the derivatives inside."""
    programs = locality.programs_inside(view.single, view.double)
    if view.name == "scan" and compilers.sizes_of_scan(view.single) != compilers.sizes_of_scan(view.double):
        return False
    if not locality.is_local_inside(view) or not all(_are_same(*pair, view.rows, view.asks_rules) for pair in programs):
        return False
    if not view.asks_rules or not view.name.startswith("custom_"):
        return True
    try:
        return _are_same(*locality.derivative_of_rule(view), view.rows, asks_rules=False)
    except Exception:  # a rule may refuse to be asked: then nothing is known of it
        return False


def _are_same(single: Any, double: Any, sizes: Rows, asks_rules: bool) -> bool:
    (of_single, consts), (of_double, others) = compilers.opened(single), compilers.opened(double)
    if len(consts) != len(others) or not all(map(_is_equal, consts, others)):
        return False
    given = zip((*of_single.constvars, *of_single.invars), (*of_double.constvars, *of_double.invars), strict=True)
    pairs = zip(of_single.outvars, of_double.outvars, strict=True)
    return _are_one_function(pairs, given, _makers(of_single, sizes), _makers(of_double, sizes), sizes, asks_rules)


def _makers(program: Any, sizes: Rows) -> MadeBy:
    made = [Equation(each, each, each.invars, each.outvars, sizes) for each in program.eqns]
    return {var: equation for equation in made for var in equation.outs}


_LITERALS = (Constant, Number, core.Literal)


def _is_same_number(a: Any, b: Any) -> bool:
    if not (isinstance(a, _LITERALS) and isinstance(b, _LITERALS)):
        return False
    return _is_equal(*(each.val if isinstance(each, core.Literal) else each.array for each in (a, b)))


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tracer) or isinstance(b, Tracer):
        return a is b
    return bool(np.array_equal(np.asarray(a), np.asarray(b)))
