"""How much a call of a train step counts if nobody says it: what its loss divides by, read off the trace."""

import functools
import itertools
import linecache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from optax_accum import flax as accum
from tests.flax_problems import RNG, X, Y, created, rows_of
from tests.tiers import sweep

MASK = np.array([0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 0], "f")
W = RNG.normal(size=(6, 3)).astype("f")
SIZES = (2, 8, 2)  # a program for each size


def each_of(w, batch):
    return optax.softmax_cross_entropy_with_integer_labels(batch[0] @ w, batch[1])


def looked_up(w, batch):
    """Logits by row: an Explicit mesh knows no place for them, and each device by itself does."""
    return optax.softmax_cross_entropy_with_integer_labels(w[batch[1]], batch[1])


def masked(w, batch):
    return jnp.sum(batch[2] * each_of(w, batch)) / jnp.maximum(jnp.sum(batch[2]), 1)


def fractional(w, batch, each=each_of):
    """What a call has of a mask is less than what keeps its denominator from zero."""
    mask = batch[2] / 4
    return jnp.sum(mask * each(w, batch)) / jnp.maximum(jnp.sum(mask), 1)


def uncounted(w, batch, each=each_of):
    """As in detection: all rows have a loss, few are counted, and some micro-batches have none of these."""
    return jnp.sum(each(w, batch)) / jnp.maximum(jnp.sum(batch[2] * (batch[1] == 1)), 1)


def soft(w, batch, each=each_of):
    """Masks that add up to less, in the whole window, than what keeps the denominator from zero."""
    return jnp.sum(each(w, batch)) / jnp.maximum(jnp.sum(batch[2]) / 16, 1)


def of_few(w, batch):
    return optax_accum.Ratio(jnp.sum(each_of(w, batch)), jnp.sum(batch[2] * (batch[1] == 1)))


def mean(w, batch, each=each_of):
    return each(w, batch).mean()


def total(w, batch):
    return each_of(w, batch).sum()


def two_means(w, batch):
    return masked(w, batch) + mean(w, batch)


def normalised(w, batch):
    h = batch[0] @ w
    return mean(jnp.eye(3), (h - h.mean(0, keepdims=True), *batch[1:]))


@jax.custom_vjp
def clipped(w):
    return w


clipped.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


class Module(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array(W))


def linen(loss, tx, sizes, place, **options):
    """The parameters after these calls."""
    of_train_step = lambda params, batch, key, state: (loss(params["w"], batch), {})
    step = accum.linen.train_step(of_train_step, **{"num_microbatches": 1, **options})
    state = accum.linen.TrainState.create(apply_fn=None, params={"w": jnp.array(W)}, tx=tx, metrics=("loss",))
    for batch in batches(sizes, place):
        state, metrics = step(state, batch, jax.random.key(0))
    return state.params["w"], metrics["loss"]


def of_nnx(loss, tx, sizes, place, **options):
    """The same in NNX."""
    step = accum.nnx.train_step(lambda model, batch: loss(model.w[...], batch), **{"num_microbatches": 1, **options})
    model = Module()
    optimizer = accum.nnx.Optimizer(model, tx, wrt=nnx.Param, metrics=("loss",))
    for batch in batches(sizes, place):
        metrics = step(model, optimizer, batch)
    return model.w[...], metrics["loss"]


def batches(sizes, place):
    ends = np.cumsum(sizes)
    for end, size in zip(ends, sizes, strict=True):
        yield jax.tree.map(lambda leaf: place(leaf[end - size : end]), (X, Y, MASK))  # noqa: B023


STEPS = {"Linen": linen, "NNX": of_nnx}
each = pytest.mark.parametrize("trained", STEPS.values(), ids=STEPS)
one_of = pytest.mark.parametrize("trained", [*sweep([linen]), of_nnx], ids=STEPS)  # the other is in the sweep


def window(reduction="mean", every=3, **options):
    return optax_accum.accumulate_gradients(optax.sgd(1.0), every, reduction=reduction, **options)


def assert_whole(found, loss, expected=None):
    value, grads = jax.value_and_grad(loss)(W, (X, Y, MASK))
    np.testing.assert_allclose(found[0], W - grads, rtol=1e-5, atol=1e-6)
    if expected is None:
        np.testing.assert_allclose(found[1], value, rtol=1e-5)


@pytest.mark.sweep
@each
@pytest.mark.parametrize("tx", [window(), optax.chain(optax.identity(), window())], ids=["alone", "in a chain"])
def test_it_is_what_the_loss_divides_by(trained, tx):
    assert_whole(trained(masked, tx, SIZES, jnp.asarray), masked)


@pytest.mark.sweep
@one_of
def test_a_fractional_mask_counts_as_in_the_whole_batch(trained):
    """The window's sum is 1.75, of its calls 0.25, 1.25 and 0.25; metrics count so, too."""
    assert_whole(trained(fractional, window(), SIZES, jax.device_put), fractional)


@each
@pytest.mark.parametrize("loss", sweep([of_few, soft, uncounted], but=[soft]))
def test_a_call_that_counts_nothing_adds_its_loss(trained, loss):
    counts = [jnp.sum(batch[2] * (batch[1] == 1)) for batch in batches((1, 10, 1), jnp.asarray)]
    assert min(counts) == 0 < max(counts)
    found = trained(loss, window(), (1, 10, 1), jax.device_put, num_microbatches=1)
    assert_whole(found, uncounted if loss is of_few else loss)


@pytest.mark.sweep
@one_of
def test_a_call_that_is_left_out_first_leaves_the_loss_of_the_others(trained):
    place = lambda leaf: jnp.full_like(leaf, jnp.nan) if leaf.shape == (1, *X.shape[1:]) else jnp.asarray(leaf)
    _, loss = trained(uncounted, window(nonfinite="omit"), (1, 7, 4), place)
    np.testing.assert_allclose(loss, uncounted(W, (X[1:], Y[1:], MASK[1:])), rtol=1e-5)


def without_flax(loss, tx, sizes, place, num_microbatches):
    """The same by `value_and_apply_gradients`, whose micro-batch is a device's rows."""
    step, w = jax.jit(optax_accum.value_and_apply_gradients(loss, tx)), jnp.array(W)
    state = tx.init(w)
    for batch in batches(sizes, place):
        _, w, state = step(w, state, batch)
    return w, None


def on(kind):
    return jax.make_mesh((2,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),), devices=jax.devices()[:2])


WAYS = {
    "Linen": (linen, False),
    "Linen, deferred": (linen, True),
    "NNX": (of_nnx, False),
    "NNX, deferred": (of_nnx, True),
    "without Flax": (without_flax, True),
}
READ = [*itertools.product(WAYS, ["Auto", "Explicit"], [fractional, mean, uncounted], [each_of, looked_up])]
IN_EACH_RUN = [
    ("Linen, deferred", "Auto", fractional, each_of),
    ("NNX", "Explicit", fractional, looked_up),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("way", "kind", "loss", "of_rows"), sweep(READ, but=IN_EACH_RUN))
def test_each_device_reads_the_loss_of_its_rows(way, kind, loss, of_rows):
    """Once per call, with the gradient; or in partial sums, of which each device's is weighed by it.

    Weight and factor are read together, so a loss that only a device by itself can run is as exact as any other.
    """
    (trained, deferred), mesh = WAYS[way], on(kind)
    place = lambda rows: jax.device_put(rows, NamedSharding(mesh, P("data")))
    tx, options = (window(every=2, devices="data"), {}) if deferred else (window(every=2), {"devices": "data"})
    loss = functools.partial(loss, each=of_rows)
    with jax.set_mesh(mesh):
        found = trained(loss, tx, (4, 8), place, num_microbatches=2, **options)
    assert_whole(found, loss, expected="of each device" if way == "without Flax" else None)


@pytest.mark.parametrize("options", [{"weight_fn": rows_of}, {}], ids=["weighed", "a sum"])
@pytest.mark.parametrize(
    ("step", "kind"), sweep(itertools.product(STEPS, ["Auto", "Explicit"]), but=[("Linen", "Explicit")])
)
def test_each_device_checks_the_loss_of_its_rows(step, kind, options):
    """The loss that a device runs, and whole calls cannot on an Explicit mesh: it would pass unread."""
    mesh = on(kind)
    place = lambda rows: jax.device_put(rows, NamedSharding(mesh, P("data")))
    centred = lambda w, batch: looked_up(w, (None, batch[1])).std()
    tx = window(every=2) if options else window("sum", every=2)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="(?s)each row takes a mean over rows.*exact=False"):
        STEPS[step](centred, tx, (4, 8), place, devices="data", **options)


@pytest.mark.sweep
@pytest.mark.parametrize(("devices", "cut"), [(4, 1), *sweep([(2, 3), (1, 2), (1, 1)])], ids=str)
@one_of
def test_a_window_of_one_call_has_a_micro_batch_on_each_device(trained, devices, cut):
    """`every=1`: devices are weighed, and refused where no weight is right; one alone is the whole batch."""
    mesh = jax.make_mesh(
        (devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )
    place = lambda rows: jax.device_put(rows, NamedSharding(mesh, P("data")))
    tx, options = window(every=1, devices="data"), {"num_microbatches": cut}
    with jax.set_mesh(mesh):
        assert_whole(trained(masked, tx, (12,), place, **options), masked)
        if devices == 1:
            assert_whole(trained(two_means, tx, (12,), place, **options), two_means)
        else:
            with pytest.raises(ValueError, match="divided by the sum over rows at .* and by the number of rows"):
                trained(two_means, tx, (12,), place, **options)


@each
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (normalised, "each row takes a mean over rows, test_weights.py:"),
        (two_means, r"divided by the sum over rows at test_weights.py:\d+ and by the number of rows"),
        (total, r'divided by no count of them \(test_weights.py:\d+\).*Pass reduction="sum"'),
    ],
)
def test_where_no_weight_is_right_an_error_shows_the_lines(trained, loss, message):
    for weighed in ({}, {"weight_fn": rows_of}):
        with pytest.raises(ValueError, match=f"(?s){message}.*exact=False"):
            trained(loss, window(), SIZES, jnp.asarray, **weighed)


@pytest.mark.sweep
@one_of
def test_each_call_counts_by_itself_if_one_says_so(trained):
    """By its rows, or as `weight_fn` says."""
    grads = [jax.grad(normalised)(W, batch) for batch in batches(SIZES, jnp.asarray)]
    for options, weights in (({}, SIZES), ({"weight_fn": lambda batch: 1.0}, (1, 1, 1))):
        found, _ = trained(normalised, window(), SIZES, jnp.asarray, exact=False, **options)
        np.testing.assert_allclose(found, W - np.average(grads, 0, weights), rtol=1e-5, atol=1e-6)


@pytest.mark.sweep
@each
def test_an_update_of_each_call_reads_nothing(trained):
    for tx in (window(every=1), window("sum", every=1), optax.sgd(1.0)):
        for options in ({}, {"weight_fn": lambda batch: 1.0}):
            assert_whole(trained(two_means, tx, (12,), jnp.asarray, num_microbatches=3, **options), two_means)


@each
@pytest.mark.parametrize("exact", [None, 0, "no"])
def test_exact_is_a_bool(trained, exact):
    with pytest.raises(TypeError, match="exact must be True or False: exact="):
        trained(mean, window(), SIZES, jnp.asarray, exact=exact)


@pytest.mark.sweep
@each
def test_losses_of_an_optimizer_that_takes_a_sum_are_added(trained):
    assert_whole(trained(total, window("sum"), SIZES, jnp.asarray), total, expected="its mean over calls")


@pytest.mark.sweep
@each
def test_losses_are_added_over_devices_and_micro_batches_too(trained):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    place = lambda rows: jax.device_put(rows, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        found = trained(total, window("sum", 2, devices="data"), (4, 8), place, num_microbatches=2)
    assert_whole(found, total, expected="its mean over calls")


@pytest.mark.sweep
@each
def test_where_nothing_shows_what_counts_a_warning_says_so_at_a_line_of_the_user(trained):
    loss = lambda w, batch: mean(clipped(w), batch)
    with pytest.warns(UserWarning, match="counts by its rows:\n  a derivative of yours that is not linear") as warned:
        trained(loss, window(), SIZES, jnp.asarray)
    lines = [linecache.getline(warning.filename, warning.lineno) for warning in warned]
    assert all(warning.filename == __file__ for warning in warned)
    assert all("step(" in line for line in lines)


@pytest.mark.sweep
@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_across_calls_is_averaged_if_one_says_so(train):
    """Not with running statistics that stay, as in fine-tuning: rows are then apart."""

    def loss(params, batch, key, state):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch[0], train, mutable=["batch_stats"])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        return jnp.sum(batch[2] * each) / jnp.sum(batch[2]), {"batch_stats": state.batch_stats, **new}

    batch = next(batches((6,), jnp.asarray))
    if train:
        message = r"(?s)each row takes a mean over rows, flax_problems.py:\d+.*use_running_average=True.*GroupNorm.*exact=False"
        for weighed in ({}, {"weight_fn": rows_of}):
            with pytest.raises(ValueError, match=message):
                accum.linen.train_step(loss, num_microbatches=1, **weighed)(
                    created(window(every=2), norm=True, metrics=("loss",)), batch, jax.random.key(0)
                )
    options = {"exact": False} if train else {}
    state, _ = accum.linen.train_step(loss, num_microbatches=1, **options)(
        created(window(every=2), norm=True, metrics=("loss",)), batch, jax.random.key(0)
    )
    assert float(state.opt_state.weight) == (6 if train else MASK[:6].sum())


def test_float8_counts_by_its_rows_and_says_so():
    """Its derivatives are rules of its own, of the whole batch: what micro-batches add up to is not shown."""
    model = nn.Dense(3, dot_general_cls=Fp8DirectDotGeneralOp)
    variables = jax.jit(model.init)(jax.random.key(0), X)
    loss = lambda params, batch, key, state: (mean(jnp.eye(3), (model.apply(params, batch[0]), *batch[1:])), {})
    state = accum.linen.TrainState.create(apply_fn=model.apply, params=variables, tx=window(), metrics=("loss",))
    with pytest.warns(UserWarning, match="counts by its rows"):
        accum.linen.train_step(loss, num_microbatches=1)(state, (X, Y), jax.random.key(0))


# With `devices` in the optimizer: the rows of each device are taken together.

UNITS, EACH = 64, 4  # of dropout; rows of a device


@pytest.fixture
def two_devices():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        yield lambda rows: jax.device_put(rows, NamedSharding(mesh, P("data")))


class Dropping(nnx.Module):
    def __init__(self):
        self.w, self.drop = nnx.Param(jnp.zeros((2 * EACH, UNITS))), nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1))


def of_kept(w, kept, row):
    """A loss whose gradient by a row of `w` is what the row kept."""
    return jnp.mean(jnp.sum(kept * w[row], -1))


def kept_in_linen(rows, tx):
    def loss(params, row, key, state):
        drop = nn.Dropout(0.5, deterministic=False)
        kept = drop.apply({}, jnp.ones((len(row), UNITS)), rngs={"dropout": key})
        return of_kept(params["w"], kept, row), {}

    params = {"w": jnp.zeros((2 * EACH, UNITS))}
    state = accum.linen.TrainState.create(apply_fn=None, params=params, tx=tx, metrics=("loss",))
    return accum.linen.train_step(loss, num_microbatches=2)(state, rows, jax.random.key(0))[0].params["w"]


def kept_in_nnx(rows, tx):
    def loss(model, row):
        return of_kept(model.w[...], model.drop(jnp.ones((len(row), UNITS))), row)

    model = Dropping()
    optimizer = accum.nnx.Optimizer(model, tx, wrt=nnx.Param, metrics=("loss",))
    accum.nnx.train_step(loss, num_microbatches=2)(model, optimizer, rows)
    assert int(model.drop.rngs.count[...]) == 1
    return model.w[...]


@pytest.mark.parametrize("kept", [*sweep([kept_in_linen]), kept_in_nnx], ids=STEPS)
def test_devices_have_masks_of_their_own(kept, two_devices):
    """In the place of one another, too; and micro-batches of one device have those of its rows."""
    masks = -2 * EACH * kept(two_devices(np.arange(2 * EACH)), window(every=1, devices="data"))
    np.testing.assert_allclose(np.unique(masks), [0, 2], rtol=1e-6)
    assert len(np.unique(np.asarray(masks), axis=0)) == 2 * EACH


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [pytest.param((12,), marks=pytest.mark.sweep), (4, 8)], ids=str)
@one_of
def test_a_mask_that_micro_batches_of_a_device_share_unevenly(trained, sizes, two_devices, monkeypatch):
    """Of each device's rows too: they have counts 2 and 0, and 2 and 3, in the first of these cases."""
    monkeypatch.setitem(globals(), "MASK", np.array([1, 0, 0, 0, 1, 0, 1, 1, 1, 1, 0, 1], "f"))
    tx = window(every=len(sizes), devices="data")
    found, value = trained(masked, tx, sizes, two_devices, num_microbatches=2)
    want_value, grads = jax.value_and_grad(masked)(W, (X, Y, MASK))
    np.testing.assert_allclose(found, W - grads, rtol=0, atol=1e-6)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    unweighed = [jax.grad(masked)(W, (X[rows], Y[rows], MASK[rows])) for rows in (slice(6), slice(6, 12))]
    assert np.max(np.abs(np.mean(unweighed, 0) - grads)) > 1e-2  # it compares something
