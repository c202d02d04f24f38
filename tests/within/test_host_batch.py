"""A batch in the memory of the host: each micro-batch is brought to the device, and nothing else of it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from tests.problems import normal
from tests.tiers import sweep
from tests.versions import since

pytestmark = since(0, 10, why="offload")
PARAMS = {"w": normal(0, 6, 4)}


def batch_of(rows):
    return {"x": normal(1, rows, 6), "y": normal(2, rows), "mask": np.arange(rows) % 3 > 0}


def loss(params, batch):
    """A masked mean over normalised rows, and one over pairs of rows, which are whole."""
    h = jnp.tanh(batch["x"] @ params["w"])
    h = (h - h.mean(0)[None]) / (h.std(0)[None] + 1e-3)
    of_rows = jnp.sum(batch["mask"] * (h.sum(1) - batch["y"]) ** 2) / jnp.sum(batch["mask"])
    return of_rows + jnp.mean(jax.nn.logsumexp(h @ h.T, axis=1))


WAYS = {
    "value_and_grad": optax_accum.value_and_grad,
    "microbatched": lambda loss, k, **options: jax.value_and_grad(optax_accum.microbatched(loss, k, **options)),
}


def assert_whole(found, batch):
    value, grads = jax.value_and_grad(loss)(PARAMS, batch)
    np.testing.assert_allclose(found[0], value, rtol=1e-5)
    np.testing.assert_allclose(found[1]["w"], grads["w"], rtol=1e-4, atol=1e-6)


CASES = list(itertools.product(WAYS, [(16, 4), (14, 4), (16, 1)], ["jit", "eager"]))


@pytest.mark.sweep
@pytest.mark.parametrize(("way", "sizes", "how"), sweep(CASES, but=[("value_and_grad", (14, 4), "jit")]))
def test_the_gradient_is_that_of_the_whole_batch(way, sizes, how):
    rows, k = sizes
    batch, run = batch_of(rows), jax.jit if how == "jit" else lambda fun: fun
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    assert_whole(run(WAYS[way](loss, k))(PARAMS, jax.device_put(batch, host)), batch)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("way", "kind"), sweep(itertools.product(WAYS, ["Auto", "Explicit"]), but=[("microbatched", "Explicit")])
)
def test_over_devices(way, kind):
    batch, axes = batch_of(16), (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((2,), ("data",), axis_types=axes, devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        given = jax.device_put(batch, NamedSharding(mesh, P("data"), memory_kind="pinned_host"))
        found = jax.jit(WAYS[way](loss, 4, devices="data"))(PARAMS, given)
    assert_whole(found, batch)
