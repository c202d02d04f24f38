"""The demonstration: one training on padded text, by the whole batch and by micro-batches, right and wrong."""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import html.entities
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_accum
from examples import processes

Tree = Any
LENGTH, WIDTH, HEADS, LAYERS = 64, 32, 4, 2  # tokens in a row, features, heads, layers of the decoder
HELD_OUT, CHECK = 96, 2  # rows for the loss that is drawn, and how many updates lie between two measurements
TOLERANCE = 1e-5  # of the gradient, relative to its largest entry
WRONG = ("scan, mean of means", "optax.MultiSteps")  # both take the mean of the micro-batches' means


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line asks for; the fields are its options."""

    batch_size: int = 32
    every: int = 8
    updates: int = 40
    optimizer: str = "adam"
    learning_rate: float = 0.003
    seed: int = 0
    output: Path = Path("demo.png")
    dark: bool = False


class Seen(NamedTuple):
    """State of `_remember`: the gradient that the optimizer got last."""

    gradient: Tree


@dataclasses.dataclass
class Way:
    """One of the ways to train, how far it is, and what it needs."""

    name: str
    every: int  # calls of `step` for an update
    tx: Any
    step: jax.stages.Compiled
    megabytes: float  # that the step holds beside parameters and optimizer state: temporary memory and accumulator
    params: Tree
    state: Tree
    losses: list[float] = dataclasses.field(default_factory=list[float])  # on the held-out rows
    errors: list[float] = dataclasses.field(default_factory=list[float])  # of the gradient: before training, after it


def main(argv: Sequence[str] | None = None) -> int:
    """Trains in five ways, prints the table, draws the picture, and returns the exit code."""
    parser = _parser()
    options = vars(parser.parse_args(argv))
    if number := options.pop("processes"):
        return processes.main([f"--processes={number}"])
    settings = Settings(**options)
    # Imported only where they are used, so that a missing one can be named here.
    if missing := [name for name in ("matplotlib", "tqdm") if not importlib.util.find_spec(name)]:
        print(f'The demo needs {", ".join(missing)}. Run: pip install ".[demo]"', file=sys.stderr)
        return 1
    try:
        _check(settings)
    except ValueError as error:
        parser.error(str(error))
    try:
        # A GPU or a TPU would round products: that is no error of accumulation.
        with jax.default_matmul_precision("float32"):
            ways = run(settings)
        print(f"\n{_table(ways)}\n\n{_explanation(ways)}")
        _draw(settings, ways)
    except KeyboardInterrupt:
        print("\nInterrupted: no picture was drawn.", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"{settings.output} cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
    print(f"\nThe picture is in {settings.output.resolve()}")
    if inexact := [way.name for way in ways[1:] if way.name not in WRONG and not np.max(way.errors) <= TOLERANCE]:
        print(f"\nGradients must be within {TOLERANCE} of the whole batch's: {', '.join(inexact)}.", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Trains a small decoder on padded text, by the whole batch and by micro-batches; compares them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    count = _number(int, "an integer of at least 1", lambda value: value >= 1)
    rate = _number(float, "a finite number above 0", lambda value: 0 < value < math.inf)
    seed = _number(int, "an integer from 0 to 2**32 - 1", lambda value: 0 <= value < 2**32)
    for name, kind, text in (
        ("batch_size", count, "rows of text per update"),
        ("every", count, "micro-batches per update; must divide the batch size"),
        ("updates", count, "updates of each training"),
        ("optimizer", str, "name of an optimizer of optax that needs only a learning rate"),
        ("learning_rate", rate, "learning rate of the optimizer"),
        ("seed", seed, "seed of the held-out rows, the initial parameters and the batches"),
        ("output", Path, "PNG file to write, in a folder that exists"),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(Settings, name), help=text)
    parser.add_argument("--dark", action="store_true", help="draw on a dark ground")
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
    rows = len(_load_text(settings.seed)[0])
    if batch_size > rows:
        raise ValueError(f"--batch-size must be at most the {rows} training rows: {batch_size}. Make it smaller.")
    if batch_size % every:
        nearest = min((k for k in range(1, batch_size + 1) if batch_size % k == 0), key=lambda k: abs(k - every))
        raise ValueError(f"--every must divide --batch-size {batch_size}: {every}. Try --every {nearest}.")
    if output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK):
        raise ValueError(f"--output must be a file that can be written: {output}. Name one in a folder that exists.")
    _check_optimizer(settings)


@functools.cache
def _load_text(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of bytes [n, LENGTH + 1] to learn from, and rows held out; zeros are padding.

    Python ships with both kinds: names of HTML's characters are short, paragraphs of its documentation long. Three
    rows of four are names.
    """
    from pydoc_data.topics import topics

    random = np.random.default_rng(seed)
    names = sorted({name.rstrip(";") for name in html.entities.html5 if len(name) > 3})
    paragraphs = [text for topic in topics.values() for text in topic.split("\n\n") if len(text) > 20]
    chosen = random.choice(len(paragraphs), len(names) // 3, replace=False)
    texts = [text.encode("ascii", "ignore")[: LENGTH + 1] for text in [*names, *(paragraphs[n] for n in chosen)]]
    rows = np.zeros((len(texts), LENGTH + 1), np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = list(text)
    rows = random.permutation(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


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
        raise ValueError(f"{rule}: {name} ({error}). Try adam.") from error


def _optimizers() -> list[str]:
    """Returns the names that optax exports of functions whose first parameter is a learning rate."""
    functions = inspect.getmembers(optax, inspect.isfunction)
    first = {name: next(iter(inspect.signature(f).parameters), "") for name, f in functions if name[0] != "_"}
    return [name for name in first if first[name] in ("learning_rate", "max_learning_rate") and "scale_by" not in name]


def _optimizer(settings: Settings) -> optax.GradientTransformationExtraArgs:
    return optax.chain(_remember(), getattr(optax, settings.optimizer)(settings.learning_rate))


def _remember() -> optax.GradientTransformation:
    """Returns a transformation that keeps the gradient that it gets: what each way really gives the optimizer."""

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Seen]:
        del state, params
        return updates, Seen(updates)

    return optax.GradientTransformation(lambda params: Seen(jax.tree.map(jnp.zeros_like, params)), update)


def run(settings: Settings) -> list[Way]:
    """Trains in all ways on the same batches, and compares gradients with the first one's, the whole batch's."""
    train, held_out = _load_text(settings.seed)
    ways, measure = _ways(settings), jax.jit(_loss)
    batch = train[: settings.batch_size]
    _compare_gradients(ways, ways[0].params, _by_length(batch))
    for number, batch in enumerate(_batches(settings, train)):
        for way in ways:
            if number % CHECK == 0:
                way.losses.append(float(measure(way.params, held_out)))
            way.params, way.state = _updated(way, way.params, way.state, batch)
    for way in ways:
        way.losses.append(float(measure(way.params, held_out)))
    _compare_gradients(ways, ways[0].params, _by_length(batch))
    return ways


def _initial_params(seed: int) -> Tree:
    """Returns the parameters of a decoder: an embedding of bytes and one of places, layers, and a head."""
    random = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return random.normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32)

    def layer() -> Tree:
        ends = {"up": draw(WIDTH, 4 * WIDTH), "down": draw(4 * WIDTH, WIDTH)}
        return {"qkv": draw(WIDTH, 3 * WIDTH), "out": draw(WIDTH, WIDTH), **ends}

    layers = [layer() for _ in range(LAYERS)]
    return {"embed": draw(128, WIDTH), "place": draw(LENGTH, WIDTH), "layers": layers, "head": draw(WIDTH, 128)}


def _logits(params: Tree, tokens: jax.Array) -> jax.Array:
    """Returns for each byte [n, LENGTH] what may follow it, [n, LENGTH, 128]."""
    h = params["embed"][tokens] + params["place"][None]
    for layer in params["layers"]:
        heads = (_normalized(h) @ layer["qkv"]).reshape(*h.shape[:2], 3, HEADS, -1)
        attended = jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0), is_causal=True)
        h += attended.reshape(h.shape) @ layer["out"]
        h += jax.nn.gelu(_normalized(h) @ layer["up"]) @ layer["down"]
    return _normalized(h) @ params["head"]


def _normalized(h: jax.Array) -> jax.Array:
    return h * jax.lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6)


def _loss(params: Tree, rows: jax.Array) -> jax.Array:
    """Returns the mean over the tokens that are there."""
    there = rows[:, 1:] > 0
    each = optax.softmax_cross_entropy_with_integer_labels(_logits(params, rows[:, :-1]), rows[:, 1:])
    return jnp.sum(each, where=there) / jnp.sum(there)


def _ways(settings: Settings) -> list[Way]:
    every, tx = settings.every, _optimizer(settings)
    way = functools.partial(_way, settings, _initial_params(settings.seed))
    accumulated = optax_accum.accumulate_gradients(tx, every)
    return [
        way("whole batch", tx, jax.value_and_grad),
        way("value_and_grad", tx, functools.partial(optax_accum.value_and_grad, num_microbatches=every)),
        way("accumulate_gradients", accumulated, jax.value_and_grad, optax_accum.apply_gradients, every),
        way("scan, mean of means", tx, functools.partial(_mean_of_means, every)),
        way("optax.MultiSteps", optax.MultiSteps(tx, every), jax.value_and_grad, every=every),
    ]


def _mean_of_means(every: int, loss: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, Tree]]:
    """Returns the usual loop: a scan that adds up the micro-batches' means, and divides by their number."""

    def value_and_grad(params: Tree, rows: jax.Array) -> tuple[jax.Array, Tree]:
        def add(sums: Tree, micro_batch: jax.Array) -> tuple[Tree, None]:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, micro_batch)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
        sums, _ = jax.lax.scan(add, zeros, rows.reshape(every, -1, rows.shape[1]))
        return jax.tree.map(lambda leaf: leaf / every, sums)

    return value_and_grad


def _way(
    settings: Settings,
    params: Tree,
    name: str,
    tx: Any,
    differentiate: Callable[..., Any],
    apply: Callable[..., tuple[Tree, Tree]] | None = None,
    every: int = 1,
) -> Way:
    weighted = apply is not None  # only ours takes a weight

    def step(params: Tree, state: Tree, rows: jax.Array) -> tuple[Tree, Tree]:
        value, grads = differentiate(_loss)(params, rows)
        weight = {"weight": jnp.sum(rows[:, 1:] > 0)} if weighted else {}
        return (apply or _update_and_apply)(tx, grads, state, params, value=value, **weight)

    start = _copied((params, tx.init(params)))
    rows = jax.ShapeDtypeStruct((settings.batch_size // every, LENGTH + 1), jnp.int32)
    # Donated in the order in which they are returned: in another, XLA matches equal shapes crosswise and copies.
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*start, rows).compile()
    memory: Any = compiled.memory_analysis()
    accumulator = _bytes(start[1]) - _bytes(_optimizer(settings).init(params))
    return Way(name, every, tx, compiled, (memory.temp_size_in_bytes + accumulator) / 1e6, *start)


def _copied(tree: Tree) -> Any:
    """Copies arrays: a donated buffer is gone, and some optimizers keep the initial parameters in their state."""
    return jax.tree.map(jnp.array, tree)


def _bytes(tree: Tree) -> int:
    return sum(jnp.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))


def _update_and_apply(tx: Any, grads: Tree, state: Tree, params: Tree, **extra_args: Any) -> tuple[Tree, Tree]:
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


def _batches(settings: Settings, train: np.ndarray) -> Iterator[np.ndarray]:
    from tqdm import tqdm

    random = np.random.default_rng(settings.seed)
    pause = 0.1 if sys.stderr.isatty() else 5  # seconds between two refreshes; a log keeps them all
    for _ in tqdm(range(settings.updates), "training", unit="update", mininterval=pause):
        yield _by_length(train[random.choice(len(train), settings.batch_size, replace=False)])


def _by_length(rows: np.ndarray) -> np.ndarray:
    """Returns the rows in the order of a loader that pads little: micro-batches have rows of similar length."""
    return rows[np.argsort(np.sum(rows > 0, axis=1), kind="stable")]


def _updated(way: Way, params: Tree, state: Tree, batch: np.ndarray) -> tuple[Tree, Tree]:
    for micro_batch in np.split(batch, way.every):
        params, state = way.step(params, state, micro_batch)
    return params, state


def _compare_gradients(ways: list[Way], params: Tree, batch: np.ndarray) -> None:
    """Adds to each way the error of the gradient that its optimizer gets of a batch."""
    gradients: list[list[Any]] = []
    for way in ways:
        copied, state = _copied((params, way.tx.init(params)))
        _, state = _updated(way, copied, state, batch)
        gradients.append([np.asarray(leaf) for leaf in jax.tree.leaves(optax.tree.get(state, "gradient"))])
    largest = max(np.max(np.abs(leaf)) for leaf in gradients[0])
    for way, gradient in zip(ways, gradients, strict=True):
        apart = [np.max(np.abs(leaf - exact)) for leaf, exact in zip(gradient, gradients[0], strict=True)]
        way.errors.append(float(np.max(apart) / largest))


def _table(ways: list[Way]) -> str:
    lines = [
        f"{'error of the gradient':>42}{'held-out':>13}",
        f"{'before':>31}{'after':>11}{'loss':>13}{'apart':>11}{'memory':>12}",
    ]
    for way in ways:
        apart = np.max(np.abs(np.subtract(way.losses, ways[0].losses)))
        before, after = way.errors
        columns = f"{before:>10.1e}{after:>11.1e}{way.losses[-1]:>13.4f}{apart:>11.1e}{way.megabytes:>9.1f} MB"
        lines.append(f"{way.name:<21}{columns}")
    return "\n".join(lines)


def _explanation(ways: list[Way]) -> str:
    if not all(math.isfinite(loss) for loss in ways[0].losses):
        return "The training diverged: the loss is not finite. Try a smaller --learning-rate."
    return f"""\
The loss is a mean over tokens, and rows have up to {LENGTH} of them. A scan that averages the micro-batches' losses
counts a token of a short row more than one of a long row, and so does optax.MultiSteps: they train for another loss.
value_and_grad reads from the loss what counts; accumulate_gradients gets the number of tokens as weight.

error of the gradient: before and after training, relative to the largest entry of the whole batch's gradient
apart: the largest distance from the whole batch's held-out loss
memory: what a step holds beside parameters and optimizer state, its accumulator included"""


def _draw(settings: Settings, ways: list[Way]) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ground, ink = ("#14181e", "#e0e4e8") if settings.dark else ("white", "#202428")
    colours: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink
    )
    plain: dict[Any, Any] = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 14,
        "axes.titlesize": 15,
    }
    with rc_context({"figure.facecolor": ground, "axes.facecolor": ground, **colours, **plain}):
        # Narrow, so that a phone shows its words large enough.
        figure = Figure(figsize=(6, 7.2), layout="constrained")
        losses, memory = figure.subplots(2, height_ratios=[1.8, 1])
        _draw_losses(losses, settings, ways)
        _draw_memory(memory, settings, ways, ink)
        figure.supxlabel(_versions(), fontsize=9, color="#808488")
        figure.savefig(settings.output, format="png", dpi=180)


def _lines(dark: bool) -> list[dict[str, Any]]:
    """Returns how the line of each way is drawn: lines that lie on one another all show."""
    styles = (
        ("#f2b134", "-", 11),
        ("#2f7fc1", "-", 5),
        ("#c3e4ff" if dark else "#0b2a4a", (0, (2, 2)), 1.6),
        ("#e4572e", "-", 5),
        ("#ffc9ae" if dark else "#7d1128", (0, (2, 2)), 1.6),
    )
    return [dict(zip(("color", "linestyle", "linewidth"), style, strict=True)) for style in styles]


def _draw_losses(axes: Any, settings: Settings, ways: list[Way]) -> None:
    measured = np.minimum(np.arange(len(ways[0].losses)) * CHECK, settings.updates)
    for way, line in zip(ways, _lines(settings.dark), strict=True):
        label = f"{way.name}: {_percent(way.errors[0]) if way is not ways[0] else 0}"
        axes.plot(measured, way.losses, label=label, **line)
    top = max(way.losses[1] for way in ways)  # from where they part; all start alike
    axes.set(title="Held-out loss per token", xlabel="update", ylim=(None, top))
    axes.legend(frameon=False, title="The first gradient is off by", alignment="left", handlelength=1.5)


def _percent(error: float) -> str:
    return f"{error:.0%}" if error > 0.01 else f"{error:.0e}".replace("e-0", "e-")


def _draw_memory(axes: Any, settings: Settings, ways: list[Way], ink: str) -> None:
    sizes, largest = [way.megabytes for way in ways], max(way.megabytes for way in ways)
    axes.barh(range(len(ways)), sizes, color=[line["color"] for line in _lines(settings.dark)])
    for row, way in enumerate(ways):
        inside = way.megabytes > largest / 2
        x, ink_here = (0.02 * largest, "black") if inside else (way.megabytes + 0.02 * largest, ink)
        axes.text(x, row, f"{way.name}: {way.megabytes:.1f} MB", va="center", color=ink_here)
    axes.invert_yaxis()
    axes.set(title="Memory of a step, including the accumulator", xticks=[], yticks=[])
    axes.spines["bottom"].set_visible(False)


def _versions() -> str:
    packages = [f"{package.__name__} {package.__version__}" for package in (optax_accum, jax, optax)]
    device = jax.devices()[0]
    kind = f"{os.cpu_count()} CPU cores" if device.platform == "cpu" else device.device_kind
    return f"{', '.join(packages)}; {kind}"


if __name__ == "__main__":
    raise SystemExit(main())
