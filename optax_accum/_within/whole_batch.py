"""The value and the gradient of a whole batch on one of its devices, as the traced loss tells: nothing is declared.

Each micro-batch runs once where that is enough (`one_pass`), else level by level (`by_level`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._arguments.roles import Call, Roles
from optax_accum._core import dtypes, tracing
from optax_accum._core.leaves import check_arrays, is_array, parted
from optax_accum._core.types import Tree
from optax_accum._loss import ratio
from optax_accum._loss.parts import Returns
from optax_accum._space.device import Device
from optax_accum._space.space import Space
from optax_accum._within import by_level, splitting
from optax_accum._within.alike import check_alike
from optax_accum._within.by_level import axis_of
from optax_accum._within.cut import AGAIN, cut
from optax_accum._within.end import Given
from optax_accum._within.one_pass import OnePass, one_pass
from optax_accum._within.rules import CallRules
from optax_accum._within.separate import UnreadableError
from optax_accum._within.traced_call import (
    TracedCall,
    UndividedError,
    number_of_microbatches,
    trace_call,
    warn_undivided,
)

_SUM_OVER_ROWS = (
    "a loss whose gradient is a sum over rows: this one has a term of the parameters alone (weight decay, say), which "
    "is added in the end. Give the term to the optimizer"
)


class Local(NamedTuple):
    """One device's part of the gradient and of the statistics, and its rows of outputs."""

    grads: Any
    outputs: Tree
    samples: Any = ()
    weight: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Along:
    """One device's rows of an output, [n, ...], and the axis along which they belong."""

    rows: jax.Array
    axis: int = dataclasses.field(metadata={"static": True})


def differentiated(rules: CallRules, device: Device, call: Call, again: bool) -> tuple[Local, Tree]:
    """One device's part of the whole batch's value and gradient, and the outputs that all devices have alike.

    Raises:
      UnreadableError: the loss takes something from the other devices.
      UndividedError: all rows must run at once, and cannot.
    """
    if not device.one_batch:  # its own batch: nothing is added over devices, parameters' gradients neither
        arrays, filled = parted(call[tuple(call.arguments)], is_array)
        call = call.with_values(tuple(call.arguments), filled(device.vary(arrays)))
    fun = _of_one_number(rules)
    may_run_at_once = device.is_alone and not rules.meter.measures
    if may_run_at_once and number_of_microbatches(rules.sizes, list(call[call.batch]), device.count) == 1:
        return _at_once(rules, device, call, fun)
    try:
        over = device if device.one_batch else Device(alike=device.alike, apart=device.axes)
        loss = trace_call(fun, call, rules.sizes, call.params, over, rules.crossing)
    except UndividedError as error:
        if not may_run_at_once:
            error.add_note("Over devices, and with statistics, micro-batches cannot run at once. Change that line.")
            raise
        warn_undivided(error)
        return _at_once(rules, device, call, fun)
    if collectives := device.collectives(loss.traced):
        raise UnreadableError(loss, collectives, device, rules.returns)
    device.check_nested(loss.traced)
    device.check_axes(loss.traced.program.out_avals)
    if device.one_batch:
        check_alike(loss, device, call)
    once = one_pass(loss)
    if once is None:
        return _in_levels(rules, device, call, loss, again)
    return _in_one_pass(rules, device, call, once, again)


def _at_once(rules: CallRules, device: Device, call: Call, fun: Callable[..., Any]) -> tuple[Local, Tree]:
    grads, outputs = _differentiated(rules, device, call, lambda call: call.apply(fun))
    device.check_axes(jax.tree.leaves(outputs))
    return Local(grads, jax.tree.map(lambda _: None, outputs)), outputs


def joined(space: Space, local: Tree, outputs: Tree) -> Tree:
    """The outputs as `fun` returns them, from the devices' own parts and from outputs that all have alike."""

    def join(mine: Any, same: Any) -> Any:
        if mine is None:
            return same
        if isinstance(mine, Along):
            return jnp.moveaxis(space.output("concat", mine.rows), 0, mine.axis)
        return space.total(mine)

    return jax.tree.map(join, local, outputs, is_leaf=lambda node: node is None or isinstance(node, Along))


def _of_one_number(rules: CallRules) -> Callable[..., Any]:
    """`fun` with a loss that is one number: a `Ratio` is divided, and several terms are added."""

    @functools.wraps(rules.fun)
    def fun(*args: Any, **kwargs: Any) -> Any:
        parts = rules.returns.parts(rules.fun(*args, **kwargs))
        check_arrays("What fun returns", parts, "Return arrays and numbers, and register a class of them as a pytree.")
        loss = jax.tree.map(jnp.asarray, parts.loss)
        ratio.check_loss(loss, None)
        return rules.returns.joined(parts._replace(loss=ratio.as_number(loss)))

    return fun


# Level by level


def _in_levels(rules: CallRules, device: Device, call: Call, loss: TracedCall, again: bool) -> tuple[Local, Tree]:
    """The value and the gradient of a loss that takes rows together before its end."""
    rules.meter.refuse(
        "Statistics take the gradient of each micro-batch, and this loss takes rows together: micro-batches have no "
        "gradients of their own. Leave statistics out."
    )
    names = tuple(call.arguments)
    once = tracing.is_staged() and not again and rules.in_place is not False
    values = tracing.refuse_differentiation(loss.call[names], AGAIN) if once else loss.call[names]

    def compute(call: Call) -> Any:
        arrays, _ = parted(call[names], is_array)
        return loss.returned(by_level.evaluate(loss.levels, loss.units, loss.device, arrays, once=once))

    grads, outputs = _differentiated(rules, loss.device, call.with_values(names, values), compute)
    local, same = _placed(device, loss, outputs)
    return Local(grads, local), same


def _differentiated(rules: CallRules, device: Device, call: Call, compute: Callable[[Call], Any]) -> tuple[Tree, Any]:
    """One device's part of the gradient, by `jax.grad`, and the result of `compute`."""

    def fun(params: Tree) -> Any:
        outputs = compute(call.with_values(call.params, params))
        return device.part(rules.returns.taken_apart(outputs).loss), outputs

    grads, outputs = jax.grad(fun, has_aux=True, allow_int=True)(call[call.params])
    named = dtypes.named_dtypes(rules.accumulator_dtype, call[call.params])
    return jax.tree.map(_widened, grads, named), outputs


def _widened(grad: Any, named: Any) -> Any:
    """The gradient in the dtype in which it is added over devices."""
    return grad if dtypes.is_float0(grad) else grad.astype(dtypes.accumulator_dtype(grad.dtype, named))


# In one pass


def _in_one_pass(rules: CallRules, device: Device, call: Call, once: OnePass, again: bool) -> tuple[Local, Tree]:
    """The value and the gradient of a loss whose cotangents are known beforehand."""
    if rules.meter.measures:
        once = once.measured

    def contribution(*args: Any) -> Any:
        *params, batch, fixed = args
        return once.contribution(jax.tree.leaves(params), batch, fixed)

    count = len(call.params)
    roles = Roles(contribution, argnums=tuple(range(count)), batch_argnums=count, whole_argnums=count + 1)
    inner = dataclasses.replace(
        rules,
        fun=contribution,
        roles=roles,
        returns=Returns(has_aux=True),
        sizes=splitting.Sizes(once.traced.units.parts, None, 1),
        weight_fn=once.weight if once.is_filled else None,
        single=False,
        aux_reduction=once.reductions,
    )
    if once.end.adds:
        device = device.with_endings(missing=_SUM_OVER_ROWS)
    sums, _ = cut(inner, device, roles.bind((*call[call.params], once.batch, once.fixed), {}), again).add_up()
    given = once.joined(sums.outputs)
    grads = _ended(once, given, sums.grads)
    local, same = _placed(device, once.traced, once.traced.returned(once.outputs(given)))
    return Local(grads, local, sums.samples, sums.weight), same


def _ended(once: OnePass, given: Given, grads: Any) -> Any:
    """The gradient after the end of the loss: scaled by its factor, with its own terms added."""
    leaves, treedef = jax.tree.flatten(grads)
    if once.factor_at is not None:
        factor = once.end.factor(given, once.factor_at)
        leaves = [leaf if dtypes.is_float0(leaf) else leaf * factor.astype(leaf.dtype) for leaf in leaves]
    if once.end.adds:
        pairs = zip(leaves, once.end.direct(given), strict=True)
        leaves = [leaf if more is None else leaf + more.astype(leaf.dtype) for leaf, more in pairs]
    return treedef.unflatten(leaves)


def _placed(device: Device, loss: TracedCall, outputs: Tree) -> tuple[Tree, Tree]:
    """Splits outputs: one device's own, and the ones that all have alike; None stands for the others."""
    leaves = jax.tree.leaves(outputs)
    if device.is_alone:
        return loss.returned([None] * len(leaves)), outputs
    values = loss.levels.program.outputs
    mine: list[Any] = [None] * len(leaves)
    same: list[Any] = [None] * len(leaves)
    for place, (value, leaf) in enumerate(zip(values, leaves, strict=True)):
        if by_level.has_own_rows(value):
            mine[place] = Along(jnp.moveaxis(leaf, axis_of(value), 0), axis_of(value))
        elif device.one_batch:
            same[place] = device.same(leaf)
        else:
            mine[place] = leaf
    return loss.returned(mine), loss.returned(same)
