"""`value_and_apply_gradients`: a micro-step that differentiates the loss, adds in place and updates."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optax

from optax_accum._across.loss import Loss
from optax_accum._across.steps import AccumulatingStep, Keywords, Step
from optax_accum._across.transformation import rules_of
from optax_accum._arguments import callables, checks
from optax_accum._arguments.roles import Roles
from optax_accum._core.types import Name, Tree
from optax_accum._loss.meter import Meter
from optax_accum._loss.ratio import Returns
from optax_accum._shared.checks import as_function


@callables.renamed("every in accumulate_gradients")
def value_and_apply_gradients(
    fun: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    batch_argnums: Name | Sequence[Name] = 1,
    whole_argnums: Name | Sequence[Name] = (),
    weight_fn: Callable[..., Any] | None = None,
    rng_argnum: Name | None = None,
    exact: bool = True,
) -> Callable[..., tuple[Any, Tree, Tree]]:
    """Returns a train step: loss, gradient added in place, and update.

        step = value_and_apply_gradients(loss, tx)
        value, params, state = step(params, state, batch)

    The step does what `jax.value_and_grad(fun)` and then
    `apply_gradients(tx, ...)` do: one micro-step. Its backward pass adds
    each gradient, scaled by the micro-batch's weight, to the accumulator in
    the state as soon as it is computed. So it never stores a tree of
    gradients beside the accumulator, most of a micro-step's extra memory.

    Args:
      fun: a loss `fun(params, *args) -> loss`, or `-> (loss, aux)` with
        `has_aux`. It may be a `Ratio`, which says itself how much the
        micro-batch counts.
      tx: what `accumulate_gradients` returned; any other optimizer makes an
        update at every call.
      has_aux: whether `fun` returns a pair.
      batch_argnums: the argument of `fun`, or several, that hold the rows
        of the micro-batch, by position or name as in `value_and_grad`. `()`
        for a loss without one.
      whole_argnums: arguments that are no part of the batch though they
        have as many rows, and keys that all micro-batches share on purpose.
      weight_fn: `weight_fn(batch)` is the weight of the micro-batch, such
        as `batch["mask"].sum()`. By default what the traced loss divides
        by: a sum over a mask, or the number of rows, and rows with a
        warning where nothing shows that this is right; 1 if `tx` takes a
        sum. `weight=` in a call replaces it. (A window inside a chain is
        told the same.) No weight is right for a loss that compares rows:
        see `exact`.
      rng_argnum: an argument that is a key, or a tree of keys: micro-step i
        of a window gets `jax.random.fold_in(key, i)`, with `devices` of
        a key of the device's own. Pass another key in each window.
      exact: whether the update is to be the whole batch's, so that a loss
        whose micro-batches certainly do not add up raises, however they are
        weighed. False: each micro-batch counts by itself, as with
        `optax.MultiSteps`. Then the loss is not read: without `weight` and
        `weight_fn` a micro-batch counts by its rows.

    With `devices` in `tx`, each device differentiates its own rows of the
    batch and adds to its own partial sum; `fun` and `weight_fn` see the
    rows of one device: a micro-batch, also with `every=1`. All devices get
    every other argument whole. Only a static `flush=True` (a Python bool)
    lets the last backward pass of a window add over the devices, too
    (`Devices(overlap=)`).

    Returns:
      A function `step(params, state, *args, **keywords) -> (value, params,
      state)`, where `value` is what `fun` returned, a `Ratio` divided (with
      `devices` one for each device, [d, ...]). A keyword that `fun`
      names goes to `fun`, any other to `tx.update`: `weight`, `flush`,
      arguments that the inner optimizer reads. The loss is passed on as
      `value=`, unless `mean_args` of `tx` leaves it out. Donate the first
      two.

    Raises:
      TypeError, ValueError: the loss is not a real scalar; arguments whose
        roles do not fit; a keyword that neither `fun` names nor `tx` reads;
        a loss whose micro-batches do not add up, however they are weighed
        (BatchNorm, InfoNCE, several denominators, a sum for a mean), unless
        `exact=False`. `explain` shows the lines. Otherwise as
        `accumulate_gradients`.

    Guarantees:
      The same parameters and state as the two calls, to rounding (if a
      parameter is used twice, its two gradients are added one by one).

      Gradients of parameters of any dtype, whatever `fun` casts them to,
      are added in place; of a parameter that is used at several places, one
      by one. With a `jax.custom_vjp`, float16 or float8 in `fun`, the weight
      is multiplied in where gradients arise. (A rule that is not linear,
      such as a clip, sees the gradient of the micro-batch alone.) The step
      may be differentiated, as in meta-learning, and batched. Known when
      tracing:

      * `"skip"`, `"omit"`, a callable: they must see the gradient, which is
        written first, and then added. The same outside `jit`.
      * `every=1`, or another optimizer: nothing is accumulated.
      * An integer parameter: stays, where `tx` leaves it out
        (`optax.masked`); else an error says how.
      * A key that no role names, or one that a compiled loss closes over,
        or makes, if numbers for rows are drawn from it; an argument with as
        many rows as the batch: an error.
      * A keyword argument that both `fun` and `tx` name: an error.
      * `rng_argnum` and an optimizer with several windows: an error.
      * `devices` with rows that the devices do not divide, or with a
        loss averaged with `pmean`: an error.

      Known when running:

      * `weight` or `weight_fn` gives 0: the micro-batch is not run, and
        zeros stand for what `fun` returned. Where the gradient is written
        first (above), or where it overlaps, the micro-batch may be run all
        the same: it adds nothing, and what `fun` returned is returned.
      * A `Ratio` counts 0: the micro-batch is run, and adds its total,
        unless that is a NaN.
      * `fun` communicates over these devices: one more number, the weight, is
        added over the devices.

    Example:
      >>> import functools, jax, jax.numpy as jnp, optax, optax_accum
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.5), every=2)
      >>> fun = lambda params, x: jnp.mean((params - x) ** 2)
      >>> step = optax_accum.value_and_apply_gradients(fun, tx)
      >>> train_step = jax.jit(step, donate_argnums=(0, 1))
      >>> params = jnp.array(0.0)
      >>> state = tx.init(params)
      >>> for x in (1.0, 3.0):
      ...     batch = jnp.array([x])
      ...     loss, params, state = train_step(params, state, batch)
      ...     print(loss, params)
      1.0 0.0
      9.0 2.0
    """
    roles = Roles(
        fun, batch_argnums=batch_argnums, whole_argnums=whole_argnums, rng_argnum=rng_argnum, needs_batch=False
    )
    fun = as_function(fun, remedy="Pass the loss, then the optimizer: value_and_apply_gradients(fun, tx).")
    optimizer, rules = callables.as_optimizer(tx), rules_of(tx)
    checks.check_flag("exact", exact, may_be_none=False)
    loss = Loss(
        fun,
        returns=Returns(has_aux),
        weight_fn=callables.as_weight_fn(weight_fn, roles),
        meter=rules.meter if rules else Meter(),
        weigher=functools.partial(_weigher, fun, roles, has_aux) if exact else None,
    )
    if rules is None:
        optimizer = callables.ignoring(optimizer, "value", "weight", "rows", "grad_weight", "flush")
        micro_step = Step(loss, roles, optimizer, mean_args=("value",))
    else:
        micro_step = AccumulatingStep(loss, roles, rules.inner, rules.mean_args, rules=rules)

    @functools.wraps(fun)
    def step(
        params: Tree, state: Tree, *args: Any, weight: Any = None, flush: Any = None, **extra_args: Any
    ) -> tuple[Any, Tree, Tree]:
        return micro_step.step(params, state, args, Keywords(weight, flush, extra_args))

    del step.__wrapped__  # `jax.jit(step, static_argnames="flush")` reads the signature of `step`, not of `fun`
    return step


def _weigher(*args: Any) -> Any:
    from optax_accum._explain.weigher import Weigher  # loaded when the first loss is read

    return Weigher(*args)
