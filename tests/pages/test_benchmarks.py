"""What `python -m benchmarks` says and refuses. It times nothing here."""

import math
import os
import re
import signal
import subprocess
import sys
import time
import types

import numpy as np
import optax
import pytest

from benchmarks import __main__ as entry
from benchmarks import (
    _code,
    _in_place,
    _measure,
    _one_device,
    _pages,
    _problems,
    _results,
    accelerators,
    code_size,
    compile_time,
    on_device,
    packing,
    peers,
    plan_search,
    planning,
)
from benchmarks._contenders import JAX_WAYS, OURS, TORCH, WHOLE, Torch
from optax_accum.accelerators import _targets as targets
from tests import ROOT


def run(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", *arguments]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


@pytest.fixture(scope="module")
def table():
    """A small table, from two processes."""
    return peers.measured(peers.Case("MLP", 2, 16, (WHOLE, peers.OURS)), seconds=0)


@pytest.mark.sweep
def test_each_way_is_measured_in_a_process_of_its_own(table):
    assert list(table.rows) == [WHOLE, peers.OURS]
    for row in table.rows.values():
        assert row.seconds > 0 < row.compile
        assert row.peak > row.program > table.copy
    assert table.rows[WHOLE].difference == 0 < table.rows[peers.OURS].difference < _problems.TOLERANCE


@pytest.mark.sweep
def test_a_way_that_cannot_run_says_why_and_has_no_number(table, monkeypatch):
    monkeypatch.setattr(Torch, "needs", ("a_package_that_nobody_has",))
    problem = _problems.make("MLP with Muon", size=16)
    assert peers.why_not(TORCH, problem) == "not run: a_package_that_nobody_has is not installed"
    assert peers.why_not("optax.apply_every", problem) == "n/a: adds up k updates of the optimizer"
    assert peers.why_not(peers.OURS, problem) == ""
    absent = table._replace(case=table.case._replace(ways=(*table.rows, TORCH)), absent={TORCH: "not run: x"})
    (line,) = [line for line in peers._rendered(absent).splitlines() if TORCH in line]
    assert not any(digit in line for digit in "0123456789")


def test_ways_that_would_not_fit_together_run_one_by_one(monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 6_000_000}.get)  # 24 GB
    names = list(peers.WAYS)
    assert peers._groups(names, _problems.make("MLP", size=16)) == [names]
    assert peers._groups(names, _problems.make("model of 2000 leaves")) == [[name] for name in names]


def test_another_update_ends_the_run_before_a_time_is_printed():
    start = {"a": np.zeros(2), "b": np.zeros(1)}
    expected = {"a": np.array([1.0, 2.0]), "b": np.array([1.0])}
    near = _problems.difference({"a": expected["a"] + 1e-6, "b": expected["b"]}, expected, start)
    _problems.judge("a case", {"near": near})
    lost = {"a": expected["a"], "b": expected["b"] * 1.5}
    spoiled = {"a": expected["a"] * np.nan, "b": expected["b"]}
    for wrong in (
        _problems.difference(lost, expected, start),
        _problems.difference(spoiled, expected, start),
        _problems.difference(expected, expected, expected),  # nothing was trained: nothing is compared
    ):
        with pytest.raises(SystemExit, match="a case: other is another update: difference="):
            _problems.judge("a case", {"other": wrong})


def test_a_process_that_fails_says_why_in_one_line():
    process = peers.Process(peers.OURS, "MLP", 2, 16)
    process._process.kill()
    process._process.wait()
    with pytest.raises(SystemExit, match="ours: apply_gradients: its process ended: "):
        process.begin()
    process.close()


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["across calls: apply_gradients, static flush", "within a call: optax.microbatch"])
def test_what_an_accelerator_is_asked_runs_here(name):
    facts = on_device.measured(name, small=True)
    assert facts["bytes"] > 0 < facts["foretold"]
    assert on_device.table(name.split(":")[0], {name: facts}, 1e-12).count("n/a") == 2  # a CPU keeps no count
    other = facts | {"norms": [2 * norm for norm in facts["norms"]]}
    assert on_device.others({name: facts, "other": other}) == ["other"]


# What rows need beyond their goals, by the reasons that docs/accelerators.md gives; 1 is 16 layers.
REASONS = {
    "Layers one by one, cast before": (r"one by one, cast before: in place|v5e.*one by one, float32: in place", 0.51),
    "Statistics: up to 0.13 on an H100": (r"h100.*: with statistics", 0.13),
    "up to 0.06 on a CPU": (r"cpu.*: with statistics", 0.06),
    "A `switch` over layers, before JAX 0.12: 0.95": (r"JAX 0\.(9|10)\..*a switch.*: in place", 0.95),
}
GOALS = {"in place": ("one micro-batch", 0.05), "with statistics": ("in place", 0.02)}


def _misses(record):
    """By how much rows of the record miss their goals."""
    for name, facts in record.items():
        for case, row in facts.get("in place", {}).items():
            for way, (base, goal) in GOALS.items():
                more = row[f"{way}, P"] - row[f"{base}, P"]
                if more > goal + 1e-9:
                    yield f"{name}: {case}: {way}", more


def test_what_needs_more_memory_in_place_is_what_the_page_explains():
    """Goals: no more than one micro-batch and 0.05 P; with statistics 0.02 P more. Each reason is needed."""
    record = accelerators.record()
    assert {name.split(", lib")[0] for name in record} == {
        *("h100, JAX 0.9.2", "h100, JAX 0.10.0", "h100, JAX 0.12.0.1", "v5e:4x4, JAX 0.12.0.1", "cpu, JAX 0.12.0.1"),
        "h100, JAX 0.11.0",  # the oldest that overlaps: that alone
    }
    record.pop("h100, JAX 0.11.0")
    assert all(len(facts["in place"]) == 3 * len(_in_place.CASES) + 3 for facts in record.values())
    page, needed = (accelerators.FACTS.parents[1] / "docs/accelerators.md").read_text(), set()
    for where, more in _misses(record):
        (reason,) = (reason for reason, (rows, most) in REASONS.items() if re.search(rows, where))
        assert more <= REASONS[reason][1] + 1e-9, where
        needed.add(reason)
    assert needed == set(REASONS)
    assert all(reason in page for reason in REASONS)


def test_in_place_no_tree_of_gradients_stands_beside_the_sum():
    """A tied embedding in bfloat16 at k = 4, checkpointed or not, and norms of a float32 stack, by all compilers."""
    record = accelerators.record()
    cases = {
        (_in_place.FOUR, "in place"): 0.39,
        (_in_place.KEPT, "in place"): 0.39,
        (_in_place.CHOSEN, "in place"): 0.45,
        ("scan, float32", "with statistics"): 0.85,
    }
    for (case, way), gain in cases.items():
        rows = {name: facts["in place"][case] for name, facts in record.items() if "in place" in facts}
        if case == _in_place.CHOSEN:  # into branches sinks go from JAX 0.12 on
            rows = {name: row for name, row in rows.items() if not re.search(r"JAX 0\.(9|10)\.", name)}
        assert {name[:4] for name in rows} == {"h100", "v5e:", "cpu,"}
        for name, row in rows.items():
            assert row[f"{way}, P"] <= row["by hand, P"] - gain, (name, case)


@pytest.mark.sweep
def test_an_update_of_other_micro_batches_has_no_time(monkeypatch):
    """One that forgets: the optimizer is called in each micro-step."""
    inner = optax.adamw(1e-3)
    forgets = lambda small: on_device._way([_one_device.alone(inner)], inner, on_device._matrices(small), lambda p: p)
    monkeypatch.setitem(on_device.WAYS, "across calls: forgets", forgets)
    ways = ("across calls: optax.MultiSteps", "across calls: apply_gradients", "across calls: forgets")
    found = {name: on_device.measured(name, small=True) for name in ways}
    assert on_device.others(found) == ["across calls: forgets"]


def test_an_accelerator_that_is_not_here_is_not_measured():
    with pytest.raises(SystemExit, match="JAX finds a CPU"):
        on_device.measured("across calls: update", small=False)


@pytest.mark.skipif(not targets.DRIVER.exists(), reason="no NVIDIA driver here: nothing of this runs on a GPU")
def test_on_the_accelerator_that_is_here():
    """Its own order of a scan's gradients, its own count of bytes."""
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, "-m", "benchmarks.on_device", "--small"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "platform cpu" in done.stdout:
        pytest.skip("JAX has no plugin for the GPU that is here")
    assert done.returncode == 0, done.stderr
    assert "n/a" not in done.stdout


def printed(name, text):
    return _results.part(name, [], f"## {name}\n\n* device: here\n\n{text}")


def test_a_part_is_replaced_and_the_others_stay():
    texts = {kind: _results.section(kind, [printed("peers", kind)]) for kind in ("cpu", "gpu")}
    page = _results.merged("", texts)
    assert page.count("* device: ") == 2  # one for each section: that of the part is gone
    assert "### peers" in page
    assert "--quick" in _results.section("cpu", [printed("peers", "a sample")], quick=True)
    assert "--quick" not in page
    new = {"cpu": _results.section("cpu", [printed("calls", "new")]), "compiled": _results.section("compiled", [])}
    again = _results.merged(page, new)
    order = [again.index(f"## {title}\n") for title in ("CPU time", "GPU time", "Compiled facts by target")]
    assert order == sorted(order)
    assert again.index("\ncpu\n") < again.index("\nnew\n") < order[1]
    again = _results.merged(again, {"cpu": _results.section("cpu", [printed("peers", "newer")])})
    assert "\ncpu\n" not in again
    assert again.index("\nnewer\n") < again.index("\nnew\n")
    assert _results.changed(again) == []
    elsewhere = again.replace("* host: ", "* host: another ", 1)
    assert "\nnew\n" not in _results.merged(elsewhere, {"cpu": _results.section("cpu", [printed("peers", "here")])})


def test_what_a_hand_has_changed_is_found():
    page = _results.merged(
        "", {"counts": _results.section("counts", [printed("loops", "| 50 |"), printed("verify_step", "")])}
    )
    assert _results.changed(page) == []
    assert _results.changed(page.replace("50", "51")) == ["loops"]
    assert _results.changed(page.replace("\n\nPrinted by `python -m benchmarks.loops` at", "")) == ["loops"]
    assert _results.changed(f"{page}\n\n### More\n\n| 1 |") == ["More"]


RESULTS = (accelerators.FACTS.parent / "RESULTS.md").read_text()


def test_the_results_are_what_their_commands_printed():
    assert _results.changed(RESULTS) == []
    commands = re.findall(r"^Printed by `python -m benchmarks\.(\w+)", RESULTS, re.MULTILINE)
    assert len(commands) == len(set(commands)) > 10
    assert set(commands) <= set(entry.found())


def test_the_facts_of_compilers_are_those_of_the_record():
    """The same JSON as on the pages; each kind of the code that told it."""
    assert str(entry._of_compilers()) in RESULTS


# Benchmarks that have changed since they were run. `python -m benchmarks NAME` runs one again: then its name goes.
OUTDATED = {"on_device", "many_leaves"}


def test_a_result_is_of_the_benchmark_that_is_there():
    assert set(_results.outdated(RESULTS)) == OUTDATED


def test_those_that_have_changed_can_be_run_alone(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--outdated"])
    assert set(entry._options().names) == OUTDATED


def test_a_benchmark_that_has_changed_since_is_found(monkeypatch, tmp_path):
    """With git, and from the files alone where there is none."""
    section = lambda: _results.section("counts", [printed("features", "| 1 |")])
    monkeypatch.setattr(_code, "commit", lambda: "1ff67c9 of 2026-11-28, with changes")
    page = _results.merged("", {"counts": section()})
    assert "\n\nPrinted by `python -m benchmarks.features` at commit 1ff67c9 of 2026-11-28, with changes. <!-- " in page
    monkeypatch.undo()
    monkeypatch.setattr(_code, "ROOT", tmp_path)
    assert _code.commit() == "that is not known: there is no git here"
    monkeypatch.undo()
    assert _results.outdated(page) == []
    read = _code.read
    changed = lambda name: f"{read(name)}\nADDED = 1" if name == "benchmarks._problems" else read(name)
    monkeypatch.setattr(_code.digest, "__defaults__", (changed,))
    assert _results.outdated(page) == ["features"]


def test_a_digest_of_a_benchmark_is_of_its_statements():
    """In whatever module of it they stand, and in whatever order."""
    one = {
        "benchmarks.a": '"""An a."""\nfrom benchmarks import b\n\nX = 1\n',
        "benchmarks.b": "@f\ndef g(): return 2\n",
    }
    moved = {
        "benchmarks.a": "import os\nfrom benchmarks.b import g\n",
        "benchmarks.b": "X = 1\n\n@f\ndef g():  return 2",
    }
    digest = lambda sources: _code.digest("a", sources.get)
    assert digest(one) == digest(moved)
    for text, new in (("X = 1", "X = 2"), ("@f", "@h"), ("return 2", "return 3")):
        assert digest({name: source.replace(text, new) for name, source in one.items()}) != digest(one)


@pytest.mark.parametrize("path", [*dict.fromkeys(where for where, _ in _pages.TABLES.values()), "README.md"])
def test_a_table_of_a_page_is_that_of_the_results(path):
    """`python -m benchmarks._pages` writes it."""
    text = (ROOT / path).read_text()
    assert _pages.written(path, text, RESULTS) == text
    marks = [name for name, (where, _) in _pages.TABLES.items() if where == path]
    assert re.findall(r"<!-- results: (\w+) -->\n\n\|", text) == marks
    assert marks or "| time, " in text


def test_a_table_that_is_not_that_of_the_results_is_written_anew():
    text = (ROOT / "docs/tokens.md").read_text()
    assert _pages.written("docs/tokens.md", text.replace("6510 / 6470", "6511 / 6470"), RESULTS) == text


@pytest.mark.sweep
def test_compile_times_are_of_ways_that_make_one_update(monkeypatch):
    problem = _problems.make("MLP", size=16)
    assert compile_time.measured(problem, 1).shape == (1, len(compile_time.WAYS))
    monkeypatch.setattr(JAX_WAYS[OURS], "gradient", lambda way, params, *_: params)
    with pytest.raises(SystemExit, match="MLP: one of .* makes another update"):
        compile_time.measured(problem, 1)


def test_a_target_that_is_missed_is_explained():
    rows = _measure.targets_text(
        [_measure.verdict("statistics, beyond that", 2.0, 1.2, "here"), _measure.verdict("other", 0.5, 1, "")]
    )
    said = _results.body(f"## Title\n\n{rows}\n\n## Next").splitlines()
    assert next(line for line in said if "MISSED" in line).startswith("| statistics, beyond that |")
    assert [line for line in said if line.startswith("Missed: ")] == [
        f"Missed: statistics, beyond that: {_results.WHY['statistics, beyond that']}."
    ]
    assert "### Next" in said


@pytest.mark.sweep
def test_the_list_has_every_module_and_what_it_is():
    found = entry.found()
    assert next(iter(found)) == "peers"
    assert {"micro_step", "features"} < set(found)
    assert set(entry.QUICK) | set(entry.FULL) <= set(found)
    assert all(len(about) > 30 for about in found.values())


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["nothing"], "unknown: nothing. There are peers, "),
        (["--quick", "verify_step"], "not in --quick: verify_step. There are peers, "),
        (["--output", "no/such/folder/R.md"], "must be a file that can be written: no/such/folder/R.md."),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(options, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *options])
    with pytest.raises(SystemExit):
        entry.main()
    assert said in capsys.readouterr().err


def test_an_output_that_cannot_be_written_after_all_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"R\.md cannot be written: No such file or directory\."):
        _measure.write(tmp_path / "gone" / "R.md", "text")


@pytest.mark.sweep
def test_ctrl_c_ends_in_one_line():
    # A shell's background job ignores it, and so do those that it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = run("benchmarks.peers", "--models", "model of 2000 leaves")  # minutes, if nobody stops it
    signal.signal(signal.SIGINT, before)
    assert "Side by side" in process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.strip().splitlines()[-1] == "Interrupted."
    assert "Traceback" not in errors


def test_packings_are_held_to_the_fewest_on_as_many_devices():
    """Beside the longest row one of 8 fits on the other device, two do not: half of one device's two is too few."""
    found = packing._packed("long", [9, 8, 8], (16,), (1, 2))
    assert [each.buckets for each in found] == 2 * ["default", "24", "16", "8"]
    assert [(each.devices, each.fewest) for each in found[::4]] == [(1, 2), (2, 2)]
    filled, fewest, _ = packing._verdicts(found)
    assert (filled["measured"], filled["verdict"], fewest["measured"]) == (0.39, "MISSED", 1.0)


def test_what_an_accelerator_holds_is_what_it_says():
    said = {"bytes_in_use": 3, "peak_bytes_in_use": 8, "bytes_limit": 10}
    gpu = types.SimpleNamespace(platform="gpu", memory_stats=lambda: said)
    assert (planning._in_use(gpu), planning._most_in_use(gpu)) == (3, 8)


def test_plans_are_held_to_their_targets():
    row = planning.Measured("mlp", 4, True, 100, 98.0, 99.0, 7, "")
    fewer = row._replace(k=3, chosen=False, foretold=120.0, measured=130.0)
    verdicts = lambda *found: [row["verdict"] for row in planning.verdicts(found)]
    assert verdicts(row, fewer) == ["met"] * 3
    assert verdicts(row._replace(foretold=93.0), fewer._replace(measured=99.9)) == ["MISSED", "met", "MISSED"]
    assert verdicts(row._replace(measured=100.1), fewer) == ["met", "MISSED", "met"]
    assert verdicts(row) == ["met", "met", "not measured"]
    assert "| mlp " in planning._rendered([row, fewer])


@pytest.mark.sweep
def test_the_search_of_a_plan_is_held_to_brute_force():
    found = plan_search.found_of("PINN", rows=8, width=16)
    assert (found.divisors, found.wrong, found.planned) == (4, 0, True)
    bad = found._replace(answers=[(2, 8), (4, None)], planned=False)
    assert (bad.wrong, bad._replace(answers=[(2, 8)]).times, bad.times) == (2, 4, math.inf)
    verdicts = lambda each: [row["verdict"] for row in plan_search.verdicts([each])]
    assert (verdicts(found), verdicts(bad)[:2]) == (["met"] * 4, ["MISSED"] * 2)
    assert found.cells[:2] == ("PINN", "4")


def test_what_counts_as_code():
    source = '"""A module."""\n\n\ndef f(call, x=1):  # a comment\n    """Returns x."""\n    return x\n'
    files = {"a.py": source, "b.py": "", "optax_accum/plan/c.py": "x = 1", "optax_accum/batching/_packing.py": ""}
    core, products = code_size.counted(files).values()
    assert (core["files"], core["lines"], core["lines of code"], core["tokens"], core["docstrings"]) == (2, 6, 2, 12, 2)
    assert (products["files"], products["tokens"]) == (2, 3)
    assert code_size.public_options()["value_and_grad"] >= code_size.public_options()["flax.nnx.value_and_grad"] > 0
