"""The loop over micro-batches: a scan, or one by one. Micro-batches of weight zero are not run."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import compilers, flags, tracing
from optax_accum._core.types import Flag


def add_alive(count: int, alive: Flag, add: Callable[..., Any], totals: Any, *, static: bool) -> Any:
    """Adds the first `count` micro-batches, those that are `alive`, in order.

    Their number may be traced; a `static` loop runs all iterations, and JAX can differentiate it again. Outside `jit`
    there is no loop.
    """
    staged = tracing.is_staged()
    if not count:
        return totals
    if staged and not (isinstance(alive, bool) or static):
        alive = alive[:count]
        order = jnp.argsort(jnp.logical_not(alive), stable=True)
        return jax.lax.fori_loop(0, jnp.sum(alive), lambda step, totals: add(order[step], totals), totals)

    def iteration(index: Any, totals: Any) -> Any:
        flag = alive if isinstance(alive, bool) else alive[index]
        return if_alive(flag, functools.partial(add, index), totals, static=static)

    if staged and count > 1:
        return jax.lax.fori_loop(0, count, iteration, totals)
    for index in range(count):
        totals = iteration(index, totals)
    return totals


def if_alive(alive: Flag, add: Callable[[Any], Any], totals: Any, *, static: bool) -> Any:
    """Adds one micro-batch if it is alive: in a branch, or where none can be, in a loop of at most one iteration."""
    alive = flags.known(alive)
    if isinstance(alive, bool):
        return add(totals) if alive else totals
    if static:
        return compilers.branch(alive, lambda: add(totals), lambda: totals)
    return jax.lax.fori_loop(0, alive.astype(int), lambda _, totals: add(totals), totals)


def recomputed(fun: Callable[..., Any], args: Any) -> Callable[..., Any]:
    """`fun` under `jax.checkpoint`, unless it runs outside `jit` and is not differentiated."""
    return jax.checkpoint(fun) if tracing.is_staged() or tracing.is_differentiated(args) else fun


def mapped(fun: Callable[[Any], Any], xs: Any) -> Any:
    """Like `jax.lax.map`; outside `jit` without a loop, which would be compiled at every call."""
    if tracing.is_staged():
        return jax.lax.map(fun, xs)
    count = len(jax.tree.leaves(xs)[0])
    results = [fun(jax.tree.map(lambda leaf: leaf[iteration], xs)) for iteration in range(count)]  # noqa: B023
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)
