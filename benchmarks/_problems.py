"""What the peers are compared on: a model, its data, an optimizer and k; in JAX and, where asked, in PyTorch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Batch = tuple[np.ndarray, ...]
Params = dict[str, Any]  # arrays by name; all take them in the order of the names
TOLERANCE = 1e-3  # of the largest change in a leaf; rounding stays far below, a lost micro-batch is far above
RATE, MOMENTUM, EPSILON = 1e-2, 0.9, 1e-3  # with a smaller epsilon Adam makes steps of what is rounding

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "SGD": lambda: optax.sgd(RATE),
    "SGD, momentum": lambda: optax.sgd(RATE, MOMENTUM),
    "AdamW": lambda: optax.adamw(RATE, eps=EPSILON),
    "Muon": lambda: optax.contrib.muon(RATE),
}


class Problem(NamedTuple):
    """A model and what it is trained on.

    Attributes:
      name: what the tables call it.
      loss: `loss(params, *micro_batch)`, the mean over its rows, or over what `weight` counts.
      torch_loss: the same in PyTorch; None where nobody wrote it.
      params: the first parameters.
      batches: one for each update that is compared.
      optimizer: a key of `OPTIMIZERS`.
      k: micro-batches of a batch.
      weight: how much a micro-batch counts, for those that ask; None: all alike.
      skip: whether to leave micro-batches out that are not finite, for those that offer it.
      unroll: whether XLA is slow in a loop here (convolutions on a CPU).
      called: is called when the optimizer runs.
    """

    name: str
    loss: Callable[..., Any]
    torch_loss: Callable[..., Any] | None
    params: Params
    batches: list[Batch]
    optimizer: str
    k: int
    weight: Callable[..., Any] | None = None
    skip: bool = False
    unroll: bool = False
    called: Callable[[], None] | None = None

    @property
    def inner(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer, of Optax."""
        inner = optax.with_extra_args_support(OPTIMIZERS[self.optimizer]())
        if self.called is None:
            return inner

        def update(*args: Any, **extra_args: Any) -> tuple[Any, Any]:
            jax.debug.callback(self.called)
            return inner.update(*args, **extra_args)

        return optax.GradientTransformationExtraArgs(inner.init, update)

    @property
    def size(self) -> int:
        """Bytes of the parameters."""
        return sum(leaf.nbytes for leaf in self.params.values())

    def cut(self, batch: Batch) -> list[Batch]:
        """Returns micro-batches of consecutive rows; a batch of fewer rows has fewer of them."""
        rows = len(self.batches[0][0]) // self.k
        return [tuple(x[i : i + rows] for x in batch) for i in range(0, len(batch[0]), rows)]


def make(name: str, k: int = 8, size: int | None = None) -> Problem:
    """Returns a problem by its name, in k micro-batches; `size` is a width, for those that grow."""
    return PROBLEMS[name](name, k) if size is None else PROBLEMS[name](name, k, size)


def difference(got: Params, expected: Params, start: Params) -> float:
    """Returns the largest distance in a leaf, in units of its largest change; NaN if one did not change."""
    with np.errstate(divide="ignore", invalid="ignore"):
        leaves = [abs(got[n] - expected[n]).max() / abs(expected[n] - start[n]).max() for n in sorted(start)]
    return float(np.max(leaves))  # numpy's: a NaN stays one


def judge(case: object, differences: dict[str, float]) -> None:
    """Ends the run if a way disagrees beyond rounding."""
    for name, value in differences.items():
        if not value <= TOLERANCE:
            raise SystemExit(f"{case}: {name} is another update: difference={value:.1e}, tolerance={TOLERANCE:.0e}.")


def _normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    return np.float32(random.normal(size=shape) / np.sqrt(shape[-2]))


def _cnn(name: str, k: int, rows: int = 256) -> Problem:
    """Two convolutions and two layers, on the handwritten digits of scikit-learn."""
    from sklearn.datasets import load_digits

    random, digits = np.random.default_rng(0), load_digits()
    batches = [
        (np.float32(digits.images[i : i + rows, ..., None] / 16), np.int64(digits.target[i : i + rows]))
        for i in (0, rows, 2 * rows)
    ]
    params = {
        "conv_0": _normal(random, 3, 3, 1, 16),
        "conv_1": _normal(random, 3, 3, 16, 32) / 3,
        "dense_0": _normal(random, 16 * 32, 256),
        "dense_1": _normal(random, 256, 10),
    }

    def loss(params: Params, h: jax.Array, labels: jax.Array) -> jax.Array:
        for kernel in (params["conv_0"], params["conv_1"]):
            layout = ("NHWC", "HWIO", "NHWC")
            h = jnp.tanh(jax.lax.conv_general_dilated(h, kernel, (1, 1), "SAME", dimension_numbers=layout))
        h = h.reshape(len(h), 4, 2, 4, 2, -1).mean((2, 4)).reshape(len(h), -1)
        h = jnp.tanh(h @ params["dense_0"]) @ params["dense_1"]
        return optax.softmax_cross_entropy_with_integer_labels(h, labels).mean()

    def torch_loss(params: Params, h: Any, labels: Any) -> Any:
        from torch.nn import functional as f

        h = h.permute(0, 3, 1, 2)
        for kernel in (params["conv_0"], params["conv_1"]):
            h = f.conv2d(h, kernel.permute(3, 2, 0, 1), padding=1).tanh()
        h = f.avg_pool2d(h, 2).permute(0, 2, 3, 1).flatten(1)
        return f.cross_entropy((h @ params["dense_0"]).tanh() @ params["dense_1"], labels)

    return Problem(name, loss, torch_loss, params, batches, "SGD", k, unroll=True)


def _decoder(
    name: str,
    k: int,
    width: int = 128,
    layers: int = 8,
    rows: int = 32,
    length: int = 16,
    dtype: Any = jnp.float32,
    scanned: bool = True,
) -> Problem:
    """Causal attention of one head and a wide product in each layer, recomputed in the backward pass.

    It computes in `dtype`, and its layers are a scan, or a loop of Python that takes them out of stacked parameters.
    """
    random = np.random.default_rng(0)
    params = {
        "down": _normal(random, layers, 4 * width, width),
        "qkv": _normal(random, layers, width, 3 * width),
        "up": _normal(random, layers, width, 4 * width),
    }
    batches = [(np.float32(random.normal(size=(rows, length, width))),) for _ in range(2)]
    future = np.triu(np.full((length, length), -1e9, np.float32), 1)

    @jax.checkpoint
    def layer(h: jax.Array, weights: Params) -> jax.Array:
        norm = lambda h: h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-3)
        q, keys, v = jnp.split(norm(h) @ weights["qkv"], 3, axis=-1)
        h = h + jax.nn.softmax(q @ keys.mT / width**0.5 + future.astype(h.dtype)) @ v
        return h + jnp.tanh(norm(h) @ weights["up"]) @ weights["down"]

    def loss(params: Params, x: jax.Array) -> jax.Array:
        params, h = jax.tree.map(lambda leaf: leaf.astype(dtype), (params, x))
        if scanned:
            h, _ = jax.lax.scan(lambda h, weights: (layer(h, weights), None), h, params)
        else:
            for number in range(layers):
                h = layer(h, {name: stack[number] for name, stack in params.items()})
        return jnp.mean((h[:, :-1] - x[:, 1:]) ** 2)

    def torch_loss(params: Params, x: Any) -> Any:
        import torch
        from torch.utils.checkpoint import checkpoint

        def layer(h: Any, qkv: Any, up: Any, down: Any) -> Any:
            norm = lambda h: h * (h.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
            q, keys, v = (norm(h) @ qkv).chunk(3, dim=-1)
            h = h + (q @ keys.mT / width**0.5 + torch.from_numpy(future)).softmax(-1) @ v
            return h + (norm(h) @ up).tanh() @ down

        h = x
        for weights in zip(*(params[name].unbind() for name in ("qkv", "up", "down")), strict=True):
            h = checkpoint(layer, h, *weights, use_reentrant=False)
        return (h[:, :-1] - x[:, 1:]).square().mean()

    written = torch_loss if dtype == jnp.float32 else None
    return Problem(name, loss, written, params, batches, "AdamW", k)


def _mlp(name: str, k: int, width: int = 256, optimizer: str = "Muon", layers: int = 4, rows: int = 64) -> Problem:
    """Square layers; `size` is their width."""
    random = np.random.default_rng(0)
    params = {f"layer_{i}": _normal(random, width, width) for i in range(layers)}
    row = lambda: np.float32(random.normal(size=(rows, width)))
    batches = [(row(), row()) for _ in range(2)]

    def loss(params: Params, h: jax.Array, y: jax.Array) -> jax.Array:
        for name in sorted(params):
            h = jnp.tanh(h @ params[name])
        return jnp.mean((h - y) ** 2)

    def torch_loss(params: Params, h: Any, y: Any) -> Any:
        for name in sorted(params):
            h = (h @ params[name]).tanh()
        return (h - y).square().mean()

    return Problem(name, loss, torch_loss, params, batches, optimizer, k)


def _leaves(name: str, k: int, leaves: int = 2000, rows: int = 64) -> Problem:
    """One layer whose columns are so many parameters: little to compute, much to hand over."""
    random = np.random.default_rng(0)
    params = {f"leaf_{i:04}": np.float32(random.normal(size=8)) for i in range(leaves)}
    batches = [(np.float32(random.normal(size=(rows, 8))), np.float32(random.normal(size=rows))) for _ in range(2)]

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ jnp.stack([params[name] for name in sorted(params)], 1)).mean(1) - y) ** 2)

    def torch_loss(params: Params, x: Any, y: Any) -> Any:
        import torch

        columns = torch.stack([params[name] for name in sorted(params)], 1)
        return ((x @ columns).tanh().mean(1) - y).square().mean()

    return Problem(name, loss, torch_loss, params, batches, "SGD, momentum", k)


def _gradients(name: str, k: int, width: int = 512, optimizer: str = "AdamW", layers: int = 16) -> Problem:
    """A loss whose gradients are its rows: what is left is to add them and to update."""
    random = np.random.default_rng(0)
    params = {f"layer_{i:02}": _normal(random, width, width) for i in range(layers)}
    start = [random.standard_normal((1, width, width), np.float32) for _ in params]
    # No entry changes its sign within a window: where a mean cancels, its rounding is not that of its terms.
    share = 1 + 0.5 * np.cos(np.arange(k, dtype=np.float32))[:, None, None]
    batches = [tuple(share * leaf for leaf in start)]

    def loss(params: Params, *rows: jax.Array) -> jax.Array:
        return sum(jnp.sum(x.mean(0) * params[name]) for name, x in zip(sorted(params), rows, strict=True))

    return Problem(name, loss, None, params, batches, optimizer, k)


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "CNN on digits": _cnn,
    "decoder of stacked layers": _decoder,
    "decoder in bfloat16": functools.partial(_decoder, dtype=jnp.bfloat16),
    "decoder in a Python loop": functools.partial(_decoder, scanned=False),
    "MLP with Muon": _mlp,
    "model of 2000 leaves": _leaves,
    "model of 100 leaves": functools.partial(_leaves, leaves=100),
    "MLP": lambda name, k, width=256: _mlp(name, k, width, "AdamW"),
    "AdamW, 4.2 M": _gradients,
    "Muon, 4.2 M": functools.partial(_gradients, optimizer="Muon"),
}
