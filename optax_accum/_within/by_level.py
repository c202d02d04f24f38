"""A program of rows, level by level: loops over micro-batches, and between two loops the equations that take all rows.

The gradient of a masked mean is one loop: the batch alone decides its cotangents, mask / sum(mask), before it begins.
With BatchNorm one loop adds up a layer's mean, the next takes it; backward loops add up its cotangent, and take that.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import compilers, evaluation, tracing
from optax_accum._core.folds import SUM
from optax_accum._rows import derivatives, layers, resized
from optax_accum._rows.division import ADDS
from optax_accum._rows.leveling import body_levels, is_over_layers
from optax_accum._rows.levels import Kind, Levels, Loop
from optax_accum._rows.places import explained
from optax_accum._rows.program import Equation, Number, Value
from optax_accum._rows.units import Units
from optax_accum._space.device import Device
from optax_accum._within import shared
from optax_accum._within.fold import NOTHING, Result, Sampled, folded
from optax_accum._within.some_rows import evaluate_rows, evaluate_some, followed, part_of, read, reduction_of
from optax_accum._within.store import Store, axis_of, has_own_rows


def evaluate(levels: Levels, units: Units, device: Device, values: Sequence[Any]) -> list[Any]:
    """Evaluates a program for all rows of a device, one micro-batch after the other."""
    store = run_levels(levels, units, device, values)
    return [jnp.asarray(store.whole(value)) for value in levels.program.outputs]


def run_levels(
    levels: Levels,
    units: Units,
    device: Device,
    values: Sequence[Any],
    asked: Mapping[Value, Result] = MappingProxyType({}),
    sampled: Sampled = NOTHING,
) -> Store:
    """Runs a program level by level; `asked` says what becomes of some sums, `sampled` what is measured of them."""
    store = Store(units, device, dict(zip(levels.program.inputs, values, strict=True)), asked=asked, sampled=sampled)
    for stage in levels.stages:
        for equation in stage.before_loop:
            with explained(equation):
                run_whole(equation, levels, store)
        if stage.loop:
            run(stage.loop, levels, store)
    return store


def run_whole(equation: Equation, levels: Levels, store: Store) -> None:
    if _is_of_widened(equation, store):
        (value,), (result,) = equation.ins, equation.outs
        store.values[result] = shared.followed(lambda leaf: followed(equation, [leaf])[0], store.values[value])
        return
    if _is_of_parts(equation, levels, store):
        results = followed(equation, [_part_of_sum(value, equation, store) for value in equation.ins])
        store.sums.update(zip(equation.outs, results, strict=True))
        return
    values = [store.whole(value) for value in equation.ins]
    if _is_part_of_batch(equation, levels, store):
        every = jnp.arange(store.units.count)
        store.sums[equation.outs[0]] = part_of(equation, store.units, values, every)
        return
    if is_over_layers(equation, levels):
        results = over_layers(equation, levels, store, values)
    elif store.device.is_alone:
        results = _in_step(equation, functools.partial(_as_it_is, equation), store.device, values)
    else:
        results = _over_devices(equation, levels.kinds[equation], store, values)
    store.values.update(zip(equation.outs, results, strict=True))


def _in_step(equation: Equation, run: Any, device: Device, values: list[Any]) -> list[Any]:
    """Evaluates an equation of this device's rows; all devices run its loops and branches together."""
    differ = ([value.axis is not None for value in equation.ins],)
    return device.in_step(run, [equation.single], differ)(values)


def _as_it_is(equation: Equation, values: list[Any]) -> Sequence[Any]:
    """Evaluates an equation for all rows; programs inside it are traced again where values, by type, differ more."""
    if not evaluation.varying_more(values, [atom.aval for atom in equation.single.invars]):
        return evaluation.bind(equation.single, values)
    return resized.evaluate(equation.single, equation.single, resized.Some(equation.rows, equation.rows[0]), values)


def _over_devices(equation: Equation, kind: Kind, store: Store, values: list[Any]) -> Sequence[Any]:
    """Evaluates an equation for all rows, each device for its own; one that takes rows together gathers them."""
    units, device = store.units, store.device
    every = jnp.arange(units.count)
    if kind is Kind.LOCAL:
        local = functools.partial(evaluate_rows, equation, units, indices=every)
        return _in_step(equation, local, device, values)
    if kind is Kind.PARTIAL:
        part = part_of(equation, units, values, every)
        return [finished(equation, device.joined(reduction_of(equation).fold, part), store)]
    has_rule = derivatives.has_backward(equation)
    if has_rule:  # it may do anything with a cotangent: it needs the whole one, of all devices, and returns a whole one
        values = list(map(device.with_part_of_cotangent, values))
    pairs = zip(values, equation.ins, strict=True)
    values = [device.gathered(v, axis_of(value)) if has_own_rows(value) else v for v, value in pairs]
    results = _as_it_is(equation, values)
    results = map(device.with_whole_cotangent, results) if has_rule else results
    results = zip(results, equation.outs, strict=True)
    return [device.own(result, axis_of(value)) if has_own_rows(value) else result for result, value in results]


def _is_of_widened(equation: Equation, store: Store) -> bool:
    """Whether an equation is linear in a narrow parameter, a cast say: then its gradient need not be rounded."""
    if len(equation.ins) != 1 or not shared.is_widened(store.values.get(equation.ins[0])):
        return False
    return layers.follows(equation, set(equation.ins), layers.Zeros())


def _is_part_of_batch(equation: Equation, levels: Levels, store: Store) -> bool:
    """Whether an equation is a sum over the rows of several devices that the batch alone decides."""
    if store.device.is_alone or levels.differentiable or levels.kinds[equation] is not Kind.PARTIAL:
        return False
    return reduction_of(equation).fold is SUM and not equation.name.startswith("scatter")


def _is_of_parts(equation: Equation, levels: Levels, store: Store) -> bool:
    """Whether an equation is linear in sums of which each device has a part: then it need not be added over devices."""
    parts = [value for value in equation.ins if value in store.sums]
    if not parts or levels.differentiable or len(equation.outs) != 1:
        return False
    if equation.name in ADDS:
        avals = [value.aval for value in (*equation.ins, *equation.outs)]
        are_inexact = all(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals)
        return are_inexact and len({aval.shape for aval in avals}) == 1
    return layers.follows(equation, set(parts), layers.Zeros())


def _part_of_sum(value: Value, equation: Equation, store: Store) -> Any:
    if value in store.sums:
        return store.sums[value]
    return store.part(value) if equation.name in ADDS else store.whole(value)


def run(loop: Loop, levels: Levels, store: Store) -> None:
    rows, totals = results_of(loop, levels, store)

    def given(value: Value, result: jax.Array) -> jax.Array:
        return result if value in levels.differentiable or not levels.differentiable else jax.lax.stop_gradient(result)

    store.slices.update((value, given(value, row)) for value, row in zip(loop.rows, rows, strict=True))
    for (value, fold), total in zip(loop.sums.items(), totals, strict=True):
        if fold is SUM and not levels.differentiable and value not in loop.onto:
            store.sums[value] = total  # added over the devices when the whole of it is first asked for
            continue
        total = store.device.joined(fold, total)
        if value in loop.onto:
            total = total + store.whole(loop.onto[value])
        store.values[value] = given(value, total.astype(value.aval.dtype))


def results_of(loop: Loop, levels: Levels, store: Store) -> tuple[list[Any], list[Any]]:
    """Runs a loop over the micro-batches; returns the rows that it keeps [k, ...], and its sums over all rows here."""
    units = store.units
    takes = [value for value in loop.takes if not isinstance(value, Number)]
    constant = [value for value in takes if value.axis is None and value not in levels.differentiable]
    shared_values = [value for value in takes if value.axis is None and value in levels.differentiable]
    kept_rows = [value for value in takes if value.axis is not None and value in levels.of_params]
    batch_rows = [value for value in takes if value.axis is not None and value not in levels.of_params]
    interleaved = [units.interleaved(store.splittable(value), axis_of(value)) for value in batch_rows]
    constants = [store.whole(value) for value in constant]
    wide = list(map(store.shared, shared_values))

    def part(given: Any, wide: Any, index: Any, rows: list[Any]) -> list[Any]:
        constants, interleaved = given
        env = dict(
            zip((*constant, *shared_values, *kept_rows), (*constants, *shared.narrowed(wide), *rows), strict=True)
        )
        env |= {v: units.micro_batch(leaf, axis_of(v), index) for v, leaf in zip(batch_rows, interleaved, strict=True)}
        evaluate_some(loop.equations, levels, units, env, units.indices(index))
        return [read(env, value) for value in (*loop.rows, *loop.sums)]

    differ = (False, True), False, False, True  # of given, wide, index, rows: each device has its own rows
    part = store.device.in_loop(part, [equation.single for equation in loop.equations], differ)
    given, xs = (constants, interleaved), [store.split(value) for value in kept_rows]
    if levels.differentiable:  # JAX differentiates a scan that stacks parts; else they are added in place, in the carry
        iteration = _recomputed(part, list(store.values.values()))
        results = _mapped(lambda x: iteration(given, wide, *x), (jnp.arange(units.microbatches), xs))
        found = zip(loop.sums.values(), results[len(loop.rows) :], strict=True)
        return results[: len(loop.rows)], [fold.along(leaf, axis=0) for fold, leaf in found]
    sums = [store.asked.get(value, Result(fold)) for value, fold in loop.sums.items()]
    sampled = store.sampled if any(one.square is not None for one in sums) else NOTHING
    results = [*(Result(over=at) for at in _replaced(loop, kept_rows, xs)), *sums]
    found, samples = folded(
        lambda index, rows: part(given, wide, index, rows), xs, units.microbatches, results, sampled
    )
    store.samples = samples if sampled is not NOTHING else store.samples
    return found[: len(loop.rows)], found[len(loop.rows) :]


def _recomputed(fun: Callable[..., Any], args: Any) -> Callable[..., Any]:
    """`fun` under `jax.checkpoint`, unless it runs outside `jit` and is not differentiated."""
    return jax.checkpoint(fun) if tracing.is_staged() or tracing.is_differentiated(args) else fun


def _mapped(fun: Callable[[Any], Any], xs: Any) -> Any:
    """Like `jax.lax.map`; outside `jit` without a loop, which would be compiled at every call."""
    if tracing.is_staged():
        return jax.lax.map(fun, xs)
    count = len(jax.tree.leaves(xs)[0])
    results = [fun(jax.tree.map(lambda leaf: leaf[iteration], xs)) for iteration in range(count)]  # noqa: B023
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


def _replaced(loop: Loop, kept_rows: Sequence[Value], xs: Sequence[Any]) -> list[int | None]:
    """For each array of rows that a loop keeps, one that it may overwrite, as nothing takes it afterwards; or None."""
    free = {at: _layout(value) for at, value in enumerate(kept_rows) if value in loop.ends}
    found: list[int | None] = []
    for value in loop.rows:
        at = next((at for at, layout in free.items() if layout == _layout(value)), None)
        found.append(at)
        free.pop(at, None)  # type: ignore[arg-type]
    return found


def _layout(value: Value) -> Any:
    return value.aval.shape, value.aval.dtype, value.axis, compilers.varying_axes(value.aval)


def finished(equation: Equation, total: jax.Array, store: Store) -> jax.Array:
    """The result of an equation, from its joined parts: a scatter adds them to its operand."""
    if equation.name.startswith("scatter"):
        total = total + store.whole(equation.ins[0])
    return total.astype(equation.outs[0].aval.dtype)


# Loops over layers whose bodies take rows together


def over_layers(equation: Equation, levels: Levels, store: Store, values: Sequence[Any]) -> list[Any]:
    """Evaluates a loop over layers whose body takes rows together: the loop as it is, its body level by level."""
    inner = body_levels(equation, levels)
    consts, _ = compilers.sizes_of_scan(equation.single)
    values = evaluation.varying_as(values, [atom.aval for atom in equation.single.invars])
    more = evaluation.varying_more(values, [atom.aval for atom in equation.single.invars])
    # Gradients of constants are sums over all iterations.
    wide = shared.widened(list(values[:consts]))

    def body(given: list[Any]) -> list[Any]:
        outs = evaluate(inner, store.units, store.device, [*shared.narrowed(wide), *given[consts:]])
        return evaluation.varying_as(outs, [value.aval for value in inner.program.outputs], more)

    return evaluation.scanned(equation.single, values, body)
