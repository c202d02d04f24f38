"""Whether what is said of a program is true, for values: each equation, evaluated as a micro-batch evaluates it.

For tests, and for who doubts a result: `unsound(loss)` runs all rows at once, and each equation of a loop once more.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._core import evaluation
from optax_accum._rows.levels import Kind, Levels
from optax_accum._rows.program import Constant, Equation, Number, Value
from optax_accum._rows.traces import COUPLED
from optax_accum._rows.units import Units
from optax_accum._space.device import Device
from optax_accum._within import by_level, partial
from optax_accum._within.traced_call import TracedCall


def unsound(traced: TracedCall, tolerance: float = 1e-6) -> list[str]:
    """What is not true of a traced loss on one device; empty if all is."""
    values = dict(zip(traced.levels.program.inputs, map(jnp.asarray, traced.values), strict=True))
    return [*_untold(traced.levels), *_untrue(traced.levels, traced.units, values, tolerance)]


def _untold(levels: Levels) -> Iterator[str]:
    """What a kind must not have: only a proof lets an equation run for some rows."""
    for equation, kind in levels.kinds.items():
        view = equation.view
        if kind is Kind.FREE and (view.has_rows or view.makes_rows):
            yield f"{equation} is free, and takes or makes rows"
        if kind is Kind.MADE and (view.has_rows or not view.makes_rows):
            yield f"{equation} makes no rows, or takes some"
        if kind is Kind.LOCAL and COUPLED in (*view.ins, *(v.axis for v in equation.outs)):
            yield f"{equation} is local, and its rows are coupled"
    for loop in levels.loops:
        for equation in loop.equations:
            if levels.kinds[equation] is not Kind.LOCAL:
                yield f"{equation} runs in a loop, and is {levels.kinds[equation].name}"


def _untrue(levels: Levels, units: Units, env: dict[Value, Any], tolerance: float) -> Iterator[str]:
    def read(value: Value) -> Any:
        return jnp.asarray(value.array) if isinstance(value, Constant | Number) else env[value]

    for equation, kind in levels.kinds.items():
        values = list(map(read, equation.ins))
        whole = evaluation.bind(equation.single, values)
        env.update(zip(equation.outs, whole, strict=True))
        if kind in (Kind.LOCAL, Kind.PARTIAL) and not equation.single.effects:
            found = _difference(equation, kind, units, values, whole)
            if not found <= tolerance:
                yield f"{equation} is {kind.name}, and its parts are not the whole: {found:.1e}"


def _difference(equation: Equation, kind: Kind, units: Units, values: Sequence[Any], whole: Sequence[Any]) -> float:
    """The largest difference of results and of gradients, all rows at once against micro-batch by micro-batch."""
    pairs_of = zip(equation.ins, values, strict=True)
    moves = [jnp.issubdtype(x.dtype, jnp.inexact) and not isinstance(v, Constant | Number) for v, x in pairs_of]
    given = [leaf for leaf, moving in zip(values, moves, strict=True) if moving]

    def put(given: Sequence[Any]) -> list[Any]:
        rest = iter(given)
        return [next(rest) if moving else leaf for leaf, moving in zip(values, moves, strict=True)]

    def at_once(given: Sequence[Any]) -> list[Any]:
        return list(evaluation.bind(equation.single, put(given)))

    def in_parts(given: Sequence[Any]) -> list[Any]:
        store = by_level.Store(units, Device(), dict(zip(equation.ins, put(given), strict=True)))
        parts = [_part(equation, kind, units, store, index) for index in range(units.parts)]
        if kind is Kind.PARTIAL:
            total = partial.reduction_of(equation).over(jnp.stack([part[0] for part in parts]), axis=0)
            return [by_level.finished(equation, total, store)]
        joined = [jnp.stack(leaves) for leaves in zip(*parts, strict=True)]
        return [
            leaf[0] if value.axis is None else units.joined(leaf, value.axis)
            for leaf, value in zip(joined, equation.outs, strict=True)
        ]

    cotangents = [_some_cotangent(leaf) for leaf in whole]
    pairs = []
    for fun in (at_once, in_parts):
        results, back = jax.vjp(fun, given)
        grads = back(cotangents)[0] if equation.name not in ("while",) else []
        pairs.append(jax.tree.leaves((results, grads)))
    return max(map(_farthest, *pairs), default=0.0)


def _part(equation: Equation, kind: Kind, units: Units, store: by_level.Store, index: int) -> Sequence[Any]:
    numbers = units.of_part(index)
    values = [store.whole(value) if value.axis is None else store.cut(value)[index] for value in equation.ins]
    if kind is Kind.PARTIAL:
        return [partial.part_of(equation, units, values, numbers)]
    return by_level.of_rows(equation, units, values, numbers)


def _some_cotangent(leaf: Any) -> Any:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return np.zeros(leaf.shape, jax.dtypes.float0)
    return jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape).astype(leaf.dtype)


def _farthest(got: Any, want: Any) -> float:
    if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    if got.dtype == jax.dtypes.float0 or not got.size:
        return 0.0
    a, b = np.asarray(got, np.complex128), np.asarray(want, np.complex128)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    far = float(np.max(np.where(same, 0, np.abs(a - b)) / max(np.nanmax(np.abs(b), initial=0), 1.0)))
    return (
        far * 2.0**-23 / max(float(jnp.finfo(got.dtype).eps), 2.0**-23)
        if jnp.issubdtype(got.dtype, jnp.inexact)
        else far
    )
