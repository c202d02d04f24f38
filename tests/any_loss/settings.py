"""What losses that are drawn are made of: models, comparisons, noise, dtypes, sizes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optax_accum
from benchmarks._measure import Tree

Random = np.random.Generator
Maker = Callable[[Random], "Problem"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A loss, and how it is split. In a batch "x" are inputs, all else says what they are compared with."""

    name: str
    fun: Callable[..., Any]
    params: Tree
    batch: dict[str, jax.Array]
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def has_aux(self) -> bool:
        """Whether `fun` returns more than the loss."""
        return not {"has_aux", "carry_argnum"}.isdisjoint(self.options)

    @property
    def is_narrow(self) -> bool:
        """Whether it computes in 16 bits."""
        return any(dtype in self.name for dtype in ("bfloat16", "float16"))

    def loss(self, *args: Any) -> jax.Array:
        """Returns the loss as one number."""
        out = self.fun(*args)
        out = out[0] if self.has_aux else out
        is_ratio = lambda part: isinstance(part, optax_accum.Ratio)
        terms = jax.tree.leaves(out, is_leaf=is_ratio)
        return sum(term.total / term.count if is_ratio(term) else term for term in terms)


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


def cross_entropy(outputs: jax.Array, batch: Tree) -> jax.Array:
    """Returns that of each row, or of each place."""
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), batch["label"][..., None], -1)[..., 0]


COMPARISONS = {"squared": _squared, "huber": _huber, "cross-entropy": cross_entropy}


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


def masked(s: Setting, params: Tree, batch: Tree, *key: Any) -> jax.Array:
    """Returns the mean over what the mask counts."""
    return jnp.sum(batch["mask"] * s.each(params, batch, *key)) / jnp.sum(batch["mask"])


def mean(s: Setting, params: Tree, batch: Tree, *key: Any) -> jax.Array:
    """Returns the mean over rows, or over places."""
    return jnp.mean(s.each(params, batch, *key))


def tokens(batch: Tree) -> jax.Array:
    """Returns how much the mask counts."""
    return batch["mask"].sum()


def row_count(batch: Tree) -> jax.Array:
    """Returns the number of rows."""
    return jnp.float32(len(batch["mask"]))
