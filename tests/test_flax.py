"""Flax train steps: what one line changes, and what acts once per update."""

import warnings

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import dynamic_scale, train_state
from numpy.testing import assert_allclose, assert_array_equal

import optax_accum
from optax_accum import flax as accum
from optax_accum.flax import _window

ROWS = [3, 5, 4]
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 6)).astype("f"), RNG.integers(0, 3, size=12)


@pytest.fixture(autouse=True)
def ranks():
    """Flax layers add biases to batches."""
    with jax.numpy_rank_promotion("allow"):
        yield


class MLP(nn.Module):
    norm: bool = False

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(8)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(3)(nn.relu(x))


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def micro_batches():
    ends = np.cumsum(ROWS)
    return [(X[end - n : end], Y[end - n : end]) for end, n in zip(ends, ROWS, strict=True)]


def created(tx, cls=accum.TrainState, norm=False, **kwargs):
    model = MLP(norm)
    variables = model.init(jax.random.key(0), X[:2])
    if norm:
        kwargs = {"batch_stats": variables["batch_stats"], "momentum": 0.9, **kwargs}
    return cls.create(apply_fn=model.apply, params=variables["params"], tx=tx, **kwargs)


def gradient(state, batch):
    return jax.value_and_grad(lambda params: cross_entropy(state.apply_fn({"params": params}, batch[0]), batch[1]))(
        state.params
    )


def close(got, want, tolerance=1e-6):
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=tolerance), got, want)


def equal(got, want):
    jax.tree.map(assert_array_equal, got, want)


# Linen


def test_one_line_changes_and_the_update_is_that_of_the_whole_batch():
    plain = created(optax.adam(0.1), train_state.TrainState)
    whole = plain.apply_gradients(grads=gradient(plain, (X, Y))[1])
    state = created(optax_accum.accumulate_gradients(optax.adam(0.1), every=3), metrics=("loss",))
    for number, batch in enumerate(micro_batches(), start=1):
        value, grads = gradient(state, batch)
        state = state.apply_gradients(grads=grads, weight=len(batch[0]), metrics={"loss": value})
        assert (int(state.step), int(state.micro_step)) == (number // 3, number)
    close(state.params, whole.params, 1e-5)
    assert_allclose(state.window_metrics()["loss"], gradient(plain, (X, Y))[0], rtol=1e-6)
    state = state.apply_gradients(grads=gradient(state, (X, Y))[1], metrics={"loss": 7.0})
    assert_allclose(state.window_metrics()["loss"], 7)  # the next window begins anew


def test_extra_arguments_reach_the_optimizer_and_fields_are_replaced():
    seen = []

    def update(grads, state, params=None, *, extra=None, **_):
        seen.append(extra)
        return grads, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    state = created(optax_accum.accumulate_gradients(inner, every=None))
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    state = state.apply_gradients(grads=zeros, flush=True, extra="here", apply_fn="new")
    assert "here" in seen
    assert state.apply_fn == "new"


def test_an_optimizer_that_does_not_accumulate_works_and_says_so_once():
    _window.warn_once.cache_clear()
    plain, ours = created(optax.sgd(0.1), train_state.TrainState), created(optax.sgd(0.1))
    grads = gradient(plain, (X, Y))[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moved = ours.apply_gradients(grads=grads, weight=2.0)
        moved = moved.apply_gradients(grads=grads, flush=True)
    assert ["this optimizer has none" in str(warning.message) for warning in caught] == [True]
    equal(moved.params, plain.apply_gradients(grads=grads).apply_gradients(grads=grads).params)
    assert moved.step == 2


def normalised(state, batch):
    """The gradient and the new statistics, as in Flax's examples."""

    def loss(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch[0], mutable=["batch_stats"])
        return cross_entropy(logits, batch[1]), new["batch_stats"]

    (_, stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    return grads, stats


def test_batch_statistics_make_one_exact_step_for_each_update():
    tx = optax_accum.accumulate_gradients(optax.set_to_zero(), every=3)
    state = created(tx, norm=True)
    want = normalised(state, (X, Y))[1]
    for _ in range(2):
        for batch in micro_batches():
            before = state.batch_stats
            grads, stats = normalised(state, batch)
            state = state.apply_gradients(grads=grads, batch_stats=stats, weight=len(batch[0]))
            if not optax_accum.has_updated(state.opt_state):
                equal(state.batch_stats, before)
        close(state.batch_stats, want)
        want = normalised(state, (X, Y))[1]
    var = want["BatchNorm_0"]["var"]
    naive = [normalised(state, batch)[1]["BatchNorm_0"]["var"] for batch in micro_batches()]
    assert np.max(np.abs(np.average(naive, axis=0, weights=ROWS) - var)) > 1e-3  # the mean of variances is not it


def test_a_schedule_an_average_and_a_log_act_once_per_update():
    """Naively, what counts micro-steps acts three times too often, and what counts updates three times too seldom."""
    schedule = lambda step: 0.1 / (1 + step)
    tx = optax_accum.accumulate_gradients(optax.sgd(schedule), every=3)
    state = created(tx)
    whole = created(optax.sgd(schedule), train_state.TrainState)
    average = wanted = naive = state.params
    logged = []
    for _ in range(2):
        whole = whole.apply_gradients(grads=gradient(whole, (X, Y))[1])
        wanted = optax.incremental_update(whole.params, wanted, 0.1)
        for batch in micro_batches():
            state = state.apply_gradients(grads=gradient(state, batch)[1], weight=len(batch[0]))
            naive = optax.incremental_update(state.params, naive, 0.1)
            if optax_accum.has_updated(state.opt_state):
                average = optax.incremental_update(state.params, average, 0.1)
                logged.append(int(state.step))
    close(state.params, whole.params)
    close(average, wanted)
    assert logged == [1, 2]
    kernel = lambda tree: tree["Dense_0"]["kernel"]
    assert np.max(np.abs(kernel(naive) - kernel(wanted))) > 10 * np.max(np.abs(kernel(average) - kernel(wanted)))


@pytest.mark.parametrize("norm", [False, True])
def test_train_step(norm):
    def fun(params, batch, key, state):
        x, labels = batch
        variables = {"params": params, **({"batch_stats": state.batch_stats} if norm else {})}
        logits, new = state.apply_fn(variables, x, mutable=["batch_stats"])
        accuracy = (logits.argmax(-1) == labels).mean(dtype=jnp.float32)
        return cross_entropy(logits, labels), {"metrics": {"accuracy": accuracy}, **new}

    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
    state = created(tx, norm=norm, metrics=("loss", "accuracy"))
    whole = created(optax.sgd(0.1), train_state.TrainState)
    want, stats = gradient(whole, (X, Y)), normalised(state, (X, Y))[1] if norm else None
    step = accum.train_step(fun, num_microbatches=2)
    for rows in (slice(0, 8), slice(8, 12)):
        state, metrics = step(state, (X[rows], Y[rows]), jax.random.key(0))
    assert (int(state.step), int(state.micro_step)) == (1, 2)
    if norm:  # normalisation inside a micro-batch differs, as the docs say; its statistics do not
        close(state.batch_stats, stats)
    else:
        close(state.params, whole.apply_gradients(grads=want[1]).params)
        assert_allclose(metrics["loss"], want[0], rtol=1e-6)


def test_float16_with_a_dynamic_scale():
    """The scale is divided out once, grows after updates in a row, and backs off for a window that overflowed."""
    inner = optax.chain(accum.unscale(), optax.sgd(0.5))
    tx = optax_accum.accumulate_gradients(inner, every=2, nonfinite="discard")
    scale = dynamic_scale.DynamicScale(growth_interval=2, scale=2.0**10)
    params = {"w": jnp.float32(1e-4)}
    state = tx.init(params)

    @jax.jit
    def step(params, state, scale, x):
        loss = lambda p: (p["w"].astype(jnp.float16) * x.astype(jnp.float16)) * scale.scale.astype(jnp.float16)
        grads = jax.grad(lambda p: loss(p).astype(jnp.float32))(params)
        new, after = optax_accum.apply_gradients(tx, grads, state, params, scale=scale.scale)
        return new, after, accum.next_scale(scale, state, after)

    scale = scale.replace(scale=jnp.float32(scale.scale), fin_steps=jnp.int32(0))
    scales = []
    for x in (1e-4, 3e-4, 1e-4, 3e-4, 1e-4, 3e-4, 6e4, 1.0):  # the last window overflows in float16
        before = params
        params, state, scale = step(params, state, scale, jnp.float32(x))
        scales.append(float(scale.scale))
    assert scales == [1024] * 5 + [2048] * 2 + [1024]
    equal(params, before)
    assert_allclose(params["w"], 1e-4 - 3 * 0.5 * 2e-4, rtol=1e-2)


# Checkpoints


def test_a_state_in_the_middle_of_a_window_goes_on_bit_identical(tmp_path):
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), every=3)
    state = created(tx, norm=True, metrics=("loss",))

    def advance(state, batches):
        for batch in batches:
            grads, stats = normalised(state, batch)
            state = state.apply_gradients(grads=grads, batch_stats=stats, weight=2.0, metrics={"loss": 1.0})
        return state

    half = advance(state, micro_batches()[:2])
    undisturbed = advance(half, micro_batches()[2:])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", half)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "c", half)
    equal(advance(restored, micro_batches()[2:]), undisturbed)
    restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(half))
    equal(advance(restored, micro_batches()[2:]), undisturbed)


def test_checkpoints_of_others():
    plain = created(optax.adam(0.1), train_state.TrainState)
    plain = plain.apply_gradients(grads=gradient(plain, (X, Y))[1])
    ours = flax.serialization.from_bytes(created(optax.adam(0.1)), flax.serialization.to_bytes(plain))
    equal(ours.params, plain.params)
    assert ours.step == 1
    multi = created(optax.MultiSteps(optax.adam(0.1), 3), train_state.TrainState)
    multi = multi.apply_gradients(grads=gradient(multi, (X, Y))[1])
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), every=3)
    moved = created(tx).replace(params=multi.params, opt_state=optax_accum.from_multi_steps(multi.opt_state))
    for _ in range(2):
        moved = moved.apply_gradients(grads=gradient(moved, (X, Y))[1])
    close(moved.params, plain.params)
    other = created(tx).replace(params=jax.tree.map(lambda leaf: jnp.zeros((*leaf.shape, 2)), moved.params))
    with pytest.raises(ValueError, match=r"of another model: at params\['Dense_0'\]\['bias'\]"):
        flax.serialization.from_bytes(other, flax.serialization.to_bytes(created(tx)))
    with pytest.raises(ValueError, match=r"\['opt_state', 'params', 'step'\] are missing"):
        flax.serialization.from_state_dict(created(tx), {})
    with pytest.raises(ValueError, match="not one of a TrainState with these fields"):
        flax.serialization.from_state_dict(created(tx), {"other": 1})
    with pytest.raises(ValueError, match="do not match|don't match"):
        flax.serialization.from_bytes(created(optax.sgd(0.1, momentum=0.9)), flax.serialization.to_bytes(plain))


def test_a_resumed_run_may_change_every():
    """In the middle of a window of three, one of two is gone on with: it closes at once, with the right mean."""
    wrapped = lambda every: optax_accum.accumulate_gradients(optax.sgd(0.1), every)
    state, whole = created(wrapped(3)), created(optax.sgd(0.1), train_state.TrainState)
    for batch in micro_batches()[:2]:
        state = state.apply_gradients(grads=gradient(state, batch)[1], weight=len(batch[0]))
    resumed = flax.serialization.from_bytes(created(wrapped(2)), flax.serialization.to_bytes(state))
    batch = micro_batches()[2]
    resumed = resumed.apply_gradients(grads=gradient(resumed, batch)[1], weight=len(batch[0]))
    assert int(resumed.step) == 1
    close(resumed.params, whole.apply_gradients(grads=gradient(whole, (X, Y))[1]).params)


# NNX


class Net(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x, norm=True):
        x = self.first(x)
        x = self.norm(x) if norm else x
        return self.last(self.drop(nnx.relu(x)))


def nnx_loss(model, batch, norm=False):
    return cross_entropy(model(batch[0], norm), batch[1])


def arrays(tree):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(tree))


@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "nnx.jit"])
def test_the_gradient_of_a_module_is_that_of_the_whole_batch(jit):
    model = Net(nnx.Rngs(0))
    want_value, want = nnx.value_and_grad(nnx_loss)(model, (X, Y))
    cut = accum.value_and_grad(nnx_loss, num_microbatches=5, weight_fn=lambda batch: batch[0].shape[0])
    value, grads = jit(lambda model, batch: cut(model, batch))(model, (X, Y))
    assert_allclose(value, want_value, rtol=1e-6)
    close(arrays(grads), arrays(want))


def test_batch_norm_and_random_streams_of_a_module():
    whole, model = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    loss = lambda model, batch: nnx_loss(model, batch, norm=True)
    nnx.value_and_grad(loss)(whole, (X, Y))
    accum.value_and_grad(loss, num_microbatches=4)(model, (X, Y))
    stats = lambda model: arrays(nnx.state(model, nnx.BatchStat))
    close(stats(model), stats(whole))
    dropping = Net(nnx.Rngs(0, dropout=1), rate=0.5)
    masks = lambda model, x: (jnp.float32(0) + model.first.kernel.sum() * 0, model.drop(jnp.ones_like(x)))
    (_, kept), _ = accum.value_and_grad(masks, has_aux=True, num_microbatches=4, aux_reduction="stack")(dropping, X)
    assert len(np.unique(np.asarray(kept).reshape(4, -1), axis=0)) == 4
    counts = [leaf for path, leaf in jax.tree.leaves_with_path(nnx.state(dropping)) if "count" in str(path)]
    assert 4 in [int(count) for count in counts]


def test_frozen_parameters_cost_no_accumulator():
    model = nnx.LoRALinear if hasattr(nnx, "LoRALinear") else None
    layer = model(6, 3, lora_rank=2, rngs=nnx.Rngs(0))
    loss = lambda layer, batch: cross_entropy(layer(batch[0]), batch[1])
    _, grads = accum.value_and_grad(loss, wrt=nnx.LoRAParam, num_microbatches=3)(layer, (X, Y))
    sizes = sorted(leaf.shape for leaf in jax.tree.leaves(grads))
    assert sizes == [(2, 3), (6, 2)]
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
    optimizer = accum.Optimizer(layer, tx, wrt=nnx.LoRAParam)
    before = arrays(nnx.state(layer))
    for _ in range(2):
        optimizer.update(layer, grads)
    after = arrays(nnx.state(layer))
    equal(after["kernel"], before["kernel"])
    assert np.max(np.abs(after["lora"]["lora_b"] - before["lora"]["lora_b"])) > 0


def test_the_nnx_train_step_and_its_checkpoint(tmp_path):
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), every=2)
    model, whole = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    reference = nnx.Optimizer(whole, optax.adam(0.1), wrt=nnx.Param)
    reference.update(whole, nnx.grad(nnx_loss)(whole, (X, Y)))
    optimizer = accum.Optimizer(model, tx, wrt=nnx.Param, metrics=("loss",))
    step = accum.nnx_train_step(nnx_loss, num_microbatches=2)
    step(model, optimizer, (X[:8], Y[:8]))
    assert (int(optimizer.step[...]), int(optimizer.micro_step[...])) == (0, 1)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", nnx.state((model, optimizer)))
    step(model, optimizer, (X[8:], Y[8:]))
    params = lambda model: arrays(nnx.state(model, nnx.Param))
    close(params(model), params(whole), 1e-4)
    again = Net(nnx.Rngs(1))
    other = accum.Optimizer(again, tx, wrt=nnx.Param, metrics=("loss",))
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update((again, other), checkpointer.restore(tmp_path / "c", nnx.state((again, other))))
    step(again, other, (X[8:], Y[8:]))
    equal(params(again), params(model))
    assert int(other.step[...]) == 1


# Bad input


def test_bad_input():
    state = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), metrics=("loss",))
    grads = gradient(state, (X, Y))[1]
    with pytest.raises(ValueError, match=r"metrics must have the names that were announced: \['other'\]"):
        state.apply_gradients(grads=grads, metrics={"other": 1.0})
    with pytest.raises(ValueError, match="A metric must be a scalar: 'loss' has shape"):
        state.apply_gradients(grads=grads, metrics={"loss": jnp.ones(3)})
    with pytest.raises(ValueError, match="The state has no batch_stats"):
        state.apply_gradients(grads=grads, batch_stats={"mean": jnp.ones(3)})
    normed = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), norm=True)
    with pytest.raises(ValueError, match="must keep their tree and shapes"):
        normed.apply_gradients(grads=normalised(normed, (X, Y))[0], batch_stats={"mean": jnp.ones(3)})
