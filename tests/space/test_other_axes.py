"""Losses that communicate along an axis which is not in `devices`: tensor and sequence parallelism in a `jax.shard_map`.

The law: value, aux and gradient are what `jax.value_and_grad` returns for all rows on one device along "data", with as
many along "tp".
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import optax_accum
from tests import paths
from tests.tiers import sweep

ROWS, TOKENS, WIDTH = 8, 4, 4
AROUND = [(0, 1), (1, 0)]


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("f")


PARAMS = {"w": draw(0, 3, WIDTH), "v": draw(1, WIDTH, 3), "b": draw(2, 3)}
SHARDS = {"w": P(None, "tp"), "v": P("tp"), "b": P()}
BATCH = {
    "x": draw(3, ROWS, 3),
    "y": np.arange(ROWS, dtype="i") % WIDTH,
    "mask": np.float32([1, 0, 0, 0, 1, 1, 1, 0]),
    "tokens": draw(4, ROWS, TOKENS, 3),
    "counts": np.float32(draw(5, ROWS, TOKENS) > 0),
}
DEALT = {"x": P("data"), "y": P("data"), "mask": P("data"), "tokens": P("data", "tp"), "counts": P("data", "tp")}


def masked(rows, b):
    return jnp.sum(b["mask"] * rows) / jnp.sum(b["mask"])


def summed(p, b):
    return masked(lax.psum(jnp.tanh(b["x"] @ p["w"]).sum(-1), "tp"), b)


def layer(p, x):
    """Columns, then rows, of two matrices: the biased sum is the same on all devices along "tp"."""
    return lax.psum(jax.nn.gelu(x @ p["w"]) @ p["v"], "tp") + p["b"][None]


def layers(p, b):
    return masked(jnp.sum(layer(p, layer(p, b["x"])) ** 2, -1), b)


def in_a_scan(p, b):
    x, _ = lax.scan(lambda x, scale: (layer(p, scale * x), None), b["x"], jnp.float32([1, 0.5]))
    return masked(jnp.sum(x**2, -1), b)


def with_a_parameter_beside(p, b):
    """What a checkpoint returns of `b` is the same on all devices."""
    x, bias = jax.checkpoint(lambda p, x: (layer(p, x), 2 * p["b"]))(p, b["x"])
    return masked(jnp.sum((x + bias[None]) ** 2, -1), b) + jnp.sum(bias)


def normalised(p, b):
    h = b["x"] @ p["w"]
    h = (h - h.mean(0, keepdims=True)) * lax.rsqrt(h.var(0, keepdims=True) + 0.1)
    return masked(jnp.sum((lax.psum(h @ p["v"], "tp") + p["b"][None]) ** 2, -1), b)


def normalised_in_a_scan(p, b):
    def step(x, _):
        x = layer(p, x)
        return x - x.mean(0, keepdims=True), None

    return masked(jnp.sum(lax.scan(step, b["x"], None, length=2)[0] ** 2, -1), b)


def normalised_sums(p, b):
    """Rows that are kept for a later loop, and the same on all devices."""
    h = layer(p, b["x"])
    h = layer(p, h - h.mean(0, keepdims=True))
    return masked(jnp.sum((h / jnp.sqrt(1 + h.var(0, keepdims=True))) ** 2, -1), b)


def gathered(p, b):
    h = lax.all_gather(b["x"] @ p["w"], "tp", axis=1, tiled=True)
    return lax.pmean(masked(jnp.sum(jnp.sin(h) * jnp.arange(WIDTH)[None], -1), b), "tp")


def gathered_in_front(p, b):
    h = lax.all_gather(jnp.tanh(b["x"] @ p["w"]), "tp")  # a new axis, before that of rows
    return lax.pmean(masked(jnp.sum(h**2 * jnp.arange(2.0)[:, None, None], (0, 2)), b), "tp")


def permuted(p, b):
    h = lax.ppermute(b["x"] @ p["w"], "tp", AROUND) * (1 + lax.axis_index("tp"))
    return lax.psum(masked(jnp.sum(jnp.sin(h), -1), b), "tp")


def scattered(p, b):
    h = lax.psum_scatter(jnp.sin(b["x"] @ p["w"]), "tp", scatter_dimension=1, tiled=True)
    return lax.psum(masked(jnp.sum(h**2, -1), b), "tp")


def dealt_again(p, b):
    """Tokens are dealt out over devices, then heads, as in Ulysses' attention."""
    h = jnp.tanh(b["tokens"] @ p["b"][:, None] * jnp.arange(4.0)[None, None])
    h = lax.all_to_all(h, "tp", 2, 1, tiled=True)
    scores = jax.nn.softmax(jnp.einsum("nth,nsh->nhts", h, h), -1)
    h = lax.all_to_all(jnp.einsum("nhts,nsh->nth", scores, h), "tp", 1, 2, tiled=True)
    return lax.psum(masked(jnp.sum(h**2, (1, 2)), b), "tp")


def counted_tokens(p, b):
    """Each device counts its tokens: the denominator is a sum over both axes."""
    error = (jnp.tanh(b["tokens"]) @ p["b"]) ** 2
    return lax.psum(jnp.sum(b["counts"] * error), "tp") / lax.psum(jnp.sum(b["counts"]), "tp")


def classified(p, b):
    """Cross-entropy of a vocabulary of which each device has a part."""
    logits = b["x"] @ p["w"]
    largest = lax.pmax(lax.stop_gradient(logits).max(-1), "tp")
    logits = logits - largest[:, None]
    local = b["y"][:, None] - lax.axis_index("tp") * logits.shape[1] == jnp.arange(logits.shape[1])[None]
    mine = lax.psum(jnp.sum(jnp.where(local, logits, 0), -1), "tp")
    return masked(jnp.log(lax.psum(jnp.exp(logits).sum(-1), "tp")) - mine, b)


def varied(p, b):
    """Not linear in what the loop returns: a forward pass for the cotangents comes first."""
    return jnp.var(layer(p, b["x"]).sum(-1)) + masked(layer(p, b["x"])[:, 0] ** 2, b)


def divided_at_the_end(p, b):
    """The factor of the gradient is known in the end, and differs between devices along "tp"."""
    h = jnp.sum(jnp.tanh(b["x"] @ p["w"])) + jnp.sum(b["x"] @ p["b"])
    return lax.psum(h**2 / (1 + lax.axis_index("tp")), "tp") / len(b["x"]) ** 2


def divided_after_a_sum(p, b):
    h = jnp.sum(lax.psum(jnp.tanh(b["x"] @ p["w"]).sum(-1), "tp"))
    return lax.psum(h**2 * (1 + lax.axis_index("tp")), "tp") / len(b["x"]) ** 2


def compared(p, b):
    z = layer(p, b["x"])
    return jnp.mean(jax.nn.logsumexp(z @ z.T, -1))


def averaged(p, b):
    return lax.pmean(masked(jnp.tanh(b["x"] @ p["w"]).sum(-1), b), "tp")


def rows_dealt_again(p, b):
    """Rows change places between devices along "tp": all of them at once."""
    h = lax.all_to_all(jnp.tanh(b["x"] @ p["w"]), "tp", 0, 0, tiled=True)
    return lax.pmean(masked(jnp.sum(h**2, -1), b), "tp")


def rows_gathered(p, b):
    h = lax.all_gather(jnp.tanh(b["x"] @ p["w"]), "tp", axis=0, tiled=True)
    return lax.pmean(jnp.mean(jnp.sum(h**2, -1)) + jnp.var(h), "tp")


def under_vmap(p, b):
    return masked(jax.vmap(lambda x: jnp.sum(layer(p, x[None]) ** 2))(b["x"]), b)


LOSSES = [
    *(summed, layers, in_a_scan, with_a_parameter_beside, normalised, normalised_in_a_scan, normalised_sums, gathered),
    *(gathered_in_front, permuted, scattered, dealt_again, counted_tokens, classified, varied, divided_at_the_end),
    *(divided_after_a_sum, compared, averaged, under_vmap, rows_dealt_again, rows_gathered),
]


VALUE_AND_GRAD = P(), SHARDS


def inside(run, data, out_specs=VALUE_AND_GRAD, *, check_vma=True):
    """A function of parameters and rows in a `jax.shard_map`; without devices along "data" all rows are on each."""
    dealt = DEALT if data else {name: P(None, *spec[1:]) for name, spec in DEALT.items()}
    return jax.shard_map(
        run, mesh=paths.mesh_with_tp(data or 1, 2), in_specs=(SHARDS, dealt), out_specs=out_specs, check_vma=check_vma
    )


def mapped(run, *where, **options):
    return jax.tree.map(np.asarray, jax.jit(inside(run, *where, **options))(PARAMS, BATCH))


@functools.cache
def whole(loss, check_vma):
    return mapped(jax.value_and_grad(loss), 0, check_vma=check_vma)


def close(got, want, rtol=2e-5):
    most = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * most), got, want)


@pytest.mark.parametrize(
    ("loss", "check_vma"),
    sweep(itertools.product(LOSSES, [True, False]), but=[(gathered, True)]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_collective_along_another_axis_treats_rows_one_by_one(loss, check_vma):
    for k in (1, 2, 3):
        run = optax_accum.value_and_grad(loss, k, devices="data")
        close(mapped(run, 2, check_vma=check_vma), whole(loss, check_vma))


def updated(loss, every, **options):
    """Parameters after a window of micro-batches of a call each, dealt out as `BATCH` is, with SGD."""

    def run(params, batch):
        tx = optax_accum.accumulate_gradients(optax.sgd(1.0), every, devices="data")
        step = optax_accum.value_and_apply_gradients(loss, tx, **options)
        state = tx.init(params)
        for part in range(every):
            _, params, state = step(params, state, jax.tree.map(lambda leaf: leaf[part::every], batch))  # noqa: B023
        return params

    return run


ACROSS = [summed, counted_tokens, averaged, gathered, permuted]


@pytest.mark.sweep
@pytest.mark.parametrize("loss", sweep(ACROSS, but=[counted_tokens]), ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("every", [2, *sweep([1])])
def test_across_calls_such_a_loss_says_how_much_a_micro_batch_counts(loss, every):
    want = jax.tree.map(np.subtract, PARAMS, whole(loss, True)[1])
    close(mapped(updated(loss, every), 2, SHARDS), want)


def of_own_tokens(p, b):
    """Each device along "tp" has some: the mean of their means is no sum over a count."""
    return lax.pmean(jnp.sum(b["counts"] * (b["tokens"] @ p["b"]) ** 2) / jnp.sum(b["counts"]), "tp")


def by_device(p, b):
    """The batch is the same along "tp": the device's number is not."""
    count = jnp.sum(b["mask"] * (1.0 + lax.axis_index("tp")))
    return lax.pmean(jnp.sum(b["mask"] * (b["x"] @ p["b"]) ** 2) / count, "tp")


@pytest.mark.parametrize(("loss", "check_vma"), [(of_own_tokens, True), (by_device, True), (averaged, False)])
def test_across_calls_a_mean_of_devices_that_may_count_differently_has_no_weight(loss, check_vma):
    """Without types nothing tells that they count alike."""
    with pytest.warns(UserWarning, match=r"psum.* of what a sum over rows divides.*\n.*weight_fn"):
        jax.eval_shape(inside(updated(loss, 2), 2, SHARDS, check_vma=check_vma), PARAMS, BATCH)


def coupled(p, b):
    """A loss that takes something from other devices' rows."""
    x = b["x"] - lax.pmean(b["x"].mean(0, keepdims=True), "data")
    return jnp.mean(jnp.sum((layer(p, x)) ** 2, -1)), x


def by_micro_batch(p, b):
    """The mean of two micro-batches, each of every second row."""
    each = [jax.tree.map(lambda leaf: leaf[part::2], b) for part in range(2)]  # noqa: B023
    return sum(coupled(p, part)[0] for part in each) / 2


REFUSED = r"other devices of \('data',\) \(psum.*test_other_axes.py:\d+\). Leave that out: .*one batch"


@pytest.mark.sweep
@pytest.mark.parametrize("check_vma", [True, *sweep([False])], ids=["vma", "no vma"])
def test_along_the_devices_a_loss_is_refused_with_what_else_to_do(check_vma):
    """Without, the rows of all devices are one batch; or each micro-batch counts by itself."""
    only_loss = lambda p, b: coupled(p, b)[0]
    for run in (
        optax_accum.value_and_grad(only_loss, 2, devices="data"),
        optax_accum.value_and_grad(coupled, 2, devices="data", has_aux=True),
    ):
        with pytest.raises(ValueError, match=rf"{REFUSED}.*jax.value_and_grad\(optax_accum.reduce_microbatches\("):
            mapped(run, 2, check_vma=check_vma)
    want = whole(only_loss, check_vma)
    alone = lambda p, b: jnp.mean(jnp.sum(layer(p, b["x"] - b["x"].mean(0, keepdims=True)) ** 2, -1))
    close(mapped(optax_accum.value_and_grad(alone, 2, devices="data"), 2, check_vma=check_vma), want)
    if check_vma:
        apart = jax.value_and_grad(optax_accum.reduce_microbatches(only_loss, 2, devices="data"))
    else:  # there a gradient is that of one device, also in JAX: their mean is that of all
        apart = optax_accum.reduce_microbatches(jax.value_and_grad(only_loss), 2, devices="data")
    close(mapped(apart, 2, check_vma=check_vma), whole(by_micro_batch, check_vma))
    with pytest.raises(AssertionError):
        close(whole(by_micro_batch, check_vma), want)  # it compares something


def test_across_calls_such_a_loss_warns_or_has_a_weight():
    only_loss = lambda p, b: coupled(p, b)[0]
    with pytest.warns(UserWarning, match=r"counts by its rows:\n.*other devices of \('data',\).*\n.*weight_fn"):
        jax.eval_shape(inside(updated(only_loss, 2), 2, SHARDS), PARAMS, BATCH)
    weighed = updated(only_loss, 2, weight_fn=lambda b: b["mask"].sum() + 1)  # the remedy
    jax.eval_shape(inside(weighed, 2, SHARDS), PARAMS, BATCH)


def run_with_own(loss, k=2):
    """The value of a loss of rows, and of a number that each device has for itself."""

    def run(w, x, own):
        return optax_accum.value_and_grad(loss, k, batch_argnums=1, devices="data")(w, x, own[0])

    inside = jax.shard_map(run, mesh=paths.mesh_with_tp(2, 1), in_specs=(P(), P("data"), P("data")), out_specs=P())
    return jax.jit(inside)(jnp.float32(2), jnp.arange(8.0), jnp.float32([1, 10]))


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x, own: own * jnp.mean(w * x),
        lambda w, x, own: jnp.mean(w * x) * (1.0 + lax.axis_index("data")),
        lambda w, x, own: jnp.var(w * x) + own**2,
    ],
)
def test_what_differs_between_devices_is_refused_after_a_sum_over_rows(loss, k):
    """The first device's value stood for all."""
    with pytest.raises(ValueError, match=r"(argument 2|index).*differs between the devices of \('data',\).*pmean"):
        run_with_own(loss, k)


def test_each_row_may_meet_what_differs_between_devices():
    value, grad = run_with_own(lambda w, x, own: jnp.mean(w * own * x))
    rows = np.arange(8) * np.repeat([1, 10], 4)
    close((value, grad), (np.float32(2 * rows.mean()), np.float32(rows.mean())))
