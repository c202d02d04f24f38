"""Values that all micro-batches share: the gradient of a narrow one (bfloat16) is added in float32."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_accum._core import compilers, dtypes, evaluation
from optax_accum._core.leaves import is_array
from optax_accum._core.types import Tree


class Widened(NamedTuple):
    """A narrow leaf, and zeros in float32 that no forward pass reads.

    The gradient of each micro-batch goes to the zeros, cast up; the backward pass of `_widen` adds over the devices
    and casts the sum down.
    """

    leaf: jax.Array
    zeros: jax.Array


def widened(tree: Tree, *gathers: Tree) -> Tree:
    """A narrow array becomes a `Widened`; `gathers` has for each array a function that is applied to it, too."""

    def widen(leaf: Any, gather: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
        if not is_array(leaf):
            return leaf  # a flag, a name, a function
        return Widened(*_widen(gather, leaf)) if _is_narrow(leaf) else gather(leaf)

    return jax.tree.map(widen, tree, *gathers)


def narrowed(tree: Tree) -> Tree:
    """The tree as one micro-batch sees it."""
    return jax.tree.map(lambda node: _narrow(*node) if is_widened(node) else node, tree, is_leaf=is_widened)


def is_widened(node: Any) -> bool:
    return isinstance(node, Widened)


def variable_of(leaf: jax.Array) -> jax.Array:
    """What to differentiate by in place of a leaf: the leaf, or, of a narrow one, zeros in float32."""
    if not dtypes.is_narrow(leaf.dtype):
        return leaf
    zeros = jnp.zeros_like(leaf, dtype=dtypes.accumulator_dtype(leaf.dtype, None))
    return evaluation.varying_together([zeros, leaf])[0]


def with_variable(leaf: jax.Array, variable: jax.Array) -> Any:
    """A leaf whose gradient goes to its variable: a `Widened`, if it is narrow."""
    if not dtypes.is_narrow(leaf.dtype):
        return variable
    narrow, zeros = _widen(lambda leaf: leaf, leaf)
    return Widened(narrow, zeros + variable)


def arrays_of(tree: Tree) -> list[Any]:
    """The arrays of a tree, in order; a narrow one may be widened."""
    leaves = jax.tree.leaves(tree, is_leaf=is_widened)
    return [leaf for leaf in leaves if is_array(leaf) or is_widened(leaf)]


def followed(fun: Callable[[Any], Any], node: Widened) -> Any:
    """A linear function of a narrow leaf: a `Widened`; or, where it casts to float32, a leaf of that dtype."""
    leaf, zeros = fun(node.leaf), fun(node.zeros)
    return Widened(leaf, zeros) if dtypes.is_narrow(leaf.dtype) else _narrow(leaf, zeros)


def closed_over(values: Sequence[Any], known: Tree) -> dict[int, Tree]:
    """What a function closes over, by id, with narrow values widened; {} if all of these are `known`: widened already.

    JAX traces them as the same on all devices, and they stay that: JAX adds their gradients over devices each time.
    """
    ids = set(map(id, jax.tree.leaves(known)))
    is_new = any(_is_narrow(leaf) and id(leaf) not in ids for leaf in values)
    return {id(leaf): widened(leaf) for leaf in values} if is_new else {}


def _is_narrow(leaf: Any) -> bool:
    """Whether a leaf's gradient, if JAX may ask for it, would be added in its narrow dtype."""
    may_be_asked = isinstance(leaf, Tracer) and not compilers.is_reference(leaf)
    return may_be_asked and dtypes.is_narrow(jnp.result_type(leaf))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _widen(gather: Callable[[Any], Any], leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
    gathered = gather(leaf)
    return gathered, jnp.zeros_like(gathered, dtype=dtypes.accumulator_dtype(leaf.dtype, None))


@_widen.defjvp
def _(gather: Callable[[Any], Any], primals: Any, tangents: Any) -> Any:
    wide = _widen(gather, *primals)
    return wide, (jnp.zeros_like(wide[0]), gather(tangents[0].astype(wide[1].dtype)))


@jax.custom_jvp
def _narrow(leaf: jax.Array, zeros: jax.Array) -> jax.Array:
    return leaf


@_narrow.defjvp
def _(primals: Any, tangents: Any) -> Any:
    # The tangent of the zeros, not of the leaf: for second derivatives.
    return _narrow(*primals), tangents[1].astype(primals[0].dtype)
