"""Sinks followed through the equations of a traced loss, beside their parameters.

Where an equation is unknown, the parameter is used there: that is always right.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from optax_accum._core import compilers
from optax_accum._core.equations import is_cast_down, may_be_clamped, operands
from optax_accum._core.leaves import parted
from optax_accum._loss.sinks import Lent, used


def run(traced: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates a traced program, with its constants or without, of which some values are `Lent`."""
    program, consts = compilers.opened(traced)
    uses = collections.Counter(var for equation in program.eqns for var in operands(equation))
    uses.update(atom for atom in program.outvars if not isinstance(atom, core.Literal))
    env: dict[Any, Any] = {}

    def write(var: Any, value: Any) -> None:
        once_more = isinstance(value, Lent) and value.at_once and uses[var] > 1
        env[var] = used(value) if once_more else value

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for var, value in zip((*program.constvars, *program.invars), (*consts, *values), strict=True):
        write(var, value)
    for equation in program.eqns:
        taken = [read(atom) for atom in equation.invars]
        follow = FOLLOW.get(equation.primitive.name) if any(isinstance(value, Lent) for value in taken) else None
        results = (follow or _end)(equation, taken)
        for var, value in zip(equation.outvars, results, strict=True):
            write(var, value)
    return [used(read(atom)) for atom in program.outvars]


def _end(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    return compilers.bind(equation, [used(value) for value in values])


def _scan(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    num_consts, num_carry = compilers.sizes_of_scan(equation)
    params, first = equation.params, num_consts + num_carry
    values = _used_if_twice(values) if params["length"] else list(map(used, values))
    consts, narrow = zip(*map(_shared, values[:num_consts]), strict=True) if num_consts else ((), ())
    carry = [used(value) for value in values[num_consts:first]]
    turned = [value.turned(params["length"]) if isinstance(value, Lent) else value for value in values[first:]]
    # Before JAX 0.11, of what has a gradient that which has a reference must come first: as this dict is sorted.
    scanned = {(not isinstance(value, Lent), index): value for index, value in enumerate(turned)}
    slices, filled = parted(scanned, lambda leaf: jnp.ndim(leaf) > 0)  # one number is for all iterations

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        turn = filled(slices)
        shared = [value if dtype is None else value.astype(dtype) for value, dtype in zip(consts, narrow, strict=True)]
        results = run(params["jaxpr"], [*shared, *carry, *(turn[key] for key in scanned)])
        return results[:num_carry], results[num_carry:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(step, carry, slices, **options)
    return [*carry, *stacked]


def _used_if_twice(values: Sequence[Any]) -> list[Any]:
    """Returns operands of which none has the sink of another: a scan does not add to one in two ways."""
    sinks = collections.Counter(id(value.sink.grad) for value in values if isinstance(value, Lent))
    before: dict[int, Any] = {}

    def once(value: Any) -> Any:
        if not isinstance(value, Lent) or sinks[id(value.sink.grad)] == 1:
            return value
        return before.setdefault(id(value), used(value))

    return list(map(once, values))


def _shared(value: Any) -> tuple[Any, Any]:
    """Returns the constants of a scan, each with the dtype that its body casts it to, if any.

    If the whole gradient is needed at once, JAX adds the iterations' gradients: cast up first, to the sink's dtype.
    """
    if not (isinstance(value, Lent) and value.at_once):
        return value, None
    dtype = value.sink.grad.dtype
    if dtype == value.param.dtype:
        return used(value), None
    return used(dataclasses.replace(value, param=value.param.astype(dtype))), value.param.dtype


def _jit(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    if not compilers.is_plain_jit(equation):
        return _end(equation, values)
    return run(equation.params["jaxpr"], values)


def _checkpoint(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    if not compilers.ADDS_IN_CHECKPOINTS:
        return _end(equation, values)
    params = equation.params

    def again(values: Any) -> Any:
        return run(params["jaxpr"], values)

    within = [dataclasses.replace(value, is_reference=False) if isinstance(value, Lent) else value for value in values]
    return jax.checkpoint(again, prevent_cse=params["prevent_cse"], policy=params["policy"])(within)


def _cond(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """A branch is followed where JAX adds to a reference in it: any other gradient it returns, as wide as the sink."""
    if equation.params.get("branches_platforms"):  # it is the compiler that chooses
        return _end(equation, values)

    def goes_in(value: Any) -> Any:
        return isinstance(value, Lent) and value.is_reference and value.total is None

    index, *operands = [value if goes_in(value) else used(value) for value in _used_if_twice(values)]

    def branch(program: Any) -> Any:
        return lambda *operands: run(program, operands)

    return jax.lax.switch(index, list(map(branch, equation.params["branches"])), *operands)


def _cast(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """A cast down is followed: the parameter's gradient is the cast value's, cast up."""
    if not is_cast_down(equation):
        return _end(equation, values)
    (value,) = values
    return [dataclasses.replace(value, param=compilers.bind(equation, [value.param])[0])]


def _slice(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """A slice is followed where JAX adds to a slice of a reference, which it does not clamp as it does the slice."""
    value, *starts = values
    if not isinstance(value, Lent) or not value.has_slices:
        return _end(equation, values)
    where = _clamped(equation, starts) if may_be_clamped(equation) else starts

    def part(leaf: Any) -> Any:
        return compilers.bind(equation, [leaf, *where])[0]

    return [Lent(part(value.param), value.sink._replace(grad=part(value.sink.grad)), is_reference=False)]


def _clamped(equation: Any, starts: Sequence[Any]) -> Sequence[Any]:
    """Returns where a dynamic slice starts that would reach beyond its array."""
    sizes = zip(equation.invars[0].aval.shape, equation.params["slice_sizes"], strict=True)
    wide = [start.astype(jnp.int32) if start.dtype.itemsize < 4 else start for start in map(jnp.asarray, starts)]
    return [jnp.clip(start, 0, size - length) for start, (size, length) in zip(wide, sizes, strict=True)]


FOLLOW: dict[str, Callable[[Any, Sequence[Any]], Sequence[Any]]] = {
    "scan": _scan,
    "jit": _jit,
    "pjit": _jit,
    "checkpoint": _checkpoint,
    "remat2": _checkpoint,
    "convert_element_type": _cast,
    "slice": _slice,
    "dynamic_slice": _slice,
    "squeeze": _slice,
}
if compilers.ADDS_IN_BRANCHES:
    FOLLOW["cond"] = _cond
