"""The loop over micro-batches: a scan, or one by one. Micro-batches of weight zero are not run."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import compilers, dtypes, evaluation, flags, memory, tracing
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


def mapped_once(
    fun: Callable[[Any, Any, Any, Any], Any],
    constants: Any,
    shared: Any,
    xs: list[jax.Array],
    count: int,
    *,
    passes: Sequence[bool],
    to_host: Sequence[bool],
) -> tuple[list[jax.Array], Any, list[jax.Array]]:
    """Maps `fun(constants, shared, index, x) -> list` over `xs`; JAX can differentiate it once, in reverse.

    JAX stacks the results of a loop in zeros, and XLA makes the zeros of all loops of a program beforehand: memory for
    all at the same time. Here an array begins where its loop does, filled with a number that the program has by then.
    Constants have no gradient. `to_host` says which results go to the memory of the host; a gradient goes to the memory
    where its array lies.

    Returns the results, `shared`, and `xs`. A later loop must take `shared` and `xs` from here: the gradient of this
    loop is then added to the later loop's. `passes` says for which `xs` this is done, micro-batch by micro-batch.
    """

    def passed(leaves: Sequence[Any]) -> list[Any]:
        return [leaf for leaf, passes_ in zip(leaves, passes, strict=True) if passes_]

    @jax.custom_vjp
    def run(constants: Any, shared: Any, xs: Any) -> Any:
        def iteration(_: None, slices: Any) -> Any:
            return None, fun(constants, shared, *slices)

        _, results = _stacked(iteration, None, (jnp.arange(count), xs), to_host)
        return results, shared, passed(xs)

    def forward(*args: Any) -> Any:
        return run(*args), args

    def backward(args: Any, cotangents: Any) -> Any:
        constants, shared, xs = args
        cotangents, totals, later = (
            [leaf for leaf in jax.tree.leaves(cts) if not dtypes.is_float0(leaf)] for cts in cotangents
        )
        moves = list(map(is_inexact, xs))  # an integer has no gradient
        adds = [passes_ for passes_, moving in zip(passes, moves, strict=True) if moving]
        to_host = [compilers.on_host(leaf) for leaf, moving in zip(xs, moves, strict=True) if moving]

        def iteration(totals: Any, slices: Any) -> Any:
            index, x, cotangents, later = slices
            numbers, filled = parted((shared, x), is_inexact)

            def of_numbers(numbers: Any) -> Any:
                shared, x = filled(numbers)
                return [leaf for leaf in fun(constants, shared, index, x) if is_inexact(leaf)]

            grads = jax.vjp(of_numbers, numbers)[1](cotangents)[0]
            of_shared, of_x, rest = grads[: len(totals)], grads[len(totals) :], iter(later)
            of_x = [grad + next(rest) if added else grad for grad, added in zip(of_x, adds, strict=True)]
            return list(map(jnp.add, totals, of_shared)), of_x

        totals, of_xs = _stacked(iteration, totals, (jnp.arange(count), xs, cotangents, later), to_host)
        grads = iter([*totals, *of_xs])
        return None, *jax.tree.map(lambda leaf: next(grads) if is_inexact(leaf) else None, (shared, xs))

    run.defvjp(forward, backward)
    results, shared, after = run(constants, shared, xs)
    rest = iter(after)
    return results, shared, [next(rest) if passes_ else leaf for leaf, passes_ in zip(xs, passes, strict=True)]


def _stacked(
    iteration: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, to_host: Sequence[bool]
) -> tuple[Any, list[jax.Array]]:
    """Like `jax.lax.scan`; its buffers begin with a number of the last leaf of `xs`, or on the host.

    Each array differs between devices where an iteration's does, and along no other axes.
    """
    leaves = jax.tree.leaves(xs)
    count, last = len(leaves[0]), leaves[-1]

    def slices(index: Any) -> Any:
        return memory.to_device(jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, False), xs))

    after, shapes = jax.eval_shape(iteration, carry, slices(0))
    carry = jax.tree.map(lambda leaf, kind: evaluation.varying_as([leaf], [kind])[0], carry, after)
    explicit = compilers.explicit_sharding(last) is not None  # its first number is on one device alone
    begin = jnp.zeros([]) if explicit or not last.size or compilers.on_host(last) else jnp.real(last.ravel()[0])

    def empty(row: Any, on_host: bool) -> jax.Array:
        differs_more = compilers.varying_axes(begin) - compilers.varying_axes(row)
        (number,) = evaluation.varying_as([jnp.zeros([]) if on_host or differs_more else begin], [row])
        buffer = meshes.filled([count], row, number)
        return compilers.moved(buffer, to_host=True) if on_host else buffer

    def stored(buffer: jax.Array, row: jax.Array, index: Any, on_host: bool) -> jax.Array:
        row = compilers.moved(row[None], to_host=True) if on_host else row[None]
        return jax.lax.dynamic_update_slice_in_dim(buffer, row, index, 0)

    def step(index: Any, carried: Any) -> Any:
        carry, buffers = carried
        carry, rows = iteration(carry, slices(index))
        triples = zip(buffers, rows, to_host, strict=True)
        return carry, [stored(buffer, row, index, on_host) for buffer, row, on_host in triples]

    return jax.lax.fori_loop(0, count, step, (carry, list(map(empty, shapes, to_host))))
