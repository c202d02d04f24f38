"""Owns the checks of what users pass: each says the rule, the value and the remedy. Computes nothing."""

import math
import operator
import sys
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum._core.arithmetic import Weight
from optax_accum._core.leaves import NOT_ARRAYS, check_arrays, short
from optax_accum._core.state import default_float


def as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with support for extra arguments."""
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(f"inner must be an optax.GradientTransformation: inner={short(inner)}. {_remedy(inner)}")
    return optax.with_extra_args_support(inner)


def _remedy(inner: Any) -> str:
    if isinstance(inner, int):
        return "The optimizer comes first: accumulate_gradients(optax.adam(1e-3), every=4)."
    if isinstance(inner, optax.MultiSteps):
        return "Pass the optimizer that optax.MultiSteps wraps."
    if isinstance(getattr(inner, "tx", None), optax.GradientTransformation):
        return "Pass its tx."
    if callable(inner):
        return "Call it: optax.adam(1e-3), say, returns an optimizer."
    return "Pass an optimizer, such as optax.adam(1e-3)."


def as_weight(weight: Any, rows: int | None = None, name: str = "weight") -> Weight:
    """Returns a weight as a Python float where it is a number, else as a scalar of the default float dtype."""
    remedy = "Pass one number for the micro-batch, such as mask.sum()."
    if name != "weight":
        remedy = "Return one number for the micro-batch, such as mask.sum(), or a dict of them for a dict of terms."
    value = as_scalar(name, weight, remedy, rows)
    dtype = jnp.result_type(weight)
    if dtype.itemsize < 4:
        raise TypeError(
            f"{name} must be counted in at least 32 bits: it has dtype {dtype}, which overflows or stalls. "
            "Count with mask.sum(dtype=jnp.float32), say."
        )
    return value


def as_scalar(name: str, value: Any, remedy: str, rows: int | None = None) -> Weight:
    """Returns a real scalar as a Python float where it is a number, else in the default float dtype.

    With `rows` it may also be so many numbers, one for each device.
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
    "reduce_dtype": "Pass jnp.bfloat16.",
}


def as_float_dtype(name: str, dtype: Any) -> jnp.dtype | None:
    """Returns `dtype` as a real floating-point dtype, or None."""
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
    """Returns a tree of dtypes, each as `as_float_dtype` does."""
    return jax.tree.map(lambda dtype: as_float_dtype(name, dtype), dtypes, is_leaf=lambda node: node is None)


def as_positive(name: str, count: Any) -> int | None:
    """Returns `count` as a Python integer >= 1, or None."""
    rule = f"{name} must be an integer >= 1"
    return None if count is None else as_integer(rule, name, count, "Pass 1 or more.")


def as_tolerance(name: str, tolerance: Any) -> float | None:
    """Returns `tolerance` as a number above 0, or None."""
    if tolerance is None or 0 < float(tolerance) < math.inf:
        return tolerance
    raise ValueError(f"{name} must be a finite number above 0: {name}={tolerance}. Leave it out for its default.")


def one_of(name: str, value: Any, allowed: tuple[str, ...], otherwise: str = "") -> str:
    """Returns `value` if it is one of the words `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        words = ", ".join(f'"{word}"' for word in allowed)
        raise ValueError(f"{name} must be one of {words}{otherwise}: {name}={value!r}. Choose one of these.")
    return value


_OF_MODULES = "For the gradient use optax_accum.flax.nnx.value_and_grad; to check a train step, verify_step."


def check_no_module(args: Iterable[Any], remedy: str = _OF_MODULES) -> None:
    """Raises for a module of NNX: as a tree, it loses what a loss changes in it, such as running statistics."""
    nnx = sys.modules.get("flax.nnx")
    for arg in args:
        if nnx is not None and isinstance(arg, nnx.Module):
            raise TypeError(
                "Parameters must be a tree of arrays, and a module of NNX also holds what a loss changes (BatchNorm's "
                f"statistics, counts of random streams): an argument is a {type(arg).__name__}. {remedy}"
            )


def check_differentiable(params: Any) -> None:
    """Raises unless every leaf that is differentiated is of a floating-point dtype."""
    check_arrays("What argnums names", params, NOT_ARRAYS)
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"Only floating-point arguments can be differentiated: argnums holds {jnp.result_type(leaf)} at "
                f"{jax.tree_util.keystr(path) or 'the only leaf'}. Pass it as another argument, named by whole_argnums "
                "if it has as many rows as the batch."
            )


def check_loss(loss: Any, shares: Any) -> None:
    """Raises unless the loss is a real scalar, or a dict of them with the keys of the weights."""
    if type(loss) is tuple:
        raise TypeError(
            f"fun must return a real scalar loss, or a dict of them: it returned a tuple of {len(loss)}. If that is "
            "(loss, aux), pass has_aux=True; if it holds gradients, use optax_accum.accumulate."
        )
    for path, leaf in jax.tree.leaves_with_path(loss):
        if leaf.shape or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"fun must return a real scalar loss, or a dict of them: {jax.tree_util.keystr(path) or 'the loss'} is "
                f"{leaf.dtype}{list(leaf.shape)}. Reduce it with jnp.mean, say; with has_aux=True the loss comes first."
            )
    terms = sorted(loss) if isinstance(loss, dict) else None
    wanted = sorted(shares) if isinstance(shares, dict) else None
    if not terms and not hasattr(loss, "dtype"):
        raise TypeError(
            f"fun must return a real scalar loss, or a dict of them: it returned {loss!r}. Return one number; "
            "with has_aux=True, return (loss, aux)."
        )
    if shares is not None and terms != wanted:
        raise ValueError(
            f"weight_fn must return a weight for each term of the loss: the loss has {terms or 'no terms'}, the "
            f"weights have {wanted or 'no terms'}. Return dicts with the same keys from both."
        )


def check_kinds(name: str, tree: Any, like: Any, remedy: str) -> None:
    """Raises where the dtypes of `like` have no room for `tree`: no fraction fits into an integer."""
    for (path, leaf), to in zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(like), strict=True):
        new, old = (leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf) for leaf in (leaf, to))
        for kind in (jnp.inexact, jnp.complexfloating):
            if jnp.issubdtype(new, kind) and not jnp.issubdtype(old, kind):
                where = jax.tree_util.keystr(path) or "the only leaf"
                raise TypeError(
                    f"{name} must keep its dtypes: at {where} it began as {old} and became {new}, which would be cut "
                    f"off. {remedy}"
                )


def check_carry(carry: Any, new: Any) -> None:
    """Raises unless the carry that `fun` returns has the tree, shapes and dtypes of the one it was given."""
    old, new_tree = jax.tree.structure(carry), jax.tree.structure(new)
    if old != new_tree:
        raise TypeError(
            f"The carry must keep its tree: it came as {old} and left as {new_tree}. Return from fun a carry of the "
            "first tree."
        )
    for (path, a), b in zip(jax.tree.leaves_with_path(carry), jax.tree.leaves(new), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise TypeError(
                f"The carry must keep its type: at {jax.tree_util.keystr(path) or 'its only leaf'} it came as "
                f"{a.dtype}{list(a.shape)} and left as {b.dtype}{list(b.shape)}. Cast it back in fun."
            )


def check_rows(outputs: Any, size: int) -> None:
    """Raises unless every leaf of the outputs of the micro-batches [k, ...] has one row for each example."""
    for path, leaf in jax.tree.leaves_with_path(outputs):
        if leaf.ndim < 2 or leaf.shape[1] != size:
            raise ValueError(
                f"Outputs must have one row for each example: {jax.tree_util.keystr(path) or 'the output'} has shape "
                f"{leaf.shape[1:]} for a micro-batch of {size} rows. Return rows, and reduce them outside."
            )


def check_rest(outputs: Any, rest: Any, size: int, rows: int) -> None:
    """Raises unless the outputs of the remainder join those of the whole micro-batches, all in one [n, ...]."""
    for (path, leaf), last in zip(jax.tree.leaves_with_path(outputs), jax.tree.leaves(rest), strict=True):
        if jnp.shape(last) != (rows, *leaf.shape[1:]):
            raise ValueError(
                f"Outputs must have one row for each example, and rows of one shape: "
                f"{jax.tree_util.keystr(path) or 'the output'} has shape {(size, *leaf.shape[1:])} for {size} rows and "
                f"{jnp.shape(last)} for the remainder of {rows}. Return rows, and reduce them outside."
            )


def as_integer(rule: str, name: str, value: Any, remedy: str) -> int:
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) == jnp.bool_:
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{rule}: {name}={value!r}. Pass an int, such as {name}=4.") from None
    if number < 1:
        raise ValueError(f"{rule}: {name}={number}. {remedy}")
    return number


def dtype_and_shape(value: Any) -> tuple[Any, tuple[int, ...]]:
    """Returns the dtype and shape of a number or an array, and the dtype `object` for anything else."""
    if not isinstance(value, bool | int | float | complex | np.generic | np.ndarray | jax.Array):
        return np.dtype(object), ()
    return jnp.result_type(value), jnp.shape(value)
