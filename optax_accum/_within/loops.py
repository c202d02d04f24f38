"""The loop over micro-batches: a scan, or one by one. Those of weight zero are not run."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import compilers, dtypes, flags, tracing
from optax_accum._core.leaves import is_inexact, parted
from optax_accum._core.types import Flag
from optax_accum._space import meshes


def add_alive(count: int, alive: Flag, add: Callable[..., Any], totals: Any, *, static: bool) -> Any:
    """Adds the full micro-batches that are `alive`, all or [k], in order.

    Their number may be traced; a `static` loop runs all iterations, and JAX can differentiate it again. Outside `jit`
    there is no loop.
    """
    staged = tracing.is_staged()
    if not count:
        return totals
    if staged and not (isinstance(alive, bool) or static):
        order = jnp.argsort(jnp.logical_not(alive), stable=True)
        return jax.lax.fori_loop(0, jnp.sum(alive), lambda step, totals: add(order[step], totals), totals)

    def turn(index: Any, totals: Any) -> Any:
        flag = alive if isinstance(alive, bool) else alive[index]
        return if_alive(flag, functools.partial(add, index), totals, static=static)

    if staged and count > 1:
        return jax.lax.fori_loop(0, count, turn, totals)
    for index in range(count):
        totals = turn(index, totals)
    return totals


def if_alive(alive: Flag, add: Callable[[Any], Any], totals: Any, *, static: bool) -> Any:
    """Adds one micro-batch, unless it is left out: a branch, or where none can be, a loop of at most one iteration."""
    alive = flags.known(alive)
    if isinstance(alive, bool):
        return add(totals) if alive else totals
    if static:
        return compilers.branch(alive, lambda: add(totals), lambda: totals)
    return jax.lax.fori_loop(0, alive.astype(int), lambda _, totals: add(totals), totals)


def recomputed(fun: Callable[..., Any], args: Any) -> Callable[..., Any]:
    """Returns `fun` under `jax.checkpoint`, unless it runs outside `jit` and nobody differentiates it."""
    return jax.checkpoint(fun) if tracing.is_staged() or tracing.is_differentiated(args) else fun


def mapped(fun: Callable[[Any], Any], xs: Any) -> Any:
    """Does what `jax.lax.map` does; outside `jit` without a loop, which would be compiled at every call."""
    if tracing.is_staged():
        return jax.lax.map(fun, xs)
    turns = len(jax.tree.leaves(xs)[0])
    results = [fun(jax.tree.map(lambda leaf: leaf[turn], xs)) for turn in range(turns)]  # noqa: B023
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


def mapped_once(fun: Callable[[Any, Any, Any], Any], constants: Any, shared: Any, xs: Any) -> Any:
    """Does what `mapped(lambda x: fun(constants, shared, x), xs)` does; JAX can differentiate it once, in reverse.

    What JAX stacks in a loop begins as zeros, and XLA makes the zeros of all loops of a program beforehand: memory for
    each at the same time. Here an array begins where its loop does, as a number that comes before. Constants have no
    gradient.
    """

    @jax.custom_vjp
    def run(constants: Any, shared: Any, xs: Any) -> Any:
        return _stacked(lambda _, x: (None, fun(constants, shared, x)), None, xs, like=(constants, shared))[1]

    def forward(*args: Any) -> Any:
        return run(*args), args

    def backward(args: Any, cotangents: Any) -> Any:
        constants, shared, xs = args
        cotangents = [leaf for leaf in jax.tree.leaves(cotangents) if not dtypes.is_float0(leaf)]

        def turn(totals: Any, slices: Any) -> Any:
            x, cotangents = slices
            numbers, filled = parted((shared, x), is_inexact)

            def of_numbers(numbers: Any) -> Any:
                return [leaf for leaf in jax.tree.leaves(fun(constants, *filled(numbers))) if is_inexact(leaf)]

            grads = jax.vjp(of_numbers, numbers)[1](cotangents)[0]
            return list(map(jnp.add, totals, grads[: len(totals)])), grads[len(totals) :]

        zeros = [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(shared) if is_inexact(leaf)]
        totals, stacked = _stacked(turn, zeros, (xs, cotangents), like=args)
        grads = iter([*totals, *stacked])  # an integer has none
        return None, *jax.tree.map(lambda leaf: next(grads) if is_inexact(leaf) else None, (shared, xs))

    run.defvjp(forward, backward)
    return run(constants, shared, xs)


def _stacked(turn: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, like: Any) -> tuple[Any, Any]:
    """Does what `jax.lax.scan` does; the arrays that it stacks begin as the last leaf of `xs` does.

    All of them may differ between devices where `like` does.
    """
    leaves = jax.tree.leaves(xs)
    first = jax.tree.map(lambda leaf: leaf[0], xs)
    shapes = jax.eval_shape(turn, carry, first)[1]
    explicit = compilers.explicit_sharding(leaves[-1]) is not None  # its first number is on one device alone
    begin = jnp.zeros([]) if explicit or not leaves[-1].size else jnp.real(leaves[-1].ravel()[0])
    types = compilers.varying_together(jax.tree.leaves((carry, begin)), like=[*leaves, *jax.tree.leaves(like)])
    carry, begin = jax.tree.unflatten(jax.tree.structure((carry, begin)), types)
    buffers = jax.tree.map(lambda leaf: meshes.filled(len(leaves[0]), leaf, begin), shapes)

    def step(index: Any, carried: Any) -> Any:
        carry, buffers = carried
        carry, rows = turn(carry, jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, False), xs))

        def update(buffer: Any, row: Any) -> Any:
            return jax.lax.dynamic_update_index_in_dim(buffer, row, index, 0)

        return carry, jax.tree.map(update, buffers, rows)

    return jax.lax.fori_loop(0, len(leaves[0]), step, (carry, buffers))
