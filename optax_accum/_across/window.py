"""The micro-step: a micro-batch joins its window, which then holds or emits.

With `every=2`, call 1 adds a gradient in `join` and holds; call 2 adds one in `join` and emits: it divides the sum and
calls the inner optimizer. The addition comes before the branch between the two, so that none need return the sum.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_accum._across import accumulator, inner, on_host, outcomes
from optax_accum._across.accumulator import Divisor
from optax_accum._across.loss import Added
from optax_accum._across.outcomes import Closing, Outcome
from optax_accum._across.policy import Policy
from optax_accum._across.schedules import Schedule
from optax_accum._arguments import checks
from optax_accum._core import arithmetic, compilers, flags, matching, sums
from optax_accum._core.leaves import NOT_ARRAYS, check_arrays, is_array
from optax_accum._core.state import AccumulationState
from optax_accum._core.sums import WeightedSum
from optax_accum._core.types import Flag, Tree, Weight
from optax_accum._loss.meter import Meter
from optax_accum._loss.weighing import Amount
from optax_accum._space.devices import Devices
from optax_accum._space.ending import Reduced
from optax_accum._space.space import Space


@dataclasses.dataclass(frozen=True)
class WindowRules:
    """The options of `accumulate_gradients`, each as the object that answers for it."""

    inner: optax.GradientTransformationExtraArgs
    schedule: Schedule
    divisor: Divisor
    policy: Policy
    meter: Meter
    accumulator_dtype: Tree
    emit_dtype: jnp.dtype | str | None
    mean_args: Mapping[str, Any]  # an example of each
    devices: Devices


class MicroBatch(NamedTuple):
    """The inputs of a micro-step, converted for its space."""

    grads: Tree  # the gradient, or, if a backward pass has added it, a stand-in of its shapes and dtypes
    amount: Amount
    flush: Any
    extra_args: Mapping[str, Any]
    added: Added | None = None


class Window(NamedTuple):
    """The window with this micro-batch in it."""

    state: AccumulationState
    total: Tree | Reduced  # sum(w g)
    weight: Weight  # sum(w)
    amount: Amount  # of this micro-batch
    counts: Flag  # whether the micro-batch is a micro-step

    def with_left(self, fields: dict[str, Any]) -> AccumulationState:
        """Moves the buffer of a closed window, if there is one, from the fields to the state."""
        left = fields.pop("acc_grads", None)
        return self.state if left is None else accumulator.with_sum(self.state, left)


def weighed(rules: WindowRules, space: Space, amount: Amount, state: AccumulationState) -> Amount:
    """Converts an amount for this space; a mean spreads it over the devices."""
    check_state(state)
    return amount.map(lambda number: space.weight(number, state.weight, spread=rules.divisor.is_mean))


def micro_step(
    rules: WindowRules, space: Space, batch: MicroBatch, state: AccumulationState, params: Tree | None, outcome: Outcome
) -> tuple[Tree, AccumulationState]:
    like = checked(rules, space, batch, state, params)
    closes = on_host.closes(rules.schedule, rules.policy, state, batch.flush)
    given, state = state, on_host.plain(state)
    window = join(rules, space, batch, state, params)
    if closes is None:
        weight = lambda: space.total(window.weight)
        closes = rules.schedule.closes(window.state, weight, window.counts, batch.flush)
    emit = lambda: close(rules, space, window, like, params, batch.extra_args, outcome)
    (result, fields), closing = outcomes.emit_or_hold(
        closes,
        lambda: judged(rules, space, batch, state, window),
        emit,
        lambda: leave_open(rules, space, window, outcome, emit),
        costly=rules.policy.needs_sum or space.communicates,
        alike=lambda new: inner.check_tree(rules.inner, new, state.inner_opt_state, like if params is None else params),
    )
    state = window.with_left(fields)
    return result, on_host.spent(outcomes.state_after(state, closes, closing, fields), given)


@jax.named_scope("optax_accum.add")
def join(rules: WindowRules, space: Space, batch: MicroBatch, state: AccumulationState, params: Tree | None) -> Window:
    """Adds the micro-batch to its window, unless the policy leaves it out.

    A backward pass that adds gradients where they arise (`_across/loss.py`) has made the sum: `batch.added`.
    """
    skip, info = rules.policy.screen(space, batch.grads, batch.amount, state, params)
    counts = flags.negated(skip) if rules.policy.waits else True
    amount = batch.amount.map(lambda number: flags.selected(skip, 0, number))
    weight = amount.weight
    first = flags.known(state.mini_step == 0)
    added, window_weight = batch.added, accumulator.weight_with(state, weight)
    if added is None:
        squares = rules.meter.squares(batch.grads, like=state.weight)
        acc = arithmetic.add(accumulator.so_far(state), batch.grads, batch.amount.grad_weight, first, skip)
        added = Added(acc, squares, None)
    state = state._replace(
        mini_step=outcomes.count(state.mini_step, counts),
        weight=state.weight + weight,
        mean_args={name: _add_arg(name, old, batch.extra_args, amount, first) for name, old in state.mean_args.items()},
        skipped=outcomes.count(state.skipped, skip),
        skip_state=info,
        samples=rules.meter.sample(state.samples, _squares_of_mean(added.squares, amount), weight, first),
    )
    state = accumulator.with_sum(state, added.acc)
    return Window(state, added.reduced or added.acc, window_weight, amount, counts)


def _squares_of_mean(squares: Any, amount: Amount) -> Any:
    """The squares of the gradient of a micro-batch's total over its weight."""
    if amount.grad_weight is amount.weight:
        return squares
    factor = (amount.grad_weight * arithmetic.reciprocal(amount.weight)) ** 2
    return jax.tree.map(lambda square: square * factor, squares)


def _add_arg(name: str, old: WeightedSum, extra_args: Mapping[str, Any], amount: Amount, first: Flag) -> WeightedSum:
    """Adds an extra argument to its weighted sum: one number or tree, or one for each device.

    The value is the loss, which scales as its gradient does.
    """
    if name not in extra_args:
        return sums.add(old, jax.tree.map(jnp.zeros_like, old.total), jnp.zeros_like(old.weight), first)
    value, rows = extra_args[name], jnp.shape(amount.weight)
    if is_array(old.total) and old.total.ndim == old.weight.ndim:
        remedy = (
            "Pass its mean, such as loss.mean(). For an array or a tree, give an example of it in a dict: mean_args="
            f"{{{name!r}: jnp.zeros(shape)}}, say. Or leave it out of mean_args."
        )
        value = checks.as_scalar(name, value, remedy, *rows)
    else:
        matching.check_mean_arg(name, value, old.total, old.weight.ndim)
    values = jax.tree.map(lambda leaf, total: jnp.broadcast_to(leaf, total.shape), value, old.total)
    return sums.add(old, values, amount.weight, first, amount.grad_weight if name == "value" else None)


@jax.named_scope("optax_accum.add")
def judged(rules: WindowRules, space: Space, batch: MicroBatch, before: AccumulationState, window: Window) -> Closing:
    """Whether a window that closes makes an update: its sum can be divided, and its policy accepts it."""
    weight = space.total(window.weight)
    divides = rules.divisor.divides(window.amount.divides(weight))
    if window.amount.kept and rules.policy.leaves_out:  # perhaps all that there was
        divides &= window.state.mini_step > 0 if rules.policy.waits else weight != 0
    emits = divides & rules.policy.accepts(space, window.total, window.weight)
    has_micro_batch = True
    if (asked := rules.schedule.asked(batch.flush)) is not False:
        has_micro_batch = flags.either(flags.negated(asked), space.total(batch.amount.grad_weight) != 0)
    had_samples = flags.either(flags.known(before.mini_step > 0), flags.known(has_micro_batch))
    loses_samples = flags.both(flags.known(window.state.mini_step > 0), had_samples)
    return Closing(flags.known(emits), flags.known(has_micro_batch), flags.known(loses_samples))


@jax.named_scope("optax_accum.emit")
def close(
    rules: WindowRules,
    space: Space,
    window: Window,
    like: Tree,
    params: Tree | None,
    extra_args: Mapping[str, Any],
    outcome: Outcome,
) -> tuple[Tree, dict[str, Any]]:
    """Reduces the window, once, and calls the inner optimizer with its mean, or sum, unless the policy rejects that.

    With the result it returns the fields of the state that change when a window emits.
    """
    state = window.state
    weight = space.total(window.weight)
    divisor = window.amount.divides(weight)
    total, left = space.reduced(window.total)
    gradient = arithmetic.divided(total, like, rules.divisor.factor(divisor), rules.emit_dtype)
    params = None if params is None else space.shard(params)

    def emit() -> tuple[Tree, dict[str, Any]]:
        extra = {**extra_args, **_grad_of_window(extra_args, gradient, like)}
        learnt = rules.meter.learn(state, space.total(state.samples), total, weight)
        extra |= outcomes.mean_args(space, state.mean_args, extra, window.amount)
        updates, inner_opt_state = inner.update(rules.inner, gradient, like, state.inner_opt_state, params, extra)
        return outcome.updated(updates), outcomes.fields_of(state) | learnt | {"inner_opt_state": inner_opt_state}

    if rules.policy.rejects is None:
        result, fields = emit()
        return result, fields | left
    rejected, info = rules.policy.rejects(gradient, state, params)
    discard = lambda: (outcome.unchanged(emit), outcomes.fields_of(state))
    result, fields = compilers.branch(rejected, discard, emit)
    return result, fields | left | {"rejected": rejected, "skip_state": info}


def _grad_of_window(extra_args: Mapping[str, Any], gradient: Tree, like: Tree) -> dict[str, Tree]:
    """The `grad` argument of a line search, which gets its gradient twice; {} if the caller's is no gradient."""
    given = extra_args.get("grad")
    if jax.tree.structure(given) != jax.tree.structure(like):
        return {}
    shapes = zip(map(jnp.shape, jax.tree.leaves(given)), map(jnp.shape, jax.tree.leaves(like)), strict=True)
    of_one_or_all_devices = all(shape in (whole, shape[:1] + whole) for shape, whole in shapes)
    return {"grad": gradient} if of_one_or_all_devices else {}


@jax.named_scope("optax_accum.hold")
def leave_open(
    rules: WindowRules, space: Space, window: Window, outcome: Outcome, emit: Callable[[], tuple[Tree, dict[str, Any]]]
) -> tuple[Tree, dict[str, Any]]:
    fields = outcomes.fields_of(window.state) | space.held(window.total)
    if rules.policy.rejects is not None:
        fields |= {"rejected": jnp.array(False), "skip_state": window.state.skip_state}
    return outcome.unchanged(emit), fields


def check_state(state: Any) -> None:
    if not isinstance(state, AccumulationState):
        remedy = (
            "The order is tx.update(grads, state, params), apply_gradients(tx, grads, state, params), and in "
            "value_and_apply_gradients step(params, state, batch)."
        )
        if isinstance(state, tuple):
            remedy = (
                "If it is that of the inner optimizer, go on with tx.init(params)._replace(inner_opt_state=state). "
                + remedy
            )
        if isinstance(state, optax.MultiStepsState):
            remedy = "Turn that of optax.MultiSteps into one with from_multi_steps."
        raise TypeError(
            f"The state must be what `init` returned, an AccumulationState: state={type(state).__name__}. {remedy}"
        )


def checked(rules: WindowRules, space: Space, batch: MicroBatch, state: AccumulationState, params: Tree | None) -> Tree:
    """Checks the micro-batch against the state; returns stand-ins with the whole gradient's shapes and dtypes."""
    if batch.added is None:
        accumulator.check(rules.schedule, state, batch.grads)
    for name in (name for name in rules.meter.fields if not getattr(state, name)):
        raise ValueError(
            f"The state was made without {name}: state.{name}=(). Add what is missing with "
            "new = tx.init(params); state._replace(samples=new.samples, statistics=new.statistics, seen=new.seen)."
        )
    if unknown := sorted(({*rules.mean_args} ^ {*state.mean_args}) & batch.extra_args.keys()):
        raise ValueError(
            f"The state must have a sum for each mean argument: {unknown[0]!r} is given, "
            f"mean_args={tuple(rules.mean_args)}, and the state has sums for {tuple(state.mean_args)}. Between two "
            "windows, take those of a new state: state._replace(mean_args=tx.init(params).mean_args)."
        )
    like = batch.grads if batch.added else space.like(batch.grads)
    if params is not None:
        check_arrays("Parameters", params, NOT_ARRAYS)
        matching.check_params(params, like)
    names = set(batch.extra_args) - set(rules.mean_args)
    inner.check_extra_args(rules.inner, names, (like, state.inner_opt_state, params), batch.extra_args)
    return like
