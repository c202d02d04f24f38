"""Owns Linen: the train state of Flax with a window, and a train step around it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, cast

import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

import optax_accum
from optax_accum import WeightedSum
from optax_accum.flax import _window
from optax_accum.flax._batch_norm import batch_moments, check_momentum, check_stats, merge_batch_stats
from optax_accum.flax._window import MicroStep

Tree = Any


class Window(NamedTuple):
    """What is summed over a window beside the gradients.

    Attributes:
      metrics: one `WeightedSum` for each announced metric.
      moments: those of `batch_moments`, or None.
      maxima: the elementwise maximum of fp8 statistics, or None.
    """

    metrics: dict[str, WeightedSum]
    moments: WeightedSum | None
    maxima: Tree


class TrainState(train_state.TrainState, kw_only=True):
    """`flax.training.train_state.TrainState` whose `step` counts updates, for an optimizer that accumulates.

    Change the import, and wrap the optimizer in `accumulate_gradients`; the train step stays as it is.

    Attributes:
      step: int32 []. Updates made. Schedules, logs and evaluations that ask for it act once per update.
      micro_step: int32 []. Calls of `apply_gradients`.
      batch_stats: the running statistics of BatchNorm, or None. They stay what they are while a window is held, and
        make one momentum step when it emits, with the statistics of the whole window (see `merge_batch_stats`).
      window: the sums over the window so far: see `window_metrics`.
      momentum: that of the BatchNorm layers; needed with `batch_stats`.

    Guarantees:
      | case | result |
      |---|---|
      | an optimizer that does not accumulate | what Flax's own does; `weight`, `flush`, `metrics` warn once |
      | the window is held | `step`, `params` and `batch_stats` are the same, bit for bit |
      | the window is discarded | the same, and the metrics of the window begin anew |
      | `nonfinite` leaves a micro-batch out | so do metrics and `batch_stats`: a NaN in them does not stay |
      | no micro-batch of the window has counted yet | `window_metrics` are NaN |
      | fp8 statistics beside the parameters | the maximum over the window overwrites them when it emits |
      | a checkpoint of Flax's own `TrainState` | is restored; the fields that it lacks stay as created |
      | one of another model or optimizer | refused by `flax.serialization`, with the name of what differs |

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_accum
      >>> from flax import linen as nn
      >>> from optax_accum.flax import TrainState
      >>> model = nn.Dense(1)
      >>> params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
      >>> state = TrainState.create(apply_fn=model.apply, params=params, tx=tx, metrics=("loss",))
      >>> for x in (1.0, 2.0):
      ...     loss = lambda p: jnp.mean((state.apply_fn({"params": p}, jnp.full((1, 2), x)) - x) ** 2)
      ...     value, grads = jax.value_and_grad(loss)(state.params)
      ...     state = state.apply_gradients(grads=grads, weight=1.0, metrics={"loss": value})
      >>> int(state.step), int(state.micro_step), sorted(state.window_metrics())
      (1, 2, ['loss'])
    """

    micro_step: Any = 0
    batch_stats: Any = flax.struct.field(default_factory=lambda: None)  # a subclass may declare it without a default
    window: Any = None
    momentum: Any = flax.struct.field(pytree_node=False, default=None)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        flax.serialization.register_serialization_state(cls, _to_state_dict, _from_state_dict, override=True)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: Tree,
        tx: Any,
        metrics: tuple[str, ...] = (),
        momentum: float | None = None,
        **kwargs: Any,
    ) -> Self:
        """Creates a state before its first micro-step.

        Args:
          apply_fn: the model's `apply`.
          params: its parameters.
          tx: the optimizer.
          metrics: the names of the metrics that `apply_gradients` will be given.
          momentum: that of the BatchNorm layers, with `batch_stats`: it cannot be read off them.
          **kwargs: other fields, such as `batch_stats`.

        Raises:
          ValueError: `batch_stats` without `momentum`; an optimizer of several windows.
        """
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, momentum=momentum, **kwargs)
        window = kwargs.get("window")
        if window is None:
            stats, overwritten = state.batch_stats, _overwritten(params)
            merges = _window.find_window(state.opt_state) is not None and stats is not None
            if merges:
                check_momentum(momentum)
            window = Window(
                metrics=_window.zero_metrics(metrics),
                moments=_window.zero_sums(stats) if merges else None,
                maxima=jax.tree.map(jnp.zeros_like, overwritten),
            )
        counts = {name: jnp.asarray(getattr(state, name), jnp.int32) for name in ("step", "micro_step")}
        return state.replace(window=window, opt_state=_window.own_buffers(state.opt_state, params), **counts)

    def apply_gradients(
        self,
        *,
        grads: Tree,
        weight: Any = None,
        flush: Any = None,
        metrics: Mapping[str, Any] | None = None,
        stats_weight: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Makes one micro-step: adds the gradient, and updates if this closes the window.

        Args:
          grads: the gradients of one micro-batch, a tree like `params`.
          weight: how much the micro-batch counts: 1 by default.
          flush: closes the window with this micro-batch.
          metrics: scalars of this micro-batch, by the names given to `create`; they are averaged over the window.
          stats_weight: how much its `batch_stats` count: their rows, where `weight` counts something else.
          **kwargs: fields of the state are replaced, as Flax does (`batch_stats` as said above); all else goes to the
            optimizer.

        Raises:
          ValueError: metrics of other names or that are no scalars; `batch_stats` of another tree.
        """
        before = _window.find_window(self.opt_state)
        if before is None and not (weight is None and flush is None and metrics is None):
            _window.warn_once()
        fields = {field.name for field in dataclasses.fields(cast(Any, self))}
        replaced = {name: kwargs.pop(name) for name in list(kwargs) if name in fields}
        of_window = {} if before is None else {"weight": weight, "flush": flush}
        extra = {**kwargs, **{name: value for name, value in of_window.items() if value is not None}}
        params, opt_state = optax_accum.apply_gradients(
            self.tx, _trained(grads), self.opt_state, _trained(self.params), **extra
        )
        micro_step = MicroStep.between(before, _window.find_window(opt_state))
        window, counted = self.window, _window.as_weight(weight)
        if metrics is not None:
            window = window._replace(metrics=_window.add_metrics(window.metrics, metrics, counted, micro_step))
        if "batch_stats" in replaced and before is not None:
            counted = counted if stats_weight is None else _window.as_weight(stats_weight)
            stats, moments = self._add_stats(replaced["batch_stats"], counted, micro_step)
            replaced["batch_stats"], window = stats, window._replace(moments=moments)
        if _overwritten(grads) is not None:
            maxima, overwritten = self._overwrite(_overwritten(grads), micro_step)
            params, window = {"params": params, OVERWRITE_WITH_GRADIENT: overwritten}, window._replace(maxima=maxima)
        made = {"params": params, "opt_state": opt_state, "window": window}
        step = self.step + micro_step.emitted.astype(jnp.int32)
        return self.replace(**{"step": step, "micro_step": self.micro_step + 1, **made, **replaced})

    def window_metrics(self) -> dict[str, jax.Array]:
        """Returns the weighted means of the metrics over the window so far, or over the one that has just closed."""
        return _window.mean_metrics(self.window.metrics)

    def _add_stats(self, new: Tree, weight: jax.Array, micro_step: MicroStep) -> tuple[Tree, WeightedSum]:
        """Returns the running statistics, which step when the window emits, and its moments."""
        old = self.batch_stats
        check_stats(old, new)
        moments = _window.add(self.window.moments, batch_moments(new, old, self.momentum), weight, micro_step)
        merged = merge_batch_stats(_window.mean(moments), old, self.momentum)
        return jax.tree.map(lambda new, old: jnp.where(micro_step.emitted, new, old), merged, old), moments

    def _overwrite(self, new: Tree, micro_step: MicroStep) -> tuple[Tree, Tree]:
        """Returns the maxima of fp8 statistics over the window, and those statistics: overwritten when it emits."""
        largest = lambda maximum, new: jnp.maximum(
            jnp.where(micro_step.first, 0, maximum), jnp.where(micro_step.kept, new, 0)
        )
        maxima = jax.tree.map(largest, self.window.maxima, new)
        old = _overwritten(self.params)
        return maxima, jax.tree.map(lambda new, old: jnp.where(micro_step.emitted, new, old), maxima, old)


def train_step(
    fun: Callable[..., Any], *, weight_fn: Callable[..., Any] | None = None, **options: Any
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Returns the usual Linen train step: micro-batches within the call, windows across calls, metrics, donation.

    Args:
      fun: `fun(params, batch, key, state) -> (loss, extra)`, where `extra` is a dict that may hold `"metrics"`, a dict
        of scalars, and `"batch_stats"`, as the model returned them. Give `state.apply_fn` the key as `rngs`.
      weight_fn: how much a micro-batch counts: by default its number of rows. `batch_stats` always count by rows.
      **options: those of `optax_accum.value_and_grad`: `num_microbatches` or `microbatch_size`, `reduce_axes`, ...

    Returns:
      A jitted `step(state, batch, key) -> (state, metrics)` that donates `state`, a `TrainState` created with
      `metrics=("loss", ...)`. The metrics are those of the window so far.

    Raises:
      ValueError: fp8 statistics beside the parameters: their gradients are new values, which must not be added.
    """

    def pure(params: Tree, batch: Tree, key: jax.Array, state: TrainState) -> tuple[jax.Array, Any]:
        loss, extra = fun(params, batch, key, state)
        rows, moments = jnp.float32(_window.num_rows(batch)), None
        if "batch_stats" in extra:
            moments = batch_moments(extra["batch_stats"], state.batch_stats, state.momentum)
            moments = jax.tree.map(lambda leaf: rows * leaf, moments)
        return loss, (extra.get("metrics", {}), (moments, rows))

    cut = optax_accum.value_and_grad(
        pure, has_aux=True, rng_argnum=2, weight_fn=weight_fn, aux_reduction=("mean", "sum"), **options
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: Tree, key: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        if _overwritten(state.params) is not None:
            raise ValueError(
                f"train_step adds gradients within a call, and those of {OVERWRITE_WITH_GRADIENT!r} are new values. "
                "Take state.apply_gradients for each micro-batch, which takes their maximum over the window."
            )
        (loss, (metrics, sums)), grads = cut(state.params, batch, key, state)
        moments, new = _window.mean(WeightedSum(*sums)), {}
        if moments is not None:
            new = {"batch_stats": merge_batch_stats(moments, state.batch_stats, state.momentum)}
        rows = _window.num_rows(batch)
        weight = weight_fn(batch) if weight_fn else rows
        metrics = {"loss": loss, **metrics}
        state = state.apply_gradients(grads=grads, weight=weight, stats_weight=rows, metrics=metrics, **new)
        return state, state.window_metrics()

    return step


def _overwritten(tree: Tree) -> Tree:
    """Returns the part of parameters or gradients that Flax overwrites instead of training (fp8), or None."""
    return tree.get(OVERWRITE_WITH_GRADIENT) if isinstance(tree, Mapping) else None


def _trained(tree: Tree) -> Tree:
    return tree if _overwritten(tree) is None else tree["params"]


def _pytree_fields(state: TrainState) -> list[str]:
    fields = dataclasses.fields(cast(Any, state))
    return [field.name for field in fields if field.metadata.get("pytree_node", True)]


def _to_state_dict(state: TrainState) -> dict[str, Any]:
    return {name: flax.serialization.to_state_dict(getattr(state, name)) for name in _pytree_fields(state)}


def _from_state_dict(state: TrainState, saved: dict[str, Any]) -> TrainState:
    """Restores a saved state; fields that Flax's own `TrainState` does not have may be missing."""
    fields = _pytree_fields(state)
    if unknown := sorted(set(saved) - set(fields)):
        raise ValueError(f"The checkpoint is not one of a TrainState with these fields: it has {unknown}, too.")
    if missing := sorted({"step", "params", "opt_state"} - set(saved)):
        raise ValueError(f"The checkpoint is not one of a TrainState: {missing} are missing.")
    return state.replace(
        **{name: _restored(name, getattr(state, name), saved[name]) for name in fields if name in saved}
    )


def _restored(field: str, mine: Tree, saved: Tree) -> Tree:
    """Restores one field; raises where its tree or a shape is another: it is of another model or optimizer."""
    other = "optimizer" if field == "opt_state" else "model"
    remedy = f"Create the state with the {other} that was saved."
    try:
        restored = flax.serialization.from_state_dict(mine, saved, name=field)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"The checkpoint is one of another {other}: {error} {remedy}") from error
    for (path, old), new in zip(jax.tree.leaves_with_path(mine), jax.tree.leaves(restored), strict=True):
        if jnp.shape(old) != jnp.shape(new):
            raise ValueError(
                f"The checkpoint is one of another model: at {field}{jax.tree_util.keystr(path)} it has shape "
                f"{jnp.shape(new)}, and the state {jnp.shape(old)}. {remedy}"
            )
    return restored


flax.serialization.register_serialization_state(TrainState, _to_state_dict, _from_state_dict, override=True)
