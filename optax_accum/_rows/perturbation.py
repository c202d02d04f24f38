"""Which values a derivative perturbs, as JAX tells a user's rule (`perturbed`): those that depend on a perturbed one.

Differentiated by `w` alone, `scan(lambda h, t: (h * w + t, t), h0, ts)` has a perturbed `h` from its second iteration
on, and never a perturbed `t`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from optax_accum._core import compilers
from optax_accum._core.equations import inner_programs

Perturbed = Sequence[bool] | None  # of each operand; None: not known, so each that is inexact may
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2")


def is_inexact(var: Any) -> bool:
    """Whether a variable may have a derivative."""
    return jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.inexact)  # a token has none


def each_equation(program: Any, perturbed: Perturbed) -> Iterator[tuple[Any, Perturbed]]:
    """Yields the equations of a program, each with which of its operands are perturbed."""
    return zip(program.eqns, _followed(program, perturbed)[0], strict=True)


def results_of(equation: Any, perturbed: Perturbed) -> list[bool]:
    """Which results of an equation are perturbed."""
    inexact = list(map(is_inexact, equation.outvars))
    if perturbed is None:
        return inexact
    if not any(perturbed) or equation.primitive.name == "stop_gradient":
        return [False] * len(inexact)
    found = [_followed(compilers.opened(program)[0], inside)[1] for program, inside in _inside(equation, perturbed)]
    if not found:
        return inexact
    return [is_ and any(each) for is_, *each in zip(inexact, *found, strict=True)]


def inside(equation: Any, perturbed: Perturbed, program: Any) -> Perturbed:
    """Which operands of a program inside an equation are perturbed."""
    if perturbed is None:
        return None
    count = len(compilers.opened(program)[0].invars)
    if not any(perturbed):
        return [False] * count
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        consts, carried = compilers.sizes_of_scan(equation)
        return _carried(
            program, perturbed[:consts], perturbed[consts : consts + carried], perturbed[consts + carried :]
        )
    if name == "while":
        of_cond, of_body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        if program is params["cond_jaxpr"]:
            return [False] * count  # a predicate has no derivative
        return _carried(program, perturbed[of_cond:of_body], perturbed[of_body:], ())
    perturbed = perturbed[1:] if name == "cond" else perturbed
    return perturbed if len(perturbed) == count else None


def _inside(equation: Any, perturbed: Sequence[bool]) -> list[tuple[Any, Perturbed]]:
    """The programs inside an equation whose results are its own, each with which of its operands are perturbed."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        programs = params["branches"]
    elif name == "while":
        programs = [params["body_jaxpr"]]
    else:
        programs = inner_programs(equation) if name in (*_CALLS, "scan") else []
    return [(program, inside(equation, perturbed, program)) for program in programs]


def _carried(program: Any, consts: Sequence[bool], carry: Sequence[bool], xs: Sequence[bool]) -> list[bool]:
    """The next iteration of a loop carries what one has perturbed: repeated until nothing is added."""
    opened, _ = compilers.opened(program)
    while True:
        _, outs = _followed(opened, [*consts, *carry, *xs])
        after = [a or b for a, b in zip(carry, outs, strict=False)]
        if after == list(carry):
            return [*consts, *carry, *xs]
        carry = after


def _followed(program: Any, perturbed: Perturbed) -> tuple[list[Perturbed], list[bool]]:
    """Which operands of each equation of a program are perturbed, and which of its outputs."""
    if perturbed is None:
        return [None] * len(program.eqns), list(map(is_inexact, program.outvars))
    variables = {var for var, is_perturbed in zip(program.invars, perturbed, strict=True) if is_perturbed}
    read = lambda atoms: [isinstance(atom, core.Var) and atom in variables for atom in atoms]
    operands: list[Perturbed] = []
    for equation in program.eqns:
        operands.append(read(equation.invars))
        results = zip(equation.outvars, results_of(equation, operands[-1]), strict=True)
        variables.update(var for var, is_perturbed in results if is_perturbed)
    return operands, read(program.outvars)
