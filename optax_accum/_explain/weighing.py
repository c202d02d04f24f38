"""How much a micro-batch of a loss counts across calls: read off the traced loss, and computed from a batch."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._arguments import checks
from optax_accum._arguments.roles import Call, Roles
from optax_accum._arguments.rows import count_known_rows, of_rows
from optax_accum._core import dtypes, messages
from optax_accum._core.compilers import varying_axes
from optax_accum._core.equations import collective_axes
from optax_accum._core.leaves import by_path, is_array, parted
from optax_accum._core.messages import counted
from optax_accum._core.types import Axes, Name, Tree
from optax_accum._explain.explanation import BY_ITSELF, PLAIN, Weight
from optax_accum._explain.written import summed
from optax_accum._loss.parts import Returns
from optax_accum._loss.ratio import as_ratio, check_loss, is_ratio
from optax_accum._loss.weighing import ByWeight
from optax_accum._rows.denominators import Denominator, Found, denominators_of, reasons_of
from optax_accum._rows.forms import TAKES, Reason
from optax_accum._rows.places import place_of
from optax_accum._rows.program import Program
from optax_accum._within.splitting import Sizes
from optax_accum._within.traced_call import TracedCall, trace_call, type_of


def typed(tree: Tree) -> Tree:
    """Returns a tree with types in place of its arrays, which it does not hold."""
    return jax.tree.map(lambda leaf: type_of(leaf) if is_array(leaf) else leaf, tree)


def has_type(leaf: Any) -> bool:
    """Returns whether a leaf is an array, or the type of one."""
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def differs_along(tree: Tree) -> tuple[frozenset[str], ...]:
    """Returns the axes of a `jax.shard_map` along which each array, or type of one, may differ between devices."""
    return tuple(varying_axes(leaf) for leaf in jax.tree.leaves(tree) if has_type(leaf))


@dataclasses.dataclass(frozen=True)
class Subject:
    """A loss, with the arguments of one call, arrays or their types; `along`: what `differs_along` says of these."""

    fun: Callable[..., Any]
    roles: Roles
    arguments: dict[Name, Any]
    sizes: Sizes
    has_aux: bool
    along: tuple[frozenset[str], ...] = ()

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
            answers.append(question(trace_call(lambda call: call.apply(self.fun), call, self.sizes, call.params)))

        jax.eval_shape(read, leaves)
        return answers[0]

    @property
    def batch(self) -> tuple[Name, ...]:
        """The arguments that hold the batch."""
        keywords = [name for name in self.arguments if isinstance(name, str)]
        return self.roles.passed_as(len(self.arguments) - len(keywords), keywords)["batch_argnums"]

    @property
    def inputs(self) -> list[tuple[Name, str, Any]]:
        """The arrays of the call: the argument, its text, and the array."""
        return [
            (name, f"{self.roles.signature.parameter(name)}{path}", leaf)
            for name, argument in self.arguments.items()
            for path, leaf in by_path(argument, "")
            if has_type(leaf)
        ]


Terms = dict[str | None, Found] | None


def terms_of(subject: Subject, found: TracedCall) -> Terms:
    """Returns what divides the loss, or each of its terms; None for a `Ratio`, or a dict of them, that may add up."""
    returns, shapes = Returns(subject.has_aux), found.traced.shapes
    loss = returns.parts(shapes).loss
    check_loss(loss, None)
    others = [None if name in subject.batch else text for name, text, _ in subject.inputs]
    terms = loss if isinstance(loss, dict) else {None: loss}
    if any(map(is_ratio, terms.values())):
        places = jax.tree.unflatten(jax.tree.structure(shapes), range(len(jax.tree.leaves(shapes))))
        sums = jax.tree.leaves(as_ratio(returns.taken_apart(places).loss))
        reasons = (reason for place in sums for reason in reasons_of(found.levels, place))
        certain = [reason for reason in reasons if reason.is_certain and not reason.unless_weighed]
        return {None: Found((), tuple(dict.fromkeys(certain)))} if certain else None
    names = sorted(terms, key=str)
    return {name: denominators_of(found.levels, others, place, subject.along) for place, name in enumerate(names)}


def weight_of(subject: Subject, program: Program, term: str | None, denominator: Denominator) -> Weight:
    """Returns a weight in the user's terms."""
    sums = tuple(dict.fromkeys(equation.place for equation in denominator.sums))
    if denominator.makes is None:
        return Weight(PLAIN if denominator.by is None else "its number of rows", term=term, sums=sums)
    of = tuple(subject.inputs[place][1] for place in sorted(denominator.inputs))
    guard, place = denominator.guard, denominator.makes.place
    names = [text for _, text, _ in subject.inputs]
    expression = summed(program, denominator, names, subject.fun)
    text, by = f"the sum over rows at {place}", guard.name if guard else ""
    return Weight(text, term, place, of, guard and guard.place, sums, expression, by)


def _count(weight: Any, denominator: Denominator, times: int) -> jax.Array:
    """Returns the weight of a batch that was repeated so many times."""
    return jnp.asarray(weight, dtypes.default_float()) / (1 if denominator.by is None else times)


class Read(NamedTuple):
    """A sum over rows that divides a loss, for batches of the types that its subject has."""

    subject: Subject  # holds types alone
    program: Program
    denominator: Denominator
    times: int  # how often the rows of a batch are repeated

    def of(self, batch: Sequence[Tree]) -> jax.Array:
        """Returns the weight of a batch: of the arguments that hold it."""
        given = dict(zip(self.subject.batch, _repeated(batch, self.times), strict=True))
        inputs = dataclasses.replace(self.subject, arguments={**self.subject.arguments, **given}).inputs
        values = [jnp.asarray(leaf) if is_array(leaf) else leaf for _, _, leaf in inputs]
        return _count(self.denominator.counted(self.program, values), self.denominator, self.times)

    def factor(self, weight: jax.Array) -> Any:
        """Returns what makes of a loss the sum of its rows over the weight: it may divide by what is kept from zero.

        That is 1, but for fractional masks: a sum of 0.5 under `maximum(sum, 1)` gives 2.
        """
        if not self.denominator.keeps:
            return 1.0
        by = jnp.where(weight == 0, 1, weight)
        return jnp.where(weight == 0, 1, self.denominator.kept(by) / by)


class Answer(NamedTuple):
    """What the trace of a loss says about micro-batches.

    Attributes:
      subject: the loss; it holds types alone.
      program: the program of rows.
      found: what divides the loss, or each of its terms; empty for a `Ratio` that may add up.
      spoken_to: what it takes from other devices, so that their micro-batches do not count each by itself.
    """

    subject: Subject
    program: Program
    found: Sequence[Found]
    spoken_to: Sequence[Reason]

    @property
    def reasons(self) -> list[Reason]:
        return [reason for term in self.found for reason in term.reasons]

    @property
    def denominators(self) -> list[Denominator]:
        return [one for term in self.found for one in term.denominators]


@dataclasses.dataclass(frozen=True)
class Weigher:
    """How much micro-batches of a loss count in a mean: its denominator.

    Where it tells nothing they count by their rows: it communicates, say, or looks at values, or is another program for
    more rows. Where nothing shows that this is right, a warning says so.

    Attributes:
      axes: the devices', of which a micro-batch of each one counts by itself.

    Raises:
      ValueError: no weight makes micro-batches add up.
    """

    fun: Callable[..., Any]
    roles: Roles
    has_aux: bool
    axes: Axes = ()

    def by_weight(
        self, call: Call, *, takes_a_sum: bool, is_weighed: bool, total: Callable[[jax.Array], jax.Array] = lambda n: n
    ) -> ByWeight | None:
        """Returns how the micro-batch of a call counts; None if by its rows, or as the user says, or if it is summed.

        One trace of the loss gives both the weight and the factor: read in two places, where rows lie in different
        ways, one might be known and not the other. `total` adds the weights of devices that share one gradient.
        """
        if takes_a_sum or is_weighed:
            self._check(call, takes_a_sum=takes_a_sum, is_weighed=is_weighed)
            return None
        read = self._read(call)
        if read is None:
            return None
        weight = total(read.of(call[call.batch]))
        return ByWeight(weight, read.factor(weight))

    def _check(self, call: Call, *, takes_a_sum: bool, is_weighed: bool) -> None:
        """Raises where micro-batches of the loss do not add up, whatever they weigh.

        Warns where nothing shows that they do, unless the user weighs them (`is_weighed`) and so says it.
        """
        try:
            answer = self._ask(call, _of_sum if takes_a_sum else terms_of)
        except Exception as error:  # whatever the loss raises for twice as many rows
            if not is_weighed:
                _warn_of_sum([_other_program(error, call)])
            return
        if not answer.spoken_to:
            _check_adds_up(answer)
        if (reasons := [*answer.spoken_to, *answer.reasons]) and not is_weighed:
            _warn_of_sum(map(str, reasons))

    def _ask(self, call: Call, found_of: Callable[[Subject, TracedCall], Terms]) -> Answer:
        subject = self._subject(call)

        def answer(traced: TracedCall) -> Answer:
            found = (found_of(subject, traced) or {}).values()
            return Answer(subject, traced.levels.program, list(found), self._spoken_to(traced))

        return subject.ask(answer, integers=True)

    def _spoken_to(self, found: TracedCall) -> list[Reason]:
        along = [each for each in found.traced.collectives if {*self.axes} & {*collective_axes(each)}]
        return [Reason(f"{each.primitive.name} of the other devices of {self.axes}", place_of(each)) for each in along]

    def _subject(self, call: Call) -> Subject:
        """Returns the loss with the types of a call; of two rows, if it has one."""
        call = call.with_values(call.batch, _repeated(call[call.batch], _times(call[call.batch])))
        types = {name: typed(argument) for name, argument in call.arguments.items()}
        along = differs_along(list(call.arguments.values()))
        return Subject(self.fun, self.roles, types, Sizes(1, None), self.has_aux, along=along)

    def _read(self, call: Call) -> Read | None:
        batch = call[call.batch]
        try:
            answer = self._ask(call, terms_of)
        except Exception as error:  # whatever the loss raises for twice as many rows
            _warn([_other_program(error, call)], _ROWS)
            return None
        if answer.spoken_to:
            _warn(map(str, answer.spoken_to))
            return None
        _check_adds_up(answer)
        _check_batch_tells(answer)
        if answer.reasons:
            _warn(map(str, answer.reasons))
        if not answer.denominators or answer.denominators[0].makes is None:
            return None
        return Read(answer.subject, answer.program, answer.denominators[0], _times(batch))


def _other_program(error: Exception, call: Call) -> str:
    """Returns the reason why a loss is not read that raises for twice as many rows."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    rows = counted(count_known_rows(call[call.batch]), "row")
    return f"for twice its {rows} it is another program: {lines[0]}"


def _of_sum(_: Subject, found: TracedCall) -> Terms:
    """Returns why the losses of micro-batches may not add up, whatever count divides them."""
    return {None: Found((), reasons_of(found.levels, 0))}


def _times(batch: Sequence[Tree]) -> int:
    """Returns how often the rows of a batch are repeated to read a loss, which may be another program for one row."""
    return 2 if count_known_rows(batch) == 1 else 1


def _repeated(batch: Sequence[Tree], times: int) -> Sequence[Tree]:
    return of_rows(lambda leaf: jnp.concatenate([leaf] * times), batch) if times > 1 else batch


def _check_adds_up(answer: Answer) -> None:
    """Raises where micro-batches of a loss do not add up to the whole batch, however they are weighed."""
    certain = [reason for reason in answer.reasons if reason.is_certain and not reason.unless_weighed]
    lines, denominators = list(map(str, certain)), answer.denominators
    if len({denominator.by for denominator in denominators}) > 1:
        by = [f"the sum over rows at {one.makes.place}" if one.makes else "the number of rows" for one in denominators]
        lines += [f"its sums are divided by {' and by '.join(by)}"]
    if lines:
        norm = _NORM if any(reason.text.startswith(TAKES) for reason in certain) else ""
        raise ValueError(
            f"No weight makes the micro-batches of this loss add up to the whole batch:{_listed(lines)}\n"
            f"{_WITHIN} {norm}{BY_ITSELF}"
        )
    if any(one.by is None for one in denominators):
        raise ValueError(
            f"A loss that is a sum over rows, divided by no count of them ({denominators[0].sums[0].place}), is added "
            'over micro-batches, and the optimizer takes their mean. Pass reduction="sum" to accumulate_gradients, or '
            f"divide the sum by a count. {BY_ITSELF}"
        )


def _check_batch_tells(answer: Answer) -> None:
    """Raises where something else than the batch decides what divides a loss."""
    if certain := [reason for reason in answer.reasons if reason.is_certain]:
        raise ValueError(
            "The batch alone does not tell how much a micro-batch of this loss counts:"
            f"{_listed(map(str, certain))}\nSay it: {_WEIGHT}. {_WITHIN} {BY_ITSELF}"
        )


def _warn(reasons: Iterable[str], remedy: str = "") -> None:
    messages.warn(
        "It cannot be read how much a micro-batch of this loss counts, nor that micro-batches add up, so it counts by "
        f"its rows:{_listed(reasons)}\nIf micro-batches add up, say how much each counts: {_WEIGHT}. {_WITHIN}{remedy}"
    )


def _warn_of_sum(reasons: Iterable[str]) -> None:
    messages.warn(
        f"Nothing shows that micro-batches of this loss add up to the whole batch:{_listed(reasons)}\nIf their sum is "
        "meant nevertheless, say how they count: weight_fn=lambda batch: 1.0, say."
    )


_WEIGHT = "weight_fn=, or, of value_and_apply_gradients, weight= in a call"
_WITHIN = "Within a call rows are taken together, and value_and_grad is exact."
_NORM = "Across calls BatchNorm with running statistics is exact, or GroupNorm in its place. "
_ROWS = (
    " Or let the loss take sizes from the batch (x.shape[0], -1), not from a constant. Rows stand along the first axis "
    "of each array of the batch: one example without that axis needs it, x[None]."
)


def _listed(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in dict.fromkeys(lines))


def weight_fn(subject: Subject) -> Callable[..., Any]:
    """Returns a function of the batch that returns its weight: a number, a dict or a list."""

    def weight(*batches: Tree) -> Any:
        times = _times(batches)
        given = dict(zip(subject.batch, _repeated(batches, times), strict=True))
        of_batch = dataclasses.replace(subject, arguments={**subject.arguments, **given})
        values = [jnp.asarray(leaf) if is_array(leaf) else leaf for _, _, leaf in of_batch.inputs]

        def counts(found: TracedCall) -> dict[Any, list[Any]]:
            terms = terms_of(subject, found) or {}
            program = found.levels.program
            any_weight = Denominator(None, ())
            return {name: [(program, one) for one in term.denominators or [any_weight]] for name, term in terms.items()}

        weights = {
            name: [_count(one.counted(program, values), one, times) for program, one in denominators]
            for name, denominators in of_batch.ask(counts).items()
        }
        of_terms = {name: numbers if len(numbers) > 1 else numbers[0] for name, numbers in weights.items()}
        return of_terms.get(None, of_terms)

    return weight
