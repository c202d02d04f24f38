"""Losses drawn from a seed: a model, what its rows are compared with, how they are averaged, noise, dtype, scale, sizes.

`SOUND` ones, and `FAULTS`: losses that micro-batches by themselves compute wrongly.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._measure import Tree
from tests.any_loss.settings import (
    COMPARISONS,
    Maker,
    Problem,
    Random,
    Setting,
    cross_entropy,
    masked,
    mean,
    row_count,
    setting,
    tokens,
)

# Sound losses.


def _sound_mean(random: Random) -> Problem:
    s = setting(random, noise=0.4, narrow=0.25)
    return s.problem("mean", functools.partial(mean, s))


def _sound_aux(random: Random) -> Problem:
    s = setting(random, noise=0.4, narrow=0.25)
    fun = lambda params, batch, *key: (
        mean(s, params, batch, *key),
        {"outputs": jnp.sum(s.outputs(params, batch, *key))},
    )
    return s.problem("with aux", fun, has_aux=True)


def _sound_masked(random: Random) -> Problem:
    s = setting(random, noise=0.4, narrow=0.25)
    return s.problem("masked mean", functools.partial(masked, s), weight_fn=tokens)


def _sound_empty_rows(random: Random) -> Problem:
    s = setting(random, noise=0.0, narrow=0.0)
    keep = jnp.asarray(random.permutation(len(s.batch["x"])) < len(s.batch["x"]) // 2 + 1, jnp.float32)
    s.batch["mask"] = s.batch["mask"] * keep.reshape((-1,) + (1,) * (s.batch["mask"].ndim - 1))
    return s.problem("masked mean, rows without tokens", functools.partial(masked, s), weight_fn=tokens)


def _sound_terms(random: Random) -> Problem:
    s = setting(random, noise=0.3, narrow=0.2)
    other = float(10.0 ** random.integers(-2, 3))

    def fun(params: Tree, batch: Tree, *key: Any) -> dict[str, jax.Array]:
        return {"data": masked(s, params, batch, *key), "rows": other * mean(s, params, batch, *key)}

    return s.problem("terms", fun, weight_fn=lambda batch: {"data": tokens(batch), "rows": row_count(batch)})


def _sound_policy(random: Random) -> Problem:
    """Policy gradient: advantages of mean 0, so that the loss and some gradients cancel."""
    s = setting(random, noise=0.2, narrow=0.15)
    advantages = _advantages(random, len(s.batch["x"]))
    s.batch["advantage"] = jnp.asarray(advantages, jnp.float32)
    surrogate = random.random() < 0.5

    def fun(params: Tree, batch: Tree, *key: Any) -> jax.Array:
        logp = -cross_entropy(s.outputs(params, batch, *key), batch)
        logp = logp if logp.ndim == 1 else logp.sum(1)
        ratio = jnp.exp(logp - jax.lax.stop_gradient(logp)) if surrogate else logp
        return -s.scale * jnp.mean(ratio * batch["advantage"])

    return s.problem("policy gradient", fun)


def _advantages(random: Random, rows: int) -> np.ndarray:
    rewards = random.normal(size=rows)
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def _sound_cancelling(random: Random) -> Problem:
    """Rows that are nearly alike, with coefficients that add up to 0: the gradient nearly cancels."""
    s = setting(random, noise=0.0, narrow=0.0)
    x, near = s.batch["x"], 10.0 ** -random.integers(1, 6)
    same = jnp.broadcast_to(x[:1], x.shape)
    s.batch["x"] = same + near * (x - same) if jnp.issubdtype(x.dtype, jnp.floating) else same
    s.batch["y"] = jnp.broadcast_to(s.batch["y"][:1], s.batch["y"].shape)
    s.batch["label"] = jnp.broadcast_to(s.batch["label"][:1], s.batch["label"].shape)
    s.batch["advantage"] = jnp.asarray(_advantages(random, len(x)) + near, jnp.float32)

    def fun(params: Tree, batch: Tree) -> jax.Array:
        each = s.each(params, batch)
        return jnp.mean(batch["advantage"] * (each if each.ndim == 1 else each.mean(1)))

    return s.problem("cancelling", fun)


def _sound_groups(random: Random) -> Problem:
    """Group-relative policy gradient, or a pairwise preference: rows of a group stay together."""
    size = int(random.choice((2, 3, 4)))
    s = setting(random, noise=0.2, narrow=0.1, group=size)
    s.batch["reward"] = jnp.asarray(random.normal(size=len(s.batch["x"])), jnp.float32)
    return s.problem(f"groups of {size}", functools.partial(_grouped, s, size), group_size=size)


def _grouped(s: Setting, size: int, params: Tree, batch: Tree, *key: Any) -> jax.Array:
    each = s.each(params, batch, *key)
    scores = (each if each.ndim == 1 else each.sum(1)).reshape(-1, size)
    rewards = batch["reward"].reshape(-1, size)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-3)
    return jnp.mean(advantages * scores)


def _sound_carry(random: Random) -> Problem:
    s = setting(random, noise=0.0, narrow=0.1)

    def fun(params: Tree, batch: Tree, carry: jax.Array) -> tuple[jax.Array, jax.Array]:
        return mean(s, params, batch), 0.9 * carry + 0.1 * jnp.mean(s.outputs(params, batch))

    problem = s.problem("running statistics", fun, carry_argnum=2)
    return dataclasses.replace(problem, args=(jnp.float32(0),))


def _sound_decay(random: Random) -> Problem:
    s = setting(random, noise=0.3, narrow=0.2)
    decay = lambda params: sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(params))
    fun = lambda params, batch, *key: mean(s, params, batch, *key) + 0.1 * s.scale * decay(params)
    return s.problem("weight decay", fun)


def _sound_classes(random: Random) -> Problem:
    s = setting(random, noise=0.2, narrow=0.2)
    weights = jnp.asarray(random.uniform(0.2, 3, size=16), jnp.float32)
    fun, count = _class_weighted(s, weights)
    return s.problem("class weights", fun, weight_fn=count)


def _class_weighted(s: Setting, weights: jax.Array) -> tuple[Callable[..., Any], Callable[..., Any]]:
    of = lambda batch: weights[batch["label"]]
    fun = lambda params, batch, *key: jnp.sum(of(batch) * s.each(params, batch, *key)) / jnp.sum(of(batch))
    return fun, lambda batch: jnp.sum(of(batch))


def _sound_whole(random: Random) -> Problem:
    """A table that every micro-batch is to get whole, of as many rows as the batch."""
    s = setting(random, noise=0.0, narrow=0.1)
    table = jnp.asarray(random.uniform(0.5, 2, size=len(s.batch["x"])), jnp.float32)

    def fun(params: Tree, batch: Tree, table: jax.Array) -> jax.Array:
        return jnp.mean(table[batch["label"] % len(table)] * s.each(params, batch))

    return dataclasses.replace(s.problem("a table", fun, whole_argnums=2), args=(table,))


SOUND: dict[str, Maker] = {
    "mean": _sound_mean,
    "aux": _sound_aux,
    "masked": _sound_masked,
    "empty rows": _sound_empty_rows,
    "terms": _sound_terms,
    "policy": _sound_policy,
    "cancelling": _sound_cancelling,
    "groups": _sound_groups,
    "carry": _sound_carry,
    "decay": _sound_decay,
    "classes": _sound_classes,
    "whole": _sound_whole,
}


# Faults: each plants one cause in a setting.


def _unweighted(random: Random) -> Problem:
    s = setting(random, noise=0.3, narrow=0.1)
    return s.problem("masked mean without weight_fn", functools.partial(masked, s))


def _wrong_weights(random: Random) -> Problem:
    s = setting(random, noise=0.3, narrow=0.1)
    return s.problem("mean over rows weighted by tokens", functools.partial(mean, s), weight_fn=tokens)


def _two_denominators(random: Random) -> Problem:
    s = setting(random, noise=0.3, narrow=0.1)
    fun = lambda params, batch, *key: masked(s, params, batch, *key) + mean(s, params, batch, *key)
    return s.problem("two denominators", fun, weight_fn=tokens)


def _unweighted_classes(random: Random) -> Problem:
    s = setting(random, noise=0.3, narrow=0.1)
    fun, _ = _class_weighted(s, jnp.asarray(random.uniform(0.1, 4, size=16), jnp.float32))
    return s.problem("class weights without weight_fn", fun)


def _unweighted_terms(random: Random) -> Problem:
    problem = _sound_terms(random)
    return dataclasses.replace(problem, options=problem.options | {"weight_fn": None})


def _sum_of_rows(random: Random) -> Problem:
    s = setting(random, noise=0.3, narrow=0.1)
    return s.problem("sum", lambda params, batch, *key: jnp.sum(s.each(params, batch, *key)))


def _sum_of_tokens(random: Random) -> Problem:
    s = setting(random, noise=0.3, narrow=0.1)
    fun = lambda params, batch, *key: jnp.sum(batch["mask"] * s.each(params, batch, *key))
    return s.problem("sum over tokens", fun, weight_fn=tokens if random.random() < 0.5 else None)


def _sum_by_constant(random: Random) -> Problem:
    s = setting(random, noise=0.3, narrow=0.1)
    rows = len(s.batch["x"])
    return s.problem("sum over a fixed number", lambda params, batch, *key: jnp.sum(s.each(params, batch, *key)) / rows)


def _batch_norm(random: Random) -> Problem:
    s = setting(random, noise=0.2, narrow=0.1)

    def fun(params: Tree, batch: Tree, *key: Any) -> jax.Array:
        h = s.outputs(params, batch, *key)
        h = (h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-3)
        return s.scale * jnp.mean(COMPARISONS[s.comparison](h, batch))

    return s.problem("BatchNorm", fun)


def _flat_outputs(s: Setting, params: Tree, batch: Tree, *key: Any) -> jax.Array:
    h = s.outputs(params, batch, *key)
    return h.reshape(len(h), -1)


def _contrastive(random: Random) -> Problem:
    s = setting(random, noise=0.2, narrow=0.1)

    def fun(params: Tree, batch: Tree, *key: Any) -> jax.Array:
        logits = _flat_outputs(s, params, batch, *key) @ batch["y"].reshape(len(batch["y"]), -1).T
        return -s.scale * jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))

    return s.problem("InfoNCE", fun)


def _ranking(random: Random) -> Problem:
    s = setting(random, noise=0.2, narrow=0.1)

    def fun(params: Tree, batch: Tree, *key: Any) -> jax.Array:
        scores = _flat_outputs(s, params, batch, *key).mean(1)
        return s.scale * jnp.mean(jax.nn.softplus(2 * scores[:, None] - 2 * scores[None, :]))

    return s.problem("ranking", fun)


def _variance(random: Random) -> Problem:
    s = setting(random, noise=0.2, narrow=0.1)

    def fun(params: Tree, batch: Tree, *key: Any) -> jax.Array:
        spread = jnp.sqrt(_flat_outputs(s, params, batch, *key).var(0) + 1e-3)
        return mean(s, params, batch, *key) - s.scale * jnp.mean(spread)

    return s.problem("variance of outputs", fun)


def _undeclared_groups(random: Random) -> Problem:
    s = setting(random, noise=0.0, narrow=0.1, group=4)
    fun = lambda params, batch: s.scale * jnp.mean(jax.nn.softplus(_neighbours(s, params, batch)))
    return s.problem("neighbours", fun)


def _neighbours(s: Setting, params: Tree, batch: Tree) -> jax.Array:
    scores = 3 * _flat_outputs(s, params, batch).mean(1)
    return scores - jnp.roll(scores, 1)


def _one_key(random: Random) -> Problem:
    s = setting(random, noise=1.0, narrow=0.2)
    weighted = random.random() < 0.3
    fun = functools.partial(masked if weighted else mean, s)
    return s.problem("one key", fun, rng_argnum=None, weight_fn=tokens if weighted else None)


def _second_key(random: Random) -> Problem:
    s = setting(random, noise=1.0, narrow=0.2)

    def fun(params: Tree, batch: Tree, first: jax.Array, second: jax.Array) -> jax.Array:
        return mean(s, params, batch, first) + mean(s, params, batch, second)

    problem = s.problem("a second key", fun, rng_argnum=2)
    return dataclasses.replace(problem, args=(*problem.args, jax.random.key(7)))


def _narrow_sums(random: Random) -> Problem:
    s = setting(random, noise=0.2, narrow=0.0, scaled=0.0, rows=int(random.choice((16, 24, 33))))
    many, dtype = int(random.choice((8, 16))), random.choice((jnp.bfloat16, jnp.bfloat16, jnp.float16))
    return s.problem("narrow sums", functools.partial(mean, s), accumulator_dtype=dtype, num_microbatches=many)


def _cut_table(random: Random) -> Problem:
    """A table with as many rows as the batch, which stands in it."""
    s = setting(random, noise=0.0, narrow=0.0)
    s.batch["table"] = jnp.asarray(random.permutation(len(s.batch["x"])) + 1.0, jnp.float32)

    def fun(params: Tree, batch: Tree) -> jax.Array:
        picked = batch["table"][batch["label"] % len(batch["table"])]
        return jnp.mean(picked * s.each(params, batch))

    return s.problem("a table in the batch", fun)


def _carried_norm(random: Random) -> Problem:
    s = setting(random, noise=0.0, narrow=0.1)

    def fun(params: Tree, batch: Tree, carry: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = s.outputs(params, batch)
        loss = s.scale * jnp.mean(COMPARISONS[s.comparison](h / jnp.sqrt(0.1 + carry), batch))
        return loss, 0.5 * carry + 0.5 * jnp.mean(jax.lax.stop_gradient(h) ** 2)

    problem = s.problem("normalised by a carry that it changes", fun, carry_argnum=2)
    return dataclasses.replace(problem, args=(jnp.float32(1),))


def _carried_count(random: Random) -> Problem:
    s = setting(random, noise=0.0, narrow=0.1)
    fun = lambda params, batch, carry: (mean(s, params, batch) * (1 + 0.3 * carry), carry + 1.0)
    problem = s.problem("a carry that scales the loss", fun, carry_argnum=2)
    return dataclasses.replace(problem, args=(jnp.float32(0),))


def _counts_calls(random: Random) -> Problem:
    s = setting(random, noise=0.2, narrow=0.2)
    calls: list[None] = []

    def fun(params: Tree, batch: Tree, *key: Any) -> jax.Array:
        calls.append(None)
        return mean(s, params, batch, *key) * len(calls)

    return s.problem("counts its calls", fun)


def _numpy_noise(random: Random) -> Problem:
    s = setting(random, noise=0.2, narrow=0.2)
    hidden = np.random.default_rng(0)

    def fun(params: Tree, batch: Tree, *key: Any) -> jax.Array:
        each = s.each(params, batch, *key)
        return jnp.mean(each * hidden.uniform(0.5, 1.5, size=each.shape).astype(np.float32))

    return s.problem("NumPy's noise", fun)


def _clipped_inside(random: Random) -> Problem:
    """A rule that clips each gradient to a tenth or a half of its largest number."""
    s = setting(random, noise=0.0, narrow=0.0)
    part = float(random.choice((0.1, 0.5)))
    limits = jax.tree.map(lambda g: part * jnp.max(jnp.abs(g)), jax.grad(functools.partial(mean, s))(s.params, s.batch))

    @jax.custom_vjp
    def clipped(params: Tree) -> Tree:
        return params

    bent = lambda _, grads: (jax.tree.map(lambda g, most: jnp.clip(g, -most, most), grads, limits),)
    clipped.defvjp(lambda params: (params, None), bent)
    return s.problem("a clip inside", lambda params, batch: mean(s, clipped(params), batch))


FAULTS: dict[str, tuple[Maker, ...]] = {
    "weights": (_unweighted, _wrong_weights, _two_denominators, _unweighted_classes, _unweighted_terms),
    "sum": (_sum_of_rows, _sum_of_tokens, _sum_by_constant),
    "coupled examples": (_batch_norm, _contrastive, _ranking, _variance, _undeclared_groups),
    "shared key": (_one_key, _one_key, _second_key),
    "low-precision sum": (_narrow_sums,),
    "nonlinear derivative": (_clipped_inside,),
    "not rows": (_cut_table,),
    "mutable state": (_carried_norm, _carried_count, _counts_calls, _numpy_noise),
}
