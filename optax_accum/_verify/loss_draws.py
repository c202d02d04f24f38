"""Owns which random numbers of a loss are drawn from a key that is not among its arguments. Runs nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_accum._core.arithmetic import Tree
from optax_accum._core.tracing import inner_programs

Shapes = list[tuple[int, ...]]
LOOPS = {"scan": ("num_consts",), "while": ("cond_nconsts", "body_nconsts")}  # how many arguments stay as they are


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
            found, after = _draws(inner, _inside(equation, inner, depends))
            shapes += found
            if equation.primitive.name not in LOOPS and len(after) == len(outputs):
                outputs = after
        known |= {id(var) for var, depends in zip(equation.outvars, outputs, strict=True) if depends}
    return shapes, [id(var) in known for var in program.outvars]


def _inside(equation: Any, inner: Any, depends: list[bool]) -> list[bool]:
    """Returns which inputs of a program inside an equation depend on the arguments; in loops what changes does."""
    if equation.primitive.name in LOOPS:
        constants = sum(equation.params[name] for name in LOOPS[equation.primitive.name])
        depends = depends[:constants] + [any(depends)] * (len(depends) - constants)
    missing = [any(depends)] * (len(inner.invars) - len(depends))
    return (missing + depends)[len(missing) + len(depends) - len(inner.invars) :]
