"""Linen's train step: micro-batches within the call, windows across calls."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

import optax_accum
from optax_accum._arguments import checks
from optax_accum._arguments.callables import as_weight_fn, check_called_with
from optax_accum._arguments.roles import Call, Roles
from optax_accum._core.sums import mean as weighted_mean
from optax_accum._core.types import Tree
from optax_accum._shared.arrays import is_key, short
from optax_accum.flax import _calls, _window
from optax_accum.flax._batch_norm import batch_moments, merge_batch_stats
from optax_accum.flax._calls import StepWeighing
from optax_accum.flax._linen import TrainState, field_names, parted


def train_step(
    fun: Callable[..., Any], *, weight_fn: Callable[..., Any] | None = None, exact: bool = True, **options: Any
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Returns a jitted Linen train step that accumulates.

    The step splits its batch into micro-batches, accumulates across calls,
    averages metrics over the window, and donates its state.

    Args:
      fun: `fun(params, batch, key, state) -> (loss, extra)`, where `extra`
        is a dict that may hold `"metrics"`, a dict of scalars, and must
        hold `"batch_stats"`, as the model returned them, if the state has
        some. Give `state.apply_fn` the key as `rngs`. `fun` gets
        the state without parameters and optimizer state.
      weight_fn: `weight_fn(batch)` is how much a call counts in its window.
        By default what the traced loss divides by: a sum over a mask, or
        the number of rows, and rows with a warning where nothing shows that
        this is right; 1 if the optimizer takes a sum; a `Ratio` says it
        itself. `batch_stats` always count by rows. Within a call all rows
        are taken together, as in `optax_accum.value_and_grad`: BatchNorm
        and dropout are those of the whole call. With `devices` in the
        optimizer they are those of each device, which is weighed by it.
      exact: whether the update is to be the whole batch's, so that a loss
        whose calls certainly do not add up raises, however they are weighed
        (BatchNorm by the statistics of a call). False: each call counts by
        itself, by `weight_fn` or by its rows, and the loss is not read.
      **options: those of `optax_accum.value_and_grad`: `num_microbatches`
        (1 if your loader delivers micro-batches) or `microbatch_size`, and
        others. `devices` of `accumulate_gradients` need not be repeated
        here.

    Returns:
      A jitted `step(state, batch, key, flush=None) -> (state, metrics)`
      that donates `state`, a `TrainState` created with
      `metrics=("loss", ...)`. The metrics are those of the window so far;
      of the call, if the optimizer does not accumulate.

    Raises:
      TypeError: the state is one of Flax's own; `fun` returns no pair; a
        metric that is no real number; an option that `train_step` sets
        itself.
      ValueError: `extra` lacks `"batch_stats"`, or has other entries; a
        metric of the name `"loss"`; a window of several calls whose
        gradients do not add up, however they are weighed (BatchNorm,
        several denominators, a sum for a mean), unless `exact=False`.
        `optax_accum.explain` shows the lines.
    """
    _calls.check_step_options("optax_accum.flax.linen.train_step", options, _OWN_OPTIONS)
    checks.check_flag("exact", exact, may_be_none=False)
    check_called_with(fun, "params", "batch", "key", "state")

    def with_outputs(params: Tree, batch: Tree, key: jax.Array, state: TrainState) -> tuple[Any, Any]:
        loss, extra = _checked(fun(params, batch, key, state), state)
        return loss, (_calls.checked_loss(loss, extra.get("metrics", {})), extra)

    def sums_of(call: Call, loss: Any, extra: Mapping[str, Any], weigh: Callable[[], Any]) -> dict[str, Any]:
        (batch,), state = call[call.batch], call.arguments[3]
        sums = _calls.measured(loss, extra.get("metrics", {}), batch, weigh)._asdict()
        if extra.get("batch_stats"):
            moments = batch_moments(extra["batch_stats"], state.batch_stats, state.momentum)
            sums["moments"] = _window.weighted(moments, _calls.weight_of(batch))
        return sums

    optax_accum.value_and_grad(with_outputs, has_aux=True, **options)  # raises its errors when the step is built
    roles = Roles(with_outputs)
    as_weight_fn(weight_fn, roles)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        state: TrainState, batch: Tree, key: jax.Array, flush: Any = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        _check_state(state)
        _check_key(key)
        own = _calls.where_sums_go(state.tx, state.opt_state, options)
        still = state.replace(params=None, opt_state=None, window=None)
        call = roles.bind((state.params, batch, key, still), {})
        of_loss = with_outputs if exact else None
        weighing = StepWeighing.chosen(state.tx, state.opt_state, weight_fn, of_loss, own)
        compute = optax_accum.value_and_grad(weighing.differentiated(with_outputs), has_aux=True, **own)
        (_, outputs), grads = compute(state.params, batch, key, still)
        sums = weighing.summed(own, call, outputs, sums_of)
        if parted(grads)[1] is not None:  # of fp8: they are new values, no gradients
            new_values = _calls.over_devices(grads[OVERWRITE_WITH_GRADIENT], own, "max")
            grads = {**grads, OVERWRITE_WITH_GRADIENT: new_values}
        totals = _calls.over_devices(sums, own)
        moments, new = totals.get("moments"), {}
        if moments is not None:
            new = {"batch_stats": merge_batch_stats(weighted_mean(moments), state.batch_stats, state.momentum)}
        if _window.find_window(state.opt_state) is None:  # each call is an update
            return state.apply_gradients(grads=grads, flush=flush, **new), weighted_mean(totals["sums"])
        new |= {"weight": sums["sums"].weight, "stats_weight": None if moments is None else moments.weight}
        new |= {"grad_weight": sums["grad_weight"]}
        state = state.apply_gradients(grads=grads, flush=flush, metrics=totals["sums"], **new)
        return state, state.window_metrics()

    return step


_OWN_OPTIONS: dict[str, str] = dict.fromkeys(
    ("has_aux", "argnums"),
    "Leave it out; for a step of another form, take optax_accum.value_and_grad and state.apply_gradients.",
)


def _check_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            f"train_step needs a state with a window: state={type(state).__module__}.{type(state).__qualname__}. "
            "Create it with optax_accum.flax.linen.TrainState; the order is (state, batch, key)."
        )
    if "metrics" in field_names(type(state)):
        raise ValueError(
            f"train_step averages metrics over the window: {type(state).__name__} has a field `metrics`. Give it "
            "another name."
        )


def _check_key(key: Any) -> None:
    if not all(map(is_key, jax.tree.leaves(key))):
        raise TypeError(f"The key must be one of jax.random: key={short(key)}. The order is (state, batch, key).")


def _checked(out: Any, state: TrainState) -> tuple[jax.Array, Mapping[str, Any]]:
    if not isinstance(out, tuple) or len(out) != 2 or not isinstance(out[1], Mapping):
        raise TypeError("fun must return (loss, extra), where extra is a dict. With nothing to add, return (loss, {}).")
    extra = out[1]
    if unknown := sorted(set(extra) - {"metrics", "batch_stats"}):
        raise ValueError(
            f'extra may hold "metrics" and "batch_stats": it has {unknown}. Put scalars into "metrics", '
            "and leave out the rest."
        )
    if jax.tree.leaves(state.batch_stats) and not extra.get("batch_stats"):
        raise ValueError(
            'extra must hold "batch_stats", since the state has some: it has none. Return what the model returned with '
            'mutable=["batch_stats"], or state.batch_stats where they are to stay.'
        )
    return out
