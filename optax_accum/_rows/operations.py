"""The forms of operations on sums over rows: a table of those that do more than the registry says.

A rule takes an operation and the forms of its operands, and returns the form of the result; None if separate rows stay
separate and nothing else is known, as for an operation without a rule.
"""

from collections.abc import Callable, Collection, Sequence

import jax.numpy as jnp
import numpy as np

from optax_accum._core.compilers import varying_axes
from optax_accum._core.equations import collective_axes
from optax_accum._rows.analysis import FormAnalysis
from optax_accum._rows.forms import NONE, Form, Reason, Sum, Term, Test, added, failed, name_of, power
from optax_accum._rows.pairing import paired_inside
from optax_accum._rows.program import Equation, Value
from optax_accum._rows.registry import known

LARGE = 1e6  # the smallest number that is taken for a bound which no denominator reaches
SMALL = 1e-3  # the largest number that keeps a mean of a mask from zero
ADDED = 1e-5  # the largest that may be added to a denominator for that: of ten tokens, a millionth

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


def _sum(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    """A sum, or a difference. Adding a small number, which keeps a denominator from zero, is a guard."""
    for place, value in enumerate(equation.ins):
        small = equation.name == "add" and analysis.is_small(equation.ins[1 - place], ADDED)
        if small and analysis.scalar(value) is not None:
            return _guarded(analysis, equation, place, forms)
    return added(forms)


def _from_devices(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    """Values of other devices, moved or added: of no one count, where each device may have a count of its own.

    Types tell that devices have the same count in a `jax.shard_map` that checks them: what it adds is invariant then.
    """
    counts = [by for form in forms for term in form.terms for by, _ in term.powers if isinstance(by, Sum)]
    tells = equation.name == "psum_invariant"
    axes = collective_axes(equation.single)
    for by in (by for by in counts if not (tells and _is_alike(analysis, by.value, axes))):
        (term, *_) = analysis.form(by.value).sums
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
    if equation.name == "mul":
        _scaled(analysis, equation, *equation.ins)
        _scaled(analysis, equation, *equation.ins[::-1])
    for place, other in enumerate(forms):
        form, scalar = forms[1 - place], analysis.scalar(equation.ins[place])
        if not other.sums:
            scaled = [form.times(term.powers, term.guards) for term in other.terms]
            return added(scaled).because(*form.reasons, *other.reasons)
        if form.sums and scalar is not None:
            return form.times(scalar, analysis.guards_of(equation.ins[place])).because(*other.reasons)
    if not all(form.sums for form in forms):
        return None
    text = "a {} times another {}".format(*(name_of(form.sums[0]) for form in forms))
    return failed(forms, Reason(text, equation.place, is_certain=True))


def _quotient(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    (form, by), value = forms, equation.ins[1]
    _scaled(analysis, equation, *equation.ins)
    is_power = len(by.terms) == 1 and not by.sums
    scalar = by.terms[0].powers if is_power else analysis.scalar(value)
    if scalar is not None and jnp.issubdtype(value.aval.dtype, jnp.inexact):
        guards = by.terms[0].guards if is_power else analysis.guards_of(value)
        return form.times(power(scalar, -1), guards).because(*by.reasons)
    if not by.sums or not jnp.issubdtype(value.aval.dtype, jnp.inexact):
        return None
    text, place = f"divided by a {name_of(by.sums[0])} and something else", by.sums[0].sources[0].place
    if value.aval.size > 1:
        text = f"each entry is divided by a {name_of(by.sums[0])} of its own"
    if value in analysis.of_params:
        text = f"divided by a {name_of(by.sums[0])} that the model decides: return a Ratio of the two sums"
    is_count = value.aval.size == 1 and value in analysis.of_params and value not in analysis.levels.differentiable
    return Form().because(*form.reasons, *by.reasons, Reason(text, place, True, unless_weighed=is_count))


def _scaled(analysis: FormAnalysis, equation: Equation, value: Value, number: Value) -> None:
    """Notes a count that is kept from zero, then multiplied by a number: it divides as without the number."""
    guard, (result,) = analysis.guard_of.get(value), equation.outs
    if guard is not None and result.aval.size == 1 and analysis.is_fixed(number):
        analysis.unscaled[result], analysis.guard_of[result] = value, guard


def _power(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    scalar = analysis.scalar(equation.ins[0])
    exponent = equation.single.params["y"] if equation.name == "integer_pow" else analysis.literal(equation.ins[1])
    if scalar is None or exponent is None or exponent != int(exponent):
        return None
    powers, guards = power(scalar, int(exponent)), analysis.guards_of(equation.ins[0])
    return Form((Term(powers, guards=guards),), forms[0].reasons)


def _largest(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    """The larger of two: a small number keeps a denominator from zero."""
    for place, value in enumerate(equation.ins):
        if analysis.scalar(value) is not None and analysis.is_small(equation.ins[1 - place], _least(analysis, value)):
            return _guarded(analysis, equation, place, forms)
    return None


def _smallest(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    """The smaller of two: a large number bounds a denominator that never reaches it."""
    for place, value in enumerate(equation.ins):
        bound = analysis.literal(equation.ins[1 - place])
        if analysis.scalar(value) is not None and bound is not None and bound >= LARGE:
            return _guarded(analysis, equation, place, forms)
    return None


def _least(analysis: FormAnalysis, value: Value) -> float:
    """The largest number that keeps a sum from zero: 1 for a count; less for a mean, as a mask's is less than 1."""
    return SMALL if analysis.form(value).terms[0].powers else 1


def _compared(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    """A comparison: with a number it may be the test of a guard. There is at least one row."""
    if _asks_finite(analysis, equation):
        tested = equation.ins[0]
        analysis.tests[equation.outs[0]] = Test(analysis.original(tested), 0, is_exact=False)
        return Form()
    if equation.name == "gt" and analysis.is_count(equation.ins[0]) and analysis.is_small(equation.ins[1], 0):
        return Form()
    for value, other, name in ((*equation.ins, equation.name), (*equation.ins[::-1], _TURNED[equation.name])):
        if analysis.scalar(value) is not None and analysis.is_small(other, _least(analysis, value)):
            is_zero = analysis.is_small(other, 0)
            if is_zero or name not in ("eq", "ne"):
                # The case of a sum that is not zero; and whether, among counts, only zero goes to the other case.
                case, alone = int(name in ("gt", "ge", "ne")), is_zero != (name in ("ge", "lt"))
                analysis.tests[equation.outs[0]] = Test(analysis.original(value), case, alone)
    return None


def _asks_finite(analysis: FormAnalysis, equation: Equation) -> bool:
    """Whether a comparison asks if a number is NaN or infinite, as the quotient of two empty sums."""
    a, b = equation.ins
    if a.aval.size != 1:
        return False
    return (equation.name == "ne" and a is b) or (equation.name == "eq" and analysis.literal(b) in (np.inf, -np.inf))


_TURNED = {"gt": "lt", "lt": "gt", "ge": "le", "le": "ge", "eq": "eq", "ne": "ne"}


def _chosen(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    """A choice by row; or by a test whether a denominator is zero, if the other case is a number."""
    test = analysis.tests.get(equation.ins[0])
    if test is None:
        return _linear(range(1, len(forms)))(analysis, equation, forms)
    left = [place for place, value in enumerate(equation.ins) if place and not analysis.is_fixed(value)]
    if len(left) != 1 or left[0] != 1 + test.case:
        return None
    value, form = equation.ins[left[0]], forms[left[0]]
    counts = [by.value for term in form.terms for by, _ in term.powers if isinstance(by, Sum)]
    is_count = analysis.original(value) is test.tested
    if not (is_count or (test.tested in counts and test.is_exact)):
        return None
    return _guarded(analysis, equation, left[0], forms)


def _branched(analysis: FormAnalysis, equation: Equation, forms: Sequence[Form]) -> Form | None:
    """A branch by a test whether a denominator is zero, if the other branch returns a number."""
    index, *operands = equation.ins
    test = analysis.tests.get(analysis.orders.index(index))
    if test is None or len(equation.single.params["branches"]) != 2 or len(equation.outs) != 1:
        return None
    outputs = [analysis.inside(program, operands) for program in paired_inside(equation)]
    other, value = outputs[1 - test.case], outputs[test.case]
    if other is None or value is None or not analysis.is_fixed(other):
        return None
    form = analysis.form(value)
    counts = [by.value for term in form.terms for by, _ in term.powers if isinstance(by, Sum)]
    return form.times(NONE, [equation]) if test.tested in counts and test.is_exact else None


def _guarded(analysis: FormAnalysis, equation: Equation, place: int, forms: Sequence[Form]) -> Form:
    """Notes an operation that changes an operand only if a denominator is zero; returns the operand's form.

    The operand is that denominator, or else a quotient.
    """
    value = equation.ins[place]
    if analysis.scalar(value) is None:
        return forms[place].times(NONE, [equation])
    analysis.repeats[equation.outs[0]] = analysis.original(value)
    analysis.guard_of[equation.outs[0]] = analysis.first(equation)
    return forms[place]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "add_any", "sub"), _sum),
    **dict.fromkeys(("mul", "dot_general", "conv_general_dilated"), _product),
    **dict.fromkeys(("eq", "ne", "gt", "ge", "lt", "le"), _compared),
    **dict.fromkeys(("psum", "psum_invariant", "ppermute", "pbroadcast", "reduce_scatter"), _from_devices),
    **dict.fromkeys(("all_to_all", "all_gather", "all_gather_invariant", "all_gather_reduced"), _from_devices),
    "convert_element_type": _cast,
    "cond": _branched,
    "div": _quotient,
    "integer_pow": _power,
    "max": _largest,
    "min": _smallest,
    "pow": _power,
    "select_n": _chosen,
}


def rule_of(equation: Equation) -> Rule | None:
    """The rule of an operation: its own, or that of one that is linear in some operands."""
    groups = known(equation.name).linear_groups(equation.single)
    return RULES.get(equation.name) or (_linear(groups[0]) if groups else None)
