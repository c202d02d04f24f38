"""NNX's optimizer with a window; it steps the model once per update."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import optax_accum
from optax_accum._across.transformation import axes_of
from optax_accum._arguments import callables
from optax_accum._core.leaves import own_buffers
from optax_accum._core.state import AccumulationState
from optax_accum._core.sums import WeightedSum
from optax_accum._core.types import Tree
from optax_accum._space.meshes import names_over_devices
from optax_accum.flax import _window
from optax_accum.flax._nnx_module import batch_norms, check_trained, running_stats
from optax_accum.flax._nnx_reading import in_states_of, is_variable
from optax_accum.flax._versions import as_pure, set_sharding, sharding_of
from optax_accum.flax._window import MicroStep


class Optimizer(nnx.Optimizer):
    """An `nnx.Optimizer` that changes the model once per window.

    `updates` counts these changes; `step` counts calls, as in Flax.

    Attributes:
      step: uint32 []. Calls of `update`, as in Flax.
      updates: uint32 []. Updates made: for learning rates, logs and
        evaluations.
      window: the sums over the window so far, and the running statistics
        before it.

    Guarantees:
      * An optimizer that does not accumulate: what Flax's own does;
        `weight`, `flush`, `metrics` warn once.
      * A call that makes no update: parameters and the statistics of
        `nnx.BatchNorm` are what they were before the window.
      * An update: `nnx.BatchNorm` makes one momentum step, with the
        statistics of the whole window.
      * `nonfinite` leaves a micro-batch out: so do metrics and statistics;
        a NaN in them does not stay.
      * `wrt` names no variable of the model: an error, where Flax's own
        trains nothing.
      * Several optimizers on one model with BatchNorm: each would take its
        statistics; use one, with `optax.partition`.
      * Statistics are loaded into the model later: create the optimizer
        after that, or load its state as well.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> from flax import nnx
      >>> from optax_accum.flax.nnx import Optimizer
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
      >>> optimizer = Optimizer(model, tx, wrt=nnx.Param)
      >>> for _ in range(2):
      ...     loss = lambda model: jnp.mean(model(jnp.ones((1, 2))) ** 2)
      ...     grads = nnx.grad(loss)(model)
      ...     optimizer.update(model, grads, weight=3.0)
      >>> int(optimizer.step[...]), int(optimizer.updates[...])
      (2, 1)
    """

    def __init__(self, model: Any, tx: Any, *, wrt: Any, metrics: tuple[str, ...] = (), **kwargs: Any):
        """Creates an optimizer before its first micro-step.

        `metrics` names what `update` will be given.
        """
        check_trained(model, nnx.state(model, wrt), wrt, "Pass those that are to be trained.")
        super().__init__(model, _placing_rows(callables.as_optimizer(tx)), wrt=wrt, **kwargs)
        window_state = _window.find_window(as_pure(self.opt_state))
        self.tx = tx
        own = own_buffers(as_pure(self.opt_state), as_pure(nnx.state(model)))
        nnx.update(self.opt_state, nnx.state(own))
        self.updates = nnx.OptState(jnp.array(0, dtype=jnp.uint32))
        window: dict[str, Any] = {"metrics": _window.zero_metrics(metrics or ())}
        stats, _ = running_stats(model)
        if jax.tree.leaves(stats) and window_state is not None:
            window |= {"batch_stats": jax.tree.map(jnp.array, stats), "moments": _window.zero_sums(stats)}
        self.window = nnx.data(jax.tree.map(nnx.OptState, window))

    def update(  # type: ignore[override]
        self,
        model: Any,
        grads: Any,
        /,
        *,
        weight: Any = None,
        flush: Any = None,
        metrics: Mapping[str, Any] | None = None,
        stats_weight: Any = None,
        **kwargs: Any,
    ) -> None:
        """Makes one micro-step.

        Adds the gradient, and updates the model if this closes the window.

        Args:
          model: the module.
          grads: the gradients of one micro-batch.
          weight: how much the micro-batch counts: 1 by default.
          flush: closes the window with this micro-batch.
          metrics: scalars of this micro-batch, by the names given to the
            constructor, averaged over the window.
          stats_weight: how much its BatchNorm statistics count: `weight` by
            default. BatchNorm takes the mean over rows, so with a `weight`
            that does not count rows (tokens), pass the number of rows:
            otherwise the merged statistics are wrong, without an error.
          **kwargs: for the optimizer, such as `grad_weight`.

        Raises:
          TypeError: a metric that is no real number; an extra argument that
            looks like one of these, misspelt.
          ValueError: metrics of other names, missing, or no scalars;
            gradients of other variables than those of `wrt`; a model with
            other layers than before.
        """
        if isinstance(model, nnx.State):
            raise TypeError("update takes the model first: model=State. The order is optimizer.update(model, grads).")
        params, state = as_pure(nnx.state(model, self.wrt)), as_pure(self.opt_state)
        before = _window.find_window(state)
        own = "metrics", "stats_weight"
        extra = _window.extra_args(before, kwargs, own, metrics, weight=weight, flush=flush)
        grads = as_pure(nnx.state(grads, self.wrt))
        _check_grads(grads, params, self.wrt)
        params, state = optax_accum.apply_gradients(self.tx, grads, state, params, **as_pure(extra))
        micro_step = MicroStep.between(before, _window.find_window(state))
        window, counted = as_pure(self.window), _window.as_weight(weight)
        metrics = metrics if metrics is None or isinstance(metrics, WeightedSum) else as_pure(dict(metrics))
        added = _window.add_metrics(window["metrics"], metrics, counted, micro_step, extra.get("grad_weight"))
        window = {**window, "metrics": added}
        if "moments" in window:
            counted = counted if stats_weight is None else _window.as_weight(stats_weight)
            window = _step_stats(model, window, counted, micro_step)
        if before is not None:
            _window.check_given(window["metrics"], metrics, as_pure(weight))
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(state))
        if type(_window.find_window(state)) is not AccumulationState:
            self.opt_state = nnx.data(in_states_of(state, self.opt_state))  # its type says that its micro-step is over
        nnx.update(self.window, nnx.state(window))
        self.step[...] += 1
        self.updates[...] += micro_step.emitted.astype(jnp.uint32)

    def discard_window(self, when: Any = True) -> None:
        """Drops the micro-batches added since the last update.

        `optax_accum.discard_window` says more. `step` and metrics stay; the
        next micro-step begins metrics and statistics anew.
        """
        state = optax_accum.discard_window(as_pure(self.opt_state), as_pure(when))
        nnx.update(self.opt_state, nnx.state(state))

    def window_metrics(self) -> dict[str, jax.Array]:
        """Returns the weighted means of the metrics over the window.

        That is the window so far, or the one that has just closed.
        """
        return _window.mean_metrics(as_pure(self.window)["metrics"])


def _placing_rows(tx: Any) -> optax.GradientTransformation:
    """Makes `tx.init` put the device axes into the partial sums' sharding metadata, as names of the first axis."""
    axes = axes_of(tx)

    def over_devices(variable: Any) -> Any:
        if isinstance(variable, nnx.Variable) and (names := sharding_of(variable)):
            set_sharding(variable, names_over_devices(axes, names) if axes else None)  # a chain hides its axes
        return variable

    placed = lambda acc: jax.tree.map(over_devices, acc, is_leaf=is_variable)
    return optax.GradientTransformation(lambda params: _window.with_partial_sums(tx.init(params), placed), tx.update)


def _check_grads(grads: Tree, params: Tree, wrt: Any) -> None:
    """Raises if a trained variable has no gradient."""
    paths = lambda tree: {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)}
    if missing := sorted(paths(params) - paths(grads)):
        raise ValueError(
            f"grads must hold a gradient for each variable of wrt={wrt!r}: there is none at {', '.join(missing)}. Pass "
            "the State that nnx.grad or optax_accum.flax.nnx.value_and_grad returned, for the same wrt."
        )


def _step_stats(model: Any, window: dict[str, Any], weight: jax.Array, micro_step: MicroStep) -> dict[str, Any]:
    """Moves a micro-batch's statistics from the model to the window; the model's change when the window emits."""
    new, momentum = running_stats(model)
    old = window["batch_stats"]
    moments, stats = _window.add_stats(window["moments"], new, old, momentum, weight, micro_step)
    state = nnx.state(model, batch_norms(model)[0])
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.copy, stats))  # two buffers: a donated one is gone
    nnx.update(model, state)
    return {**window, "batch_stats": stats, "moments": moments}
