"""Where the gradient of each input of a traced program comes from, read from its equations."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from optax_accum._core.equations import (
    all_equations,
    inner_programs,
    is_barrier,
    is_cast_down,
    is_checkpoint,
    may_be_clamped,
    operands,
)
from optax_accum._loss import follow


def casts(program: Any) -> list[bool]:
    """Returns which of the inputs of a traced program are cast down before it comes to a loop."""
    cast: set[Any] = set()
    for equation in program.eqns:
        name = equation.primitive.name
        if is_cast_down(equation):
            cast.update(operands(equation))
        elif name != "scan" and name in follow.FOLLOW:
            cast.update(var for var, inside in _inside(equation, casts) if any(inside))
    return [var in cast for var in program.invars]


def breaks(program: Any) -> list[bool]:
    """Returns for which inputs of a traced program JAX fails to differentiate with references, or does so wrongly.

    A scan that takes one array in two ways, say scanned over and closed over; a scan of length 0; a barrier; a slice
    that may be clamped. What has a sink is used before it comes to the first three, and is clamped before the last.
    """
    broken: set[Any] = set()
    for equation in reversed(program.eqns):
        name, programs = equation.primitive.name, list(inner_programs(equation))
        if programs:
            broken.update(var for var, count in collections.Counter(operands(equation)).items() if count > 1)
        if _breaks_here(equation) or (name not in follow.FOLLOW and any(map(_breaks_any, programs))):
            broken.update(operands(equation))
        elif name in follow.FOLLOW and programs:
            broken.update(var for var, inside in _inside(equation, breaks) if any(inside))
        elif name in follow.FOLLOW and equation.outvars[0] in broken:  # what goes in is what comes out
            broken.update(operands(equation)[:1])
    return [var in broken for var in program.invars]


def _breaks_here(equation: Any) -> bool:
    """Returns whether an equation breaks whatever it takes; a scan of length 0 slices an array without rows."""
    empty = equation.primitive.name == "scan" and not equation.params["length"]
    return is_barrier(equation) or may_be_clamped(equation) or empty


def _breaks_any(program: Any) -> bool:
    """Returns whether a program holds an equation that breaks, or hands one array twice to an inner program."""

    def twice(variables: Any) -> Any:
        return len(set(variables)) < len(variables)

    return any(
        _breaks_here(equation) or (any(inner_programs(equation)) and twice(operands(equation)))
        for equation in all_equations(program)
    )


def leave_whole(program: Any, into_branches: bool = True) -> list[str | None]:
    """Returns for each input of a traced program the function that its gradient leaves as a whole, if there is one.

    That is one that takes a function, and that sinks do not go into: inside a checkpoint they go into no branches.
    """
    left_by: dict[Any, str | None] = {}
    for equation in reversed(program.eqns):
        name, programs = equation.primitive.name, list(inner_programs(equation))
        followed = name in follow.FOLLOW and (into_branches or name != "cond")
        if followed and programs:
            asked = functools.partial(leave_whole, into_branches=into_branches and not is_checkpoint(equation))
            pairs = [(var, next(filter(None, inside), None)) for var, inside in _inside(equation, asked)]
        elif followed:  # what goes in is what comes out
            pairs = [(var, left_by.get(equation.outvars[0])) for var in operands(equation)[:1]]
        else:
            pairs = [(var, name if programs else None) for var in operands(equation)]
        left_by.update((var, function) for var, function in pairs if function)
    return [left_by.get(var) for var in program.invars]


def _inside(equation: Any, asked: Callable[[Any], Sequence[Any]]) -> list[tuple[Any, tuple[Any, ...]]]:
    """Returns each variable that goes into programs inside an equation, with the answer of each program."""
    programs = list(inner_programs(equation))
    atoms = equation.invars[1:] if equation.primitive.name == "cond" else equation.invars
    pairs = zip(atoms, zip(*map(asked, programs), strict=True), strict=True) if programs else ()
    return [(atom, answers) for atom, answers in pairs if not isinstance(atom, core.Literal)]
