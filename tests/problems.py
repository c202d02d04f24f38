"""Small problems with known gradients, and the ways to cut their batches, shared by the tests."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_accum

# Options of `reduce_microbatches` alone, which no message of another function names.
GONE = r"\b(whole_argnums|group_size|weight_fn|weight_of|rng_argnum|carry_argnum|aux_reduction|stacked|unroll)\b"


def normal(seed, *shape):
    """Numbers that compile no program, which JAX's own would, and in each worker: modules are imported by all."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def params(dtype=jnp.float32):
    """A tree with a matrix, a vector, a scalar and an empty leaf; it mixes nothing but shapes."""
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(4, 3)), dtype),
        "b": [jnp.asarray(rng.normal(size=3), dtype), jnp.asarray(0.5, dtype)],
        "empty": jnp.zeros((0, 2), dtype),
        "none": None,
    }


def rows(n, seed=1):
    """Returns a batch: inputs [n, 4] and targets [n, 3]."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(n, 4)), jnp.float32), jnp.asarray(rng.normal(size=(n, 3)), jnp.float32)


def loss(params, batch):
    """The mean over rows of a squared error."""
    x, y = batch
    bias, scale = params["b"]
    prediction = scale * (x @ params["w"] + bias[None])
    return jnp.mean(jnp.sum((prediction - y) ** 2, axis=-1)) + jnp.sum(params["empty"])


grad = jax.jit(jax.grad(loss))  # compiled once for each size of a micro-batch, whatever the path


def cut(batch, sizes):
    """Returns consecutive micro-batches of the given sizes."""
    ends = np.cumsum(sizes)
    return [jax.tree.map(lambda x, a=end - size, b=end: x[a:b], batch) for end, size in zip(ends, sizes, strict=True)]


def whole_batch_update(inner, start, batch, **extra):
    """One update of `inner` on the whole batch: what every path must give."""
    updates, state = inner.update(grad(start, batch), inner.init(start), start, **extra)
    return optax.apply_updates(start, updates), state


def across_calls(inner, start, batches, every="count", **options):
    """One window through `apply_gradients`, each micro-batch weighted by its rows."""
    tx = optax_accum.accumulate_gradients(inner, len(batches) if every == "count" else every, **options)
    state, now = tx.init(start), start
    for batch in batches:
        now, state = optax_accum.apply_gradients(tx, grad(now, batch), state, now, weight=len(batch[0]))
    return now, state
