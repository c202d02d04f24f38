"""Owns the demonstration: one training at one effective batch, four ways. Ignores how gradients are accumulated."""

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import optax_accum
from examples import processes

Tree = Any
Rows = tuple[Any, Any]  # images float32 [b, 8, 8, 1], labels int32 [b]
LINES = (("#f2b134", "-", 11), ("#1f77b4", "-", 6), ("#9fd3c7", "-", 3), ("#202020", "--", 1.2))  # color, style, width


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


@dataclasses.dataclass
class Way:
    """One of the ways to train, how far it is, and what it took."""

    name: str
    every: int
    order: Any  # of the rows of a batch, as an index
    step: jax.stages.Compiled
    megabytes: float  # that the step holds beside parameters and optimizer state: temporary memory and accumulator
    params: Tree
    state: Tree
    losses: list[float] = dataclasses.field(default_factory=list[float])  # of an update: the mean of its micro-batches
    milliseconds: list[float] = dataclasses.field(default_factory=list[float])  # of an update
    accuracy: float = math.nan  # on the held-out digits


def main(argv: Sequence[str] | None = None) -> int:
    """Trains four ways, prints the table, draws the picture, and returns the exit code."""
    parser = _parser()
    options = vars(parser.parse_args(argv))
    if number := options.pop("processes"):
        return processes.main([f"--processes={number}"])
    settings = Settings(**options)
    # Imported only where they are used, so that a missing one can be named here.
    if missing := [name for name in ("flax", "matplotlib", "sklearn", "tqdm") if not importlib.util.find_spec(name)]:
        print(f'The demo needs {", ".join(missing)}. Run: pip install ".[demo]"', file=sys.stderr)
        return 1
    try:
        _check(settings)
    except ValueError as error:
        parser.error(str(error))
    try:
        *ways, shuffled = run(settings)
        print(f"\n{_table(ways)}\n\n{_explanation(ways, shuffled)}")
        _draw(settings, ways)
    except KeyboardInterrupt:
        print("\nInterrupted: no picture was drawn.", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"{settings.output} cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
    print(f"\nThe picture is in {settings.output.resolve()}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Trains a small network on handwritten digits four ways at one effective batch, and compares them.",
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
    parser.add_argument("--processes", type=count, help="run examples.processes instead, on so many processes")
    return parser


def _number(kind: type[int] | type[float], rule: str, holds: Callable[[Any], bool]) -> Callable[[str], Any]:
    def parse(text: str) -> int | float:
        with contextlib.suppress(ValueError):
            if holds(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {rule}: {text!r}. Leave the option out for its default.")

    return parse


def _check(settings: Settings) -> None:
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
        close = ", ".join(difflib.get_close_matches(name.lower(), known) or known)
        raise ValueError(f"--optimizer must be an optimizer that optax exports: {name}. Try one of these: {close}.")
    try:
        tx = _optimizer(settings)
        jax.eval_shape(lambda params: tx.update(params, tx.init(params), params, value=params[0, 0]), jnp.ones((2, 2)))
    except TypeError as error:
        rule = "--optimizer must run on a learning rate, gradients and a loss alone"
        raise ValueError(f"{rule}: {name} ({error}). Try adamw.") from error


def _optimizers() -> list[str]:
    """Returns the names that optax exports of functions whose first parameter is a learning rate."""
    functions = inspect.getmembers(optax, inspect.isfunction)
    first = {name: next(iter(inspect.signature(f).parameters), "") for name, f in functions if name[0] != "_"}
    return [name for name in first if first[name] in ("learning_rate", "max_learning_rate") and "scale_by" not in name]


def _optimizer(settings: Settings) -> optax.GradientTransformationExtraArgs:
    return optax.with_extra_args_support(getattr(optax, settings.optimizer)(settings.learning_rate))


def run(settings: Settings) -> list[Way]:
    """Trains the four ways and, to show what rounding alone does, the whole batch with its rows shuffled."""
    train, test = _load_digits(settings.seed)
    model = _model()
    ways = _ways(settings, model, train)
    for batch in _batches(settings, train):
        for way in ways:  # in turn, so that a busy machine slows them alike
            _update(way, batch)
    accuracy = jax.jit(lambda params: jnp.mean(model.apply(params, test[0]).argmax(-1) == test[1]))
    return [dataclasses.replace(way, accuracy=float(accuracy(way.params))) for way in ways]


def _model() -> Any:
    from flax import linen as nn

    flatten = lambda features: features.reshape(len(features), -1)
    # Products: in a loop on a CPU, XLA runs `nn.Conv` about ten times slower (jax-ml/jax#12868), and with `unroll=True`
    # value_and_grad takes as much memory as the whole batch up to JAX 0.10 (here 7.7 MB; in the loop 1.7).
    # tanh is smooth: rounding decides whether a relu near zero is on, and what differs once grows from there.
    patches = [_patches, nn.Dense(128), nn.tanh, _patches, nn.Dense(128), nn.tanh]
    return nn.Sequential([*patches, flatten, nn.Dense(128), nn.tanh, nn.Dense(10)])


def _patches(features: jax.Array) -> jax.Array:
    """Returns the features of each 2 x 2 patch side by side: [b, h, w, c] as [b, h / 2, w / 2, 4 c]."""
    b, h, w, c = features.shape
    return features.reshape(b, h // 2, 2, w // 2, 2, c).swapaxes(2, 3).reshape(b, h // 2, w // 2, 4 * c)


def _ways(settings: Settings, model: Any, train: Rows) -> list[Way]:
    tx = _optimizer(settings)
    accumulated = optax_accum.accumulate_gradients(tx, settings.every)
    multi_steps = optax.MultiSteps(tx, settings.every)
    within_call = functools.partial(optax_accum.value_and_grad, num_microbatches=settings.every, batch_argnums=(1, 2))
    shuffled = np.random.default_rng(settings.seed).permutation(settings.batch_size)
    params = jax.jit(model.init)(jax.random.key(settings.seed), train[0][:1])
    optimizer_state = _bytes(tx.init(params))

    def way(
        name: str,
        tx: Any,
        apply: Any,
        every: int = 1,
        order: Any = slice(None),
        differentiate: Any = jax.value_and_grad,
    ) -> Way:
        # Copied: a donated buffer is gone, and some optimizers keep the initial parameters in their state.
        start = jax.tree.map(jnp.array, (params, tx.init(params)))
        micro_batch = [column[: settings.batch_size // every] for column in train]
        step: Any = _compile(model, tx, differentiate, apply, *start, *micro_batch)
        accumulator = _bytes(start[1]) - optimizer_state
        return Way(name, every, order, step, (step.memory_analysis().temp_size_in_bytes + accumulator) / 1e6, *start)

    return [
        way("whole batch", tx, _update_and_apply),
        way("accumulate_gradients", accumulated, optax_accum.apply_gradients, settings.every),
        way("value_and_grad", tx, _update_and_apply, differentiate=within_call),
        way("optax.MultiSteps", multi_steps, _update_and_apply, settings.every),
        way("whole batch, rows shuffled", tx, _update_and_apply, order=shuffled),
    ]


def _bytes(tree: Tree) -> int:
    return sum(jnp.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))


def _update_and_apply(tx: Any, grads: Tree, state: Tree, params: Tree, **extra_args: Any) -> tuple[Tree, Tree]:
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


def _compile(model: Any, tx: Any, differentiate: Any, apply: Any, *arguments: Tree) -> jax.stages.Compiled:
    def mean_loss(params: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, images), labels).mean()

    def step(params: Tree, state: Tree, images: jax.Array, labels: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        loss, grads = differentiate(mean_loss)(params, images, labels)
        params, state = apply(tx, grads, state, params, value=loss)
        return params, state, loss

    # Donated in the order in which they are returned: in another, XLA matches equal shapes crosswise and copies.
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()


def _batches(settings: Settings, train: Rows) -> Iterator[Rows]:
    from tqdm import tqdm

    random, rows, size = np.random.default_rng(settings.seed), len(train[1]), settings.batch_size
    epochs = [random.permutation(rows)[: rows - rows % size] for _ in range(settings.epochs)]
    pause = 0.1 if sys.stderr.isatty() else 5  # seconds between two refreshes; a log keeps them all
    for chosen in tqdm(np.concatenate(epochs).reshape(-1, size), "training", unit="update", mininterval=pause):
        yield train[0][chosen], train[1][chosen]


def _update(way: Way, batch: Rows) -> None:
    images, labels = (jnp.split(jnp.asarray(rows[way.order]), way.every) for rows in batch)
    jax.block_until_ready((images, labels))
    start, losses = time.perf_counter(), list[jax.Array]()
    for micro_batch in zip(images, labels, strict=True):
        way.params, way.state, loss = way.step(way.params, way.state, *micro_batch)
        losses.append(loss)
    jax.block_until_ready((way.params, way.state))
    way.milliseconds.append(1000 * (time.perf_counter() - start))
    way.losses.append(float(np.mean(losses)))


def _table(ways: list[Way]) -> str:
    lines = [f"{'test accuracy':>34}{'largest parameter difference':>30}{'ms per update':>15}{'memory':>12}"]
    for way in ways:
        apart, milliseconds = _apart(way.params, ways[0].params), np.median(way.milliseconds)
        lines.append(f"{way.name:<21}{way.accuracy:>13.1%}{apart:>30.2g}{milliseconds:>15.1f}{way.megabytes:>9.2f} MB")
    return "\n".join(lines)


def _apart(tree: Tree, other: Tree) -> float:
    """Returns the largest distance between two numbers in the same place."""
    return float(np.abs(np.subtract(ravel_pytree(tree)[0], ravel_pytree(other)[0])).max())


def _explanation(ways: list[Way], shuffled: Way) -> str:
    rounding = _apart(shuffled.params, ways[0].params)
    if not math.isfinite(rounding):
        return "The training diverged: the parameters are not finite. Try a smaller --learning-rate."
    text = f"The whole batch with shuffled rows ends {rounding:.2g} away: rounding, float32 sums in another order.\n"
    larger = [way.name for way in ways if _apart(way.params, ways[0].params) > 100 * max(rounding, 1e-7)]
    if larger:
        text += f"More than 100 times as far: {', '.join(larger)}. An optimizer that takes the sign of a gradient or\n"
        text += "divides by its size can turn rounding into steps of the learning rate: compare with --optimizer sgd.\n"
        text += "One that reads the loss gets the mean over the window, but from optax.MultiSteps the last one in it.\n"
    text += "Memory is what a step holds beside parameters and optimizer state: temporary memory and the accumulator,\n"
    text += "which value_and_grad needs during a call alone. This network has no convolutions: a CPU runs them slowly\n"
    return text + "in the loop over micro-batches, and value_and_grad has unroll=True for them."


def _draw(settings: Settings, ways: list[Way]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.8), layout="constrained")
    axes: Any = figure.subplot_mosaic([["loss", "memory", "time"]], width_ratios=[1.9, 1.1, 1.1])
    rows, every, optimizer = settings.batch_size, settings.every, settings.optimizer
    figure.suptitle(f"Handwritten digits, {optimizer}; {rows} images per update: at once, or {every} x {rows // every}")
    _draw_losses(axes["loss"], ways)
    memory = "Memory of a step, with its accumulator,\nwithout parameters and optimizer state"
    _draw_bars(axes["memory"], memory, "MB", [way.megabytes for way in ways])
    _draw_bars(axes["time"], "Time of an update (median)", "ms", [np.median(way.milliseconds) for way in ways])
    figure.supxlabel(_versions(), fontsize=8, color="#606060")
    figure.savefig(settings.output, format="png", dpi=150)


def _versions() -> str:
    packages = [f"{package.__name__} {package.__version__}" for package in (optax_accum, jax, optax)]
    device = jax.devices()[0]
    kind = f"{os.cpu_count()} CPU cores" if device.platform == "cpu" else device.device_kind
    return f"{', '.join(packages)}; {kind}"


def _draw_losses(axes: Any, ways: list[Way]) -> None:
    for way, (color, line, width) in zip(ways, LINES, strict=True):
        axes.plot(np.arange(len(way.losses)) + 1, way.losses, line, color=color, linewidth=width, label=way.name)
    apart = max(_apart(way.losses, ways[0].losses) for way in ways)
    axes.set(title=f"Loss: curves at most {apart:.1g} apart", xlabel="update", ylabel="training loss", yscale="log")
    axes.legend()


def _draw_bars(axes: Any, title: str, unit: str, heights: Sequence[Any]) -> None:
    names = ("whole\nbatch", "accumulate_\ngradients", "value_\nand_grad", "optax.\nMultiSteps")
    bars = axes.bar(names, heights, color=[color for color, _, _ in LINES])
    axes.bar_label(bars, fmt="%#.3g", padding=3)
    axes.set(title=title, ylabel=unit, ymargin=0.1)
    axes.tick_params(axis="x", labelsize=8)


if __name__ == "__main__":
    raise SystemExit(main())
