"""Linen's `TrainState` with a window; it steps once per update."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, cast

import flax.core
import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
from flax.core.meta import Partitioned
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

import optax_accum
from optax_accum._across.transformation import axes_of
from optax_accum._core.leaves import own_buffers
from optax_accum._core.sums import WeightedSum
from optax_accum._core.types import Axes, Tree
from optax_accum._space.meshes import names_over_devices
from optax_accum.flax import _window
from optax_accum.flax._batch_norm import check_stats, momentum_of_each
from optax_accum.flax._checkpoint import from_state_dict, to_state_dict
from optax_accum.flax._window import MicroStep


class WindowSums(NamedTuple):
    """The sums over a window beside the gradient.

    Attributes:
      metrics: one `WeightedSum` for each announced metric.
      moments: the sum of `batch_moments`, or None.
      maxima: the elementwise maximum of fp8 statistics, or None.
    """

    metrics: dict[str, WeightedSum]
    moments: WeightedSum | None = None
    maxima: Tree = None


class TrainState(train_state.TrainState, kw_only=True):
    """A `TrainState` of Flax Linen for an optimizer that accumulates.

    It extends `flax.training.train_state.TrainState`: `updates` counts the
    optimizer's updates. Change the import, and wrap the optimizer in
    `accumulate_gradients`; the train step stays as it is. `step` still
    counts calls, so a dropout key that is folded with it differs for each
    micro-batch of a window. A schedule outside the optimizer, a log or an
    evaluation that asked for `step` now asks for `updates`.

    Attributes:
      step: int32 []. Calls of `apply_gradients`, as in Flax: for random
        keys, the names of checkpoints, resumed loops.
      updates: int32 []. Updates made: for learning rates, logs and
        evaluations.
      batch_stats: the running statistics of BatchNorm, or None. They change
        only with an update: one momentum step, with the statistics of the
        whole window (see `merge_batch_stats`).
      window: the sums over the window so far: see `window_metrics`.
      momentum: that of the BatchNorm layers, needed with `batch_stats`; a
        number, or a prefix of their tree.

    Guarantees:
      * An optimizer that does not accumulate: what Flax's own does;
        `weight`, `flush`, `metrics` warn once.
      * A call that makes no update: `updates`, `params` and `batch_stats`
        are the same, bit for bit. If a part of an `optax.chain` stands
        outside the window, that part acts at every micro-step.
      * Closed late, by `weight=0, flush=True` alone: the statistics of the
        window step, as they should.
      * The window is discarded: no update, and the next micro-step begins
        another window.
      * `nonfinite` leaves a micro-batch out: so do metrics and
        `batch_stats`; a NaN in them does not stay.
      * No micro-batch of the window has counted yet: `window_metrics` are
        NaN.
      * A subclass has a field `metrics` of its own: `metrics=` sets that
        field, as in Flax, and the window averages no metrics.
      * fp8 statistics beside the parameters: the maximum over the window
        overwrites them when it updates.
      * A checkpoint of Flax's own `TrainState`: is restored; `updates` is
        read off its window, if it accumulated.
      * A checkpoint of another model, optimizer or dtype: refused by
        `flax.serialization`, with the name of what differs.
      * A checkpoint of other metrics: they are restored by name; others
        start anew.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_accum
      >>> from flax import linen as nn
      >>> from optax_accum.flax.linen import TrainState
      >>> model = nn.Dense(1)
      >>> params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
      >>> state = TrainState.create(
      ...     apply_fn=model.apply, params=params, tx=tx, metrics=("loss",))
      >>> for x in (1.0, 2.0):
      ...     rows = jnp.full((1, 2), x)
      ...     outputs = lambda p: state.apply_fn({"params": p}, rows)
      ...     loss = lambda p: jnp.mean((outputs(p) - x) ** 2)
      ...     value, grads = jax.value_and_grad(loss)(state.params)
      ...     state = state.apply_gradients(
      ...         grads=grads, weight=1.0, metrics={"loss": value})
      >>> int(state.step), int(state.updates)
      (2, 1)
      >>> sorted(state.window_metrics())
      ['loss']
    """

    updates: Any = 0
    batch_stats: Any = flax.struct.field(default_factory=lambda: None)  # a subclass may declare it without a default
    window: Any = flax.struct.field(default_factory=lambda: WindowSums({}))
    momentum: Any = flax.struct.field(pytree_node=False, default=None)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        flax.serialization.register_serialization_state(cls, to_state_dict, from_state_dict, override=True)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: Tree,
        tx: Any,
        metrics: Any = None,
        momentum: Tree = None,
        **kwargs: Any,
    ) -> Self:
        """Creates a state before its first micro-step.

        Args:
          apply_fn: the model's `apply`.
          params: its parameters.
          tx: the optimizer.
          metrics: the names of the metrics that `apply_gradients` will be
            given.
          momentum: that of the BatchNorm layers, with `batch_stats`: it
            cannot be read off them. A number, or a prefix of their tree:
            `{"BatchNorm_0": 0.9, "BatchNorm_1": 0.99}`.
          **kwargs: other fields, such as `batch_stats`.

        Raises:
          ValueError: `batch_stats` without `momentum`, or with that of
            other layers; an optimizer of several windows.
        """
        if "metrics" in field_names(cls) and metrics is not None:
            kwargs["metrics"], metrics = metrics, None
        kwargs["batch_stats"] = flax.core.unfreeze(kwargs.get("batch_stats", cast(Any, None)))
        momentum = flax.core.freeze(momentum) if isinstance(momentum, Mapping) else momentum
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, momentum=momentum, **kwargs)
        window, (trained, overwritten) = kwargs.get("window"), parted(params)
        accumulates = _window.find_window(state.opt_state) is not None
        if window is None:
            stats = state.batch_stats
            merges = accumulates and bool(jax.tree.leaves(stats))
            if merges:
                momentum_of_each(momentum, stats)
            window = WindowSums(
                metrics=_window.zero_metrics(metrics or ()),
                moments=_window.zero_sums(stats) if merges else None,
                maxima=jax.tree.map(jnp.zeros_like, overwritten),
            )
        counts = {name: jnp.asarray(getattr(state, name), jnp.int32) for name in ("step", "updates")}
        opt_state = _boxed(own_buffers(state.opt_state, params), trained, axes_of(tx))
        return state.replace(window=window, opt_state=opt_state, **counts)

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
        """Makes one micro-step.

        Adds the gradient, and updates if this closes the window.

        Args:
          grads: the gradients of one micro-batch, a tree like `params`.
          weight: how much the micro-batch counts: 1 by default.
          flush: closes the window with this micro-batch.
          metrics: scalars of this micro-batch, by the names given to
            `create`; they are averaged over the window.
          stats_weight: how much its `batch_stats` count: `weight` by
            default. BatchNorm takes the mean over rows, so with a `weight`
            that does not count rows (tokens), pass the number of rows:
            otherwise the merged statistics are wrong, without an error.
          **kwargs: fields of the state are replaced, as in Flax
            (`batch_stats` as above); all else, such as `grad_weight`, goes
            to the optimizer.

        Raises:
          TypeError: a metric that is no real number; an extra argument that
            looks like one of these, misspelt.
          ValueError: metrics of other names, missing, or no scalars;
            `batch_stats` of another tree.
        """
        fields = field_names(type(self))
        if "metrics" in fields and metrics is not None:
            kwargs["metrics"], metrics = metrics, None
        before = _window.find_window(self.opt_state)
        replaced = {name: kwargs.pop(name) for name in list(kwargs) if name in fields}
        own = "metrics", "batch_stats", "stats_weight"
        extra = _window.extra_args(before, kwargs, own, metrics, weight=weight, flush=flush)
        grad_weight = extra.get("grad_weight")
        (trained, old), (grads, new) = parted(self.params), parted(grads)
        opt_state = _boxed(self.opt_state, trained)
        params, opt_state = optax_accum.apply_gradients(self.tx, grads, opt_state, trained, **extra)
        opt_state = _boxed(opt_state, trained, axes_of(self.tx))
        micro_step = MicroStep.between(before, _window.find_window(opt_state))
        window, counted = self.window, _window.as_weight(weight)
        window = window._replace(metrics=_window.add_metrics(window.metrics, metrics, counted, micro_step, grad_weight))
        if before is not None:
            counted = counted if stats_weight is None else _window.as_weight(stats_weight)
            moments, stats = self._add_stats(replaced.pop("batch_stats", None), counted, micro_step)
            replaced, window = {"batch_stats": stats, **replaced}, window._replace(moments=moments)
            _window.check_given(self.window.metrics, metrics, weight)
        if new is not None:
            maxima, overwritten = self._overwrite(new, old, micro_step)
            params, window = {"params": params, OVERWRITE_WITH_GRADIENT: overwritten}, window._replace(maxima=maxima)
        made = {"params": params, "opt_state": opt_state, "window": window}
        updates = self.updates + micro_step.emitted.astype(jnp.int32)
        return self.replace(**{"step": self.step + 1, "updates": updates, **made, **replaced})

    def discard_window(self, when: Any = True) -> Self:
        """Drops the micro-batches added since the last update.

        `optax_accum.discard_window` says more. `step` and metrics stay; the
        next micro-step begins metrics and `batch_stats` anew.
        """
        return self.replace(opt_state=optax_accum.discard_window(self.opt_state, when))

    def window_metrics(self) -> dict[str, jax.Array]:
        """Returns the weighted means of the metrics over the window.

        That is the window so far, or the one that has just closed.
        """
        return _window.mean_metrics(self.window.metrics)

    def _add_stats(self, new: Tree, weight: jax.Array, micro_step: MicroStep) -> tuple[WeightedSum | None, Tree]:
        """The moments with this micro-batch's added, and the running statistics, which change when the window emits."""
        old, moments = self.batch_stats, self.window.moments
        if new is not None:
            check_stats(old, new)
        if moments is None:
            if jax.tree.leaves(new):
                raise ValueError(
                    "The window of this state has no sums for batch_stats: they were put into it later, or the "
                    "optimizer was. Pass batch_stats, momentum and the optimizer to TrainState.create."
                )
            return None, old
        new, weight = (old, jnp.zeros([])) if new is None else (new, weight)
        return _window.add_stats(moments, new, old, self.momentum, weight, micro_step)

    def _overwrite(self, new: Tree, old: Tree, micro_step: MicroStep) -> tuple[Tree, Tree]:
        """The maxima of the fp8 statistics over the window, and these statistics, overwritten when the window emits."""

        def largest(maximum: Any, new: Any) -> Any:
            return jnp.maximum(jnp.where(micro_step.first, 0, maximum), jnp.where(micro_step.counts, new, 0))

        maxima = jax.tree.map(largest, self.window.maxima, new)
        return maxima, micro_step.stepped(maxima, old)


def _boxed(opt_state: Tree, params: Tree, axes: Axes = ()) -> Tree:
    """Names the device axes in the boxes of partial sums, whose first axis lies over the devices.

    Without axes, the boxes get the parameters' names, as the boxes of gradients have.
    """
    is_box = lambda node: isinstance(node, Partitioned)
    renamed = lambda names: names_over_devices(axes, names) if axes else names

    def one(param: Any, acc: Any) -> Any:
        return acc.replace(names=renamed(param.names)) if is_box(param) and is_box(acc) else acc

    return _window.with_partial_sums(opt_state, lambda acc: jax.tree.map(one, params, acc, is_leaf=is_box))


def field_names(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def parted(tree: Tree) -> tuple[Tree, Tree]:
    """The trained part of parameters or gradients, and the part that Flax overwrites (fp8 statistics), or None."""
    overwritten = tree.get(OVERWRITE_WITH_GRADIENT) if isinstance(tree, Mapping) else None
    return (tree, None) if overwritten is None else (tree["params"], overwritten)


flax.serialization.register_serialization_state(TrainState, to_state_dict, from_state_dict, override=True)
