"""Public transformers, restated small, with the lines that decide how rows belong together."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from benchmarks._measure import Tree
from tests.public_models.others import KEY, Maker, Model, Random, dense, integers, mlp, normal

HEADS, WORDS = 2, 23


class _Block(nn.Module):
    """Attention and a dense part, each with its norm before it and dropout after it."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.MultiHeadDotProductAttention(num_heads=HEADS)(nn.LayerNorm()(x))
        x = x + nn.Dropout(0.1, deterministic=False)(h)
        h = nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.1, deterministic=False)(h)


class _ViT(nn.Module):
    """Patches, of which a class token or the probe of a head (MAP) takes what counts."""

    width: int
    head: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (4, 4), strides=(4, 4), padding="VALID")(x)
        n, height, width, c = x.shape
        x = jnp.reshape(x, [n, height * width, c])
        if self.head == "token":
            cls = self.param("cls", nn.initializers.zeros, (1, 1, c))
            x = jnp.concatenate([jnp.tile(cls, [n, 1, 1]), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], c))
        for _ in range(2):
            x = _Block()(x)
        x = nn.LayerNorm()(x)
        if self.head == "map":
            probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, c))
            x = nn.MultiHeadDotProductAttention(num_heads=HEADS)(jnp.tile(probe, [n, 1, 1]), x)
            x = x + nn.Dense(c)(nn.gelu(nn.Dense(4 * c)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x[:, 0])


def _vit(random: Random, rows: int, width: int, head: str) -> Model:
    batch = {"image": normal(random, rows, 16, 16, 3, scale=1), "label": integers(random, 10, rows)}
    model = _ViT(width, head)
    params = jax.jit(model.init)({"params": KEY, "dropout": KEY}, batch["image"][:2])["params"]

    def loss(params: Tree, batch: Tree, key: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, batch["image"], rngs={"dropout": key})
        if head == "token":
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return optax.sigmoid_binary_cross_entropy(logits, jax.nn.one_hot(batch["label"], 10)).sum(-1).mean()

    return Model(loss, params, batch, (KEY,))


def vit(random: Random, rows: int, width: int) -> Model:
    """ViT of google-research/vision_transformer: a class token [1, 1, c], tiled, and dropout."""
    return _vit(random, rows, width, "token")


def vit_map(random: Random, rows: int, width: int) -> Model:
    """ViT of big_vision: a probe [1, 1, c], tiled, attends to all patches; a sigmoid for each class."""
    return _vit(random, rows, width, "map")


def attention(random: Random, width: int) -> Tree:
    """Returns the parameters of `attend`."""
    return {name: normal(random, width, width) for name in ("q", "k", "v", "out")}


def attend(params: Tree, x: jax.Array, y: jax.Array, bias: jax.Array | float = 0.0) -> jax.Array:
    """Returns attention of x [n, q, c] to y [n, k, c], with a bias [n or 1, heads or 1, q or 1, k]."""
    split = lambda h: h.reshape(*h.shape[:2], HEADS, -1)
    q, k, v = split(x @ params["q"]), split(y @ params["k"]), split(y @ params["v"])
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / np.sqrt(q.shape[-1]) + bias
    return jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ params["out"]


def block(random: Random, width: int, *, cross: bool = False) -> Tree:
    """Returns the parameters of `apply`."""
    parts = {"self": attention(random, width), "dense": dense(random, width, 4 * width, width)}
    parts |= {"cross": attention(random, width)} if cross else {}
    return parts | {"scales": {name: 1 + normal(random, width, scale=0.1) for name in parts}}


def apply(
    params: Tree, x: jax.Array, bias: jax.Array | float = 0.0, y: jax.Array | None = None, of_y: jax.Array | float = 0.0
) -> jax.Array:
    """Returns a block with its norms before: attention to itself, to `y`, and a dense part."""
    normed = lambda name: layer_norm(x) * params["scales"][name]
    x = x + attend(params["self"], normed("self"), normed("self"), bias)
    if y is not None:
        x = x + attend(params["cross"], normed("cross"), y, of_y)
    return x + mlp(params["dense"], normed("dense"), jax.nn.gelu)


def layer_norm(x: jax.Array) -> jax.Array:
    """Returns features of mean 0 and variance 1."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def causal(length: int) -> jax.Array:
    """Returns the bias that hides later tokens."""
    return jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -1e9)[None, None]


def masked_mean(each: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the mean over the tokens that count."""
    return jnp.sum(each * mask) / jnp.sum(mask)


def sentences(random: Random, rows: int, length: int) -> jax.Array:
    """Returns tokens, padded with 0; the last word of each is the largest."""
    ends = random.integers(2, length, (rows, 1))
    places = np.arange(length)[None]
    tokens = np.where(places == ends, WORDS - 1, random.integers(1, WORDS - 1, (rows, length)))
    return jnp.asarray(np.where(places <= ends, tokens, 0), jnp.int32)


def clip(random: Random, rows: int, width: int) -> Model:
    """CLIP: a class token, the features of the end of a text, and the scores of all pairs, by rows and by columns."""
    length, patches = 6, 4
    params = {
        "patch": normal(random, 12, width),
        "class": normal(random, width, scale=0.1),
        "image_positions": normal(random, patches + 1, width, scale=0.1),
        "image": block(random, width),
        "words": normal(random, WORDS, width, scale=0.3),
        "text_positions": normal(random, length, width, scale=0.1),
        "text": block(random, width),
        "image_out": normal(random, width, width),
        "text_out": normal(random, width, width),
        "logit_scale": jnp.float32(np.log(1 / 0.07)),
    }

    def of_images(params: Tree, patches: jax.Array) -> jax.Array:
        x = patches @ params["patch"]
        first = jnp.tile(params["class"][None, None], (x.shape[0], 1, 1))
        x = jnp.concatenate([first, x], axis=1) + params["image_positions"]
        return layer_norm(apply(params["image"], x))[:, 0] @ params["image_out"]

    def of_texts(params: Tree, tokens: jax.Array) -> jax.Array:
        x = apply(params["text"], params["words"][tokens] + params["text_positions"], causal(length))
        return layer_norm(x)[jnp.arange(x.shape[0]), tokens.argmax(axis=-1)] @ params["text_out"]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        images, texts = of_images(params, batch["patches"]), of_texts(params, batch["tokens"])
        images, texts = (h / jnp.linalg.norm(h, axis=-1, keepdims=True) for h in (images, texts))
        logits = jnp.exp(params["logit_scale"]) * images @ texts.T
        own = jnp.arange(logits.shape[0])
        ways = [optax.softmax_cross_entropy_with_integer_labels(each, own).mean() for each in (logits, logits.T)]
        return (ways[0] + ways[1]) / 2

    batch = {"patches": normal(random, rows, patches, 12, scale=1), "tokens": sentences(random, rows, length)}
    return Model(loss, params, batch)


def whisper(random: Random, rows: int, width: int) -> Model:
    """Whisper: two convolutions over sound, the second with a stride, and a decoder of padded texts that attends."""
    time, mels, length = 16, 5, 7
    params = {
        "conv1": normal(random, 3, mels, width),
        "conv2": normal(random, 3, width, width),
        "encoder": block(random, width),
        "words": normal(random, WORDS, width, scale=0.3),
        "positions": normal(random, 2 * length, width, scale=0.1),
        "decoder": block(random, width, cross=True),
    }
    angles = np.arange(time // 2)[:, None] / 1e4 ** np.linspace(0, 1, width // 2)
    waves = jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), jnp.float32)

    def conv(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
        return jax.nn.gelu(
            jax.lax.conv_general_dilated(x, w, (stride,), [(1, 1)], dimension_numbers=("NHC", "HIO", "NHC"))
        )

    def loss(params: Tree, batch: Tree) -> jax.Array:
        sound = conv(conv(batch["mel"], params["conv1"], 1), params["conv2"], 2) + waves
        sound = layer_norm(apply(params["encoder"], sound))
        tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        x = params["words"][tokens] + params["positions"][: tokens.shape[1]]
        x = layer_norm(apply(params["decoder"], x, causal(tokens.shape[1]), sound))
        each = optax.softmax_cross_entropy_with_integer_labels(x @ params["words"].T, labels)
        return masked_mean(each, labels != 0)

    batch = {"mel": normal(random, rows, time, mels, scale=1), "tokens": sentences(random, rows, length + 1)}
    return Model(loss, params, batch)


def gpt2(random: Random, rows: int, width: int) -> Model:
    """GPT-2: learned positions, of which a text takes the first, layers in a scan, a tied embedding."""
    length, depth = 16, 2
    layers = [block(random, width) for _ in range(depth)]
    params = {
        "wte": normal(random, WORDS, width, scale=0.3),
        "wpe": normal(random, 2 * length, width, scale=0.1),
        "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers),
    }

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        places = inputs.shape[1]
        h = params["wte"][inputs] + params["wpe"][:places]
        h, _ = jax.lax.scan(lambda h, layer: (apply(layer, h, causal(places)), None), h, params["layers"])
        logits = layer_norm(h) @ params["wte"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return Model(loss, params, integers(random, WORDS, rows, length + 1))


def _buckets(length: int, *, both_ways: bool, number: int = 8, far: int = 16) -> jax.Array:
    """Returns the bucket of each distance: one for each of the near, wider ones for the far."""
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    first = np.where(both_ways & (distance < 0), number // 2, 0)
    number = number // 2 if both_ways else number
    distance = np.abs(distance) if both_ways else np.maximum(distance, 0)
    near = number // 2
    wide = near + (np.log(np.maximum(distance, 1) / near) / np.log(far / near) * (number - near)).astype(int)
    return jnp.asarray(first + np.where(distance < near, distance, np.minimum(wide, number - 1)))


def t5(random: Random, rows: int, width: int) -> Model:
    """T5: biases by relative position for all layers, padded inputs and targets, a z-loss."""
    length = 9
    params = {
        "words": normal(random, WORDS, width, scale=0.3),
        "far_in_inputs": normal(random, 8, HEADS, scale=0.3),
        "far_in_targets": normal(random, 8, HEADS, scale=0.3),
        "encoder": [block(random, width) for _ in range(2)],
        "decoder": [block(random, width, cross=True) for _ in range(2)],
    }
    relative = lambda table, both_ways: table[_buckets(length, both_ways=both_ways)].transpose(2, 0, 1)[None]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        hidden = jnp.where(batch["inputs"] > 0, 0.0, -1e9)[:, None, None, :]
        bias = relative(params["far_in_inputs"], True) + hidden
        x = params["words"][batch["inputs"]]
        for layer in params["encoder"]:
            x = apply(layer, x, bias)
        x = layer_norm(x)
        shifted = jnp.pad(batch["targets"][:, :-1], ((0, 0), (1, 0)))
        bias = relative(params["far_in_targets"], False) + causal(length)
        y = params["words"][shifted]
        for layer in params["decoder"]:
            y = apply(layer, y, bias, x, hidden)
        logits = layer_norm(y) @ params["words"].T / np.sqrt(width)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        each += 1e-4 * jax.nn.logsumexp(logits, axis=-1) ** 2
        return masked_mean(each, batch["targets"] > 0)

    batch = {name: sentences(random, rows, length) for name in ("inputs", "targets")}
    return Model(loss, params, batch)


def moe(random: Random, rows: int, width: int) -> Model:
    """A mixture of experts as in MaxText: all tokens sorted by expert, ragged products, a balance over the batch."""
    length, experts, chosen = 5, 4, 2
    params = {
        "words": normal(random, WORDS, width, scale=1),
        "router": normal(random, width, experts),
        "up": normal(random, experts, width, 2 * width),
        "down": normal(random, experts, 2 * width, width),
    }

    def mixed(params: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        shares = jax.nn.softmax(x @ params["router"])
        weights, to = jax.lax.top_k(shares, chosen)
        order = jnp.argsort(to.reshape(-1))
        sizes = jnp.bincount(to.reshape(-1), length=experts)
        h = x[order // chosen]
        h = jax.lax.ragged_dot(jax.nn.silu(jax.lax.ragged_dot(h, params["up"], sizes)), params["down"], sizes)
        h = h[jnp.argsort(order)].reshape(*to.shape, -1)
        used = jnp.mean(jax.nn.one_hot(to, experts), axis=(0, 1))
        weights = weights / weights.sum(-1, keepdims=True)
        return jnp.einsum("tc,tcd->td", weights, h), experts * jnp.sum(used * shares.mean(0))

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        x = params["words"][tokens[:, :-1]]
        h, balance = mixed(params, x.reshape(-1, x.shape[-1]))
        logits = (x + h.reshape(x.shape)) @ params["words"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean() + 0.01 * balance

    return Model(loss, params, integers(random, WORDS, rows, length + 1))


MODELS: dict[str, Maker] = {
    "ViT, class token, dropout": vit,
    "ViT, MAP head": vit_map,
    "CLIP": clip,
    "Whisper": whisper,
    "GPT-2": gpt2,
    "T5": t5,
    "MoE, sorted, ragged_dot": moe,
}
