"""What is 0 where a count is, read backwards: where `sum(mask * v)` is 0, one of the factors `mask` and `v` is."""

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
from optax_accum._rows.analysis import CASTS
from optax_accum._rows.locality import NESTED
from optax_accum._rows.registry import known

Factors = frozenset[tuple[Any, bool]]  # each a value, or a comparison; with False it is `~value`, or `1 - value`
Products = list[Factors]
NONE: Factors = frozenset()
MOST_ENTRIES, MOST_PRODUCTS, MOST_STEPS = 2**17, 100, 50

_SAME = CASTS | {"rev", "transpose"}  # each entry is one of the operand
AT_ZERO_ALONE = {"abs", "integer_pow", "max", "reduce_max", "reduce_or", "sign", "sqrt", "square"}
_SOME_ENTRIES = {"dynamic_slice", "dynamic_update_slice", "gather", "pad", "scatter", "slice", "split", "unstack"}
COMPARED = {  # as a > b or a == b: the order, and whether it is that or its negation
    **{"gt": (">", 1, True), "lt": (">", -1, True), "le": (">", 1, False), "ge": (">", -1, False)},
    **{"eq": ("==", 1, True), "ne": ("==", 1, False)},
}


class Step(NamedTuple):
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


class Body:
    """A program, read backwards: what is 0 if a value is."""

    def __init__(self, steps: Iterable[Step], array: Callable[[Any], Any], original: Callable[[Any], Any]):
        """`array`: what a constant is; `original`: the earlier value that a value repeats."""
        self.steps, self.array, self.original = list(steps), array, original
        self.made_by = {value: step for step in self.steps for value in step.outs}
        self.given: dict[Any, tuple[Body, Any]] = {}  # the values that a program inside another one takes from it
        self.inputs: Sequence[Any] = ()  # of a program inside another one
        self.outputs: Sequence[Any] = ()
        self.found: dict[Any, Products] = {}
        self.depth = 0

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

    def maker(self, value: Any) -> Step | None:
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
        if step is None or step.name not in COMPARED:
            return self.original(value), True
        how, order, is_itself = COMPARED[step.name]
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
        original = self.original(value)
        if (original, number) not in self.found:
            self.found[original, number] = self._found(value, number)
        return self.found[original, number]

    def _found(self, value: Any, number: int) -> Products:
        """At most so many products, found in so many steps, that no loss takes long, however it makes its mask."""
        step, found = self.maker(value), None
        if step is not None and self.depth < MOST_STEPS:
            self.depth += 1
            found = self._products(step, self.original(value), number)
            self.depth -= 1
        key, is_itself = self.factor(value)
        own = [frozenset([(key, is_itself != bool(number))])]
        return own if found is None else list(dict.fromkeys(found))[:MOST_PRODUCTS]

    def _products(self, step: Step, value: Any, number: int) -> Products | None:
        name, ins = step.name, step.ins
        if step.is_same:
            becomes_bool = value.aval.dtype == bool and ins[0].aval.dtype != bool  # of 2, too
            return None if number and becomes_bool else self.products(ins[0], number)
        if is_negation(self, step):
            return self.products(ins[name == "sub"], 1 - number)
        if name in ("and", "or") and value.aval.dtype != bool:  # bit by bit
            return None
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
        if name in COMPARED:
            return self._products_compared(step, number)
        if name == "max" and not all(self.number(value) is None for value in ins):  # as relu, of what may be negative
            return None
        if (name, number) in (("and", 0), ("or", 1), ("mul", 0), ("dot_general", 0), ("min", 0)):
            return _either(*(self.products(value, number) for value in ins))
        if (name, number) in (("and", 1), ("or", 0)) or (name in AT_ZERO_ALONE and not number):
            return [each for operand in ins for each in self.products(operand, number)]
        if name in ("exp", "logistic") or (name == "gather" and self.is_positive(ins[0])):
            return None if number else [NONE]
        if number or name in _SOME_ENTRIES | {"convert_element_type", "sub"} or len(step.linear) != 1:
            return None
        return [each for place in step.linear[0] for each in self.products(ins[place])]

    def _products_compared(self, step: Step, number: int) -> Products | None:
        """A count of what is greater than 0, or other than 0."""
        how, order, is_itself = COMPARED[step.name]
        value, other = step.ins[::order]
        is_told = (is_itself == bool(number)) == (how == "==")
        return self.products(value) if is_told and self.number(other) == 0 else None

    def inside(self, step: Step, program: Inside) -> "Body":
        """A program inside a step."""
        jaxpr, consts = compilers.opened(program.program)
        arrays = dict(zip(jaxpr.constvars, consts, strict=True))
        array = lambda value: value.val if isinstance(value, core.Literal) else arrays.get(value)
        body = Body((Step(eqn, eqn.invars, eqn.outvars) for eqn in jaxpr.eqns), array, lambda value: value)
        taken = list(zip(jaxpr.invars, program.taken(step.ins), strict=True))
        body.inputs, body.outputs = jaxpr.invars, jaxpr.outvars
        carried = jaxpr.invars[program.carried]  # not what it begins with
        body.given = {var: (self, operand) for var, operand in taken if var not in carried}
        return body


def is_negation(body: Body, step: Step) -> bool:
    """Whether a step is `~value`, `1 - value`, or `value == 0` of a bool."""
    is_compared = step.name == "eq" and body.root(step.ins[0]).aval.dtype == bool
    return (
        (step.name == "not" and body.root(step.ins[0]).aval.dtype == bool)
        or (step.name == "sub" and body.number(step.ins[0]) == 1)
        or (is_compared and body.number(step.ins[1]) == 0)
    )


def _either(a: Products, b: Products) -> Products:
    """What follows if one of two values is 0, or the first of it."""
    return [one | other for one, other in itertools.islice(itertools.product(a, b), MOST_PRODUCTS)]
