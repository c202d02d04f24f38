"""Rarer models: packed sequences, graphs, derivatives in the loss, straight-through estimators, policies."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.any_loss.settings import normal


class Small(NamedTuple):
    """A small model: a term for each row [n], or for each place in it [n, places], and what of these counts."""

    params: Any
    batch: dict
    each: Any
    counted: Any = lambda batch: batch["mask"]

    def mean(self, params, batch):
        """The mean over what counts."""
        counted = self.counted(batch)
        return jnp.sum(counted * self.each(params, batch)) / jnp.sum(counted)


def lengths(random, rows, places):
    return jnp.asarray(np.arange(places)[None] < random.integers(1, places + 1, size=(rows, 1)), jnp.float32)


def packed(random):
    """Sequences packed into rows: attention within a segment, a term for each token but the padding."""
    rows, width, places, words = int(random.choice((6, 8, 9))), int(random.choice((3, 5))), 6, 9
    starts = np.cumsum(random.random((rows, places)) < 0.4, axis=1) + 1
    segments = jnp.asarray(starts) * lengths(random, rows, places).astype(int)
    params = {"table": normal(random, words, width) * 3, "out": normal(random, width, words)}
    tokens = jnp.asarray(random.integers(words, size=(rows, places)))

    def each(params, batch):
        h, own = params["table"][batch["tokens"]], batch["mask"]
        sees = (own[:, :, None] == own[:, None, :]) & np.tri(places, dtype=bool)[None]
        h = h + jax.nn.softmax(jnp.where(sees, h @ h.mT, -1e4)) @ h
        chosen = jax.nn.log_softmax(h @ params["out"])
        return -jnp.take_along_axis(chosen, batch["next"][..., None], -1)[..., 0]

    batch = {"tokens": tokens, "next": jnp.roll(tokens, -1, 1), "mask": segments}
    return Small(params, batch, each, lambda batch: (batch["mask"] > 0).astype(jnp.float32))


def graphs(random):
    """Graphs padded to as many nodes: two rounds of messages, a term for each node."""
    rows, width, nodes = int(random.choice((6, 8, 10))), int(random.choice((3, 4))), 5
    mask = lengths(random, rows, nodes)
    edges = jnp.asarray(random.random((rows, nodes, nodes)) < 0.5) * mask[:, :, None] * mask[:, None, :]
    params = {"first": normal(random, width, width), "second": normal(random, width, 1)}

    def each(params, batch):
        degree = 1 + batch["edges"].sum(2, keepdims=True)
        h = jnp.tanh((batch["x"] + batch["edges"] @ batch["x"]) / degree @ params["first"])
        return ((h + batch["edges"] @ h) / degree @ params["second"])[..., 0] ** 2

    x = jnp.asarray(random.normal(size=(rows, nodes, width)), jnp.float32)
    return Small(params, {"x": x, "edges": edges, "mask": mask}, each)


def of_rows(random):
    rows, width = int(random.choice((5, 6, 8, 12))), int(random.choice((1, 3, 4)))
    x, y = (jnp.asarray(random.normal(size=(rows, width)), jnp.float32) for _ in range(2))
    params = {"in": normal(random, width, 4), "out": normal(random, 4, 1)}
    return params, {"x": x, "y": y[:, 0], "mask": jnp.asarray(random.integers(1, 6, size=rows), jnp.float32)}


def network(params):
    return lambda x: (jnp.tanh(x @ params["in"]) @ params["out"])[0]


def physics(random):
    """The Laplacian of a network is to be that of a function: second derivatives in the loss."""

    def each(params, batch):
        laplacian = lambda x: jnp.trace(jax.hessian(network(params))(x))
        return (jax.vmap(laplacian)(batch["x"]) - batch["y"]) ** 2

    return Small(*of_rows(random), each)


def penalised(random):
    """A regression whose derivative by each input is to be of length 1, as in a critic."""

    def each(params, batch):
        value, slope = jax.vmap(jax.value_and_grad(network(params)))(batch["x"])
        return (value - batch["y"]) ** 2 + (jnp.sqrt(jnp.sum(slope**2, 1) + 1e-6) - 1) ** 2

    return Small(*of_rows(random), each)


def rounded(x, scale):
    return x + jax.lax.stop_gradient(jnp.round(x / scale) * scale - x)


def straight_through(random):
    """Rounded weights and activations, with the gradient of what is not rounded."""

    def each(params, batch):
        h = rounded(jnp.tanh(batch["x"] @ rounded(params["in"], 1 / 8)), 1 / 4)
        return ((h @ params["out"])[:, 0] - batch["y"]) ** 2

    return Small(*of_rows(random), each)


MODELS = (packed, graphs, physics, penalised, straight_through)


def policy(random):
    """The surrogate of PPO for one action in each row, of a model as small as two numbers."""
    rows, width, actions = int(random.choice((5, 6, 8, 12))), int(random.choice((1, 2, 6))), int(random.choice((2, 4)))
    batch = {
        "x": jnp.asarray(random.normal(size=(rows, width)), jnp.float32),
        "action": jnp.asarray(random.integers(actions, size=rows)),
        "old": jnp.asarray(-np.log(actions) + 0.05 * random.normal(size=rows), jnp.float32),
        "reward": jnp.asarray(random.normal(1, 2, size=rows), jnp.float32),
        "mask": jnp.asarray(random.integers(1, 6, size=rows), jnp.float32),
    }

    def each(params, batch):
        chosen = jax.nn.log_softmax(batch["x"] @ params["w"])[jnp.arange(len(batch["x"])), batch["action"]]
        ratio, gain = jnp.exp(chosen - batch["old"]), batch["reward"]
        return -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.25) * gain)

    return Small({"w": 0.1 * normal(random, width, actions)}, batch, each)
