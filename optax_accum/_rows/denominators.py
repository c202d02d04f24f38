"""How much a micro-batch counts across calls, read off a loss: by sum(mask), if it is sum(mask * error) / sum(mask)."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core import evaluation
from optax_accum._rows import vanishing
from optax_accum._rows.analysis import FormAnalysis
from optax_accum._rows.forms import NONE, ROWS, TAKES, Extreme, Reason, Sum, Term, extremes_of
from optax_accum._rows.functions import Function
from optax_accum._rows.levels import Levels
from optax_accum._rows.operations import rule_of
from optax_accum._rows.places import Place
from optax_accum._rows.program import Constant, Equation, Number, Program, needed


class Denominator(NamedTuple):
    """The divisor of some sums over rows.

    Attributes:
      by: a sum over rows, `ROWS`, or None if nothing divides.
      sums: the sums that it divides.
      makes: the reduction that makes it, if it is a sum.
      guard: the operation that keeps it from zero, or makes another number of it, if one does.
      function: what divides, as a function of the sum; None for the sum itself, and for a guard that is not that of all
        terms.
      hides: the operation that takes a number in place of a quotient by zero, if one does.
      lost: the sums that are left out where it is zero, though nothing shows that they are zero there.
      inputs: the indices of the program's inputs on which it depends.
    """

    by: Sum | str | None
    sums: tuple[Equation, ...]
    makes: Equation | None = None
    guard: Equation | None = None
    function: Function | None = None
    hides: Equation | None = None
    lost: tuple[Equation, ...] = ()
    inputs: frozenset[int] = frozenset()

    def counted(self, program: Program, values: Sequence[Any]) -> Any:
        """The denominator for these inputs; 1 if nothing divides. Inputs that do not decide it are not read."""
        if self.by is None:
            return 1
        return program.rows[0] if not isinstance(self.by, Sum) else _value_of(self.by, program, values)


class Found(NamedTuple):
    """The denominators of an output's terms; or the reasons why micro-batches do not add up."""

    denominators: tuple[Denominator, ...]
    reasons: tuple[Reason, ...] = ()


def denominators_of(
    levels: Levels, others: Sequence[str | None], output: int, along: Sequence[frozenset[str]] = ()
) -> Found:
    """The denominators of the sums over rows in one output.

    `others` names each input's argument; None if it holds the batch. `along`: as in `FormAnalysis`.
    """
    analysis = FormAnalysis(levels, rule_of, along)
    form = analysis.form(levels.program.outputs[output])
    apart = [term for term in form.terms if not term.is_sum]
    for extreme in (each for term in apart for each in extremes_of(term.powers)):
        form = form.because(Reason(str(extreme), extreme.by.place, True))
    found = [_denominator(analysis, others, term) for term in form.sums]
    if form.reasons:
        return Found((), _one_a_line(form.reasons))
    denominators = [one for one in found if isinstance(one, Denominator)]
    reasons = [reason for reason in found if isinstance(reason, Reason)]
    for term in form.sums:
        place = term.sources[0].place
        if term.powers == NONE and len(form.terms) > 1:
            beside = "a term that takes no rows" if apart else "a mean"
            reasons.append(Reason(f"a sum over rows that nothing divides, beside {beside}", place, True))
        if any(other.powers for other in apart):
            reasons.append(Reason("a sum over rows, beside a term without rows that a count divides", place, True))
    if not form.sums and any(term.powers for term in apart):
        made = levels.program.made_by[levels.program.outputs[output]]
        reasons.append(Reason("a term without rows that a count divides, or multiplies", made.place, True))
    if reasons:
        return Found((), _one_a_line(reasons))
    if apart or len({one.function and frozenset(one.function.powers) for one in denominators}) > 1:
        for one in denominators:  # no single factor corrects the loss
            if one.function and not one.function.is_count:
                name = one.guard.name if one.guard else "a power"
                text = f"{name} of a sum over rows divides one term, and not the others"
                return Found((), (Reason(text, one.sums[0].place, not one.function.may_be_count),))
        denominators = _merged(one._replace(function=None) for one in denominators)
    return Found(tuple(one._replace(lost=_lost(analysis, one)) for one in denominators))


def _merged(denominators: Iterable[Denominator]) -> list[Denominator]:
    """One for each count, whatever keeps it from zero."""
    found: dict[Any, Denominator] = {}
    for one in denominators:
        first = found.setdefault(one.by, one)
        sums, guard, hides = dict.fromkeys([*first.sums, *one.sums]), first.guard or one.guard, first.hides or one.hides
        found[one.by] = first._replace(sums=tuple(sums), guard=guard, hides=hides)
    return list(found.values())


def _lost(analysis: FormAnalysis, one: Denominator) -> tuple[Equation, ...]:
    """The sums that are lost where a denominator is zero. A loss without a guard says that it is never zero."""
    may_be_zero = one.hides or (one.guard and not one.function)
    return vanishing.not_shown(analysis, one.sums, one.by.value) if may_be_zero and isinstance(one.by, Sum) else ()


def reasons_of(levels: Levels, output: int) -> tuple[Reason, ...]:
    """The reasons why one output may not add up over micro-batches, whatever count divides its sums."""
    form = FormAnalysis(levels, rule_of).form(levels.program.outputs[output])
    extremes = [each for term in form.terms for each in extremes_of(term.powers)]
    largest = [Reason(str(extreme), extreme.by.place, True) for extreme in extremes]
    beside = [term.sources[0].place for term in form.sums if len(form.sums) < len(form.terms)]
    often = [Reason("a term that takes no rows, and counts in each micro-batch, beside a sum", at) for at in beside]
    return _one_a_line([*form.reasons, *largest, *often])


def _one_a_line(reasons: Sequence[Reason]) -> tuple[Reason, ...]:
    """One reason for each line, sorted by line. That rows take a sum says most, so it comes before others."""
    rank = lambda reason: (not reason.is_certain, reason.unless_weighed, not reason.text.startswith(TAKES))
    by_line: dict[Place, Reason] = {}
    for reason in sorted(reasons, key=rank):
        by_line.setdefault(reason.place, reason)
    return tuple(by_line[place] for place in sorted(by_line))


def _denominator(analysis: FormAnalysis, others: Sequence[str | None], term: Term) -> Denominator | Reason:
    """The count that divides a sum over rows; or the reason why no such count is known."""
    powers, sums = term.powers, term.sources
    if powers == NONE:
        return Denominator(None, sums)
    for extreme in extremes_of(powers):
        return Reason(f"each row takes {extreme}", extreme.by.place, True)
    text = "a sum over rows that several counts divide, or multiply"
    numbers = [(by.value, -exponent) for by, exponent in powers if isinstance(by, Sum)]
    counts = {analysis.count_under(value) for value, _ in numbers}
    if len(counts) != 1 or len(numbers) < len(powers):
        if powers == frozenset([(ROWS, -1)]):
            return Denominator(ROWS, sums)
        # If two are the same, they may cancel, and one is left: whoever passes a weight says so.
        cancels = sum(exponent for _, exponent in powers) == -1
        is_test = any(analysis.function([each]).is_constant for each in numbers)  # whether a count is not 0, say
        return Reason(text, sums[0].place, not is_test, unless_weighed=cancels)
    function = analysis.function(numbers)
    (of_count,) = analysis.form(count := function.count).terms
    if function.is_constant:  # S / maximum(c, 1) * c
        return Denominator(None, sums)
    if function.falls or not (of_count.powers == NONE or function.is_count):
        return Reason(text, sums[0].place, True)
    makes, inputs = of_count.sources[0], analysis.inputs.get(count, frozenset())
    for place in inputs:
        if others[place] is not None:
            text = f"divided by what the argument {others[place]} decides, too"
            return Reason(text, makes.place, True, unless_weighed=True)
    is_itself = of_count.powers != NONE or (function.guard is None and function.is_count)
    hides = min(term.hides, key=lambda each: each.place, default=None)
    by, guard = Sum(count, of_count.powers), function.guard
    return Denominator(by, sums, makes, guard, None if is_itself else function, hides, inputs=inputs)


def _value_of(of: Sum, program: Program, values: Sequence[Any]) -> jax.Array:
    making, found = needed([of.value], program.made_by), dict(zip(program.inputs, values, strict=True))
    read = lambda value: value.array if isinstance(value, Constant | Number) else found[value]
    for equation in (each for each in program.equations if each in making):
        results = evaluation.bind(equation.single, list(map(read, equation.ins)))
        found.update(zip(equation.outs, results, strict=True))
    count = jnp.reshape(found[of.value], ())
    count = count.astype(jnp.promote_types(count.dtype, jnp.float32))
    for base, exponent in of.powers:
        base = Sum(base.value, NONE) if isinstance(base, Extreme) else base
        by = _value_of(base, program, values) if isinstance(base, Sum) else program.rows[0]
        count = count / by**exponent
    return count
