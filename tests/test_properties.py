"""The law over random trees, weights and partitions; hypothesis looks for the counterexample."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

import optax_accum

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
trees = st.recursive(
    shapes,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner)),
    max_leaves=5,
)
weights = st.one_of(st.just(0.0), st.floats(0.0625, 1024, width=32))


def is_shape(node):
    return isinstance(node, tuple)


def fill(tree, seed):
    """Returns a tree of arrays with the shapes that stand in `tree`."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32), tree, is_leaf=is_shape)


@given(trees, st.lists(weights, min_size=1, max_size=6), st.sampled_from(["mean", "sum"]))
def test_the_window_emits_the_weighted_mean_or_sum(tree, weights, reduction):
    grads = [fill(tree, seed) for seed in range(len(weights))]
    tx = optax_accum.accumulate_gradients(optax.identity(), len(weights), reduction=reduction)
    state = tx.init(grads[0])
    for grad, weight in zip(grads, weights, strict=True):
        updates, state = tx.update(grad, state, weight=weight)
    total = sum(weights)
    divisor = (total or 1.0) if reduction == "mean" else 1.0
    expected = jax.tree.map(
        lambda *g: sum(w * np.float64(x) for w, x in zip(weights, g, strict=True)) / divisor, *grads
    )
    for leaf, value in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, value, rtol=1e-5, atol=1e-6 * max(1.0, total / divisor))
    assert state.discarded == (total == 0)
    assert optax_accum.has_updated(state) == (total != 0)


GRAD = jax.jit(jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 2**31))
def test_any_partition_of_the_rows_gives_the_gradient_of_all(sizes, seed):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(sum(sizes), 3)), jnp.float32)
    w = jnp.asarray(rng.normal(size=3), jnp.float32)
    tx = optax_accum.accumulate_gradients(optax.identity(), None)
    state, start = tx.init(w), 0
    for i, size in enumerate(sizes):
        grads = GRAD(w, x[start : start + size])
        updates, state = tx.update(grads, state, weight=size, flush=i == len(sizes) - 1)
        start += size
    np.testing.assert_allclose(updates, GRAD(w, x), rtol=1e-5, atol=1e-6)


@given(st.lists(st.sampled_from("gbf"), min_size=1, max_size=12), st.sampled_from(["skip", "omit", "discard"]))
def test_the_counters_agree_with_a_model_in_python(events, nonfinite):
    """Good and bad micro-batches and flushes in any order, every=3, against twelve lines of Python."""
    tx = optax_accum.accumulate_gradients(optax.identity(), 3, nonfinite=nonfinite)
    state = tx.init(jnp.ones(2))
    window, arrived, updates_made, skipped, discarded = [], 0, 0, 0, 0
    for i, event in enumerate(events):
        bad, flush = event == "b", event == "f"
        grads = jnp.full(2, np.nan if bad else float(i + 1))
        updates, state = tx.update(grads, state, flush=flush)
        arrived += not (bad and nonfinite == "skip")
        skipped += bad and nonfinite != "discard"
        window += [np.nan if bad else i + 1.0] if nonfinite == "discard" or not bad else []
        expected = np.zeros(2)
        if flush or arrived >= 3:
            usable = bool(window) and np.all(np.isfinite(window))
            expected = np.full(2, np.mean(window)) if usable else expected
            updates_made, discarded = updates_made + usable, discarded + (not usable)
            window, arrived = [], 0
        np.testing.assert_allclose(updates, expected, rtol=1e-6)
        counted = [state.mini_step, state.gradient_step, state.skipped, state.discarded]
        assert [int(c) for c in counted] == [arrived, updates_made, skipped, discarded]
