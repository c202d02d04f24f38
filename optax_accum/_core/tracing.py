"""Owns what is known while tracing: is a call traced, is it differentiated again, which flags are known."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

Tree = Any
Flag = bool | jax.Array  # a Python bool is known when tracing
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def is_staged() -> bool:
    """Returns whether a program is being traced, as inside `jit`, rather than run."""
    return isinstance(jnp.zeros([]), Tracer)


def traced(fun: Callable[..., Any], *args: Any) -> tuple[Any, Tree]:
    """Returns `fun`, traced, and the shapes of what it returns.

    Outside `jit` it may look at values, which no trace has: then it is run, and what it returned is all that is known.
    """
    try:
        return jax.make_jaxpr(fun, return_shape=True)(*args)
    except NEEDS_VALUES:
        if is_staged():
            raise
    result = fun(*args)
    return jax.make_jaxpr(lambda *_: result, return_shape=True)(*args)


def is_again(args: Tree) -> bool:
    """Returns whether JAX may differentiate again, with no `jit` between, what is computed from `args`.

    Outside `jit` it may also differentiate what functions close over, so there it always may.
    """
    return not is_staged() or is_differentiated(args)


def known(flag: Flag) -> Flag:
    """Returns a Python bool where the value is known: outside `jit`, a branch would be compiled at every call."""
    return flag if isinstance(flag, Tracer) else bool(flag)


def is_differentiated(tree: Tree) -> bool:
    """Returns whether JAX is differentiating what is computed from `tree`, with no `jit` between."""
    seen: list[bool] = []
    _watched(tree, Tracer, lambda: seen.append(True))
    return bool(seen)


def is_batched(tree: Tree) -> bool:
    """Returns whether `jax.vmap` runs over some of these arrays, with no `jit` between."""
    seen: list[bool] = []

    @jax.custom_batching.custom_vmap
    def identity(leaves: list[Any]) -> list[Any]:
        return leaves

    @identity.def_vmap
    def _(axis_size: int, in_batched: Any, leaves: list[Any]) -> tuple[list[Any], Any]:
        seen.append(True)
        return leaves, in_batched[0]

    traced = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, Tracer)]
    identity(jax.lax.stop_gradient(traced))  # a custom_vmap is not always differentiated
    return bool(seen)


def refuse_differentiation(tree: Tree, message: str) -> Tree:
    """Returns `tree`; whoever differentiates it after this call, through a `jit` between, gets the message."""

    def refuse() -> None:
        raise ValueError(message)

    return _watched(tree, jax.Array, refuse)


def _watched(tree: Tree, kind: type, differentiated: Callable[[], None]) -> Tree:
    """Returns `tree`; calls a function when JAX differentiates its leaves of a kind."""

    @jax.custom_jvp
    def identity(leaves: list[Any]) -> list[Any]:
        return leaves

    @identity.defjvp
    def _(leaves: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        differentiated()
        return leaves[0], tangents[0]

    inexact, filled = parted(tree, lambda leaf: isinstance(leaf, kind) and jnp.issubdtype(leaf.dtype, jnp.inexact))
    return filled(identity(inexact)) if inexact else tree


def inner_programs(equation: Any) -> Iterator[Any]:
    """Yields the programs inside an equation of a traced program: of a loop, a branch, a function."""
    for inner in jax.tree.leaves(list(equation.params.values())):
        program = getattr(inner, "jaxpr", inner)  # with or without its constants
        if isinstance(program, core.Jaxpr):
            yield program


def equations(program: Any) -> Iterator[Any]:
    """Yields the equations of a traced program, and of all programs inside it."""
    for equation in program.eqns:
        yield equation
        for inner in inner_programs(equation):
            yield from equations(inner)


def either(one: Flag, other: Flag) -> Flag:
    """Returns whether one of two flags is set: a Python bool where that is known when tracing."""
    if isinstance(one, bool):
        return one or other
    return other or one if isinstance(other, bool) else one | other


def negated(flag: Flag) -> Flag:
    """Returns the opposite of a flag."""
    return not flag if isinstance(flag, bool) else jnp.logical_not(flag)


def selected(flag: Flag, one: Tree, other: Tree) -> Tree:
    """Returns one of two trees: the first where the flag is set."""
    if isinstance(flag, bool):
        return one if flag else other
    return jax.tree.map(lambda one, other: jnp.where(flag, one, other), one, other)


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array that JAX can hold: NumPy has arrays of strings and of objects, too."""
    if isinstance(leaf, np.ndarray | np.generic):
        return jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype in (np.bool_, jax.dtypes.float0)
    return isinstance(leaf, jax.Array)


def parted(tree: Tree, is_one: Callable[[Any], bool]) -> tuple[list[Any], Callable[[Iterable[Any]], Tree]]:
    """Returns some of the leaves of a tree, and what puts others in their place."""
    leaves, treedef = jax.tree.flatten(tree)
    chosen = list(map(is_one, leaves))

    def filled(others: Iterable[Any]) -> Tree:
        given = iter(others)
        return treedef.unflatten([next(given) if one else leaf for leaf, one in zip(leaves, chosen, strict=True)])

    return [leaf for leaf, one in zip(leaves, chosen, strict=True) if one], filled
