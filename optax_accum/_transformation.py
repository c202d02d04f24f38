"""Owns accumulation across calls as users meet it: `accumulate_gradients` and `apply_gradients`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from optax_accum import _accumulator, _arguments, _sharding
from optax_accum._accumulator import Tree, Weight
from optax_accum._arguments import Every
from optax_accum._micro_step import Accumulation, Skip
from optax_accum._sharding import Axes


def accumulate_gradients(
    inner: optax.GradientTransformation,
    every: Every,
    *,
    reduction: str = "mean",
    accumulator_dtype: Any = None,
    emit_dtype: Any = None,
    nonfinite: str | Skip = "propagate",
    mean_args: tuple[str, ...] = ("value",),
    reduce_axes: str | Sequence[str] | None = None,
    reduce_to: Tree = None,
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
        shows in the update of its own window, and in no other window's gradient. `"skip"`: as if it had never
        come; the window waits for another. `"omit"`: the window ends on time, with the rest. `"discard"`: the window
        ends on time, without an update. Or a callable
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
      | a mean argument is not given at some micro-steps | the mean over those that gave it | tracing |
      | a mean argument is not given at the closing one | `inner` does not get it | tracing |
      | a NaN in a mean argument | shows in its mean: policies look at gradients and weights only | running |
      | the state has another accumulator dtype than asked for | the state's is used | tracing |
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
    accumulation = Accumulation(
        inner=_arguments.as_transformation(inner),
        every=_arguments.as_every(every),
        reduction=_arguments.one_of("reduction", reduction, ("mean", "sum")),
        accumulator_dtype=_arguments.as_float_dtype("accumulator_dtype", accumulator_dtype),
        emit_dtype=emit_dtype if emit_dtype == "gradient" else _arguments.as_float_dtype("emit_dtype", emit_dtype),
        nonfinite=nonfinite
        if callable(nonfinite)
        else _arguments.one_of("nonfinite", nonfinite, policies, " or a callable"),
        mean_args=_arguments.as_names(mean_args),
        reduce_axes=_sharding.as_axes(reduce_axes),
        reduce_to=reduce_to,
    )
    _check_reduction(accumulation)
    return optax.GradientTransformationExtraArgs(accumulation.init, cast(Any, accumulation.update))


def _check_reduction(accumulation: Accumulation) -> None:
    if accumulation.reduce_to is not None and not accumulation.reduce_axes:
        raise ValueError("reduce_to says where the sum over reduce_axes goes: reduce_axes=None. Name the axes, too.")
    if callable(accumulation.nonfinite) and accumulation.reduce_axes:
        raise ValueError(
            "A callable nonfinite looks at the gradient of a micro-batch, which reduce_axes does not reduce: "
            f'reduce_axes={accumulation.reduce_axes}. Take "skip", "omit" or "discard".'
        )


def apply_gradients(
    tx: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, **extra_args: Any
) -> tuple[Tree, Tree]:
    """Makes a micro-step and applies it: `tx.update` and `optax.apply_updates` in one.

        emit:  params + updates of `inner`, inside the branch        hold:  params

    A held micro-step reads and writes the accumulator, and neither parameters nor optimizer state nor a tree of zeros,
    so it costs what adding costs. The result is that of the two calls: bit for bit outside `jit`, and inside it to the
    rounding of the compiler's fusions.

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
    if isinstance(accumulation, Accumulation):
        return accumulation.apply(grads, state, params, **extra_args)
    updates, state = optax.with_extra_args_support(tx).update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


def value_and_apply_gradients(
    fun: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    weight_fn: Callable[..., Any] | None = None,
    rng_argnum: int | None = None,
) -> Callable[..., tuple[Any, Tree, Tree]]:
    """Makes a whole micro-step of a loss: `jax.value_and_grad(fun)` and then `apply_gradients(tx, ...)`, in place.

    The backward pass adds each gradient to the accumulator in the state where it arises, scaled by the micro-batch's
    weight. So no tree of gradients is ever written or read beside it, which is what a micro-step's memory mostly is.

    Args:
      fun: a loss `fun(params, *args) -> loss`, or `-> (loss, aux)` with `has_aux`.
      tx: what `accumulate_gradients` returned; any other optimizer makes an update at every call.
      has_aux: whether `fun` returns a pair.

    Returns:
      A function `step(params, state, *args, **extra_args) -> (value, params, state)`, where `value` is what `fun`
      returned, and `extra_args` is what `tx.update` takes by keyword: `weight`, `flush`, and the arguments of the inner
      optimizer. The loss is passed on as `value=`, unless `mean_args` of `tx` leaves it out. Donate the first two.

    Raises:
      TypeError: the loss is not a real scalar. Otherwise as `accumulate_gradients`.

    Guarantees:
      The same parameters and state as the two calls, to rounding (a parameter that is used twice is added twice).

      | case | result | known when |
      |---|---|---|
      | parameters in the dtype of their accumulators | added in place | tracing |
      | a bfloat16 parameter with a float32 accumulator | the gradient is written, then added | tracing |
      | `nonfinite` is `"skip"`, `"omit"` or a callable, which must see the gradient | as above | tracing |
      | `every=1`, or another optimizer | as above; nothing is accumulated | tracing |
      | weight 0 | the backward pass is not run | running |

    Example:
      >>> import functools, jax, jax.numpy as jnp, optax, optax_accum
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.5), every=2)
      >>> step = optax_accum.value_and_apply_gradients(lambda params, x: jnp.mean((params - x) ** 2), tx)
      >>> train_step = jax.jit(step, donate_argnums=(0, 1))
      >>> params = jnp.array(0.0)
      >>> state = tx.init(params)
      >>> for x in (1.0, 3.0):
      ...     loss, params, state = train_step(params, state, jnp.array([x]))
      ...     print(loss, params)
      1.0 0.0
      9.0 2.0
    """

    micro_step = _MicroStep(
        fun=fun,
        has_aux=has_aux,
        batch_argnums=_arguments.as_argnums("batch_argnums", batch_argnums),
        weight_fn=weight_fn,
        rng_argnum=rng_argnum,
    )

    @functools.wraps(fun)
    def step(
        params: Tree, state: Tree, *args: Any, weight: Any = None, flush: Any = None, **extra_args: Any
    ) -> tuple[Any, Tree, Tree]:
        params = jax.tree.map(jnp.asarray, params)
        accumulation = getattr(tx.update, "__self__", None)
        accumulation = accumulation if isinstance(accumulation, Accumulation) else None
        in_place = accumulation is not None and accumulation.adds_in_place(state, params)
        axes, to = (accumulation.reduce_axes, accumulation.reduce_to) if accumulation else ((), None)
        done = micro_step.run(axes, to, in_place, params, state, args, weight)
        if accumulation is None or "value" in accumulation.mean_args:
            extra_args = {"value": done.loss, **extra_args}
        extra_args = {"weight": done.weight, "flush": flush, **extra_args}
        if in_place:
            params, state = accumulation.apply_added(done.grads, state, params, **extra_args)
        else:
            params, state = apply_gradients(tx, done.grads, state, params, **extra_args)
        return done.value, params, state

    return step


class _Done(NamedTuple):
    """One micro-batch differentiated; with `reduce_axes`, rows [d, ...]."""

    loss: jax.Array  # []
    value: Any  # what `fun` returned
    weight: Weight
    grads: Tree  # the gradient, or the accumulator with the gradient in it


@dataclasses.dataclass(frozen=True)
class _MicroStep:
    """What `value_and_apply_gradients` was asked for, and the functions that differentiate."""

    fun: Callable[..., Any]
    has_aux: bool
    batch_argnums: tuple[int, ...]
    weight_fn: Callable[..., Any] | None
    rng_argnum: int | None

    def run(
        self,
        axes: Axes,
        reduce_to: Tree,
        in_place: bool,
        params: Tree,
        state: Tree,
        args: tuple[Any, ...],
        weight: Any,
    ) -> _Done:
        """Differentiates one micro-batch, with `axes` on each device its own rows."""
        acc = _sharding.to_device(state.acc_grads) if in_place else None
        if not axes:
            return self._differentiate(axes, params, acc, weight, in_place and state.mini_step == 0, args)
        _sharding.check_num_rows(state.weight, axes, params, args)
        if reduce_to is None:
            _sharding.check_replicated(params, axes)
        if weight is not None:
            weight = _arguments.as_weight(weight, len(state.weight))
        local = functools.partial(self._on_device, axes)
        if _sharding.is_manual(axes):
            done = local(params, acc, weight, state.mini_step == 0, *args)
            return done._replace(grads=jax.tree.map(lambda leaf: leaf[None], done.grads)) if in_place else done
        split = (1, 2, *(number + 3 for number in self.batch_argnums))
        own = lambda *args: (local(*args), None)
        return _sharding.per_device(own, axes, split, (params, acc, weight, state.mini_step == 0, *args))[0]

    def _on_device(self, axes: Axes, params: Tree, acc: Tree, weight: Any, first: Any, *args: Any) -> _Done:
        if self.rng_argnum is not None:
            own = _sharding.own_key(args[self.rng_argnum - 1], axes)
            args = (*args[: self.rng_argnum - 1], own, *args[self.rng_argnum :])
        acc, weight = _sharding.own_row((acc, weight))
        return self._differentiate(axes, _sharding.varying(params, axes), acc, weight, first, args)

    def _differentiate(
        self, axes: Axes, params: Tree, acc: Tree | None, weight: Any, first: Any, args: tuple[Any, ...]
    ) -> _Done:
        if weight is None:
            batch = [(params, *args)[number] for number in self.batch_argnums] if self.weight_fn else []
            weight = self.weight_fn(*batch) if self.weight_fn else 1.0
        weight = _arguments.as_weight(weight)
        loss, backward, value = _vjp(self.fun, self.has_aux, params, args)
        if axes:
            _sharding.check_own_loss(loss, axes)
        if acc is None:
            (grads,) = backward(jnp.ones_like(loss))
            return _Done(loss, value, weight, grads)
        run = lambda refs, weight: _discard(backward.with_refs(refs)(jnp.ones_like(loss) * jnp.asarray(weight, loss.dtype)))
        return _Done(loss, value, weight, _accumulator.add_backward(run, acc, weight, first))


def _vjp(fun: Callable[..., Any], has_aux: bool, params: Tree, args: tuple[Any, ...]) -> tuple[jax.Array, Any, Any]:
    """Returns the loss in at least float32, its backward pass, and what `fun` returned."""

    def wide(params: Tree) -> tuple[jax.Array, Any]:
        out = fun(params, *args)
        loss = out[0] if has_aux else out
        _arguments.check_loss(loss, None)
        return loss.astype(_accumulator.accumulator_dtype(loss.dtype, None)), out

    return jax.vjp(wide, params, has_aux=True)


def _discard(_: Any) -> None:
    """Leaves nothing of the cotangents, which the references hold."""
