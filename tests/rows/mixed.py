"""Random losses that mix rows of the batch with rows of parameters and with things of n entries.

Sizes coincide: the width, the length of a table's row and the number of classes may be n; n is often prime, two or one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LONGEST = 48  # rows of the table: enough for 2 n


class Mixture:
    """One random loss of hidden states [n, d], its parameters and its batch, by its number."""

    def __init__(self, number):
        self.random = np.random.default_rng([1, number])
        self.n = self.pick([12, 12, 8, 7, 6, 5, 4, 3, 2, 1])
        self.d = self.pick([2, 3, 4, self.n, self.n])
        self.start, self.end = self.pick(STARTS), self.pick(ENDS)
        makers = [self.pick(MAKERS) for _ in range(2)]
        self.steps = [self.step(each, nests=2) for each in self.shuffled([*makers, self.pick(STEPS), self.pick(STEPS)])]
        self.is_narrow = narrow_copy in makers

    def pick(self, table):
        return table[self.random.integers(len(table))]

    def shuffled(self, items):
        return [items[place] for place in self.random.permutation(len(items))][: self.pick([2, 3])]

    def step(self, step, nests):
        """A step, or a maker, whose rows are added or multiplied; in a body, perhaps."""
        if step in MAKERS:
            step = functools.partial(self.pick([added, scaled]), step)
        if nests and self.random.random() < 0.35:
            return self.pick(NESTS)(self.step(step, nests - 1))
        return step

    def loss(self, p, b):
        h = self.start(p, b)
        for step in self.steps:
            h = step(p, b, h)
        return self.end(p, b, h)

    def values(self):
        normal = lambda *shape: jnp.asarray(self.random.normal(size=shape) / 2, jnp.float32)
        whole = lambda top: jnp.asarray(self.random.integers(0, top, self.n), jnp.int32)
        d, n = self.d, self.n
        params = {"w": normal(d, d), "z": normal(LONGEST, d), "cls": normal(1, d), "v": 1 + normal(d)}
        return params, {
            "x": normal(n, d),
            "i": whole(d),
            "y": normal(n),
            "mask": whole(2).astype(jnp.float32).at[0].set(1),
        }


# Hidden states


def given(p, b):
    return jnp.tanh(b["x"] @ p["w"])


def looked_up(p, b):
    return p["z"][b["i"]] + b["x"]


STARTS = [given, given, looked_up]

# Rows of parameters, and of nothing: [n, d]


def first_rows(p, n):
    return p["z"][:n]


def next_rows(p, n):
    return p["z"][1 : n + 1]


def last_rows(p, n):
    return p["z"][LONGEST - n :]


def rows_from(p, n):
    return lax.dynamic_slice(p["z"], (2, 0), (n, p["z"].shape[1]))


def one_tiled(p, n):
    return jnp.tile(p["cls"], (n, 1))


def several_tiled(p, n):
    return jnp.tile(p["z"][:2], (n, 1))[:n]


def padded(p, n):
    return jnp.pad(p["cls"], ((0, n - 1), (0, 0)))


def from_one(p, n):
    return jnp.broadcast_to(p["cls"], (n, p["cls"].shape[1]))


def repeated(p, n):
    return jnp.repeat(p["cls"], n, axis=0)


def by_a_scan(p, n):
    return lax.scan(lambda c, _: (jnp.sin(c + p["v"]), c), p["v"], None, length=n)[1]


def numbered(p, n):
    return p["z"][jnp.arange(n)]


def numbered_from_the_end(p, n):
    return p["z"][jnp.arange(n)[::-1]]


def one_hot(p, n):
    return jax.nn.one_hot(jnp.arange(n), LONGEST) @ p["z"]


def by_keys(p, n):
    keys = jax.random.split(jax.random.key(5), n)
    return jax.vmap(lambda key: jax.random.normal(key, p["v"].shape) * p["v"])(keys)


def by_a_key(p, n):
    return jax.random.normal(jax.random.key(6), (n, len(p["v"]))) * p["v"][None]


def by_a_key_of_the_model(p, n):
    key = jax.random.key(lax.stop_gradient(jnp.sum(p["v"]) * 10).astype(jnp.int32))
    return jax.random.uniform(key, (n, len(p["v"])))


def places(p, n):
    return jnp.arange(n)[:, None] / n * p["v"][None]


def steps(p, n):
    return jnp.linspace(0, 1, n)[:, None] * p["v"][None]


def waves(p, n):
    return jnp.sin(jnp.arange(n)[:, None] * jnp.arange(1, 1 + len(p["v"]))[None] * p["v"][None])


def sorted_rows(p, n):
    return jnp.sort(p["z"][:n], axis=0)


def narrow_copy(p, n):
    return p["z"].astype(jnp.bfloat16)[:n].astype(jnp.float32)


def in_two_axes(p, n):
    return jnp.tile(p["v"][:1], (n, n)) @ p["z"][:n] / n


def a_triangle(p, n):
    return jnp.tril(jnp.ones((n, n))) @ p["z"][:n] / n


MAKERS = [
    *(first_rows, next_rows, last_rows, rows_from, one_tiled, several_tiled, padded, from_one, repeated, by_a_scan),
    *(numbered, numbered_from_the_end, one_hot, by_keys, by_a_key, by_a_key_of_the_model, places, steps, waves),
    *(sorted_rows, narrow_copy, in_two_axes, a_triangle),
]


def added(maker, p, b, h):
    return h + maker(p, len(h))


def scaled(maker, p, b, h):
    return h * jnp.tanh(maker(p, len(h)))


# Steps


def dense(p, b, h):
    return jnp.tanh(h @ p["w"])


def n_steps(p, b, h):
    return h * lax.fori_loop(0, len(h), lambda i, s: s + 0.1 * p["v"][0], 1.0)


def n_ones(p, b, h):
    return h * jnp.sum(jnp.full(len(h), p["v"][0])) / len(h)


def mapped_with_n_copies(p, b, h):
    return lax.map(lambda row: jnp.sin(row) * jnp.sum(jnp.full(len(h), row @ p["v"])) / len(h), h)


def mapped_with_a_table(p, b, h):
    return lax.map(lambda row: row + jnp.mean(p["z"][: len(h)] @ row), h)


def mapped_with_places(p, b, h):
    one = lambda of: jnp.tanh(of[1]) * jnp.sum(jax.nn.one_hot(of[0], len(h)) * (1 + of[1][0]))
    return lax.map(one, (jnp.arange(len(h)), h))


def mapped_in_pairs(p, b, h):
    return lax.map(lambda row: jnp.tanh(row * p["v"]), h, batch_size=2)


def mapped_in_fours(p, b, h):
    return lax.map(lambda row: jnp.tanh(row * p["v"]), h, batch_size=4)


def prefixes(p, b, h):
    return lax.associative_scan(jnp.add, h) / len(h)


def by_parity(p, b, h):
    return h * p["v"][None] if len(h) % 2 else jnp.sin(h)


def by_size(p, b, h):
    return jnp.sin(h + p["cls"]) if len(h) > 8 else jnp.tanh(h)


def own_row(p, b, h):
    return h * (1 + h[jnp.arange(len(h)), b["i"]][:, None])


def own_row_by_small_numbers(p, b, h):
    return h * (1 + h[jnp.arange(len(h)).astype(jnp.int8), b["i"]][:, None])


def own_row_set(p, b, h):
    return h.at[jnp.arange(len(h)), b["i"]].set(0)


def own_row_multiplied(p, b, h):
    return h.at[jnp.arange(len(h)), b["i"]].multiply(2)


def first_row_set(p, b, h):
    return h.at[0].set(p["cls"][0])


def over_a_still_maximum(p, b, h):
    return jnp.exp(h - lax.stop_gradient(jnp.max(h, axis=0, keepdims=True)))


def norm(p, b, h):
    return (h - h.mean(0, keepdims=True)) * lax.rsqrt(h.var(0, keepdims=True) + 0.1)


def reversed_rows(p, b, h):
    return h + jnp.flip(h, 0) * p["v"][None]


def in_groups(p, b, h):
    size = 2 if len(h) % 2 == 0 else 1
    groups = h.reshape(-1, size, h.shape[1])
    return (groups - 0.5 * groups.mean(1, keepdims=True)).reshape(h.shape)


def merged(p, b, h):
    wide = jnp.stack([h, jnp.sin(h), h * p["v"][None]], axis=1).reshape(-1, h.shape[1])
    return jnp.tanh(wide @ p["w"]).reshape(-1, 3, h.shape[1]).sum(1)


def means_of_groups(p, b, h):
    total = jax.ops.segment_sum(h, b["i"], h.shape[1])
    return h + total[b["i"]] / len(h)


def all_pairs(p, b, h):
    return jax.nn.softmax(h @ h.T) @ h


def attention_to_a_table(p, b, h):
    return jax.nn.softmax(h @ p["z"][: len(h)].T) @ p["z"][: len(h)]


@jax.custom_jvp
def twice(h, v):
    return 2 * h * v


@twice.defjvp
def _(primals, tangents):
    h, v = primals
    return twice(h, v), 3 * (tangents[0] * v + h * tangents[1])


@jax.custom_vjp
def product(h, w):
    return h @ w


product.defvjp(lambda h, w: (h @ w, (h, w)), lambda kept, ct: (2 * ct @ kept[1].T, 3 * kept[0].T @ ct))


def with_a_forward_rule(p, b, h):
    return twice(h, jnp.broadcast_to(p["v"], h.shape))


def with_a_backward_rule(p, b, h):
    return product(h, p["w"])


STEPS = [
    *(dense, dense, n_steps, n_ones, mapped_with_n_copies, mapped_with_a_table, mapped_with_places, mapped_in_pairs),
    *(mapped_in_fours, prefixes, by_parity, by_size, own_row, own_row_by_small_numbers, own_row_set),
    *(own_row_multiplied, first_row_set, over_a_still_maximum, norm, reversed_rows, in_groups, merged),
    *(means_of_groups, all_pairs, attention_to_a_table, with_a_forward_rule, with_a_backward_rule),
]

# Bodies


def checkpointed(step):
    return lambda p, b, h: jax.checkpoint(step)(p, b, h)


def jitted(step):
    return lambda p, b, h: jax.jit(step)(p, b, h)


def layers(step):
    def run(p, b, h):
        return lax.scan(lambda h, s: (jnp.tanh(step(p, b, h) * s), None), h, jnp.stack([p["v"][0], p["w"][0, 0]]))[0]

    return run


def branch(step):
    return lambda p, b, h: lax.cond(p["v"][0] > 0.5, lambda h: step(p, b, h), jnp.sin, h)


NESTS = [checkpointed, checkpointed, jitted, layers, branch]

# Ends


def mean(p, b, h):
    return jnp.mean(h**2)


def masked(p, b, h):
    return jnp.sum(jnp.sum(h, 1) * b["mask"]) / jnp.sum(b["mask"])


def two_terms(p, b, h):
    return jnp.mean(jnp.sin(h)) + jnp.mean(p["z"][: len(h)] ** 2) + 0.1 * jnp.sum(p["w"] ** 2)


def square_of_a_sum(p, b, h):
    return jnp.mean(h**2) + (jnp.sum(h) / len(h)) ** 2


def variance(p, b, h):
    return jnp.var(h * p["v"][None])


def counted(p, b, h):
    return jnp.sum(jnp.where(h > 0.1, h, 0)) / (1 + jnp.sum(h > 0.1))


def contracted(p, b, h):
    return jnp.sum(jnp.sin(h.T @ p["z"][: len(h)])) / len(h)


ENDS = [mean, masked, two_terms, square_of_a_sum, variance, counted, contracted]
