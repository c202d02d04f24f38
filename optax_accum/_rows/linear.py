"""Whether a derivative that the user wrote is linear in the cotangents: a clip is not, nor a term that it adds.

Rows of a micro-batch meet cotangents of another size than in the whole batch, so only a linear rule gives its part.
"""

import enum
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_accum._core import compilers, evaluation
from optax_accum._core.equations import CALLS, CHECKPOINTS, programs_of
from optax_accum._rows import derivatives, perturbation
from optax_accum._rows.perturbation import Perturbed
from optax_accum._rows.registry import known


class Dependence(enum.IntEnum):
    """How a value depends on the cotangents."""

    ZERO = 0
    LINEAR = 1
    FIXED = 2  # does not depend on them
    OTHER = 3


Dependences = list[Dependence]


def nonlinear_rules(eqn: Any, perturbed: Perturbed = None) -> Iterator[Any]:
    """Yields the functions, in an equation and inside it, with a backward pass by the user that is not linear.

    `perturbed`: which operands a derivative perturbs.
    """
    if eqn.primitive.name.startswith("custom_vjp_call"):
        if not _is_linear(eqn, perturbed):
            yield eqn
        return
    for inside in programs_of(eqn):
        there = perturbation.of_inputs(inside, perturbed)
        for inner, perturbed_inside in perturbation.each_equation(inside.program, there):
            yield from nonlinear_rules(inner, perturbed_inside)


def _is_linear(eqn: Any, perturbed: Perturbed) -> bool:
    try:
        backward = derivatives.traced_derivative(eqn, derivatives.backward, perturbed)
    except Exception:  # a rule may refuse to be asked: then nothing is known of it
        return False
    count = len(backward.jaxpr.invars) - len(eqn.invars)
    found = [Dependence.FIXED] * len(eqn.invars) + [Dependence.LINEAR] * count
    return all(each in (Dependence.ZERO, Dependence.LINEAR) for each in _dependences(backward, found))


def _dependences(program: Any, found: Dependences) -> Dependences:
    jaxpr, _ = compilers.opened(program)
    env = dict(zip(jaxpr.invars, found, strict=True)) | dict.fromkeys(jaxpr.constvars, Dependence.FIXED)
    number = lambda literal: Dependence.FIXED if np.any(np.asarray(literal.val)) else Dependence.ZERO
    return evaluation.in_order(jaxpr.eqns, env, jaxpr.outvars, _follow, number)


def _follow(eqn: Any, ins: Dependences) -> Dependences:
    if eqn.primitive.name in (*CALLS, *CHECKPOINTS, "scan"):
        (inside,) = programs_of(eqn)
        taken, outs = inside.followed(ins, _dependences, _together)
        carry = taken[inside.carried]
        outs = [*carry, *outs[len(carry) :]]
    else:
        outs = [_follow_operation(eqn, ins)] * len(eqn.outvars)
    exact = lambda var: not jnp.issubdtype(var.aval.dtype, jnp.inexact)
    return [
        Dependence.OTHER if each is Dependence.LINEAR and exact(var) else each
        for var, each in zip(eqn.outvars, outs, strict=True)
    ]


def _together(*ins: Dependence) -> Dependence:
    """An operation that is linear in all of its operands together."""
    found = {each for each in ins if each is not Dependence.ZERO} or {Dependence.ZERO}
    return found.pop() if len(found) == 1 else Dependence.OTHER


def _follow_operation(eqn: Any, ins: Dependences) -> Dependence:
    """The result of an operation that is linear in some of its operands, if the others are fixed."""
    zero = {place for place, each in enumerate(ins) if each is Dependence.ZERO}
    fixed = {place for place, each in enumerate(ins) if each is Dependence.FIXED}
    groups = known(eqn.primitive.name).linear_groups(eqn)
    if any(group <= zero for group in groups):
        return Dependence.ZERO
    if len(zero) + len(fixed) == len(ins):
        return Dependence.FIXED
    linear = {place for place, each in enumerate(ins) if each is Dependence.LINEAR}
    is_linear = any(linear <= group <= linear | zero for group in groups)
    return Dependence.LINEAR if is_linear and Dependence.OTHER not in ins else Dependence.OTHER
