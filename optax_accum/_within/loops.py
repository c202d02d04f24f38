"""The loop over micro-batches: a scan, or one by one. Micro-batches of weight zero are not run."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import adding, compilers, evaluation, flags, tracing
from optax_accum._core.types import Flag
from optax_accum._space import meshes
from optax_accum._within import partial


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


def folded(
    part: Callable[[Any, list[Any]], list[Any]],
    xs: list[jax.Array],
    count: int,
    joins: Sequence[str | None],
    dtypes: Sequence[Any],
) -> list[jax.Array]:
    """Runs `part(index, rows of xs)` for each micro-batch; its results are joined, or stacked where `joins` has None.

    A sum is added where `part` makes it, in place, in the dtype that is named.
    """
    if not tracing.is_staged():
        return _folded_eagerly(part, xs, count, joins, dtypes)

    def slices(index: Any) -> list[Any]:
        return [jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False) for leaf in xs]

    program = jax.make_jaxpr(lambda index: part(index, slices(index)))(jnp.int32(0))
    kinds = program.out_avals

    def step(index: Any, state: list[Any]) -> list[Any]:
        sums = [adding.Sum(leaf) if how == "sum" else None for leaf, how in zip(state, joins, strict=True)]
        results = adding.run(program, [index], sums)
        after: list[Any] = []
        for leaf, result, how, added in zip(state, results, joins, sums, strict=True):
            if added is not None:
                after.append(added.total)
            elif how is None:
                after.append(jax.lax.dynamic_update_index_in_dim(leaf, result, index, 0))
            else:
                after.append(partial.TOGETHER[how](leaf, result))
        return after

    start: list[Any] = []
    for kind, how, dtype in zip(kinds, joins, dtypes, strict=True):
        sizes, number = ([count], 0) if how is None else ([], partial.NOTHING[how](kind.dtype))
        leaf = meshes.filled(sizes, kind, number, dtype)
        start.append(evaluation.varying_as([leaf], [kind])[0])
    return jax.lax.fori_loop(0, count, step, start)


def _folded_eagerly(part: Any, xs: Any, count: int, joins: Sequence[str | None], dtypes: Sequence[Any]) -> list[Any]:
    found = [part(jnp.int32(index), [leaf[index] for leaf in xs]) for index in range(count)]
    results: list[Any] = []
    for leaves, how, dtype in zip(zip(*found, strict=True), joins, dtypes, strict=True):
        together = jnp.stack(leaves) if how is None else functools.reduce(partial.TOGETHER[how], leaves)
        results.append(together if dtype is None else together.astype(dtype))
    return results
