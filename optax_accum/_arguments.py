"""Owns the checks of what users pass: each says the rule, the value and the remedy. Computes nothing."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from optax_accum._state import default_float

Flag = bool | jax.Array  # a Python bool is known when tracing
Weight = float | jax.Array  # so is a Python float
Every = int | Callable[[jax.Array], Any] | None


def as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with support for extra arguments."""
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"inner must be an optax.GradientTransformation: inner={inner!r}. Pass what a factory returned, such as "
            "optax.adam(1e-3), or MultiSteps(...).gradient_transformation()."
        )
    return optax.with_extra_args_support(inner)


def as_every(every: Any) -> Every:
    """Returns `every` as a Python integer, a callable or None."""
    if every is None or callable(every):
        return every
    rule = "every must be an integer >= 1, a callable of gradient_step, or None"
    if isinstance(every, Tracer):
        raise TypeError(f"{rule}: every={every}. A value known only at run time goes into a callable, or use flush.")
    try:
        if _is_bool(every):
            raise TypeError
        count = operator.index(every)
    except TypeError:
        raise TypeError(f"{rule}: every={every!r}. Pass an int, such as every=4.") from None
    if count < 1:
        raise ValueError(f"{rule}: every={count}. Use every=1 for an update at every micro-step.")
    return count


def as_count(count: Any) -> jax.Array:
    """Returns what a callable `every` gave, as an integer scalar."""
    dtype, shape = _dtype_and_shape(count)
    if not jnp.issubdtype(dtype, jnp.integer) or shape:
        raise TypeError(
            f"A callable every must return an integer scalar: it returned {_describe(count)}. "
            "Wrap a schedule of floats: lambda step: schedule(step).astype(int)."
        )
    return jnp.asarray(count)


def as_flush(flush: Any, every: Every) -> Flag:
    """Returns `flush` as a Python bool where it is one, else as a bool scalar."""
    if flush is None:
        if every is None:
            raise ValueError(
                "With every=None the caller closes the window: flush=None. Pass flush=False to go on, flush=True to "
                "close it."
            )
        return False
    if _dtype_and_shape(flush) != (jnp.bool_, ()):
        raise TypeError(
            f"flush must be a bool, or a bool scalar: flush={_describe(flush)}. Pass flush=(step == last), say."
        )
    return flush if isinstance(flush, jax.Array) else bool(flush)


def as_weight(weight: Any) -> Weight:
    """Returns `weight` as a Python float where it is a number, else as a scalar of the default float dtype."""
    return as_scalar("weight", weight, "Pass one number for the micro-batch, such as mask.sum().")


def as_scalar(name: str, value: Any, remedy: str) -> Weight:
    """Returns a real scalar as a Python float where it is a number, else in the default float dtype."""
    dtype, shape = _dtype_and_shape(value)
    if not jnp.issubdtype(dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name} must be a real number: {name}={_describe(value)}. {remedy}")
    if shape:
        raise ValueError(f"{name} must be a scalar: {name}={_describe(value)}. {remedy}")
    return value.astype(default_float()) if isinstance(value, jax.Array) else float(value)


def as_float_dtype(name: str, dtype: Any) -> jnp.dtype | None:
    """Returns `dtype` as a real floating-point dtype, or None."""
    if dtype is None:
        return None
    rule = f"{name} must be a real floating-point dtype or None"
    remedy = "Pass jnp.float32, or None for at least float32; complex leaves take the complex dtype of that width."
    try:
        named = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(f"{rule}: {name}={dtype!r}. {remedy}") from None
    if not jnp.issubdtype(named, jnp.floating):
        raise TypeError(f"{rule}: {name}={named.name}. {remedy}")
    if named.itemsize == 8 and default_float().itemsize == 4:
        raise ValueError(
            f'{rule} that JAX has: {name}={named.name}. Turn it on with jax.config.update("jax_enable_x64", True).'
        )
    return named


def as_names(names: Any) -> tuple[str, ...]:
    """Returns the names of `mean_args` as a tuple."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f'mean_args must be a tuple of names: mean_args={names!r}. Write mean_args=("value",).')
    reserved = [name for name in names if name in ("weight", "flush", "params")]
    if reserved:
        raise ValueError(
            f"mean_args must name extra arguments of the inner optimizer: mean_args={names!r}. "
            f"Leave out {reserved[0]!r}."
        )
    return tuple(names)


def one_of(name: str, value: Any, allowed: tuple[str, ...], otherwise: str = "") -> str:
    """Returns `value` if it is one of the words `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        words = ", ".join(f'"{word}"' for word in allowed)
        raise ValueError(f"{name} must be one of {words}{otherwise}: {name}={value!r}. Choose one of these.")
    return value


def as_skip(skip: Any) -> jax.Array:
    """Returns what a callable `nonfinite` decided, as a bool scalar."""
    if _dtype_and_shape(skip) != (jnp.bool_, ()):
        raise TypeError(
            f"A callable nonfinite must return (skip, info) with a bool scalar first: it returned {_describe(skip)}. "
            "Reduce it to one answer with jnp.any or jnp.all."
        )
    return jnp.asarray(skip)


def _dtype_and_shape(value: Any) -> tuple[Any, tuple[int, ...]]:
    """Returns the dtype and shape of a number or an array, and the dtype `object` for anything else."""
    if not isinstance(value, bool | int | float | complex | np.generic | np.ndarray | jax.Array):
        return np.dtype(object), ()
    return jnp.result_type(value), jnp.shape(value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) == jnp.bool_


def _describe(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)
