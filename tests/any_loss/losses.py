"""Losses of drawn models: means, sums, terms, and what takes rows together, so that no micro-batch by itself has them."""

import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_accum
from tests.any_loss import rare
from tests.any_loss.settings import cross_entropy, setting

LOSSES = {}


class Problem(NamedTuple):
    """A loss, what it is called with, and the number of micro-batches."""

    fun: Any
    params: Any
    batch: dict
    args: tuple
    parts: int
    has_aux: bool
    is_narrow: bool


def problem(name):
    """Draws a loss: another one for each name."""
    return LOSSES[name](np.random.default_rng(zlib.crc32(name.encode())))


def loss(*args, has_aux=False, **options):
    """Adds a loss: a function of a setting, parameters, a batch, a key if there is noise, and `args`."""

    def add(fun):
        def made(random):
            s = setting(random, **options)
            of_setting = functools.partial(fun, s)
            return Problem(of_setting, s.params, s.batch, (*s.args, *args), s.parts, has_aux, s.dtype != "float32")

        LOSSES[fun.__name__] = made
        return fun

    return add


def rare_loss(*models):
    """Adds a loss: a function of one of these models, parameters and a batch."""

    def add(fun):
        def made(random):
            model = models[random.integers(len(models))](random)
            parts = int(random.integers(2, min(5, len(model.batch["mask"])) + 1))
            return Problem(functools.partial(fun, model), model.params, model.batch, (), parts, False, False)

        LOSSES[fun.__name__] = made
        return fun

    return add


@loss()
def mean(s, params, batch, *key):
    return jnp.mean(s.each(params, batch, *key))


@loss()
def masked(s, params, batch, *key):
    return jnp.sum(batch["mask"] * s.each(params, batch, *key)) / jnp.sum(batch["mask"])


@loss(noise=0)
def masked_with_rows_without_tokens(s, params, batch):
    kept = batch["kept"].reshape(-1, *[1] * (batch["mask"].ndim - 1))
    return masked(s, params, batch | {"mask": batch["mask"] * kept})


@loss(has_aux=True)
def with_aux(s, params, batch, *key):
    return mean(s, params, batch, *key), {"outputs": jnp.sum(s.outputs(params, batch, *key))}


@loss(dtype="bfloat16")
def terms(s, params, batch, *key):
    return {"data": masked(s, params, batch, *key), "rows": 10 * mean(s, params, batch, *key)}


@loss()
def two_denominators(s, params, batch, *key):
    return masked(s, params, batch, *key) + mean(s, params, batch, *key)


@loss()
def policy_gradient(s, params, batch, *key):
    """Advantages of mean 0, so that the loss and some gradients cancel."""
    logp = -cross_entropy(s.outputs(params, batch, *key), batch).reshape(len(batch["x"]), -1).sum(1)
    return -s.scale * jnp.mean((jnp.exp(logp - jax.lax.stop_gradient(logp)) + logp) * batch["reward"])


@loss(group=3)
def groups(s, params, batch, *key):
    """Group-relative: rows of a group stay together."""
    scores = s.each(params, batch, *key).reshape(len(batch["x"]), -1).sum(1).reshape(-1, 3)
    rewards = batch["reward"].reshape(-1, 3)
    return jnp.mean((rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-3) * scores)


@loss(jnp.float32(0), has_aux=True, noise=0)
def running_statistics(s, params, batch, carry):
    return mean(s, params, batch), 0.9 * carry + 0.1 * jnp.mean(s.outputs(params, batch))


@loss()
def weight_decay(s, params, batch, *key):
    decay = sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(params))
    return mean(s, params, batch, *key) + 0.1 * s.scale * decay


@loss(dtype="bfloat16 inside")
def class_weights(s, params, batch, *key):
    weights = jnp.linspace(0.2, 3, 16)[batch["label"]]
    return jnp.sum(weights * s.each(params, batch, *key)) / jnp.sum(weights)


@loss(jnp.linspace(0.5, 2, 8), noise=0)
def a_table_that_is_no_batch(s, params, batch, table):
    """Of as many rows as the batch may have."""
    return jnp.mean(table[batch["label"] % len(table)] * s.each(params, batch))


@loss(noise=0)
def a_table_in_the_batch(s, params, batch):
    return jnp.mean(batch["place"][batch["label"] % len(batch["place"])] * s.each(params, batch))


@loss(dtype="bfloat16")
def sum_of_rows(s, params, batch, *key):
    return jnp.sum(s.each(params, batch, *key))


@loss()
def sum_of_tokens(s, params, batch, *key):
    return jnp.sum(batch["mask"] * s.each(params, batch, *key))


@loss()
def sum_over_a_constant(s, params, batch, *key):
    return jnp.sum(s.each(params, batch, *key)) / 12


@loss()
def batch_norm(s, params, batch, *key):
    h = s.outputs(params, batch, *key)
    return s.scale * jnp.mean(
        s.comparison((h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-3), batch)
    )


@loss(dtype="float16")
def contrastive(s, params, batch, *key):
    logits = s.flat(params, batch, *key) @ batch["y"].reshape(len(batch["y"]), -1).T
    return -s.scale * jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))


@loss()
def ranking(s, params, batch, *key):
    scores = s.flat(params, batch, *key).mean(1)
    return s.scale * jnp.mean(jax.nn.softplus(2 * scores[:, None] - 2 * scores[None, :]))


@loss()
def variance(s, params, batch, *key):
    return mean(s, params, batch, *key) - s.scale * jnp.mean(jnp.sqrt(s.flat(params, batch, *key).var(0) + 1e-3))


@loss(noise=0)
def neighbours(s, params, batch):
    scores = 3 * s.flat(params, batch).mean(1)
    return s.scale * jnp.mean(jax.nn.softplus(scores - jnp.roll(scores, 1)))


@loss(noise=1)
def one_key(s, params, batch, key):
    return masked(s, params, batch, key)


@loss(jax.random.key(7), noise=1)
def a_second_key(s, params, batch, first, second):
    return mean(s, params, batch, first) + mean(s, params, batch, second)


@loss(noise=0)
def clipped_inside(s, params, batch):
    """A rule that clips each gradient to a tenth of its largest number."""
    whole = jax.grad(functools.partial(mean, s))(s.params, s.batch)
    limits = jax.tree.map(lambda g: 0.1 * jnp.max(jnp.abs(g)), whole)
    clipped = jax.custom_vjp(lambda params: params)
    bent = lambda _, grads: (jax.tree.map(lambda g, most: jnp.clip(g, -most, most), grads, limits),)
    clipped.defvjp(lambda params: (params, None), bent)
    return mean(s, clipped(params), batch)


# Of rarer models


@rare_loss(*rare.MODELS)
def mean_of_a_rare_model(model, params, batch):
    return model.mean(params, batch)


@rare_loss(*rare.MODELS)
def ratio(model, params, batch):
    counted = model.counted(batch)
    return optax_accum.Ratio(jnp.sum(counted * model.each(params, batch)), jnp.sum(counted))


@rare_loss(*rare.MODELS)
def ratios(model, params, batch):
    counted, each = model.counted(batch), model.each(params, batch)
    of = lambda weights: optax_accum.Ratio(jnp.sum(weights * each), jnp.sum(weights))
    return {"counted": of(counted), "large": of(jax.lax.stop_gradient(each > 0) * (1 + counted))}


@rare_loss(*rare.MODELS)
def sum_of_a_rare_model(model, params, batch):
    return jnp.sum(model.counted(batch) * model.each(params, batch))


@rare_loss(*rare.MODELS)
def fixed_features(model, params, batch):
    """What a key draws that is no argument, and no row: the same for all on purpose."""
    noise = lambda leaf: jax.random.normal(jax.random.key(3), leaf.shape) / 10
    return model.mean(jax.tree.map(lambda leaf: leaf + noise(leaf), params), batch)


def normalised(rewards, weights):
    mean = jnp.sum(weights * rewards) / jnp.sum(weights)
    return (rewards - mean) / (jnp.sqrt(jnp.sum(weights * (rewards - mean) ** 2) / jnp.sum(weights)) + 1e-6)


@rare_loss(rare.policy)
def advantages_normalised_before(model, params, batch):
    rewards = model.batch["reward"]
    fixed = (batch["reward"] - rewards.mean()) / (rewards.std() + 1e-6)
    return model.mean(params, batch | {"reward": fixed})


@rare_loss(rare.policy)
def advantages_normalised_inside(model, params, batch):
    """As PPO and GRPO normalise them, beside another term of the rewards."""
    own = batch | {"reward": normalised(batch["reward"], batch["mask"])}
    return model.mean(params, own) + jnp.mean((batch["x"] @ params["w"][:, 0] - batch["reward"]) ** 2)


@rare_loss(rare.graphs)
def graphs_normalised(model, params, batch):
    h = batch["x"] @ params["first"]
    h = (h - h.mean((0, 1), keepdims=True)) / jnp.sqrt(h.var((0, 1), keepdims=True) + 1e-3)
    return jnp.mean(((h + batch["edges"] @ h) @ params["second"]) ** 2)


@rare_loss(rare.penalised)
def squared_mean_of_derivatives(model, params, batch):
    """Where a mean of squares was meant."""
    return jnp.sum(jnp.mean(jax.vmap(jax.grad(rare.network(params)))(batch["x"]), 0) ** 2)


@rare_loss(rare.straight_through)
def rounded_to_parts_of_the_largest(model, params, batch):
    h = batch["x"] @ params["in"]
    h = rare.rounded(h, jnp.max(jnp.abs(h)) / 3)
    return jnp.mean(((h @ params["out"])[:, 0] - batch["y"]) ** 2)


@rare_loss(rare.straight_through)
def cross_entropy_in_a_branch(model, params, batch):
    """Which keeps the labels for its backward pass, where the other branch has none."""
    logits, labels = batch["x"] @ params["in"], (batch["y"] > 0).astype(jnp.int32)
    entropy = lambda: optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return jax.lax.cond(jnp.sum(params["out"]) > -100, entropy, lambda: jnp.mean(logits**2))


KEY = jax.random.key(11)


@rare_loss(rare.straight_through)
def keys_that_are_no_arguments(model, params, batch):
    """One that it closes over, and one that it makes."""
    kept = [jax.random.bernoulli(key, 0.7, batch["x"].shape) for key in (KEY, jax.random.key(5))]
    return jnp.mean(model.each(params, batch | {"x": jnp.where(kept[0] & kept[1], batch["x"], 0)}))
