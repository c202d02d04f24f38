"""What a traced loss says about micro-batches across calls: exact, not exact, or it cannot be read; and weights."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_accum._arguments import checks
from optax_accum._arguments.roles import Roles
from optax_accum._arguments.rows import count_known_rows, map_rows
from optax_accum._core import dtypes
from optax_accum._core.compilers import varying_axes
from optax_accum._core.equations import collective_axes
from optax_accum._core.leaves import by_path, is_array, parted
from optax_accum._core.types import Axes, Name, Tree
from optax_accum._explain.explanation import CANNOT_BE_READ, EXACT, NOT_EXACT, PLAIN, Weight
from optax_accum._loss.ratio import Returns, as_ratio, check_loss, is_ratio
from optax_accum._rows.denominators import Denominator, Found, denominators_of, reasons_of
from optax_accum._rows.forms import Reason
from optax_accum._rows.places import Place, place_of
from optax_accum._rows.program import Constant, Program, needed
from optax_accum._shared.hidden_draws import draws_of, is_chosen
from optax_accum._within.splitting import Sizes
from optax_accum._within.traced_call import TracedCall, trace_call, type_of


def has_type(leaf: Any) -> bool:
    """Returns whether a leaf is an array, or the type of one."""
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A loss, with the arguments of one call, arrays or their types.

    Attributes:
      along: the axes of a `jax.shard_map` along which each of these may differ between devices.
    """

    fun: Callable[..., Any]
    roles: Roles
    arguments: dict[Name, Any]
    has_aux: bool
    along: tuple[frozenset[str], ...] = ()

    @classmethod
    def of(cls, fun: Callable[..., Any], roles: Roles, arguments: Mapping[Name, Any], has_aux: bool) -> "Subject":
        """Holds types in place of the arrays of a call."""
        along = tuple(varying_axes(leaf) for leaf in jax.tree.leaves(list(arguments.values())) if has_type(leaf))
        typed = {
            name: jax.tree.map(lambda leaf: type_of(leaf) if is_array(leaf) else leaf, argument)
            for name, argument in arguments.items()
        }
        return cls(fun, roles, typed, has_aux, along)

    def ask(self, question: Callable[[TracedCall], Any], *, integers: bool = False) -> Any:
        """Asks the traced loss, and runs nothing; parameters may be `integers`."""
        leaves, filled = parted(tuple(self.arguments.values()), has_type)
        answers: list[Any] = []

        def read(leaves: Sequence[jax.Array]) -> None:
            arguments = dict(zip(self.arguments, filled(leaves), strict=True))
            args = [argument for name, argument in arguments.items() if isinstance(name, int)]
            call = self.roles.bind(args, {name: arg for name, arg in arguments.items() if isinstance(name, str)})
            if not integers:
                checks.check_differentiable(call[call.params], of_whole_batch=self.roles.of_whole_batch)
            answers.append(question(trace_call(lambda call: call.apply(self.fun), call, Sizes(1, None), call.params)))

        jax.eval_shape(read, leaves)
        return answers[0]

    @property
    def batch(self) -> tuple[Name, ...]:
        """The arguments that hold the batch."""
        keywords = [name for name in self.arguments if isinstance(name, str)]
        return self.roles.passed_as(len(self.arguments) - len(keywords), keywords)["batch_argnums"]

    def with_batch(self, batch: Sequence[Tree]) -> "Subject":
        """Returns the loss with another batch: the arguments that hold it."""
        given = dict(zip(self.batch, repeated(batch), strict=True))
        return dataclasses.replace(self, arguments={**self.arguments, **given})

    @property
    def inputs(self) -> list[tuple[Name, str, Any]]:
        """The arrays of the call: the argument, its text, and the array."""
        return [
            (name, f"{self.roles.signature.parameter(name)}{path}", leaf)
            for name, argument in self.arguments.items()
            for path, leaf in by_path(argument, "")
            if has_type(leaf)
        ]


def _times(batch: Sequence[Tree]) -> int:
    """Returns how often the rows of a batch are repeated to read a loss, which may be another program for one row."""
    return 2 if count_known_rows(batch) == 1 else 1


def repeated(batch: Sequence[Tree]) -> Sequence[Tree]:
    times = _times(batch)
    return map_rows(lambda leaf: jnp.concatenate([leaf] * times), batch) if times > 1 else batch


Terms = dict[str | None, Found]


def terms_of(subject: Subject, found: TracedCall) -> Terms:
    """Returns what divides the loss, or each of its terms; {} for a `Ratio`, or a dict of them, that may add up."""
    returns, shapes = Returns(subject.has_aux), found.traced.shapes
    loss = returns.parts(shapes).loss
    check_loss(loss)
    others = [None if name in subject.batch else text for name, text, _ in subject.inputs]
    terms = loss if isinstance(loss, dict) else {None: loss}
    if any(map(is_ratio, terms.values())):
        places = jax.tree.unflatten(jax.tree.structure(shapes), range(len(jax.tree.leaves(shapes))))
        sums = jax.tree.leaves(as_ratio(returns.taken_apart(places).loss))
        reasons = (reason for place in sums for reason in reasons_of(found.levels, place))
        certain = [reason for reason in reasons if reason.is_certain and not reason.unless_weighed]
        return {None: Found((), tuple(dict.fromkeys(certain)))} if certain else {}
    names = sorted(terms, key=str)
    divides: Terms = {
        name: denominators_of(found.levels, others, place, subject.along) for place, name in enumerate(names)
    }
    plain = [one for term in divides.values() for one in term.denominators if one.by is None]
    if plain and len(terms) > len(plain) and not any(term.reasons for term in divides.values()):
        reason = Reason("a sum over rows that nothing divides, beside other terms", plain[0].sums[0].place, True)
        return dict.fromkeys(divides, Found((), (reason,)))
    return divides


class Answer(NamedTuple):
    """What the trace of a loss says about micro-batches across calls.

    Attributes:
      subject: the loss; it holds types alone.
      program: the program of rows.
      terms: what divides the loss, or each of its terms; {} for a `Ratio` that may add up.
      spoken_to: what it takes from other devices, so that their micro-batches do not count each by itself.
      drawn: where each micro-batch draws the same random numbers for its rows.
    """

    subject: Subject
    program: Program
    terms: Terms
    spoken_to: Sequence[Reason]
    drawn: Sequence[Reason]

    @property
    def reasons(self) -> list[Reason]:
        return [*self.drawn, *(reason for term in self.terms.values() for reason in term.reasons)]

    @property
    def denominators(self) -> list[Denominator]:
        return [one for term in self.terms.values() for one in term.denominators]

    @property
    def divides_by_several(self) -> bool:
        return len({one.by for one in self.denominators}) > 1

    @property
    def verdict(self) -> str:
        if any(reason.is_certain for reason in self.reasons) or self.divides_by_several:
            return NOT_EXACT
        return CANNOT_BE_READ if self.reasons else EXACT

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The denominators in the user's terms."""
        return tuple(self._in_words(name, one) for name, term in self.terms.items() for one in term.denominators)

    @property
    def places(self) -> set[Place]:
        """The lines that a text names: of the sums that divide the loss, and of the reasons against a weight."""
        return {one.makes.place for one in self.denominators if one.makes} | {reason.place for reason in self.reasons}

    def _in_words(self, term: str | None, denominator: Denominator) -> Weight:
        sums = tuple(dict.fromkeys(equation.place for equation in denominator.sums))
        if denominator.makes is None:
            return Weight(PLAIN if denominator.by is None else "its number of rows", term=term, sums=sums)
        names = [text for _, text, _ in self.subject.inputs]
        of = tuple(names[place] for place in sorted(denominator.inputs))
        guard, place = denominator.guard, denominator.makes.place
        text, by = f"the sum over rows at {place}", guard.name if guard and denominator.function else ""
        lost = tuple(dict.fromkeys(equation.place for equation in denominator.lost))
        return Weight(text, term, place, of, guard and guard.place, sums, by, lost)

    def counts(self, batch: Sequence[Tree]) -> dict[str | None, list[jax.Array]]:
        """How much a batch of these types counts: one number for each denominator of each term."""
        inputs, times = self.subject.with_batch(batch).inputs, _times(batch)
        values = [jnp.asarray(leaf) if is_array(leaf) else leaf for _, _, leaf in inputs]

        def count(one: Denominator) -> jax.Array:
            number = jnp.asarray(one.counted(self.program, values), dtypes.default_float())
            return number if one.by is None else number / times

        any_weight = (Denominator(None, ()),)
        return {name: list(map(count, term.denominators or any_weight)) for name, term in self.terms.items()}

    def weight(self, batch: Sequence[Tree]) -> jax.Array:
        """How much a batch of these types counts in a loss that one count divides."""
        return next(iter(self.counts(batch).values()))[0]

    @property
    def kept(self) -> Callable[[jax.Array], jax.Array] | None:
        """What the loss divides by in place of its weight, as a function of that: `maximum(weight, 1)`, say."""
        return self.denominators[0].function


def answer_of(
    subject: Subject,
    found: TracedCall,
    terms: Callable[[Subject, TracedCall], Terms] = terms_of,
    axes: Axes = (),
    *,
    eager: bool = False,
) -> Answer:
    """Returns what a traced loss says.

    `axes` are the devices', of which a micro-batch of each counts by itself. `eager`: outside `jit`, where another call
    may close over, or make, another key.
    """
    along = [each for each in found.traced.collectives if {*axes} & {*collective_axes(each)}]
    spoken_to = [Reason(f"{each.primitive.name} of the other devices of {axes}", place_of(each)) for each in along]
    return Answer(
        subject, found.levels.program, terms(subject, found), spoken_to, [] if eager else _drawn_alike(subject, found)
    )


def _drawn_alike(subject: Subject, found: TracedCall) -> list[Reason]:
    """Where numbers for each row are drawn from a key that is the same in each call: micro-batches all get the same."""
    program, reasons = found.levels.program, list[Reason]()
    losses = jax.tree.leaves(Returns(subject.has_aux).taken_apart(found.traced.shapes).loss)
    of_loss = needed(program.outputs[: len(losses)], program.made_by)
    changes = {*program.inputs}
    is_traced = lambda value: isinstance(value, Constant) and isinstance(value.array, Tracer)
    for equation in (each for each in program.equations if each in of_loss):
        depends = [value in changes or is_traced(value) for value in equation.ins]
        shapes, after = draws_of(equation.single, depends)
        if shapes != draws_of(equation.double, depends)[0] and not is_chosen(equation.single, depends):
            text = "numbers for rows are drawn from a key that is the same in each call (name an argument: rng_argnum)"
            reasons.append(Reason(text, equation.place, True))
        changes.update(value for value, changed in zip(equation.outs, after, strict=True) if changed)
    return reasons


def weight_fn(subject: Subject) -> Callable[..., Any]:
    """Returns a function of the batch that returns its weight: a number, a dict or a list."""

    def weight(*batch: Tree) -> Any:
        of_batch = subject.with_batch(batch)
        counts = of_batch.ask(lambda found: answer_of(of_batch, found)).counts(batch)
        of_terms = {name: numbers if len(numbers) > 1 else numbers[0] for name, numbers in counts.items()}
        return of_terms.get(None, of_terms)

    return weight
