"""What is read from a state, and the way from a running `optax.MultiSteps`."""

import pickle

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optax_accum
from optax_accum import batching, sharding
from tests.pairs import every_pair
from tests.tiers import sweep

pytestmark = pytest.mark.quick

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}
GRADS = [jax.tree.map(lambda p, i=i: jnp.sin(p + i), PARAMS) for i in range(8)]


def train(tx, state, params, grads):
    update = jax.jit(tx.update)
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize(
    ("steps", "mean"),
    sweep([(0, True), (1, True), (2, True), (3, True), (1, False), (4, False)], but=[(2, True), (1, False)]),
)
def test_a_running_multi_steps_can_switch_at_any_micro_step(steps, mean):
    inner = optax.adamw(optax.linear_schedule(0.1, 0.01, 4))
    old = optax.MultiSteps(inner, 3, use_grad_mean=mean)
    params, old_state = train(old, old.init(PARAMS), PARAMS, GRADS[:steps])
    expected, expected_state = train(old, old_state, params, GRADS[steps:])
    reduction = "mean" if mean else "sum"
    tx = optax_accum.accumulate_gradients(inner, 3, reduction=reduction)
    state = optax_accum.from_multi_steps(old_state, tx)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, tx.init(PARAMS))
    assert optax_accum.has_updated(state) == old.has_updated(old_state)
    now, state = train(tx, state, params, GRADS[steps:])
    chex.assert_trees_all_close(now, expected, rtol=1e-5)
    assert (state.mini_step, state.gradient_step) == (expected_state.mini_step, expected_state.gradient_step)


def test_a_multi_steps_inside_a_chain_can_switch():
    old = optax.chain(optax.identity(), optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation())
    new = optax_accum.accumulate_gradients(optax.sgd(0.1), 2)
    state = optax_accum.from_multi_steps(old.init(PARAMS), new)
    tx = optax.chain(optax.identity(), new)
    chex.assert_trees_all_equal(state, tx.init(PARAMS))


def test_a_multi_steps_of_another_length_can_switch():
    old = optax.MultiSteps(optax.sgd(1.0), 8)
    _, state = train(old, old.init(PARAMS), PARAMS, GRADS[:3])
    for every, closes_with in [(4, 4), (2, 4), (1, 4)]:
        tx = optax_accum.accumulate_gradients(optax.sgd(1.0), every)
        updates, _ = tx.update(GRADS[3], optax_accum.from_multi_steps(state, tx), PARAMS)
        mean = jax.tree.map(lambda *g, n=closes_with: -sum(g) / n, *GRADS[:4])
        chex.assert_trees_all_close(updates, mean, rtol=1e-5)


@pytest.mark.sweep
def test_a_skipping_multi_steps_can_switch():
    old = optax.MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=optax.transforms.skip_not_finite)
    for nonfinite in ("skip", optax.transforms.skip_not_finite):
        tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 2, nonfinite=nonfinite)
        state = optax_accum.from_multi_steps(old.init(PARAMS), tx)
        assert train(tx, state, PARAMS, GRADS[:2])[1].gradient_step == 1


def test_a_window_in_flight_survives_being_saved():
    """Bytes and pickles of a state in the middle of a window; training goes on bit for bit."""
    tx = optax_accum.accumulate_gradients(optax.adamw(0.1), 4)
    params, state = train(tx, tx.init(PARAMS), PARAMS, GRADS[:6])
    stored = flax.serialization.from_bytes(tx.init(PARAMS), flax.serialization.to_bytes(state))
    for restored in (stored, pickle.loads(pickle.dumps(state))):
        chex.assert_trees_all_equal(train(tx, restored, params, GRADS), train(tx, state, params, GRADS))


def test_metrics():
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 3, nonfinite="omit")
    state, bad = tx.init(PARAMS), jax.tree.map(lambda g: g * np.nan, GRADS[0])
    seen = []
    for grads, weight in [(GRADS[0], 2), (bad, 5), (GRADS[1], 4), (bad, 1), (bad, 1), (bad, 1), (GRADS[2], 3)]:
        _, state = tx.update(grads, state, PARAMS, weight=weight)
        seen.append(tuple(value.item() for value in optax_accum.metrics(state).values())[:-1])
    assert list(optax_accum.metrics(state)) == [
        *("mini_step", "gradient_step", "weight", "skipped", "discarded", "batches"),
    ]
    assert seen == [
        (1, 0, 2.0, 0, 0),
        (2, 0, 2.0, 1, 0),
        (0, 1, 0.0, 1, 0),
        (1, 1, 0.0, 2, 0),
        (2, 1, 0.0, 3, 0),
        (0, 1, 0.0, 4, 1),
        (1, 1, 3.0, 4, 1),
    ]


def test_the_first_fields_are_those_of_multi_steps():
    names = optax_accum.AccumulationState._fields
    assert names[:4] == optax.MultiStepsState._fields[:4]


def test_every_field_is_documented():
    lines = [line.strip() for line in optax_accum.AccumulationState.__doc__.splitlines()]
    for name in optax_accum.AccumulationState._fields:
        assert any(line.startswith(f"{name}: ") for line in lines), name


# What a loop asks of a window.


@pytest.mark.sweep
def test_the_mean_so_far_is_what_multi_steps_keeps():
    """In its units, whatever the weights; before a window's first micro-step it is zero there, too."""
    ours, theirs = optax_accum.accumulate_gradients(optax.sgd(0.1), 3), optax.MultiSteps(optax.sgd(0.1), 3)
    state, old = ours.init(PARAMS), theirs.init(PARAMS)
    chex.assert_trees_all_equal(optax_accum.mean_grads(state), old.acc_grads)
    for grads in GRADS[:5]:
        _, state = ours.update(grads, state, PARAMS, weight=80)
        _, old = theirs.update(grads, old, PARAMS)
        chex.assert_trees_all_close(optax_accum.mean_grads(state), old.acc_grads, rtol=1e-5, atol=1e-6)
    assert optax.tree.norm(state.acc_grads) > 50 * optax.tree.norm(old.acc_grads)


def test_the_mean_so_far_where_little_is_kept():
    state = optax_accum.accumulate_gradients(optax.sgd(0.1), 1).init(PARAMS)
    assert optax.tree.norm(optax_accum.mean_grads(state)) == 0
    tx = optax.chain(optax.identity(), optax_accum.accumulate_gradients(optax.sgd(0.1), 2, reduction="sum"))
    params = {"w": jnp.ones(2, jnp.bfloat16), "n": jnp.arange(2)}
    grads = {"w": jnp.full(2, 3, jnp.bfloat16), "n": np.zeros(2, jax.dtypes.float0)}
    tx = optax_accum.accumulate_gradients(optax.masked(optax.sgd(0.1), {"w": True, "n": False}), 2, reduction="sum")
    _, state = tx.update(grads, tx.init(params), params, weight=5.0)
    mean = optax_accum.mean_grads(state)
    assert (mean["w"].dtype, mean["w"].tolist(), mean["n"]) == (jnp.float32, [3.0, 3.0], optax.MaskedNode())


OPTIONS = {
    "plain": {},
    "skip": {"nonfinite": "skip"},
    "discard": {"nonfinite": "discard"},
    "statistics": {"statistics": True},
    "mean arguments": {"mean_args": {"value": 0.0, "tree": jnp.zeros(2)}},
}


LEFT = [*[(name, True) for name in OPTIONS], (next(iter(OPTIONS)), False)]


@pytest.mark.parametrize(("name", "jit"), sweep(LEFT, but=[LEFT[0], ("mean arguments", True)]), ids=str)
def test_a_window_that_is_left_has_not_begun(name, jit):
    """PPO stops in the middle; training goes on as if nobody had begun."""
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 3, **OPTIONS[name])
    extra = {"value": 1.5, "tree": jnp.ones(2)} if name == "mean arguments" else {}
    jit = jax.jit if jit else lambda fun: fun
    update = jit(lambda grads, state, params: tx.update(grads, state, params, weight=2.0, **extra))
    leave = jit(lambda state, when: optax_accum.discard_window(state, when=when))
    state = tx.init(PARAMS)
    for grads in GRADS[:4]:
        _, state = update(grads, state, PARAMS)
    _, begun = update(GRADS[7], state, PARAMS)
    kept, left = leave(begun, jnp.array(False)), leave(begun, jnp.array(True))
    chex.assert_trees_all_equal(kept, begun)
    assert jax.tree.map(jax.typeof, left) == jax.tree.map(jax.typeof, state)
    assert (left.discarded, left.mini_step, left.weight, left.batches) == (1, 0, 0, 5)
    without = left
    for grads in GRADS[:3]:
        updates, left = update(grads, left, PARAMS)
    fresh = optax_accum.discard_window(state)
    for grads in GRADS[:3]:
        expected, fresh = update(grads, fresh, PARAMS)
    chex.assert_trees_all_equal(updates, expected)
    chex.assert_trees_all_equal(left._replace(batches=fresh.batches), fresh)
    assert optax_accum.discard_window(without).discarded == 1  # empty
    assert optax_accum.has_updated(optax_accum.discard_window(left))


def test_windows_are_left_wherever_they_are():
    tx = optax.partition(
        {"often": optax_accum.accumulate_gradients(optax.sgd(0.1), 2), "seldom": optax.sgd(0.1)},
        {"w": "often", "b": "seldom"},
    )
    _, state = tx.update(GRADS[0], tx.init(PARAMS), PARAMS)
    assert optax_accum.metrics(optax_accum.discard_window(state))["discarded"] == 1
    with pytest.raises(ValueError, match="discard_window needs a state that holds an AccumulationState: state=Scale"):
        optax_accum.discard_window(optax.scale_by_adam().init(PARAMS))
    with pytest.raises(TypeError, match=r"when must be a bool.*when=float32\[2\].*jnp.any"):
        optax_accum.discard_window(state, when=jnp.ones(2))


@pytest.mark.parametrize(
    ("nonfinite", "flush", "jit"), every_pair(["propagate", "discard", "skip"], [True, "traced"], [False, True])
)
def test_an_empty_window_that_is_flushed_is_no_discarded_one(nonfinite, flush, jit):
    """A call after the last batch, in a run whose last window closed by itself."""
    flush, jit = jnp.array(True) if flush == "traced" else True, jax.jit if jit else lambda fun: fun
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 2, nonfinite=nonfinite)
    flag = {"flush": flush} if flush is True else {}
    close = jit(
        lambda grads, state, weight, flush=flush: tx.update(
            grads, state, PARAMS, weight=weight, **(flag or {"flush": flush})
        )
    )
    state = tx.init(PARAMS)
    for grads in GRADS[:2]:
        _, state = tx.update(grads, state, PARAMS)
    _, after = close(GRADS[0], state, 0.0)
    chex.assert_trees_all_equal(after._replace(emitted=state.emitted, acc_grads=state.acc_grads), state)
    assert not optax_accum.has_updated(after)
    _, state = tx.update(GRADS[0], state, PARAMS, weight=0.0)  # a micro-batch of no weight is in this window
    assert close(GRADS[0], state, 0.0)[1].discarded == 1


def test_the_state_counts_the_batches_that_a_loop_has_given():
    """So a restored loop knows which is next: with skips, empty batches, flushes and windows that were left."""
    bad = jax.tree.map(lambda g: g * np.nan, GRADS[0])
    for nonfinite in ("skip", "omit", "discard"):
        tx = optax_accum.accumulate_gradients(optax.adam(0.1), 3, nonfinite=nonfinite)
        state, given = tx.init(PARAMS), 0
        for grads, weight, flush in [
            *[(GRADS[0], 1, False), (bad, 1, False), (GRADS[1], 0, False), (GRADS[2], 1, True), (bad, 1, True)],
            *[(GRADS[3], 0, True), (GRADS[3], 1, False), (GRADS[3], 0, True)],
        ]:
            _, state = tx.update(grads, state, PARAMS, weight=weight, flush=flush)
            given += not (weight == 0 and flush)
            assert optax_accum.metrics(state)["batches"] == given
    assert optax_accum.discard_window(state).batches == 6


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_window_of_so_many_rows(jit):
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), batching.every_by_weight(10), nonfinite="omit")
    update, state, closed = jit(lambda *args, weight: tx.update(*args, weight=weight)), tx.init(PARAMS), []
    for grads, weight in zip(GRADS, (4, 5, 3, 10, 2, 8), strict=False):
        updates, state = update(grads, state, PARAMS, weight=float(weight))
        closed.append(bool(state.emitted))
    assert closed == [False, False, True, True, False, True]
    mean = jax.tree.map(lambda g, h: -(2 * g + 8 * h) / 10, *GRADS[4:6])
    chex.assert_trees_all_close(updates, mean, rtol=1e-5)
    for bad in (jnp.nan, 1e30):
        _, state = update(GRADS[0], state, PARAMS, weight=bad)
        assert state.mini_step == (1 if bad != bad else 0)  # left out, and waits


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan"), True, "4096", None], ids=repr)
def test_a_window_of_no_rows(weight):
    with pytest.raises(ValueError, match="weight must be a number above 0: weight=.*Pass the examples"):
        batching.every_by_weight(weight)


# The same over devices.


def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.sweep
def test_a_window_over_devices():
    """Its mean so far, its weight, its end and what is left of it are those of all devices."""
    rows = np.random.default_rng(0).normal(size=(5, 8, 2)).astype(np.float32)
    with jax.set_mesh(mesh()):
        params = jax.device_put(jnp.zeros(2), NamedSharding(mesh(), PartitionSpec()))
        tx = optax_accum.accumulate_gradients(optax.sgd(1.0), batching.every_by_weight(100), devices="data")
        init = jax.jit(tx.init, out_shardings=sharding.state_sharding(tx, params))
        update, state = jax.jit(tx.update), init(params)
        weights = jnp.arange(8.0) + 1  # of the devices, 36 in all
        for row in rows[:2]:
            updates, state = update(row, state, params, weight=weights)
        mean = np.average(rows[:2].mean(axis=0), axis=0, weights=weights)
        np.testing.assert_allclose(jax.jit(optax_accum.mean_grads)(state), mean, rtol=1e-5)
        left = jax.jit(optax_accum.discard_window)(state)
        assert jax.tree.map(lambda leaf: leaf.sharding, left) == jax.tree.map(lambda leaf: leaf.sharding, state)
        for row in rows[2:]:
            updates, left = update(row, left, params, weight=weights)
        np.testing.assert_allclose(-updates, np.average(rows[2:].mean(axis=0), axis=0, weights=weights), rtol=1e-5)
        for flush in (jnp.array(True), jnp.array(False)):  # brings nothing; brings an empty batch
            _, left = update(rows[0], left, params, weight=jnp.zeros(8), flush=flush)
    assert (left.gradient_step, left.discarded, left.batches, left.mini_step) == (1, 1, 6, 1)


@pytest.mark.sweep
def test_a_window_inside_a_shard_map():
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), batching.every_by_weight(16), devices="data")

    def run(grads):
        state, found = tx.init(jnp.zeros(1)), []
        for grad, stop in zip(grads, (True, False, False), strict=True):
            updates, state = tx.update(grad, state, jnp.zeros(1), weight=8.0)
            found.append(optax_accum.mean_grads(state))
            state = optax_accum.discard_window(state, when=jnp.array(stop))
        _, state = tx.update(grads[0], state, jnp.zeros(1), weight=0.0, flush=jnp.array(True))
        counts = jnp.stack([state.gradient_step, state.discarded, state.batches])
        return updates, jnp.stack(found), counts

    run = jax.shard_map(run, mesh=mesh(), in_specs=PartitionSpec(None, "data"), out_specs=PartitionSpec())
    updates, means, counts = jax.jit(run)(jnp.arange(24.0).reshape(3, 8))
    np.testing.assert_allclose(updates, [-15.5])
    np.testing.assert_allclose(means, [[3.5], [11.5], [0]])
    assert counts.tolist() == [1, 1, 3]
