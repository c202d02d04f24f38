"""Random numbers that a function draws from a key that is not among its arguments."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_accum._arguments.roles import Call
from optax_accum._core.equations import inner_programs
from optax_accum._core.leaves import is_array, parted

Shapes = list[tuple[int, ...]]
LOOPS = ("scan", "while")


def may_hide(program: Any, call: Call) -> bool:
    """Whether a traced `fun(call)` may draw from a key that is not an argument; compares arrays by identity."""
    names = tuple(name for name in call.arguments if name != call.carry)  # some carries can be flattened only once
    arguments = set(map(id, jax.tree.leaves(call[names])))
    constants = [id(const) in arguments for const in program.consts]
    return bool(_draws(program.jaxpr, [True] * len(program.jaxpr.invars), constants)[0])


def check_keys(fun: Callable[[Call], Any], part: Call, all_rows: Call) -> None:
    """Raises if `fun` draws numbers for each row from a key that is not an argument: all micro-batches get the same.

    `part` is the call for some rows, `all_rows` for all.
    """
    try:
        of_part = hidden_draws(*_of_arrays(fun, part))
        of_rows = hidden_draws(*_of_arrays(fun, all_rows)) if of_part else []
    except Exception:  # fun takes one batch size only, or an axis that is not here: draws for each row are not known
        return
    for shape, of_all in zip(of_part, of_rows, strict=False):
        if shape != of_all:
            raise ValueError(
                "A random key must be an argument of fun, or every micro-batch would draw the same numbers: fun draws "
                f"{list(shape)} from a key that it closes over, or makes. Pass the key as an argument and name it with "
                "rng_argnum; to share it on purpose, with whole_argnums."
            )


def _of_arrays(fun: Callable[[Call], Any], call: Call) -> tuple[Callable[[Any], Any], Any]:
    """`fun(call)` as a function of the arrays among its arguments, and these arrays."""
    names = tuple(call.arguments)
    arrays, filled = parted(call[names], lambda leaf: is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct))
    with_arrays = lambda arrays: call.with_values(names, filled(arrays))
    return lambda arrays: fun(with_arrays(arrays)), arrays


def hidden_draws(fun: Callable[..., Any], *args: Any) -> Shapes:
    """The shapes of random draws that no argument decides: from a key that `fun` closes over, or makes."""
    traced = jax.make_jaxpr(fun)(*args)
    return _draws(traced.jaxpr, [True] * len(traced.jaxpr.invars))[0]


def _draws(program: Any, of_arguments: Sequence[bool], of_constants: Sequence[bool] = ()) -> tuple[Shapes, list[bool]]:
    """The shapes of hidden draws in a program, and whether each of its outputs depends on the arguments."""
    known = {id(var) for var, depends in zip(program.invars, of_arguments, strict=True) if depends}
    known |= {id(var) for var, depends in zip(program.constvars, of_constants, strict=False) if depends}
    shapes: Shapes = []
    for equation in program.eqns:
        depends = [id(var) in known for var in equation.invars]
        outputs = [any(depends)] * len(equation.outvars)
        if equation.primitive.name == "random_bits" and not any(depends):
            shapes.append(equation.outvars[0].aval.shape)
        for inner in inner_programs(equation):
            loops = equation.primitive.name in LOOPS
            hidden, after = _around(inner, _last(depends, inner)) if loops else _draws(inner, _last(depends, inner))
            shapes += hidden
            if not loops and len(after) == len(outputs):
                outputs = after
        known |= {id(var) for var, depends in zip(equation.outvars, outputs, strict=True) if depends}
    return shapes, [id(var) in known for var in program.outvars]


def _around(body: Any, depends: list[bool]) -> tuple[Shapes, list[bool]]:
    """`_draws` for the body of a loop, repeated until no further input depends on the arguments."""
    while True:
        shapes, after = _draws(body, depends)
        returned = [str(var.aval) for var, dependent in zip(body.outvars, after, strict=True) if dependent]
        more = [dependent or str(var.aval) in returned for var, dependent in zip(body.invars, depends, strict=True)]
        if more == depends:
            return shapes, after
        depends = more


def _last(depends: list[bool], inner: Any) -> list[bool]:
    """Whether each input of an inner program depends on the arguments: the equation's operands are its last inputs."""
    missing = len(inner.invars) - len(depends)
    return [any(depends)] * missing + depends[max(0, -missing) :]
