"""On an Explicit mesh that arrays alone tell of, with no `jax.set_mesh`: gradients as with it, in place where JAX can."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from tests import paths
from tests.pairs import every_pair
from tests.tiers import sweep
from tests.versions import JAX, needs_explicit_outputs

W = np.random.default_rng(0).normal(size=(3, 4)).astype("f")
X = np.random.default_rng(1).normal(size=(8, 3)).astype("f")


def plain(params, x):
    return jnp.mean(((x @ params["w"]) * params["scale"][None] - 1) ** 2)


def in_a_shard_map(params, x):
    """Of the user's own, where a parameter meets its result."""
    mesh = jax.typeof(x).sharding.mesh
    product = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("data"), P(None, "other")), out_specs=P("data", "other"))
    return jnp.mean((product(x, params["w"]) * params["scale"][None] - 1) ** 2)


def normalised(params, x):
    """Rows that are taken together, between a product over them and one by them."""
    h = x @ params["w"]
    return jnp.mean((jnp.tanh(h - h.mean(0)[None]) * params["scale"][None] - 1) ** 2)


def that_asks_where_its_rows_lie(params, x):
    there = NamedSharding(jax.typeof(x).sharding.mesh, P("data", None))
    return jnp.mean(jnp.matmul(jnp.tanh(x @ params["w"]), params["w"].T, out_sharding=there) ** 2)


def within(loss, k=2, **options):
    return lambda params, x: optax_accum.value_and_grad(loss, k, **options)(params, x)[1]


def across(loss):
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2)
    weight_fn = len if loss is in_a_shard_map else None  # which is not read: a warning would ask for it
    step = optax_accum.value_and_apply_gradients(loss, tx, weight_fn=weight_fn)

    def run(params, x):
        now, state = params, tx.init(params)
        for _ in range(2):
            _, now, state = step(now, state, x)
        return jax.tree.map(jnp.subtract, params, now)

    return run


def placed(scale_is_placed=True):
    mesh = paths.mesh_of("Explicit")
    scale = np.float32([1, 2, 3, 4])
    scale = paths.on_mesh(mesh, scale, P()) if scale_is_placed else scale
    return {"w": paths.on_mesh(mesh, W, P(None, "other")), "scale": scale}, paths.on_mesh(mesh, X, P("data"))


EVERY = every_pair([within, across], [plain, in_a_shard_map], [True, False])


@pytest.mark.parametrize(("way", "loss", "scale_is_placed"), sweep(EVERY, but=[(across, plain, False)]))
def test_the_gradient_is_that_of_the_whole_batch(way, loss, scale_is_placed):
    got = jax.jit(way(loss))(*placed(scale_is_placed))
    want = jax.jit(jax.grad(loss))(*placed(scale_is_placed))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5), got, want)


@pytest.mark.parametrize("with_mesh", [False, *sweep([True])])
@pytest.mark.parametrize(
    ("loss", "k"),
    [*sweep([(normalised, 2), (normalised, 8), (that_asks_where_its_rows_lie, 2)]), (in_a_shard_map, 8)],
)
def test_a_loss_that_is_read_knows_where_its_rows_lie(loss, k, with_mesh):
    """Also where a micro-batch has fewer rows than there are devices."""
    with jax.set_mesh(paths.mesh_of("Explicit")) if with_mesh else contextlib.nullcontext():
        got, want = (jax.jit(grad)(*placed()) for grad in (within(loss, k), jax.grad(loss)))
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5), got, want)


def centred(h):
    return h - h.mean(0, keepdims=True)


@jax.custom_vjp
def clipped(h):
    return h * 1.5


clipped.defvjp(lambda h: (h * 1.5, None), lambda _, ct: (ct / (1 + jnp.sqrt(jnp.sum(ct**2))),))
TOGETHER = {
    "an extreme": lambda h: centred(h - h.max(0, keepdims=True)),
    "a sort": lambda h: centred(jnp.sort(h, 0))[3:],
    "a sort under vmap": lambda h: jax.vmap(jnp.sort)(h.T)[:, 2],
    "a cumulative sum": lambda h: jnp.cumsum(h, 0),
    "a roll": lambda h: jnp.roll(h, 1, 0) - h,
    "a condition": lambda h: jax.lax.cond(jnp.sum(h) > 0, centred, jnp.tanh, h),
    "a rule for cotangents": lambda h: clipped(jnp.tanh(h)),
}
# As JAX itself can where rows are sharded over an Explicit axis; over `devices` each device gathers what is whole.
BY_TYPES = ["an extreme", "a condition", "a rule for cotangents"]
EACH = [(name, "data") for name in TOGETHER] + [(name, None) for name in BY_TYPES]
SORTS = ("a sort", "a sort under vmap")


@needs_explicit_outputs
@pytest.mark.parametrize(("name", "devices"), sweep(EACH, but=[("a sort under vmap", "data"), (BY_TYPES[2], None)]))
def test_all_rows_at_once_beside_a_sharded_model(name, devices):
    if name in SORTS and JAX < (0, 12, 0):
        pytest.skip("JAX 0.12: a sort beside an axis that shards what is sorted")
    params, x = placed()

    def loss(params, x):
        return jnp.mean(TOGETHER[name](x @ params["w"]) ** 2)

    with jax.set_mesh(paths.mesh_of("Explicit")):
        value, grads = jax.jit(optax_accum.value_and_grad(loss, 3, devices=devices))(params, x)
    want = jax.jit(jax.value_and_grad(loss))({"w": W, "scale": np.float32([1, 2, 3, 4])}, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5), (value, grads), want)


# Of several devices each has a last one of its own.
OUTPUTS = [(reduction, "data") for reduction in ("mean", "sum", "max")]
OUTPUTS += [(reduction, None) for reduction in ("mean", "sum", "max", "last", "stack")]


@needs_explicit_outputs
@pytest.mark.parametrize(("reduction", "devices"), sweep(OUTPUTS, but=[("mean", "data")]))
def test_outputs_that_an_axis_of_the_model_shards(reduction, devices):
    """Arrays that wait for outputs lie where these do."""
    params, x = placed()

    def fun(params, x):
        h = x @ params["w"]
        return h.max(0), h

    with jax.set_mesh(paths.mesh_of("Explicit")):
        k = 2 if devices else 4
        run = optax_accum.reduce_microbatches(fun, k, reduction=(reduction, "concat"), devices=devices)
        _, rows = found = jax.jit(run)(params, x)
    maxima = (X @ W).reshape(-1, 2, k, 4).max(1).reshape(4, 4)  # micro-batches take every k-th row
    want = {"mean": maxima.mean(0), "sum": maxima.sum(0), "max": maxima.max(0), "last": maxima[-1], "stack": maxima}
    np.testing.assert_allclose(np.asarray(found[0]), want[reduction], atol=1e-5)
    np.testing.assert_allclose(np.asarray(rows), X @ W, atol=1e-5)
    assert [jax.typeof(leaf).sharding.spec[-1] for leaf in found] == ["other", "other"]


@pytest.mark.sweep
def test_parameters_that_do_not_lie_on_a_mesh_that_is_set():
    args = placed(scale_is_placed=False)
    want = jax.jit(jax.grad(plain))(*args)
    with jax.set_mesh(paths.mesh_of("Explicit")):
        got = jax.jit(within(plain))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5), got, want)


@pytest.mark.sweep
@pytest.mark.parametrize("compiled", [jax.jit, *sweep([lambda run: run])])
def test_an_auto_axis_beside_an_explicit_one_needs_no_set_mesh(compiled):
    """The arrays tell the mesh; JAX asks for one in reach."""
    kinds = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=kinds)
    w = paths.on_mesh(mesh, np.linspace(0, 1, 24, dtype="f").reshape(3, 8), P(None, "tp"))
    x = np.linspace(-1, 1, 24, dtype="f").reshape(8, 3)
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 1, devices="data")
    across = lambda w, x: w - optax_accum.value_and_apply_gradients(loss, tx)(w, tx.init(w), x)[1]
    within = lambda w, x: optax_accum.value_and_grad(loss, 2, devices="data")(w, x)[1]
    want = jax.grad(loss)(np.asarray(w), x)
    for run in (across, within):
        found = compiled(run)(w, paths.on_mesh(mesh, x, P("data")))
        np.testing.assert_allclose(np.asarray(found), want, rtol=1e-5, atol=1e-7)
