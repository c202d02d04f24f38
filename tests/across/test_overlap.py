"""The last backward pass of a window adds its sums over the devices: a static flush, the same numbers, one reduction."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from optax_accum.sharding import count_collectives
from tests.tiers import sweep
from tests.versions import since
from tests.within.test_overlap import BATCH, LAYERS, LOSSES, MESHES, PARAMS, SHARDS, WIDTH, mean, over_mask

pytestmark = since(0, 11, why="overlapping")


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, cotangent: (jnp.clip(cotangent, -0.01, 0.01),))

WAYS = {  # a loss, options of the step, options of the optimizer and of its devices
    "mean": (mean, {}, {}),
    "weights": (over_mask, {"weight_fn": lambda batch: batch["mask"].sum()}, {}),
    "to shards": (mean, {}, {"to": SHARDS["rows"]}),
    "a shard of layers": (mean, {}, {"to": {"layers": P(), "shared": P("data")}}),
    "statistics": (mean, {}, {"statistics": True}),
    "discard": (mean, {}, {"nonfinite": "discard"}),
    "sum": (lambda *args: 0.01 * mean(*args), {"exact": False}, {"reduction": "sum"}),
    "a clip in the backward pass": (
        lambda *args: clipped(3.0 * mean(*args)),
        {"weight_fn": lambda batch: len(batch["x"])},
        {},
    ),
    "in bfloat16": (mean, {}, {"dtype": jnp.bfloat16}),
    "Ratio": (LOSSES["Ratio"], {}, {"statistics": True}),
    "Ratio, to shards": (LOSSES["Ratio"], {}, {"to": SHARDS["rows"]}),
}


def made(fun, mesh, options, params=PARAMS, every=None, *, to=None, dtype=None, overlap=None, **of_tx):
    """A step that is jitted, what it begins with, and a batch of 32 rows on the mesh."""
    shape, types = MESHES[mesh]
    mesh = jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=types)
    devices = optax_accum.Devices("data", to=to, dtype=dtype, overlap=overlap)
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1, momentum=0.9), every, devices=devices, **of_tx)
    with jax.set_mesh(mesh):
        params = jax.device_put(jax.device_get(params), NamedSharding(mesh, P()))  # they are donated
        placed = optax_accum.sharding.state_sharding(tx, params)
        carry = params, jax.jit(tx.init, out_shardings=placed)(params)
        step = optax_accum.value_and_apply_gradients(fun, tx, **options)
        out = (None, jax.tree.map(lambda leaf: leaf.sharding, params), placed)
        step = jax.jit(step, static_argnames="flush", donate_argnums=(0, 1), out_shardings=out)
        return mesh, step, carry, lambda batch: jax.device_put(batch, NamedSharding(mesh, P("data")))


def trained(fun, mesh="Auto", options=None, masks=(None,) * 3, **of_tx):
    """Parameters, the state and losses after windows of three micro-batches, one for each mask of the last."""
    mesh, step, (params, state), placed = made(fun, mesh, options or {}, **of_tx)
    losses = []
    with jax.set_mesh(mesh):
        for number, mask in enumerate(masks):
            for index in range(3) if number != 1 else (2,):  # the second has one micro-batch
                batch = {**BATCH, "x": jnp.roll(BATCH["x"], 5 * number + 7 * index, axis=0)}
                batch = batch if index < 2 or mask is None else {**batch, "mask": jnp.asarray(mask, jnp.float32)}
                loss, params, state = step(params, state, placed(batch), flush=index == 2)
                losses.append(loss)
    return jax.device_get((params, state._replace(acc_grads=None), losses))


@pytest.mark.sweep
@pytest.mark.parametrize("way", sweep(WAYS, but=["to shards", "in bfloat16"]))
def test_three_windows_are_those_whose_sums_are_reduced_after(way):
    fun, options, of_tx = WAYS[way]
    now, want = (trained(fun, options=options, overlap=flag, **of_tx) for flag in (True, False))
    error = 2**-8 if way == "in bfloat16" else 1e-6
    chex.assert_trees_all_close(now, want, rtol=10 * error, atol=error)


@functools.cache
def of_one_mesh():
    return trained(mean, overlap=False)


@pytest.mark.parametrize("mesh", sweep(MESHES))
def test_on_every_mesh(mesh):
    chex.assert_trees_all_close(trained(mean, mesh, overlap=True), of_one_mesh(), rtol=1e-5, atol=1e-6)


def of_nothing(params, batch):
    """Its total is a NaN where nothing counts."""
    count = jnp.sum(batch["mask"])
    return optax_accum.Ratio(count * over_mask(params, batch), count)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("fun", "options"), [*sweep([WAYS["weights"][:2]]), (of_nothing, {})], ids=["weights", "Ratio"]
)
def test_the_last_micro_batch_may_weigh_nothing(fun, options):
    """Its loss is 0 / 0 on one device, or on all: it is run, and nothing comes of it. Its value is as without overlap."""
    device, rows = np.arange(32) // 8, np.arange(32)
    masks = [(rows % 3 > 0) & (device > 0), np.zeros(32, bool), device == 2]
    now, want = (trained(fun, options=options, masks=masks, overlap=flag) for flag in (True, False))
    chex.assert_tree_all_finite(now[:2])
    chex.assert_trees_all_close(now, want, rtol=1e-5, atol=1e-6)  # values, too: NaN of a Ratio, 0 of a weight of 0


@pytest.mark.sweep
def test_a_nan_in_a_shard_of_a_device_that_weighs_nothing_is_discarded():
    """The shard that it keeps is of the sum of all."""
    batch = {**BATCH, "x": BATCH["x"].at[9].set(jnp.nan)}
    for overlap in (True, False):
        options = {"weight_fn": lambda batch: batch["mask"].sum()}
        of_tx = {"to": SHARDS["rows"], "overlap": overlap, "nonfinite": "discard"}
        mesh, step, (params, state), placed = made(mean, "Auto", options, **of_tx)
        batch["mask"] = (jnp.arange(32) >= 8).astype(jnp.float32)
        with jax.set_mesh(mesh):
            _, params, state = step(params, state, placed(batch), flush=True)
        chex.assert_trees_all_equal(jax.device_get(params), jax.device_get(PARAMS))
        assert (state.discarded, state.gradient_step) == (1, 0)


@pytest.mark.sweep
@pytest.mark.parametrize("of_tx", [{"every": 1}, {"nonfinite": "skip"}, {"accumulator_dtype": jnp.bfloat16}], ids=str)
def test_by_default_nothing_is_asked_where_gradients_are_added_after(of_tx):
    """Not even how the sums are sharded: without an accumulator there are none."""
    of_tx = {"every": None, **of_tx}
    mesh, step, carry, placed = made(mean, "Auto", {}, to=SHARDS["rows"], **of_tx)
    with jax.set_mesh(mesh):
        _, params, _ = step(*carry, placed(BATCH), flush=True)
    grads = jax.grad(mean)(PARAMS, BATCH)
    want = jax.tree.map(lambda param, grad: param - 0.1 * grad, PARAMS, grads)
    chex.assert_trees_all_close(
        jax.device_get(params), want, rtol=1e-2, atol=1e-2 if "accumulator_dtype" in of_tx else 1e-6
    )


@pytest.mark.sweep
def test_each_layer_is_reduced_inside_the_backward_pass_that_closes_the_window():
    found = {}
    for overlap in (True, False):
        mesh, step, carry, placed = made(mean, "Auto", {}, overlap=overlap)
        with jax.set_mesh(mesh):
            closing, holding = (step.lower(*carry, placed(BATCH), flush=flag).compile() for flag in (True, False))
        found[overlap] = count_collectives(closing)
        assert not count_collectives(holding).operations
    (layer,) = found[True].select(place="loop").operations
    assert (layer.times, layer.bytes) == (LAYERS, 4 * WIDTH * WIDTH)
    assert not found[False].select(place="loop").operations
    assert found[True].bytes == found[False].bytes


def test_inside_a_shard_map_without_types():
    """Three micro-steps, the last of which closes the window."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    results = []
    for overlap in (True, False):
        devices = optax_accum.Devices("data", overlap=overlap)
        tx = optax_accum.accumulate_gradients(optax.sgd(0.1, momentum=0.9), None, devices=devices)
        step = optax_accum.value_and_apply_gradients(mean, tx)

        def window(params, *batches, tx=tx, step=step):
            state = tx.init(params)
            for batch in batches[:-1]:
                _, params, state = step(params, state, batch, flush=False)
            return step(params, state, batches[-1], flush=True)[1]

        specs = (P(), *[P("data")] * 3)
        run = jax.jit(jax.shard_map(window, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
        args = (PARAMS, *({**BATCH, "x": jnp.roll(BATCH["x"], shift, axis=0)} for shift in (0, 5, 9)))
        results.append(jax.device_get(run(*args)))
        assert bool(count_collectives(run.lower(*args).compile()).select(place="loop").operations) == overlap
    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("fun", "of_tx", "flush", "needs"),
    [
        (mean, {"every": 3}, None, "a Python bool as flush.*flush=None"),
        (mean, {"nonfinite": "skip"}, True, "gradients that are added inside the backward pass"),
    ],
    ids=["every=3", "skip"],
)
def test_where_it_cannot_be_an_error_says_what_it_needs(fun, of_tx, flush, needs):
    of_tx = {"every": None, "devices": optax_accum.Devices("data", overlap=True), **of_tx}
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), **of_tx)
    step = functools.partial(optax_accum.value_and_apply_gradients(fun, tx), flush=flush)
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))):
        state = jax.jit(tx.init)(PARAMS)
        with pytest.raises(ValueError, match=f"overlap=True needs .*{needs}.*Leave overlap=None"):
            jax.jit(step)(PARAMS, state, BATCH)
