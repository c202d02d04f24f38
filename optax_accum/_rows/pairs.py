"""Values for each pair of rows that are sums of values of single rows: `f[:, None] + g[None]`.

The mean over all pairs of such a sum is the mean of `f` plus that of `g`: rows are compared with all rows, and nothing
comes of it. A value is kept as its summands, by the axis along which each has its rows, as long as linear steps follow.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from optax_accum._rows.constants import growing
from optax_accum._rows.forms import ROWS, Form, added, power, summed
from optax_accum._rows.orders import OWN, Orders
from optax_accum._rows.program import Equation, Value
from optax_accum._rows.registry import known
from optax_accum._rows.traces import COUPLED

Summands = dict[int | None, Form]  # by the axis of rows; None: the same for all pairs


class Pairs:
    """The values of a program that are sums of values of single rows; None where a reshape mixes pairs."""

    def __init__(self, orders: Orders, form_of: Callable[[Value], Form]):
        self.orders, self.form_of = orders, form_of
        self.summands: dict[Value, Summands | None] = {}

    def read(self, equation: Equation) -> bool:
        """Notes the result of an operation that is linear in summands; False if the operation is none."""
        if equation.differs or len(equation.outs) != 1:
            return False
        (result,), rows = equation.outs, [place for place, v in enumerate(equation.ins) if not self._is_shared(v)]
        if self.summands.keys().isdisjoint(equation.ins) and not self._begins(equation, rows):
            return False
        if rows and self.orders.neutral.issuperset(equation.ins[place] for place in rows):
            return False
        if not all(self._is_sum(equation.ins[place]) for place in rows):
            return False
        if not any(set(rows) <= set(group) for group in known(equation.name).linear_groups(equation.single)):
            return False
        self.summands[result] = self._of(equation, rows)
        return True

    def _begins(self, equation: Equation, rows: Sequence[int]) -> bool:
        """Whether an operation makes pairs, or adds one sum over rows to each row; a slice of rows makes no pairs."""
        if len(_growing_result(equation)) > 1:
            return equation.name in _RULES
        is_added = equation.name in ("add", "sub") and equation.outs[0].axis != COUPLED
        return is_added and bool(rows) and any(v.axis is None and self.form_of(v).sums for v in equation.ins)

    def _is_shared(self, value: Value) -> bool:
        """Whether all rows, or pairs, have the same of a value."""
        if value in self.summands:
            return set(self.summands[value] or ()) == {None}
        return value.axis is None or value in self.orders.alike

    def _is_sum(self, value: Value) -> bool:
        """Whether a value is a sum of values of single rows; no row decides a constant matrix."""
        is_of_rows = value.axis != COUPLED and self.orders.order(value) == OWN and not self.form_of(value).sums
        return value in self.summands or value in self.orders.neutral or is_of_rows

    def _of(self, equation: Equation, rows: Sequence[int]) -> Summands | None:
        operands: list[Summands] = []
        for place, value in enumerate(equation.ins):
            summands = self.summands.get(value)
            if summands is None and place in rows and (value in self.summands or value.axis == COUPLED):
                return None
            operands.append(summands or {value.axis if place in rows else None: self.form_of(value)})
        rule = _RULES.get(equation.name)
        n, m = equation.rows
        of_result, of_double = (each.outvars[0].aval.shape for each in (equation.single, equation.double))
        if rule is None or any(of_result[axis] * m != of_double[axis] * n for axis in _growing_result(equation)):
            return None
        return rule(equation, operands)


def _growing_result(equation: Equation) -> list[int]:
    return growing(equation.single.outvars[0], equation.double.outvars[0])


def _sum(equation: Equation, operands: Sequence[Summands]) -> Summands:
    axes = dict.fromkeys(axis for summands in operands for axis in summands)
    return {axis: added(summands[axis] for summands in operands if axis in summands) for axis in axes}


def _same(equation: Equation, operands: Sequence[Summands]) -> Summands | None:
    is_inexact = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in (*equation.ins, *equation.outs)]
    return None if is_inexact == [True, False] else operands[0]


def _scaled(equation: Equation, operands: Sequence[Summands]) -> Summands | None:
    """A product with a power of the number of rows, or with a number; or a quotient."""
    sign = -1 if equation.name == "div" else 1
    by, summands = sorted(operands, key=lambda summands: set(summands) != {None}) if sign > 0 else operands[::-1]
    if set(by) != {None} or by[None].sums or len(by[None].terms) != 1:
        return None
    if sign < 0 and not jnp.issubdtype(equation.outs[0].aval.dtype, jnp.inexact):
        return None
    (term,), reasons = by[None].terms, by[None].reasons
    powers = power(term.powers, sign)
    return {axis: form.times(powers, term.hides).because(*reasons) for axis, form in summands.items()}


def _moved(to: Callable[[Equation], Mapping[int, int]]) -> Callable[[Equation, Sequence[Summands]], Summands]:
    def rule(equation: Equation, operands: Sequence[Summands]) -> Summands:
        axes: Mapping[Any, Any] = {None: None, **to(equation)}
        return {axes[axis]: form for axis, form in operands[0].items()}

    return rule


def _reduced(equation: Equation, operands: Sequence[Summands]) -> Summands:
    """A sum over axes: a part adds up over its rows, and as often as there are rows along each other axis."""
    over = equation.single.params["axes"]
    rows = set(over).intersection(growing(equation.single.invars[0], equation.double.invars[0]))
    left = [axis for axis in range(equation.ins[0].aval.ndim) if axis not in over]
    found: dict[int | None, list[Form]] = {}
    for axis, form in operands[0].items():
        times = len(rows - {axis})
        form = summed(form, equation) if axis in rows else form
        form = form.times(frozenset([(ROWS, times)] if times else []))
        found.setdefault(left.index(axis) if axis in left else None, []).append(form)
    return {axis: added(forms) for axis, forms in found.items()}


_RULES: dict[str, Callable[[Equation, Sequence[Summands]], Summands | None]] = {
    **dict.fromkeys(("add", "add_any", "sub"), _sum),
    **dict.fromkeys(("neg", "copy", "convert_element_type", "stop_gradient"), _same),
    **dict.fromkeys(("mul", "div"), _scaled),
    "broadcast_in_dim": _moved(lambda equation: dict(enumerate(equation.single.params["broadcast_dimensions"]))),
    "transpose": _moved(lambda equation: {old: new for new, old in enumerate(equation.single.params["permutation"])}),
    "reduce_sum": _reduced,
}
