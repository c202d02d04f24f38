"""The forms of operations on sums over rows: a table of those that do more than the registry says.

A rule takes an operation and the forms of its operands, and returns the form of the result; None if separate rows stay
separate and nothing else is known, as for an operation without a rule.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_accum._core.compilers import varying_axes
from optax_accum._core.equations import collective_axes
from optax_accum._rows.analysis import FormAnalysis
from optax_accum._rows.forms import NONE, Form, Reason, Sum, added, failed, name_of, power
from optax_accum._rows.pairing import paired_inside
from optax_accum._rows.program import Equation, Value
from optax_accum._rows.registry import known

Rule = Callable[[FormAnalysis, Equation, Sequence[Form]], Form | None]


def _linear(places: Collection[int]) -> Rule:
    """The rule of an operation that is linear in these operands together."""

    def rule(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
        others = [form for place, form in enumerate(forms) if place not in places]
        if not all(form.is_plain for form in others):
            return None
        return added([forms[place] for place in sorted(places) if place < len(forms)]).because(
            *(reason for form in others for reason in form.reasons)
        )

    return rule


def _cast(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    is_inexact = [jnp.issubdtype(value.aval.dtype, jnp.inexact) for value in (equation.ins[0], equation.outs[0])]
    return None if is_inexact == [True, False] else forms[0]


def _sum(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form:
    return added(forms)


def _from_devices(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    """Values of other devices, moved or added: of no one count, where each device may have a count of its own.

    Types tell that devices have the same count in a `jax.shard_map` that checks them: what it adds is invariant then.
    """
    counts = [by for form in forms for term in form.terms for by, _ in term.powers if isinstance(by, Sum)]
    tells = equation.name == "psum_invariant"
    axes = collective_axes(equation.single)
    for by in (by for by in counts if not (tells and _is_alike(analysis, by.value, axes))):
        (term, *_) = analysis.form(analysis.count_of.get(by.value, by.value)).sums
        text = f"{equation.name} of what a {name_of(term)} divides: each device may have another"
        return added(forms).because(Reason(text, equation.place))
    return added(forms)


def _is_alike(analysis: FormAnalysis, value: Value, axes: Sequence[str]) -> bool:
    """Whether a value is the same on all devices along axes of a `jax.shard_map` whose types tell that."""
    if not analysis.along:
        return False
    inputs = analysis.inputs.get(value, frozenset())
    return varying_axes(value.aval).union(*(analysis.along[place] for place in inputs)).isdisjoint(axes)


def _product(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    for place, other in enumerate(forms):
        form, scalar = forms[1 - place], analysis.scalar(equation.ins[place])
        if not other.sums:
            scaled = [form.times(term.powers, term.hides) for term in other.terms]
            return added(scaled).because(*form.reasons, *other.reasons)
        if form.sums and scalar is not None:
            return form.times(scalar).because(*other.reasons)
    if not all(form.sums for form in forms):
        return None
    text = "a {} times another {}".format(*(name_of(form.sums[0]) for form in forms))
    return failed(forms, Reason(text, equation.place, is_certain=True))


def _quotient(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    (form, by), value = forms, equation.ins[1]
    is_power = len(by.terms) == 1 and not by.sums
    scalar = by.terms[0].powers if is_power else analysis.scalar(value)
    if scalar is not None and jnp.issubdtype(value.aval.dtype, jnp.inexact):
        return form.times(power(scalar, -1)).because(*by.reasons)
    if not by.sums or not jnp.issubdtype(value.aval.dtype, jnp.inexact):
        return None
    text, place = f"divided by a {name_of(by.sums[0])} and something else", by.sums[0].sources[0].place
    if value.aval.size > 1:
        text = f"each entry is divided by a {name_of(by.sums[0])} of its own"
    if value in analysis.of_params:
        text = f"divided by a {name_of(by.sums[0])} that the model decides: return a Ratio of the two sums"
    is_count = value.aval.size == 1 and value in analysis.of_params and value not in analysis.levels.differentiable
    return Form().because(*form.reasons, *by.reasons, Reason(text, place, True, unless_weighed=is_count))


def _compared(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    """A comparison: whether there is a row, as there is, or whether a number is finite, as a quotient of sums is."""
    value, other = equation.ins
    if equation.name == "gt" and analysis.is_count(value) and analysis.literal(other) == 0:
        return Form()
    is_nan, is_infinite = equation.name == "ne" and value is other, analysis.literal(other) in (np.inf, -np.inf)
    if value.aval.size == 1 and (is_nan or (equation.name == "eq" and is_infinite)):
        analysis.finite[equation.outs[0]] = analysis.original(value)
        return Form()
    return None


def _tested(analysis: FormAnalysis, index: Value) -> tuple[Value, int | None] | None:
    """What a choice asks, a count or if a number is finite; and the case of a count that is not zero, or a number."""
    if index in analysis.finite:
        return analysis.finite[index], 0
    count = analysis.count_under(index)
    return None if count is None else (count, analysis.function([(index, 1)]).case)


def _chosen(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    """A choice by row; or in place of a quotient whose denominator is zero, if the other case is a number."""
    index, *cases = equation.ins
    tested = _tested(analysis, index)
    if tested is None:
        return _linear(range(1, len(forms)))(analysis, equation, forms)
    left = [place for place, value in enumerate(cases) if not analysis.is_fixed(value)]
    return _hidden(analysis, equation, tested, cases[left[0]]) if left == [tested[1]] else None


def _branched(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    """A branch by a test whether a denominator is zero, if the other branch returns a number."""
    index, *operands = equation.ins
    tested = _tested(analysis, index)
    if tested is None or tested[1] is None or len(equation.single.params["branches"]) != 2 or len(equation.outs) != 1:
        return None
    outputs = [analysis.inside(program, operands) for program in paired_inside(equation)]
    other, value = outputs[1 - tested[1]], outputs[tested[1]]
    if other is None or value is None or not analysis.is_fixed(other):
        return None
    return _hidden(analysis, equation, tested, value)


def _hidden(analysis: FormAnalysis, equation: Equation, tested: tuple[Value, Any], value: Value) -> Form | None:
    """A quotient that a number replaces if what is tested says that its denominator is zero."""
    form = analysis.form(value)
    bases = [by.value for term in form.terms for by, _ in term.powers if isinstance(by, Sum)]
    asked = {analysis.original(value), *map(analysis.count_under, bases)}
    return form.times(NONE, [equation]) if tested[0] in asked else None


RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "add_any", "sub"), _sum),
    **dict.fromkeys(("mul", "dot_general", "conv_general_dilated"), _product),
    **dict.fromkeys(("eq", "ne", "gt", "ge", "lt", "le"), _compared),
    **dict.fromkeys(("psum", "psum_invariant", "ppermute", "pbroadcast", "reduce_scatter"), _from_devices),
    **dict.fromkeys(("all_to_all", "all_gather", "all_gather_invariant", "all_gather_reduced"), _from_devices),
    "convert_element_type": _cast,
    "cond": _branched,
    "div": _quotient,
    "select_n": _chosen,
}


def rule_of(equation: Equation) -> Rule | None:
    """The rule of an operation: its own, or that of one that is linear in some operands."""
    groups = known(equation.name).linear_groups(equation.single)
    return RULES.get(equation.name) or (_linear(groups[0]) if groups else None)
