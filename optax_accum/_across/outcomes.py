"""The outcomes of a micro-step, and the state after either.

Hold keeps the parameters; emit returns new ones, and the next micro-step begins a window.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_accum._core import arithmetic, compilers, dtypes, flags, sums
from optax_accum._core.state import AccumulationState
from optax_accum._core.types import Flag, Tree
from optax_accum._loss.weighing import Amount
from optax_accum._space.space import Space

Fields = dict[str, Any]  # fields of the state
Branch = Callable[[], tuple[Tree, Fields]]
LEFT = "acc_grads"  # the field whose memory the sum of a closed window may take


class Outcome(NamedTuple):
    """The result of a micro-step beside the state: `updated(updates)`, or `unchanged(emit)`, shaped like `emit()`."""

    updated: Callable[[Tree], Tree]
    unchanged: Callable[[Callable[[], Any]], Tree]


class Closing(NamedTuple):
    """The verdict on a micro-step that closes its window."""

    emits: Flag  # whether the window makes an update
    has_micro_batch: Flag = True  # whether it brought a micro-batch, and did not only close the window
    loses_samples: Flag = False  # whether something was in the window, which is lost if it does not emit


def updates_of(space: Space, params: Tree | None) -> Outcome:
    """The outcome of `update`: updates, or zeros."""
    gathered = lambda updates: updates if params is None else space.gather(updates, params)
    return Outcome(gathered, lambda emit: arithmetic.zeros_of(jax.eval_shape(emit)[0], compilers.NOTHING))


def new_params(space: Space, params: Tree) -> Outcome:
    """The outcome of `apply_gradients`: new parameters, or the old ones."""
    moved = lambda updates: space.gather(apply_updates(space.shard(params), updates), params)
    return Outcome(moved, lambda emit: params)


def emit_or_hold(
    closes: Flag,
    judged: Callable[[], Closing],
    emit: Branch,
    hold: Branch,
    *,
    costly: bool,
    alike: Callable[[Tree], None],
) -> tuple[tuple[Tree, Fields], Closing]:
    """Calls the outcome that is known when tracing, else compiles both: a branch, or a select for a static flush.

    An outcome gives the result of a micro-step and its fields of the state; the verdict of `judged` is returned beside
    it. A `costly` verdict is asked only of a window that closes. Where both outcomes are compiled, `alike` raises if
    emitting changes the tree of the state.
    """

    def emit_beside_hold() -> tuple[Tree, Fields]:
        result, fields = emit()
        alike(fields["inner_opt_state"])
        return result, {name: compilers.returned(fields[name]) if name == LEFT else fields[name] for name in fields}

    def close() -> tuple[tuple[Tree, Fields], Closing]:
        closing = judged()
        return compilers.branch(closing.emits, emit_beside_hold, hold), Closing(*map(jnp.asarray, closing))

    if closes is False:
        return hold(), _HELD
    if costly and closes is not True:
        return compilers.branch(closes, close, lambda: (hold(), Closing(*map(jnp.array, _HELD))))
    closing = judged()
    emits = closing.emits if closes is True else closes & closing.emits
    closing = closing._replace(emits=emits)
    if isinstance(emits, bool):
        return emit() if emits else hold(), closing
    if closes is not True:
        return compilers.branch(emits, emit_beside_hold, hold), closing
    result, fields = emit()
    alike(fields["inner_opt_state"])
    before, old = hold()
    old |= {name: fields[name] for name in old if name == LEFT}  # nobody reads the sum of a closed window
    return _select(emits, (result, fields), (before, old)), closing


_HELD = Closing(emits=False, has_micro_batch=True, loses_samples=True)  # the last is read where a window closes


def fields_of(state: AccumulationState) -> Fields:
    """The fields of the state that only an emitting window changes."""
    return {name: getattr(state, name) for name in ("inner_opt_state", "statistics", "seen")}


def state_after(state: AccumulationState, closes: Flag, closing: Closing, fields: Fields) -> AccumulationState:
    """The state after the micro-step: a closed window starts again; its sum stays, to be overwritten."""
    rejected = fields.pop("rejected", False)
    closes, emits = flags.known(closes), flags.known(flags.both(closing.emits, flags.negated(rejected)))
    reset = lambda total: flags.selected(closes, jnp.zeros_like(total), total)
    return state._replace(
        mini_step=reset(state.mini_step),
        gradient_step=count(state.gradient_step, emits),
        weight=reset(state.weight),
        emitted=jnp.asarray(emits),
        discarded=count(state.discarded, flags.both(closes != emits, closing.loses_samples)),
        batches=count(state.batches, closing.has_micro_batch),
        **fields,
    )


def mean_args(
    space: Space, parts_of: dict[str, sums.WeightedSum], extra_args: Mapping[str, Any], amount: Amount
) -> dict[str, Tree]:
    """The weighted means of the mean arguments that came with this micro-step; the loss is divided as its gradient."""

    def mean(value: Any, parts: jax.Array, total: jax.Array, weight: jax.Array) -> jax.Array:
        value = jnp.asarray(value)
        last = 0 if parts.ndim > total.ndim else value.astype(total.dtype)  # if none of the values so far had a weight
        found = sums.mean(sums.WeightedSum(total, weight), empty=last)
        inexact = jnp.issubdtype(value.dtype, jnp.inexact)
        return found.astype(dtypes.accumulator_dtype(value.dtype, None)) if inexact else found

    means: dict[str, Tree] = {}
    for name in (name for name in parts_of if name in extra_args):
        total, weight = space.total(parts_of[name])
        by = amount.divides(weight) if name == "value" else weight
        mean_of = functools.partial(mean, weight=by)
        means[name] = jax.tree.map(mean_of, extra_args[name], parts_of[name].total, total)
    return means


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Like `optax.apply_updates`, but an integer parameter stays."""
    moved = jax.tree.map(lambda u, p: jnp.zeros_like(p) if dtypes.is_float0(u) else u, updates, params)
    return optax.apply_updates(params, moved)


def count(total: jax.Array, flag: Flag) -> jax.Array:
    """Adds one if the flag is set, but never overflows."""
    return total if flag is False else flags.selected(flag, optax.safe_increment(total), total)


def _select(flag: Flag, on_true: Tree, on_false: Tree) -> Tree:
    select = lambda a, b: a if dtypes.is_float0(a) else jnp.where(flag, a, b)
    chosen = jax.tree.map(select, *map(compilers.on_device, (on_true, on_false)))
    return compilers.to_memory_of(chosen, on_false)
