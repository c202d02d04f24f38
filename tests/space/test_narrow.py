"""`Devices(dtype=)`: half the bytes through the network, and one rounding of each device's sum."""

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
from tests.problems import normal
from tests.tiers import sweep
from tests.versions import since

PARAMS = {"w": normal(0, 16, 8), "b": normal(1, 3)}
X = normal(2, 32, 16)


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2) + jnp.mean(x[:, :3] * params["b"][None])


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4,), ("data",), axis_types=(kind,))


def placed(mesh):
    return jax.device_put(PARAMS, NamedSharding(mesh, P())), jax.device_put(X, NamedSharding(mesh, P("data")))


def bound(leaves):
    """What rounding each part, and the sum, can do: `u (sum |part| + |sum|)`, with the unit `u` of bfloat16."""
    leaves = np.asarray(leaves, np.float64)
    return 2.0**-8 * (np.sum(np.abs(leaves), 0) + np.abs(np.sum(leaves, 0)))


@pytest.mark.sweep
@pytest.mark.parametrize("scale", sweep([1.0, 1e-30, 1e30], but=[1e-30]), ids=str)
@pytest.mark.parametrize("axes", [("data",), ("data", "model")], ids=str)
def test_each_part_is_rounded_once_and_added_in_float32(axes, scale):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    devices = int(np.prod([mesh.shape[axis] for axis in axes]))
    parts = scale * jax.random.normal(jax.random.key(3), (devices, 5, 16))
    total = lambda w, own: jnp.sum(own * w[None])  # its gradient on a device is the device's part
    run = optax_accum.value_and_grad(total, 1, devices=optax_accum.Devices(axes, dtype=jnp.bfloat16))
    with jax.set_mesh(mesh):
        _, added = jax.jit(run)(jnp.ones((5, 16)), jax.device_put(parts, NamedSharding(mesh, P(axes))))
    for shard in added.addressable_shards:
        np.testing.assert_array_equal(shard.data, added)
    want = np.sum(np.asarray(parts, np.float64), 0)
    assert np.all(np.abs(added - want) <= bound(parts))
    rounded = np.sum(np.asarray(parts.astype(jnp.bfloat16), np.float64), 0)  # no sum is rounded before it is complete
    np.testing.assert_allclose(added, np.asarray(jnp.asarray(rounded).astype(jnp.bfloat16), np.float64), rtol=2**-7)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", sweep([AxisType.Auto, AxisType.Explicit], but=[AxisType.Explicit]), ids=str)
@pytest.mark.parametrize("to", [None, {"w": P("data"), "b": P()}], ids=["everywhere", "scattered"])
def test_half_the_bytes_through_the_network(kind, to):
    mesh = mesh_of(kind)
    found = {}
    with jax.set_mesh(mesh):
        args = placed(mesh)
        for dtype in (None, jnp.bfloat16):
            call = optax_accum.value_and_grad(loss, 4, devices=optax_accum.Devices("data", to=to, dtype=dtype))
            run = jax.jit(call).lower(*args).compile()
            found[dtype] = count_collectives(run).select(min_bytes=64), jax.device_get(run(*args)[1])
    size = PARAMS["w"].size
    kinds = lambda dtype: {op.kind: op.bytes & ~63 for op in found[dtype][0].operations}  # some bring small ones along
    assert kinds(None) == {"all-reduce" if to is None else "reduce-scatter": 4 * size}
    assert kinds(jnp.bfloat16) == {"all-to-all": 2 * size} | ({"all-gather": 2 * size} if to is None else {})
    want = jax.grad(loss)(PARAMS, X)
    parts = jnp.stack([jax.grad(loss)(PARAMS, rows)["w"] / 4 for rows in jnp.split(X, 4)])
    assert np.all(np.abs(found[jnp.bfloat16][1]["w"] - want["w"]) <= bound(parts))
    assert np.any(found[jnp.bfloat16][1]["w"] != found[None][1]["w"])
    np.testing.assert_allclose(found[jnp.bfloat16][1]["b"], want["b"], rtol=1e-5)  # 3 do not divide: float32


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["jit", "eager", "shard_map", pytest.param("overlap", marks=since(0, 11, why="that"))])
def test_within_a_call_however_it_is_made(how):
    mesh = mesh_of()
    overlap = True if how == "overlap" else None
    devices = optax_accum.Devices("data", dtype=jnp.bfloat16, overlap=overlap)
    call = optax_accum.value_and_grad(loss, 4, devices=devices)
    if how == "shard_map":
        call = jax.shard_map(call, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    with jax.set_mesh(mesh):
        value, grads = (call if how == "eager" else jax.jit(call))(*placed(mesh))
    want, exact = jax.value_and_grad(loss)(PARAMS, X)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    chex.assert_trees_all_close(jax.device_get(grads), exact, rtol=0.02, atol=0.01)
    assert np.any(np.asarray(grads["w"]) != np.asarray(exact["w"]))


@pytest.mark.sweep
@pytest.mark.parametrize("to", [None, {"w": P("data"), "b": P()}], ids=["everywhere", "scattered"])
def test_across_calls(to):
    mesh = mesh_of()
    options = {"devices": optax_accum.Devices("data", to=to, dtype=jnp.bfloat16)}
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2, **options)
    with jax.set_mesh(mesh):
        params, x = placed(mesh)
        state = jax.jit(tx.init, out_shardings=optax_accum.sharding.state_sharding(tx, params))(params)
        step = jax.jit(optax_accum.value_and_apply_gradients(loss, tx))
        for rows in (x, x):
            _, params, state = step(params, state, rows)
    want = jax.tree.map(jnp.subtract, PARAMS, jax.grad(loss)(PARAMS, X))
    chex.assert_trees_all_close(jax.device_get(params), want, rtol=0.02, atol=0.01)
    np.testing.assert_allclose(params["b"], want["b"], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axes": None, "dtype": jnp.bfloat16}, "axes=None, and dtype given. Name the axes"),
        ({"dtype": jnp.int8}, "floating.*Pass jnp.bfloat16"),
        ({"dtype": jnp.float16}, "range of float32.*ends at 65504. Pass jnp.bfloat16"),
        ({"to": "partial", "dtype": jnp.bfloat16}, "Leave it out"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        optax_accum.Devices(**{"axes": "data", **options})


def test_a_dtype_wider_than_the_sums_is_refused():
    mesh = mesh_of()
    call = optax_accum.value_and_grad(
        loss, 4, devices=optax_accum.Devices("data", dtype=jnp.float32), accumulator_dtype=jnp.bfloat16
    )
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="must not be wider than the sums"):
        jax.jit(call)(*placed(mesh))


def test_a_wire_wider_than_the_sums_of_a_window_is_refused_when_they_are_made():
    options = {"devices": optax_accum.Devices("data", dtype=jnp.float32), "accumulator_dtype": jnp.bfloat16}
    tx, mesh = optax_accum.accumulate_gradients(optax.sgd(1.0), 2, **options), mesh_of()
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="must not be wider than the sums"):
        jax.jit(tx.init)(placed(mesh)[0])


@pytest.mark.parametrize(
    "to", [*sweep([None, {"w": P("data"), "b": P()}]), P()], ids=["everywhere", "scattered", "whole"]
)
def test_it_is_differentiated_again(to):
    """As the sum in float32 is: what crosses the network are integers, which have no derivative."""
    mesh, square = mesh_of(), lambda tree: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))
    want = jax.grad(lambda params: square(jax.grad(loss)(params, X)))(PARAMS)
    f = optax_accum.value_and_grad(loss, 2, devices=optax_accum.Devices("data", to=to, dtype=jnp.bfloat16))
    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(lambda params, x: square(f(params, x)[1])))(*placed(mesh))
    largest = jnp.max(jnp.abs(want["w"]))
    np.testing.assert_allclose(jax.device_get(got["w"]), want["w"], atol=2**-7 * largest)
    assert largest > 1e-3


def test_what_stays_whole_beside_shards_is_narrow_too():
    mesh = mesh_of()
    f = optax_accum.value_and_grad(loss, 2, devices=optax_accum.Devices("data", to=P(), dtype=jnp.bfloat16))
    with jax.set_mesh(mesh):
        found = count_collectives(jax.jit(f).lower(*placed(mesh)).compile())
    assert found.select(kind="all-to-all").bytes == found.select(kind="all-gather").bytes == 2 * PARAMS["w"].size


def test_with_types_a_shard_map_is_told_what_it_needs():
    f = optax_accum.value_and_grad(loss, 2, devices=optax_accum.Devices("data", dtype=jnp.bfloat16))
    run = jax.shard_map(f, mesh=mesh_of(), in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match="Devices.dtype=. inside jax.shard_map needs check_vma=False.*bfloat16"):
        jax.jit(run).lower(PARAMS, X)
