"""Owns the backward pass: a loss differentiated once, its gradient added inside that pass or after it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, compilers, matching, ratio, tracing
from optax_accum._core.arithmetic import Tree, Weight
from optax_accum._core.parts import Parts
from optax_accum._core.weighing import Index, Weighing


class Contribution(NamedTuple):
    """One micro-batch, differentiated."""

    loss: jax.Array  # [], as it was scaled, in at least float32
    backward: "Backward"
    parts: Parts  # what `fun` returned; the count of a Ratio is checked


def contribution(
    fun: Callable[[Tree], Parts],
    params: Tree,
    weighing: Weighing,
    index: Index,
    check_loss: Callable[[jax.Array], None],
) -> Contribution:
    """Differentiates a micro-batch: runs `fun(params)` forward, with its loss scaled as it is weighed."""

    def scaled(params: Tree) -> tuple[jax.Array, Parts]:
        parts = fun(params)
        parts = parts._replace(loss=ratio.checked(parts.loss))
        check_loss(jnp.asarray(sum(jax.tree.leaves(ratio.totals(parts.loss)))))
        return weighing.scaled(parts.loss, index), parts

    loss, backward, parts = jax.vjp(scaled, params, has_aux=True)
    return Contribution(loss, Backward(backward, loss, params), parts)


class Backward:
    """The backward pass of a loss, whose parameters may be integers: they get no reference, and a float0 gradient."""

    def __init__(self, backward: Any, loss: jax.Array, params: Tree):
        self.backward, self.one, self.params = backward, jnp.ones_like(loss), params
        self.grads: Tree | None = None  # once they are written

    def gradient(self) -> Tree:
        """Returns the gradient; asked twice, the same."""
        if self.grads is None:
            (self.grads,) = self.backward(self.one)
        return self.grads

    def add_to(self, refs: Tree, weight: Weight = 1.0) -> None:
        """Adds `weight` times the gradient to references, where each part of it arises.

        An accumulator has one for each inexact parameter.
        """
        refs = arithmetic.like_gradients(self.params, refs)
        self.backward.with_refs(refs)(self.one * jnp.asarray(weight, self.one.dtype))


def add_to(
    acc: Tree,
    run: Callable[[], tuple[Backward, Any]],
    weight: Weight,
    first: jax.Array,
    *,
    in_place: bool,
    vary: Callable[[Tree], Tree],
) -> tuple[Tree, Any]:
    """Returns `acc + weight * gradient`, or `weight * gradient` where `first`, and what `run` gives beside it.

    What weighs nothing is not run, for its loss is often 0 / 0: what comes beside it is zeros. `vary` is that of the
    device.
    """

    def begun() -> Tree:
        if in_place:
            return compilers.zeroed(acc, first)
        return jax.tree.map(lambda total: jnp.where(first, jnp.zeros_like(total), total), acc)  # has a derivative

    start = begun() if in_place else acc

    def added() -> tuple[Tree, Any]:
        backward, beside = run()
        if not in_place:
            return arithmetic.add(start, backward.gradient(), weight, first), vary(beside)
        backward.one, ready = compilers.ready_together(backward.one, start)
        refs = jax.tree.map(jax.new_ref, ready)
        backward.add_to(refs, weight)
        return jax.tree.map(jax.freeze, refs), vary(beside)

    def unrun() -> tuple[Tree, Any]:
        beside = arithmetic.zeros_of(jax.eval_shape(lambda: run()[1]))
        return start if in_place else begun(), vary(beside)

    counts = tracing.known(weight != 0)
    if isinstance(counts, bool):
        return added() if counts else unrun()
    return compilers.branch(counts, added, unrun)


def adds_in_place(asked: bool | None, params: Tree, acc: Tree, differentiated: Callable[[], Backward]) -> bool:
    """Returns whether gradients are added inside the backward pass; raises where that is asked for in vain."""
    path = matching.narrower(params, acc)
    if asked and path is not None:
        raise TypeError(
            "in_place=True needs accumulators in the dtype of the parameters, for JAX adds a gradient only into an "
            f"array of its own dtype: at {path} they differ (parameters {arithmetic.dtypes(params)}, accumulators "
            f"{arithmetic.dtypes(acc)}). Leave in_place=None, or name the parameters' dtype as accumulator_dtype "
            "(its sums stall)."
        )
    if asked is False or path is not None:
        return False
    why_not = compilers.why_not_in_place(lambda: differentiated().add_to(jax.tree.map(jax.new_ref, acc)))
    if asked and why_not:
        raise TypeError(f"in_place=True {why_not}. Leave in_place=None.")
    return why_not is None


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
