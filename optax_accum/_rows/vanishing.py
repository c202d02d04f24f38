"""Whether a sum over rows is 0 wherever a count is: the sum of `mask * error` is, if the count is the sum of `mask`.

What a count adds up is not negative. Where `sum(mask * v)` is 0, one of the factors `mask` and `v` is 0 in each entry,
and so is any other product of both of them.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from optax_accum._core import compilers
from optax_accum._core.equations import Inside, programs_of
from optax_accum._rows.analysis import CASTS, FormAnalysis
from optax_accum._rows.locality import NESTED
from optax_accum._rows.program import Equation, Value
from optax_accum._rows.registry import known

Factors = frozenset[tuple[Any, bool]]  # each a value, or a comparison; with False it is `~value`, or `1 - value`
Products = list[Factors]
NONE: Factors = frozenset()
MOST_ENTRIES, MOST_PRODUCTS = 2**17, 100

_SAME = CASTS | {"rev", "transpose"}  # each entry is one of the operand
_AT_ZERO_ALONE = {"abs", "integer_pow", "max", "reduce_max", "reduce_or", "sign", "sqrt", "square"}
_AT_ZERO = {*_AT_ZERO_ALONE, "expm1", "floor", "log1p", "min", "reduce_and", "reduce_min", "round", "tanh"}
_SOME_ENTRIES = {"dynamic_slice", "dynamic_update_slice", "gather", "pad", "scatter", "slice", "split", "unstack"}
_COMPARED = {  # as a > b or a == b: the order, and whether it is that or its negation
    **{"gt": (">", 1, True), "lt": (">", -1, True), "le": (">", 1, False), "ge": (">", -1, False)},
    **{"eq": ("==", 1, True), "ne": ("==", 1, False)},
}


def not_shown(analysis: FormAnalysis, sums: Iterable[Equation], count: Value) -> tuple[Equation, ...]:
    """The sums over rows of which nothing shows that they are 0 wherever the count is 0."""
    steps = {e: _Step(e.single, e.ins, e.outs) for e in analysis.levels.program.equations if not e.differs}
    array = lambda value: getattr(analysis.number(analysis.original(value)), "array", None)
    body = _Body(steps.values(), array, analysis.original)
    followed = _Followed(body, body.products(count))
    # What a count decides says nothing of rows: where(count > 0, error / count, 0) hides the errors.
    of_counts = {v for step in body.steps for v in step.outs if v.axis is None and analysis.inputs.get(v)}
    followed.parts.update(dict.fromkeys(of_counts, _NOTHING))
    followed.run()
    return tuple(each for each in sums if each not in steps or not followed.are_zero(steps[each]))


class _Step(NamedTuple):
    """An equation, of a program of rows or of one inside it."""

    eqn: Any
    ins: Sequence[Any]
    outs: Sequence[Any]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def is_same(self) -> bool:
        """Whether each entry of the result is one of the operand, and is not rounded."""
        cast = [jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in (*self.eqn.invars, *self.eqn.outvars)]
        return self.name in _SAME and cast != [True, False]

    @property
    def linear(self) -> list[frozenset[int]]:
        return known(self.name).linear_groups(self.eqn)


class _Body:
    """A program, read backwards: what is 0 if a value is."""

    def __init__(self, steps: Iterable[_Step], array: Callable[[Any], Any], original: Callable[[Any], Any]):
        """`array`: what a constant is; `original`: the earlier value that a value repeats."""
        self.steps, self.array, self.original = list(steps), array, original
        self.made_by = {value: step for step in self.steps for value in step.outs}
        self.given: dict[Any, tuple[_Body, Any]] = {}  # the values that a program inside another one takes from it
        self.outputs: Sequence[Any] = ()  # of a program inside another one

    def number(self, value: Any) -> Any:
        """The number that each entry of a constant is; None if there are several."""
        entries = self._entries(value)
        return entries.flat[0] if entries.size and (entries == entries.flat[0]).all() else None

    def is_positive(self, value: Any) -> bool:
        """Whether a constant is a table of numbers above 0, as of classes' weights."""
        entries = self._entries(value)
        return bool(entries.size) and bool((entries > 0).all())

    def _entries(self, value: Any) -> np.ndarray:
        """Those of a small constant; none of any other value."""
        array = self.array(value)
        is_known = array is not None and not isinstance(array, Tracer) and np.size(array) <= MOST_ENTRIES
        is_here = is_known and getattr(array, "is_fully_addressable", True)
        return np.asarray(array if is_here and not jnp.issubdtype(jnp.result_type(array), jax.dtypes.extended) else [])

    def maker(self, value: Any) -> _Step | None:
        return None if isinstance(value, core.Literal) else self.made_by.get(self.original(value))

    def root(self, value: Any) -> Any:
        """The value of whose entries a value is made."""
        while (step := self.maker(value)) is not None and step.is_same:
            value = step.ins[0]
        if isinstance(value, core.Var) and value in self.given:
            body, operand = self.given[value]
            return body.root(operand)
        return self.original(value)

    def factor(self, value: Any) -> tuple[Any, bool]:
        """A value as a factor; a comparison is the same wherever it is made."""
        step = self.maker(value)
        if step is None or step.name not in _COMPARED:
            return self.original(value), True
        how, order, is_itself = _COMPARED[step.name]
        roots = list(map(self.root, step.ins[::order]))
        keys = [root if self.number(root) is None else float(self.number(root)) for root in roots]
        return (how, frozenset(keys) if how == "==" else tuple(keys)), is_itself

    def products(self, value: Any, number: int = 0) -> Products:
        """What follows if each entry of a value is 0, or 1: of each of these products, one factor is 0."""
        if (constant := self.number(value)) is not None:
            return [] if constant == number else [NONE]  # which is never 0
        if value in self.given:
            body, operand = self.given[value]
            return body.products(operand, number)
        step = self.maker(value)
        found = None if step is None else self._products(step, self.original(value), number)
        key, is_itself = self.factor(value)
        return [frozenset([(key, is_itself != bool(number))])] if found is None else found

    def _products(self, step: _Step, value: Any, number: int) -> Products | None:
        name, ins = step.name, step.ins
        if step.is_same:
            return self.products(ins[0], number)
        if _is_negation(self, step):
            return self.products(ins[name == "sub"], 1 - number)
        if name in NESTED - {"cond", "while"}:
            (program,) = programs_of(step.eqn)
            inside = self.inside(step, program)
            return inside.products(inside.outputs[list(step.outs).index(value)], number)
        if name == "select_n" and len(ins) == 3:
            test, *cases = ins
            return [
                *_either(self.products(test, 1), self.products(cases[0], number)),
                *_either(self.products(test, 0), self.products(cases[1], number)),
            ]
        if name in _COMPARED:
            return self._products_compared(step, number)
        if (name, number) in (("and", 0), ("or", 1), ("mul", 0), ("dot_general", 0), ("min", 0)):
            return _either(*(self.products(value, number) for value in ins))
        if (name, number) in (("and", 1), ("or", 0)) or (name in _AT_ZERO_ALONE and not number):
            return [each for operand in ins for each in self.products(operand, number)]
        if name in ("exp", "logistic") or (name == "gather" and self.is_positive(ins[0])):
            return [NONE]
        if number or name in _SOME_ENTRIES or name == "sub" or len(step.linear) != 1:
            return None
        return [each for place in step.linear[0] for each in self.products(ins[place])]

    def _products_compared(self, step: _Step, number: int) -> Products | None:
        """A count of what is greater than 0, or other than 0."""
        how, order, is_itself = _COMPARED[step.name]
        value, other = step.ins[::order]
        is_told = (is_itself == bool(number)) == (how == "==")
        return self.products(value) if is_told and self.number(other) == 0 else None

    def inside(self, step: _Step, program: Inside) -> "_Body":
        """A program inside a step."""
        jaxpr, consts = compilers.opened(program.program)
        arrays = dict(zip(jaxpr.constvars, consts, strict=True))
        array = lambda value: value.val if isinstance(value, core.Literal) else arrays.get(value)
        body = _Body((_Step(eqn, eqn.invars, eqn.outvars) for eqn in jaxpr.eqns), array, lambda value: value)
        body.given = {var: (self, of) for var, of in zip(jaxpr.invars, program.taken(step.ins), strict=True)}
        body.outputs = jaxpr.outvars
        return body


def _is_negation(body: _Body, step: _Step) -> bool:
    """Whether a step is `~value`, `1 - value`, or `value == 0` of a bool."""
    is_compared = step.name == "eq" and body.root(step.ins[0]).aval.dtype == bool
    return (
        step.name == "not"
        or (step.name == "sub" and body.number(step.ins[0]) == 1)
        or (is_compared and body.number(step.ins[1]) == 0)
    )


def _either(a: Products, b: Products) -> Products:
    """What follows if one of two values is 0: so much that no loss takes long, however it makes its mask."""
    return [one | other for one, other in itertools.islice(itertools.product(a, b), MOST_PRODUCTS)]


class _Part(NamedTuple):
    """The factors with which a value is 0, if one of them is; and those with which it is 1."""

    zero: Factors = NONE
    one: Factors = NONE


_NOTHING = _Part()


class _Followed:
    """A program, read forwards: what is 0 if of each of some products one factor is."""

    def __init__(self, body: _Body, products: Products):
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

    def are_zero(self, step: _Step) -> bool:
        return all(self._closed(part.zero) == self.all for part in self.of(step))

    def _with_itself(self, value: Any, part: _Part) -> _Part:
        key, is_itself = self.body.factor(value)
        own = [self.all & {(key, is_itself == is_zero)} for is_zero in (True, False)]
        return _Part(self._closed(part.zero | own[0]), self._closed(part.one | own[1]))

    def _closed(self, factors: Factors) -> Factors:
        return self.all if any(product <= factors for product in self.products) else factors

    def of(self, step: _Step) -> list[_Part]:
        """With which factors the results of a step are 0, or 1."""
        parts = list(map(self.part, step.ins))
        return self._inside(step, parts) if step.name in NESTED else [self._of(step, parts)] * len(step.outs)

    def _of(self, step: _Step, parts: Sequence[_Part]) -> _Part:
        name, zeros = step.name, [part.zero for part in parts]
        if step.is_same:
            return parts[0]
        if _is_negation(self.body, step):
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
        if name in _COMPARED:
            return self._compared(step)
        if name == "min":
            zeros = [part.zero for part, value in zip(parts, step.ins, strict=True) if not self.body.is_positive(value)]
        if name in _AT_ZERO:
            return _Part(_common(zeros))
        of_groups = (_common([zeros[place] for place in group]) for group in step.linear)
        return _Part(NONE.union(*of_groups))

    def _compared(self, step: _Step) -> _Part:
        """Of `a > b` and `a == b`: where a is 0, and b is 0, or no less, as places are."""
        how, order, is_itself = _COMPARED[step.name]
        value, other = step.ins[::order]
        number, made = self.body.number(other), self.body.maker(self.body.root(other))
        is_place = made is not None and made.name == "iota"
        is_no_less = is_place if number is None else number >= 0
        zero = self.part(value).zero if (is_no_less if how == ">" else number == 0) else NONE
        return _Part(zero) if is_itself == (how == ">") else _Part(one=zero)

    def _inside(self, step: _Step, parts: Sequence[_Part]) -> list[_Part]:
        """Of a function, of branches, or of each iteration of a loop."""
        if step.name == "while":
            return [_NOTHING] * len(step.outs)
        programs = programs_of(step.eqn)
        found = [program.followed(parts, self._follow(step, program), _in_all)[1] for program in programs]
        return list(map(_in_all, *found))

    def _follow(self, step: _Step, program: Inside) -> Callable[[Any, Sequence[_Part]], list[_Part]]:
        body = self.body.inside(step, program)

        def follow(_: Any, given: Sequence[_Part]) -> list[_Part]:
            inside = _Followed(body, self.products)
            inside.parts.update(zip(body.given, given, strict=True))
            inside.run()
            return list(map(inside.part, body.outputs))

        return follow


def _common(factors: Sequence[Factors]) -> Factors:
    return frozenset.intersection(*factors) if factors else NONE


def _in_all(*parts: _Part) -> _Part:
    return _Part(*map(_common, zip(*parts, strict=True)))
