"""How much a micro-batch counts across calls, read off a loss: by sum(mask), if it is sum(mask * error) / sum(mask)."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core import evaluation
from optax_accum._rows import vanishing
from optax_accum._rows.analysis import FormAnalysis
from optax_accum._rows.forms import NONE, TAKES, Extreme, Reason, Sum, Term, extremes_of
from optax_accum._rows.levels import Levels
from optax_accum._rows.operations import rule_of
from optax_accum._rows.places import Place
from optax_accum._rows.program import Constant, Equation, Number, Program, Value, needed


class Denominator(NamedTuple):
    """The divisor of some sums over rows.

    Attributes:
      by: a sum over rows, `ROWS`, or None if nothing divides.
      sums: the sums that it divides.
      makes: the reduction that makes it, if it is a sum.
      guard: the operation that keeps it from zero, if one does.
      keeps: the operations that compute the guarded sum from the sum alone; empty if they are not known.
      power: the power of it that divides.
      bends: whether `keeps` and `power` are more than a guard, as a root is: the sum alone is not in its place.
      hides: the operation that takes a number in place of a quotient by zero, if one does.
      lost: the sums that a micro-batch of which it is zero leaves out, though nothing shows that they are zero, too.
      inputs: the indices of the program's inputs on which it depends.
    """

    by: Sum | str | None
    sums: tuple[Equation, ...]
    makes: Equation | None = None
    guard: Equation | None = None
    keeps: tuple[Equation, ...] = ()
    power: int = 1
    bends: bool = False
    hides: Equation | None = None
    lost: tuple[Equation, ...] = ()
    inputs: frozenset[int] = frozenset()

    def counted(self, program: Program, values: Sequence[Any]) -> Any:
        """The denominator for these inputs; 1 if nothing divides. Inputs that do not decide it are not read."""
        if self.by is None:
            return 1
        return program.rows[0] if not isinstance(self.by, Sum) else _value_of(self.by, program, values)

    def kept(self, count: jax.Array) -> jax.Array:
        """The denominator as the loss has it: the count, or each of several, kept from zero."""

        @jnp.vectorize
        def one(count: jax.Array) -> jax.Array:
            unguarded = lambda value: jnp.reshape(count, value.aval.shape).astype(value.aval.dtype)
            results = _evaluated(self.keeps, unguarded, evaluation.bind_elsewhere)
            return jnp.reshape(results[self.keeps[-1].outs[0]], ()).astype(count.dtype)

        return (one(count) if self.keeps else count) ** self.power


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
    if apart or len({(one.keeps, one.power) for one in denominators}) > 1:  # no single factor corrects the loss
        for one in (one for one in denominators if one.bends):
            name = one.guard.name if one.guard else "a power"
            is_certain = one.power > 1 or not {each.name for each in one.keeps} <= _BOUNDS
            text = f"{name} of a sum over rows divides one term, and not the others"
            return Found((), (Reason(text, one.sums[0].place, is_certain),))
        denominators = [one._replace(keeps=()) for one in denominators]
    return Found(tuple(one._replace(lost=_lost(analysis, one)) for one in denominators))


def _lost(analysis: FormAnalysis, one: Denominator) -> tuple[Equation, ...]:
    """The sums that are lost where a denominator is zero. A loss without a guard says that it is never zero."""
    may_be_zero = one.hides or (one.guard and not one.keeps)
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
    [(by, exponent), *more] = powers
    text = "a sum over rows that several counts divide, or multiply"
    if more or exponent >= 0:
        cancels = sum(exponent for _, exponent in powers) == -1  # if two are the same, one is left, and whoever
        return Reason(text, sums[0].place, True, unless_weighed=cancels)  # passes a weight says that they are
    if isinstance(by, str):
        return Denominator(by, sums) if exponent == -1 else Reason(text, sums[0].place, True)
    assert isinstance(by, Sum)  # there is no extreme among them
    count, inputs = analysis.function_of.get(by.value, by.value), analysis.inputs.get(by.value, frozenset())
    makes = analysis.form(count).sums[0].sources[0]
    for place in inputs:
        if others[place] is not None:
            text = f"divided by what the argument {others[place]} decides, too"
            return Reason(text, makes.place, True, unless_weighed=True)
    guards = sorted((guard for guard in term.guards if guard is not None), key=lambda guard: guard.place)
    hides = [guard for guard in guards if guard.outs[0] not in analysis.guard_of]
    of_count = [guard for guard in guards if guard not in hides]
    keeps, bends = _keeps(analysis, by, count, term.guards.difference(hides)), count is not by.value or exponent != -1
    if (bends and by.powers) or (count is not by.value and not keeps):
        return Reason(f"{analysis.levels.program.made_by[by.value].name} of a sum over rows", makes.place)
    guard, by = keeps[-1] if keeps else next(iter(of_count), None), Sum(count, NONE) if bends else by
    return Denominator(by, sums, makes, guard, keeps, -exponent, bends, next(iter(hides), None), inputs=inputs)


_BOUNDS = {"clamp", "convert_element_type", "div", "max", "min", "mul", "neg", "select_n"}  # sums may never reach them


def _keeps(analysis: FormAnalysis, by: Sum, count: Value, guards: Iterable[Equation | None]) -> tuple[Equation, ...]:
    """The operations from a count to what divides; empty unless that is a function of it, or has one guard."""
    made_by = analysis.levels.program.made_by
    guard, *more = guards or [None]
    if more or by.powers or (guard and analysis.repeats.get(guard.outs[0]) != by.value):
        return ()
    last = guard or (made_by[by.value] if count is not by.value else None)
    if last is None:
        return ()
    needed, todo = {last}, [last]
    while todo:
        for value in todo.pop().ins:
            is_count = analysis.original(value) == count and value not in analysis.guard_of
            if isinstance(value, Constant | Number) or is_count:
                continue
            if value not in made_by:
                return ()
            if made_by[value] not in needed:
                needed.add(made_by[value])
                todo.append(made_by[value])
    return tuple(equation for equation in analysis.levels.program.equations if equation in needed)


def _value_of(of: Sum, program: Program, values: Sequence[Any]) -> jax.Array:
    making = needed([of.value], program.made_by)
    inputs = dict(zip(program.inputs, values, strict=True))
    found = _evaluated([equation for equation in program.equations if equation in making], inputs.__getitem__)
    count = jnp.reshape(found[of.value], ())
    count = count.astype(jnp.promote_types(count.dtype, jnp.float32))
    for base, exponent in of.powers:
        base = Sum(base.value, NONE) if isinstance(base, Extreme) else base
        by = _value_of(base, program, values) if isinstance(base, Sum) else program.rows[0]
        count = count / by**exponent
    return count


def _evaluated(
    equations: Iterable[Equation], given: Callable[[Value], Any], bind: Callable[..., Any] = evaluation.bind
) -> dict[Value, Any]:
    """The results of equations, for all rows; `given` says those of others."""
    found: dict[Value, Any] = {}

    def read(value: Value) -> Any:
        if isinstance(value, Constant | Number):
            return value.array
        return found[value] if value in found else given(value)

    for equation in equations:
        found.update(zip(equation.outs, bind(equation.single, list(map(read, equation.ins))), strict=True))
    return found
