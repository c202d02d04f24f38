"""Loops over layers, or tokens, whose bodies treat rows one by one, and add over them: what they add are parts of sums.

The gradient of stacked layers is such a loop: it carries the rows' cotangents from layer to layer, one by one, and each
layer's gradient is a sum over rows. For a micro-batch the loop gives the micro-batch's part of each.
"""

import collections
from collections.abc import Container, Sequence

import numpy as np

from optax_accum._core import compilers
from optax_accum._core.equations import every_equation
from optax_accum._rows import locality
from optax_accum._rows.levels import Bodies, Body, Kind
from optax_accum._rows.pairing import paired_inside
from optax_accum._rows.program import Equation, Number, Program, Value
from optax_accum._rows.traces import COUPLED, OtherProgramError


class Zeros:
    """Which values of a program are zeros: it makes them of a literal."""

    def __init__(self) -> None:
        self.found: set[Value] = set()

    def __contains__(self, value: Value) -> bool:
        return value in self.found or (isinstance(value, Number) and not np.any(value.array))

    def read(self, equation: Equation) -> None:
        if locality.keeps_zero(equation.single, _places(equation, self)):
            self.found.update(equation.outs)


def _places(equation: Equation, values: Container[Value]) -> set[int]:
    return {place for place, value in enumerate(equation.ins) if value in values}


def bodies_of(equation: Equation, zeros: Zeros) -> Bodies | None:
    """The programs inside a loop over layers, or a branch, that may run for some rows; None for any other equation."""
    if (
        equation.differs
        or equation.single.effects
        or any(map(compilers.makes_reference, every_equation(equation.single)))
    ):
        return None
    if any(value.axis == COUPLED for value in (*equation.ins, *equation.outs)):
        return None
    try:
        if equation.name == "scan":
            is_over_layers = equation.single.params["length"] == equation.double.params["length"]
            return _read_layers(equation, zeros) if is_over_layers else _read_rows(equation, zeros)
        if equation.name == "cond" and equation.ins[0].axis is None:
            return _read_branches(equation)
    except OtherProgramError:
        return None
    return None


def _read_layers(equation: Equation, zeros: Zeros) -> Bodies | None:
    consts, carried = compilers.sizes_of_scan(equation.single)
    (program,) = paired_inside(equation)
    begins = [place for place in range(carried) if equation.ins[consts + place] in zeros]
    running = {place: program.inputs[consts + place] for place in begins if _only_adds(program, consts, place)}
    found = _read_body(program, set(running.values()))
    if found is None:
        return None
    body, parts, _ = found
    is_part = [value in parts for value in program.outputs]
    if any(is_part[place] != (place in running) for place in range(carried)):
        return None  # the next iteration takes what this one carries: a part of a sum only where it just adds to it
    return Bodies([body], is_part)


def _read_rows(equation: Equation, zeros: Zeros) -> Bodies | None:
    """A loop over rows that only adds to what it carries: its body sees one row, and runs as it is."""
    single, double = equation.single, equation.double
    consts, carried = compilers.sizes_of_scan(single)
    if any(value.axis is not None for value in equation.ins[: consts + carried]):
        return None
    if any(value.axis != 0 for value in (*equation.ins[consts + carried :], *equation.outs[carried:])):
        return None
    if not locality.are_rowless(single.params["jaxpr"], double.params["jaxpr"], equation.rows, asks_rules=False):
        return None
    (program,) = paired_inside(equation)
    sums = (equation.ins[consts + place] in zeros and _only_adds(program, consts, place) for place in range(carried))
    return Bodies([], [place < carried for place in range(len(equation.outs))]) if all(sums) else None


def _read_branches(equation: Equation) -> Bodies | None:
    """Branches whose results are rows, or parts of sums: a sum is one in each branch that does not return zeros."""
    each = [_read_body(branch, set()) for branch in paired_inside(equation)]
    found = [one for one in each if one is not None]
    are_parts = [[value in parts for value in body.program.outputs] for body, parts, _ in found]
    may_be = [[value in parts or value in zeros for value in body.program.outputs] for body, parts, zeros in found]
    is_part = [any(of_branches) for of_branches in zip(*are_parts, strict=True)]
    can_be = [all(of_branches) for of_branches in zip(*may_be, strict=True)]
    is_refused = any(part and not can for part, can in zip(is_part, can_be, strict=True))
    return None if len(found) < len(each) or is_refused else Bodies([body for body, _, _ in found], is_part)


def _read_body(program: Program, begun: set[Value]) -> tuple[Body, set[Value], Zeros] | None:
    """A body, its values that are parts of sums, and those that are zeros; None if it takes all rows."""
    parts, zeros = set(begun), Zeros()
    kinds: dict[Equation, Kind] = {}
    bodies: dict[Equation, Bodies] = {}
    for equation in program.equations:
        kind, made = _kind(equation, parts, bodies, zeros)
        if kind is None:
            return None
        kinds[equation] = kind
        parts.update(made)
        zeros.read(equation)
    return Body(program, kinds, bodies), parts, zeros


def _kind(
    equation: Equation, parts: set[Value], bodies: dict[Equation, Bodies], zeros: Zeros
) -> tuple[Kind | None, Sequence[Value]]:
    """Where an equation of a body runs, and which of its results are parts of sums; None where it takes all rows."""
    if not parts.isdisjoint(equation.ins):
        return (Kind.PARTIAL, equation.outs) if follows(equation, parts, zeros) else (None, ())
    view = equation.view._replace(perturbed=[False] * len(equation.ins))
    if equation.differs:
        return None, ()
    if locality.makes_sum(view, _places(equation, zeros)):
        return Kind.PARTIAL, equation.outs
    if locality.is_local_inside(view):
        return Kind.LOCAL, ()
    inside = bodies_of(equation, zeros)
    if inside is None:
        return None, ()
    bodies[equation] = inside
    return Kind.LOCAL, [value for value, is_part in zip(equation.outs, inside.are_sums, strict=True) if is_part]


def follows(equation: Equation, parts: Container[Value], zeros: Zeros) -> bool:
    """Whether an equation follows sums of which there are parts, see `locality.follows`."""
    places = _places(equation, parts), _places(equation, zeros)
    return not equation.differs and locality.follows(equation.view, *places)


def _only_adds(program: Program, consts: int, place: int) -> bool:
    """Whether a body only adds to a value that it carries."""
    made_by = program.made_by
    taken = [*(value for equation in program.equations for value in equation.ins), *program.outputs]
    uses = collections.Counter(taken)
    begins, value = program.inputs[consts + place], program.outputs[place]
    todo, found = [value], False
    while todo:
        value = todo.pop()
        found = found or value is begins
        if value in made_by and made_by[value].name in ("add", "add_any") and uses[value] == 1:
            todo += made_by[value].ins
    return found and uses[begins] == 1 and begins.axis is None
