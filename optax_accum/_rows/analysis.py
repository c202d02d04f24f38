"""The form of each value of a program: sum(mask) is a sum over rows that the batch alone decides, sum(error) is not.

That the parts of micro-batches add up is shown operation by operation; an operation that is not known to keep the form
of a sum is a reason why no weight is found.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_accum._core.equations import collective_axes
from optax_accum._rows import constants, reordering
from optax_accum._rows.forms import (
    NONE,
    ROWS,
    ZERO,
    Extreme,
    Form,
    Powers,
    Reason,
    Sum,
    Term,
    added,
    extremes_of,
    failed,
    multiplied,
    name_of,
    product,
    scattered,
    summed,
    taken_by_rows,
)
from optax_accum._rows.functions import COUNTS, MEANS, Function
from optax_accum._rows.leveling import body_levels, is_over_layers
from optax_accum._rows.levels import Kind, Levels
from optax_accum._rows.linear import nonlinear_rules
from optax_accum._rows.orders import Orders
from optax_accum._rows.pairs import Pairs
from optax_accum._rows.program import Constant, Equation, Number, Program, Value
from optax_accum._rows.traces import COUPLED, equal


class FormAnalysis:
    """One analysis of a program: the form of each of its values."""

    def __init__(self, levels: Levels, rule_of: Callable[[Equation], Any], along: Sequence[frozenset[str]] = ()):
        """`along`: the axes of a `jax.shard_map` along which each input may differ; empty if that is not known."""
        self.along = along
        self.levels, self.rows, self.rule_of = levels, levels.program.rows, rule_of
        self.of_params = set(levels.of_params)
        self.orders = Orders(levels.of_params, reordering.RULES)
        self.pairs = Pairs(self.orders, self.form)
        self.numbers: dict[Value, Constant | Number] = {}  # values that constants of the program decide
        self.forms: dict[Value, Form] = {}
        self.inputs: dict[Value, frozenset[int]] = {v: frozenset([i]) for i, v in enumerate(levels.program.inputs)}
        self.repeats: dict[Value, Value] = {}  # the earlier value that a value repeats, or casts
        self.firsts: dict[Any, list[Equation]] = {}
        self.finite: dict[Value, Value] = {}  # from what asks if a number is NaN, or infinite, to the number
        self.count_of: dict[Value, Value] = {}  # from numbers that one count alone decides to that count
        for equation, kind in levels.kinds.items():
            self._read(equation, kind)

    def form(self, value: Value) -> Form:
        if value not in self.forms:
            literal = self.number(value)
            self.forms[value] = Form() if literal is None else self._read_literal(literal)
        return self.forms[value]

    def number(self, value: Value) -> Constant | Number | None:
        return value if isinstance(value, Constant | Number) else self.numbers.get(value)

    def original(self, value: Value) -> Value:
        return self.repeats.get(value, value)

    # Numbers

    def _read_literal(self, value: Constant | Number) -> Form:
        """The form of a literal: a power (-2 to 2) of the number of rows, or any other number."""
        array, other = value.array if isinstance(value, Constant) else np.asarray(value.array), value.double
        if value.axis is not None:
            return Form().because(Reason("an array in the program has a place for each row of the batch", _HERE))
        if array is other or not constants.is_known(array):
            return Form()
        if other is not None and np.array_equal(array, other, equal_nan=True):
            return Form() if value.aval.shape or array else ZERO
        for exponent in (-2, -1, 1, 2):
            grown = array * (self.rows[1] / self.rows[0]) ** exponent
            if other is not None and np.allclose(other, grown, rtol=1e-5, atol=0):
                return Form((Term(frozenset([(ROWS, exponent)])),))
        number = f"the number {np.asarray(array).item():g}" if np.size(array) == 1 else "an array in the program"
        return Form().because(Reason(f"{number} depends on the number of rows", _HERE))

    def is_fixed(self, value: Value) -> bool:
        """Whether neither an input nor the number of rows decides a value."""
        return value not in self.of_params and not self.inputs.get(value) and self.form(value).is_plain

    def literal(self, value: Value) -> float | None:
        """The number that a value is, whatever the number of rows; None if it is none."""
        number = self.number(self.original(value))
        if number is None or np.size(number.array) != 1 or not constants.is_known(number.array):
            return None
        return np.asarray(number.array).item() if self.form(value).is_plain else None

    def is_count(self, value: Value) -> bool:
        """Whether a value is the number of rows, or in proportion to it."""
        return self.form(value).terms == (Term(frozenset([(ROWS, 1)])),)

    # Equations

    def _read(self, equation: Equation, kind: Kind) -> None:
        takes_params = not self.of_params.isdisjoint(equation.ins)
        inputs = frozenset().union(*(self.inputs.get(value, frozenset()) for value in equation.ins))
        self.inputs.update(dict.fromkeys(equation.outs, inputs))
        self.orders.note(equation)
        if not takes_params:
            self._find_again(equation)
        if kind is Kind.NO_ROWS and self._compute(equation):
            return
        form = self._read_form(equation, kind)
        if takes_params and any(
            nonlinear_rules(equation.single, [v in self.levels.differentiable for v in equation.ins])
        ):
            form = form.because(Reason("a derivative of yours that is not linear", equation.place))
        if any(reason.place is _HERE for reason in form.reasons):
            reasons = tuple(r._replace(place=equation.place) if r.place is _HERE else r for r in form.reasons)
            form = form._replace(reasons=reasons)
        self.forms.update(dict.fromkeys(equation.outs, form))

    def _compute(self, equation: Equation) -> bool:
        """Computes what small constants decide, as the number of entries of an array."""
        found = constants.computed(equation, [self.number(value) for value in equation.ins])
        self.numbers.update(zip(equation.outs, found or (), strict=False))
        return found is not None

    def inside(self, program: Program, operands: Sequence[Value]) -> Value | None:
        """Reads a program of one result inside an equation; None if it takes, or makes, rows."""
        if any(equation.view.has_rows or equation.view.makes_rows for equation in program.equations):
            return None
        for value, operand in zip(program.inputs, operands, strict=True):
            self.repeats[value], self.forms[value] = self.original(operand), self.form(operand)
            self.inputs[value] = self.inputs.get(operand, frozenset())
            if operand in self.of_params:
                self.of_params.add(value)
        for equation in program.equations:
            if not self.of_params.isdisjoint(equation.ins):
                self.of_params.update(equation.outs)
            self._read(equation, Kind.NO_ROWS)
        return program.outputs[0]

    def _find_again(self, equation: Equation) -> None:
        """Notes if an equation repeats an earlier one, or only casts its operand."""
        first = self.first(equation)
        if first is not equation:
            pairs = zip(equation.outs, first.outs, strict=True)
            self.repeats.update((value, self.original(other)) for value, other in pairs)
        elif equation.name in CASTS and len(equation.ins) == 1 and _keeps_numbers(equation):
            self.repeats[equation.outs[0]] = self.original(equation.ins[0])

    def first(self, equation: Equation) -> Equation:
        """The first equation that does the same with the same operands."""
        known = self.firsts.setdefault((equation.name, tuple(map(self._key, equation.ins))), [])
        for other in known:
            if equal(other.single.params, equation.single.params):
                return other
        known.append(equation)
        return equation

    def _key(self, value: Value) -> Any:
        if isinstance(value, Number):
            return str(value.aval), str(value.number), str(value.double)
        return self.original(value)

    def _read_form(self, equation: Equation, kind: Kind) -> Form:
        if equation.differs:
            return self._failed(equation, f"{equation.name} is another program for another number of rows")
        is_separate, why_not = self.orders.read(equation, kind)
        if self.pairs.read(equation):
            return self._read_pairs(equation)
        if why_not:
            return self._failed(equation, why_not, is_certain=True)
        if kind is Kind.WHOLE and is_over_layers(equation, self.levels):
            together = body_levels(equation, self.levels).coupling
            reasons = [Reason("rows are taken together in a loop over layers", inner.place) for inner in together]
            return failed(list(map(self.form, equation.ins)), *reasons)
        if kind is Kind.WHOLE and not is_separate:
            return self._failed(equation, f"{equation.name} of all rows at once")
        if self._is_extreme(equation):
            extreme = Term(frozenset([(Extreme(equation.outs[0], equation), 1)]))
            return Form((extreme,), self.form(equation.ins[0]).reasons)
        takes_rows = kind not in (Kind.NO_ROWS, Kind.MADE) and any(value.axis is not None for value in equation.ins)
        forms = [self._spread(value, equation) if takes_rows else self.form(value) for value in equation.ins]
        if kind is Kind.PARTIAL and takes_rows:  # others follow a sum in its parts
            return self._reduced(equation, forms)
        if kind is Kind.WHOLE:  # separate rows in another order; the numbers of rows are their order
            pairs = zip(equation.ins, forms, strict=True)
            forms = [Form() if self.orders.numbers_rows(value) else form for value, form in pairs]
        if kind is Kind.MADE and not equation.name.startswith(("random_", "threefry")):
            return self._failed(equation, f"{equation.name} depends on the place of a row in its batch")
        rule = self.rule_of(equation)
        form = rule(self, equation, forms) if rule else None
        return self._read_number(equation, self._plain(equation, forms) if form is None else form)

    # Numbers that one count decides

    def _read_number(self, equation: Equation, form: Form) -> Form:
        """The form of a number that one count alone decides, if the form so far says less of it, or too much.

        It says too much of a count times its root: that parts of it add up.
        """
        taken = [value for value in equation.ins if not self.is_fixed(value)]
        count, *others = {self.count_under(value) for value in taken} or [None]
        has_rows = any(value.axis is not None for value in equation.outs)
        if count is None or others or has_rows or not equation.outs or collective_axes(equation.single):
            return form
        result, *more = equation.outs
        self.count_of.update(dict.fromkeys(equation.outs, count))
        (of_count,) = self.form(count).terms
        says = len(form.terms) == 1 and not form.reasons
        if says and form.sums:  # as twice a count; a count times its root is no sum
            says = form.terms[0].powers == of_count.powers and all(self.form(value).sums for value in taken)
        if says or more or result.aval.size != 1:
            return form
        if of_count.powers == NONE:
            return Form((Term(frozenset([(Sum(self.original(result), NONE), 1)])),))
        return self.form(count) if self.function([(result, 1)]).is_count else form

    def count_under(self, value: Value) -> Value | None:
        """The count that alone decides a value, which may be the count itself."""
        value = self.original(value)
        return self.count_of.get(value, value if self.scalar(value) is not None else None)

    def function(self, powers: Sequence[tuple[Value, int]]) -> Function:
        """A product of powers of values that one count decides."""
        count = self.count_under(powers[0][0])
        assert count is not None
        samples = COUNTS if self.form(count).terms[0].powers == NONE else MEANS
        return Function(count, powers, samples, self.orders.made_by, self.repeats)

    def _is_extreme(self, equation: Equation) -> bool:
        """Whether an equation is the largest, or the smallest, number of all rows."""
        (operand, *_), (result, *_) = equation.ins or [None], equation.outs or [None]
        if equation.name not in ("reduce_max", "reduce_min") or operand is None or result is None:
            return False
        return operand.axis not in (None, COUPLED) and result.axis is None and result.aval.size == 1

    def _failed(self, equation: Equation, text: str, *, is_certain: bool = False) -> Form:
        """A result that does not add up; analysis goes on, to find other reasons."""
        return failed(list(map(self.form, equation.ins)), Reason(text, equation.place, is_certain))

    def _read_pairs(self, equation: Equation) -> Form:
        """The form of a sum of parts; until it is reduced over all rows, only what is linear takes parts by parts."""
        (result,) = equation.outs
        parts = self.pairs.summands[result]
        if parts is None or result.axis == COUPLED:
            return self._failed(equation, f"{equation.name} of all rows at once")
        form = added(parts.values())
        if result.axis is None or not form.sums:
            del self.pairs.summands[result]
            return form
        return failed([form], *(taken_by_rows(term, source) for term in form.sums for source in term.sources))

    def _plain(self, equation: Equation, forms: Sequence[Form]) -> Form:
        """A result of which only this is known: separate rows stay separate."""
        return failed(forms, *(self._why(equation, form) for form in forms if not form.is_plain))

    def _why(self, equation: Equation, form: Form) -> Reason:
        """The reason why an operation on a value that is not plain does not add up."""
        if form.sums:
            is_certain = equation.name in _CURVED and not self.of_params.isdisjoint(equation.ins)
            return Reason(f"{equation.name} of a {name_of(form.sums[0])}", equation.place, is_certain)
        for by in (by for term in form.terms for by in extremes_of(term.powers)):
            return Reason(f"{equation.name} of {by}", by.by.place)
        for by in (by for term in form.terms for by, _ in term.powers if isinstance(by, Sum)):
            (term,) = self.form(self.count_of.get(by.value, by.value)).sums
            if by.value in self.count_of:  # a test of a count, say
                return Reason(f"{equation.name} of a {name_of(term)}", equation.place)
            return taken_by_rows(term, term.sources[0])
        return Reason(f"{equation.name} of a number that depends on the number of rows", equation.place)

    def _spread(self, value: Value, equation: Equation) -> Form:
        """The form of an operand beside rows: if it is a sum over rows, each row takes that sum."""
        form = self.form(value)
        if not form.sums or value.axis is not None:
            return form
        scalar = self.scalar(value)
        if scalar is not None:
            return Form((Term(scalar),), form.reasons)
        return failed([form], *(taken_by_rows(term, source) for term in form.sums for source in term.sources))

    def scalar(self, value: Value) -> Powers | None:
        """A value as powers; None unless it is one number, and a sum over rows that the batch alone decides."""
        form = self.form(value)
        if value in self.of_params or len(form.terms) != 1 or not form.sums or value.aval.size != 1:
            return None
        (term,) = form.terms
        return product(term.powers, frozenset([(Sum(self.original(value), term.powers), 1)]))

    def _reduced(self, equation: Equation, forms: Sequence[Form]) -> Form:
        if equation.name == "reduce_sum":
            return summed(forms[0], equation)
        if equation.name == "dot_general":
            return summed(multiplied(forms), equation)
        if equation.name.startswith("scatter"):
            return added([self.form(equation.ins[0]), summed(scattered(forms[2], forms[1], equation), equation)])
        return self._failed(equation, f"{equation.name} of all rows")


_HERE: Any = None  # in place of the line of a literal: the line of the equation that takes it
# No weight of a micro-batch makes up for these; for a logarithm, the sum itself does.
_CURVED = {"cbrt", "exp", "exp2", "expm1", "integer_pow", "pow", "rsqrt", "sqrt", "square"}
CASTS = {"convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "copy", "pvary", "stop_gradient"}


def _keeps_numbers(equation: Equation) -> bool:
    """Whether a cast makes no integers of fractions, nor changes numbers of rows: a mask of bools has one sum."""
    before, after = equation.ins[0].aval.dtype, equation.outs[0].aval.dtype
    if equation.outs[0].axis is None:
        return jnp.issubdtype(after, jnp.inexact) or not jnp.issubdtype(before, jnp.inexact)
    return equation.name == "convert_element_type" and jnp.promote_types(before, after) == after
