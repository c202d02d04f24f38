"""Owns the demonstration: one training at one effective batch, three ways. Ignores how gradients are accumulated."""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_accum

Tree = Any
Rows = tuple[Any, Any]  # images float32 [b, 8, 8, 1], labels int32 [b]
Apply = Callable[..., tuple[Tree, Tree]]  # (tx, grads, state, params, **extra_args) -> (params, state)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line asks for; the fields are its options."""

    batch_size: int = 256
    every: int = 8
    epochs: int = 20
    optimizer: str = "adamw"
    learning_rate: float = 0.003
    seed: int = 0
    output: Path = Path("demo.png")


class Result(NamedTuple):
    """What one way came to."""

    name: str
    accuracy: float  # on the held-out digits
    parameters: np.ndarray  # [P], all of them after the last update
    losses: list[float]  # of each update, the mean over its micro-batches
    milliseconds: float  # per update, the median
    temporary_bytes: int  # of the compiled step


def main(argv: Sequence[str] | None = None) -> int:
    """Trains three ways, prints the table, draws the picture, and returns the exit code."""
    parser = _parser()
    settings = Settings(**vars(parser.parse_args(argv)))
    # Imported only where they are used, so that a missing one can be named here.
    if missing := [name for name in ("flax", "matplotlib", "sklearn", "tqdm") if not importlib.util.find_spec(name)]:
        print(f'The demo needs {", ".join(missing)}. Run: pip install "optax_accum[demo]"', file=sys.stderr)
        return 1
    try:
        check(settings)
    except ValueError as error:
        parser.error(str(error))
    *results, reversed_rows = run(settings)
    print(f"\n{table(results)}\n\n{explanation(results, reversed_rows)}")
    draw(settings, results)
    print(f"\nThe picture is in {settings.output.resolve()}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m optax_accum.demo",
        description="Trains a small CNN on handwritten digits at one effective batch three ways: the whole batch, "
        "micro-batches through optax_accum, micro-batches through optax.MultiSteps. Prints a table, draws a picture.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    count = _number(int, "an integer of at least 1", lambda value: value >= 1)
    rate = _number(float, "a finite number above 0", lambda value: 0 < value < math.inf)
    seed = _number(int, "an integer from 0 to 2**32 - 1", lambda value: 0 <= value < 2**32)
    for name, kind, text in (
        ("batch_size", count, "rows per update; an epoch drops the rows, shuffled anew, that fill no batch"),
        ("every", count, "micro-batches per update; must divide the batch size"),
        ("epochs", count, "passes over the training set"),
        ("optimizer", str, "name of an optimizer of optax that needs only a learning rate"),
        ("learning_rate", rate, "learning rate of the optimizer"),
        ("seed", seed, "seed of the split, the initial parameters and the order of the rows"),
        ("output", Path, "PNG file to write, in a folder that exists"),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(Settings, name), help=text)
    return parser


def _number(kind: type[int] | type[float], rule: str, holds: Callable[[Any], bool]) -> Callable[[str], Any]:
    def parse(text: str) -> int | float:
        with contextlib.suppress(ValueError):
            if holds(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {rule}: {text!r}. Leave the option out for its default.")

    return parse


def check(settings: Settings) -> None:
    """Raises ValueError for settings that cannot be run."""
    batch_size, every, output = settings.batch_size, settings.every, settings.output
    rows = len(_load_digits(settings.seed)[0][1])
    if batch_size > rows:
        raise ValueError(f"--batch-size must be at most the {rows} training rows: {batch_size}. Make it smaller.")
    if batch_size % every:
        nearest = min((k for k in range(1, batch_size + 1) if batch_size % k == 0), key=lambda k: abs(k - every))
        raise ValueError(f"--every must divide --batch-size {batch_size}: {every}. Try --every {nearest}.")
    if output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK):
        raise ValueError(f"--output must be a file that can be written: {output}. Name one in a folder that exists.")
    _check_optimizer(settings)


def _load_digits(seed: int) -> tuple[Rows, Rows]:
    """Returns the rows to learn from, and a fifth of each class held out."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits: Any = load_digits()
    images, labels = np.float32(digits.images[..., None] / 16), np.int32(digits.target)
    split: Any = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)
    return (split[0], split[2]), (split[1], split[3])


def _check_optimizer(settings: Settings) -> None:
    name, known = settings.optimizer, _optimizers()
    if name not in known:
        rule = "is made from a learning rate" if hasattr(optax, name) else "exists"
        close = difflib.get_close_matches(name.lower(), known) or known
        raise ValueError(f"--optimizer must name an optimizer of optax: none {rule} as {name}. Try {', '.join(close)}.")
    try:
        tx = _optimizer(settings)
        jax.eval_shape(lambda params: tx.update(params, tx.init(params), params, value=params[0, 0]), jnp.ones((2, 2)))
    except TypeError as error:
        rule = "--optimizer must need no more than a learning rate, gradients and a loss"
        raise ValueError(f"{rule}: {name} does ({error}). Try adamw.") from error


def _optimizers() -> list[str]:
    """Returns the names that optax exports of functions whose first parameter is a learning rate."""
    public = [name for name in dir(optax) if not name.startswith(("_", "scale_by_"))]
    functions = [name for name in public if inspect.isfunction(getattr(optax, name))]
    first = lambda name: next(iter(inspect.signature(getattr(optax, name)).parameters), None)
    return [name for name in functions if first(name) in ("learning_rate", "max_learning_rate")]


def _optimizer(settings: Settings) -> optax.GradientTransformationExtraArgs:
    return optax.with_extra_args_support(getattr(optax, settings.optimizer)(settings.learning_rate))


def run(settings: Settings) -> list[Result]:
    """Returns the results of the three ways, then of the whole batch with its rows reversed: what rounding alone does.

    All of them make an update before any makes the next, so that a busy machine slows them alike.
    """
    train, test = _load_digits(settings.seed)
    model = _model()
    ways = _ways(settings, model, train)
    for batch in _batches(settings, train):
        for way in ways:
            _update(way, batch)
    accuracy = jax.jit(lambda params: jnp.mean(model.apply(params, test[0]).argmax(-1) == test[1]))
    return [_result(way, accuracy(way.params)) for way in ways]


def _model() -> Any:
    from flax import linen as nn

    pool = functools.partial(nn.avg_pool, window_shape=(2, 2), strides=(2, 2))
    flatten = lambda features: features.reshape(len(features), -1)
    # Smooth, since rounding decides whether a relu near zero is on, and what differs once grows from there.
    smooth = nn.tanh
    convolutions = [nn.Conv(16, (3, 3)), smooth, nn.Conv(32, (3, 3)), smooth, pool]
    return nn.Sequential([*convolutions, flatten, nn.Dense(256), smooth, nn.Dense(10)])


@dataclasses.dataclass
class _Way:
    """One of the ways in training."""

    name: str
    every: int
    order: int  # -1 for reversed rows
    step: jax.stages.Compiled
    params: Tree
    state: Tree
    losses: list[float] = dataclasses.field(default_factory=list[float])
    seconds: list[float] = dataclasses.field(default_factory=list[float])


def _ways(settings: Settings, model: Any, train: Rows) -> list[_Way]:
    tx = _optimizer(settings)
    accumulated = optax_accum.accumulate_gradients(tx, settings.every)
    multi_steps = optax.MultiSteps(tx, settings.every)
    params = jax.jit(model.init)(jax.random.key(settings.seed), train[0][:1])

    def way(name: str, tx: Any, apply: Apply, every: int = 1, order: int = 1) -> _Way:
        # Copied: a donated buffer is gone, and some optimizers keep the initial parameters in their state.
        start = jax.tree.map(jnp.array, (params, tx.init(params)))
        micro_batch = [column[: settings.batch_size // every] for column in train]
        return _Way(name, every, order, _compile(model, tx, apply, *start, *micro_batch), *start)

    return [
        way("whole batch", tx, _update_and_apply),
        way("optax_accum", accumulated, optax_accum.apply_gradients, settings.every),
        way("optax.MultiSteps", multi_steps, _update_and_apply, settings.every),
        way("whole batch, rows reversed", tx, _update_and_apply, order=-1),
    ]


def _update_and_apply(tx: Any, grads: Tree, state: Tree, params: Tree, **extra_args: Any) -> tuple[Tree, Tree]:
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


def _compile(model: Any, tx: Any, apply: Apply, *arguments: Tree) -> jax.stages.Compiled:
    def mean_loss(params: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, images), labels).mean()

    def step(params: Tree, state: Tree, images: jax.Array, labels: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        loss, grads = jax.value_and_grad(mean_loss)(params, images, labels)
        params, state = apply(tx, grads, state, params, value=loss)
        return params, state, loss

    # Donated in the order in which they are returned: in another, XLA matches equal shapes crosswise and copies.
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()


def _batches(settings: Settings, train: Rows) -> Iterator[Rows]:
    from tqdm import tqdm

    random, rows, size = np.random.default_rng(settings.seed), len(train[1]), settings.batch_size
    epochs = [random.permutation(rows)[: rows - rows % size] for _ in range(settings.epochs)]
    terminal = sys.stderr.isatty()  # a log gets a line every 5 s, not ten a second
    bar = functools.partial(tqdm, unit="update", dynamic_ncols=terminal, mininterval=0.1 if terminal else 5)
    for chosen in bar(np.concatenate(epochs).reshape(-1, size), desc="training three ways"):
        yield train[0][chosen], train[1][chosen]


def _update(way: _Way, batch: Rows) -> None:
    images, labels = (jnp.split(jnp.asarray(rows[:: way.order]), way.every) for rows in batch)
    jax.block_until_ready((images, labels))
    start, losses = time.perf_counter(), list[jax.Array]()
    for micro_batch in zip(images, labels, strict=True):
        way.params, way.state, loss = way.step(way.params, way.state, *micro_batch)
        losses.append(loss)
    jax.block_until_ready((way.params, way.state))
    way.seconds.append(time.perf_counter() - start)
    way.losses.append(float(np.mean(losses)))


def _result(way: _Way, accuracy: jax.Array) -> Result:
    memory: Any = way.step.memory_analysis()
    return Result(
        name=way.name,
        accuracy=float(accuracy),
        parameters=np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(way.params)]),
        losses=way.losses,
        milliseconds=1000 * float(np.median(way.seconds)),
        temporary_bytes=memory.temp_size_in_bytes,
    )


def table(results: list[Result]) -> str:
    """Returns a line for each way; the parameters are compared with those of the first."""
    lines = [f"{'':<18}{'test accuracy':>13}{'largest difference':>20}{'ms per update':>15}{'temporary memory':>18}"]
    for name, accuracy, parameters, _, milliseconds, temporary_bytes in results:
        difference = f"{_difference(parameters, results[0].parameters):.1e}" if name != results[0].name else "0"
        memory = f"{temporary_bytes / 1e6:.2f} MB"
        lines.append(f"{name:<18}{accuracy:>13.1%}{difference:>20}{milliseconds:>15.1f}{memory:>18}")
    return "\n".join(lines)


def _difference(some: Sequence[float] | np.ndarray, others: Sequence[float] | np.ndarray) -> float:
    return float(np.abs(np.subtract(some, others)).max())


def explanation(results: list[Result], reversed_rows: Result) -> str:
    """Returns what the differences are, as far as it was measured."""
    whole, *accumulated = results
    if not np.isfinite([result.parameters for result in results]).all():
        return "The training diverged: parameters are not finite. Try a smaller --learning-rate."
    rounding = _difference(reversed_rows.parameters, whole.parameters)
    text = (
        f"Reversing the rows of the whole batch changes only the order of float32 sums, and moves it by {rounding:.1e}:"
    )
    text += " differences of that size are rounding."
    for result in accumulated:
        if _difference(result.parameters, whole.parameters) > 10 * rounding:
            far = int((np.abs(result.parameters - whole.parameters) > 1e-5).sum())
            text += (
                f"\n{result.name} differs by more than ten times that: {far} of {whole.parameters.size} parameters by "
                f"more than 1e-05, its losses by up to {_difference(result.losses, whole.losses):.1e}."
            )
    return text


def draw(settings: Settings, results: list[Result]) -> None:
    """Writes the picture: the loss of every update, and what it took."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.8), layout="constrained")
    axes: Any = figure.subplot_mosaic([["loss", "memory", "time"]], width_ratios=[2.2, 1, 1])
    cut = f"{settings.every} micro-batches of {settings.batch_size // settings.every}"
    figure.suptitle(f"Handwritten digits, {settings.optimizer}: batches of {settings.batch_size}, whole and as {cut}")
    _draw_losses(axes["loss"], results)
    _draw_bars(axes["memory"], "Temporary memory of a step", "MB", [way.temporary_bytes / 1e6 for way in results])
    _draw_bars(axes["time"], "Time of an update (median)", "milliseconds", [way.milliseconds for way in results])
    figure.savefig(settings.output, format="png", dpi=150)


def _draw_losses(axes: Any, results: list[Result]) -> None:
    apart = max(_difference(result.losses, results[0].losses) for result in results)
    for result, color, width, line in zip(results, _COLORS, (9, 4, 1.5), ("-", "-", "--"), strict=True):
        axes.plot(
            range(1, len(result.losses) + 1), result.losses, line, color=color, linewidth=width, label=result.name
        )
    axes.set(title=f"Loss: the three curves are at most {apart:.0e} apart", xlabel="update", ylabel="training loss")
    axes.set_yscale("log")
    axes.legend()


def _draw_bars(axes: Any, title: str, unit: str, heights: list[float]) -> None:
    bars = axes.bar(("whole\nbatch", "optax_\naccum", "optax.\nMultiSteps"), heights, color=_COLORS)
    axes.bar_label(bars, fmt="%.3g", padding=3)
    axes.set(title=title, ylabel=unit)
    axes.margins(y=0.12)


_COLORS = ("#f2b134", "#1f77b4", "#202020")


if __name__ == "__main__":
    raise SystemExit(main())
