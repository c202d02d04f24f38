"""The equations of a traced loss: where sinks follow their parameters, and where they cannot.

Where an equation is unknown, the parameter is used there: that is always right.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from optax_accum._core import compilers, evaluation
from optax_accum._core.equations import (
    all_equations,
    inner_programs,
    is_barrier,
    is_cast_down,
    is_checkpoint,
    may_be_clamped,
    operands,
)
from optax_accum._core.leaves import parted
from optax_accum._loss.sinks import Lent, used


def run(traced: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates a traced program, with its constants or without, in which some values are `Lent`."""
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
    return evaluation.bind(equation, [used(value) for value in values])


def _scan(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    num_consts, num_carry = compilers.sizes_of_scan(equation)
    params, first = equation.params, num_consts + num_carry
    values = _used_if_twice(values) if params["length"] else list(map(used, values))
    consts, narrow = zip(*map(_shared, values[:num_consts]), strict=True) if num_consts else ((), ())
    carry = [used(value) for value in values[num_consts:first]]
    turned = [value.turned(params["length"]) if isinstance(value, Lent) else value for value in values[first:]]
    # Before JAX 0.11, operands with references must come before others with a gradient: the keys of this dict sort so.
    scanned = {(not isinstance(value, Lent), index): value for index, value in enumerate(turned)}
    slices, filled = parted(scanned, lambda leaf: jnp.ndim(leaf) > 0)  # all iterations share a scalar

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        taken = filled(slices)
        shared = [value if dtype is None else value.astype(dtype) for value, dtype in zip(consts, narrow, strict=True)]
        results = run(params["jaxpr"], [*shared, *carry, *(taken[key] for key in scanned)])
        return results[:num_carry], results[num_carry:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(step, carry, slices, **options)
    return [*carry, *stacked]


def _used_if_twice(values: Sequence[Any]) -> list[Any]:
    """Uses parameters that are operands twice, so that no two share a sink: a scan does not add to one in two ways."""
    sinks = collections.Counter(id(value.sink.grad) for value in values if isinstance(value, Lent))
    before: dict[int, Any] = {}

    def once(value: Any) -> Any:
        if not isinstance(value, Lent) or sinks[id(value.sink.grad)] == 1:
            return value
        return before.setdefault(id(value), used(value))

    return list(map(once, values))


def _shared(value: Any) -> tuple[Any, Any]:
    """A constant of a scan, with the dtype that the body casts it to, if any.

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
    """Follows references, to which JAX adds in a branch; a branch would return other gradients, as wide as the sink."""
    if equation.params.get("branches_platforms"):  # the compiler chooses the branch
        return _end(equation, values)

    def goes_in(value: Any) -> Any:
        return isinstance(value, Lent) and value.is_reference and value.total is None

    index, *operands = [value if goes_in(value) else used(value) for value in _used_if_twice(values)]

    def branch(program: Any) -> Any:
        return lambda *operands: run(program, operands)

    return jax.lax.switch(index, list(map(branch, equation.params["branches"])), *operands)


def _cast(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Follows a cast down: the parameter's gradient is the cast value's, cast up."""
    if not is_cast_down(equation):
        return _end(equation, values)
    (value,) = values
    return [dataclasses.replace(value, param=evaluation.bind(equation, [value.param])[0])]


def _slice(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Follows a slice if JAX adds to slices of references. JAX clamps none of those, so the starts are clamped here."""
    value, *starts = values
    if not isinstance(value, Lent) or not value.has_slices:
        return _end(equation, values)
    where = _clamped(equation, starts) if may_be_clamped(equation) else starts

    def part(leaf: Any) -> Any:
        return evaluation.bind(equation, [leaf, *where])[0]

    return [Lent(part(value.param), value.sink._replace(grad=part(value.sink.grad)), is_reference=False)]


def _clamped(equation: Any, starts: Sequence[Any]) -> Sequence[Any]:
    """The starts of a dynamic slice, moved so that the slice stays inside its array."""
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


def casts(program: Any) -> list[bool]:
    """Which inputs of a traced program are cast down before they reach a loop."""
    cast: set[Any] = set()
    for equation in program.eqns:
        name = equation.primitive.name
        if is_cast_down(equation):
            cast.update(operands(equation))
        elif name != "scan" and name in FOLLOW:
            cast.update(var for var, inside in _inside(equation, casts) if any(inside))
    return [var in cast for var in program.invars]


def breaks(program: Any) -> list[bool]:
    """For which inputs of a traced program JAX fails to differentiate with references, or does so wrongly.

    A scan that takes one array in two ways, say scanned over and closed over; a scan of length 0; a barrier; a slice
    that may be clamped. A parameter with a sink is used before the first three, and clamped before the last.
    """
    broken: set[Any] = set()
    for equation in reversed(program.eqns):
        name, programs = equation.primitive.name, list(inner_programs(equation))
        if programs:
            broken.update(var for var, count in collections.Counter(operands(equation)).items() if count > 1)
        if _breaks_here(equation) or (name not in FOLLOW and any(map(_breaks_any, programs))):
            broken.update(operands(equation))
        elif name in FOLLOW and programs:
            broken.update(var for var, inside in _inside(equation, breaks) if any(inside))
        elif name in FOLLOW and equation.outvars[0] in broken:  # a cast or a slice
            broken.update(operands(equation)[:1])
    return [var in broken for var in program.invars]


def _breaks_here(equation: Any) -> bool:
    """Whether an equation breaks for any operands; a scan of length 0 slices an array without rows."""
    empty = equation.primitive.name == "scan" and not equation.params["length"]
    return is_barrier(equation) or may_be_clamped(equation) or empty


def _breaks_any(program: Any) -> bool:
    """Whether a program holds an equation that breaks, or hands one array twice to an inner program."""

    def twice(variables: Any) -> Any:
        return len(set(variables)) < len(variables)

    return any(
        _breaks_here(equation) or (any(inner_programs(equation)) and twice(operands(equation)))
        for equation in all_equations(program)
    )


def leave_whole(program: Any, into_branches: bool = True) -> list[str | None]:
    """For each input of a traced program, the function from which its gradient comes as a whole, or None.

    Such a function takes functions, and sinks do not go into it: inside a checkpoint they go into no branches.
    """
    left_by: dict[Any, str | None] = {}
    for equation in reversed(program.eqns):
        name, programs = equation.primitive.name, list(inner_programs(equation))
        followed = name in FOLLOW and (into_branches or name != "cond")
        if followed and programs:
            asked = functools.partial(leave_whole, into_branches=into_branches and not is_checkpoint(equation))
            pairs = [(var, next(filter(None, inside), None)) for var, inside in _inside(equation, asked)]
        elif followed:  # a cast or a slice
            pairs = [(var, left_by.get(equation.outvars[0])) for var in operands(equation)[:1]]
        else:
            pairs = [(var, name if programs else None) for var in operands(equation)]
        left_by.update((var, function) for var, function in pairs if function)
    return [left_by.get(var) for var in program.invars]


def _inside(equation: Any, asked: Callable[[Any], Sequence[Any]]) -> list[tuple[Any, tuple[Any, ...]]]:
    """Each variable that goes into programs inside an equation, with the answer of each program."""
    programs = list(inner_programs(equation))
    atoms = equation.invars[1:] if equation.primitive.name == "cond" else equation.invars
    pairs = zip(atoms, zip(*map(asked, programs), strict=True), strict=True) if programs else ()
    return [(atom, answers) for atom, answers in pairs if not isinstance(atom, core.Literal)]
