"""Measuring: compile with donation, time in turn, memory, targets, tables."""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import platform
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


def _leaf_difference(got: jax.Array, expected: jax.Array) -> jax.Array:
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    scale = jnp.max(jnp.abs(expected))
    return jnp.max(jnp.abs(got - expected)) / jnp.where(scale == 0, 1, scale)


@dataclasses.dataclass(frozen=True)
class Target:
    """A number to reach in every table that counts, so in the worst of them.

    Attributes:
      what: the number.
      counts: `counts(table.case)`: whether it is read from this table.
      value: reads it.
      bound: what to reach.
      at_least: whether more is better.
    """

    what: str
    counts: Callable[[Any], bool]
    value: Callable[[Any], float]
    bound: float
    at_least: bool = False


def judged(target: Target, measured: Iterable[Any]) -> dict[str, Any]:
    """Returns the target, what was measured (to the two decimals that are printed), the verdict, and where."""
    counted = [table for table in measured if target.counts(table.case)]
    if not counted:
        return verdict(target.what, None, target.bound, "", at_least=target.at_least)
    worst = (min if target.at_least else max)(counted, key=target.value)
    many = f", worst of {len(counted)}" if len(counted) > 1 else ""
    return verdict(target.what, target.value(worst), target.bound, f"{worst.case}{many}", at_least=target.at_least)


def verdict(what: str, value: float | None, bound: float, where: str, *, at_least: bool = False) -> dict[str, Any]:
    """Returns a number to reach, what was measured, and whether it was reached."""
    row = {"number": what, "target": f"{'>=' if at_least else '<='} {bound:g}"}
    if value is None:
        return row | {"measured": None, "verdict": "not measured", "where": where}
    value = round(float(value), 2)
    met = value >= bound if at_least else value <= bound
    return row | {"measured": value, "verdict": "met" if met else "MISSED", "where": where}


def targets_text(verdicts: Sequence[dict[str, Any]]) -> str:
    """Returns what `judged` says, as a Markdown section."""
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


def writable(text: str) -> pathlib.Path:
    """Returns an option as the path of a file that can be written, before anything is measured."""
    path = pathlib.Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"must be a file that can be written: {text}. Its folder must exist.")
    return path


def command(main: Callable[[], Any]) -> None:
    """Runs the main function of a benchmark; Ctrl-C ends it in one line."""
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted.") from None


def write(path: pathlib.Path, text: str, record: Any) -> None:
    """Writes the record where the path ends in `.json`, else the text."""
    try:
        path.write_text((json.dumps(record, indent=2) if path.suffix == ".json" else text) + "\n")
    except OSError as error:
        raise SystemExit(f"{path} cannot be written: {error.strerror}.") from None
