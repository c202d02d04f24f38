"""Owns what a call cannot read off its arguments: is it traced, is it differentiated again, which JAX is this."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.extend import core

Tree = Any
Flag = bool | jax.Array  # a Python bool is known when tracing
_JAX = jax.__version_info__[:3]
NOT_IN_PLACE = (
    f"in_place=True needs JAX 0.11 or later for this loss: JAX {jax.__version__} adds to no slice of a parameter (p[0] "
    "or p[:n]) inside the backward pass. Leave in_place=None."
)


def is_staged() -> bool:
    """Returns whether a program is being traced, as inside `jit`, rather than run."""
    return isinstance(jnp.zeros([]), Tracer)


def is_differentiated(tree: Tree) -> bool:
    """Returns whether JAX is differentiating what is computed from `tree`, with no `jit` between."""
    seen: list[bool] = []
    _watched(tree, Tracer, lambda: seen.append(True))
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


def branch(flag: Flag, on_true: Callable[[], Any], on_false: Callable[[], Any]) -> Any:
    """Calls one of two functions when running: `lax.cond`, with branches in the order that compiles well.

    Before JAX 0.11.1 a GPU copies all that passes through a `cond`; a `switch` of the same branches it does not.
    """
    if _JAX >= (0, 11, 1):
        return jax.lax.cond(flag, on_true, on_false)
    return branch_by_index(flag, on_true, on_false)


def branch_by_index(flag: Flag, on_true: Callable[[], Any], on_false: Callable[[], Any]) -> Any:
    """Does what `branch` does where a branch communicates: there every GPU compiler copies what passes a `cond`."""
    return jax.lax.switch(jnp.asarray(flag).astype(jnp.int32), [on_false, on_true])


def kept(tree: Tree) -> Tree:
    """Returns what a branch only reads as a result of that branch, which XLA would leave out, where that tells a TPU.

    What a branch reads and does not return, the schedule of a TPU reads early: Muon's momentum of a leaf or two is then
    written before its turn, and lies there.
    """
    return _kept(tree) if jax.tree.leaves(tree) else tree


@jax.custom_jvp
def _kept(tree: Tree) -> Tree:
    return jax.lax.platform_dependent(tree, tpu=_barrier, default=lambda tree: tree)


_kept.defjvp(lambda trees, tangents: (_kept(*trees), *tangents))  # a custom_vmap has no transpose


@custom_vmap
def _barrier(tree: Tree) -> Tree:
    return jax.tree.map(jax.lax.optimization_barrier, tree)


@_barrier.def_vmap
def _(size: int, batched: list[Tree], tree: Tree) -> tuple[Tree, Tree]:
    return tree, batched[0]  # a branch becomes a select, which would read the leaves once more


def extremes(real: jax.Array) -> list[jax.Array]:
    """Returns what is finite if all of an array is: one reduction, where a CPU does not write the magnitudes first."""
    if _JAX >= (0, 10, 2):
        return [jnp.max(jnp.abs(real))]
    return [jnp.max(real), jnp.min(real)]


def traces_in_place(add: Callable[[], Any]) -> bool:
    """Returns whether JAX can trace a backward pass that adds in place: before 0.11 not through a slice."""
    if _JAX >= (0, 11, 0):
        return True
    try:
        jax.eval_shape(add)
    except TypeError:
        return False
    return True


def inner_programs(equation: Any) -> Iterator[Any]:
    """Yields the programs inside an equation of a traced program: of a loop, a branch, a function."""
    for inner in jax.tree.leaves(list(equation.params.values())):
        program = getattr(inner, "jaxpr", inner)  # with or without its constants
        if isinstance(program, core.Jaxpr):
            yield program


def parted(tree: Tree, is_one: Callable[[Any], bool]) -> tuple[list[Any], Callable[[Iterable[Any]], Tree]]:
    """Returns some of the leaves of a tree, and what puts others in their place."""
    leaves, treedef = jax.tree.flatten(tree)
    chosen = list(map(is_one, leaves))

    def filled(others: Iterable[Any]) -> Tree:
        given = iter(others)
        return treedef.unflatten([next(given) if one else leaf for leaf, one in zip(leaves, chosen, strict=True)])

    return [leaf for leaf, one in zip(leaves, chosen, strict=True) if one], filled
