"""What is read from a state, and the way from a running `optax.MultiSteps`."""

import pickle

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum

pytestmark = pytest.mark.quick

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}
GRADS = [jax.tree.map(lambda p, i=i: jnp.sin(p + i), PARAMS) for i in range(8)]


def train(tx, state, params, grads):
    update = jax.jit(tx.update)
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize(("steps", "mean"), [(0, True), (1, True), (2, True), (3, True), (1, False), (4, False)])
def test_a_running_multi_steps_can_switch_at_any_micro_step(steps, mean):
    inner = optax.adamw(optax.linear_schedule(0.1, 0.01, 4))
    old = optax.MultiSteps(inner, 3, use_grad_mean=mean)
    params, old_state = train(old, old.init(PARAMS), PARAMS, GRADS[:steps])
    expected, expected_state = train(old, old_state, params, GRADS[steps:])
    reduction = "mean" if mean else "sum"
    tx = optax_accum.accumulate_gradients(inner, 3, reduction=reduction)
    state = optax_accum.from_multi_steps(old_state, reduction=reduction)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, tx.init(PARAMS))
    assert optax_accum.has_updated(state) == old.has_updated(old_state)
    now, state = train(tx, state, params, GRADS[steps:])
    chex.assert_trees_all_close(now, expected, rtol=1e-5)
    assert (state.mini_step, state.gradient_step) == (expected_state.mini_step, expected_state.gradient_step)


def test_a_multi_steps_inside_a_chain_can_switch():
    old = optax.chain(optax.identity(), optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation())
    state = optax_accum.from_multi_steps(old.init(PARAMS))
    tx = optax.chain(optax.identity(), optax_accum.accumulate_gradients(optax.sgd(0.1), 2))
    chex.assert_trees_all_equal(state, tx.init(PARAMS))


def test_a_multi_steps_of_another_length_can_switch():
    old = optax.MultiSteps(optax.sgd(1.0), 8)
    _, state = train(old, old.init(PARAMS), PARAMS, GRADS[:3])
    for every, closes_with in [(4, 4), (2, 4), (1, 4)]:
        tx = optax_accum.accumulate_gradients(optax.sgd(1.0), every)
        updates, _ = tx.update(GRADS[3], optax_accum.from_multi_steps(state), PARAMS)
        mean = jax.tree.map(lambda *g, n=closes_with: -sum(g) / n, *GRADS[:4])
        chex.assert_trees_all_close(updates, mean, rtol=1e-5)


def test_a_skipping_multi_steps_can_switch():
    old = optax.MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=optax.transforms.skip_not_finite)
    state = optax_accum.from_multi_steps(old.init(PARAMS))
    for nonfinite in ("skip", optax.transforms.skip_not_finite):
        tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 2, nonfinite=nonfinite)
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
        seen.append(tuple(value.item() for value in optax_accum.metrics(state).values()))
    assert list(optax_accum.metrics(state)) == ["mini_step", "gradient_step", "weight", "skipped", "discarded"]
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
