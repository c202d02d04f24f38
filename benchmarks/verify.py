"""Owns the counts of `verify`: false alarms in sound losses, and misses among planted faults of each kind.

Run `python -m benchmarks.verify`, or with `--losses 20 --faults 5` for a sample. Losses are drawn from a seed: a model,
what its rows are compared with, how they are averaged, noise, dtype, scale, sizes. A fault is planted in such a loss.
The exit status is 1 if there is a false alarm or a miss.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optax_accum
from benchmarks import _measure, _verdicts
from benchmarks._measure import Tree

Random = np.random.Generator
KINDS = ("weights", "sum", "coupled examples", "shared key", "low-precision accumulator", "mutable state")

NOTES = """\
Each loss is run by `verify` as a user would run it. Found: the law is said not to hold. Named right: the first cause is
the one that was planted."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A loss and what `verify` is called with. In a batch "x" are inputs, all else says what they are compared with."""

    name: str
    fun: Callable[..., Any]
    params: Tree
    batch: dict[str, jax.Array]
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def report(self) -> Any:
        """Returns what `verify` says."""
        return optax_accum.verify(self.fun, self.params, self.batch, *self.args, **self.options)


def main() -> None:
    asked = _verdicts.options(__doc__, "verify", "losses", (200, 50), KINDS)
    _verdicts.count(asked, "verify", "losses", NOTES, sound_loss, fault)


# Models: parameters, inputs [n, ...], and outputs for each row [n, out] or each place in it [n, length, out].


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of random size."""

    name: str
    params: Tree
    inputs: np.ndarray  # [n, ...]
    outputs: Callable[[Tree, jax.Array], jax.Array]  # [n, ...] -> [n, out] or [n, length, out]


ACTIVATIONS = {"tanh": jnp.tanh, "gelu": jax.nn.gelu, "softplus": jax.nn.softplus, "sin": jnp.sin}
WIDTHS, LENGTH = (3, 4, 6, 8), 5


def _normal(random: Random, *shape: int) -> jax.Array:
    return jnp.asarray(random.normal(size=shape) / shape[0] ** 0.5, jnp.float32)


def _dense(random: Random, rows: int) -> Model:
    width, depth = random.choice(WIDTHS), random.integers(1, 4)
    name = random.choice(list(ACTIVATIONS))
    params = [{"w": _normal(random, width, width), "b": _normal(random, width)} for _ in range(depth)]

    def outputs(params: Tree, h: jax.Array) -> jax.Array:
        for layer in params:
            h = ACTIVATIONS[name](h @ layer["w"] + layer["b"][None])
        return h

    return Model(f"dense {name} x {depth}", params, random.normal(size=(rows, width)), outputs)


def _conv(random: Random, rows: int) -> Model:
    width, size = random.choice(WIDTHS), 6
    params = {"kernel": _normal(random, 3, 1, width) / 2, "out": _normal(random, width, width)}

    def outputs(params: Tree, h: jax.Array) -> jax.Array:
        h = jax.lax.conv_general_dilated(h, params["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return jax.nn.silu(h).mean(1) @ params["out"]

    return Model("conv", params, random.normal(size=(rows, size, 1)), outputs)


def _attention(random: Random, rows: int) -> Model:
    width = int(random.choice(WIDTHS))
    params = {"qkv": _normal(random, width, 3 * width), "out": _normal(random, width, width)}

    def outputs(params: Tree, h: jax.Array) -> jax.Array:
        h = h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-3)
        q, k, v = jnp.split(h @ params["qkv"], 3, axis=-1)
        scores = jnp.where(np.tri(LENGTH, dtype=bool)[None], q @ k.mT / width**0.5, -1e4)
        return h + jax.nn.softmax(scores) @ v @ params["out"]

    return Model("attention", params, random.normal(size=(rows, LENGTH, width)), outputs)


def _embedding(random: Random, rows: int) -> Model:
    width, vocabulary = random.choice(WIDTHS), random.integers(5, 20)
    params = {"table": _normal(random, vocabulary, width) * 2, "out": _normal(random, width, width)}
    outputs = lambda params, tokens: jnp.tanh(params["table"][tokens].mean(1)) @ params["out"]
    return Model("embedding", params, random.integers(vocabulary, size=(rows, LENGTH)), outputs)


def _tied(random: Random, rows: int) -> Model:
    width = random.choice(WIDTHS)
    params = {"w": _normal(random, width, width), "b": _normal(random, width)}
    outputs = lambda params, h: jnp.tanh(h @ params["w"] + params["b"][None]) @ params["w"].T
    return Model("tied", params, random.normal(size=(rows, width)), outputs)


def _recurrent(random: Random, rows: int) -> Model:
    width = random.choice(WIDTHS)
    params = {"in": _normal(random, width, width), "state": _normal(random, width, width)}

    def outputs(params: Tree, h: jax.Array) -> jax.Array:
        def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.tanh(x @ params["in"] + state @ params["state"])
            return state, state

        return jnp.swapaxes(jax.lax.scan(step, jnp.zeros_like(h[:, 0]), jnp.swapaxes(h, 0, 1))[1], 0, 1)

    return Model("recurrent", params, random.normal(size=(rows, LENGTH, width)), outputs)


MODELS = (_dense, _dense, _conv, _attention, _embedding, _tied, _recurrent)


# What outputs are compared with: targets [n, ...], and a loss for each row [n], or for each place in it [n, length].


def _targets(random: Random, like: jax.Array) -> dict[str, jax.Array]:
    *shape, classes = like.shape
    return {
        "y": jnp.asarray(random.normal(size=like.shape), jnp.float32),
        "label": jnp.asarray(random.integers(classes, size=shape)),
    }


def _squared(outputs: jax.Array, batch: Tree) -> jax.Array:
    return jnp.mean((outputs - batch["y"]) ** 2, -1)


def _huber(outputs: jax.Array, batch: Tree) -> jax.Array:
    error = jnp.abs(outputs - batch["y"])
    return jnp.mean(jnp.where(error < 1, error**2 / 2, error - 0.5), -1)


def _cross_entropy(outputs: jax.Array, batch: Tree) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), batch["label"][..., None], -1)[..., 0]


COMPARISONS = {"squared": _squared, "huber": _huber, "cross-entropy": _cross_entropy}


# Noise: what a key does to outputs [n, ..., out]. The keep rates reach from a coin to a rare outcome.


def _dropout(rate: float, key: jax.Array, h: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, rate, h.shape), h / rate, 0)


def _gaussian(rate: float, key: jax.Array, h: jax.Array) -> jax.Array:
    return h + (1 - rate) * jax.random.normal(key, h.shape, h.dtype)


def _stochastic_depth(rate: float, key: jax.Array, h: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, rate), jnp.sin(2 * h), h)


def _drop_path(rate: float, key: jax.Array, h: jax.Array) -> jax.Array:
    keep = jax.random.bernoulli(key, rate, (len(h),) + (1,) * (h.ndim - 1))
    return jnp.where(keep, jnp.sin(2 * h), h)


NOISES = {"dropout": _dropout, "noise": _gaussian, "stochastic depth": _stochastic_depth, "drop path": _drop_path}
RATES = (0.5, 0.8, 0.9, 0.95)


# A setting: all that a loss is made of, but how its rows are averaged.


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model with what it is compared with, its noise, dtype and scale."""

    random: Random
    model: Model
    comparison: str
    noise: str
    rate: float
    dtype: str
    scale: float
    batch: dict[str, jax.Array]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        parts = [self.model.name, self.comparison, self.dtype, f"x {self.scale:.0e}", f"{len(self.batch['x'])} rows"]
        noise = [f"{self.noise} {self.rate:g}"] if self.noise else []
        return ", ".join(parts + noise + [f"{k} {v}" for k, v in self.options.items() if type(v) is int])

    def outputs(self, params: Tree, batch: Tree, *key: Any) -> jax.Array:
        """Returns the outputs, after noise."""
        narrow = {"float32": jnp.float32, "float16": jnp.float16}.get(self.dtype, jnp.bfloat16)
        cast = lambda x: x.astype(narrow) if jnp.issubdtype(x.dtype, jnp.floating) else x
        h = self.model.outputs(jax.tree.map(cast, params), cast(batch["x"]))
        return NOISES[self.noise](self.rate, key[0], h).astype(jnp.float32) if self.noise else h.astype(jnp.float32)

    def each(self, params: Tree, batch: Tree, *key: Any) -> jax.Array:
        """Returns the loss of each row [n], or of each place in it [n, length]."""
        return self.scale * COMPARISONS[self.comparison](self.outputs(params, batch, *key), batch)

    @property
    def params(self) -> Tree:
        """The parameters, narrow where the dtype says so."""
        return (
            jax.tree.map(lambda p: p.astype(jnp.bfloat16), self.model.params)
            if self.dtype == "bfloat16"
            else (self.model.params)
        )

    def problem(self, name: str, fun: Callable[..., Any], **options: Any) -> Problem:
        """Returns the loss `fun` in this setting."""
        unnamed = {key: value for key, value in (self.options | options).items() if value is not None}
        return Problem(f"{name}: {self}", fun, self.params, self.batch, self.args, unnamed)


def setting(
    random: Random, *, noise: float, narrow: float, scaled: float = 0.3, group: int = 1, rows: int = 0
) -> Setting:
    """Returns a setting; `noise`, `narrow` and `scaled` are the chances of noise, of 16 bits, of a far scale."""
    rows = rows or group * int(random.choice((4, 5, 6, 8, 9, 12)))
    model = MODELS[random.integers(len(MODELS))](random, rows)
    x = jnp.asarray(model.inputs, jnp.float32 if model.inputs.dtype.kind == "f" else jnp.int32)
    like = jax.eval_shape(model.outputs, model.params, x)
    mask = np.arange(LENGTH)[None] < random.integers(1, LENGTH + 1, size=(rows, 1))
    if like.ndim == 2:
        mask = random.integers(1, 6, size=rows)
    chosen = str(random.choice(list(NOISES))) if random.random() < noise else ""
    dtype = str(random.choice(("bfloat16", "bfloat16 inside", "float16"))) if random.random() < narrow else "float32"
    far = random.random() < scaled and dtype != "float16"  # whose gradients would be 0
    key = jax.random.key if random.random() < 0.5 else jax.random.PRNGKey
    return Setting(
        random=random,
        model=model,
        comparison=str(random.choice(list(COMPARISONS))),
        noise=chosen,
        rate=float(random.choice(RATES)),
        dtype=dtype,
        scale=float(10.0 ** random.integers(-12, 12)) if far else 1.0,
        batch={"x": x, "mask": jnp.asarray(mask, jnp.float32), **_targets(random, like)},
        args=(key(int(random.integers(1000))),) if chosen else (),
        options={
            "num_microbatches": int(random.integers(2, min(5, rows // group) + 1)),
            "rng_argnum": 2 if chosen else None,
        },
    )


def _masked(s: Setting, params: Tree, batch: Tree, *key: Any) -> jax.Array:
    return jnp.sum(batch["mask"] * s.each(params, batch, *key)) / jnp.sum(batch["mask"])


def _mean(s: Setting, params: Tree, batch: Tree, *key: Any) -> jax.Array:
    return jnp.mean(s.each(params, batch, *key))


def _tokens(batch: Tree) -> jax.Array:
    return batch["mask"].sum()


def _rows(batch: Tree) -> jax.Array:
    return jnp.float32(len(batch["mask"]))


# Sound losses.


def sound_loss(number: int) -> Problem:
    """Returns the sound loss of that number."""
    random = np.random.default_rng([0, number])
    kinds = list(SOUND)
    return SOUND[kinds[number % len(kinds)]](random)


def _sound_mean(random: Random) -> Problem:
    s = setting(random, noise=0.4, narrow=0.25)
    return s.problem("mean", functools.partial(_mean, s))


def _sound_aux(random: Random) -> Problem:
    s = setting(random, noise=0.4, narrow=0.25)
    fun = lambda params, batch, *key: (
        _mean(s, params, batch, *key),
        {"outputs": jnp.sum(s.outputs(params, batch, *key))},
    )
    return s.problem("with aux", fun, has_aux=True)


def _sound_masked(random: Random) -> Problem:
    s = setting(random, noise=0.4, narrow=0.25)
    return s.problem("masked mean", functools.partial(_masked, s), weight_fn=_tokens)


def _sound_empty_rows(random: Random) -> Problem:
    s = setting(random, noise=0.0, narrow=0.0)
    keep = jnp.asarray(random.permutation(len(s.batch["x"])) < len(s.batch["x"]) // 2 + 1, jnp.float32)
    s.batch["mask"] = s.batch["mask"] * keep.reshape((-1,) + (1,) * (s.batch["mask"].ndim - 1))
    return s.problem("masked mean, rows without tokens", functools.partial(_masked, s), weight_fn=_tokens)


def _sound_terms(random: Random) -> Problem:
    s = setting(random, noise=0.3, narrow=0.2)
    other = float(10.0 ** random.integers(-2, 3))

    def fun(params: Tree, batch: Tree, *key: Any) -> dict[str, jax.Array]:
        return {"data": _masked(s, params, batch, *key), "rows": other * _mean(s, params, batch, *key)}

    return s.problem("terms", fun, weight_fn=lambda batch: {"data": _tokens(batch), "rows": _rows(batch)})


def _sound_policy(random: Random) -> Problem:
    """Policy gradient: advantages of mean 0, so that the loss and some gradients cancel."""
    s = setting(random, noise=0.2, narrow=0.15)
    advantages = _advantages(random, len(s.batch["x"]))
    s.batch["advantage"] = jnp.asarray(advantages, jnp.float32)
    surrogate = random.random() < 0.5

    def fun(params: Tree, batch: Tree, *key: Any) -> jax.Array:
        logp = -_cross_entropy(s.outputs(params, batch, *key), batch)
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
        return _mean(s, params, batch), 0.9 * carry + 0.1 * jnp.mean(s.outputs(params, batch))

    problem = s.problem("running statistics", fun, carry_argnum=2)
    return dataclasses.replace(problem, args=(jnp.float32(0),))


def _sound_decay(random: Random) -> Problem:
    s = setting(random, noise=0.3, narrow=0.2)
    decay = lambda params: sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(params))
    fun = lambda params, batch, *key: _mean(s, params, batch, *key) + 0.1 * s.scale * decay(params)
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


SOUND = {
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


def fault(kind: str, number: int) -> Problem:
    """Returns the loss of that number with that fault."""
    random = np.random.default_rng([1 + KINDS.index(kind), number])
    makers = FAULTS[kind]
    return makers[number % len(makers)](random)


def _unweighted(random: Random) -> Problem:
    s = setting(random, noise=0.3, narrow=0.1)
    return s.problem("masked mean without weight_fn", functools.partial(_masked, s))


def _wrong_weights(random: Random) -> Problem:
    s = setting(random, noise=0.3, narrow=0.1)
    return s.problem("mean over rows weighted by tokens", functools.partial(_mean, s), weight_fn=_tokens)


def _two_denominators(random: Random) -> Problem:
    s = setting(random, noise=0.3, narrow=0.1)
    fun = lambda params, batch, *key: _masked(s, params, batch, *key) + _mean(s, params, batch, *key)
    return s.problem("two denominators", fun, weight_fn=_tokens)


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
    return s.problem("sum over tokens", fun, weight_fn=_tokens if random.random() < 0.5 else None)


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
        return _mean(s, params, batch, *key) - s.scale * jnp.mean(spread)

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
    masked = random.random() < 0.3
    fun = functools.partial(_masked if masked else _mean, s)
    return s.problem("one key", fun, rng_argnum=None, weight_fn=_tokens if masked else None)


def _second_key(random: Random) -> Problem:
    s = setting(random, noise=1.0, narrow=0.2)

    def fun(params: Tree, batch: Tree, first: jax.Array, second: jax.Array) -> jax.Array:
        return _mean(s, params, batch, first) + _mean(s, params, batch, second)

    problem = s.problem("a second key", fun, rng_argnum=2)
    return dataclasses.replace(problem, args=(*problem.args, jax.random.key(7)))


def _narrow_sums(random: Random) -> Problem:
    s = setting(random, noise=0.2, narrow=0.0, scaled=0.0, rows=int(random.choice((16, 24, 33))))
    many, dtype = int(random.choice((8, 16))), random.choice((jnp.bfloat16, jnp.bfloat16, jnp.float16))
    return s.problem("narrow sums", functools.partial(_mean, s), accumulator_dtype=dtype, num_microbatches=many)


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
    fun = lambda params, batch, carry: (_mean(s, params, batch) * (1 + 0.3 * carry), carry + 1.0)
    problem = s.problem("a carry that scales the loss", fun, carry_argnum=2)
    return dataclasses.replace(problem, args=(jnp.float32(0),))


def _counts_calls(random: Random) -> Problem:
    s = setting(random, noise=0.2, narrow=0.2)
    calls: list[None] = []

    def fun(params: Tree, batch: Tree, *key: Any) -> jax.Array:
        calls.append(None)
        return _mean(s, params, batch, *key) * len(calls)

    return s.problem("counts its calls", fun)


def _numpy_noise(random: Random) -> Problem:
    s = setting(random, noise=0.2, narrow=0.2)
    hidden = np.random.default_rng(0)

    def fun(params: Tree, batch: Tree, *key: Any) -> jax.Array:
        each = s.each(params, batch, *key)
        return jnp.mean(each * hidden.uniform(0.5, 1.5, size=each.shape).astype(np.float32))

    return s.problem("NumPy's noise", fun)


FAULTS = {
    "weights": (_unweighted, _wrong_weights, _two_denominators, _unweighted_classes, _unweighted_terms),
    "sum": (_sum_of_rows, _sum_of_tokens, _sum_by_constant),
    "coupled examples": (_batch_norm, _contrastive, _ranking, _variance, _undeclared_groups),
    "shared key": (_one_key, _one_key, _second_key),
    "low-precision accumulator": (_narrow_sums,),
    "mutable state": (_carried_norm, _carried_count, _counts_calls, _numpy_noise),
}

if __name__ == "__main__":
    _measure.command(main)
