"""Is each planted fault of a step found and named, and is nothing found in sound steps, whoever wrote them?"""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_accum
from optax_accum import verify_step
from optax_accum.verify import _params as step_params
from optax_accum.verify._calls import StepRunner
from optax_accum.verify._report import Report
from tests.tiers import sweep
from tests.verify.planted import KINDS, sound_step
from tests.verify.planted import fault as planted

rng = np.random.default_rng(0)
N, K, D = 12, 4, 3
W = rng.normal(size=(6, D)).astype(np.float32)
BATCH = {
    "x": rng.normal(size=(N, 6)).astype(np.float32),
    "y": rng.normal(size=(N, D)).astype(np.float32),
    "mask": rng.uniform(0.2, 3, size=N).astype(np.float32),
}
BEST = np.linalg.lstsq(BATCH["x"], BATCH["y"])[0]  # has no gradient


def squared(w, batch, key):
    """The gradient of a mean of squares, in NumPy: nothing is compiled."""
    x, y = np.asarray(batch["x"]), np.asarray(batch["y"])
    return 2 * x.T @ (x @ w - y) / y.size


def masked(w, batch, key):
    x, y, mask = (np.asarray(batch[name]) for name in ("x", "y", "mask"))
    return 2 * x.T @ (mask[:, None] * (x @ w - y)) / mask.sum() / D


def normed(w, batch, key):
    x = np.asarray(batch["x"])
    return squared(w, batch | {"x": (x - x.mean(0, keepdims=True)) / x.std(0, keepdims=True)}, key)


def summed(w, batch, key):
    return squared(w, batch, key) * np.float32(len(batch["x"]))


def dropped(w, batch, key):
    keep = np.asarray(jax.random.bernoulli(key, 0.7, batch["x"].shape))
    return squared(w, batch | {"x": np.asarray(batch["x"]) * keep / np.float32(0.7)}, key)


def dropped_sum(w, batch, key):
    """Of a loss that is divided by a constant."""
    return dropped(w, batch, key) * np.float32(len(batch["x"]) / N)


PARAMS = {"w": jnp.asarray(W)}


def loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


@dataclasses.dataclass(frozen=True)
class Loop:
    """Gradient descent with momentum in plain NumPy, and the places where it can go wrong in a window."""

    grad: object = squared
    clip: object = lambda g: g  # of each micro-batch's gradient
    inside: object = lambda g: g  # a clip in the optimizer, where it belongs
    weight: object = lambda batch: np.float32(len(batch["x"]))
    join: object = lambda acc, g, n: acc + g
    factor: object = lambda n, k: 1
    closes: object = lambda n, k: n >= k
    held: object = lambda w: w
    rate: object = lambda m: np.float32(0.1)
    decay: object = np.float32(0)
    key: object = lambda key, n: jax.random.fold_in(key, n)
    empty: object = lambda acc: np.zeros_like(acc)
    summed: object = lambda acc, k: acc  # of the sum so far
    stays: tuple = ()  # what an update does not set back to 0
    stale: bool = False  # whether gradients are those of the parameters before the last update
    flushes: bool = True  # whether the last micro-batch of the data makes an update
    guarded: bool = False
    dtype: object = np.float32
    draws: bool = False

    def __call__(self, every):
        def step(carry, batch, last=False):
            w, m, acc, n = carry["params"]["w"], carry["m"]["w"], carry["acc"], carry["n"] + 1
            key = self.key(carry["key"], n) if self.draws else None
            share = self.weight(batch)
            g = self.clip(self.grad(carry["old"] if self.stale else w, batch, key))
            acc = self.summed(self.join(acc, (share * g).astype(self.dtype), n), every)
            total = carry["total"] + share
            if not (self.closes(n, every) or (last and self.flushes)):
                return carry | {"params": {"w": self.held(w)}, "acc": acc, "n": n, "total": total}
            mean = acc.astype(np.float32) / total * np.float32(self.factor(n, every))
            new = np.float32(0.9) * m + self.inside(mean) + self.decay * w
            if np.isfinite(new).all() or not self.guarded:
                m, w = new, w - self.rate(m) * new
            old = {"old": carry["params"]["w"]} if self.stale else {}
            kept = {"n": n, "total": total}
            counts = {name: kept[name] if name in self.stays else 0 * kept[name] for name in kept}
            return carry | {"params": {"w": w}, "m": {"w": m}, "acc": self.empty(acc)} | counts | old

        carry = {"params": {"w": W}, "m": {"w": np.zeros_like(W)}, "acc": np.zeros_like(W, self.dtype)}
        carry |= {"n": 0, "total": np.float32(0)} | ({"key": jax.random.key(0)} if self.draws else {})
        carry |= {"old": W} if self.stale else {}
        return step, carry, lambda carry, batch: step(carry, batch, last=True)


def in_windows(**fields):
    """A fault that make_step(1) has not."""
    return lambda every: (Loop(**fields) if every > 1 else Loop())(every)


class Cut:
    """The same within a call: the rows that k does not divide are left out, or are in the last micro-batch."""

    def __init__(self, *, drops=False, deals=False, loop=None):
        self.drops, self.deals, self.loop = drops, deals, loop or Loop()

    def __call__(self, every):
        micro_step, carry, _ = self.loop(every)

        def step(carry, batch):
            rows = len(batch["x"])
            kept = np.arange(rows // every * every if self.drops else rows)
            parts = [kept[n::every] for n in range(every)] if self.deals else np.array_split(kept, every)
            for part in parts:
                carry = micro_step(carry, {name: np.asarray(leaf)[part] for name, leaf in batch.items()})
            return carry

        return step, carry


def by_norm(limit, g):
    return g * np.float32(min(1, limit / np.linalg.norm(g)))


def tokens(batch):
    return np.asarray(batch["mask"]).sum()


SIZE = np.linalg.norm(squared(W, BATCH, None))
FAULTS = {
    "never closes": in_windows(closes=lambda n, k: False),
    "closes at another micro-step": in_windows(closes=lambda n, k: n > k),
    "wrong divisor": in_windows(factor=lambda n, k: np.float32(0.6)),
    "only the first gradient": Loop(join=lambda acc, g, n: acc if n > 1 else g),
    "only the last gradient": Loop(join=lambda acc, g, n: g, factor=lambda n, k: n),
    "divided twice": Loop(factor=lambda n, k: 1 / n),
    "divided by the full k": Loop(factor=lambda n, k: n / k),
    "sum for a mean": Loop(factor=lambda n, k: n),
    "mean of means": Loop(masked, weight=lambda batch: np.float32(1)),
    "clipping at each micro-step": Loop(clip=lambda g: g / np.linalg.norm(g)),
    "optimizer at each micro-step": Loop(closes=lambda n, k: True),
    "moves while held": Loop(held=lambda w: np.float32(0.99) * w),
    "shared key": Loop(dropped, key=lambda key, n: key, draws=True),
    "low-precision sum": Loop(dtype=jnp.bfloat16),
    "NaN poison": lambda every: Loop(guarded=True, empty=lambda acc: 0 * acc if every > 1 else np.zeros_like(acc))(
        every
    ),
    "coupled examples": Loop(normed),
    "not emptied": in_windows(empty=lambda acc: acc),
    "rows left out": Cut(drops=True),
    "short window dropped": Loop(flushes=False),
    "emptied in mid-window": Loop(join=lambda acc, g, n: g if n == 2 else acc + g),
    "wrong weights": Loop(weight=lambda batch: np.float32(batch["mask"][0])),
    "weighed by place": Loop(join=lambda acc, g, n: np.float32(0.7) * acc + g),
    "clipping the running sum": Loop(
        weight=lambda batch: np.float32(1), summed=lambda acc, k: by_norm(0.3 * SIZE * k, acc)
    ),
    "counter not emptied": in_windows(stays=("total",)),
    "stale parameters": in_windows(stale=True),
}
OPTIONS = {"rows left out": {"within_call": True}}


@pytest.mark.parametrize("kind", FAULTS)
def test_each_planted_fault_is_named(kind):
    report = verify_step(FAULTS[kind], BATCH, **OPTIONS.get(kind, {}))
    assert not report.holds
    assert [cause.kind for cause in report.causes] == [kind], str(report)
    assert report.causes[0].remedy in " ".join(str(report).split())
    assert max(map(len, str(report).splitlines())) <= 80
    with pytest.raises(
        AssertionError,
        match=f"Differs: the update of micro-batches is not that of the whole batch[^.]*[.](.|\n)*Cause: {kind}",
    ):
        report.check()


def test_every_kind_of_the_benchmark_is_planted_here_too():
    assert sorted(FAULTS) == sorted(KINDS)


def apply_every(every):
    """Adam sees each micro-batch's gradient; what it makes of them is averaged."""
    tx = optax.chain(optax.scale_by_adam(), optax.apply_every(every), optax.scale(-0.01 / every))

    @jax.jit
    def step(carry, batch):
        updates, state = tx.update(jax.grad(loss)(carry[0], batch), carry[1], carry[0])
        return optax.apply_updates(carry[0], updates), state

    return step, (PARAMS, tx.init(PARAMS))


def averaged_signs(every):
    """The update of each micro-batch, by signs of its momentum, waits for the last one. Nothing counts them."""

    @jax.jit
    def step(carry, batch):
        w, m, acc, n = carry
        m = 0.5 * m + jax.grad(lambda w: loss({"w": w}, batch))(w)
        acc, closes = acc + jnp.sign(m) / every, (n + 1) % every == 0
        return w - 0.01 * jnp.where(closes, acc, 0), m, jnp.where(closes, 0, acc), n + 1

    w = jnp.asarray(W)
    return step, (w, 0 * w, 0 * w, 0)


def hidden_key(every):
    """A key that stands in the step: dropout that is always the same."""
    step, carry, _ = Loop(dropped, key=lambda key, n: key, draws=True)(every)
    key = carry.pop("key")
    return lambda carry, batch: step(carry | {"key": key}, batch), carry


SUM = {"weight": lambda batch: np.float32(1), "factor": lambda n, k: n}
EQUAL = {"weight": lambda batch: np.float32(1)}
clipped = lambda g: g * np.float32(min(1, 0.05 / np.linalg.norm(g)))
clipped_later = lambda g: g * np.float32(min(1, 1.3 * SIZE / np.linalg.norm(g)))  # of two windows, not of one
AGAIN = {
    "an undivided sum, clipped at each micro-step": (
        "clipping the running sum",
        Loop(summed=lambda acc, k: by_norm(0.3 * SIZE, acc), **SUM),
    ),
    "earlier micro-batches count more": ("weighed by place", Loop(join=lambda acc, g, n: acc + g / np.float32(n))),
    "a micro-batch that nobody adds": ("rows left out", Loop(join=lambda acc, g, n: acc if n == 2 else acc + g)),
    "the first, divided by all tokens": (
        "only the first gradient",
        Loop(masked, weight=tokens, join=lambda acc, g, n: acc if n > 1 else g),
    ),
    "a counter that is never 0 again": ("counter not emptied", in_windows(stays=("n",))),
    "a counter that passes the end by": ("counter not emptied", in_windows(stays=("n",), closes=lambda n, k: n == k)),
    "a sum emptied in the second window alone": (
        "emptied in mid-window",
        in_windows(stays=("n",), closes=lambda n, k: n % k == 0, join=lambda acc, g, n: g if n == K + 2 else acc + g),
    ),
    "weights of rows for tokens": ("mean of means", Loop(masked)),
    "tokens that nobody counts, behind a clip that acts": ("mean of means", Loop(masked, inside=clipped, **EQUAL)),
    "a sum that stays, behind a clip that acts": (
        "not emptied",
        lambda every: Loop(inside=clipped_later, empty=(lambda acc: acc) if every > 1 else np.zeros_like)(every),
    ),
    "a summed loss, averaged": ("divided twice", Loop(summed, **EQUAL)),
    "a sum, and weight decay": ("sum for a mean", Loop(factor=lambda n, k: n, decay=np.float32(0.1))),
    "a larger factor of no one": ("wrong divisor", in_windows(factor=lambda n, k: np.float32(1.4))),
    "later micro-batches count more": (
        "weighed by place",
        in_windows(join=lambda acc, g, n: acc + n * g * 2 / (K + 1)),
    ),
    "the wrong rate": ("optimizer at each micro-step", in_windows(rate=lambda m: np.float32(0.3))),
    "the wrong rate, later": (
        "optimizer at each micro-step",
        in_windows(rate=lambda m: np.float32(0.1 + 0.1 * m.any())),
    ),
    "clipped by value": ("clipping at each micro-step", Loop(clip=lambda g: np.clip(g, -0.01, 0.01))),
    "a key in the step": ("shared key", hidden_key),
    "a key that the parts of a sum share": ("shared key", Loop(dropped_sum, key=lambda key, n: key, draws=True, **SUM)),
    "apply_every after Adam": ("optimizer at each micro-step", apply_every),
    "signs of each gradient, averaged": ("optimizer at each micro-step", averaged_signs),
}


@pytest.mark.parametrize("name", sweep(AGAIN, but=["a key in the step", "the wrong rate", "apply_every after Adam"]))
def test_other_ways_to_a_fault(name):
    kind, make_step = AGAIN[name]
    report = verify_step(make_step, BATCH, uneven=False)
    assert [cause.kind for cause in report.causes] == [kind], str(report)


def test_low_precision_that_only_the_second_window_shows():
    report = verify_step(in_windows(dtype=np.float16), BATCH, uneven=False, rtol=1.85e-4)
    assert [cause.kind for cause in report.causes] == ["low-precision sum"], str(report)


SOUND = {
    "squares": Loop(),
    "a weighted mean": Loop(masked, weight=tokens),
    "clipped means": Loop(factor=lambda n, k: 1.0),
    "dropout": Loop(dropped, draws=True),
    "dropout, of a sum": Loop(dropped_sum, draws=True, **SUM),
    "no NaN": Loop(guarded=True),
    "a gradient near its own rounding": Loop(lambda w, *args: squared(w - W + BEST + np.float32(1e-4), *args)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_in_a_sound_loop(name):
    report = verify_step(SOUND[name], BATCH)
    assert report.holds, str(report)
    random = name.startswith("dropout")
    assert set(report.errors) == ({"m/w"} if random else {"w", "m/w"})  # means over keys: what is linear
    assert not report.notes
    assert report.random == random
    report.check()


def of_narrow_data(w, batch, key):
    return squared(w, batch | {"x": np.asarray(batch["x"], np.float32)}, key)


def sum_of_narrow_data(w, batch, key):
    return of_narrow_data(w, batch, key) * np.float32(len(batch["x"]) / N)


NARROW = {
    "a mean": (Loop(of_narrow_data), []),
    "a sum": (Loop(sum_of_narrow_data, **SUM), []),
    "a sum, and weight decay": (Loop(sum_of_narrow_data, decay=np.float32(0.1), **SUM), []),
    "a mean in bfloat16": (Loop(of_narrow_data, dtype=jnp.bfloat16), ["low-precision sum"]),
    "a sum in bfloat16": (Loop(sum_of_narrow_data, dtype=jnp.bfloat16, **SUM), ["low-precision sum"]),
}


@pytest.mark.parametrize("name", sweep(NARROW, but=["a mean", "a sum in bfloat16"]))
def test_what_is_given_in_bfloat16_is_summed_in_float32(name):
    make_step, kinds = NARROW[name]
    report = verify_step(make_step, BATCH | {"x": jnp.asarray(BATCH["x"], jnp.bfloat16)})
    assert [cause.kind for cause in report.causes] == kinds, str(report)


# Other people's steps.


def multi_steps(every):
    @jax.jit
    def step(state, batch):
        return state.apply_gradients(grads=jax.grad(loss)(state.params, batch))

    return step, TrainState.create(apply_fn=None, params=PARAMS, tx=optax.MultiSteps(optax.adam(0.01), every))


def dropped_state(every):
    """Optax's notebook: a compiled function keeps the new state to itself."""
    optimizer = optax.MultiSteps(optax.adam(0.01), every)
    state = optimizer.init(PARAMS)

    @jax.jit
    def update(params, state, batch):
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates)

    return lambda params, batch: update(params, state, batch), PARAMS


def scanned(every):
    @jax.jit
    def step(carry, batch):
        params, state = carry
        cut = jax.tree.map(lambda x: x.reshape(every, -1, *x.shape[1:]), batch)
        grads = jax.lax.map(lambda micro: jax.grad(loss)(params, micro), cut)
        updates, state = optax.lion(0.01).update(jax.tree.map(lambda g: g.mean(0), grads), state, params)
        return optax.apply_updates(params, updates), state

    return step, (PARAMS, optax.lion(0.01).init(PARAMS))


def test_the_parameters_of_a_module_are_its_params_alone():
    """And not the variances of BatchNorm, which are no zeros at first either."""
    model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    _, found = step_params.params_of((model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)), None)
    assert sorted(found) == ["0/bias", "0/kernel", "1/bias", "1/scale"]


def of_nnx(every):
    model = nnx.Linear(6, D, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.MultiSteps(optax.sgd(0.1), every), wrt=nnx.Param)

    @nnx.jit
    def update(model, optimizer, batch):
        grads = nnx.grad(lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))(model)
        optimizer.update(model, grads)

    def step(carry, batch):
        update(*carry, batch)
        return carry

    return step, (model, optimizer)


def ours(every):
    tx = optax_accum.accumulate_gradients(optax.adam(0.01), every)

    def step(carry, batch, flush=False):
        grads = jax.grad(loss)(carry[0], batch)
        return optax_accum.apply_gradients(tx, grads, carry[1], carry[0], weight=len(batch["x"]), flush=flush)

    last = jax.jit(lambda carry, batch: step(carry, batch, True))
    return jax.jit(step), (PARAMS, tx.init(PARAMS)), last


def split_of_nnx(every):
    """What nnx.split gives is a state of nnx.Param; so are the moments and sums that are made of it."""
    graphdef, params = nnx.split(nnx.Linear(6, D, rngs=nnx.Rngs(0)))
    tx = optax.MultiSteps(optax.adam(0.01), every)

    @jax.jit
    def step(carry, batch):
        of = lambda params: jnp.mean((nnx.merge(graphdef, params)(batch["x"]) - batch["y"]) ** 2)
        updates, state = tx.update(jax.grad(of)(carry[0]), carry[1], carry[0])
        return optax.apply_updates(carry[0], updates), state

    return step, (params, tx.init(params))


def summed_of_nnx(every):
    """Optax's other notebook: sums in a tree of their own, and no division."""
    graphdef, params = nnx.split(nnx.Linear(6, D, rngs=nnx.Rngs(0)))
    tx = optax.adam(0.01)

    @jax.jit
    def add(params, acc, batch):
        of = lambda params: jnp.mean((nnx.merge(graphdef, params)(batch["x"]) - batch["y"]) ** 2)
        return jax.tree.map(jnp.add, jax.grad(of)(params), acc)

    @jax.jit
    def update(params, state, acc):
        updates, state = tx.update(acc, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.zeros_like(acc)

    def step(carry, batch):
        params, state, acc, n = carry
        acc = add(params, acc, batch)
        return (params, state, acc, n + 1) if n + 1 < every else (*update(params, state, acc), 0)

    return step, (params, tx.init(params), optax.tree.zeros_like(params), 0)


def held_by_nnx(every):
    """A module that holds another one twice, beside that one: still one in each run."""

    class Pair(nnx.Module):
        def __init__(self, model):
            self.model = self.again = model

    step, (model, optimizer) = of_nnx(every)
    return lambda carry, batch: (step((carry[1].again, carry[2]), batch), carry)[1], (model, Pair(model), optimizer)


def with_metrics(every):
    """Flax's metrics have a `count`, too, and count micro-steps."""
    step, carry = of_nnx(every)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average())

    def counted(carry, batch):
        carry[2].update(values=jnp.float32(1))
        return (*step(carry[:2], batch), carry[2])

    return counted, (*carry, metrics)


def dealt_out(every, alike=False):
    """Rows are dealt out to micro-batches whose means have denominators of their own."""
    masked_mean = lambda params, batch: (
        jnp.sum(batch["mask"] * jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2, 1)) / jnp.sum(batch["mask"])
    )
    tx, cut = optax.adam(0.01), optax_accum.value_and_grad(masked_mean, every)
    if alike:
        cut = optax_accum.reduce_microbatches(jax.value_and_grad(masked_mean), every, weight_fn=lambda batch: 1.0)

    @jax.jit
    def step(carry, batch):
        updates, state = tx.update(cut(carry[0], batch)[1], carry[1], carry[0])
        return optax.apply_updates(carry[0], updates), state

    return step, (PARAMS, tx.init(PARAMS))


def dealt_alike(every):
    return dealt_out(every, alike=True)


OTHERS = {
    "MultiSteps in a TrainState": (multi_steps, {"uneven": False}, []),
    "MultiSteps, unequal micro-batches": (multi_steps, {}, ["mean of means"]),
    "NNX": (of_nnx, {"uneven": False}, []),
    "NNX, a module that stands twice": (held_by_nnx, {"uneven": False, "params": lambda carry: carry[0]}, []),
    "NNX, split": (split_of_nnx, {"uneven": False}, []),
    "NNX, split, a sum": (summed_of_nnx, {}, ["sum for a mean"]),
    "NNX, metrics": (with_metrics, {"uneven": False}, []),
    "rows dealt out": (dealt_out, {"within_call": True}, []),
    "rows dealt out, weighed alike": (dealt_alike, {"within_call": True}, ["mean of means"]),
    "a scan": (scanned, {"within_call": True}, []),
    "ours": (ours, {}, []),
    "a state that is lost": (dropped_state, {"optimizer": optax.adam(0.01), "loss": loss}, ["never closes"]),
}


@pytest.mark.sweep
@pytest.mark.usefixtures("rank_promotion")
@pytest.mark.parametrize(
    "name", sweep(OTHERS, but=["MultiSteps, unequal micro-batches", "NNX", "a scan", "ours", "a state that is lost"])
)
def test_a_step_of_a_framework(name):
    make_step, options, kinds = OTHERS[name]
    report = verify_step(make_step, BATCH, **options)
    assert [cause.kind for cause in report.causes] == kinds, str(report)
    assert report.holds == (not kinds)


@pytest.mark.usefixtures("rank_promotion")
@pytest.mark.parametrize("rate", ["constant", "schedule"])
def test_a_step_of_keras(rate, monkeypatch):
    """Keras 3 calls a schedule with the number of the micro-step."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")

    def make_step(every):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(D)])
        decay = keras.optimizers.schedules.ExponentialDecay(0.01, 4, 0.5)
        steps = {"gradient_accumulation_steps": every} if every > 1 else {}
        optimizer = keras.optimizers.Adam(decay if rate == "schedule" else 0.01, **steps)
        optimizer.build(model.trainable_variables)

        @jax.jit
        def step(carry, batch):
            params, others, state = carry
            of = lambda params: jnp.mean((model.stateless_call(params, others, batch["x"])[0] - batch["y"]) ** 2)
            params, state = optimizer.stateless_apply(state, jax.grad(of)(params), params)
            return params, others, state

        owned = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
        return step, tuple([variable.value for variable in variables] for variables in owned)

    report = verify_step(make_step, BATCH, uneven=False)
    assert [cause.kind for cause in report.causes] == ["optimizer at each micro-step"] * (rate == "schedule")


class Model:
    """What may stand in a static field: a lock, a module, a device, a compiled function."""

    def __init__(self):
        self.lock, self.module, self.device, self.traced = threading.Lock(), np, jax.devices()[0], 0
        self.apply = jax.jit(self._apply)

    def _apply(self, params, x):
        self.traced += 1
        return x @ params["w"]


@pytest.mark.sweep
def test_a_leaf_that_stands_twice_is_copied_without_what_stands_beside_it():
    """An average that starts as the parameters. Each compiled function is traced once for each size of a batch."""
    of = dataclasses.make_dataclass("State", ["params", "ema", "state", "model"])
    jax.tree_util.register_dataclass(of, ["params", "ema", "state"], ["model"])
    models = []

    def make_step(every):
        models.append(Model())
        tx = optax.MultiSteps(optax.sgd(0.1), every)

        def step(carry, batch):
            grads = jax.grad(lambda p: jnp.mean((carry.model.apply(p, batch["x"]) - batch["y"]) ** 2))(carry.params)
            updates, state = tx.update(grads, carry.state, carry.params)
            return dataclasses.replace(carry, params=optax.apply_updates(carry.params, updates), state=state)

        return step, of(PARAMS, PARAMS, tx.init(PARAMS), models[-1])

    assert verify_step(make_step, BATCH, every=2, uneven=False).holds
    assert max(model.traced for model in models) <= 4


def test_what_was_not_tried_is_said():
    report = verify_step(scanned, BATCH, within_call=True)
    assert "Not tried: micro-batches of [3, 3, 3, 2] rows, which the step refuses" in " ".join(str(report).split())
    assert "returns no last_step" in str(verify_step(lambda every: Loop()(every)[:2], BATCH, every=2))


def test_a_step_that_cuts_its_batch_itself_is_told_of_the_option():
    """Without it each call is an update: what is said of it would accuse a sound step."""
    report = verify_step(Cut(), BATCH, every=2, uneven=False)
    assert not report.holds
    says = "Not tried: within_call=True, which a step needs that gets the whole batch in one call"
    assert says in " ".join(str(report).split())
    assert verify_step(Cut(), BATCH, every=2, uneven=False, within_call=True).holds


def test_batch_norm_is_named_where_micro_batches_are_weighed():
    weighed = lambda w, batch, key: masked(w, batch | {"x": normalised_columns(batch["x"])}, key)
    report = verify_step(Loop(weighed, weight=lambda batch: np.asarray(batch["mask"]).sum()), BATCH, uneven=False)
    assert [cause.kind for cause in report.causes] == ["coupled examples"], str(report)


def gained(w, batch, key):
    """Advantages normalised in the loss: in a batch of a few rows one of them counts against the others."""
    gain = np.asarray(batch["mask"])
    gain = (gain - gain.mean()) / gain.std()
    x = np.asarray(batch["x"])
    return x.T @ (gain[:, None] * np.tanh(x @ w)) / len(x)


@pytest.mark.parametrize("every", [2, 4])
@pytest.mark.parametrize("columns", [1, D])
def test_advantages_normalised_in_the_loss_are_coupled(columns, every):
    """Also where fewer numbers move than micro-batches can be told apart."""
    make_step = lambda every: narrow(Loop(gained)(every), columns)
    report = verify_step(make_step, BATCH, every=every, uneven=False)
    assert [cause.kind for cause in report.causes] == ["coupled examples"], str(report)
    assert "['mask'] of the batch is normalised over its rows" in " ".join(str(report).split())
    assert "before it is split" in report.causes[0].remedy
    fixed = (BATCH["mask"] - BATCH["mask"].mean()) / BATCH["mask"].std()  # the remedy
    given = Loop(
        lambda w, batch, key: (
            np.asarray(batch["x"]).T @ (np.asarray(batch["mask"])[:, None] * np.tanh(batch["x"] @ w)) / len(batch["x"])
        )
    )
    assert verify_step(given, BATCH | {"mask": fixed}, every=every, uneven=False).holds


def test_a_mean_near_the_whole_batchs_is_named_too():
    """Within two in a hundred of it, where whatever is near might be called right."""
    batch = BATCH | {"mask": 1 + np.float32(0.02) * (BATCH["mask"] > 1)}
    report = verify_step(FAULTS["mean of means"], batch, uneven=False)
    assert [cause.kind for cause in report.causes] == ["mean of means"], str(report)
    assert max(report.errors.values()) < 0.02


def narrow(made, columns):
    """A model of fewer columns."""
    step, carry, last = made
    of = lambda tree: {
        name: {"w": leaf["w"][:, :columns]} if isinstance(leaf, dict) else leaf for name, leaf in tree.items()
    }
    return step, of(carry) | {"acc": carry["acc"][:, :columns]}, last


def test_an_average_beside_the_parameters_is_none_of_them():
    """In a dict, where every part that is filled may hold parameters."""
    w = {"w": np.ones((2, 3), np.float32) / 3}
    carry = {"model": w, "ema": w, "optimizer": {"mu": {"w": np.zeros((2, 3))}}}
    assert step_params.params_of(carry, None)[0] == ("model",)
    assert step_params.params_of({"window": (w, {"w": 0 * w["w"]}), "model": w}, None)[0] == ("model",)
    counted = optax.ScaleByAdamState(jnp.int32(0), w, {"w": 0.5 * w["w"]})  # not zeros: as constants that Muon keeps
    assert step_params.params_of({"optimizer": counted, "model": w}, None)[0] == ("model",)
    both = {"actor": w, "critic": {"w": 2 * w["w"]}}
    assert sorted(step_params.params_of(both, None)[1]) == ["actor/w", "critic/w"]


def normalised_columns(x):
    x = np.asarray(x)
    return (x - x.mean(0, keepdims=True)) / x.std(0, keepdims=True)


def test_the_reference_may_be_ours():
    fault = lambda every: Loop(factor=lambda n, k: 1 / K)(every)
    assert not verify_step(fault, BATCH, uneven=False).causes[1:]  # make_step(1) has the same fault
    report = verify_step(
        lambda every: Loop(join=lambda acc, g, n: acc + g)(every), BATCH, optimizer=optax.sgd(0.1, 0.9), loss=loss
    )
    assert report.holds, str(report)


def test_parameters_are_where_one_says():
    make_step = lambda every: (lambda step, carry, last: (step, carry))(*Loop()(every))
    report = verify_step(make_step, BATCH, params=lambda carry: carry["params"], every=2)
    assert report.holds


def test_a_step_that_keeps_something_to_itself_is_made_anew_for_each_run():
    def make_step(every):
        seen, momentum = [], np.zeros_like(W)

        def step(carry, batch):
            seen.append(squared(carry, batch, None))
            if len(seen) % every:
                return carry
            momentum[:] = np.float32(0.9) * momentum + np.mean(seen[-every:], axis=0, dtype=np.float32)
            return carry - np.float32(0.1) * momentum

        return step, W

    assert verify_step(make_step, BATCH, uneven=False).holds


# Bad input.


def ranked(carry, batch):
    """The update of a batch is no combination of those of its parts."""
    g = dropped(carry["params"]["w"], batch, carry["key"])
    return carry | {"params": {"w": carry["params"]["w"] - np.float32(0.01) * (g >= np.sort(g, None)[-2])}}


random_ranks = ranked, {"params": {"w": W}, "key": jax.random.key(0)}
BAD = {
    "a batch too small": (Loop(), {"every": 7}, "needs 14 rows or more, two for each of every=7.*has 12"),
    "no window": (Loop(), {"every": 1}, "a window to compare: every=1. Pass 2"),
    "no number": (Loop(), {"every": "4"}, "every must be an integer"),
    "None": (Loop(), {"every": None}, "every must be an integer >= 1: every=None"),
    "no size": (Loop(), {"every": 2, "group_size": None}, "group_size must be an integer >= 1: group_size=None"),
    "groups": (Loop(), {"every": 2, "group_size": 5}, "needs 20 rows or more, two groups for each"),
    "broken groups": (Loop(), {"every": 2, "group_size": 3}, None),
    "no pair": (lambda every: W, {}, r"must return \(step, carry\).*make_step\(4\) returned float32"),
    "no last step": (lambda every: (*Loop()(every)[:2], 3), {}, "last_step must be a function"),
    "no parameters": (lambda every: (lambda c, b: c, {"n": 1}), {}, "must hold the parameters.*params=lambda carry"),
    "nothing returned": (
        lambda every: (lambda c, b: None, (W,)),
        {},
        "it returned None.*in place, as NNX and PyTorch do",
    ),
    "less than the carry": (
        lambda every: (lambda c, b: {"w": c["w"]}, {"w": W, "ema": W}),
        {},
        "return the whole carry: ema is not in what it returned",
    ),
    "an object": (lambda every: (lambda c, b: c, object()), {}, r"one object, of object.*return \(model, optimizer\)"),
    "more than the carry": (lambda every: (lambda c, b: (c, 0.5), {"w": W}), {}, r"a tuple that begins with it.*\[0\]"),
    "a step that does nothing": (lambda every: (lambda c, b: c, (W,)), {}, "must move the parameters.*take nnx.jit"),
    "random and linear in nothing": (
        lambda every: random_ranks,
        {},
        "nothing in this carry is. Make the step with optax.s",
    ),
    "NaN": (lambda every: (lambda c, b: (c[0] * np.nan,), (W,)), {}, "must have a finite update"),
    "other parameters": (
        lambda every: (*Loop()(every)[:1], (W * every,)),
        {},
        "with the same parameters.*other values",
    ),
    "no tolerance": (Loop(), {"rtol": np.nan}, "rtol must be a finite number above 0: rtol=nan. Leave it out"),
    "a loss alone": (Loop(), {"loss": loss}, "loss= was given, optimizer= was not"),
    "no optimizer": (Loop(), {"optimizer": optax.sgd, "loss": loss}, "^optimizer must be an optax.Gr.*optax.adam"),
    "an optimizer alone": (Loop(), {"optimizer": optax.sgd(0.1)}, "optimizer= was given, loss= was not"),
    "a hidden key": (
        lambda every: (
            lambda c, b: Loop(dropped, draws=True)(every)[0](c | {"key": jax.random.key(0)}, b),
            Loop()(1)[1],
        ),
        {},
        "put the key into the carry",
    ),
}


@pytest.mark.parametrize("name", [name for name in BAD if BAD[name][2]])
def test_bad_input(name):
    make_step, options, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=message):
        verify_step(make_step, BATCH, **options)


# The benchmark.


@pytest.mark.sweep
@pytest.mark.usefixtures("rank_promotion")
def test_a_sample_of_the_benchmark():
    assert sound_step(4).report().holds
    assert [cause.kind for cause in planted("sum for a mean", 0).report().causes] == ["sum for a mean"]


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        pytest.param("coupled examples", 16, marks=pytest.mark.sweep),  # AdamW's first change looks clipped
        ("wrong weights", 13),  # the second of two counts for 1 %
        pytest.param("wrong weights", 19, marks=pytest.mark.sweep),
    ],
)
@pytest.mark.usefixtures("rank_promotion")
def test_what_looks_like_another_fault(kind, number):
    assert [cause.kind for cause in planted(kind, number).report().causes][:1] == [kind]


def test_the_steps_of_the_benchmark_differ():
    names = {sound_step(number).name.split(",")[0] for number in range(50)}
    assert len(names) >= 10


# What a reference cannot tell.


def by_halves(every):
    """What two devices do that are averaged as equals, though one has more that counts; also in `make_step(1)`."""
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every)

    def loss(w, batch):
        return jnp.sum(batch["mask"][:, None] * (batch["x"] @ w - batch["y"]) ** 2) / batch["mask"].sum()

    @jax.jit
    def step(carry, batch):
        w, state = carry
        halves = jax.tree.map(lambda leaf: jnp.stack(jnp.split(jnp.asarray(leaf), [len(leaf) // 2])), batch)
        grads = jax.vmap(jax.grad(loss), (None, 0))(w, halves).mean(0)
        return optax_accum.apply_gradients(tx, grads, state, w)

    return step, (jnp.asarray(W), tx.init(jnp.asarray(W)))


def test_a_reference_that_averages_devices_as_equals_is_refused():
    """It was called a shared key, in a step that draws nothing."""
    batch = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf[:4]]), BATCH)
    with pytest.raises(ValueError, match="changes with the order of its rows.*On several devices make_step"):
        verify_step(by_halves, batch, every=4, uneven=False)


@pytest.mark.sweep
def test_a_window_that_is_not_finite_is_no_other_fault():
    """It was said to move while held: NaN is not NaN."""

    def make_step(every):
        tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every)

        def step(carry, batch):
            grads = squared(carry[0], batch, None) * (np.nan if len(batch["x"]) < N else 1)
            return optax_accum.apply_gradients(tx, jnp.asarray(grads, jnp.float32), carry[1], carry[0])

        return step, (jnp.asarray(W), tx.init(jnp.asarray(W)))

    (cause,) = verify_step(make_step, BATCH, every=3, uneven=False).causes
    assert cause.kind == "another difference"
    assert "is not finite" in cause.evidence


@pytest.mark.parametrize(
    ("make_step", "message"),
    [(by_halves(4), "must be a function.*Pass make_step itself"), (by_halves(4)[0], "missing a required.*itself")],
    ids=["what it returns", "the step"],
)
def test_what_is_no_make_step(make_step, message):
    with pytest.raises(TypeError, match=message):
        verify_step(make_step, BATCH)


def test_clipping_is_named_where_micro_batches_have_weights():
    """Weights explain the update, too: those of clipped gradients, of which the whole batch has more than all."""

    def loss(params, batch):
        error = (batch["x"] @ params["w"] - batch["y"]) ** 2
        return jnp.sum(batch["mask"] * error) / jnp.sum(batch["mask"])

    def make_step(every):
        sgd = optax_accum.accumulate_gradients(optax.sgd(0.1), every)
        tx = optax.chain(optax.clip_by_global_norm(0.1), sgd)
        apply = lambda carry, batch: optax_accum.apply_gradients(
            tx, jax.grad(loss)(carry[0], batch), carry[1], carry[0], weight=batch["mask"].sum()
        )
        params = {"w": jax.random.normal(jax.random.key(0), (6, 3))}
        return jax.jit(apply), (params, tx.init(params))

    x = jax.random.normal(jax.random.key(1), (16, 6))
    mask = jax.random.bernoulli(jax.random.key(2), 0.5, (16, 3)).at[:, 0].set(True)
    report = verify_step(make_step, {"x": x, "y": x[:, :3], "mask": mask}, every=4)
    assert [cause.kind for cause in report.causes] == ["clipping at each micro-step"], str(report)


@pytest.mark.sweep
@pytest.mark.parametrize("shared", [False, True])
def test_a_random_step_that_is_clearly_sound_takes_few_keys(shared, monkeypatch):
    """Sixteen keys, and where these do not decide, 64: it took 2,000 runs, each of a window or more."""
    runs = []
    run = StepRunner.run
    monkeypatch.setattr(StepRunner, "run", lambda *args, **options: runs.append(0) or run(*args, **options))
    own = Loop(dropped, draws=True)
    report = verify_step(FAULTS["shared key"] if shared else own, BATCH, uneven=False)
    assert report.holds != shared
    assert report.draws == (64 if shared else 16)
    assert f"means over {report.draws} keys" in " ".join(str(report).split())
    assert shared or len(runs) < 400


def labelled(w, batch, key):
    """Labels that are read as floats, and cut to integers."""
    wanted = np.eye(D, dtype=np.float32)[np.nan_to_num(batch["label"]).astype(int)]
    return squared(w, batch | {"y": wanted}, key)


LABELS = BATCH | {"label": rng.integers(0, D, N).astype(np.float32)}
A_SUM = Loop(labelled, factor=lambda n, k: n)


def test_labels_that_are_whole_floats_are_not_moved():
    sound = verify_step(Loop(labelled), LABELS)
    assert sound.holds
    assert max(sound.limits.values()) < 1e-3
    report = verify_step(A_SUM, LABELS)
    assert [cause.kind for cause in report.causes] == ["sum for a mean"], str(report)


def test_where_rounding_moves_the_reference_nothing_can_be_told():
    """A label that is no whole number: all are moved, and jump; a sum of half the gradient was said to hold."""
    noisy = LABELS | {"label": np.where(np.arange(N) == 0, np.float32(0.5), LABELS["label"])}
    report = verify_step(Loop(labelled, factor=lambda n, k: 1 + 0.5 * (n > 1)), noisy, uneven=False)
    assert [cause.kind for cause in report.causes] == ["cannot tell"], str(report)
    assert str(report).startswith("Cannot tell whether the update of micro-batches is that of the whole batch (12")
    assert "pass labels as integers" in report.causes[0].remedy
    with pytest.raises(AssertionError, match="Cannot tell"):
        report.check()


@pytest.mark.parametrize("error", [SystemExit(1), FloatingPointError("loss is nan")])
def test_a_step_that_ends_at_a_nan_ends_no_test(error):
    def stopping(w, batch, key):
        if np.isnan(batch["x"]).any():
            raise error
        return squared(w, batch, key)

    report = verify_step(Loop(stopping), BATCH, uneven=False)
    assert report.holds
    assert f"Not tried: a micro-batch of NaN, at which the step raises {error!r}" in " ".join(str(report).split())


def adversaries(every, factor=1):
    """Two networks and two optimizers, whose moments have the names inside their own network; a leaf is frozen."""

    def step(carry, batch):
        params, state, acc, n = carry["params"], carry["state"], carry["acc"], carry["n"] + 1
        w = params["generator"]["w"] * params["discriminator"]["v"]
        g = squared(w, batch, None)
        grads = {"w": g * params["discriminator"]["v"], "v": -g * params["generator"]["w"]}
        acc = {name: acc[name] + grads[name] for name in acc}
        if n < every:
            return carry | {"acc": acc, "n": n}
        done = {}
        for net, name in (("generator", "w"), ("discriminator", "v")):
            mean = acc[name] / np.float32(every) * np.float32(factor if name == "v" else 1)
            m = np.float32(0.9) * state[net]["mu"][name] + mean
            params = params | {net: params[net] | {name: params[net][name] - np.float32(0.01) * np.sign(m)}}
            done[net] = {"mu": {name: m}}
        return {"params": params, "state": done, "acc": {name: 0 * a for name, a in acc.items()}, "n": 0}

    nets = {"generator": {"w": W, "frozen": W}, "discriminator": {"v": W + np.float32(1)}}
    zeros = lambda: np.zeros_like(W)
    state = {"generator": {"mu": {"w": zeros()}}, "discriminator": {"mu": {"v": zeros()}}}
    return step, {"params": nets, "state": state, "acc": {"w": zeros(), "v": zeros()}, "n": 0}


def test_moments_of_two_optimizers_are_those_of_their_networks():
    """A sum in one of them held: the sign of a gradient is that of its sum."""
    sound = verify_step(adversaries, BATCH, uneven=False)
    assert sound.holds, str(sound)
    assert {"state/generator/mu/w", "state/discriminator/mu/v"} <= sound.errors.keys()
    report = verify_step(lambda every: adversaries(every, every), BATCH, uneven=False)
    assert [cause.kind for cause in report.causes] == ["sum for a mean"], str(report)


# Words.


def mixed(w, batch, key):
    """Each row is mixed with the next, as mixup does: nothing is drawn."""
    x, y = (0.7 * leaf + 0.3 * np.roll(leaf, 1, 0) for leaf in (np.asarray(batch["x"]), np.asarray(batch["y"])))
    return squared(w, batch | {"x": x, "y": y}, key).astype(np.float32)


def test_mixup_of_neighbours_is_no_key():
    with pytest.raises(ValueError, match="changes with the order of its rows.*mixed with their neighbours"):
        verify_step(Loop(mixed), BATCH, uneven=False)


def test_an_update_at_the_first_micro_step_closes_at_another_one():
    def make_step(every):
        def step(carry, batch):
            w, acc, n = carry
            acc = acc + squared(w, batch, None)
            return (w, acc, n + 1) if n % every else (w - np.float32(0.1) * acc / every, 0 * acc, n + 1)

        return step, (W, np.zeros_like(W), 0)

    (cause,) = verify_step(make_step, BATCH, uneven=False).causes
    assert (cause.kind, "they moved at [1, 5] of 8" in cause.evidence) == ("closes at another micro-step", True)


def test_a_micro_batch_without_tokens_is_asked_for():
    """Its mean is 0 / 0."""
    empty = BATCH | {"mask": np.where(np.arange(N) < 3, np.float32(0), BATCH["mask"])}
    (cause,) = verify_step(Loop(masked_or_nan, **EQUAL), empty, uneven=False).causes
    assert "Has a micro-batch no tokens?" in cause.evidence


def masked_or_nan(w, batch, key):
    with np.errstate(all="ignore"):
        return masked(w, batch, key)


def test_the_leaf_that_differs_alone_is_said():
    def make_step(every):
        step, carry, _ = Loop()(every)

        def doubled(carry, batch):
            new = step(carry | {"params": {"w": carry["params"]["w"]}}, batch)
            bias = carry["params"]["b"]
            closes = new["n"] == 0
            moved = bias + np.float32(every > 1) * bias**2 - np.float32(0.1) * bias
            return new | {"params": new["params"] | {"b": moved if closes else bias}}

        return doubled, carry | {"params": carry["params"] | {"b": W[0]}}

    (cause,) = verify_step(make_step, BATCH, uneven=False).causes
    assert "b alone, of 3 leaves, is off by" in cause.evidence, cause


def test_remedies_of_a_loop_that_is_not_of_jax_name_none_of_its_functions():
    for kind in ("mean of means", "never closes", "not emptied", "NaN poison"):
        remedy = verify_step(FAULTS[kind], BATCH).causes[0].remedy
        assert not any(
            word in remedy for word in ("jit", "jnp", "apply_gradients", "accumulate_gradients", "where(")
        ), remedy


@pytest.mark.parametrize(
    ("limit", "says"), [(0.05, "an error of 5% would not be seen"), (3.02, "no error would be seen")]
)
def test_what_rounding_hides_is_said_in_percents_of_it(limit, says):
    """An error of 302 % "would not be seen", as if others were."""
    assert f"In this precision {says} in w." in str(Report(True, {"w": 0.0}, {"w": limit}, (), 8, 2, False, 64))


def noised(w, batch, key):
    """The noise of DP-SGD, added to the gradient of each micro-batch."""
    return squared(w, batch, key) + np.float32(0.1) * np.asarray(jax.random.normal(key, w.shape))


@pytest.mark.sweep
def test_noise_of_each_micro_batch_is_not_seen_as_the_docstring_says():
    report = verify_step(Loop(noised, draws=True), BATCH, uneven=False)
    assert (report.holds, report.random) == (True, True), str(report)
    assert "Noise added to each gradient, as by DP-SGD, is not seen" in verify_step.__doc__


def test_a_window_that_the_data_end_is_to_be_flushed():
    """It was said to never close, with a remedy about jit, above errors that were all under their limits."""
    report = verify_step(FAULTS["short window dropped"], BATCH)
    (cause,) = report.causes
    assert "ends after 2 of 4 micro-batches" in cause.evidence
    assert cause.remedy.startswith("Flush: call the optimizer's step and zero_grad() at the last micro-batch")
    assert "flush=True" in cause.fault.remedy
    assert all(report.errors[path] > report.limits[path] for path in report.errors)


def test_a_cause_above_errors_under_their_limits_is_explained():
    report = verify_step(FAULTS["NaN poison"], BATCH)
    assert all(report.errors[path] <= report.limits[path] for path in report.errors)
    assert "errors below are all within their limits: the cause shows in other runs" in " ".join(str(report).split())
    assert "all within" not in str(verify_step(FAULTS["sum for a mean"], BATCH))


def signs_of_vectors(every):
    """A bias before InstanceNorm has a gradient that is rounding, of which a sign makes as much as of any other."""
    shapes = {"w": (6, 4), "bias": (4,), "out": (4, D)}
    sizes = np.cumsum([np.prod(shape) for shape in shapes.values()])[:-1]

    def loss(vector, batch):
        parts = zip(jnp.split(vector, sizes), shapes.items(), strict=True)
        p = {name: part.reshape(shape) for part, (name, shape) in parts}
        h = jnp.einsum("ntd,dc->ntc", batch["x"], p["w"]) + p["bias"][None, None]
        h = (h - h.mean(1, keepdims=True)) / jnp.sqrt(h.var(1, keepdims=True) + 1e-5)
        return jnp.mean((jnp.tanh(h).mean(1) @ p["out"] - batch["y"]) ** 2)

    gradient = jax.jit(jax.grad(loss))

    def step(carry, batch):
        acc, n = carry["acc"] + np.asarray(gradient(carry["params"], batch)), carry["n"] + 1
        if n < every:
            return carry | {"acc": acc, "n": n}
        return {"params": carry["params"] - np.float32(0.01) * np.sign(acc), "acc": 0 * acc, "n": 0}

    w = np.random.default_rng(1).normal(size=sum(np.prod(shape) for shape in shapes.values())).astype(np.float32)
    return step, {"params": w, "acc": 0 * w, "n": 0}


@pytest.mark.parametrize("seed", [*sweep([5]), 8, 12])
def test_a_gradient_of_rounding_in_a_vector_is_no_key(seed):
    """Nothing is drawn, and two runs are equal; it was called a shared key, or another difference."""
    x = np.random.default_rng(seed).normal(size=(N, 7, 6)).astype(np.float32)
    report = verify_step(signs_of_vectors, {"x": x, "y": BATCH["y"]}, uneven=False)
    assert [cause.kind for cause in report.causes] == ["cannot tell"], str(report)
    assert str(report).startswith("Cannot tell")
    assert not report.random


def test_mixup_with_the_opposite_row_says_nothing_of_keys():
    def opposite(w, batch, key):
        x, y = (0.7 * leaf + 0.3 * leaf[::-1] for leaf in (np.asarray(batch["x"]), np.asarray(batch["y"])))
        return squared(w, batch | {"x": x, "y": y}, key).astype(np.float32)

    with pytest.raises(ValueError, match=r"order of its rows, and nothing is drawn.*mixup by x\[::-1\]") as raised:
        verify_step(Loop(opposite), BATCH, uneven=False)
    assert "key" not in str(raised.value)


def test_a_small_share_is_compared_with_what_it_should_be():
    """One of 50 counts twice: two hundredths more, which were nothing beside 0.02."""
    x, y = rng.normal(size=(100, 20)).astype(np.float32), rng.normal(size=(100, D)).astype(np.float32)
    w = rng.normal(size=(20, D)).astype(np.float32)

    def make_step(every):
        def step(carry, batch):
            g = squared(carry["params"], batch, None) * np.float32(2 if carry["n"] == 30 else 1)
            acc, n = carry["acc"] + g, carry["n"] + 1
            if n < every:
                return carry | {"acc": acc, "n": n}
            return {"params": carry["params"] - np.float32(0.1) * acc / n, "acc": 0 * acc, "n": 0}

        return step, {"params": w, "acc": 0 * w, "n": 0}

    (cause,) = verify_step(make_step, {"x": x, "y": y}, every=50, uneven=False).causes
    assert cause.kind == "weighed by place", cause


@pytest.mark.parametrize("order", [1, -1])
def test_equal_micro_batches_that_count_unequally_are_no_mean_of_means(order):
    weights = np.float32([1, 3, 2, 5])[::order]
    make_step = Loop(join=lambda acc, g, n: acc + weights[(n - 1) % K] * g, factor=lambda n, k: 1 / weights[:n].mean())
    (cause,) = verify_step(make_step, BATCH, uneven=False).causes
    assert cause.kind == "weighed by place"
    assert "In the opposite order" in cause.evidence


@pytest.mark.parametrize(
    "put", [lambda tree: tree, *sweep([lambda tree: jax.device_put(tree, jax.devices()[1])])], ids=["", "put"]
)
def test_a_step_gets_arrays_that_lie_as_its_own_do(put):
    """So that `jax.jit` compiles it once for each size: for arrays that are put on a device it would once more."""
    was_put = put(jnp.zeros(1)).committed
    seen = set()

    def make_step(every):
        tx = optax.MultiSteps(optax.adam(0.1), every)
        compiled = jax.jit(lambda carry, batch: tx.update(jax.grad(loss)(carry[0], batch), carry[1], carry[0]))

        def step(carry, batch):
            seen.update((leaf.committed, leaf.device) for leaf in jax.tree.leaves(carry))
            updates, state = compiled(carry, batch)
            return optax.apply_updates(carry[0], updates), state

        return step, put((PARAMS, tx.init(PARAMS)))

    assert verify_step(make_step, {name: BATCH[name] for name in "xy"}, uneven=False).holds
    assert seen == {(was_put, put(jnp.zeros(1)).device)}
