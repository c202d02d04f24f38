"""Equations of a program of rows, evaluated for the rows of one micro-batch; what adds over rows gives its part."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import compilers, dtypes, evaluation
from optax_accum._rows import locality, resized
from optax_accum._rows.division import ADDS
from optax_accum._rows.levels import Bodies, Body, Kind, Levels
from optax_accum._rows.places import explained
from optax_accum._rows.program import Constant, Equation, Number, Value
from optax_accum._rows.registry import Reduction, known
from optax_accum._rows.units import Units
from optax_accum._within.store import axis_of


def evaluate_some(
    equations: Sequence[Equation], known: Levels | Body, units: Units, env: dict[Value, Any], numbers: jax.Array
) -> None:
    """Evaluates equations for the rows of these units: adds their results to `env`."""
    for equation in equations:
        with explained(equation):
            values = [read(env, value) for value in equation.ins]
            if equation in known.bodies:
                results = _inside(equation)(equation, known.bodies[equation], units, values, numbers)
            elif known.kinds[equation] is Kind.PARTIAL and equation.view.has_rows:
                results = [part_of(equation, units, values, numbers)]
            elif known.kinds[equation] is Kind.PARTIAL:
                if equation.name in ADDS and isinstance(known, Levels):
                    pairs = zip(values, equation.ins, strict=True)
                    values = [leaf if value in known.folds else units.share(numbers, leaf) for leaf, value in pairs]
                results = followed(equation, values)
            else:
                results = of_rows(equation, units, values, numbers)
            env.update(zip(equation.outs, results, strict=True))


def read(env: dict[Value, Any], value: Value) -> Any:
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
    for place in (place for place in range(carried) if bodies.are_sums[place]):
        start[place] = start[place].astype(dtypes.wide(start[place].dtype))

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = _of_body(body, units, [*fixed, *carry, *x], numbers)
        return outs[:carried], outs[carried:]

    start = evaluation.settled(step, start, xs, fixed)
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


def reduction_of(equation: Equation) -> Reduction:
    return known(equation.name).partial


def part_of(equation: Equation, units: Units, values: list[Any], numbers: jax.Array) -> jax.Array:
    """One micro-batch's part of a reduction of rows, in at least float32 if it is a sum."""
    reduction = reduction_of(equation)

    def filled(value: Any, axis: int | None) -> Any:
        if axis is None or not units.fills:
            return value
        counts = units.counts(numbers, value.shape[axis])
        counts = jnp.expand_dims(counts, [dim for dim in range(value.ndim) if dim != axis])
        return jnp.where(counts, value, jnp.asarray(reduction.fold.nothing(value.dtype), value.dtype))

    pairs = zip(values, (value.axis for value in equation.ins), strict=True)
    return reduction.part(equation.single, [filled(*pair) for pair in pairs], dtypes.of_sum, reduction.fold.along)


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

    start = evaluation.settled(step, start, (counts, rows), fixed)
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
            triples = zip(results, bodies.are_sums, types, strict=True)
            return [jnp.asarray(leaf, dtypes.wide(kind.dtype) if part else kind.dtype) for leaf, part, kind in triples]

        return run

    branches = list(map(branch, bodies.each))
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
    return [read(env, value) for value in body.program.outputs]


def followed(equation: Equation, values: Sequence[Any]) -> Sequence[Any]:
    """An equation that is linear in parts of sums, in their dtype if that is wider than its own."""
    values, kind = list(map(jnp.asarray, values)), equation.outs[0].aval.dtype
    inexact = [jnp.issubdtype(value.dtype, jnp.inexact) for value in values]
    wide = functools.reduce(jnp.promote_types, [v.dtype for v, is_ in zip(values, inexact, strict=True) if is_])
    if equation.name == "convert_element_type":
        is_as_wide = dtypes.holds(wide, kind) and _is_complex(wide) == _is_complex(kind)
        return [values[0] if is_as_wide else values[0].astype(kind)]
    values = [value.astype(wide) if is_ else value for value, is_ in zip(values, inexact, strict=True)]
    return evaluation.bind(equation.single, values)


def _is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)
