"""Random numbers that a function draws from a key that no argument decides, read off its traced program."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

Shapes = list[tuple[int, ...]]
LOOPS = ("scan", "while")


def hidden_draws(fun: Callable[..., Any], *args: Any) -> Shapes:
    """The shapes of random draws that no argument decides: from a key that `fun` closes over, or makes."""
    traced = jax.make_jaxpr(fun)(*args)
    return draws(traced.jaxpr, [True] * len(traced.jaxpr.invars))[0]


def draws(program: Any, of_arguments: Sequence[bool], of_constants: Sequence[bool] = ()) -> tuple[Shapes, list[bool]]:
    """The shapes of hidden draws in a program, and whether each of its outputs depends on the arguments."""
    known = {id(var) for var, depends in zip(program.invars, of_arguments, strict=True) if depends}
    known |= {id(var) for var, depends in zip(program.constvars, of_constants, strict=False) if depends}
    shapes: Shapes = []
    for equation in program.eqns:
        hidden, outputs = draws_of(equation, [id(var) in known for var in equation.invars])
        shapes += hidden
        known |= {id(var) for var, depends in zip(equation.outvars, outputs, strict=True) if depends}
    return shapes, [id(var) in known for var in program.outvars]


def draws_of(equation: Any, depends: list[bool]) -> tuple[Shapes, list[bool]]:
    """`draws` of one equation, and of the programs inside it; `depends`: which operands do, on the arguments."""
    outputs, shapes = [any(depends)] * len(equation.outvars), Shapes()
    if equation.primitive.name == "random_bits" and not any(depends):
        shapes.append(equation.outvars[0].aval.shape)
    found = list[list[bool]]()
    for inner in inner_programs(equation):
        loops = equation.primitive.name in LOOPS
        hidden, after = _around(inner, _last(depends, inner)) if loops else draws(inner, _last(depends, inner))
        shapes += hidden
        if not loops and len(after) == len(outputs):
            found.append(after)
    if found:
        chosen = is_chosen(equation, depends)
        outputs = [chosen or any(each) for each in zip(*found, strict=True)]
    return shapes, outputs


def is_chosen(equation: Any, depends: list[bool]) -> bool:
    """Whether the arguments choose a branch."""
    return equation.primitive.name == "cond" and depends[0]


def _around(body: Any, depends: list[bool]) -> tuple[Shapes, list[bool]]:
    """`draws` for the body of a loop, repeated until no further input depends on the arguments."""
    while True:
        shapes, after = draws(body, depends)
        returned = [str(var.aval) for var, dependent in zip(body.outvars, after, strict=True) if dependent]
        more = [dependent or str(var.aval) in returned for var, dependent in zip(body.invars, depends, strict=True)]
        if more == depends:
            return shapes, after
        depends = more


def _last(depends: list[bool], inner: Any) -> list[bool]:
    """Whether each input of an inner program depends on the arguments: the equation's operands are its last inputs."""
    missing = len(inner.invars) - len(depends)
    return [any(depends)] * missing + depends[max(0, -missing) :]


def inner_programs(equation: Any) -> Iterator[Any]:
    for inner in jax.tree.leaves(list(equation.params.values())):
        program = getattr(inner, "jaxpr", inner)  # with or without its constants
        if isinstance(program, core.Jaxpr):
            yield program
