"""The statistics of gradients that the batch alone decides, wholly or in part: they vary between micro-batches, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_accum
from optax_accum import statistics
from tests.problems import normal

PARAMS = {"w": normal(0, 6, 4), "b": normal(1, 3)}
X = normal(2, 16, 6)


def linear(params, x):
    return jnp.mean((x @ params["w"]) ** 2) + jnp.mean(x[:, :3] @ params["b"])


def linear_and_more(params, x):
    return linear(params, x) + jnp.mean(jnp.sin(x[:, :3] @ params["b"]))


def with_decay(params, x):
    return linear_and_more(params, x) + jnp.sum(params["w"] ** 2) + jnp.sum(params["b"] ** 2)


def of_a_sum(params, x):
    """Two parameters have one sum, times 1 and times 2."""
    return jnp.mean((x @ (params["w"] + 2 * jnp.pad(params["b"], (3, 0))[:, None])) ** 3)


@pytest.mark.parametrize("loss", [linear, linear_and_more, with_decay])
def test_each_micro_batch_has_its_own(loss):
    by_name = statistics.Options(groups={"w": "w", "b": "b"})
    run = optax_accum.value_and_grad(loss, 4, statistics=by_name)
    ((_, found), _) = jax.jit(run)(PARAMS, X)
    parts = [jax.grad(loss)(PARAMS, X[i::4]) for i in range(4)]
    whole = jax.grad(loss)(PARAMS, X)
    for name in PARAMS:
        spread = np.mean([np.sum((part[name] - whole[name]) ** 2) for part in parts])
        np.testing.assert_allclose(found.noise[name], spread / (1 / 4 - 1 / 16), rtol=1e-4)


def of_a_count(params, x):
    """What divides the loss is there before the first loop; here it is a part of a gradient as well."""
    count = jnp.sum(x[:, 0] > 0)
    mean = jnp.sum((x[:, 0] > 0) * (x @ params["w"])[:, 0] ** 2) / count
    return mean + jnp.sin(params["b"].sum() * x[:, 0]).mean() + count * params["b"].sum()


@pytest.mark.parametrize("loss", [of_a_sum, of_a_count])
def test_gradients_that_no_micro_batch_has_are_refused(loss):
    run = optax_accum.value_and_grad(loss, 4, statistics=statistics.Options(groups={"w": "w", "b": "b"}))
    with pytest.raises(ValueError, match="micro-batches have none of their own.*Leave statistics out"):
        jax.jit(run)(PARAMS, X)


@pytest.mark.parametrize("overlap", [None, True])
def test_over_devices_such_a_gradient_is_the_whole_batch_s(overlap):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    run = optax_accum.value_and_grad(linear_and_more, 4, devices=optax_accum.Devices("data", overlap=overlap))
    of_linear = optax_accum.value_and_grad(linear, 4, devices=optax_accum.Devices("data", overlap=overlap))
    with jax.set_mesh(mesh):
        found = jax.jit(run)(PARAMS, X)[1], jax.jit(of_linear)(PARAMS, X)[1]
    for grads, loss in zip(found, (linear_and_more, linear), strict=True):
        whole = jax.grad(loss)(PARAMS, X)
        for name in PARAMS:
            np.testing.assert_allclose(grads[name], whole[name], rtol=2e-5, atol=1e-6)
