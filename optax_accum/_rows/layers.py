"""Loops over layers, or tokens, whose bodies treat rows one by one, and add over them: what they add are parts of sums.

The gradient of stacked layers is such a loop: it carries the rows' cotangents from layer to layer, one by one, and each
layer's gradient is a sum over rows. For a micro-batch the loop gives the micro-batch's part of each.
"""

import collections
from collections.abc import Container, Sequence

import numpy as np

from optax_accum._core import compilers
from optax_accum._core.equations import every_equation
from optax_accum._rows import locality, moving
from optax_accum._rows.levels import Body, Kind
from optax_accum._rows.pairing import paired
from optax_accum._rows.program import Equation, Number, Program, Value
from optax_accum._rows.registry import known
from optax_accum._rows.traces import COUPLED, OtherProgramError


class Zeros:
    """Which values of a program are zeros: it makes them of a literal."""

    def __init__(self) -> None:
        self.found: set[Value] = set()

    def __contains__(self, value: Value) -> bool:
        return value in self.found or (isinstance(value, Number) and not np.any(value.array))

    def read(self, equation: Equation) -> None:
        if equation.name in _KEEPS_ZERO and all(value in self for value in equation.ins):
            self.found.update(equation.outs)


_KEEPS_ZERO = frozenset(["broadcast_in_dim", "convert_element_type", "copy", "neg", "pcast", "pvary", "reshape", "squeeze", "transpose"])


def body_of(equation: Equation, zeros: Zeros) -> Body | None:
    """The body of a loop over layers that may run for some rows; None for any other equation."""
    if equation.name != "scan" or equation.differs or equation.single.effects:
        return None
    if equation.single.params["length"] != equation.double.params["length"]:
        return None
    if any(map(compilers.makes_reference, every_equation(equation.single))):
        return None
    if any(value.axis == COUPLED for value in (*equation.ins, *equation.outs)):
        return None
    consts, carried = compilers.sizes_of_scan(equation.single)
    try:
        program = paired(equation.single.params["jaxpr"], equation.double.params["jaxpr"], equation.rows, equation)
    except OtherProgramError:
        return None
    begins = [place for place in range(carried) if equation.ins[consts + place] in zeros]
    return _read(program, consts, carried, begins)


def _read(program: Program, consts: int, carried: int, begins: Sequence[int]) -> Body | None:
    running = {place: program.inputs[consts + place] for place in begins if _only_adds(program, consts, place)}
    parts = set(running.values())
    kinds: dict[Equation, Kind] = {}
    bodies: dict[Equation, Body] = {}
    zeros = Zeros()
    for equation in program.equations:
        kind, made = _kind(equation, parts, bodies, zeros)
        if kind is None:
            return None
        kinds[equation] = kind
        parts.update(made)
        zeros.read(equation)
    found = [value in parts for value in program.outputs]
    if any(found[place] != (place in running) for place in range(carried)):
        return None
    return Body(program, kinds, bodies, found)


def _kind(
    equation: Equation, parts: set[Value], bodies: dict[Equation, Body], zeros: Zeros
) -> tuple[Kind | None, Sequence[Value]]:
    """Where an equation of a body runs, and which of its results are parts of sums; None where it takes all rows."""
    if not parts.isdisjoint(equation.ins):
        return (Kind.PARTIAL, equation.outs) if follows(equation, parts, zeros) else (None, ())
    view = equation.view._replace(moves=[False] * len(equation.ins))
    if equation.differs:
        return None, ()
    if adds_up(equation, zeros):
        return Kind.PARTIAL, equation.outs
    if locality.is_local_inside(view):
        return Kind.LOCAL, ()
    body = body_of(equation, zeros)
    if body is None:
        return None, ()
    bodies[equation] = body
    return Kind.LOCAL, [value for value, is_part in zip(equation.outs, body.parts, strict=True) if is_part]


def adds_up(equation: Equation, zeros: Zeros) -> bool:
    """Whether an equation is a sum over rows, and of nothing else."""
    if equation.differs or not locality.is_partial(equation.view) or known(equation.name).partial.joins != "sum":
        return False
    return not equation.name.startswith("scatter") or equation.ins[0] in zeros


def follows(equation: Equation, parts: Container[Value], zeros: Zeros) -> bool:
    """Whether an equation is linear in the parts of sums that it takes, and takes no rows: its result is a part, too."""
    view = equation.view
    if equation.differs or view.has_rows or view.makes_rows or not view.has_same_sizes:
        return False
    places = {place for place, value in enumerate(equation.ins) if value in parts}
    summed = (equation.single.invars[place] for place in places)
    if not all(map(moving.is_inexact, (*summed, *equation.single.outvars))):
        return False
    nothing = {place for place, value in enumerate(equation.ins) if value in zeros}
    groups = known(equation.name).linear_groups(equation.single)
    return any(places <= group <= places | nothing for group in groups)


def _only_adds(program: Program, consts: int, place: int) -> bool:
    """Whether a body only adds to a value that it carries."""
    made = {value: equation for equation in program.equations for value in equation.outs}
    taken = [*(value for equation in program.equations for value in equation.ins), *program.outputs]
    uses = collections.Counter(taken)
    begins, value = program.inputs[consts + place], program.outputs[place]
    todo, found = [value], False
    while todo:
        value = todo.pop()
        found = found or value is begins
        if value in made and made[value].name in ("add", "add_any") and uses[value] == 1:
            todo += made[value].ins
    return found and uses[begins] == 1 and begins.axis is None
