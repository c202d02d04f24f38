"""The loops that people write by hand, in the shape of public ones, small, on a model of two layers.

Each has one thing that is wrong, or none (the host loop has two). `benchmarks.loops` prints their table.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import apply_updates

import optax_accum
from benchmarks._measure import Tree

ROWS, TOKENS, EVERY, SEEDS = 32, 32, 16, 5
SGD = optax.sgd(0.1)
add = functools.partial(jax.tree.map, jnp.add)
MakeStep = Callable[[int], Any]


# The problem: a mean over tokens, in rows whose lengths are log-normal or all the same.


def batch(seed: int, *, even: bool = False) -> dict[str, np.ndarray]:
    """Returns rows of tokens, some of them padding: x, y [rows, tokens, ...], mask [rows, tokens]."""
    random = np.random.default_rng(seed)
    lengths = np.clip(np.exp(random.normal(1.5, 1.0, ROWS)), 1, TOKENS).astype(int)
    lengths = np.full(ROWS, TOKENS) if even else lengths
    draw = lambda *shape: random.normal(size=(ROWS, *shape)).astype("f")
    mask = (np.arange(TOKENS) < lengths[:, None]).astype("f")
    return {"x": draw(TOKENS, 6), "y": draw(TOKENS, 3), "mask": mask, "gain": draw() + 0.5}


def params() -> Tree:
    """Returns the two layers."""
    first, second = jax.random.split(jax.random.key(0))
    of = lambda key, *shape: 0.4 * jax.random.normal(key, shape)
    return {"first": of(first, 6, 16), "second": of(second, 16, 3)}


def count(batch: Tree) -> jax.Array:
    """Returns the number of tokens."""
    return jnp.sum(batch["mask"])


def outputs(params: Tree, batch: Tree, key: Any = None) -> jax.Array:
    """Returns [rows, tokens, 3]; with a key hidden units are dropped."""
    h = jnp.tanh(batch["x"] @ params["first"])
    h = h if key is None else jnp.where(jax.random.bernoulli(key, 0.5, h.shape), 2 * h, 0)
    return h @ params["second"]


def loss(params: Tree, batch: Tree, key: Any = None) -> jax.Array:
    """Returns the mean over tokens."""
    each = jnp.mean((outputs(params, batch, key) - batch["y"]) ** 2, -1)
    return jnp.sum(batch["mask"] * each) / count(batch)


def advantages(params: Tree, batch: Tree) -> jax.Array:
    """Returns the loss of a policy whose advantages are normalised in it."""
    gain = (batch["gain"] - batch["gain"].mean()) / (batch["gain"].std() + 1e-6)
    return -jnp.mean(jax.nn.log_softmax(outputs(params, batch)[:, 0])[:, 0] * gain)


# The loops. A `make_step` is what `verify_step` takes; what is carried begins with what is compared.


def parts(batch: Tree, every: int) -> Tree:
    """Returns the micro-batches [every, rows / every, ...], in the order of the rows."""
    return jax.tree.map(lambda leaf: leaf.reshape(every, -1, *leaf.shape[1:]), batch)


def updated(carry: Tree, grads: Tree, optimizer: Any = SGD) -> Tree:
    """Returns parameters and state after one update."""
    updates, state = optimizer.update(grads, carry[1], carry[0])
    return apply_updates(carry[0], updates), state


def scan(every: int, *, loss: Any = loss, divides: bool = True, dtype: Any = jnp.float32) -> Any:
    """Means that are added, divided by k."""

    @jax.jit
    def step(carry: Tree, batch: Tree) -> Tree:
        gradient = lambda part: jax.tree.map(lambda g: g.astype(dtype), jax.grad(loss)(carry[0], part))
        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype), carry[0])
        sums, _ = jax.lax.scan(lambda sums, part: (add(sums, gradient(part)), None), zeros, parts(batch, every))
        return updated(carry, jax.tree.map(lambda g: g / every, sums) if divides else sums)

    return step, (params(), SGD.init(params()))


def running_mean(every: int) -> Any:
    """A mean that each micro-batch moves on."""

    @jax.jit
    def step(carry: Tree, batch: Tree) -> Tree:
        def body(i: Any, mean: Tree) -> Tree:
            grads = jax.grad(loss)(carry[0], jax.tree.map(lambda leaf: leaf[i], parts(batch, every)))
            return jax.tree.map(lambda m, g: (i * m + g) / (i + 1), mean, grads)

        return updated(carry, jax.lax.fori_loop(0, every, body, jax.tree.map(jnp.zeros_like, carry[0])))

    return step, (params(), SGD.init(params()))


def floored(every: int) -> Any:
    """Micro-batches of `rows // k` rows: what k does not divide is left."""

    @jax.jit
    def step(carry: Tree, batch: Tree) -> Tree:
        size = len(batch["x"]) // every
        part = lambda i: jax.tree.map(lambda leaf: leaf[i * size : (i + 1) * size], batch)
        sums = functools.reduce(add, [jax.grad(loss)(carry[0], part(i)) for i in range(every)])
        return updated(carry, jax.tree.map(lambda g: g / every, sums))

    return step, (params(), SGD.init(params()))


def one_key(every: int) -> Any:
    """Dropout with the key of the step, in each micro-batch."""

    @jax.jit
    def step(carry: Tree, batch: Tree) -> Tree:
        key, own = jax.random.split(carry[2])
        grads = [
            jax.grad(loss)(carry[0], jax.tree.map(lambda leaf, i=i: leaf[i], parts(batch, every)), own)
            for i in range(every)
        ]
        return *updated(carry, jax.tree.map(lambda *leaves: sum(leaves) / every, *grads)), key

    return step, (params(), SGD.init(params()), jax.random.key(1))


def tokens(every: int) -> Any:
    """Float32 sums of sums, divided once by all tokens."""

    @jax.jit
    def step(carry: Tree, batch: Tree) -> Tree:
        def body(sums: Tree, part: Tree) -> tuple[Tree, None]:
            grads = jax.grad(lambda params: loss(params, part) * count(part))(carry[0])
            return add(sums, grads), None

        sums, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, carry[0]), parts(batch, every))
        return updated(carry, jax.tree.map(lambda g: g / count(batch), sums))

    return step, (params(), SGD.init(params()))


def multi_steps(every: int, *, clip: bool = False) -> Any:
    """`optax.MultiSteps`, and perhaps a clip by hand before it."""
    tx = optax.MultiSteps(SGD, every)

    @jax.jit
    def step(carry: Tree, batch: Tree) -> Tree:
        grads = jax.grad(loss)(carry[0], batch)
        if clip:
            grads, _ = optax.clip_by_global_norm(0.02).update(grads, optax.EmptyState())
        return updated(carry, grads, tx)

    return step, (params(), tx.init(params()))


def apply_every(every: int) -> Any:
    """`optax.apply_every` behind the optimizer."""
    tx = optax.chain(optax.adamw(0.01), optax.apply_every(every))

    @jax.jit
    def step(carry: Tree, batch: Tree) -> Tree:
        return updated(carry, jax.grad(loss)(carry[0], batch), tx)

    return step, (params(), tx.init(params()))


def average(every: int) -> Any:
    """An average of the parameters that the host loop moves at each call."""
    tx = optax.MultiSteps(SGD, every)

    @jax.jit
    def step(carry: Tree, batch: Tree) -> Tree:
        new, state = updated((carry["params"], carry["state"]), jax.grad(loss)(carry["params"], batch), tx)
        return {"params": new, "state": state, "average": optax.incremental_update(new, carry["average"], 0.1)}

    return step, {"params": params(), "state": tx.init(params()), "average": params()}


def host(every: int, *, keeps: str = "sum") -> Any:
    """Two compiled functions and a counter: `loss / k` for each micro-batch; the last may end its window early."""
    gradient, update = jax.jit(jax.grad(loss)), jax.jit(updated)

    def step(carry: Tree, batch: Tree, last: bool = False) -> Tree:
        *trained, sums, n = carry
        grads = jax.tree.map(lambda g: g / every, gradient(trained[0], batch))
        grads = add(sums, grads) if keeps == "sum" else jax.tree.map(lambda g: g * every, grads)
        if n + 1 < every and not last:
            return *trained, grads, n + 1
        return *update(trained, grads), jax.tree.map(jnp.zeros_like, grads), 0

    carry = params(), SGD.init(params()), jax.tree.map(jnp.zeros_like, params()), 0
    return step, carry, functools.partial(step, last=True)


def ours_within(every: int) -> Any:
    cut = optax_accum.value_and_grad(loss, every)
    step = jax.jit(lambda carry, batch: updated(carry, cut(carry[0], batch)[1]))
    return step, (params(), SGD.init(params()))


def ours_across(every: int) -> Any:
    tx = optax_accum.accumulate_gradients(SGD, every)
    micro_step = optax_accum.value_and_apply_gradients(loss, tx)
    step = lambda carry, batch, flush=False: micro_step(*carry, batch, flush=flush)[1:]
    return jax.jit(step), (params(), tx.init(params())), jax.jit(functools.partial(step, flush=True))


class Loop(NamedTuple):
    """A row of the table."""

    name: str
    seen: str
    make_step: MakeStep
    within: bool
    even: bool = False  # rows of one length, where lengths are not what it gets wrong
    every: int = EVERY
    windows: int = 1
    micro_batches: int | None = None  # that come before the data ends
    of: Callable[[Tree], Tree] = lambda carry: carry[0]


def _link(name: str, path: str) -> str:
    return f"[{name}](https://github.com/{path})"


T5X = _link("commit", "google-research/t5x/commit/cc342d4")
LOOPS = [
    Loop(
        "a scan that adds means and divides by k",
        _link("pull request", "AI-Hypercomputer/maxtext/pull/5088"),
        scan,
        True,
    ),
    Loop("a running mean, `(i * m + g) / (i + 1)`", "", running_mean, True),
    Loop(
        "`optax.MultiSteps` around the optimizer",
        _link("thread", "Physical-Intelligence/openpi/issues/286"),
        multi_steps,
        False,
    ),
    Loop(
        "the same scan, with sums in bfloat16",
        _link("commit", "AI-Hypercomputer/maxtext/commit/e591f30"),
        functools.partial(scan, dtype=jnp.bfloat16),
        True,
        even=True,
    ),
    Loop("the same scan, not divided", T5X, functools.partial(scan, divides=False), True, even=True),
    Loop(
        "`rows // k` rows for each micro-batch, k = 12",
        _link("commit", "phlippe/uvadlc_notebooks/commit/0da8037"),
        floored,
        True,
        even=True,
        every=12,
    ),
    Loop("the key of the step for each micro-batch", T5X, one_key, True, even=True),
    Loop("advantages normalised in the loss", "", functools.partial(scan, loss=advantages), True, even=True),
    Loop("a clip by hand before `MultiSteps`", "", functools.partial(multi_steps, clip=True), False, even=True),
    Loop(
        "`optax.apply_every` behind AdamW",
        _link("commit", "evanatyourservice/gpt-jax/commit/e1b2305"),
        apply_every,
        False,
        even=True,
    ),
    Loop(
        "an average of the parameters, moved at each call",
        _link("thread", "Physical-Intelligence/openpi/issues/286"),
        average,
        False,
        even=True,
        windows=2,
        of=lambda carry: carry["average"],
    ),
    Loop("a host loop, `loss / k`; the data end after 5 of 16", "", host, False, even=True, micro_batches=5),
    Loop(
        "a service that keeps the last request's gradient",
        _link("pull request", "NovaSky-AI/SkyRL/pull/2008"),
        functools.partial(host, keeps="last"),
        False,
        even=True,
    ),
    Loop("a scan that adds sums and divides by all tokens", "", tokens, True),
    Loop(
        "`value_and_grad(loss, k)`",
        "ours",
        ours_within,
        True,
    ),
    Loop(
        "`value_and_apply_gradients(loss, tx)`",
        "ours",
        ours_across,
        False,
    ),
]
