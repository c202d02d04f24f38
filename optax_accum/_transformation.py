"""Owns accumulation across calls: when a window closes, and what it emits. Leaves the sums to _accumulator."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from optax_accum import _accumulator, _arguments
from optax_accum._accumulator import Tree
from optax_accum._arguments import Every, Flag, Weight
from optax_accum._state import AccumulationState, WeightedSum, new_state

Skip = Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Tree]]


def accumulate_gradients(
    inner: optax.GradientTransformation,
    every: Every,
    *,
    reduction: str = "mean",
    accumulator_dtype: Any = None,
    emit_dtype: Any = None,
    nonfinite: str | Skip = "propagate",
    mean_args: tuple[str, ...] = ("value",),
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it updates once per window of micro-steps, with the gradient of the whole batch.

    Over a window of micro-batches with gradients `g_i` and weights `w_i`, `inner` sees

        mean:  g = sum_i w_i g_i / sum_i w_i        sum:  g = sum_i w_i g_i

    and only when the window closes: then this transformation *emits* the updates of `inner`. At every other
    micro-step it *holds*: the updates are exact zeros, and neither `inner` nor its state is touched. Schedules inside
    `inner` count updates. Clipping belongs inside `inner` as well: before it, each micro-batch would be clipped.

    Args:
      inner: any Optax optimizer.
      every: the number of micro-steps in a window: an integer >= 1; or a callable of `gradient_step`, evaluated when
        running (it returns an integer; below 1 acts as 1); or `None`: the caller closes each window with `flush`.
        A window closes when `mini_step + 1 >= every`, so a resumed run may change it in the middle of a window.
      reduction: `"mean"`, for losses that are means; or `"sum"`, for losses that are sums.
      accumulator_dtype: a real floating-point dtype to add in; complex leaves take the complex dtype of its width. By
        default at least float32, and never narrower than the gradient.
      emit_dtype: the dtype in which `inner` sees the gradient. By default the accumulator's; `"gradient"` for that of
        the gradients passed in, as `optax.MultiSteps` does; or a real floating-point dtype.
      nonfinite: what becomes of a micro-batch whose gradient or weight holds a NaN or an infinity. `"propagate"`: it
        shows, in its own window only. `"skip"`: as if it had never come; the window waits for another. `"omit"`: the
        window ends on time, with the rest. `"discard"`: the window ends on time, without an update. Or a callable
        `(grads, gradient_step, params) -> (skip, info)`, as `optax.MultiSteps` takes, which acts as `"skip"`; its
        `info` is kept as `state.skip_state`.
      mean_args: names of scalar extra arguments which `inner` gets as their weighted mean over the window.

    Returns:
      An `optax.GradientTransformationExtraArgs` with an `AccumulationState`. Its `update` takes, beside `(grads, state,
      params)`, by keyword and also through `optax.chain`:

      * `weight`: how much this micro-batch counts, a real scalar; 1 by default. For a loss that is a mean over rows or
        tokens, their number.
      * `flush`: a bool scalar; `True` closes the window with this micro-batch and divides by the weight that is in it.
        A Python bool is known when compiling: with `every=None`, or when true, no `lax.cond` is compiled at all.
      * whatever else `inner` takes. What is not in `mean_args` reaches it as the closing micro-step gave it.

    Raises:
      TypeError, ValueError: an argument that cannot be right, or, while tracing: gradients whose tree, shape or dtype
        does not fit the state; a weight, flush or mean argument that is no scalar; `every=None` without `flush`. What
        is known only when running never raises; its outcome is in the table.

    Guarantees:
      The update equals that of the whole batch, to rounding, for any partition with weights. The state keeps its types,
      shapes and shardings. Updates have the dtypes that `inner` alone would give them, and the inner state those of
      `inner.init`.

      | case | result | known when |
      |---|---|---|
      | `every=1` | `inner` itself; no accumulator is allocated, no branch compiled | tracing |
      | a callable `every` returns 0 or less | acts as 1 | running |
      | `every` is lowered below `mini_step` | the window closes at the next micro-step, with the right mean | running |
      | `every=1` is raised, with its state | an error that says how to add an accumulator | tracing |
      | weight 0 | adds nothing, even of a NaN; the micro-step counts | running |
      | weight below 0 | subtracts; the divisor is still `sum(w)` | running |
      | the weights add to 0 | zero updates, inner state untouched, `discarded + 1` | running |
      | a NaN under `"propagate"` | NaN updates for this window; the next window starts clean | running |
      | a NaN under `"skip"` | zero updates, window and counters unchanged, `skipped + 1` | running |
      | a NaN under `"omit"` | weight 0, `skipped + 1` | running |
      | a NaN under `"discard"` | at the end zero updates, inner state untouched, `discarded + 1` | running |
      | `flush` on a skipped micro-batch | closes the window with the rest | running |
      | `None`, `MaskedNode`, empty leaves | pass through | tracing |
      | float0 (of an integer parameter) | passes through to `inner` and back | tracing |
      | inside `optax.masked` or `optax.partition` | nothing is allocated for the leaves left out | tracing |
      | a mean argument not given at some micro-steps | the mean over those that gave it | tracing |
      | under `jax.vmap` | a window for each member; `lax.cond` becomes a select, so `inner` always runs | tracing |

    Example:
      Four micro-batches of unequal length, weighted by their tokens:

      >>> import jax, jax.numpy as jnp, optax, optax_accum
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(1.0), every=4)
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> for tokens in (10, 30, 20, 40):
      ...     grads = jnp.array([1.0, tokens])  # of a mean over this micro-batch's tokens
      ...     updates, state = tx.update(grads, state, params, weight=tokens)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params)
      [ -1. -30.]

    References:
      The state and the callable `nonfinite` follow `optax.MultiSteps`; the errors of adding in low precision are
      analysed in N. Higham, *The accuracy of floating point summation*, SIAM J. Sci. Comput. 14 (1993).
    """
    policies = ("propagate", "skip", "omit", "discard")
    accumulation = _Accumulation(
        inner=_arguments.as_transformation(inner),
        every=_arguments.as_every(every),
        reduction=_arguments.one_of("reduction", reduction, ("mean", "sum")),
        accumulator_dtype=_arguments.as_float_dtype("accumulator_dtype", accumulator_dtype),
        emit_dtype=emit_dtype if emit_dtype == "gradient" else _arguments.as_float_dtype("emit_dtype", emit_dtype),
        nonfinite=nonfinite
        if callable(nonfinite)
        else _arguments.one_of("nonfinite", nonfinite, policies, " or a callable"),
        mean_args=_arguments.as_names(mean_args),
    )
    return optax.GradientTransformationExtraArgs(accumulation.init, cast(Any, accumulation.update))


def apply_gradients(
    tx: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, **extra_args: Any
) -> tuple[Tree, Tree]:
    """Makes a micro-step and applies it: `tx.update` and `optax.apply_updates` in one.

        emit:  params + updates of `inner`, inside the branch        hold:  params

    A held micro-step reads and writes the accumulator, and neither parameters nor optimizer state nor a tree of zeros,
    so it costs what adding costs. The result is bit for bit that of the two calls.

    Args:
      tx: what `accumulate_gradients` returned. For any other transformation (a chain that holds one, say) this is
        `tx.update` followed by `optax.apply_updates`.
      grads: the gradients of one micro-batch, a tree like `params`.
      state: the state of `tx`.
      params: the parameters, which are returned in their own dtypes.
      **extra_args: what `tx.update` takes by keyword: `weight`, `flush`, and the arguments of the inner optimizer.

    Returns:
      `(params, state)`. Donate them to `jit` in this order (`step(params, state, ...) -> (params, state)`): JAX gives
      donated buffers to results of equal shape in order, and in another order the compiler copies them.

    Raises:
      ValueError: `params` is None. Otherwise as `accumulate_gradients`.

    Guarantees:
      | case | result | known when |
      |---|---|---|
      | the window is held, or closes without an update | the same parameters, bit for bit | running |
      | the window emits | `optax.apply_updates(params, updates)` | running |
      | a leaf whose gradient is a float0 | the same parameter | tracing |
      | `tx` does not accumulate | one update; `weight` and `flush` are ignored like any extra argument | tracing |

    Example:
      >>> import functools, jax, jax.numpy as jnp, optax, optax_accum
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.5), every=2)
      >>> @functools.partial(jax.jit, donate_argnums=(0, 1))
      ... def train_step(params, state, x):
      ...     grads = jax.grad(lambda p: jnp.mean((p - x) ** 2))(params)
      ...     return optax_accum.apply_gradients(tx, grads, state, params)
      >>> params = jnp.array(0.0)
      >>> state = tx.init(params)
      >>> for x in (1.0, 3.0):
      ...     params, state = train_step(params, state, jnp.array([x]))
      ...     print(params)
      0.0
      2.0
    """
    if params is None:
        raise ValueError("apply_gradients returns new parameters and needs the old ones: params=None. Pass params.")
    accumulation = getattr(tx.update, "__self__", None)
    if isinstance(accumulation, _Accumulation):
        return accumulation.apply(grads, state, params, **extra_args)
    updates, state = optax.with_extra_args_support(tx).update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


class _Window(NamedTuple):
    """The window with this micro-batch in it."""

    state: AccumulationState
    total: Tree  # sum(w g)
    weight: Weight  # sum(w)


@dataclasses.dataclass(frozen=True)
class _Accumulation:
    """What `accumulate_gradients` was asked for, and the functions that do it."""

    inner: optax.GradientTransformationExtraArgs
    every: Every
    reduction: str
    accumulator_dtype: jnp.dtype | None
    emit_dtype: jnp.dtype | str | None
    nonfinite: str | Skip
    mean_args: tuple[str, ...]

    def init(self, params: Tree) -> AccumulationState:
        acc_grads = () if self.every == 1 else _accumulator.zeros(params, self.accumulator_dtype)
        skip_state = ()
        if callable(self.nonfinite):
            skip_state = _zeros(jax.eval_shape(self.nonfinite, params, jnp.zeros([], jnp.int32), params)[1])
        return new_state(_strong(self.inner.init(params)), acc_grads, self.mean_args, skip_state=skip_state)

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
            return _zeros(jax.eval_shape(emit)[0])

        return self._step(grads, state, params, weight, flush, extra_args, lambda updates: updates, held)

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
        params = jax.tree.map(jnp.asarray, params)
        apply = functools.partial(_apply_updates, params)
        return self._step(grads, state, params, weight, flush, extra_args, apply, lambda _: params)

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
    ) -> tuple[Tree, AccumulationState]:
        """Adds the micro-batch to the window, then emits or holds.

        `finish(updates)` is the result when it emits, `held(emit)` the result when it holds.
        """
        self._check(grads, state)
        flush = _arguments.as_flush(flush, self.every)
        with jax.named_scope("optax_accum.add"):
            window = self._add(grads, state, params, _arguments.as_weight(weight), extra_args)
            closes = _known(self._closes(window.state, flush))
            usable = _known(self._usable(window, closes))

        def emit() -> tuple[Tree, Any]:
            with jax.named_scope("optax_accum.emit"):
                updates, inner_opt_state = self._inner_update(grads, window, params, extra_args)
                return finish(updates), inner_opt_state

        def hold() -> tuple[Tree, Any]:
            with jax.named_scope("optax_accum.hold"):
                return held(emit), state.inner_opt_state

        result, inner_opt_state = _emit_or_hold(closes, usable, emit, hold)
        return result, _close(window.state, closes, usable, inner_opt_state)

    def _check(self, grads: Tree, state: Any) -> None:
        if not isinstance(state, AccumulationState):
            raise TypeError(
                f"The state must be what `init` returned, an AccumulationState: state={type(state).__name__}. Turn "
                "that of optax.MultiSteps into one with from_multi_steps."
            )
        if _has_accumulator(state):
            _accumulator.check(state.acc_grads, grads)
        elif self.every != 1 and jax.tree.leaves(grads):
            raise ValueError(
                f"Only every=1 works without an accumulator: every={self.every}, and the state was made for every=1. "
                "Add one with state._replace(acc_grads=tx.init(params).acc_grads)."
            )

    def _add(
        self, grads: Tree, state: AccumulationState, params: Tree | None, weight: Weight, extra_args: Mapping[str, Any]
    ) -> _Window:
        skip, skip_state = self._screen(grads, state, params, weight)
        arrived = True if skip is False or self.nonfinite == "omit" else jnp.logical_not(skip)
        weight = weight if skip is False else jnp.where(skip, 0, weight)
        kept = _has_accumulator(state)
        total = _accumulator.add(state.acc_grads if kept else None, grads, weight, state.mini_step == 0)
        added = state._replace(
            mini_step=_count(state.mini_step, arrived),
            acc_grads=total if kept else (),
            weight=state.weight + weight,
            mean_args=self._add_args(state.mean_args, extra_args, weight),
            skipped=_count(state.skipped, skip),
            skip_state=skip_state,
        )
        return _Window(added, total, added.weight if kept else weight)

    def _screen(self, grads: Tree, state: AccumulationState, params: Tree | None, weight: Weight) -> tuple[Flag, Tree]:
        """Returns whether this micro-batch is left out, and what a callable policy says about it."""
        if callable(self.nonfinite):
            skip, info = self.nonfinite(grads, state.gradient_step, params)
            return _arguments.as_skip(skip), _cast_like(info, state.skip_state)
        if self.nonfinite in ("skip", "omit"):
            return ~_accumulator.all_finite((grads, weight)) & (weight != 0), ()
        return False, ()

    def _add_args(
        self, sums: dict[str, WeightedSum], extra_args: Mapping[str, Any], weight: Weight
    ) -> dict[str, WeightedSum]:
        def add(name: str) -> WeightedSum:
            if name not in extra_args:
                return sums[name]
            value = _arguments.as_scalar(name, extra_args[name], "Name only scalars in mean_args.")
            share = jnp.where(weight != 0, weight * value, 0)
            return WeightedSum(sums[name].total + share, sums[name].weight + weight)

        return {name: add(name) for name in sums}

    def _closes(self, state: AccumulationState, flush: Flag) -> Flag:
        if self.every is None or flush is True:
            return flush
        if self.every == 1 and self.nonfinite in ("propagate", "omit", "discard"):
            return True
        every = _arguments.as_count(self.every(state.gradient_step)) if callable(self.every) else self.every
        due = state.mini_step >= jnp.maximum(every, 1)
        return due if flush is False else due | flush

    def _usable(self, window: _Window, closes: Flag) -> Flag:
        """Returns whether an update can be made of this window; the gradients are read only if it closes."""
        usable = window.weight != 0
        if self.nonfinite != "discard" or closes is False:
            return usable
        finite = functools.partial(_accumulator.all_finite, (window.total, window.weight))
        return usable & (finite() if closes is True else jax.lax.cond(closes, finite, lambda: jnp.array(True)))

    def _inner_update(
        self, grads: Tree, window: _Window, params: Tree | None, extra_args: Mapping[str, Any]
    ) -> tuple[Tree, Any]:
        state = window.state
        weight = window.weight if self.reduction == "mean" else None
        mean = _accumulator.mean(window.total, grads, weight, self.emit_dtype)
        extra_args = {**extra_args, **_mean_args(state.mean_args, extra_args)}
        inner = lambda grads: self.inner.update(grads, state.inner_opt_state, params, **extra_args)
        try:
            with jax.named_scope("optax_accum.inner"):
                updates, inner_opt_state = inner(mean)
        except (TypeError, ValueError) as error:
            if not _same_dtypes(mean, grads):
                error.add_note(_DTYPE_NOTE.format(emitted=_dtypes(mean), given=_dtypes(grads)))
            raise
        if not _same_dtypes(mean, grads):
            updates = _cast_like(updates, jax.eval_shape(lambda: inner(grads))[0])
        return updates, _cast_like(inner_opt_state, state.inner_opt_state)


_DTYPE_NOTE = (
    "accumulate_gradients gave the inner optimizer gradients of dtype {emitted}, and was given {given}. An optimizer "
    "that needs the dtype of its parameters (optax.novograd and optax.contrib.mechanize over bfloat16 ones) gets it "
    'with emit_dtype="gradient".'
)


def _emit_or_hold(closes: Flag, usable: Flag, emit: Callable[[], Any], hold: Callable[[], Any]) -> Any:
    """Calls the branch that is known when tracing, else compiles both: a cond, or a select for a static flush."""
    if closes is False or usable is False:
        return hold()
    if closes is True:
        return emit() if usable is True else _select(usable, emit(), hold())
    return jax.lax.cond(closes & usable, emit, hold)


def _close(state: AccumulationState, closes: Flag, usable: Flag, inner_opt_state: Any) -> AccumulationState:
    """Returns the state after the micro-step: the counters of a closed window start again, its sum is left to lie."""
    emitted = jnp.asarray(closes & usable)
    reset = lambda count: jnp.where(closes, 0, count)
    return state._replace(
        mini_step=reset(state.mini_step),
        gradient_step=jnp.where(emitted, optax.safe_increment(state.gradient_step), state.gradient_step),
        inner_opt_state=inner_opt_state,
        weight=reset(state.weight),
        mean_args=jax.tree.map(reset, state.mean_args),
        emitted=emitted,
        discarded=_count(state.discarded, closes & ~emitted),
    )


def _count(total: jax.Array, flag: Flag) -> jax.Array:
    return total + jnp.asarray(flag).astype(total.dtype)


def _mean_args(sums: dict[str, WeightedSum], extra_args: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns the weighted means of those extra arguments that came with this micro-step."""
    means: dict[str, jax.Array] = {}
    for name, (total, weight) in sums.items():
        if name in extra_args:
            value = jnp.asarray(extra_args[name])
            mean = jnp.where(weight == 0, value.astype(total.dtype), total * _accumulator.reciprocal(weight))
            inexact = jnp.issubdtype(value.dtype, jnp.inexact)
            means[name] = mean.astype(_accumulator.accumulator_dtype(value.dtype, None)) if inexact else mean
    return means


def _apply_updates(params: Tree, updates: Tree) -> Tree:
    moved = jax.tree.map(lambda u, p: jnp.zeros_like(p) if _accumulator.is_float0(u) else u, updates, params)
    return optax.apply_updates(params, moved)


def _has_accumulator(state: AccumulationState) -> bool:
    return not (isinstance(state.acc_grads, tuple) and not state.acc_grads)


def _known(flag: Flag) -> Flag:
    """Returns a Python bool where the value is known: outside jit, a cond would be compiled at every call."""
    return flag if isinstance(flag, Tracer) else bool(flag)


def _select(flag: Flag, on_true: Tree, on_false: Tree) -> Tree:
    def select(a: Any, b: Any) -> Any:
        return a if _accumulator.is_float0(a) else jnp.where(flag, a, b)

    return jax.tree.map(select, on_true, on_false)


def _zeros(shapes: Tree) -> Tree:
    def zeros(leaf: jax.ShapeDtypeStruct) -> Any:
        return np.zeros(leaf.shape, leaf.dtype) if _accumulator.is_float0(leaf) else jnp.zeros_like(leaf)

    return jax.tree.map(zeros, shapes)


def _strong(tree: Tree) -> Tree:
    """Returns `tree` without weak types, which an update would not give back."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype=jnp.asarray(leaf).dtype), tree)


def _cast_like(tree: Tree, like: Tree) -> Tree:
    return jax.tree.map(lambda leaf, to: leaf if leaf.dtype == to.dtype else leaf.astype(to.dtype), tree, like)


def _same_dtypes(tree: Tree, other: Tree) -> bool:
    return _dtypes(tree) == _dtypes(other)


def _dtypes(tree: Tree) -> str:
    return ", ".join(dict.fromkeys(jnp.result_type(leaf).name for leaf in jax.tree.leaves(tree)))
