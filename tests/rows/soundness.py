"""Whether what is said of a program is true, for values: each equation, evaluated as a micro-batch evaluates it.

For tests, and for who doubts a result: the equations of a loss, or of the program of its gradient, run for all rows, and
each that runs in a loop once more, micro-batch by micro-batch; those of a loss with their derivatives. All of it is one
program.
"""

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._arguments.roles import Roles
from optax_accum._core import evaluation
from optax_accum._core.folds import SUM
from optax_accum._rows.levels import Kind, Levels
from optax_accum._rows.linear import nonlinear_rules
from optax_accum._rows.program import Equation, Value
from optax_accum._rows.traces import COUPLED
from optax_accum._rows.units import Units
from optax_accum._space.device import Device
from optax_accum._within import by_level, partial, some_rows, whole_batch
from optax_accum._within.rules import as_rules
from optax_accum._within.splitting import Sizes
from optax_accum._within.traced_call import TracedCall, trace_call

WIDE = 2.0**-23  # numbers of more digits are compared as if they had so many


def traced(loss: Any, params: Any, batch: Any, parts: int = 5) -> TracedCall:
    """A loss of parameters and a batch, as micro-batches run it."""
    call = Roles(loss, argnums=0, batch_argnums=1).bind((params, batch), {})
    return trace_call(lambda call: call.apply(loss), call, Sizes(parts, None), call.params)


def traced_gradient(loss: Any, params: Any, batch: Any, parts: int = 5) -> TracedCall:
    """The program of a loss and its gradient, as `value_and_grad` runs it."""
    rules = as_rules(loss, parts)
    return whole_batch.traced_gradient(rules, rules.roles.bind((params, batch), {}), Device())


def unsound(*calls: TracedCall, tolerance: float = 1e-6) -> list[str]:
    """What is not true of traced losses on one device; empty if all is. The losses are one program."""
    checked = _differing(calls)
    differences = jax.jit(lambda values: list(map(_differences, calls, checked, values)))
    found = differences([list(map(jnp.asarray, call.values)) for call in calls])
    said = [sentence for call in calls for sentence in untold(call.levels)]
    for call, equations, of_call in zip(calls, checked, found, strict=True):
        for equation, far in zip(equations, of_call, strict=True):
            if not far <= tolerance:
                kind = call.levels.kinds[equation].name
                said.append(f"{equation} is {kind}, and its parts are not the whole: {float(far):.1e}")
    return said


def untold(levels: Levels) -> Iterator[str]:
    """What a kind must not have: only a proof lets an equation run for some rows."""
    for equation, kind in levels.kinds.items():
        view = equation.view
        if kind is Kind.FREE and (view.has_rows or view.makes_rows):
            yield f"{equation} is FREE, and takes or makes rows"
        if kind is Kind.MADE and (view.has_rows or not view.makes_rows):
            yield f"{equation} is MADE, and makes no rows, or takes some"
        if kind in (Kind.LOCAL, Kind.PARTIAL) and COUPLED in (*view.ins, *view.outs):
            yield f"{equation} is {kind.name}, and its rows are coupled"
        if kind in (Kind.LOCAL, Kind.PARTIAL) and equation.differs:
            yield f"{equation} is {kind.name}, and another equation for more rows"
    for loop in levels.loops:
        for equation in loop.equations:
            if levels.kinds[equation] not in (Kind.LOCAL, Kind.PARTIAL):
                yield f"{equation} runs in a loop, and is {levels.kinds[equation].name}"
        if any(value.axis == COUPLED for value in loop.takes):
            yield "a loop takes rows that are coupled"
    made = collections.Counter(equation for loop in levels.loops for equation in loop.equations)
    for equation, times in made.items():
        if times > 1 and not levels.moving.isdisjoint(equation.ins) and any(nonlinear_rules(equation.single)):
            yield f"{equation} runs in {times} loops, and its derivative by the user is not linear"


def _differing(calls: Sequence[TracedCall]) -> list[list[Equation]]:
    """The equations that loops may run and that no earlier one is like, of each call."""
    found: list[list[Equation]] = []
    seen: set[Any] = set()
    for call in calls:
        found.append([])
        for equation, kind in call.levels.kinds.items():
            if kind in (Kind.LOCAL, Kind.PARTIAL) and not equation.single.effects:
                sort = _sort(call, equation)
                found[-1] += [equation] * (sort not in seen)
                seen.add(sort)
    return found


def _sort(call: TracedCall, equation: Equation) -> Any:
    """What an equation is, but for the values that it takes."""
    values = [*equation.ins, *equation.outs]
    moves = tuple(value in call.levels.moving for value in equation.ins)
    kind, units = call.levels.kinds[equation], call.units.number
    return kind, units, moves, str(equation.single.params), equation.name, *((str(v.aval), v.axis) for v in values)


def _differences(call: TracedCall, checked: Sequence[Equation], arrays: Sequence[Any]) -> list[Any]:
    """How far the parts of each equation are from the whole."""
    env: dict[Value, Any] = dict(zip(call.levels.program.inputs, arrays, strict=True))
    found = []
    for equation in call.levels.kinds:
        values = [jnp.asarray(some_rows.read(env, value)) for value in equation.ins]
        whole = evaluation.bind(equation.single, values)
        env.update(zip(equation.outs, whole, strict=True))
        if equation in checked:
            found.append(_difference(call, equation, values, whole))
    return found


def _difference(call: TracedCall, equation: Equation, values: Sequence[Any], whole: Sequence[Any]) -> Any:
    """The largest difference of results and of gradients, all rows at once against micro-batch by micro-batch."""
    kind, units = call.levels.kinds[equation], call.units
    moves = [value in call.levels.moving for value in equation.ins]
    follows = kind is Kind.PARTIAL and not equation.view.has_rows  # a sum, of which each micro-batch has a part
    sums = call.levels.parts if follows else set[Value]()
    is_still = equation.name == "while" or (
        kind is Kind.PARTIAL and not follows and partial.reduction_of(equation).fold is not SUM
    )
    pairs = zip(values, moves, strict=True)
    moves = [moving and not is_still and _is_inexact(value) for value, moving in pairs]

    def put(given: Sequence[Any]) -> list[Any]:
        rest = iter(given)
        return [next(rest) if moving else leaf for leaf, moving in zip(values, moves, strict=True)]

    def at_once(given: Sequence[Any]) -> list[Any]:
        return list(evaluation.bind(equation.single, put(given)))

    def in_parts(given: Sequence[Any]) -> list[Any]:
        store = by_level.Store(units, Device(), dict(zip(equation.ins, put(given), strict=True)))
        cut = [None if value.axis is None else store.cut(value) for value in equation.ins]
        whole = [store.whole(value) if value.axis is None else None for value in equation.ins]

        def part(of: Any) -> Sequence[Any]:
            index, rows = of
            taken = [value if mine is None else mine for value, mine in zip(whole, rows, strict=True)]
            share = 2 * (index + 1) / (units.parts * (units.parts + 1))
            parts = zip(equation.ins, taken, strict=True)
            taken = [leaf * share.astype(leaf.dtype) if value in sums else leaf for value, leaf in parts]
            known = dict(zip(equation.ins, taken, strict=True))
            some_rows.evaluate_some([equation], call.levels, units, known, units.of_part(index))
            return [known[value] for value in equation.outs]

        parts = jax.lax.map(part, (jnp.arange(units.parts), cut))
        if kind is Kind.PARTIAL and not follows:
            return [by_level.finished(equation, partial.reduction_of(equation).fold.along(parts[0], axis=0), store)]
        inside = call.levels.bodies.get(equation)
        are_parts = inside.parts if inside else [follows] * len(equation.outs)
        triples = zip(parts, equation.outs, are_parts, strict=True)
        return [_joined(leaf, value, units, is_part) for leaf, value, is_part in triples]

    given = [leaf for leaf, moving in zip(values, moves, strict=True) if moving]
    if not given:
        return _farthest(in_parts(given), whole, values)
    cotangents = list(map(_some_cotangent, whole))
    results, back = jax.vjp(at_once, given)
    found, back_of_parts = jax.vjp(in_parts, given)
    return _farthest([*found, *back_of_parts(cotangents)[0]], [*results, *back(cotangents)[0]], values)


def _joined(leaf: Any, value: Value, units: Units, is_part: bool) -> Any:
    if is_part:
        return jnp.sum(leaf, 0).astype(value.aval.dtype)
    return leaf[0] if value.axis is None else units.joined(leaf, value.axis)


def _some_cotangent(leaf: Any) -> Any:
    if not _is_inexact(leaf):
        return np.zeros(leaf.shape, jax.dtypes.float0)
    return jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape).astype(leaf.dtype)


def _farthest(got: Sequence[Any], want: Sequence[Any], taken: Sequence[Any]) -> Any:
    """The largest difference, relative to the largest number of its leaf, of what both have as numbers.

    It counts in units of the narrowest dtype, `taken` or made: in one of two programs XLA may keep digits that a cast
    cuts off.
    """
    digits = max([WIDE, *(float(jnp.finfo(leaf.dtype).eps) for leaf in (*want, *taken) if _is_inexact(leaf))])
    pairs = zip(got, want, strict=True)
    found = [_far(a, b) for a, b in pairs if a.size and a.dtype != jax.dtypes.float0]
    return jnp.max(jnp.stack(found)) * (WIDE / digits) if found else jnp.zeros([])


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _far(got: Any, want: Any) -> Any:
    if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    wide = complex if jnp.issubdtype(got.dtype, jnp.complexfloating) else float
    same = (got == want) | ((got != got) & (want != want))
    got, want = got.astype(wide), want.astype(wide)
    size = jnp.max(jnp.where(jnp.isfinite(want), jnp.abs(want), 0))
    return jnp.max(jnp.where(same, 0, jnp.abs(got - want))) / jnp.maximum(size, 1)
