"""Does `verify_step` hold and name faults under optimizers whose state is partial, factored or of second moments?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from optax_accum import verify_step
from tests.tiers import sweep

K = 4
rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
PARAMS = {"a": {"w": normal(6, 5)}, "b": {"w": normal(5, 3)}}
BATCH = {"x": normal(16, 6), "y": normal(16, 3)}
WARM_UP = optax.linear_schedule(0.0, 1e-2, 4)


def loss(params, batch):
    return jnp.mean((batch["x"] @ params["a"]["w"] @ params["b"]["w"] - batch["y"]) ** 2)


def loop(tx, factor=1.0, ema=None, rate=1.0, kept=False):
    """Returns a sound `make_step`, but for factors in windows, an average that moves where `ema` says, sums that stay."""

    def make_step(every):
        @jax.jit
        def step(carry, batch, last=False):
            rows = len(batch["x"])
            acc = jax.tree.map(lambda a, g: a + rows * g, carry["acc"], jax.grad(loss)(carry["params"], batch))
            n, total = carry["n"] + 1, carry["total"] + rows
            closes = (n >= every) | last
            scale = (factor if every > 1 else 1.0) / total
            updates, state = tx.update(jax.tree.map(lambda a: scale * a, acc), carry["state"], carry["params"])
            updates = jax.tree.map(lambda u: (rate if every > 1 else 1.0) * u, updates)
            new = {"params": optax.apply_updates(carry["params"], updates), "state": state}
            old = {"params": carry["params"], "state": carry["state"]}
            emptied = acc if kept and every > 1 else jax.tree.map(jnp.zeros_like, acc)
            new |= {"acc": emptied, "n": 0 * n, "total": 0 * total}
            out = jax.tree.map(lambda a, b: jnp.where(closes, a, b), new, old | {"acc": acc, "n": n, "total": total})
            if ema:
                average = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, carry["ema"], out["params"])
                moves = closes | (ema == "at each micro-step")
                out["ema"] = jax.tree.map(lambda a, b: jnp.where(moves, a, b), average, carry["ema"])
            return out

        carry = {"params": PARAMS, "state": tx.init(PARAMS), "acc": jax.tree.map(jnp.zeros_like, PARAMS)}
        carry |= {"n": jnp.int32(0), "total": jnp.float32(0)} | ({"ema": PARAMS} if ema else {})
        return step, carry, lambda carry, batch: step(carry, batch, True)

    return make_step


OPTIMIZERS = {
    "a warm-up from 0": lambda: optax.adam(WARM_UP),
    "a warm-up from 0 without moments": lambda: optax.sgd(WARM_UP),
    "partition": lambda: optax.partition({"x": optax.adam(1e-2), "y": optax.sgd(1e-2)}, {"a": "x", "b": "y"}),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"a": True, "b": False}),
    "Muon": lambda: optax.contrib.muon(1e-2),
    "Adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=3),
    "NovoGrad": lambda: optax.novograd(1e-2),
    "SM3": lambda: optax.sm3(1e-2),
    "RMSProp": lambda: optax.rmsprop(1e-2),
    "schedule-free AdamW": lambda: optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
}


# `benchmarks.verify_step --rare` has the others.
@pytest.mark.sweep
@pytest.mark.parametrize("name", ["masked", "Muon", "Adafactor", "schedule-free AdamW"])
def test_a_factor_is_found_in_what_decides_it(name):
    """`holds` would be wrong of most of these where parameters alone are compared: a factor cancels in them."""
    tx = OPTIMIZERS[name]()
    sound = verify_step(loop(tx), BATCH)
    assert sound.holds, str(sound)
    for factor, kind in ((K, "sum for a mean"), (1 / K, "divided twice")):
        report = verify_step(loop(tx, factor), BATCH, uneven=False)
        assert [cause.kind for cause in report.causes] == [kind], str(report)


@pytest.mark.parametrize("name", sweep(["SM3", "RMSProp", "Adafactor", "a warm-up from 0"], but=["SM3"]))
def test_another_rate_is_none_of_the_gradient(name):
    """Second moments are right, where no first ones tell."""
    report = verify_step(loop(OPTIMIZERS[name](), rate=1.6), BATCH, uneven=False)
    assert [cause.kind for cause in report.causes] == ["optimizer at each micro-step"], str(report)


@pytest.mark.parametrize(
    "name",
    sweep(["a warm-up from 0", "a warm-up from 0 without moments", "masked"], but=["a warm-up from 0 without moments"]),
)
def test_a_sum_that_stays_is_found_after_an_update_of_nothing(name):
    """At a rate of 0 the first window changes no parameter, and its sum is in the second."""
    report = verify_step(loop(OPTIMIZERS[name](), kept=True), BATCH, uneven=False)
    assert [cause.kind for cause in report.causes] == ["not emptied"], str(report)


@pytest.mark.sweep
def test_an_average_that_moves_at_each_micro_step_moves_while_held():
    """It starts as the parameters: the first window does not show it."""
    sound = verify_step(loop(optax.adam(1e-2), ema="when a window closes"), BATCH)
    assert sound.holds, str(sound)
    assert {"ema/a/w", "ema/b/w"} <= sound.errors.keys()
    report = verify_step(loop(optax.adam(1e-2), ema="at each micro-step"), BATCH)
    assert [cause.kind for cause in report.causes] == ["moves while held"]
    assert "ema/a/w, ema/b/w moved at micro-step 5" in " ".join(str(report).split())


def test_a_bias_that_a_clip_holds_in_each_micro_batch_is_no_average():
    """Its part of the sum is the same whatever the micro-batch; that of the kernel beside it is not."""

    def make_step(every):
        def step(carry, batch):
            off = np.asarray(batch["x"]) @ carry["w"] + carry["bias"] - np.asarray(batch["y"]) - 9
            grads = {"w": np.asarray(batch["x"]).T @ off / off.size, "bias": off.mean(0) / 3}
            grads = {name: np.clip(g, -0.5, 0.5) for name, g in grads.items()}
            acc, n = {name: carry["acc"][name] + g for name, g in grads.items()}, carry["n"] + 1
            if n < every:
                return carry | {"acc": acc, "n": n}
            new = {name: carry[name] - np.float32(0.1) * acc[name] / n for name in acc}
            return new | {"acc": {name: 0 * a for name, a in acc.items()}, "n": 0}

        params = {"w": np.ones((6, 3), "f"), "bias": np.zeros(3, "f")}
        return step, params | {"acc": {name: 0 * leaf for name, leaf in params.items()}, "n": 0}

    params = lambda carry: {"w": carry["w"], "bias": carry["bias"]}
    report = verify_step(make_step, BATCH, uneven=False, params=params)
    assert [cause.kind for cause in report.causes] == ["clipping at each micro-step"], str(report)


@pytest.mark.sweep
def test_what_is_not_compared_is_said():
    """What belongs to no parameter, or changes while held, as metrics and running statistics do."""

    def make_step(every):
        step, carry, _ = loop(optax.adam(1e-2))(every)
        logged = lambda carry, batch: (step(carry[0], batch), carry[1] + jnp.sum(batch["x"]))
        return logged, (carry, jnp.float32(0))

    report = verify_step(make_step, BATCH, uneven=False)
    assert report.holds
    assert report.notes[0].startswith("1 in the carry, which changes and belongs to no parameter")
    assert not any("carry" in note for note in verify_step(loop(optax.adam(1e-2)), BATCH).notes)


# Gradients that are rounding.

TOKENS = {"ids": rng.integers(0, 7, (16, 5)), "target": rng.integers(0, 7, (16, 5))}


def attention(params, batch):
    """Attention of one head whose keys have a bias, which moves no softmax; token 0 is padding that nobody sees."""
    x = params["embed"][batch["ids"]]
    q, k, v = x @ params["q"], x @ params["k"] + params["key_bias"], x @ params["v"]
    h = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k), -1) @ v
    terms = -jnp.take_along_axis(jax.nn.log_softmax((x + h) @ params["out"]), batch["target"][..., None], -1)[..., 0]
    mask = batch["ids"] > 0
    return jnp.sum(mask * terms) / jnp.sum(mask)


def of_tokens(weighed):
    params = {"embed": normal(7, 4), "q": normal(4, 4), "k": normal(4, 4), "key_bias": 0.1 * normal(1, 1, 4)}
    params |= {"v": normal(4, 4), "out": normal(4, 7)}

    def make_step(every):
        tx = optax_accum.accumulate_gradients(optax.adam(1e-2), every)

        @jax.jit
        def step(carry, batch):
            weight = jnp.sum(batch["ids"] > 0) if weighed else 1.0
            return optax_accum.apply_gradients(tx, jax.grad(attention)(carry[0], batch), *carry[::-1], weight=weight)

        return step, (params, tx.init(params))

    return make_step


@pytest.mark.sweep
@pytest.mark.parametrize("weighed", [True, False])
def test_a_gradient_that_is_rounding_is_judged_by_itself(weighed):
    """Adam moves a key's bias by rounding, as far as it likes."""
    report = verify_step(of_tokens(weighed), TOKENS, uneven=False)
    assert [cause.kind for cause in report.causes] == ["mean of means"] * (not weighed), str(report)


def normalised(params, batch):
    """A bias before BatchNorm, which takes it away again."""
    h = batch["x"] @ params["w"] + params["bias"]
    h = (h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-5)
    return jnp.mean((jnp.tanh(h) @ params["out"] - batch["y"]) ** 2)


@pytest.mark.sweep
@pytest.mark.parametrize("exact", sweep([True, False], but=[True]))
def test_a_bias_before_batch_norm_is_rounding(exact):
    """It hides neither that a step is right, nor what is wrong with another."""
    params = {"w": normal(6, 5), "bias": 0.1 * normal(1, 5), "out": normal(5, 3)}

    def make_step(every):
        tx = optax.adam(1e-2)
        value_and_grad = optax_accum.value_and_grad(normalised, every)

        def mean_of_means(params, batch):
            parts = jax.tree.map(lambda leaf: leaf.reshape(every, -1, leaf.shape[1]), batch)
            return jax.tree.map(lambda g: g.mean(0), jax.vmap(jax.grad(normalised), (None, 0))(params, parts))

        @jax.jit
        def step(carry, batch):
            grads = value_and_grad(carry[0], batch)[1] if exact else mean_of_means(carry[0], batch)
            updates, state = tx.update(grads, carry[1], carry[0])
            return optax.apply_updates(carry[0], updates), state

        return step, (params, tx.init(params))

    batch = {"x": rng.normal(size=(16, 6)).astype(np.float32), "y": rng.normal(size=(16, 3)).astype(np.float32)}
    report = verify_step(make_step, batch, within_call=True, uneven=False)
    assert [cause.kind for cause in report.causes] == ["coupled examples"] * (not exact), str(report)


CLIP = optax.clip_by_global_norm(0.1)
WARM_ADAMW = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 40))
PAIRS = {"x": normal(32, 6), "y": 3 * normal(32, 6)}


def squares(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["out"] - batch["y"]) ** 2)


def contrastive(params, batch):
    unit = lambda rows: rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
    similar = 5 * unit(jnp.tanh(batch["x"] @ params["w"]) @ params["out"]) @ unit(batch["y"]).T
    return jnp.mean(jax.nn.logsumexp(similar, 1) - jnp.diag(similar))


def clipped(loss, outside, inside):
    params = {"w": normal(6, 8), "out": normal(8, 6)}

    def make_step(every):
        tx = optax.chain(*outside, optax_accum.accumulate_gradients(optax.chain(*inside), every))

        @jax.jit
        def step(carry, batch):
            updates, state = tx.update(jax.grad(loss)(carry[0], batch), carry[1], carry[0])
            return optax.apply_updates(carry[0], updates), state

        return step, (params, tx.init(params))

    return make_step


@pytest.mark.parametrize("optimizer", [*sweep([WARM_ADAMW]), optax.sgd(0.1)], ids=["warm-up", "sgd"])
@pytest.mark.parametrize(
    ("loss", "outside", "inside", "kind"),
    [
        *sweep([(squares, [CLIP], [], "clipping at each micro-step")]),  # behind a warm-up: coupled examples
        (contrastive, [], [CLIP], "coupled examples"),  # it was another difference
    ],
    ids=["outside", "inside"],
)
def test_a_clip_and_what_stands_behind_it_are_told_apart(loss, outside, inside, kind, optimizer):
    report = verify_step(clipped(loss, outside, [*inside, optimizer]), PAIRS, every=8, uneven=False)
    assert [cause.kind for cause in report.causes] == [kind], str(report)
