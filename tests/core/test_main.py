"""`python -m optax_accum`: what there is, and what a bug report needs."""

import subprocess
import sys

import jax
import pytest

import optax_accum
from optax_accum import __main__ as command
from tests import ROOT


@pytest.fixture
def said(monkeypatch, capsys):
    jax.devices()  # which ends the process where XLA does not know a flag
    monkeypatch.setenv("XLA_FLAGS", "--xla_some_flag")
    monkeypatch.setenv("MY_SECRET", "hidden")
    monkeypatch.setattr(sys, "argv", ["optax_accum"])
    assert command.main() == 0
    return capsys.readouterr().out


def test_it_names_all_there_is(said):
    names, _ = said.split("For a bug report:")
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
    assert "devices: Unable to initialize backend 'cuda'" in command._diagnostics()


@pytest.mark.sweep
def test_it_runs_without_flax():
    program = "import sys, runpy; sys.modules['flax'] = None; runpy.run_module('optax_accum', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 'pip install "flax>=0.11.2"' in done.stdout
    assert "For a bug report:" in done.stdout


@pytest.mark.sweep
def test_whoever_reads_may_stop():
    """`python -m optax_accum | head`: no traceback, and no warning."""
    command = [sys.executable, "-W", "error", "-m", "optax_accum"]
    call = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    with call:
        call.stdout.close()
        assert (call.stderr.read(), call.wait()) == ("", 141)
