"""Owns the order in which micro-batches are added: in a loop, or one by one. Those of weight zero are not run."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import tracing
from optax_accum._within import splitting
from optax_accum._within.splitting import Shares


def _loop(count: int, shares: Shares, add: Callable[[Any, Any], Any], totals: Any) -> Any:
    """Adds the whole micro-batches in order; those of weight zero are not run, so their number may be traced."""
    if isinstance(shares, float):
        return add(0, totals) if count == 1 else jax.lax.fori_loop(0, count, add, totals)
    alive = splitting.live(shares)
    order = jnp.argsort(jnp.logical_not(alive), stable=True)
    return jax.lax.fori_loop(0, jnp.sum(alive), lambda step, totals: add(order[step], totals), totals)


def _loop_rest(share: Shares, add: Callable[[Any], Any], totals: Any) -> Any:
    if isinstance(share, float):
        return add(totals) if share else totals
    return jax.lax.fori_loop(0, splitting.live(share).astype(int), lambda _, totals: add(totals), totals)


def _static(count: int, shares: Shares, add: Callable[[Any, Any], Any], totals: Any) -> Any:
    """Does what `_loop` does in a loop over all, which JAX can differentiate again."""
    if isinstance(shares, float):
        return _loop(count, shares, add, totals)
    alive = splitting.live(shares)
    one = lambda index, totals: tracing.branch(alive[index], lambda: add(index, totals), lambda: totals)
    return jax.lax.fori_loop(0, count, one, totals)


def _unrolled(count: int, shares: Shares, add: Callable[[Any, Any], Any], totals: Any) -> Any:
    """Does what `_loop` does, without a loop in the compiled program."""
    for index in range(count):
        share = shares if isinstance(shares, float) else splitting.live(shares)[index]
        totals = _unrolled_rest(share, functools.partial(add, index), totals)
    return totals


def _unrolled_rest(share: Shares, add: Callable[[Any], Any], totals: Any) -> Any:
    if isinstance(share, float):
        return add(totals) if share else totals
    return tracing.branch(splitting.live(share), lambda: add(totals), lambda: totals)


LOOPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "dynamic": (_loop, _loop_rest),
    "static": (_static, _unrolled_rest),
    "unrolled": (_unrolled, _unrolled_rest),
}
