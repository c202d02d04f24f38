"""The last micro-batch's gradient, added over the devices where it arises: the same numbers, in one reduction."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from optax_accum.sharding import count_collectives
from tests.pairs import every_pair
from tests.problems import normal
from tests.tiers import one_of_each, sweep
from tests.versions import since

pytestmark = since(0, 11, why="overlapping")

LAYERS, WIDTH, ROWS = 3, 8, 32
PARAMS = {
    "layers": normal(0, LAYERS, WIDTH, WIDTH) / WIDTH**0.5,
    "shared": normal(1, WIDTH),
}
BATCH = {  # a mask of bools would be a select to XLA, whose 0 / 0 is 0
    "x": normal(2, ROWS, WIDTH),
    "mask": jnp.asarray(np.arange(ROWS) % 3 > 0, jnp.float32),
}
MESHES = {
    "Auto": ((4,), (AxisType.Auto,)),
    "Explicit": ((4,), (AxisType.Explicit,)),
    "Auto beside Explicit": ((4, 2), (AxisType.Auto, AxisType.Explicit)),
    "Explicit beside Auto": ((4, 2), (AxisType.Explicit, AxisType.Auto)),
    "beside Auto": ((4, 2), (AxisType.Auto, AxisType.Auto)),
}
SIZES = [{"num_microbatches": 4}, {"microbatch_size": 12}, {"num_microbatches": 1}]


def errors(params, batch):
    def layer(x, w):
        return jnp.tanh(x @ w + params["shared"][None]), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], params["layers"])
    return jnp.sum((x * params["shared"][None]) ** 2, 1)


def mean(params, batch):
    return jnp.mean(errors(params, batch))


def over_mask(params, batch):
    return jnp.sum(batch["mask"] / jnp.sum(batch["mask"]) * errors(params, batch))  # 0 / 0 where nothing counts


def ratio(params, batch):
    return optax_accum.Ratio(jnp.sum(batch["mask"] * errors(params, batch)), jnp.sum(batch["mask"]))


LOSSES = {
    "mean": mean,
    "weights": over_mask,
    "Ratio": ratio,
    "Ratios": lambda *args: {"a": ratio(*args), "b": optax_accum.Ratio(mean(*args) * 2.0, 2.0)},
    "terms": lambda *args: {"a": over_mask(*args), "b": mean(*args)},
}


SHARDS = {
    "rows": {"layers": P(None, "data"), "shared": P("data")},
    "columns, and one whole": {"layers": P(None, None, "data"), "shared": P()},
    "layers": {"layers": P("data"), "shared": P("data")},  # no slice of it can be scattered
}


def compiled(loss, mesh, batch=BATCH, params=PARAMS, *, to=None, dtype=None, overlap=None, **options):
    """The call, compiled, and its arguments."""
    devices = optax_accum.Devices("data", to=to, dtype=dtype, overlap=overlap)
    shape, types = MESHES[mesh]
    mesh = jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=types)
    with jax.set_mesh(mesh):
        args = (
            jax.device_put(params, NamedSharding(mesh, P())),
            jax.device_put(batch, NamedSharding(mesh, P("data"))),
        )
        return jax.jit(optax_accum.value_and_grad(loss, devices=devices, **options)).lower(*args).compile(), args


def both(loss, batch=BATCH, **options):
    """What it returns with and without."""
    results = []
    for overlap in (True, False):
        run, args = compiled(loss, "Auto", batch, overlap=overlap, **options)
        results.append(jax.device_get(run(*args)))
    return results


of_whole = jax.jit(jax.value_and_grad(mean))
ON_MESHES = [(mesh, size) for mesh in MESHES for size in SIZES]


@pytest.mark.parametrize(("mesh", "size"), sweep(ON_MESHES, but=[("Explicit", SIZES[1])]), ids=str)
def test_the_gradient_is_that_of_the_whole_batch(mesh, size):
    run, args = compiled(mean, mesh, overlap=True, **size)
    want = of_whole(PARAMS, BATCH)
    chex.assert_trees_all_close(jax.device_get(run(*args)), want, rtol=1e-5, atol=1e-7)


@pytest.mark.sweep
@pytest.mark.parametrize("loss", sweep(LOSSES, but=["weights", "Ratio"]))
def test_inside_a_shard_map_without_types(loss):
    """With them, JAX takes no sum over devices to be the same on all that was written where partial sums lay."""
    fun = LOSSES[loss]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    got = []
    for overlap in (True, False):
        f = optax_accum.value_and_grad(fun, 4, devices=optax_accum.Devices("data", overlap=overlap))
        inside = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
        run = jax.jit(inside).lower(PARAMS, BATCH).compile()
        got.append(run(PARAMS, BATCH))
        assert bool(count_collectives(run).select(place="loop").operations) == overlap
    chex.assert_trees_all_close(*got, rtol=1e-5, atol=1e-7)
    f = optax_accum.value_and_grad(fun, 4, devices=optax_accum.Devices("data", overlap=True))
    typed = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    with pytest.raises(ValueError, match="overlap=True needs check_vma=False in jax.shard_map"):
        typed.lower(PARAMS, BATCH)


TO_SHARDS = [(mesh, shards) for mesh in MESHES if mesh != "Auto beside Explicit" for shards in SHARDS]


@pytest.mark.parametrize(("mesh", "shards"), sweep(TO_SHARDS, but=[("Explicit beside Auto", "layers")]))
def test_each_device_keeps_its_shard(mesh, shards):
    """ZeRO-1: four layers, so that each device may keep one."""
    params = {**PARAMS, "layers": jnp.concatenate([PARAMS["layers"], PARAMS["layers"][:1]])}
    to = SHARDS[shards]
    run, args = compiled(mean, mesh, params=params, overlap=True, microbatch_size=12, to=to)
    value, grads = run(*args)
    want = of_whole(params, BATCH)
    chex.assert_trees_all_close(jax.device_get((value, grads)), want, rtol=1e-5, atol=1e-7)
    for name, spec in to.items():
        assert grads[name].sharding.is_equivalent_to(NamedSharding(grads[name].sharding.mesh, spec), grads[name].ndim)
    found = count_collectives(run)
    in_loop = [(op.kind, op.times, op.bytes) for op in found.select(place="loop").operations]
    assert in_loop == ([] if shards == "layers" else [("reduce-scatter", 4, 4 * WIDTH * WIDTH)])
    assert not found.select("all-reduce", min_bytes=4 * WIDTH * WIDTH)


def test_shards_that_are_not_taken_beside_other_axes():
    """A dimension over both axes, or Explicit ones beside the reduced: scattered after the backward pass."""
    both = {"layers": P(None, ("model", "data")), "shared": P()}
    for mesh, to in (("beside Auto", both), ("Auto beside Explicit", SHARDS["rows"])):
        with pytest.raises(ValueError, match=r"overlap=True needs Devices.to=. .*Leave overlap=None"):
            compiled(mean, mesh, overlap=True, num_microbatches=4, to=to)
        run, args = compiled(mean, mesh, num_microbatches=4, to=to)
        want = of_whole(PARAMS, BATCH)
        chex.assert_trees_all_close(jax.device_get(run(*args)), want, rtol=1e-5, atol=1e-7)


COUNTED = every_pair(LOSSES, SIZES[:2], [None, SHARDS["rows"]])


@pytest.mark.sweep
@pytest.mark.parametrize(("loss", "size", "to"), sweep(COUNTED, but=one_of_each(COUNTED)), ids=str)
def test_whatever_a_loss_counts(loss, size, to):
    fun = LOSSES[loss]
    chex.assert_trees_all_close(*both(fun, to=to, **size), rtol=1e-5, atol=1e-7)


@pytest.mark.sweep
def test_the_last_micro_batch_may_weigh_nothing():
    """It is run all the same, its loss is 0 / 0, and nothing comes of it: on one device, and on all."""
    last, device = np.arange(ROWS) % 4 == 3, np.arange(ROWS) // 8
    fun = LOSSES["weights"]
    for live, to in ((~last | (device > 0), None), (~last, None), (last & (device == 0), SHARDS["rows"])):
        batch = {**BATCH, "mask": jnp.asarray(live, jnp.float32)}
        now, want = both(fun, batch=batch, num_microbatches=4, to=to)
        chex.assert_tree_all_finite(now)
        chex.assert_trees_all_close(now, want, rtol=1e-5, atol=1e-7)


@pytest.mark.sweep
def test_keys_outputs_and_statistics():
    def loss(params, batch, key):
        kept = jax.random.bernoulli(key, 0.8, batch["x"].shape)
        value = mean(params, {**batch, "x": jnp.where(kept, batch["x"], 0)})
        return value, {"rows": errors(params, batch), "largest": jnp.max(batch["x"])}

    options = {"has_aux": True, "statistics": True, "num_microbatches": 4}
    fun = functools.partial(optax_accum.value_and_grad, loss, **options)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        args = PARAMS, jax.device_put(BATCH, NamedSharding(mesh, P("data"))), jax.random.key(1)
        now, want = (jax.jit(fun(devices=optax_accum.Devices("data", overlap=flag)))(*args) for flag in (True, False))
    chex.assert_trees_all_close(now, want, rtol=1e-5, atol=1e-7)
    (_, told), _ = now
    assert told.known > 0


def test_each_layer_is_reduced_once_inside_the_last_backward_pass():
    inside = count_collectives(compiled(mean, "Auto", overlap=True, num_microbatches=4)[0])
    after = count_collectives(compiled(mean, "Auto", overlap=False, num_microbatches=4)[0])
    (layer,) = inside.select(place="loop").operations
    assert (layer.times, layer.bytes) == (LAYERS, 4 * WIDTH * WIDTH)
    assert not after.select(place="loop").operations
    assert inside.bytes == after.bytes


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({"devices": optax_accum.Devices("data", to="partial", overlap=True)}, 'not Devices.to="partial".'),
    ],
    ids=str,
)
def test_where_it_cannot_be_an_error_says_what_it_needs(options, needs):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    call = optax_accum.value_and_grad(mean, 2, **{"devices": optax_accum.Devices("data", overlap=True), **options})
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=f"overlap=True needs .*{needs}.*\\. Leave overlap=None"):
        jax.jit(call)(PARAMS, BATCH)


def test_parameters_with_one_gradient_and_other_shards():
    """It was reduced for the shard of the last of them: the others got numbers of no one."""
    params, x = {"a": jnp.ones((8, 4)), "b": jnp.ones((8, 4))}, jnp.sin(jnp.arange(128.0)).reshape(16, 8)
    loss = lambda p, x: jnp.mean(jnp.tanh(x @ (p["a"] + p["b"])) ** 2)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    to = {"a": P("data"), "b": P(None, "data")}
    call = lambda **options: optax_accum.value_and_grad(loss, 2, devices=optax_accum.Devices("data", **options))
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="overlap=True needs parameters with different gradients"):
            jax.jit(call(to=to, overlap=True))(params, x)
        for options in ({"to": to}, {"overlap": True}):  # the remedies
            found = jax.device_get(jax.jit(call(**options))(params, x)[1])
            chex.assert_trees_all_close(found, jax.grad(loss)(params, x), rtol=1e-5)


def test_outside_jit_it_says_so():
    call = optax_accum.value_and_grad(mean, 2, devices=optax_accum.Devices("data", overlap=True))
    with (
        jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))),
        pytest.raises(ValueError, match=r"overlap=True needs jax\.jit\. "),
    ):
        call(PARAMS, BATCH)


@pytest.mark.sweep
def test_layers_that_an_explicit_axis_shards():
    """JAX takes no slice of a reference to them: they are reduced together, behind the scan."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))
    at = {"layers": P(None, None, "model"), "shared": P()}

    def loss(params, batch):
        turn = lambda x, w: (jnp.tanh(jnp.einsum("bi,ij->bj", x, w, out_sharding=P(None, None))), None)
        return jnp.mean(jax.lax.scan(turn, batch["x"], params["layers"])[0] ** 2)

    with jax.set_mesh(mesh):
        params = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), PARAMS, at)
        batch = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
        call = optax_accum.value_and_grad(loss, 2, devices=optax_accum.Devices("data", overlap=True))
        grads = jax.jit(call)(params, batch)[1]
    want = jax.grad(lambda w: jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), BATCH["x"], w)[0] ** 2))
    np.testing.assert_allclose(grads["layers"], want(PARAMS["layers"]), rtol=1e-4, atol=1e-6)


def test_a_wire_wider_than_the_sums_is_refused_here_too():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    wide = lambda params, batch: mean(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), batch)
    options = {"num_microbatches": 2, "accumulator_dtype": jnp.bfloat16, "overlap": True}
    with pytest.raises(ValueError, match="must not be wider than the sums"):
        compiled(wide, "Auto", params=params, dtype=jnp.float32, **options)


@pytest.mark.sweep
def test_a_parameter_that_only_other_micro_batches_use():
    """Its sum goes over the devices, too, though the smaller last micro-batch has no gradient for it."""

    def loss(params, batch):
        value = jnp.mean((batch["x"] @ params["layers"][0]) ** 2)
        return value + jnp.mean(jnp.tanh(batch["x"] * params["shared"][None])) if len(batch["x"]) > 1 else value

    batch = {"x": jnp.tile(BATCH["x"], (2, 1))[:36]}  # 9 rows a device: 4 + 4 + 1
    for to in (None, {"layers": P(None, "data"), "shared": P("data")}):
        chex.assert_trees_all_close(*both(loss, batch=batch, microbatch_size=16, to=to), rtol=1e-5, atol=1e-7)


def test_shards_cross_the_network_in_bfloat16():
    """Half the bytes, each part rounded once."""
    options = {"overlap": True, "num_microbatches": 4, "to": SHARDS["rows"]}
    wide, narrow = (compiled(mean, "Auto", dtype=dtype, **options) for dtype in (None, jnp.bfloat16))
    (one,), (other,) = (count_collectives(run).select(place="loop").operations for run, _ in (wide, narrow))
    assert (one.kind, other.kind, one.bytes) == ("reduce-scatter", "all-to-all", 2 * other.bytes)
    now, want = (jax.device_get(run(*args)[1]) for run, args in (narrow, wide))
    chex.assert_trees_all_close(now, want, rtol=2**-7, atol=2**-7 * float(np.abs(want["layers"]).max()))
