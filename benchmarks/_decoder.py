"""What a decoder's step holds at its peak: with each mechanism and peer."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_accum
from benchmarks._measure import Tree
from benchmarks._one_device import Facts, alone, compiled, size
from optax_accum.accelerators import Target


class Sizes(NamedTuple):
    """Those of a decoder of 0.17e9 parameters."""

    model: int = 1024
    heads: int = 8
    depth: int = 12
    vocabulary: int = 8192


FULL, LENGTH = Sizes(), 512


def decoder(
    cast: Callable[[Tree], Tree] = lambda w: w, sizes: Sizes = FULL
) -> tuple[Callable[[Tree, Tree], jax.Array], Tree]:
    """Returns the loss of a decoder of stacked layers, each run again in the backward pass, and its parameters.

    Each layer is given its parameters as `cast` returns them.
    """
    model, heads, depth, vocabulary = sizes
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    params = {
        "embedding": shape(vocabulary, model),
        "layers": {
            "qkv": shape(depth, model, 3 * model),
            "out": shape(depth, model, model),
            "up": shape(depth, model, 4 * model),
            "down": shape(depth, 4 * model, model),
        },
    }

    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    @jax.checkpoint
    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        w = cast(w)
        qkv = (norm(x) @ w["qkv"]).reshape(*x.shape[:2], 3, heads, model // heads)
        attended = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
        x = x + attended.reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        embedding = cast(params["embedding"])
        x, _ = jax.lax.scan(layer, embedding[tokens[:, :-1]], params["layers"])
        logits = (norm(x) @ embedding.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss, params


def decoders(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields the memory of a decoder's step with Adam and 8 micro-batches: all that it holds at its peak."""
    loss, params = decoder()
    inner = optax.adam(1e-3)
    tokens = lambda rows: jax.ShapeDtypeStruct((rows, LENGTH + 1), jnp.int32)

    def memory(step: Callable[..., Any], tx: Any, rows: int) -> Facts:
        stats = compiled(on, step, params, jax.eval_shape(tx.init, params), tokens(rows)).memory_analysis()
        held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        return {"memory, P": (held + stats.temp_size_in_bytes) / size(params)}

    def update(gradient: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, state, batch: alone(inner)(params, state, gradient(params, batch)[1])

    ours = functools.partial(optax_accum.value_and_grad, loss, num_microbatches=8)
    microbatch = optax.microbatching.microbatch(
        jax.value_and_grad(loss), argnums=1, microbatch_size=1, accumulator=optax.microbatching.AccumulationType.MEAN
    )
    tx, peer = optax_accum.accumulate_gradients(inner, 8), optax.MultiSteps(inner, 8)

    def two(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        return optax_accum.apply_gradients(tx, jax.grad(loss)(params, batch), state, params)

    def then(wrapper: Any) -> Callable[..., Any]:
        return lambda params, state, batch: alone(wrapper)(params, state, jax.grad(loss)(params, batch))

    fused = optax_accum.value_and_apply_gradients(loss, tx)
    yield "value_and_grad, in place", memory(update(ours()), inner, 8)
    yield "optax.microbatch", memory(update(microbatch), inner, 8)
    yield "value_and_apply_gradients", memory(lambda *args: fused(*args)[1:], tx, 1)
    yield "gradient, then apply_gradients", memory(two, tx, 1)
    yield "gradient, then update", memory(then(tx), tx, 1)
    yield "gradient, then MultiSteps", memory(then(peer), peer, 1)
    # Above is what tests/accelerators/test_facts.py asks; each takes a TPU's compiler half a minute.
    yield "whole batch", memory(update(jax.value_and_grad(loss)), inner, 8)
