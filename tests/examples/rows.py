"""What the small trainers here train: rows of tokens, some of them padding, and a network with dropout."""

import jax
import jax.numpy as jnp
import numpy as np


def batches(size):
    """Eight batches of 16 rows, in parts of `size` rows."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(128, 5, 6)).astype("f"), rng.normal(size=(128, 5, 3)).astype("f")  # [rows, tokens, ...]
    mask = (np.arange(5) < rng.integers(1, 6, (128, 1))).astype("f")
    return [{"x": x[i : i + size], "y": y[i : i + size], "mask": mask[i : i + size]} for i in range(0, 128, size)]


def init():
    """The parameters of the network."""
    first, second = jax.random.split(jax.random.key(0))
    return {"first": 0.4 * jax.random.normal(first, (6, 16)), "second": 0.3 * jax.random.normal(second, (16, 3))}


def loss(params, batch, key, dropout):
    """The mean over the tokens that count."""
    h = jnp.tanh(batch["x"] @ params["first"])
    h = jnp.where(jax.random.bernoulli(key, 1 - dropout, h.shape), h / (1 - dropout), 0)
    return mean((h @ params["second"] - batch["y"]) ** 2, batch["mask"])


def mean(errors, mask):
    """The mean over the tokens that count, of errors [rows, tokens, 3]."""
    return jnp.sum(errors.mean(-1) * mask) / jnp.sum(mask)
