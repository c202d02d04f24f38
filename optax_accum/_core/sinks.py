"""Owns sinks: what goes through a traced loss beside a parameter, unread, and takes its gradient where that arises.

A sink goes through loops and functions as its parameter does, one slice beside each slice. Where the parameter is used,
the backward pass hands over what its gradient is there, in the dtype of the sink. So a bfloat16 parameter has a float32
sink, to which JAX can add in place; and the square of a gradient can be read as it passes.
"""

import collections
import dataclasses
import functools
import operator
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


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("param", "sink", "at"), meta_fields=("total", "is_reference")
)
@dataclasses.dataclass(frozen=True)
class Lent:
    """A parameter, or a part of one, with its sink.

    If it has a `total`, its gradient goes there, to the slice `at`, and the sink gets zeros.

    Attributes:
      is_reference: whether JAX adds to the sink itself: that of a slice, or in a checkpoint, has a gradient which is
        written first.
    """

    param: jax.Array
    sink: Sink
    total: Total | None = None
    at: tuple[jax.Array, ...] = ()
    is_reference: bool = True

    @property
    def at_once(self) -> bool:
        """Whether the whole gradient is wanted at once: a square of a sum is no sum of squares."""
        return self.sink.square is not None or self.total is not None or not compilers.ADDS_TO_SLICES

    def turned(self, length: int) -> Any:
        """Returns this as a scan of so many turns takes it; a reference that Explicit axes shard has no slices."""
        if self.total is None:
            return self
        at = (*self.at, jnp.arange(length))
        return used(self) if compilers.is_sharded(self.param) else dataclasses.replace(self, at=at)


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
    return functools.reduce(operator.add, [jnp.sum(jnp.square(part.astype(like.dtype)), axes) for part in parts])


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
    total = value.total
    if total is None:
        return _use(value.param, value.sink)
    return _use_last(total.finish, value.param, value.sink, _Place(total.ref, value.at, total.counts))


def run(program: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Evaluates a traced program, of which some values are `Lent`."""
    uses = collections.Counter(
        var for atoms in (*(equation.invars for equation in program.eqns), program.outvars) for var in variables(atoms)
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


def variables(atoms: Sequence[Any]) -> list[Any]:
    """Returns those of an equation's operands that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


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
    """Returns operands of which none has the sink of another: a scan does not add to one in two ways."""
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
    return used(dataclasses.replace(value, param=value.param.astype(dtype))), value.param.dtype


def _jit(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    if not compilers.is_plain_jit(equation):
        return _end(equation, values)
    return run(*compilers.opened(equation.params["jaxpr"]), values)


def _checkpoint(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    if not compilers.ADDS_IN_CHECKPOINTS:
        return _end(equation, values)
    params = equation.params
    again = lambda values: run(*compilers.opened(params["jaxpr"]), values)
    within = [dataclasses.replace(value, is_reference=False) if isinstance(value, Lent) else value for value in values]
    return jax.checkpoint(again, prevent_cse=params["prevent_cse"], policy=params["policy"])(within)


def _cond(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """A branch is followed where JAX adds to a reference in it: any other gradient it returns, as wide as the sink."""
    if equation.params.get("branches_platforms"):  # it is the compiler that chooses
        return _end(equation, values)
    goes_in = lambda value: isinstance(value, Lent) and value.is_reference and not value.at_once
    index, *operands = [value if goes_in(value) else used(value) for value in _used_if_twice(values)]
    branch = lambda program: lambda *operands: run(*compilers.opened(program), operands)
    return jax.lax.switch(index, list(map(branch, equation.params["branches"])), *operands)


def _cast(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """A cast down is followed: the gradient of what is cast, cast up, is that of the parameter."""
    if not is_down(equation):
        return _end(equation, values)
    (value,) = values
    return [dataclasses.replace(value, param=compilers.bind(equation, [value.param])[0])]


def is_down(equation: Any) -> bool:
    """Returns whether a cast is one to fewer bits."""
    own, to = equation.invars[0].aval.dtype, equation.params["new_dtype"]
    floating = jnp.issubdtype(own, jnp.inexact) and jnp.issubdtype(to, jnp.inexact)
    return floating and jnp.finfo(to).bits < jnp.finfo(own).bits


def _slice(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """A slice is followed where JAX adds to a slice of a reference."""
    value, *where = values
    if not isinstance(value, Lent) or value.at_once:
        return _end(equation, values)
    part = lambda leaf: compilers.bind(equation, [leaf, *where])[0]
    return [Lent(part(value.param), value.sink._replace(grad=part(value.sink.grad)), is_reference=False)]


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
