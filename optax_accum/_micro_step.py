"""Owns one micro-step: the micro-batch joins its window, which then holds or emits. Leaves the sums to _accumulator."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import _accumulator, _arguments, _emit, _inner, _mesh, _sharding, _tracing
from optax_accum._accumulator import Tree
from optax_accum._arguments import Every, Weight
from optax_accum._mesh import Axes
from optax_accum._roles import NOT_ARRAYS, check_arrays
from optax_accum._state import AccumulationState, WeightedSum, new_state
from optax_accum._tracing import Flag

Skip = Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Tree]]


class Window(NamedTuple):
    """The window with this micro-batch in it."""

    state: AccumulationState
    total: Tree  # sum(w g)
    weight: Weight  # sum(w)


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """What `accumulate_gradients` was asked for, and the functions that do it."""

    inner: optax.GradientTransformationExtraArgs
    every: Every
    reduction: str
    accumulator_dtype: jnp.dtype | None
    emit_dtype: jnp.dtype | str | None
    nonfinite: str | Skip
    mean_args: tuple[str, ...]
    reduce_axes: Axes = ()
    reduce_to: Tree = None

    def init(self, params: Tree) -> AccumulationState:
        check_arrays("Parameters", params, NOT_ARRAYS)
        acc_grads = () if self.every == 1 else self._zeros(params)
        skip_state = ()
        if callable(self.nonfinite):
            skip_state = _emit.zeros(jax.eval_shape(self.nonfinite, params, jnp.zeros([], jnp.int32), params)[1])
        inner_opt_state = _accumulator.strong(self.inner.init(self._sharded(params, params)))
        scalar = (lambda: _sharding.zero_scalars(params, self.reduce_axes)) if self.reduce_axes else None
        return new_state(inner_opt_state, acc_grads, self.mean_args, scalar, skip_state=skip_state)

    def update(
        self,
        grads: Tree,
        state: AccumulationState,
        params: Tree | None = None,
        *,
        weight: Any = 1.0,
        flush: Any = None,
        **extra_args: Any,
    ) -> tuple[Tree, AccumulationState]:
        def held(emit: Callable[[], Any]) -> Tree:
            return _emit.zeros(jax.eval_shape(emit)[0])

        whole = lambda updates: updates if params is None else self._whole(updates, params)
        return self._step(self._as_rows(grads, state), state, params, weight, flush, extra_args, whole, held)

    def apply(
        self,
        grads: Tree,
        state: AccumulationState,
        params: Tree,
        *,
        weight: Any = 1.0,
        flush: Any = None,
        **extra_args: Any,
    ) -> tuple[Tree, AccumulationState]:
        params, grads = jax.tree.map(jnp.asarray, params), self._as_rows(grads, state)
        return self._step(grads, state, params, weight, flush, extra_args, self._applied(params), lambda _: params)

    def apply_added(
        self,
        acc_grads: Tree,
        state: AccumulationState,
        params: Tree,
        *,
        weight: Any = 1.0,
        flush: Any = None,
        **extra_args: Any,
    ) -> tuple[Tree, AccumulationState]:
        """`apply` for a gradient that its backward pass has added to the accumulator; see `adds_in_place`."""
        add = lambda acc, weight, first: acc_grads
        like = lambda param, total: total if hasattr(total, "dtype") else np.zeros(jnp.shape(param), jax.dtypes.float0)
        grads = jax.tree.map(like, params, state.acc_grads)
        return self._step(grads, state, params, weight, flush, extra_args, self._applied(params), lambda _: params, add)

    def _applied(self, params: Tree) -> Callable[[Tree], Tree]:
        """Returns what makes new parameters of updates: where the updates are sharded, on the shards."""
        return lambda updates: self._whole(_emit.apply_updates(self._sharded(params, params), updates), params)

    def counters(self, state: AccumulationState) -> AccumulationState:
        """Returns the state without what is large or lies in rows."""
        return state._replace(acc_grads=(), inner_opt_state=(), weight=(), mean_args={}, skip_state=())

    def why_not_in_place(self, state: AccumulationState, params: Tree) -> str | None:
        """Returns what keeps a backward pass from adding to the accumulator, if something does."""
        if not _has_accumulator(state):
            return "the state holds no accumulator (every=1)"
        if self.nonfinite not in ("propagate", "discard"):
            return f"a policy has to see the gradient before it is added (nonfinite={self.nonfinite!r})"
        if path := _accumulator.narrower(params, state.acc_grads):
            return f"the parameter and its accumulator have different dtypes at {path}"
        return None

    def _step(
        self,
        grads: Tree,
        state: AccumulationState,
        params: Tree | None,
        weight: Any,
        flush: Any,
        extra_args: Mapping[str, Any],
        finish: Callable[[Tree], Tree],
        held: Callable[[Callable[[], Any]], Tree],
        add: Callable[[Tree | None, Weight, jax.Array], Tree] | None = None,
    ) -> tuple[Tree, AccumulationState]:
        """Adds the micro-batch to the window, then emits or holds.

        `finish(updates)` is the result when it emits, `held(emit)` the result when it holds, and `add(acc, weight,
        first)` the accumulator with the micro-batch in it.
        """
        add = add or (lambda acc, weight, first: _accumulator.add(acc, grads, weight, first))
        self._check(grads, state, params)
        names, like = set(extra_args) - set(self.mean_args), self._like(grads)
        _inner.check_extra_args(self.inner, names, like, state.inner_opt_state, params, extra_args)
        flush = _arguments.as_flush(flush, self.every)
        with jax.named_scope("optax_accum.add"):
            window = self._add(add, grads, state, params, self.as_weight(weight, state), extra_args)
            closes = _emit.known(self._closes(window.state, flush))
            usable = _emit.known(self._usable(window, closes))

        def emit() -> tuple[Tree, Any]:
            with jax.named_scope("optax_accum.emit"):
                updates, inner_opt_state = self._inner_update(grads, window, params, extra_args)
                if closes is not False and not (closes is True and usable is True):
                    _inner.check_kept(inner_opt_state, state.inner_opt_state)
                return finish(updates), inner_opt_state

        def hold() -> tuple[Tree, Any]:
            with jax.named_scope("optax_accum.hold"):
                return held(emit), state.inner_opt_state

        result, inner_opt_state = _emit.emit_or_hold(closes, usable, emit, hold)
        return result, _emit.close(window.state, closes, usable, inner_opt_state)

    def check_state(self, state: Any) -> None:
        """Raises unless the state is one of ours."""
        if not isinstance(state, AccumulationState):
            remedy = "The order is (gradients, state, parameters)."
            if isinstance(state, optax.MultiStepsState):
                remedy = "Turn that of optax.MultiSteps into one with from_multi_steps."
            raise TypeError(
                f"The state must be what `init` returned, an AccumulationState: state={type(state).__name__}. {remedy}"
            )

    def _check(self, grads: Tree, state: Any, params: Tree | None) -> None:
        self.check_state(state)
        if _has_accumulator(state):
            _accumulator.check(state.acc_grads, grads)
        elif self.every != 1 and jax.tree.leaves(grads):
            raise ValueError(
                f"Only every=1 works without an accumulator: every={self.every}, and the state was made for every=1. "
                "Add one with state._replace(acc_grads=tx.init(params).acc_grads)."
            )
        if params is not None:
            _accumulator.check_params(params, self._like(grads))

    def _add(
        self,
        add: Callable[[Tree | None, Weight, jax.Array], Tree],
        grads: Tree,
        state: AccumulationState,
        params: Tree | None,
        weight: Weight,
        extra_args: Mapping[str, Any],
    ) -> Window:
        skip, skip_state = self._screen(grads, state, params, weight)
        arrived = True if skip is False or self.nonfinite == "omit" else jnp.logical_not(skip)
        weight = weight if skip is False else jnp.where(skip, 0, weight)
        kept = _has_accumulator(state)
        total = add(_mesh.to_device(state.acc_grads) if kept else None, weight, state.mini_step == 0)
        added = state._replace(
            mini_step=_emit.count(state.mini_step, arrived),
            acc_grads=_mesh.to_memory_of(total, state.acc_grads) if kept else (),
            weight=state.weight + weight,
            mean_args=self._add_args(state.mean_args, extra_args, weight),
            skipped=_emit.count(state.skipped, skip),
            skip_state=skip_state,
        )
        return Window(added, total, added.weight if kept else weight)

    def _screen(self, grads: Tree, state: AccumulationState, params: Tree | None, weight: Weight) -> tuple[Flag, Tree]:
        """Returns whether this micro-batch is left out, and what a callable policy says about it."""
        if callable(self.nonfinite):
            skip, info = self.nonfinite(grads, state.gradient_step, params)
            return _arguments.as_skip(skip), _like_skip_state(info, state)
        if self.nonfinite in ("skip", "omit"):
            return self._nonfinite(grads, weight), state.skip_state
        return False, state.skip_state

    def _nonfinite(self, grads: Tree, weight: Weight) -> jax.Array:
        """Returns whether a gradient that counts, on any device, holds a NaN or an infinity."""
        if not self.reduce_axes:
            return ~_accumulator.all_finite((grads, weight)) & (weight != 0)
        rows = [leaf for leaf in jax.tree.leaves((grads, weight)) if not _accumulator.is_float0(leaf)]
        return _sharding.any_row(~jax.vmap(_accumulator.all_finite)(rows) & (weight != 0), self.reduce_axes)

    def _add_args(
        self, sums: dict[str, WeightedSum], extra_args: Mapping[str, Any], weight: Weight
    ) -> dict[str, WeightedSum]:
        def add(name: str) -> WeightedSum:
            if name not in extra_args:
                return sums[name]
            remedy = "Pass its mean, such as loss.mean(), or leave it out of mean_args."
            rows = weight.shape[0] if self.reduce_axes and isinstance(weight, jax.Array) else None
            value = _arguments.as_scalar(name, extra_args[name], remedy, rows)
            value = value if rows is None else jnp.broadcast_to(value, (rows,))
            share = jnp.where(weight != 0, weight * value, 0)
            return WeightedSum(sums[name].total + share, sums[name].weight + weight)

        return {name: add(name) for name in sums}

    def _closes(self, state: AccumulationState, flush: Flag) -> Flag:
        if self.every is None or flush is True:
            return flush
        if self.every == 1 and self.nonfinite in ("propagate", "omit", "discard"):
            return True
        every = _arguments.as_count(self.every(state.gradient_step)) if callable(self.every) else self.every
        due = state.mini_step >= every
        return due if flush is False else due | flush

    def _usable(self, window: Window, closes: Flag) -> Flag:
        """Returns whether an update can be made of this window; what is costly to know is asked only if it closes."""

        def usable() -> Flag:
            weighty = self._sum(window.weight) != 0
            return weighty if self.nonfinite != "discard" else weighty & ~self._nonfinite(window.total, window.weight)

        costly = self.nonfinite == "discard" or self.reduce_axes
        if closes is False or closes is True or not costly:
            return True if closes is False else usable()
        return _tracing.branch(closes, usable, lambda: jnp.array(True))

    def _inner_update(
        self, grads: Tree, window: Window, params: Tree | None, extra_args: Mapping[str, Any]
    ) -> tuple[Tree, Any]:
        state = window.state
        to = None if self.reduce_to is None else _mesh.shardings(self.reduce_to, window.total, self.reduce_axes)
        total, grads = self._sum(window.total, to), self._like(grads, to)
        weight = self._sum(window.weight) if self.reduction == "mean" else None
        mean = _accumulator.mean(total, grads, weight, self.emit_dtype)
        extra_args = {**extra_args, **_emit.mean_args(self._sum(state.mean_args), extra_args)}
        old, params = _mesh.to_device(state.inner_opt_state), self._sharded(params, params)
        updates, inner_opt_state = _inner.update(self.inner, mean, grads, old, params, extra_args)
        if not _inner.keeps(inner_opt_state, old):
            return updates, inner_opt_state
        return updates, _mesh.to_memory_of(inner_opt_state, state.inner_opt_state)

    def _zeros(self, params: Tree) -> Tree:
        if not self.reduce_axes:
            return _accumulator.zeros(params, self.accumulator_dtype)
        shapes = jax.eval_shape(lambda: _accumulator.zeros(params, self.accumulator_dtype))
        return _sharding.zero_rows(shapes, params, self.reduce_axes)

    def _as_rows(self, grads: Tree, state: AccumulationState) -> Tree:
        return (
            _sharding.as_rows(grads, getattr(state, "acc_grads", ()), self.reduce_axes) if self.reduce_axes else grads
        )

    def as_weight(self, weight: Any, state: AccumulationState) -> Weight:
        """Returns a weight; with `reduce_axes` one for each device [d], which share the weight of a micro-batch."""
        if isinstance(weight, _arguments.Rows) and self.reduction == "sum":
            weight = 1.0
        if not self.reduce_axes:
            return _arguments.as_weight(weight)
        weight = _arguments.as_weight(weight, state.weight.shape[0])
        return _sharding.weight_rows(weight, state.weight, self.reduce_axes, share=self.reduction == "mean")

    def _sum(self, rows: Tree, to: Tree = None) -> Tree:
        """Returns the sum over devices, where there are some."""
        return _sharding.sum_rows(rows, self.reduce_axes, to) if self.reduce_axes else rows

    def _like(self, grads: Tree, to: Tree = None) -> Tree:
        """Returns leaves with the shapes and dtypes of the gradient of the whole batch."""
        return _emit.zeros(jax.eval_shape(lambda: self._sum(grads, to))) if self.reduce_axes else grads

    def _sharded(self, tree: Tree, params: Tree | None) -> Tree:
        """Returns a tree like `params` sharded as the update is to be, where that was asked for."""
        if self.reduce_to is None or params is None:
            return tree
        return _mesh.place(tree, _mesh.shardings(self.reduce_to, params, self.reduce_axes))

    def _whole(self, tree: Tree, params: Tree) -> Tree:
        """Undoes `_sharded`."""
        if self.reduce_to is None:
            return tree
        return _mesh.gather(tree, self.reduce_to, params, self.reduce_axes)


def _like_skip_state(info: Tree, state: AccumulationState) -> Tree:
    if jax.tree.structure(info) != jax.tree.structure(state.skip_state):
        raise ValueError(
            f"A callable nonfinite must return an info of the tree in the state: it returned {info!r}, the state has "
            f"{state.skip_state!r}. For a state of another policy: "
            "state._replace(skip_state=tx.init(params).skip_state)."
        )
    return _accumulator.cast_like(info, state.skip_state)


def _has_accumulator(state: AccumulationState) -> bool:
    return not (type(state.acc_grads) is tuple and not state.acc_grads)  # a MaskedNode is a tuple, too
