"""`examples/engine.py`: two verbs, and an update of all requests since the last."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from examples.engine import Engine
from tests.problems import normal

BASE = normal(0, 6, 5)
ADAPTER = {"a": normal(1, 6, 2), "b": normal(2, 2, 5)}
BATCH = {"x": np.asarray(normal(3, 16, 6)), "mask": (np.arange(16) % 5 > 0).astype(np.float32)}
REQUESTS = [jax.tree.map(lambda leaf, rows=rows: leaf[rows], BATCH) for rows in (slice(5), slice(5, 7), slice(7, 16))]
ADAM = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
COUNT = lambda batch: batch["mask"].sum()


def loss(adapter, batch, base):
    errors = jnp.sum(jnp.tanh(batch["x"] @ (base + adapter["a"] @ adapter["b"])) ** 2, 1)
    return jnp.sum(batch["mask"] * errors) / jnp.maximum(batch["mask"].sum(), 1)


@jax.jit
def updated(adapter, batch, state=None, **hyperparams):
    """What one update with the whole batch makes of an adapter."""
    state = optax.tree.set(state or ADAM.init(adapter), **hyperparams)
    updates, state = ADAM.update(jax.grad(loss)(adapter, batch, BASE), state, adapter)
    return optax.apply_updates(adapter, updates), state


@pytest.fixture
def engine():
    engine = Engine(loss, ADAM, BASE, COUNT)
    for name in ("mine", "yours"):
        engine.create(name, ADAPTER)  # which it copies
    return engine


@pytest.mark.sweep
def test_all_requests_of_a_window_count(engine):
    """Their tokens differ; a second window begins empty, with another learning rate."""
    want, state = ADAPTER, None
    for rate in (0.1, 0.02):
        for request in REQUESTS:
            engine.forward_backward("mine", request)
            chex.assert_trees_all_equal(engine.adapters["mine"][0], want)
        assert engine.optim_step("mine", learning_rate=rate)
        want, state = updated(want, BATCH, state, learning_rate=rate)
        chex.assert_trees_all_close(engine.adapters["mine"][0], want, rtol=1e-5)
        want = jax.tree.map(jnp.array, engine.adapters["mine"][0])


@pytest.mark.sweep
def test_each_adapter_has_a_window_of_its_own(engine):
    first, second, third = REQUESTS
    for name, request in (("mine", first), ("yours", second), ("mine", third)):
        engine.forward_backward(name, request)
    assert engine.optim_step("mine")
    chex.assert_trees_all_equal(engine.adapters["yours"][0], ADAPTER)
    assert engine.optim_step("yours")
    both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), first, third)
    for name, batch in (("mine", both), ("yours", second)):
        chex.assert_trees_all_close(engine.adapters[name][0], updated(ADAPTER, batch)[0], rtol=1e-5)


def test_a_step_of_nothing_changes_nothing(engine):
    assert not engine.optim_step("mine")
    engine.forward_backward("mine", {**BATCH, "mask": jnp.zeros(16)})
    assert not engine.optim_step("mine")
    chex.assert_trees_all_equal(engine.adapters["mine"][0], ADAPTER)


@pytest.mark.sweep
@pytest.mark.parametrize("forgets", [False, True])
def test_verify_step_names_the_service_that_keeps_the_last_request_alone(engine, forgets):
    def make_step(every):
        def step(carry, batch):
            *engine.adapters["mine"], n = carry
            if forgets and every > 1 and n % every < every - 1:
                return *engine.adapters["mine"], n + 1
            engine.forward_backward("mine", batch)
            if n % every == every - 1:
                engine.optim_step("mine")
            return *engine.adapters["mine"], n + 1

        adapter = jax.tree.map(jnp.array, ADAPTER)
        return step, (adapter, engine._tx.init(adapter), 0)

    report = optax_accum.verify_step(make_step, BATCH, every=4)
    assert [cause.kind for cause in report.causes] == ["only the last gradient"] * forgets, str(report)
