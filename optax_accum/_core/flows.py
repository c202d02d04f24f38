"""Owns what becomes of the gradient of each input of a traced program, read from its equations. Runs none."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from optax_accum._core import sinks, tracing


def casts(program: Any) -> list[bool]:
    """Returns which of the inputs of a traced program are cast down before it comes to a loop."""
    found: set[Any] = set()
    for equation in program.eqns:
        name = equation.primitive.name
        if name == "convert_element_type" and sinks.is_down(equation):
            found.update(sinks.variables(equation.invars))
        elif name != "scan" and name in sinks.FOLLOW and any(tracing.inner_programs(equation)):
            found.update(sinks.variables([atom for atom, cast in _each(equation, casts) if any(cast)]))
    return [var in found for var in program.invars]


def has_loop_or_branch(program: Any) -> bool:
    """Returns whether a traced program holds a scan or a cond."""
    return any(equation.primitive.name in ("scan", "cond") for equation in tracing.equations(program))


def breaks(program: Any) -> list[bool]:
    """Returns for which inputs of a traced program JAX fails to differentiate with references, or does so wrongly.

    A scan that takes one array in two ways, say scanned over and closed over, and a barrier. What has a sink is used
    before it comes there.
    """
    found: set[Any] = set()
    for equation in reversed(program.eqns):
        name, programs = equation.primitive.name, list(tracing.inner_programs(equation))
        operands = sinks.variables(equation.invars)
        if programs:
            found.update(var for var, count in collections.Counter(operands).items() if count > 1)
        if is_barrier(equation) or (name not in sinks.FOLLOW and any(map(_breaks_any, programs))):
            found.update(operands)
        elif name in sinks.FOLLOW and programs:
            found.update(sinks.variables([atom for atom, fails in _each(equation, breaks) if any(fails)]))
        elif name in sinks.FOLLOW and equation.outvars[0] in found:  # what goes in is what comes out
            found.update(operands[:1])
    return [var in found for var in program.invars]


def is_barrier(equation: Any) -> bool:
    """Returns whether an equation only orders others."""
    return equation.primitive.name == "optimization_barrier"


def _breaks_any(program: Any) -> bool:
    """Returns whether a program holds a barrier, or hands one array twice to an inner program."""
    for equation in tracing.equations(program):
        operands = sinks.variables(equation.invars)
        twice = any(tracing.inner_programs(equation)) and len(set(operands)) < len(operands)
        if twice or is_barrier(equation):
            return True
    return False


def leave_whole(program: Any) -> list[str | None]:
    """Returns for each input of a traced program the function that its gradient leaves as a whole, if there is one.

    That is one that takes a function, and that sinks do not go into.
    """
    found: dict[Any, str | None] = {}
    for equation in reversed(program.eqns):
        name, programs = equation.primitive.name, list(tracing.inner_programs(equation))
        if name in sinks.FOLLOW and programs:
            pairs = [(atom, next(filter(None, inside), None)) for atom, inside in _each(equation, leave_whole)]
        elif name in sinks.FOLLOW:  # what goes in is what comes out
            pairs = [(equation.invars[0], found.get(equation.outvars[0]))]
        else:
            pairs = [(atom, name if programs else None) for atom in equation.invars]
        found.update((atom, function) for atom, function in pairs if function and not isinstance(atom, core.Literal))
    return [found.get(var) for var in program.invars]


def _each(equation: Any, asked: Callable[[Any], Sequence[Any]]) -> list[tuple[Any, tuple[Any, ...]]]:
    """Returns each operand that goes into the programs inside an equation, and what is asked of it, of each program."""
    operands = equation.invars[1:] if equation.primitive.name == "cond" else equation.invars
    return list(zip(operands, zip(*map(asked, tracing.inner_programs(equation)), strict=True), strict=True))
