"""Checks of values that users pass. Each error says the rule, the value and the remedy."""

import sys
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._core.dtypes import default_float
from optax_accum._core.leaves import NOT_ARRAYS, by_path, check_arrays, is_inexact
from optax_accum._core.types import Weight
from optax_accum._shared.arrays import short


def as_weight(weight: Any, rows: int | None = None, name: str = "weight") -> Weight:
    """`as_scalar` for a weight, which must be counted in at least 32 bits."""
    verb = "Pass" if name == "weight" else "Return"
    value = as_scalar(name, weight, f"{verb} one number for the micro-batch, such as mask.sum().", rows)
    dtype = jnp.result_type(weight)
    if dtype.itemsize < 4:
        raise TypeError(
            f"{name} must be counted in at least 32 bits: it has dtype {dtype}, which overflows or stalls. "
            "Count with mask.sum(dtype=jnp.float32), say."
        )
    return value


def as_scalar(name: str, value: Any, remedy: str, rows: int | None = None) -> Weight:
    """A real scalar: a JAX array in the default float dtype, anything else as a Python float.

    With `rows` it may also be `rows` numbers, one for each device.
    """
    dtype, shape = dtype_and_shape(value)
    if not jnp.issubdtype(dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name} must be a real number: {name}={short(value)}. {remedy}")
    if shape and (rows is None or shape != (rows,)):
        expected = "a scalar" if rows is None else f"a scalar, or {rows} numbers, one for each device"
        raise ValueError(f"{name} must be {expected}: {name}={short(value)}. {remedy}")
    if shape:
        return jnp.asarray(value, default_float())
    return value.astype(default_float()) if isinstance(value, jax.Array) else float(value)


_REMEDIES = {
    "emit_dtype": 'Pass "gradient" for the dtype of the gradients, jnp.float32, say, or None for the accumulator\'s.',
    "dtype": "Pass jnp.bfloat16.",
}


def as_float_dtype(name: str, dtype: Any) -> jnp.dtype | None:
    """Raises unless `dtype` is a real floating-point dtype that JAX has, or None."""
    if dtype is None:
        return None
    rule = f"{name} must be a real floating-point dtype or None"
    remedy = _REMEDIES.get(name, "Pass jnp.float32, say; complex leaves take the complex dtype of that width.")
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


def as_float_dtypes(name: str, dtypes: Any) -> Any:
    """Applies `as_float_dtype` to each leaf of a tree; None is a leaf."""
    return jax.tree.map(lambda dtype: as_float_dtype(name, dtype), dtypes, is_leaf=lambda node: node is None)


def check_flag(name: str, value: Any, *, may_be_none: bool = True) -> None:
    """Raises unless `value` is a Python or NumPy bool, or None."""
    if not (isinstance(value, bool | np.bool_) or (may_be_none and value is None)):
        words = "True, False or None" if may_be_none else "True or False"
        raise TypeError(f"{name} must be {words}: {name}={short(value)}. Leave it out for the default.")


_OF_MODULES = "For the gradient use optax_accum.flax.nnx.value_and_grad; to check a train step, verify_step."
MODULES_ACROSS_CALLS = (
    "Across calls use optax_accum.flax.nnx.Optimizer, whose update(model, grads, weight=...) is a micro-step, or "
    "optax_accum.flax.nnx.train_step."
)


def check_no_module(args: Iterable[Any], remedy: str = _OF_MODULES) -> None:
    """Raises for an NNX module: as a tree, it loses a loss's changes to it, such as running statistics."""
    nnx = sys.modules.get("flax.nnx")
    for arg in args:
        if nnx is not None and isinstance(arg, nnx.Module):
            raise TypeError(
                "Parameters must be a tree of arrays, and a module of NNX also holds what a loss changes (BatchNorm's "
                f"statistics, counts of random streams): an argument is a {type(arg).__name__}. {remedy}"
            )


def check_differentiable(params: Any, *, of_whole_batch: bool = False) -> None:
    """Raises unless every leaf has a floating-point dtype; `of_whole_batch`: no other argument is named."""
    named = "" if of_whole_batch else ", named by whole_argnums if it has as many rows as the batch"
    check_arrays("What argnums names", params, NOT_ARRAYS)
    for path, leaf in by_path(params):
        if not is_inexact(leaf):
            raise TypeError(
                f"Only floating-point arguments can be differentiated: argnums holds {jnp.result_type(leaf)} at "
                f"{path}. Pass it as another argument{named}."
            )


def check_kinds(name: str, tree: Any, like: Any, remedy: str) -> None:
    """Raises if the dtypes of `like` would cut off `tree`: a fraction does not fit into an integer."""
    for (path, leaf), to in zip(by_path(tree), jax.tree.leaves(like), strict=True):
        new, old = (leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf) for leaf in (leaf, to))
        for kind in (jnp.inexact, jnp.complexfloating):
            if jnp.issubdtype(new, kind) and not jnp.issubdtype(old, kind):
                raise TypeError(
                    f"{name} must keep its dtypes: at {path} it began as {old} and became {new}, which would be cut "
                    f"off. {remedy}"
                )


def dtype_and_shape(value: Any) -> tuple[Any, tuple[int, ...]]:
    """The dtype and shape of a number or an array; the dtype `object` for anything else."""
    if not isinstance(value, bool | int | float | complex | np.generic | np.ndarray | jax.Array):
        return np.dtype(object), ()
    return jnp.result_type(value), jnp.shape(value)
