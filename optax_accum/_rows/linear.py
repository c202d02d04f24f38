"""Whether a derivative that the user wrote is linear in the cotangents: a clip is not, nor a term that it adds.

Rows of a micro-batch meet cotangents of another size than in the whole batch, so only a linear rule gives its part.
"""

import enum
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_accum._core import compilers
from optax_accum._core.equations import all_equations
from optax_accum._rows import locality


class Sort(enum.IntEnum):
    """How a value depends on the cotangents."""

    ZERO = 0
    LINEAR = 1
    FIXED = 2  # does not depend on them
    OTHER = 3


Sorts = list[Sort]
_Rule = Callable[[Sorts], Sort]


def nonlinear_rules(eqn: Any) -> Iterator[Any]:
    """Yields the functions, in an equation and inside it, with a backward pass by the user that is not linear."""
    inside = (inner for program in _programs(eqn) for inner in all_equations(program))
    for each in (eqn, *inside):
        if each.primitive.name.startswith("custom_vjp_call") and not _is_linear(each):
            yield each


def _programs(eqn: Any) -> list[Any]:
    keys = ("jaxpr", "call_jaxpr", "cond_jaxpr", "body_jaxpr")
    programs = [eqn.params[key] for key in keys if key in eqn.params]
    if eqn.primitive.name.startswith("custom_vjp_call"):
        return []
    return [compilers.opened(program)[0] for program in (*programs, *eqn.params.get("branches", ()))]


def _is_linear(eqn: Any) -> bool:
    backward = locality.traced_derivative(eqn, locality.backward)
    count = len(backward.jaxpr.invars) - len(eqn.invars)
    sorts = [Sort.FIXED] * len(eqn.invars) + [Sort.LINEAR] * count
    return all(sort in (Sort.ZERO, Sort.LINEAR) for sort in _sorts(backward, sorts))


def _sorts(program: Any, sorts: Sorts) -> Sorts:
    jaxpr, _ = compilers.opened(program)
    env = dict(zip(jaxpr.invars, sorts, strict=True)) | dict.fromkeys(jaxpr.constvars, Sort.FIXED)

    def read(atom: Any) -> Sort:
        if isinstance(atom, core.Literal):
            return Sort.FIXED if np.any(np.asarray(atom.val)) else Sort.ZERO
        return env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _of_equation(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def _of_equation(eqn: Any, ins: Sorts) -> Sorts:
    name, params = eqn.primitive.name, eqn.params
    if name in _RULES:
        outs = [_RULES[name](ins)] * len(eqn.outvars)
    elif all(sort in (Sort.ZERO, Sort.FIXED) for sort in ins):
        return [Sort.FIXED] * len(eqn.outvars)
    elif name == "scan":
        outs = _of_scan(eqn, ins)
    elif name in ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"):
        outs = _sorts(params["jaxpr" if "jaxpr" in params else "call_jaxpr"], ins)
    else:
        outs = [Sort.OTHER] * len(eqn.outvars)

    def exact(var: Any) -> Any:
        return not jnp.issubdtype(var.aval.dtype, jnp.inexact)

    return [
        Sort.OTHER if sort is Sort.LINEAR and exact(var) else sort for var, sort in zip(eqn.outvars, outs, strict=True)
    ]


def _of_scan(eqn: Any, ins: Sorts) -> Sorts:
    consts, carried = compilers.sizes_of_scan(eqn)
    carry = ins[consts : consts + carried]
    while True:
        outs = _sorts(eqn.params["jaxpr"], [*ins[:consts], *carry, *ins[consts + carried :]])
        joined = [_together([a, b]) for a, b in zip(carry, outs[:carried], strict=True)]
        if joined == carry:
            return [*carry, *outs[carried:]]
        carry = joined


def _together(ins: Sorts) -> Sort:
    """An operation that is linear in all of its operands together."""
    sorts = {sort for sort in ins if sort is not Sort.ZERO} or {Sort.ZERO}
    return sorts.pop() if len(sorts) == 1 else Sort.OTHER


def _first(ins: Sorts) -> Sort:
    """An operation that is linear in the first operand, if the others do not depend on the cotangents."""
    return ins[0] if all(sort in (Sort.ZERO, Sort.FIXED) for sort in ins[1:]) else Sort.OTHER


def _product(ins: Sorts) -> Sort:
    if Sort.ZERO in ins:
        return Sort.ZERO
    return max(ins) if Sort.OTHER in ins or Sort.LINEAR not in ins else _of_one(ins)


def _of_one(ins: Sorts) -> Sort:
    return Sort.LINEAR if ins.count(Sort.LINEAR) == 1 else Sort.OTHER


def _chosen(ins: Sorts) -> Sort:
    return _together(ins[1:]) if ins[0] in (Sort.ZERO, Sort.FIXED) else Sort.OTHER


def _scattered(ins: Sorts) -> Sort:
    return _together([ins[0], ins[-1]]) if ins[1] in (Sort.ZERO, Sort.FIXED) else Sort.OTHER


_FIRST = """
    broadcast_in_dim convert_element_type copy copy_p cumsum div dynamic_slice gather imag neg real reduce_precision
    reduce_sum reduce_window_sum reshape rev slice split squeeze transpose
"""
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_FIRST.split(), _first),
    **dict.fromkeys(("add", "add_any", "sub", "concatenate", "pad"), _together),
    **dict.fromkeys(("mul", "dot_general", "conv_general_dilated"), _product),
    **dict.fromkeys(("scatter-add", "scatter_add"), _scattered),
    "dynamic_update_slice": lambda ins: _together(ins[:2]) if set(ins[2:]) <= {Sort.ZERO, Sort.FIXED} else Sort.OTHER,
    "select_n": _chosen,
}
