"""Devices that a micro-batch weighs nothing for run it all the same where others may wait for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_accum
from tests import paths, programs
from tests.engine import compilers

ROWS, WIDTH = 8, 4
W = np.random.default_rng(0).normal(size=(3, WIDTH)).astype("f")
BATCH = {
    "x": np.random.default_rng(1).normal(size=(ROWS, 3)).astype("f"),
    "mask": np.float32([1, 1, 0, 1, 0, 0, 0, 0]),  # the rows of one device count, and those of the other do not
}
tokens = paths.count


def placed(mesh):
    return paths.on_mesh(mesh, W, P(None, "tp")), paths.on_mesh(mesh, BATCH, P("data"))


def total(w, batch):
    rolled = jnp.roll(batch["x"] @ w, 1, axis=-1)  # over "tp": a permute
    return jnp.sum(batch["mask"] * jnp.sum(rolled**2 * jnp.arange(WIDTH)[None], axis=-1))


def loss(w, batch):
    return total(w, batch) / jnp.sum(batch["mask"])  # 0 / 0 on one device


def counted(w, batch):
    return optax_accum.Ratio(total(w, batch), jnp.sum(batch["mask"]))


def counted_or_nan(w, batch):
    """A gradient of NaN where nothing counts."""
    count = jnp.sum(batch["mask"])
    return optax_accum.Ratio(total(w, batch) * (count / count), count)


def within(loss, options, w, batch):
    return optax_accum.value_and_grad(loss, 2, devices="data", **options)(w, batch)[1]


def accumulated(loss, options, w, batch):
    return optax_accum.reduce_microbatches(jax.grad(loss), 2, devices="data", **options)(w, batch)


def with_a_carry(loss, options, w, batch):
    carrying = lambda w, batch, carry: (jax.grad(loss)(w, batch), carry + 1)
    run = optax_accum.reduce_microbatches(carrying, 2, devices="data", carry_argnum=2, **options)
    grad, carry = run(w, batch, jnp.zeros([]))
    return grad + 0 * carry


def across(loss, options, w, batch):
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 1 + 1, devices="data")
    step = optax_accum.value_and_apply_gradients(loss, tx, **options)
    now, state = w, tx.init(w)
    for _ in range(2):
        _, now, state = step(now, state, batch)
    return w - now


WEIGHED = {"weight_fn": tokens}
WAYS = {
    "value_and_grad": (within, loss, {}),
    "a carry": (with_a_carry, loss, WEIGHED),
    "reduce_microbatches": (accumulated, loss, WEIGHED),
    "across": (across, loss, WEIGHED),
    "across, a Ratio": (across, counted, {}),
    "across, a Ratio of NaN": (across, counted_or_nan, {}),
}


def varying_choices(program):
    """Returns the loops and branches that one device may run and another not."""
    found = []
    for equation in programs.equations(program):
        if equation.primitive.name == "cond":
            asked = [equation.invars[0].aval]
        elif equation.primitive.name == "while":
            asked = [var.aval for var in equation.params["cond_jaxpr"].jaxpr.outvars]
        else:
            continue
        found += [equation.primitive.name for aval in asked if compilers.varying_axes(aval)]
    return found


@pytest.mark.sweep
@pytest.mark.parametrize(("way", "fun", "options"), WAYS.values(), ids=WAYS)
def test_no_device_skips_what_others_wait_for(way, fun, options):
    """Else this test would hang, or end Python."""
    run, mesh = functools.partial(way, fun, options), paths.mesh_with_tp(2, 2)
    with jax.set_mesh(mesh):
        assert not varying_choices(jax.make_jaxpr(run)(*placed(mesh)).jaxpr)
        grad = jax.jit(run)(*placed(mesh))
    np.testing.assert_allclose(np.asarray(grad), jax.grad(loss)(W, BATCH), rtol=1e-5)


@pytest.mark.sweep
def test_nor_does_it_where_the_loss_permutes_over_another_axis_in_a_shard_map():
    around = lambda leaf: jax.lax.ppermute(leaf, "tp", [(0, 1), (1, 0)])
    mean = lambda w, batch: jnp.sum(batch["mask"] * jnp.sum((batch["x"] @ w) ** 2, -1)) / tokens(batch)
    permuting = lambda w, batch: jax.lax.psum(mean(around(w), batch), "tp")
    mesh = paths.mesh_with_tp(2, 2)
    run = jax.shard_map(
        functools.partial(across, permuting, WEIGHED),
        mesh=mesh,
        in_specs=(P(None, "tp"), P("data")),
        out_specs=P(None, "tp"),
    )
    with jax.set_mesh(mesh):
        assert not varying_choices(jax.make_jaxpr(run)(*placed(mesh)).jaxpr)
        grad = jax.jit(run)(*placed(mesh))
    np.testing.assert_allclose(np.asarray(grad), jax.grad(mean)(W, BATCH), rtol=1e-5)


def test_where_nobody_waits_a_device_skips_them():
    mesh = paths.mesh_with_tp(2, 1)
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(functools.partial(accumulated, loss, WEIGHED))(*placed(mesh))
    assert varying_choices(program.jaxpr)
