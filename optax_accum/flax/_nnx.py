"""Owns NNX: gradients of a module within a call, an optimizer with a window, and a train step around both."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import optax_accum
from optax_accum import WeightedSum
from optax_accum.flax import _window
from optax_accum.flax._batch_norm import batch_moments, check_stats, merge_batch_stats
from optax_accum.flax._window import MicroStep

Tree = Any


def value_and_grad(
    fun: Callable[..., Any], *, wrt: Any = nnx.Param, has_aux: bool = False, **options: Any
) -> Callable[..., tuple[Any, Any]]:
    """Does what `nnx.value_and_grad(fun)` does, one micro-batch after the other.

    Args:
      fun: a loss `fun(model, batch, *args)`, whose first argument is an NNX module; it may change the values of the
        module's variables, and make no new ones (`sow` does). All other arguments are arrays and trees of them, given
        by position: an `nnx.Rngs` belongs into the module.
      wrt: the variables to differentiate, such as `nnx.LoRAParam`: all others cost no accumulator.
      has_aux: `fun` returns `(loss, aux)`.
      **options: those of `optax_accum.value_and_grad`: `num_microbatches` or `microbatch_size`, `weight_fn`, ...

    Returns:
      A function of the arguments of `fun`, which returns `(value, grads)` and leaves the model's other state as the
      batch leaves it.

    Guarantees:
      | state of the model | after the call |
      |---|---|
      | random streams | have advanced at each micro-batch; with `reduce_axes`, each device has streams of its own |
      | `nnx.BatchNorm` | one momentum step, with the statistics of all rows (`merge_batch_stats`) |
      | whatever else there is | went from one micro-batch to the next |

    Example:
      >>> import jax.numpy as jnp, optax_accum.flax
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> loss = lambda model, x: jnp.mean(model(x) ** 2)
      >>> value, grads = optax_accum.flax.value_and_grad(loss, num_microbatches=2)(model, jnp.ones((4, 2)))
      >>> grads["kernel"].shape
      (2, 1)
    """
    reduction, axes = options.pop("aux_reduction", "mean"), options.get("reduce_axes")
    batch_argnums, reduced = options.get("batch_argnums", 1), options.get("reduced", True)

    @functools.wraps(fun)
    def run(model: Any, *args: Any) -> tuple[Any, Any]:
        running, momenta = _batch_norms(model)
        graph, params, stats, rest = nnx.split(model, wrt, running, ...)

        def pure(params: Any, *args_and_state: Any) -> tuple[jax.Array, Any]:
            *args, stats, rest = args_and_state
            copies = jax.tree.map(lambda leaf: leaf, (params, stats, rest))  # variables of this trace
            micro = nnx.merge(graph, *copies)
            streams = _own_streams(micro, axes) if axes else None
            out = fun(micro, *args)
            loss, aux = out if has_aux else (out, None)
            if axes:
                nnx.update(micro, streams)
            _, _, new, rest = nnx.split(micro, wrt, running, ...)
            old, rows = nnx.to_pure_dict(stats), _window.num_rows([(params, *args)[n] for n in _numbers(batch_argnums)])
            moments = batch_moments(nnx.to_pure_dict(new), old, momenta(old))
            return loss, ((_window.weighted(moments, jnp.float32(rows)), aux), rest)

        cut = optax_accum.value_and_grad(
            pure, has_aux=True, carry_argnum=len(args) + 2, aux_reduction=("sum", reduction), **options
        )
        (loss, ((sums, aux), rest)), grads = cut(params, *args, stats, rest)
        old, moments = nnx.to_pure_dict(stats), _window.mean(_window.over_devices(sums, axes, reduced=reduced))
        nnx.replace_by_pure_dict(stats, merge_batch_stats(moments, old, momenta(old)))
        nnx.update(model, stats, rest)
        return ((loss, aux) if has_aux else loss), grads

    return run


class Optimizer(nnx.Optimizer):
    """`nnx.Optimizer` whose `step` counts updates, and whose `update` touches the model only when a window emits.

    Attributes:
      step: uint32 []. Updates made.
      micro_step: uint32 []. Calls of `update`.
      window: the sums over the window so far, and the running statistics before it.

    Guarantees:
      | case | result |
      |---|---|
      | an optimizer that does not accumulate | what Flax's own does; `weight`, `flush`, `metrics` warn once |
      | the window is held | parameters and the statistics of `nnx.BatchNorm` are what they were before it |
      | the window emits | `nnx.BatchNorm` makes one momentum step, with the statistics of the whole window |
      | `nonfinite` leaves a micro-batch out | so do metrics and statistics: a NaN in them does not stay |
      | several optimizers on one model with BatchNorm | each would take its statistics: take one, `optax.partition` |
      | statistics are loaded into the model later | create the optimizer after that, or load its state as well |

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> from flax import nnx
      >>> from optax_accum.flax import Optimizer
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
      >>> optimizer = Optimizer(model, tx, wrt=nnx.Param)
      >>> for _ in range(2):
      ...     grads = nnx.grad(lambda model: jnp.mean(model(jnp.ones((1, 2))) ** 2))(model)
      ...     optimizer.update(model, grads, weight=3.0)
      >>> int(optimizer.step[...]), int(optimizer.micro_step[...])
      (1, 2)
    """

    def __init__(self, model: Any, tx: Any, *, wrt: Any, metrics: tuple[str, ...] = (), **kwargs: Any):
        """Creates an optimizer before its first micro-step; `metrics` names what `update` will be given."""
        super().__init__(model, tx, wrt=wrt, **kwargs)
        own = _window.own_buffers(nnx.as_pure(self.opt_state), nnx.as_pure(nnx.state(model)))
        nnx.update(self.opt_state, nnx.state(own))
        self.micro_step = nnx.OptState(jnp.array(0, dtype=jnp.uint32))
        window: dict[str, Any] = {"metrics": _window.zero_metrics(metrics)}
        stats, _ = _running_stats(model)
        if jax.tree.leaves(stats) and _window.find_window(nnx.as_pure(self.opt_state)) is not None:
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
        """Makes one micro-step: adds the gradient, and updates the model if this closes the window.

        Args:
          model: the module.
          grads: the gradients of one micro-batch.
          weight: how much the micro-batch counts: 1 by default.
          flush: closes the window with this micro-batch.
          metrics: scalars of this micro-batch, by the names given to the constructor, averaged over the window.
          stats_weight: how much its statistics count: its rows, where `weight` counts something else.
          **kwargs: for the optimizer.

        Raises:
          ValueError: metrics of other names or that are no scalars; a model with other layers than before.
        """
        params, state = nnx.as_pure(nnx.state(model, self.wrt)), nnx.as_pure(self.opt_state)
        before = _window.find_window(state)
        if before is None and not (weight is None and flush is None and metrics is None):
            _window.warn_once()
        of_window = {} if before is None else {"weight": weight, "flush": flush}
        extra = {**kwargs, **{name: value for name, value in of_window.items() if value is not None}}
        grads = nnx.as_pure(nnx.state(grads, self.wrt))
        params, state = optax_accum.apply_gradients(self.tx, grads, state, params, **nnx.as_pure(extra))
        micro_step = MicroStep.between(before, _window.find_window(state))
        window, counted = nnx.as_pure(self.window), _window.as_weight(weight)
        metrics = None if metrics is None else nnx.as_pure(dict(metrics))
        window = {**window, "metrics": _window.add_metrics(window["metrics"], metrics, counted, micro_step)}
        if "moments" in window:
            counted = counted if stats_weight is None else _window.as_weight(stats_weight)
            window = _step_stats(model, window, counted, micro_step)
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(state))
        nnx.update(self.window, nnx.state(window))
        self.step[...] += micro_step.emitted.astype(jnp.uint32)
        self.micro_step[...] += 1

    def window_metrics(self) -> dict[str, jax.Array]:
        """Returns the weighted means of the metrics over the window so far, or over the one that has just closed."""
        return _window.mean_metrics(nnx.as_pure(self.window)["metrics"])


def nnx_train_step(
    fun: Callable[..., Any],
    *,
    weight_fn: Callable[..., Any] | None = None,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., dict[str, jax.Array]]:
    """Returns the usual NNX train step: micro-batches within the call, windows across calls, metrics, donation.

    Args:
      fun: `fun(model, batch) -> loss`, or, with `has_aux`, `(loss, metrics)`, a dict of scalars. Random keys are those
        of the model.
      weight_fn: how much a micro-batch counts: by default its number of rows. Statistics always count by rows: those of
        the micro-batches that are run, which those of weight zero are not.
      wrt: the variables to train, as given to the `Optimizer`.
      has_aux: `fun` returns metrics.
      **options: those of `value_and_grad`; and `reduced=False`, if `reduce_axes` was given to `accumulate_gradients`
        too.

    Returns:
      A function `step(model, optimizer, batch, flush=None) -> metrics` under `nnx.jit`, which donates the model and the
      optimizer: an `Optimizer` of this module, created with `metrics=("loss", ...)`. The metrics are those of the
      window so far; of the call, if the optimizer does not accumulate.

    Raises:
      TypeError: the optimizer is one of Flax's own.
      ValueError: a metric of the name `"loss"`.
    """
    axes, reduced = options.get("reduce_axes"), options.get("reduced", True)

    def measured(model: Any, batch: Tree) -> tuple[jax.Array, tuple[WeightedSum, jax.Array]]:
        out = fun(model, batch)
        loss, metrics = out if has_aux else (out, {})
        sums = _window.weighted(_window.with_loss(loss, metrics), _window.weight_of(weight_fn, batch))
        return loss, (sums, _window.weight_of(None, batch))

    cut = value_and_grad(measured, wrt=wrt, has_aux=True, weight_fn=weight_fn, aux_reduction="sum", **options)

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def step(model: Any, optimizer: Any, batch: Tree, flush: Any = None) -> dict[str, jax.Array]:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"nnx_train_step needs an optimizer that has a window: optimizer={type(optimizer).__name__}. Create it "
                "with optax_accum.flax.Optimizer."
            )
        (_, (sums, rows)), grads = cut(model, batch)
        totals, rows = _window.over_devices((sums, rows), axes, reduced=reduced)
        metrics = _window.mean(totals)
        if _window.find_window(nnx.as_pure(optimizer.opt_state)) is None:  # each call is an update
            optimizer.update(model, grads, flush=flush)
            return metrics
        optimizer.update(model, grads, weight=sums.weight, stats_weight=rows, metrics=metrics, flush=flush)
        return optimizer.window_metrics()

    return step


def _batch_norms(model: Any) -> tuple[Any, Callable[[Tree], Tree]]:
    """Returns a filter for the running statistics of `nnx.BatchNorm`, and what gives each of them its momentum."""
    momenta = {
        tuple(path): module.momentum
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.BatchNorm) and module.momentum != 1  # at 1 they never change
    }
    is_running = nnx.All(nnx.BatchStat, lambda path, _: tuple(path[:-1]) in momenta)
    of = lambda path, _: momenta[tuple(entry.key for entry in path[:-1])]
    return is_running, lambda stats: jax.tree.map_with_path(of, stats)


def _running_stats(model: Any) -> tuple[Tree, Tree]:
    """Returns the running statistics of all `nnx.BatchNorm`, and their momenta."""
    running, momenta = _batch_norms(model)
    stats = nnx.to_pure_dict(nnx.state(model, running))
    return stats, momenta(stats)


def _step_stats(model: Any, window: dict[str, Any], weight: jax.Array, micro_step: MicroStep) -> dict[str, Any]:
    """Takes the statistics of a micro-batch out of the model into the window; they step when it emits."""
    new, momentum = _running_stats(model)
    old = window["batch_stats"]
    check_stats(old, new)
    moments = _window.add(window["moments"], batch_moments(new, old, momentum), weight, micro_step)
    merged = merge_batch_stats(_window.mean(moments), old, momentum)
    stats = jax.tree.map(lambda new, old: jnp.where(micro_step.emitted, new, old), merged, old)
    state = nnx.state(model, _batch_norms(model)[0])
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.copy, stats))  # two buffers: a donated one is gone
    nnx.update(model, state)
    return {**window, "batch_stats": stats, "moments": moments}


def _own_streams(model: Any, axes: str | Sequence[str]) -> Any:
    """Gives each device random streams of its own; returns those that all of them had."""
    keys = jax.tree.map(lambda key: key, nnx.state(model, nnx.RngKey))  # not the variables of the model
    device = jax.lax.axis_index(axes)
    own = lambda key: jax.vmap(jax.random.fold_in, (0, None))(key.reshape(-1), device).reshape(key.shape)
    nnx.update(model, jax.tree.map(own, keys))
    return keys


def _numbers(argnums: int | Sequence[int]) -> Sequence[int]:
    return (argnums,) if isinstance(argnums, int) else argnums
