"""Owns a whole micro-step across calls: a loss differentiated, its gradient added in place, the update applied."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_accum import _accumulator, _arguments, _mesh, _sharding
from optax_accum._accumulator import Tree, Weight
from optax_accum._mesh import Axes
from optax_accum._micro_step import Accumulation
from optax_accum._transformation import apply_gradients


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
      batch_argnums: the argument of `fun`, or several, that hold the batch; used by the next two, and by `reduce_axes`.
      weight_fn: `weight_fn(batch)` is the weight of the micro-batch, such as `batch["mask"].sum()`: one, if not given
        at the call.
      rng_argnum: with `reduce_axes`, an argument that is a key: each device gets one of its own.

    With `reduce_axes` in `tx`, each device differentiates its own rows of the batch and adds to its own row of the
    accumulator; `fun` and `weight_fn` see the rows of one device. Every other argument is on all devices whole.

    Returns:
      A function `step(params, state, *args, **extra_args) -> (value, params, state)`, where `value` is what `fun`
      returned (with `reduce_axes` one row for each device, [d, ...]), and `extra_args` is what `tx.update` takes by
      keyword: `weight`, `flush`, and the arguments of the inner optimizer. The loss is passed on as `value=`, unless
      `mean_args` of `tx` leaves it out. Donate the first two.

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
      | `reduce_axes`: rows that the devices do not divide; a loss averaged with `pmean` | an error | tracing |

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
        in_place = accumulation.adds_in_place(state, params) if accumulation else False
        done = micro_step.run(accumulation, in_place, params, state, args, weight)
        if accumulation is None or "value" in accumulation.mean_args:
            extra_args = {"value": done.loss, **extra_args}
        extra_args = {"weight": done.weight, "flush": flush, **extra_args}
        if accumulation and in_place:
            params, state = accumulation.apply_added(done.grads, state, params, **extra_args)
        else:
            params, state = apply_gradients(tx, done.grads, state, params, **extra_args)
        return done.value, params, state

    del step.__wrapped__  # `jax.jit(step, static_argnames="flush")` reads the signature of `step`, not of `fun`
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
        accumulation: Accumulation | None,
        in_place: bool,
        params: Tree,
        state: Tree,
        args: tuple[Any, ...],
        weight: Any,
    ) -> _Done:
        """Differentiates one micro-batch, with `reduce_axes` on each device its own rows."""
        acc = _mesh.to_device(state.acc_grads) if in_place else None
        if accumulation is None or not accumulation.reduce_axes:
            return self._differentiate((), params, acc, weight, in_place and state.mini_step == 0, args)
        axes = accumulation.reduce_axes
        _sharding.check_num_rows(state.weight, axes, params, args)
        if accumulation.reduce_to is None:
            _sharding.check_replicated(params, axes)
        if weight is not None or self.weight_fn is None:
            weight = accumulation.as_weight(1.0 if weight is None else weight, state)
        local = functools.partial(self._on_device, axes)
        if _mesh.is_manual(axes):
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
        run = lambda refs, weight: _discard(
            backward.with_refs(refs)(jnp.ones_like(loss) * jnp.asarray(weight, loss.dtype))
        )
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
