"""The gradient of micro-batches that count each by itself, as several calls do."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from optax_accum._arguments import checks
from optax_accum._arguments.roles import Call
from optax_accum._core import dtypes, tracing
from optax_accum._core.types import Tree
from optax_accum._loss.parts import Parts
from optax_accum._loss.weighing import divided
from optax_accum._space.device import Device
from optax_accum._within import gradients, microbatches, reductions
from optax_accum._within.cut import Sums, cut
from optax_accum._within.rules import CallRules, as_rules


def one_by_one(fun: Callable[..., Any], *sizes: Any, **options: Any) -> Callable[..., tuple[Any, Any]]:
    """Does what `value_and_grad` does, with the loss of one micro-batch: losses and gradients are averaged.

    By the number of rows, or by `weight_fn`. The other options of `as_rules` are as in `accumulate`; `grad_reduction`
    is `"max"` or `"last"` for leaves whose backward pass returns new values in the place of gradients, such as the
    statistics of float8.
    """
    rules = as_rules(fun, *sizes, **options)

    @functools.wraps(rules.fun)
    def compute(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return added_up(rules, rules.roles.bind(args, kwargs))

    return compute


def added_up(rules: CallRules, call: Call) -> tuple[Any, Any]:
    """Adds the gradients of all micro-batches, on all devices, and returns what `jax.value_and_grad` would."""
    checks.check_no_module(call[call.params])
    again = tracing.is_again(list(call.arguments.values()))
    call = microbatches.checked_batch(call, rules.sizes)
    space = rules.space(call[call.params])
    local, carry = space.run(functools.partial(_of_device, rules, again), call)
    outputs = jax.tree.map(space.output, reductions.over_devices(rules.aux_reduction, local.outputs), local.outputs)
    loss, grads = space.total(local.loss), space.reduced(local.grads)[0]
    loss, grads = divided((loss, grads), space.total(local.counted))
    kinds = rules.kinds(call[call.params])
    value = rules.returns.joined(Parts(loss, outputs, carry))
    samples, weight = space.total((local.samples, local.weight))
    value = rules.meter.with_statistics(value, samples, gradients.added(grads, kinds), weight)
    grads = gradients.over_devices(kinds, space, local.grads, grads, call[call.params])
    grads = dtypes.as_gradients(grads, call[call.params], rules.accumulator_dtype)
    return value, grads[0] if rules.single else grads


def _of_device(rules: CallRules, again: bool, device: Device, call: Call) -> tuple[Sums, Tree]:
    micro_batches = cut(rules, device, call, again)
    device.check_axes(micro_batches.types)
    return micro_batches.add_up()
