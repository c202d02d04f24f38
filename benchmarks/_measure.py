"""Measuring: compile with donation, time in turn, memory, targets, tables."""

import argparse
import math
import os
import pathlib
import platform
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any
Table = list[Sequence[str]]  # the head, then the rows


def relative_difference(got: Tree, expected: Tree) -> float:
    """Returns `max |got - expected| / max |expected|` of the leaf where it is largest; NaN if one holds a NaN."""

    @jax.jit
    def per_leaf(got: Tree, expected: Tree) -> list[jax.Array]:
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        return [_leaf_difference(a, b) for a, b in pairs if a.size]

    differences = [float(leaf) for leaf in per_leaf(got, expected)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def gradient_difference(ours: Tree, whole: Tree) -> float:
    """Returns the largest difference of gradients, over the largest entry of all; of values, as above."""
    (our_value, our_grads), (value, grads) = ours, whole
    scale = max(float(abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    apart = jax.tree.map(lambda a, b: float(abs(a - b).max()) / scale, our_grads, grads)
    return max(relative_difference(our_value, value), *jax.tree.leaves(apart))


def _leaf_difference(got: jax.Array, expected: jax.Array) -> jax.Array:
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    scale = jnp.max(jnp.abs(expected))
    return jnp.max(jnp.abs(got - expected)) / jnp.where(scale == 0, 1, scale)


def cpu_seconds(run: Callable[..., Any], *args: Any) -> float:
    """Returns the CPU time of a call, on all cores."""
    start = time.process_time()
    jax.block_until_ready(run(*args))
    return time.process_time() - start


def worst(
    what: str, rows: Sequence[Any], value: Callable[[Any], float], bound: float, *, at_least: bool = False
) -> dict[str, Any]:
    """Returns the verdict on a number to reach in every row, so in the worst of them."""
    if not rows:
        return verdict(what, None, bound, "", at_least=at_least)
    found = (min if at_least else max)(rows, key=value)
    many = f", worst of {len(rows)}" if len(rows) > 1 else ""
    return verdict(what, value(found), bound, f"{found}{many}", at_least=at_least)


def verdict(what: str, value: float | None, bound: float, where: str, *, at_least: bool = False) -> dict[str, Any]:
    """Returns a number to reach, what was measured (to two decimals), and whether it was reached."""
    row = {"number": what, "target": f"{'>=' if at_least else '<='} {bound:g}"}
    if value is None:
        return row | {"measured": None, "verdict": "not measured", "where": where}
    value = round(float(value), 2)
    met = value >= bound if at_least else value <= bound
    return row | {"measured": value, "verdict": "met" if met else "MISSED", "where": where}


def targets_text(verdicts: Sequence[dict[str, Any]]) -> str:
    """Returns verdicts as a Markdown section."""
    show = lambda value: "" if value is None else f"{value:.2f}" if isinstance(value, float) else value
    rows = [tuple(map(show, verdict.values())) for verdict in verdicts]
    return "### Targets\n\n" + markdown([("number", "target", "measured", "verdict", "where"), *rows], left=(0, 3, 4))


def machine() -> dict[str, str]:
    """Returns what a reader needs to know about the machine and the versions."""
    device = jax.devices()[0]
    return {
        "device": f"platform {device.platform}, kind {device.device_kind}, number {jax.device_count()}",
        "host": f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "versions": f"Python {platform.python_version()}, JAX {jax.__version__}, Optax {optax.__version__}",
    }


def header(title: str, notes: str) -> str:
    """Returns the title, the facts of `machine` and how to read the tables, as Markdown."""
    facts = [f"* {name}: {value}" for name, value in machine().items()]
    return "\n".join([f"## {title}", "", *facts, "", notes, ""])


def markdown(table: Table, left: Sequence[int] = (0,)) -> str:
    """Returns a Markdown table with aligned columns, numbers to the right; `left` names the columns of words."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.ljust(widths[i]) if i in left else cell.rjust(widths[i]) for i, cell in enumerate(cells)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * w if i in left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(table[0]), line(rule), *map(line, table[1:])])


def by_turns(names: Iterable[str], seconds: np.ndarray) -> list[tuple[str, ...]]:
    """Returns table rows of times [turn, contender]: the median ratio to the first, its quartiles, the median in ms.

    Each turn gives a ratio of its own: a machine is faster or slower for minutes at a time.
    """
    low, middle, high = np.quantile(seconds / seconds[:, :1], [0.25, 0.5, 0.75], axis=0)
    cells = zip(names, middle, low, high, 1e3 * np.median(seconds, axis=0), strict=True)
    return [(name, f"{m:.2f}", f"{a:.2f} to {b:.2f}", digits(ms)) for name, m, a, b, ms in cells]


def digits(value: float) -> str:
    """Returns `value` with three significant digits and without an exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def parser(document: str | None) -> argparse.ArgumentParser:
    """Returns a parser of options whose help is a module's docstring."""
    return argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)


def writable(text: str) -> pathlib.Path:
    """Returns an option as the path of a file that can be written, before anything is measured."""
    path = pathlib.Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"must be a file that can be written: {text}. Its folder must exist.")
    return path


def filled(text: str, kind: str, table: Callable[[re.Match[str]], str]) -> str:
    """Returns a page with `table(mark)` after each of its marks `<!-- kind -->`, in the place of an old table."""
    marked = re.compile(rf"(?P<mark><!-- {kind} -->\n)(?:\n\|.*(?:\n\|.*)*\n)?")
    return marked.sub(lambda found: f"{found['mark']}\n{table(found).rstrip()}\n", text)


def command(main: Callable[[], Any]) -> None:
    """Runs the main function of a benchmark; Ctrl-C ends it in one line."""
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted.") from None


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file, or ends the run in one line."""
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise SystemExit(f"{path} cannot be written: {error.strerror}.") from None
