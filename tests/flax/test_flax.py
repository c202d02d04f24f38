"""Linen train steps: what a window changes in them, and what acts once per update."""

import re
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
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import dynamic_scale, train_state
from numpy.testing import assert_allclose

import optax_accum
from optax_accum import flax as accum
from tests import ROOT, programs
from tests.engine import warn_of_no_window
from tests.flax_problems import (
    ROWS,
    X,
    Y,
    close,
    created,
    cross_entropy,
    equal,
    gradient,
    micro_batches,
    normalised,
)
from tests.tiers import sweep
from tests.versions import since

pytestmark = pytest.mark.usefixtures("rank_promotion")


@pytest.mark.sweep
def test_extra_arguments_reach_the_optimizer_and_fields_are_replaced():
    seen = []

    def update(grads, state, params=None, *, extra=None, **_):
        seen.append(extra)
        return grads, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    state = created(optax_accum.accumulate_gradients(inner, every=None))
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    step = lambda state: state.apply_gradients(grads=zeros, flush=True, extra="here", apply_fn="new")
    state = jax.eval_shape(step, state)
    assert "here" in seen
    assert state.apply_fn == "new"


def test_an_optimizer_that_does_not_accumulate_works_and_says_so_once():
    warn_of_no_window.cache_clear()
    plain, ours = created(optax.sgd(0.1), train_state.TrainState), created(optax.sgd(0.1))
    grads = gradient(plain, (X, Y))[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moved = ours.apply_gradients(grads=grads, weight=2.0)
        moved = moved.apply_gradients(grads=grads, flush=True)
    assert ["this optimizer has none" in str(warning.message) for warning in caught] == [True]
    assert caught[0].filename == __file__
    equal(moved.params, plain.apply_gradients(grads=grads).apply_gradients(grads=grads).params)
    assert (moved.step, moved.updates) == (2, 2)


@pytest.mark.sweep
def test_statistics_count_by_stats_weight_beside_a_weight_of_tokens():
    """docs/flax.md says so, and that they count by the tokens without it."""
    state = created(optax_accum.accumulate_gradients(optax.set_to_zero(), every=3), norm=True)
    given = [normalised(state, batch) for batch in micro_batches()]

    @jax.jit
    def step(run, of_batch, **weights):
        return run.apply_gradients(grads=of_batch[0], batch_stats=of_batch[1], **weights)

    def merged(told):
        run = state
        for tokens, rows, of_batch in zip((5.0, 1.0, 9.0), ROWS, given, strict=True):
            run = step(run, of_batch, weight=tokens, **({"stats_weight": rows} if told else {}))
        return run.batch_stats["BatchNorm_0"]["mean"]

    want = normalised(state, (X, Y))[1]["BatchNorm_0"]["mean"]
    close(merged(told=True), want)
    assert np.max(np.abs(merged(told=False) - want)) > 1e-3


@pytest.mark.sweep
@pytest.mark.parametrize("nonfinite", ["skip", "omit"])
def test_a_nan_that_is_left_out_stays_out_of_statistics_and_metrics(nonfinite):
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=None, nonfinite=nonfinite)
    state = clean = created(tx, norm=True, metrics=("loss",))
    bad = (np.full_like(X[:3], np.nan), Y[:3])
    for name, batches in (
        ("clean", micro_batches()),
        ("state", [bad, *micro_batches()[:1], bad, *micro_batches()[1:]]),
    ):
        run = created(tx, norm=True, metrics=("loss",))
        for number, batch in enumerate(batches, start=1):
            grads, stats = normalised(run, batch)
            run = run.apply_gradients(
                grads=grads,
                batch_stats=stats,
                weight=len(batch[0]),
                metrics={"loss": jnp.sum(batch[0])},
                flush=number == len(batches),
            )
        clean, state = (run, state) if name == "clean" else (clean, run)
    assert int(state.opt_state.skipped) == 2
    equal(
        (state.params, state.batch_stats, state.window_metrics()),
        (clean.params, clean.batch_stats, clean.window_metrics()),
    )


def test_the_metrics_of_nothing_are_no_number():
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
    assert np.isnan(created(tx, metrics=("loss",)).window_metrics()["loss"])


@pytest.mark.sweep
def test_statistics_far_from_zero_keep_their_variance():
    """Moments about the running mean: a mean of 1000 and a variance of 1 in float32."""
    rng = np.random.default_rng(0)
    old = {"mean": jnp.full(4, 1000.0), "var": jnp.ones(4)}
    rows = (1000 + rng.normal(size=(12, 4))).astype("f")
    left = lambda x: {
        "mean": 0.9 * old["mean"] + 0.1 * jnp.asarray(x.astype("d").mean(0), jnp.float32),
        "var": 0.9 * old["var"] + 0.1 * jnp.asarray(x.astype("d").var(0), jnp.float32),
    }
    parts = [accum.batch_moments(left(part), old, 0.9) for part in np.split(rows, 3)]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 3, *parts)
    close(accum.merge_batch_stats(mean, old, 0.9), left(rows), 2e-4)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), old)
    moments = accum.batch_moments(half, half, 0.9)
    assert {leaf.dtype for leaf in jax.tree.leaves(moments)} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(accum.merge_batch_stats(moments, half, 0.9))} == {jnp.bfloat16.dtype}
    untouched = accum.merge_batch_stats(accum.batch_moments(old, old, 0.9), old, 0.9)
    equal(untouched, old)  # layers in inference mode


@pytest.mark.sweep
def test_layers_of_different_momenta_and_frozen_statistics():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            norm = lambda momentum: nn.BatchNorm(use_running_average=False, momentum=momentum, use_scale=False)(x)
            return norm(0.9) + norm(0.5)

    model = Two()
    variables = model.init(jax.random.key(0), X)
    left = lambda x: model.apply(variables, x, mutable=["batch_stats"])[1]["batch_stats"]
    state = accum.linen.TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=flax.core.freeze(variables["batch_stats"]),
        momentum={"BatchNorm_0": 0.9, "BatchNorm_1": 0.5},
        tx=optax_accum.accumulate_gradients(optax.set_to_zero(), every=3),
    )
    for freeze, batch in zip((flax.core.freeze, dict, dict), micro_batches(), strict=True):
        state = jax.jit(lambda state, new, n: state.apply_gradients(grads=state.params, batch_stats=new, weight=n))(
            state, freeze(left(batch[0])), len(batch[0])
        )
    close(state.batch_stats, left(X))


def test_statistics_that_came_too_late_are_refused():
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 1)
    state = created(tx, norm=True)
    grads, stats = normalised(state, (X, Y))
    late = created(tx).replace(params=state.params, batch_stats=state.batch_stats, momentum=0.9)
    late = late.replace(opt_state=state.opt_state)
    with pytest.raises(ValueError, match="has no sums for batch_stats: they were put into it later"):
        late.apply_gradients(grads=grads, batch_stats=stats)


@pytest.mark.sweep
def test_the_train_state_of_an_example_of_flax_is_subclassed():
    """As in Flax's ImageNet example: fields of its own, one of them named as ours, without defaults."""

    class State(accum.linen.TrainState):
        batch_stats: object
        dynamic_scale: object

    state = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), State, norm=True, dynamic_scale=None)
    grads, stats = normalised(state, (X, Y))
    state = state.apply_gradients(grads=grads, batch_stats=stats, dynamic_scale=jnp.ones([]))
    assert (int(state.updates), int(state.step), float(state.dynamic_scale)) == (0, 1, 1.0)
    plain = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), train_state.TrainState)
    bare = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), State, batch_stats=None, dynamic_scale=None)
    equal(flax.serialization.from_bytes(bare, flax.serialization.to_bytes(plain)).params, plain.params)


def test_a_field_named_metrics_stays_the_users():
    """As in Flax's guide: a collection of metrics in the state, given to `create` and replaced by the user."""

    class State(accum.linen.TrainState):
        metrics: object

    state = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), State, metrics={"count": 0})
    state = state.apply_gradients(grads=gradient(state, (X, Y))[1], metrics={"count": 1})
    assert (state.metrics, state.window_metrics()) == ({"count": 1}, {})
    assert state.replace(metrics={"count": 2}).metrics == {"count": 2}
    with pytest.raises(ValueError, match="State has a field `metrics`"):
        accum.linen.train_step(lambda *_: None, num_microbatches=2)(state, (X, Y), jax.random.key(0))


def test_a_train_step_whose_batch_and_key_are_swapped():
    state = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2))
    step = accum.linen.train_step(lambda *_: (jnp.float32(0), {}), num_microbatches=2)
    with pytest.raises(TypeError, match=r"The key must be one of jax.random.*The order is \(state, batch, key\)"):
        step(state, jax.random.key(0), (X, Y))


@pytest.mark.sweep
def test_fp8_statistics_are_overwritten_by_their_maximum_over_the_window():
    """That of the inputs is what the whole batch leaves; held micro-steps leave all as it was."""
    model = nn.Dense(3, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    variables = jax.jit(model.init)(jax.random.key(0), X)
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=3)
    create = lambda cls, tx: cls.create(apply_fn=model.apply, params=variables, tx=tx)
    gradient_of = jax.jit(jax.grad(lambda params, batch: cross_entropy(model.apply(params, batch[0]), batch[1])))
    grads = lambda state, batch: gradient_of(state.params, batch)
    whole = create(train_state.TrainState, optax.sgd(0.1))
    whole = whole.apply_gradients(grads=grads(whole, (X, Y)))
    state = create(accum.linen.TrainState, tx)
    for batch in micro_batches():
        equal(state.params, variables)
        state = state.apply_gradients(grads=grads(state, batch), weight=len(batch[0]))
    history = lambda state: state.params[OVERWRITE_WITH_GRADIENT]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    assert float(history(state).max()) == float(np.abs(X).max())
    equal(history(state), history(whole))
    plain = create(accum.linen.TrainState, optax.sgd(0.1))
    equal(plain.apply_gradients(grads=grads(plain, (X, Y))).params, whole.params)


def test_fp8_statistics_within_a_call_are_those_of_the_whole_batch():
    """Also those of the gradients, whose cotangents have the micro-batch's share in them; over devices as well."""
    model = nn.Dense(3, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    variables = jax.jit(model.init)(jax.random.key(0), X)
    loss = lambda params, batch, key, state: (cross_entropy(model.apply(params, batch[0]), batch[1]), {})

    def trained(cls, tx, options=None):
        announced = {"metrics": ("loss",)} if options else {}
        state = cls.create(apply_fn=model.apply, params=jax.tree.map(jnp.array, variables), tx=tx, **announced)
        gradient_of = jax.jit(jax.grad(lambda params, batch: loss(params, batch, None, None)[0]))
        step = accum.linen.train_step(loss, **options) if options else None
        for number in (1, 2):  # the second with scales that the first has left
            batch = X * number, Y
            if step is None:
                state = state.apply_gradients(grads=gradient_of(state.params, batch))
            else:
                state, _ = step(state, batch, jax.random.key(0))
        return state.params

    whole = trained(train_state.TrainState, optax.sgd(0.1))
    assert float(jax.tree.leaves(whole[OVERWRITE_WITH_GRADIENT])[0].max()) > 0
    assert not np.allclose(*(jax.tree.leaves(tree["params"])[1] for tree in (whole, variables)), atol=1e-3)
    close(trained(accum.linen.TrainState, optax.sgd(0.1), {"microbatch_size": 5}), whole)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    over = {"num_microbatches": 2, "devices": "data"}
    with jax.set_mesh(mesh):
        close(trained(accum.linen.TrainState, optax.sgd(0.1), over), whole)
        tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 1, devices="data")
        partial = trained(accum.linen.TrainState, tx, {**over, "weight_fn": lambda batch: len(batch[0])})
    close(partial["params"], whole["params"], 1e-2)  # quantised with other scales of the gradients
    of_inputs = lambda params: params[OVERWRITE_WITH_GRADIENT]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    equal(of_inputs(partial), of_inputs(whole))


@pytest.mark.sweep
def test_a_train_step_is_compiled_once_and_donates_any_optimizer():
    """`dog` keeps the parameters that it began with in its state: the same buffer, which is donated only once."""
    tx = optax_accum.accumulate_gradients(optax.contrib.dog(), every=2)
    state = created(tx, metrics=("loss",))
    step = accum.linen.train_step(loss_of, num_microbatches=2)
    for number in range(3):
        given, (state, _) = state, step(state, (X, Y), jax.random.key(number))
    assert step._cache_size() == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((given.params, given.opt_state.inner_opt_state)))


@pytest.mark.sweep
def test_a_micro_step_takes_no_memory_beside_the_state():
    """The fused path, donated: Flax's own state holds the updates, one copy of the parameters, for a moment."""
    model = nn.Dense(256)
    params = model.init(jax.random.key(0), jnp.ones((1, 256)))["params"]
    tx = optax_accum.accumulate_gradients(optax.adam(1e-3), every=4)

    def temporary(cls):
        state = cls.create(apply_fn=model.apply, params=params, tx=tx)
        step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads), donate_argnums=0)
        return programs.compiled(step.lower(state, params)).memory_analysis().temp_size_in_bytes / (4 * 257 * 256)

    assert temporary(accum.linen.TrainState) < 0.05 < 0.9 < temporary(train_state.TrainState)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "deferred", "norm"),
    [*sweep([("Auto", False, False), ("Auto", True, True), ("Explicit", False, True)]), ("Explicit", True, False)],
)
def test_a_train_step_on_four_devices(kind, deferred, norm):
    """Each device normalises its own rows; gradients, metrics and statistics are those of all of them."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType[kind],))

    def fun(params, batch, key, state):
        x, labels = batch
        variables = {"params": params, **({"batch_stats": state.batch_stats} if norm else {})}
        logits, new = state.apply_fn(variables, x, mutable=["batch_stats"])
        return cross_entropy(logits, labels), {"metrics": {"label": labels.max() > 0}, **new}

    axes = {"devices": "data"} if deferred else {}
    state = created(optax.sgd(0.1), train_state.TrainState) if not norm else created(optax.sgd(0.1), norm=True)
    want = normalised(state, (X, Y))[1] if norm else state.apply_gradients(grads=gradient(state, (X, Y))[1]).params
    options = {} if deferred else {"devices": "data"}  # deferred: as the optimizer has it
    exact = not norm  # each call is normalised by itself
    step = accum.linen.train_step(fun, num_microbatches=1, exact=exact, **options)
    with jax.set_mesh(mesh):
        rows, replicated = (jax.NamedSharding(mesh, jax.P(*names)) for names in (("data",), ()))
        params, stats = jax.device_put((state.params, getattr(state, "batch_stats", None)), replicated)
        state = accum.linen.TrainState.create(
            apply_fn=state.apply_fn,
            params=params,
            batch_stats=stats,
            momentum=0.9,
            tx=optax_accum.accumulate_gradients(optax.sgd(0.1), every=2, **axes),
            metrics=("loss", "label"),
        )
        parts = [jax.device_put((X[part], Y[part]), rows) for part in (slice(0, 8), slice(8, 12))]
        program = programs.compiled(step.lower(state, parts[0], jax.random.key(0)))
        found = optax_accum.sharding.count_collectives(program)
        for part in parts:
            state, metrics = step(state, part, jax.random.key(0))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    reduced_always = found.select(place=("outside", "loop")).bytes
    assert reduced_always < size / 2 if deferred else reduced_always >= size
    assert found.select(place="loop").count == 0
    assert int(state.updates) == 1
    assert 0 < float(metrics["label"]) <= 1
    close(state.batch_stats if norm else state.params, want)


def loss_of(params, batch, key, state):
    return cross_entropy(state.apply_fn({"params": params}, batch[0]), batch[1]), {}


@pytest.mark.sweep
def test_a_train_step_of_an_optimizer_that_does_not_accumulate():
    """No window, no warning that there is none, and no names of metrics: they are those of the call (docs/flax.md)."""
    state = created(optax.sgd(0.1))
    loss, grads = gradient(state, (X, Y))
    want = state.apply_gradients(grads=grads).params
    warn_of_no_window.cache_clear()
    state, metrics = accum.linen.train_step(loss_of, num_microbatches=3)(state, (X, Y), jax.random.key(0))
    close(state.params, want)
    assert_allclose(metrics["loss"], loss, rtol=1e-6)


def test_sums_begin_anew_and_a_late_flush_closes():
    """A loader that finds out too late closes the window without a gradient, statistics or metrics."""
    state = created(optax_accum.accumulate_gradients(optax.sgd(0.1), every=4), norm=True, metrics=("loss",))
    grads, want = normalised(state, (X, Y))
    zeros = jax.tree.map(jnp.zeros_like, grads)
    state = state.apply_gradients(grads=grads, batch_stats=want, metrics={"loss": 10.0})
    state = state.apply_gradients(grads=zeros, weight=0, flush=True)
    close(state.batch_stats, want)
    assert_allclose(state.window_metrics()["loss"], 10)
    old, left = state.batch_stats, normalised(state, (X[:4], Y[:4]))[1]
    state = state.apply_gradients(grads=zeros, metrics={"loss": 2})
    state = state.apply_gradients(grads=zeros, batch_stats=left, metrics={"loss": 2}, flush=True)
    assert_allclose(state.window_metrics()["loss"], 2)
    close(state.batch_stats, left)
    assert np.max(np.abs(old["BatchNorm_0"]["mean"] - left["BatchNorm_0"]["mean"])) > 1e-3


def test_a_window_that_is_left_and_one_that_is_empty():
    """A loop that stops in the middle goes on as if it had not begun; a flush of nothing leaves the log alone."""
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
    state, never = (created(tx, norm=True, metrics=("loss",)) for _ in range(2))
    grads, stats = normalised(state, (X[:4], Y[:4]))
    step = jax.jit(
        lambda state, scale: state.apply_gradients(
            grads=jax.tree.map(lambda g: scale * g, grads), batch_stats=stats, metrics={"loss": scale}
        )
    )
    state = jax.jit(lambda state: state.discard_window())(step(state, 7.0))
    for scale in (1.0, 3.0):
        state, never = step(state, scale), step(never, scale)
    close(state.params, never.params)
    close(state.batch_stats, never.batch_stats)
    state = state.apply_gradients(grads=grads, weight=0, flush=True)
    assert_allclose(state.window_metrics()["loss"], 2)
    assert (state.updates, state.opt_state.discarded, state.opt_state.batches, state.step) == (1, 1, 3, 4)


@pytest.mark.parametrize("jit", [jax.jit, lambda step: step], ids=["jit", "eager"])
def test_announced_metrics_must_come(jit):
    """The window's loss was NaN, without a word."""
    state = created(optax_accum.accumulate_gradients(optax.sgd(0.1), every=2), metrics=("loss",))
    grads = jax.tree.map(jnp.zeros_like, state.params)
    message = r"metrics=\('loss',\) were, and apply_gradients.* has metrics=None. Pass a dict of them"
    with pytest.raises(ValueError, match=message):
        jit(lambda state, grads: state.apply_gradients(grads=grads))(state, grads)
    with pytest.raises(ValueError, match=message):
        jit(lambda state, grads, weight: state.apply_gradients(grads=grads, weight=weight))(state, grads, 3.0)
    close(
        created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2)).apply_gradients(grads=grads).params, state.params
    )


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
    empty = state
    for _ in range(2):
        _, empty = optax_accum.apply_gradients(tx, params, empty, params, scale=1.0, weight=0)
    assert int(empty.discarded) == 1
    assert accum.next_scale(scale, state, empty).scale == scale.scale  # nothing overflowed
    narrow = optax_accum.accumulate_gradients(inner, 2, reduction="sum", emit_dtype=jnp.float16, nonfinite="discard")
    before = after = narrow.init(params)
    for _ in range(2):  # a sum that only float16 cannot hold
        before, (_, after) = after, narrow.update({"w": jnp.float16(4e4)}, after, params, scale=1.0)
    assert accum.next_scale(scale, before, after).scale == scale.scale / 2
    half, _ = accum.unscale().update({"w": jnp.float16(60000)}, None, scale=65536.0)  # more than float16 holds
    assert_allclose(half["w"], 60000 / 65536, rtol=1e-6)
    scales = []
    for x in (1e-4, 3e-4, 1e-4, 3e-4, 1e-4, 3e-4, 6e4, 1.0):  # the last window overflows in float16
        before = params
        params, state, scale = step(params, state, scale, jnp.float32(x))
        scales.append(float(scale.scale))
    assert scales == [1024] * 5 + [2048] * 2 + [1024]
    equal(params, before)
    assert_allclose(params["w"], 1e-4 - 3 * 0.5 * 2e-4, rtol=1e-3)


# Checkpoints


@pytest.mark.sweep
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
    other = created(optax_accum.accumulate_gradients(optax.sgd(0.1), every=3), norm=True, metrics=("loss",))
    with ocp.StandardCheckpointer() as checkpointer, pytest.raises(ValueError, match=r"opt_state\.inner_opt_state"):
        checkpointer.restore(tmp_path / "c", other)
    restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(half))
    equal(advance(restored, micro_batches()[2:]), undisturbed)


def test_checkpoints_of_others():
    plain = created(optax.adam(0.1), train_state.TrainState)
    plain = plain.apply_gradients(grads=gradient(plain, (X, Y))[1])
    ours = flax.serialization.from_bytes(created(optax.adam(0.1)), flax.serialization.to_bytes(plain))
    equal(ours.params, plain.params)
    assert (ours.step, ours.updates) == (1, 1)
    multi = created(optax.MultiSteps(optax.adam(0.1), 3), train_state.TrainState)
    multi = multi.apply_gradients(grads=gradient(multi, (X, Y))[1])
    multi = flax.serialization.from_bytes(multi, flax.serialization.to_bytes(multi))
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), every=3)
    moved = created(tx).replace(params=multi.params, opt_state=optax_accum.from_multi_steps(multi.opt_state, tx))
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
    with pytest.raises(ValueError, match=r"of another optimizer: .*opt_state"):
        flax.serialization.from_bytes(created(optax.sgd(0.1, momentum=0.9)), flax.serialization.to_bytes(plain))
    with pytest.raises(ValueError, match=r"of another optimizer: .*opt_state"):
        flax.serialization.from_bytes(created(tx), flax.serialization.to_bytes(multi))
    restore = lambda mine, saved: flax.serialization.from_bytes(mine, flax.serialization.to_bytes(saved))
    with pytest.raises(ValueError, match=r"of another model: it has no batch_stats, and the state has some"):
        restore(created(tx, norm=True).replace(params=created(tx).params, opt_state=created(tx).opt_state), created(tx))
    with pytest.raises(ValueError, match=r"of another model: it has batch_stats, and the state has none"):
        restore(created(tx), created(tx, norm=True))
    half = created(tx).replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), multi.params))
    with pytest.raises(ValueError, match=r"params\['Dense_0'\]\['bias'\] it has bfloat16 \[8\], and the state float32"):
        restore(created(tx), half)


@pytest.mark.sweep
def test_a_checkpoint_of_flax_counted_micro_steps_and_other_metrics():
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), every=3)
    plain = created(tx, train_state.TrainState)
    for batch in [*micro_batches(), *micro_batches()[:1]]:
        plain = plain.apply_gradients(grads=gradient(plain, batch)[1])
    restore = lambda mine, saved: flax.serialization.from_bytes(mine, flax.serialization.to_bytes(saved))
    ours = restore(created(tx, metrics=("loss",)), plain)
    assert (int(ours.updates), int(ours.step), ours.updates.dtype) == (1, 4, jnp.int32)
    ours = ours.apply_gradients(grads=gradient(ours, (X, Y))[1], metrics={"loss": 3.0})
    more = restore(created(tx, metrics=("accuracy", "loss")), ours)
    assert_allclose([more.window_metrics()[name] for name in ("accuracy", "loss")], [np.nan, 3])
    assert sorted(restore(created(tx, metrics=("accuracy",)), ours).window_metrics()) == ["accuracy"]


def test_a_resumed_run_may_change_every():
    """In the middle of a window of three, one of two is gone on with: it closes at once, with the right mean."""
    wrapped = lambda every: optax_accum.accumulate_gradients(optax.sgd(0.1), every)
    state, whole = created(wrapped(3)), created(optax.sgd(0.1), train_state.TrainState)
    for batch in micro_batches()[:2]:
        state = state.apply_gradients(grads=gradient(state, batch)[1], weight=len(batch[0]))
    resumed = flax.serialization.from_bytes(created(wrapped(2)), flax.serialization.to_bytes(state))
    batch = micro_batches()[2]
    resumed = resumed.apply_gradients(grads=gradient(resumed, batch)[1], weight=len(batch[0]))
    assert int(resumed.updates) == 1
    close(resumed.params, whole.apply_gradients(grads=gradient(whole, (X, Y))[1]).params)


# Bad input


def test_bad_input():
    state = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), metrics=("loss",))
    grads = gradient(state, (X, Y))[1]
    with pytest.raises(ValueError, match=r"created with metrics=\('loss',\), and .* \['other'\]. Create it with"):
        state.apply_gradients(grads=grads, metrics={"other": 1.0})
    with pytest.raises(ValueError, match="A metric must be a scalar: 'loss' has shape"):
        state.apply_gradients(grads=grads, metrics={"loss": jnp.ones(3)})
    with pytest.raises(ValueError, match="The state has no batch_stats"):
        state.apply_gradients(grads=grads, batch_stats={"mean": jnp.ones(3)})
    normed = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), norm=True)
    with pytest.raises(ValueError, match="must keep their tree and shapes"):
        normed.apply_gradients(grads=normalised(normed, (X, Y))[0], batch_stats={"mean": jnp.ones(3)})
    with pytest.raises(TypeError, match=r"metrics must be a tuple of names: metrics='loss'"):
        created(optax.sgd(0.1), metrics="loss")
    assert created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), batch_stats={}).window.moments is None
    with pytest.raises(ValueError, match=r"needs the momentum of the BatchNorm layers.*momentum=None"):
        created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), norm=True, momentum=None)
    accum.merge_batch_stats({"mean": jnp.ones(3)}, {"mean": jnp.ones(3)}, np.float32(0.9))
    with pytest.raises(ValueError, match=r"momentum=1"):
        accum.merge_batch_stats({"mean": jnp.ones(3)}, {"mean": jnp.ones(3)}, 1)
    two = optax.chain(*(optax_accum.accumulate_gradients(optax.sgd(0.1), 2) for _ in range(2)))
    with pytest.raises(ValueError, match="must have one window: it holds 2"):
        created(two)


@pytest.mark.parametrize("layers", [(), ("BatchNorm_0", "BatchNorm_1"), ("Norm_0",)])
def test_a_momentum_of_other_layers_is_refused_when_the_state_is_made(layers):
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 2)
    with pytest.raises(
        ValueError,
        match=r"a prefix of the tree of batch_stats: .*, and the tree is .*'BatchNorm_0'.*Pass one number, or give each layer its own",
    ):
        created(tx, norm=True, momentum=dict.fromkeys(layers, 0.9))


def test_an_array_of_text_is_no_metric():
    state = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), metrics=("name",))
    with pytest.raises(TypeError, match="A metric must be a real scalar: 'name' is a ndarray"):
        state.apply_gradients(grads=state.params, metrics={"name": np.array("a")})


def test_modules_named_mean_and_var():
    """They are no statistics, though what is in them is."""
    one = {"mean": jnp.zeros(2), "var": jnp.ones(2)}
    old = {"mean": one, "var": one}
    new = jax.tree.map(lambda leaf: leaf + 0.1, old)
    want = accum.merge_batch_stats(accum.batch_moments(new["mean"], one, 0.9), one, 0.9)
    got = accum.merge_batch_stats(accum.batch_moments(new, old, 0.9), old, 0.9)
    equal(got, {"mean": want, "var": want})


@pytest.mark.parametrize("number", [2**40, np.int64(2**40), np.float64(2**40), np.array(2**40), jnp.float32(2**40)])
def test_numbers_of_any_kind_are_metrics(number):
    """2^40 of Python or NumPy came out as an error or as zero: it is no int32."""
    state = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), metrics=("tokens",))
    state = state.apply_gradients(grads=state.params, metrics={"tokens": number})
    assert_allclose(state.window_metrics()["tokens"], 2.0**40)


@pytest.mark.parametrize("fun", [lambda params, batch: 0.0, lambda params, batch, key: 0.0])
def test_a_train_step_takes_a_fun_of_four(fun):
    with pytest.raises(TypeError, match=r"calls fun\(params, batch, key, state\): it takes \(.*these 4 parameters"):
        accum.linen.train_step(fun, num_microbatches=2)


@pytest.mark.parametrize(
    ("name", "meant"), [("metric", "metrics"), ("batch_stat", "batch_stats"), ("stat_weight", "stats_weight")]
)
def test_a_misspelt_argument_is_not_lost(name, meant):
    state = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2))
    with pytest.raises(TypeError, match=f"{name}= looks like a misspelt {meant}=, and would go to the optimizer"):
        state.apply_gradients(grads=state.params, **{name: {}})


@pytest.mark.parametrize(
    ("out", "norm", "error", "message"),
    [
        (lambda loss, new: loss, False, TypeError, r"fun must return \(loss, extra\)"),
        (lambda loss, new: (loss, {"accuracy": loss}), False, ValueError, r"it has \['accuracy'\]. Put scalars into"),
        (lambda loss, new: ({"a": loss}, {}), False, TypeError, r"fun returned the terms \['a'\]. Return their sum"),
        (lambda loss, new: (loss[None], {}), False, TypeError, r"must return a real scalar loss.*float32\[1\]"),
        (lambda loss, new: (loss, {"metrics": loss}), False, TypeError, "metrics must be a dict of scalars"),
        (
            lambda loss, new: (loss, {"metrics": {"a": {"b": loss}}}),
            False,
            TypeError,
            "'a' is a dict. Give each number",
        ),
        (lambda loss, new: (loss, {"metrics": {"a": None}}), False, TypeError, "real scalar: 'a' is a NoneType"),
        (
            lambda loss, new: (loss, {"metrics": {"a": loss * 1j}}),
            False,
            TypeError,
            "real scalar: 'a' is a complex number",
        ),
        (lambda loss, new: (loss, {"batch_stats": None}), True, ValueError, 'extra must hold "batch_stats"'),
        (lambda loss, new: (loss, {"metrics": {"loss": loss}}), False, ValueError, "metrics has a 'loss', too"),
        (lambda loss, new: (loss, {}), True, ValueError, 'extra must hold "batch_stats", since the state has some'),
    ],
)
def test_what_the_fun_of_a_train_step_returns(out, norm, error, message):
    state = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), norm=norm, metrics=("loss",))

    def fun(params, batch, key, state):
        variables = {"params": params, **({"batch_stats": state.batch_stats} if norm else {})}
        logits, new = state.apply_fn(variables, batch[0], mutable=["batch_stats"])
        return out(cross_entropy(logits, batch[1]), new)

    with pytest.raises(error, match=message):
        accum.linen.train_step(fun, num_microbatches=2)(state, (X, Y), jax.random.key(0))
    plain = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), train_state.TrainState)
    with pytest.raises(TypeError, match=r"train_state.TrainState. Create it with optax_accum.flax.linen.TrainState"):
        accum.linen.train_step(fun, num_microbatches=2)(plain, (X, Y), jax.random.key(0))


def test_a_train_step_takes_one_weight():
    state = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 2), metrics=("loss",))
    step = accum.linen.train_step(loss_of, num_microbatches=2, weight_fn=lambda batch: {"rows": 1.0})
    with pytest.raises(ValueError, match=r"takes one weight for a micro-batch: weight_fn returned \['rows'\]"):
        step(state, (X, Y), jax.random.key(0))


@pytest.mark.parametrize("name", ["argnums", "has_aux"])
def test_options_that_are_the_steps_own(name):
    with pytest.raises(TypeError, match=rf"train_step sets {name} itself: {name}=1. Leave it out"):
        accum.linen.train_step(lambda *_: None, num_microbatches=2, **{name: 1})
    if name != "has_aux":
        with pytest.raises(TypeError, match=rf"nnx.train_step sets {name} itself: {name}=1. Leave it out"):
            accum.nnx.train_step(lambda *_: None, num_microbatches=2, **{name: 1})


@pytest.mark.parametrize("make", [accum.linen.train_step, accum.nnx.train_step], ids=["linen", "nnx"])
def test_where_sums_go_is_the_optimizers(make):
    with pytest.raises(TypeError, match="has from its optimizer where sums go.*Leave to out"):
        make(lambda *_: None, num_microbatches=2, devices=optax_accum.Devices("data", to="partial"))


@pytest.mark.parametrize("make", [accum.linen.train_step, accum.nnx.train_step], ids=["linen", "nnx"])
def test_a_train_step_that_is_not_told_how_to_split_says_what_leaves_the_batch_whole(make):
    """The steps of test_weights.py do what it says."""
    with pytest.raises(ValueError, match=r"must be given.*To accumulate across calls alone, pass num_microbatches=1"):
        make(lambda *_: None)


@pytest.mark.sweep
def test_the_weight_that_flax_takes_for_a_field():
    """A question of docs/faq.md, and its answer."""
    says = "TrainState.__init__() got an unexpected keyword argument 'weight'"
    assert f"\n## `{says}`\n" in (ROOT / "docs/faq.md").read_text()
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
    plain, ours = created(tx, train_state.TrainState), created(tx)
    grads = gradient(ours, (X, Y))[1]
    with pytest.raises(TypeError, match=re.escape(says)):
        plain.apply_gradients(grads=grads, weight=3.0)
    assert ours.apply_gradients(grads=grads, weight=3.0).opt_state.weight == 3


@pytest.mark.sweep
@since(0, 8, why="a constraint over other axes inside a shard_map over some")
def test_partial_sums_of_boxed_parameters_lie_over_the_devices():
    """`nn.get_partition_spec` places each row on its device."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    boxed = lambda *names: nn.with_partitioning(nn.initializers.lecun_normal(), names)
    model = nn.Sequential(
        [nn.Dense(8, kernel_init=boxed(None, "tensor")), nn.relu, nn.Dense(3, kernel_init=boxed("tensor", None))]
    )
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]
    grads = jax.jit(jax.grad(lambda params: cross_entropy(model.apply({"params": params}, X), Y)))
    want = optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads(params)))
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 2, devices="data")
    create = lambda params: accum.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, metrics=("loss",))
    with jax.set_mesh(mesh):
        specs = nn.get_partition_spec(jax.eval_shape(create, params))
        acc = specs.opt_state.acc_grads
        assert acc["layers_0"]["kernel"] == jax.P("data", None, "tensor")
        assert acc["layers_2"]["kernel"] == jax.P("data", "tensor", None)
        where = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
        state = jax.jit(create, out_shardings=where)(params)
        step = accum.linen.train_step(loss_of, num_microbatches=1)
        for part in (slice(0, 8), slice(8, 12)):
            batch = jax.device_put((X[part], Y[part]), jax.NamedSharding(mesh, jax.P("data")))
            state, _ = step(state, batch, jax.random.key(0))
    close(nn.unbox(state.params), nn.unbox(want), 1e-6)


def test_no_accumulator_over_devices():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        state = created(optax_accum.accumulate_gradients(optax.sgd(0.1), 1, devices="data"), metrics=("loss",))
        want = state.params, gradient(state, (X, Y))[1]
        want = jax.tree.map(lambda p, g: np.asarray(p - 0.1 * g), *want)
        with pytest.raises(ValueError, match="adds over the devices of its optimizer"):
            accum.linen.train_step(loss_of, num_microbatches=1, devices="other")(state, (X, Y), jax.random.key(0))
        state, _ = accum.linen.train_step(loss_of, num_microbatches=1)(state, (X, Y), jax.random.key(0))
        tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 2, devices="data")
        for options in ({"dtype": jnp.bfloat16}, {"overlap": True}):
            step = accum.linen.train_step(loss_of, num_microbatches=1, devices=optax_accum.Devices("data", **options))
            with pytest.raises(ValueError, match="dtype and the overlap of devices=.*give dtype to accumulate"):
                step(created(tx, metrics=("loss",)), (X, Y), jax.random.key(0))
    close(state.params, want)


class LinenConvolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Conv(2, (2,))(nn.tanh(nn.Conv(3, (2,))(x))).mean((1, 2))


class Convolutions(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.data([nnx.Conv(1, 3, (2,), rngs=rngs), nnx.Conv(3, 2, (2,), rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](nnx.tanh(self.layers[0](x))).mean((1, 2))


def linen_convolutions(x):
    model = LinenConvolutions()
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), jax.eval_shape(model.init, jax.random.key(0), x)["params"])
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
    state = accum.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, metrics=("loss",))
    fun = lambda params, x, key, state: (jnp.mean(state.apply_fn({"params": params}, x) ** 2), {})
    step = accum.linen.train_step(fun, num_microbatches=2)
    return jax.jit(lambda state, x: step(state, x, jax.random.key(0))[0].params).lower(state, x)


def nnx_convolutions(x):
    graph, state = nnx.split(Convolutions())
    differentiated = accum.nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), 2)
    return jax.jit(lambda state, x: differentiated(nnx.merge(graph, state), x)).lower(state, x)


@pytest.mark.sweep
@pytest.mark.parametrize("lowered", [linen_convolutions, nnx_convolutions])
def test_convolutions_are_of_the_form_for_which_a_cpu_has_a_kernel(lowered):
    text = lowered(jnp.ones((4, 6, 1))).as_text()
    assert set(re.findall(r"dim_numbers = (.*?), window", text)) == {"[b, 0, f]x[0, i, o]->[b, 0, f]"}


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: accum.linen.train_step(lambda p, b, k, s: 0.0, **o),
        lambda **o: accum.nnx.train_step(lambda m, b: 0.0, **o),
    ],
    ids=["linen", "nnx"],
)
def test_a_weight_fn_that_is_none_is_refused_when_a_step_is_built(make):
    with pytest.raises(TypeError, match="weight_fn must be a function: weight_fn=3"):
        make(num_microbatches=1, weight_fn=3)
    make(num_microbatches=1, weight_fn=len)  # the remedy
