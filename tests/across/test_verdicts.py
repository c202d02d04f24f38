"""What is said of losses across calls: exact, not exact, or cannot be read; `explain` and the step say the same."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_accum
from tests.tiers import one_of_each, sweep

ROWS, TOKENS, WIDTH, EXPERTS, WORDS = 8, 6, 4, 3, 7
D, E = WIDTH, EXPERTS
RANDOM = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


PARAMS = {
    "w": normal(D, D) / 2,
    "o": normal(D, WORDS) / 2,
    "e": normal(E, D, D) / 2,
    "v": normal(D),
    "z": normal(40, D),
    "s": normal(1, D),
    "cls": normal(1, 1, D),
}
BATCH = {
    "x": normal(ROWS, D),
    "h": normal(ROWS, TOKENS, D),
    "y": normal(ROWS),
    "m": jnp.asarray([1, 0, 1, 1, 0, 1, 1, 1], jnp.float32),
    "mt": jnp.asarray(RANDOM.random((ROWS, TOKENS)) < 0.7, jnp.float32),
    "i": jnp.asarray(RANDOM.integers(0, WORDS, ROWS)),
    "it": jnp.asarray(RANDOM.integers(0, WORDS, (ROWS, TOKENS))),
    "g": jnp.asarray(RANDOM.integers(0, 3, ROWS)),
    "wt": jnp.asarray(RANDOM.random(ROWS) + 0.1, jnp.float32),
}
EXACT, NOT_EXACT, CANNOT_BE_READ = {}, {}, {}


def put(table):
    def add(fun):
        table[fun.__name__] = fun
        return fun

    return add


exact, not_exact, cannot_be_read = put(EXACT), put(NOT_EXACT), put(CANNOT_BE_READ)


net = lambda p, x: jnp.tanh(x @ p["w"])
per = lambda p, b: (net(p, b["x"]) @ p["v"] - b["y"]) ** 2


@exact
def mean(p, b):
    return per(p, b).mean()


@exact
def masked(p, b):
    return (per(p, b) * b["m"]).sum() / b["m"].sum()


@exact
def dropless(p, b):
    x = b["h"].reshape(-1, D)
    e = jnp.argmax(x @ p["w"][:, :E], -1)
    order = jnp.argsort(e)
    y = lax.ragged_dot(x[order], p["e"], jnp.bincount(e, length=E))
    y = y[jnp.argsort(order)]
    return jnp.mean(jnp.tanh(y) ** 2)


@exact
def dropless_scatter(p, b):
    x = b["h"].reshape(-1, D)
    e = jnp.argmax(x @ p["w"][:, :E], -1)
    order = jnp.argsort(e)
    y = lax.ragged_dot(x[order], p["e"], jnp.sum(jax.nn.one_hot(e, E, dtype=jnp.int32), 0))
    y = jnp.zeros_like(y).at[order].set(y)
    return jnp.mean(jnp.tanh(y + x) ** 2)


@exact
def sorted_sum(p, b):
    order = jnp.argsort(b["y"])
    return jnp.mean(net(p, b["x"][order]) ** 2)


@exact
def head_in_chunks(p, b):
    x = b["h"].reshape(-1, 2, D)

    def f(c, x):
        return c + jnp.sum(jax.nn.logsumexp(x @ p["o"], -1)), None

    return lax.scan(f, 0.0, x)[0] / (b["h"].shape[0] * TOKENS)


@exact
def head_in_chunks_masked(p, b):
    x = b["h"].reshape(-1, 3, D)
    m = b["mt"].reshape(-1, 3)
    t = b["it"].reshape(-1, 3)

    @jax.checkpoint
    def g(x, m, t):
        each = x @ p["o"]
        return jnp.sum(m * (jax.nn.logsumexp(each, -1) - jnp.take_along_axis(each, t[:, None], 1)[:, 0]))

    def f(c, a):
        return (c[0] + g(*a), c[1] + jnp.sum(a[1])), None

    (s, c), _ = lax.scan(f, (0.0, 0.0), (x, m, t))
    return s / c


@cannot_be_read
def map_in_blocks(p, b):
    """Of eight rows, two are left after two blocks of three."""
    each = lax.map(lambda x: jnp.where(x[0] > 0, jax.nn.softmax(x @ p["w"])[0], x @ p["v"]), b["x"], batch_size=3)
    return jnp.sum(b["m"] * each) / jnp.sum(b["m"])


@exact
def guidance(p, b):
    x = jnp.concatenate([b["x"], jnp.zeros_like(b["x"])], 0)
    y = net(p, x)
    a, c = jnp.split(y, 2)
    return jnp.mean((c + 2 * (a - c) - b["y"][:, None]) ** 2)


@exact
def tiled(p, b):
    return jnp.mean((jnp.tile(p["s"], (b["x"].shape[0], 1)) + net(p, b["x"])) ** 2)


@exact
def broadcasted(p, b):
    return jnp.mean(jnp.exp(jnp.broadcast_to(p["s"], (b["x"].shape[0], D))) * b["x"])


@exact
def class_token(p, b):
    return jnp.mean(net(p, jnp.concatenate([jnp.tile(p["cls"], (b["h"].shape[0], 1, 1)), b["h"]], 1))[:, 0] ** 2)


@exact
def keras_mean(p, b):
    v = per(p, b)
    return jnp.sum(v) / jnp.prod(jnp.array(v.shape)).astype(v.dtype)


@exact
def one_mask_as_booleans_and_floats(p, b):
    """Whose sum is taken three times: of booleans, which are integers then, and of floats."""
    kept = b["m"] > 0
    m = kept.astype(jnp.float32)
    by = jnp.where(kept, per(p, b), 0).sum() / kept.sum() + (kept * net(p, b["x"])[:, 0]).sum() / kept.sum()
    return by + (m * per(p, b) ** 2).sum() / m.sum()


@exact
def small_number_added(p, b):
    return (per(p, b) * b["m"]).sum() / (b["m"].sum() + 1e-6)


@exact
def cond_guard(p, b):
    s, c = (per(p, b) * b["m"]).sum(), b["m"].sum()
    return lax.cond(c > 0, lambda: s / (2 * c), lambda: 0.0)


@exact
def power_guard(p, b):
    return (per(p, b) * b["m"]).sum() * jnp.maximum(b["m"].sum(), 1) ** -1.0


@exact
def nan_guard(p, b):
    return jnp.nan_to_num((per(p, b) * b["m"]).sum() / b["m"].sum())


@exact
def top_guard(p, b):
    return (per(p, b) * b["m"]).sum() / jnp.minimum(b["m"].sum(), 1e9)


@exact
def bf16(p, b):
    return jnp.mean(per(p, b)).astype(jnp.bfloat16)


@exact
def bf16_back(p, b):
    return jnp.mean(per(p, b).astype(jnp.bfloat16)).astype(jnp.float32)


@exact
def bf16_masked(p, b):
    q = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)
    each = (net(q, b["x"].astype(jnp.bfloat16)) @ q["v"] - b["y"].astype(jnp.bfloat16)) ** 2
    m = b["m"].astype(jnp.bfloat16)
    return (jnp.sum(each * m) / jnp.sum(m)).astype(jnp.float32)


@exact
def f16(p, b):
    return (jnp.mean(per(p, b)).astype(jnp.float16)).astype(jnp.float32)


@exact
def packed_loss(p, b):
    return jnp.sum(jax.nn.logsumexp(b["h"] @ p["o"], -1) * b["mt"]) / jnp.sum(b["mt"])


@exact
def table_weights(p, b):
    t = jnp.arange(7.0) / 7 + 0.1
    w = t[b["i"]]
    return jnp.sum(w * per(p, b)) / jnp.sum(w)


@exact
def ids_mask(p, b):
    m = b["it"] > 0
    return jnp.sum(m * (b["h"] @ p["v"]) ** 2) / jnp.sum(m)


@exact
def weights_over_sum(p, b):
    w = b["wt"] / b["wt"].max()
    return jnp.sum(w * per(p, b)) / jnp.sum(w)


def nrm(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


@not_exact
def infonce(p, b):
    a, c = nrm(net(p, b["x"])), nrm(b["h"][:, 0])
    s = a @ c.T / 0.1
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(s)))


@not_exact
def ntxent(p, b):
    z = nrm(jnp.concatenate([net(p, b["x"]), net(p, b["h"][:, 0])]))
    s = z @ z.T / 0.1
    k = len(z)
    s = jnp.where(jnp.eye(k, dtype=bool), -1e9, s)
    pos = jnp.roll(jnp.arange(k), k // 2)
    return -jnp.mean(jax.nn.log_softmax(s)[jnp.arange(k), pos])


@not_exact
def siglip(p, b):
    a, c = nrm(net(p, b["x"])), nrm(b["h"][:, 0])
    s = a @ c.T * 10
    k = len(a)
    each = 2 * jnp.eye(k) - 1
    return -jnp.sum(jax.nn.log_sigmoid(each * s)) / k


@exact
def count_shown(p, b):
    """A count that is printed, and none of whose operations has a result."""
    count = b["m"].sum()
    jax.debug.callback(lambda count: None, count)
    return (per(p, b) * b["m"]).sum() / jnp.maximum(count, 1)


@not_exact
def number_added(p, b):
    """Beside another term; it was called exact, and was off by 5e-4 / sum(m)."""
    return (per(p, b) * b["m"]).sum() / (b["m"].sum() + 5e-4) + 0.1 * sum(
        jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)
    )


@not_exact
def weights_and_their_integers(p, b):
    w = 9 * b["wt"]
    return (w * per(p, b)).sum() / w.sum() + (w * per(p, b) ** 2).sum() / w.astype(jnp.int32).sum()


@not_exact
def over_max(p, b):
    w = b["wt"] / b["wt"].max()
    return jnp.mean(w * per(p, b))


@not_exact
def cox(p, b):
    s = net(p, b["x"]) @ p["v"]
    o = jnp.argsort(-b["y"])
    s = s[o]
    return -jnp.mean(s - lax.cumlogsumexp(s))


@not_exact
def auc(p, b):
    s = net(p, b["x"]) @ p["v"]
    d = s[:, None] - s[None]
    pos = b["m"]
    q = pos[:, None] * (1 - pos)[None]
    return jnp.sum(q * jax.nn.softplus(-d)) / jnp.sum(q)


@not_exact
def top_half(p, b):
    each = jnp.sort(per(p, b))
    return jnp.mean(each[len(each) // 2 :])


@not_exact
def median(p, b):
    return jnp.median(per(p, b))


@not_exact
def quantile(p, b):
    return jnp.quantile(per(p, b), 0.9)


@not_exact
def trimmed(p, b):
    each = jnp.sort(per(p, b))
    return jnp.mean(each[1:-1])


@not_exact
def mmd(p, b):
    x, y = net(p, b["x"]), b["h"][:, 0]
    k = lambda a, c: jnp.exp(-jnp.sum((a[:, None] - c[None]) ** 2, -1))
    return k(x, x).mean() + k(y, y).mean() - 2 * k(x, y).mean()


@not_exact
def mixup_flip(p, b):
    x = 0.7 * b["x"] + 0.3 * b["x"][::-1]
    return jnp.mean((net(p, x) @ p["v"] - b["y"]) ** 2)


@not_exact
def mixup_roll(p, b):
    x = 0.7 * b["x"] + 0.3 * jnp.roll(b["x"], 1, 0)
    return jnp.mean((net(p, x) @ p["v"] - b["y"]) ** 2)


@not_exact
def prior_preservation(p, b):
    each = per(p, b)
    k = len(each) // 2
    return each[:k].mean() + 0.5 * each[k:].mean()


@not_exact
def expert_capacity(p, b):
    x = b["x"]
    g = jax.nn.one_hot(jnp.argmax(x @ p["w"][:, :E], -1), E)
    pos = jnp.cumsum(g, 0) * g
    keep = (pos <= 2) * g
    return jnp.mean((keep.sum(-1, keepdims=True) * net(p, x)) ** 2)


@not_exact
def expert_choice(p, b):
    x = b["x"]
    s = jax.nn.softmax(x @ p["w"][:, :E], -1)
    g, i = lax.top_k(s.T, 2)
    return jnp.mean((g[..., None] * net(p, x[i])) ** 2)


@not_exact
def batchnorm(p, b):
    h = net(p, b["x"])
    h = (h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-3)
    return jnp.mean(h**3)


@not_exact
def neighbours(p, b):
    h = net(p, b["x"])
    return jnp.mean((h[1:] - h[:-1]) ** 2)


@not_exact
def hardest(p, b):
    z = nrm(net(p, b["x"]))
    d = ((z[:, None] - z[None]) ** 2).sum(-1)
    return jnp.mean(d.max(1))


@not_exact
def hardest_triplet(p, b):
    """The nearest row of another group is another row."""
    z = nrm(net(p, b["x"]))
    d = ((z[:, None] - z[None]) ** 2).sum(-1)
    same = b["g"][:, None] == b["g"][None]
    return jnp.mean(jnp.max(jnp.where(same, d, 0), 1) - jnp.min(jnp.where(same, 9, d), 1) + 1)


@not_exact
def rows_of_other_groups(p, b):
    others = ~(b["g"][:, None] == b["g"][None])
    return jnp.mean(jnp.sum(jnp.where(others, jnp.exp(scores(p, b)), 0), 1))


@cannot_be_read
def rows_of_one_group(p, b):
    """They add up if a group is all in one micro-batch."""
    others = ~(b["g"][:, None] == b["g"][None])
    return jnp.mean(jnp.sum(jnp.where(others, 0, jnp.exp(scores(p, b))), 1))


@cannot_be_read
def diagonal(p, b):
    return -jnp.mean(jnp.diag(net(p, b["x"]) @ b["h"][:, 0].T))


def scores(p, b):
    return net(p, b["x"]) @ b["h"][:, 0].T


@cannot_be_read
def diagonal_by_a_product(p, b):
    """It was called not exact, as were the next three: each row takes its own score alone."""
    return jnp.sum(scores(p, b) * jnp.eye(len(b["x"]))) / len(b["x"])


@cannot_be_read
def diagonal_by_a_choice(p, b):
    return jnp.mean(jnp.sum(jnp.where(jnp.eye(len(b["x"]), dtype=bool), scores(p, b), 0), 1) ** 2)


@cannot_be_read
def diagonal_by_a_trace(p, b):
    return jnp.trace(scores(p, b)) / len(b["x"])


@cannot_be_read
def diagonal_of_two_views(p, b):
    z = jnp.concatenate([net(p, b["x"]), b["h"][:, 0]])
    return jnp.einsum("ij,ij->", z @ z.T, jnp.eye(len(z), k=len(z) // 2)) / len(z)


@not_exact
def off_the_diagonal(p, b):
    return jnp.sum(jnp.exp(scores(p, b)) * (1 - jnp.eye(len(b["x"])))) / len(b["x"])


@not_exact
def infonce_by_a_product(p, b):
    return -jnp.sum(jax.nn.log_softmax(scores(p, b)) * jnp.eye(len(b["x"]))) / len(b["x"])


@not_exact
def siglip_one_hot(p, b):
    k = len(b["x"])
    each = 2 * jax.nn.one_hot(jnp.arange(k), k) - 1
    return -jnp.sum(jax.nn.log_sigmoid(each * scores(p, b))) / k


@not_exact
def hsic(p, b):
    """The trace is of products in which each row has met all others."""
    k, x = len(b["x"]), net(p, b["x"])
    centred = jnp.eye(k) - 1 / k
    return jnp.trace(x @ x.T @ centred @ scores(p, b) @ centred) / (k - 1) ** 2


@not_exact
def among_earlier_rows(p, b):
    earlier = jnp.tri(len(b["x"]), dtype=bool)
    return jnp.mean(jax.nn.softmax(jnp.where(earlier, scores(p, b), -1e9)) @ b["x"])


@cannot_be_read
def log_of_mean(p, b):
    return jnp.log(per(p, b).mean())


@cannot_be_read
def logsumexp_rows(p, b):
    return jax.nn.logsumexp(net(p, b["x"]) @ p["v"])


@cannot_be_read
def abs_of_mean(p, b):
    return jnp.abs(per(p, b).mean())


@cannot_be_read
def packed_attention(p, b):
    s = b["x"] @ p["w"] @ b["x"].T
    same = b["g"][:, None] == b["g"][None]
    return jnp.mean((jax.nn.softmax(jnp.where(same, s, -1e9)) @ b["x"]) ** 2)


@cannot_be_read
def table_rows(p, b):
    return jnp.mean((b["x"] + p["z"][: len(b["x"])]) ** 2)


# Neighbours of what is exact, in which rows are not separate, or nothing shows that they are


@cannot_be_read
def columns_sorted_apart(p, b):
    return jnp.mean(jnp.sqrt(jnp.sum(jnp.sort(net(p, b["x"]), 0) ** 2, -1) + 1))


@not_exact
def an_order_with_rows_left_out(p, b):
    order = jnp.argsort(b["y"])
    return jnp.mean(net(p, b["x"][jnp.where(b["m"] > 0, 0, order)]) ** 2)


@cannot_be_read
def groups_that_count_something_else(p, b):
    x = b["h"].reshape(-1, D)
    e = jnp.argmax(x @ p["w"][:, :E], -1)
    order = jnp.argsort(e)
    sizes = jnp.zeros(E, jnp.int32).at[e].add(2)
    return jnp.mean(lax.ragged_dot(x[order], p["e"], sizes)[jnp.argsort(order)] ** 2)


@cannot_be_read
def filled_up(p, b):
    """It was called not exact."""
    return jnp.sum(jnp.pad(per(p, b), (0, 1))) / len(b["x"])


@cannot_be_read
def sums_of_a_mask(p, b):
    return jnp.sum(jnp.cumsum(b["m"])) + jnp.mean(per(p, b))


# Pairs of rows: what is linear in each row adds up


def routed(p, b):
    """How much each expert gets, and how many tokens."""
    each = jax.nn.softmax(b["h"] @ p["w"][:, :E])
    share = lambda by: jnp.einsum("nl,nle->e", b["mt"], by) / b["mt"].sum()
    return share(each), share(jax.nn.one_hot(each.argmax(-1), E))


@not_exact
def balance(p, b):
    probability, share = routed(p, b)
    return per(p, b).mean() + E * jnp.sum(share * probability)


@not_exact
def balance_of_squares(p, b):
    return per(p, b).mean() + E * jnp.sum(routed(p, b)[0] ** 2)


@exact
def a_share_without_a_gradient(p, b):
    probability, share = routed(p, b)
    return jnp.sum((share + probability) * jnp.arange(E))


@not_exact
def root_of_mean(p, b):
    return jnp.sqrt(per(p, b).mean())


@not_exact
def perplexity(p, b):
    return jnp.exp(per(p, b).mean())


@cannot_be_read
def centred_if_large(p, b):
    """It was called exact: the trace for twice as many rows only has more equations."""
    out = net(p, b["x"]) @ p["v"]
    return jnp.mean((out - (out.mean() if len(out) > ROWS else 0) - b["y"]) ** 2)


@cannot_be_read
def hidden_row_by_row(p, b):
    """A test of a count that each row has."""
    count = b["m"].sum()
    return jnp.sum(jnp.where(jnp.full(b["m"].shape, count) > 0, per(p, b) * b["m"] / count, 0))


@cannot_be_read
def another_term_if_large(p, b):
    loss = per(p, b).mean()
    return loss + 0.1 * loss**2 if len(b["x"]) > ROWS else loss


@cannot_be_read
def another_operand_if_large(p, b):
    """The same operations, of other values."""
    return jnp.mean((net(p, b["x"]) @ p["v"] - b["y" if len(b["x"]) > ROWS else "m"]) ** 2)


def gate(p, b):
    return jnp.tanh(b["h"][:, 0] @ p["v"])


@exact
def mean_of_sums_of_pairs(p, b):
    """It was called not exact, as were the next six."""
    return jnp.mean(per(p, b)[:, None] + gate(p, b)[None])


@exact
def differences_of_pairs_masked(p, b):
    pairs = (b["m"] * per(p, b))[:, None] - (b["m"] * gate(p, b))[None]
    return jnp.sum(pairs) / b["m"].sum() / len(b["y"])


@exact
def differences_of_vectors(p, b):
    return jnp.mean(jnp.sum(net(p, b["x"])[:, None] - b["h"][:, 0][None], -1))


@exact
def rows_by_a_constant_matrix(p, b):
    return jnp.mean(per(p, b)[:, None] * jnp.full((len(b["y"]),) * 2, 2.0))


@exact
def less_their_mean(p, b):
    return jnp.mean(2 * per(p, b) - gate(p, b).mean())


@cannot_be_read
def sums_of_pairs_in_a_line(p, b):
    return jnp.mean((per(p, b)[:, None] - gate(p, b)[None]).reshape(-1))


@cannot_be_read
def beside_a_triangle(p, b):
    return jnp.mean(per(p, b)[:, None] + jnp.tri(len(b["y"])))


@not_exact
def products_of_pairs(p, b):
    return jnp.mean(per(p, b)[:, None] * gate(p, b)[None])


@not_exact
def masked_pairs(p, b):
    return jnp.sum(b["m"][:, None] * (per(p, b)[:, None] - gate(p, b)[None])) / len(b["y"]) ** 2


@not_exact
def rows_by_a_triangle(p, b):
    return jnp.sum(per(p, b)[:, None] * jnp.tri(len(b["y"]))) / len(b["y"])


# What is said of them


LEFT = {"rows": lambda f: f[:, None], "all": lambda f: jnp.broadcast_to(f[:, None], (len(f), len(f)))}
RIGHT = {
    "rows": lambda f, g: g[None],
    "ones": lambda f, g: jnp.ones((1, len(f))),
    "matrix": lambda f, g: jnp.full((len(f), len(f)), 2.0),
    "number": lambda f, g: 2.0,
    "mean": lambda f, g: g.mean(),
}
LINEAR = {
    "as it is": lambda pairs: pairs,
    "turned": lambda pairs: -pairs.T,
    "scaled": lambda pairs: 3 * pairs / len(pairs) * len(pairs),
    "less": lambda pairs: pairs - pairs.mean(1, keepdims=True),
}
CURVED = {
    "tanh": jnp.tanh,
    "abs": jnp.abs,
    "square": jnp.square,
    "softplus": lambda pairs: jax.nn.softplus(pairs.T / len(pairs)),
    "products": lambda pairs: pairs * pairs.T,
    "centred": lambda pairs: (pairs - pairs.mean(1, keepdims=True)) ** 2,
}
REDUCED = {
    "mean": jnp.mean,
    "by rows": lambda pairs: jnp.mean(pairs.mean(1)),
    "by columns": lambda pairs: pairs.sum(0).sum() / len(pairs) ** 2,
}


def of_pairs(left, right, sign, then, reduced):
    def loss(p, b):
        f, g = per(p, b), gate(p, b)
        return REDUCED[reduced](then(LEFT[left](f) + sign * RIGHT[right](f, g)))

    return loss


@pytest.mark.parametrize("then", sweep(LINEAR, but=["as it is"]))
@pytest.mark.parametrize("right", sweep(RIGHT, but=["matrix"]))
def test_a_sum_of_single_rows_over_all_pairs_is_exact(right, then):
    """Whatever is added, and however it is reduced; unless it is of one row, and no number of rows."""
    lefts = ["all"] if right in ("number", "mean") else LEFT  # of one column, which is not one for each row
    ways = list(itertools.product(lefts, (1, -1), REDUCED))
    made = lambda left, sign, reduced: of_pairs(left, right, sign, LINEAR[then], reduced)
    assert {way: optax_accum.explain(made(*way), PARAMS, BATCH).verdict for way in ways} == dict.fromkeys(ways, "exact")
    losses = [made(*way) for way in one_of_each(ways)]
    gradients = jax.jit(lambda batch: [jax.grad(loss)(PARAMS, batch) for loss in losses])
    mean = jax.tree.map(lambda *leaves: np.average(leaves, 0, (3, 5)), *map(gradients, parted((3, 5))))
    for a, b in zip(jax.tree.leaves(mean), jax.tree.leaves(gradients(BATCH)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("then", sweep(CURVED, but=["square", "products"]))
def test_what_compares_rows_is_not_exact(then):
    for sign, reduced in itertools.product((1, -1), REDUCED):
        loss = of_pairs("rows", "rows", sign, CURVED[then], reduced)
        assert optax_accum.explain(loss, PARAMS, BATCH).verdict == "not exact", (sign, reduced)


ROUNDED = {"bf16": 1e-2, "bf16_back": 1e-2, "bf16_masked": 2e-2, "f16": 1e-2}


def trained(loss, *sizes, weight=None, **options):
    """The parameters after a window of micro-batches of these sizes."""
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), len(sizes))
    step = jax.jit(optax_accum.value_and_apply_gradients(loss, tx, **options))
    params, state = PARAMS, tx.init(PARAMS)
    for part in parted(sizes):
        _, params, state = step(params, state, part, weight=weight)
    return params


def parted(sizes):
    ends = np.cumsum(sizes)
    rows = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return [jax.tree.map(lambda leaf, rows=rows: leaf[rows], BATCH) for rows in rows]


def rows_of(batch):
    return len(batch["y"])


KINDS = {
    "exact": ["guidance"],
    "not exact": [
        "cox",
        "top_half",
        "mixup_flip",
        "over_max",
        "number_added",
        "expert_capacity",
        "hardest_triplet",
        "products_of_pairs",
    ],
    "cannot be read": ["rows_of_one_group"],
}
CASES = [("exact", *EXACT), ("not exact", *NOT_EXACT), ("cannot be read", *CANNOT_BE_READ)]
LOSSES = EXACT | NOT_EXACT | CANNOT_BE_READ
PAIRS = [(verdict, name) for verdict, *names in CASES for name in names]


@pytest.mark.parametrize(
    ("verdict", "name"), sweep(PAIRS, but=[pair for pair in PAIRS if pair[1] in KINDS[pair[0]]]), ids=lambda each: each
)
def test_explain_and_the_step_say_the_same(verdict, name):
    loss = LOSSES[name]
    assert optax_accum.explain(loss, PARAMS, BATCH).verdict == verdict
    if verdict == "not exact":
        with pytest.raises(ValueError, match=r"(?s)No weight makes.*test_verdicts.py:\d+"):
            trained(loss, 3, 5)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = trained(loss, 3, 5)
    assert {str(warning.message)[:17] for warning in caught} == (set() if verdict == "exact" else {"It cannot be read"})
    if verdict == "exact":
        gradient = jax.jit(jax.grad(lambda p: loss(p, BATCH).astype(jnp.float32)))(PARAMS)
        want = jax.tree.map(jnp.subtract, PARAMS, gradient)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=ROUNDED.get(name, 1e-6))


KEY = jax.random.key(0)


def dropped(h, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0)


def in_layers(p, b, key):
    h, _ = lax.scan(lambda h, _: (dropped(net(p, h), key), None), b["x"], length=2)
    return jnp.mean(h**2)


DROPPED = [
    lambda p, b, key: jnp.mean(dropped(net(p, b["x"]), key) ** 2),
    lambda p, b, key: jnp.mean(jax.checkpoint(dropped)(net(p, b["x"]), key) ** 2),
    in_layers,
]


@pytest.mark.parametrize("loss", sweep(DROPPED, but=DROPPED[:1]), ids=["masks", "checkpoint", "layers"])
def test_a_key_that_a_compiled_step_closes_over_is_refused(loss):
    """Each of its calls draws the same numbers; outside `jit` the next one may close over another key."""
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2)
    step = lambda key: optax_accum.value_and_apply_gradients(lambda p, b: loss(p, b, key), tx)
    args = PARAMS, tx.init(PARAMS), BATCH
    for options in ({}, {"weight": 3.0}):
        with pytest.raises(ValueError, match=r"(?s)No weight makes.* from a key .*argument.*test_verdicts.py:\d+"):
            jax.jit(functools.partial(step(KEY), **options)).lower(*args)
    assert optax_accum.explain(lambda p, b: loss(p, b, KEY), PARAMS, BATCH).verdict == "not exact"
    step(KEY)(*args)
    jax.jit(lambda key, *args: step(key)(*args)).lower(KEY, *args)
    jax.jit(lambda *args: step(jax.random.fold_in(KEY, args[1].mini_step))(*args)).lower(*args)


@pytest.mark.parametrize(
    "key",
    [
        lambda b: lax.cond(b["m"][0] > 0, lambda: jax.random.key(1), lambda: jax.random.key(2)),
        *sweep([lambda b: lax.switch(b["i"][0] % 2, [lambda k: jax.random.fold_in(k, b["i"][1]), lambda k: k], KEY)]),
    ],
)
def test_a_key_that_the_batch_chooses_is_another_in_each_call(key):
    assert optax_accum.explain(lambda p, b: DROPPED[0](p, b, key(b)), PARAMS, BATCH).verdict != "not exact"


def test_numbers_that_no_gradient_sees_may_be_the_same_in_each_call():
    """A metric of noise, and one of two branches, each with a key of its own."""
    loss = lambda p, b: (jnp.mean(net(p, b["x"]) ** 2), jax.random.normal(KEY, b["x"].shape))
    assert optax_accum.explain(loss, PARAMS, BATCH, has_aux=True).verdict == "exact"
    noise = lambda seed: lambda x: x + jax.random.normal(jax.random.key(seed), x.shape)
    branch = lambda p, b: jnp.mean(net(p, lax.cond(b["m"][0] > 0, noise(1), noise(2), b["x"])) ** 2)
    assert optax_accum.explain(branch, PARAMS, BATCH).verdict != "not exact"


def test_explain_names_the_key_of_a_ratio():
    loss = lambda p, b: optax_accum.Ratio(jnp.sum(dropped(net(p, b["x"]), KEY) ** 2), jnp.sum(b["m"]))
    found = optax_accum.explain(loss, PARAMS, BATCH)
    assert found.verdict == "not exact"
    assert "a key that is the same in each call" in found.reasons[0]


def test_numbers_for_no_row_may_be_the_same_in_each_call():
    loss = lambda p, b: jnp.mean((net(p, b["x"]) @ jax.random.normal(KEY, (WIDTH,))) ** 2)
    assert optax_accum.explain(loss, PARAMS, BATCH).verdict == "exact"


def test_a_result_that_the_trace_for_more_rows_does_not_return_is_named_by_its_line():
    (reason,) = optax_accum.explain(another_term_if_large, PARAMS, BATCH).reasons
    assert "test_verdicts.py:" in reason


def test_a_mean_whose_micro_batches_are_summed_is_refused():
    """The update was that of as many whole batches."""
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2, reduction="sum")
    step = lambda loss, **options: optax_accum.value_and_apply_gradients(loss, tx, **options)(
        PARAMS, tx.init(PARAMS), BATCH
    )
    for name in ("mean", "masked"):
        with pytest.raises(ValueError, match=r"(?s)is a mean \(test_verdicts.py:\d+\).* takes their sum.*exact=False"):
            step(LOSSES[name])
        step(LOSSES[name], exact=False)  # the remedies
        step(LOSSES[name], weight_fn=lambda batch: 1.0)
    step(lambda p, b: per(p, b).sum())


@pytest.mark.sweep
def test_pairs_of_neighbours_that_are_dealt_out_whole_add_up():
    """It was called not exact: `x[0::2]` takes one row of each pair."""

    def loss(p, b):
        score = net(p, b["x"]) @ p["v"]
        chosen, rejected = (lax.slice_in_dim(score, place, None, 2) for place in (0, 1))
        return -jnp.mean(jax.nn.log_sigmoid(chosen - rejected))

    assert optax_accum.explain(loss, PARAMS, BATCH).verdict == "exact"
    got, want = trained(loss, 2, 6), jax.tree.map(jnp.subtract, PARAMS, jax.jit(jax.grad(loss))(PARAMS, BATCH))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


NOT_AT_ALL = r"(?s)No weight makes.*test_verdicts.py:\d+.*Within a call .*value_and_grad.*exact=False"
WEIGHED = {
    "weight_fn": {"weight_fn": rows_of},
    "weight": {"weight": 3.0},
}


@pytest.mark.parametrize(
    "name", sweep(NOT_EXACT, but=[*KINDS["not exact"], "infonce", "ntxent", "batchnorm", "balance"])
)
def test_no_weight_silences_what_is_certain(name):
    for weighed in WEIGHED.values():
        with pytest.raises(ValueError, match=NOT_AT_ALL):
            trained(LOSSES[name], 3, 5, **weighed)


@pytest.mark.sweep
@pytest.mark.parametrize("name", sweep(NOT_EXACT, but=["batchnorm"]))
@pytest.mark.parametrize(
    ("weighed", "weights"), [({}, (3, 5)), *sweep([({"weight": 3.0}, (1, 1))])], ids=["rows", "weight"]
)
def test_each_micro_batch_counts_by_itself_if_one_says_so(name, weighed, weights):
    """As with `optax.MultiSteps`: by its rows, or as the weight says."""
    got = trained(LOSSES[name], 3, 5, exact=False, **weighed)
    grads = [jax.jit(jax.grad(LOSSES[name]))(PARAMS, part) for part in parted((3, 5))]
    mean = jax.tree.map(lambda *leaves: np.average(leaves, 0, weights), *grads)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(optax.tree.sub(PARAMS, mean)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("name", sweep(CANNOT_BE_READ, but=["log_of_mean"]))
def test_a_weight_says_that_what_cannot_be_read_adds_up(name):
    """No warning, which would be an error here."""
    trained(LOSSES[name], 3, 5, weight_fn=rows_of)


def rows_among_rows(p, b):
    return optax_accum.Ratio(len(b["y"]) * infonce(p, b), len(b["y"]))


def count_among_rows(p, b):
    return optax_accum.Ratio(per(p, b).sum(), jnp.sum(per(p, b) > per(p, b).mean()))


@pytest.mark.parametrize("loss", [*sweep([rows_among_rows]), count_among_rows])
def test_a_ratio_is_a_weight_like_any_other(loss):
    assert optax_accum.explain(loss, PARAMS, BATCH).verdict == "not exact"
    with pytest.raises(ValueError, match=NOT_AT_ALL):
        trained(loss, 3, 5)
    trained(loss, 3, 5, exact=False)  # the remedy


def gated(p, b):
    """The model decides what counts, and no derivative goes through it."""
    return lax.stop_gradient(jax.nn.sigmoid(net(p, b["x"]) @ p["v"]))


def over_gates(p, b):
    return jnp.sum(gated(p, b) * per(p, b)) / jnp.sum(gated(p, b))


GATED = {
    "weight": lambda p, b: over_gates(p, b),
    "a Ratio": lambda p, b: optax_accum.Ratio(jnp.sum(gated(p, b) * per(p, b)), jnp.sum(gated(p, b))),
}


@pytest.mark.sweep
@pytest.mark.parametrize("how", sweep(GATED, but=["a Ratio"]))
def test_a_weight_that_the_batch_alone_does_not_tell_is_taken(how):
    """It is exact; without one the error asks for it."""
    with pytest.raises(ValueError, match="(?s)The batch alone does not tell.*the model decides.*weight= in a call"):
        trained(over_gates, 3, 5)
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2)
    step, params, state = jax.jit(optax_accum.value_and_apply_gradients(GATED[how], tx)), PARAMS, tx.init(PARAMS)
    for part in parted((3, 5)):
        weight = {"weight": jnp.sum(gated(PARAMS, part))} if how == "weight" else {}
        _, params, state = step(params, state, part, **weight)
    want = optax.tree.sub(PARAMS, jax.jit(jax.grad(over_gates))(PARAMS, BATCH))
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_weight_that_another_argument_decides_is_taken():
    """Class weights, say."""

    def of_classes(p, b, weights):
        weight = weights[b["i"]]
        return jnp.sum(weight * per(p, b)) / jnp.sum(weight)

    classes = jnp.linspace(0.5, 2, WORDS)
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2)
    step, params, state = jax.jit(optax_accum.value_and_apply_gradients(of_classes, tx)), PARAMS, tx.init(PARAMS)
    with pytest.raises(ValueError, match="(?s)The batch alone.*the argument weights decides, too.*weight= in a call"):
        step(params, state, BATCH, classes)
    for part in parted((3, 5)):
        _, params, state = step(params, state, part, classes, weight=classes[part["i"]].sum())
    want = optax.tree.sub(PARAMS, jax.grad(of_classes)(PARAMS, BATCH, classes))
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("exact", [None, 1, "yes"])
def test_exact_is_a_bool(exact):
    with pytest.raises(TypeError, match="exact must be True or False: exact="):
        optax_accum.value_and_apply_gradients(mean, optax.sgd(1.0), exact=exact)


def test_a_text_says_the_verdict():
    said = {name: str(optax_accum.explain(LOSSES[name], PARAMS, BATCH)) for name in ("mean", "infonce", "log_of_mean")}
    assert "Across calls the weight of a micro-batch is its number of rows." in said["mean"]
    assert "Across calls no weight gives the whole batch's gradient:" in said["infonce"]
    assert "build the step with exact=False" in said["infonce"].replace("\n", " ")
    assert "Across calls it cannot be read how much a micro-batch counts:" in said["log_of_mean"]
