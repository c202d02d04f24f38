"""Derivative rules of the user's own, which JAX traces when it differentiates: their functions, rewritten."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._core import evaluation
from optax_accum._core.dtypes import is_float0
from optax_accum._core.equations import programs_of
from optax_accum._core.leaves import parted

Rewrite = Callable[[Callable[..., Any]], Callable[..., Any]]


def has_rule(equation: Any) -> bool:
    """Whether an equation calls a function with a derivative of the user's own."""
    return equation.primitive.name.startswith(tuple(_DERIVATIVES))


def rewritten(equation: Any, rewrite: Rewrite) -> Callable[..., Any]:
    """The function that an equation calls, rewritten, with its rewritten rule."""
    name = next(name for name in _DERIVATIVES if equation.primitive.name.startswith(name))
    return _DERIVATIVES[name](equation, rewrite)


def differentiated(equation: Any, values: Sequence[Any]) -> Any:
    """The derivative of such an equation, as its rule has it: of all its operands, and in reverse if it says how."""
    call = functools.partial(_bound, equation)
    if equation.primitive.name.startswith("custom_jvp_call"):
        return jax.jvp(call, values, list(map(_tangent_like, values)))
    return with_backward_pass(call, values)


def with_backward_pass(fun: Callable[..., Any], values: Sequence[Any]) -> Any:
    """The results of a function, and the gradients by all its operands, for some cotangents."""
    results, backward = jax.vjp(fun, *values)
    return results, backward(jax.tree.map(_tangent_like, results))


def _tangent_like(value: Any) -> Any:
    return value if jnp.issubdtype(value.dtype, jnp.inexact) else np.zeros(value.shape, jax.dtypes.float0)


def _custom_jvp(equation: Any, rewrite: Rewrite) -> Callable[..., Any]:
    called = jax.custom_jvp(rewrite(_inner(equation)))

    @called.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        given, filled = parted(tangents, _has_derivative)
        pushed = lambda primals, given: jax.jvp(functools.partial(_bound, equation), primals, filled(given))
        return rewrite(pushed)(primals, given)

    return called


def _custom_vjp(equation: Any, rewrite: Rewrite) -> Callable[..., Any]:
    called = jax.custom_vjp(rewrite(_inner(equation)))
    inexact = [jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in equation.invars]
    forward = lambda *values: rewrite(lambda *values: jax.vjp(functools.partial(_bound, equation), *values))(*values)

    def backward(residuals: Any, cotangents: Any) -> Any:
        given, filled = parted(cotangents, _has_derivative)

        def pulled(residuals: Any, given: Any) -> Any:
            gradients = residuals(filled(given))
            return [gradient for gradient, wanted in zip(gradients, inexact, strict=True) if wanted]

        found = iter(rewrite(pulled)(residuals, given))
        return tuple(next(found) if wanted else None for wanted in inexact)

    called.defvjp(forward, backward)
    return called


_DERIVATIVES = {"custom_jvp_call": _custom_jvp, "custom_vjp_call": _custom_vjp}


def _inner(equation: Any) -> Callable[..., Any]:
    (inner,) = programs_of(equation)
    return lambda *values: tuple(evaluation.run(inner.program, values))


def _bound(equation: Any, *values: Any) -> tuple[Any, ...]:
    return tuple(evaluation.bind(equation, values))


def _has_derivative(leaf: Any) -> bool:
    return not is_float0(leaf)
