"""Owns losses that couple examples: a forward pass in micro-batches, run again in the backward pass. Knows no loss."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _accumulator, _arguments, _split

Tree = Any


def microbatched_apply(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    batch_argnums: int | Sequence[int] = 1,
    rng_argnum: int | None = None,
) -> Callable[..., Any]:
    """Placeholder."""
    _arguments.check_one_size(num_microbatches, microbatch_size)
    count = _arguments.as_positive("num_microbatches", num_microbatches)
    size = _arguments.as_positive("microbatch_size", microbatch_size)
    roles = {"batch_argnums": _arguments.as_argnums("batch_argnums", batch_argnums), "rng_argnum": rng_argnum}

    @functools.wraps(fun)
    def applied(*args: Any, **kwargs: Any) -> Any:
        numbers = _arguments.as_roles(roles, len(args))
        batch_numbers, rng_number = numbers["batch_argnums"], numbers["rng_argnum"]
        batches = [args[n] for n in batch_numbers]
        _arguments.check_keys(batches)
        split = _split.split_rows(batches, count, size)
        rest = [None if n in batch_numbers else arg for n, arg in enumerate(args)]
        leaves, treedef = jax.tree.flatten(rest)
        opened = [_opened(leaf) for leaf in leaves]

        @jax.checkpoint
        def one(opened: list[Any], micro_batches: Sequence[Tree], index: Any) -> Any:
            micro_args = treedef.unflatten([_grafted(*pair) for pair in opened])
            for number, rows in zip(batch_numbers, micro_batches, strict=True):
                micro_args[number] = rows
            if rng_number is not None:
                micro_args[rng_number] = jax.random.fold_in(micro_args[rng_number], index)
            return fun(*micro_args, **kwargs)

        return _mapped(functools.partial(one, opened), split, batches)

    return applied


def _mapped(one: Callable[[Sequence[Tree], Any], Any], split: _split.Split, batches: list[Tree]) -> Any:
    """Returns the outputs of all micro-batches, in the order of the rows."""
    stacked = _split.stacked(split, batches)
    leaves, treedef = jax.tree.flatten(stacked)
    scanned = [jnp.moveaxis(leaf, 1, 0) for leaf in leaves if _split.is_split(leaf)]

    def micro(xs: tuple[list[jax.Array], jax.Array]) -> Any:
        rows = iter(xs[0])
        return one(treedef.unflatten([next(rows) if _split.is_split(leaf) else leaf for leaf in leaves]), xs[1])

    whole = jax.lax.map(micro, (scanned, jnp.arange(split.whole)))
    _arguments.check_rows(whole, split.size)
    whole = jax.tree.map(lambda out: jnp.moveaxis(out, 0, 1).reshape(-1, *out.shape[2:]), whole)
    if not split.rest:
        return whole
    rest = one(_split.remainder(split, batches), split.whole)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), whole, rest)


# The gradient of a narrow leaf (bfloat16, say) is a sum over micro-batches, so it is added in float32: `_opened` lends
# the leaf an array of zeros that no forward pass reads, `_grafted` sends the gradient of each micro-batch there, cast
# up, and the backward pass of `_opened` casts the sum down.


def _opened(leaf: Any) -> tuple[Any, Any]:
    dtype = jnp.result_type(leaf)
    narrow = jnp.issubdtype(dtype, jnp.inexact) and _accumulator.accumulator_dtype(dtype, None) != dtype
    return _lend(leaf) if narrow else (leaf, None)


def _grafted(leaf: Any, wide: jax.Array | None) -> Any:
    return leaf if wide is None else _graft(leaf, wide)


@jax.custom_vjp
def _lend(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
    return leaf, jnp.zeros_like(leaf, dtype=_accumulator.accumulator_dtype(leaf.dtype, None))


_lend.defvjp(
    lambda leaf: (_lend(leaf), None), lambda _, cotangents: (cotangents[0] + cotangents[1].astype(cotangents[0].dtype),)
)


@jax.custom_vjp
def _graft(leaf: jax.Array, wide: jax.Array) -> jax.Array:
    return leaf


_graft.defvjp(
    lambda leaf, wide: (leaf, None),
    lambda _, cotangent: (None, cotangent.astype(_accumulator.accumulator_dtype(cotangent.dtype, None))),
)
