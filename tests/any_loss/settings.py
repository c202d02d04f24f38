"""What losses that are drawn are made of: a model of rows, what these are compared with, noise, a dtype, a scale, sizes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Models: parameters, inputs [n, ...], and a function of both to outputs [n, out], or [n, length, out].

ACTIVATIONS = {"tanh": jnp.tanh, "gelu": jax.nn.gelu, "softplus": jax.nn.softplus, "sin": jnp.sin}
WIDTHS, LENGTH = (3, 4, 6, 8), 5


def normal(random, *shape):
    return jnp.asarray(random.normal(size=shape) / shape[0] ** 0.5, jnp.float32)


def dense(random, rows):
    width, activation = random.choice(WIDTHS), ACTIVATIONS[random.choice(list(ACTIVATIONS))]
    params = [{"w": normal(random, width, width), "b": normal(random, width)} for _ in range(random.integers(1, 4))]

    def outputs(params, h):
        for layer in params:
            h = activation(h @ layer["w"] + layer["b"][None])
        return h

    return params, random.normal(size=(rows, width)), outputs


def conv(random, rows):
    width = random.choice(WIDTHS)
    params = {"kernel": normal(random, 3, 1, width) / 2, "out": normal(random, width, width)}

    def outputs(params, h):
        h = jax.lax.conv_general_dilated(h, params["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return jax.nn.silu(h).mean(1) @ params["out"]

    return params, random.normal(size=(rows, 6, 1)), outputs


def attention(random, rows):
    width = int(random.choice(WIDTHS))
    params = {"qkv": normal(random, width, 3 * width), "out": normal(random, width, width)}

    def outputs(params, h):
        h = h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-3)
        q, k, v = jnp.split(h @ params["qkv"], 3, axis=-1)
        scores = jnp.where(np.tri(LENGTH, dtype=bool)[None], q @ k.mT / width**0.5, -1e4)
        return h + jax.nn.softmax(scores) @ v @ params["out"]

    return params, random.normal(size=(rows, LENGTH, width)), outputs


def embedding(random, rows):
    width, vocabulary = random.choice(WIDTHS), random.integers(5, 20)
    params = {"table": normal(random, vocabulary, width) * 2, "out": normal(random, width, width)}
    outputs = lambda params, tokens: jnp.tanh(params["table"][tokens].mean(1)) @ params["out"]
    return params, random.integers(vocabulary, size=(rows, LENGTH)), outputs


def tied(random, rows):
    width = random.choice(WIDTHS)
    params = {"w": normal(random, width, width), "b": normal(random, width)}
    outputs = lambda params, h: jnp.tanh(h @ params["w"] + params["b"][None]) @ params["w"].T
    return params, random.normal(size=(rows, width)), outputs


def recurrent(random, rows):
    width = random.choice(WIDTHS)
    params = {"in": normal(random, width, width), "state": normal(random, width, width)}

    def outputs(params, h):
        step = lambda state, x: (jnp.tanh(x @ params["in"] + state @ params["state"]),) * 2
        return jnp.swapaxes(jax.lax.scan(step, jnp.zeros_like(h[:, 0]), jnp.swapaxes(h, 0, 1))[1], 0, 1)

    return params, random.normal(size=(rows, LENGTH, width)), outputs


MODELS = (dense, dense, conv, attention, embedding, tied, recurrent)

# What outputs are compared with: a loss for each row [n], or for each place in it [n, length].


def squared(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2, -1)


def huber(outputs, batch):
    error = jnp.abs(outputs - batch["y"])
    return jnp.mean(jnp.where(error < 1, error**2 / 2, error - 0.5), -1)


def cross_entropy(outputs, batch):
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), batch["label"][..., None], -1)[..., 0]


COMPARISONS = (squared, huber, cross_entropy)

# Noise: what a key does to outputs [n, ..., out]. The keep rates reach from a coin to a rare outcome.


def dropout(rate, key, h):
    return jnp.where(jax.random.bernoulli(key, rate, h.shape), h / rate, 0)


def gaussian(rate, key, h):
    return h + (1 - rate) * jax.random.normal(key, h.shape, h.dtype)


def stochastic_depth(rate, key, h):
    return jnp.where(jax.random.bernoulli(key, rate), jnp.sin(2 * h), h)


def drop_path(rate, key, h):
    keep = jax.random.bernoulli(key, rate, (len(h),) + (1,) * (h.ndim - 1))
    return jnp.where(keep, jnp.sin(2 * h), h)


NOISES, RATES = (dropout, gaussian, stochastic_depth, drop_path), (0.5, 0.8, 0.9, 0.95)


@dataclasses.dataclass(frozen=True)
class Setting:
    """All that a loss is made of, but how its rows are averaged."""

    model: Any
    params: Any
    batch: dict
    comparison: Any
    noise: Any  # a function of a key and outputs, or None
    dtype: str  # of the parameters, or of what is computed with them
    scale: float
    args: tuple
    parts: int

    def outputs(self, params, batch, *key):
        """After noise."""
        narrow = {"float32": jnp.float32, "float16": jnp.float16}.get(self.dtype, jnp.bfloat16)
        cast = lambda x: x.astype(narrow) if jnp.issubdtype(x.dtype, jnp.floating) else x
        h = self.model(jax.tree.map(cast, params), cast(batch["x"]))
        return (self.noise(key[0], h) if self.noise else h).astype(jnp.float32)

    def flat(self, params, batch, *key):
        """The outputs as [n, features]."""
        h = self.outputs(params, batch, *key)
        return h.reshape(len(h), -1)

    def each(self, params, batch, *key):
        """The loss of each row [n], or of each place in it [n, length]."""
        return self.scale * self.comparison(self.outputs(params, batch, *key), batch)


def setting(random, *, noise=0.3, dtype="float32", group=1):
    """Draws a setting; `noise` is the chance of it."""
    pick = lambda table: table[random.integers(len(table))]
    rows = group * pick((4, 5, 6, 8, 9, 12))
    params, x, model = pick(MODELS)(random, rows)
    x = jnp.asarray(x, jnp.float32 if x.dtype.kind == "f" else jnp.int32)
    like = jax.eval_shape(model, params, x)
    far = random.random() < 0.3 and dtype != "float16"  # whose gradients would be 0
    draws, rate, rewards = random.random() < noise, pick(RATES), random.normal(size=rows)
    apply, key = pick(NOISES), pick((jax.random.key, jax.random.PRNGKey))(int(random.integers(1000)))
    mask = np.arange(LENGTH)[None] < random.integers(1, LENGTH + 1, size=(rows, 1))
    batch = {
        "x": x,
        "y": jnp.asarray(random.normal(size=like.shape), jnp.float32),
        "label": jnp.asarray(random.integers(like.shape[-1], size=like.shape[:-1])),
        "mask": jnp.asarray(random.integers(1, 6, size=rows) if like.ndim == 2 else mask, jnp.float32),
        "kept": jnp.asarray(random.permutation(rows) < rows // 2 + 1, jnp.float32),
        "place": jnp.asarray(random.permutation(rows) + 1.0, jnp.float32),
        "reward": jnp.asarray((rewards - rewards.mean()) / (rewards.std() + 1e-6), jnp.float32),
    }
    return Setting(
        model=model,
        params=jax.tree.map(lambda p: p.astype(jnp.bfloat16), params) if dtype == "bfloat16" else params,
        batch=batch,
        comparison=pick(COMPARISONS),
        noise=(lambda key, h: apply(rate, key, h)) if draws else None,
        dtype=dtype,
        scale=float(10.0 ** random.integers(-12, 12)) if far else 1.0,
        args=(key,) * draws,
        parts=int(random.integers(2, min(5, rows // group) + 1)),
    )
