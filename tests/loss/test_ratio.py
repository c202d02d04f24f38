"""Losses whose denominator only the loss knows: what they may be, what they cost, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from optax_accum import Ratio
from tests import programs
from tests.tiers import sweep

X = jnp.asarray(np.random.default_rng(0).normal(size=(10, 3)), jnp.float32)
W = jnp.asarray([1.0, -0.5, 2.0])
CUT = {"microbatch_size": 4}


def passed(w, x):
    """A mean over the rows that the parameters let through, 0 / 0 where they let none."""
    score = x @ w
    lets = score > 0
    return Ratio(jnp.sum(jnp.where(lets, jnp.tanh(score) ** 2, 0)), lets.sum())


def whole(loss, *args):
    def quotient(*args):
        out = loss(*args)
        return sum(ratio.total / ratio.count for ratio in (out.values() if isinstance(out, dict) else [out]))

    return jax.jit(jax.value_and_grad(quotient))(*args)


def close(ours, expected, rtol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), ours, expected)


def test_it_stands_where_the_loss_stands():
    def loss(w, x):
        ratio = passed(w, x)
        return ratio, {"rows": x.sum(1), "mean": ratio.total / ratio.count}

    (value, aux), grad = jax.jit(optax_accum.value_and_grad(loss, has_aux=True, **CUT))(W, X)
    close((value, grad), whole(passed, W, X))
    close(aux, {"rows": X.sum(1), "mean": value})


def test_a_narrow_loss_is_divided_in_float32():
    loss = lambda w, x: Ratio(jnp.sum(w.astype(jnp.bfloat16) * x), x.size)
    value, grad = jax.jit(optax_accum.value_and_grad(loss, **CUT))(jnp.float32(1), jnp.full((10, 3), 5.0, jnp.bfloat16))
    assert (value.dtype, grad.dtype) == (jnp.float32, jnp.float32)
    wanted = 5 * 0.2 * 5  # the loss itself adds in bfloat16
    np.testing.assert_allclose((value, grad), wanted, rtol=2**-7)


@pytest.mark.sweep
def test_a_window_is_divided_by_the_counts_in_it():
    """`value` is each micro-batch's own quotient, and reaches the optimizer as their weighted mean."""
    values = []

    def spy(updates, state, params=None, *, value, **extra):
        jax.debug.callback(lambda v: values.append(float(v)), value)
        return updates, state

    inner = optax.chain(optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), spy), optax.sgd(1.0))
    tx = optax_accum.accumulate_gradients(inner, 3)
    step = jax.jit(optax_accum.value_and_apply_gradients(lambda w, x: (passed(w, x), len(x)), tx, has_aux=True))
    now, state = W, tx.init(W)
    for rows in (X[:2], X[2:9], X[9:]):
        (value, rows_seen), now, state = step(now, state, rows)
        ratio = passed(W, rows)
        np.testing.assert_allclose(value, ratio.total / jnp.maximum(ratio.count, 1), rtol=1e-6)
        assert rows_seen == len(rows)
    jax.effects_barrier()
    expected, grad = whole(passed, W, X)
    close((values[0], now), (expected, W - grad))
    assert state.gradient_step == 1


@pytest.mark.sweep
def test_another_optimizer_makes_an_update_of_each():
    now, _ = optax_accum.value_and_apply_gradients(passed, optax.sgd(1.0))(W, optax.sgd(1.0).init(W), X)[1:]
    close(now, W - whole(passed, W, X)[1])


@pytest.mark.sweep
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("number", [2.0, 2, np.float32(2)], ids=["Python", "integer", "NumPy"])
def test_a_loss_or_a_total_that_is_a_number(jit, number):
    tx = optax_accum.accumulate_gradients(optax.sgd(0.5), 1)
    for loss, has_aux in ((number, False), (optax_accum.Ratio(number, 1), False), ((number, X), True)):
        step = optax_accum.value_and_apply_gradients(lambda w, x, loss=loss: loss, tx, has_aux=has_aux)
        value, w, _ = (jax.jit(step) if jit else step)(W, tx.init(W), X)
        assert (value[0] if has_aux else value) == 2
        np.testing.assert_array_equal(w, W)
    step = optax_accum.value_and_apply_gradients(lambda w, x: jnp.int32(2), tx)
    with pytest.raises(TypeError, match=r"a real scalar loss, or a dict of them: the loss is int32\[\]"):
        step(W, tx.init(W), X)


@pytest.mark.sweep
def test_nothing_is_nan_on_the_way():
    """Outside `jit` `jax.debug_nans` looks at each operation."""
    loss = lambda w, x: Ratio(jnp.sum((x @ w) ** 2), jnp.sum(x > 0))
    with jax.debug_nans(True):
        close(optax_accum.value_and_grad(loss, **CUT)(W, X), whole(loss, W, X))


def test_a_window_in_which_nothing_counts_makes_no_update():
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 1)
    value, now, state = optax_accum.value_and_apply_gradients(passed, tx)(W, tx.init(W), jnp.zeros_like(X))
    assert value == 0
    np.testing.assert_array_equal(now, W)
    assert (state.gradient_step, state.discarded) == (0, 1)


@pytest.mark.sweep
@pytest.mark.xfail(strict=True, reason="a count that the model decides is known only when a loop is over")
def test_no_micro_batch_is_run_twice():
    def loss(w, x):
        h, _ = jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, w)
        return jnp.sum(h**2), (h > 0).sum()

    def loops(loss):
        step = jax.jit(optax_accum.value_and_grad(loss, num_microbatches=4))
        return programs.compiled(step.lower(jnp.ones((8, 32, 32)), jnp.ones((8, 32)))).as_text().count(" while(")

    assert loops(lambda *args: Ratio(*loss(*args))) == loops(lambda *args: loss(*args)[0])


def test_a_loss_that_calls_back_does_so_once():
    calls = []

    def loss(w, x):
        jax.debug.callback(lambda: calls.append(1))
        return passed(w, x)

    jax.jit(optax_accum.value_and_grad(loss, **CUT))(W, X)
    jax.effects_barrier()
    assert len(calls) == 1


def test_a_count_that_is_differentiated_is_exact_within_a_call():
    loss = lambda w, x: Ratio(x.sum() * w[0], jnp.sum(jax.nn.sigmoid(x @ w)))
    close(jax.jit(optax_accum.value_and_grad(loss, **CUT))(W, X), whole(loss, W, X))


@pytest.mark.sweep
def test_no_gradient_of_a_ratio_stands_beside_the_sum():
    """A loop that adds trees of gradients has one beside it."""

    def loss(w, x):
        h, _ = jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, w)
        return Ratio(jnp.sum(h**2), (h > 0).sum())

    w = jnp.ones((8, 32, 32)) / 8

    def by_hand(w, x):
        grad = jax.grad(lambda w, x: loss(w, x).total)
        add = lambda total, x: (total + grad(w, x), None)
        return jax.lax.scan(add, jnp.zeros_like(w), x.reshape(4, 2, -1))[0]

    ours = optax_accum.value_and_grad(loss, num_microbatches=4)
    temporary = lambda f: programs.compiled(jax.jit(f).lower(w, jnp.ones((8, 32)))).memory_analysis().temp_size_in_bytes
    assert temporary(by_hand) - temporary(ours) > 0.7 * w.nbytes


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda w, x: Ratio(x.sum() * w[0], jnp.sum(jax.nn.sigmoid(x @ w))), ValueError, "derivative.*stop_gradient"),
        (lambda w, x: Ratio(x @ w, x.size), TypeError, "real scalar loss.*float32.[48].. Reduce it"),
        (lambda w, x: Ratio(jnp.sum(x @ w), jnp.ones(2)), ValueError, "the count of a Ratio must be a scalar"),
        (lambda w, x: Ratio(jnp.sum(x @ w), jnp.bfloat16(2)), TypeError, "count of a Ratio must be counted.*32 bits"),
        (lambda w, x: Ratio(jnp.sum(x @ w), 1j), TypeError, "the count of a Ratio must be a real number"),
        (lambda w, x: {"a": Ratio(x.sum(), 1), "b": w.sum()}, TypeError, "a dict of nothing else: .*Ratio.total=rows"),
        (lambda w, x: {"a": {"b": Ratio(x.sum(), 1.0)}}, TypeError, "a dict of nothing else"),
        (
            lambda w, x: (Ratio(x.sum(), 1), Ratio(x.sum(), 1)),
            TypeError,
            "a dict of nothing else|returned a tuple of 2",
        ),
        (lambda w, x: {"a": Ratio(x @ w, x.size)}, TypeError, "real scalar loss.*'a'.*float32.[48].. Reduce it"),
    ],
    ids=["differentiable", "rows", "counts", "narrow", "complex", "a number beside it", "nested", "a tuple", "a term"],
)
def test_what_cannot_be_right_is_refused_within_a_call_and_across(loss, error, message):
    if "derivative" not in message:
        with pytest.raises(error, match=message):
            optax_accum.value_and_grad(loss, microbatch_size=4)(W, X[:8])
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2)
    with pytest.raises(error, match=message):
        optax_accum.value_and_apply_gradients(loss, tx)(W, tx.init(W), X[:4])


@pytest.mark.parametrize(
    ("tx", "options", "extra", "message"),
    [
        (2, {"weight_fn": lambda x: 1.0}, {}, "A Ratio brings the weight of a micro-batch: weight_fn is given"),
        (2, {}, {"weight": 3.0}, "A Ratio brings the weight of a micro-batch: weight is given"),
        ("sum", {}, {}, 'the optimizer takes a sum: reduction="sum"'),
    ],
    ids=["weight_fn", "weight", "sum"],
)
def test_two_denominators_are_refused(tx, options, extra, message):
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2, reduction="sum" if tx == "sum" else "mean")
    with pytest.raises(ValueError, match=message):
        optax_accum.value_and_apply_gradients(passed, tx, **options)(W, tx.init(W), X, **extra)


@pytest.mark.sweep
def test_the_remedies_for_a_count_with_a_derivative():
    """Held constant, or differentiated: rows of `microbatched`."""
    soft = lambda w, x: (jnp.tanh(x @ w) ** 2 * jax.nn.sigmoid(x @ w), jax.nn.sigmoid(x @ w))

    def held(w, x):
        total, count = map(jnp.sum, soft(w, x))
        return Ratio(total, jax.lax.stop_gradient(count))

    close(jax.jit(optax_accum.value_and_grad(held, **CUT))(W, X), whole(held, W, X))

    def exact(rows):
        def loss(w, x):
            totals, counts = rows(w, x)
            return totals.sum() / counts.sum()

        return jax.jit(jax.value_and_grad(loss))(W, X)

    close(exact(optax_accum.microbatched(soft, **CUT)), exact(soft))
    assert not np.allclose(exact(soft)[1], whole(held, W, X)[1], rtol=1e-2)


# Leaves whose backward pass returns new values in the place of gradients.


@jax.custom_vjp
def noted(x, largest, last):
    return x


def _noted(x, largest, last):
    return x, x


noted.defvjp(_noted, lambda x, g: (g, jnp.max(jnp.abs(x)), x.ravel()[-1]))
LEAVES = {"w": W, "stats": {"largest": jnp.float32(7), "last": jnp.float32(8)}}


def noting(params, x):
    return jnp.mean((noted(x, **params["stats"]) @ params["w"]) ** 2)


@pytest.mark.parametrize("form", [*sweep(["mean"]), "Ratio"])
def test_leaves_that_are_no_gradients_are_those_of_the_whole_batch(form):
    """A Ratio divides only gradients."""
    loss = noting if form == "mean" else lambda p, x: Ratio(noting(p, x) * len(x), len(x))
    close(jax.jit(optax_accum.value_and_grad(loss, **CUT))(LEAVES, X), jax.value_and_grad(noting)(LEAVES, X))


def test_the_largest_of_all_devices():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        _, grads = jax.jit(optax_accum.value_and_grad(noting, 2, devices="data"))(LEAVES, X)
    close(grads, jax.grad(noting)(LEAVES, X))
