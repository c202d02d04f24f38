"""Dtypes: of sums, of options, and of gradients by integers (float0)."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._core.leaves import for_each_leaf, is_inexact
from optax_accum._core.types import Tree


def accumulator_dtype(dtype: Any, named: jnp.dtype | None) -> jnp.dtype:
    """`named`, or at least float32 and never narrower than `dtype`; complex stays complex."""
    real = jnp.finfo(dtype).dtype
    if named is None:
        named = jnp.dtype(real if jnp.finfo(real).bits >= 32 else jnp.float32)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(jnp.complex128 if jnp.finfo(named).bits == 64 else jnp.complex64)
    return named


def named_dtypes(dtype: Tree, params: Tree) -> Tree:
    """The dtype named for each leaf, or None: `dtype` is a prefix of the tree of the parameters."""
    remedy = "Name one dtype, or one (or None) for each branch."
    return for_each_leaf("accumulator_dtype", dtype, params, remedy, is_leaf=lambda node: node is None)


def as_gradients(grads: Tree, params: Tree, dtype: Tree) -> Tree:
    """Sums in the dtypes that were named for gradients, else in the parameters' dtypes."""
    cast = lambda grad, param, named: grad.astype(jnp.result_type(param)) if named is None else grad
    return jax.tree.map(cast, grads, params, named_dtypes(dtype, params))


def holds(dtype: Any, other: Any) -> bool:
    """Whether a floating-point dtype has each number of another: asking JAX to promote may be an error."""
    if jnp.issubdtype(other, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    own, its = jnp.finfo(dtype), jnp.finfo(other)
    return own.nmant >= its.nmant and own.maxexp >= its.maxexp


def of_sum(dtype: Any) -> Any:
    """The dtype in which numbers are added: at least float32; integers stay."""
    return accumulator_dtype(dtype, None) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def wide(dtype: Any) -> jnp.dtype:
    """The dtype in which numbers of any dtype are averaged."""
    return accumulator_dtype(dtype, None) if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype(jnp.float32)


def is_short(dtype: Any) -> bool:
    """Whether a dtype has a shorter range than float32, as float16 has."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp


def is_narrow(dtype: Any) -> bool:
    """Whether numbers of a dtype are summed in a wider one."""
    return jnp.issubdtype(dtype, jnp.inexact) and accumulator_dtype(dtype, None) != dtype


def extreme(dtype: Any, sign: int) -> Any:
    """Infinity, or for a negative sign minus infinity; the last number of a dtype that has none."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return sign > 0
    infinite = sign * np.inf
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex(infinite, infinite)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if not is_integer and np.isinf(np.asarray(infinite, dtype)):
        return infinite
    limits = jnp.iinfo(dtype) if is_integer else jnp.finfo(dtype)  # some of float8 have no infinity
    return limits.max if sign > 0 else limits.min


def strong(tree: Tree) -> Tree:
    """Removes weak types, which an update would not give back."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype=jnp.asarray(leaf).dtype), tree)


def cast_like(tree: Tree, like: Tree) -> Tree:
    """Casts leaves to the dtypes of `like`; keys stay as they are, Python numbers become arrays."""

    def cast(leaf: Any, to: Any) -> Any:
        leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        dtype = to.dtype if hasattr(to, "dtype") else jnp.result_type(to)  # a Python number put there by hand
        return leaf if leaf.dtype == dtype else leaf.astype(dtype)

    return jax.tree.map(cast, tree, like)


def names_in(tree: Tree) -> str:
    return ", ".join(dict.fromkeys(jnp.result_type(leaf).name for leaf in jax.tree.leaves(tree)))


def same(tree: Tree, other: Tree) -> bool:
    dtypes_of = lambda tree: list(map(jnp.result_type, jax.tree.leaves(tree)))
    return dtypes_of(tree) == dtypes_of(other)


def gradients_like(params: Tree, inexact: Iterable[Any]) -> Tree:
    """The tree of gradients, of those by inexact parameters; JAX has zeros of a type of their own for integers."""
    rest = iter(inexact)
    return jax.tree.map(
        lambda leaf: next(rest) if is_inexact(leaf) else np.zeros(jnp.shape(leaf), jax.dtypes.float0), params
    )


def is_float0(leaf: Any) -> bool:
    """Whether `leaf` is the gradient that JAX gives to an integer parameter."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def default_float() -> jnp.dtype:
    """The dtype of weights: float32, or float64 when JAX runs with 64-bit numbers."""
    return jnp.result_type(float)
