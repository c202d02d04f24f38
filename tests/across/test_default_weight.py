"""How much a micro-batch counts if nobody says it: what its loss divides by, read off the trace."""

import functools
import linecache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from tests.tiers import sweep

RANDOM = np.random.default_rng(0)
BATCH = {
    "x": RANDOM.normal(size=(12, 3)).astype("f"),
    "y": RANDOM.normal(size=12).astype("f"),
    "mask": np.array([0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 0], "f"),
}
W = jnp.ones(3)


def errors(w, batch):
    return (batch["x"] @ w - batch["y"]) ** 2


def masked(w, batch):
    return jnp.sum(batch["mask"] * errors(w, batch)) / jnp.maximum(jnp.sum(batch["mask"]), 1)


def normalised(w, batch):
    h = batch["x"] @ w
    return jnp.mean(((h - h.mean()) / h.std() - batch["y"]) ** 2)


def two_means(w, batch):
    return masked(w, batch) + jnp.mean(errors(w, batch))


def total(w, batch):
    return jnp.sum(errors(w, batch))


def rows_of(batch):
    return len(batch["y"])


def over_model(w, batch):
    gate = jax.nn.sigmoid(batch["x"] @ w)
    return jnp.sum(gate * errors(w, batch)) / jnp.sum(gate)


@jax.custom_vjp
def clipped(w):
    return w


clipped.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def trained(loss, sizes=(1, 1, 10), place=lambda rows: rows, tx=None, options=None, **keywords):
    """The parameters after one window."""
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), len(sizes)) if tx is None else tx
    step = jax.jit(optax_accum.value_and_apply_gradients(loss, tx, **(options or {})))
    now, state, end = W, jax.jit(tx.init)(W), 0
    for size in sizes:
        _, now, state = step(now, state, place(jax.tree.map(lambda leaf: leaf[end : end + size], BATCH)), **keywords)  # noqa: B023
        end += size
    return now


def traced(loss, every=2, tx=None, options=None, **keywords):
    """A micro-step that is not run: what is said of a loss is said where it is traced."""
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), every) if tx is None else tx
    step = optax_accum.value_and_apply_gradients(loss, tx, **(options or {}))
    jax.eval_shape(functools.partial(step, **keywords), W, jax.eval_shape(tx.init, W), BATCH)


OUTSIDE = pytest.mark.parametrize("outside", [[], [optax.identity()]], ids=["a window", "a window inside a chain"])


@pytest.mark.quick
@pytest.mark.parametrize("loss", [masked, lambda w, batch: masked(w, batch) + 0.1 * jnp.sum(w**2)])
def test_it_is_what_the_loss_divides_by(loss):
    """Micro-batches of one row, and of rows that do not count, among them."""
    np.testing.assert_allclose(trained(loss), W - jax.grad(loss)(W, BATCH), rtol=1e-5)


@pytest.mark.quick
def test_a_window_inside_a_chain_is_told_too():
    """A mean; a sum takes losses as they are."""
    inside = lambda **how: optax.chain(optax.identity(), optax_accum.accumulate_gradients(optax.sgd(1.0), 3, **how))
    np.testing.assert_allclose(trained(masked, tx=inside()), W - jax.grad(masked)(W, BATCH), rtol=1e-5)
    np.testing.assert_allclose(trained(total, tx=inside(reduction="sum")), W - jax.grad(total)(W, BATCH), rtol=1e-5)
    with pytest.raises(ValueError, match="each row takes a mean over rows"):
        traced(normalised, tx=inside())
    with pytest.raises(ValueError, match="A Ratio is divided by the counts"):
        traced(lambda w, batch: optax_accum.Ratio(total(w, batch), 12.0), tx=inside(reduction="sum"))


def squared(batch):
    return jnp.sum(batch["mask"]) ** 2


GUARDS = {  # of two terms
    "maximum": lambda count: [jnp.maximum(count, 1), jnp.maximum(count, 1)],
    "where": lambda count: [jnp.where(count > 0.5, count, 0.5)] * 2,
    "both": lambda count: [jnp.maximum(count + 1e-9, 1)] * 2,
    "clip": lambda count: [jnp.clip(count, 1, 1e6)] * 2,
    "scaled": lambda count: [4 * jnp.maximum(count, 1) / 3, 2.0 * jnp.maximum(count, 1)],
}


@pytest.mark.sweep
@pytest.mark.parametrize("guard", sweep(GUARDS, but=["maximum"]))
@OUTSIDE
def test_fractional_masks_count_as_in_the_whole_batch_however_little_a_micro_batch_has(guard, outside):
    """What keeps the denominator of a micro-batch from zero is not to make its rows count less."""

    def loss(w, batch):
        mask = batch["mask"] / 3  # the sums of micro-batches are 0, 1 / 3 and 2
        total, squares = (jnp.sum(mask * errors(w, batch) ** power) for power in (1, 2))
        by, by_too = GUARDS[guard](jnp.sum(mask))
        return total / by + squares / by_too

    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 3)
    now = trained(loss, (1, 1, 10), tx=optax.chain(*outside, tx) if outside else tx)
    np.testing.assert_allclose(now, W - jax.grad(loss)(W, BATCH), rtol=1e-5)


FUNCTIONS = {  # of the count, 7, and of those of micro-batches
    "maximum": lambda count: jnp.maximum(count, 5),
    "root": jnp.sqrt,
    "power": lambda count: jnp.maximum(count, 1) ** 2,
    "pow": lambda count: count**1.5,
    "of integers": lambda count: jnp.maximum(count.astype(int), 2),
    "added": lambda count: count + (count == 0),
    "several": lambda count: 2 * jnp.sqrt(count) + jnp.minimum(count, 3) / 3,
    "product": lambda count: count * jnp.maximum(count, 2),
    "square": lambda count: count * count,
    "inverse": lambda count: 1 / jax.lax.rsqrt(count + 1),
    "softplus": lambda count: jax.nn.softplus(count - 1),
    "branch": lambda count: jax.lax.cond(count > 2, lambda: 2 * count, lambda: count + 2),
    "test": lambda count: jnp.maximum(count, 1) * (2 - (count > 0)),
    "largest": lambda count: jnp.max(jnp.stack([count, jnp.sqrt(count), jnp.float32(3)])),
    "close": lambda count: jnp.where(jnp.isclose(count, 0), 1, count),
}


@pytest.mark.sweep
@pytest.mark.parametrize("function", sweep(FUNCTIONS, but=["branch"]))
def test_any_function_of_a_count_may_divide(function):
    loss = lambda w, batch: jnp.sum(batch["mask"] * errors(w, batch)) / FUNCTIONS[function](jnp.sum(batch["mask"]))
    np.testing.assert_allclose(trained(loss, (2, 5, 5)), W - jax.grad(loss)(W, BATCH), rtol=1e-5)


def root_of_each(w, batch):
    """Of a count, and of what keeps it from zero: these are two functions."""
    count, error = jnp.sum(batch["mask"]) / 100, errors(w, batch)
    return jnp.sum(error) / jnp.sqrt(jnp.maximum(count, 1)) + jnp.sum(error**2) / jnp.sqrt(count)


BESIDE = {
    "a term": lambda w, batch: total(w, batch) / jnp.sqrt(jnp.sum(batch["mask"])) + jnp.sum(w**2),
    "a term of another": root_of_each,
    "a count that multiplies no rows": lambda w, batch: jnp.sum(batch["mask"]) * jnp.sum(w**2),
    "a count that divides no rows": lambda w, batch: jnp.sum(w**2) / jnp.sum(batch["mask"]),
}


@pytest.mark.parametrize("loss", BESIDE)
def test_no_function_of_a_count_stands_beside_another_term(loss):
    with pytest.raises(ValueError, match="No weight makes|divided by no count"):
        traced(BESIDE[loss])


def over_positives(w, batch):
    """All rows have a loss, as in detection; the first micro-batch counts none of them."""
    return jnp.sum(errors(w, batch)) / jnp.maximum(_positives(batch), 1)


def _positives(batch):
    return jnp.sum(batch["mask"] * (jnp.abs(batch["y"] - Y_OF_FEW) < 0.5))


Y_OF_FEW = BATCH["y"][1]
UNCOUNTED = {
    "maximum": over_positives,
    "where": lambda w, batch: jnp.sum(errors(w, batch)) / jnp.where(_positives(batch) == 0, 1, _positives(batch)),
    "Ratio": lambda w, batch: optax_accum.Ratio(jnp.sum(errors(w, batch)), _positives(batch)),
}


@pytest.mark.parametrize("loss", sweep(UNCOUNTED, but=["maximum"]))
@pytest.mark.parametrize("outside", [*sweep([[]]), [optax.identity()]], ids=["a window", "a window inside a chain"])
def test_a_micro_batch_that_counts_nothing_adds_its_loss(loss, outside):
    """A Ratio, too; the loss that the inner optimizer sees is the whole batch's."""
    tx = optax.chain(*outside, optax_accum.accumulate_gradients(seeing_value(), 3, nonfinite="discard"))
    value, grad = jax.value_and_grad(over_positives)(W, BATCH)
    now = trained(UNCOUNTED[loss], tx=tx)
    assert _positives(jax.tree.map(lambda leaf: leaf[:1], BATCH)) == 0 < _positives(BATCH)
    np.testing.assert_allclose(now, W - grad * value, rtol=1e-5)


def seeing_value():
    """A step as long as the loss."""
    update = lambda grads, state, params=None, *, value, **_: (jax.tree.map(lambda g: -value * g, grads), state)
    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@pytest.mark.sweep
@pytest.mark.parametrize("scale", [0.01, *sweep([0.0, 1e-6])])
@pytest.mark.parametrize("way", [*sweep(["window", "chain"]), "devices"])
@pytest.mark.parametrize("guard", sweep([*GUARDS, "plus"], but=["maximum", "plus"]))
def test_a_window_is_divided_by_what_the_loss_divides_the_whole_batch_by(guard, way, scale, monkeypatch):
    """Its masks add up to 0.07, or to nothing, and each row has a loss; the inner optimizer sees that."""
    monkeypatch.setitem(BATCH, "mask", np.float32(scale) * BATCH["mask"])

    def loss(w, batch):
        return (
            jnp.sum(errors(w, batch))
            / {**GUARDS, "plus": lambda count: [count + 1e-6]}[guard](jnp.sum(batch["mask"]))[0]
        )

    axes = "data" if way == "devices" else None
    tx = optax_accum.accumulate_gradients(seeing_value(), 3, nonfinite="discard", devices=axes)
    tx = optax.chain(optax.identity(), tx) if way == "chain" else tx
    now = over(2, loss, (2, 4, 6), tx) if axes else trained(loss, (2, 4, 6), tx=tx)
    value, grad = jax.value_and_grad(loss)(W, BATCH)
    np.testing.assert_allclose(now, W - grad * value, rtol=1e-5)


@pytest.mark.parametrize("scale", [0.01, *sweep([0.0, 1.0])])
def test_grad_weight_by_hand_is_what_the_loss_divides_by(scale):
    loss = lambda w, batch: jnp.sum(errors(w, batch)) / jnp.maximum(scale * jnp.sum(batch["mask"]), 1)
    tx, now = optax_accum.accumulate_gradients(optax.sgd(1.0), 3), W
    state = tx.init(now)
    for rows in (slice(0, 1), slice(1, 2), slice(2, 12)):
        part = jax.tree.map(lambda leaf: leaf[rows], BATCH)  # noqa: B023
        weights = {"weight": scale * jnp.sum(part["mask"]), "grad_weight": lambda count: jnp.maximum(count, 1)}
        now, state = optax_accum.apply_gradients(tx, jax.grad(loss)(now, part), state, now, **weights)
    np.testing.assert_allclose(now, W - jax.grad(loss)(W, BATCH), rtol=1e-5)


@pytest.mark.parametrize("nonfinite", ["skip", *sweep(["omit"])])
def test_a_window_of_which_a_policy_leaves_out_all_makes_no_update_whatever_divides_its_loss(nonfinite):
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 1, nonfinite=nonfinite)
    weights = {"weight": 0.0, "grad_weight": lambda count: jnp.maximum(count, 1)}
    now, state = optax_accum.apply_gradients(tx, jnp.full(3, jnp.nan), tx.init(W), W, flush=True, **weights)
    np.testing.assert_array_equal(now, W)
    assert state.skipped == 1
    assert state.gradient_step == 0


@pytest.mark.sweep
def test_a_ratio_of_0_times_a_mean_of_nothing_adds_nothing():
    mean = lambda w, batch: jnp.sum(batch["mask"] * errors(w, batch)) / jnp.sum(batch["mask"])
    weighed = lambda w, batch: optax_accum.Ratio(jnp.sum(batch["mask"]) * mean(w, batch), jnp.sum(batch["mask"]))
    np.testing.assert_allclose(trained(weighed), W - jax.grad(mean)(W, BATCH), rtol=1e-5)


@pytest.mark.sweep
def test_a_ratio_that_counts_nothing_changes_nothing_where_no_window_adds_it_up():
    nothing = lambda w, batch: optax_accum.Ratio(jnp.sum(errors(w, batch)), 0.0 * jnp.sum(batch["mask"]))
    np.testing.assert_array_equal(trained(nothing, tx=optax.sgd(1.0)), W)


@pytest.mark.sweep
@pytest.mark.parametrize("nonfinite", ["skip", "omit"])
def test_a_weight_that_is_a_nan_is_left_out_beside_a_grad_weight(nonfinite):
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 1, nonfinite=nonfinite)
    weights = {"weight": jnp.float32(jnp.nan), "grad_weight": 1.0}
    now, state = optax_accum.apply_gradients(tx, jnp.ones(3), tx.init(W), W, **weights)
    np.testing.assert_array_equal(now, W)
    assert state.skipped == 1


@OUTSIDE
def test_grad_weight_is_not_for_a_step_that_reads_its_loss(outside):
    tx = optax.chain(*outside, optax_accum.accumulate_gradients(optax.sgd(1.0), 3))
    with pytest.raises(TypeError, match="reads off the loss what multiplies its gradient"):
        traced(masked, tx=tx, weight=1.0, grad_weight=1.0)


@pytest.mark.sweep
def test_a_denominator_that_is_kept_from_zero_elsewhere_changes_nothing():
    """In a metric beside the loss; and a guard of 1 is none for a mean of a mask, which is never more."""

    def with_metric(w, batch):
        mask = batch["mask"] / 3
        return jnp.sum(mask * errors(w, batch)) / jnp.sum(mask), jnp.sum(mask) / jnp.maximum(jnp.sum(mask), 1)

    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 3)
    step = jax.jit(optax_accum.value_and_apply_gradients(with_metric, tx, has_aux=True))
    now, state = W, tx.init(W)
    for rows in (slice(0, 2), slice(2, 4), slice(4, 12)):
        _, now, state = step(now, state, jax.tree.map(lambda leaf: leaf[rows], BATCH))  # noqa: B023
    np.testing.assert_allclose(now, W - jax.grad(lambda w: with_metric(w, BATCH)[0])(W), rtol=1e-5)

    def of_means(w, batch):
        return jnp.mean(batch["mask"] * errors(w, batch)) / jnp.maximum(jnp.mean(batch["mask"]), 1)

    with pytest.warns(UserWarning, match="counts by its rows:\n  max of a mean over rows"):
        traced(of_means)


@pytest.mark.sweep
def test_inside_a_chain_a_weight_that_the_loss_returns_stays():
    """The square of a count, not the count that divides the loss: by `weight_fn`, and as a `Ratio`."""
    tx = optax.chain(optax.identity(), optax_accum.accumulate_gradients(optax.sgd(1.0), 3))
    by_batch = optax_accum.value_and_apply_gradients(masked, tx, weight_fn=squared)
    by_ratio = optax_accum.value_and_apply_gradients(
        lambda w, batch: optax_accum.Ratio(squared(batch) * masked(w, batch), squared(batch)), tx
    )
    found = []
    for step in map(jax.jit, (by_batch, by_ratio)):
        now, state = W, tx.init(W)
        for rows in (slice(0, 5), slice(5, 7), slice(7, 12)):
            _, now, state = step(now, state, jax.tree.map(lambda leaf: leaf[rows], BATCH))  # noqa: B023
        found.append(now)
    np.testing.assert_allclose(*found, rtol=1e-5)
    assert not np.allclose(found[0], trained(masked, (5, 2, 5), tx=tx), rtol=1e-3)


def over(devices, loss, sizes, tx=None, **options):
    """The parameters after one window on so many devices."""
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), len(sizes), devices="data") if tx is None else tx
    mesh = jax.make_mesh(
        (devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )
    place = functools.partial(jax.device_put, device=NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        return trained(loss, sizes, place, tx, options)


def unguarded(w, batch):
    return jnp.sum(batch["mask"] * errors(w, batch)) / jnp.sum(batch["mask"])


@pytest.mark.parametrize(("devices", "sizes"), [(4, (12,)), *sweep([(1, (12,)), (2, (12,)), (2, (4, 8))])], ids=str)
@pytest.mark.parametrize("loss", [masked, *sweep([unguarded])])
def test_each_device_weighs_its_own_rows(loss, devices, sizes):
    """Also where a window is one call (`every=1`): it has as many micro-batches as there are devices."""
    np.testing.assert_allclose(over(devices, loss, sizes), W - jax.grad(loss)(W, BATCH), rtol=1e-5)


@pytest.mark.sweep
def test_a_device_of_padding_alone_counts_nothing_with_every_1(monkeypatch):
    """Its loss is 0 / 0."""
    monkeypatch.setitem(BATCH, "mask", np.float32([0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0]))
    np.testing.assert_allclose(over(4, unguarded, (12,)), W - jax.grad(unguarded)(W, BATCH), rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        *sweep(
            [
                (normalised, "each row takes a mean over rows, test_default_weight.py:"),
                (two_means, r"divided by the sum over rows at test_default_weight.py:\d+ and by the number of rows"),
            ]
        ),
        (total, r"divided by no count of them \(test_default_weight.py:\d+\)"),
    ],
)
def test_several_devices_are_several_micro_batches_with_every_1(loss, message):
    """Weighed or not; unless each device's rows are to count by themselves."""
    for weighed in ({}, {"weight_fn": rows_of}):
        with pytest.raises(ValueError, match=f"(?s){message}.*exact=False"):
            over(2, loss, (12,), **weighed)
        # one alone is the whole batch
        np.testing.assert_allclose(over(1, loss, (12,), **weighed), W - jax.grad(loss)(W, BATCH), rtol=1e-5)
    halves = [jax.grad(loss)(W, jax.tree.map(lambda leaf: leaf[rows], BATCH)) for rows in (slice(6), slice(6, 12))]  # noqa: B023
    np.testing.assert_allclose(over(2, loss, (12,), exact=False), W - sum(halves) / 2, rtol=1e-5)


@pytest.mark.sweep
def test_a_sum_with_every_1_is_read_over_devices_too():
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 1, reduction="sum", devices="data")
    np.testing.assert_allclose(over(2, total, (12,), tx), W - jax.grad(total)(W, BATCH), rtol=1e-5)
    with pytest.raises(ValueError, match="(?s)No weight makes.*each row takes a mean over rows.*exact=False"):
        over(2, normalised, (12,), tx)
    over(2, normalised, (12,), tx, exact=False)  # the remedy


@pytest.mark.parametrize("outside", [[], *sweep([[optax.identity()]])], ids=["a window", "a window inside a chain"])
def test_a_window_of_one_call_in_a_shard_map_of_the_user_has_several_micro_batches_too(outside):
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 1, devices="data")
    tx = optax.chain(*outside, tx) if outside else tx

    def run(w, batch):
        return optax_accum.value_and_apply_gradients(masked, tx)(w, tx.init(w), batch)[1]

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    run = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    with jax.set_mesh(mesh):
        now = jax.jit(run)(W, BATCH)
    np.testing.assert_allclose(now, W - jax.grad(masked)(W, BATCH), rtol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (normalised, "each row takes a mean over rows, test_default_weight.py:"),
        (two_means, r"divided by the sum over rows at test_default_weight.py:\d+ and by the number of rows"),
        (over_model, "that the model decides: return a Ratio"),
        (total, r'divided by no count of them \(test_default_weight.py:\d+\).*Pass reduction="sum"'),
    ],
)
def test_where_no_weight_is_right_an_error_shows_the_lines(loss, message):
    for weighed in ({}, {"weight": 1.0}):
        with pytest.raises(ValueError, match=f"(?s){message}.*exact=False"):
            traced(loss, **weighed)
    traced(loss, options={"exact": False})  # the remedy
    traced(loss, every=1)  # nothing is averaged


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda w, batch: total(w, batch) + jnp.sum(w**2), "a term that takes no rows, and counts in each micro-batch"),
        (lambda w, batch: jnp.log(total(w, batch)), "log of a sum over rows"),
        (total, None),
    ],
)
@OUTSIDE
def test_whether_a_sum_over_micro_batches_adds_up_is_read_too(loss, message, outside):
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2, reduction="sum")
    tx = optax.chain(*outside, tx) if outside else tx
    if message is None:
        np.testing.assert_allclose(trained(loss, (6, 6), tx=tx), W - jax.grad(loss)(W, BATCH), rtol=1e-5)
        return
    with pytest.warns(UserWarning, match=f"(?s)micro-batches of this loss add up.*\n  {message}.*test_default_weight"):
        traced(loss, tx=tx)
    traced(loss, tx=tx, weight=1.0)  # the remedy


def over_largest(w, batch):
    return jnp.sum(errors(w, batch) * batch["mask"] / jnp.max(batch["mask"]))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (normalised, "each row takes a mean over rows"),
        (over_model, "divided by a sum over rows that the model decides"),
        (over_largest, "the largest of all rows"),
    ],
)
@OUTSIDE
def test_a_sum_that_certainly_does_not_add_up_is_an_error_too(loss, message, outside):
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2, reduction="sum")
    tx = optax.chain(*outside, tx) if outside else tx
    for weighed in ({}, {"weight": 1.0}):
        with pytest.raises(ValueError, match=f"(?s)No weight makes.*\n  {message}.*test_default_weight.*exact=False"):
            traced(loss, tx=tx, **weighed)
    traced(loss, tx=tx, options={"exact": False})  # the remedy


def test_a_loss_of_one_size_counts_by_its_rows_and_says_so():
    loss = lambda w, batch: jnp.mean(errors(w, batch).reshape(4))
    with pytest.warns(
        UserWarning, match="(?s)for twice its 4 rows it is another program: cannot reshape.*not from a con"
    ):
        now = trained(loss, (4, 4, 4))
    np.testing.assert_allclose(now, W - jax.grad(lambda w: jnp.mean(errors(w, BATCH)))(W), rtol=1e-5)
    summed = {"tx": optax_accum.accumulate_gradients(optax.sgd(1.0), 3, reduction="sum")}
    of_all = lambda w, batch: jnp.mean(errors(w, batch).reshape(12))
    with pytest.warns(UserWarning, match="(?s)Nothing shows .* twice its 12 rows it is another program: cannot resh"):
        traced(of_all, **summed)
    traced(of_all, **summed, weight=1.0)  # the remedy


@pytest.mark.sweep
def test_one_example_without_an_axis_of_rows_is_told_of_that_axis():
    """Its features pass for rows, of which each call has as many: the mean is right."""
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2)
    step = jax.jit(optax_accum.value_and_apply_gradients(lambda w, x: (x @ w - 1) ** 2, tx))
    one, two = BATCH["x"][:2]
    with pytest.warns(UserWarning, match=r"(?s)twice its 3 rows.*one example without that axis needs it, x\[None\]"):
        _, now, state = step(W, tx.init(W), one)
    _, now, state = step(now, state, two)
    np.testing.assert_allclose(now, W - jax.grad(lambda w: jnp.mean((BATCH["x"][:2] @ w - 1) ** 2))(W), rtol=1e-5)


@pytest.mark.parametrize("compiled", [jax.jit, lambda step: step], ids=["in jit", "outside"])
def test_where_nothing_shows_what_counts_a_warning_shows_a_line_of_the_user(compiled):
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2)
    step = compiled(optax_accum.value_and_apply_gradients(lambda w, batch: masked(clipped(w), batch), tx))
    not_linear = "counts by its rows:\n  a derivative of yours that is not linear, test_default_weight.py:"
    with pytest.warns(UserWarning, match=not_linear) as warned:
        step(W, tx.init(W), BATCH)
    (line,) = {warning.lineno for warning in warned if warning.filename == __file__}
    assert "step(W, tx.init(W), BATCH)" in linecache.getline(__file__, line)


def guarded(denominator):
    return lambda w, batch: jnp.sum(batch["mask"] * errors(w, batch)) / denominator(jnp.sum(batch["mask"]))


@pytest.mark.parametrize(
    ("loss", "is_read"),
    [
        (guarded(lambda count: jnp.where(count > 0, count, 1.0)), True),
        (guarded(lambda count: jnp.where(count == 0, 1.0, count)), True),
        (guarded(lambda count: jnp.where(count < 1, 1.0, count)), True),
        (guarded(lambda count: jnp.where(count > 1, 1.0, count)), True),  # a minimum is a function of the count, too
        (lambda w, batch: jnp.where(batch["mask"].sum() > 0, masked(w, batch), 0.0), True),
        (lambda w, batch: jnp.where(batch["mask"].sum() > 1, masked(w, batch), 0.0), False),  # leaves out one token
    ],
)
def test_a_guard_keeps_from_zero_and_changes_nothing_else(loss, is_read):
    assert (optax_accum.explain(loss, W, BATCH).weight is not None) == is_read


@pytest.mark.sweep
def test_arguments_by_keyword():
    def loss(w, batch, *, scale):
        return scale * masked(w, batch)

    np.testing.assert_allclose(trained(loss, scale=2.0), W - 2 * jax.grad(masked)(W, BATCH), rtol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "traces"),
    [({}, 3), ({"weight_fn": lambda batch: batch["mask"].sum()}, 3), ({"exact": False}, 1)],
    ids=["read", "checked", "by itself"],
)
def test_a_loss_is_traced_once_and_twice_more_to_be_read(options, traces):
    """The trace is the program that is differentiated: a model that is slow to trace is not traced for each question."""
    traced = []

    def loss(w, batch):
        traced.append(1)
        return masked(w, batch)

    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 2)
    step = jax.jit(optax_accum.value_and_apply_gradients(loss, tx, **options))
    state = step(W, tx.init(W), BATCH)[2]
    assert len(traced) == traces
    step(W, state, BATCH)
    jax.jit(optax_accum.value_and_grad(loss, 4))(W, BATCH)
    assert len(traced) == traces + 2


def scaled_by_rule(w, batch):
    """The rule of a derivative closes over a value of the loss."""
    scale = batch["x"].mean()

    @jax.custom_jvp
    def same(w):
        return w

    same.defjvp(lambda primals, tangents: (primals[0], tangents[0] * scale))
    return jnp.mean(errors(same(w), batch))


def scaled_backward(w, batch):
    """The same in reverse."""
    scale = batch["x"].mean()

    @jax.custom_vjp
    def same(w):
        return w

    same.defvjp(lambda w: (w, None), lambda _, g: (g * scale,))
    return jnp.mean(errors(same(w), batch))


@pytest.mark.parametrize(("scaled_by_rule", "every"), [(scaled_by_rule, 2), (scaled_backward, 1)])
def test_a_rule_may_close_over_a_value_of_the_loss(scaled_by_rule, every):
    """Its program cannot be differentiated apart from the loss: the loss is called again."""
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every)
    step = jax.jit(optax_accum.value_and_apply_gradients(scaled_by_rule, tx, weight_fn=lambda batch: 1.0))
    params, state = W, tx.init(W)
    for _ in range(every):
        _, params, state = step(params, state, BATCH)
    np.testing.assert_allclose(params, W - 0.1 * jax.grad(scaled_by_rule)(W, BATCH), rtol=1e-5)
