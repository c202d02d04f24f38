"""Flax train steps with accumulation: a Linen `TrainState`, NNX functions, and BatchNorm that steps once per update.

Imported as `optax_accum.flax`, never by `optax_accum` itself.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state

import optax_accum
from optax_accum import AccumulationState, WeightedSum

Tree = Any


class TrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` whose `step` counts updates, for an optimizer that accumulates.

    Change the import, and wrap the optimizer in `accumulate_gradients`; the train step stays as it is.

    Attributes:
      step: updates made. Schedules, logs and evaluations that ask for it act once per update.
      micro_step: calls of `apply_gradients`.
      batch_stats: the running statistics of BatchNorm, or None. They stay what they are while a window is held, and
        make one momentum step when it emits, with the statistics of the whole window (see `merge_batch_stats`).
      window: sums over the window so far, by name: see `window_metrics`.
      moments: sums over the window so far, of what `batch_stats` will be made of.
      momentum: the momentum of the BatchNorm layers; 0.99 is Flax's default.

    Guarantees:
      | case | result |
      |---|---|
      | an optimizer that does not accumulate | what Flax's own does; `weight`, `flush`, `metrics` warn once |
      | the window is held | `step`, `params` and `batch_stats` are the same, bit for bit |
      | the window is discarded | the same, and the metrics of the window begin anew |
      | a checkpoint of Flax's own `TrainState` | is restored; the fields that it lacks stay as created |

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
    batch_stats: Any = None
    window: Any = None
    moments: Any = None
    momentum: Any = flax.struct.field(pytree_node=False, default=0.99)

    @classmethod
    def create(
        cls, *, apply_fn: Callable[..., Any], params: Tree, tx: Any, metrics: tuple[str, ...] = (), **kwargs: Any
    ) -> Self:
        """Creates a state before its first micro-step; `metrics` names what `apply_gradients` will be given."""
        blank = lambda: WeightedSum(jnp.zeros([]), jnp.zeros([]))
        kwargs.setdefault("window", {name: blank() for name in metrics} or None)
        stats = kwargs.get("batch_stats")
        if stats is not None:
            zeros = jax.tree.map(jnp.zeros_like, stats)
            kwargs.setdefault("moments", WeightedSum(zeros, jnp.zeros([])))
        return super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)

    def apply_gradients(
        self,
        *,
        grads: Tree,
        weight: Any = None,
        flush: Any = None,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Makes one micro-step: adds the gradient, and updates if this closes the window.

        Args:
          grads: the gradients of one micro-batch, a tree like `params`.
          weight: how much the micro-batch counts: 1 by default.
          flush: closes the window with this micro-batch.
          metrics: scalars of this micro-batch, by the names given to `create`; they are averaged over the window.
          **kwargs: fields of the state are replaced, as Flax does (`batch_stats` as said above); all else goes to the
            optimizer.

        Raises:
          ValueError: metrics of other names or that are no scalars; `batch_stats` of another tree.
        """
        ours = _ours(self.opt_state)
        if ours is None and not (weight is None and flush is None and metrics is None):
            _warn_once()
        fields = {field.name for field in dataclasses.fields(cast(Any, self))}
        replaced = {name: kwargs.pop(name) for name in list(kwargs) if name in fields}
        window = {"weight": weight, "flush": flush} if ours is not None else {}
        extra = {**kwargs, **{name: value for name, value in window.items() if value is not None}}
        params, opt_state = optax_accum.apply_gradients(self.tx, grads, self.opt_state, self.params, **extra)
        first = True if ours is None else ours.mini_step == 0
        emitted = jnp.array(True) if ours is None else optax_accum.has_updated(opt_state)
        share = jnp.asarray(1.0 if weight is None else weight, jnp.float32)
        new_stats = replaced.pop("batch_stats", None)
        return self.replace(
            **{
                "step": self.step + emitted.astype(jnp.int32),
                "micro_step": self.micro_step + 1,
                "params": params,
                "opt_state": opt_state,
                "window": self._add_metrics(metrics, share, first),
                **(self._add_stats(new_stats, share, first, emitted) if new_stats is not None else {}),
                **replaced,
            }
        )

    def window_metrics(self) -> dict[str, jax.Array]:
        """Returns the weighted means of the metrics over the window so far, or over the one that has just closed."""
        return {
            name: total / jnp.where(weight == 0, 1, weight) for name, (total, weight) in (self.window or {}).items()
        }

    def _add_metrics(self, metrics: Mapping[str, Any] | None, weight: jax.Array, first: Any) -> Any:
        if metrics is None:
            return self.window
        if sorted(metrics) != sorted(self.window or {}):
            raise ValueError(
                f"metrics must have the names given to create: {sorted(metrics)}, and the state has "
                f"{sorted(self.window or {})}. Pass metrics={tuple(sorted(metrics))} to TrainState.create."
            )
        for name, value in metrics.items():
            if jnp.ndim(value):
                raise ValueError(f"A metric must be a scalar: {name!r} has shape {jnp.shape(value)}. Pass its mean.")
        return {name: _added(self.window[name], jnp.asarray(metrics[name]), weight, first) for name in self.window}

    def _add_stats(self, new: Tree, weight: jax.Array, first: Any, emitted: jax.Array) -> dict[str, Any]:
        _check_stats(self.batch_stats, new)
        moments = _added(self.moments, batch_moments(new, self.batch_stats, self.momentum), weight, first)
        mean = jax.tree.map(lambda total: total / jnp.where(moments.weight == 0, 1, moments.weight), moments.total)
        merged = merge_batch_stats(mean, self.batch_stats, self.momentum)
        stats = jax.tree.map(lambda new, old: jnp.where(emitted, new, old), merged, self.batch_stats)
        return {"batch_stats": stats, "moments": moments}


def batch_moments(new: Tree, old: Tree, momentum: float = 0.99) -> Tree:
    """Returns what can be averaged over micro-batches: their means, and their second moments in place of variances.

    BatchNorm returned `new = momentum old + (1 - momentum) stats`; this undoes it, and

        mean_i,    var_i + mean_i^2

    are linear in the weights. Use it as an auxiliary output with `aux_reduction="mean"`, or let `TrainState` do so.

    Args:
      new: the statistics that the model returned for one micro-batch, given `old`.
      old: the running statistics before the update: the same for all its micro-batches.
      momentum: of the BatchNorm layers.

    Raises:
      ValueError: the trees or shapes differ.
    """
    _check_stats(old, new)
    own = jax.tree.map(lambda new, old: (new - momentum * old) / (1 - momentum), new, old)
    return _map_pairs(lambda mean, var: (mean, var + mean**2), own)


def merge_batch_stats(moments: Tree, old: Tree, momentum: float = 0.99) -> Tree:
    """Returns the running statistics after one update, from the mean `batch_moments` of its micro-batches.

    The law of total variance, and one momentum step whatever the number of micro-batches:

        mean = sum_i n_i mean_i / n,    var = sum_i n_i (var_i + mean_i^2) / n - mean^2

    It is exact for the running statistics. What it cannot change: inside a micro-batch, BatchNorm normalises with the
    statistics of that micro-batch, so gradients are not those of the whole batch; `verify` says so.

    Args:
      moments: the weighted mean of `batch_moments` over the micro-batches.
      old: the running statistics before the update.
      momentum: of the BatchNorm layers.
    """
    stats = _map_pairs(lambda mean, second: (mean, jnp.maximum(second - mean**2, 0)), moments)
    return jax.tree.map(lambda stat, old: momentum * old + (1 - momentum) * stat, stats, old)


def unscale() -> optax.GradientTransformationExtraArgs:
    """Divides gradients by the extra argument `scale`: once per update, inside `accumulate_gradients`.

    For float16, with the scale of `flax.training.dynamic_scale.DynamicScale`:

        tx = accumulate_gradients(optax.chain(unscale(), optax.adam(1e-3)), every=8, nonfinite="discard")

    Multiply the loss by the scale, pass `scale=` to every micro-step, and move it with `next_scale` when a window has
    closed. `DynamicScale.value_and_grad` itself does not hold under accumulation: it moves the scale at every
    micro-batch, so that one window would add gradients of different scales, and divides k times.
    """

    def update(grads: Tree, state: Any, params: Tree = None, *, scale: Any, **_: Any) -> tuple[Tree, Any]:
        return jax.tree.map(lambda g: g * (1 / jnp.asarray(scale, g.dtype)), grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), cast(Any, update))


def next_scale(dynamic_scale: Any, before: Tree, after: Tree) -> Any:
    """Returns the dynamic scale after a micro-step: it moves only when a window has closed.

    Args:
      dynamic_scale: a `flax.training.dynamic_scale.DynamicScale`.
      before: the optimizer state before the micro-step.
      after: the state after it, of `accumulate_gradients(..., nonfinite="discard")`.

    Returns:
      The scale grown after `growth_interval` updates in a row, backed off after a window that was discarded.
    """
    updated = optax_accum.has_updated(after)
    discarded = optax_accum.metrics(after)["discarded"] > optax_accum.metrics(before)["discarded"]
    grow = updated & (dynamic_scale.fin_steps >= dynamic_scale.growth_interval)
    largest = jnp.finfo(jnp.float32).max
    scale = jnp.asarray(dynamic_scale.scale, jnp.float32)
    grown = jnp.where(grow, jnp.minimum(scale * dynamic_scale.growth_factor, largest), scale)
    smallest = 0.0 if dynamic_scale.minimum_scale is None else dynamic_scale.minimum_scale
    scale = jnp.where(discarded, jnp.maximum(scale * dynamic_scale.backoff_factor, smallest), grown)
    steps = jnp.where(grow | discarded, 0, dynamic_scale.fin_steps + updated.astype(jnp.int32))
    return dynamic_scale.replace(scale=scale, fin_steps=steps)


def value_and_grad(
    fun: Callable[..., Any], *, wrt: Any = nnx.Param, has_aux: bool = False, momentum: float = 0.99, **options: Any
) -> Callable[..., tuple[Any, Any]]:
    """Does what `nnx.value_and_grad(fun)` does, one micro-batch after the other.

    Args:
      fun: a loss `fun(model, batch, *args)`, whose first argument is an NNX module; it may change the module's state.
      wrt: the variables to differentiate, such as `nnx.LoRAParam`: all others cost no accumulator.
      has_aux: `fun` returns `(loss, aux)`.
      momentum: that of the BatchNorm layers.
      **options: those of `optax_accum.value_and_grad`: `num_microbatches` or `microbatch_size`, `weight_fn`, ...

    Returns:
      A function of the arguments of `fun`, which returns `(value, grads)` and leaves the model's other state as the
      batch leaves it: random streams have advanced at each micro-batch, BatchNorm has made one momentum step with the
      statistics of all (`merge_batch_stats`), what else there is went from one micro-batch to the next.

    Example:
      >>> import jax.numpy as jnp, optax_accum.flax
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> loss = lambda model, x: jnp.mean(model(x) ** 2)
      >>> value, grads = optax_accum.flax.value_and_grad(loss, num_microbatches=2)(model, jnp.ones((4, 2)))
      >>> grads["kernel"].shape
      (2, 1)
    """
    reduction = options.pop("aux_reduction", "mean")

    @functools.wraps(fun)
    def run(model: Any, *args: Any) -> tuple[Any, Any]:
        graph, params, stats, rest = nnx.split(model, wrt, nnx.BatchStat, ...)
        old = nnx.to_pure_dict(stats)

        def pure(params: Any, *args_and_rest: Any) -> tuple[jax.Array, Any]:
            *args, rest = args_and_rest
            own = jax.tree.map(lambda leaf: leaf, (stats, rest))  # variables of this trace, which the model may change
            micro = nnx.merge(graph, params, *own)
            out = fun(micro, *args)
            loss, aux = out if has_aux else (out, None)
            _, _, new, rest = nnx.split(micro, wrt, nnx.BatchStat, ...)
            moments = batch_moments(nnx.to_pure_dict(new), old, momentum)
            return loss, ((moments, aux), rest)

        cut = optax_accum.value_and_grad(
            pure, has_aux=True, carry_argnum=len(args) + 1, aux_reduction=("mean", reduction), **options
        )
        (loss, ((moments, aux), new_rest)), grads = cut(params, *args, rest)
        nnx.replace_by_pure_dict(stats, merge_batch_stats(moments, old, momentum))
        nnx.update(model, stats, new_rest)
        return ((loss, aux) if has_aux else loss), grads

    return run


class Optimizer(nnx.Optimizer):
    """`nnx.Optimizer` whose `step` counts updates, and whose `update` touches the model only when a window emits.

    Attributes:
      step: updates made.
      micro_step: calls of `update`.

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

    def __init__(self, model: Any, tx: Any, *, wrt: Any):
        super().__init__(model, tx, wrt=wrt)
        self.micro_step = nnx.OptState(jnp.array(0, dtype=jnp.uint32))

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> None:  # type: ignore[override]
        """Makes one micro-step; takes `weight`, `flush` and what the optimizer takes by keyword."""
        params, state = nnx.as_pure(nnx.state(model, self.wrt)), nnx.as_pure(self.opt_state)
        grads = nnx.as_pure(nnx.state(grads, self.wrt))
        ours = _ours(state)
        if ours is None and {"weight", "flush"} & set(kwargs):
            _warn_once()
            kwargs = {name: value for name, value in kwargs.items() if name not in ("weight", "flush")}
        params, state = optax_accum.apply_gradients(self.tx, grads, state, params, **nnx.as_pure(kwargs))
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(state))
        emitted = jnp.array(True) if ours is None else optax_accum.has_updated(state)
        self.step[...] += emitted.astype(jnp.uint32)
        self.micro_step[...] += 1


def train_step(
    fun: Callable[..., Any], *, weight_fn: Callable[..., Any] | None = None, **options: Any
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Returns the usual Linen train step: micro-batches within the call, windows across calls, metrics, donation.

    Args:
      fun: `fun(params, batch, key, state) -> (loss, extra)`, where `extra` is a dict that may hold `"metrics"`, a dict
        of scalars, and `"batch_stats"`, as the model returned them. Give `state.apply_fn` the key as `rngs`.
      weight_fn: how much a micro-batch counts: by default its number of rows.
      **options: those of `optax_accum.value_and_grad`: `num_microbatches` or `microbatch_size`, ...

    Returns:
      A jitted `step(state, batch, key) -> (state, metrics)` that donates `state`, a `TrainState` created with
      `metrics=("loss", ...)`. The metrics are those of the window so far.
    """

    def pure(params: Tree, batch: Tree, key: jax.Array, state: TrainState) -> tuple[jax.Array, Any]:
        loss, extra = fun(params, batch, key, state)
        stats = extra.get("batch_stats")
        moments = None if stats is None else batch_moments(stats, state.batch_stats, state.momentum)
        return loss, (extra.get("metrics", {}), moments)

    cut = optax_accum.value_and_grad(pure, has_aux=True, rng_argnum=2, weight_fn=weight_fn, **options)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: Tree, key: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        (loss, (metrics, moments)), grads = cut(state.params, batch, key, state)
        stats = None if moments is None else merge_batch_stats(moments, state.batch_stats, state.momentum)
        new = {} if stats is None else {"batch_stats": stats}
        weight = weight_fn(batch) if weight_fn else jax.tree.leaves(batch)[0].shape[0]
        state = state.apply_gradients(grads=grads, weight=weight, metrics={"loss": loss, **metrics}, **new)
        return state, state.window_metrics()

    return step


def nnx_train_step(
    fun: Callable[..., Any], *, weight_fn: Callable[..., Any] | None = None, wrt: Any = nnx.Param, **options: Any
) -> Callable[..., jax.Array]:
    """Returns the usual NNX train step: micro-batches within the call, windows across calls.

    Args:
      fun: a loss `fun(model, batch)`.
      weight_fn: how much a micro-batch counts: by default its number of rows.
      wrt: the variables to train, as given to the `Optimizer`.
      **options: those of `value_and_grad`.

    Returns:
      A function `step(model, optimizer, batch) -> loss` under `nnx.jit`, with an `Optimizer` of this module.
    """
    cut = value_and_grad(fun, wrt=wrt, weight_fn=weight_fn, **options)

    @nnx.jit
    def step(model: Any, optimizer: Optimizer, batch: Tree) -> jax.Array:
        loss, grads = cut(model, batch)
        weight = weight_fn(batch) if weight_fn else jax.tree.leaves(batch)[0].shape[0]
        optimizer.update(model, grads, weight=weight)
        return loss

    return step


def _ours(opt_state: Tree) -> AccumulationState | None:
    """Returns the one `AccumulationState` in an optimizer's state, or None."""
    is_ours = lambda node: isinstance(node, AccumulationState)
    found = [node for node in jax.tree.leaves(opt_state, is_leaf=is_ours) if is_ours(node)]
    return found[0] if len(found) == 1 else None


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "weight, flush and metrics belong to a window, and this optimizer has none: each call is an update. Wrap it in "
        "optax_accum.accumulate_gradients.",
        stacklevel=3,
    )


def _added(sums: WeightedSum, values: Tree, weight: jax.Array, first: Any) -> WeightedSum:
    """Adds to the sums of the window, or begins it anew."""
    add = lambda total, value: (
        jnp.where(first, 0, total) + jnp.where(weight != 0, weight * value, 0).astype(total.dtype)
    )
    return WeightedSum(jax.tree.map(add, sums.total, values), add(sums.weight, jnp.ones([])))


def _map_pairs(fun: Callable[[Any, Any], tuple[Any, Any]], stats: Tree) -> Tree:
    """Applies `fun` to each `mean` and `var` that stand side by side; what stands alone stays."""
    if not isinstance(stats, Mapping):
        return stats
    mapped = {name: _map_pairs(fun, node) for name, node in stats.items()}
    if "mean" in mapped and "var" in mapped:
        mapped["mean"], mapped["var"] = fun(mapped["mean"], mapped["var"])
    return mapped if isinstance(stats, dict) else cast(Any, type(stats))(mapped)


def _check_stats(old: Tree, new: Tree) -> None:
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    if old is None:
        raise ValueError(
            "The state has no batch_stats: pass batch_stats=variables['batch_stats'] to TrainState.create."
        )
    if jax.tree.structure(old) != jax.tree.structure(new) or shapes(old) != shapes(new):
        raise ValueError(f"batch_stats must keep their tree and shapes: {shapes(old)} became {shapes(new)}.")


def _from_state_dict(state: TrainState, saved: dict[str, Any]) -> TrainState:
    """Restores a saved state; fields that Flax's own `TrainState` does not have may be missing."""
    fields = {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(cast(Any, state))
        if field.metadata.get("pytree_node", True)
    }
    if unknown := sorted(set(saved) - set(fields)):
        raise ValueError(f"The checkpoint is not one of a TrainState with these fields: it has {unknown}, too.")
    restored = {
        name: flax.serialization.from_state_dict(value, saved[name], name=name)
        for name, value in fields.items()
        if name in saved
    }
    if missing := sorted({"step", "params", "opt_state"} - set(restored)):
        raise ValueError(f"The checkpoint is not one of a TrainState: {missing} are missing.")
    for name, value in restored.items():
        _check_shapes(name, fields[name], value)
    return state.replace(**restored)


def _check_shapes(field: str, mine: Tree, saved: Tree) -> None:
    """Raises where a restored field has another shape: it is of another model, or of another optimizer."""
    for (path, old), new in zip(jax.tree.leaves_with_path(mine), jax.tree.leaves(saved), strict=True):
        if jnp.shape(old) != jnp.shape(new):
            raise ValueError(
                f"The checkpoint is one of another model: at {field}{jax.tree_util.keystr(path)} it has shape "
                f"{jnp.shape(new)}, and the state {jnp.shape(old)}. Create the state with the model that was saved."
            )


def _to_state_dict(state: TrainState) -> dict[str, Any]:
    fields = dataclasses.fields(cast(Any, state))
    kept = [field.name for field in fields if field.metadata.get("pytree_node", True)]
    return {name: flax.serialization.to_state_dict(getattr(state, name)) for name in kept}


flax.serialization.register_serialization_state(TrainState, _to_state_dict, _from_state_dict, override=True)
