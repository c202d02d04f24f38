"""One micro-batch of a loss across calls: weighed, differentiated, added to the accumulator where gradients arise."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._arguments import checks, rows
from optax_accum._arguments.roles import Call
from optax_accum._core import adding, arithmetic, compilers, dtypes, flags, matching, tracing
from optax_accum._core.adding import Finish
from optax_accum._core.leaves import is_inexact, parted
from optax_accum._core.traced import Traced, trace_or_run
from optax_accum._core.types import Flag, Tree, Weight
from optax_accum._loss import ratio
from optax_accum._loss.meter import Meter
from optax_accum._loss.ratio import LossParts, Ratio, Returns, check_loss, check_single
from optax_accum._loss.weighing import Amount, ByCount, ByWeight
from optax_accum._shared.arrays import short
from optax_accum._space.device import Device
from optax_accum._space.ending import Ending, Reduced

Fun = Callable[[Tree], LossParts]  # of the parameters


class Added(NamedTuple):
    """An accumulator after a backward pass has added to it."""

    acc: Tree  # with the gradient in it
    squares: Any  # the squared norms of that gradient; None if the meter measures nothing
    reduced: Reduced | None  # the sum over devices, if that pass has added it, too


class Done(NamedTuple):
    """One micro-batch differentiated, as partial sums."""

    loss: jax.Array  # []
    value: Any  # what `fun` returned
    amount: Amount
    grads: Any  # the gradient; `Added` if the backward pass has added it


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss that gets one micro-batch a call, how each is weighed, and the statistics of its gradient."""

    fun: Callable[..., Any]
    returns: Returns
    weight_fn: Callable[..., Any] | None
    meter: Meter
    weigher: Callable[..., Any] | None  # of the devices' axes: reads off the traced loss how a micro-batch counts

    def add(
        self,
        device: Device,
        call: Call,
        acc: Tree | None,
        weight: Any,
        index: Any,
        *,
        flush: Flag | None,
        in_window: bool,
        takes_a_sum: bool,
    ) -> Done:
        """Differentiates the micro-batch of one device, and adds its gradient to this device's partial sum.

        Without `acc`, or outside `jit`, the gradient is returned instead. `flush`: whether this micro-batch closes the
        window, None if nobody has said it. `in_window`: whether several micro-batches, of calls or of devices, make one
        update, and `takes_a_sum` whether of their sum.
        """
        call = device.localized(call, call.params).fold_key(index)
        params = call.arguments[0]
        traced, compute = self._traced(device, call)
        weighing = self._weighing(device, traced, call, weight, in_window, takes_a_sum)
        if acc is not None:
            matching.check_sums(acc, params)
        in_place = acc is not None and tracing.is_staged()
        ending = self._ending(device, acc, in_place, flush)

        def outputs(loss: jax.Array, parts: LossParts) -> tuple[jax.Array, Any]:
            return loss, self.returns.joined(parts._replace(loss=weighing.value(parts.loss)))

        def run() -> tuple[Backward, tuple[jax.Array, Any], Amount]:
            loss, backward, parts = contribution(compute, params, weighing)
            return backward, outputs(loss, parts), weighing.counted(parts.loss)

        if not in_place:
            backward, (loss, value), amount = run()
            if acc is not None and weighing.amount is not None:  # as if a micro-batch of weight 0 had not run
                loss, value = _where(flags.known(amount.grad_weight != 0), (loss, value))
            return Done(loss, value, amount, backward.gradient())  # the window adds it, and measures it
        amount, done = weighing.amount, None
        gradient_of, rest_of = lambda: run()[:2], lambda: outputs(*forward(compute, params, weighing))
        if amount is None:  # a Ratio has its count only when it has been run
            backward, done, amount = run()
            gradient_of, rest_of = lambda: (backward, None), lambda: None
        # A weighed cotangent may overflow in float16, and a `custom_vjp` need not be linear in it: there each gradient
        # is weighed, not the loss.
        finish = None if ending is None else ending.finish
        how = Adding(self.meter.zero_squares(params), traced.is_short or traced.has_rule, finish)
        together = device.runs_together(traced)
        acc, squares, found = add_to(
            acc, gradient_of, amount.grad_weight, index == 0, rest=rest_of, how=how, vary=device.vary, together=together
        )
        loss, value = done or found
        measured = self.meter.by_group(parted(params, is_inexact)[1](squares)) if squares else None
        return Done(loss, value, amount, Added(acc, measured, None if ending is None else ending.reduced(acc)))

    def _traced(self, device: Device, call: Call) -> tuple[Traced, Fun]:
        """The loss of the parameters, traced and checked, and the function that runs it on this device."""

        def fun(params: Any) -> LossParts:
            return self.returns.parts(call.with_arguments({0: params}).apply(self.fun))

        traced = trace_or_run(fun, call.arguments[0])
        types = traced.program.out_avals[: len(jax.tree.leaves(traced.shapes.loss))]
        device.check_axes(types, of_optimizer=True)
        device.check_loss(traced, types)
        device.check_nested(traced)
        run = traced.run if traced.runs_alone else fun
        return traced, device.in_loop(run, traced.jaxpr.eqns, differ=False)  # no parameter differs between devices

    def _ending(self, device: Device, acc: Tree | None, in_place: bool, flush: Flag | None) -> Ending | None:
        if flush is False:
            return None
        missing = None
        if flush is not True:
            missing = f"a Python bool as flush, so that a program of its own closes the window: flush={short(flush)}"
        elif not in_place:
            missing = (
                "gradients that are added inside the backward pass: an accumulator, and no policy that sees them first"
            )
        return device.ending(acc, missing)

    def _weighing(
        self, device: Device, traced: Traced, call: Call, weight: Any, in_window: bool, takes_a_sum: bool
    ) -> ByWeight | ByCount:
        """How a micro-batch is weighed; raises where micro-batches do not add up."""
        loss, mean_and_factor = traced.shapes.loss, device.mean_and_factor(traced)
        check_loss(loss)
        check_single(loss)
        is_ratio, is_weighed = isinstance(loss, Ratio), weight is not None or self.weight_fn is not None
        if is_ratio:
            self._check_ratio(is_weighed, takes_a_sum)
        read = None
        if in_window and self.weigher and call.batch:
            weigher = self.weigher(device.axes)
            read = weigher.amount(call, takes_a_sum=takes_a_sum, is_weighed=is_ratio or is_weighed)
        if is_ratio:
            return ByCount(mean_and_factor, in_window)
        own = self._amount(call, read, takes_a_sum) if weight is None else Amount.of(checks.as_weight(weight))
        means, factors = zip(*map(mean_and_factor, own.numbers), strict=True)
        return ByWeight(Amount(means[0], means[-1], own.kept), factors[-1])

    def _check_ratio(self, weighed: bool, takes_a_sum: bool) -> None:
        if weighed:
            weigher = "weight_fn" if self.weight_fn else "weight"
            raise ValueError(f"A Ratio brings the weight of a micro-batch: {weigher} is given, too. Leave that out.")
        if takes_a_sum:
            raise ValueError(
                'A Ratio is divided by the counts of its window, and the optimizer takes a sum: reduction="sum". Take '
                '"mean", or return the total alone.'
            )

    def _amount(self, call: Call, read: Amount | None, takes_a_sum: bool) -> Amount:
        """How much the micro-batch counts: by `weight_fn`, else by its loss, else by its rows, or 1 in a sum."""
        if self.weight_fn:
            return Amount.of(checks.as_weight(self.weight_fn(*call[call.batch]), name="weight_fn's result"))
        if read is not None:
            return read
        by_rows = call.batch and not takes_a_sum
        return Amount.of(rows.count_known_rows(call[call.batch]) * 1.0 if by_rows else 1.0)


# The backward pass: the gradient, or sums to which it is added where it arises.


def contribution(fun: Fun, params: Tree, weighing: ByWeight | ByCount) -> tuple[jax.Array, "Backward", LossParts]:
    """Differentiates a micro-batch: returns its weighed loss [], its backward pass, and the parts of `fun`'s result."""
    inexact, filled = parted(params, is_inexact)
    run = lambda inexact: forward(fun, filled(inexact), weighing)
    loss, backward, parts = jax.vjp(run, inexact, has_aux=True)
    return loss, Backward(backward, jnp.ones_like(loss), params), parts


def forward(fun: Fun, params: Tree, weighing: ByWeight | ByCount) -> tuple[jax.Array, LossParts]:
    """The loss of a micro-batch as it is weighed, and the result of `fun`."""
    parts = fun(params)
    parts = parts._replace(loss=ratio.checked(parts.loss))
    return weighing.scaled(parts.loss), parts


@dataclasses.dataclass(frozen=True)
class Adding:
    """How a gradient is added to sums.

    Attributes:
      squares: zeros for `|g|^2` of each inexact parameter: [], or [n] with one number for each slice; empty if nothing
        is measured.
      scales: whether the weight multiplies each gradient where it arises; else it multiplies the loss.
      finish: for each the function that finishes its sum (see `adding.Sum`), if this is its last gradient.
    """

    squares: Sequence[jax.Array]
    scales: bool
    finish: Sequence[Finish] | None


class Backward:
    """The backward pass of a loss, which returns the gradient or adds it to sums."""

    def __init__(self, backward: Any, cotangent: jax.Array, params: Tree):
        self.backward, self.cotangent, self.params = backward, cotangent, params

    def gradient(self) -> Tree:
        """The gradient; that of an integer is a zero of a type of its own."""
        return dtypes.gradients_like(self.params, self.backward(self.cotangent)[0])

    def add_to(self, totals: Sequence[Any], how: Adding, weight: Weight, counts: Flag) -> tuple[list[Any], list[Any]]:
        """Adds `weight` times the gradient to totals, where each part of it arises: one for each inexact parameter.

        If it does not count, zeros are added. Returns the totals, and the unweighted `|g|^2` of each if it is measured.
        """
        cotangent = self.cotangent if how.scales else self.cotangent * jnp.asarray(weight, self.cotangent.dtype)
        scale = jnp.asarray(weight if how.scales else 1.0, dtypes.default_float())
        scale = scale if counts is True else jnp.where(counts, scale, 0)
        scale = scale if how.scales or counts is not True else None
        program = jax.make_jaxpr(lambda cotangent: self.backward(cotangent)[0])(cotangent)
        zeros = how.squares or [None] * len(totals)
        finish = how.finish or [None] * len(totals)
        sums = [adding.Sum(total, zero, scale, end) for total, zero, end in zip(totals, zeros, finish, strict=True)]
        adding.run(program, [cotangent], sums)
        undone = 1.0 if how.scales else arithmetic.reciprocal(weight) ** 2
        return [one.total for one in sums], [one.square * undone for one in sums if how.squares]


def add_to(
    acc: Tree,
    run: Callable[[], tuple[Backward, Any]],
    weight: Weight,
    first: jax.Array,
    *,
    rest: Callable[[], Any],
    how: Adding,
    vary: Callable[[Tree], Tree],
    together: bool,
) -> tuple[Tree, list[jax.Array], Any]:
    """Returns `acc + weight * gradient`, or `weight * gradient` where `first`; `|g|^2`; and the rest of `run`'s result.

    A micro-batch of weight 0 is not run, for its loss is often 0 / 0: zeros like those of `rest` stand for the rest.
    Where devices run `together`, or add a sum together in this backward pass, it is run, and adds zeros. `vary` is
    `device.vary`.
    """
    start = compilers.zeroed(acc, first)

    def added(counts: Flag) -> tuple[Tree, list[jax.Array], Any]:
        backward, returned = run()
        backward.cotangent, ready = compilers.ready_together(backward.cotangent, start)
        leaves, treedef = jax.tree.flatten(ready)
        totals, squares = backward.add_to(leaves, how, weight, counts)
        return treedef.unflatten(totals), vary(_where(counts, squares)), vary(_where(counts, returned))

    def unrun() -> tuple[Tree, list[jax.Array], Any]:
        return start, vary(list(how.squares)), vary(arithmetic.zeros_of(jax.eval_shape(rest)))

    counts = flags.known(weight != 0)
    if together or how.finish or counts is True:
        return added(counts)
    return unrun() if counts is False else compilers.branch(counts, lambda: added(True), unrun)


def _where(counts: Flag, tree: Tree) -> Tree:
    return flags.selected(counts, tree, jax.tree.map(jnp.zeros_like, tree))
