"""What fits: the search and the table, against programs whose memory is known by hand."""

import dataclasses
import functools
import importlib.util
import math
import re
import sys
from collections.abc import Callable

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
from optax_accum import plan
from optax_accum.accelerators import _footprint as footprint
from optax_accum.plan import _budgets as budgets
from optax_accum.plan import _search as search
from tests import programs

ROWS, WIDTH = 256, 128
ROW = 4 * WIDTH  # bytes


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def lower(k, on=None, rows=ROWS, scale=1.0):
    """A product of what must be written first: `sin(rows)`, of the rows of one micro-batch."""

    def add(total, rows):
        written = jax.lax.optimization_barrier(jnp.sin(scale * rows))
        return total + written.T @ written, None

    def step(x):
        return jax.lax.scan(add, jnp.zeros((WIDTH, WIDTH)), x.reshape(k, -1, WIDTH))[0]

    x = shape(rows, WIDTH)
    return jax.jit(step).lower(x if on is None else on.shapes(x))


def divisors(n):
    return [k for k in range(1, n + 1) if n % k == 0]


@dataclasses.dataclass
class Lowers:
    """A step that is lowered by hand, whatever its arguments."""

    make_step: Callable
    number: int

    def lower(self, *args):
        return self.make_step(self.number)


def planned(make_step=lower, rows=ROWS, **options):
    options = {"candidates": divisors(rows), "progress": False, "safety": 1, "batch_argnums": 0, **options}
    return plan.fit(lambda k: Lowers(make_step, k), shape(rows, WIDTH), run=False, **options)


def planned_step(step_of_k, *args, **options):
    options = {"progress": False, "safety": 1, **options}
    return plan.fit(step_of_k, *args, run=False, **options)


def planned_loss(loss, w, x, **options):
    return planned_step(plan.of_loss(loss, optax.sgd(0.1)), w, x, **options)


def in_one_line(found):
    """What a plan prints, without its line breaks."""
    return " ".join(str(found).split())


# The search, of functions instead of programs.

lines = st.tuples(st.integers(2, 2048), st.floats(1, 1e3), st.floats(0.01, 10), st.sampled_from([0.0, 50.0]))


def peak_of(start, row, ragged):
    return lambda c: start + row * c.rows + ragged * c.ragged


every_size = lambda rows: search.candidates(rows, range(1, rows + 1))


@pytest.mark.sweep
@given(lines, st.floats(-0.1, 1.1), st.booleans(), st.floats(0.2, 3.0), st.sampled_from([-100.0, 0.0]))
def test_the_fewest_that_fit_are_found_by_halving(line, where, divisors, bend, one):
    """Whatever the law, as long as memory grows; with that of rows of one, and the cost of a ragged cut, unknown."""
    rows, *of = line
    every = search.candidates(rows) if divisors else every_size(rows)
    straight = peak_of(*of)
    peak = lambda c: 200 + straight(c) ** bend + one * (c.rows == 1)
    limit = peak(every[-1]) + where * (peak(every[0]) - peak(every[-1]))
    asked = []
    peaks = search.search(every, lambda c: asked.append(c) or peak(c), limit)
    assert len(asked) == len(set(asked)) <= search.enough(every)
    assert search.best(peaks, limit) == min((c for c in every if peak(c) <= limit), default=None)
    assert all(c.rows > 1 or c == asked[-1] or c == every[0] for c in asked)


@pytest.mark.sweep
def test_six_are_enough_for_1024_rows():
    assert [search.enough(search.candidates(rows)) for rows in (512, 1000, 1024, 4096, 720)] == [6, 6, 6, 6, 7]
    every = search.candidates(1024)
    for limit in range(1025):
        for floor in (0, 1000):  # what is held at no rows may not be what it seems
            peaks = search.search(every, lambda c: c.rows**0.5, limit**0.5, lambda floor=floor: -floor)
            assert len(peaks) <= 6
            assert (found := search.best(peaks, limit**0.5)) == next((c for c in every if c.rows <= limit), None)
            assert found is None or found == every[0] or every[every.index(found) - 1] in peaks


def test_rows_of_one_are_asked_last():
    """They were asked second: their law of memory led the line astray, and 512 micro-batches were the answer."""
    every = search.candidates(512)
    peaks = search.search(every, lambda c: 10.0 if c.rows == 1 else 1000.0 + c.rows**1.2, 1030)
    assert search.best(peaks, 1030).number == 32
    assert min(c.rows for c in peaks) > 1


@given(lines, st.floats(0.01, 0.9), st.floats(0.7, 1.4), st.floats(1.0, 1.2))
def test_of_what_is_nearly_a_line_what_is_found_fits_and_was_measured(line, where, whole, bend):
    rows, *of = line
    straight, every = peak_of(*of), search.candidates(rows)
    peak = lambda c: straight(c) ** bend * (whole if c.number == 1 else 1)
    limit = peak(every[-1]) + where * abs(peak(every[0]) - peak(every[-1]))
    peaks = search.search(every, peak, limit)
    found = search.best(peaks, limit)
    assert len(peaks) <= 6
    assert found in peaks
    assert peaks[found] == peak(found) <= limit


def test_what_is_not_to_be_had_is_left_out():
    every = search.candidates(64)
    measure = lambda c: None if c.number in (1, 8) else float(c.rows)
    assert [c.number for c in search.search(every, measure, 10) if c.rows <= 10] == [16]


@pytest.mark.sweep
def test_candidates_of_the_same_size_are_one():
    """Of 8 rows, 4, 5, 6 and 7 micro-batches are of 2 rows; named or not, it is compiled and shown once."""
    numbers = lambda rows, asked=None: [(c.number, c.rows, c.ragged) for c in search.candidates(rows, asked)]
    assert numbers(8, [7, 5, 6, 8, 1, 5]) == [(1, 8, False), (5, 2, False), (8, 1, False)]
    assert numbers(8, range(1, 9)) == [(1, 8, False), (2, 4, False), (3, 3, True), (4, 2, False), (8, 1, False)]
    assert numbers(8) == [(1, 8, False), (2, 4, False), (4, 2, False), (8, 1, False)]
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    found = planned_loss(loss, shape(WIDTH, WIDTH), shape(8, WIDTH), candidates=[7, 6, 5], budget="1GB")
    assert ([row["num_microbatches"] for row in found.rows], found.sizes) == ([5], (2, 2, 2, 2))


def test_candidates_are_the_sizes_that_there_are():
    assert [c.number for c in search.candidates(1000)] == divisors(1000)
    every = every_size(1024)
    assert len(every) == len({-(-1024 // k) for k in range(1, 1025)}) == len({c.rows for c in every})
    assert all(c.rows == -(-1024 // c.number) and c.ragged == bool(1024 % c.rows) for c in every)
    assert all(-(-1024 // (c.number - 1)) > c.rows for c in every[1:])  # the fewest of that size


def test_memory_that_falls_with_the_rows_is_halved_and_said():
    """A loop unrolled: the more micro-batches, the more is kept."""
    every = search.candidates(64)
    peaks = search.search(every, lambda c: 10.0 * c.number + (1e4 if c.number == 1 else 0), 100)
    assert not search.grows(peaks)
    assert search.best(peaks, 100) is not None
    assert search.grows({c: c.rows for c in every})


def test_where_nothing_fits_four_are_enough():
    peaks = search.search(search.candidates(1024), peak_of(100, 1, 0), 50, lambda: 40)
    assert [c.rows for c in peaks] == [1024, 8, 2, 1]
    assert len(search.search(search.candidates(1024), peak_of(100, 1, 0), 50, lambda: 60)) == 1


def test_a_whole_batch_that_no_compiler_finishes_leaves_no_line():
    """TPU: more than there is, and nobody says how much."""
    peak = lambda c: math.inf if c.rows > 100 else 10.0 + c.rows
    for every, rows in ((search.candidates(1024), 32), (every_size(1024), 49)):
        assert search.best(search.search(every, peak, 60), 60).rows == rows


# Programs whose memory is known.


def test_the_bytes_of_a_program_that_is_known():
    with programs.as_shipped():
        found = planned(budget="1GB").rows[0]
    assert found["arguments"] == ROWS * ROW
    assert found["unaliased"] == WIDTH * ROW
    assert found["temporary"] == pytest.approx(ROWS * ROW, rel=0.1)  # sin(rows)
    assert found["peak"] == sum(found[kind] for kind in ("arguments", "unaliased", "temporary", "code"))


def test_a_donated_argument_counts_once():
    donated = lambda k: jax.jit(lambda x: x + 1, donate_argnums=0).lower(shape(ROWS, WIDTH))
    found = planned(donated, budget="1GB").rows[0]
    assert (found["arguments"], found["unaliased"]) == (ROWS * ROW, 0)


@functools.cache
def table():
    with programs.as_shipped():
        return planned(budget=ROWS * ROW + 2 * WIDTH * ROW + ROWS * ROW // 3)


@pytest.mark.sweep
def test_the_fewest_that_fit_were_compiled_and_the_next_fewer_do_not_fit():
    found = table()
    assert found.num_microbatches == 4
    assert (found.microbatch_size, found.sizes, sum(found.sizes)) == (64, (64,) * 4, ROWS)
    (chosen,) = (row for row in found.rows if row["chosen"])
    assert chosen["num_microbatches"] == 4
    assert chosen["fits"]
    assert chosen["peak"] == found.peak
    assert not any(row["fits"] for row in found.rows if row["num_microbatches"] < 4)
    assert len(found.rows) <= 5


@pytest.mark.sweep
def test_a_table_is_monotone_and_says_all():
    found = table()
    peaks = [row["peak"] for row in found.rows]
    assert peaks[1:] == sorted(peaks[1:], reverse=True)  # the whole batch is in no loop
    assert [row["num_microbatches"] for row in found.rows] == sorted(row["num_microbatches"] for row in found.rows)
    assert str(found) == repr(found)
    text = in_one_line(found)
    assert "* 4" in text
    assert "4 micro-batches" in text
    assert "temporary" in text
    assert "yes" in text
    assert "no" in text
    assert "What does not shrink with the rows: " in text
    assert "each row of a micro-batch adds 512 B" in text


@pytest.mark.sweep
@pytest.mark.parametrize(("dtype", "copies"), [(jnp.float32, "1 P = 65.54 kB"), (jnp.bfloat16, "2 P = 65.54 kB")])
def test_what_accumulation_itself_costs(dtype, copies):
    """The sum is float32 or wider; it is told where one loop was compiled, too."""
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2).astype(jnp.float32)
    args = shape(WIDTH, WIDTH, dtype=dtype), shape(64, WIDTH, dtype=dtype)
    found = in_one_line(planned_loss(loss, *args, candidates=[2], budget="1GB"))
    assert f"holds one sum of gradients, {copies}; one micro-batch needs none." in found
    assert "does not shrink" not in found
    assert "sum of gradients" not in str(planned_loss(loss, *args, candidates=[1], budget="1GB"))
    assert "sum of gradients" not in str(table())  # of a step that is not ours


def test_what_is_kept_for_all_rows_is_counted_and_named():
    """BatchNorm couples rows: what crosses from one level to the next no number of micro-batches makes smaller."""

    def loss(w, x):
        h = x @ w
        return jnp.mean(jnp.tanh((h - h.mean(0, keepdims=True)) * jax.lax.rsqrt(h.var(0, keepdims=True) + 1e-5)) ** 2)

    rows, apart = 8192, lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    w, x = shape(16, WIDTH), shape(rows, 16)
    kept = optax_accum.explain(loss, w, x).kept_bytes
    assert kept == rows * ROW  # h, which all rows must have given before one is normalised
    with pytest.raises(plan.NothingFitsError) as error:
        planned_loss(loss, w, x, candidates=[64], budget=4 * x.size + kept)
    found = error.value.plan
    assert (found.kept, found.rows[0]["temporary"] > kept) == (kept, True)
    says = "4.19 MB are kept for all rows, however many micro-batches: explain(loss, params, batch) names"
    assert says in in_one_line(found)
    assert "kept for all rows" not in str(dataclasses.replace(found, limit=1e9))  # less than 1 %
    other = planned_loss(apart, w, x, candidates=[64], budget="1GB")
    assert (other.kept, other.rows[0]["temporary"] < kept / 8) == (0, True)


def test_a_last_micro_batch_that_is_smaller():
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    found = planned_loss(loss, shape(WIDTH, WIDTH), shape(100, WIDTH), candidates=[3], budget="1GB")
    assert found.sizes == (34, 34, 32)
    assert found.copy == WIDTH * ROW


@pytest.mark.sweep
def test_options_of_the_compiler_are_those_of_the_step():
    """They are not in the text of a program, so a plan of it knows nothing of another."""

    def peak(**options):
        step = jax.grad(lambda w, x: jnp.mean((jax.nn.gelu(x @ w) @ w.T - x) ** 2))
        make_step = lambda k: jax.jit(step, compiler_options=options).lower(shape(64, 256), shape(ROWS, 64))
        return planned(make_step, budget="1GB", candidates=[1]).peak

    with programs.as_shipped():
        usual, other = peak(), peak(xla_disable_hlo_passes="fusion")
    assert usual != other


@pytest.mark.sweep
def test_a_number_is_lowered_and_compiled_once(monkeypatch):
    compiled, lowered = [], []
    compile_ = search.footprint
    monkeypatch.setattr(search, "footprint", lambda *args: compiled.append(args) or compile_(*args))
    with programs.as_shipped():
        found = planned(lambda k: lowered.append(k) or lower(k), budget=ROWS * ROW + 2 * WIDTH * ROW + ROWS * ROW // 3)
    assert len(compiled) == len(found.rows)
    assert sorted(lowered) == sorted({*lowered}) == sorted({*(row["num_microbatches"] for row in found.rows), 2})


def planned_mlp(rows, width=256, **options):
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p[0]) @ p[1] - x) ** 2)
    params = (shape(64, width), shape(width, 64))
    return planned_step(plan.of_loss(loss, optax.adam(1e-3)), params, shape(rows, 64), **options)


@pytest.mark.sweep
def test_a_budget_between_two_sizes_is_answered_with_the_smaller_one():
    """Of this model rows of one have another law of memory, a product of a matrix and a vector."""
    with programs.as_shipped():
        peak = lambda k: planned_mlp(512, budget="1GB", candidates=[k]).peak
        few, more = peak(32), peak(64)
        found = planned_mlp(512, budget=(few + more) / 2)
    assert few > more
    assert found.num_microbatches == 64
    numbers = [row["num_microbatches"] for row in found.rows]
    assert 32 in numbers
    assert {*numbers} <= {*divisors(512)}
    assert len(numbers) <= 6


def test_a_step_that_reshapes_is_planned_without_candidates():
    """It takes divisors only; asked for other numbers, too, they are passed over, and the plan says so."""
    budget = ROWS * ROW + 2 * WIDTH * ROW + ROWS * ROW // 3
    with programs.as_shipped():
        assert planned(budget=budget, candidates=None).num_microbatches == 4
        found = planned(budget=budget, candidates=range(1, ROWS + 1))
    assert found.num_microbatches == 4
    assert "Not planned: step_of_k(3) must return a step that can be lowered: it raised TypeError" in in_one_line(found)


@pytest.mark.parametrize("budget", ["1GB", 290_000])
def test_a_builder_that_takes_the_number_for_the_rows(budget):
    with pytest.raises(ValueError, match=r"must take the number.*take their rows: .*step_of_k\(1\) has 3.28e\+04"):
        planned(lambda k: lower(ROWS // k), budget=budget)


def test_memory_that_is_not_monotone_is_said():
    """Unrolled, each micro-batch keeps what it wrote."""

    def make_step(k):
        def step(x):
            written = [jax.lax.optimization_barrier(jnp.outer(part[:, 0], jnp.ones(k * 100))) for part in x]
            return sum(jnp.sum(w) for w in jax.lax.optimization_barrier(written))

        return jax.jit(lambda x: step(x.reshape(k, -1, WIDTH))).lower(shape(64, WIDTH))

    with programs.as_shipped():
        least = planned(make_step, 64, budget="1GB", candidates=[2]).peak
        if least < 2 * 64 * WIDTH * 4:  # little more than the argument, on JAX 0.10
            pytest.skip("this compiler writes nothing of it")
        found = planned(make_step, 64, budget=least * 1.01, candidates=[2, 4, 8])
        with pytest.raises(ValueError, match="Nothing fits") as error:
            planned(make_step, 64, budget=least / 2, candidates=[2, 4, 8])
    assert found.num_microbatches == 2
    assert found.monotone
    assert "Memory is not monotone" in str(error.value.plan)


@pytest.mark.sweep
def test_rows_go_to_the_shards_of_the_batch():
    """On a mesh of data 2 x model 4 half of the rows are on each device: there may be 32 micro-batches of 64 rows."""

    mesh = optax_accum.accelerators.target().mesh("data", "model", shape=(2, 4))
    on = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    params = (on(shape(64, 256), P(None, "model")), on(shape(256, 64), P("model")))
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p[0]) @ p[1] - x) ** 2)
    before = jax.config.jax_use_shardy_partitioner
    for shardy in (True, False):
        jax.config.update("jax_use_shardy_partitioner", shardy)
        try:
            found = planned_loss(loss, params, on(shape(64, 64), P("data")), budget="1GB", candidates=[32])
        finally:
            jax.config.update("jax_use_shardy_partitioner", before)
        assert (found.num_microbatches, found.num_devices, found.sizes) == (32, 8, (2,) * 32)
        assert found.rows[0]["rows"] == 1


def test_the_largest_product_of_a_step():
    """In a loop, a convolution, none."""
    filters = shape(3, 3, 4, 8)
    numbers = ("NHWC", "HWIO", "NHWC")
    convolve = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
    lowered = jax.jit(convolve).lower(shape(2, 16, 16, 4), filters)
    assert footprint.largest_product(lowered) == 2 * (2 * 16 * 16 * 8) * (3 * 3 * 4)
    assert footprint.largest_product(lower(4)) == 2 * (ROWS // 4) * WIDTH**2
    assert footprint.largest_product(jax.jit(jnp.sin).lower(shape(8))) == 0


def test_arguments_that_shrink_with_the_number_may_fit():
    """A step across calls takes a micro-batch."""
    step = lambda k: jax.jit(lambda x: jnp.sin(x).sum(0)).lower(shape(ROWS // k, WIDTH))
    assert planned(step, budget=ROWS * ROW // 2).num_microbatches >= 2


# Devices, targets, builders.


def test_several_devices_share_a_micro_batch():
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    step_of_k, args = plan.of_loss(loss, optax.sgd(0.1), devices="data"), (shape(WIDTH, WIDTH), shape(ROWS, WIDTH))
    four = optax_accum.accelerators.target(None, 4)
    found = planned_step(step_of_k, *args, target=four, budget="1GB", candidates=[2])
    assert (found.num_devices, found.sizes, found.rows[0]["rows"]) == (4, (128, 128), 32)
    assert found.rows[0]["arguments"] == WIDTH * ROW + ROWS // 4 * ROW  # those of one device
    assert "32 a device" in str(found)
    moved = found.rows[0]["network"]
    assert WIDTH * ROW <= moved <= WIDTH * ROW + 64  # the sum of the gradients, and the loss
    assert found.rows[0]["exposed"] == moved  # on a CPU
    assert str(found).splitlines()[3].split() == ["micro-batches", "network", "exposed"]


def test_one_device_has_no_network():
    assert "network" not in str(planned(budget="1GB"))


def test_a_plan_for_here_of_a_step_for_elsewhere():
    """And the other way round: the devices are compared."""
    here = optax_accum.accelerators.target(None, 1)
    other = optax_accum.accelerators.Target("other", tuple(jax.devices()[1:2]), 10**9)
    elsewhere = lower(1, here)
    with pytest.raises(ValueError, match="it was for 1 x cpu, and target='other' is 1 x cpu.*name no other devices"):
        planned(lambda k: elsewhere, target=other)
    assert planned(lambda k: lower(k, other), target=other).num_microbatches == 1
    assert planned(lambda k: lower(k, here), budget="1GB").num_microbatches == 1


@pytest.mark.sweep
@pytest.mark.skipif(importlib.util.find_spec("flax") is None, reason="needs flax")
def test_train_steps_of_flax_from_shapes_alone(rank_promotion):
    from flax import linen, nnx

    import optax_accum.flax

    class Linen(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(WIDTH)(x)

    def state():
        params = Linen().init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"]
        return optax_accum.flax.linen.TrainState.create(
            apply_fn=Linen().apply, params=params, tx=optax.sgd(0.1), metrics=("loss",)
        )

    def fun(params, batch, key, state):
        return jnp.mean(state.apply_fn({"params": params}, batch) ** 2), {}

    def model():
        made = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        tx = optax.sgd(0.1)
        return made, optax_accum.flax.nnx.Optimizer(made, tx, wrt=nnx.Param, metrics=("loss",))

    batch = shape(ROWS, WIDTH)
    of_linen = lambda k: optax_accum.flax.linen.train_step(fun, num_microbatches=k)
    of_nnx = lambda k: optax_accum.flax.nnx.train_step(lambda model, x: jnp.mean(model(x) ** 2), num_microbatches=k)
    params, how = WIDTH * ROW + ROW, {"candidates": [2], "budget": "1GB"}
    for found in (
        planned_step(of_linen, jax.eval_shape(state), batch, jax.random.key(0), **how),
        planned_step(of_nnx, *nnx.eval_shape(model), batch, batch_argnums=2, **how),
    ):
        assert 0 <= found.rows[0]["arguments"] - params - ROWS * ROW < 64  # and a few scalars


# What is refused, and what helps.


SIZES = [("80GB", 80e9), ("7.5 GiB", 7.5 * 2**30), ("512 MiB", 2**29), (1e9, 1e9), ("2e9", 2e9), (".5GB", 5e8)]
SIZES += [("5.GB", 5e9), (np.int64(10**9), 1e9), (np.float32(1e9), 1e9)]


@pytest.mark.parametrize(("budget", "size"), SIZES)
def test_a_budget(budget, size):
    assert budgets.as_bytes(budget) == size


@pytest.mark.parametrize(
    "budget", [0, -1, "0GB", "-3 GB", float("nan"), 10**400, "much", "", ".", "80 GX", True, [1], "8i"], ids=repr
)
def test_a_budget_that_cannot_be(budget):
    with pytest.raises(ValueError, match=r'The budget must be.*budget=.*Pass bytes, or text such as "80GB"'):
        planned(budget=budget)


def test_by_default_a_cpu_has_what_is_free():
    found = planned()
    physical = optax_accum.accelerators.target().memory
    assert 0 < found.budget <= physical
    nobody = optax_accum.accelerators.Target("mystery", jax.devices()[:1], None)
    with pytest.raises(ValueError, match='how much memory mystery has. Pass budget=, such as budget="16GB"'):
        planned(target=nobody)


CGROUPS = {
    "2": ("0::/pod/box", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "1": (
        "4:cpu:/pod\n10:memory:/pod/box",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


@pytest.mark.parametrize("version", CGROUPS)
def test_what_is_free_is_what_a_container_leaves(version, tmp_path, monkeypatch):
    """The tightest of the groups around a process; files that can be dropped are free."""
    line, mount, most, used, dropped = CGROUPS[version]
    files = {"proc/meminfo": "MemAvailable:   8000000 kB", "proc/self/cgroup": line}
    files |= {f"{mount}/pod/{most}": "5000000000", f"{mount}/pod/{used}": "2000000000"}
    files |= {f"{mount}/pod/memory.stat": f"anon 7\n{dropped} 500000000\n", f"{mount}/pod/box/{most}": "max"}
    monkeypatch.setattr(budgets, "_ROOT", tmp_path)
    assert budgets._free() is None
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert budgets._free() == 3_500_000_000
    (tmp_path / mount / "pod" / used).write_text("6000000000")  # more than there may be
    assert budgets.memory_of(optax_accum.accelerators.target(None, 1), here=True, devices=1) == 1
    (tmp_path / "proc/self/cgroup").unlink()
    assert budgets._free() == 8_000_000 * 1024


def test_a_budget_below_the_arguments_alone():
    with pytest.raises(ValueError, match="must hold what the step is given.*No number.*Donate.*FSDP.*offload"):
        planned(budget=ROWS * ROW // 2)
    with pytest.raises(ValueError, match='The budget is 80 bytes: for more pass text, such as "80GB"'):
        planned(budget=80)


def test_nothing_fits():
    budget = ROWS * ROW + WIDTH * ROW + 100
    with pytest.raises(
        ValueError, match=r"Nothing fits: the smallest peak is.*budget of.*jax.checkpoint.*FSDP"
    ) as error:
        planned(budget=budget)
    assert "nothing fits." in error.value.__notes__[0]


def raises(k):
    raise KeyError("nothing here")


def test_where_all_but_the_whole_batch_raise_the_error_says_why():
    with pytest.raises(ValueError, match=r"Nothing fits.*Not planned: step_of_k\(2\) must.*KeyError: 'nothing here'"):
        planned(lambda k: lower(k) if k == 1 else raises(k), budget=ROWS * ROW + WIDTH * ROW + 100)


def test_steps_that_do_not_lower():
    with pytest.raises(KeyError, match="nothing here"):
        planned(raises)
    with pytest.raises(ValueError, match=r"step_of_k\(2\) must return.*raised KeyError: 'nothing here'\. If it takes"):
        planned(raises, candidates=[2])
    with pytest.raises(TypeError, match="step_of_k must be a function: step_of_k=None. Pass a function that returns"):
        plan.fit(None, shape(ROWS, WIDTH), run=False)
    only_divisors = lambda k: lower(k)  # a reshape fails for 3
    with pytest.raises(ValueError, match=r"step_of_k\(3\).*raised TypeError.*pass them as candidates="):
        planned(only_divisors, budget="1GB", candidates=[3])
    with pytest.raises(TypeError, match=r"must return a jax.stages.Lowered.*it returned NoneType"):
        planned(lambda k: None)
    with pytest.raises(TypeError, match="it returned Compiled"):
        planned(lambda k: lower(k).compile())


def test_a_builder_that_ignores_the_number():
    budget = ROWS * ROW + WIDTH * ROW + 100
    with pytest.raises(ValueError, match="1 and 128 micro-batches are the same program, so all cost the same. Pass"):
        planned(lambda k: lower(1), budget=budget)


def test_a_builder_that_ignores_the_number_in_what_it_computes():
    """Other programs, of the same memory."""
    make_step = lambda k: lower(1, scale=1.0 + k)
    with pytest.raises(ValueError, match="Nothing fits.*must split the batch as it is told, and all numbers cost the"):
        planned(make_step, budget=ROWS * ROW + WIDTH * ROW + 100)


def test_the_rows_of_a_plan_are_those_of_its_batch():
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    w, batch = shape(WIDTH, WIDTH), {"x": shape(64, WIDTH), "count": shape()}
    step = lambda k: jax.jit(optax_accum.value_and_grad(lambda w, b: loss(w, b["x"]), num_microbatches=k))
    how = {"candidates": [1], "budget": "1GB"}
    assert planned_loss(loss, w, batch["x"], **how).global_batch == 64
    for argnums in (1, -1, np.int64(1), [1]):
        assert planned_step(step, w, batch, batch_argnums=argnums, **how).global_batch == 64
    with pytest.raises(ValueError, match="must be arrays with the same rows: batch_argnums=1. Pass the positions"):
        planned_step(step, w, (shape(64, 2), shape(3)))
    for argnums in ("batch", 2, -3, 1.0, None):
        with pytest.raises(ValueError, match=r"among the 2 arguments of the step: batch_argnums=.*Count from 0"):
            planned_step(step, w, batch, batch_argnums=argnums)


def test_a_parameter_that_is_a_python_number():
    found = planned_loss(lambda w, x: jnp.mean((x - w) ** 2), 1.0, shape(ROWS), candidates=[1], budget="1GB")
    assert found.num_microbatches == 1


def test_a_step_that_is_not_jitted():
    with pytest.raises(TypeError, match="step_of_k must return a jitted step: it returned .*Pass it to jax.jit"):
        planned_step(lambda k: lambda x: jnp.sin(x), shape(ROWS, WIDTH), batch_argnums=0)


def test_a_function_with_a_method_copy():
    class Function:
        __call__ = staticmethod(lower)

        def copy(self):
            return self

    with programs.as_shipped():
        found = planned(Function(), budget=ROWS * ROW + 2 * WIDTH * ROW + ROWS * ROW // 3)
    assert "each row of" in in_one_line(found)


@pytest.mark.parametrize("where", ["nowhere", "shard_map", "constrained"])
def test_a_step_for_some_of_the_devices(where):
    """One that names no shapes may still run on all of them."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    steps = {
        "nowhere": lambda x: x.sum(0),
        "shard_map": jax.shard_map(
            lambda x: jax.lax.psum(x.sum(0), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        ),
        "constrained": lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data"))).sum(0),
    }

    def ask(number):
        target = optax_accum.accelerators.target(None, number)
        lowered = jax.jit(steps[where]).lower(shape(ROWS, WIDTH))
        return planned(lambda k: lowered, budget="1GB", candidates=[1], target=target)

    right, wrong = (1, 4) if where == "nowhere" else (4, 8)
    assert ask(right).num_devices == right
    noun = "device" if right == 1 else "devices"
    with pytest.raises(
        ValueError, match=f"all devices.*for {right} x cpu.*is {wrong} x cpu.*or plan for a target of {right} {noun}"
    ):
        ask(wrong)


@pytest.mark.parametrize("partitioner", ["shardy", "gspmd"])
def test_a_step_that_no_device_shares(partitioner):
    """Its arguments lie whole on each of the devices, which all compute all rows: the plan would say a quarter."""
    product = lambda x: x.T @ x
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    by_rows = NamedSharding(mesh, P("data"))
    split = lambda x: product(jax.lax.with_sharding_constraint(jnp.sin(x), by_rows))
    inside = jax.shard_map(product, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    four = optax_accum.accelerators.target(None, 4)
    ask = lambda step, spec: planned(
        lambda k: jax.jit(step).lower(four.shapes(shape(ROWS, WIDTH), spec)),
        budget="1GB",
        candidates=[1],
        target=four,
    )
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", partitioner == "shardy")
    try:
        with pytest.raises(ValueError, match="must share the rows among.*: 4 hold and compute all.*or plan for one"):
            ask(product, P())
        for step, spec in [(product, P("data")), (split, P()), (inside, P())]:
            assert ask(step, spec).rows[0]["rows"] == ROWS // 4
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
    assert planned(lambda k: jax.jit(product).lower(shape(ROWS, WIDTH)), budget="1GB", candidates=[1]).num_devices == 1


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"candidates": [ROWS + 1]}, ValueError, f"There must be a row for each.*Pass numbers from 1 to {ROWS}"),
        ({"candidates": []}, ValueError, "There must be a row for each"),
        ({"candidates": [0]}, ValueError, "candidates must be an integer >= 1"),
        ({"safety": 0}, ValueError, "safety must be a number above 0 and at most 1.*Pass 0.9"),
        ({"safety": 1.5}, ValueError, "safety must be a number above 0"),
        ({"candidates": 4}, TypeError, r"must be several numbers of micro-batches: candidates=4. Pass \[1, 2, 4\]"),
        ({"target": 100}, TypeError, 'The target must be named by text, such as "h100".*name=100'),
        ({"target": "h1000"}, ValueError, "The target must be one of a100"),
        ({"safety": "0.9"}, TypeError, "safety must be a number above 0 and at most 1: safety='0.9'. Pass 0.9"),
        ({"safety": math.nan}, ValueError, "safety must be a number above 0"),
    ],
    ids=str,
)
def test_what_cannot_be_asked(options, error, says):
    with pytest.raises(error, match=says):
        planned(**options)


def test_one_is_one():
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    w, x = shape(WIDTH, WIDTH), shape(1, WIDTH)
    found = planned_loss(loss, w, x, budget="1GB")
    assert str(found).startswith("1 row on cpu, ")
    assert ": 1 micro-batch.\n" in str(found)
    with pytest.raises(ValueError, match=r"candidates=\[2\], and there is 1 row. Pass numbers from 1 to 1"):
        planned_loss(loss, w, x, candidates=[2])
    large = lambda k: jax.jit(lambda x: (jnp.sin(x) @ jnp.ones((WIDTH, 100 * WIDTH))).sum()).lower(shape(1, WIDTH))
    with pytest.raises(ValueError, match="with 1 micro-batch, and"):
        planned(large, 1, budget=2 * ROW)


def test_a_step_runs_where_its_arguments_lie():
    with pytest.raises(
        ValueError, match="runs where its arguments lie: target='h100'. Pass run=False to plan for that"
    ):
        plan.fit(lambda k: jax.jit(jnp.sin), jnp.ones((ROWS, 1)), batch_argnums=0, target="h100")
    loss = lambda w, x: jnp.mean((x @ w) ** 2)
    with pytest.raises(TypeError, match="that of of_loss. Pass run=False"):
        plan.fit(plan.of_loss(loss, optax.sgd(0.1)), jnp.ones(3), jnp.ones((4, 3)))


def test_a_backend_without_memory_analysis(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: None)
    with pytest.raises(RuntimeError, match='memory analysis, and that of cpu gives none.*target="h100"'):
        planned(budget="1GB")


def test_a_compiler_that_stops_for_want_of_memory(monkeypatch):
    """As that of a TPU does; what it says counts."""
    says = "RESOURCE_EXHAUSTED: E1000: the total memory required for HLO temporaries (48.03G) exceeds available HBM"
    compiled_for = footprint.compiled_for

    def stops(target, lowered):
        if "tensor<1x256x128xf32>" in lowered.as_text():
            raise jax.errors.JaxRuntimeError(says)
        return compiled_for(target, lowered)

    monkeypatch.setattr(footprint, "compiled_for", stops)
    found = planned(budget="15GB", candidates=[1, 2, 4])
    assert found.num_microbatches == 2
    assert found.rows[0]["refused"]
    assert found.rows[0]["peak"] == pytest.approx(48.03 * 2**30)
    assert ">51.57 GB" in str(found)
    assert footprint._needed("RESOURCE_EXHAUSTED: no more") == math.inf
    monkeypatch.setattr(footprint, "compiled_for", raises_other)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        planned(lambda k: lower(k, scale=3.0), budget="15GB")


def raises_other(target, lowered):
    raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_options_of_of_loss_that_are_its_own():
    with pytest.raises(ValueError, match="The plan sets this itself: num_microbatches=4. Leave it out"):
        plan.of_loss(lambda w, x: x @ w, optax.sgd(0.1), num_microbatches=4)


# The picture, the bar.


def test_a_picture():
    pytest.importorskip("matplotlib")
    figure = table().plot()
    (axes,) = figure.axes
    assert [tick.get_text().split()[0] for tick in axes.get_xticklabels()] == [
        str(row["num_microbatches"]) for row in table().rows
    ]
    assert axes.get_ylim()[1] * 1e6 > max(row["peak"] for row in table().rows)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        table().plot()


def test_without_tqdm_there_is_no_bar(monkeypatch, capsys):
    pytest.importorskip("tqdm")
    planned(budget="1GB", progress=True)
    drawn = capsys.readouterr().err
    assert "compiling" in drawn
    assert re.search(r"1 micro-batch of \d+ rows", drawn)
    monkeypatch.delitem(sys.modules, "tqdm.auto")
    planned(budget="1GB", progress=False)
    assert "tqdm.auto" not in sys.modules
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    planned(budget="1GB", progress=True)
    assert capsys.readouterr().err == ""
