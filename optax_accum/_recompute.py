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
    """Applies a function in micro-batches, and again in the backward pass: all the outputs, the memory of one.


        microbatched_apply(fun, k)(params, batch) = fun(params, batch)

    For losses that couple examples, where no sum of micro-batch gradients is the gradient of the batch: contrastive and
    ranking losses, balances over a batch. Any loss of all outputs has the whole batch's exact gradient, with respect to
    parameters, batch and anything that `fun` closes over. The price is a second forward pass.

    Args:
      fun: `fun(params, batch)` returns a tree of arrays with one row for each example, and treats each row alone.
      num_microbatches: the largest number of micro-batches; or
      microbatch_size: the rows of a micro-batch. Exactly one of the two.
      batch_argnums: the argument, or several, that hold the batch; see `value_and_grad`.
      rng_argnum: an argument that is a key: micro-batch i gets `jax.random.fold_in(key, i)`, the same in both passes.

    Returns:
      A function of the arguments of `fun`, which returns its outputs for the whole batch, in the order of the rows.

    Raises:
      ValueError: an output without a row for each example. Otherwise as `value_and_grad`.

    Guarantees:
      | case | result | known when |
      |---|---|---|
      | the rows do not divide | one smaller micro-batch; nothing is padded or dropped | tracing |
      | bfloat16 parameters | their gradient is added in float32, and cast down once | tracing |
      | several calls in one loss (two towers) | each has its own micro-batches | tracing |
      | `fun` couples examples (BatchNorm) | not the whole batch's output: see `verify` | never |

    Example:
      In-batch softmax over 8 rows, two at a time:

      >>> import jax, jax.numpy as jnp, optax_accum
      >>> encode = lambda params, x: jnp.tanh(x @ params)
      >>> def loss(params, x, y, encode):
      ...     logits = encode(params, x) @ encode(params, y).T
      ...     return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)))
      >>> params, x, y = jnp.eye(3), jnp.ones((8, 3)), jnp.ones((8, 3))
      >>> small = optax_accum.microbatched_apply(encode, microbatch_size=2)
      >>> whole, cut = (jax.grad(loss)(params, x, y, f) for f in (encode, small))
      >>> bool(jnp.allclose(whole, cut))
      True

    References:
      L. Gao et al., *Scaling deep contrastive learning batch size under memory limited setup* (GradCache), 2021.
    """
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
