"""The law for Flax: every path over uneven partitions against a whole batch in float64, Linen and NNX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from numpy.testing import assert_allclose

import optax_accum
from optax_accum import flax as accum
from tests import programs
from tests.tiers import sweep

pytestmark = pytest.mark.usefixtures("rank_promotion")

ROWS, UPDATES, MOMENTUM = 12, 2, 0.9
CASES = [((5, 7), True), ((1, 10, 1), False)]  # the rows of each call of a window; are they weighted?
INNER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.5, momentum=0.9))  # needs the norm of the whole
RNG = np.random.default_rng(0)
X = RNG.normal(size=(UPDATES * ROWS, 6)).astype("f")
LABELS = RNG.integers(0, 3, size=UPDATES * ROWS).astype(np.int32)
WEIGHTS = RNG.integers(1, 9, size=UPDATES * ROWS).astype("f")
KERNELS = {"inner": RNG.normal(size=(6, 5)).astype("f"), "outer": RNG.normal(size=(5, 3)).astype("f")}


class Linen(nn.Module):
    """Two layers, and a BatchNorm that looks on: what it normalises would not be that of the whole batch."""

    @nn.compact
    def __call__(self, x):
        nn.BatchNorm(use_running_average=False, momentum=MOMENTUM, use_bias=False, use_scale=False)(3 * x + 1)
        dense = lambda name: nn.Dense(KERNELS[name].shape[1], use_bias=False, name=name)
        return dense("outer")(jnp.tanh(dense("inner")(x)))


class Module(nnx.Module):
    """The same in NNX."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(6, momentum=MOMENTUM, use_bias=False, use_scale=False, rngs=rngs)
        self.inner, self.outer = (nnx.Linear(*k.shape, use_bias=False, rngs=rngs) for k in KERNELS.values())
        self.inner.kernel[...], self.outer.kernel[...] = KERNELS.values()

    def __call__(self, x):
        self.norm(3 * x + 1)
        return self.outer(jnp.tanh(self.inner(x)))


def mean_loss(logits, labels, weights):
    """A mean over what the weights count, and the mean logit beside it."""
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(weights * each) / jnp.sum(weights), jnp.sum(weights * logits[:, 0]) / jnp.sum(weights)


@functools.cache
def oracle(weighted):
    """The parameters, statistics and metrics after `UPDATES` updates with the whole batch, in float64."""

    def loss(params, x, labels, weights):
        return mean_loss(jnp.tanh(x @ params["inner"]) @ params["outer"], labels, weights)

    @jax.jit
    def step(params, state, *batch):
        (value, logit), grads = jax.value_and_grad(loss, has_aux=True)(params, *batch)
        updates, state = INNER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, {"loss": value, "logit": logit}

    with programs.enable_x64():
        weights = WEIGHTS if weighted else np.ones_like(WEIGHTS)
        params = {name: kernel.astype("d") for name, kernel in KERNELS.items()}
        state, mean, var = INNER.init(params), np.zeros(6), np.ones(6)
        for update in range(UPDATES):
            rows = slice(update * ROWS, (update + 1) * ROWS)
            x = X[rows].astype("d")
            params, state, metrics = step(params, state, x, LABELS[rows], weights[rows].astype("d"))
            mean = MOMENTUM * mean + (1 - MOMENTUM) * (3 * x + 1).mean(0)
            var = MOMENTUM * var + (1 - MOMENTUM) * (3 * x + 1).var(0)
        return jax.tree.map(np.asarray, (params, {"mean": mean, "var": var}, metrics))


def calls(sizes, weighted):
    """The batches of all calls, and whether each is the last of its window."""
    ends = np.cumsum(sizes * UPDATES)
    for end, size in zip(ends, sizes * UPDATES, strict=True):
        rows = slice(end - size, end)
        weights = WEIGHTS[rows] if weighted else np.ones(size, "f")
        yield (X[rows], LABELS[rows], weights), int(end) % ROWS == 0


def weight_of(weighted):
    return (lambda batch: batch[2].sum()) if weighted else None


# Linen: each path returns the state, the optimizer and the metrics of the last window.


def linen_state(tx):
    return accum.linen.TrainState.create(
        apply_fn=Linen().apply,
        params={name: {"kernel": jnp.array(kernel)} for name, kernel in KERNELS.items()},
        batch_stats={"BatchNorm_0": {"mean": jnp.zeros(6), "var": jnp.ones(6)}},
        momentum=MOMENTUM,
        tx=tx,
        metrics=("loss", "logit"),
    )


def linen_loss(params, batch, key, state):
    x, *others = batch
    logits, new = state.apply_fn({"params": params, "batch_stats": state.batch_stats}, x, mutable=["batch_stats"])
    loss, logit = mean_loss(logits, *others)
    return loss, {"metrics": {"logit": logit}, **new}


def linen_result(state, metrics):
    params = {name: state.params[name]["kernel"] for name in KERNELS}
    return params, dict(state.batch_stats["BatchNorm_0"]), metrics, int(state.updates)


def through_apply_gradients(sizes, weighted):
    """One gradient for each call, of `jax.value_and_grad`."""

    @jax.jit
    def step(state, batch):
        loss = lambda params: linen_loss(params, batch, None, state)
        (value, extra), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        metrics = {"loss": value, **extra["metrics"]}
        return state.apply_gradients(
            grads=grads,
            batch_stats=extra["batch_stats"],
            weight=batch[2].sum(),
            stats_weight=len(batch[0]),
            metrics=metrics,
        )

    state = linen_state(optax_accum.accumulate_gradients(INNER, len(sizes)))
    for batch, last in calls(sizes, weighted):
        before, state = state, step(state, batch)
        assert last or jax.tree.all(jax.tree.map(np.array_equal, state.batch_stats, before.batch_stats))
    return linen_result(state, state.window_metrics())


def through_train_step(sizes, weighted, loss=linen_loss, **options):
    """Micro-batches of up to four rows within each call, a window across calls; its loss tells how much each counts."""
    state = linen_state(optax_accum.accumulate_gradients(INNER, len(sizes)))
    step = accum.linen.train_step(loss, microbatch_size=4, **options)
    for batch, _ in calls(sizes, weighted):
        state, metrics = step(state, batch, jax.random.key(0))
    return linen_result(state, metrics)


def through_a_flushed_train_step(sizes, weighted):
    """The caller owns the window, inside a chain."""
    tx = optax.chain(optax.identity(), optax_accum.accumulate_gradients(INNER, None))
    step = accum.linen.train_step(linen_loss, num_microbatches=1 if 1 in sizes else 3)
    state = linen_state(tx)
    for batch, last in calls(sizes, weighted):
        state, metrics = step(state, batch, jax.random.key(0), flush=jnp.array(last))
    return linen_result(state, metrics)


def through_a_train_step_without_window(sizes, weighted):
    """Each call is an update: of all rows, which the number of micro-batches does not divide."""
    state = linen_state(INNER)
    step = accum.linen.train_step(linen_loss, num_microbatches=len(sizes) + 6)
    for batch, _ in calls((ROWS,), weighted):
        state, metrics = step(state, batch, jax.random.key(0))
    return linen_result(state, metrics)


# NNX


def nnx_loss(model, batch):
    loss, logit = mean_loss(model(batch[0]), *batch[1:])
    return loss, {"logit": logit}


def nnx_result(model, optimizer, metrics):
    params = {"inner": model.inner.kernel[...], "outer": model.outer.kernel[...]}
    return params, {"mean": model.norm.mean[...], "var": model.norm.var[...]}, metrics, int(optimizer.updates[...])


def nnx_optimizer(model, every):
    tx = optax_accum.accumulate_gradients(INNER, every)
    return accum.nnx.Optimizer(model, tx, wrt=nnx.Param, metrics=("loss", "logit"))


def through_the_optimizer(sizes, weighted, value_and_grad=nnx.value_and_grad, **options):
    """One gradient for each call, of `nnx.value_and_grad` or of our own."""
    model = Module()
    optimizer = nnx_optimizer(model, len(sizes))

    @nnx.jit
    def step(model, optimizer, batch):
        (value, aux), grads = value_and_grad(nnx_loss, has_aux=True, **options)(model, batch)
        rows = len(batch[0])
        optimizer.update(model, grads, weight=batch[2].sum(), stats_weight=rows, metrics={"loss": value, **aux})

    for batch, last in calls(sizes, weighted):
        before = np.array(model.norm.var[...])
        step(model, optimizer, batch)
        assert last or np.array_equal(model.norm.var[...], before)
    return nnx_result(model, optimizer, optimizer.window_metrics())


def through_value_and_grad(sizes, weighted):
    return through_the_optimizer(sizes, weighted, accum.nnx.value_and_grad, microbatch_size=4)


def accumulated(loss, has_aux, **options):
    """A ready gradient function of NNX, cut."""
    return accum.nnx.reduce_microbatches(nnx.value_and_grad(loss, has_aux=has_aux), **options)


def through_accumulate(sizes, weighted):
    options = {"microbatch_size": 4, "weight_fn": weight_of(weighted)}
    return through_the_optimizer(sizes, weighted, accumulated, **options)


def through_the_nnx_train_step(sizes, weighted, loss=nnx_loss, **options):
    model = Module()
    optimizer = nnx_optimizer(model, None)
    step = accum.nnx.train_step(loss, has_aux=True, microbatch_size=4, **options)
    for batch, last in calls(sizes, weighted):
        metrics = step(model, optimizer, batch, flush=jnp.array(last))
    return nnx_result(model, optimizer, metrics)


PATHS = [
    through_apply_gradients,
    through_train_step,
    through_a_flushed_train_step,
    through_a_train_step_without_window,
    through_the_optimizer,
    through_value_and_grad,
    through_accumulate,
    through_the_nnx_train_step,
]


def as_ratio(loss):
    """The loss with a denominator that only it knows."""

    def ratio(model, batch, *args):
        value, extra = loss(model, batch, *args)
        return optax_accum.Ratio(value * batch[2].sum(), batch[2].sum()), extra

    return ratio


TRAIN_STEPS = {"Linen": (through_train_step, linen_loss), "NNX": (through_the_nnx_train_step, nnx_loss)}


@pytest.mark.parametrize("step", sweep(TRAIN_STEPS, but=["NNX"]))
def test_a_ratio_says_how_much_a_micro_batch_counts(step):
    path, loss = TRAIN_STEPS[step]
    assert_the_update_of_the_whole_batch(functools.partial(path, loss=as_ratio(loss)), *CASES[0])


def communicating(loss):
    """The loss with a sum over devices in it, of which no trace tells what it is for the whole batch."""

    def of_own_rows(model, batch, *args):
        value, extra = loss(model, batch, *args)
        return value + 0 * jax.lax.psum(batch[0].sum(), "data"), extra

    return of_own_rows


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("step", TRAIN_STEPS)
def test_a_train_step_refuses_a_loss_that_communicates_by_name(step, weighted):
    path, loss = TRAIN_STEPS[step]
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        options = {"devices": "data", "weight_fn": weight_of(weighted)}
        message = (
            r"from the other devices of \('data',\) \(psum\w*, test_law_flax.py:\d+\). Leave that out: .* one batch"
        )
        with pytest.raises(ValueError, match=message):
            path((4, 8), weighted=True, loss=communicating(loss), **options)


def as_terms(loss):
    """Two such terms, of which a train step could divide the sum of gradients by one."""

    def terms(model, batch, *args):
        ratio, extra = as_ratio(loss)(model, batch, *args)
        return {"a": ratio, "b": ratio}, extra

    return terms


@pytest.mark.parametrize("step", TRAIN_STEPS)
def test_a_train_step_says_what_takes_several_terms(step):
    path, loss = TRAIN_STEPS[step]
    with pytest.raises(TypeError, match="the terms .'a', 'b'.. Return their sum, or one Ratio.*value_and_grad"):
        path(*CASES[0], loss=as_terms(loss))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("sizes", "weighted"), sweep(CASES, but=CASES[:1]), ids=str)
def test_the_update_equals_the_update_of_the_whole_batch(path, sizes, weighted):
    assert_the_update_of_the_whole_batch(path, sizes, weighted)


def assert_the_update_of_the_whole_batch(path, sizes, weighted):
    params, stats, metrics = oracle(weighted)
    *got, updates = path(sizes, weighted)
    for one, other in zip(got, (params, stats, metrics), strict=True):
        jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5, atol=2e-6), one, other)
    assert updates == UPDATES
    assert all(np.max(np.abs(params[name] - kernel)) > 1e-2 for name, kernel in KERNELS.items())
