"""Owns the backward pass of a loss in the parameters, and whether a weight may go through it. Knows no window."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._core import arithmetic, checks, tracing
from optax_accum._core.arithmetic import Tree
from optax_accum._core.roles import Call


def vjp(fun: Callable[..., Any], has_aux: bool, call: Call) -> tuple[jax.Array, "Backward", Any]:
    """Returns the loss in at least float32, its backward pass, and what `fun` returned."""
    params = call.arguments[0]
    leaves, treedef = jax.tree.flatten(params)

    def wide(inexact: list[jax.Array]) -> tuple[jax.Array, Any]:
        given = iter(inexact)
        own = treedef.unflatten([next(given) if _is_inexact(leaf) else leaf for leaf in leaves])
        out = call.with_arguments({0: own}).apply(fun)
        loss = out[0] if has_aux else out
        checks.check_loss(loss, None)
        return loss.astype(arithmetic.accumulator_dtype(loss.dtype, None)), out

    loss, backward, out = jax.vjp(wide, [leaf for leaf in leaves if _is_inexact(leaf)], has_aux=True)
    return loss, Backward(backward, params), out


class Backward:
    """The backward pass of a loss, whose parameters may be integers: they get no reference, and a float0 gradient."""

    def __init__(self, backward: Any, params: Tree):
        self.backward = backward
        self.leaves, self.treedef = jax.tree.flatten(params)

    def __call__(self, cotangent: jax.Array) -> Tree:
        """Returns the gradient."""
        (grads,) = self.backward(cotangent)
        given = iter(grads)
        filled = [next(given) if _is_inexact(p) else np.zeros(p.shape, jax.dtypes.float0) for p in self.leaves]
        return self.treedef.unflatten(filled)

    def with_refs(self, refs: Tree, cotangent: jax.Array) -> None:
        """Adds the gradient to the references, of which an accumulator has one for each inexact parameter."""
        self.backward.with_refs(jax.tree.leaves(refs))(cotangent)


def bends(jaxpr: Any) -> bool:
    """Returns whether a factor in the cotangent could give another gradient than one on the gradient.

    Where a number has a shorter range than float32 (float16, float8), a large weight overflows and a small one
    vanishes; and a backward pass that the user wrote need not be linear (a clip).
    """
    widest = jnp.finfo(jnp.float32).maxexp
    for equation in jaxpr.eqns:
        dtypes = [getattr(var.aval, "dtype", jnp.dtype(bool)) for var in equation.outvars]
        if any(jnp.issubdtype(d, jnp.floating) and jnp.finfo(d).maxexp < widest for d in dtypes):
            return True
        if equation.primitive.name.startswith("custom_vjp_call"):
            return True
        if any(map(bends, tracing.inner_programs(equation))):
            return True
    return False


def _is_inexact(leaf: Any) -> bool:
    """Returns whether a parameter has a gradient."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
