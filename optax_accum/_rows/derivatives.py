"""The derivatives of equations, traced: of those with rules that the user wrote, a clip of a gradient, say."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_accum._core import compilers, evaluation
from optax_accum._core.equations import every_equation
from optax_accum._rows import perturbation
from optax_accum._rows.perturbation import Perturbed


def has_backward(equation: Any) -> bool:
    """Whether an equation, or one inside it, has a backward pass by the user."""
    return any(eqn.primitive.name.startswith("custom_vjp_call") for eqn in every_equation(equation.single))


def derivative_of(
    single: Any, double: Any, derivative: Callable[..., Any], perturbed: Perturbed = None, takes: Perturbed = None
) -> tuple[Any, Any]:
    """The traces of a derivative of two equations: functions of operands, and of tangents or cotangents."""
    trace = functools.partial(traced_derivative, derivative=derivative, perturbed=perturbed, takes=takes)
    return trace(single), trace(double)


def traced_derivative(
    eqn: Any, derivative: Callable[..., Any], perturbed: Perturbed = None, takes: Perturbed = None
) -> Any:
    """The trace of a derivative by the operands that move; a backward pass takes cotangents of some results.

    By default, these are all that are inexact.
    """
    operands, results = (list(map(perturbation.is_inexact, variables)) for variables in (eqn.invars, eqn.outvars))
    operands = operands if perturbed is None else [a and b for a, b in zip(perturbed, operands, strict=True)]
    results = results if takes is None else [a and b for a, b in zip(takes, results, strict=True)]
    values = [_shape(var) for var in eqn.invars]
    pairs = zip(eqn.invars, operands, strict=True) if derivative is forward else zip(eqn.outvars, results, strict=True)
    changes = [_shape(var) for var, changes in pairs if changes]
    return jax.make_jaxpr(functools.partial(derivative, eqn, operands, results))(values, changes)


def _shape(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, sharding=compilers.explicit_sharding(var.aval))


def forward(eqn: Any, perturbed: Sequence[bool], takes: Any, values: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The results of an equation and their tangents; an integer's tangent is zero."""
    fun, at = _split_operands(eqn, perturbed, values)
    outs, moved = jax.jvp(fun, at, list(tangents))
    return outs, moved


def primal(eqn: Any, perturbed: Sequence[bool], takes: Any, values: Sequence[Any], changes: Any) -> Any:
    """The results of an equation as its user's forward pass has them: these are what is differentiated again."""
    fun, at = _split_operands(eqn, perturbed, values)
    return jax.vjp(fun, *at)[0]


def backward(
    eqn: Any, perturbed: Sequence[bool], takes: Sequence[bool], values: Sequence[Any], cotangents: Sequence[Any]
) -> Any:
    """The cotangents of an equation's operands that move; of other results, a rule sees that they have none."""
    fun, at = _split_operands(eqn, perturbed, values)
    return jax.vjp(lambda *at: [out for out, is_ in zip(fun(*at), takes, strict=True) if is_], *at)[1](list(cotangents))


def _split_operands(
    eqn: Any, perturbed: Sequence[bool], values: Sequence[Any]
) -> tuple[Callable[..., list[Any]], list[Any]]:
    """An equation as a function of the operands that may move, and these operands."""

    def fun(*given: Any) -> list[Any]:
        rest = iter(given)
        return list(evaluation.bind(eqn, [next(rest) if is_ else v for v, is_ in zip(values, perturbed, strict=True)]))

    return fun, [value for value, is_ in zip(values, perturbed, strict=True) if is_]
