"""Owns the gradient of an NNX module within a call. Knows no optimizer."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import optax_accum
from optax_accum.flax import _window
from optax_accum.flax._batch_norm import batch_moments, merge_batch_stats
from optax_accum.flax._nnx_variables import batch_norms, own_streams

Tree = Any


def value_and_grad(
    fun: Callable[..., Any], *, wrt: Any = nnx.Param, has_aux: bool = False, **options: Any
) -> Callable[..., tuple[Any, Any]]:
    """Does what `nnx.value_and_grad(fun)` does, one micro-batch after the other.

    Args:
      fun: a loss `fun(model, batch, *args)`, whose first argument is an NNX module; it may change the values of the
        module's variables, and make no new ones (`sow` does). All other arguments are arrays and trees of them, given
        by position: an `nnx.Rngs` belongs into the module.
      wrt: the variables to differentiate, such as `nnx.LoRAParam`: all others cost no accumulator.
      has_aux: `fun` returns `(loss, aux)`.
      **options: those of `optax_accum.value_and_grad`: `num_microbatches` or `microbatch_size`, `weight_fn`, ...

    Returns:
      A function of the arguments of `fun`, which returns `(value, grads)` and leaves the model's other state as the
      batch leaves it.

    Guarantees:
      | state of the model | after the call |
      |---|---|
      | random streams | have advanced at each micro-batch; with `reduce_axes`, each device has streams of its own |
      | `nnx.BatchNorm` | one momentum step, with the statistics of all rows (`merge_batch_stats`) |
      | whatever else there is | went from one micro-batch to the next |

    Example:
      >>> import jax.numpy as jnp, optax_accum.flax
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> loss = lambda model, x: jnp.mean(model(x) ** 2)
      >>> value, grads = optax_accum.flax.value_and_grad(loss, num_microbatches=2)(model, jnp.ones((4, 2)))
      >>> grads["kernel"].shape
      (2, 1)
    """
    reduction, axes = options.pop("aux_reduction", "mean"), options.get("reduce_axes")
    batch_argnums, reduced = options.get("batch_argnums", 1), options.get("reduced", True)

    @functools.wraps(fun)
    def run(model: Any, *args: Any) -> tuple[Any, Any]:
        running, momenta = batch_norms(model)
        graph, params, stats, rest = nnx.split(model, wrt, running, ...)

        def pure(params: Any, *args_and_state: Any) -> tuple[jax.Array, Any]:
            *args, stats, rest = args_and_state
            copies = jax.tree.map(lambda leaf: leaf, (params, stats, rest))  # variables of this trace
            micro = nnx.merge(graph, *copies)
            streams = own_streams(micro, axes) if axes else None
            out = fun(micro, *args)
            loss, aux = out if has_aux else (out, None)
            if axes:
                nnx.update(micro, streams)
            _, _, new, rest = nnx.split(micro, wrt, running, ...)
            old, rows = nnx.to_pure_dict(stats), _window.num_rows([(params, *args)[n] for n in _numbers(batch_argnums)])
            moments = batch_moments(nnx.to_pure_dict(new), old, momenta(old))
            return loss, ((_window.weighted(moments, jnp.float32(rows)), aux), rest)

        cut = optax_accum.value_and_grad(
            pure, has_aux=True, carry_argnum=len(args) + 2, aux_reduction=("sum", reduction), **options
        )
        (loss, ((sums, aux), rest)), grads = cut(params, *args, stats, rest)
        old, moments = nnx.to_pure_dict(stats), _window.mean(_window.over_devices(sums, axes, reduced=reduced))
        nnx.replace_by_pure_dict(stats, merge_batch_stats(moments, old, momenta(old)))
        nnx.update(model, stats, rest)
        return ((loss, aux) if has_aux else loss), grads

    return run


def _numbers(argnums: int | Sequence[int]) -> Sequence[int]:
    return (argnums,) if isinstance(argnums, int) else argnums
