"""A layer's parameters gathered once for all its micro-batches: the law on every mesh, and traffic that k leaves as is."""

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal

import optax_accum
from tests import ROOT, programs
from tests.tiers import sweep

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESHES = {  # sizes, kinds, axes, specs of a layer
    "Auto": ({"data": 8}, (AUTO,), "data", {"up": P("data"), "down": P(None, "data"), "bias": P()}),
    "Explicit": ({"data": 8}, (EXPLICIT,), "data", {"up": P("data"), "down": P(None, "data"), "bias": P("data")}),
    "Auto, tensor": (
        {"data": 4, "tensor": 2},
        (AUTO, AUTO),
        "data",
        {"up": P("data", "tensor"), "down": P("tensor", "data"), "bias": P("data")},
    ),
    "Explicit, tensor Auto": ({"data": 4, "tensor": 2}, (EXPLICIT, AUTO), ("data",), P("data")),
    "Explicit, tensor Explicit": ({"data": 4, "tensor": 2}, (EXPLICIT, EXPLICIT), "data", P("data")),
    "two axes": (
        {"pod": 2, "data": 4},
        (AUTO, AUTO),
        ("pod", "data"),
        {"up": P(("pod", "data")), "down": P("data"), "bias": P()},
    ),
}
LAYERS, ROWS, WIDTH, HIDDEN = 3, 24, 8, 16


def draw(seed, *shape):
    return np.asarray(np.random.default_rng(seed).normal(size=shape) / 3, np.float32)


def host_params():
    layers = {
        "up": draw(0, LAYERS, WIDTH, HIDDEN),
        "down": draw(1, LAYERS, HIDDEN, WIDTH),
        "bias": draw(2, LAYERS, HIDDEN),
    }
    return {"embed": draw(3, 5, WIDTH), "layers": layers, "head": draw(4, WIDTH)}


BATCH = {"token": np.arange(ROWS, dtype="i") % 5, "x": draw(5, ROWS, WIDTH), "y": draw(6, ROWS)}


def block(layer, h):
    return h + jnp.tanh(h @ layer["up"] + layer["bias"][None]) @ layer["down"]


def loss(apply, params, batch):
    """Layers in a scan, between an embedding and a head."""
    h = batch["x"] + jax.nn.one_hot(batch["token"], 5) @ params["embed"]
    h, _ = jax.lax.scan(lambda h, layer: (apply(layer, h), None), h, params["layers"])
    return jnp.mean((h @ params["head"] - batch["y"]) ** 2)


@functools.cache
def whole():
    return jax.jit(jax.value_and_grad(functools.partial(loss, block)))(host_params(), BATCH)


def make_mesh(name):
    sizes, kinds, _, _ = MESHES[name]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def place(mesh, axes, specs):
    """Returns parameters and batch, sharded."""
    named = lambda spec, *first: NamedSharding(mesh, P(*first, *spec))
    params, spec_of = host_params(), (lambda name: specs if isinstance(specs, P) else specs[name])
    layers = {name: jax.device_put(leaf, named(spec_of(name), None)) for name, leaf in params["layers"].items()}
    others = {name: jax.device_put(params[name], named(P())) for name in ("embed", "head")}
    return others | {"layers": layers}, jax.device_put(BATCH, named(P(axes)))


@pytest.fixture
def data_mesh():
    with jax.set_mesh(mesh := make_mesh("Auto")):
        yield mesh


SPECS = MESHES["Auto"][3]


def close(got, expected):
    jax.tree.map(lambda a, b: assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6), got, expected)


# The law.


EVERY = [(name, of) for name in MESHES for of in ("jax", "ours")]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "of"), sweep(EVERY, but=[("Explicit", "jax"), ("Auto, tensor", "ours")]))
def test_the_gradient_is_that_of_the_whole_batch_and_lies_where_the_parameters_do(name, of):
    """Also with a smaller micro-batch at the end, and inside our own micro-batches, in place."""
    mesh, (_, _, axes, specs) = make_mesh(name), MESHES[name]
    with jax.set_mesh(mesh):
        params, batch = place(mesh, axes, specs)
        apply = optax_accum.microbatched(block, 2, devices=optax_accum.Devices(axes, to=specs))
        f = functools.partial(loss, apply)
        f = jax.value_and_grad(f) if of == "jax" else optax_accum.value_and_grad(f, num_microbatches=1)
        value, grads = jax.jit(f)(params, batch)
        close((value, grads), whole())
        same = lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim)
        assert all(jax.tree.leaves(jax.tree.map(same, grads["layers"], params["layers"])))


@pytest.mark.sweep
def test_outside_jit_and_outside_a_scan(data_mesh):
    params, batch = place(data_mesh, "data", SPECS)
    first = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    apply = optax_accum.microbatched(block, microbatch_size=16, devices=optax_accum.Devices("data", to=SPECS))
    close(apply(first, batch["x"]), block(first, BATCH["x"]))


def test_bfloat16_parameters_are_added_in_float32_over_micro_batches_and_devices(data_mesh):
    """24 numbers of which each is lost beside their sum in bfloat16: 256 and 23 times 1/2."""
    x = np.full((ROWS, 1), 0.5, np.float32)
    x[0] = 256
    apply = optax_accum.microbatched(
        lambda w, x: x * w.astype(jnp.float32)[:1][None], 3, devices=optax_accum.Devices("data", to=P("data"))
    )
    grad = jax.jit(jax.grad(lambda w, x: jnp.sum(apply(w, x))))(jnp.ones(8, jnp.bfloat16), x)
    assert grad.dtype == jnp.bfloat16
    assert float(grad[0]) == 268  # of 267.5; 256 where each is rounded


@pytest.mark.sweep
def test_what_else_the_block_is_given_has_its_gradient_and_one_reduction(data_mesh):
    params, batch = place(data_mesh, "data", SPECS)
    first = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    scaled = lambda layer, h, scale, power: block(layer, h) * scale[None] ** power
    apply = optax_accum.microbatched(scaled, 3, devices=optax_accum.Devices("data", to=SPECS))
    sum_of = lambda f: lambda scale, h: jnp.sum(f(first, h, scale, 2) ** 2)
    grad, scale = jax.jit(jax.grad(sum_of(apply))), jnp.arange(1.0, 1 + WIDTH)
    close(grad(scale, batch["x"]), jax.grad(sum_of(scaled))(scale, BATCH["x"]))
    found = optax_accum.sharding.count_collectives(programs.compiled(grad.lower(scale, batch["x"])))
    assert not found.select(place="loop")


@pytest.mark.sweep
def test_each_row_has_its_numbers_of_the_whole_batch_in_both_passes(data_mesh):
    """The gradient with respect to the rows is the mask that the forward pass drew."""
    drop = lambda w, x, key: x * w[:1][None] * jax.random.bernoulli(key, 0.5, x.shape)
    apply = optax_accum.microbatched(drop, 3, devices=optax_accum.Devices("data", to=P("data")))
    x, w = jnp.ones((24, 32)), jnp.ones(8)
    both = jax.jit(jax.value_and_grad(lambda x, w, key: apply(w, x, key).sum()))
    mask = jax.jit(apply)(w, x, jax.random.key(0))
    value, grad = both(x, w, jax.random.key(0))
    assert_array_equal(grad, mask)
    assert value == mask.sum()
    assert_array_equal(mask, drop(w, x, jax.random.key(0)))


@pytest.mark.sweep
def test_parameters_may_be_replicated(data_mesh):
    """Without `to`: gradients are reduced once for all micro-batches."""
    params, batch = place(data_mesh, "data", P())
    f = jax.jit(jax.value_and_grad(functools.partial(loss, optax_accum.microbatched(block, 3, devices="data"))))
    close(f(params, batch), whole())


@pytest.mark.sweep
def test_boundaries_that_wait_on_the_host_give_the_same_gradient(data_mesh):
    """A CPU has a memory of that name."""
    params, batch = place(data_mesh, "data", SPECS)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["boundary"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    apply = optax_accum.microbatched(block, 3, devices=optax_accum.Devices("data", to=SPECS))
    apply_named = lambda layer, h: apply(layer, checkpoint_name(h, "boundary"))
    offloaded = jax.value_and_grad(functools.partial(loss, jax.checkpoint(apply_named, policy=policy)))
    close(jax.jit(offloaded)(params, batch), whole())
    moved = re.findall(r"f32<host>\[\d+(?:@data)?,8\]", str(jax.make_jaxpr(offloaded)(params, batch)))
    assert moved


# What passes through the network.


def window(mesh, k):
    params, batch = place(mesh, "data", SPECS)
    apply = optax_accum.microbatched(block, k, devices=optax_accum.Devices("data", to=SPECS))
    grad = jax.jit(jax.grad(functools.partial(loss, apply)), out_shardings=jax.tree.map(lambda x: x.sharding, params))
    bigger = jax.tree.map(lambda x: jnp.concatenate([x] * 8), batch)
    bigger = jax.device_put(bigger, NamedSharding(mesh, P("data")))
    return optax_accum.sharding.count_collectives(programs.compiled(grad.lower(params, bigger)))


@pytest.mark.sweep
def test_bytes_do_not_grow_with_k(data_mesh):
    """A layer is gathered in each pass and scattered once: as many runs as layers, whatever k."""
    small, large = window(data_mesh, 2), window(data_mesh, 8)
    matrices = 4 * LAYERS * 2 * WIDTH * HIDDEN
    assert small.bytes == large.bytes
    for found in (small, large):
        assert found.select("all-gather").bytes == 2 * matrices
        assert found.select("reduce-scatter").bytes == matrices
        assert max(op.times for op in found) <= LAYERS


# Bad input.

LAYER = {"up": np.ones((WIDTH, HIDDEN), "f"), "down": np.ones((HIDDEN, WIDTH), "f"), "bias": np.ones(HIDDEN, "f")}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"to": P()}, ValueError, "must shard parameters over its axes.*shard_over"),
        ({"to": {"up": P("data")}}, ValueError, "must be a prefix of the tree of the parameters"),
        ({"to": "data"}, ValueError, "to must be None, specs"),
        ({"to": "partial"}, ValueError, "must go somewhere here.*Leave it out, or pass specs"),
        ({"to": {"up": 3, "down": 3, "bias": 3}}, TypeError, "must hold a jax.sharding.PartitionSpec"),
        ({"to": P(None, "data")}, ValueError, r"evenly: at \['bias'\] the shape is \(16,\).*specs of one layer"),
        ({"axes": None}, ValueError, "Name the axes"),
        ({"dtype": jnp.bfloat16}, ValueError, "are for gradients of value_and_grad"),
        ({"axes": "model"}, ValueError, r"'model' is none of \('data',\)"),
        ({"microbatch_size": 12, "num_microbatches": None}, ValueError, "microbatch_size=12, 8 devices"),
        ({"num_microbatches": 4}, ValueError, "num_microbatches=4, and each of 8 devices has 3 rows"),
    ],
    ids=str,
)
def test_bad_options(data_mesh, options, error, message):
    options = {"num_microbatches": 3, "axes": "data", "to": P("data")} | options
    where = {name: options.pop(name) for name in ("axes", "to", "dtype") if name in options}
    with pytest.raises(error, match=message):
        optax_accum.microbatched(block, devices=optax_accum.Devices(**where), **options)(LAYER, BATCH["x"])


@pytest.mark.parametrize(
    ("layer", "x", "message"),
    [
        (LAYER, BATCH["x"][:23], "23 rows, 8 devices.*Pad the batch to 24 rows"),
        (LAYER | {"bias": np.ones(12, "f")}, BATCH["x"], r"evenly: at \['bias'\] the shape is \(12,\)"),
    ],
)
def test_what_the_devices_do_not_divide(data_mesh, layer, x, message):
    with pytest.raises(ValueError, match=message):
        optax_accum.microbatched(block, 3, devices=optax_accum.Devices("data", to=P("data")))(layer, x)


@pytest.mark.sweep
def test_a_block_may_take_rows_together_and_return_what_has_none(data_mesh):
    """The statistics are those of all devices' rows, and so is what is returned for all of them."""

    def normalised(layer, h):
        h = block(layer, h)
        mean = h.mean(0)
        return h - mean[None], mean

    cut = optax_accum.microbatched(normalised, 3, devices=optax_accum.Devices("data", to=P("data")))
    total = lambda run: lambda layer, x: sum(jnp.sum(leaf**3) for leaf in run(layer, x))
    close(jax.jit(cut)(LAYER, BATCH["x"]), normalised(LAYER, BATCH["x"]))
    grads = (jax.jit(jax.grad(total(run)))(LAYER, BATCH["x"]) for run in (cut, normalised))
    close(*grads)


def test_sharded_parameters_without_specs_are_refused():
    with jax.set_mesh(mesh := make_mesh("Explicit")):
        layer = jax.device_put(LAYER, NamedSharding(mesh, P("data")))
        with pytest.raises(ValueError, match=r"replicated over devices.*to=shard_over"):
            optax_accum.microbatched(block, 3, devices="data")(layer, BATCH["x"])


def test_no_mesh_in_reach():
    with pytest.raises(ValueError, match=r"needs a mesh in reach.*jax\.set_mesh"):
        optax_accum.microbatched(block, 3, devices=optax_accum.Devices("data", to=P("data")))(LAYER, BATCH["x"])


@pytest.mark.sweep
def test_inside_a_shard_map_specs_are_refused_and_what_the_message_says_works(data_mesh):
    def local(to, layer, x):
        apply = optax_accum.microbatched(block, 3, devices=optax_accum.Devices("data", to=to))
        if to is None:
            layer = jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, "data", tiled=True), layer)
        return apply(layer, x)

    def run(to):
        return jax.shard_map(functools.partial(local, to), in_specs=(P("data"), P("data")), out_specs=P("data"))

    with pytest.raises(ValueError, match="the sum goes everywhere.*Leave it out; gather there"):
        run(P("data"))(LAYER, BATCH["x"])
    sum_of = lambda f: jax.jit(jax.grad(lambda layer: jnp.sum(f(layer, BATCH["x"]) ** 2)))
    close(sum_of(run(None))(LAYER), sum_of(block)(LAYER))


@pytest.mark.sweep
def test_the_example_trains_as_the_whole_batch_does():
    done = subprocess.run(
        [sys.executable, "-m", "examples.fsdp"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "equals the whole batch" in done.stdout
