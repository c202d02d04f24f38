"""Rows that devices do not share evenly: halves of a batch run on all rows; groups on two devices are named."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import optax_accum
from tests.tiers import sweep

DEVICES, ROWS = 4, 12  # three rows on each: half of all rows are no whole number there
RNG = np.random.RandomState(0)
W = jnp.asarray(RNG.randn(4, 4), jnp.float32)
X = jnp.asarray(RNG.randn(ROWS, 4), jnp.float32)


def hidden(w, x):
    return jnp.tanh(x @ w)


def first_half(w, x):
    h = hidden(w, x)
    return jnp.mean(h[: len(x) // 2] ** 2) + jnp.mean(h)


def normalised(w, x):
    h = hidden(w, x)
    h = h - h.mean(0, keepdims=True)
    return jnp.mean(jnp.cumsum(h[: len(x) // 2], 0) ** 2) + jnp.mean(h**3)


def turned(w, x):
    h, half = hidden(w, x), len(x) // 2
    return jnp.mean(jnp.concatenate([2 * h[half:], h[:half]]) * h)


def numbered(w, x):
    h, half = hidden(w, x), len(x) // 2
    return jnp.mean((h[:half] - h[half:]) ** 2 * jnp.arange(half)[:, None]) + jnp.mean(jnp.sin(h))


def a_constant(w, x):
    half = len(x) // 2
    return jnp.mean(hidden(w, x)[:half] * np.linspace(0, 1, half, dtype=np.float32)[:, None])


def contrastive(w, x):
    h, half = hidden(w, x), len(x) // 2
    return jnp.mean(jax.nn.logsumexp(h[:half] @ h[half:].T, axis=1)) + jnp.mean(h**2)


def in_a_branch(w, x):
    h, half = hidden(w, x), len(x) // 2
    return jax.lax.cond(jnp.sum(h) > 0, lambda h: jnp.mean(h[:half] ** 2), lambda h: jnp.mean(h[half:]), h)


def in_a_loop(w, x):
    h = hidden(w, x)
    return jnp.mean(jax.lax.fori_loop(0, 2, lambda i, h: jnp.sin(h), h[: len(x) // 2]) ** 2) + jnp.mean(h)


HALVES = [first_half, normalised, turned, numbered, a_constant, contrastive, in_a_branch, in_a_loop]
KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}


def over_devices(loss, number, kind="Auto", **options):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(KINDS[kind],), devices=jax.devices()[:DEVICES])
    with jax.set_mesh(mesh):
        return jax.jit(optax_accum.value_and_grad(loss, number, devices="data", **options))(W, X)


@pytest.mark.parametrize("number", [*sweep([1]), 3])
@pytest.mark.parametrize("loss", sweep(HALVES, but=[in_a_loop]), ids=lambda loss: loss.__name__)
def test_half_of_the_rows_is_gathered(loss, number):
    """A mean over it was refused: "a group of rows must be on one device"."""
    value, grad = over_devices(loss, number)
    expected, gradient = jax.value_and_grad(loss)(W, X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.sweep
def test_half_of_the_rows_on_an_explicit_mesh():
    value, grad = over_devices(first_half, 3, "Explicit")
    expected, gradient = jax.value_and_grad(first_half)(W, X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, gradient, rtol=1e-5, atol=1e-6)


def test_half_of_the_rows_as_an_output():
    with_aux = lambda w, x: (first_half(w, x), hidden(w, x)[: len(x) // 2])
    (_, half), _ = over_devices(with_aux, 3, has_aux=True)
    np.testing.assert_allclose(half, hidden(W, X)[: ROWS // 2], rtol=1e-6)


def groups(w, x, size=2):
    return jnp.mean(hidden(w, x).reshape(-1, size, 4).max(1))  # here


def groups_in_layers(w, x):
    def layer(h, _):
        means = h.reshape(-1, 2, 4).mean(1, keepdims=True)  # here
        return jnp.tanh(h @ w) + jnp.broadcast_to(means, (len(x) // 2, 2, 4)).reshape(h.shape), None

    return jnp.mean(jax.lax.scan(layer, x, None, length=2)[0])


def half_in_layers(w, x):
    def layer(h, _):
        return jnp.tanh(h @ w) - h[: len(x) // 2].mean(0, keepdims=True), None  # here

    return jnp.mean(jax.lax.scan(layer, x, None, length=2)[0])


def by_map(w, x, size=2):
    return jnp.mean(jax.lax.map(lambda row: jnp.tanh(row @ w), x, batch_size=size))  # here


def line_of(loss):
    lines, first = inspect.getsourcelines(loss)
    (at,) = [number for number, line in enumerate(lines, start=first) if "# here" in line]
    return f"test_dealing.py:{at}"


@pytest.mark.parametrize(
    ("loss", "what", "remedy"),
    [
        (groups, "reshape", "Give each device a multiple of 2 rows, or take fewer devices."),
        (groups_in_layers, "reshape", "Give each device a multiple of 2 rows, or take fewer devices."),
        (half_in_layers, "slice", "Give each device a multiple of 2 rows, or take fewer devices."),
        (by_map, "lax.map with a batch_size", "Take a batch_size that divides 3, or jax.vmap: "),
    ],
    ids=lambda loss: getattr(loss, "__name__", ""),
)
def test_a_group_on_two_devices_is_named(loss, what, remedy):
    says = (
        f"must be on one device: {what} at {line_of(loss)} takes 2 rows together, and each of 4 devices has 3. {remedy}"
    )
    with pytest.raises(ValueError, match=re.escape(says)):
        over_devices(loss, 3)


@pytest.mark.parametrize(
    "loss",
    [
        *sweep([lambda w, x: groups(w, x, 3), lambda w, x: by_map(w, x, 3)]),
        lambda w, x: jnp.mean(jax.vmap(lambda row: jnp.tanh(row @ w))(x)),
    ],
    ids=["groups", "map", "vmap"],
)
def test_the_remedies(loss):
    value, grad = over_devices(loss, 3)
    expected, gradient = jax.value_and_grad(loss)(W, X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, gradient, rtol=1e-5, atol=1e-6)
