"""Whether a sum over rows is 0 wherever a count is: the sum of `mask * error` is, if the count is the sum of `mask`.

What a count adds up is taken not to be negative, nor to be NaN. Where `sum(mask * v)` is 0, one of the factors `mask`
and `v` is 0 in each entry, and so is any other product of both of them at the same entries: axes are not compared, so
that a count of `rows & tokens` may hide a sum of `rows.any() & tokens.any()`. Nobody is warned of that.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from optax_accum._core.equations import Inside, programs_of
from optax_accum._rows.analysis import FormAnalysis
from optax_accum._rows.factors import AT_ZERO_ALONE, COMPARED, NONE, Body, Factors, Products, Step, is_negation
from optax_accum._rows.locality import NESTED
from optax_accum._rows.program import Equation, Value

_AT_ZERO = {*AT_ZERO_ALONE, "expm1", "floor", "log1p", "min", "reduce_and", "reduce_min", "round", "tanh"}


def not_shown(analysis: FormAnalysis, sums: Iterable[Equation], count: Value) -> tuple[Equation, ...]:
    """The sums over rows of which nothing shows that they are 0 wherever the count is 0."""
    steps = {e: Step(e.single, e.ins, e.outs) for e in analysis.levels.program.equations if not e.differs}
    array = lambda value: getattr(analysis.number(analysis.original(value)), "array", None)
    body = Body(steps.values(), array, analysis.original)
    followed = _Followed(body, body.products(count))
    # What a count decides says nothing of rows: where(count > 0, error / count, 0) hides the errors.
    of_counts = {v for step in body.steps for v in step.outs if v.axis is None and analysis.inputs.get(v)}
    followed.parts.update(dict.fromkeys(of_counts, _NOTHING))
    followed.run()
    return tuple(each for each in sums if each not in steps or not followed.are_zero(steps[each]))


class _Part(NamedTuple):
    """Where one of the factors `zero` is 0, a value is 0; where one of `one` is 0, it is 1."""

    zero: Factors = NONE
    one: Factors = NONE


_NOTHING = _Part()


class _Followed:
    """A program, read forwards: what is 0 if of each of some products one factor is."""

    def __init__(self, body: Body, products: Products):
        self.body, self.products = body, products
        self.all: Factors = NONE.union(*products)  # of a value that is 0
        self.parts: dict[Any, _Part] = {}

    def part(self, value: Any) -> _Part:
        if (number := self.body.number(value)) is not None:
            return _Part(self.all if number == 0 else NONE, self.all if number == 1 else NONE)
        value = self.body.original(value)
        return self.parts[value] if value in self.parts else self._with_itself(value, _NOTHING)

    def run(self) -> None:
        for step in self.body.steps:
            for value, part in zip(step.outs, self.of(step), strict=True):
                self.parts.setdefault(value, self._with_itself(value, part))

    def are_zero(self, step: Step) -> bool:
        return all(self._closed(part.zero) == self.all for part in self.of(step))

    def _with_itself(self, value: Any, part: _Part) -> _Part:
        key, is_itself = self.body.factor(value)
        own = [self.all & {(key, is_itself == is_zero)} for is_zero in (True, False)]
        return _Part(self._closed(part.zero | own[0]), self._closed(part.one | own[1]))

    def _closed(self, factors: Factors) -> Factors:
        return self.all if any(product <= factors for product in self.products) else factors

    def of(self, step: Step) -> list[_Part]:
        """With which factors the results of a step are 0, or 1."""
        parts = list(map(self.part, step.ins))
        return self._inside(step, parts) if step.name in NESTED else [self._of(step, parts)] * len(step.outs)

    def _of(self, step: Step, parts: Sequence[_Part]) -> _Part:
        name, zeros = step.name, [part.zero for part in parts]
        if step.is_same:
            return parts[0]
        if is_negation(self.body, step):
            return _Part(*parts[name == "sub"][::-1])
        if name == "log":
            return _Part(parts[0].one)
        if name in ("and", "or"):
            (a, not_a), (b, not_b) = parts
            return _Part(a | b, not_a & not_b) if name == "and" else _Part(a & b, not_a | not_b)
        if name == "select_n" and len(parts) == 3:
            (unless, when), *cases = parts
            chosen = lambda no, yes: (no & yes) | (unless & no) | (when & yes)
            return _Part(*map(chosen, *cases))
        if name in COMPARED:
            return self._compared(step)
        if name == "min":
            zeros = [part.zero for part, value in zip(parts, step.ins, strict=True) if not self.body.is_positive(value)]
        if name in _AT_ZERO:
            return _Part(_common(zeros))
        of_groups = (_common([zeros[place] for place in group]) for group in step.linear)
        return _Part(NONE.union(*of_groups))

    def _compared(self, step: Step) -> _Part:
        """Of `a > b` and `a == b`: where a is 0, and b is 0, or no less, as places are."""
        how, order, is_itself = COMPARED[step.name]
        value, other = step.ins[::order]
        number, made = self.body.number(other), self.body.maker(self.body.root(other))
        is_place = made is not None and made.name == "iota"
        is_no_less = is_place if number is None else number >= 0
        zero = self.part(value).zero if (is_no_less if how == ">" else number == 0) else NONE
        return _Part(zero) if is_itself == (how == ">") else _Part(one=zero)

    def _inside(self, step: Step, parts: Sequence[_Part]) -> list[_Part]:
        """Of a function, of branches, or of each iteration of a loop."""
        if step.name == "while":
            return [_NOTHING] * len(step.outs)
        programs = programs_of(step.eqn)
        found = [program.followed(parts, self._follow(step, program), _in_all)[1] for program in programs]
        return list(map(_in_all, *found))

    def _follow(self, step: Step, program: Inside) -> Callable[[Any, Sequence[_Part]], list[_Part]]:
        body = self.body.inside(step, program)

        def follow(_: Any, given: Sequence[_Part]) -> list[_Part]:
            inside = _Followed(body, self.products)
            inside.parts.update(zip(body.inputs, given, strict=True))
            inside.run()
            return list(map(inside.part, body.outputs))

        return follow


def _common(factors: Sequence[Factors]) -> Factors:
    return frozenset.intersection(*factors) if factors else NONE


def _in_all(*parts: _Part) -> _Part:
    return _Part(*map(_common, zip(*parts, strict=True)))
