"""Losses of several terms, each over a count that only the loss knows: what they cost, and where they are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from optax_accum import Ratio
from tests import programs
from tests.loss.test_ratio import CUT, W, X, close, passed, whole


def near(w, x):
    """Two terms: one has counts that the parameters decide, and none in some micro-batches."""
    score = x @ w
    return {"policy": passed(w, x), "kl": Ratio(jnp.sum(jnp.where(score > 2, score**2, 0)), jnp.sum(score > 2))}


@pytest.mark.sweep
def test_each_term_is_divided_by_its_own_count():
    f = jax.jit(optax_accum.value_and_grad(near, **CUT))
    close(f(W, X), whole(near, W, X))
    value, grad = f(W, 0.4 * X)  # of one term nothing counts
    assert near(W, 0.4 * X)["kl"].count == 0
    close((value, grad), whole(passed, W, 0.4 * X))
    close(f(W, jnp.zeros_like(X)), (0.0, jnp.zeros(3)))
    assert not np.allclose(whole(near, W, X)[1], whole(passed, W, X)[1], rtol=1e-2)


@pytest.mark.sweep
def test_partial_sums_of_terms_are_each_device_s_own():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    f = optax_accum.value_and_grad(near, num_microbatches=5, devices=optax_accum.Devices("data", to="partial"))
    with jax.set_mesh(mesh):
        values, grads = jax.jit(f)(W, np.concatenate([X, 2 * X]))
    for own in range(2):
        close((values[own], grads[own]), whole(near, W, (1 + own) * X))


@pytest.mark.sweep
def test_terms_are_differentiated_again():
    value = lambda f: lambda w: f(w, X)[0]
    cut = jax.hessian(value(optax_accum.value_and_grad(near, **CUT)))(W)
    close(cut, jax.hessian(value(lambda w, x: whole(near, w, x)))(W))


def counted(count):
    """A deep loss of two terms, whose counts come from the parameters or from the data."""

    def loss(w, x):
        h, _ = jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, w)
        return {"a": Ratio(jnp.sum(h**2), count(h, x)), "b": Ratio(jnp.sum(h), h.size)}

    return loss


@pytest.mark.sweep
@pytest.mark.parametrize("turns", [1, 2])
def test_counts_run_the_loss_forward_once_more_as_far_as_they_need_it(turns):
    """And no accumulator of their own is made."""
    of_data, of_both = counted(lambda h, x: jnp.sum(x > 0)), counted(lambda h, x: jnp.sum(h > 0))
    one = lambda w, x: Ratio(of_data(w, x)["a"].total, jnp.sum(x > 0))
    w, x = jnp.ones((8, 32, 32)) / 8, jnp.ones((8, 32))

    def compiled(loss):
        return programs.compiled(jax.jit(optax_accum.value_and_grad(loss, num_microbatches=4)).lower(w, x))

    program, single = compiled(of_data if turns == 1 else of_both), compiled(one)
    forward = lambda program: program.as_text().count(" tanh(")
    assert forward(program) == forward(single) + turns - 1
    temporary = lambda program: program.memory_analysis().temp_size_in_bytes
    assert temporary(program) < temporary(single) + 0.3 * w.nbytes


def test_terms_are_refused_over_calls_with_what_to_do():
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2)
    with pytest.raises(
        TypeError, match=r"Across calls .* the terms \['kl', 'policy'\].*let value_and_grad split the whole"
    ):
        optax_accum.value_and_apply_gradients(near, tx)(W, tx.init(W), X)
    of_means = lambda w, x: {"a": jnp.mean(x @ w), "b": jnp.sum(w)}
    with pytest.raises(TypeError, match=r"the terms \['a', 'b'\]. Return their sum"):
        optax_accum.value_and_apply_gradients(of_means, tx)(W, tx.init(W), X)


@pytest.mark.sweep
def test_statistics_of_terms():
    (value, statistics), grad = jax.jit(optax_accum.value_and_grad(near, statistics=True, **CUT))(W, X)
    close((value, grad), whole(near, W, X))
    close(statistics.squares, {"all": jnp.sum(grad**2)})


@pytest.mark.sweep
def test_the_remedy_for_a_mean_beside_a_ratio():
    loss = lambda w, x: {"a": passed(w, x), "b": Ratio(len(x) * jnp.mean((x @ w) ** 2), len(x))}
    close(jax.jit(optax_accum.value_and_grad(loss, **CUT))(W, X), whole(loss, W, X))
