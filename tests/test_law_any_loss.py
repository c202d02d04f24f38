"""The law within a call, for any loss: nothing is said, and value and gradient are those of the whole batch.

The losses are those of `tests/any_loss`: micro-batches by themselves compute most of them wrongly.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_accum
from tests import paths, programs
from tests.any_loss.losses import LOSSES, problem
from tests.tiers import sweep
from tests.versions import JAX

# One for each way in which rows are coupled, weighed or drawn, and of each dtype.
EACH = [
    *("masked", "running_statistics", "mean", "sum_of_tokens", "batch_norm", "contrastive", "neighbours"),
    *("a_second_key", "a_table_in_the_batch"),
]


def largest_difference(ours, whole):
    """The largest difference of an entry, over the largest entry of all: some leaves have a gradient of zero."""
    pairs = list(zip(map(np.float64, jax.tree.leaves(ours)), map(np.float64, jax.tree.leaves(whole)), strict=True))
    return max(np.max(np.abs(a - b), initial=0) for a, b in pairs) / max(np.max(np.abs(b), initial=0) for _, b in pairs)


def check(drawn, k=None, **options):
    """Checks one loss, cut into k micro-batches."""
    args, has_aux = (drawn.params, drawn.batch, *drawn.args), drawn.has_aux
    of_whole = lambda *args: paths.value_of(drawn.fun(*args)[0] if has_aux else drawn.fun(*args))
    ours = optax_accum.value_and_grad(drawn.fun, k or drawn.parts, has_aux=has_aux, **options)
    whole = jax.value_and_grad(of_whole)
    (value, grads), (whole_value, whole_grads) = jax.jit(lambda *args: (ours(*args), whole(*args)))(*args)
    value = value[0] if has_aux else value
    assert np.any([np.any(leaf) for leaf in jax.tree.leaves(whole_grads)])
    assert largest_difference(grads, whole_grads) < (0.1 if drawn.is_narrow else 1e-5)
    np.testing.assert_allclose(value, whole_value, rtol=0.1 if drawn.is_narrow else 1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sweep(LOSSES, but=EACH))
def test_any_loss_has_the_gradient_of_the_whole_batch(name, rank_promotion):
    check(problem(name))


# On several devices one of each kind: what is counted over all of them, gathered, drawn, ruled, and divided in the end.
ON_DEVICES = ["masked", "a_second_key", "cross_entropy_in_a_branch"]


@pytest.mark.parametrize("name", sweep(LOSSES, but=ON_DEVICES))
def test_any_loss_of_the_rows_of_several_devices(name, rank_promotion):
    drawn = problem(name)
    rows = len(jax.tree.leaves(drawn.batch)[0])
    devices = next(number for number in range(2, 9) if rows % number == 0)
    with jax.set_mesh(mesh_of(devices)):
        check(drawn, k=min(2, rows // devices), devices="data")


def normal(*shapes):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


def close(got, want, rtol=1e-4, atol=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want)


def mesh_of(number):
    axis = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((number,), ("data",), axis_types=axis, devices=jax.devices()[:number])


@pytest.mark.parametrize("check_vma", sweep([False, True], but=[True]))
def test_any_loss_inside_a_shard_map(check_vma):
    """Sums over the rows of all devices, a gather, a variance, and rows that come out."""

    def loss(w, batch):
        h = batch["x"] @ w
        h = jnp.tanh((h - h.mean(0, keepdims=True)) / (h.std(0, keepdims=True) + 1e-3))
        scores = jnp.sum(jax.nn.log_softmax(h @ h.T) * jnp.eye(len(h)))
        return scores + jnp.sum(batch["mask"] * h.sum(1) ** 2) / jnp.sum(batch["mask"]) + jnp.var(h), h

    x, w = normal((24, 4), (4, 3))
    batch = {"x": x, "mask": jnp.arange(24) % 5 < 2}
    mesh = mesh_of(4)
    ours = optax_accum.value_and_grad(loss, 4, has_aux=True, devices="data")
    spec = jax.P("data")
    run = jax.shard_map(
        ours, mesh=mesh, in_specs=(jax.P(), spec), out_specs=((jax.P(), spec), jax.P()), check_vma=check_vma
    )
    got, whole = jax.jit(run)(w, batch), jax.jit(jax.value_and_grad(loss, has_aux=True))(w, batch)
    close(got, whole, atol=3e-5)


def test_devices_wait_for_each_other_between_loops_alone():
    """Sums of BatchNorm and of the mask over all devices are added once each, beside the one reduction of the gradient."""

    def loss(w, batch):
        h = batch["x"]
        for layer in w:
            h = jnp.tanh(h @ layer)
            h = (h - h.mean(0, keepdims=True)) * jax.lax.rsqrt(h.var(0, keepdims=True) + 1e-5)
        return jnp.sum(batch["mask"] * h.sum(1) ** 2) / jnp.sum(batch["mask"])

    mesh = mesh_of(4)
    rows = jax.NamedSharding(mesh, jax.P("data"))
    batch = {
        "x": jax.ShapeDtypeStruct((32, 16), "f", sharding=rows),
        "mask": jax.ShapeDtypeStruct((32,), "f", sharding=rows),
    }
    w = jax.ShapeDtypeStruct((2, 16, 16), "f", sharding=jax.NamedSharding(mesh, jax.P()))
    with jax.set_mesh(mesh):
        compiled = jax.jit(optax_accum.value_and_grad(loss, 4, devices="data")).lower(w, batch).compile()
    found = optax_accum.sharding.count_collectives(compiled)
    assert not found.select(place="loop")
    large = [each for each in found.operations if each.bytes >= 4 * 2 * 16 * 16]
    assert len(large) == 1
    assert all(each.bytes <= 256 for each in found.operations if each not in large)


@pytest.mark.parametrize("norm", [*sweep([False]), True])
def test_partial_sums_are_those_of_a_batch_of_each_device_s_own(norm):
    """A mask counts the rows of one device, and a term of the parameters is added once to each."""

    def loss(w, batch):
        h = batch["x"] @ w
        h = h - h.mean(0, keepdims=True) if norm else h
        return jnp.sum(batch["mask"] * jnp.tanh(h).sum(1) ** 2) / jnp.sum(batch["mask"]) + jnp.sum(w**2)

    x, w = normal((12, 4), (4, 3))
    batch = {"x": x, "mask": jnp.arange(12) % 5 < 2}
    with jax.set_mesh(mesh_of(2)):
        got = jax.jit(optax_accum.value_and_grad(loss, 3, devices=optax_accum.Devices("data", to="partial")))(w, batch)
    for own in range(2):
        rows = {name: leaf[6 * own : 6 * own + 6] for name, leaf in batch.items()}
        close([leaf[own] for leaf in got], [*jax.value_and_grad(loss)(w, rows)], rtol=1e-7)


@pytest.mark.parametrize("k", sweep([1, 2, 5, 12], but=[1, 5]))
def test_every_row_alone_and_a_remainder(k):
    """Rows normalised over the batch, and a mask: no micro-batch by itself has this gradient."""
    x, w = normal((12, 4), (4, 3))
    mask = jnp.arange(12) % 5 < 2

    def loss(w, batch):
        h = batch["x"] @ w
        h = (h - h.mean(0, keepdims=True)) / (h.std(0, keepdims=True) + 1e-3)
        return jnp.sum(batch["mask"] * jnp.tanh(h).sum(1) ** 2) / jnp.sum(batch["mask"]), h

    whole = jax.value_and_grad(loss, has_aux=True)(w, {"x": x, "mask": mask})
    ours = jax.jit(optax_accum.value_and_grad(loss, num_microbatches=k, has_aux=True))(w, {"x": x, "mask": mask})
    close(ours, whole, rtol=1e-7)


def normed_layers(kernels, x):
    """A network whose rows come together in each layer; what one layer gives, later ones take, too."""
    for kernel in kernels:
        h = x @ kernel
        x = x + jax.nn.relu((h - h.mean(0, keepdims=True)) * jax.lax.rsqrt(h.var(0, keepdims=True) + 1e-5))
    return jnp.mean(x**2)


@pytest.mark.sweep
def test_what_levels_keep_is_there_when_it_is_needed():
    """XLA made the arrays of all loops beforehand: twice as much as the whole batch, and more with each layer."""
    args = jax.ShapeDtypeStruct((8, 16, 16), jnp.float32), jax.ShapeDtypeStruct((4096, 16), jnp.float32)
    ways = jax.value_and_grad(normed_layers), optax_accum.value_and_grad(normed_layers, 16)
    whole, ours = (programs.compiled(jax.jit(way).lower(*args)).memory_analysis().temp_size_in_bytes for way in ways)
    assert ours < 16 * 4096 * 16 * 4 < whole


@pytest.mark.sweep
def test_rows_that_are_made_again_need_the_memory_of_a_micro_batch():
    """Kept ones, of eight layers, take more than eight times the batch."""
    args = jax.ShapeDtypeStruct((8, 16, 16), jnp.float32), jax.ShapeDtypeStruct((4096, 16), jnp.float32)

    def batches(recompute):
        ours = jax.jit(optax_accum.value_and_grad(normed_layers, 16, recompute=recompute))
        return programs.compiled(ours.lower(*args)).memory_analysis().temp_size_in_bytes / (4096 * 16 * 4)

    assert batches(0) > 8
    assert batches(4.0) < (5 if JAX[:2] == (0, 10) else 4)


RECOMPUTED = [0.5, 4.0]


@pytest.mark.sweep
@pytest.mark.parametrize("recompute", sweep(RECOMPUTED, but=[0.5]))
def test_rows_that_cross_levels_elsewhere(recompute):
    """Each way to have them, with a remainder: of layers one by one, of which later ones take the rows, and in a scan."""
    kernels, x = normal((2, 4, 4), (12, 4))

    def scanned(kernels, x):
        return jax.lax.scan(lambda x, kernel: (normed_layers([kernel], x) * jnp.tanh(x), None), x, kernels)[0].sum()

    losses = normed_layers, scanned
    ours = [optax_accum.value_and_grad(loss, 5, recompute=recompute) for loss in losses]
    whole = [jax.value_and_grad(loss) for loss in losses]
    got, want = jax.jit(lambda *args: [[way(*args) for way in ways] for ways in (ours, whole)])(kernels, x)
    close(got, want, atol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_rows_that_cross_levels_outside_jit_and_for_a_second_derivative(recompute):
    kernels, x = normal((1, 4, 4), (12, 4))
    ours, whole = optax_accum.value_and_grad(normed_layers, 5, recompute=recompute), jax.value_and_grad(normed_layers)
    again = jax.grad(lambda kernels, grad: jnp.sum(grad(kernels, x)[1] ** 2))
    for got, want in ((ours(kernels, x), whole(kernels, x)), (again(kernels, ours), again(kernels, whole))):
        close(got, want, atol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("recompute", sweep(RECOMPUTED, but=[4.0]))
def test_rows_of_several_devices_that_cross_levels_elsewhere(recompute):
    kernels, x = normal((2, 4, 4), (12, 4))
    mesh = mesh_of(2)
    ours = optax_accum.value_and_grad(normed_layers, 3, recompute=recompute, devices="data")
    with jax.set_mesh(mesh):
        got = jax.jit(ours)(kernels, jax.device_put(x, jax.NamedSharding(mesh, jax.P("data"))))
    want = jax.value_and_grad(normed_layers)(kernels, x)
    close(got, want, atol=1e-5)


@pytest.mark.parametrize("recompute", [0.0, *sweep([4.0])])
def test_what_has_no_derivative_may_take_rows_that_stand_still(recompute):
    """A callback of all rows, and of what is made of them, between two levels: a tangent of zeros is no tangent."""

    def loss(kernels, x):
        h = jnp.tanh(x @ kernels[0])
        h = h - h.mean(0, keepdims=True)
        still = jax.lax.stop_gradient(h) * 2
        total = jax.lax.stop_gradient(jnp.sum(h**2)) + 1
        sine, root = (
            jax.pure_callback(fun, jax.ShapeDtypeStruct(a.shape, a.dtype), a)
            for fun, a in ((np.sin, still), (np.sqrt, total))
        )
        h = h @ kernels[1] + sine * root
        return jnp.mean((h - h.max(0, keepdims=True)) ** 3)

    kernels, x = normal((2, 4, 4), (12, 4))
    got = jax.jit(optax_accum.value_and_grad(loss, 5, recompute=recompute))(kernels, x)
    close(got, jax.value_and_grad(loss)(kernels, x), atol=1e-4)


def test_an_extreme_over_devices_that_stands_still():
    w, x = normal((4, 4), (12, 4))

    def loss(w, x):
        h = x @ w
        return jnp.mean(jax.lax.stop_gradient(h.max(0))[None] * h)

    with jax.set_mesh(mesh_of(2)):
        got = jax.jit(optax_accum.value_and_grad(loss, 3, devices="data"))(w, x)
    close(got, jax.value_and_grad(loss)(w, x), rtol=1e-5, atol=0)


@jax.custom_vjp
def clipped(w):
    return w


clipped.defvjp(lambda w: (w, None), lambda _, ct: (jnp.clip(ct, -0.02, 0.02),))


@pytest.mark.parametrize("where", ["before", "in a scan", "in a checkpoint", "in bfloat16"])
def test_a_rule_for_the_gradient_of_a_parameter_takes_the_whole_of_it(where):
    """A clip of the gradient of each micro-batch would be another gradient."""
    x, w = normal((12, 4), (3, 4, 4))

    def loss(w, x):
        layer = lambda h, w: jnp.tanh(h @ clipped(w))
        if where == "in a scan":
            h = jax.lax.scan(lambda h, w: (layer(h, w), None), x, w)[0]
        elif where == "in a checkpoint":
            h = jax.checkpoint(layer)(x, w[0])
        elif where == "in bfloat16":
            h = x @ clipped(w[0].astype(jnp.bfloat16)).astype(jnp.float32)
        else:
            h = layer(x, w[1])
        return jnp.mean(h**2)

    whole = jax.grad(loss)(w, x)
    assert jnp.isclose(jnp.max(jnp.abs(whole)), 0.02, rtol=1e-2)
    np.testing.assert_allclose(jax.jit(optax_accum.value_and_grad(loss, 4))(w, x)[1], whole, atol=1e-4)


def test_a_gradient_that_is_divided_by_what_the_model_counts_is_measured():
    """Where it is measured, the count comes first: else its statistics would be those before it is divided."""

    def loss(w, x):
        each = (x @ w) ** 2
        large = jax.lax.stop_gradient(each > 0.1)
        return jnp.sum(each * large) / jnp.sum(large)

    w, x = jnp.ones(3), jnp.linspace(-1, 1, 24).reshape(8, 3)
    (_, statistics), grads = jax.jit(optax_accum.value_and_grad(loss, 2, statistics=True))(w, x)
    np.testing.assert_allclose(grads, jax.grad(loss)(w, x), rtol=1e-5)
    np.testing.assert_allclose(statistics.squares["all"], jnp.sum(grads**2), rtol=1e-5)
