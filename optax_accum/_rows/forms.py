"""A value as a sum of terms that add up over rows, each with powers of counts before it: n^-1 for a mean."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from optax_accum._rows.places import Place
from optax_accum._rows.program import Equation, Value

ROWS = "rows"  # the number of rows, among powers
Powers = frozenset[tuple["str | Sum | Extreme", int]]
NONE: Powers = frozenset()
TAKES = "each row takes a"  # the beginning of a reason


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum over rows that the batch alone decides, or a function of one: a value of the program, divided by powers."""

    value: Value
    powers: Powers


@dataclasses.dataclass(frozen=True)
class Extreme:
    """The largest, or the smallest, of all rows: a value of the program, made by an equation."""

    value: Value
    by: Equation

    def __str__(self) -> str:
        return "the smallest of all rows" if self.by.name == "reduce_min" else "the largest of all rows"


class Reason(NamedTuple):
    """Why micro-batches do not add up, whatever they weigh; or, unless `is_certain`, why nothing shows that they do.

    `unless_weighed`: a weight that the user computes may be right, but none of the batch alone.
    """

    text: str
    place: Place
    is_certain: bool = False
    unless_weighed: bool = False

    def __str__(self) -> str:
        return f"{self.text}, {self.place}"


class Term(NamedTuple):
    """Powers times a sum over rows; or, unless `is_sum`, times a value that each row decides alone, or no row at all.

    `sources`: the reductions that make the sum. `hides`: the operations that take a number in its place where a count
    is zero.
    """

    powers: Powers = NONE
    is_sum: bool = False
    sources: tuple[Equation, ...] = ()
    hides: frozenset[Equation] = frozenset()


class Form(NamedTuple):
    """A value as a sum of terms; zero has no terms. `reasons` say why the value may be no such sum."""

    terms: tuple[Term, ...] = (Term(),)
    reasons: tuple[Reason, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether each row decides its own part, without powers."""
        return not any(term.is_sum or term.powers for term in self.terms)

    @property
    def sums(self) -> tuple[Term, ...]:
        """The terms that are sums over rows."""
        return tuple(term for term in self.terms if term.is_sum)

    def because(self, *reasons: Reason) -> "Form":
        return self._replace(reasons=tuple(dict.fromkeys([*self.reasons, *reasons])))

    def times(self, powers: Powers, hides: Iterable[Equation] = ()) -> "Form":
        """Multiplies each term by powers."""
        times = lambda term: term._replace(powers=product(term.powers, powers), hides=term.hides.union(hides))
        return self._replace(terms=tuple(map(times, self.terms)))


ZERO = Form(())


def product(a: Powers, b: Powers) -> Powers:
    exponents = dict(a)
    for base, exponent in b:
        exponents[base] = exponents.get(base, 0) + exponent
    return frozenset((base, exponent) for base, exponent in exponents.items() if exponent)


def power(powers: Powers, exponent: int) -> Powers:
    return frozenset((base, own * exponent) for base, own in powers if exponent)


def added(forms: Iterable[Form]) -> Form:
    """The sum of values; terms with the same powers are merged."""
    terms: dict[tuple[Powers, bool], Term] = {}
    reasons: list[Reason] = []
    for form in forms:
        reasons += form.reasons
        for term in form.terms:
            first = terms.get((term.powers, term.is_sum), term)
            sources = tuple(dict.fromkeys([*first.sources, *term.sources]))
            terms[term.powers, term.is_sum] = first._replace(sources=sources, hides=first.hides | term.hides)
    return Form(tuple(terms.values())).because(*reasons)


def summed(form: Form, by: Equation) -> Form:
    """The sum of a value over its rows, made by one reduction."""
    return added([form._replace(terms=tuple(term._replace(is_sum=True, sources=(by,)) for term in form.terms))])


def extremes_of(powers: Powers) -> list[Extreme]:
    return [by for by, _ in powers if isinstance(by, Extreme)]


def name_of(term: Term) -> str:
    """A sum over rows is called a mean if the number of rows divides it."""
    return "mean over rows" if (ROWS, -1) in term.powers else "sum over rows"


def failed(forms: Sequence[Form], *reasons: Reason) -> Form:
    """A result that does not add up: one reason of each kind for each line."""
    known = [reason for form in forms for reason in form.reasons]
    kind = lambda reason: (reason.text.startswith(TAKES), *reason[1:])
    kinds = set(map(kind, known))
    return Form().because(*known, *(reason for reason in reasons if kind(reason) not in kinds))


def taken_by_rows(term: Term, source: Equation) -> Reason:
    return Reason(f"{TAKES} {name_of(term)}", source.place, is_certain=True)


def multiplied(forms: Sequence[Form]) -> Form:
    """The form of a product of separate rows."""
    left, right = forms
    terms = tuple(Term(product(a.powers, b.powers), hides=a.hides | b.hides) for a in left.terms for b in right.terms)
    return added([Form(terms).because(*left.reasons, *right.reasons)])


def scattered(form: Form, by: Form, equation: Equation) -> Form:
    """The form of an operation that is linear in one operand; `by` must have no powers."""
    reasons = () if by.is_plain else (Reason(f"{equation.name} at places that a count decides", equation.place),)
    return form.because(*by.reasons, *reasons)
