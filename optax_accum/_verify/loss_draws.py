"""Owns which random numbers of a loss are drawn from a key that is not among its arguments. Runs nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_accum._core.arithmetic import Tree
from optax_accum._core.tracing import inner_programs

Shapes = list[tuple[int, ...]]
LOOPS = ("scan", "while")


def hidden_draws(fun: Callable[..., Any], *args: Tree) -> Shapes:
    """Returns the shapes of what is drawn, whatever the arguments: from a key that `fun` closes over, or makes."""
    closed = jax.make_jaxpr(fun)(*args)
    return _draws(closed.jaxpr, [True] * len(closed.jaxpr.invars))[0]


def _draws(program: Any, of_arguments: Sequence[bool]) -> tuple[Shapes, list[bool]]:
    """Returns the shapes of hidden draws in a program, and which of its outputs depend on the arguments."""
    known = {id(var) for var, depends in zip(program.invars, of_arguments, strict=True) if depends}
    shapes: Shapes = []
    for equation in program.eqns:
        depends = [id(var) in known for var in equation.invars]
        outputs = [any(depends)] * len(equation.outvars)
        if equation.primitive.name == "random_bits" and not any(depends):
            shapes.append(equation.outvars[0].aval.shape)
        for inner in inner_programs(equation):
            loops = equation.primitive.name in LOOPS
            found, after = _around(inner, _last(depends, inner)) if loops else _draws(inner, _last(depends, inner))
            shapes += found
            if not loops and len(after) == len(outputs):
                outputs = after
        known |= {id(var) for var, depends in zip(equation.outvars, outputs, strict=True) if depends}
    return shapes, [id(var) in known for var in program.outvars]


def _around(body: Any, depends: list[bool]) -> tuple[Shapes, list[bool]]:
    """Returns the same of the body of a loop: what it returns may be any of its inputs that looks like it."""
    while True:
        shapes, after = _draws(body, depends)
        returned = [str(var.aval) for var, one in zip(body.outvars, after, strict=True) if one]
        more = [one or str(var.aval) in returned for var, one in zip(body.invars, depends, strict=True)]
        if more == depends:
            return shapes, after
        depends = more


def _last(depends: list[bool], inner: Any) -> list[bool]:
    """Returns which inputs of a program inside an equation depend on the arguments: they come last in it."""
    missing = len(inner.invars) - len(depends)
    return [any(depends)] * missing + depends[max(0, -missing) :]
