"""Which values a derivative moves, as JAX tells a user's rule: those that depend on what moves, inside loops, too.

In `scan(lambda h, t: (h * w + t, t), h0, ts)` with only `w` moving, `h` moves from the second iteration on; `t` never.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from optax_accum._core import compilers
from optax_accum._core.equations import inner_programs

Moves = Sequence[bool] | None  # of each operand; None: not known, so each that is inexact may
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2")


def is_inexact(var: Any) -> bool:
    """Whether a variable may have a derivative."""
    return jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.inexact)  # a token has none


def each_equation(program: Any, moves: Moves) -> Iterator[tuple[Any, Moves]]:
    """Yields the equations of a program, each with which of its operands move."""
    moving = _Moving(program, moves)
    for equation in program.eqns:
        yield equation, moving.read(equation.invars)
        moving.add(equation)


def of_results(equation: Any, moves: Moves) -> list[bool]:
    """Which results of an equation move."""
    inexact = list(map(is_inexact, equation.outvars))
    if moves is None:
        return inexact
    if not any(moves) or equation.primitive.name == "stop_gradient":
        return [False] * len(inexact)
    found = [_of_outputs(compilers.opened(program)[0], inside) for program, inside in _inside(equation, moves)]
    if not found:
        return inexact
    return [is_ and any(each) for is_, *each in zip(inexact, *found, strict=True)]


def inside(equation: Any, moves: Moves, program: Any) -> Moves:
    """Which operands of a program inside an equation move."""
    if moves is None:
        return None
    count = len(compilers.opened(program)[0].invars)
    if not any(moves):
        return [False] * count
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        consts, carried = compilers.sizes_of_scan(equation)
        return _carried(program, moves[:consts], moves[consts : consts + carried], moves[consts + carried :])
    if name == "while":
        of_cond, of_body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        if program is params["cond_jaxpr"]:
            return [False] * count  # a predicate has no derivative
        return _carried(program, moves[of_cond:of_body], moves[of_body:], ())
    moves = moves[1:] if name == "cond" else moves
    return moves if len(moves) == count else None


def _inside(equation: Any, moves: Sequence[bool]) -> list[tuple[Any, Moves]]:
    """The programs inside an equation whose results are its own, each with which of its operands move."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        programs = params["branches"]
    elif name == "while":
        programs = [params["body_jaxpr"]]
    else:
        programs = inner_programs(equation) if name in (*_CALLS, "scan") else []
    return [(program, inside(equation, moves, program)) for program in programs]


def _carried(program: Any, consts: Sequence[bool], carry: Sequence[bool], xs: Sequence[bool]) -> list[bool]:
    """What one iteration of a loop moves, the next carries."""
    opened, _ = compilers.opened(program)
    while True:
        outs = _of_outputs(opened, [*consts, *carry, *xs])
        after = [a or b for a, b in zip(carry, outs, strict=False)]
        if after == list(carry):
            return [*consts, *carry, *xs]
        carry = after


def _of_outputs(program: Any, moves: Moves) -> list[bool]:
    moving = _Moving(program, moves)
    for equation in program.eqns:
        moving.add(equation)
    return list(moving.read(program.outvars) or map(is_inexact, program.outvars))


class _Moving:
    """The variables of a program that move, so far."""

    def __init__(self, program: Any, moves: Moves):
        self.all = moves is None
        pairs = zip(program.invars, moves or (), strict=not self.all)
        self.variables = {var for var, moves_ in pairs if moves_}

    def read(self, atoms: Sequence[Any]) -> Moves:
        if self.all:
            return None
        return [isinstance(atom, core.Var) and atom in self.variables for atom in atoms]

    def add(self, equation: Any) -> None:
        if not self.all:
            results = of_results(equation, self.read(equation.invars))
            self.variables.update(var for var, moves in zip(equation.outvars, results, strict=True) if moves)
