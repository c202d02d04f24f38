"""Where a loss takes rows together, line by line, and the arrays that it therefore keeps for all rows."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from optax_accum._explain.explanation import Coupling
from optax_accum._rows import locality
from optax_accum._rows.levels import Kind, Levels, inside_layers, is_over_layers
from optax_accum._rows.program import Equation, Value


class Site(NamedTuple):
    """An equation that takes rows together, in a program that runs so many times."""

    equation: Equation
    kind: Kind
    times: int
    kept: frozenset[Value]  # what is kept for all rows, of what it takes and makes


def sites_of(levels: Levels, times: int = 1) -> Iterator[Site]:
    """Yields the equations that take rows together and that the model decides, also those inside loops over layers."""
    kept = kept_by(levels)
    for equation in levels.coupling:
        if is_over_layers(equation, levels):
            yield from sites_of(inside_layers(equation, levels), times * equation.long.params["length"])
        else:
            touched = kept.intersection((*equation.ins, *equation.outs))
            yield Site(equation, levels.kinds[equation], times, frozenset(touched))


def kept_by(levels: Levels) -> set[Value]:
    """Returns the values that are there for all rows between two loops."""
    taken = {value for loop in levels.loops for value in loop.takes}
    taken.update(value for stage in levels.stages for equation in stage.once for value in equation.ins)
    kept = {value for loop in levels.loops for value in loop.rows if value in taken}
    wholes = [equation for equation in levels.coupling if levels.kinds[equation] is Kind.WHOLE]
    kept.update(value for equation in wholes for value in equation.outs if value.axis is not None)
    return kept


def loops_of(levels: Levels) -> int:
    """Returns how many loops over the micro-batches run, in loops over layers, too."""
    return len(levels.loops) + sum(length * loops_of(inner) for inner, length in _inner(levels))


def bytes_kept(levels: Levels) -> int:
    """Returns the bytes that are kept for all rows between loops."""
    inside = sum(length * bytes_kept(inner) for inner, length in _inner(levels))
    return sum(map(bytes_of, kept_by(levels))) + inside


def _inner(levels: Levels) -> list[tuple[Levels, int]]:
    over = [equation for equation in levels.coupling if is_over_layers(equation, levels)]
    return [(inside_layers(equation, levels), equation.long.params["length"]) for equation in over]


def bytes_of(value: Value) -> int:
    """Returns the bytes of a value, for all rows."""
    return math.prod(value.long.shape) * value.long.dtype.itemsize


def couplings_of(levels: Levels) -> list[Coupling]:
    """Returns where rows are taken together, one for each line."""
    by_line: dict[Any, list[Site]] = {}
    for site in sites_of(levels):
        by_line.setdefault((site.equation.place, site.times), []).append(site)
    return [_coupling(sites) for sites in by_line.values()]


def _coupling(sites: list[Site]) -> Coupling:
    first = sites[0]
    results = [value for site in sites for value in site.equation.outs]
    largest = max(results, key=bytes_of)
    kept = frozenset[Value]().union(*(site.kept for site in sites))
    unknown = [name for site in sites for name in locality.unknown(site.equation.view)]
    return Coupling(
        place=first.equation.place,
        primitives=tuple(dict.fromkeys(site.equation.name for site in sites)),
        in_parts=all(site.kind is Kind.PARTIAL for site in sites),
        shape=tuple(largest.long.shape),
        dtype=str(largest.long.dtype),
        kept_bytes=first.times * sum(map(bytes_of, kept)),
        times=first.times,
        unknown=tuple(dict.fromkeys(unknown)),
    )
