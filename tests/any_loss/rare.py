"""Losses of rarer kinds, sound and with a fault each.

Packed sequences, graphs, derivatives in the loss, straight-through estimators, advantages, keys that are no arguments,
counts that only the loss knows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optax_accum
from benchmarks._measure import Tree
from tests.any_loss.settings import Maker, Problem, Random, row_count


@dataclasses.dataclass(frozen=True)
class Small:
    """A small model: a term for each row [n], or for each place in it [n, places], and what of these counts."""

    name: str
    params: Tree
    batch: dict[str, jax.Array]
    each: Callable[[Tree, Tree], jax.Array]
    counted: Callable[[Tree], jax.Array] = lambda batch: jnp.ones(row_count(batch).astype(int))

    def mean(self, params: Tree, batch: Tree) -> jax.Array:
        """Returns the mean over what counts."""
        counted = self.counted(batch)
        return jnp.sum(counted * self.each(params, batch)) / jnp.sum(counted)

    def weight(self, batch: Tree) -> jax.Array:
        """Returns how much counts."""
        return jnp.sum(self.counted(batch))

    def problem(self, random: Random, name: str, fun: Callable[..., Any], **options: Any) -> Problem:
        """Returns the loss `fun` of this model."""
        many = int(random.integers(2, min(5, len(self.batch["mask"])) + 1))
        numbers = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        says = f"{name}: {self.name}, {len(self.batch['mask'])} rows, {numbers} parameters, {many} micro-batches"
        return Problem(says, fun, self.params, self.batch, (), {"num_microbatches": many} | options)


def _normal(random: Random, *shape: int) -> jax.Array:
    return jnp.asarray(random.normal(size=shape) / shape[0] ** 0.5, jnp.float32)


def _lengths(random: Random, rows: int, places: int) -> jax.Array:
    return jnp.asarray(np.arange(places)[None] < random.integers(1, places + 1, size=(rows, 1)), jnp.float32)


def packed(random: Random) -> Small:
    """Sequences packed into rows: attention within a segment, a term for each token but the padding."""
    rows, width, places, words = int(random.choice((6, 8, 9))), int(random.choice((3, 5))), 6, 9
    starts = np.cumsum(random.random((rows, places)) < 0.4, axis=1) + 1
    segments = jnp.asarray(starts) * _lengths(random, rows, places).astype(int)
    params = {"table": _normal(random, words, width) * 3, "out": _normal(random, width, words)}
    tokens = jnp.asarray(random.integers(words, size=(rows, places)))

    def each(params: Tree, batch: Tree) -> jax.Array:
        h, own = params["table"][batch["tokens"]], batch["mask"]
        sees = (own[:, :, None] == own[:, None, :]) & np.tri(places, dtype=bool)[None]
        h = h + jax.nn.softmax(jnp.where(sees, h @ h.mT, -1e4)) @ h
        chosen = jax.nn.log_softmax(h @ params["out"])
        return -jnp.take_along_axis(chosen, batch["next"][..., None], -1)[..., 0]

    batch = {"tokens": tokens, "next": jnp.roll(tokens, -1, 1), "mask": segments}
    return Small("packed", params, batch, each, lambda batch: (batch["mask"] > 0).astype(jnp.float32))


def graphs(random: Random) -> Small:
    """Graphs padded to as many nodes: two rounds of messages, a term for each node."""
    rows, width, nodes = int(random.choice((6, 8, 10))), int(random.choice((3, 4))), 5
    mask = _lengths(random, rows, nodes)
    edges = jnp.asarray(random.random((rows, nodes, nodes)) < 0.5) * mask[:, :, None] * mask[:, None, :]
    params = {"first": _normal(random, width, width), "second": _normal(random, width, 1)}

    def each(params: Tree, batch: Tree) -> jax.Array:
        degree = 1 + batch["edges"].sum(2, keepdims=True)
        h = jnp.tanh((batch["x"] + batch["edges"] @ batch["x"]) / degree @ params["first"])
        return ((h + batch["edges"] @ h) / degree @ params["second"])[..., 0] ** 2

    x = jnp.asarray(random.normal(size=(rows, nodes, width)), jnp.float32)
    return Small("graphs", params, {"x": x, "edges": edges, "mask": mask}, each, lambda batch: batch["mask"])


def _rows(random: Random) -> tuple[dict[str, jax.Array], Tree]:
    rows, width = int(random.choice((5, 6, 8, 12))), int(random.choice((1, 3, 4)))
    x, y = (jnp.asarray(random.normal(size=(rows, width)), jnp.float32) for _ in range(2))
    params = {"in": _normal(random, width, 4), "out": _normal(random, 4, 1)}
    return {"x": x, "y": y[:, 0], "mask": jnp.asarray(random.integers(1, 6, size=rows), jnp.float32)}, params


def physics(random: Random) -> Small:
    """The Laplacian of a network is to be that of a function: second derivatives in the loss."""
    batch, params = _rows(random)

    def each(params: Tree, batch: Tree) -> jax.Array:
        f = lambda x: (jnp.tanh(x @ params["in"]) @ params["out"])[0]
        return (jax.vmap(lambda x: jnp.trace(jax.hessian(f)(x)))(batch["x"]) - batch["y"]) ** 2

    return Small("physics", params, batch, each, lambda batch: batch["mask"])


def penalised(random: Random) -> Small:
    """A regression whose derivative by each input is to be of length 1, as in a critic."""
    batch, params = _rows(random)

    def each(params: Tree, batch: Tree) -> jax.Array:
        f = lambda x: (jnp.tanh(x @ params["in"]) @ params["out"])[0]
        value, slope = jax.vmap(jax.value_and_grad(f))(batch["x"])
        return (value - batch["y"]) ** 2 + (jnp.sqrt(jnp.sum(slope**2, 1) + 1e-6) - 1) ** 2

    return Small("gradient penalty", params, batch, each, lambda batch: batch["mask"])


def _rounded(x: jax.Array, scale: Any) -> jax.Array:
    return x + jax.lax.stop_gradient(jnp.round(x / scale) * scale - x)


def straight_through(random: Random) -> Small:
    """Rounded weights and activations, with the gradient of what is not rounded."""
    batch, params = _rows(random)

    def each(params: Tree, batch: Tree) -> jax.Array:
        h = _rounded(jnp.tanh(batch["x"] @ _rounded(params["in"], 1 / 8)), 1 / 4)
        return ((h @ params["out"])[:, 0] - batch["y"]) ** 2

    return Small("straight-through", params, batch, each, lambda batch: batch["mask"])


MODELS = (packed, graphs, physics, penalised, straight_through)


def _small(random: Random) -> Small:
    return MODELS[random.integers(len(MODELS))](random)


def policy(random: Random) -> Small:
    """The surrogate of PPO for one action in each row, of a model as small as two numbers."""
    rows, width, actions = int(random.choice((5, 6, 8, 12))), int(random.choice((1, 2, 6))), int(random.choice((2, 4)))
    rewards = random.normal(1, 2, size=rows) if random.random() < 0.7 else 1.0 * (np.arange(rows) % 3 == 0)
    old = -np.log(actions) + 0.05 * random.normal(size=rows)
    batch = {
        "x": jnp.asarray(random.normal(size=(rows, width)), jnp.float32),
        "action": jnp.asarray(random.integers(actions, size=rows)),
        "old": jnp.asarray(old, jnp.float32),
        "reward": jnp.asarray(rewards, jnp.float32),
        "mask": jnp.asarray(random.integers(1, 6, size=rows), jnp.float32),
    }
    name, clips = f"policy of {width * actions}", random.random() < 0.5

    def each(params: Tree, batch: Tree) -> jax.Array:
        chosen = jax.nn.log_softmax(batch["x"] @ params["w"])[jnp.arange(len(batch["x"])), batch["action"]]
        ratio, gain = jnp.exp(chosen - batch["old"]), batch["reward"]
        return -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.25) * gain) if clips else -chosen * gain

    return Small(name, {"w": 0.1 * _normal(random, width, actions)}, batch, each, lambda batch: batch["mask"])


def normalised(rewards: jax.Array, weights: jax.Array, *, centred: bool = True) -> jax.Array:
    """Returns rewards divided by their spread, less their mean."""
    mean = jnp.sum(weights * rewards) / jnp.sum(weights) if centred else 0.0
    spread = jnp.sqrt(jnp.sum(weights * (rewards - mean) ** 2) / jnp.sum(weights))
    return (rewards - mean) / (spread + 1e-6)


# Sound losses.


def _mean(random: Random) -> Problem:
    model = _small(random)
    return model.problem(random, "mean", model.mean, weight_fn=model.weight)


def _ratio(random: Random) -> Problem:
    model = _small(random)

    def fun(params: Tree, batch: Tree) -> optax_accum.Ratio:
        counted = model.counted(batch)
        return optax_accum.Ratio(jnp.sum(counted * model.each(params, batch)), jnp.sum(counted))

    return model.problem(random, "ratio", fun)


def _ratios(random: Random) -> Problem:
    model = _small(random)

    def fun(params: Tree, batch: Tree) -> dict[str, optax_accum.Ratio]:
        counted, each = model.counted(batch), model.each(params, batch)
        of = lambda weights: optax_accum.Ratio(jnp.sum(weights * each), jnp.sum(weights))
        return {"counted": of(counted), "large": of(jax.lax.stop_gradient(each > 0) * (1 + counted))}

    return model.problem(random, "ratios", fun)


def _normalised_before(random: Random) -> Problem:
    model = policy(random)
    batch = model.batch | {"reward": normalised(model.batch["reward"], model.batch["mask"])}
    model = dataclasses.replace(model, batch=batch)
    return model.problem(random, "advantages normalised before", model.mean, weight_fn=model.weight)


def _fixed_features(random: Random) -> Problem:
    """What a key draws that is no argument, and no row: the same for all on purpose."""
    model = _small(random)
    noise = lambda leaf: jax.random.normal(jax.random.key(3), leaf.shape) / 10
    fun = lambda params, batch: model.mean(jax.tree.map(lambda leaf: leaf + noise(leaf), params), batch)
    return model.problem(random, "fixed noise on parameters", fun, weight_fn=model.weight)


SOUND: dict[str, Maker] = {
    "mean of a rare model": _mean,
    "ratio": _ratio,
    "ratios": _ratios,
    "normalised before": _normalised_before,
    "fixed features": _fixed_features,
}


# Faults.


def _unweighted(random: Random) -> Problem:
    model = _small(random)
    return model.problem(random, "mean without weight_fn", model.mean)


def _wrong_count(random: Random) -> Problem:
    model = _small(random)
    fun = lambda params, batch: optax_accum.Ratio(model.mean(params, batch), 1.0)
    return model.problem(random, "ratio of a mean to 1", fun)


def _sum(random: Random) -> Problem:
    model = _small(random)
    fun = lambda params, batch: jnp.sum(model.counted(batch) * model.each(params, batch))
    return model.problem(random, "sum", fun)


def _normalised_inside(random: Random) -> Problem:
    """Advantages as PPO and GRPO normalise them, in the loss; with them there may be another term of the rewards."""
    model = policy(random)
    masked, centred = random.random() < 0.3, random.random() < 0.8
    value = random.random() < 0.3 and bool(
        np.ptp(model.batch["reward"]) > 1
    )  # rewards of 0 and 1 might be a mask there

    def fun(params: Tree, batch: Tree) -> jax.Array:
        weights = batch["mask"] if masked else jnp.ones_like(batch["mask"])
        own = batch | {"reward": normalised(batch["reward"], weights, centred=centred)}
        loss = jnp.sum(weights * model.each(params, own)) / jnp.sum(weights)
        return loss + value * jnp.mean((batch["x"] @ params["w"][:, 0] - batch["reward"]) ** 2)

    name = f"advantages in the loss{', masked' * masked}{', not centred' * (not centred)}{', and values' * value}"
    return model.problem(random, name, fun, weight_fn=model.weight if masked else None)


def _norm_of_graphs(random: Random) -> Problem:
    model = graphs(random)

    def fun(params: Tree, batch: Tree) -> jax.Array:
        h = batch["x"] @ params["first"]
        h = (h - h.mean((0, 1), keepdims=True)) / jnp.sqrt(h.var((0, 1), keepdims=True) + 1e-3)
        return jnp.mean(((h + batch["edges"] @ h) @ params["second"]) ** 2)

    return model.problem(random, "all graphs normalised", fun)


def _slope_of_the_mean(random: Random) -> Problem:
    """The square of a mean of derivatives, where a mean of squares was meant."""
    model = penalised(random)

    def fun(params: Tree, batch: Tree) -> jax.Array:
        f = lambda x: (jnp.tanh(x @ params["in"]) @ params["out"])[0]
        return jnp.sum(jnp.mean(jax.vmap(jax.grad(f))(batch["x"]), 0) ** 2)

    return model.problem(random, "squared mean of derivatives", fun)


def _range_of_the_batch(random: Random) -> Problem:
    """Activations rounded to parts of the largest one in the batch."""
    model = straight_through(random)

    def fun(params: Tree, batch: Tree) -> jax.Array:
        h = batch["x"] @ params["in"]
        return jnp.mean(((_rounded(h, jnp.max(jnp.abs(h)) / 3) @ params["out"])[:, 0] - batch["y"]) ** 2)

    return model.problem(random, "rounded to parts of the largest", fun)


def _hidden_key(random: Random) -> Problem:
    model = straight_through(random)
    key, made = jax.random.key(int(random.integers(1000))), random.random() < 0.5

    def fun(params: Tree, batch: Tree) -> jax.Array:
        kept = jax.random.bernoulli(jax.random.key(5) if made else key, 0.6, batch["x"].shape)
        return jnp.mean(model.each(params, batch | {"x": jnp.where(kept, batch["x"], 0)}))

    return model.problem(random, "a key that is no argument", fun)


FAULTS: dict[str, tuple[Maker, ...]] = {
    "weights": (_unweighted, _wrong_count),
    "sum": (_sum,),
    "coupled examples": (
        _normalised_inside,
        _norm_of_graphs,
        _normalised_inside,
        _slope_of_the_mean,
        _normalised_inside,
        _range_of_the_batch,
    ),
    "shared key": (_hidden_key,),
}
