"""`python -m optax_accum`: what there is and what a bug report needs, `plan`, `verify`."""

import json
import re
import subprocess
import sys

import jax
import pytest

import optax_accum
from optax_accum.__main__ import COMMANDS, main
from optax_accum._command import info, named
from optax_accum._command import plan as plan_command
from tests import ROOT
from tests.plan.test_plan import ROW, ROWS


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """What is loaded by name adds a folder to it."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def raising(error):
    def raises(*args, **options):
        raise error

    return raises


# What there is.


@pytest.fixture
def said(monkeypatch, capsys):
    jax.devices()  # which ends the process where XLA does not know a flag
    monkeypatch.setenv("XLA_FLAGS", "--xla_some_flag")
    monkeypatch.setenv("MY_SECRET", "hidden")
    assert main([]) == 0
    return capsys.readouterr().out


def test_it_names_all_there_is(said):
    names, _ = said.split("For a bug report:")
    assert "optax_accum plan --help" in names
    assert "optax_accum verify --help" in names
    for name in (*dir(optax_accum), "Target", "shard_over"):
        assert name == "__version__" or f"{name} " in names, name


def test_it_tells_versions_devices_and_flags(said):
    _, report = said.split("For a bug report:")
    for fact in (optax_accum.__version__, f"jax {jax.__version__}", "optax ", "cpu, 8 x cpu", "--xla_some_flag"):
        assert fact in report, fact
    assert "MY_SECRET" not in said


def test_devices_that_fail_are_what_it_tells(monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", devices)
    assert "devices: Unable to initialize backend 'cuda'" in info._diagnostics()


def test_it_runs_without_flax():
    program = "import sys, runpy; sys.modules['flax'] = None; runpy.run_module('optax_accum', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 'pip install "flax>=0.11.2"' in done.stdout
    assert "For a bug report:" in done.stdout


# Commands.


def examples_of(name, capsys):
    """Returns the examples in the help of a command, or in that of all."""
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"] if name else ["--help"])
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("  python -m")]


def test_the_help_shows_examples_of_two_commands(capsys):
    shown = examples_of(None, capsys)
    assert len(shown) == 2
    assert {*shown} <= {example for name in COMMANDS for example in examples_of(name, capsys)}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_help_shows_an_example_that_runs(name, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (example,) = map(str.split, examples_of(name, capsys))
    assert example[:3] == ["python", "-m", "optax_accum"]
    quick = ["--candidates", "64"] if "plan" in example else []
    assert main([*example[3:], *quick]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 4


@pytest.mark.sweep
def test_it_is_called_without_a_warning():
    call = [sys.executable, "-W", "error", "-m", "optax_accum", "verify", "examples.verified_step:make_step"]
    done = subprocess.run(call, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith("Holds: ")


def test_ctrl_c_ends_a_command_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(plan_command, "plan_microbatches", raising(KeyboardInterrupt()))
    assert main(["plan", "tests.plan.test_plan:lower", "--global-batch", "8"]) == 130
    assert capsys.readouterr().err == "\nInterrupted.\n"


def test_whoever_reads_may_stop():
    """`python -m optax_accum | head`: no traceback, and no warning."""
    command = [sys.executable, "-W", "error", "-m", "optax_accum"]
    call = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    with call:
        call.stdout.close()
        assert (call.stderr.read(), call.wait()) == ("", 141)


def test_a_file_is_what_it_is_whatever_its_name(tmp_path):
    """`types` is a module of Python, `talks` one of another folder."""
    kept = {*sys.modules}
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name in ("types", "steps"):
            file = tmp_path / folder / f"{name}.py"
            file.write_text(f"from tests.plan.test_plan import *\nmine = lambda k: {folder!r}\n")
            assert named.load(f"{file}:mine")(1) == folder
            assert named.load(f"{file}:mine")(1) == folder
    for name in {*sys.modules} - kept:
        del sys.modules[name]
    with pytest.raises(ValueError, match="There is no module 'gone'"):
        named.load(f"{tmp_path}/gone.py:mine")


# plan

WORDS = ("plan", "tests.plan.test_plan:lower", "--global-batch", "256", "--candidates", "1", "2", "--budget")


def test_plan_prints_a_table_or_json(capsys):
    assert main([*WORDS, "1GB"]) == 0
    assert "1 micro-batch." in capsys.readouterr().out
    assert main([*WORDS, "1GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_microbatches"], found["sizes"], found["budget"]) == (1, [256], 10**9)
    assert found["rows"][0]["arguments"] == ROWS * ROW
    assert found["peak"] == found["rows"][0]["peak"]


def test_json_is_all_that_is_printed(capsys, tmp_path):
    """Whatever the user's module prints; and where nothing fits, too."""
    text = "print('hello')\nfrom tests.plan.test_plan import lower\ndef make(k):\n    print(k)\n    return lower(k)\n"
    (tmp_path / "talks.py").write_text(text)
    words = [word.replace("tests.plan.test_plan:lower", f"{tmp_path}/talks.py:make") for word in WORDS]
    assert main([*words, "1GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_microbatches"] == 1
    assert main([*words, "220kB", "--json"]) == 1
    said = capsys.readouterr()
    assert "Nothing fits: the smallest peak is" in said.err
    found = json.loads(said.out)
    assert (found["num_microbatches"], found["sizes"], found["peak"]) == (None, None, None)
    assert [row["fits"] for row in found["rows"]] == [False, False]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("tests.plan.test_plan --global-batch 8", '"module:name".*Write train:make_step'),
        ("no_such:make_step --global-batch 8", "There is no module 'no_such'.*PYTHONPATH"),
        ("tests.plan.test_plan:lowered --global-batch 8", "has no .lowered.*It has shape, lower, divisors, planned"),
        ("examples.will_it_fit:step --global-batch 8", "has no .step.*It has params, loss, make_step, main\\."),
        ("tests.plan.test_plan:ROWS --global-batch 8", "make_step must be a function.*make_step=256"),
        ("tests.plan.test_plan:lower --global-batch 0", "global_batch must be an integer >= 1: global_batch=0"),
        ("tests.plan.test_plan:lower --global-batch 8 --budget=-3GB", "above zero: budget='-3GB'"),
        ("tests.plan.test_plan:raises --global-batch 8 --budget 1GB", "KeyError"),
        ("tests.plan.test_plan:lower --global-batch 8 --budget none", "The budget must be"),
        ("tests.plan.test_plan:lower --global-batch 8 --target h1000", "The target must be one of a100"),
    ],
)
def test_plan_says_what_is_wrong(words, says, capsys):
    assert main(["plan", *words.split()]) == 2
    assert re.search(says, capsys.readouterr().err)


BROKEN = {
    "x = (": r"broken \(of '.*broken.py:make_step'\) must be a module that Python can import: it raised SyntaxError: .*",
    "raise KeyError('gone')": ".*it raised KeyError: 'gone'",
    "import no_such_module": ".*it raised ModuleNotFoundError: No module named 'no_such_module'",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_module_that_is_broken_is_named(text, tmp_path, capsys):
    (tmp_path / "broken.py").write_text(text)
    assert main(["plan", f"{tmp_path}/broken.py:make_step", "--global-batch", "8"]) == 2
    said, place = capsys.readouterr().err.splitlines()
    assert re.fullmatch(BROKEN[text], said)
    assert place.startswith(f"At {tmp_path}/broken.py, line 1")


# verify


@pytest.mark.parametrize(("name", "status"), [("sound", 0), ("broken", 1), ("missing", 2)])
def test_verify(name, status, tmp_path, monkeypatch, capsys):
    (tmp_path / "steps_of_mine.py").write_text(
        "from tests.verify.test_verify_step import BATCH as batch, FAULTS, Loop\nsound, broken = Loop(), FAULTS['divided twice']"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "steps_of_mine", raising=False)
    assert main(["verify", f"steps_of_mine:{name}", "--every", "3"]) == status
    said = capsys.readouterr()
    assert ("has no 'missing'" in said.err) == (status == 2)
    assert ("Cause: divided twice" in said.out) == (status == 1)


OF_USERS = {
    "no_such_name": "NameError",
    "{}['gone']": "KeyError",
    "1 / 0": "ZeroDivisionError",
    "W.gone": "AttributeError",
}


@pytest.mark.parametrize("line", OF_USERS)
def test_an_error_of_the_users_own_is_said_with_its_line(line, tmp_path, capsys):
    """It is no difference: the status is 2, whatever its type."""
    text = "from tests.verify.test_verify_step import BATCH as batch, Loop, W\ndef make_step(every):\n"
    (tmp_path / "mine.py").write_text(
        f"{text}    def step(carry, rows):\n        {line}\n    return step, {{'w': W}}\n"
    )
    assert main(["verify", f"{tmp_path}/mine.py:make_step"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{OF_USERS[line]}: ")
    assert f"At {tmp_path}/mine.py, line 4, in step." in said
    del sys.modules["mine"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("BATCH", "must be a function: tests.verify.test_verify_step:BATCH is a dict. Name make_step."),
        ("Loop --rtol nan", "rtol must be a finite number above 0: rtol=nan."),
    ],
)
def test_verify_says_what_is_wrong(words, says, capsys):
    step = f"tests.verify.test_verify_step:{words}".split()
    assert main(["verify", *step, "--batch", "tests.verify.test_verify_step:BATCH"]) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
