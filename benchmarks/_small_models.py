"""Thirty small models of many kinds, each a loss of parameters and rows."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks._measure import Tree


class Small(NamedTuple):
    """A loss of `params` and a batch of so many rows."""

    loss: Callable[[Tree, Any], jax.Array]
    params: Tree
    row: Any  # its shapes, without the rows
    rows: int = 512

    @property
    def batch(self) -> Any:
        """The shapes of the batch."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((self.rows, *leaf.shape), leaf.dtype), self.row)


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array."""
    return jax.ShapeDtypeStruct(dims, dtype)


def ids(*dims: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array of integers."""
    return shape(*dims, dtype=jnp.int32)


def square(y: jax.Array) -> jax.Array:
    """Returns the mean of squares."""
    return jnp.mean(y.astype(jnp.float32) ** 2)


def dense(*widths: int, dtype: Any = jnp.float32) -> list[jax.ShapeDtypeStruct]:
    """Returns matrices from width to width."""
    return [shape(a, b, dtype=dtype) for a, b in itertools.pairwise(widths)]


def layers(act: Callable[[jax.Array], jax.Array]) -> Callable[[Tree, jax.Array], jax.Array]:
    """Returns the loss of layers with an activation between them."""

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        for w in params[:-1]:
            x = act(x @ w)
        return square(x @ params[-1])

    return loss


def scanned(wrap: Callable[..., Any]) -> Callable[[Tree, jax.Array], jax.Array]:
    """Returns the loss of equal layers in a scan."""
    layer = wrap(lambda h, w: (h + jnp.tanh(h @ w), None))
    return lambda params, x: square(jax.lax.scan(layer, x, params)[0])


def softmax(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def convolve(x: jax.Array, w: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    """Returns a convolution over height and width, or over a length."""
    of = ("NHWC", "HWIO", "NHWC") if x.ndim == 4 else ("NHC", "HIO", "NHC")
    strides = (stride,) * (x.ndim - 2)
    return jax.lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=of, feature_group_count=groups)


def recurrent(cell: Callable[..., jax.Array], width: int) -> Callable[[Tree, jax.Array], jax.Array]:
    """Returns the loss of a recurrence over the second axis."""

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        step = lambda h, x: (cell(params, h, x),) * 2
        return square(jax.lax.scan(step, jnp.zeros((x.shape[0], width)), x.swapaxes(0, 1))[1])

    return loss


def gated(params: Tree, h: jax.Array, x: jax.Array) -> jax.Array:
    """A cell with a gate."""
    gate = jax.nn.sigmoid(x @ params["in"] + h @ params["gate"])
    return gate * h + (1 - gate) * jnp.tanh(h @ params["new"])


def attend(params: Tree, h: jax.Array, heads: int = 4, *, causal: bool = False) -> jax.Array:
    """Returns attention of tokens to each other."""
    q, k, v = jnp.split((h @ params["qkv"]).reshape(*h.shape[:2], heads, -1), 3, axis=-1)
    return h + jax.nn.dot_product_attention(q, k, v, is_causal=causal).reshape(h.shape) @ params["out"]


def attention(width: int) -> Tree:
    """Returns the parameters of `attend`."""
    return {"qkv": shape(width, 3 * width), "out": shape(width, width)}


def decoder(*, again: bool) -> Callable[[Tree, jax.Array], jax.Array]:
    """Returns the loss of two blocks and a head, recomputed or not."""

    def block(h: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        h = attend(layer, h, causal=True)
        return h + jax.nn.gelu(h @ layer["up"]) @ layer["down"], None

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(jax.checkpoint(block) if again else block, params["embed"][tokens], params["layers"])
        return softmax(h[:, :-1] @ params["embed"].T, tokens[:, 1:])

    return loss


def of_decoder(vocabulary: int = 256, width: int = 64) -> Tree:
    """Returns its parameters."""
    up, down = shape(2, width, 4 * width), shape(2, 4 * width, width)
    block = {"qkv": shape(2, width, 3 * width), "out": shape(2, width, width), "up": up, "down": down}
    return {"embed": shape(vocabulary, width), "layers": block}


def unet(params: Tree, x: jax.Array) -> jax.Array:
    """Down, up, and across."""
    across = jax.nn.relu(convolve(x, params[0]))
    deep = jax.nn.relu(convolve(across, params[1], 2))
    up = jax.image.resize(deep, (*across.shape[:3], deep.shape[3]), "nearest")
    return square(convolve(jnp.concatenate([up, across], -1), params[2]))


def experts(params: Tree, x: jax.Array) -> jax.Array:
    """All experts, mixed."""
    share = jax.nn.softmax(x @ params["route"])
    return square(jnp.einsum("nd,edf,ne->nf", x, params["experts"], share))


def physics(params: Tree, x: jax.Array) -> jax.Array:
    """A derivative of the network in its input is part of the loss."""
    value = lambda x: (jnp.tanh(x @ params[0]) @ params[1]).sum()
    return square(jax.vmap(jax.grad(value))(x).sum(-1) - x.sum(-1))


def normed(params: Tree, x: jax.Array) -> jax.Array:
    """Layers with a norm over features."""
    for w in params:
        h = x @ w
        x = jax.nn.silu((h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-6))
    return square(x)


def graph(params: Tree, batch: Tree) -> jax.Array:
    """Messages along the edges of small graphs."""
    h = batch["nodes"]
    for w in params:
        h = jax.nn.relu(batch["edges"] @ h @ w)
    return square(h)


def items(params: Tree, batch: Tree) -> jax.Array:
    """Few of many embeddings, and many items to choose from."""
    return softmax(jnp.tanh(params["table"][batch["seen"]].mean(1)) @ params["items"], batch["next"])


def perceiver(params: Tree, x: jax.Array) -> jax.Array:
    """Few latents attend to many inputs."""
    weights = jax.nn.softmax(jnp.einsum("ld,nsd->nls", params["latents"], x @ params["k"]))
    return square(weights @ (x @ params["v"]))


def contrastive(params: Tree, batch: Tree) -> jax.Array:
    """All pairs of the rows of a micro-batch."""
    a, b = batch["a"] @ params[0], batch["b"] @ params[1]
    return softmax(a @ b.T, jnp.arange(a.shape[0]))


def ode(params: Tree, x: jax.Array) -> jax.Array:
    """Steps in time, of the same layer."""
    step = lambda h, _: (h + 0.1 * jnp.tanh(h @ params[0]) @ params[1], None)
    return square(jax.lax.scan(step, x, None, length=16)[0])


def fourier(params: Tree, x: jax.Array) -> jax.Array:
    """Mixed by frequencies."""
    return square(jnp.fft.irfft(jnp.fft.rfft(jax.nn.gelu(x @ params[0]), axis=1), n=x.shape[1], axis=1) @ params[1])


def patches(params: Tree, x: jax.Array) -> jax.Array:
    """Patches of pictures attend to each other."""
    return square(attend(params, convolve(x, params["patch"], 8).reshape(x.shape[0], -1, 64)))


def pooled(params: Tree, x: jax.Array) -> jax.Array:
    """Convolutions with pooling, and a head."""
    for w in params[:-1]:
        x = jax.lax.reduce_window(
            jax.nn.relu(convolve(x, w)), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"
        )
    return square(x.mean((1, 2)) @ params[-1])


MODELS: dict[str, Small] = {
    "linear": Small(layers(jnp.tanh), dense(64, 8), shape(64), 1024),
    "many classes": Small(lambda p, b: softmax(b["x"] @ p[0], b["y"]), dense(64, 2000), {"x": shape(64), "y": ids()}),
    "mlp": Small(layers(jnp.tanh), dense(64, 256, 64), shape(64)),
    "deep mlp": Small(layers(jax.nn.gelu), dense(64, 128, 128, 128, 128, 8), shape(64)),
    "mlp, 1000 rows": Small(layers(jax.nn.relu), dense(32, 512, 1), shape(32), 1000),
    "mlp, 720 rows": Small(layers(jax.nn.silu), dense(48, 192, 48), shape(48), 720),
    "mlp, bfloat16": Small(
        layers(jnp.tanh), dense(64, 256, 64, dtype=jnp.bfloat16), shape(64, dtype=jnp.bfloat16), 1024
    ),
    "autoencoder": Small(layers(jax.nn.relu), dense(256, 64, 8, 64, 256), shape(256)),
    "normed mlp": Small(normed, dense(64, 128, 128, 64), shape(64)),
    "layers in a scan": Small(scanned(lambda f: f), shape(6, 64, 64), shape(64), 1024),
    "layers recomputed": Small(scanned(jax.checkpoint), shape(6, 64, 64), shape(64), 1024),
    "convolutions": Small(pooled, [shape(3, 3, 3, 8), shape(3, 3, 8, 16), shape(16, 10)], shape(16, 16, 3), 256),
    "depthwise": Small(
        lambda p, x: square(convolve(jax.nn.relu(convolve(x, p[0], 1, 8)), p[1])),
        [shape(3, 3, 1, 8), shape(1, 1, 8, 16)],
        shape(16, 16, 8),
        128,
    ),
    "sound": Small(
        lambda p, x: square(convolve(jax.nn.relu(convolve(x, p[0], 2)), p[1])),
        [shape(9, 1, 16), shape(9, 16, 16)],
        shape(256, 1),
        128,
    ),
    "u-net": Small(unet, [shape(3, 3, 3, 8), shape(3, 3, 8, 8), shape(3, 3, 16, 3)], shape(24, 24, 3), 64),
    "patches": Small(patches, {**attention(64), "patch": shape(8, 8, 3, 64)}, shape(32, 32, 3), 256),
    "rnn": Small(
        recurrent(lambda p, h, x: jnp.tanh(x @ p["in"] + h @ p["h"]), 64),
        {"in": shape(16, 64), "h": shape(64, 64)},
        shape(32, 16),
        256,
    ),
    "gated rnn": Small(
        recurrent(gated, 64), {"in": shape(16, 64), "gate": shape(64, 64), "new": shape(64, 64)}, shape(32, 16), 256
    ),
    "attention": Small(lambda p, x: square(attend(p, x)), attention(64), shape(32, 64), 256),
    "causal attention": Small(lambda p, x: square(attend(p, x, causal=True)), attention(64), shape(64, 64), 96),
    "decoder": Small(decoder(again=False), of_decoder(), ids(32), 128),
    "decoder recomputed": Small(decoder(again=True), of_decoder(), ids(32), 128),
    "latents": Small(perceiver, {"latents": shape(8, 32), "k": shape(16, 32), "v": shape(16, 32)}, shape(64, 16), 256),
    "recommender": Small(
        items, {"table": shape(5000, 32), "items": shape(32, 500)}, {"seen": ids(16), "next": ids()}, 512
    ),
    "pairs": Small(contrastive, dense(32, 64) + dense(32, 64), {"a": shape(32), "b": shape(32)}, 512),
    "experts": Small(experts, {"route": shape(32, 8), "experts": shape(8, 32, 64)}, shape(32), 512),
    "graphs": Small(graph, dense(16, 32, 32), {"nodes": shape(24, 16), "edges": shape(24, 24)}, 256),
    "physics": Small(physics, dense(8, 128, 1), shape(8), 1024),
    "steps in time": Small(ode, dense(32, 64, 32), shape(32), 512),
    "fourier": Small(fourier, dense(32, 64, 32), shape(32, 32), 128),
}
