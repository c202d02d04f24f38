"""Micro-batches by tokens: the budget, the balance, the order, the fewest; and any packing gives the whole batch's update."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from optax_accum.batching import token_microbatches

COSTS = {"tokens": lambda lengths: lengths, "squares": lambda lengths: lengths.astype(float) ** 2}


@st.composite
def asked(draw):
    """Lengths, a budget that holds them, and options."""
    group = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=40).map(lambda some: some * group))
    longest, budget = max(lengths), group * draw(st.integers(max(lengths), 400))
    lists = st.lists(st.integers(1, longest), max_size=4).map(lambda some: [*some, longest])
    buckets = draw(st.none() | st.integers(1, 5) | lists)
    cost = draw(st.sampled_from(["tokens", "squares", lambda lengths: 1 / lengths]))
    options = {"num_devices": draw(st.integers(1, 4)), "group_size": group, "buckets": buckets, "cost": cost}
    return np.array(lengths), budget, options


@given(asked(), st.integers(0, 3))
def test_nothing_is_lost_no_budget_is_exceeded_and_devices_are_balanced(asked, spare):
    lengths, budget, options = asked
    group, devices = options["group_size"], options["num_devices"]
    needed = token_microbatches(lengths, budget, **options)
    packing = token_microbatches(lengths, budget, num_microbatches=needed.num_microbatches + spare, **options)
    rows, count = packing.rows, packing.num_microbatches
    assert np.issubdtype(rows.dtype, np.integer)
    assert rows.shape[:2] == (count, devices) == (needed.num_microbatches + spare, packing.num_devices)
    np.testing.assert_array_equal(np.sort(packing.order), np.arange(len(lengths)))  # nothing lost, nothing twice
    np.testing.assert_array_equal(packing.order, rows[rows >= 0])
    loads = COSTS.get(options["cost"], options["cost"])(lengths)
    total = np.zeros(devices)
    for own, length, most in zip(rows, packing.padded_lengths, packing.device_rows, strict=True):
        assert length in packing.buckets
        assert most * length <= budget  # padding included
        counts = (own >= 0).sum(1)
        assert counts.max() <= most
        assert counts.max() - counts.min() <= group
        for share in own:
            mine = share[share >= 0]
            assert all(share[: len(mine)] >= 0)  # -1 comes last
            assert max(lengths[mine], default=0) <= length
            heads = mine[::group]
            np.testing.assert_array_equal(heads % group, 0)
            np.testing.assert_array_equal(mine, (heads[:, None] + np.arange(group)).reshape(-1))  # groups are whole
        total += [loads[share[share >= 0]].sum() for share in own]
    assert total.max() - total.min() <= loads.reshape(-1, group).sum(1).max() * (1 + 1e-9)
    np.testing.assert_array_equal(packing.tokens.sum(), lengths.sum())
    assert (packing.tokens[needed.num_microbatches :] == 0).all()  # spare ones weigh nothing,
    shapes = [set(zip(p.device_rows, p.padded_lengths, strict=True)) for p in (packing, needed)]
    assert shapes[0] == shapes[1]  # compile nothing anew,
    assert (packing.filled, packing.padding) == (needed.filled, needed.padding)  # and do not count
    assert packing.filled == pytest.approx(lengths.sum() / (budget * devices * needed.num_microbatches))


@given(asked())
def test_what_is_taken_comes_back_in_order(asked):
    lengths, budget, options = asked
    packing = token_microbatches(lengths, budget, **options)
    ragged = [100 * row + np.arange(length) for row, length in enumerate(lengths)]
    padded = np.full((len(lengths), lengths.max(), 2), -5)
    for row, tokens in zip(padded, ragged, strict=True):
        row[: len(tokens)] = tokens[:, None]
    for index in range(packing.num_microbatches):
        tokens, mask = packing.take(index, ragged, fill=-7), packing.mask(index)
        shape = options["num_devices"] * packing.device_rows[index], packing.padded_lengths[index]
        assert tokens.shape == mask.shape == shape
        np.testing.assert_array_equal(mask, tokens != -7)
        np.testing.assert_array_equal(packing.take(index, padded, fill=-7)[..., 1], tokens)
        own = mask.reshape(options["num_devices"], -1).sum(1)
        np.testing.assert_array_equal(own, packing.tokens[index])  # rows lie device after device
    every = range(packing.num_microbatches)
    for back, row in zip(packing.restore([packing.take(i, ragged) for i in every], ragged=True), ragged, strict=True):
        np.testing.assert_array_equal(back, row)
    labels = np.arange(len(lengths)) / 2
    np.testing.assert_array_equal(packing.restore([packing.take(i, labels) for i in every]), labels)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(12, 30), st.integers(1, 2))
def test_with_a_bucket_for_each_length_none_has_fewer_micro_batches(lengths, budget, devices):
    """Against all partitions of the rows."""

    def fewest(rows):
        """Of rows, sorted: the first goes together with any of the others."""
        if not rows:
            return 0
        first, others = rows[0], rows[1:]
        most = min(devices * (budget // first) - 1, len(others))
        choices = (set(chosen) for chosen in itertools.combinations(range(len(others)), most))
        return 1 + min(fewest([r for i, r in enumerate(others) if i not in chosen]) for chosen in choices)

    packing = token_microbatches(lengths, budget, num_devices=devices, buckets=len(lengths))
    assert packing.num_microbatches == fewest(sorted(lengths, reverse=True))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(60, 200), st.integers(1, 3))
def test_no_other_buckets_share_the_budget_better(lengths, budget, count):
    lengths = np.array(lengths)

    def share(buckets):  # a row whose bucket lets c of them into a micro-batch takes 1 / c of it
        padded = np.array(buckets)[np.searchsorted(buckets, lengths)]
        return (1 / np.minimum(budget // padded, 1 << (len(lengths) - 1).bit_length())).sum()

    found = token_microbatches(lengths, budget, buckets=count).buckets
    assert len(found) <= count
    some = [sorted({*chosen, lengths.max()}) for chosen in itertools.combinations(np.unique(lengths), count - 1)]
    assert share(found) <= min(map(share, some), default=np.inf) + 1e-9


def log_normal(rows, seed=0):
    return np.clip(np.random.default_rng(seed).lognormal(5, 1, rows).astype(int), 1, 2048)


@pytest.mark.parametrize("devices", [1, 8])
def test_log_normal_lengths_fill_the_budget(devices):
    """The figures of benchmarks/packing.py, on fewer rows."""
    lengths = log_normal(20_000)
    packing = token_microbatches(lengths, 8192, num_devices=devices)
    fewest = token_microbatches(lengths, 8192, num_devices=devices, buckets=len(lengths)).num_microbatches
    assert packing.filled >= 0.9
    assert packing.num_microbatches <= 1.05 * fewest
    assert len(set(packing.padded_lengths)) <= 50
    assert np.ptp(packing.tokens.sum(0)) <= 2


@given(st.integers(0, 200), st.sampled_from([5, 50, 500, 5000]), st.sampled_from([2048, 16384]), st.integers(1, 8))
def test_default_buckets_need_the_fewest_of_any_packing_or_2_percent_more(seed, rows, budget, devices):
    lengths = log_normal(rows, seed)
    of = lambda buckets, count=None: token_microbatches(
        lengths, budget, num_devices=devices, buckets=buckets, num_microbatches=count
    )
    fewest, coarse, found = of(np.unique(lengths)).num_microbatches, of(coarse_buckets(budget)), of(None)
    assert fewest <= found.num_microbatches <= 1.02 * fewest
    assert set(coarse.buckets) <= set(found.buckets)
    if coarse.num_microbatches <= 1.02 * fewest:
        assert found.buckets == coarse.buckets  # more only where they are needed
    exactly, allowed = of(None, fewest), of(None, coarse.num_microbatches)
    assert (exactly.tokens[-1] > 0).any()  # none is spare
    assert allowed.buckets == coarse.buckets


def coarse_buckets(budget):
    """The lengths that fit once, twice, ..., and then 10 % more often from one to the next."""
    numbers = [1]
    while numbers[-1] < budget:
        numbers.append(max(numbers[-1] + 1, int(1.1 * numbers[-1])))
    return [budget // number for number in numbers if number <= budget]


def test_a_micro_batch_too_many_is_not_taken_for_coarse_buckets():
    """Of these, 21 fit; the buckets take 20 or 22."""
    lengths = [2048 // 21] * (34 * 21)
    assert token_microbatches(lengths, 2048, buckets=coarse_buckets(2048)).num_microbatches == 36
    assert token_microbatches(lengths, 2048).num_microbatches == 34
    for asked, used in ((40, 36), (35, 34)):  # unless they were allowed: shapes that are always the same are worth more
        packing = token_microbatches(lengths, 2048, num_microbatches=asked)
        assert (packing.num_microbatches, (packing.tokens.sum(-1) > 0).sum()) == (asked, used)


def test_what_is_balanced_is_the_cost():
    lengths = log_normal(1000)

    def spread(cost):  # of the squares, between devices
        rows = token_microbatches(lengths, 8192, num_devices=8, cost=cost).rows
        return np.ptp(np.where(rows < 0, 0, lengths[rows].astype(float) ** 2).sum((0, 2)))

    assert spread("squares") == spread(lambda n: n.astype(float) ** 2) < spread("tokens") / 2


def test_by_default_buckets_are_what_fits_the_budget_so_many_times():
    assert token_microbatches([1], 100).buckets[-5:] == (20, 25, 33, 50, 100)


def test_the_next_batch_has_the_same_shapes():
    for buckets in (None, token_microbatches(log_normal(20_000), 8192, buckets=6).buckets):
        shapes = {}
        for seed in range(8):
            packing = token_microbatches(log_normal(300 + 10 * seed, seed), 8192, buckets=buckets)
            assert buckets is None or packing.buckets == buckets
            for rows, length in zip(packing.device_rows, packing.padded_lengths, strict=True):
                assert shapes.setdefault(length, rows) == rows == min(8192 // length, 512)
        assert len(shapes) <= (6 if buckets else 50)


# The law.

LENGTHS = (6, 1, 3, 3, 8, 2, 1, 4, 2, 1, 7)
ADAM = optax.adamw(0.1)


def problem():
    """Parameters, and rows of tokens as long as `LENGTHS`."""
    rng = np.random.default_rng(0)
    params = {"table": rng.normal(size=(9, 4)).astype("f"), "w": rng.normal(size=(4, 9)).astype("f")}
    return jax.tree.map(jnp.asarray, params), [rng.integers(0, 9, length) for length in LENGTHS]


def loss(params, batch):
    """Each token from the mean of those before it: a mean over tokens, in which rows do not meet."""
    h = params["table"][batch["tokens"]] * batch["mask"][..., None]
    seen = jnp.cumsum(h, 1) / (1 + jnp.arange(h.shape[1], dtype=h.dtype))[None, :, None]
    logits = jnp.tanh(seen) @ params["w"]
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
    return jnp.sum(batch["mask"] * each) / jnp.maximum(batch["mask"].sum(), 1)


def count(batch):
    return batch["mask"].sum()


@functools.cache
def whole():
    start, rows = problem()
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    tokens = np.zeros(mask.shape, int)
    tokens[mask] = np.concatenate(rows)

    @jax.jit
    def update(params, batch):
        updates, _ = ADAM.update(jax.grad(loss)(params, batch), ADAM.init(params), params)
        return optax.apply_updates(params, updates)

    return update(start, {"tokens": tokens, "mask": mask})


def micro_batch(packing, index, rows):
    return {"tokens": packing.take(index, rows), "mask": packing.mask(index)}


def check(now, start):
    chex.assert_trees_all_close(jax.tree.map(np.asarray, now), whole(), rtol=2e-5, atol=2e-6)
    assert not np.allclose(whole()["w"], start["w"])  # it compares something


@pytest.mark.sweep
def test_any_packing_makes_the_update_of_the_whole_batch():
    start, rows = problem()
    tx, traced = optax_accum.accumulate_gradients(ADAM, 12), []
    micro_step = optax_accum.value_and_apply_gradients(loss, tx, weight_fn=count)

    @jax.jit
    def step(params, state, batch):
        traced.append(batch["tokens"].shape)
        return micro_step(params, state, batch)

    for buckets in (2, 1):
        packing = token_microbatches(LENGTHS, 8, num_microbatches=12, buckets=buckets)
        state, now = tx.init(start), start
        for index in range(12):
            _, now, state = step(now, state, micro_batch(packing, index, rows))
        assert state.gradient_step == 1
        assert packing.tokens[-1].sum() == 0
        check(now, start)
    assert len(traced) == len(set(traced)) == 2  # spare ones and another packing bring no third program


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["in place", "added after"])
def test_a_spare_micro_batch_is_not_run(dtype):
    """Its loss would be 0 / 0, and its gradient a nan; it is 0, and so is what comes beside it."""
    start, rows = problem()
    packing = token_microbatches(LENGTHS, 16, num_microbatches=8, buckets=1)
    tx, ran = optax_accum.accumulate_gradients(ADAM, 8), []

    def unguarded(params, batch):
        jax.debug.callback(lambda: ran.append(True))
        low = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), low)
        return loss(wide, batch) * count(batch) / count(batch), {"ones": jnp.ones(2), "key": jax.random.key(7)}

    step = jax.jit(optax_accum.value_and_apply_gradients(unguarded, tx, weight_fn=count, has_aux=True))
    now = jax.tree.map(lambda leaf: leaf.astype(dtype), start)
    state, losses, beside = tx.init(now), [], []
    for index in range(8):
        (value, aux), now, state = step(now, state, micro_batch(packing, index, rows))
        losses.append(value)
        beside.append(aux["ones"])
    jax.effects_barrier()
    spare = packing.tokens[:, 0] == 0
    assert (len(ran), spare.sum()) == (6, 2)
    np.testing.assert_array_equal(np.asarray(losses) == 0, spare)
    np.testing.assert_array_equal(np.asarray(beside), np.where(spare, 0.0, 1.0)[:, None] * np.ones(2))
    if dtype == jnp.float32:
        check(now, start)
    assert jax.tree.all(jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), (now, state)))


@pytest.mark.sweep
def test_gradients_are_weighted_by_their_tokens():
    """`apply_gradients`, the window closed by `flush`, micro-batches in any order."""
    start, rows = problem()
    packing = token_microbatches(LENGTHS, 16, buckets=[4, 8])
    tx = optax_accum.accumulate_gradients(ADAM, None)
    state, now = tx.init(start), start

    @jax.jit
    def step(params, state, batch, weight, flush):
        return optax_accum.apply_gradients(tx, jax.grad(loss)(params, batch), state, params, weight=weight, flush=flush)

    for index in reversed(range(packing.num_microbatches)):
        batch, weight = micro_batch(packing, index, rows), packing.tokens[index].sum()
        now, state = step(now, state, batch, weight, jnp.array(index == 0))
    check(now, start)


@pytest.mark.sweep
def test_over_devices():
    """Four of them, also without a row (and so a weight) of their own, and spare micro-batches."""
    start, rows = problem()
    packing = token_microbatches(LENGTHS, 8, num_devices=4, buckets=[4, 8], num_microbatches=4)
    assert (packing.tokens[:3] == 0).any()
    assert (packing.tokens[3] == 0).all()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        tx = optax_accum.accumulate_gradients(ADAM, 4, devices="data")
        step = jax.jit(optax_accum.value_and_apply_gradients(loss, tx, weight_fn=count))
        now = jax.device_put(start, NamedSharding(mesh, P()))
        state = jax.jit(tx.init, out_shardings=optax_accum.sharding.state_sharding(tx, now))(now)
        for index in range(4):
            batch = jax.device_put(micro_batch(packing, index, rows), NamedSharding(mesh, P("data")))
            _, now, state = step(now, state, batch)
        assert state.gradient_step == 1
    check(now, start)


# What a packing does besides.


def test_a_process_takes_the_rows_of_its_devices():
    ragged = [np.full(length, row) for row, length in enumerate(LENGTHS)]
    packing = token_microbatches(LENGTHS, 8, num_devices=4)
    halves = [dataclasses.replace(packing, rows=packing.rows[:, own]) for own in (slice(0, 2), slice(2, 4))]
    for index in range(packing.num_microbatches):
        parts = [half.take(index, ragged) for half in halves]
        np.testing.assert_array_equal(np.concatenate(parts), packing.take(index, ragged))
    outputs = [halves[0].take(index, ragged) for index in range(packing.num_microbatches)]
    back = halves[0].restore(outputs, ragged=True)
    np.testing.assert_array_equal([row[0] for row in back], np.sort(halves[0].order))


def test_rows_are_read_when_they_are_taken():
    read = set()

    class Reader:
        def __getitem__(self, number):
            read.add(int(number))
            return np.zeros(LENGTHS[number])

    packing = token_microbatches(LENGTHS, 16)
    packing.take(1, Reader())
    assert read == {*packing.rows[1][packing.rows[1] >= 0], packing.order[0]}


def test_outputs_of_jax_come_back_and_spare_ones_need_not_run():
    packing = token_microbatches(LENGTHS, 8, num_microbatches=20)
    rows = jnp.arange(11 * 8.0).reshape(11, 8)
    outputs = [jnp.asarray(packing.take(i, rows)).sum(1) if packing.tokens[i].any() else None for i in range(20)]
    want = [row[:length].sum() for row, length in zip(np.asarray(rows), LENGTHS, strict=True)]
    np.testing.assert_array_equal(packing.restore(outputs), want)


def test_it_is_printed_by_shape():
    text = str(token_microbatches(LENGTHS, 16, num_devices=2, buckets=[4, 8], num_microbatches=5))
    assert text.splitlines() == [
        "11 rows, 38 tokens: 2 micro-batches and 3 spare on 2 devices, 59.4% of the budget of 16 tokens filled",
        "      1 of     2 rows x      8 tokens,  78.1% of them no padding",
        "      1 of     4 rows x      4 tokens,  40.6% of them no padding",
    ]


def test_one_is_one():
    assert str(token_microbatches([1], 1)).splitlines()[0] == (
        "1 row, 1 token: 1 micro-batch, 100.0% of the budget of 1 token filled"
    )
    with pytest.raises(ValueError, match=r"must return a number >= 0 for each row: .* for 1 row, or"):
        token_microbatches([1], 1, cost=lambda n: -n)


@pytest.mark.parametrize("lengths", [np.array([3, 9], np.uint8), (3, 9), jnp.array([3, 9]), [np.int64(3), 9]], ids=repr)
def test_lengths_are_integers_of_any_kind(lengths):
    assert token_microbatches(lengths, np.int32(10)).tokens.tolist() == [[9], [3]]


def test_a_budget_without_end_takes_all_rows_at_once():
    packing = token_microbatches(LENGTHS, 10**30, num_devices=2)
    assert (packing.num_microbatches, packing.device_rows) == (1, (8,))


# Bad input.

BAD = {
    "of zero": ([3, 0], 8, {}, ValueError, r"Every row must have a token: lengths\[1\]=0\. Leave"),
    "negative": ([3, 2, -4], 8, {}, ValueError, r"lengths\[2\]=-4"),
    "floats": ([3.0, 2.0], 8, {}, TypeError, r"one integer for each row: lengths is float64\[2\]\. Pass \[len"),
    "bools": ([True, False], 8, {}, TypeError, "lengths is bool"),
    "words": ("abc", 8, {}, TypeError, "one integer for each row"),
    "the rows themselves": ([[1, 2], [3]], 8, {}, TypeError, "they are no array"),
    "a matrix": ([[1, 2], [3, 4]], 8, {}, TypeError, r"int64\[2, 2\]"),
    "one number": (3, 8, {}, TypeError, r"int64\[\]"),
    "none": ([], 8, {}, ValueError, "lengths is empty. Skip empty batches"),
    "too long": ([3, 9, 4], 8, {}, ValueError, r"row 1 has 9 tokens, max_tokens=8\. Cut"),
    "several too long": ([3, 9, 10, 9], 8, {}, ValueError, "row 2 has 10 tokens, max_tokens=8, and 2 more are too"),
    "two too long": ([9, 10], 8, {}, ValueError, "max_tokens=8, and 1 more is too long. Cut"),
    "beyond all counting": (
        [3, 2**62],
        2**62,
        {},
        ValueError,
        r"64 bits count: 2 rows of up to \d+\. Pass",
    ),
    "a group too long": ([3, 5], 8, {"group_size": 2}, ValueError, "fit the budget 2 times.* row 1 has 5 tokens"),
    "a group of one token each": (
        [1, 1],
        1,
        {"group_size": 2},
        ValueError,
        "row 0 has 1 token, max_tokens=1, and 1 more",
    ),
    "a row without its group": ([3], 8, {"group_size": 2}, ValueError, "group_size=2, and lengths has 1 row. Pass 2"),
    "half a group": ([3, 5, 1], 8, {"group_size": 2}, ValueError, "group_size=2, and lengths has 3 rows. Pass 2 or 4"),
    "no budget": ([3], 0, {}, ValueError, "max_tokens must be an integer >= 1: max_tokens=0"),
    "a negative budget": ([3], -8, {}, ValueError, "max_tokens=-8"),
    "a budget of floats": ([3], 8.0, {}, TypeError, "max_tokens=8.0"),
    "a budget of None": ([3], None, {}, TypeError, "max_tokens=None. Pass an int"),
    "no device": ([3], 8, {"num_devices": 0}, ValueError, "num_devices=0"),
    "group_size": ([3], 8, {"group_size": 0}, ValueError, "group_size=0"),
    "too few": ([5, 5, 5], 8, {"num_microbatches": 2}, ValueError, "num_microbatches=2, and 3 are needed for max_tok"),
    "too few buckets": (
        [5, 2, 2, 2, 2],
        8,
        {"num_microbatches": 2, "buckets": [5]},
        ValueError,
        "5 are needed.*larger max_tokens, or more buckets",
    ),
    "no micro-batch": ([5], 8, {"num_microbatches": 0}, ValueError, "num_microbatches=0"),
    "a word as cost": ([5], 8, {"cost": "flops"}, ValueError, '"tokens", "squares", or a function'),
    "a cost of one": (
        [5, 5],
        8,
        {"cost": lambda n: n.sum()},
        ValueError,
        r"each row: it returned int64\[\] for 2 rows",
    ),
    "a negative cost": ([5, 5], 8, {"cost": lambda n: -n}, ValueError, "negative or not finite"),
    "a cost of NaN": ([5, 5], 8, {"cost": lambda n: n * np.nan}, ValueError, "negative or not finite"),
    "no bucket": ([5], 8, {"buckets": []}, ValueError, "buckets=.., the longest row has 5 tokens, and 8 fit"),
    "short buckets": ([5], 8, {"buckets": [2, 4]}, ValueError, r"must hold the longest row.*buckets=\[2, 4\]"),
    "a bucket too long": ([5], 8, {"buckets": [4, 16]}, ValueError, "fit max_tokens"),
    "a bucket of zero": ([5], 8, {"buckets": [0, 8]}, ValueError, "buckets=0"),
    "buckets of floats": ([5], 8, {"buckets": 2.5}, TypeError, "buckets=2.5"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case):
    lengths, budget, options, kind, match = BAD[case]
    with pytest.raises(kind, match=match):
        token_microbatches(lengths, budget, **options)


def test_the_remedies_work():
    assert token_microbatches([5, 5, 5], 8, num_microbatches=3).num_microbatches == 3
    assert token_microbatches([5, 2, 2, 2, 2], 8, num_microbatches=2, buckets=[2, 5]).num_microbatches == 2
    assert token_microbatches([5], 8, buckets=[5, 8]).padded_lengths == (5,)
    assert token_microbatches([5, 3], 8, cost=lambda n: n**1.5).num_microbatches == 2


def test_rows_and_outputs_that_do_not_fit():
    packing = token_microbatches([3, 2], 8)
    with pytest.raises(ValueError, match=r"row 0 has 2, lengths\[0\]=3\. Pass the lengths of these rows"):
        packing.take(0, [[1, 2], [3, 4]])
    with pytest.raises(TypeError, match=r"All rows must have one dtype: row . has .*Convert them, with np.asarray"):
        packing.take(0, [[1, 2, 3], [0.5, 1.5]])
    with pytest.raises(ValueError, match="2 outputs, 1 micro-batch. Pass None for spare"):
        packing.restore([np.zeros(2), np.zeros(2)])
    with pytest.raises(ValueError, match=r"outputs\[0\] has 5, take\(0, ...\) has 2. Return all rows"):
        packing.restore([np.zeros(5)])


@pytest.mark.parametrize("values", [[3, 2.5, 4.75], [True, 7, 3]])
def test_numbers_of_rows_are_not_rounded_to_those_of_the_longest(values):
    packing = token_microbatches([5, 3, 2], 10)
    with pytest.raises(TypeError, match="All rows must have one dtype: row"):
        [packing.take(index, values) for index in range(packing.num_microbatches)]
    taken = packing.take(0, np.asarray(values, np.float32))
    assert set(taken) <= {*np.asarray(values, np.float32), 0}


@pytest.mark.parametrize(("fill", "dtype"), [(0.5, int), (np.nan, int), (-100, np.uint8)])
def test_what_fills_has_the_dtype_of_the_rows(fill, dtype):
    packing = token_microbatches([2, 1], 4)
    with pytest.raises(ValueError, match="fill must be a number of the dtype of the rows"):
        packing.take(0, [np.ones(2, dtype), np.ones(1, dtype)], fill=fill)
    assert np.isnan(packing.take(0, [np.ones(2), np.ones(1)], fill=np.nan)).sum() == 1
