"""Owns a whole micro-step across calls: a loss differentiated, its gradient added in place, the update applied."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum._across.accumulator import accumulator_of
from optax_accum._across.divisor import as_divisor
from optax_accum._across.inner import check_extra_args, is_data, unread
from optax_accum._across.loss import Added, Done, Loss
from optax_accum._across.outcomes import new_params
from optax_accum._across.schedules import as_flush
from optax_accum._across.transformation import apply_gradients, rules_of
from optax_accum._across.window import MicroBatch, Rules, check_state, micro_step, weighed, why_not_in_place
from optax_accum._core import arithmetic, checks, tracing
from optax_accum._core.arithmetic import Tree
from optax_accum._core.backward import log_after
from optax_accum._core.callables import as_function, as_optimizer, as_weight_fn, as_weight_of
from optax_accum._core.leaves import NOT_ARRAYS, check_arrays, short
from optax_accum._core.meter import Meter
from optax_accum._core.parts import Returns
from optax_accum._core.roles import Call, Roles
from optax_accum._core.rows import count_rows, is_split
from optax_accum._core.signature import Name, signature_of
from optax_accum._core.state import AccumulationState, micro_step_of
from optax_accum._space.space import Space


def value_and_apply_gradients(
    fun: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    batch_argnums: Name | Sequence[Name] = 1,
    whole_argnums: Name | Sequence[Name] = (),
    group_size: int = 1,
    weight_fn: Callable[..., Any] | None = None,
    weight_of: Callable[[Any, Any], Any] | None = None,
    rng_argnum: Name | None = None,
    in_place: bool | None = None,
    overlap: bool | None = None,
) -> Callable[..., tuple[Any, Tree, Tree]]:
    """Returns a whole micro-step of a loss, which adds gradients in place.

        step = value_and_apply_gradients(loss, tx)
        value, params, state = step(params, state, batch)

    The step does what `jax.value_and_grad(fun)` and then
    `apply_gradients(tx, ...)` do. Its backward pass adds each gradient to
    the accumulator in the state where it arises, scaled by the
    micro-batch's weight. So it never stores a tree of gradients beside the
    accumulator, which would be most of a micro-step's extra memory.

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
      group_size: this many consecutive rows belong together; the number
        must divide the rows of each device.
      weight_fn: `weight_fn(batch)` is the weight of the micro-batch, such
        as `batch["mask"].sum()`. By default the number of its rows, and 1
        if `tx` takes a sum.
      weight_of: `weight_of(value, aux)`, where only what `fun` returned
        tells how much the micro-batch counts (`aux` is None without
        `has_aux`): losses times weights are added, and divided by the sum
        of weights, as with a `Ratio`.
      rng_argnum: an argument that is a key, or a tree of keys: micro-step i
        of a window gets `jax.random.fold_in(key, i)`, with `reduce_axes` of
        a key of the device's own. Pass another key in each window.
      in_place: whether to add inside the backward pass. By default wherever
        that gives the same gradient.
      overlap: with `reduce_axes`, whether the backward pass that closes a
        window also adds the sums over the devices, each as soon as it is
        there. Only a static `flush=True` (a Python bool) can do it. By
        default on GPUs, from 64 MiB of gradients on, without `reduce_to`.

    With `reduce_axes` in `tx`, each device differentiates its own rows of
    the batch and adds to its own partial sum; `fun` and `weight_fn` see the
    rows of one device. Every other argument is on all devices whole.

    Returns:
      A function `step(params, state, *args, **keywords) -> (value, params,
      state)`, where `value` is what `fun` returned, a `Ratio` divided (with
      `reduce_axes` one for each device, [d, ...]). A keyword that `fun`
      names goes to `fun`, any other to `tx.update`: `weight`, `flush`,
      arguments that the inner optimizer reads. The loss is passed on as
      `value=`, unless `mean_args` of `tx` leaves it out. Donate the first
      two.

    Raises:
      TypeError, ValueError: the loss is not a real scalar; arguments whose
        roles do not fit; a keyword that neither `fun` names nor `tx` reads.
        Otherwise as `accumulate_gradients`.

    Guarantees:
      The same parameters and state as the two calls, to rounding (if a
      parameter is used twice, its two gradients are added one by one).

      Gradients of parameters of any dtype, whatever `fun` casts them to,
      are added in place. With a `jax.custom_vjp`, float16 or float8 in
      `fun`, the weight is multiplied in where gradients arise. The gradient
      is first written and then added in these cases, all known when
      tracing:

      * `fun` has a `jax.custom_vjp`, float16 or float8 and returns a
        `Ratio`, whose weight is known too late.
      * `"skip"`, `"omit"`, a callable: they must see the gradient.
      * Accumulators narrower than the parameters; JAX before 0.8.1.
      * The step is differentiated again, with no `jit` between, or called
        outside `jit`.
      * `every=1`, or another optimizer; nothing is accumulated then.

      Also known when tracing:

      * `in_place=True` where it cannot be: an error.
      * An integer parameter: stays, where `tx` leaves it out
        (`optax.masked`); else an error says how.
      * A key that no role names; an argument with as many rows as the
        batch: an error.
      * A keyword argument that both `fun` and `tx` name: an error.
      * `rng_argnum` and an optimizer with several windows: an error.
      * `reduce_axes` with rows that the devices do not divide, or with a
        loss averaged with `pmean`: an error.

      Known when running:

      * `weight` or `weight_fn` gives 0: the micro-batch is not run, and
        zeros stand for what `fun` returned. Where the gradient is written
        first (above), with `in_place=False`, or where it overlaps, the
        micro-batch may be run all the same; it then adds nothing.
      * `weight_of` gives 0: the micro-batch is run; guard a 0 / 0 in its
        loss with `jnp.maximum`.
      * `fun` communicates over `reduce_axes`: one more number, the weight, is
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
        fun,
        batch_argnums=batch_argnums,
        whole_argnums=whole_argnums,
        rng_argnum=rng_argnum,
        needs_batch=False,
    )
    fun = as_function(fun, remedy="Pass the loss, then the optimizer: value_and_apply_gradients(fun, tx).")
    optimizer, rules = as_optimizer(tx), rules_of(tx)
    if overlap and rules is None:
        raise ValueError(
            f"overlap=True needs an optimizer that accumulate_gradients returned, and that is in no other: tx is "
            f"{short(tx)}. Wrap the chain: accumulate_gradients(optax.chain(...), reduce_axes=...)."
        )
    loss = Loss(
        fun,
        returns=Returns(has_aux, weight_of=as_weight_of(weight_of, weight_fn)),
        group_size=checks.as_positive("group_size", group_size) or 1,
        weight_fn=as_weight_fn(weight_fn, roles),
        in_place=in_place,
        overlap=overlap,
        divisor=rules.divisor if rules else as_divisor("mean"),  # an optimizer that we cannot look into takes a mean
        meter=rules.meter if rules else Meter(),
    )
    made = _AccumulatingStep(loss, optimizer, roles, rules) if rules else _Step(loss, optimizer, roles)

    @functools.wraps(fun)
    def step(
        params: Tree, state: Tree, *args: Any, weight: Any = None, flush: Any = None, **extra_args: Any
    ) -> tuple[Any, Tree, Tree]:
        return made.step(params, state, args, weight, flush, extra_args)

    del step.__wrapped__  # `jax.jit(step, static_argnames="flush")` reads the signature of `step`, not of `fun`
    return step


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step of any optimizer: it is handed the gradient of a micro-batch, and how much that counts."""

    loss: Loss
    tx: optax.GradientTransformationExtraArgs
    roles: Roles

    def step(
        self,
        params: Tree,
        state: Tree,
        args: Sequence[Any],
        weight: Any,
        flush: Any,
        extra_args: Mapping[str, Any],
    ) -> tuple[Any, Tree, Tree]:
        """Differentiates one micro-batch, and applies what comes out."""
        checks.check_no_module([params])
        check_arrays("Parameters", params, NOT_ARRAYS)
        params = jax.tree.map(jnp.asarray, params)
        given = {name for name, arg in (("weight", weight), ("flush", flush)) if arg is not None}
        of_fun = self._of_fun(1 + len(args), given | extra_args.keys())
        call = self.roles.bind((params, *args), {name: arg for name, arg in extra_args.items() if name in of_fun})
        self._check(call, weighted=weight is not None or self.loss.weight_fn is not None)
        extra_args = {name: arg for name, arg in extra_args.items() if name not in of_fun}
        space = self.space(state, call)
        self._check_read(extra_args, state, params)
        weight = None if weight is None else self.weighed(space, weight, state)
        again = tracing.is_again((params, state, args, weight, extra_args))
        index = micro_step_of(state, keyed=call.rng is not None)
        closes = None if flush is None else tracing.known(as_flush(flush))
        add = functools.partial(self.loss.add, again=again, flush=closes)
        done, _ = space.run(lambda *own: (add(*own), None), call, self._acc(state), weight, index)
        return space.as_own(done.value), *self.apply(space, done, weight, flush, extra_args, state, params)

    @property
    def inner(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer that takes the keyword arguments which nobody else names."""
        return self.tx

    @property
    def mean_args(self) -> tuple[str, ...]:
        """The keyword arguments that are averaged over a window."""
        return ("value",)

    def inner_state(self, state: Tree) -> Tree:
        """Returns the state of that optimizer."""
        return state

    def space(self, state: Tree, call: Call) -> Space:
        """Returns where the micro-batch is differentiated; raises for a state that is not of there."""
        return Space()

    def weighed(self, space: Space, weight: Any, state: Tree) -> Any:
        """Takes a weight through the door of the space."""
        return weight

    def why_not_in_place(self, state: Tree) -> str | None:
        """Returns what keeps a backward pass from adding to an accumulator, if something does."""
        return "it does not accumulate"

    def apply(
        self,
        space: Space,
        done: Done,
        weight: Any,
        flush: Any,
        extra_args: Mapping[str, Any],
        state: Tree,
        params: Tree,
    ) -> tuple[Tree, Tree]:
        """Returns the parameters and the state after the micro-batch."""
        named = weight is not None or self.loss.weight_fn or isinstance(done.weight, jax.Array)
        counted = {"weight": done.weight} if named else {"rows": int(done.weight)}
        extra_args = {"value": done.loss, **counted, "flush": flush, **extra_args}
        return apply_gradients(self.tx, done.grads, state, params, **extra_args)

    def _of_fun(self, bound: int, names: set[str]) -> set[str]:
        """Returns those names of keyword arguments that are for `fun`, of which `bound` arguments come by position."""
        signature = self.roles.signature
        if both := sorted(names & self._of_tx & signature.keywords_after(bound)):
            raise TypeError(
                f"A keyword argument must be for fun or for the optimizer: {both[0]!r} is an argument of both. Pass "
                "that of fun by position, or give it another name there."
            )
        return names & (set(signature.keywords) - self._of_tx | self.roles.keywords)

    @property
    def _of_tx(self) -> set[str]:
        """The keyword arguments that the optimizer names."""
        return {"weight", "flush", *self.mean_args, *signature_of(self.inner.update).keywords_after(3)}

    def _check_read(self, extra_args: Mapping[str, Any], state: Tree, params: Tree) -> None:
        """Raises for a keyword argument that nobody reads, such as one that `fun` takes as one of its **kwargs."""
        given = self.inner, extra_args.keys() - self._of_tx, (params, self.inner_state(state), params), extra_args
        check_extra_args(*given)
        for name in (name for name in unread(*given) if is_data(extra_args[name])):
            raise TypeError(
                f"A keyword argument must be named by fun or read by the optimizer: {name!r} is neither, and fun is "
                f"{self.roles.signature}. Name it there, or leave it out."
            )

    def _check(self, call: Call, *, weighted: bool) -> None:
        """Raises for a batch whose rows do not fit, and for what every micro-batch would share unasked."""
        batch = call[call.batch]
        has_rows = any(map(is_split, jax.tree.leaves(batch)))
        if call.batch and not (has_rows or weighted):
            raise ValueError(
                "A micro-batch counts by its rows unless it is weighed: the batch arguments hold scalars only. Pass "
                "weight=, or batch_argnums=() if the loss has no batch."
            )
        call.check_shared(count_rows(batch) if has_rows else None)

    def _acc(self, state: Tree) -> Tree | None:
        """Returns the accumulator that a backward pass may add to, or None."""
        why_not = self.why_not_in_place(state)
        if self.loss.in_place and why_not:
            raise ValueError(f"in_place=True needs an accumulator to add to: {why_not}. Leave in_place=None.")
        if why_not or self.loss.in_place is False:
            log_after(why_not or "in_place=False")
            return None
        return accumulator_of(state).on_device(state)


@dataclasses.dataclass(frozen=True)
class _AccumulatingStep(_Step):
    """A micro-step: the gradient is added to the window, where it arises if it can be."""

    rules: Rules

    @property
    def inner(self) -> optax.GradientTransformationExtraArgs:
        return self.rules.inner

    @property
    def mean_args(self) -> tuple[str, ...]:
        return self.rules.mean_args

    def inner_state(self, state: AccumulationState) -> Tree:
        return state.inner_opt_state

    def space(self, state: Tree, call: Call) -> Space:
        space = self.rules.here()
        check_state(state)
        space.check_state(state.weight, call[tuple(call.arguments)])
        space.check_params(call.arguments[0])
        return space

    def weighed(self, space: Space, weight: Any, state: AccumulationState) -> Any:
        return weighed(self.rules, space, weight, state)

    def why_not_in_place(self, state: AccumulationState) -> str | None:
        return why_not_in_place(self.rules, state)

    def apply(
        self,
        space: Space,
        done: Done,
        weight: Any,
        flush: Any,
        extra_args: Mapping[str, Any],
        state: AccumulationState,
        params: Tree,
    ) -> tuple[Tree, Tree]:
        if "value" in self.mean_args:
            extra_args = {"value": done.loss, **extra_args}
        batch = MicroBatch(
            done.grads, self.weighed(space, done.weight, state) if weight is None else weight, flush, extra_args
        )
        if isinstance(done.grads, Added):
            batch = batch._replace(grads=arithmetic.like_gradients(params, state.acc_grads), added=done.grads)
        return micro_step(self.rules, space, batch, state, params, new_params(space, params))
