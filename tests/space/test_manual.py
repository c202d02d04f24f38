"""Inside a user's `jax.shard_map`, and on Explicit meshes: weights counted once, what is returned, what is refused."""

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

BATCH = paths.rows()
loss = paths.loss_of(("gathers",))


@pytest.fixture(params=sweep(["Auto", "Explicit"], but=["Explicit"]))
def mesh(request):
    mesh = paths.mesh_of(request.param)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
@pytest.mark.parametrize(
    ("options", "call", "total"),
    [({}, {}, 12), ({"weight_fn": paths.count}, {}, BATCH["mask"].sum()), ({}, {"weight": 5.0}, 15)],
    ids=["rows", "weight_fn", "weight"],
)
def test_a_weight_is_shared_over_devices_once(options, call, total, check_vma):
    mesh = paths.mesh_of("Auto")
    tx = optax_accum.accumulate_gradients(paths.SGD, 100, reduce_axes="data")
    step = optax_accum.value_and_apply_gradients(loss, tx, **options)
    with jax.set_mesh(mesh):
        fun = lambda params, state, batch: step(params, state, batch, **call)[1:]
        _, state = paths.in_shard_map(mesh, fun, tx, paths.params(), BATCH, check_vma=check_vma)
    assert optax_accum.metrics(state)["weight"] == total


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_reduced_false_returns_in_a_shard_map(mesh, reduction):
    """Each device's own, without an axis of devices; outside, that axis comes first."""
    fun = lambda params, batch: (loss(params, batch), {"rows": batch["x"], "norm": jnp.mean(batch["x"] ** 2)})
    options = {"has_aux": True, "aux_reduction": {"rows": "concat", "norm": reduction}}
    f = optax_accum.value_and_grad(fun, microbatch_size=4, reduce_axes="data", reduce_to="partial", **options)
    params, batch = (paths.on_mesh(mesh, tree, spec) for tree, spec in ((paths.params(), P()), (BATCH, P("data"))))
    shapes = []

    def local(params, batch):
        (value, aux), grads = f(params, batch)
        shapes.append(jax.tree.map(jnp.shape, (value, aux, grads)))
        return jax.tree.map(lambda leaf: leaf[None], (value, aux["norm"], grads))

    rows = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), axis_names={"data"})
    )(params, batch)
    assert shapes[0] == ((), {"rows": (6, 4), "norm": ()}, jax.tree.map(jnp.shape, params))
    (value, aux), grads = jax.jit(f)(params, batch)
    assert aux["rows"].shape == (12, 4)
    got = jax.tree.map(np.asarray, (value, aux["norm"], grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, jax.tree.map(np.asarray, rows))


@pytest.mark.parametrize(
    ("mesh", "nonfinite", "every"),
    every_pair(["Auto", "Explicit"], ["skip", "omit", "discard"], [1, 2]),
    indirect=["mesh"],
)
def test_policies_over_rows_of_devices(mesh, nonfinite, every):
    """A NaN on one device, in a micro-step of its own, and the step after."""
    tx = optax_accum.accumulate_gradients(paths.SGD, every, reduce_axes="data", nonfinite=nonfinite)
    grad = optax_accum.value_and_grad(loss, num_microbatches=1, reduce_axes="data", reduce_to="partial")
    params = now = paths.on_mesh(mesh, paths.params(), P())
    state, _ = paths.sharded_state(tx, now)
    step = jax.jit(lambda p, s, b: optax_accum.apply_gradients(tx, grad(p, b)[1], s, p, weight=12.0))
    bad = {**BATCH, "x": np.where(np.arange(12)[:, None] == 7, np.nan, BATCH["x"]).astype("f")}
    for batch in [bad] * every + [BATCH] * every:
        now, state = step(now, state, paths.on_mesh(mesh, batch, P("data")))
    want = paths.oracle(loss, params, BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, atol=1e-6), now, want)
    counted = optax_accum.metrics(state)
    assert counted["discarded"] == 1 if nonfinite == "discard" else counted["skipped"] == every


def test_sharded_parameters_are_not_gathered_unasked():
    """FSDP, with `reduce_to="partial"` as without."""
    mesh = paths.mesh_of("Explicit")
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("data")))
        f = optax_accum.value_and_grad(
            lambda w, x: jnp.mean(x @ w), num_microbatches=1, reduce_axes="data", reduce_to="partial"
        )
        with pytest.raises(ValueError, match="must be replicated over reduce_axes"):
            jax.jit(f)(w, jnp.ones((4, 4)))


def test_several_arguments_and_one_place_for_their_sums():
    mesh = paths.mesh_of("Auto")
    with jax.set_mesh(mesh):
        f = optax_accum.value_and_grad(
            lambda a, b, x: a * b * jnp.mean(x),
            argnums=(0, 1),
            batch_argnums=2,
            num_microbatches=1,
            reduce_axes="data",
            reduce_to=(P(),),
        )
        with pytest.raises(ValueError, match="reduce_to must be a prefix of the tree of the parameters"):
            jax.jit(f)(jnp.float32(1), jnp.float32(2), jnp.ones(4))


def test_a_held_micro_step_does_nothing_in_its_branch():
    """What NVIDIA's compiler copies in a held micro-step: see `tracing.branch`."""
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 2)
    step = lambda g, s, p: optax_accum.apply_gradients(tx, g, s, p)
    (branch,) = [
        eqn
        for eqn in jax.make_jaxpr(step)(jnp.ones(3), tx.init(jnp.ones(3)), jnp.ones(3)).eqns
        if eqn.primitive.name == "cond"
    ]
    sizes = [len(inner.jaxpr.eqns) for inner in branch.params["branches"]]
    assert sizes[0] == 0 < sizes[1]  # hold, then emit: whichever of `cond` and `switch` this JAX compiles well


def test_a_place_for_the_sum_is_refused_inside_a_shard_map():
    """There it goes everywhere."""
    mesh = paths.mesh_of("Auto")
    f = optax_accum.value_and_grad(loss, num_microbatches=1, reduce_axes="data", reduce_to=P("data"))
    run = jax.shard_map(lambda p, b: f(p, b)[1], mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="the sum goes everywhere.*Leave it out"):
        jax.jit(run)(paths.params(), BATCH)


def test_a_loss_of_each_device_needs_the_axes_in_every_way():
    """JAX adds its gradient over the devices, so that a step was that of as many times the gradient."""
    mesh, tx = paths.mesh_of("Auto"), optax_accum.accumulate_gradients(optax.sgd(1.0), 1)
    step = optax_accum.value_and_apply_gradients(loss, tx)
    ways = {
        "Pass reduce_axes=.*for the gradient of all their rows": optax_accum.accumulate(jax.value_and_grad(loss), 1),
        "Pass reduce_axes=.* to accumulate_gradients; or return jax.lax.pmean": lambda p, b: step(p, tx.init(p), b)[1],
    }
    for message, run in ways.items():
        inside = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        with pytest.raises(ValueError, match=f"differs between devices needs reduce_axes.*{message}"):
            jax.jit(inside).lower(paths.params(), BATCH)
