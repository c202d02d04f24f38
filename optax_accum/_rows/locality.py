"""Whether an equation treats rows one by one, with the programs inside it: a scan over layers of `tanh(h @ w)` does."""

from collections.abc import Iterator, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_accum._core import compilers
from optax_accum._core.equations import programs_of
from optax_accum._core.folds import SUM
from optax_accum._rows import perturbation
from optax_accum._rows.derivatives import backward, derivative_of, forward
from optax_accum._rows.perturbation import Perturbed
from optax_accum._rows.registry import is_known, known, register
from optax_accum._rows.traces import COUPLED, OtherProgramError, Rows, View, axis_of, in_step, view_of


def is_local(view: View) -> bool:
    """Whether an equation treats rows one by one, so that it may be evaluated for some of them."""
    if COUPLED in view.ins or COUPLED in view.outs or not view.has_rows or None in view.outs:
        return False
    return view.has_same_numbers and known(view.name).local(view)


def is_partial(view: View) -> bool:
    """Whether an equation reduces over rows, and parts can be reduced separately, then joined."""
    if COUPLED in view.ins or not view.has_rows or view.makes_rows:
        return False
    return view.has_same_numbers and known(view.name).partial.rule(view)


def is_alike(view: View) -> bool:
    """Whether an equation without rows makes rows that are all alike."""
    if view.has_rows or not view.outs or not {None, COUPLED}.isdisjoint(view.outs):
        return False
    return view.has_same_numbers and known(view.name).alike(view)


def is_positional(view: View) -> bool:
    """Whether an equation without rows makes rows, each by its place."""
    positional = known(view.name).positional
    if positional is None or view.has_rows or not {None, COUPLED}.isdisjoint(view.outs):
        return False
    return view.has_same_numbers and positional.rule(view)


def programs_inside(single: Any, double: Any) -> list[tuple[Any, Any]]:
    """The programs inside an equation, each for n rows and for 2 n."""
    pairs = zip(programs_of(single), programs_of(double), strict=True)
    return [(ours.program, others.program) for ours, others in pairs]


def _is_call_local(view: View) -> bool:
    """Whether a function, a checkpoint, a branch or a `while` treats rows one by one, and so does its derivative."""
    if view.name == "cond" and view.ins[0] is not None:
        return False
    return bool(programs_of(view.single)) and _are_inside_local(view) and _rule_is_local(view)


def _is_scan_local(view: View) -> bool:
    """Whether a loop over layers or tokens treats rows one by one, or a loop over rows has no carry."""
    if view.params["length"] != view.double.params["length"]:
        return _is_map_over_rows(view)
    return _are_inside_local(view)


def _is_map_over_rows(view: View) -> bool:
    """Whether a loop goes over rows, without a carry from one to the next.

    Its body sees one row, so nothing in it may grow with the number of rows.
    """
    consts, carried = compilers.sizes_of_scan(view.single)
    alike = are_rowless(view.params["jaxpr"], view.double.params["jaxpr"], view.rows, view.asks_rules)
    over_rows = all(axis == 0 for axis in view.ins[consts:]) and not any(axis is not None for axis in view.ins[:consts])
    return not carried and alike and over_rows and all(axis == 0 for axis in view.outs)


CALLS = "jit pjit closed_call checkpoint remat2 cond while custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr"
NESTED = frozenset(f"scan {CALLS}".split())
register("scan", local=_is_scan_local)
register(CALLS, local=_is_call_local)


def _are_inside_local(view: View) -> bool:
    return all(
        are_local(a.program, b.program, view.rows, view.asks_rules, perturbation.of_inputs(a, view.perturbed))
        for a, b in zip(programs_of(view.single), programs_of(view.double), strict=True)
    )


def are_local(single: Any, double: Any, rows: Rows, asks_rules: bool = True, perturbed: Perturbed = None) -> bool:
    """Whether every equation of a program treats rows one by one, or takes none.

    `asks_rules`: the user's derivative rules must do so, too. A rule often calls its own function, so rules inside
    rules are not asked. `perturbed`: which operands a derivative may perturb; None: all.
    """
    (of_single, consts), (of_double, double_consts) = compilers.opened(single), compilers.opened(double)
    if list(map(jnp.shape, consts)) != list(map(jnp.shape, double_consts)):
        return False
    try:
        for (a, b), (_, inner) in zip(
            in_step(of_single, of_double), perturbation.each_equation(of_single, perturbed), strict=True
        ):
            if not is_local_inside(view_of(a, b, rows, asks_rules)._replace(perturbed=inner)):
                return False
    except OtherProgramError:
        return False
    return True


def is_local_inside(view: View) -> bool:
    """Whether an equation of a body treats rows one by one, or has nothing to do with them."""
    if not _same_literals(view.single, view.double):
        return False
    if not view.has_rows and not view.makes_rows:
        return _is_rowless(view)
    if view.name in NESTED:  # a result without rows, such as a counter, depends on none: all equations inside are local
        view = view._replace(outs=[axis for axis in view.outs if axis is not None])
    return is_local(view) or is_alike(view)


def _is_rowless(view: View) -> bool:
    """Whether an equation has nothing to do with rows: it is the same in both traces, to the last program inside it."""
    if view.has_rows or view.makes_rows or not _same_literals(view.single, view.double):
        return False
    # A rule for a parameter's gradient takes the whole gradient: in a loop it would get each micro-batch's.
    if view.asks_rules and _is_differentiated(view) and view.name.startswith("custom_vjp_call"):
        return False
    pairs = programs_inside(view.single, view.double)
    return view.has_same_sizes and all(are_rowless(*pair, view.rows, view.asks_rules) for pair in pairs)


def _is_differentiated(view: View) -> bool:
    return view.perturbed is None or any(view.perturbed)


def are_rowless(single: Any, double: Any, rows: Rows, asks_rules: bool = True) -> bool:
    """Whether two programs are the same, and have nothing to do with rows."""
    (of_single, _), (of_double, _) = compilers.opened(single), compilers.opened(double)
    variables = [[var.aval for var in (*each.constvars, *each.invars)] for each in (of_single, of_double)]
    try:
        pairs = list(in_step(of_single, of_double))
    except OtherProgramError:
        return False
    return variables[0] == variables[1] and all(_is_rowless(view_of(a, b, rows, asks_rules)) for a, b in pairs)


def _same_literals(single: Any, double: Any) -> bool:
    """Whether the numbers in two equations are the same: 1 / n differs with the rows."""
    return all(_same_atom(a, b) for a, b in zip(single.invars, double.invars, strict=True))


def _same_atom(a: Any, b: Any) -> bool:
    if not (isinstance(a, core.Literal) and isinstance(b, core.Literal)):
        return isinstance(a, core.Literal) == isinstance(b, core.Literal)
    return np.array_equal(a.val, b.val, equal_nan=perturbation.is_inexact(a))  # only inexact numbers can be NaN


def unknown(view: View) -> Iterator[str]:
    """Yields the primitives, in an equation and inside it, that take rows and are in no table."""
    pairs = programs_inside(view.single, view.double) if view.name in NESTED else []
    for single, double in pairs:
        try:
            for a, b in in_step(compilers.opened(single)[0], compilers.opened(double)[0]):
                yield from unknown(view_of(a, b, view.rows))
        except OtherProgramError:
            return
    if view.has_rows and not is_known(view.name):
        yield view.name


# The user's derivative rules


def _rule_is_local(view: View) -> bool:
    """Whether the user's derivative of a function treats rows one by one; True if there is none."""
    is_forward, is_backward = view.name == "custom_jvp_call", view.name.startswith("custom_vjp_call")
    if not (view.asks_rules and (is_forward or is_backward) and _is_differentiated(view)):
        return True
    try:
        traces = derivative_of_rule(view)
    except Exception:  # a rule may refuse to be asked: then nothing is known of it
        return False
    if is_forward:
        return are_local(*traces, view.rows, asks_rules=False)
    return adds_up(*traces, view.rows)


def derivative_of_rule(view: View) -> tuple[Any, Any]:
    """The traces, for n rows and for 2 n, of the derivative that a user wrote for an equation's function."""
    single, double, perturbed = view.single, view.double, view.perturbed
    if view.name == "custom_jvp_call":
        return derivative_of(single, double, forward, perturbed)
    try:
        return derivative_of(single, double, backward, perturbed)
    except Exception:  # under vmap, JAX refuses the cotangent of a result that rows share, such as a number of steps
        has_rows = [axis is not None for axis in view_of(single, double, view.rows).outs]
        return derivative_of(single, double, backward, perturbed, has_rows)


def adds_up(single: Any, double: Any, rows: Rows) -> bool:
    """Whether a derivative, computed for some rows at a time, adds up to the derivative of all rows.

    An output with rows must be computed row by row; any other must be a sum over rows.
    """
    of_single, of_double = single.jaxpr, double.jaxpr
    sums: set[Any] = set()  # variables that are sums over rows
    zeros: set[Any] = set()
    is_zero = lambda atom: not np.any(atom.val) if isinstance(atom, core.Literal) else atom in zeros
    is_sum = lambda atom: isinstance(atom, core.Var) and atom in sums
    try:
        pairs = list(in_step(of_single, of_double))
    except OtherProgramError:
        return False
    for a, b in pairs:
        view = view_of(a, b, rows, asks_rules=False)
        parts, nothing = ({at for at, atom in enumerate(a.invars) if is_(atom)} for is_ in (is_sum, is_zero))
        if follows(view, parts, nothing) if parts else makes_sum(view, nothing):
            sums.update(a.outvars)
        elif parts or not (is_local_inside(view) or (view.name in ("jit", "pjit") and _is_call_local(view))):
            return False
        elif keeps_zero(a, nothing):
            zeros.update(a.outvars)

    def may_leave(single: Any, double: Any) -> bool:
        if single.aval.dtype == jax.dtypes.float0 or is_zero(single):
            return True
        has_rows = axis_of(single.aval, double.aval, rows) not in (None, COUPLED)
        return has_rows or is_sum(single)

    return all(map(may_leave, of_single.outvars, of_double.outvars))


# Sums over rows, in parts: of which operands, by their places


def makes_sum(view: View, zeros: Set[int]) -> bool:
    """Whether an equation is a sum over rows, and of nothing else."""
    is_sum = is_partial(view) and known(view.name).partial.fold is SUM
    return is_sum and (not view.name.startswith("scatter") or 0 in zeros)


def follows(view: View, parts: Set[int], zeros: Set[int]) -> bool:
    """Whether an equation without rows is linear in the parts of sums that it takes: its result is a part, too."""
    if view.has_rows or view.makes_rows or not view.has_same_sizes:
        return False
    if not all(map(perturbation.is_inexact, (*(view.single.invars[at] for at in parts), *view.single.outvars))):
        return False  # rounded to integers, a sum is no sum
    return any(parts <= group <= parts | zeros for group in known(view.name).linear_groups(view.single))


def keeps_zero(equation: Any, zeros: Set[int]) -> bool:
    """Whether an equation takes zeros alone, and makes zeros."""
    return len(zeros) == len(equation.invars) and zeros in known(equation.primitive.name).linear_groups(equation)
