"""The value and the gradient of a whole batch on one of its devices, as the traced loss tells: nothing is declared.

The program that computes the gradient runs level by level (`by_level`), micro-batch by micro-batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._arguments.roles import Call
from optax_accum._core import dtypes
from optax_accum._core.adding import Finish
from optax_accum._core.folds import SUM
from optax_accum._core.leaves import check_arrays
from optax_accum._core.types import Tree
from optax_accum._loss import ratio
from optax_accum._rows.leveling import is_over_layers, size_of
from optax_accum._rows.levels import Kind
from optax_accum._rows.places import place_of
from optax_accum._rows.program import Value
from optax_accum._space.device import Device
from optax_accum._space.ending import Ending
from optax_accum._within import by_level, shared
from optax_accum._within.call_rules import CallRules
from optax_accum._within.fold import NOTHING, Result
from optax_accum._within.measured import measured, sums_of, takes_a_sum
from optax_accum._within.outputs import check_alike, placed
from optax_accum._within.splitting import split_rows
from optax_accum._within.traced_call import (
    TracedCall,
    UndividedError,
    on_device,
    trace_call,
    warn_undivided,
)

_ADDED_IN_PLACE = "gradients that are added in place; those that are differentiated again are not"
_TWINS = "parameters with different gradients, where devices keep shards: two have the same gradient, as in a + b"
_SUM_OVER_ROWS = (
    "a loss whose gradients are sums over rows: most of this one's gradients need one more operation after the sum, as "
    "for a term without rows (weight decay, say). Give that term to the optimizer"
)


class Local(NamedTuple):
    """One device's part of the gradient and of the statistics, and its rows of outputs."""

    grads: Any
    outputs: Tree
    samples: Any = ()
    weight: jax.Array | None = None


def differentiated(rules: CallRules, device: Device, call: Call, again: bool) -> tuple[Local, Tree]:
    """One device's part of the whole batch's value and gradient, and the outputs that all devices have alike.

    Raises:
      ValueError: the loss takes something from the other devices.
      UndividedError: all rows must run at once, and cannot.
    """
    if not device.one_batch:  # its own batch: nothing is added over devices, parameters' gradients neither
        others = tuple(name for name in call.arguments if name not in call.batch)
        call = call.with_values(others, device.fold_keys(call[others]))
        call = device.localized(call, tuple(call.arguments))
    fun = _with_one_number(rules)
    may_run_at_once = device.is_alone and not rules.meter.measures
    if may_run_at_once and split_rows(list(call[call.batch]), rules.sizes, device.count).microbatches == 1:
        return _at_once(rules, device, call, fun)
    over = device if device.one_batch else Device(alike=device.alike, apart=device.axes)
    try:
        program = None
        if not again or rules.meter.measures:
            program = traced_gradient(rules, call, over, joins_all=rules.meter.measures or not device.endings.missing)
        # JAX differentiates it, also with collectives of its own, or those of its gradient, by types.
        if program is None or _is_smaller_as_function(rules, program) or device.collectives(program.traced):
            loss = trace_call(lambda call: call.apply(fun), call, rules.sizes, call.params, over, by_rows=True)
            return _run_function(rules, device, call, loss)
    except UndividedError as error:
        if not may_run_at_once:
            error.add_note("Over devices, and with statistics, micro-batches cannot run at once. Change that line.")
            raise
        warn_undivided(error)
        return _at_once(rules, device, call, fun)
    device.check_nested(program.traced)
    outputs = len(jax.tree.leaves(program.traced.shapes[0]))
    device.check_axes(program.traced.program.out_avals[:outputs])
    if device.one_batch:
        check_alike(program, device, call, outputs)
    return _run_gradient(rules, device, program)


def traced_gradient(
    rules: CallRules, call: Call, device: Device | None = None, *, joins_all: bool = False
) -> TracedCall:
    """The program that computes the value and the gradient of the whole batch; see `trace_call` and `levels_of`."""
    gradient = functools.partial(_gradient, rules, _with_one_number(rules))
    return trace_call(
        gradient,
        call,
        rules.sizes,
        call.params,
        device,
        differentiated=False,
        joins_all=joins_all,
        outputs=lambda shapes: len(jax.tree.leaves(shapes[0])),
        recompute=rules.recompute_share,
    )


def _is_smaller_as_function(rules: CallRules, program: TracedCall) -> bool:
    """Whether a scan over layers takes rows together: its gradient keeps all that each layer makes, for all rows.

    Differentiated layer by layer, the function keeps what goes from one to the next.
    """
    if rules.meter.measures or rules.devices.overlap:
        return False
    kinds = program.levels.kinds.items()
    return any(kind is Kind.WHOLE and is_over_layers(equation, program.levels) for equation, kind in kinds)


def _gradient(rules: CallRules, fun: Callable[..., Any], call: Call) -> tuple[Tree, list[Any]]:
    """What `fun` returns, and the gradient by the inexact parameters: the program that is traced.

    If the loss alone were traced, each loop would have to be differentiated, and somebody would have to say where the
    cotangents of its sums come from, in what order, and whether a rule of the user's may see a part of one. Here JAX
    has said it: a cotangent is a value like any other, 1 / sum(mask) of a masked mean, and a parameter's gradient is
    a sum over rows, added in the loop in which it arises.
    """

    def loss(params: Tree) -> tuple[jax.Array, Tree]:
        outputs = call.with_values(call.params, params).apply(fun)
        return rules.returns.taken_apart(outputs).loss, outputs

    grads, outputs = jax.grad(loss, has_aux=True)(call[call.params])
    return outputs, jax.tree.leaves(grads)


def _run_gradient(rules: CallRules, device: Device, program: TracedCall) -> tuple[Local, Tree]:
    """The value and the gradient, by the program that computes both."""
    params = program.call[program.call.params]
    named = dtypes.named_dtypes(rules.accumulator_dtype, params)
    wide_dtype = lambda leaf, name: dtypes.accumulator_dtype(jnp.result_type(leaf), name)
    sum_dtypes = jax.tree.leaves(jax.tree.map(wide_dtype, params, named))
    results = program.levels.program.outputs
    count = len(results) - len(sum_dtypes)
    outputs, gradient = results[:count], results[count:]
    sums = sums_of(program.levels)
    asked: dict[Value, Result] = {}
    for value, dtype in zip(gradient, sum_dtypes, strict=True):  # one that several parameters have is added once
        if value not in sums:
            continue
        before = asked.get(value)
        asked[value] = Result(SUM, jnp.promote_types(before.dtype, dtype) if before else dtype)
    sampled = NOTHING
    if rules.meter.measures:
        asked, sampled = measured(rules.meter, program, gradient, asked)
    ending, ends, finished_in_loop = _ending(device, program, gradient, sum_dtypes)
    asked |= {value: dataclasses.replace(asked[value], finish=ends[value]) for value in finished_in_loop}
    store = by_level.run_levels(program.levels, program.units, program.device, program.values, asked, sampled)
    found = [jnp.asarray(store.whole(value)) for value in outputs]
    parts = [store.part(value).astype(dtype) for value, dtype in zip(gradient, sum_dtypes, strict=True)]
    pairs = zip(parts, gradient, strict=True)
    parts = [ends[value](part) if value in ends and value not in finished_in_loop else part for part, value in pairs]
    grads = jax.tree.unflatten(jax.tree.structure(params), parts)
    local, same = placed(device, program, jax.tree.unflatten(jax.tree.structure(program.traced.shapes[0]), found))
    weight = jnp.asarray(program.units.count * program.units.block, dtypes.default_float())
    if not device.one_batch:
        grads = device.vary(grads)
    return Local(grads if ending is None else ending.reduced(grads), local, store.samples, weight), same


def _ending(
    device: Device, program: TracedCall, gradient: Sequence[Value], sum_dtypes: Sequence[Any]
) -> tuple[Ending | None, dict[Value, Finish], set[Value]]:
    """How the last micro-batch adds the gradient over the devices: what finishes each sum, and which a loop finishes.

    A loop can finish a sum that nothing takes afterwards, while its products go on; others are finished after it.
    """
    zeros = [jnp.zeros(value.aval.shape, dtype) for value, dtype in zip(gradient, sum_dtypes, strict=True)]
    taken = {value for equation in program.levels.program.equations for value in equation.ins}
    finished_in_loop = sums_of(program.levels).intersection(gradient) - taken
    of_sums = {value for value in gradient if takes_a_sum(value, program.levels)}
    missing = None if 2 * sum(map(size_of, finished_in_loop)) >= sum(map(size_of, of_sums)) else _SUM_OVER_ROWS
    if len(set(gradient)) < len(gradient) and device.endings.shards_of is not None:
        missing = _TWINS  # one sum is finished once, for one shard
    ending = device.ending(jax.tree.unflatten(jax.tree.structure(program.call[program.call.params]), zeros), missing)
    if ending is None:
        return None, {}, set()
    return ending, dict(zip(gradient, ending.finish, strict=True)), finished_in_loop


def _at_once(rules: CallRules, device: Device, call: Call, fun: Callable[..., Any]) -> tuple[Local, Tree]:
    apply = lambda call: call.with_values(call.params, shared.narrowed(call[call.params])).apply(fun)
    grads, outputs = _differentiated(rules, device, on_device(call), apply)
    device.check_axes(jax.tree.leaves(outputs))
    return Local(grads, jax.tree.map(lambda _: None, outputs)), outputs


def _with_one_number(rules: CallRules) -> Callable[..., Any]:
    """`fun` with a loss that is one number: a `Ratio` is divided, and several terms are added."""

    @functools.wraps(rules.fun)
    def fun(*args: Any, **kwargs: Any) -> Any:
        parts = rules.returns.parts(rules.fun(*args, **kwargs))
        check_arrays("What fun returns", parts, "Return arrays and numbers, and register a class of them as a pytree.")
        loss = jax.tree.map(jnp.asarray, parts.loss)
        ratio.check_loss(loss)
        return rules.returns.joined(parts._replace(loss=ratio.as_number(loss)))

    return fun


# Differentiated again


def _run_function(rules: CallRules, device: Device, call: Call, loss: TracedCall) -> tuple[Local, Tree]:
    """The value and the gradient of a loss, by JAX, which may differentiate them again."""
    _check_own_rows(device, loss)
    device.check_nested(loss.traced)
    device.check_axes(loss.traced.program.out_avals)
    if device.one_batch:
        check_alike(loss, device, call)
    device.ending(call[call.params], _ADDED_IN_PLACE)
    names = tuple(call.arguments)

    def compute(call: Call) -> Any:
        arrays = shared.arrays_of(call[names])
        return loss.returned(by_level.evaluate(loss.levels, loss.units, loss.device, arrays))

    grads, outputs = _differentiated(rules, loss.device, call.with_values(names, loss.call[names]), compute)
    local, same = placed(device, loss, outputs)
    return Local(grads, local), same


def _check_own_rows(device: Device, loss: TracedCall) -> None:
    """Raises for a loss that takes something from the other devices: whose rows are in its sums, no trace tells."""
    if not (collectives := device.collectives(loss.traced)):
        return
    where = f"{collectives[0].primitive.name}, {place_of(collectives[0])}"
    raise ValueError(
        f"The loss takes something from the other devices of {device.axes} ({where}). Leave that out: with devices, "
        "the rows of all devices are one batch. Or, under check_vma=True, let each micro-batch count by itself: "
        "jax.value_and_grad(optax_accum.reduce_microbatches(loss, k, weight_fn=..., devices=...))."
    )


def _differentiated(rules: CallRules, device: Device, call: Call, compute: Callable[[Call], Any]) -> tuple[Tree, Any]:
    """One device's part of the gradient, by `jax.grad`, and the result of `compute`; narrow parameters are widened."""
    params = call[call.params]

    def fun(variables: Tree) -> Any:
        outputs = compute(call.with_values(call.params, jax.tree.map(shared.with_variable, params, variables)))
        return device.part(rules.returns.taken_apart(outputs).loss), outputs

    grads, outputs = jax.grad(fun, has_aux=True)(jax.tree.map(shared.variable_of, params))
    named = dtypes.named_dtypes(rules.accumulator_dtype, params)
    widened = lambda grad, name: grad.astype(dtypes.accumulator_dtype(grad.dtype, name))  # as devices add it
    return jax.tree.map(widened, grads, named), outputs
