"""Measuring: compile with donation, time in turn, memory, targets, tables."""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any
Table = list[Sequence[str]]  # the head, then the rows


@dataclasses.dataclass
class Runner:
    """A compiled step with what it works on: `carry = step(*carry, *constants)`, the carry donated.

    Attributes:
      name: what the tables call it.
      compiled: the step. Its results have the order of the carry: a donated buffer goes to the result in its place, and
        where the order differs XLA copies.
      carry: what the last call returned.
      constants: arguments that no call changes.
      calls: calls in one timing.
      times: seconds per call, one for each timing.
      spent: seconds in all timings.
    """

    name: str
    compiled: Callable[..., tuple[Any, ...]]
    carry: tuple[Any, ...]
    constants: tuple[Any, ...] = ()
    calls: int = 1
    times: list[float] = dataclasses.field(default_factory=list)
    spent: float = 0.0

    def run(self, inputs: Sequence[tuple[Any, ...]] = ()) -> None:
        """Times one call for each of `inputs`, or `calls` calls with the constants."""
        inputs = inputs or [self.constants] * self.calls
        jax.block_until_ready((self.carry, inputs))
        start = time.perf_counter()
        for constants in inputs:
            self.carry = self.compiled(*self.carry, *constants)
        jax.block_until_ready(self.carry)
        seconds = time.perf_counter() - start
        self.times.append(seconds / len(inputs))
        self.spent += seconds

    @property
    def best(self) -> float:
        """Seconds per call in the fastest round: what others do on the machine can only add."""
        return min(self.times)


def compile_donated(
    name: str, step: Callable[..., Any], carry: tuple[Any, ...], constants: tuple[Any, ...], calls: int = 1
) -> Runner:
    """Compiles `step(*carry, *constants) -> carry`, with a carry of its own: donating it destroys no one else's."""
    carry = jax.tree.map(jnp.copy, carry)
    donated = tuple(range(len(carry)))
    compiled = jax.jit(step, donate_argnums=donated).lower(*carry, *constants).compile()
    return Runner(name, compiled, carry, constants, calls)


def interleave(runners: Sequence[Runner], seconds: float, rounds: int) -> int:
    """Times every runner once per round, so that drift hits all, while rounds and time are left; returns the rounds.

    Timings made before count as rounds. Two rounds are made, however long they take: the first finds nothing warm.
    """
    done = len(runners[0].times)
    in_time = lambda: sum(runner.spent for runner in runners) * (done + 1) <= seconds * done
    while done < rounds and (done < 2 or in_time()):
        for runner in runners:
            runner.run()
        done += 1
    return done


def cpu_seconds(run: Callable[..., Any], *args: Any) -> float:
    """Returns the CPU time of a call, on all cores."""
    start = time.process_time()
    jax.block_until_ready(run(*args))
    return time.process_time() - start


def temporary_copies(runner: Runner, params: Tree) -> float:
    """Returns the temporary memory of the compiled step, in copies of `params`."""
    copy = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return runner.compiled.memory_analysis().temp_size_in_bytes / copy


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
