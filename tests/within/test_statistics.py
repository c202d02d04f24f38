"""The statistics of gradients that the batch alone decides, wholly or in part: they vary between micro-batches, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_accum
from optax_accum import statistics
from tests.problems import normal
from tests.tiers import sweep

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


def scaled(params, x):
    """A parameter scales a mean, whose gradient is that mean: a sum, and 1 / n."""
    return params["b"][0] * jnp.mean((x @ params["w"]) ** 2)


def repeated(params, x):
    """Each entry has the same gradient, of their sum."""
    return jnp.mean((x @ params["w"]) ** 2) + jnp.mean(jnp.sin(params["b"].sum() * x[:, 0]))


@pytest.mark.parametrize("loss", sweep([linear, with_decay, linear_and_more, scaled, repeated], but=[scaled]))
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


def of_a_scaled_sum(params, x):
    """How much the sum over all rows changes the loss, no micro-batch tells: it is there after the loop."""
    total = params["b"][0] * jnp.sum(jax.nn.sigmoid(x @ params["w"]))
    return total / (total + len(x))


@pytest.mark.parametrize("loss", [of_a_sum, of_a_count, of_a_scaled_sum])
def test_gradients_that_no_micro_batch_has_are_refused(loss):
    run = optax_accum.value_and_grad(loss, 4, statistics=statistics.Options(groups={"w": "w", "b": "b"}))
    with pytest.raises(ValueError, match=r"none of their own: that of argnums\[0\]\['b'\] .*Leave statistics out"):
        jax.jit(run)(PARAMS, X)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "of_rows", [lambda params, x: params["b"].sum() * x[:, 0], *sweep([lambda params, x: x @ params["w"]])]
)
def test_a_micro_batch_has_its_part_of_the_gradient_of_a_ratio(of_rows):
    """Of an intersection over a union: its denominator is that of all rows."""
    ratio = lambda i: i / (i + len(X))
    loss = lambda params, x: ratio(jnp.sum(jax.nn.sigmoid(of_rows(params, x))))
    (_, found), _ = jax.jit(optax_accum.value_and_grad(loss, 4, statistics=True))(PARAMS, X)

    def by_part(copies):
        return ratio(sum(jnp.sum(jax.nn.sigmoid(of_rows(copy, X[i::4]))) for i, copy in enumerate(copies)))

    parts = [jax.tree.map(lambda leaf: 4 * leaf, part) for part in jax.grad(by_part)([PARAMS] * 4)]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 4, *parts)
    spread = sum(np.sum((part[name] - mean[name]) ** 2) / 4 for part in parts for name in PARAMS)
    np.testing.assert_allclose(found.noise["all"], spread / (1 / 4 - 1 / 16), rtol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("overlap", [None, *sweep([True])])
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
