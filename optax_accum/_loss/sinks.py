"""Sinks: values that go through a traced loss beside a parameter and receive its gradient where that arises.

A sink goes through loops and functions as its parameter does, one slice beside each slice. Where the parameter is used,
the backward pass hands over what its gradient is there, in the dtype of the sink. So a bfloat16 parameter has a float32
sink, to which JAX can add in place; and the square of a gradient can be read as it passes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, compilers, flags

Finish = Callable[[jax.Array], jax.Array | None]  # of a sum, or of a slice of it: see `Total`


class Sink(NamedTuple):
    """Takes the gradient of a parameter.

    Attributes:
      grad: takes the gradient: of the shape of the parameter, or [] if a `Total` takes it.
      square: takes `|g|^2`: [], or [n] with one number for each slice along the first axis; or None.
      factor: [], multiplies the gradient; or None.
    """

    grad: jax.Array
    square: jax.Array | None = None
    factor: jax.Array | None = None

    def scaled(self, grad: jax.Array) -> jax.Array:
        """A gradient times the factor; zeros for a factor of 0, whatever the gradient is."""
        if self.factor is None:
            return grad
        return jnp.where(self.factor == 0, 0, grad * self.factor.astype(grad.dtype))

    def taking(self, grad: jax.Array, cotangent: jax.Array) -> "Sink":
        """The cotangent of the sink: `grad`, and the square of the parameter's cotangent."""
        like = self.square
        square = None if like is None else arithmetic.squared_norm(cotangent, like.dtype, like.ndim)
        return Sink(grad, square, jax.tree.map(jnp.zeros_like, self.factor))


class Total:
    """An accumulator that takes its last gradient.

    Attributes:
      ref: holds the sum so far: of the parameter's shape.
      finish: maps the whole sum to its final value, such as its sum over devices; or does so with one slice after the
        other, unless it returns None for one.
      counts: whether the gradient is added; or a reference that holds the answer by the time the backward pass begins.
      is_finished: whether the backward pass that was traced last has finished the sum.
    """

    def __init__(self, ref: Any, finish: Finish, counts: Any):
        self.ref, self._finish, self.counts, self.is_finished = ref, finish, counts, False

    def finish(self, total: jax.Array) -> jax.Array:
        """The whole sum, or a slice of it, finished if it can be."""
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
      is_reference: whether JAX adds to the sink itself. The gradient of a slice, or in a checkpoint, is written first.
    """

    param: jax.Array
    sink: Sink
    total: Total | None = None
    at: tuple[jax.Array, ...] = ()
    is_reference: bool = True

    @property
    def at_once(self) -> bool:
        """Whether the whole gradient must come at once: the square of a sum is no sum of squares."""
        return self.sink.square is not None or self.total is not None or not compilers.ADDS_TO_SLICES

    @property
    def has_slices(self) -> bool:
        """Whether the only slice that is used takes its gradient alone: all others are zero, and add no square."""
        square = self.sink.square
        return compilers.ADDS_TO_SLICES and self.total is None and (square is None or jnp.ndim(square) == 0)

    def turned(self, length: int) -> Any:
        """Prepares it for a scan of this length; a reference that Explicit axes shard has no slices."""
        if self.total is None:
            return self
        at = (*self.at, jnp.arange(length))
        return used(self) if compilers.is_sharded(self.param) else dataclasses.replace(self, at=at)


@jax.custom_vjp
def _use(param: jax.Array, sink: Sink) -> jax.Array:
    return param


def _taken(sink: Sink, cotangent: jax.Array) -> tuple[jax.Array, Sink]:
    grad = sink.scaled(cotangent.astype(sink.grad.dtype))
    return jnp.zeros_like(cotangent), sink.taking(grad, cotangent)


_use.defvjp(lambda param, sink: (param, sink), _taken)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _use_last(finish: Callable[[jax.Array], jax.Array], param: jax.Array, sink: Sink, place: Any) -> jax.Array:
    return param


def _totalled(finish: Any, residuals: tuple[Sink, Any], cotangent: jax.Array) -> tuple[Any, ...]:
    sink, (ref, at, counts) = residuals
    counts = counts[...] if isinstance(counts, jax.Ref) else counts
    grad = flags.selected(counts, cotangent, jnp.zeros_like(cotangent)).astype(ref.dtype)
    ref[at or ...] = finish(ref[at or ...] + sink.scaled(grad))
    return jnp.zeros_like(cotangent), sink.taking(jnp.zeros_like(sink.grad), cotangent), None


_use_last.defvjp(lambda finish, param, sink, place: (param, (sink, place)), _totalled)


def empty(param: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros for a sink of a parameter, which differ between devices where the parameter does."""
    if shape == jnp.shape(param):
        zeros = compilers.on_mesh_of(param, jnp.zeros_like(param, dtype=dtype))
    else:  # a lone zero would be a constant, which is of no mesh
        zeros = jnp.sum(jnp.zeros((1, *shape), dtype), axis=0)
    missing = compilers.varying_axes(param) - compilers.varying_axes(zeros)
    return compilers.as_varying(zeros, sorted(missing)) if missing else zeros


def used(value: Any) -> Any:
    """The value for an equation that does not follow sinks: a parameter is used here."""
    if not isinstance(value, Lent):
        return value
    total = value.total
    if total is None:
        return _use(value.param, value.sink)
    return _use_last(total.finish, value.param, value.sink, (total.ref, value.at, total.counts))
