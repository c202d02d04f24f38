"""Equations evaluated for the rows of one micro-batch: `tanh(x)` gives its rows, `sum(x, 0)` its part of the sum."""

import functools
from collections.abc import Sequence
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
    equations: Sequence[Equation], levels: Levels | Body, units: Units, env: dict[Value, Any], indices: jax.Array
) -> None:
    """Evaluates equations for the rows of these units: adds their results to `env`."""
    for equation in equations:
        with explained(equation):
            values = [read(env, value) for value in equation.ins]
            if equation in levels.bodies:
                results = _evaluate_inside(equation, levels.bodies[equation], units, values, indices)
            elif levels.kinds[equation] is Kind.PARTIAL and equation.view.has_rows:
                results = [part_of(equation, units, values, indices)]
            elif levels.kinds[equation] is Kind.PARTIAL:
                if equation.name in ADDS and isinstance(levels, Levels):  # of a term without rows, decay say, a share
                    pairs = zip(values, equation.ins, strict=True)
                    values = [leaf if value in levels.folds else units.share(indices, leaf) for leaf, value in pairs]
                results = followed(equation, values)
            else:
                results = evaluate_rows(equation, units, values, indices)
            env.update(zip(equation.outs, results, strict=True))


def read(env: dict[Value, Any], value: Value) -> Any:
    return value.array if isinstance(value, Number | Constant) and value not in env else env[value]


def evaluate_rows(equation: Equation, units: Units, values: list[Any], indices: jax.Array) -> Sequence[Any]:
    """Evaluates an equation for the rows of one micro-batch."""
    positional = known(equation.name).positional
    if positional is not None and locality.is_positional(equation.view):
        (made,) = equation.outs
        places = units.places(indices, made.aval.shape[axis_of(made)])
        return [positional.at(equation.single, values, axis_of(made), places)]
    return resized.evaluate(equation.single, equation.double, _some(equation, units, indices), values)


def _some(equation: Equation, units: Units, indices: jax.Array) -> resized.Some:
    return resized.Some(equation.rows, len(indices) * units.block, indices < units.count if units.fills else None)


def _evaluate_inside(
    equation: Equation, bodies: Bodies, units: Units, values: Sequence[Any], indices: jax.Array
) -> Sequence[Any]:
    """Evaluates an equation whose programs inside make rows and parts of sums."""
    values = evaluation.varying_as(values, [atom.aval for atom in equation.single.invars])
    if equation.name == "cond":
        return _evaluate_branches(equation, bodies, units, values, indices)
    if equation.single.params["length"] == equation.double.params["length"]:
        return _evaluate_layers(equation, bodies, units, values, indices)
    return _evaluate_row_by_row(equation, units, values, indices)


def _evaluate_layers(
    equation: Equation, bodies: Bodies, units: Units, values: list[Any], indices: jax.Array
) -> Sequence[Any]:
    """Evaluates a loop over layers for the rows of one micro-batch; its sums are the micro-batch's parts of them."""
    consts, carried = compilers.sizes_of_scan(equation.single)
    (body,) = bodies.each
    for place in (consts + place for place in range(carried) if bodies.are_sums[place]):
        values[place] = values[place].astype(dtypes.wide(values[place].dtype))
    run = lambda given: _evaluate_body(body, units, given, indices)
    return evaluation.scanned(equation.single, values, run, settles=True)


def _evaluate_row_by_row(equation: Equation, units: Units, values: list[Any], indices: jax.Array) -> Sequence[Any]:
    """Evaluates a loop over the rows of one micro-batch that adds to what it carries; copies of rows add nothing."""
    program = equation.single.params["jaxpr"]
    consts, carried = compilers.sizes_of_scan(equation.single)
    some, length = _some(equation, units, indices), len(values[consts + carried])

    def body(given: list[Any]) -> list[Any]:
        *given, is_real = given
        outs = resized.run(program, program, some.all_rows, given)
        if units.fills:
            carry = given[consts : consts + carried]
            outs[:carried] = [jnp.where(is_real, new, old) for new, old in zip(outs, carry, strict=False)]
        return outs

    values = [*values, some.are_real(length)]
    return evaluation.scanned(equation.single, values, body, length, settles=True)


def _evaluate_branches(
    equation: Equation, bodies: Bodies, units: Units, values: Sequence[Any], indices: jax.Array
) -> Sequence[Any]:
    """Evaluates branches for the rows of one micro-batch; their sums are the micro-batch's parts of them."""

    def run(number: int, operands: Sequence[Any]) -> list[Any]:
        found = _evaluate_body(bodies.each[number], units, operands, indices)
        results = zip(found, bodies.are_sums, equation.outs, strict=True)
        dtype = lambda part, value: dtypes.wide(value.aval.dtype) if part else value.aval.dtype
        return [jnp.asarray(leaf, dtype(part, value)) for leaf, part, value in results]

    types = [jax.eval_shape(functools.partial(run, number), values[1:]) for number in range(len(bodies.each))]

    def branch(number: int, operands: Sequence[Any]) -> list[Any]:
        """A branch whose results vary along the axes along which those of any branch do."""
        results = zip(run(number, operands), *types, strict=True)
        return [evaluation.varying_together([leaf], of_branches)[0] for leaf, *of_branches in results]

    return evaluation.run_inside(equation.single, values, branch)


def _evaluate_body(body: Body, units: Units, values: Sequence[Any], indices: jax.Array) -> list[Any]:
    env = dict(zip(body.program.inputs, values, strict=True))
    evaluate_some(body.program.equations, body, units, env, indices)
    return [read(env, value) for value in body.program.outputs]


def followed(equation: Equation, values: Sequence[Any]) -> Sequence[Any]:
    """An equation that is linear in parts of sums, in their dtype if that is wider than its own."""
    values, dtype = list(map(jnp.asarray, values)), equation.outs[0].aval.dtype
    inexact = [jnp.issubdtype(value.dtype, jnp.inexact) for value in values]
    wide = functools.reduce(jnp.promote_types, [v.dtype for v, is_ in zip(values, inexact, strict=True) if is_])
    if equation.name == "convert_element_type":
        is_as_wide = dtypes.holds(wide, dtype) and _is_complex(wide) == _is_complex(dtype)
        return [values[0] if is_as_wide else values[0].astype(dtype)]
    values = [value.astype(wide) if is_ else value for value, is_ in zip(values, inexact, strict=True)]
    return evaluation.bind(equation.single, values)


def _is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


# Sums over rows


def reduction_of(equation: Equation) -> Reduction:
    return known(equation.name).partial


def part_of(equation: Equation, units: Units, values: list[Any], indices: jax.Array) -> jax.Array:
    """One micro-batch's part of a reduction of rows, in at least float32 if it is a sum."""
    reduction, some = reduction_of(equation), _some(equation, units, indices)
    pairs = zip(values, equation.ins, strict=True)
    values = [some.without_filling(leaf, value.axis, reduction.fold) for leaf, value in pairs]
    return reduction.part(equation.single, values, dtypes.of_sum, reduction.fold.along)
