"""Owns sinks: what goes through a traced loss beside a parameter, unread, and takes its gradient where that arises.

A sink goes through loops and functions as its parameter does, one slice beside each slice. Where the parameter is used,
the backward pass hands over what its gradient is there, in the dtype of the sink. So a bfloat16 parameter has a float32
sink, to which JAX can add in place; and the square of a gradient can be read as it passes.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from optax_accum._core import compilers, tracing

Tree = Any
Finish = Callable[[jax.Array], jax.Array | None]  # of a sum, or of a slice of it: see `Total`


class Sink(NamedTuple):
    """What takes the gradient of a parameter.

    Attributes:
      grad: takes the gradient: of the shape of the parameter.
      square: takes `|g|^2`: [], or [n] with one number for each slice along the first axis; or None.
      factor: [], what the gradient is multiplied by; or None.
    """

    grad: jax.Array
    square: jax.Array | None = None
    factor: jax.Array | None = None


@jax.tree_util.register_static
class Total:
    """An accumulator that takes its last gradient.

    Attributes:
      ref: holds the sum so far: of the parameter's shape.
      finish: makes of the whole sum what is to be in its place, such as its sum over devices; or does so with one slice
        after the other, unless it returns None for one.
      counts: whether the gradient is added; or a reference that will tell when the backward pass begins.
      is_finished: whether the backward pass that was traced last does.
    """

    def __init__(self, ref: Any, finish: Finish, counts: Any = True):
        self.ref, self._finish, self.counts, self.is_finished = ref, finish, counts, False

    def finish(self, total: jax.Array) -> jax.Array:
        """Returns the whole sum, or a slice of it, finished if it can be."""
        finished = self._finish(total)
        self.is_finished = finished is not None
        return total if finished is None else finished

    def finish_unused(self) -> None:
        """Finishes a sum to which the last backward pass added nothing, or slices that cannot be finished alone."""
        if not self.is_finished:
            self.ref[...] = self.finish(self.ref[...])


class Lent(NamedTuple):
    """A parameter, or a part of one, with its sink.

    If it has a `total`, its gradient goes there, to the slice `at`, and the sink gets zeros.
    """

    param: jax.Array
    sink: Sink
    total: Total | None = None
    at: tuple[jax.Array, ...] = ()

    @property
    def at_once(self) -> bool:
        """Whether the whole gradient is wanted at once: a square of a sum is no sum of squares."""
        return self.sink.square is not None or self.total is not None or not compilers.ADDS_TO_SLICES

    def turned(self, length: int) -> Any:
        """Returns this as a scan of so many turns takes it; a reference that Explicit axes shard has no slices."""
        if self.total is None:
            return self
        return used(self) if compilers.is_sharded(self.param) else self._replace(at=(*self.at, jnp.arange(length)))


@jax.custom_vjp
def _use(param: jax.Array, sink: Sink) -> jax.Array:
    return param


def _taken(sink: Sink, cotangent: jax.Array) -> tuple[jax.Array, Sink]:
    grad = cotangent.astype(sink.grad.dtype)
    square = None if sink.square is None else _square(cotangent, sink.square)
    if sink.factor is None:
        return jnp.zeros_like(cotangent), Sink(grad, square)
    return jnp.zeros_like(cotangent), Sink(grad * sink.factor.astype(grad.dtype), square, jnp.zeros_like(sink.factor))


_use.defvjp(lambda param, sink: (param, sink), _taken)


class _Place(NamedTuple):
    """Where in an accumulator a gradient goes."""

    ref: Any
    at: tuple[jax.Array, ...]
    counts: Any  # see `Total`


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _use_last(finish: Callable[[jax.Array], jax.Array], param: jax.Array, sink: Sink, place: _Place) -> jax.Array:
    return param


def _totalled(finish: Any, residuals: tuple[Sink, _Place], cotangent: jax.Array) -> tuple[Any, ...]:
    sink, (ref, at, counts) = residuals
    counts = counts[...] if isinstance(counts, jax.Ref) else counts
    grad = tracing.selected(counts, cotangent, jnp.zeros_like(cotangent)).astype(ref.dtype)
    grad = grad if sink.factor is None else grad * sink.factor.astype(grad.dtype)
    ref[at or ...] = finish(ref[at or ...] + grad)
    square = None if sink.square is None else _square(cotangent, sink.square)
    factor = None if sink.factor is None else jnp.zeros_like(sink.factor)
    return jnp.zeros_like(cotangent), Sink(jnp.zeros_like(sink.grad), square, factor), None


_use_last.defvjp(lambda finish, param, sink, place: (param, (sink, place)), _totalled)


def _square(cotangent: jax.Array, like: jax.Array) -> jax.Array:
    parts = (cotangent.real, cotangent.imag) if jnp.iscomplexobj(cotangent) else (cotangent,)
    axes = tuple(range(like.ndim, cotangent.ndim))
    return sum(jnp.sum(jnp.square(part.astype(like.dtype)), axes) for part in parts)  # type: ignore[return-value]


def empty(param: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros for a sink of a parameter, which differ between devices where it does."""
    if shape == jnp.shape(param):
        zeros = jnp.zeros_like(param, dtype=dtype)
    else:  # a lone zero would be a constant, which is of no mesh
        zeros = jnp.sum(jnp.zeros((1, *shape), dtype), axis=0)
    missing = compilers.varying_axes(param) - compilers.varying_axes(zeros)
    return compilers.as_varying(zeros, sorted(missing)) if missing else zeros


def used(value: Any) -> Any:
    """Returns a value as an equation takes it: a parameter is used here."""
    if not isinstance(value, Lent):
        return value
    param, sink, total, at = value
    return _use_last(total.finish, param, sink, _Place(total.ref, at, total.counts)) if total else _use(param, sink)


def run(program: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Evaluates a traced program, of which some values are `Lent`."""
    uses = collections.Counter(
        var for atoms in (*(equation.invars for equation in program.eqns), program.outvars) for var in _vars(atoms)
    )
    env: dict[Any, Any] = {}

    def write(var: Any, value: Any) -> None:
        once_more = isinstance(value, Lent) and value.at_once and uses[var] > 1
        env[var] = used(value) if once_more else value

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for var, value in zip((*program.constvars, *program.invars), (*consts, *values), strict=True):
        write(var, value)
    for equation in program.eqns:
        given = [read(atom) for atom in equation.invars]
        follow = FOLLOW.get(equation.primitive.name) if any(isinstance(value, Lent) for value in given) else None
        results = (follow or _end)(equation, given)
        for var, value in zip(equation.outvars, results, strict=True):
            write(var, value)
    return [used(read(atom)) for atom in program.outvars]


def _vars(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def casts(program: Any) -> list[bool]:
    """Returns which of the inputs of a traced program are cast down before it comes to a loop."""
    found: set[Any] = set()
    for equation in program.eqns:
        if equation.primitive.name == "convert_element_type" and _is_down(equation):
            found.update(_vars(equation.invars))
        elif equation.primitive.name in ("jit", "pjit", "checkpoint", "remat2"):
            inner = casts(compilers.opened(equation.params["jaxpr"])[0])
            found.update(_vars([atom for atom, cast in zip(equation.invars, inner, strict=True) if cast]))
    return [var in found for var in program.invars]


def has_loop(program: Any) -> bool:
    """Returns whether a traced program holds a scan."""
    return any(equation.primitive.name == "scan" for equation in tracing.equations(program))


def breaks(program: Any) -> list[bool]:
    """Returns for which inputs of a traced program JAX fails to differentiate with references, or does so wrongly.

    A scan that takes one array in two ways, say scanned over and closed over, and a barrier. What has a sink is used
    before it comes there.
    """
    found: set[Any] = set()
    for equation in reversed(program.eqns):
        name, programs = equation.primitive.name, list(tracing.inner_programs(equation))
        operands = _vars(equation.invars)
        if programs:
            found.update(var for var, count in collections.Counter(operands).items() if count > 1)
        if is_barrier(equation) or (name not in FOLLOW and any(map(_breaks_any, programs))):
            found.update(operands)
        elif name in FOLLOW and programs:
            by_operand = zip(equation.invars, breaks(programs[0]), strict=True)
            found.update(_vars([atom for atom, fails in by_operand if fails]))
        elif name in FOLLOW and equation.outvars[0] in found:  # what goes in is what comes out
            found.update(operands[:1])
    return [var in found for var in program.invars]


def is_barrier(equation: Any) -> bool:
    """Returns whether an equation only orders others."""
    return equation.primitive.name == "optimization_barrier"


def _breaks_any(program: Any) -> bool:
    """Returns whether a program holds a barrier, or hands one array twice to an inner program."""
    for equation in tracing.equations(program):
        operands = _vars(equation.invars)
        twice = any(tracing.inner_programs(equation)) and len(set(operands)) < len(operands)
        if twice or is_barrier(equation):
            return True
    return False


def leave_whole(program: Any) -> list[str | None]:
    """Returns for each input of a traced program the function that its gradient leaves as a whole, if there is one.

    That is one that takes a function, and that sinks do not go into.
    """
    found: dict[Any, str | None] = {}
    for equation in reversed(program.eqns):
        name, programs = equation.primitive.name, list(tracing.inner_programs(equation))
        if name in FOLLOW and programs:
            by_operand = leave_whole(programs[0])
        elif name in FOLLOW:  # what goes in is what comes out
            by_operand = [found.get(equation.outvars[0]), *[None] * (len(equation.invars) - 1)]
        else:
            by_operand = [name if programs else None] * len(equation.invars)
        pairs = zip(equation.invars, by_operand, strict=True)
        found.update((atom, function) for atom, function in pairs if function and not isinstance(atom, core.Literal))
    return [found.get(var) for var in program.invars]


# What is known of equations. Where an equation is unknown, the parameter is used there: that is always right.


def _end(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    return compilers.bind(equation, [used(value) for value in values])


def _scan(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    num_consts, num_carry = compilers.sizes_of_scan(equation)
    params, first = equation.params, num_consts + num_carry
    values = _used_if_twice(values)
    consts, narrow = zip(*map(_shared, values[:num_consts]), strict=True) if num_consts else ((), ())
    carry = [used(value) for value in values[num_consts:first]]
    turned = [value.turned(params["length"]) if isinstance(value, Lent) else value for value in values[first:]]
    # Before JAX 0.11, of what has a gradient that which has a reference must come first: as this dict is sorted.
    operands = {(not isinstance(value, Lent), index): value for index, value in enumerate(turned)}
    slices, whole = tracing.parted(operands, lambda leaf: jnp.ndim(leaf) > 0)  # one number is for all turns

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        turn = whole(slices)
        shared = [value if dtype is None else value.astype(dtype) for value, dtype in zip(consts, narrow, strict=True)]
        results = run(*compilers.opened(params["jaxpr"]), [*shared, *carry, *(turn[key] for key in operands)])
        return results[:num_carry], results[num_carry:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(step, carry, slices, **options)
    return [*carry, *stacked]


def _used_if_twice(values: Sequence[Any]) -> list[Any]:
    """Returns the operands of a scan, which does not add to one sink in two ways: such a parameter is used before."""
    sinks = collections.Counter(id(value.sink.grad) for value in values if isinstance(value, Lent))
    before: dict[int, Any] = {}

    def once(value: Any) -> Any:
        if not isinstance(value, Lent) or sinks[id(value.sink.grad)] == 1:
            return value
        return before.setdefault(id(value), used(value))

    return list(map(once, values))


def _shared(value: Any) -> tuple[Any, Any]:
    """Returns what all turns of a scan share, and the dtype that each casts it to, if any.

    If the gradient is wanted at once, JAX adds up those of the turns: in the dtype of the sink.
    """
    if not (isinstance(value, Lent) and value.at_once):
        return value, None
    dtype = value.sink.grad.dtype
    if dtype == value.param.dtype:
        return used(value), None
    return used(value._replace(param=value.param.astype(dtype))), value.param.dtype


def _jit(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    if not compilers.is_plain_jit(equation):
        return _end(equation, values)
    return run(*compilers.opened(equation.params["jaxpr"]), values)


def _checkpoint(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    if not compilers.ADDS_IN_CHECKPOINTS:
        return _end(equation, values)
    params = equation.params
    again = lambda values: run(*compilers.opened(params["jaxpr"]), values)
    return jax.checkpoint(again, prevent_cse=params["prevent_cse"], policy=params["policy"])(list(values))


def _cast(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """A cast down is followed: the gradient of what is cast, cast up, is that of the parameter."""
    if not _is_down(equation):
        return _end(equation, values)
    (value,) = values
    return [value._replace(param=compilers.bind(equation, [value.param])[0])]


def _is_down(equation: Any) -> bool:
    own, to = equation.invars[0].aval.dtype, equation.params["new_dtype"]
    floating = jnp.issubdtype(own, jnp.inexact) and jnp.issubdtype(to, jnp.inexact)
    return floating and jnp.finfo(to).bits < jnp.finfo(own).bits


def _slice(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """A slice is followed where JAX adds to a slice of a reference."""
    value, *where = values
    if not isinstance(value, Lent) or value.at_once:
        return _end(equation, values)
    part = lambda leaf: compilers.bind(equation, [leaf, *where])[0]
    return [Lent(part(value.param), value.sink._replace(grad=part(value.sink.grad)))]


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
