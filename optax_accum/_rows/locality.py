"""Whether an equation treats rows one by one, with the programs inside it: loops, branches, users' derivatives."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_accum._core import compilers
from optax_accum._core.equations import all_equations, inner_programs
from optax_accum._rows import primitives
from optax_accum._rows.traces import COUPLED, OtherProgramError, Rows, View, axis_of, in_step, view_of

_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr", "cond_jaxpr", "body_jaxpr")


def is_local(view: View) -> bool:
    """Whether an equation treats rows one by one, so that it may be evaluated for some of them."""
    if COUPLED in view.ins or COUPLED in view.outs or not view.has_rows or None in view.outs:
        return False
    rule = NESTED.get(view.name) or primitives.LOCAL.get(view.name)
    return rule is not None and primitives.same_numbers(view) and rule(view)


def is_partial(view: View) -> bool:
    """Whether an equation reduces over rows, and parts can be reduced separately, then joined."""
    if COUPLED in view.ins or not view.has_rows or any(axis is not None for axis in view.outs):
        return False
    rule = primitives.PARTIAL.get(view.name)
    return rule is not None and primitives.same_numbers(view) and rule(view)


def is_alike(view: View) -> bool:
    """Whether an equation without rows makes rows that are all alike."""
    rule = primitives.ALIKE.get(view.name)
    return rule is not None and view.outs[0] not in (None, COUPLED) and rule(view)


def _is_call_local(view: View) -> bool:
    """Whether a function, a checkpoint, a branch or a `while` treats rows one by one, and so does its derivative."""
    if view.name == "cond" and view.ins[0] is not None:
        return False
    programs = programs_inside(view.single, view.double)
    return (
        bool(programs)
        and all(are_local(*pair, view.rows, view.asks_rules) for pair in programs)
        and _rule_is_local(view)
    )


def programs_inside(single: Any, double: Any) -> list[tuple[Any, Any]]:
    """The programs inside an equation, each for n rows and for 2 n."""
    pairs = [(single.params[key], double.params[key]) for key in _INNER if key in single.params]
    return pairs + list(zip(single.params.get("branches", ()), double.params.get("branches", ()), strict=True))


def _is_body_local(view: View) -> bool:
    return are_local(view.params["jaxpr"], view.double.params["jaxpr"], view.rows, view.asks_rules)


def _is_map_over_rows(view: View) -> bool:
    """Whether a loop goes over rows, without a carry from one to the next."""
    consts, carried = compilers.sizes_of_scan(view.single)
    body, of_double = (compilers.opened(eqn.params["jaxpr"])[0] for eqn in (view.single, view.double))
    alike = [var.aval for var in body.invars] == [var.aval for var in of_double.invars]
    over_rows = all(axis == 0 for axis in view.ins[consts:]) and not any(axis is not None for axis in view.ins[:consts])
    return not carried and alike and over_rows and all(axis == 0 for axis in view.outs)


def _is_scan_local(view: View) -> bool:
    """Whether a loop over layers or tokens treats rows one by one, or a loop over rows has no carry."""
    same = view.params["length"] == view.double.params["length"]
    return _is_body_local(view) if same else _is_map_over_rows(view)


_CALLS = (
    *("jit", "pjit", "closed_call", "checkpoint", "remat2", "cond", "while"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
)
NESTED: dict[str, primitives.Rule] = {"scan": _is_scan_local, **dict.fromkeys(_CALLS, _is_call_local)}


def are_local(single: Any, double: Any, rows: Rows, asks_rules: bool = True) -> bool:
    """Whether every equation of a program treats rows one by one, or takes none.

    `asks_rules`: the user's derivative rules must do so, too. A rule often calls its own function, so rules inside
    rules are not asked.
    """
    (of_single, consts), (of_double, double_consts) = compilers.opened(single), compilers.opened(double)
    if any(jnp.shape(a) != jnp.shape(b) for a, b in zip(consts, double_consts, strict=True)):
        return False
    try:
        return all(_is_free_or_local(a, b, rows, asks_rules) for a, b in in_step(of_single, of_double))
    except OtherProgramError:
        return False


def _is_free_or_local(single: Any, double: Any, rows: Rows, asks_rules: bool) -> bool:
    if not _same_literals(single, double):
        return False
    view = view_of(single, double, rows, asks_rules)
    if not view.has_rows and all(axis is None for axis in view.outs):
        # A rule for a parameter's gradient takes the whole gradient: in a loop it would get each micro-batch's.
        return primitives.same_numbers(view) and not (asks_rules and view.name.startswith("custom_vjp_call"))
    if view.name in NESTED:  # a result without rows, such as a counter, depends on none: all equations inside are local
        view = view._replace(outs=[axis for axis in view.outs if axis is not None])
    return is_local(view) or (not view.has_rows and is_alike(view))


def _same_literals(single: Any, double: Any) -> bool:
    """Whether the numbers in two equations are the same: 1 / n differs with the rows."""
    return all(_same_atom(a, b) for a, b in zip(single.invars, double.invars, strict=True))


def _same_atom(a: Any, b: Any) -> bool:
    if not (isinstance(a, core.Literal) and isinstance(b, core.Literal)):
        return isinstance(a, core.Literal) == isinstance(b, core.Literal)
    return np.array_equal(a.val, b.val, equal_nan=_moves(a))  # only inexact numbers can be NaN


def unknown(view: View) -> Iterator[str]:
    """Yields the primitives, in an equation and inside it, that take rows and are in no table."""
    pairs = programs_inside(view.single, view.double) if view.name in NESTED else []
    for single, double in pairs:
        try:
            for a, b in in_step(compilers.opened(single)[0], compilers.opened(double)[0]):
                yield from unknown(view_of(a, b, view.rows))
        except OtherProgramError:
            return
    tables = (NESTED, primitives.LOCAL, primitives.PARTIAL, primitives.ALIKE)
    if view.has_rows and not any(view.name in table for table in tables):
        yield view.name


# The user's derivative rules


def _rule_is_local(view: View) -> bool:
    """Whether the user's derivative of a function treats rows one by one; True if there is none."""
    if not view.asks_rules:
        return True
    if view.name == "custom_jvp_call":
        return are_local(*derivative_of(view.single, view.double, forward), view.rows, asks_rules=False)
    if view.name.startswith("custom_vjp_call"):
        return _adds_up(*derivative_of(view.single, view.double, backward), view.rows)
    return True


def has_backward(equation: Any) -> bool:
    """Whether an equation, or one inside it, has a backward pass by the user."""
    inner = (eqn for program in inner_programs(equation.single) for eqn in all_equations(program))
    return any(eqn.primitive.name.startswith("custom_vjp_call") for eqn in (equation.single, *inner))


def derivative_of(single: Any, double: Any, derivative: Callable[..., Any]) -> tuple[Any, Any]:
    """The traces of a derivative of two equations: functions of operands, and of tangents or cotangents."""
    return traced_derivative(single, derivative), traced_derivative(double, derivative)


def traced_derivative(eqn: Any, derivative: Callable[..., Any]) -> Any:
    values = [_shape(var) for var in eqn.invars]
    moving = [_shape(var) for var in (eqn.invars if derivative is forward else eqn.outvars) if _moves(var)]
    return jax.make_jaxpr(functools.partial(derivative, eqn))(values, moving)


def _shape(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, sharding=compilers.explicit_sharding(var.aval))


def _moves(var: Any) -> bool:
    """Whether a variable may have a derivative."""
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


def forward(eqn: Any, values: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The results of an equation and their tangents; an integer's tangent is zero."""
    fun, moving = _of_moving(eqn, values)
    outs, moved = jax.jvp(fun, moving, list(tangents))
    return outs, moved


def backward(eqn: Any, values: Sequence[Any], cotangents: Sequence[Any]) -> Any:
    """The cotangents of an equation's operands that may have a derivative."""
    fun, moving = _of_moving(eqn, values)
    outs, back = jax.vjp(fun, *moving)
    given = iter(cotangents)

    def none(leaf: Any) -> Any:
        return np.zeros(leaf.shape, jax.dtypes.float0)

    return back([next(given) if _moves(var) else none(leaf) for var, leaf in zip(eqn.outvars, outs, strict=True)])


def _of_moving(eqn: Any, values: Sequence[Any]) -> tuple[Callable[..., list[Any]], list[Any]]:
    """An equation as a function of the operands that may have a derivative, and these operands."""
    moves = list(map(_moves, eqn.invars))

    def fun(*moving: Any) -> list[Any]:
        rest = iter(moving)
        return list(compilers.bind(eqn, [next(rest) if m else v for v, m in zip(values, moves, strict=True)]))

    return fun, [value for value, m in zip(values, moves, strict=True) if m]


_LINEAR = {
    "add",
    "add_any",
    "broadcast_in_dim",
    "convert_element_type",
    "neg",
    "reshape",
    "squeeze",
    "sub",
    "transpose",
}


def _adds_up(single: Any, double: Any, rows: Rows) -> bool:
    """Whether a derivative, computed for some rows at a time, adds up to the derivative of all rows.

    An output with rows must be computed row by row; any other must be a sum over rows.
    """
    of_single, of_double = single.jaxpr, double.jaxpr
    sums: set[Any] = set()  # variables that are sums over rows
    zeros: set[Any] = set()
    for a, b in in_step(of_single, of_double):
        view = view_of(a, b, rows)
        variables = [atom for atom in a.invars if not isinstance(atom, core.Literal)]
        of_sums = [var in sums for var in variables]
        if a.primitive.name in ("jit", "pjit") and not any(of_sums):
            if not are_local(a.params["jaxpr"], b.params["jaxpr"], rows, asks_rules=False):
                return False
        elif any(of_sums):
            makes_rows = any(axis is not None for axis in view.outs)
            at = next(i for i, atom in enumerate(a.invars) if isinstance(atom, core.Var) and atom in sums)
            scales = sum(of_sums) == 1 and (a.primitive.name == "mul" or (a.primitive.name == "div" and at == 0))
            linear = a.primitive.name in _LINEAR and all(of_sums)
            if view.has_rows or makes_rows or not (linear or scales):
                return False
            if not all(map(_moves, a.outvars)):
                return False  # rounded to integers
            sums.update(a.outvars)
        elif is_partial(view) and a.primitive.name in ("reduce_sum", "dot_general", "scatter-add"):
            sums.update(a.outvars)
        elif not _is_free_or_local(a, b, rows, asks_rules=False):
            return False
        elif a.primitive.name == "broadcast_in_dim" and isinstance(a.invars[0], core.Literal) and not a.invars[0].val:
            zeros.update(a.outvars)
    outputs = list(zip(of_single.outvars, of_double.outvars, strict=True))
    return all(_may_leave(a, b, sums | zeros, rows) for a, b in outputs)


def _may_leave(single: Any, double: Any, sums: set[Any], rows: Rows) -> bool:
    if single.aval.dtype == jax.dtypes.float0:
        return True
    axis = axis_of(single.aval, double.aval, rows)
    if isinstance(single, core.Literal):
        return not np.any(single.val)
    return axis not in (None, COUPLED) or single in sums
