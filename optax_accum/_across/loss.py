"""One micro-batch of a loss across calls: weighed, differentiated, added to the accumulator."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from optax_accum._arguments import checks, rows
from optax_accum._arguments.roles import Call
from optax_accum._core import convolutions, matching, tracing
from optax_accum._core.leaves import is_inexact, parted
from optax_accum._core.traced import Traced, trace_or_run
from optax_accum._core.types import Flag, Tree
from optax_accum._loss.backward import Adding, Backward, add_to, contribution, forward
from optax_accum._loss.meter import Meter
from optax_accum._loss.ratio import LossParts, Ratio, Returns, check_loss, check_single
from optax_accum._loss.weighing import Amount, ByCount, ByWeight
from optax_accum._shared.arrays import short
from optax_accum._space.device import Device
from optax_accum._space.ending import Ending, Reduced


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
    grads: Tree | Added  # the gradient, unless the backward pass has added it


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss that gets one micro-batch a call, how each is weighed, and the statistics of its gradient."""

    fun: Callable[..., Any]
    returns: Returns
    weight_fn: Callable[..., Any] | None
    meter: Meter
    amount_from_loss: Callable[..., Amount | None] | None = None  # reads off the loss how a micro-batch counts

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

        Without `acc` the gradient is returned instead. `flush`: whether this micro-batch closes the window, None if
        nobody has said it. `in_window`: whether the optimizer adds micro-batches up, of calls or of devices, and
        `takes_a_sum` whether it takes their sum.
        """
        call = device.localized(call, call.params).fold_key(index)

        def fun(params: Any) -> Any:
            return self.returns.parts(call.with_arguments({0: params}).apply(self.fun))

        params = call.arguments[0]
        traced, compute = _traced(device, fun, params)
        weighing = self._weighing(device, traced, call, weight, in_window, takes_a_sum)
        together = device.runs_together(traced)
        if acc is not None:
            matching.check_sums(acc, params)
        how = self._adding(params, traced) if acc is not None and tracing.is_staged() else None

        def returned(loss: jax.Array, parts: LossParts) -> tuple[jax.Array, Any, Amount]:
            value = self.returns.joined(parts._replace(loss=weighing.value(parts.loss)))
            return loss, value, weighing.counted(parts.loss)

        def run() -> tuple[Backward, Any]:
            loss, backward, parts = contribution(compute, params, weighing)
            return backward, returned(loss, parts)

        def rest() -> Any:
            return returned(*forward(compute, params, weighing))

        ending = self._ending(device, acc, how, flush)
        amount = weighing.amount
        if acc is None or (not how and (self.meter.measures or amount is None)):
            backward, (loss, value, amount) = run()
            return Done(loss, value, amount, backward.gradient())  # the window adds it, and measures it
        how = how and dataclasses.replace(how, finish=ending and ending.finish)
        gradient_of, rest_of, done = run, rest, None
        if amount is None and ending is None:  # a Ratio has its count only when it has been run
            backward, done = run()
            gradient_of, rest_of, amount = lambda: (backward, None), lambda: None, done[-1]
        known = None if amount is None else amount.grad_weight
        acc, squares, found = add_to(
            acc, gradient_of, known, index == 0, rest=rest_of, how=how, vary=device.vary, together=together
        )
        loss, value, counted = done or found
        amount = amount or counted
        measured = self.meter.by_group(parted(params, is_inexact)[1](squares)) if squares else None
        reduced = None if ending is None else ending.reduced(acc)
        return Done(loss, value, amount, Added(acc, measured, reduced))

    def _ending(self, device: Device, acc: Tree | None, how: Adding | None, flush: Flag | None) -> Ending | None:
        if flush is False:
            return None
        missing = None
        if flush is not True:
            missing = f"a Python bool as flush, so that a program of its own closes the window: flush={short(flush)}"
        elif not how:
            missing = (
                "gradients that are added inside the backward pass: an accumulator, and no policy that sees them first"
            )
        return device.ending(acc, missing)

    def _adding(self, params: Tree, traced: Traced) -> Adding:
        """How the gradient is added to the accumulator inside the backward pass.

        The weight is a factor of the cotangent. It is multiplied in where gradients arise instead if it could change
        more than their size, for float16 or a `custom_vjp`.
        """
        return Adding(self.meter.no_squares(params), traced.is_short or traced.has_rule)

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
        if in_window and self.amount_from_loss and call.batch:
            how = {"takes_a_sum": takes_a_sum, "is_weighed": is_ratio or is_weighed}
            read = self.amount_from_loss(call, axes=device.axes, **how)
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


def _traced(device: Device, fun: Callable[[Any], LossParts], params: Tree) -> tuple[Traced, Callable[[Any], LossParts]]:
    """A loss of the parameters, traced and checked, and the function that runs it on this device."""
    traced = trace_or_run(fun, params)
    types = traced.program.out_avals[: len(jax.tree.leaves(traced.shapes.loss))]
    device.check_axes(types, of_optimizer=True)
    device.check_loss(traced, types)
    device.check_nested(traced)
    differ = lambda params: jax.tree.map(lambda _: False, params)  # no parameter differs between devices
    fun = device.in_step(traced.run if traced.runs_alone else fun, traced.jaxpr.eqns, differ)
    return traced, convolutions.fast_in_loops(fun, traced.jaxpr.eqns)
