"""What the gradients of a window tell: unbiased, in every cut, for one more read; and what is made of it."""

import contextlib
import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from optax_accum import batching, statistics
from optax_accum.accelerators import count_traffic
from tests import programs
from tests.tiers import sweep

SIZES = (1, 2, 5)
GROUPS = statistics.Options(decay=0.5, groups={"a": "first", "b": "second"})
START = {"a": jnp.arange(3.0), "b": jnp.ones([2, 2])}


def accumulate(every=3, inner=None, **options):
    return optax_accum.accumulate_gradients(inner or optax.sgd(0.1), every, **({"statistics": True} | options))


def trained(tx, batches, start=START, state=None):
    """The state after micro-batches `(gradient, weight)`."""
    state = tx.init(start) if state is None else state
    update = jax.jit(tx.update)
    for grads, weight in batches:
        _, state = update(grads, state, start, weight=float(weight))
    return state


def gradients(count, seed=0):
    """Gradients of START."""
    rng = np.random.default_rng(seed)
    return [jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), START) for _ in range(count)]


def expected(samples):
    """Noise and signal of samples `(gradient, weight)`, in float64."""
    flat = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(g)]).astype(float) for g, _ in samples]
    weights = np.array([weight for _, weight in samples], float)
    mean = sum(w * g for w, g in zip(weights, flat, strict=True)) / weights.sum()
    squares = sum(w * g @ g for w, g in zip(weights, flat, strict=True))
    noise = (squares - weights.sum() * mean @ mean) / (len(weights) - 1)
    return noise, mean @ mean - noise / weights.sum()


WINDOW = list(zip(gradients(3), SIZES, strict=True))
TWO = WINDOW + list(zip(gradients(3, seed=1), SIZES, strict=True))


@pytest.mark.sweep
def test_the_estimates_are_unbiased():
    """Over 10,000 windows of uneven sizes, within four standard errors of what the gradients were drawn from."""
    truth, spread = jnp.array([0.5, -1.0, 0.25, 2.0]), jnp.array([1.0, 2.0, 0.5, 3.0])
    tx = accumulate(statistics=statistics.Options(decay=0.0))

    @jax.jit
    @jax.vmap
    def window(key):
        state = tx.init(truth)
        for part, size in zip(jax.random.split(key, len(SIZES)), SIZES, strict=True):
            grads = truth + spread * jax.random.normal(part, (4,)) / jnp.sqrt(size)
            _, state = tx.update(grads, state, truth, weight=float(size))
        return statistics.gradient_noise_scale(state)[:2]

    found = np.array(window(jax.random.split(jax.random.key(0), 10_000)))
    error = found.std(axis=1) / np.sqrt(found.shape[1])
    wanted = np.array([jnp.sum(spread**2), jnp.sum(truth**2)])
    assert np.all(error < 0.05 * wanted)  # else anything would pass
    assert np.all(np.abs(found.mean(axis=1) - wanted) < 4 * error)


@pytest.mark.sweep
def test_noise_and_signal_are_smoothed_apart():
    state = trained(accumulate(statistics=GROUPS), TWO)
    parts = [expected(TWO[:3]), expected(TWO[3:])]
    mean = (np.array(parts[0]) + 2 * np.array(parts[1])) / 3  # 0.5 * 0.5, 0.5
    np.testing.assert_allclose(statistics.gradient_noise_scale(state)[:2], mean, rtol=1e-5)


def test_a_group_is_measured_for_itself():
    state = trained(accumulate(statistics=GROUPS), WINDOW)
    for name, leaf in (("first", "a"), ("second", "b")):
        own = [(grads[leaf], weight) for grads, weight in WINDOW]
        np.testing.assert_allclose(statistics.gradient_noise_scale(state, name)[:2], expected(own), rtol=1e-5)
        assert optax_accum.metrics(state)[f"gradient_noise/{name}"] == pytest.approx(expected(own)[0], rel=1e-5)
    whole = statistics.gradient_noise_scale(state)
    np.testing.assert_allclose(whole[:2], expected(WINDOW), rtol=1e-5)


@pytest.mark.sweep
def test_metrics_by_name():
    state = trained(accumulate(every=2), [(gradients(1)[0], 3), (gradients(1)[0], 5), (gradients(1, 7)[0], 2)])
    found = optax_accum.metrics(state)
    norm = lambda tree: pytest.approx(float(optax.tree.norm(tree)), rel=1e-5)
    assert found["gradient_norm"] == norm(gradients(1)[0])
    assert found["micro_gradient_norm"] == norm(gradients(1, 7)[0])
    assert found["seen"] == 8
    assert found["gradient_noise"] == pytest.approx(0, abs=1e-4)
    names = ("gradient_norm", "micro_gradient_norm", "gradient_noise", "gradient_signal", "noise_scale")
    assert list(found)[6:] == ["seen", *names]
    by_group = optax_accum.metrics(accumulate(statistics=GROUPS).init(START))
    assert {f"{name}/{group}" for name in names for group in ("first", "second")} < set(by_group)


NAN = (jax.tree.map(lambda g: g * np.nan, gradients(1)[0]), 3)
ZERO = (gradients(1, 5)[0], 0)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("nonfinite", "every", "batches"),
    [
        ("skip", 3, [WINDOW[0], NAN, *WINDOW[1:]]),
        ("omit", 4, [WINDOW[0], NAN, *WINDOW[1:]]),
        ("propagate", 4, [WINDOW[0], ZERO, *WINDOW[1:]]),
        ("propagate", 3, [*WINDOW, WINDOW[0], NAN, WINDOW[1]]),
        ("discard", 3, [*WINDOW, WINDOW[0], NAN, WINDOW[1]]),
        ("propagate", 3, [*WINDOW, ZERO, WINDOW[1], ZERO]),  # one sample
    ],
)
def test_what_is_left_out_is_no_sample(nonfinite, every, batches):
    state = trained(accumulate(every, nonfinite=nonfinite), batches)
    np.testing.assert_allclose(statistics.gradient_noise_scale(state)[:2], expected(WINDOW), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Noise is measured between")
def test_of_one_micro_batch_nothing_is_known():
    tx = accumulate(every=1)
    state = trained(tx, WINDOW)
    assert state.gradient_step == 3
    assert np.isnan(statistics.gradient_noise_scale(state)).all()
    assert optax_accum.metrics(state)["gradient_norm"] == pytest.approx(float(optax.tree.norm(WINDOW[2][0])))


def test_no_signal_is_an_infinite_scale():
    opposite = [(START, 1), (jax.tree.map(jnp.negative, START), 1)]
    assert statistics.gradient_noise_scale(trained(accumulate(every=2), opposite)).scale == np.inf


@pytest.mark.sweep
@pytest.mark.usefixtures("strict_dtypes")
@pytest.mark.parametrize("every", [2, batching.every_by_noise(2, 4), batching.every_by_tokens({0: 2, 8: 3})])
def test_nothing_is_promoted(every):
    state = trained(accumulate(every=every), [(START, jnp.float32(2)), (jax.tree.map(jnp.sin, START), jnp.int32(3))])
    assert state.gradient_step == 1
    assert all(
        leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(optax_accum.statistics.gradient_noise_scale(state))
    )
    optax_accum.metrics(state)


@pytest.mark.sweep
def test_leaves_without_a_gradient_have_none():
    params = {"a": jnp.ones(2), "n": jnp.arange(2), "none": None, "z": jnp.ones(2, jnp.complex64)}
    groups = statistics.Options(groups={"a": "x", "n": "y", "none": "y", "z": "z"})
    tx = accumulate(every=2, inner=optax.identity(), statistics=groups)
    state = tx.init(params)
    for value in (1.0, 3.0):
        z = jnp.full(2, value * (1 + 1j), jnp.complex64)
        grads = {"a": jnp.full(2, value), "n": np.zeros(2, jax.dtypes.float0), "none": None, "z": z}
        _, state = tx.update(grads, state, params)
    assert set(state.statistics.noise) == {"x", "z"}
    assert statistics.gradient_noise_scale(state, "x").noise == 2 * 2
    assert statistics.gradient_noise_scale(state, "z").noise == 2 * 4


@pytest.mark.sweep
def test_the_update_stays_what_it_is_and_nothing_is_paid_unasked():
    plain, measured = accumulate(statistics=False), accumulate()
    a, b = trained(plain, TWO), trained(measured, TWO)
    chex.assert_trees_all_equal(a, b._replace(samples=(), statistics=(), seen=()))
    text = {tx: str(jax.make_jaxpr(tx.update)(START, tx.init(START), START)) for tx in (plain, measured)}
    assert "reduce_sum" in text[measured]
    assert "reduce_sum" not in text[plain]


@pytest.mark.sweep
@pytest.mark.parametrize("name", programs.installed("cpu", "h100", "v5e:2x4"))
def test_a_micro_step_reads_its_gradient_once_more_and_writes_nothing(name):
    device = programs.target(name)
    device = type(device)(device.name, device.devices[:1], device.memory)
    width = 128 if name == "cpu" else 4096 if ":" in name else 1024
    params = {f"layer {i}": jax.ShapeDtypeStruct((width, width), jnp.float32) for i in range(4)}
    copy, found = 4 * 4 * width**2, {}
    for asked in (False, True):
        tx = accumulate(8, inner=optax.adam(0.1), statistics=asked)
        step = lambda params, state, grads, tx=tx: optax_accum.apply_gradients(tx, grads, state, params)
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
            *map(device.shapes, (params, jax.eval_shape(tx.init, params), params))
        )
        with programs.as_shipped():
            found[asked] = count_traffic(programs.compiled(lowered) if name == "cpu" else device.compile(lowered))
    more = found[True].least - found[False].least
    written = int(name == "cpu" and jax.__version_info__ < (0, 10, 2))  # that CPU compiler writes the squares
    assert more <= (1.01 + 3 * written if name == "cpu" else 0.01) * copy  # others read it where it is added
    assert found[True].most - found[False].most <= more + (1 + 3 * written) * 1.01 * copy
    assert found[True].temporary - found[False].temporary <= (written + 0.03) * copy
    if name == "cpu":
        assert more > 0.99 * copy  # it reads it at all


# Several devices: each device's own gradient is a sample.

MESH = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
ROWS = jnp.asarray(np.random.default_rng(3).normal(size=(3, 8, 3)), jnp.float32)  # micro-batches of 8 rows


def loss(w, rows):
    return jnp.mean((rows @ w - 1.0) ** 2)


@functools.cache
def one_device():
    """The state of one device, which has the rows of each of the two as a micro-batch."""
    tx = accumulate(every=6)
    w = jnp.ones(3)
    return trained(tx, [(jax.grad(loss)(w, half), 4) for rows in ROWS for half in (rows[:4], rows[4:])], start=w)


def close(found, wanted):
    np.testing.assert_allclose(np.array(found), np.array(wanted), rtol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("to", sweep([None, P("data")], but=[P("data")]))
def test_over_a_mesh(to):
    """Also what a state needs to be placed, and to move to another number of devices in the middle of a window."""
    width = 4 if to else 3  # the devices divide it
    rows = jnp.pad(ROWS, ((0, 0), (0, 0), (0, width - 3)))
    w = jax.device_put(jnp.ones(width), NamedSharding(MESH, P()))
    tx = accumulate(every=3, devices=optax_accum.Devices("data", to=to))
    where = optax_accum.sharding.state_sharding(tx, w)
    state = jax.jit(tx.init, out_shardings=where)(w)
    assert where.samples.number.spec[0] == "data"
    step = optax_accum.value_and_apply_gradients(lambda w, rows: loss(w, rows[:, :width]), tx)
    step = jax.jit(step, out_shardings=(None, NamedSharding(MESH, P()), where))
    for micro_batch in rows[:2]:
        _, w, state = step(w, state, jax.device_put(micro_batch, NamedSharding(MESH, P("data"))))
    moved = optax_accum.checkpoint.redistribute(jax.device_get(state), None)
    assert moved.samples.number == 4
    _, w, state = step(w, state, jax.device_put(rows[2], NamedSharding(MESH, P("data"))))
    close(statistics.gradient_noise_scale(state), statistics.gradient_noise_scale(one_device()))
    assert optax_accum.metrics(state)["seen"] == 24


@pytest.mark.sweep
def test_inside_shard_map():
    tx = accumulate(every=3, devices="data")
    rows = jax.device_put(ROWS, NamedSharding(MESH, P(None, "data")))

    @jax.jit
    @jax.shard_map(mesh=MESH, in_specs=(P(), P(None, "data")), out_specs=P())
    def run(w, rows):
        state = tx.init(w)
        for micro_batch in rows:
            grads = jax.grad(loss)(optax_accum.sharding.defer_reduction(w, "data"), micro_batch)
            _, state = tx.update(grads, state, w, weight=8)
        return state.statistics, state.seen

    told, seen = run(jnp.ones(3), rows)
    close(statistics.gradient_noise_scale(told), statistics.gradient_noise_scale(one_device()))
    assert seen.rest == 24


@pytest.mark.sweep
def test_metrics_inside_shard_map_are_those_of_all_devices():
    tx = accumulate(every=3, devices="data")

    @jax.jit
    @jax.shard_map(mesh=MESH, in_specs=(P(), P("data")), out_specs=(P("data"), P()))
    def run(w, rows):
        grads = jax.grad(loss)(optax_accum.sharding.defer_reduction(w, "data"), rows)
        state = tx.update(grads, tx.init(w), w, weight=8)[1]
        return state.samples.latest["all"], optax_accum.metrics(state)

    latest, inside = run(jnp.ones(3), ROWS[0])
    assert inside["weight"] == 8
    assert len(set(latest.tolist())) > 1
    np.testing.assert_allclose(inside["micro_gradient_norm"], np.sqrt(np.mean(latest)), rtol=1e-6)


def ratio(w, rows):
    return optax_accum.Ratio(total=len(rows) * loss(w, rows), count=jnp.float32(len(rows)))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("fun", "options"),
    [(loss, {}), (ratio, {}), (loss, {"devices": "data"})],
    ids=["rows", "ratio", "devices"],
)
def test_within_a_call(fun, options):
    """The same as across calls: each micro-batch of each device is a sample; what fills up the last counts nothing."""
    w, batch = jnp.ones(3), ROWS.reshape(24, 3)[:20]
    with_aux = lambda w, rows: (fun(w, rows), jnp.sum(rows))
    asked = {"num_microbatches": 3, "has_aux": True, "statistics": True}
    measure = jax.jit(optax_accum.value_and_grad(with_aux, **asked, **options))
    parts = [batch]
    given = batch
    if "devices" in options:
        parts, given = jnp.split(batch, 2), jax.device_put(batch, NamedSharding(MESH, P("data")))
    with jax.set_mesh(MESH) if "devices" in options else contextlib.nullcontext():
        ((value, aux), told), grads = measure(w, given)
    close(value, loss(w, batch))
    close(aux, jnp.sum(batch))
    close(grads, jax.grad(loss)(w, batch))
    samples = [(jax.grad(loss)(w, rows[i::3]), len(rows[i::3])) for rows in parts for i in range(3)]
    close(statistics.gradient_noise_scale(told)[:2], expected(samples))
    np.testing.assert_allclose(told.step_weight * len(samples), 20, rtol=1e-6)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:Noise is measured between")
def test_within_a_call_by_group_and_smoothed():
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    fun = lambda p, rows: loss(p["a"], rows) + loss(p["b"], rows) + 0.1 * jnp.sum(p["b"])
    groups = statistics.Options(groups={"a": "x", "b": "y"})
    cut = lambda k: optax_accum.value_and_grad(fun, k, statistics=groups)
    measure = jax.jit(cut(2))
    (_, first), grads = measure(params, ROWS[0])
    (_, second), _ = measure(params, ROWS[1])
    assert set(first.noise) == {"x", "y"}
    close(statistics.gradient_noise_scale(first, "x").noise, first.noise["y"])
    assert first.squares["y"] == pytest.approx(float(jnp.sum(grads["b"] ** 2)), rel=1e-5)
    told = statistics.smooth(first, second, 0.75)
    wanted = 0.75 * first.noise["x"] + 0.25 * second.noise["x"]
    close(statistics.gradient_noise_scale(told, "x").noise, wanted)
    (_, one), _ = cut(1)(params, ROWS[0])
    assert jnp.isnan(statistics.gradient_noise_scale(one).scale)
    assert statistics.smooth(told, one, 0.75).noise == told.noise


# Windows that grow.


def lengths(tx, batches, state=None):
    """The micro-steps in each window that closed, and the state; all from one program."""
    step = jax.jit(tx.update)
    state, found, count = tx.init(jnp.ones(3)) if state is None else state, [], 0
    for grads, weight in batches:
        _, state = step(grads, state, jnp.ones(3), weight=jnp.float32(weight))
        count += 1
        if optax_accum.has_updated(state):
            found.append(count)
            count = 0
    assert step._cache_size() == 1
    return found, state


def resumed(tx, batches, cut):
    """The same of a run that was saved in the middle of a window."""
    first, saved = lengths(tx, batches[:cut])
    rest, _ = lengths(tx, batches[cut:], pickle.loads(pickle.dumps(saved)))
    left = cut - sum(first)
    assert left > 0
    return [*first, rest[0] + left, *rest[1:]]


def test_windows_grow_with_the_tokens_seen():
    every = batching.every_by_tokens({0: 1, 300: 2, 500.5: 4})
    tx = accumulate(every, statistics=False)
    batches = [(jnp.ones(3), 100)] * 15
    found, state = lengths(tx, batches)
    assert found == [1, 1, 1, 2, 2, 4, 4]
    assert optax_accum.metrics(state)["seen"] == 1500
    assert resumed(tx, batches, 8) == found


def test_tokens_are_counted_where_float32_would_stall():
    weight, windows = 12_345_677, 25_000
    total = weight * windows
    for threshold, length in ((total, 2), (total + 1, 1)):  # what the schedule says next tells what it has seen
        tx = accumulate(batching.every_by_tokens({0: 1, threshold: 2}), statistics=False)
        step = lambda state, weight, tx=tx: tx.update(jnp.ones(3), state, weight=weight)[1]
        run = lambda state, step=step: jax.lax.fori_loop(0, windows, lambda _, state: step(state, float(weight)), state)
        state = jax.jit(run)(tx.init(jnp.ones(3)))
        for weight_of_next in (np.nan, 1.0):
            assert bool(optax_accum.has_updated(step(state, weight_of_next))) == (length == 1)


def noisy(count, spread, seed=0):
    rng = np.random.default_rng(seed)
    return [(jnp.asarray(1 + spread * rng.normal(size=3), jnp.float32), 8) for _ in range(count)]


def test_windows_follow_the_noise():
    tx = accumulate(batching.every_by_noise(2, 16), statistics=statistics.Options(decay=0.5))
    calm, _ = lengths(tx, noisy(8, 0.1))
    assert calm == [2, 2, 2, 2]
    batches = noisy(40, 3.0)
    found, _ = lengths(tx, batches)
    assert found[0] == 2
    assert max(found) > 4
    assert max(found) <= 16
    assert resumed(tx, batches, 7) == found


# Outliers: docs/nan_policy.md runs as a test, too.


def rising(grads, gradient_step, params, info=(0.0, 0)):
    """Leaves out what is no larger than the largest so far."""
    most, left_out = info
    skip = grads[0] <= most
    return skip, (jnp.maximum(grads[0], most), left_out + skip)


def test_a_callable_policy_is_given_what_it_returned_last():
    tx = accumulate(every=2, statistics=False, nonfinite=rising)
    state = tx.init(jnp.ones(1))
    start, update = jax.tree.map(jax.typeof, state), jax.jit(tx.update)
    for value in (1.0, 1.0, 3.0, 2.0, 4.0):
        updates, state = update(jnp.array([value]), state, jnp.ones(1))
    assert state.skip_state == (4, 2)
    assert (state.skipped, state.gradient_step, state.mini_step) == (2, 1, 1)
    assert jax.tree.map(jax.typeof, state) == start
    assert updates == 0


# What cannot be right.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: statistics.Options(decay=1.0), "decay must be in"),
        (lambda: statistics.smooth(None, None, -0.1), "decay must be in"),
        (lambda: accumulate(statistics="all"), "statistics must be a bool"),
        (lambda: accumulate(reduction="sum"), 'reduction="sum" and statistics'),
        (lambda: accumulate(batching.every_by_noise(2, 4), statistics=False), "Pass statistics=True"),
        (lambda: batching.every_by_noise(8, 4), "Bounds must not cross"),
        (lambda: batching.every_by_noise(1, 4), "begin at 2"),
        (lambda: batching.every_by_noise(2.5, 4), "at_least must be an integer"),
        (lambda: batching.every_by_tokens({}), "from 0 tokens on"),
        (lambda: batching.every_by_tokens({10: 2}), "from 0 tokens on"),
        (lambda: batching.every_by_tokens({0: 0}), "every must be an integer >= 1"),
        (lambda: batching.every_by_tokens({0: None}), "every must be an integer >= 1: every=None"),
        (lambda: accumulate(nonfinite=lambda grads, step, params, info: (False, info)), "info has no default"),
        (lambda: accumulate(statistics=statistics.Options(groups={"a": "x"})).init(START), "groups must be a prefix"),
        (lambda: accumulate(statistics=statistics.Options(groups=3)).init(START), "strings as leaves"),
        (lambda: statistics.gradient_noise_scale(accumulate(statistics=False).init(START)), "Pass statistics=True"),
        (lambda: statistics.gradient_noise_scale(accumulate().init(START), "first"), "group must be one of all"),
        (
            lambda: optax_accum.value_and_grad(
                loss, num_microbatches=2, statistics=True, devices=optax_accum.Devices("x", to="partial")
            ),
            "Statistics take the sum",
        ),
    ],
)
def test_an_error_says_what_to_do(wrong, message):
    with pytest.raises((ValueError, TypeError), match=message):
        wrong()


@pytest.mark.sweep
def test_in_place_measures_what_is_measured_after():
    """Also of a bfloat16 parameter, and one that is used twice. A policy sees the gradient before it is added."""
    fun = lambda w, rows: jnp.mean((rows @ w["a"].astype(jnp.float32) + jnp.tanh(rows) @ w["a"] + w["b"]) ** 2)
    w, states = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones([])}, []
    for nonfinite in ("propagate", "skip"):
        tx = accumulate(every=2, nonfinite=nonfinite)
        step = jax.jit(optax_accum.value_and_apply_gradients(fun, tx))
        params, state = w, tx.init(w)
        for rows in ROWS[:3]:
            _, params, state = step(params, state, rows)
        states.append((state.statistics, state.samples, params))
    chex.assert_trees_all_close(*states, rtol=1e-6)
    assert states[0][0].known > 0


@pytest.mark.parametrize("options", [{}, {"every": batching.every_by_tokens({0: 2}), "statistics": False}])
def test_a_state_that_was_made_without_is_named(options):
    tx = accumulate(**options)
    old = accumulate(every=3, statistics=False).init(START)
    with pytest.raises(ValueError, match=r"new = tx.init\(params\)"):
        tx.update(START, old, START)
    new = tx.init(START)
    state = old._replace(samples=new.samples, statistics=new.statistics, seen=new.seen)  # the remedy
    assert tx.update(START, state, START)[1].mini_step == 1
    # and the other way round, what was measured is kept
    assert accumulate(every=3, statistics=False).update(START, new, START)[1].statistics == new.statistics


def test_a_state_of_other_groups():
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    build = lambda groups: accumulate(statistics=statistics.Options(groups=groups))
    tx, state = build({"a": "x", "b": "y"}), build(None).init(params)
    with pytest.raises(ValueError, match=r"groups=\['x', 'y'\], and the state has \['all'\].*state._replace"):
        tx.update(params, state, params)
    new = tx.init(params)
    _, state = tx.update(params, state._replace(samples=new.samples, statistics=new.statistics), params)  # the remedy
    assert state.samples.number == 1


@pytest.mark.sweep
@pytest.mark.parametrize("devices", [False, *sweep([True])], ids=["one device", "several"])
def test_layers_that_are_stacked_are_measured_as_those_that_are_not(devices):
    """By both mechanisms, and for the state of each, whose names they are."""
    first, second = (jax.random.normal(jax.random.key(i), (3, 3)) for i in range(2))
    of = lambda layers, rows: jnp.mean((jnp.tanh(rows @ layers[0]) @ layers[1]) ** 2)
    stacked = statistics.Options(groups=statistics.Layers("layer"))
    apart = statistics.Options(groups=["layer/0", "layer/1"])
    over = {"devices": "data"} if devices else {}
    rows = jnp.tile(ROWS[0], (8, 1)) + jnp.arange(8 * len(ROWS[0]))[:, None]
    found = []
    with jax.set_mesh(jax.make_mesh((4,), ("data",))) if devices else contextlib.nullcontext():
        for params, options in ((jnp.stack([first, second]), stacked), ([first, second], apart)):
            tx = accumulate(every=2, statistics=options, **over)
            step = jax.jit(optax_accum.value_and_apply_gradients(of, tx))
            w, state = params, tx.init(params)
            for _ in range(3):
                _, w, state = step(w, state, rows)
            call = jax.jit(optax_accum.value_and_grad(of, num_microbatches=2, statistics=options, **over))
            found.append((state.statistics, state.samples, call(params, rows)[0][1], optax_accum.metrics(state)))
    chex.assert_trees_all_close(*found, rtol=1e-4)
    assert {"noise_scale/layer/0", "noise_scale/layer/1"} <= found[0][-1].keys()


def test_groups_that_cannot_be():
    """Layers of one number; two groups of one name; statistics of other groups; a value beside its statistics."""
    params = {"w": jnp.ones((2, 3)), "scale": jnp.ones([])}
    made = lambda groups: optax_accum.accumulate_gradients(
        optax.sgd(0.1), 2, statistics=statistics.Options(groups=groups)
    ).init(params)
    with pytest.raises(ValueError, match=r"stacked along the first axis.*\['scale'\], one number. Name a string"):
        made(statistics.Layers("layer"))
    with pytest.raises(ValueError, match="must not have one name: 'w/0' is 'w/0' and Layers.*Rename one"):
        made({"w": statistics.Layers("w"), "scale": "w/0"})
    one, two = (made(groups).statistics for groups in ("a", {"w": "a", "scale": "b"}))
    with pytest.raises(ValueError, match="of the same groups: old has a, new has (a, b|b, a). Begin anew"):
        statistics.smooth(one, two, 0.9)
    params = {str(n): jnp.ones(1) for n in range(200)}  # of which an error shows the beginning
    with pytest.raises(ValueError, match=r"prefix of the tree.*\.\.\.\. Name one group.*in an nnx.State") as caught:
        made({"0": "a"})
    assert len(str(caught.value)) < 800
    with pytest.raises(TypeError, match=r"this is \(value, statistics\).*Pass the second"):
        statistics.gradient_noise_scale((1.0, one))
