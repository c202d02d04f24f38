"""Owns the micro-step: a micro-batch joins its window, which holds or emits. Knows neither devices nor policies."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_accum._across import inner, outcomes
from optax_accum._across.outcomes import Outcome, Question
from optax_accum._across.policy import Policy
from optax_accum._across.schedules import OfState
from optax_accum._core import arithmetic, checks, memory, statistics, sums
from optax_accum._core.arithmetic import Tree, Weight
from optax_accum._core.checks import Every
from optax_accum._core.leaves import NOT_ARRAYS, check_arrays
from optax_accum._core.state import AccumulationState
from optax_accum._core.sums import WeightedSum
from optax_accum._core.tracing import Flag
from optax_accum._space.here import here
from optax_accum._space.meshes import Axes
from optax_accum._space.space import Space


@dataclasses.dataclass(frozen=True)
class Rules:
    """What `accumulate_gradients` was asked for."""

    inner: optax.GradientTransformationExtraArgs
    every: Every
    reduction: str
    accumulator_dtype: Tree
    emit_dtype: jnp.dtype | str | None
    nonfinite: Any  # what the policy was asked for by
    policy: Policy
    mean_args: tuple[str, ...]
    statistics: statistics.Options | None
    reduce_axes: Axes = ()
    reduce_to: Tree = None

    def here(self) -> Space:
        """Returns where the partial sums of this trace live."""
        return here(self.reduce_axes, self.reduce_to)


class MicroBatch(NamedTuple):
    """What a micro-step is given, through the door of the space."""

    grads: Tree  # the gradient; where it has been added, anything of its shapes and dtypes
    weight: Weight
    flush: Any
    extra_args: Mapping[str, Any]
    added: Tree | None = None  # the accumulator with the gradient in it, if a backward pass has added it


class Window(NamedTuple):
    """The window with this micro-batch in it."""

    state: AccumulationState
    total: Tree  # sum(w g)
    weight: Weight  # sum(w)


def weighed(rules: Rules, space: Space, weight: Any, state: AccumulationState) -> Weight:
    """Takes a weight through the door: a share of it for each device where a mean is taken."""
    check_state(state)
    if isinstance(weight, checks.Rows) and rules.reduction == "sum":
        weight = 1.0
    return space.weight(weight, state.weight, share=rules.reduction == "mean")


def micro_step(
    rules: Rules,
    space: Space,
    batch: MicroBatch,
    state: AccumulationState,
    params: Tree | None,
    outcome: Outcome,
) -> tuple[Tree, AccumulationState]:
    """Does one micro-step: the micro-batch joins its window, which then holds or emits."""
    like = _checked(rules, space, batch, state, params)
    flush = checks.as_flush(batch.flush, rules.every)
    with jax.named_scope("optax_accum.add"):
        window = join(rules, space, batch, state, params)
        closes = outcomes.known(due(rules, window.state, flush))
        usable = accepted(rules, space, window, closes)

    def emit() -> tuple[tuple[Tree, Any], Tree]:
        with jax.named_scope("optax_accum.emit"):
            updates, kept, left = update_inner(rules, space, window, like, params, batch.extra_args)
            if closes is not False and not (closes is True and usable is True):
                made_for = like if params is None else params
                inner.check_kept(rules.inner, kept["inner_opt_state"], state.inner_opt_state, made_for)
            return (outcome.emitted(updates), kept), left

    def hold() -> tuple[tuple[Tree, Any], Tree]:
        with jax.named_scope("optax_accum.hold"):
            return (outcome.held(lambda: emit()[0]), outcomes.kept_of(state)), space.held(window.total)

    ((result, kept), left), usable = outcomes.emit_or_hold(closes, usable, emit, hold)
    after = outcomes.state_after(window.state, closes, usable, kept)
    if left is not None and has_accumulator(state):
        after = after._replace(acc_grads=memory.to_memory_of(left, state.acc_grads))
    return result, after


def join(rules: Rules, space: Space, batch: MicroBatch, state: AccumulationState, params: Tree | None) -> Window:
    """Adds the micro-batch to its window, unless the policy leaves it out."""
    skip, info = rules.policy.screen(space, batch.grads, batch.weight, state, params)
    weight = batch.weight if skip is False else jnp.where(skip, 0, batch.weight)
    counts = jnp.logical_not(skip) if rules.policy.waits and skip is not False else True
    kept, first = has_accumulator(state), state.mini_step == 0
    total = batch.added
    if total is None:
        acc = memory.to_device(state.acc_grads) if kept else None
        total = arithmetic.add(acc, batch.grads, batch.weight, first, skip)
    samples = state.samples
    if rules.statistics:  # one read more of the gradient
        squares = statistics.squared_norms(rules.statistics, batch.grads, like=state.weight)
        samples = statistics.add(samples, squares, weight, first)
    added = state._replace(
        mini_step=outcomes.count(state.mini_step, counts),
        acc_grads=memory.to_memory_of(total, state.acc_grads) if kept else (),
        weight=state.weight + weight,
        mean_args={name: _add_arg(name, old, batch.extra_args, weight, first) for name, old in state.mean_args.items()},
        skipped=outcomes.count(state.skipped, skip),
        skip_state=info,
        samples=samples,
    )
    return Window(added, total, added.weight if kept else weight)


def _add_arg(
    name: str, old: WeightedSum, extra_args: Mapping[str, Any], weight: Weight, first: jax.Array
) -> WeightedSum:
    """Adds an extra argument to its weighted sum: one number, or one for each device."""
    if name not in extra_args:
        return sums.add(old, jnp.zeros_like(old.total), jnp.zeros_like(old.weight), first)
    rows = jnp.shape(weight)
    remedy = "Pass its mean, such as loss.mean(), or leave it out of mean_args."
    value = checks.as_scalar(name, extra_args[name], remedy, *rows)
    return sums.add(old, jnp.broadcast_to(value, rows), weight, first)


def due(rules: Rules, state: AccumulationState, flush: Flag) -> Flag:
    """Returns whether the window closes with the micro-step that it has just counted."""
    if rules.every is None or flush is True:
        return flush
    if rules.every == 1 and not rules.policy.waits:
        return True
    every = rules.every
    if callable(every):
        every = checks.as_count(every(state if isinstance(every, OfState) else state.gradient_step))
    closes = state.mini_step >= every
    return closes if flush is False else closes | flush


def accepted(rules: Rules, space: Space, window: Window, closes: Flag) -> Flag | Question:
    """Returns whether an update can be made of this window; what is costly to know, a closing window asks."""
    policy = rules.policy

    def ask() -> Flag:
        weight = space.total(window.weight)
        weighty = arithmetic.divides(weight) if rules.reduction == "mean" else weight != 0
        return weighty & policy.accepts(space, window.total, window.weight) if policy.accepts else weighty

    if closes is False:
        return True
    if closes is True or not (policy.accepts or space.communicates):
        return outcomes.known(ask())
    return ask


def update_inner(
    rules: Rules, space: Space, window: Window, like: Tree, params: Tree | None, extra_args: Mapping[str, Any]
) -> tuple[Tree, dict[str, Any], Tree]:
    """Reduces the window, once, and calls the inner optimizer with its mean.

    Returns the updates, the fields of the state that a window changes by emitting, and what `reduced` left.
    """
    state = window.state
    weight = space.total(window.weight)
    total, left = space.reduced(window.total)
    mean = arithmetic.mean(total, like, weight if rules.reduction == "mean" else None, rules.emit_dtype)
    kept = learnt(rules, space, state, total, weight)
    extra_args = {**extra_args, **outcomes.mean_args(space.total(state.mean_args), extra_args)}
    params = None if params is None else space.shard(params)
    updates, inner_opt_state = inner.update(rules.inner, mean, like, state.inner_opt_state, params, extra_args)
    return updates, kept | {"inner_opt_state": inner_opt_state}, left


def learnt(rules: Rules, space: Space, state: AccumulationState, total: Tree, weight: Weight) -> dict[str, Any]:
    """Returns what a window tells by emitting, of what was asked for."""
    kept = outcomes.kept_of(state)
    if not state.seen:
        return kept
    weight = jnp.asarray(weight, state.seen.rest.dtype)
    if rules.statistics:
        squares = statistics.squared_norms(rules.statistics, total, like=weight)  # of the mean, it would be written
        squares = jax.tree.map(lambda square: square * arithmetic.reciprocal(weight) ** 2, squares)
        new = statistics.alone(space.total(state.samples), squares, weight, state.mini_step)
        kept["statistics"] = statistics.smooth(state.statistics, new, rules.statistics.decay)
    return kept | {"seen": statistics.see(state.seen, weight)}


def why_not_in_place(rules: Rules, state: AccumulationState) -> str | None:
    """Returns what keeps a backward pass from adding to the accumulator, if something does."""
    if not has_accumulator(state):
        return "the state holds no accumulator (every=1)"
    if rules.statistics:
        return "statistics take the gradient of each micro-batch, which it does not write (statistics=...)"
    if not rules.policy.unseen:
        return f"a policy has to see the gradient before it is added (nonfinite={rules.nonfinite!r})"
    return None


def has_accumulator(state: AccumulationState) -> bool:
    """Returns whether gradients are kept from one micro-step to the next: not for every=1."""
    return not (type(state.acc_grads) is tuple and not state.acc_grads)  # a MaskedNode is a tuple, too


def check_state(state: Any) -> None:
    """Raises unless the state is one of ours."""
    if not isinstance(state, AccumulationState):
        remedy = "The order is (gradients, state, parameters)."
        if isinstance(state, optax.MultiStepsState):
            remedy = "Turn that of optax.MultiSteps into one with from_multi_steps."
        raise TypeError(
            f"The state must be what `init` returned, an AccumulationState: state={type(state).__name__}. {remedy}"
        )


def _checked(rules: Rules, space: Space, batch: MicroBatch, state: AccumulationState, params: Tree | None) -> Tree:
    """Raises for what does not fit the state; returns leaves of the shapes and dtypes of the gradient of the whole."""
    if has_accumulator(state):
        arithmetic.check(state.acc_grads, batch.grads)
    elif rules.every != 1 and jax.tree.leaves(batch.grads):
        raise ValueError(
            f"Only every=1 works without an accumulator: every={rules.every}, and the state was made for every=1. "
            "Add one with state._replace(acc_grads=tx.init(params).acc_grads)."
        )
    wanted = {"statistics": rules.statistics, "seen": isinstance(rules.every, OfState)}
    for name in (name for name, asked in wanted.items() if asked and not getattr(state, name)):
        raise ValueError(
            f"The state holds no {name}, which was made without: state.{name}=(). Add what is missing with "
            "new = tx.init(params); state._replace(samples=new.samples, statistics=new.statistics, seen=new.seen)."
        )
    if unknown := sorted(({*rules.mean_args} ^ {*state.mean_args}) & batch.extra_args.keys()):
        raise ValueError(
            f"The state must have a sum for each mean argument: {unknown[0]!r} is given, mean_args={rules.mean_args}, "
            f"and the state has sums for {tuple(state.mean_args)}. Between two windows, take those of a new state: "
            "state._replace(mean_args=tx.init(params).mean_args)."
        )
    like = space.like(batch.grads)
    if params is not None:
        check_arrays("Parameters", params, NOT_ARRAYS)
        arithmetic.check_params(params, like)
    names = set(batch.extra_args) - set(rules.mean_args)
    inner.check_extra_args(rules.inner, names, (like, state.inner_opt_state, params), batch.extra_args)
    return like
