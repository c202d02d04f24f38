"""Owns values that all micro-batches share: the gradient of a narrow one (bfloat16) is a sum, so it is in float32."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core

from optax_accum._core import dtypes, tracing
from optax_accum._core.leaves import is_array
from optax_accum._core.types import Tree


class Lent(NamedTuple):
    """A narrow leaf, and zeros that no forward pass reads.

    The gradient of each micro-batch goes to the zeros, cast up; the backward pass of `_lend` adds over the devices and
    casts the sum down.
    """

    leaf: jax.Array
    wide: jax.Array


def lend(tree: Tree, gathers: Tree) -> Tree:
    """Returns what a function gathers of each array, and `Lent` for those that are narrow."""

    def lent(leaf: Any, gather: Callable[[Any], Any]) -> Any:
        if not is_array(leaf):
            return leaf  # a flag, a name, a function
        return Lent(*_lend(gather, leaf)) if _is_narrow(leaf) else gather(leaf)

    return jax.tree.map(lent, tree, gathers)


def graft(tree: Tree) -> Tree:
    """Returns what was lent, as one micro-batch sees it."""
    is_lent = lambda leaf: isinstance(leaf, Lent)
    return jax.tree.map(lambda leaf: _graft(*leaf) if is_lent(leaf) else leaf, tree, is_leaf=is_lent)


class Closure:
    """What functions close over, lent as well, once for all that close over it."""

    def __init__(self, known: Tree, vary: Callable[[Any], Any]):
        """Takes what is lent already, and what makes the rest a device's own."""
        self._known, self._vary = set(map(id, jax.tree.leaves(known))), vary
        self._lent: dict[int, tuple[Any, Any]] = {}  # beside a leaf what it became: so no other has its identity

    def lend(self, leaves: Sequence[Any]) -> bool:
        """Lends these leaves, unless none is narrow or all that are were lent; returns whether it did."""
        if not any(_is_narrow(leaf) and id(leaf) not in self._known for leaf in leaves):
            return False
        for leaf in leaves:
            if id(leaf) not in self._lent:
                self._lent[id(leaf)] = leaf, lend(leaf, self._vary)
        return True

    def opened(self, fun: Callable[[Any], Any], example: Any) -> Callable[[Any], Any]:
        """Returns `fun` of an argument like the example, with what was lent of its closure grafted."""
        try:
            program, shapes = jax.make_jaxpr(fun, return_shape=True)(example)
        except tracing.NEEDS_VALUES:  # outside `jit` it may look at values
            return fun
        if not self.lend(program.consts):
            return fun

        def converted(values: Any) -> Any:
            grafted = [graft(self._lent[id(leaf)][1]) for leaf in program.consts]
            run = core.jaxpr_as_fun(program.replace(consts=grafted))
            return jax.tree.unflatten(jax.tree.structure(shapes), run(*jax.tree.leaves(values)))

        return converted


def _is_narrow(leaf: Any) -> bool:
    """Returns whether the gradient of a leaf, if JAX may ask for it, would be added in its narrow dtype."""
    dtype = jnp.result_type(leaf)
    may_be_asked = isinstance(leaf, Tracer) and jnp.issubdtype(dtype, jnp.inexact)
    return may_be_asked and dtypes.accumulator_dtype(dtype, None) != dtype


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _lend(gather: Callable[[Any], Any], leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
    gathered = gather(leaf)
    return gathered, jnp.zeros_like(gathered, dtype=dtypes.accumulator_dtype(leaf.dtype, None))


@_lend.defjvp
def _(gather: Callable[[Any], Any], primals: Any, tangents: Any) -> Any:
    lent = _lend(gather, *primals)
    return lent, (jnp.zeros_like(lent[0]), gather(tangents[0].astype(lent[1].dtype)))


@jax.custom_jvp
def _graft(leaf: jax.Array, wide: jax.Array) -> jax.Array:
    return leaf


@_graft.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _graft(*primals), tangents[1].astype(primals[0].dtype)  # that, and not the leaf: for second derivatives
