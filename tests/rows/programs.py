"""Random losses, of nested pieces: some take rows one by one, some together, some in groups or in another order."""

import jax
import jax.numpy as jnp
import numpy as np

ROWS, TOKENS, WIDTH = 12, 3, 4


def values():
    """Parameters and a batch."""
    random = np.random.default_rng(7)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape) / 2, jnp.float64)
    whole = lambda top, *shape: jnp.asarray(random.integers(0, top, shape))
    params = {
        "w": normal(4, WIDTH, WIDTH),
        "scale": 1 + normal(4, WIDTH) / 4,
        "table": normal(5, WIDTH),
        "out": normal(WIDTH, 5),
    }
    batch = {
        "x": normal(ROWS, TOKENS, WIDTH),
        "t": whole(5, ROWS, TOKENS),
        "group": whole(3, ROWS),
        "mask": jnp.asarray(random.random((ROWS, TOKENS)) < 0.7, jnp.float64),
        "y": normal(ROWS),
    }
    return params, batch


class Writer:
    """Writes one random loss: its pieces are chosen once, by its number."""

    def __init__(self, number):
        self.random = np.random.default_rng(number)
        self.pieces = []  # names, for whoever looks for a fault

    def loss(self):
        """A loss of up to seven pieces, and an end."""
        pieces = [self.piece(depth=2) for _ in range(self.random.integers(2, 7))]
        end, start = self.choice(ENDS), self.choice(STARTS)
        self.pieces += [start.__name__, end.__name__]

        def loss(p, b):
            h = start(p, b)
            for piece in pieces:
                h = piece(p, b, h)
            return end(p, b, h)

        return loss

    def choice(self, table):
        """One of a table."""
        return table[self.random.integers(len(table))]

    def piece(self, depth):
        """A function of parameters, batch and hidden states [n, T, D], to other hidden states."""
        nest = self.random.random() < 0.3 and depth
        piece = self.choice(NESTS)(self.piece(depth - 1)) if nest else self.choice(PIECES)
        self.pieces.append(piece.__name__)
        index = int(self.random.integers(4))
        return lambda p, b, h: piece(p | {"w1": p["w"][index], "s1": p["scale"][index]}, b, h)


def by_token(p, b):
    return p["table"][b["t"]]


def given(p, b):
    return b["x"]


def both(p, b):
    return b["x"] + jnp.take(p["table"], b["t"], axis=0)


STARTS = [by_token, given, both]


def wide(rows):
    """Numbers [n] as [n, 1, 1]."""
    return rows[:, None, None]


# Rows one by one


def dense(p, b, h):
    return jnp.tanh(h @ p["w1"])


def residual(p, b, h):
    return h + jax.nn.gelu(h @ p["w1"]) * p["s1"][None, None]


def rectified(p, b, h):
    return jax.nn.softplus(h @ p["w1"]) - jax.nn.relu(h)


def norm_of_features(p, b, h):
    return (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-2) * p["s1"][None, None]


def attention(p, b, h):
    scores = jnp.einsum("ntd,nsd->nts", h @ p["w1"], h)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores.shape)
    return jnp.einsum("nts,nsd->ntd", jax.nn.softmax(jnp.where(causal, scores, -1e9)), h)


def sums_of_tokens(p, b, h):
    return jnp.cumsum(h, axis=1) / TOKENS


def sorted_features(p, b, h):
    return jnp.sort(h @ p["w1"], axis=-1)


def best_features(p, b, h):
    gate, index = jax.lax.top_k(h @ p["w1"], 2)
    return h * jnp.sum(jax.nn.one_hot(index, WIDTH, dtype=h.dtype) * jax.nn.softmax(gate)[..., None], axis=-2)


def tokens_first(p, b, h):
    first = jnp.swapaxes(h, 0, 1)
    _, hidden = jax.lax.scan(lambda c, x: (jnp.tanh(c + x),) * 2, jnp.zeros_like(first[0]), first @ p["w1"])
    return jnp.swapaxes(hidden, 0, 1)


def flat(p, b, h):
    return jnp.tanh(h.reshape(-1, WIDTH) @ p["w1"]).reshape(h.shape)


def padded(p, b, h):
    longer = jnp.pad(h, ((0, 0), (1, 1), (0, 0)))
    return (longer[:, :-2] + longer[:, 2:]) @ p["w1"]


def window_of_tokens(p, b, h):
    return jax.lax.conv_general_dilated(
        h, jnp.stack([p["w1"], p["w1"].T]), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


def of_each_row(p, b, h):
    return jax.vmap(lambda h, t: jnp.tanh(h) * p["table"][t])(h, b["t"])


def updated(p, b, h):
    return h.at[:, 0].set(jnp.tanh(h[:, 1] @ p["w1"])).at[:, :, 1].add(0.5)


def joined(p, b, h):
    return jnp.concatenate([jnp.sin(h), b["x"]], axis=-1) @ jnp.concatenate([p["w1"]] * 2)


# Rows in groups


def in_pairs(p, b, h):
    pairs = h.reshape(-1, 2, TOKENS, WIDTH)
    return (pairs - pairs.mean(1, keepdims=True)).reshape(h.shape)


def in_threes(p, b, h):
    return (h.reshape(-1, 3, TOKENS, WIDTH)[:, ::-1]).reshape(h.shape)


# Rows together


def norm_of_rows(p, b, h):
    return (h - h.mean((0, 1), keepdims=True)) * jax.lax.rsqrt(h.var((0, 1), keepdims=True) + 1e-2)


def masked_norm(p, b, h):
    mask = b["mask"][..., None]
    mean = (h * mask).sum((0, 1), keepdims=True) / mask.sum()
    return h - mean


def softmax_of_rows(p, b, h):
    return h + len(h) * jax.nn.softmax(h, axis=0)


def rolled(p, b, h):
    return h + jnp.tanh(jnp.roll(h, 1, axis=0) @ p["w1"])


def sums_of_rows(p, b, h):
    return h + jnp.cumsum(h, axis=0) / len(h)


def means_of_groups(p, b, h):
    total = jax.ops.segment_sum(h, b["group"], 3)
    count = jax.ops.segment_sum(jnp.ones(len(h), h.dtype), b["group"], 3)
    return h - (total / jnp.maximum(wide(count), 1))[b["group"]]


def over_the_largest(p, b, h):
    return h / (1 + jnp.max(jnp.abs(h + b["x"]), axis=0, keepdims=True))  # no two rows are alike


def over_a_still_maximum(p, b, h):
    return jnp.exp(h - jax.lax.stop_gradient(jnp.max(h)))


def sorted_rows(p, b, h):
    return h + jnp.sort(h, axis=0)


def in_order_of(p, b, h):
    return h + h[jnp.argsort(b["y"])] @ p["w1"]


def all_pairs(p, b, h):
    flat = h.reshape(len(h), -1)
    return (jax.nn.softmax(flat @ flat.T) @ flat).reshape(h.shape) + h


def decorrelated(p, b, h):
    rows = h.reshape(-1, WIDTH)
    return h @ (rows.T @ rows) / len(rows)


def later_less_earlier(p, b, h):
    return h + jnp.concatenate([h[1:] - h[:-1], h[:1]])


def weighed_by_the_batch(p, b, h):
    weight = jax.nn.softmax(b["y"]) * len(h)
    return h * wide(weight)


PIECES = [
    *(dense, residual, rectified, norm_of_features, attention, sums_of_tokens, sorted_features, best_features),
    *(tokens_first, flat, padded, window_of_tokens, of_each_row, updated, joined, in_pairs, in_threes, norm_of_rows),
    *(masked_norm, softmax_of_rows, rolled, sums_of_rows, means_of_groups, over_the_largest, over_a_still_maximum),
    *(sorted_rows, in_order_of, all_pairs, decorrelated, later_less_earlier, weighed_by_the_batch),
]

# Pieces around others


def checkpointed(piece):
    def run(p, b, h):
        return jax.checkpoint(piece)(p, b, h)

    return run


def jitted(piece):
    def run(p, b, h):
        return jax.jit(piece)(p, b, h)

    return run


def layers(piece):
    def run(p, b, h):
        each = {"w": jnp.stack([p["w"]] * 2), "scale": jnp.stack([p["scale"]] * 2)}
        return jax.lax.scan(lambda h, w: (jnp.tanh(piece(p | w, b, h)), None), h, each)[0]

    return run


def branches(piece):
    def run(p, b, h):
        return jax.lax.cond(p["scale"][0, 0] > 1, lambda h: piece(p, b, h), jnp.sin, h)

    return run


def beside(piece):
    def run(p, b, h):
        return h + 0.5 * piece(p, b, h)

    return run


NESTS = [checkpointed, jitted, layers, branches, beside, beside]

# Ends


def mean(p, b, h):
    return jnp.mean(h**2)


def masked(p, b, h):
    logits = jax.nn.log_softmax(h @ p["out"])
    chosen = jnp.take_along_axis(logits, b["t"][..., None], axis=-1)[..., 0]
    return -jnp.sum(chosen * b["mask"]) / jnp.sum(b["mask"])


def of_each_sequence(p, b, h):
    per_row = jnp.sum(h.mean(-1) * b["mask"], 1) / jnp.maximum(jnp.sum(b["mask"], 1), 1)
    return jnp.mean(per_row * b["y"])


def advantages(p, b, h):
    advantage = (b["y"] - b["y"].mean()) / (b["y"].std() + 1e-6)
    return jnp.mean(jnp.clip(jnp.exp(h.mean((1, 2))), 0.5, 2) * advantage)


def counted_by_the_model(p, b, h):
    return jnp.sum(jnp.where(h > 0.1, h, 0)) / jnp.maximum(jnp.sum(h > 0.1), 1)


def contrast(p, b, h):
    flat = h.reshape(len(h), -1)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(flat @ flat.T)))


def terms(p, b, h):
    return masked(p, b, h) + 0.1 * jnp.mean(h**2) + 1e-2 * jnp.sum(p["w"] ** 2)


def total(p, b, h):
    return jax.nn.logsumexp(h) + jnp.sum(h)


ENDS = [mean, masked, of_each_sequence, advantages, counted_by_the_model, contrast, terms, total]
