"""On a mesh: one reduction for a window, the law on every mesh, and states that stay where they belong."""

import functools
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

import optax_accum
from tests import engine, programs
from tests.tiers import sweep
from tests.versions import JAX, since

TYPES = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}
SHAPES = {"data": {"data": 8}, "data x tensor": {"data": 4, "tensor": 2}}
ROWS, WIDTH, HIDDEN = 64, 16, 32
BY_DATA = P("data")
GRADIENT_BYTES = 4 * (WIDTH * HIDDEN + HIDDEN + HIDDEN)
INNER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))  # needs the norm of all


MIXED = [(kind, "data x tensor") for kind in ("Auto+Explicit", "Explicit+Auto")]


def make_mesh(kind, shape):
    sizes, kinds = SHAPES[shape], [TYPES[name] for name in kind.split("+")]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=tuple(kinds * len(sizes))[: len(sizes)])


EVERY = [pytest.param(each) for each in (*((kind, shape) for kind in TYPES for shape in SHAPES), *MIXED)]


@pytest.fixture(params=sweep(EVERY, but=MIXED[1:]), ids=" ".join)
def mesh(request):
    mesh = make_mesh(*request.param)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(params=sweep(TYPES, but=["Explicit"]))
def data_mesh(request):
    mesh = make_mesh(request.param, "data")
    with jax.set_mesh(mesh):
        yield mesh


def loss(params, batch):
    """A mean over the rows that count: biased layers, a ragged mask."""
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"][None])
    error = (jnp.sum(hidden * params["v"][None], axis=-1) - batch["y"]) ** 2
    return jnp.sum(batch["mask"] * error) / jnp.sum(batch["mask"])


def tokens(batch):
    return batch["mask"].sum()


def host_params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: np.asarray(rng.normal(size=shape), np.float32)
    return {"w": draw(WIDTH, HIDDEN), "b": draw(HIDDEN), "v": draw(HIDDEN)}


def host_batch(rows=ROWS, seed=1):
    """Rows of which every device has another number that count, one device in eight none at all."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: np.asarray(rng.normal(size=shape), np.float32)
    mask = np.asarray(rng.random(rows) < np.linspace(0.2, 0.9, rows), np.float32)
    mask[: rows // 8] = 0
    return {"x": draw(rows, WIDTH), "y": draw(rows), "mask": mask}


def specs(mesh):
    if "tensor" in mesh.axis_names:
        return {"w": P(None, "tensor"), "b": P("tensor"), "v": P("tensor")}
    return {"w": P(), "b": P(), "v": P()}


def place(mesh, tree, spec):
    prefix = jax.tree.broadcast(spec, tree, is_leaf=lambda node: isinstance(node, P))
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), tree, prefix)


def close(got, want, tolerance=2e-6):
    jax.tree.map(lambda a, b: assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6, atol=tolerance), got, want)


@functools.partial(jax.jit, static_argnums=2)
def whole_update(params, batch, inner=INNER):
    updates, _ = inner.update(jax.grad(loss)(params, batch), inner.init(params), params)
    return optax.apply_updates(params, updates)


@functools.cache
def whole_gradient():
    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(host_params(), host_batch()))


def collectives(jitted, *args):
    return optax_accum.sharding.count_collectives(programs.compiled(jitted.lower(*args)))


def made(tx, params, **options):
    """The state, built where it belongs, and the step that leaves it there."""
    where = optax_accum.sharding.state_sharding(tx, params, **options)
    state = jax.jit(tx.init, out_shardings=where)(params)
    return state, (jax.tree.map(lambda leaf: leaf.sharding, params), where)


def collectives_of_a_micro_step(mesh, tx, params):
    state, where = made(tx, params)
    step = optax_accum.value_and_apply_gradients(loss, tx, weight_fn=tokens)
    step = jax.jit(step, out_shardings=(None, *where))
    return collectives(step, params, state, place(mesh, host_batch(), P("data")))


# Within a call


@pytest.mark.sweep
def test_the_gradient_on_every_mesh_and_its_one_reduction(mesh):
    params, batch = place(mesh, host_params(), specs(mesh)), place(mesh, host_batch(), P("data"))
    cut_loss = jax.jit(
        optax_accum.value_and_grad(loss, num_microbatches=4, devices="data"),
        out_shardings=(None, jax.tree.map(lambda leaf: leaf.sharding, params)),
    )
    close(cut_loss(params, batch), whole_gradient())
    found = collectives(cut_loss, params, batch)
    assert not [op for op in found.select(place="loop") if op.group == mesh.shape["data"] and op.bytes > 64]
    across = [op for op in found.select("all-reduce", "outside") if op.group == mesh.shape["data"] and op.bytes > 64]
    other = mesh.size // mesh.shape["data"]
    # JAX 0.10.2 and 0.11.0, not 0.10.0 or 0.12, gather over Explicit axes at the border of shard_map.
    gathered = jax.__version__ in ("0.10.2", "0.11.0") and AxisType.Explicit in mesh.axis_types
    if not gathered:
        assert not found.select("all-gather", min_bytes=64)  # a parameter stays over the other axes
    shares = {1, other} if gathered else {other}
    assert any(abs(sum(op.bytes for op in across) - GRADIENT_BYTES / share) <= 16 for share in shares)


@pytest.mark.parametrize("k", sweep([1, 2, 8], but=[8]))
def test_one_reduction_whatever_k_is_and_no_row_moves(data_mesh, k):
    params, batch = place(data_mesh, host_params(), P()), place(data_mesh, host_batch(), P("data"))
    cut_loss = jax.jit(optax_accum.value_and_grad(loss, num_microbatches=k, devices="data"))
    found = collectives(cut_loss, params, batch)
    assert not found.select(place=("loop", "branch"))
    assert {op.kind for op in found} == {"all-reduce"}
    (reduction,) = found.select(min_bytes=64)
    assert GRADIENT_BYTES <= reduction.bytes <= GRADIENT_BYTES + 4  # and the loss
    assert sum(op.bytes for op in found) <= GRADIENT_BYTES + 16  # and its sums over rows, before and after


@pytest.mark.sweep
def test_outputs_and_masks_are_those_of_the_whole_batch(data_mesh):
    params, batch = place(data_mesh, host_params(), P()), place(data_mesh, host_batch(), P("data"))
    key = jax.random.key(0)

    def with_outputs(params, batch, key):
        kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        aux = {"x": batch["x"][:, 0], "n": batch["mask"].sum(), "most": batch["y"].max(), "kept": kept}
        return loss(params, {**batch, "x": jnp.where(kept, batch["x"], 0)}), {**aux, "mean": batch["y"].mean()}

    run = optax_accum.value_and_grad(with_outputs, has_aux=True, num_microbatches=2, devices="data")
    want = jax.jit(jax.value_and_grad(with_outputs, has_aux=True))
    close(jax.jit(run)(params, batch, key), want(host_params(), host_batch(), key))


@pytest.mark.sweep
def test_two_reduced_axes():
    mesh = jax.make_mesh((2, 4), ("pod", "data"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        params, batch = place(mesh, host_params(), P()), place(mesh, host_batch(), P(("pod", "data")))
        run = optax_accum.value_and_grad(
            loss,
            num_microbatches=2,
            devices=optax_accum.Devices(("pod", "data"), to={"w": P("pod", "data"), "b": P(("pod", "data")), "v": P()}),
        )
        value, grads = jax.jit(run)(params, batch)
        close((value, grads), whole_gradient())
        assert grads["w"].sharding.is_equivalent_to(NamedSharding(mesh, P("pod", "data")), 2)


# Across calls


def train(mesh, tx, params, batches, step=None, rows=BY_DATA, **options):
    state, where = made(tx, params, **options)
    step = step or optax_accum.value_and_apply_gradients(loss, tx, weight_fn=tokens)
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(None, *where))
    for batch in batches:
        _, params, state = step(params, state, place(mesh, batch, rows))
    assert step._cache_size() == 1
    jax.tree.map(
        lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim) or pytest.fail(str(leaf)),
        state,
        where[1],
    )
    return params, state, step


BATCHES = [host_batch(seed=seed) for seed in range(3)]
JOINED = jax.tree.map(lambda *leaves: np.concatenate(leaves), *BATCHES)


@pytest.mark.sweep
def test_so_it_is_with_zero_one_on_every_mesh(mesh):
    params = place(mesh, host_params(), specs(mesh))
    to = optax_accum.sharding.shard_over(params, "data")
    tx = optax_accum.accumulate_gradients(INNER, every=3, devices=optax_accum.Devices("data", to=to))
    got, state, _ = train(mesh, tx, params, BATCHES)
    close(got, whole_update(host_params(), JOINED))
    moment = state.inner_opt_state[1][0].mu["w"]
    assert "data" in str(moment.sharding.spec)
    assert moment.sharding.is_equivalent_to(to["w"], 2)


def test_a_held_micro_step_communicates_nothing(data_mesh):
    """Every collective stands in a branch that only the closing micro-step takes."""
    params = place(data_mesh, host_params(), P())
    tx = optax_accum.accumulate_gradients(INNER, every=3, devices="data")
    found = collectives_of_a_micro_step(data_mesh, tx, params)
    assert not found.select(place=("outside", "loop"))
    (reduction,) = found.select(min_bytes=64)
    assert reduction.kind == "all-reduce"
    assert GRADIENT_BYTES <= reduction.bytes <= GRADIENT_BYTES + 12


@pytest.mark.sweep
@pytest.mark.parametrize("nonfinite", ["propagate", "discard"])
def test_the_sum_takes_the_place_of_the_partial_sums(data_mesh, nonfinite):
    """So that the all-reduce may write where it reads: 1 P less when a window emits, on a GPU and a TPU."""
    params = place(data_mesh, host_params(), P())
    tx = optax_accum.accumulate_gradients(INNER, every=2, devices="data", nonfinite=nonfinite)
    state, where = made(tx, params)
    step = jax.jit(optax_accum.value_and_apply_gradients(loss, tx, weight_fn=tokens), out_shardings=(None, *where))
    batch = place(data_mesh, host_batch(), P("data"))
    _, params, state = step(params, state, batch)
    held = jax.device_get(state.acc_grads)
    _, params, state = step(params, state, batch)
    for before, rows in zip(jax.tree.leaves(held), jax.tree.leaves(state.acc_grads), strict=True):
        rows = np.asarray(rows)
        np.testing.assert_allclose(rows, np.broadcast_to(2 * before.sum(0), rows.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.sweep
def test_owned_windows_hold_without_any_collective(data_mesh):
    params = place(data_mesh, host_params(), P())
    tx = optax_accum.accumulate_gradients(INNER, every=None, devices="data")
    state, _ = made(tx, params)
    hold = functools.partial(optax_accum.value_and_apply_gradients(loss, tx, weight_fn=tokens), flush=False)
    assert not collectives(jax.jit(hold), params, state, place(data_mesh, host_batch(), P("data")))


@pytest.mark.sweep
def test_zero_one_is_a_reduce_scatter_and_an_all_gather(data_mesh):
    params = place(data_mesh, host_params(), P())
    to = optax_accum.sharding.shard_over(params, "data")
    tx = optax_accum.accumulate_gradients(INNER, every=3, devices=optax_accum.Devices("data", to=to))
    found = collectives_of_a_micro_step(data_mesh, tx, params)
    assert not found.select(place=("outside", "loop"))
    assert found.select("reduce-scatter").bytes == found.select("all-gather").bytes == GRADIENT_BYTES
    assert not found.select("all-reduce", min_bytes=64)


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    """The forms that a TPU's compiler wants, for leaves and meshes of any size."""
    monkeypatch.setattr(engine.meshes, "device_kind", lambda mesh: "TPU v5 lite")
    monkeypatch.setattr(engine.collectives, "CHIPS", 4)
    monkeypatch.setattr(engine.collectives, "LARGE", 1)


@pytest.mark.parametrize(
    "to", [*sweep([None]), {"w": P(None, "data"), "b": P(), "v": P("data")}], ids=["whole", "ZeRO-1"]
)
def test_what_a_tpu_adds_is_the_same(data_mesh, as_on_a_tpu, to):
    """Large leaves slice by slice, in their place; a reduce-scatter in two stages."""
    params, batch = place(data_mesh, host_params(), P()), place(data_mesh, host_batch(), P("data"))
    tx = optax_accum.accumulate_gradients(INNER, every=3, devices=optax_accum.Devices("data", to=to))
    close(train(data_mesh, tx, jax.tree.map(jnp.copy, params), BATCHES)[0], whole_update(host_params(), JOINED))
    options = {"num_microbatches": 2, "devices": optax_accum.Devices("data", to=to)}
    cut_loss = jax.jit(optax_accum.value_and_grad(loss, **options))
    close(cut_loss(params, batch), whole_gradient())
    found = collectives(cut_loss, params, batch)
    if to:
        scattered = found.select("reduce-scatter")
        assert {op.group for op in scattered} == {4, 2}
        assert scattered.bytes == pytest.approx(1.25 * 4 * (WIDTH + 1) * HIDDEN)
    else:
        assert {op.times for op in found.select("all-reduce", "loop")} == {16}
        assert found.select("all-reduce", "loop").bytes == GRADIENT_BYTES


def test_a_tpu_adds_in_bfloat16_slice_by_slice(data_mesh, as_on_a_tpu):
    """Where the slices of a leaf can be dealt out; any other leaf at once."""
    params, batch = place(data_mesh, host_params(), P()), place(data_mesh, host_batch(), P("data"))
    options = {"num_microbatches": 2, "devices": optax_accum.Devices("data", dtype=jnp.bfloat16)}
    cut_loss = jax.jit(optax_accum.value_and_grad(loss, **options))
    close(cut_loss(params, batch), whole_gradient(), tolerance=2e-2)
    found = collectives(cut_loss, params, batch)
    assert {op.times for op in found.select("all-to-all", "loop")} == {16}
    assert found.select("all-to-all", "loop").bytes == 2 * WIDTH * HIDDEN


@pytest.mark.sweep
@pytest.mark.parametrize("k", [1, 2])
def test_both_mechanisms_together_reduce_once(data_mesh, k):
    params, batch = place(data_mesh, host_params(), P()), place(data_mesh, host_batch(), P("data"))
    tx = optax_accum.accumulate_gradients(INNER, every=2, devices="data")
    cut_loss = optax_accum.value_and_grad(loss, num_microbatches=k, devices=optax_accum.Devices("data", to="partial"))

    def step(params, state, batch):
        value, grads = cut_loss(params, batch)
        weight = batch["mask"].reshape(8, -1).sum(1)
        return value, *optax_accum.apply_gradients(tx, grads, state, params, weight=weight, value=value)

    got, _, jitted = train(data_mesh, tx, params, BATCHES[:2], step)
    first_two = jax.tree.map(lambda *leaves: np.concatenate(leaves), *BATCHES[:2])
    close(got, whole_update(host_params(), first_two))
    state, _ = made(tx, params)
    assert not collectives(jitted, place(data_mesh, host_params(), P()), state, batch).select(place=("outside", "loop"))


@pytest.mark.sweep
def test_agreeing_costs_one_small_number(data_mesh):
    params = place(data_mesh, host_params(), P())
    for nonfinite, limit in (("omit", 8), ("discard", 0)):
        tx = optax_accum.accumulate_gradients(INNER, every=2, devices="data", nonfinite=nonfinite)
        found = collectives_of_a_micro_step(data_mesh, tx, params)
        assert found.select(place=("outside", "loop")).bytes <= limit


@pytest.mark.sweep
def test_mean_arguments_are_those_of_all_devices(data_mesh):
    tx = optax_accum.accumulate_gradients(optax.with_extra_args_support(_value_as_update()), every=2, devices="data")
    params = place(data_mesh, {"p": np.zeros(3, "f")}, P())
    state, _ = made(tx, params)
    step = jax.jit(functools.partial(optax_accum.apply_gradients, tx))
    rows = {"p": jnp.ones((8, 3))}
    for start in (0.0, 8.0):
        params, state = step(rows, state, params, value=start + jnp.arange(8.0), weight=jnp.arange(8.0))
    assert_allclose(params["p"], np.average(np.arange(16), weights=np.tile(np.arange(8), 2)), rtol=1e-6)


def _value_as_update():
    update = lambda grads, state, params=None, *, value, **_: (
        jax.tree.map(lambda g: jnp.full_like(g, value), grads),
        state,
    )
    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@pytest.mark.sweep
def test_a_sum_and_every_one(data_mesh):
    params, rows = place(data_mesh, {"p": np.zeros(3, "f")}, P()), {"p": jnp.ones((8, 3))}
    for every, reduction, want in ((1, "mean", -1), (1, "sum", -8), (2, "sum", 0)):
        tx = optax_accum.accumulate_gradients(optax.sgd(1.0), every, reduction=reduction, devices="data")
        updates, state = jax.jit(tx.update)(rows, tx.init(params), params)
        assert_array_equal(updates["p"], np.full(3, want))
        assert (state.acc_grads == ()) == (every == 1)


@pytest.mark.sweep
def test_integer_parameters_and_bfloat16(data_mesh):
    params = place(data_mesh, {"w": np.ones(4, jnp.bfloat16), "n": np.arange(3)}, P())
    fun = lambda params, x: jnp.mean((x @ params["w"].astype(jnp.float32)) ** 2)
    for every in (1, 2):
        tx = optax_accum.accumulate_gradients(
            optax.masked(optax.sgd(0.5), {"w": True, "n": False}), every, devices="data"
        )
        step = jax.jit(optax_accum.value_and_apply_gradients(fun, tx))
        _, new, _ = step(params, tx.init(params), place(data_mesh, np.ones((16, 4), "f"), P("data")))
        assert_array_equal(new["n"], np.arange(3))
        assert_allclose(new["w"].astype(float), np.full(4, -3.0 if every == 1 else 1.0))


# Where a state lives


def test_the_state_of_a_chain_is_built_in_place(mesh):
    params = place(mesh, host_params(), specs(mesh))
    tx = optax.chain(
        optax_accum.accumulate_gradients(optax.adam(1e-3), every=4, devices="data"), optax.add_decayed_weights(0.0)
    )
    state, _ = made(tx, params, devices="data")
    ours = state[0]
    for name, spec in specs(mesh).items():
        rows = ours.acc_grads[name]
        assert rows.shape == (mesh.shape["data"], *host_params()[name].shape)
        assert rows.sharding.is_equivalent_to(NamedSharding(mesh, P("data", *spec)), rows.ndim)
        moment = ours.inner_opt_state[0].nu[name]
        assert moment.sharding.is_equivalent_to(NamedSharding(mesh, spec), moment.ndim)
    assert len(ours.mini_step.sharding.device_set) == 8
    with pytest.raises(ValueError, match="inside the chain.*Pass devices="):
        optax_accum.sharding.state_sharding(tx, params)


def test_abstract_parameters_are_enough(data_mesh):
    params = {"w": jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=NamedSharding(data_mesh, P()))}
    tx = optax_accum.accumulate_gradients(optax.adam(1e-3), every=4, devices="data")
    where = optax_accum.sharding.state_sharding(tx, params)
    assert where.acc_grads["w"].spec == P("data", None, None)
    shards = optax_accum.sharding.shard_over(params, "data")
    assert shards["w"].spec == P("data", None)
    tx = optax_accum.accumulate_gradients(optax.adam(1e-3), every=4, devices=optax_accum.Devices("data", to=shards))
    for devices in (None, "data"):  # where the sum goes is read off the optimizer
        where = optax_accum.sharding.state_sharding(tx, params, devices)
        assert where.inner_opt_state[0].mu["w"].spec == P("data", None)


def host_memory_works():
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    return "pinned_host" in kinds and tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)


@pytest.mark.sweep
@pytest.mark.skipif(not host_memory_works(), reason="XLA on CPU moves arrays to the host inside jit from JAX 0.12 on")
@pytest.mark.parametrize(
    "offload", [*sweep(["acc_grads", "inner_opt_state"]), ("acc_grads", "inner_opt_state")], ids=str
)
def test_what_is_offloaded_stays_in_host_memory(data_mesh, offload):
    params = place(data_mesh, host_params(), P())
    tx = optax_accum.accumulate_gradients(INNER, every=3, devices="data")
    state, where = made(tx, params, offload=offload)
    step = jax.jit(optax_accum.value_and_apply_gradients(loss, tx, weight_fn=tokens), out_shardings=(None, *where))
    for batch in BATCHES:
        _, params, state = step(params, state, place(data_mesh, batch, P("data")))
    close(params, whole_update(host_params(), JOINED))
    kinds = {"acc_grads": state.acc_grads["w"], "inner_opt_state": state.inner_opt_state[1][0].mu["w"]}
    for name, leaf in kinds.items():
        assert leaf.sharding.memory_kind == ("pinned_host" if name in offload else "device")
    assert step._cache_size() == 1


def test_a_window_in_flight_goes_on_with_other_devices(data_mesh):
    params = place(data_mesh, host_params(), P())
    tx = optax_accum.accumulate_gradients(INNER, every=3, devices="data")
    _, state, _ = train(data_mesh, tx, params, BATCHES[:2])
    host = jax.tree.map(np.asarray, state)
    sums = lambda state: (jax.tree.map(lambda leaf: leaf.sum(0), state.acc_grads), state.weight.sum())
    for devices in (1, 2, 3, 8, 16, None):
        moved = optax_accum.checkpoint.redistribute(host, devices)
        assert isinstance(moved.weight, np.ndarray | np.generic)
        new = (moved.acc_grads, moved.weight) if devices is None else sums(moved)
        close(new, sums(host), 1e-5)
        assert moved.weight.shape == (() if devices is None else (devices,))
        close(sums(optax_accum.checkpoint.redistribute(moved, 8)), sums(host), 1e-5)


# Bad input


def test_bad_axes_and_batches(data_mesh):
    params = place(data_mesh, host_params(), P())
    run = lambda axes, rows=ROWS, **kw: optax_accum.value_and_grad(loss, **{"num_microbatches": 2, **kw}, devices=axes)(
        params, host_batch(rows)
    )
    with pytest.raises(ValueError, match=r"'model' is none of \('data',\)"):
        run("model")
    with pytest.raises(ValueError, match=r"'model' is none of \('data',\)"):
        optax_accum.accumulate_gradients(INNER, 2, devices="model").init(params)
    with pytest.raises(ValueError, match="63 rows, 8 devices.*Pad the batch to 64 rows"):
        run("data", 63)
    with pytest.raises(ValueError, match="num_microbatches=9, and each of 8 devices has 8 rows"):
        run("data", num_microbatches=9)
    with pytest.raises(ValueError, match="microbatch_size=12, 8 devices. Pass a multiple of 8"):
        run("data", num_microbatches=None, microbatch_size=12)
    for axes, error in ((3, TypeError), ((), TypeError), (("data", "data"), ValueError)):
        with pytest.raises(error, match="devices must"):
            run(axes)


def test_no_mesh_in_reach():
    tx = optax_accum.accumulate_gradients(INNER, 2, devices="data")
    with pytest.raises(ValueError, match="needs a mesh in reach.*jax.set_mesh"):
        tx.init(host_params())
    with pytest.raises(ValueError, match="needs a mesh in reach"):
        jax.jit(optax_accum.value_and_grad(loss, num_microbatches=2, devices="data"))(host_params(), host_batch())


def test_gradients_that_a_shard_map_has_reduced_already(data_mesh):
    params = place(data_mesh, host_params(), P())
    tx = optax_accum.accumulate_gradients(INNER, 2, devices="data")
    state, _ = made(tx, params)
    spec = jax.tree.map(lambda sharding: sharding.spec, optax_accum.sharding.state_sharding(tx, params))

    @jax.jit
    @functools.partial(jax.shard_map, in_specs=(P(), spec, P("data")), out_specs=(P(), spec))
    def step(params, state, batch):
        return optax_accum.apply_gradients(tx, jax.grad(loss)(params, batch), state, params)

    with pytest.raises(ValueError, match="defer_reduction"):
        step(params, state, place(data_mesh, host_batch(), P("data")))
    with pytest.raises(ValueError, match="works inside jax.shard_map"):
        optax_accum.sharding.defer_reduction(params, "data")


def test_a_loss_that_is_averaged_over_devices(data_mesh):
    params = place(data_mesh, host_params(), P())
    averaged = lambda params, batch: jax.lax.pmean(loss(params, batch), "data")
    with pytest.raises(ValueError, match=r"Leave jax.lax.pmean out|psum\w*, test_sharded.py:\d+\). Leave that out"):
        optax_accum.value_and_grad(averaged, num_microbatches=2, devices="data")(params, host_batch())
    tx = optax_accum.accumulate_gradients(INNER, 2, devices="data")
    with pytest.raises(ValueError, match=r"Leave jax.lax.pmean out"):
        optax_accum.value_and_apply_gradients(averaged, tx)(params, tx.init(params), host_batch())


@pytest.mark.sweep
@pytest.mark.parametrize("number", [1.5, 3])
def test_a_loss_that_is_one_number_on_all_devices(data_mesh, number):
    params = place(data_mesh, host_params(), P())
    for loss in (number, optax_accum.Ratio(2 * number, 2)):
        value, grads = optax_accum.value_and_grad(lambda *_, loss=loss: loss, 2, devices="data")(params, host_batch())
        assert value == number
        close(grads, jax.tree.map(jnp.zeros_like, params))
    tx = optax_accum.accumulate_gradients(INNER, 1, devices="data")
    step = optax_accum.value_and_apply_gradients(lambda *_: float(number), tx)
    values, _, _ = step(params, tx.init(params), host_batch())
    assert set(values.tolist()) == {number}


def test_parameters_that_are_sharded_over_the_reduced_axis(data_mesh):
    sharded = place(data_mesh, host_params(), P("data"))
    run = functools.partial(optax_accum.value_and_grad, loss, num_microbatches=2)
    with pytest.raises(ValueError, match=r"replicated over devices.*to=shard_over"):
        run(devices="data")(sharded, host_batch())
    to = optax_accum.sharding.shard_over(sharded, "data")
    value, grads = jax.jit(run(devices=optax_accum.Devices("data", to=to)))(
        sharded, place(data_mesh, host_batch(), P("data"))
    )
    close((value, grads), whole_gradient())
    assert grads["w"].sharding.is_equivalent_to(to["w"], 2)


def test_a_state_for_other_devices_or_another_tree(data_mesh):
    params = place(data_mesh, host_params(), P())
    tx = optax_accum.accumulate_gradients(INNER, 2, devices="data")
    state, step = tx.init(params), optax_accum.value_and_apply_gradients(loss, tx)
    with pytest.raises(ValueError, match=r"partial sums for 4 devices, and there are 8.*redistribute\(state, 8\)"):
        step(params, optax_accum.checkpoint.redistribute(state, 4), host_batch())
    with pytest.raises(ValueError, match=r"has no partial sums.*redistribute\(state, 8\)"):
        step(params, optax_accum.checkpoint.redistribute(state, None), host_batch())
    rows = {name: jnp.zeros((8, *leaf.shape)) for name, leaf in params.items()}
    with pytest.raises(ValueError, match=r"redistribute\(state, 8\)"):
        tx.update(rows, optax_accum.checkpoint.redistribute(state, 4), params)
    with pytest.raises(ValueError, match="must have the tree of the state"):
        tx.update({"other": jnp.zeros((8, 3))}, state, None)
    for call, message in (
        (lambda: optax_accum.checkpoint.redistribute(state, 0), "num_devices must be an integer >= 1"),
        (lambda: optax_accum.checkpoint.redistribute(state, 1.5), "num_devices must be an integer >= 1"),
        (lambda: optax_accum.checkpoint.redistribute(state, True), "num_devices must be an integer >= 1"),
        (lambda: optax_accum.checkpoint.redistribute(params, 2), "holds an AccumulationState"),
        (lambda: optax_accum.sharding.state_sharding(tx, params, offload="moments"), "offload must name"),
        (lambda: optax_accum.Devices(None, to=P()), "Name the axes"),
        (lambda: optax_accum.Devices("data", to={"w": 3}), "must hold a jax.sharding.PartitionSpec.*it holds 3"),
        (
            lambda: optax_accum.accumulate_gradients(INNER, 2, devices="data", nonfinite=lambda *_: None),
            "callable nonfinite",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    wrong = optax_accum.accumulate_gradients(INNER, 1, devices=optax_accum.Devices("data", to={"w": P("data")}))
    with pytest.raises(ValueError, match="to=. must be a prefix"):
        wrong.init(params)


def test_gradients_that_are_partial_sums_over_other_axes():
    mesh = jax.make_mesh((2, 4), ("pod", "data"), axis_types=(AxisType.Auto,) * 2)
    tx = optax_accum.accumulate_gradients(INNER, 2, devices=("pod", "data"))
    with jax.set_mesh(mesh):
        params = place(mesh, host_params(), P())
        state, rows = tx.init(params), jax.tree.map(lambda leaf: jnp.ones((4, *leaf.shape)), params)
        with pytest.raises(ValueError, match=r"they are of 4 devices, and there are 8.*Pass devices=\('pod', 'data'"):
            tx.update(rows, state, params)


@pytest.mark.parametrize(("params", "every"), [({"s": np.float32(1)}, 2), (host_params(), 1)], ids=["scalar", "arrays"])
def test_gradients_that_are_whole(data_mesh, every, params):
    params = place(data_mesh, params, P())
    tx = optax_accum.accumulate_gradients(INNER, every, devices="data")
    for step in (tx.update, functools.partial(optax_accum.apply_gradients, tx), jax.jit(tx.update)):
        with pytest.raises(ValueError, match=r'reduced already.*to="partial"'):
            step(params, tx.init(params), params)


@pytest.mark.sweep
@pytest.mark.parametrize("to", [P("data"), P(None, "data"), P(None, None, "data")], ids=str)
def test_specs_that_do_not_divide(data_mesh, to):
    params, x = place(data_mesh, {"w": np.ones((12, 4), "f")}, P()), place(data_mesh, np.ones((16, 12), "f"), P("data"))
    fun = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
    tx = optax_accum.accumulate_gradients(INNER, 2, devices=optax_accum.Devices("data", to=to))
    run = optax_accum.value_and_grad(fun, num_microbatches=2, devices=optax_accum.Devices("data", to=to))
    message = r"evenly: at .*\['w'\] the shape is \(12, 4\).*shard_over\(params, axes\) leaves"
    for call in (run, jax.jit(run)):
        with pytest.raises(ValueError, match=message):
            call(params, x)
    for call in (tx.init, functools.partial(optax_accum.sharding.state_sharding, tx)):
        with pytest.raises(ValueError, match=message):
            call(params)
    whole = optax_accum.sharding.shard_over(params, "data")  # the remedy
    run = optax_accum.value_and_grad(fun, num_microbatches=2, devices=optax_accum.Devices("data", to=whole))
    close(run(params, x), jax.value_and_grad(fun)(params, x))


def test_where_it_can_be_seen_that_parameters_are_sharded_over_the_reduced_axis(data_mesh):
    """Inside jit, on an Auto mesh, it cannot: `state_sharding` sees it before."""
    params = place(data_mesh, host_params(), P("data"))
    tx = optax_accum.accumulate_gradients(INNER, 2, devices="data")
    for call in (tx.init, functools.partial(optax_accum.sharding.state_sharding, tx)):
        with pytest.raises(ValueError, match=r"replicated over devices.*to=shard_over"):
            call(params)


@pytest.mark.sweep
@pytest.mark.parametrize("to", [P("tensor"), P("data", "tensor"), P(("tensor", "data"))], ids=str)
@pytest.mark.parametrize("mesh", sweep(EVERY[1:4:2] + EVERY[4:], but=MIXED[:1]), indirect=True, ids=" ".join)
def test_a_sum_goes_over_axes_that_parameters_are_whole_over(mesh, to):
    params, batch = place(mesh, {"w": host_params()["w"]}, P()), place(mesh, host_batch()["x"], P("data"))
    fun = lambda params, x: jnp.mean(jnp.tanh(x @ params["w"]) ** 2)
    run = optax_accum.value_and_grad(fun, num_microbatches=2, devices=optax_accum.Devices("data", to=to))
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 1, devices=optax_accum.Devices("data", to=to))
    step = optax_accum.value_and_apply_gradients(fun, tx)
    whole = jax.value_and_grad(fun)({"w": host_params()["w"]}, host_batch()["x"])
    for ours in (run, jax.jit(run)):
        close(ours(params, batch), whole)
    _, new, _ = jax.jit(step)(params, tx.init(params), batch)
    close(new["w"], params["w"] - whole[1]["w"])


@pytest.mark.sweep
def test_outside_jit_over_axes_of_two_kinds():
    mesh = jax.make_mesh((2, 4), ("pod", "data"), axis_types=(AxisType.Auto, AxisType.Explicit))
    with jax.set_mesh(mesh):
        params, batch = place(mesh, host_params(), P()), place(mesh, host_batch(), P(("pod", "data")))
        run = optax_accum.value_and_grad(loss, num_microbatches=2, devices=("pod", "data"))
        close(run(params, batch), whole_gradient())
        tx = optax_accum.accumulate_gradients(INNER, 1, devices=("pod", "data"))
        _, new, _ = optax_accum.value_and_apply_gradients(loss, tx, weight_fn=tokens)(params, tx.init(params), batch)
        close(new, whole_update(host_params(), host_batch()))


ONE = [(kinds, None) for kinds in ("Auto+Auto", "Explicit+Explicit", *(kinds for kinds, _ in MIXED))]


OVER_ONE = [*ONE, *((kinds, True) for kinds in ("Auto+Auto", "Explicit+Explicit"))]


@pytest.mark.sweep
@pytest.mark.parametrize(("kinds", "overlap"), OVER_ONE)
def test_a_reduction_over_one_device_is_none(kinds, overlap):
    """Of parameters that are sharded over others; XLA partitions no all-reduce of groups of one (JAX 0.12)."""
    mesh = jax.make_mesh((1, 8), ("data", "fsdp"), axis_types=tuple(TYPES[kind] for kind in kinds.split("+")))
    with jax.set_mesh(mesh):
        params = place(mesh, host_params(), {"w": P("fsdp"), "b": P(), "v": P()})
        rows = P(("data", "fsdp")) if JAX >= (0, 9, 2) else P("data")  # before, none over an Explicit axis, too
        batch = place(mesh, host_batch(), rows)
        if kinds in ("Auto+Auto", "Explicit+Explicit") and not overlap:
            tx = optax_accum.accumulate_gradients(INNER, every=3, devices="data")
            got, _, _ = train(mesh, tx, jax.tree.map(jnp.copy, params), BATCHES, rows=rows)
            close(got, whole_update(host_params(), JOINED))
        run = optax_accum.value_and_grad(loss, num_microbatches=2, devices=optax_accum.Devices("data", overlap=overlap))
        compiled = programs.compiled(jax.jit(run).lower(params, batch))
        for ours in (run, compiled) if kinds == "Explicit+Explicit" and not overlap else (compiled,):
            close(ours(params, batch), whole_gradient())
        found = optax_accum.sharding.count_collectives(compiled)
        assert not [op for op in found.select(min_bytes=64) if op.group == 1]


@pytest.mark.sweep
def test_one_device_says_nothing():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        run = optax_accum.value_and_grad(loss, num_microbatches=2, devices="data")
        params, batch = place(mesh, host_params(), P()), place(mesh, host_batch(), P("data"))
        assert not collectives(jax.jit(run), params, batch).select(min_bytes=64)


@pytest.mark.sweep
def test_inside_a_shard_map_a_loss_of_own_rows_needs_devices(data_mesh):
    params, batch = place(data_mesh, host_params(), P()), place(data_mesh, host_batch(), P("data"))
    everywhere = {"in_specs": (P(), P("data")), "out_specs": P()}
    for k in (1, 2):
        run = optax_accum.value_and_grad(loss, num_microbatches=k)
        with pytest.raises(ValueError, match=r"differs over \('data',\).*Pass devices=\('data',\).*pmean"):
            jax.jit(jax.shard_map(run, **everywhere))(params, batch)
    averaged = lambda params, batch: jax.lax.pmean(jnp.mean(jnp.tanh(batch["x"] @ params["w"]) ** 2), "data")
    whole = lambda params, batch: jnp.mean(jnp.tanh(batch["x"] @ params["w"]) ** 2)
    run = optax_accum.value_and_grad(averaged, num_microbatches=2)  # a remedy
    close(jax.jit(jax.shard_map(run, **everywhere))(params, batch), jax.value_and_grad(whole)(params, batch))


@pytest.mark.sweep
@pytest.mark.parametrize("overlap", [*sweep([False]), True])
def test_a_loss_that_communicates_is_refused_and_its_remedies_are_exact(data_mesh, overlap):
    """Also where the last micro-batch's gradient is added over the devices in its backward pass."""
    params, batch = place(data_mesh, host_params(), P()), place(data_mesh, host_batch(), P("data"))

    def coupled(params, batch, mean=lambda x: jax.lax.pmean(x, "data")):
        x = batch["x"] - mean(batch["x"].mean(0))[None]
        return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)

    devices = optax_accum.Devices("data", overlap=overlap)
    message = r"takes something from the other devices of \('data',\) \(psum\w*, test_sharded.py:\d+\)"
    with pytest.raises(ValueError, match=f"{message}.*jax.value_and_grad.*reduce_microbatches"):
        jax.jit(optax_accum.value_and_grad(coupled, num_microbatches=2, devices=devices))(params, batch)
    alone = functools.partial(coupled, mean=lambda x: x)
    got = jax.jit(optax_accum.value_and_grad(alone, num_microbatches=2, devices="data"))(params, batch)
    close(got, jax.value_and_grad(alone)(host_params(), host_batch()))
    parts = [{"x": host_batch()["x"][part::2]} for part in range(2)]
    by_part = lambda params: sum(alone(params, part) for part in parts) / 2
    apart = optax_accum.reduce_microbatches(coupled, num_microbatches=2, devices="data")
    close(jax.jit(jax.value_and_grad(apart))(params, batch), jax.value_and_grad(by_part)(host_params()))


@pytest.mark.sweep
def test_a_state_of_one_device_and_one_made_in_jit_on_mixed_axes():
    tx = optax_accum.accumulate_gradients(INNER, 2, devices="data")
    step = optax_accum.value_and_apply_gradients(loss, tx)
    mesh = make_mesh("Auto+Explicit", "data x tensor")
    with jax.set_mesh(mesh):
        params, batch = place(mesh, host_params(), specs(mesh)), place(mesh, host_batch(), P("data"))
        alone = optax_accum.accumulate_gradients(INNER, 2).init(params)
        for call in (lambda: tx.update(params, alone, params), lambda: step(params, alone, batch, weight=2.0)):
            with pytest.raises(ValueError, match="redistribute"):
                call()
        _, _, state = jax.jit(step)(params, jax.jit(tx.init)(params), batch)
    assert state.mini_step == 1


@pytest.mark.sweep
def test_fsdp_across_calls(data_mesh):
    """Parameters sharded over the reduced axis: gathered for each gradient; for the update only where none can know."""
    params = place(data_mesh, host_params(), P("data"))
    to = optax_accum.sharding.shard_over(params, "data")
    tx = optax_accum.accumulate_gradients(INNER, every=3, devices=optax_accum.Devices("data", to=to))
    got, _, step = train(data_mesh, tx, params, BATCHES)
    close(got, whole_update(host_params(), JOINED))
    assert got["w"].sharding.is_equivalent_to(to["w"], 2)
    found = collectives(step, params, made(tx, params)[0], place(data_mesh, host_batch(), P("data")))
    assert found.select("reduce-scatter").bytes == GRADIENT_BYTES
    assert found.select("all-gather", "outside").bytes == GRADIENT_BYTES
    # Inside jit an array on an Auto mesh does not tell its sharding: new parameters are gathered, then cut again.
    auto = AxisType.Auto in data_mesh.axis_types
    assert found.select("all-gather", "branch").bytes == (GRADIENT_BYTES if auto else 0)


# What JAX still does, so that something else is done instead: a test that fails says that a quirk may go.


@pytest.mark.sweep
@since(0, 12, why="what it does decides whether a quirk may go")
def test_a_shard_map_beside_explicit_axes_still_gathers():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Explicit))
    x = jax.device_put(jnp.ones((4, 8, 8)), NamedSharding(mesh, P("data", "tensor")))
    total = lambda x: jax.lax.psum(x, "data")
    direct = functools.partial(jax.shard_map, total, mesh=mesh, axis_names={"data"})
    ours = functools.partial(engine.mapped.over_axes, total, mesh, ("data",))
    with jax.set_mesh(mesh):
        found = [collectives(jax.jit(way(in_specs=(P("data"),), out_specs=P())), x) for way in (direct, ours)]
    assert [bool(each.select("all-gather")) for each in found] == [True, False]


@pytest.mark.sweep
@since(0, 12, why="what it does decides whether a quirk may go")
def test_a_shard_map_still_scatters_nothing_beside_explicit_axes():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    w, to = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("data", "tensor"))), NamedSharding(mesh, P("data"))

    def gradient(gather):
        inner = lambda w: jax.lax.psum(jnp.sum(gather(engine.mapped.varying(w, ("data",))) ** 2), "data")
        over = jax.shard_map(inner, mesh=mesh, axis_names={"data"}, in_specs=(P("data"),), out_specs=P())
        with jax.set_mesh(mesh):
            return jax.jit(jax.grad(over))(w)

    np.testing.assert_allclose(gradient(lambda w: engine.mapped.gathered(w, to, ("data",))), 8 * np.ones((8, 8)))
    with pytest.raises(ValueError, match="sharding"):
        gradient(lambda w: jax.lax.all_gather(w, "data", axis=0, tiled=True))


@pytest.mark.sweep
@since(0, 12, why="what it does decides whether a quirk may go")
def test_an_all_reduce_of_one_device_is_still_not_partitioned():
    mesh = jax.make_mesh((1, 8), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    rows = jax.device_put(jnp.ones((1, 8)), NamedSharding(mesh, P("data", "fsdp")))
    total = lambda rows: jax.lax.psum(rows[0], "data")
    run = jax.shard_map(total, mesh=mesh, axis_names={"data"}, in_specs=P("data"), out_specs=P())
    with pytest.raises(jax.errors.JaxRuntimeError, match="manual partitioning"):
        jax.jit(run).lower(rows).compile()


ADDS_COMPLEX_CONSTANTS = """
import jax, jax.numpy as jnp
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
add = lambda x: jax.lax.psum(jax.lax.pcast(jnp.zeros(3, "complex64"), "data", to="varying"), "data")
run = jax.shard_map(add, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
jax.jit(run).lower(jnp.ones(8)).compile()
"""


@pytest.mark.sweep
@since(0, 12, why="what it does decides whether a quirk may go")
def test_an_all_reduce_of_complex_constants_still_ends_python():
    done = subprocess.run([sys.executable, "-c", ADDS_COMPLEX_CONSTANTS], check=False, capture_output=True, text=True)
    assert done.returncode < 0
    assert "Check failed: buffer" in done.stderr


def test_a_complex_parameter_that_nobody_uses():
    params = {"used": jnp.ones(WIDTH), "unused": jnp.ones(3, jnp.complex64)}
    loss = lambda params, x: jnp.mean((x @ params["used"]) ** 2)
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("f")
    with jax.set_mesh(make_mesh("Auto", "data")):
        gradient = jax.jit(optax_accum.value_and_grad(loss, 2, devices="data"))
        _, grads = gradient(params, x)
    assert_allclose(grads["used"], jax.grad(loss)(params, x)["used"], rtol=1e-5)
    assert_array_equal(grads["unused"], np.zeros(3, "complex64"))


def test_a_carry_stays_the_same_on_all_devices():
    """One device has nothing that counts: it runs no gradient, and hands on what the others do."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    counted = lambda w, x, mask, carry: (jnp.sum(mask * (x @ w) ** 2) / jnp.sum(mask), carry + 1)
    w, x = np.ones(3, "f"), np.ones((16, 3), "f")
    masks = (np.arange(16) >= 4).astype("f"), np.zeros(16, "f")
    options = {"batch_argnums": (1, 2), "carry_argnum": 3, "devices": "data"}
    with jax.set_mesh(mesh):
        call = jax.jit(optax_accum.reduce_microbatches(counted, 2, weight_fn=lambda x, mask: mask.sum(), **options))
        for mask, turns in zip(masks, (2, 0), strict=True):
            value, carry = call(w, *jax.device_put((x, mask), NamedSharding(mesh, P("data"))), jnp.int32(0))
            assert {int(shard.data) for shard in carry.addressable_shards} == {turns}
            np.testing.assert_allclose(value, 9.0 if turns else 0.0)


def test_a_bare_gradient_that_was_reduced_already_is_named():
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 2, devices="data")
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))):
        state = jax.jit(tx.init)(jnp.ones(8))
        with pytest.raises(ValueError, match="it has been reduced already"):
            jax.jit(functools.partial(optax_accum.apply_gradients, tx))(jnp.ones(8), state, jnp.ones(8))


def of_rows(zeros):
    return lambda w, x: jax.lax.scan(lambda h, row: (h + row @ w, None), zeros(x), x)[0] + 0 * x[:, 0]


def test_a_scan_that_begins_with_zeros_is_told_what_to_begin_with():
    """To JAX, zeros are the same on all devices, and what a scan makes of rows is not."""
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))):
        options = {"reduction": "concat", "devices": "data"}
        args = jnp.ones(3), jnp.ones((8, 3))
        run = lambda zeros: optax_accum.reduce_microbatches(of_rows(zeros), 2, **options)(*args)
        with pytest.raises(TypeError) as caught:
            run(lambda x: jnp.zeros([]))
        assert "Begin with one that is made of the batch" in "".join(caught.value.__notes__)
        run(lambda x: jnp.zeros_like(x[0, 0]))  # the remedy
        fun = of_rows(lambda x: jnp.zeros([]))
        np.testing.assert_allclose(optax_accum.microbatched(fun, 2, devices="data")(*args), fun(*args))  # as a whole


@pytest.mark.sweep
def test_a_loss_may_scan_from_zeros_on_several_devices():
    x = jnp.linspace(0, 1, 24).reshape(8, 3)
    loss = lambda w, x: jnp.mean(of_rows(lambda x: jnp.zeros([]))(w, x) ** 2)
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))):
        got = optax_accum.value_and_grad(loss, 2, devices="data")(jnp.ones(3), x)
    chex.assert_trees_all_close(got, jax.value_and_grad(loss)(jnp.ones(3), x), rtol=1e-5)


def test_rows_of_what_closes_over_bfloat16_have_its_gradient():
    """To JAX, it is the same on all devices, and stays that."""
    w, x = jnp.ones(3, jnp.bfloat16), jnp.linspace(0, 1, 24).reshape(8, 3)
    total = lambda apply: lambda w: apply(lambda x: (x * w.astype(jnp.float32)[None]).sum(-1))(x).sum()
    cut = lambda fun: optax_accum.microbatched(fun, 2, batch_argnums=0, devices="data")
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))):
        got = jax.jit(jax.grad(total(cut)))(w)
    np.testing.assert_allclose(
        got.astype(jnp.float32), jax.grad(total(lambda fun: fun))(w).astype(jnp.float32), rtol=1e-2
    )
