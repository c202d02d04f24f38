"""Inside a user's `jax.shard_map`, and on Explicit meshes: weights counted once, what is returned, what is refused."""

import functools

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
from tests.tiers import one_of_each, sweep
from tests.versions import JAX, since

BATCH = paths.rows()
loss = paths.loss_of(("gathers",))


@pytest.fixture(params=sweep(["Auto", "Explicit"], but=["Explicit"]))
def mesh(request):
    mesh = paths.mesh_of(request.param)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.mark.sweep
@pytest.mark.parametrize("check_vma", sweep([True, False], but=[True]), ids=["vma", "no vma"])
@pytest.mark.parametrize(
    ("options", "call", "total"),
    [({}, {}, 12), ({"weight_fn": paths.count}, {}, BATCH["mask"].sum()), ({}, {"weight": 5.0}, 15)],
    ids=["rows", "weight_fn", "weight"],
)
def test_a_weight_is_shared_over_devices_once(options, call, total, check_vma):
    mesh = paths.mesh_of("Auto")
    tx = optax_accum.accumulate_gradients(paths.SGD, 100, devices="data")
    step = optax_accum.value_and_apply_gradients(loss, tx, **options)
    with jax.set_mesh(mesh):
        fun = lambda params, state, batch: step(params, state, batch, **call)[1:]
        _, state = paths.in_shard_map(mesh, fun, tx, paths.params(), BATCH, check_vma=check_vma)
    assert optax_accum.metrics(state)["weight"] == total


@pytest.mark.sweep
def test_what_partial_sums_return_in_a_shard_map(mesh):
    """Each device's own, without an axis of devices; outside, that axis comes first."""
    fun = lambda params, batch: (loss(params, batch), {"rows": batch["x"], "norm": jnp.mean(batch["x"] ** 2)})
    f = optax_accum.value_and_grad(
        fun, microbatch_size=4, devices=optax_accum.Devices("data", to="partial"), has_aux=True
    )
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


def drawn(w, x, keys):
    """Numbers of a key, of one of the old style, and of several: one for each row."""
    draw = lambda key: jax.random.normal(key, x.shape[:1])
    noise = draw(keys["one"]) + 10 * draw(keys["old"]) + 100 * jax.vmap(draw)(keys["several"]).sum(0)
    return jnp.mean((x @ w) * noise), noise


@pytest.mark.parametrize("k", [*sweep([1]), 2])
def test_partial_sums_have_random_numbers_of_their_own(mesh, k):
    """The same rows on two devices: each has the index of its device in every key."""
    keys = {"one": jax.random.key(0), "old": jax.random.PRNGKey(1), "several": jax.random.split(jax.random.key(2), 3)}
    w, x = jnp.arange(3.0), np.random.default_rng(0).normal(size=(4, 3)).astype("f")
    f = optax_accum.value_and_grad(drawn, k, devices=optax_accum.Devices("data", to="partial"), has_aux=True)
    (_, noise), grads = jax.jit(f)(w, paths.on_mesh(mesh, np.concatenate([x, x]), P("data")), keys)
    fold = lambda device: {
        "one": jax.random.fold_in(keys["one"], device),
        "old": jax.random.fold_in(keys["old"], device),
        "several": jax.vmap(jax.random.fold_in, (0, None))(keys["several"], device),
    }
    whole = jax.jit(lambda device: jax.value_and_grad(drawn, has_aux=True)(w, x, fold(device)))
    of_device = [whole(device) for device in range(2)]
    np.testing.assert_allclose(noise, np.concatenate([own for (_, own), _ in of_device]), rtol=1e-5)
    np.testing.assert_allclose(grads, np.stack([grad for _, grad in of_device]), rtol=1e-4)
    assert np.min(np.abs(np.diff(np.asarray(noise).reshape(2, 4), axis=0))) > 1e-3


SPIKE = optax_accum.discard_if(lambda gradient, *_: (~(optax.tree.norm(gradient) < 1e3), ()))
POLICIES = every_pair(["Auto", "Explicit"], ["skip", "omit", "discard", SPIKE], [1, 2])


@pytest.mark.sweep
@pytest.mark.parametrize(("mesh", "nonfinite", "every"), sweep(POLICIES, but=one_of_each(POLICIES)), indirect=["mesh"])
def test_policies_over_rows_of_devices(mesh, nonfinite, every):
    """A NaN on one device, in the last micro-step of a window, and what is left: an update of the other rows."""
    tx = optax_accum.accumulate_gradients(paths.SGD, every, devices="data", nonfinite=nonfinite)
    grad = optax_accum.value_and_grad(loss, num_microbatches=1, devices=optax_accum.Devices("data", to="partial"))
    params = now = paths.on_mesh(mesh, paths.params(), P())
    state, _ = paths.sharded_state(tx, now)
    step = jax.jit(lambda p, s, b: optax_accum.apply_gradients(tx, grad(p, b)[1], s, p, weight=12.0))
    bad = {**BATCH, "x": np.where(np.arange(12)[:, None] == 7, np.nan, BATCH["x"]).astype("f")}
    more = {"skip": 1, "omit": int(every == 1)}.get(nonfinite, every)
    for batch in [*[BATCH] * (every - 1), bad, *[BATCH] * more]:
        now, state = step(now, state, paths.on_mesh(mesh, batch, P("data")))
    want = paths.oracle(loss, params, BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, atol=1e-6), now, want)
    counted = optax_accum.metrics(state)
    left_out, dropped = {"skip": (1, 0), "omit": (1, every == 1)}.get(nonfinite, (0, 1))
    assert (counted["skipped"], counted["discarded"]) == (left_out, dropped)


def test_sharded_parameters_are_not_gathered_unasked():
    """FSDP, with `to="partial"` as without."""
    mesh = paths.mesh_of("Explicit")
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("data")))
        f = optax_accum.value_and_grad(
            lambda w, x: jnp.mean(x @ w), num_microbatches=1, devices=optax_accum.Devices("data", to="partial")
        )
        with pytest.raises(ValueError, match="must be replicated over devices"):
            jax.jit(f)(w, jnp.ones((4, 4)))


def test_several_arguments_and_one_place_for_their_sums():
    mesh = paths.mesh_of("Auto")
    with jax.set_mesh(mesh):
        f = optax_accum.value_and_grad(
            lambda a, b, x: a * b * jnp.mean(x),
            argnums=(0, 1),
            batch_argnums=2,
            num_microbatches=1,
            devices=optax_accum.Devices("data", to=(P(),)),
        )
        with pytest.raises(ValueError, match="to=. must be a prefix of the tree of the parameters"):
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
    f = optax_accum.value_and_grad(loss, num_microbatches=1, devices=optax_accum.Devices("data", to=P("data")))
    run = jax.shard_map(lambda p, b: f(p, b)[1], mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="the sum goes everywhere.*Leave it out"):
        jax.jit(run)(paths.params(), BATCH)


def test_a_loss_of_each_device_needs_the_axes_in_every_way():
    """JAX adds its gradient over the devices, so that a step was that of as many times the gradient."""
    mesh, tx = paths.mesh_of("Auto"), optax_accum.accumulate_gradients(optax.sgd(1.0), 1)
    step = optax_accum.value_and_apply_gradients(loss, tx)
    ways = {
        "Pass devices=.*for that of all their rows": optax_accum.reduce_microbatches(jax.value_and_grad(loss), 1),
        "Pass devices=.* to accumulate_gradients; or return jax.lax.pmean": lambda p, b: step(p, tx.init(p), b)[1],
    }
    for message, run in ways.items():
        inside = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        with pytest.raises(ValueError, match=f"differs between devices needs devices.*{message}"):
            jax.jit(inside).lower(paths.params(), BATCH)


SHARDED = {"w": np.float32([[1, 2], [3, 4], [5, 6], [7, 8]]), "b": np.float32([1, -1])}
SHARDS = {"w": P("data"), "b": P()}
GATHERED_ROWS = np.random.default_rng(2).normal(size=(8, 4)).astype("f")


def gathering(params, x):
    """A mean over rows, of a matrix of which each device has a shard."""
    whole = jax.lax.all_gather(params["w"], "data", tiled=True)
    return jnp.mean((x @ whole + params["b"][None]) ** 2)


def stepped(params, x):
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 1, devices="data")
    return optax_accum.value_and_apply_gradients(gathering, tx)(
        params, tx.init(jax.tree.map(jnp.zeros_like, params)), x
    )


def per_device(run, out_specs, **options):
    mesh = paths.mesh_of("Auto")
    run = jax.shard_map(run, mesh=mesh, in_specs=(SHARDS, P("data")), out_specs=out_specs, **options)
    with jax.set_mesh(mesh):
        return jax.jit(run)(SHARDED, GATHERED_ROWS)


@pytest.mark.parametrize(
    "run",
    [
        lambda params, x: optax_accum.value_and_grad(gathering, 2, devices="data")(params, x)[1],
        lambda params, x: optax_accum.reduce_microbatches(jax.grad(gathering), 2, devices="data")(params, x),
        lambda params, x: stepped(params, x)[1],
        lambda params, x: optax_accum.sharding.defer_reduction(params, "data"),
    ],
    ids=["value_and_grad", "reduce_microbatches", "value_and_apply_gradients", "defer_reduction"],
)
def test_gradients_of_different_shards_are_not_added(run):
    with pytest.raises(ValueError, match=r"must be the same on all devices along .*\['w'\].*partial"):
        per_device(run, SHARDS)


@pytest.mark.sweep
@pytest.mark.parametrize("check_vma", [True, False])
def test_partial_gradients_of_shards_are_whole(check_vma):
    """The remedy, for a ready gradient; and what is no gradient is added as ever."""
    partial = optax_accum.Devices("data", to="partial")

    def run(params, x):
        value = optax_accum.reduce_microbatches(gathering, 2, devices="data")(params, x)
        grad = optax_accum.reduce_microbatches(jax.grad(gathering), 2, devices=partial)(params, x)
        shared = jax.lax.psum(grad["b"], "data")
        return value, jax.tree.map(lambda leaf: leaf / 2, {**grad, "b": shared})  # a mean over two devices

    plain = lambda params, x: jnp.mean((x @ params["w"] + params["b"][None]) ** 2)
    want = jax.value_and_grad(plain)(SHARDED, GATHERED_ROWS)
    got = per_device(run, (P(), SHARDS), check_vma=check_vma)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5), got, want)
    refused = lambda params, x: optax_accum.value_and_grad(gathering, 2, devices=partial)(params, x)[1]
    with pytest.raises(ValueError, match=r"other devices of \('data',\) \(all_gather\w*, test_manual.py:\d+\)"):
        per_device(refused, SHARDS, check_vma=check_vma)


ROWS = np.random.default_rng(3).normal(size=(8, 3)).astype("f")


def ring(w, x):
    """A product whose columns go around the other axis, as in ring attention."""
    return jax.lax.ppermute(x @ w, "other", [(0, 1), (1, 0)])


def ring_loss(ringed, w, x):
    return jnp.mean((ringed(w, x) * jnp.arange(4.0)[None] - 1) ** 2)


@pytest.mark.parametrize("names_its_mesh", [False, True])
@pytest.mark.parametrize("way", ["value_and_grad", "reduce_microbatches", "value_and_apply_gradients"])
def test_a_loss_with_a_shard_map_of_its_own_under_devices(way, names_its_mesh):
    """XLA's own error, in plain JAX, too: here one that says the two ways that work."""
    mesh = paths.mesh_of("Auto")
    own = {"mesh": mesh} if names_its_mesh else {}
    specs = {"in_specs": (P(None, "other"), P()), "out_specs": P(None, "other"), "axis_names": {"other"}}
    loss = functools.partial(ring_loss, jax.shard_map(ring, **specs, **own))

    def across(w, x):
        tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 1, devices="data")
        return optax_accum.value_and_apply_gradients(loss, tx)(w, tx.init(w), x)

    run = {
        "value_and_grad": optax_accum.value_and_grad(loss, 2, devices="data"),
        "reduce_microbatches": optax_accum.reduce_microbatches(jax.grad(loss), 2, devices="data"),
        "value_and_apply_gradients": across,
    }[way]
    with jax.set_mesh(mesh):
        w, x = paths.on_mesh(mesh, np.ones((3, 4), "f"), P(None, "other")), paths.on_mesh(mesh, ROWS, P("data"))
        with pytest.raises(ValueError, match=r"devices=\('data',\).*inside one jax.shard_map over all.*or leave out"):
            jax.jit(run).lower(w, x)


@pytest.mark.sweep
def test_the_two_ways_for_a_loss_that_communicates_over_another_axis():
    mesh, w = paths.mesh_of("Auto"), np.ones((3, 4), "f")
    specs = {"in_specs": (P(None, "other"), P()), "out_specs": P(None, "other"), "axis_names": {"other"}}
    without = optax_accum.value_and_grad(functools.partial(ring_loss, jax.shard_map(ring, mesh=mesh, **specs)), 2)

    def of_columns(w, x):
        mine = jax.lax.dynamic_slice_in_dim(jnp.arange(4.0), jax.lax.axis_index("other") * 2, 2)
        return jax.lax.pmean(jnp.mean((ring(w, x) * mine[None] - 1) ** 2), "other")

    in_one = jax.shard_map(
        lambda w, x: optax_accum.value_and_grad(of_columns, 2, devices="data")(w, x)[1],
        mesh=mesh,
        in_specs=(P(None, "other"), P("data")),
        out_specs=P(None, "other"),
    )
    with jax.set_mesh(mesh):
        placed = paths.on_mesh(mesh, w, P(None, "other")), paths.on_mesh(mesh, ROWS, P("data"))
        got = [jax.jit(without)(*placed)[1], jax.jit(in_one)(*placed)]
    rolled = lambda w, x: jnp.roll(x @ w, 2, axis=1)
    want = jax.grad(functools.partial(ring_loss, rolled))(w, ROWS)
    for grad in got:
        np.testing.assert_allclose(np.asarray(grad), want, rtol=1e-5)


@pytest.mark.parametrize(
    "constrain",
    [
        pytest.param(
            jax.lax.with_sharding_constraint, marks=since(0, 8, 0, why="before, some are refused when compiling")
        ),
        jax.sharding.reshard,
    ],
)
@pytest.mark.parametrize("names_its_mesh", [False, True])
def test_a_loss_that_constrains_over_the_reduced_axis(mesh, constrain, names_its_mesh):
    """JAX spoke of its own types."""
    to = NamedSharding(mesh, P("data")) if names_its_mesh else P("data")
    f = optax_accum.value_and_grad(lambda w, x: jnp.mean(constrain(x @ w, to)), 2, devices="data")
    with pytest.raises(ValueError, match=r"devices=\('data',\), and jax.lax.with_sharding_constraint.*Constrain"):
        jax.jit(f).lower(jnp.ones((3, 4)), paths.on_mesh(mesh, ROWS, P("data")))


def test_statistics_are_not_taken_of_shards():
    """Those over another axis of the user's `jax.shard_map`: types did not fit, somewhere."""
    mesh, w = paths.mesh_of("Auto"), np.ones((3, 4), "f")
    loss = lambda w, x: jax.lax.pmean(jnp.mean((x @ w) ** 2), "other")
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2, devices="data", statistics=True)
    within = lambda w, x: optax_accum.value_and_grad(loss, 2, devices="data", statistics=True)(w, x)[1]
    across = lambda w, x: optax_accum.value_and_apply_gradients(loss, tx)(w, tx.init(w), x)[1]
    for run in (within, across):
        run = jax.shard_map(run, mesh=mesh, in_specs=(P(None, "other"), P("data")), out_specs=P(None, "other"))
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"at .* each device of \('other',\) may have a shard"):
            jax.jit(run).lower(w, ROWS)


before_pmap_is_a_shard_map = pytest.mark.skipif(JAX >= (0, 8, 0), reason="JAX 0.8: jax.pmap is a jax.shard_map")


@pytest.mark.parametrize("mapped", [jax.vmap, pytest.param(jax.pmap, marks=before_pmap_is_a_shard_map)])
def test_an_axis_of_another_map_is_no_mesh_axis(mapped):
    """It was asked for a mesh."""
    f = optax_accum.value_and_grad(lambda w, x: jnp.mean(x * w), 2, devices="data")
    with pytest.raises(ValueError, match="'data' is that of jax.pmap or jax.vmap here. Take jax.jit on a mesh"):
        mapped(f, axis_name="data", in_axes=(None, 0))(1.0, jnp.ones((2, 4)))


def test_a_chain_around_the_optimizer_is_named_where_partial_sums_are_missing(mesh):
    """It told who had called `value_and_apply_gradients` to call that."""
    clip, loss = optax.clip_by_global_norm(1.0), lambda w, x: jnp.mean((x @ w) ** 2)
    outside = optax.chain(clip, optax_accum.accumulate_gradients(optax.sgd(1.0), 2, devices="data"))
    inside = optax_accum.accumulate_gradients(optax.chain(clip, optax.sgd(1.0)), 2, devices="data")
    w, x = paths.on_mesh(mesh, np.ones((3, 4), "f"), P()), paths.on_mesh(mesh, ROWS, P("data"))
    step = lambda tx: jax.jit(optax_accum.value_and_apply_gradients(loss, tx)).lower(w, tx.init(w), x)
    remedies = r"flax\.nnx\.train_step.*in no chain: accumulate_gradients\(optax\.chain"
    with pytest.raises(ValueError, match=remedies):
        step(outside)
    step(inside)  # the remedy


@pytest.mark.parametrize("every", [2, *sweep([1])])
def test_a_state_is_made_inside_with_parameters_sharded_over_another_axis(every):
    """Its sums have the types of the shards: JAX took no gradient of another type."""
    mesh, w = paths.mesh_of("Auto"), np.linspace(0, 1, 12, dtype="f").reshape(3, 4)
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), every, devices="data")
    loss = lambda w, x: jax.lax.psum(jnp.sum((x @ w) ** 2) / len(x), "other")
    step = optax_accum.value_and_apply_gradients(loss, tx, weight_fn=len)

    def run(w, x):
        state = tx.init(w)
        for _ in range(every):
            _, w, state = step(w, state, x)
        return w

    inside = jax.shard_map(run, mesh=mesh, in_specs=(P(None, "other"), P("data")), out_specs=P(None, "other"))
    now = jax.jit(inside)(w, ROWS)
    want = w - jax.grad(lambda w: jnp.sum((ROWS @ w) ** 2) / len(ROWS))(w)
    np.testing.assert_allclose(np.asarray(now), want, rtol=1e-5)
