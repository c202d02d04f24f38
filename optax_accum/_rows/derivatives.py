"""The derivatives of equations, traced: of those with rules that the user wrote, a clip of a gradient, say."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._core import compilers
from optax_accum._core.equations import all_equations, inner_programs


def has_backward(equation: Any) -> bool:
    """Whether an equation, or one inside it, has a backward pass by the user."""
    inner = (eqn for program in inner_programs(equation.single) for eqn in all_equations(program))
    return any(eqn.primitive.name.startswith("custom_vjp_call") for eqn in (equation.single, *inner))


def derivative_of(
    single: Any, double: Any, derivative: Callable[..., Any], moves: Sequence[bool] | None = None
) -> tuple[Any, Any]:
    """The traces of a derivative of two equations: functions of operands, and of tangents or cotangents."""
    return traced_derivative(single, derivative, moves), traced_derivative(double, derivative, moves)


def traced_derivative(eqn: Any, derivative: Callable[..., Any], moves: Sequence[bool] | None = None) -> Any:
    """The trace of a derivative by the operands that may move; by default, all that are inexact."""
    may_move = inexact(eqn.invars)
    moves = may_move if moves is None else [a and b for a, b in zip(moves, may_move, strict=True)]
    values = [_shape(var) for var in eqn.invars]
    given = eqn.invars if derivative is forward else eqn.outvars
    moved = moves if derivative is forward else inexact(eqn.outvars)
    changes = [_shape(var) for var, moves_ in zip(given, moved, strict=True) if moves_]
    return jax.make_jaxpr(functools.partial(derivative, eqn, moves))(values, changes)


def _shape(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, sharding=compilers.explicit_sharding(var.aval))


def inexact(variables: Sequence[Any]) -> list[bool]:
    """Which variables may have a derivative."""
    return [jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in variables]


def forward(eqn: Any, moves: Sequence[bool], values: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The results of an equation and their tangents; an integer's tangent is zero."""
    fun, moving = _of_moving(eqn, moves, values)
    outs, moved = jax.jvp(fun, moving, list(tangents))
    return outs, moved


def backward(eqn: Any, moves: Sequence[bool], values: Sequence[Any], cotangents: Sequence[Any]) -> Any:
    """The cotangents of an equation's operands that may move."""
    fun, moving = _of_moving(eqn, moves, values)
    outs, back = jax.vjp(fun, *moving)
    given = iter(cotangents)

    def none(leaf: Any) -> Any:
        return np.zeros(leaf.shape, jax.dtypes.float0)

    pairs = zip(inexact(eqn.outvars), outs, strict=True)
    return back([next(given) if moves_ else none(leaf) for moves_, leaf in pairs])


def _of_moving(eqn: Any, moves: Sequence[bool], values: Sequence[Any]) -> tuple[Callable[..., list[Any]], list[Any]]:
    """An equation as a function of the operands that may move, and these operands."""

    def fun(*moving: Any) -> list[Any]:
        rest = iter(moving)
        return list(compilers.bind(eqn, [next(rest) if m else v for v, m in zip(values, moves, strict=True)]))

    return fun, [value for value, m in zip(values, moves, strict=True) if m]
