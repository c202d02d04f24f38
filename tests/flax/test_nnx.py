"""NNX: gradients of a module, its random streams and statistics, and an optimizer with a window."""

import dataclasses
import gc
import sys
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

import optax_accum
from optax_accum import flax as accum
from optax_accum.flax._versions import as_pure, value_of
from tests import programs
from tests.flax_problems import Net, X, Y, arrays, close, cross_entropy, equal, micro_batches, nnx_loss
from tests.pairs import every_pair
from tests.tiers import one_of_each, sweep
from tests.versions import flax_before

pytestmark = pytest.mark.usefixtures("rank_promotion")


@pytest.mark.sweep
@pytest.mark.parametrize("jit", [*sweep([lambda f: f]), nnx.jit], ids=["eager", "nnx.jit"])
def test_the_gradient_of_a_module_is_that_of_the_whole_batch(jit):
    model = Net(nnx.Rngs(0))
    want_value, want = of_whole(model, (X, Y))
    cut = accum.nnx.value_and_grad(nnx_loss, num_microbatches=5)
    value, grads = jit(lambda model, batch: cut(model, batch))(model, (X, Y))
    assert_allclose(value, want_value, rtol=1e-6)
    close(arrays(grads), arrays(want))


def dropping():
    return Net(nnx.Rngs(0, dropout=1), rate=0.5)


def normalised(model, batch):
    return nnx_loss(model, batch, norm=True)


of_whole_normalised = nnx.jit(nnx.value_and_grad(normalised))


def assert_the_call_of_the_whole_batch(cut, batch):
    """Its value, its gradient, and what it leaves in the model: statistics, streams and counters."""
    whole, model = dropping(), dropping()
    want_value, want = of_whole_normalised(whole, (X, Y))
    value, grads = nnx.jit(lambda model, batch: cut(model, batch))(model, batch)
    assert_allclose(value, want_value, rtol=1e-6)
    close(arrays(grads), arrays(want))
    others = nnx.Not(nnx.Any(nnx.RngKey, nnx.Param))
    close(arrays(nnx.state(model, others)), arrays(nnx.state(whole, others)))
    assert int(model.drop.rngs.count[...]) == 1


@pytest.mark.sweep
def test_batch_norm_and_dropout_are_those_of_the_whole_batch():
    assert_the_call_of_the_whole_batch(accum.nnx.value_and_grad(normalised, num_microbatches=4), (X, Y))


@pytest.mark.parametrize("jit", [*sweep([lambda f: f]), nnx.jit], ids=["eager", "nnx.jit"])
def test_a_ready_gradient_function_of_a_module(jit):
    """Uneven micro-batches, weights, outputs in the order of the rows."""

    def loss(model, batch):
        logits = model(batch[0], norm=False)
        return cross_entropy(logits, batch[1]), {"logits": logits, "rows": jnp.float32(len(batch[0]))}

    model, gradient = Net(nnx.Rngs(0)), nnx.value_and_grad(loss, has_aux=True)
    want = gradient(model, (X, Y))
    names = (("mean", {"logits": "concat", "rows": "sum"}), "mean")
    options = {"reduction": names, "weight_fn": lambda batch: jnp.float32(len(batch[0]))}
    cut = accum.nnx.reduce_microbatches(gradient, microbatch_size=5, **options)
    (value, aux), grads = jit(lambda model, batch: cut(model, batch))(model, (X, Y))
    assert_allclose(value, want[0][0], rtol=1e-6)
    close(aux, want[0][1])
    close(arrays(grads), arrays(want[1]))


@pytest.mark.sweep
def test_a_ready_gradient_function_leaves_the_state_of_the_model_as_the_loss_does():
    """Running statistics move once, random streams at each micro-batch; no rows leave them alone."""
    gradient = nnx.value_and_grad(lambda model, batch: nnx_loss(model, batch, norm=True))
    whole, model = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    cut = accum.nnx.reduce_microbatches(gradient, microbatch_size=5)
    nnx.jit(lambda whole, model, batch: (gradient(whole, batch), cut(model, batch)))(whole, model, (X, Y))
    close(statistics(model), statistics(whole))
    cut(model, (X[:0], Y[:0]))
    close(statistics(model), statistics(whole))
    dropping = Net(nnx.Rngs(0, dropout=1), rate=0.5)
    masks = accum.nnx.reduce_microbatches(lambda model, x: model.drop(jnp.ones_like(x)), 4, reduction="stack")
    kept = masks(dropping, X)
    assert len(np.unique(np.asarray(kept).reshape(4, -1), axis=0)) == 4


def test_a_ready_gradient_function_over_devices():
    mesh, model = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,)), Net(nnx.Rngs(0))
    gradient = nnx.value_and_grad(nnx_loss)
    rows = len(X) // 4 * 4
    want = gradient(model, (X[:rows], Y[:rows]))
    cut = accum.nnx.reduce_microbatches(gradient, 2, devices="data")
    with jax.set_mesh(mesh):
        batch = jax.device_put((X[:rows], Y[:rows]), NamedSharding(mesh, P("data")))
        value, grads = nnx.jit(lambda model, batch: cut(model, batch))(model, batch)
        to = (P(), {"first": {"kernel": P(None, "data"), "bias": P("data")}, "last": P(), "norm": P()})
        sharded = accum.nnx.reduce_microbatches(
            lambda *args: as_dicts(gradient(*args)), 2, devices=optax_accum.Devices("data", to=to)
        )
        (_, shards) = nnx.jit(lambda model, batch: sharded(model, batch))(model, batch)
    assert_allclose(value, want[0], rtol=1e-6)
    close(arrays(jax.device_get(grads)), arrays(want[1]))
    close(jax.device_get(shards), arrays(want[1]))


def as_dicts(result):
    return result[0], nnx.to_pure_dict(result[1])


def test_a_module_is_no_argument_of_accumulate():
    gradient = nnx.value_and_grad(nnx_loss)
    with pytest.raises(TypeError, match=r"module of NNX.*a Net.*optax_accum.flax.nnx.reduce_microbatches"):
        optax_accum.reduce_microbatches(gradient, 4)(Net(nnx.Rngs(0)), (X, Y))
    with pytest.raises(TypeError, match="sets carry_argnum itself"):
        accum.nnx.reduce_microbatches(gradient, 4, carry_argnum=1)


class TwoNorms(nnx.Module):
    """Layers of different momenta in a list, whose statistics have integers in their paths."""

    def __init__(self, rngs):
        self.first = nnx.Linear(6, 4, rngs=rngs)
        self.norms = nnx.data([nnx.BatchNorm(4, momentum=m, rngs=rngs) for m in (0.9, 0.5)])

    def __call__(self, x):
        x = self.first(x)
        return sum(norm(x) for norm in self.norms)


def statistics(model):
    return arrays(nnx.state(model, nnx.BatchStat))


def of_two_norms(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def two_norms():
    return TwoNorms(nnx.Rngs(0)), of_two_norms


# Compiled once for all tests: what each compares with, and one micro-step with the gradients of Flax.
of_whole = nnx.jit(nnx.value_and_grad(nnx_loss))
forward = nnx.jit(of_two_norms)


@nnx.jit
def step_of_two_norms(model, optimizer, batch):
    value, grads = nnx.value_and_grad(of_two_norms)(model, batch)
    optimizer.update(model, grads, weight=batch[1].shape[0], metrics={"loss": value})


@pytest.mark.sweep
def test_a_nan_that_is_left_out_stays_out_of_a_module():
    (model, _), (clean, _) = two_norms(), two_norms()
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=3, nonfinite="skip")
    bad = (np.full_like(X[:3], np.nan), Y[:3])
    for module, batches in ((clean, micro_batches()), (model, [*micro_batches()[:1], bad, *micro_batches()[1:]])):
        optimizer = accum.nnx.Optimizer(module, tx, wrt=nnx.Param, metrics=("loss",))
        for batch in batches:
            step_of_two_norms(module, optimizer, batch)
        assert int(optimizer.updates[...]) == 1
        assert np.isfinite(optimizer.window_metrics()["loss"])
    equal(arrays(nnx.state(model)), arrays(nnx.state(clean)))


class Summed(NamedTuple):
    """A record of a trainer."""

    total: jax.Array
    rows: jax.Array


@pytest.mark.sweep
def test_a_train_step_takes_a_record_that_is_a_ratio():
    optax_accum.Ratio.register(Summed, total="total", count="rows")
    losses = []
    for record in (optax_accum.Ratio, Summed):
        model = nnx.Linear(X.shape[1], 1, rngs=nnx.Rngs(0))
        tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=1)
        optimizer = accum.nnx.Optimizer(model, tx, wrt=nnx.Param, metrics=("loss",))
        fun = lambda model, x, record=record: record(jnp.sum(model(x) ** 2), jnp.float32(len(x)))
        metrics = accum.nnx.train_step(fun, num_microbatches=2)(model, optimizer, X)
        losses.append((float(metrics["loss"]), arrays(nnx.state(model))))
    equal(*losses)


def test_batch_norm_and_dropout_over_devices():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        batch = jax.device_put((X, Y), jax.NamedSharding(mesh, jax.P("data")))
        cut = accum.nnx.value_and_grad(normalised, num_microbatches=3, devices="data")
        assert_the_call_of_the_whole_batch(cut, batch)


@pytest.mark.sweep
def test_where_micro_batches_count_each_by_itself_devices_have_streams_of_their_own():
    """Masks differ from device to device and from micro-batch to micro-batch; the model's streams advance alike."""
    mesh, model = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)), dropping()
    kept = lambda model, x: model.drop(jnp.ones_like(x))
    cut = accum.nnx.reduce_microbatches(kept, 2, reduction="concat", devices="data")
    with jax.set_mesh(mesh):
        rows = jax.device_put(np.ones((8, 64), "f"), jax.NamedSharding(mesh, jax.P("data")))
        masks = nnx.jit(lambda model, x: cut(model, x))(model, rows)
    assert len(np.unique(np.asarray(masks), axis=0)) == 8
    assert int(model.drop.rngs.count[...]) == 2


@pytest.mark.sweep
@pytest.mark.parametrize("to", [*sweep([None]), "partial"])
def test_batch_norm_inside_a_shard_map_of_the_user(to):
    """Whether gradients are reduced or not, all devices keep the statistics of all rows."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    (model, loss), (whole, _) = two_norms(), two_norms()
    forward(whole, (X, Y))
    cut = accum.nnx.value_and_grad(loss, num_microbatches=1, devices=optax_accum.Devices("data", to=to))
    graph, state = nnx.split(model)

    def local(state, batch):
        module = nnx.merge(graph, state)
        value, _ = cut(module, batch)
        return nnx.state(module, nnx.BatchStat), value.reshape(1)

    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": (jax.P(), jax.P("data"))}
    stats, _ = jax.jit(jax.shard_map(local, mesh=mesh, **specs))(state, (X, Y))
    close(arrays(stats), statistics(whole))


class Transformed(nnx.Module):
    """Layers under transformations of NNX, which make traces of their own."""

    def __init__(self, rngs):
        self.first = nnx.Linear(6, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)

        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs):
            return nnx.Linear(4, 4, rngs=rngs)

        self.layers = layers(rngs.fork(split=3) if flax_before(0, 12) else rngs.split(3))

    def __call__(self, x):
        @nnx.remat
        def start(model, x):
            return model.norm(model.first(x))

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def through(layer, x):
            return nnx.relu(layer(x))

        return through(self.layers, start(self, x))


@pytest.mark.sweep
def test_a_module_under_transformations():
    model, whole = Transformed(nnx.Rngs(0)), Transformed(nnx.Rngs(0))
    loss = lambda model, batch: jnp.mean((model(batch[0]).sum(-1) - batch[1]) ** 2)
    want_value, want = nnx.jit(nnx.value_and_grad(loss))(whole, (X, Y))
    cut = accum.nnx.value_and_grad(loss, microbatch_size=4)
    value, grads = nnx.jit(lambda model, batch: cut(model, batch))(model, (X, Y))
    assert_allclose(value, want_value, rtol=1e-5)
    close(arrays(grads), arrays(want), 1e-5)
    close(statistics(model), statistics(whole))


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "deferred"), [("Explicit", True), *sweep([("Auto", False), ("Auto", True)])])
def test_the_train_step_over_devices(kind, deferred):
    """Statistics, metrics and parameters are those of the whole batch, with one reduction per window if deferred."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType[kind],))
    plain, (whole, normed) = Net(nnx.Rngs(0)), two_norms()
    plain_loss, grads = of_whole(plain, (X, Y))
    reference = nnx.Optimizer(plain, optax.adam(0.1), wrt=nnx.Param)
    nnx.jit(nnx.Optimizer.update)(reference, plain, grads)
    forward(whole, (X, Y))
    axes = {"devices": "data"} if deferred else {}
    options = {"num_microbatches": 1} | ({} if deferred else {"devices": "data"})  # deferred: as the optimizer
    models = ((Net(nnx.Rngs(0)), nnx_loss), (two_norms()[0], normed))
    with jax.set_mesh(mesh):
        replicated, rows = jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(mesh, jax.P("data"))
        for model, loss in models:
            nnx.update(model, jax.device_put(nnx.state(model), replicated))
            tx = optax_accum.accumulate_gradients(optax.adam(0.1), every=2, **axes)
            optimizer = accum.nnx.Optimizer(model, tx, wrt=nnx.Param, metrics=("loss",))
            step = accum.nnx.train_step(loss, exact=loss is nnx_loss, **options)
            for part in (slice(0, 8), slice(8, 12)):
                metrics = step(model, optimizer, jax.device_put((X[part], Y[part]), rows))
            assert int(optimizer.updates[...]) == 1
            if loss is nnx_loss:
                close(arrays(nnx.state(model, nnx.Param)), arrays(nnx.state(plain, nnx.Param)))
                assert_allclose(metrics["loss"], plain_loss, rtol=1e-5)
            else:
                close(statistics(model), statistics(whole))


@pytest.mark.sweep
def test_the_train_step_of_an_optimizer_that_does_not_accumulate():
    (model, loss), (whole, _) = two_norms(), two_norms()
    optimizer = accum.nnx.Optimizer(model, optax.set_to_zero(), wrt=nnx.Param)
    step = accum.nnx.train_step(loss, num_microbatches=3)
    for number in (1, 2):
        metrics = step(model, optimizer, (X, Y))
        forward(whole, (X, Y))
        assert (int(optimizer.updates[...]), sorted(metrics)) == (number, ["loss"])
        close(statistics(model), statistics(whole))


@pytest.mark.sweep
def test_sums_begin_anew_and_a_late_flush_closes():
    (model, loss), (whole, _) = two_norms(), two_norms()
    tx = optax_accum.accumulate_gradients(optax.set_to_zero(), every=4)
    optimizer = accum.nnx.Optimizer(model, tx, wrt=nnx.Param, metrics=("loss",))
    grads = nnx.state(model, nnx.Param)
    forward(whole, (X, Y))
    loss(model, (X, Y))
    optimizer.update(model, grads, metrics={"loss": 10.0})
    optimizer.update(model, jax.tree.map(jnp.zeros_like, grads), weight=0, flush=True)
    close(statistics(model), statistics(whole))
    optimizer.update(model, grads, metrics={"loss": 2})
    assert_allclose(optimizer.window_metrics()["loss"], 2)


def test_a_window_that_is_left_and_one_that_is_empty():
    (model, loss), (other, _) = two_norms(), two_norms()
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
    optimizers = [accum.nnx.Optimizer(module, tx, wrt=nnx.Param, metrics=("loss",)) for module in (model, other)]

    @nnx.jit
    def step(model, optimizer, batch):
        value, grads = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, grads, metrics={"loss": value})

    step(model, optimizers[0], (X[:3], Y[:3]))
    nnx.jit(lambda optimizer, kl: optimizer.discard_window(when=kl > 0.1))(optimizers[0], jnp.float32(0.2))
    for batch in micro_batches()[:2]:
        step(model, optimizers[0], batch)
        step(other, optimizers[1], batch)
    close(arrays(nnx.state(model)), arrays(nnx.state(other)))
    before = optimizers[0].window_metrics()["loss"]
    grads = nnx.state(model, nnx.Param)
    optimizers[0].update(model, grads, weight=0, flush=True)
    assert_allclose(optimizers[0].window_metrics()["loss"], before)
    counts = as_pure(optimizers[0].opt_state)
    assert (counts.gradient_step, counts.discarded, counts.batches) == (1, 1, 3)


def test_announced_metrics_must_come():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
    optimizer = accum.nnx.Optimizer(model, tx, wrt=nnx.Param, metrics=("loss",))
    with pytest.raises(ValueError, match=r"metrics=\('loss',\) were, and .* has metrics=None. Pass a dict of them"):
        optimizer.update(model, nnx.state(model, nnx.Param), weight=3.0)


@pytest.mark.sweep
def test_a_micro_step_takes_no_memory_beside_the_state():
    """The fused path, donated; the statistics are small beside a matrix."""

    class Wide(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(256, rngs=nnx.Rngs(0))

    def temporary(cls):
        model = Wide()
        optimizer = cls(model, optax_accum.accumulate_gradients(optax.adam(1e-3), every=4), wrt=nnx.Param)
        grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
        step = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads) and None, donate_argnums=(0, 1))
        return programs.compiled(step.lower(model, optimizer, grads)).memory_analysis().temp_size_in_bytes / (
            4 * 259 * 256
        )

    most = 1.05 if flax_before(0, 12) else 0.05  # its nnx.jit gives the buffers that are donated to others
    assert temporary(accum.nnx.Optimizer) < most
    assert temporary(nnx.Optimizer) > 0.9


@pytest.mark.sweep
def test_what_a_state_tells_is_arrays():
    """In NNX a state holds variables."""
    model = Net(nnx.Rngs(0))
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=3, statistics=True)
    optimizer = accum.nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = nnx.grad(nnx_loss)(model, (X, Y))
    optimizer.update(model, grads, weight=3.0)
    state = optimizer.opt_state
    close(jax.tree.leaves(optax_accum.mean_grads(state)), jax.tree.leaves(grads))
    found = optax_accum.statistics.gradient_noise_scale(state)
    counts = (optax_accum.has_updated(state), *optax_accum.metrics(state).values(), *found)
    assert all(isinstance(count, jax.Array) for count in counts)


@pytest.mark.sweep
def test_a_running_multi_steps_goes_on():
    """The state of an `nnx.Optimizer` around `optax.MultiSteps`, in the middle of a window."""
    model, whole = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    step = nnx.jit(lambda model, optimizer, batch: optimizer.update(model, nnx.grad(nnx_loss)(model, batch)))
    step(whole, nnx.Optimizer(whole, optax.adam(0.1), wrt=nnx.Param), (X, Y))
    old = nnx.Optimizer(model, optax.MultiSteps(optax.adam(0.1), 3), wrt=nnx.Param)
    cut = [(X[i::3], Y[i::3]) for i in range(3)]
    step(model, old, cut[0])
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 3)
    new = accum.nnx.Optimizer(model, tx, wrt=nnx.Param)
    nnx.update(new.opt_state, nnx.state(optax_accum.from_multi_steps(old.opt_state, tx)))
    for batch in cut[1:]:
        step(model, new, batch)
    assert int(new.updates[...]) == 1
    close(arrays(nnx.state(model, nnx.Param)), arrays(nnx.state(whole, nnx.Param)))


def test_bad_input():
    model, loss = two_norms()
    _, grads = nnx.value_and_grad(loss)(model, (X, Y))
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
    optimizer = accum.nnx.Optimizer(model, tx, wrt=nnx.Param, metrics=("loss",))
    with pytest.raises(ValueError, match="A metric must be a scalar"):
        optimizer.update(model, grads, metrics={"loss": jnp.ones(2)})
    with pytest.raises(TypeError, match=r"metrics must be a tuple of names: metrics='loss'"):
        accum.nnx.Optimizer(model, tx, wrt=nnx.Param, metrics="loss")
    step = accum.nnx.train_step(
        lambda model, batch: (loss(model, batch), {"loss": 0.0}), has_aux=True, num_microbatches=2
    )
    with pytest.raises(ValueError, match=r"metrics has a 'loss', too"):
        step(model, optimizer, (X, Y))
    step_of_loss = accum.nnx.train_step(loss, num_microbatches=2, exact=False)
    with pytest.raises(ValueError, match=r"without metrics, and .* \['loss'\]. Create it with"):
        step_of_loss(model, accum.nnx.Optimizer(model, tx, wrt=nnx.Param), (X, Y))
    with pytest.raises(
        TypeError, match=r"must be an optax_accum.flax.nnx.Optimizer: it is a flax.nnx.*Create it with that"
    ):
        step(model, nnx.Optimizer(model, tx, wrt=nnx.Param), (X, Y))
    model.norms.append(nnx.BatchNorm(4, use_bias=False, use_scale=False, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="must keep their tree and shapes"):
        optimizer.update(model, grads)


@pytest.mark.sweep
def test_frozen_parameters_cost_no_accumulator():
    model = nnx.LoRALinear if hasattr(nnx, "LoRALinear") else None
    layer = model(6, 3, lora_rank=2, rngs=nnx.Rngs(0))
    loss = lambda layer, batch: cross_entropy(layer(batch[0]), batch[1])
    _, grads = accum.nnx.value_and_grad(loss, wrt=nnx.LoRAParam, num_microbatches=3)(layer, (X, Y))
    sizes = sorted(leaf.shape for leaf in jax.tree.leaves(grads))
    assert sizes == [(2, 3), (6, 2)]
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
    optimizer = accum.nnx.Optimizer(layer, tx, wrt=nnx.LoRAParam)
    before = arrays(nnx.state(layer))
    for _ in range(2):
        optimizer.update(layer, grads)
    after = arrays(nnx.state(layer))
    equal(after["kernel"], before["kernel"])
    assert np.max(np.abs(after["lora"]["lora_b"] - before["lora"]["lora_b"])) > 0


@pytest.mark.sweep
def test_the_nnx_train_step_and_its_checkpoint(tmp_path):
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), every=2)
    model, whole = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    nnx.jit(nnx.Optimizer.update)(
        nnx.Optimizer(whole, optax.adam(0.1), wrt=nnx.Param), whole, of_whole(whole, (X, Y))[1]
    )
    optimizer = accum.nnx.Optimizer(model, tx, wrt=nnx.Param, metrics=("loss",))
    step = accum.nnx.train_step(nnx_loss, num_microbatches=2)
    given = as_pure(nnx.state((model, optimizer.opt_state), nnx.Any(nnx.Param, nnx.OptState)))
    step(model, optimizer, (X[:8], Y[:8]))
    assert (int(optimizer.updates[...]), int(optimizer.step[...])) == (0, 1)
    donated = {leaf.shape for leaf in jax.tree.leaves(given) if leaf.is_deleted()}
    assert donated >= {(6, 8), (8, 3)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", nnx.state((model, optimizer)))
    step(model, optimizer, (X[8:], Y[8:]))
    params = lambda model: arrays(nnx.state(model, nnx.Param))
    close(params(model), params(whole))
    again = Net(nnx.Rngs(1))
    other = accum.nnx.Optimizer(again, tx, wrt=nnx.Param, metrics=("loss",))
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update((again, other), checkpointer.restore(tmp_path / "c", nnx.state((again, other))))
    wrong = accum.nnx.Optimizer(again, optax_accum.accumulate_gradients(optax.sgd(0.1), every=2), wrt=nnx.Param)
    with ocp.StandardCheckpointer() as checkpointer, pytest.raises(ValueError, match=r"opt_state\.inner_opt_state"):
        checkpointer.restore(tmp_path / "c", nnx.state((again, wrong)))
    step(again, other, (X[8:], Y[8:]))
    equal(params(again), params(model))
    assert int(other.updates[...]) == 1


# How a train step reaches the variables of its model


class Tower(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(6, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)
        self.last, self.factor = nnx.Linear(6, 3, rngs=rngs), 1.0

    def __call__(self, x):
        return self.factor * self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))


def stepping(model, cls=accum.nnx.Optimizer):
    """A step of SGD in two micro-batches, and the list of its traces."""
    traces = []

    def loss(model, batch):
        traces.append(batch)
        return cross_entropy(model(batch[0]), batch[1])

    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 1)
    optimizer = cls(model, tx, wrt=nnx.Param, metrics=("loss",))
    step = accum.nnx.train_step(loss, num_microbatches=2)
    return lambda: step(model, optimizer, (X, Y)), traces


def assert_moves_as_the_whole_batch(model, step):
    twin = nnx.clone(model)  # what Flax differentiates it also writes anew
    value, grads = nnx.value_and_grad(lambda model: cross_entropy(model(X), Y))(twin)
    want = jax.tree.map(lambda p, g: p - 0.1 * g, arrays(nnx.state(model, nnx.Param)), arrays(grads))
    assert_allclose(step()["loss"], value, rtol=1e-5)
    close(arrays(nnx.state(model, nnx.Param)), want)


def rename(model, names):
    attributes = [(names.get(name, name), value) for name, value in vars(model).items()]
    vars(model).clear()
    vars(model).update(attributes)


def note(variable):
    if flax_before(0, 12):
        variable.get_metadata()["note"] = "another"
    else:
        variable.set_metadata("note", "another")


CHANGES = {  # from outside; whether the step is traced again
    "a value": (lambda m: m.first.kernel.__setitem__(..., 2 * m.first.kernel[...]), False),
    "all values": (lambda m: nnx.update(m, jax.tree.map(jnp.negative, nnx.state(m))), False),
    "a variable": (lambda m: setattr(m.first, "kernel", nnx.Param(0.5 * jnp.ones((6, 6)))), False),
    "a variable of the same value": (lambda m: setattr(m.first, "kernel", nnx.Param(m.first.kernel[...])), False),
    "a layer": (lambda m: setattr(m, "second", nnx.Linear(6, 6, rngs=nnx.Rngs(7))), False),
    "layers exchanged": (lambda m: vars(m).update(first=m.second, second=m.first), False),
    "their names exchanged": (lambda m: rename(m, {"first": "second", "second": "first"}), False),
    "an attribute": (lambda m: setattr(m, "factor", 3.0), True),
    "metadata": (lambda m: note(m.first.kernel), True),
    "the form of a layer": (lambda m: setattr(m, "second", nnx.Linear(6, 6, use_bias=False, rngs=nnx.Rngs(7))), True),
}


@pytest.mark.sweep
@pytest.mark.parametrize("what", sweep(CHANGES, but=["a layer", "layers exchanged", "an attribute", "metadata"]))
def test_what_is_changed_between_two_steps_is_seen(what):
    changed_between_two_steps(Tower(nnx.Rngs(0)), *CHANGES[what])


def changed_between_two_steps(model, change, traced_again):
    step, traces = stepping(model)
    assert_moves_as_the_whole_batch(model, step)
    before = len(traces)
    change(model)
    for _ in range(2):
        assert_moves_as_the_whole_batch(model, step)
    assert len(traces) == before * (2 if traced_again else 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Shifted:
    by: nnx.Param


class Containers(nnx.Module):
    """Layers in containers that are no modules, and may be changed in place."""

    def __init__(self, rngs):
        self.inner = nnx.data([nnx.Linear(6, 6, rngs=rngs) for _ in range(2)])
        self.later = nnx.data([nnx.Linear(6, 6, rngs=rngs)])
        self.named = nnx.data({"last": nnx.Linear(6, 3, rngs=rngs)})
        self.shifted = nnx.data(Shifted(nnx.Param(jnp.ones(3))))

    def __call__(self, x):
        for layer in self.inner:
            x = nnx.relu(layer(x))
        for layer in self.later:
            x = layer(x)
        return self.named["last"](x) + self.shifted.by[...]


CONTAINER_CHANGES = {
    "in a list": (lambda m: m.inner.__setitem__(0, nnx.Linear(6, 6, rngs=nnx.Rngs(7))), False),
    "in a dict": (lambda m: m.named.update(last=nnx.Linear(6, 3, rngs=nnx.Rngs(7))), False),
    "in a node of another kind": (lambda m: setattr(m.shifted, "by", nnx.Param(jnp.zeros(3))), False),
    "from list to list": (lambda m: m.later.insert(0, m.inner.pop()), True),
}


@pytest.mark.sweep
@pytest.mark.parametrize("what", CONTAINER_CHANGES)
def test_what_is_changed_in_a_container_is_seen(what):
    changed_between_two_steps(Containers(nnx.Rngs(0)), *CONTAINER_CHANGES[what])


def test_a_variable_of_the_optimizer_is_exchanged_between_two_steps():
    """The gradient of a sum of squares is twice the model; momentum begins anew in the new variable."""
    model = nnx.Linear(1, 1, kernel_init=nnx.initializers.ones, bias_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    tx = optax_accum.accumulate_gradients(optax.sgd(0.25, momentum=0.5), 1)
    optimizer = accum.nnx.Optimizer(model, tx, wrt=nnx.Param, metrics=("loss",))
    loss = lambda model, batch: model.kernel[...].sum() ** 2 + model.bias[...].sum() ** 2 + 0 * batch.sum()
    step = accum.nnx.train_step(loss, num_microbatches=1)
    step(model, optimizer, jnp.ones(2))
    trace = optimizer.opt_state.inner_opt_state[0].trace
    assert [float(trace[name][...].sum()) for name in ("kernel", "bias")] == [2, 2]
    trace["kernel"] = type(trace["kernel"])(jnp.zeros((1, 1)))
    step(model, optimizer, jnp.ones(2))
    assert [float(trace[name][...].sum()) for name in ("kernel", "bias")] == [1, 2]
    assert [float(model.kernel[...].sum()), float(model.bias[...].sum())] == [0.25, 0]


def test_one_step_of_two_models_in_turn():
    """Of one form, with one program; and an attribute that is as it was needs no other one."""
    models = Tower(nnx.Rngs(0)), Tower(nnx.Rngs(1))
    traces = []

    def loss(model, batch):
        traces.append(batch)
        return cross_entropy(model(batch[0]), batch[1])

    step = accum.nnx.train_step(loss, num_microbatches=2)
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 1)
    optimizers = [accum.nnx.Optimizer(model, tx, wrt=nnx.Param, metrics=("loss",)) for model in models]
    for factor in (1.0, 3.0, 1.0):
        for model, optimizer in zip(models, optimizers, strict=True):
            model.factor = factor
            assert_moves_as_the_whole_batch(model, lambda: step(model, optimizer, (X, Y)))  # noqa: B023 (called at once)
    for_both_factors = len(traces)
    assert_moves_as_the_whole_batch(models[1], lambda: step(models[1], optimizers[0], (X, Y)))
    assert len(traces) == for_both_factors


@pytest.mark.sweep
def test_a_train_step_keeps_no_model_alive():
    model = Tower(nnx.Rngs(0))
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 1)
    optimizer = accum.nnx.Optimizer(model, tx, wrt=nnx.Param, metrics=("loss",))
    step = accum.nnx.train_step(lambda model, batch: cross_entropy(model(batch[0]), batch[1]), num_microbatches=2)
    step(model, optimizer, (X, Y))
    alive = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.first.kernel[...])
    del model, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


FORMS = {  # of graphs that are no trees
    "a variable twice": lambda m: setattr(m.second, "kernel", m.first.kernel),
    "a layer twice": lambda m: setattr(m, "second", m.first),
    "a cycle": lambda m: setattr(m, "whole", m),
    "an array that is no variable": lambda m: setattr(m, "offset", jnp.ones(3)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("what", FORMS)
def test_a_graph_that_is_no_tree_of_variables(what):
    model = Tower(nnx.Rngs(0))
    FORMS[what](model)
    step, traces = stepping(model)
    assert_moves_as_the_whole_batch(model, step)
    before = len(traces)
    assert_moves_as_the_whole_batch(model, step)
    assert len(traces) == before
    assert (model.second.kernel is model.first.kernel) == (what in ("a variable twice", "a layer twice"))


@pytest.mark.sweep
def test_random_streams_and_statistics_advance_in_one_program():
    model, whole = Net(nnx.Rngs(0), rate=0.5), Net(nnx.Rngs(0))
    traces = []

    def loss(model, batch):
        traces.append(batch)
        return nnx_loss(model, batch, norm=True)

    tx = optax_accum.accumulate_gradients(optax.set_to_zero(), every=2)
    optimizer = accum.nnx.Optimizer(model, tx, wrt=nnx.Param, metrics=("loss",))
    step = accum.nnx.train_step(loss, num_microbatches=2, exact=False)
    losses = [float(step(model, optimizer, (X, Y))["loss"]) for _ in range(4)]
    assert int(model.drop.rngs.count[...]) == 4  # one for each call, as the whole batch has it
    assert len(set(losses)) == 4
    for _ in range(2):
        nnx_loss(whole, (X, Y), norm=True)
    close(statistics(model), statistics(whole))
    once = len(traces)
    step.lower(model, optimizer, (X, Y))
    assert len(traces) == once  # it lowers the very program that a call runs


def test_a_train_step_takes_few_calls_of_python():
    """It walks no graph, as `nnx.jit` does in each call, and reads a tree again only where something has changed."""
    model, slow = Tower(nnx.Rngs(0)), Tower(nnx.Rngs(0))
    step, _ = stepping(model)
    slow.whole = slow
    calls = [python_calls(run) for run in (step, stepping(slow)[0])]
    assert calls[0] < calls[1] / 5

    def changed():
        model.factor = 3.0 if model.factor == 1.0 else 1.0
        step()

    changed()
    assert calls[0] < python_calls(changed) / 1.5


def python_calls(run):
    run()
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer: setattr(optimizer, "calls", 1),
        lambda model, _: note(model.first.kernel),
        lambda model, _: setattr(model, "second", model.first),
    ],
    ids=["an attribute", "metadata", "a layer"],
)
def test_a_train_step_changes_values_alone(change):
    class Changing(accum.nnx.Optimizer):
        def update(self, model, *args, **kwargs):
            super().update(model, *args, **kwargs)
            change(model, self)

    step, _ = stepping(Tower(nnx.Rngs(0)), Changing)
    with pytest.raises(ValueError, match="the attributes and variables that they had.*Change the others between steps"):
        step()


# What a fun may do to its model, and which arguments it has


class Sowing(nnx.Module):
    """Leaves its hidden layer in the model, in a variable that each call makes or makes longer."""

    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(6, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        hidden = self.inner(x)
        self.hidden = nnx.Intermediate((*getattr(self, "hidden", ()), hidden))
        return self.outer(hidden)


@pytest.mark.sweep
def test_what_is_sown_is_taken_out_or_refused():
    """The remedy of the message works: what is left is that of all rows."""
    loss = lambda model, batch: cross_entropy(model(batch[0]), batch[1])
    remedy = r"What sow makes, take out inside fun, aux = nnx.pop\(model, nnx.Intermediate\)"
    refused = lambda model, fun=loss, **options: accum.nnx.value_and_grad(fun, num_microbatches=5, **options)(
        model, (X, Y)
    )
    with pytest.raises(ValueError, match=rf"it made hidden \(Intermediate\). {remedy}"):
        refused(Sowing(nnx.Rngs(0)))

    def popped(model, batch):
        return loss(model, batch), nnx.to_pure_dict(nnx.pop(model, nnx.Intermediate))

    model = Sowing(nnx.Rngs(0))
    (_, aux), grads = accum.nnx.value_and_grad(popped, has_aux=True, num_microbatches=5)(model, (X, Y))
    assert_allclose(aux["hidden"][0], model.inner(X), atol=1e-6)
    close(arrays(grads), arrays(nnx.grad(loss)(Sowing(nnx.Rngs(0)), (X, Y))))
    model(X)  # outside, for a look at it
    with pytest.raises(
        ValueError, match=r"it took out hidden \(Intermediate\).*an earlier call has left.*take out before"
    ):
        refused(model, popped, has_aux=True)
    with pytest.raises(ValueError, match=r"it changed the tree or shape of hidden \(Intermediate\)"):
        refused(model)


def test_a_parameter_that_is_made_late_is_refused():
    class Late(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones(6))

        def __call__(self, x):
            self.scale = nnx.Param(jnp.ones([]))
            return x @ self.kernel[...] * self.scale[...]

    with pytest.raises(ValueError, match=r"it made scale \(Param\)"):
        accum.nnx.value_and_grad(lambda model, x: model(x).mean(), num_microbatches=2)(Late(), X)


@pytest.mark.sweep
def test_the_numbers_of_arguments_are_those_of_fun():
    """Counted from the front or from the end: the state of the model, which follows inside, is none of them."""
    model, key = nnx.Linear(6, 3, rngs=nnx.Rngs(0)), jax.random.key(0)

    def loss(model, key, scale, batch):
        return scale * cross_entropy(model(batch[0]), batch[1]) + 0.0 * jax.random.uniform(key)

    want = nnx.grad(lambda model: loss(model, key, 2.0, (X, Y)))(model)
    for number in (-1, 3):
        _, grads = accum.nnx.value_and_grad(loss, num_microbatches=5, batch_argnums=number)(model, key, 2.0, (X, Y))
        close(arrays(grads), arrays(want))
    for role, number in (("batch_argnums", 4), ("batch_argnums", -5), ("rng_argnum", 5), ("whole_argnums", "rows")):
        message = rf"{role} must name a parameter of fun: {role}={number!r}, and fun takes \(model, key, scale, batch\)"
        transform = accum.nnx.value_and_grad if role == "batch_argnums" else accum.nnx.reduce_microbatches
        with pytest.raises(ValueError, match=message):
            transform(loss, num_microbatches=5, **{"batch_argnums": 3, role: number})
    with pytest.raises(ValueError, match="argnums=0 and batch_argnums='model' name the same one"):
        accum.nnx.value_and_grad(loss, num_microbatches=5, batch_argnums="model")
    with pytest.raises(ValueError, match="batch_argnums=1 is not, in a call with 1 by position and .'batch'. by"):
        accum.nnx.value_and_grad(loss, num_microbatches=5)(model, batch=(X, Y))


def by_loss(loss, named, args, kwargs):
    """The whole batch: one mask, and a sum over all of `scale`."""
    _, grads = accum.nnx.value_and_grad(loss, num_microbatches=4, batch_argnums=named[0])(*args, **kwargs)
    return grads


def by_gradient(loss, named, args, kwargs):
    """Each micro-batch by itself, with a key of its own."""
    roles = dict(zip(("batch_argnums", "rng_argnum", "whole_argnums"), named, strict=True))
    gradient = lambda m, key, scale, batch: nnx.grad(loss)(m, key, scale, batch)
    return accum.nnx.reduce_microbatches(gradient, num_microbatches=4, **roles)(*args, **kwargs)


ARGUMENTS = every_pair([by_loss, by_gradient], [(3, 1, 2), (-1, -3, -2), ("batch", "key", "scale")], range(5))


def name_of(value):
    return getattr(value, "__name__", str(value))


@pytest.mark.sweep
@pytest.mark.parametrize(("way", "named", "by_position"), sweep(ARGUMENTS, but=one_of_each(ARGUMENTS)), ids=name_of)
def test_arguments_by_position_and_by_keyword(way, named, by_position):
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    arguments = {"m": model, "key": jax.random.key(0), "scale": jnp.ones(len(X)), "batch": (X, Y)}

    def loss(m, key, scale, batch):
        return jnp.sum(scale) * cross_entropy(m(batch[0]), batch[1]) + jnp.sum(m.bias[...]) * jax.random.normal(key)

    keys = [jax.random.fold_in(arguments["key"], i) for i in range(4)] if way is by_gradient else [arguments["key"]]
    apart = [arrays(nnx.grad(loss)(**{**arguments, "key": key})) for key in keys]
    args = list(arguments.values())[:by_position]
    kwargs = {name: arg for number, (name, arg) in enumerate(arguments.items()) if number >= by_position}
    grads = way(loss, named, args, kwargs)
    close(arrays(grads), jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *apart))


def test_arguments_by_name_stay_whole():
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    loss = lambda model, batch, scale: scale * cross_entropy(model(batch[0]), batch[1])
    cut = accum.nnx.value_and_grad(loss, num_microbatches=5)
    _, grads = nnx.jit(lambda model: cut(model, (X, Y), scale=2.0))(model)
    close(arrays(grads), arrays(nnx.jit(nnx.grad(loss))(model, (X, Y), 2.0)))


def test_options_and_arguments_that_are_refused():
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    loss = lambda model, batch, *_: cross_entropy(model(batch[0]), batch[1])
    with pytest.raises(TypeError, match="sets argnums itself: argnums=1. Name the variables to differentiate with wrt"):
        accum.nnx.value_and_grad(loss, num_microbatches=2, argnums=1)
    with pytest.raises(TypeError, match="sets carry_argnum itself: carry_argnum=2. What a micro-batch hands on"):
        accum.nnx.value_and_grad(loss, num_microbatches=2, carry_argnum=2)
    with pytest.raises(ValueError, match="Exactly one of num_microbatches and microbatch_size"):
        accum.nnx.value_and_grad(loss)
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_microbatch'"):
        accum.nnx.value_and_grad(loss, num_microbatch=2)
    with pytest.raises(TypeError, match="nnx.Rngs beside the model is advanced by nobody: argument 2"):
        accum.nnx.value_and_grad(loss, num_microbatches=2)(model, (X, Y), nnx.Rngs(0))


def test_a_gradient_of_nothing_is_refused():
    """And one of other variables than those that the optimizer trains."""
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    loss = lambda model, batch: cross_entropy(model(batch[0]), batch[1])
    with pytest.raises(ValueError, match=r"wrt=.*LoRAParam.* names none, and it has Param. For a tree of arrays"):
        accum.nnx.value_and_grad(loss, wrt=nnx.LoRAParam, num_microbatches=2)(model, (X, Y))
    with pytest.raises(
        ValueError, match=r"LoRAParam.* names none, and it has Param. Pass those that are to be trained"
    ):
        accum.nnx.Optimizer(model, optax_accum.accumulate_gradients(optax.sgd(0.1), 2), wrt=nnx.LoRAParam)
    with pytest.raises(ValueError, match="names none, and it has"):
        accum.nnx.value_and_grad(lambda p, x: (p["w"] * x).mean(), num_microbatches=2)({"w": jnp.ones(6)}, X)
    with pytest.raises(TypeError, match="must be an NNX module: Dense is one of Linen"):
        accum.nnx.value_and_grad(loss, num_microbatches=2)(linen.Dense(3), (X, Y))
    optimizer = accum.nnx.Optimizer(model, optax_accum.accumulate_gradients(optax.sgd(0.1), 2), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"there is none at \['bias'\], \['kernel'\]. Pass the State that nnx.grad"):
        optimizer.update(model, {"kernel": jnp.ones((6, 3)), "bias": jnp.ones(3)})
    with pytest.raises(TypeError, match="metric= looks like a misspelt metrics=, and would go to the optimizer"):
        optimizer.update(model, nnx.state(model, nnx.Param), metric={})


def test_a_train_step_takes_a_fun_of_two():
    with pytest.raises(TypeError, match=r"calls fun\(model, batch\): it takes \(model, batch, key\). Give it these 2"):
        accum.nnx.train_step(lambda model, batch, key: 0.0, num_microbatches=2)


@pytest.mark.parametrize(
    ("has_aux", "fun", "message"),
    [
        (True, lambda loss: loss, r"With has_aux, fun must return a pair, \(loss, aux\)"),
        (False, lambda loss: (loss, {}), "fun returned a tuple. Pass has_aux=True"),
    ],
)
def test_what_the_fun_of_a_train_step_returns(has_aux, fun, message):
    model, loss = two_norms()
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
    step = accum.nnx.train_step(lambda model, batch: fun(loss(model, batch)), has_aux=has_aux, num_microbatches=2)
    with pytest.raises(TypeError, match=message):
        step(model, accum.nnx.Optimizer(model, tx, wrt=nnx.Param, metrics=("loss",)), (X, Y))


class Partitioned(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.first = nnx.Linear(6, 8, kernel_init=nnx.with_partitioning(init, (None, "tensor")), rngs=rngs)
        self.last = nnx.Linear(8, 3, kernel_init=nnx.with_partitioning(init, ("tensor", None)), rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


@pytest.mark.parametrize("chained", [False, *sweep([True])])
def test_partial_sums_of_partitioned_variables_lie_over_the_devices(chained):
    """Their metadata is not that of the parameters: it begins with the axis of the devices."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    loss = lambda model, batch: cross_entropy(model(batch[0]), batch[1])
    with jax.set_mesh(mesh):
        model, whole = Partitioned(nnx.Rngs(0)), Partitioned(nnx.Rngs(0))
        reference = nnx.Optimizer(whole, optax.sgd(0.1), wrt=nnx.Param)
        nnx.jit(lambda whole, opt: opt.update(whole, nnx.grad(loss)(whole, (X[:8], Y[:8]))))(whole, reference)
        tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 2, devices="data")
        options = {"devices": "data"} if chained else {}
        optimizer = accum.nnx.Optimizer(model, optax.chain(tx) if chained else tx, wrt=nnx.Param, metrics=("loss",))
        named = nnx.get_partition_spec(nnx.state(optimizer)["opt_state"])
        acc = (named[0] if chained else named)["acc_grads"]
        want = (None, None) if chained else (("data", None, "tensor"), ("data", "tensor", None))
        for layer, names in zip(("first", "last"), want, strict=True):
            assert value_of(acc[layer]["kernel"]) == (jax.P() if names is None else jax.P(*names))
        step = accum.nnx.train_step(loss, num_microbatches=1, **options)
        for part in (slice(0, 4), slice(4, 8)):
            step(model, optimizer, jax.device_put((X[part], Y[part]), jax.NamedSharding(mesh, jax.P("data"))))
    close(arrays(nnx.state(model, nnx.Param)), arrays(nnx.state(whole, nnx.Param)), 1e-5)


@pytest.mark.sweep
def test_the_number_of_micro_batches_may_stand_second():
    named = accum.nnx.value_and_grad(nnx_loss, num_microbatches=2)(Net(nnx.Rngs(0)), (X, Y))
    equal(*map(arrays, (accum.nnx.value_and_grad(nnx_loss, 2)(Net(nnx.Rngs(0)), (X, Y))[1], named[1])))


@pytest.mark.sweep
def test_statistics_of_a_module():
    """The noise comes beside the value."""
    model = Net(nnx.Rngs(0))
    measured = accum.nnx.value_and_grad(nnx_loss, num_microbatches=4, statistics=True)
    (value, told), grads = nnx.jit(lambda model, batch: measured(model, batch))(model, (X, Y))
    want_value, want = of_whole(model, (X, Y))
    assert_allclose(value, want_value, rtol=1e-6)
    close(arrays(grads), arrays(want))
    assert told.known > 0
