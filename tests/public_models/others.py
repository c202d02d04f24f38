"""Public models that are no transformers, restated small, with the lines that decide how rows belong together."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from benchmarks._measure import Tree

Random = np.random.Generator
KEY = jax.random.key(0)


class Model(NamedTuple):
    """A loss of `params`, a batch and more arguments."""

    loss: Callable[..., Any]
    params: Tree
    batch: Tree
    args: tuple[Any, ...] = ()
    has_aux: bool = False


Maker = Callable[[Random, int, int], Model]  # of so many rows and so wide


def normal(random: Random, *shape: int, scale: float | None = None) -> jax.Array:
    """Returns a matrix that keeps the size of what it multiplies, or numbers of a given scale."""
    scale = shape[-2] ** -0.5 if scale is None else scale
    return jnp.asarray(scale * random.normal(size=shape), jnp.float32)


def integers(random: Random, top: int, *shape: int) -> jax.Array:
    """Returns integers below `top`."""
    return jnp.asarray(random.integers(top, size=shape), jnp.int32)


def dense(random: Random, *widths: int) -> list[Tree]:
    """Returns the parameters of `mlp`."""
    return [{"w": normal(random, a, b), "b": normal(random, b, scale=0.1)} for a, b in itertools.pairwise(widths)]


def mlp(layers: list[Tree], x: jax.Array, act: Callable[[jax.Array], jax.Array] = jnp.tanh) -> jax.Array:
    """Returns dense layers with an activation between them."""
    for layer in layers[:-1]:
        x = act(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


class _ResNet(nn.Module):
    """A stem and two stages, with a BatchNorm after each convolution."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9)
        conv = functools.partial(nn.Conv, use_bias=False)
        x = nn.relu(norm()(conv(self.width, (3, 3))(x)))
        for width, strides in ((self.width, 1), (2 * self.width, 2)):
            h = nn.relu(norm()(conv(width, (3, 3), strides)(x)))
            h = norm(scale_init=nn.initializers.constant(0.5))(conv(width, (3, 3))(h))
            if h.shape != x.shape:
                x = norm()(conv(width, (1, 1), strides)(x))
            x = nn.relu(x + h)
        return nn.Dense(10)(jnp.mean(x, axis=(1, 2)))


def resnet(random: Random, rows: int, width: int) -> Model:
    """ResNet of Flax's examples: exact BatchNorm, whose statistics come out."""
    batch = {"image": normal(random, rows, 8, 8, 3, scale=1), "label": integers(random, 10, rows)}
    model = _ResNet(width)
    variables = jax.jit(model.init)(KEY, batch["image"][:2])

    def loss(params: Tree, batch: Tree, statistics: Tree) -> tuple[jax.Array, Tree]:
        variables = {"params": params, "batch_stats": statistics}
        logits, new = model.apply(variables, batch["image"], mutable=["batch_stats"])
        cross_entropy = optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch["label"], 10)).mean()
        decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params) if leaf.ndim > 1)
        return cross_entropy + 1e-4 * 0.5 * decay, new["batch_stats"]

    return Model(loss, variables["params"], batch, (variables["batch_stats"],), has_aux=True)


def vae(random: Random, rows: int, width: int) -> Model:
    """A variational autoencoder with a learned prior [1, z], which stands beside each row's posterior."""
    inputs, latent = 4 * width, width // 2
    params = {
        "encoder": dense(random, inputs, width, 2 * latent),
        "decoder": dense(random, latent, width, inputs),
        "prior_mean": normal(random, 1, latent, scale=0.1),
        "prior_log_std": normal(random, 1, latent, scale=0.1),
    }

    def loss(params: Tree, x: jax.Array, key: jax.Array) -> jax.Array:
        mean, log_std = jnp.split(mlp(params["encoder"], x), 2, axis=-1)
        z = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
        prior_mean = jnp.broadcast_to(params["prior_mean"], mean.shape)
        prior_log_std = jnp.broadcast_to(params["prior_log_std"], mean.shape)
        spread = jnp.exp(2 * (log_std - prior_log_std)) + ((mean - prior_mean) / jnp.exp(prior_log_std)) ** 2
        divergence = jnp.sum(prior_log_std - log_std + 0.5 * (spread - 1), axis=-1)
        logits = mlp(params["decoder"], z)
        return jnp.mean(jnp.sum(optax.sigmoid_binary_cross_entropy(logits, x), axis=-1) + divergence)

    return Model(loss, params, jnp.asarray(random.random((rows, inputs)) < 0.3, jnp.float32), (KEY,))


def ppo(random: Random, rows: int, width: int) -> Model:
    """PPO as in CleanRL: one `log_std` for all states, advantages normalised over the batch, a clipped value."""
    states, actions = 6, 3
    params = {
        "actor": dense(random, states, width, width, actions),
        "critic": dense(random, states, width, width, 1),
        "log_std": normal(random, 1, actions, scale=0.1),
    }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        mean = mlp(params["actor"], batch["state"])
        log_std = jnp.broadcast_to(params["log_std"], mean.shape)
        log_prob = -0.5 * ((batch["action"] - mean) / jnp.exp(log_std)) ** 2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
        entropy = jnp.sum(0.5 + 0.5 * jnp.log(2 * jnp.pi) + log_std, axis=1)
        ratio = jnp.exp(jnp.sum(log_prob, axis=1) - batch["log_prob"])
        advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
        policy = jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, 0.8, 1.2)).mean()
        value = mlp(params["critic"], batch["state"])[:, 0]
        clipped = batch["value"] + jnp.clip(value - batch["value"], -0.2, 0.2)
        missed = jnp.maximum((value - batch["return"]) ** 2, (clipped - batch["return"]) ** 2)
        return policy - 0.01 * entropy.mean() + 0.5 * 0.5 * missed.mean()

    batch = {name: normal(random, rows, scale=1) for name in ("advantage", "value", "return")}
    batch |= {"state": normal(random, rows, states, scale=1), "action": normal(random, rows, actions, scale=1)}
    return Model(loss, params, batch | {"log_prob": -4 + normal(random, rows, scale=0.3)})


def recurrent(random: Random, rows: int, width: int) -> Model:
    """A recurrent network with a learned first state for all sequences, whose padding leaves the state as it was."""
    time, inputs = 8, 4
    params = {
        "first": normal(random, width, scale=0.3),
        "in": normal(random, inputs, width),
        "h": normal(random, width, width),
        "out": dense(random, width, 10),
    }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        def step(h: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            new = jnp.tanh(x[0] @ params["in"] + h @ params["h"])
            return jnp.where(x[1][:, None] < batch["length"][:, None], new, h), None

        x = batch["x"].swapaxes(0, 1)
        places = jnp.broadcast_to(jnp.arange(time)[:, None], x.shape[:2])
        h, _ = jax.lax.scan(step, jnp.tile(params["first"][None], (x.shape[1], 1)), (x, places))
        return optax.softmax_cross_entropy_with_integer_labels(mlp(params["out"], h), batch["label"]).mean()

    batch = {"x": normal(random, rows, time, inputs, scale=1), "label": integers(random, 10, rows)}
    return Model(loss, params, batch | {"length": 1 + integers(random, time, rows)})


def dlrm(random: Random, rows: int, width: int) -> Model:
    """DLRM: bags of embeddings, of which some places are empty, and the products of all pairs of features."""
    tables, words, bag = 3, 40, 4
    params = {
        "tables": normal(random, tables, words, width, scale=0.3),
        "bottom": dense(random, 5, width, width),
        "top": dense(random, width + tables * (tables + 1) // 2, width, 1),
    }
    pairs = np.tril_indices(tables + 1, -1)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        numbers = jax.nn.relu(mlp(params["bottom"], jnp.log1p(batch["numbers"]), jax.nn.relu))
        found = params["tables"][jnp.arange(tables)[:, None], batch["words"]]
        bags = jnp.sum(jnp.where(batch["words"][..., None] > 0, found, 0), axis=2)
        features = jnp.concatenate([numbers[:, None], bags], axis=1)
        products = features @ features.mT
        chosen = jnp.concatenate([numbers, products[:, pairs[0], pairs[1]]], axis=1)
        return optax.sigmoid_binary_cross_entropy(mlp(params["top"], chosen, jax.nn.relu)[:, 0], batch["click"]).mean()

    batch = {
        "numbers": jnp.asarray(random.random((rows, 5)), jnp.float32),
        "words": integers(random, words, rows, tables, bag),
        "click": integers(random, 2, rows).astype(jnp.float32),
    }
    return Model(loss, params, batch)


def graphs(random: Random, rows: int, width: int) -> Model:
    """A graph network as in Jraph: all graphs are one, whose edges are summed into nodes, and nodes into graphs."""
    nodes, edges = 5, 8
    params = {
        "embed": dense(random, 3, width),
        "edge": [dense(random, 2 * width, width, width) for _ in range(2)],
        "node": [dense(random, 2 * width, width, width) for _ in range(2)],
        "read": dense(random, width, 1),
    }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        n = len(batch["target"])
        first = nodes * jnp.arange(n)[:, None]
        senders, receivers = ((batch[end] + first).reshape(-1) for end in ("senders", "receivers"))
        h = mlp(params["embed"], batch["nodes"].reshape(n * nodes, -1))
        for edge, node in zip(params["edge"], params["node"], strict=True):
            messages = mlp(edge, jnp.concatenate([h[senders], h[receivers]], axis=1))
            received = jax.ops.segment_sum(messages, receivers, num_segments=n * nodes)
            h = h + mlp(node, jnp.concatenate([h, received], axis=1))
        of_graphs = jax.ops.segment_sum(h, jnp.repeat(jnp.arange(n), nodes), num_segments=n)
        return jnp.mean((mlp(params["read"], of_graphs)[:, 0] - batch["target"]) ** 2)

    batch = {
        "nodes": normal(random, rows, nodes, 3, scale=1),
        "senders": integers(random, nodes, rows, edges),
        "receivers": integers(random, nodes, rows, edges),
        "target": normal(random, rows, scale=1),
    }
    return Model(loss, params, batch)


def flow(random: Random, rows: int, width: int) -> Model:
    """RealNVP with a learned scale for all rows, whose log-determinant is one number, beside those of each row."""
    size = 6
    mask = jnp.arange(size) % 2
    layers = [
        {"net": dense(random, size, width, 2 * size), "log_scale": normal(random, size, scale=0.1)} for _ in range(3)
    ]

    def loss(layers: list[Tree], x: jax.Array) -> jax.Array:
        total = jnp.zeros(x.shape[0])
        for number, layer in enumerate(layers):
            x = x * jnp.exp(layer["log_scale"])
            total += jnp.broadcast_to(jnp.sum(layer["log_scale"]), total.shape)
            kept = mask if number % 2 else 1 - mask
            shift, log_scale = jnp.split(mlp(layer["net"], x * kept), 2, axis=-1)
            log_scale = jnp.tanh(log_scale) * (1 - kept)
            x = x * jnp.exp(log_scale) + shift * (1 - kept)
            total += jnp.sum(log_scale, axis=-1)
        log_prob = jnp.sum(-0.5 * x**2 - 0.5 * jnp.log(2 * jnp.pi), axis=-1)
        return -jnp.mean(log_prob + total)

    return Model(loss, layers, normal(random, rows, size, scale=1))


def pinn(random: Random, rows: int, width: int) -> Model:
    """A physics-informed network: Burgers' equation with a learned viscosity, its first and second derivatives."""
    params = {"net": dense(random, 2, width, width, 1), "log_viscosity": jnp.float32(-2)}

    def loss(params: Tree, batch: Tree) -> jax.Array:
        u = lambda t, x: mlp(params["net"], jnp.stack([t, x]))[0]

        def residual(t: jax.Array, x: jax.Array) -> jax.Array:
            u_t, u_x = jax.grad(u, (0, 1))(t, x)
            u_xx = jax.grad(jax.grad(u, 1), 1)(t, x)
            return u_t + u(t, x) * u_x - jnp.exp(params["log_viscosity"]) * u_xx

        inside, border = batch["inside"], batch["border"]
        missed = jax.vmap(u)(border[:, 0], border[:, 1]) - batch["value"]
        return jnp.mean(jax.vmap(residual)(inside[:, 0], inside[:, 1]) ** 2) + jnp.mean(missed**2)

    batch = {name: jnp.asarray(random.uniform(-1, 1, (rows, 2)), jnp.float32) for name in ("inside", "border")}
    return Model(loss, params, batch | {"value": jnp.sin(jnp.pi * batch["border"][:, 1])})


def forces(random: Random, rows: int, width: int) -> Model:
    """Energies of molecules, padded, and forces: the gradient of the sum of all energies in all positions."""
    atoms, kinds, waves = 4, 3, 8
    params = {
        "kind": normal(random, kinds, width, scale=1),
        "filter": dense(random, waves, width, width),
        "atom": dense(random, width, width, 1),
        "shift": normal(random, kinds, scale=1),
    }
    centres = jnp.linspace(0, 3, waves)

    def energies(params: Tree, positions: jax.Array, batch: Tree) -> jax.Array:
        apart = positions[:, :, None] - positions[:, None, :]
        pair = batch["mask"][:, :, None] * batch["mask"][:, None, :] * (1 - jnp.eye(atoms))
        distance = jnp.sqrt(jnp.where(pair > 0, jnp.sum(apart**2, axis=-1), 1))
        filters = mlp(params["filter"], jnp.exp(-4 * (distance[..., None] - centres) ** 2))
        h = params["kind"][batch["kind"]]
        h = h + jnp.einsum("nij,nijc,njc->nic", pair, filters, h)
        each = mlp(params["atom"], h)[..., 0] + params["shift"][batch["kind"]]
        return jnp.sum(each * batch["mask"], axis=1)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        def total(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
            each = energies(params, positions, batch)
            return jnp.sum(each), each

        slope, energy = jax.grad(total, has_aux=True)(batch["positions"])
        missed = (slope + batch["forces"]) ** 2 * batch["mask"][..., None]
        count = jnp.sum(batch["mask"], axis=1)
        return jnp.mean(((energy - batch["energy"]) / count) ** 2) + jnp.sum(missed) / (3 * jnp.sum(count))

    batch = {
        "positions": normal(random, rows, atoms, 3, scale=1),
        "kind": integers(random, kinds, rows, atoms),
        "mask": jnp.asarray(np.arange(atoms) < random.integers(2, atoms + 1, (rows, 1)), jnp.float32),
        "energy": normal(random, rows, scale=1),
        "forces": normal(random, rows, atoms, 3, scale=1),
    }
    return Model(loss, params, batch)


MODELS: dict[str, Maker] = {
    "ResNet, exact BatchNorm": resnet,
    "VAE, learned prior": vae,
    "PPO, learned log_std": ppo,
    "RNN, learned first state": recurrent,
    "DLRM": dlrm,
    "graph network": graphs,
    "RealNVP, learned scales": flow,
    "PINN": pinn,
    "energies and forces": forces,
}
