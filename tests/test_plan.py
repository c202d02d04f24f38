"""What fits: the search, the table and the command, against programs whose memory is known by hand."""

import dataclasses
import functools
import importlib.util
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_accum
from optax_accum import plan
from optax_accum._tools import budgets, footprint, named, plan_command, planning, search
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


def planned(make_step=lower, rows=ROWS, **options):
    options = {"candidates": divisors(rows), "progress": False, "safety": 1, **options}
    return optax_accum.plan_microbatches(make_step, rows, **options)


@pytest.fixture(autouse=True)
def nothing_known():
    footprint._KNOWN.clear()


# The search, of functions instead of programs.

lines = st.tuples(st.integers(2, 2048), st.floats(1, 1e3), st.floats(0.01, 10), st.sampled_from([0.0, 50.0]))


def peak_of(start, row, ragged):
    return lambda c: start + row * c.rows + ragged * c.ragged


@given(lines, st.floats(-0.1, 1.1))
def test_of_a_line_the_fewest_that_fit_are_found_in_six(line, where):
    """With the cost of a ragged cut unknown, too."""
    rows, *of = line
    peak, every = peak_of(*of), search.candidates(rows)
    limit = of[0] + where * of[1] * rows
    asked = []
    peaks = search.search(every, lambda c: asked.append(c) or peak(c), limit, 6)
    assert len(asked) == len(set(asked)) <= 6
    assert search.best(peaks, limit) == min((c for c in every if peak(c) <= limit), default=None)


@given(lines, st.floats(0.01, 0.9), st.floats(0.7, 1.4), st.floats(1.0, 1.2))
def test_of_what_is_nearly_a_line_what_is_found_fits_and_was_measured(line, where, whole, bend):
    rows, *of = line
    straight, every = peak_of(*of), search.candidates(rows)
    peak = lambda c: straight(c) ** bend * (whole if c.number == 1 else 1)
    limit = peak(every[-1]) + where * abs(peak(every[0]) - peak(every[-1]))
    peaks = search.search(every, peak, limit, 6)
    found = search.best(peaks, limit)
    assert len(peaks) <= 6
    assert found in peaks
    assert peaks[found] == peak(found) <= limit


def test_candidates_are_the_sizes_that_there_are():
    every = search.candidates(1024)
    assert len(every) == len({-(-1024 // k) for k in range(1, 1025)}) == len({c.rows for c in every})
    assert all(c.rows == -(-1024 // c.number) and c.ragged == bool(1024 % c.rows) for c in every)
    assert all(-(-1024 // (c.number - 1)) > c.rows for c in every[1:])  # the fewest of that size


def test_memory_that_falls_with_the_rows_is_halved_and_said():
    """A loop unrolled: the more micro-batches, the more is kept."""
    every = search.candidates(64)
    peaks = search.search(every, lambda c: 10.0 * c.number + (1e4 if c.number == 1 else 0), 100, 6)
    assert not search.grows(peaks)
    assert search.best(peaks, 100) is not None
    assert search.grows({c: c.rows for c in every})


def test_where_nothing_fits_three_are_enough():
    peaks = search.search(search.candidates(1024), peak_of(100, 1, 0), 50, 6)
    assert [c.rows for c in peaks][:2] == [1024, 1]
    assert len(peaks) == 3


def test_a_whole_batch_that_no_compiler_finishes_leaves_no_line():
    """TPU: more than there is, and nobody says how much."""
    peak = lambda c: math.inf if c.rows > 100 else 10.0 + c.rows
    peaks = search.search(search.candidates(1024), peak, 60, 8)
    assert search.best(peaks, 60).rows in range(34, 52)


# Programs whose memory is known.


def test_the_bytes_of_a_program_that_is_known():
    with programs.as_shipped():
        found = planned(budget="1GB").rows[0]
    assert found["arguments"] == ROWS * ROW
    assert found["kept"] == WIDTH * ROW
    assert found["temporary"] == pytest.approx(ROWS * ROW, rel=0.1)  # sin(rows)
    assert found["peak"] == sum(found[kind] for kind in ("arguments", "kept", "temporary", "code"))
    assert found["flops"] == 2 * ROWS * WIDTH**2


def test_a_donated_argument_counts_once():
    donated = lambda k: jax.jit(lambda x: x + 1, donate_argnums=0).lower(shape(ROWS, WIDTH))
    found = planned(donated, budget="1GB").rows[0]
    assert (found["arguments"], found["kept"]) == (ROWS * ROW, 0)


@functools.cache
def table():
    with programs.as_shipped():
        return planned(budget=ROWS * ROW + 2 * WIDTH * ROW + ROWS * ROW // 3)


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


def test_a_table_is_monotone_and_says_all():
    found = table()
    peaks = [row["peak"] for row in found.rows]
    assert peaks[1:] == sorted(peaks[1:], reverse=True)  # the whole batch is in no loop
    assert [row["num_microbatches"] for row in found.rows] == sorted(row["num_microbatches"] for row in found.rows)
    text = str(found)
    assert text == repr(found)
    assert "* 4" in text
    assert "4 micro-batches" in text
    assert "temporary" in text
    assert "yes" in text
    assert "no" in text
    assert "beside its arguments" in text
    assert "each row of a micro-batch adds 1.03 kB" in text


def test_copies_of_the_parameters_are_told_where_they_say_something():
    found = dataclasses.replace(table(), copy=1000)
    assert found._copies(2500.0) == "2.50 kB (2.5 P, copies of the parameters)"
    assert found._copies(200e3) == "200.00 kB"


def test_a_last_micro_batch_that_is_smaller():
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    make_step = plan.of_loss(loss, optax.sgd(0.1), shape(WIDTH, WIDTH), shape(100, WIDTH))
    found = planned(make_step, 100, candidates=[3], budget="1GB")
    assert found.sizes == (34, 34, 32)
    assert make_step.copy == WIDTH * ROW


def test_a_program_is_compiled_once(monkeypatch):
    compiled = []
    compile_ = footprint._compiled
    monkeypatch.setattr(footprint, "_compiled", lambda *args: compiled.append(args) or compile_(*args))
    once = planned(budget="1GB")
    assert planned(budget="1GB").rows == once.rows
    assert len(compiled) == 1
    planned(lambda k: lower(k, scale=2.0), budget="1GB")  # another program
    assert len(compiled) == 2


def test_flops_count_loops_and_what_is_recomputed():
    """XLA counts a loop once."""
    layers = shape(6, WIDTH, WIDTH)
    layer = lambda x, w: (jnp.tanh(x @ w), None)

    def flops(layer, **options):
        loss = lambda w, x: jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)
        step = optax_accum.value_and_grad(loss, num_microbatches=7, **options)
        return footprint.count_flops(jax.jit(step).lower(layers, shape(ROWS, WIDTH)))

    forward = 6 * 2 * ROWS * WIDTH**2
    assert flops(layer) == 3 * forward
    assert flops(jax.checkpoint(layer)) == 4 * forward
    assert flops(layer, weight_fn=lambda x: x[:, 0].sum()) is None  # micro-batches of weight zero are not run
    filters = shape(3, 3, 4, 8)
    convolve = lambda x, w: jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    lowered = jax.jit(convolve).lower(shape(2, 16, 16, 4), filters)
    assert footprint.count_flops(lowered) == 2 * (2 * 16 * 16 * 8) * (3 * 3 * 4)


def test_of_options_the_fewest_flops_win_then_the_fewest_micro_batches():
    """Recomputing fits in fewer micro-batches, and costs more."""

    def make_step(k, option):
        kept, again = {"keeps": (2, 1), "recomputes": (1, 2), "offloads": (1, 1)}[option]

        def one(rows):
            written = [jax.lax.optimization_barrier(jnp.sin(rows + i)) for i in range(kept)]
            return sum(w.T @ w for w in written * again) / kept

        return jax.jit(lambda x: jax.lax.map(one, x.reshape(k, -1, WIDTH)).sum(0)).lower(shape(ROWS, WIDTH))

    budget = 4 * ROWS * ROW
    choose = lambda options: planned(make_step, budget=budget, options=options)
    with programs.as_shipped():
        found = choose(["keeps", "recomputes", "offloads"])
    assert found.option == "offloads"
    assert "option" in str(found)
    assert "recomputes" in str(found)
    assert {row["option"] for row in found.rows} == {"keeps", "recomputes", "offloads"}


# Devices, targets, builders.


def test_several_devices_share_a_micro_batch():
    def make_step(num_microbatches, target):
        loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
        return plan.of_loss(loss, optax.sgd(0.1), shape(WIDTH, WIDTH), shape(ROWS, WIDTH), reduce_axes="data")(
            num_microbatches, target
        )

    found = planned(make_step, budget="1GB", num_devices=4, candidates=[2])
    assert (found.num_devices, found.sizes, found.rows[0]["rows"]) == (4, (128, 128), 32)
    assert found.rows[0]["arguments"] == WIDTH * ROW + ROWS // 4 * ROW  # those of one device
    assert "32 a device" in str(found)


@pytest.mark.parametrize("name", programs.installed("h100", "v5e:2x4"))
def test_a_target_that_is_not_here(name):
    on = programs.target(name)
    alone = on.one()
    make_step = lambda num_microbatches, target: lower(num_microbatches, target)
    found = planned(make_step, target=alone, candidates=[1])
    assert (found.num_microbatches, found.budget) == (1, on.memory)
    assert found.rows[0]["arguments"] == ROWS * ROW
    with pytest.raises(ValueError, match="must lower for the target.*a parameter `target` is given it"):
        planned(target=alone)


def test_a_plan_for_here_of_a_step_for_elsewhere():
    """And the other way round: the devices are compared."""
    here = optax_accum.accelerators.target(None, 1)
    other = optax_accum.accelerators.Target("other", tuple(jax.devices()[1:2]), 10**9)
    with pytest.raises(ValueError, match="it was for 1 x cpu, and 'other' is 1 x cpu"):
        planned(target=other)
    assert planned(lambda k: lower(k, other), target=other).num_microbatches == 1
    assert planned(lambda k: lower(k, here), budget="1GB").num_microbatches == 1


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
    of_linen = plan.of_step(
        lambda k: optax_accum.flax.linen.train_step(fun, num_microbatches=k),
        jax.eval_shape(state),
        batch,
        jax.random.key(0),
    )
    of_nnx = plan.of_step(
        lambda k: optax_accum.flax.nnx.train_step(lambda model, x: jnp.mean(model(x) ** 2), num_microbatches=k),
        *nnx.eval_shape(model),
        batch,
        batch_argnums=2,
    )
    params = WIDTH * ROW + ROW
    for make_step in (of_linen, of_nnx):
        found = planned(make_step, candidates=[2], budget="1GB")
        assert 0 <= found.rows[0]["arguments"] - params - ROWS * ROW < 64  # and a few scalars


# What is refused, and what helps.


SIZES = [("80GB", 80e9), ("7.5 GiB", 7.5 * 2**30), ("512 MiB", 2**29), (1e9, 1e9), ("2e9", 2e9), (".5GB", 5e8)]
SIZES += [("5.GB", 5e9), (np.int64(10**9), 1e9), (np.float32(1e9), 1e9)]


@pytest.mark.parametrize(("budget", "size"), SIZES)
def test_a_budget(budget, size):
    assert budgets.as_bytes(budget) == size


@pytest.mark.parametrize(
    "budget", [0, -1, "0GB", "-3 GB", float("nan"), "much", "", ".", "80 GX", True, [1], "8i"], ids=repr
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
    (tmp_path / "proc/self/cgroup").unlink()
    assert budgets._free() == 8_000_000 * 1024


def test_a_budget_below_the_arguments_alone():
    with pytest.raises(ValueError, match="must hold what the step is given.*No number.*Donate.*FSDP.*offload"):
        planned(budget=ROWS * ROW // 2)


def test_nothing_fits():
    budget = ROWS * ROW + WIDTH * ROW + 100
    with pytest.raises(
        ValueError, match=r"Nothing fits: the smallest peak is.*budget of.*jax.checkpoint.*FSDP"
    ) as error:
        planned(budget=budget)
    assert "nothing fits." in error.value.__notes__[0]


def raises(k):
    raise KeyError("nothing here")


def test_builders_that_do_not_build():
    with pytest.raises(ValueError, match=r"make_step\(1\) must return.*raised KeyError.*candidates="):
        planned(raises)
    only_divisors = lambda k: lower(k)  # a reshape fails for 3
    with pytest.raises(ValueError, match=r"make_step\(3\).*raised TypeError"):
        planned(only_divisors, budget="1GB", candidates=[3])
    with pytest.raises(TypeError, match=r"must return a lowered step: it returned NoneType. Return jax.jit"):
        planned(lambda k: None)
    with pytest.raises(TypeError, match="it returned Compiled"):
        planned(lambda k: lower(k).compile())


def test_a_builder_that_ignores_the_number():
    budget = ROWS * ROW + WIDTH * ROW + 100
    with pytest.raises(ValueError, match="1 and 256 micro-batches are the same program, so all cost the same. Pass"):
        planned(lambda k: lower(1), budget=budget)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"candidates": [ROWS + 1]}, ValueError, f"There must be a row for each.*Pass numbers from 1 to {ROWS}"),
        ({"candidates": []}, ValueError, "There must be a row for each"),
        ({"candidates": [0]}, ValueError, "candidates must be an integer >= 1"),
        ({"rows": 0, "candidates": None}, ValueError, "global_batch must be an integer >= 1"),
        ({"safety": 0}, ValueError, "safety must be a number above 0 and at most 1.*Pass 0.9"),
        ({"safety": 1.5}, ValueError, "safety must be a number above 0"),
        ({"options": []}, ValueError, "options must be a sequence"),
        ({"options": "full"}, ValueError, "options must be a sequence"),
        ({"num_devices": 0}, ValueError, "num_devices must be an integer >= 1"),
        ({"num_devices": 99}, ValueError, "There are 8 devices here, not num_devices=99"),
        ({"target": "h1000"}, ValueError, "The target must be one of a100"),
        ({"max_compilations": 0}, ValueError, "max_compilations must be an integer >= 1"),
        ({"max_compilations": 1}, ValueError, "max_compilations must be at least 2.*max_compilations=1. Pass 6"),
        ({"safety": "0.9"}, TypeError, "safety must be a number above 0 and at most 1: safety='0.9'. Pass 0.9"),
        ({"safety": math.nan}, ValueError, "safety must be a number above 0"),
    ],
    ids=str,
)
def test_what_cannot_be_asked(options, error, says):
    with pytest.raises(error, match=says):
        planned(**options)


def test_a_target_has_as_many_devices_as_it_has():
    here = optax_accum.accelerators.target(None, 2)
    with pytest.raises(ValueError, match="num_devices=3, and cpu has 2. Leave it out"):
        planned(target=here, num_devices=3)


def test_a_backend_without_memory_analysis(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: None)
    with pytest.raises(RuntimeError, match='memory analysis, and that of cpu gives none.*target="h100"'):
        planned(budget="1GB")


def test_a_compiler_that_stops_for_want_of_memory(monkeypatch):
    """As that of a TPU does; what it says counts."""
    says = "RESOURCE_EXHAUSTED: E1000: the total memory required for HLO temporaries (48.03G) exceeds available HBM"
    compile_ = optax_accum.accelerators.Target.compile

    def stops(self, lowered):
        if "tensor<1x256x128xf32>" in lowered.as_text():
            raise jax.errors.JaxRuntimeError(says)
        return compile_(self, lowered)

    monkeypatch.setattr(optax_accum.accelerators.Target, "compile", stops)
    found = planned(budget="15GB", candidates=[1, 2, 4])
    assert found.num_microbatches == 2
    assert found.rows[0]["refused"]
    assert found.rows[0]["peak"] == pytest.approx(48.03 * 2**30)
    assert ">51.57 GB" in str(found)
    assert footprint._needed("RESOURCE_EXHAUSTED: no more") == math.inf
    monkeypatch.setattr(optax_accum.accelerators.Target, "compile", raises_other)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        planned(lambda k: lower(k, scale=3.0), budget="15GB")


def raises_other(self, lowered):
    raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_options_of_of_loss_that_are_its_own():
    with pytest.raises(ValueError, match="of_loss sets this itself: num_microbatches=4. Leave it out"):
        plan.of_loss(lambda w, x: x @ w, optax.sgd(0.1), shape(3), shape(4, 3), num_microbatches=4)


def test_when_compilations_are_spent_the_plan_says_so():
    with programs.as_shipped():
        found = planned(budget=ROWS * ROW + 2 * WIDTH * ROW + ROWS * ROW // 3, max_compilations=2)
    assert (found.num_microbatches, found.open) == (ROWS, True)
    assert "Fewer micro-batches may fit, too" in str(found)
    assert not table().open


# The picture, the bar, the command.


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
    assert "compiling" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    planned(budget="1GB", progress=True)
    assert capsys.readouterr().err == ""


def told(capsys, *words):
    plan_command.main(words)
    return capsys.readouterr().out


def test_the_command(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    words = ("tests.test_plan:lower", "--global-batch", "256", "--budget", "1GB", "--candidates", "1", "2")
    assert "1 micro-batch." in told(capsys, *words, "--plot", str(picture))
    assert picture.read_bytes()[:4] == b"\x89PNG"
    found = json.loads(told(capsys, *words, "--json"))
    assert (found["num_microbatches"], found["sizes"], found["budget"]) == (1, [256], 10**9)
    assert found["rows"][0]["arguments"] == ROWS * ROW
    assert "h100" in told(capsys, "--target")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tests.test_plan", "--global-batch", "8"], '"module:name".*Write train:make_step'),
        (["no_such:make_step", "--global-batch", "8"], "There is no module 'no_such'.*PYTHONPATH"),
        (["tests.test_plan:lowered", "--global-batch", "8"], "has no .lowered.*lower"),
        (["tests.test_plan:raises", "--global-batch", "8", "--budget", "1GB"], "KeyError"),
        (["tests.test_plan:lower", "--global-batch", "8", "--budget", "none"], "The budget must be"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_the_command_says_what_is_wrong(words, says):
    with pytest.raises(SystemExit, match=says):
        plan_command.main(words)


def test_the_command_as_it_is_called():
    """Its help shows an example that runs, and loading it warns of nothing."""
    call = [sys.executable, "-W", "error", "-m", "optax_accum.plan"]
    done = subprocess.run([*call, "--help"], capture_output=True, text=True, check=True)
    (example,) = (line.split() for line in done.stdout.splitlines() if line.startswith("  python -m"))
    assert example[:4] == ["python", "-m", "optax_accum.plan", "examples.will_it_fit:make_step"]
    assert callable(named.load(example[3]))
    assert planning.plan_microbatches is optax_accum.plan_microbatches
