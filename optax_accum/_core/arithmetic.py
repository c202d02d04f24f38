"""Owns the arithmetic of an accumulator: zeros, add, scale, dtypes. Knows no counters, batches or meshes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum._core import compilers, tracing

Tree = Any
Leaf = Any
Weight = float | jax.Array  # a Python float is known when tracing, an array when running


def zeros(params: Tree, dtype: Tree) -> Tree:
    """Returns an empty accumulator for gradients of `params`; leaves without a gradient get none."""

    def empty(param: Leaf, named: jnp.dtype | None) -> Leaf:
        param = jnp.asarray(param)
        if not jnp.issubdtype(param.dtype, jnp.inexact):
            return optax.MaskedNode()  # its gradient is a float0: nothing to add
        return jnp.zeros_like(param, dtype=accumulator_dtype(param.dtype, named))

    return jax.tree.map(empty, params, named_dtypes(dtype, params))


def zeros_of(shapes: Tree, zero: float = 0) -> Tree:
    """Returns zeros of these shapes and dtypes, float0 included."""

    def fill(leaf: jax.ShapeDtypeStruct) -> Any:
        if is_float0(leaf):
            return np.zeros(leaf.shape, leaf.dtype)
        alike = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type)
        return jnp.full_like(alike, zero)  # inside jax.shard_map not yet of one device: a `leaf` that is fails there

    return jax.tree.map(fill, shapes)


def like_gradients(params: Tree, acc: Tree) -> Tree:
    """Returns leaves of the shapes and dtypes of the gradients in an accumulator: a float0 where there is none."""

    def like(param: Leaf, total: Leaf) -> Leaf:
        if not hasattr(total, "dtype"):
            return np.zeros(jnp.shape(param), jax.dtypes.float0)
        dtype = jnp.result_type(param)
        return total if total.dtype == dtype else total.astype(dtype)  # a reference has that of its parameter

    return jax.tree.map(like, params, acc)


def add(acc: Tree | None, grads: Tree, weight: Weight, first: tracing.Flag, skip: tracing.Flag = False) -> Tree:
    """Returns `acc + weight * grads`, or `weight * grads` where `first` (or where `acc` is None).

    The weight is [], or [d] with one for each partial sum of leaves [d, ...]. A weight of zero adds nothing, whatever
    the gradient holds, and so does `skip`: it selects, because `0 * nan` is nan.
    """
    counts = weight != 0 if skip is False else jnp.logical_not(skip) & (weight != 0)

    def add_leaf(grad: Leaf, total: Leaf) -> Leaf:
        if is_float0(grad):
            return optax.MaskedNode()
        grad = jnp.asarray(grad)
        dtype = accumulator_dtype(grad.dtype, None) if total is None else total.dtype
        wide = accumulator_dtype(dtype, None)  # a narrow accumulator still adds in float32
        share = _scale(grad.astype(wide), weight, counts)
        if total is None:
            return share
        start = total.astype(wide) if first is False else jnp.where(first, compilers.NOTHING, total.astype(wide))
        return (start + share).astype(dtype)

    if acc is None:
        return jax.tree.map(lambda grad: add_leaf(grad, None), grads)
    return jax.tree.map(add_leaf, grads, acc)


def emitted(acc: Tree, grads: Tree, factor: Weight, dtype: jnp.dtype | str | None) -> Tree:
    """Returns `acc * factor` in the dtype that is to be emitted.

    A mean is a product with one reciprocal: dividing each leaf by a traced scalar would not fuse into the optimizer.
    """

    def leaf(grad: Leaf, total: Leaf) -> Leaf:
        if is_float0(grad):
            return grad
        return scaled(total, factor, emitted_dtype(jnp.asarray(grad).dtype, total.dtype, dtype))

    return jax.tree.map(leaf, grads, acc)


def all_finite(tree: Tree) -> jax.Array:
    """Returns a bool scalar: no leaf holds a NaN or an infinity.

    A leaf is finite if its extremes are: unlike `isfinite` of every element, that writes nothing beside the leaf.
    """
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if not is_float0(leaf)]
    reals = [part for leaf in leaves for part in ((leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,))]
    extremes = [extreme for real in reals if real.size for extreme in compilers.extremes(real)]
    if not extremes:
        return jnp.array(True)
    widest = max((accumulator_dtype(extreme.dtype, None) for extreme in extremes), key=lambda dtype: dtype.itemsize)
    together = jnp.stack([extreme.astype(widest) for extreme in extremes])
    return jnp.all(jnp.isfinite(together))


def scaled(leaf: jax.Array, factor: Weight, dtype: Any) -> jax.Array:
    """Returns a leaf times a factor, [] or [d], computed in at least float32, in the dtype named."""
    wide = accumulator_dtype(leaf.dtype, None)
    return (leaf.astype(wide) * along_rows(factor, leaf).astype(wide)).astype(dtype)


def unless(skip: tracing.Flag, weight: Weight) -> Weight:
    """Returns a weight, and 0 where the micro-batch is left out."""
    return weight if skip is False else jnp.where(skip, 0, weight)


def along_rows(numbers: Any, leaf: jax.Array) -> jax.Array:
    """Returns one number, or [d] with one for each row of a leaf [d, ...], as they go with the leaf."""
    numbers = jnp.asarray(numbers)
    return numbers.reshape(numbers.shape + (1,) * (leaf.ndim - numbers.ndim)) if numbers.ndim else numbers


def reciprocal(weight: Weight) -> Weight:
    """Returns `1 / weight`, and 1 for a weight of zero: such a window emits nothing, and must not make a NaN."""
    return 1 / jnp.where(weight == 0, 1, weight) if isinstance(weight, jax.Array) else 1 / (weight or 1.0)


def divides(weight: Weight) -> tracing.Flag:
    """Returns whether a sum can be divided by this weight: not by 0, nor where the reciprocal is flushed to 0.

    A NaN does, and shows.
    """
    largest = 1 / float(jnp.finfo(jnp.result_type(weight)).tiny)
    is_larger = abs(weight) > largest
    return (weight != 0) & (jnp.logical_not(is_larger) if isinstance(weight, jax.Array) else not is_larger)


def accumulator_dtype(dtype: Any, named: jnp.dtype | None) -> jnp.dtype:
    """Returns `named`, or at least float32 and never narrower than `dtype`; complex stays complex."""
    real = jnp.finfo(dtype).dtype
    if named is None:
        named = jnp.dtype(real if jnp.finfo(real).bits >= 32 else jnp.float32)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(jnp.complex128 if jnp.finfo(named).bits == 64 else jnp.complex64)
    return named


def named_dtypes(dtype: Tree, params: Tree) -> Tree:
    """Returns the dtype named for each leaf, or None: `dtype` is a prefix of the tree of the parameters."""
    remedy = "Name one dtype, or one (or None) for each branch."
    return for_each_leaf("accumulator_dtype", dtype, params, remedy, is_leaf=lambda node: node is None)


def for_each_leaf(
    name: str, option: Tree, tree: Tree, remedy: str, of: str = "the parameters", is_leaf: Any = None
) -> Tree:
    """Returns the value of an option for each leaf of a tree, of which it is a prefix."""
    try:
        return compilers.each_leaf(option, tree, is_leaf)
    except ValueError as error:
        raise ValueError(
            f"{name} must be a prefix of the tree of {of}: {name} has {jax.tree.structure(option, is_leaf=is_leaf)}, "
            f"and the tree is {jax.tree.structure(tree)}. {remedy}"
        ) from error


def emitted_dtype(grad: jnp.dtype, acc: jnp.dtype, emit_dtype: jnp.dtype | str | None) -> jnp.dtype:
    """Returns the dtype in which the inner optimizer sees the gradient."""
    if emit_dtype is None:
        return acc
    return grad if isinstance(emit_dtype, str) else accumulator_dtype(grad, emit_dtype)


def strong(tree: Tree) -> Tree:
    """Returns `tree` without weak types, which an update would not give back."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype=jnp.asarray(leaf).dtype), tree)


def cast_like(tree: Tree, like: Tree) -> Tree:
    """Returns `tree` in the dtypes of `like`; keys stay as they are, Python numbers become arrays."""

    def cast(leaf: Any, to: Any) -> Any:
        leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        dtype = to.dtype if hasattr(to, "dtype") else jnp.result_type(to)  # a Python number put there by hand
        return leaf if leaf.dtype == dtype else leaf.astype(dtype)

    return jax.tree.map(cast, tree, like)


def dtypes(tree: Tree) -> str:
    """Returns the names of the dtypes in `tree`, each once, for a message."""
    return ", ".join(dict.fromkeys(jnp.result_type(leaf).name for leaf in jax.tree.leaves(tree)))


def same_dtypes(tree: Tree, other: Tree) -> bool:
    """Returns whether two trees have the same dtypes, leaf by leaf."""
    dtypes_of = lambda tree: list(map(jnp.result_type, jax.tree.leaves(tree)))
    return dtypes_of(tree) == dtypes_of(other)


def is_float0(leaf: Leaf) -> bool:
    """Returns whether `leaf` is the gradient that JAX gives to an integer parameter."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def _scale(grad: jax.Array, weight: Weight, counts: tracing.Flag) -> jax.Array:
    """Returns `weight * grad` where it counts, and zeros elsewhere."""
    if isinstance(weight, jax.Array):
        grad = grad * along_rows(weight, grad).astype(grad.dtype)
    elif weight != 1.0:
        grad = grad * weight
    return grad if counts is True else jnp.where(along_rows(counts, grad), grad, 0)
