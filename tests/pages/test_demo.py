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
from matplotlib.image import imread
from matplotlib.text import Text

import optax_accum
from examples import demo
from tests import ROOT

WAYS = ["whole batch", "value_and_grad", "accumulate_gradients", "scan, mean of means", "optax.MultiSteps"]
OURS = WAYS[1:3]
ROWS = 2668  # to learn from
SMALL = ["--batch-size", "8", "--every", "4", "--updates", "3"]


class Run(NamedTuple):
    code: int
    out: str
    err: str
    picture: Path
    ways: list[demo.Way]
    drawn: str  # the words in the picture
    figure: Figure


def shrink(patch):
    """Makes a model that compiles faster."""
    for name, value in {"LENGTH": 16, "WIDTH": 8, "HEADS": 2, "LAYERS": 1, "HELD_OUT": 16}.items():
        patch.setattr(demo, name, value)
    patch.setattr(demo, "_load_text", demo._load_text.__wrapped__)


@pytest.fixture
def shrunk(monkeypatch):
    shrink(monkeypatch)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """One run of the command in this process, with the ways that it compared."""
    picture, ways, figures = tmp_path_factory.mktemp("demo") / "picture.png", [], []
    train, save = demo.run, Figure.savefig
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        shrink(patch)
        patch.setattr(demo, "run", lambda settings: ways.extend(train(settings)) or ways)
        patch.setattr(Figure, "savefig", lambda self, *to, **as_: figures.append(self) or save(self, *to, **as_))
        code = demo.main([*SMALL, "--output", str(picture)])
    drawn = " ".join(text.get_text() for figure in figures for text in figure.findobj(Text))
    return Run(code, out.getvalue(), err.getvalue(), picture, ways, drawn, *figures)


def png_size(path):
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def table_rows(text):
    """Returns the columns of each row of the printed table, by the name of the way."""
    pattern = rf"^({'|'.join(map(re.escape, WAYS))}) +(\S+) +(\S+) +([\d.]+) +(\S+) +([\d.]+) MB$"
    return {name: list(map(float, columns)) for name, *columns in re.findall(pattern, text, re.MULTILINE)}


@pytest.mark.sweep
def test_it_prints_a_table_and_draws_a_picture(small):
    assert small.code == 0
    rows = table_rows(small.out)
    assert list(rows) == WAYS
    for name, (before, after, loss, apart, megabytes) in rows.items():
        exact = name in [WAYS[0], *OURS]
        assert (max(before, after) < 1e-5) == exact
        assert min(before, after) > 0.1 or exact
        assert (apart < 1e-5) == exact
        assert loss > 1
        assert megabytes > 0
    assert "3/3" in small.err  # the progress bar
    assert str(small.picture) in small.out
    assert all(name in small.drawn for name in WAYS)
    assert all(f"{package.__name__} {package.__version__}" in small.drawn for package in (jax, optax))


@pytest.mark.sweep
def test_a_phone_shows_the_words_of_the_picture(small):
    """At 390 pixels, of which margins take 50, they are 7 pixels high at least, and the versions beneath 6."""
    width, height = png_size(small.picture)
    assert 1 < height / width < 1.3
    points = 340 / (72 * small.figure.get_size_inches()[0])
    sizes = {text.get_text(): text.get_fontsize() * points for text in small.figure.findobj(Text) if text.get_text()}
    assert min(size for text, size in sizes.items() if "jax" not in text) > 10
    assert min(sizes.values()) > 6


def test_the_text_is_padded_and_a_loader_sorts_it(shrunk):
    train, held_out = demo._load_text(0)
    lengths = np.sum(train > 0, axis=1)
    assert held_out.shape == (16, 17)
    assert 2 * np.median(lengths) < np.max(lengths) == 17
    assert np.all(np.diff(np.sum(demo._by_length(train[:8]) > 0, axis=1)) >= 0)
    assert not set(map(bytes, train)) >= set(map(bytes, held_out))


@pytest.mark.sweep
def test_the_ways_train_and_only_ours_as_the_whole_batch(small):
    whole, *others = small.ways
    assert whole.losses[-1] < whole.losses[0] - 0.01
    for way in others:
        ours = way.name in OURS
        assert np.allclose(way.losses, whole.losses, rtol=1e-6) == ours
        assert np.allclose(ravel_pytree(way.params)[0], ravel_pytree(whole.params)[0], atol=1e-4) == ours
    assert [len(way.losses) for way in small.ways] == [3] * 5  # before updates 1 and 3, and at the end


@pytest.mark.sweep
def test_the_accumulator_of_each_way_is_counted(small):
    whole, within, accumulated, scanned, multi_steps = small.ways
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(whole.params)) / 1e6
    temporary = lambda way: way.step.memory_analysis().temp_size_in_bytes / 1e6
    for way in (accumulated, multi_steps):
        assert way.megabytes - temporary(way) == pytest.approx(parameters, rel=1e-2)
    for way in (whole, within, scanned):
        assert way.megabytes == temporary(way)


@pytest.mark.sweep
def test_it_fails_if_ours_is_not_exact(small, monkeypatch, tmp_path, capsys):
    for errors, code in (([1e-7, 2e-5], 1), ([math.nan, 0.0], 1), ([1e-6, 1e-6], 0)):
        ways = [dataclasses.replace(way, errors=errors) if way.name == OURS[0] else way for way in small.ways]
        monkeypatch.setattr(demo, "run", lambda settings, ways=ways: ways)
        assert demo.main([*SMALL, "--output", str(tmp_path / "demo.png")]) == code
        assert ("within 1e-05 of the whole batch's: value_and_grad." in capsys.readouterr().err) == bool(code)


@pytest.mark.sweep
def test_a_weight_that_is_forgotten_is_seen(shrunk, monkeypatch, tmp_path, capsys):
    apply = optax_accum.apply_gradients
    forget = lambda *args, weight, **extra_args: apply(*args, **extra_args)
    monkeypatch.setattr(optax_accum, "apply_gradients", forget)
    assert demo.main([*SMALL, "--updates", "1", "--output", str(tmp_path / "demo.png")]) == 1
    assert "whole batch's: accumulate_gradients." in capsys.readouterr().err


@pytest.mark.sweep
def test_a_dark_picture_has_a_dark_ground(small, tmp_path):
    grounds = []
    for dark in (False, True):
        demo._draw(demo.Settings(output=tmp_path / "demo.png", updates=3, dark=dark), small.ways)
        grounds.append(imread(tmp_path / "demo.png")[0, 0, :3].mean())
    assert grounds[0] > 0.9
    assert grounds[1] < 0.2


def test_the_pictures_of_the_pages_are_of_one_size():
    assert png_size(ROOT / "docs" / "demo.png") == png_size(ROOT / "docs" / "demo_dark.png")


@pytest.mark.sweep
def test_it_runs_as_a_module():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "examples.demo", "--every", "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--every must divide --batch-size 32: 7. Try --every 8." in done.stderr


@pytest.mark.sweep
def test_the_explanation_says_that_a_training_diverged(small):
    assert "mean over tokens" in demo._explanation(small.ways)
    diverged = dataclasses.replace(small.ways[0], losses=[5.0, math.nan])
    assert "diverged" in demo._explanation([diverged, *small.ways[1:]])


@pytest.mark.slow
@pytest.mark.sweep
def test_an_optimizer_that_reads_the_loss_gets_the_mean_of_the_window(shrunk):
    settings = demo.Settings(batch_size=8, every=2, updates=4, optimizer="polyak_sgd", learning_rate=1.0)
    whole, _, accumulated, _, multi_steps = [ravel_pytree(way.params)[0] for way in demo.run(settings)]
    assert np.abs(accumulated - whole).max() < 1e-4 < np.abs(multi_steps - whole).max()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch-size 0", "argument --batch-size: must be an integer of at least 1: '0'. Leave the option out"),
        ("--batch-size 2.5", "argument --batch-size: must be an integer of at least 1: '2.5'"),
        ("--every -1", "argument --every: must be an integer of at least 1: '-1'"),
        ("--every many", "argument --every: must be an integer of at least 1: 'many'"),
        ("--updates 0", "argument --updates: must be an integer of at least 1: '0'"),
        ("--learning-rate 0", "argument --learning-rate: must be a finite number above 0: '0'"),
        ("--learning-rate nan", "argument --learning-rate: must be a finite number above 0: 'nan'"),
        ("--seed -1", "argument --seed: must be an integer from 0 to 2**32 - 1: '-1'"),
        ("--every 7", "--every must divide --batch-size 32: 7. Try --every 8."),
        ("--batch-size 4096", f"--batch-size must be at most the {ROWS} training rows: 4096. Make it smaller."),
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


@pytest.mark.parametrize("option", ["every 8", "optimizer adam", "seed 0", "learning-rate 0.1", f"batch-size {ROWS}"])
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
    assert re.search(r"--dark +[^-][^()]*\(default: False\)", text)
    for field in dataclasses.fields(demo.Settings)[:-1]:
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
