"""The demo from the command line: what it prints and draws, and what it refuses."""

import contextlib
import dataclasses
import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure
from matplotlib.text import Text

from examples import demo

WAYS = ["whole batch", "accumulate_gradients", "value_and_grad", "optax.MultiSteps"]


class Run(NamedTuple):
    code: int
    out: str
    err: str
    picture: Path
    ways: list[demo.Way]
    drawn: str  # the words in the picture


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """One run of the command in this process, with the ways that it compared."""
    picture, ways, figures = tmp_path_factory.mktemp("demo") / "picture.png", [], []
    train, save = demo.run, Figure.savefig
    options = ["--batch-size", "64", "--every", "4", "--epochs", "2", "--output", str(picture)]
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        patch.setattr(demo, "run", lambda settings: ways.extend(train(settings)) or ways)
        patch.setattr(Figure, "savefig", lambda self, *to, **as_: figures.append(self) or save(self, *to, **as_))
        code = demo.main(options)
    drawn = " ".join(text.get_text() for figure in figures for text in figure.findobj(Text))
    return Run(code, out.getvalue(), err.getvalue(), picture, ways, drawn)


def png_size(path):
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def table_rows(text):
    """Returns the columns of each row of the printed table, by the name of the way."""
    pattern = rf"^({'|'.join(map(re.escape, WAYS))}) +([\d.]+)% +(\S+) +([\d.]+) +([\d.]+) MB$"
    return {name: list(map(float, columns)) for name, *columns in re.findall(pattern, text, re.MULTILINE)}


def test_it_prints_a_table_and_draws_a_picture(small):
    assert small.code == 0
    rows = table_rows(small.out)
    assert list(rows) == WAYS
    accuracies, differences, milliseconds, megabytes = zip(*rows.values(), strict=True)
    assert min(accuracies) > 50
    assert differences[0] == 0
    assert max(differences) < 1e-4
    assert min(milliseconds) > 0
    assert megabytes[0] > 1.5 * max(megabytes[1:3]) > 0
    assert "44/44" in small.err  # the progress bar: 2 epochs of 1437 // 64 batches
    assert str(small.picture) in small.out
    width, height = png_size(small.picture)
    assert width > 1000
    assert height > 400
    assert small.picture.stat().st_size > 20_000
    assert all(f"{package.__name__} {package.__version__}" in small.drawn for package in (jax, optax))


def test_the_ways_train_and_end_at_the_same_parameters(small):
    whole, *others = small.ways
    initial = jax.jit(demo._model().init)(jax.random.key(0), np.zeros((1, 8, 8, 1), np.float32))
    assert demo._apart(whole.params, initial) > 1e-2
    assert whole.accuracy > 0.5
    assert whole.losses[-1] < whole.losses[0] / 2
    for way in others:
        assert demo._apart(way.params, whole.params) < 1e-4
        np.testing.assert_allclose(way.losses, whole.losses, rtol=1e-4)
    assert [len(way.losses) for way in small.ways] == [44] * 5


def test_the_accumulator_of_each_way_is_counted(small):
    whole, accumulated, _, multi_steps, _ = small.ways
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(whole.params)) / 1e6
    temporary = lambda way: way.step.memory_analysis().temp_size_in_bytes / 1e6
    for way in (accumulated, multi_steps):
        assert way.megabytes - temporary(way) == pytest.approx(parameters, rel=1e-3)
    assert whole.megabytes == temporary(whole)


def test_it_runs_as_a_module():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "examples.demo", "--every", "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--every must divide --batch-size 256: 7. Try --every 8." in done.stderr


def test_the_explanation_names_what_is_larger_than_rounding(small):
    *four, shuffled = small.ways
    assert "More than 100 times" not in demo._explanation(four, shuffled)
    params = {"far": ravel_pytree(four[1].params)[0] + 1.0}
    far = dataclasses.replace(four[1], params=params)
    assert "More than 100 times as far: accumulate_gradients." in demo._explanation([four[0], far, four[3]], shuffled)
    diverged = dataclasses.replace(shuffled, params={"far": params["far"] * math.nan})
    assert "diverged" in demo._explanation(four, diverged)


@pytest.mark.slow
@pytest.mark.sweep
def test_an_optimizer_that_reads_the_loss_gets_the_mean_of_the_window():
    settings = demo.Settings(batch_size=64, every=2, epochs=1, optimizer="polyak_sgd", learning_rate=1.0)
    whole, accumulated, _, multi_steps, _ = demo.run(settings)
    assert demo._apart(accumulated.params, whole.params) < 1e-4 < demo._apart(multi_steps.params, whole.params)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch-size 0", "argument --batch-size: must be an integer of at least 1: '0'. Leave the option out"),
        ("--batch-size 2.5", "argument --batch-size: must be an integer of at least 1: '2.5'"),
        ("--every -1", "argument --every: must be an integer of at least 1: '-1'"),
        ("--every many", "argument --every: must be an integer of at least 1: 'many'"),
        ("--epochs 0", "argument --epochs: must be an integer of at least 1: '0'"),
        ("--learning-rate 0", "argument --learning-rate: must be a finite number above 0: '0'"),
        ("--learning-rate nan", "argument --learning-rate: must be a finite number above 0: 'nan'"),
        ("--seed -1", "argument --seed: must be an integer from 0 to 2**32 - 1: '-1'"),
        ("--every 7", "--every must divide --batch-size 256: 7. Try --every 8."),
        ("--batch-size 2048", "--batch-size must be at most the 1437 training rows: 2048. Make it smaller."),
        ("--optimizer adm", "must be an optimizer that optax exports: adm. Try one of these: adam,"),
        ("--optimizer chain", "must be an optimizer that optax exports: chain. Try one of these: adabelief,"),
        ("--optimizer scale_by_rprop", "must be an optimizer that optax exports: scale_by_rprop."),
        ("--optimizer lbfgs", "must run on a learning rate, gradients and a loss alone: lbfgs ("),
        ("--output no/such/folder/demo.png", "--output must be a file that can be written: no/such/folder/demo.png."),
        ("--output .", "--output must be a file that can be written: ."),
    ],
)
def test_bad_options_exit_with_2_and_say_why(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        demo.main(arguments.split())
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


@pytest.mark.parametrize("option", ["every 8", "optimizer adam", "seed 0", "learning-rate 0.1", "batch-size 1437"])
def test_the_remedies_are_accepted(option):
    name, value = option.split()
    every = ["--every", "1"] if name == "batch-size" else []
    options = vars(demo._parser().parse_args([f"--{name}", value, *every]))
    settings = demo.Settings(**{option: given for option, given in options.items() if option != "processes"})
    demo._check(settings)  # raises where a remedy is none
    assert str(getattr(settings, name.replace("-", "_"))) == value


def test_help_explains_each_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit_:
        demo.main(["--help"])
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(demo.Settings):
        assert re.search(rf"--{field.name.replace('_', '-')} [A-Z_]+ [^-][^()]*\(default: {field.default}\)", text)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert demo.main([]) == 1
    assert 'The demo needs tqdm. Run: pip install ".[demo]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "\nInterrupted: no picture was drawn.\n"),
        (OSError(28, "No space left on device"), 1, "demo.png cannot be written: No space left on device.\n"),
    ],
)
def test_what_ends_it_is_said_in_one_line(error, code, said, monkeypatch, capsys):
    def run(settings):
        raise error

    monkeypatch.setattr(demo, "run", run)
    assert demo.main([]) == code
    assert capsys.readouterr().err == said
