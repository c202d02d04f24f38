"""How much a micro-batch of a loss counts across calls: read off the traced loss; an error where no weight is right."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._arguments import checks
from optax_accum._arguments.roles import Call, Roles
from optax_accum._arguments.rows import count_known_rows
from optax_accum._core import messages, tracing
from optax_accum._core.types import Axes
from optax_accum._explain.answers import Answer, Subject, Terms, answer_of, repeated, terms_of
from optax_accum._explain.explanation import BY_ITSELF, LOST, WITHIN, lost_where
from optax_accum._loss.weighing import Amount
from optax_accum._rows.denominators import Found, reasons_of
from optax_accum._rows.forms import TAKES
from optax_accum._shared.checks import counted
from optax_accum._within.traced_call import TracedCall


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

    def amount(
        self, call: Call, *, takes_a_sum: bool, is_weighed: bool, total: Callable[[jax.Array], jax.Array] = lambda n: n
    ) -> Amount | None:
        """Returns how the micro-batch of a call counts; None if by its rows.

        If micro-batches are summed, or the user weighs them (`is_weighed`), it is None, too: then the loss is only
        checked. One trace of the loss gives both numbers: read in two places, where rows lie in different ways, one
        might be known and not the other. `total` adds the weights of devices that share one gradient.
        """
        is_read = not (takes_a_sum or is_weighed)
        try:
            answer = self._ask(call, _of_sum if takes_a_sum else terms_of)
        except Exception as error:  # whatever the loss raises for twice as many rows
            if is_read:
                _warn([_other_program(error, call)], _ROWS)
            elif not is_weighed:
                _warn_of_sum([_other_program(error, call)])
            return None
        if not answer.spoken_to:
            _check_adds_up(answer, takes_a_sum=takes_a_sum, is_weighed=is_weighed)
        if not is_read:
            if (reasons := [*answer.spoken_to, *answer.reasons]) and not is_weighed:
                _warn_of_sum(map(str, reasons))
            return None
        if not _tells(answer):
            return None
        weight = total(jnp.asarray(checks.as_weight(answer.weight(call[call.batch]), name="What the loss divides by")))
        return Amount.given(weight, answer.kept)

    def _ask(self, call: Call, terms: Callable[[Subject, TracedCall], Terms]) -> Answer:
        call = call.with_values(call.batch, repeated(call[call.batch]))
        subject = Subject.of(self.fun, self.roles, call.arguments, self.has_aux)
        eager = not tracing.is_staged()
        return subject.ask(lambda found: answer_of(subject, found, terms, self.axes, eager=eager), integers=True)


def _tells(answer: Answer) -> bool:
    """Whether a loss tells how much its micro-batch counts, other than by its rows; warns where nothing shows it."""
    if answer.spoken_to:
        _warn(map(str, answer.spoken_to))
        return False
    _check_batch_tells(answer)
    if answer.reasons:
        _warn(map(str, answer.reasons))
    if any(one.lost for one in answer.denominators):
        lost = " ".join(lost_where(weight) for weight in answer.weights if weight.lost)
        messages.warn(f"{lost} {LOST} {WITHIN}")
    return bool(answer.denominators) and answer.denominators[0].makes is not None


def _other_program(error: Exception, call: Call) -> str:
    """Returns the reason why a loss is not read that raises for twice as many rows."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    rows = counted(count_known_rows(call[call.batch]), "row")
    return f"for twice its {rows} it is another program: {lines[0]}"


def _of_sum(subject: Subject, found: TracedCall) -> Terms:
    """Returns why the losses of micro-batches may not add up, whatever count divides them; or else that count."""
    if reasons := reasons_of(found.levels, 0):
        return {None: Found((), reasons)}
    return {name: term._replace(reasons=()) for name, term in terms_of(subject, found).items()}


def _check_adds_up(answer: Answer, *, takes_a_sum: bool, is_weighed: bool) -> None:
    """Raises where micro-batches of a loss do not add up to the whole batch, as the optimizer takes them."""
    certain = [reason for reason in answer.reasons if reason.is_certain and not reason.unless_weighed]
    lines, denominators = list(map(str, certain)), answer.denominators
    if answer.divides_by_several:
        sums = [(one.makes or one.sums[0], "sum over" if one.makes else "number of") for one in denominators]
        by = " and by ".join(f"the {name} rows at {equation.place}" for equation, name in sums)
        lines += [f"its sums are divided by {by}: docs/weights.md has a window for each term"]
    if lines:
        norm = _NORM if any(reason.text.startswith(TAKES) for reason in certain) else ""
        raise ValueError(
            f"No weight makes the micro-batches of this loss add up to the whole batch:{_listed(lines)}\n"
            f"{WITHIN} {norm}{BY_ITSELF}"
        )
    if takes_a_sum and not is_weighed and any(one.by is not None for one in denominators):
        raise ValueError(
            f"A loss that is a mean ({denominators[0].sums[0].place}) is added over micro-batches, and the optimizer "
            f'takes their sum. Leave reduction="sum" out of accumulate_gradients, or return the sum. {BY_ITSELF}'
        )
    if not takes_a_sum and any(one.by is None for one in denominators):
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
            f"{_listed(map(str, certain))}\nSay it: {_WEIGHT}. {WITHIN} {BY_ITSELF}"
        )


def _warn(reasons: Iterable[str], remedy: str = "") -> None:
    messages.warn(
        "It cannot be read how much a micro-batch of this loss counts, nor that micro-batches add up, so it counts by "
        f"its rows:{_listed(reasons)}\nIf micro-batches add up, say how much each counts: {_WEIGHT}. {WITHIN}{remedy}"
    )


def _warn_of_sum(reasons: Iterable[str]) -> None:
    messages.warn(
        f"Nothing shows that micro-batches of this loss add up to the whole batch:{_listed(reasons)}\nIf their sum is "
        "meant nevertheless, say how they count: weight_fn=lambda batch: 1.0, say."
    )


_WEIGHT = "weight_fn=, or, of value_and_apply_gradients, weight= in a call"
_NORM = "Across calls, BatchNorm with use_running_average=True is exact, or GroupNorm in its place. "
_ROWS = (
    " Or let the loss take sizes from the batch (x.shape[0], -1), not from a constant. Rows stand along the first axis "
    "of each array of the batch: one example without that axis needs it, x[None], and an array without rows, as of "
    "running statistics, is an argument that whole_argnums names."
)


def _listed(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in dict.fromkeys(lines))
