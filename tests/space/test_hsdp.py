"""Parameters sharded inside each replica (HSDP): one reduction of a shard between replicas for a window, on every mesh."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

import optax_accum
from tests import ROOT, programs
from tests.tiers import sweep
from tests.versions import JAX

REPLICAS, SHARDS, ROWS, WIDTH, HIDDEN = 2, 4, 64, 16, 32
BOTH = P(("replica", "shard"))
COPY = 4 * 2 * WIDTH * HIDDEN  # bytes of the parameters
TYPES = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}
INNER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))  # needs the norm of all


MESHES = ["Auto Auto", "Explicit Explicit", "Explicit Auto"]


@pytest.fixture(params=sweep(MESHES, but=["Explicit Auto"]))
def mesh(request):
    kinds = tuple(TYPES[name] for name in request.param.split())
    mesh = jax.make_mesh((REPLICAS, SHARDS), ("replica", "shard"), axis_types=kinds)
    with jax.set_mesh(mesh):
        yield mesh


def loss(params, batch):
    """A mean over the rows that count."""
    error = jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["x"]) ** 2, axis=-1)
    return jnp.sum(batch["mask"] * error) / jnp.sum(batch["mask"])


def tokens(batch):
    return batch["mask"].sum()


def host_params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: np.asarray(rng.normal(size=shape) / 4, np.float32)
    return {"up": draw(WIDTH, HIDDEN), "down": draw(HIDDEN, WIDTH)}


def host_batch(seed=1, rows=ROWS):
    """Rows of which fewer count in the first replica than in the second."""
    rng = np.random.default_rng(seed)
    mask = np.asarray(rng.random(rows) < np.linspace(0.2, 0.9, rows), np.float32)
    return {"x": np.asarray(rng.normal(size=(rows, WIDTH)), np.float32), "mask": mask}


def place(mesh, tree, spec):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec)), tree)


def rows_of(mesh):
    """How rows are sharded: before 0.9.2 JAX takes none that are sharded over an Explicit axis, too."""
    return P("replica") if JAX < (0, 9, 2) and mesh.axis_types[1] == AxisType.Explicit else BOTH


def shardings(params):
    return jax.tree.map(lambda leaf: leaf.sharding, params)


def close(got, want):
    jax.tree.map(lambda a, b: assert_allclose(np.asarray(a), np.asarray(b), atol=2e-6), got, want)


def within(params, k):
    run = optax_accum.value_and_grad(loss, num_microbatches=k, devices="replica")
    return jax.jit(run, out_shardings=(None, shardings(params)))


def between_replicas(jitted, *args):
    """What more than the devices of one replica take part in."""
    found = optax_accum.sharding.count_collectives(programs.compiled(jitted.lower(*args)))
    return [op for op in found.select(min_bytes=64) if op.group != SHARDS]


@functools.cache
def whole_gradient():
    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(host_params(), host_batch()))


@pytest.mark.sweep
@pytest.mark.parametrize(("k", "spec"), [(4, rows_of), (3, lambda mesh: P("replica"))], ids=["4, both", "3, replica"])
def test_the_gradient_is_that_of_the_whole_batch_and_lies_where_the_parameters_do(mesh, k, spec):
    """Also of micro-batches whose rows the devices of a replica do not divide."""
    params, batch = place(mesh, host_params(), P("shard")), place(mesh, host_batch(), spec(mesh))
    value, grads = within(params, k)(params, batch)
    close((value, grads), whole_gradient())
    assert all(grads[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim) for name, leaf in params.items())


@pytest.mark.sweep
@pytest.mark.parametrize("k", [2, 8])
def test_replicas_exchange_one_shard_whatever_k_is(mesh, k):
    params, batch = place(mesh, host_params(), P("shard")), place(mesh, host_batch(), rows_of(mesh))
    (reduction,) = between_replicas(within(params, k), params, batch)
    assert (reduction.kind, reduction.place, reduction.group) == ("all-reduce", "outside", REPLICAS)
    assert reduction.bytes == COPY / SHARDS + 4  # and the loss


BATCHES = [host_batch(seed) for seed in range(3)]


@functools.cache
def whole_update():
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *BATCHES)
    params = host_params()
    updates, _ = INNER.update(jax.grad(loss)(params, joined), INNER.init(params), params)
    return jax.tree.map(np.asarray, optax.apply_updates(params, updates))


def in_place(tx):
    step = optax_accum.value_and_apply_gradients(loss, tx, weight_fn=tokens)
    return lambda params, state, batch: step(params, state, batch)[1:]


def in_two_parts(tx):
    """The window is calls times micro-batches."""
    own = optax_accum.value_and_grad(loss, num_microbatches=2, devices=optax_accum.Devices("replica", to="partial"))

    def step(params, state, batch):
        _, grads = own(params, batch)
        weight = batch["mask"].reshape(REPLICAS, -1, out_sharding=_free(P("replica"))).sum(1)
        return optax_accum.apply_gradients(tx, grads, state, params, weight=weight)

    return step


def _free(spec):
    """Where an axis is Explicit, JAX asks how rows that it shards are to lie."""
    mesh = jax.sharding.get_abstract_mesh()
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    return P(*(name if name in explicit else None for name in spec)) if explicit else None


WAYS = [*((kinds, in_place) for kinds in MESHES), *((kinds, in_two_parts) for kinds in MESHES[:2])]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("mesh", "make"),
    sweep(WAYS, but=[("Explicit Auto", in_place), ("Explicit Explicit", in_two_parts)]),
    indirect=["mesh"],
)
def test_across_calls_a_shard_is_exchanged_when_the_window_closes(mesh, make):
    params = place(mesh, host_params(), P("shard"))
    tx = optax_accum.accumulate_gradients(INNER, every=3, devices="replica")
    where = optax_accum.sharding.state_sharding(tx, params)
    state = jax.jit(tx.init, out_shardings=where)(params)
    sums = state.acc_grads["up"]
    assert sums.sharding.is_equivalent_to(NamedSharding(mesh, P("replica", "shard")), sums.ndim)
    step = jax.jit(make(tx), out_shardings=(shardings(params), where))
    batches = [place(mesh, batch, rows_of(mesh)) for batch in BATCHES]
    found = between_replicas(step, params, state, batches[0])
    assert {(op.kind, op.place, op.group) for op in found} == {("all-reduce", "branch", REPLICAS)}
    assert COPY / SHARDS <= sum(op.bytes for op in found) <= COPY / SHARDS + 16
    for batch in batches:
        params, state = step(params, state, batch)
    close(params, whole_update())
    assert optax_accum.has_updated(state)


# By layer


LAYERS, SPECS = 3, {"up": P("shard"), "down": P("shard")}


def block(layer, h):
    return h + jnp.tanh(h @ layer["up"]) @ layer["down"]


def stack(apply, params, h):
    h, _ = jax.lax.scan(lambda h, layer: (apply(layer, h), None), h, params)
    return jnp.mean(h**2)


@pytest.mark.sweep
@pytest.mark.parametrize("k", [2, 8])
def test_by_layer_a_layer_is_gathered_inside_its_replica_and_its_shard_exchanged_once(mesh, k):
    layers = jax.tree.map(lambda leaf: np.stack([leaf] * LAYERS), host_params())
    params, h = place(mesh, layers, P(None, "shard")), place(mesh, host_batch()["x"], BOTH)
    apply = optax_accum.microbatched(block, k, devices=optax_accum.Devices(("replica", "shard"), to=SPECS))
    jitted = jax.jit(jax.grad(functools.partial(stack, apply)), out_shardings=shardings(params))
    close(jitted(params, h), jax.grad(functools.partial(stack, block))(layers, host_batch()["x"]))
    if mesh.axis_types == (AxisType.Auto, AxisType.Explicit):
        return  # JAX 0.12 takes rows that are sharded over both for sharded over the Explicit axis first, and moves them
    (exchanged,) = between_replicas(jitted, params, h)
    assert (exchanged.kind, exchanged.group) == ("all-reduce", REPLICAS)
    assert exchanged.times * exchanged.bytes == LAYERS * COPY / SHARDS
    inside = optax_accum.sharding.count_collectives(programs.compiled(jitted.lower(params, h)))
    assert inside.select("all-gather", min_bytes=64).bytes == 2 * LAYERS * COPY  # in both passes
    assert inside.select("reduce-scatter").bytes == LAYERS * COPY


@pytest.mark.slow
@pytest.mark.sweep
def test_the_example_trains_as_the_whole_batch_does():
    command = [sys.executable, "-m", "examples.hsdp"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "equals the whole batch" in done.stdout
