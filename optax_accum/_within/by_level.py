"""A program of rows, evaluated: loops over micro-batches, and between two loops the equations that take all rows."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import compilers, convolutions, dtypes, evaluation
from optax_accum._rows import derivatives, faults, layers, locality, resized
from optax_accum._rows.leveling import inside_layers, is_over_layers
from optax_accum._rows.levels import Bodies, Body, Kind, Levels, Loop
from optax_accum._rows.program import Constant, Equation, Number, Value
from optax_accum._rows.registry import known
from optax_accum._rows.traces import COUPLED
from optax_accum._rows.units import Units
from optax_accum._space import meshes
from optax_accum._space.device import Device
from optax_accum._within import loops, partial, shared
from optax_accum._within.fold import NOTHING, Result, Sampled, folded


def evaluate(levels: Levels, units: Units, device: Device, values: Sequence[Any]) -> list[Any]:
    """Evaluates a program for all rows of a device, one micro-batch after the other."""
    store = evaluated(levels, units, device, values)
    return [jnp.asarray(store.whole(value)) for value in levels.program.outputs]


def evaluated(
    levels: Levels,
    units: Units,
    device: Device,
    values: Sequence[Any],
    asked: Mapping[Value, Result] = MappingProxyType({}),
    sampled: Sampled = NOTHING,
) -> "Store":
    """The values of a program, evaluated so; `asked` says what becomes of some sums, and what is measured of them."""
    store = Store(units, device, dict(zip(levels.program.inputs, values, strict=True)), asked=asked, sampled=sampled)
    for stage in levels.stages:
        for equation in stage.once:
            run_once(equation, levels, store)
        if stage.loop:
            run(stage.loop, levels, store)
    return store


@dataclasses.dataclass
class Store:
    """The values of a program that are known: whole, or as micro-batches [k, ...] as a loop has left them.

    Each of several devices has its own rows; all other values are the same on all.
    """

    units: Units
    device: Device
    values: dict[Value, Any]
    parts: dict[Value, Any] = dataclasses.field(default_factory=dict)
    sums: dict[Value, Any] = dataclasses.field(default_factory=dict)  # this device's parts of sums over devices
    passed: dict[Value, Any] = dataclasses.field(default_factory=dict)  # shared values, widened
    asked: Mapping[Value, Result] = dataclasses.field(default_factory=dict)  # what becomes of some sums
    sampled: Sampled = NOTHING  # what is measured of them
    samples: Any = ()

    def whole(self, value: Value) -> Any:
        if isinstance(value, Constant | Number):
            return value.array
        if value not in self.values and value in self.sums:
            self.values[value] = self.device.joined("sum", self.sums[value]).astype(value.aval.dtype)
        if value not in self.values and value.axis is None:
            self.values[value] = self.parts[value][0]  # the same for each micro-batch
        if value not in self.values:
            parts = meshes.cuttable(self.parts[value], 1, axis_of(value) + 1)  # else micro-batches lie apart
            joined = self.units.joined(parts, axis_of(value))
            self.values[value] = compilers.sharded_as(value.aval, joined)
        return self.values[value]

    def part(self, value: Value) -> Any:
        """This device's part of a value that is a sum over devices; its dtype may be wider than the value's."""
        return self.sums[value] if value in self.sums else self.device.part(self.whole(value))

    def shared(self, value: Value) -> Any:
        """A value that all micro-batches share, as the last loop passed it on: its gradients are one sum."""
        if value not in self.passed:
            (self.passed[value],) = shared.widened([self.whole(value)], [_same])
        return self.passed[value]

    def cuttable(self, value: Value) -> Any:
        """The value for all rows, as Explicit axes let it be cut."""
        units = self.units
        return meshes.cuttable(jnp.asarray(self.whole(value)), 1 if units.fills else units.size, axis_of(value))

    def cut(self, value: Value) -> Any:
        if value not in self.parts:
            self.parts[value] = self.units.cut(self.cuttable(value), axis_of(value))
        return self.parts[value]


def axis_of(value: Value) -> int:
    assert value.axis is not None
    return value.axis


def run_once(equation: Equation, levels: Levels, store: Store) -> None:
    with faults.explained(equation):
        _run_once(equation, levels, store)


def _run_once(equation: Equation, levels: Levels, store: Store) -> None:
    if _is_of_parts(equation, levels, store):
        (result,) = equation.outs
        store.sums[result] = followed(equation, [_part_of_sum(value, equation, store) for value in equation.ins])
        return
    values = [store.whole(value) for value in equation.ins]
    if _is_part_of_batch(equation, levels, store):
        every = jnp.arange(store.units.number)
        store.sums[equation.outs[0]] = partial.part_of(equation, store.units, values, every)
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

    def differ(values: list[Any]) -> Any:
        return [value.axis is not None for value in equation.ins]

    return device.in_step(run, [equation.single], differ)(values)


def _as_it_is(equation: Equation, values: list[Any]) -> Sequence[Any]:
    """Evaluates an equation for all rows; programs inside it are traced again if, by their types, values differ more."""
    if not evaluation.varying_more(values, [atom.aval for atom in equation.single.invars]):
        return evaluation.bind(equation.single, values)
    return resized.evaluate(equation.single, equation.single, resized.Some(equation.rows, equation.rows[0]), values)


def _over_devices(equation: Equation, kind: Kind, store: Store, values: list[Any]) -> Sequence[Any]:
    """Evaluates an equation for all rows, each device for its own; one that takes rows together gathers them."""
    units, device = store.units, store.device
    every = jnp.arange(units.number)
    if kind is Kind.LOCAL:
        local = functools.partial(of_rows, equation, units, numbers=every)
        return _in_step(equation, local, device, values)
    if kind is Kind.PARTIAL:
        part = partial.part_of(equation, units, values, every)
        return [finished(equation, device.joined(partial.reduction_of(equation).joins, part), store)]
    has_rule = derivatives.has_backward(equation)
    if has_rule:  # it may do anything with a cotangent: it needs the whole one, of all devices, and returns a whole one
        values = list(map(device.with_part_of_cotangent, values))
    pairs = zip(values, equation.ins, strict=True)
    values = [device.gathered(v, axis_of(value)) if has_own_rows(value) else v for v, value in pairs]
    results = _as_it_is(equation, values)
    results = map(device.with_whole_cotangent, results) if has_rule else results
    results = zip(results, equation.outs, strict=True)
    return [device.own(result, axis_of(value)) if has_own_rows(value) else result for result, value in results]


def has_own_rows(value: Value) -> bool:
    """Whether each device has its own rows of a value; not where rows are along two axes."""
    return value.axis not in (None, COUPLED)


def _is_part_of_batch(equation: Equation, levels: Levels, store: Store) -> bool:
    """Whether an equation is a sum over rows that the batch alone decides, of which each of several devices has a part."""
    if store.device.is_alone or levels.moving or levels.kinds[equation] is not Kind.PARTIAL:
        return False
    return partial.reduction_of(equation).joins == "sum" and not equation.name.startswith("scatter")


def _is_of_parts(equation: Equation, levels: Levels, store: Store) -> bool:
    """Whether an equation is linear in sums of which each device has a part: then it need not be added over devices."""
    parts = [value for value in equation.ins if value in store.sums]
    if not parts or levels.moving or len(equation.outs) != 1:
        return False
    if equation.name in ("add", "add_any", "sub"):
        return all(value.aval.shape == equation.outs[0].aval.shape for value in equation.ins)
    return layers.follows(equation, set(parts), layers.Zeros())


def sum_of(value: Value, levels: Levels) -> Value | None:
    """The sum of a loop from which a value is made linearly, as a gradient with decay; None if it takes no sum."""
    made = {each: equation for equation in levels.program.equations for each in equation.outs}
    sums = {each for loop in levels.loops for each in loop.sums}
    while value not in sums:
        equation = made.get(value)
        taken = [] if equation is None else [each for each in equation.ins if _takes(each, made, sums)]
        if len(taken) != 1 or len(equation.outs) != 1:
            return None if not taken else value
        (value,) = taken
    return value


def _takes(value: Value, made: dict[Value, Equation], sums: set[Value]) -> bool:
    """Whether a value takes a sum of a loop."""
    todo, seen = [value], set()
    while todo:
        value = todo.pop()
        if value in sums:
            return True
        if value in made and value not in seen:
            seen.add(value)
            todo += made[value].ins
    return False


def _part_of_sum(value: Value, equation: Equation, store: Store) -> Any:
    if value in store.sums:
        return store.sums[value]
    return store.part(value) if equation.name in ("add", "add_any", "sub") else store.whole(value)


def followed(equation: Equation, values: Sequence[Any]) -> Any:
    """An equation that is linear in parts of sums, in their dtype if that is wider than its own."""
    values, kind = list(map(jnp.asarray, values)), equation.outs[0].aval.dtype
    inexact = [jnp.issubdtype(value.dtype, jnp.inexact) for value in values]
    wide = functools.reduce(jnp.promote_types, [v.dtype for v, is_ in zip(values, inexact, strict=True) if is_])
    if equation.name == "convert_element_type":
        is_as_wide = dtypes.holds(wide, kind) and _is_complex(wide) == _is_complex(kind)
        return values[0] if is_as_wide else values[0].astype(kind)
    values = [value.astype(wide) if is_ else value for value, is_ in zip(values, inexact, strict=True)]
    (result,) = evaluation.bind(equation.single, values)
    return result


def _is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def run(loop: Loop, levels: Levels, store: Store) -> None:
    rows, totals = results_of(loop, levels, store)

    def given(value: Value, result: jax.Array) -> jax.Array:
        return result if value in levels.moving or not levels.moving else jax.lax.stop_gradient(result)

    store.parts.update((value, given(value, row)) for value, row in zip(loop.rows, rows, strict=True))
    for (value, joins), total in zip(loop.sums.items(), totals, strict=True):
        if joins == "sum" and not levels.moving and value not in loop.onto:
            store.sums[value] = total
            continue
        total = store.device.joined(joins, total)
        if value in loop.onto:
            total = total + store.whole(loop.onto[value])
        store.values[value] = given(value, total.astype(value.aval.dtype))


def results_of(loop: Loop, levels: Levels, store: Store) -> tuple[list[Any], list[Any]]:
    """Runs a loop over the micro-batches; returns the rows that it keeps [k, ...], and its sums over all rows here."""
    units = store.units
    takes = [value for value in loop.takes if not isinstance(value, Number)]
    free = [value for value in takes if value.axis is None and value not in levels.moving]
    fixed = [value for value in takes if value.axis is None and value in levels.moving]
    moving = [value for value in takes if value.axis is not None and value in levels.model]
    still = [value for value in takes if value.axis is not None and value not in levels.model]
    interleaved = [units.interleaved(store.cuttable(value), axis_of(value)) for value in still]
    constants = [store.whole(value) for value in free]
    wide = list(map(store.shared, fixed))

    def part(given: Any, wide: Any, index: Any, rows: list[Any]) -> list[Any]:
        constants, interleaved = given
        env = dict(zip((*free, *fixed, *moving), (*constants, *shared.narrowed(wide), *rows), strict=True))
        env |= {v: units.part(leaf, axis_of(v), index) for v, leaf in zip(still, interleaved, strict=True)}
        return of_micro_batch(loop, levels, units, env, units.of_part(index))

    def differ(given: Any, wide: Any, index: Any, rows: list[Any]) -> Any:
        constants, interleaved = given
        return (_each(False, constants), _each(True, interleaved)), _each(False, wide), False, _each(True, rows)

    equations = [equation.single for equation in loop.equations]
    part = convolutions.fast_in_loops(store.device.in_step(part, equations, differ), equations)
    given, xs = (constants, interleaved), [store.cut(value) for value in moving]
    if levels.moving:
        iteration = loops.recomputed(part, list(store.values.values()))
        results = loops.mapped(lambda x: iteration(given, wide, *x), (jnp.arange(units.parts), xs))
        found = zip(loop.sums.values(), results[len(loop.rows) :], strict=True)
        return results[: len(loop.rows)], [partial.OVER[joins](leaf, axis=0) for joins, leaf in found]
    sums = [store.asked.get(value, Result(joins)) for value, joins in loop.sums.items()]
    sampled = store.sampled if any(one.square is not None for one in sums) else NOTHING
    results = [*[Result()] * len(loop.rows), *sums]
    replaced = _replaced(loop, moving, xs)
    results[: len(loop.rows)] = [Result(over=at) for at in replaced]
    found, samples = folded(lambda index, rows: part(given, wide, index, rows), xs, units.parts, results, sampled)
    store.samples = samples if sampled is not NOTHING else store.samples
    return found[: len(loop.rows)], found[len(loop.rows) :]


def _replaced(loop: Loop, moving: Sequence[Value], xs: Sequence[Any]) -> list[int | None]:
    """For each of the rows that a loop keeps, the array in whose place: of rows that it takes, and nothing after it."""
    free = {at: _kind(value) for at, value in enumerate(moving) if value in loop.ends}
    found: list[int | None] = []
    for value in loop.rows:
        at = next((at for at, kind in free.items() if kind == _kind(value)), None)
        found.append(at)
        free.pop(at, None)  # type: ignore[arg-type]
    return found


def _kind(value: Value) -> Any:
    return value.aval.shape, value.aval.dtype, value.axis, compilers.varying_axes(value.aval)


def finished(equation: Equation, total: jax.Array, store: Store) -> jax.Array:
    """The result of an equation, from its joined parts: a scatter adds them to its operand."""
    if equation.name.startswith("scatter"):
        total = total + store.whole(equation.ins[0])
    return total.astype(equation.outs[0].aval.dtype)


def _each(flag: bool, tree: Any) -> Any:
    return jax.tree.map(lambda _: flag, tree)


def _same(leaf: Any) -> Any:
    return leaf


def of_micro_batch(loop: Loop, levels: Levels, units: Units, env: dict[Value, Any], numbers: jax.Array) -> list[Any]:
    """Evaluates a loop for one micro-batch: returns the rows that it keeps, and its parts of sums.

    `env` has the values that the loop takes; `numbers` counts the micro-batch's units.
    """
    evaluate_some(loop.equations, levels, units, env, numbers)
    return [_read(env, value) for value in (*loop.rows, *loop.sums)]


def evaluate_some(
    equations: Sequence[Equation], known: Levels | Body, units: Units, env: dict[Value, Any], numbers: jax.Array
) -> None:
    """Evaluates equations for the rows of these units: adds their results to `env`."""
    for equation in equations:
        with faults.explained(equation):
            values = [_read(env, value) for value in equation.ins]
            if equation in known.bodies:
                results = _inside(equation)(equation, known.bodies[equation], units, values, numbers)
            elif known.kinds[equation] is Kind.PARTIAL and equation.view.has_rows:
                results = [partial.part_of(equation, units, values, numbers)]
            elif known.kinds[equation] is Kind.PARTIAL:
                results = [followed(equation, values)]
            else:
                results = of_rows(equation, units, values, numbers)
            env.update(zip(equation.outs, results, strict=True))


def _read(env: dict[Value, Any], value: Value) -> Any:
    return value.array if isinstance(value, Number | Constant) and value not in env else env[value]


def _layers_of_rows(
    equation: Equation, bodies: Bodies, units: Units, values: Sequence[Any], numbers: jax.Array
) -> Sequence[Any]:
    """Evaluates a loop over layers for the rows of one micro-batch; its sums are the micro-batch's parts of them."""
    params = equation.single.params
    consts, carried = compilers.sizes_of_scan(equation.single)
    values = evaluation.varying_as(values, [atom.aval for atom in equation.single.invars])
    fixed, start, xs = values[:consts], list(values[consts : consts + carried]), list(values[consts + carried :])
    (body,) = bodies.each
    for place in (place for place in range(carried) if bodies.parts[place]):
        start[place] = start[place].astype(dtypes.wide(start[place].dtype))

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = _of_body(body, units, [*fixed, *carry, *x], numbers)
        return outs[:carried], outs[carried:]

    if any(map(compilers.varying_axes, values)):
        after, _ = jax.eval_shape(step, start, [x[0] for x in xs])
        start = [evaluation.varying_as([leaf], [kind])[0] for leaf, kind in zip(start, after, strict=True)]
    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, start, xs, **options)
    return [*carry, *ys]


def of_rows(equation: Equation, units: Units, values: list[Any], numbers: jax.Array) -> Sequence[Any]:
    """Evaluates an equation for the rows of one micro-batch."""
    positional = known(equation.name).positional
    if positional is not None and locality.is_positional(equation.view):
        (made,) = equation.outs
        places = units.places(numbers, made.aval.shape[axis_of(made)])
        return [positional.at(equation.single, values, axis_of(made), places)]
    some = resized.Some(equation.rows, len(numbers) * units.block, numbers < units.number if units.fills else None)
    return resized.evaluate(equation.single, equation.double, some, values)


def _inside(equation: Equation) -> Callable[..., Sequence[Any]]:
    """How an equation is evaluated whose programs inside make rows and parts of sums."""
    if equation.name == "cond":
        return _branches_of_rows
    return _layers_of_rows if equation.single.params["length"] == equation.double.params["length"] else _row_by_row


def _row_by_row(
    equation: Equation, bodies: Bodies, units: Units, values: Sequence[Any], numbers: jax.Array
) -> Sequence[Any]:
    """Evaluates a loop over the rows of one micro-batch that adds to what it carries; copies of rows add nothing."""
    params = equation.single.params
    consts, carried = compilers.sizes_of_scan(equation.single)
    values = evaluation.varying_as(values, [atom.aval for atom in equation.single.invars])
    fixed, start, rows = values[:consts], list(values[consts : consts + carried]), list(values[consts + carried :])
    some = resized.Some(equation.rows, equation.rows[0])
    counts = units.counts(numbers, len(rows[0]))

    def step(carry: list[Any], x: Any) -> tuple[list[Any], list[Any]]:
        count, row = x
        out = resized.run(params["jaxpr"], params["jaxpr"], some, [*fixed, *carry, *row])
        after = out[:carried]
        if units.fills:
            after = [jnp.where(count, new, old) for new, old in zip(after, carry, strict=True)]
        return after, out[carried:]

    if any(map(compilers.varying_axes, values)):
        after, _ = jax.eval_shape(step, start, jax.tree.map(lambda leaf: leaf[0], (counts, rows)))
        start = [evaluation.varying_as([leaf], [kind])[0] for leaf, kind in zip(start, after, strict=True)]
    carry, ys = jax.lax.scan(step, start, (counts, rows), reverse=params["reverse"], unroll=params["unroll"])
    return [*carry, *ys]


def _branches_of_rows(
    equation: Equation, bodies: Bodies, units: Units, values: Sequence[Any], numbers: jax.Array
) -> Sequence[Any]:
    """Evaluates branches for the rows of one micro-batch; their sums are the micro-batch's parts of them."""
    index, *operands = evaluation.varying_as(values, [atom.aval for atom in equation.single.invars])
    types = [value.aval for value in equation.outs]

    def branch(body: Body) -> Any:
        def run(*operands: Any) -> list[Any]:
            results = _of_body(body, units, operands, numbers)
            triples = zip(results, bodies.parts, types, strict=True)
            return [jnp.asarray(leaf, dtypes.wide(kind.dtype) if part else kind.dtype) for leaf, part, kind in triples]

        return run

    branches = list(map(branch, bodies.each))
    if any(map(compilers.varying_axes, values)):
        found = [jax.eval_shape(run, *operands) for run in branches]
        branches = [_as_all(run, found) for run in branches]
    return jax.lax.switch(jnp.asarray(index).astype(jnp.int32), branches, *operands)


def _as_all(run: Any, kinds: Sequence[Sequence[Any]]) -> Any:
    """A branch whose results vary along the axes along which those of any branch do."""

    def varied(*operands: Any) -> list[Any]:
        results = run(*operands)
        return [evaluation.varying_together([leaf], each)[0] for leaf, *each in zip(results, *kinds, strict=True)]

    return varied


def _of_body(body: Body, units: Units, values: Sequence[Any], numbers: jax.Array) -> list[Any]:
    env = dict(zip(body.program.inputs, values, strict=True))
    evaluate_some(body.program.equations, body, units, env, numbers)
    return [_read(env, value) for value in body.program.outputs]


# Loops over layers whose bodies take rows together


def over_layers(equation: Equation, levels: Levels, store: Store, values: Sequence[Any]) -> list[Any]:
    """Evaluates a loop over layers whose body takes rows together: the loop as it is, its body level by level."""
    params, inner = equation.single.params, inside_layers(equation, levels)
    consts, carried = compilers.sizes_of_scan(equation.single)
    values = evaluation.varying_as(values, [atom.aval for atom in equation.single.invars])
    more = evaluation.varying_more(values, [atom.aval for atom in equation.single.invars])
    body = compilers.opened(params["jaxpr"])[0]
    fixed, start, xs = values[:consts], values[consts : consts + carried], values[consts + carried :]

    wide = shared.widened(list(fixed), [_same] * consts)  # their gradients are sums over all iterations

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        out = evaluate(inner, store.units, store.device, [*shared.narrowed(wide), *carry, *x])
        out = evaluation.varying_as(out, [atom.aval for atom in body.outvars], more)
        return out[:carried], out[carried:]

    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, list(start), list(xs), **options)
    return [*carry, *ys]
