"""Which values a derivative perturbs, as JAX tells a user's rule (`perturbed`): those that depend on a perturbed one.

Differentiated by `w` alone, `scan(lambda h, t: (h * w + t, t), h0, ts)` has a perturbed `h` from its second iteration
on, and never a perturbed `t`.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from optax_accum._core import compilers, evaluation
from optax_accum._core.equations import CALLS, CHECKPOINTS, Inside, programs_of

Perturbed = Sequence[bool] | None  # of each operand; None: not known, so each that is inexact may
_FOLLOWED = (*CALLS, *CHECKPOINTS, "cond", "scan", "while")


def is_inexact(var: Any) -> bool:
    """Whether a variable may have a derivative."""
    return jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.inexact)  # a token has none


def each_equation(program: Any, perturbed: Perturbed) -> Iterator[tuple[Any, Perturbed]]:
    """Yields the equations of a program, each with which of its operands are perturbed."""
    jaxpr, _ = compilers.opened(program)
    if perturbed is None:
        return zip(jaxpr.eqns, [None] * len(jaxpr.eqns), strict=True)
    operands: list[Perturbed] = []
    _follow(program, perturbed, operands)
    return zip(jaxpr.eqns, operands, strict=True)


def results_of(equation: Any, perturbed: Perturbed) -> list[bool]:
    """Which results of an equation are perturbed."""
    inexact = list(map(is_inexact, equation.outvars))
    if perturbed is None:
        return inexact
    if not any(perturbed) or equation.primitive.name == "stop_gradient":
        return [False] * len(inexact)
    if equation.primitive.name not in _FOLLOWED:
        return inexact
    found = [inside.followed(perturbed, _follow, operator.or_)[1] for inside in programs_of(equation) if inside.gives]
    return [is_ and any(each) for is_, *each in zip(inexact, *found, strict=True)]


def of_inputs(program: Inside, perturbed: Perturbed) -> Perturbed:
    """Which inputs of a program inside an equation are perturbed, from which of the equation's operands are."""
    if perturbed is None:
        return None
    count = len(compilers.opened(program.program)[0].invars)
    if not any(perturbed) or not program.gives:  # a predicate has no derivative
        return [False] * count
    if len(program.takes) != count:
        return None
    taken = program.taken(perturbed)
    return program.followed(perturbed, _follow, operator.or_)[0] if taken[program.carried] else taken


def _follow(program: Any, perturbed: Sequence[bool], operands: list[Perturbed] | None = None) -> list[bool]:
    """Which outputs of a program are perturbed; notes which operands of each equation are."""
    jaxpr, _ = compilers.opened(program)
    noted = [] if operands is None else operands

    def results(equation: Any, perturbed: list[bool]) -> list[bool]:
        noted.append(perturbed)
        return results_of(equation, perturbed)

    env = dict.fromkeys(jaxpr.constvars, False) | dict(zip(jaxpr.invars, perturbed, strict=True))
    return evaluation.in_order(jaxpr.eqns, env, jaxpr.outvars, results, literal=lambda _: False)
