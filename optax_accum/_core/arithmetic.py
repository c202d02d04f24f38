"""The arithmetic of an accumulator: zeros, `where(first, 0, sum) + weight * gradient`, `sum * (1 / weight)`."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum._core import compilers
from optax_accum._core.dtypes import accumulator_dtype, is_float0, named_dtypes
from optax_accum._core.types import Flag, Tree, Weight


def zeros(params: Tree, dtype: Tree) -> Tree:
    """An empty accumulator for gradients of `params`, with a `MaskedNode` for each leaf without a gradient."""

    def empty(param: Any, named: jnp.dtype | None) -> Any:
        param = jnp.asarray(param)
        if not jnp.issubdtype(param.dtype, jnp.inexact):
            return optax.MaskedNode()  # its gradient is a float0: nothing to add
        return jnp.zeros_like(param, dtype=accumulator_dtype(param.dtype, named))

    return jax.tree.map(empty, params, named_dtypes(dtype, params))


def zeros_of(shapes: Tree, zero: float = 0) -> Tree:
    """Arrays full of `zero`, of these shapes and dtypes, float0 included."""

    def fill(leaf: jax.ShapeDtypeStruct) -> Any:
        if is_float0(leaf):
            return np.zeros(leaf.shape, leaf.dtype)
        alike = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type)
        return jnp.full_like(alike, zero)  # inside jax.shard_map not yet of one device: a `leaf` that is fails there

    return jax.tree.map(fill, shapes)


def add(acc: Tree | None, grads: Tree, weight: Weight, first: Flag, skip: Flag = False) -> Tree:
    """`acc + weight * grads`, or `weight * grads` where `first` (or where `acc` is None).

    The weight is [], or [d] with one for each partial sum of leaves [d, ...]. A weight of zero adds nothing, whatever
    the gradient holds, and so does `skip`: it selects, because `0 * nan` is nan.
    """
    counts = weight != 0 if skip is False else jnp.logical_not(skip) & (weight != 0)

    def add_leaf(grad: Any, total: Any) -> Any:
        if is_float0(grad):
            return optax.MaskedNode()
        grad = jnp.asarray(grad)
        dtype = accumulator_dtype(grad.dtype, None) if total is None else total.dtype
        wide = accumulator_dtype(dtype, None)  # a narrow accumulator still adds in float32
        weighed = _scale(grad.astype(wide), weight, counts)
        if total is None:
            return weighed
        start = total.astype(wide) if first is False else jnp.where(first, compilers.NOTHING, total.astype(wide))
        return (start + weighed).astype(dtype)

    if acc is None:
        return jax.tree.map(lambda grad: add_leaf(grad, None), grads)
    return jax.tree.map(add_leaf, grads, acc)


def divided(acc: Tree, grads: Tree, factor: Weight, dtype: jnp.dtype | str | None) -> Tree:
    """`acc * factor`, in the accumulator's dtype (for None), the gradients' own (for a string), or the one named.

    A mean is a product with one reciprocal: dividing each leaf by a traced scalar would not fuse into the optimizer.
    """

    def leaf(grad: Any, total: Any) -> Any:
        if is_float0(grad):
            return grad
        own = jnp.asarray(grad).dtype
        to = total.dtype if dtype is None else own if isinstance(dtype, str) else accumulator_dtype(own, dtype)
        return scaled(total, factor, to)

    return jax.tree.map(leaf, grads, acc)


def all_finite(tree: Tree) -> jax.Array:
    """Whether no leaf holds a NaN or an infinity, as a bool [].

    A leaf is finite if its extremes are: unlike `isfinite` of every element, that writes nothing beside the leaf.
    """
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if not is_float0(leaf)]
    reals = [real for leaf in leaves for real in _reals(leaf) if real.size]
    extremes = [extreme for real in reals for extreme in compilers.extremes(real)]
    if not extremes:
        return jnp.array(True)
    widest = max((accumulator_dtype(extreme.dtype, None) for extreme in extremes), key=lambda dtype: dtype.itemsize)
    together = jnp.stack([extreme.astype(widest) for extreme in extremes])
    return jnp.all(jnp.isfinite(together))


def squared_norm(leaf: jax.Array, dtype: Any, left: int = 0) -> jax.Array:
    """The sum of squares of a leaf, computed in a dtype, over all axes but the first `left`."""
    axes = tuple(range(left, leaf.ndim))
    return functools.reduce(operator.add, [jnp.sum(jnp.square(real.astype(dtype)), axes) for real in _reals(leaf)])


def _reals(leaf: jax.Array) -> tuple[jax.Array, ...]:
    return (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)


def scaled(leaf: jax.Array, factor: Weight, dtype: Any) -> jax.Array:
    """`leaf * factor` in a dtype, computed in at least float32; the factor is [] or [d]."""
    wide = accumulator_dtype(leaf.dtype, None)
    return (leaf.astype(wide) * along_rows(factor, leaf).astype(wide)).astype(dtype)


def along_rows(numbers: Any, leaf: jax.Array) -> jax.Array:
    """Shapes one number, or [d] with one for each row of a leaf [d, ...], to go with the leaf."""
    numbers = jnp.asarray(numbers)
    return numbers.reshape(numbers.shape + (1,) * (leaf.ndim - numbers.ndim)) if numbers.ndim else numbers


def reciprocal(weight: Weight) -> Weight:
    """`1 / weight`, and 1 for a weight of zero: such a window makes no update, and must not make a NaN."""
    return 1 / jnp.where(weight == 0, 1, weight) if isinstance(weight, jax.Array) else 1 / (weight or 1.0)


def divides(weight: Weight) -> Flag:
    """Whether a sum can be divided by this weight: not by 0, nor where the reciprocal is flushed to 0.

    A NaN can, and shows.
    """
    largest = 1 / float(jnp.finfo(jnp.result_type(weight)).tiny)
    is_larger = abs(weight) > largest
    return (weight != 0) & (jnp.logical_not(is_larger) if isinstance(weight, jax.Array) else not is_larger)


def _scale(grad: jax.Array, weight: Weight, counts: Flag) -> jax.Array:
    """`weight * grad` where it counts, and zeros elsewhere."""
    if isinstance(weight, jax.Array):
        grad = grad * along_rows(weight, grad).astype(grad.dtype)
    elif weight != 1.0:
        grad = grad * weight
    return grad if counts is True else jnp.where(along_rows(counts, grad), grad, 0)
