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
    variables = _Variables(program, perturbed)
    for equation in program.eqns:
        yield equation, variables.read(equation.invars)
        variables.add(equation)


def results_of(equation: Any, perturbed: Perturbed) -> list[bool]:
    """Which results of an equation are perturbed."""
    inexact = list(map(is_inexact, equation.outvars))
    if perturbed is None:
        return inexact
    if not any(perturbed) or equation.primitive.name == "stop_gradient":
        return [False] * len(inexact)
    found = [_outputs_of(compilers.opened(program)[0], inside) for program, inside in _inside(equation, perturbed)]
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
        outs = _outputs_of(opened, [*consts, *carry, *xs])
        after = [a or b for a, b in zip(carry, outs, strict=False)]
        if after == list(carry):
            return [*consts, *carry, *xs]
        carry = after


def _outputs_of(program: Any, perturbed: Perturbed) -> list[bool]:
    variables = _Variables(program, perturbed)
    for equation in program.eqns:
        variables.add(equation)
    return list(variables.read(program.outvars) or map(is_inexact, program.outvars))


class _Variables:
    """The perturbed variables of a program, so far."""

    def __init__(self, program: Any, perturbed: Perturbed):
        self.all = perturbed is None
        pairs = zip(program.invars, perturbed or (), strict=not self.all)
        self.variables = {var for var, is_perturbed in pairs if is_perturbed}

    def read(self, atoms: Sequence[Any]) -> Perturbed:
        if self.all:
            return None
        return [isinstance(atom, core.Var) and atom in self.variables for atom in atoms]

    def add(self, equation: Any) -> None:
        if not self.all:
            results = results_of(equation, self.read(equation.invars))
            self.variables.update(var for var, perturbed in zip(equation.outvars, results, strict=True) if perturbed)
