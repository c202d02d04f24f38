"""The counts of verdicts: false alarms in what is sound, and misses among planted faults.

`python -m benchmarks._verdicts` writes the tables of faults into docs/check_your_step.md.
"""

import argparse
import collections
import pathlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from tqdm import tqdm

from benchmarks import _measure
from optax_accum.verify import _faults as step_faults

PAGE = pathlib.Path(__file__).parent.parent / "docs/check_your_step.md"
TABLES = {"verify_step": step_faults.FAULTS}
Styles = dict[str, collections.Counter[str]]


class Problem(Protocol):
    """What is judged."""

    name: str

    def report(self) -> Any:
        """Returns the report."""


def options(
    about: str, command: str, sound: str, most: tuple[int, int], kinds: Sequence[str], **flags: str
) -> argparse.Namespace:
    """Returns what the command line asks for; `most` are the default numbers of sound ones and of faults.

    `flags` are more of them, each with its help.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{command}", description=about.splitlines()[0])
    parser.add_argument(f"--{sound}", type=int, default=most[0], dest="sound", help=f"sound {sound}")
    parser.add_argument("--faults", type=int, default=most[1], help="planted faults of each kind")
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--output", type=_measure.writable, help="write the counts here, too: .json, or else Markdown")
    for name, says in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=says)
    return parser.parse_args()


def count(
    asked: argparse.Namespace,
    command: str,
    sound: str,
    notes: str,
    sound_problem: Callable[[int], Problem],
    fault: Callable[[str, int], Problem],
    style: str | None = None,
    unnamed: str | None = None,
) -> None:
    """Judges sound problems and planted faults, prints the counts, and ends: with 1 for a false alarm or a miss.

    `style` says what stands before the first comma of a problem's name, to count how many of them there were; `unnamed`
    is a cause that a fault may be given instead of its own.
    """
    jax.config.update("jax_disable_most_optimizations", True)  # compiling is most of the time
    start = time.perf_counter()
    cases = [(i, "sound") for i in range(asked.sound)]
    cases += [(i, kind) for kind in asked.kinds for i in range(asked.faults)]
    counts = {kind: [0, 0, 0] for kind in asked.kinds}  # planted, found, named right
    styles: Styles = collections.defaultdict(collections.Counter)
    alarms, wrong = 0, []
    for number, kind in tqdm(cases, unit="problem", leave=False, disable=None):
        problem = sound_problem(number) if kind == "sound" else fault(kind, number)
        found, causes = _verdict(problem)
        named = causes[:1] == [kind]
        styles[kind][problem.name.split(",")[0]] += 1
        if kind == "sound":
            alarms += found
        else:
            counts[kind] = [a + b for a, b in zip(counts[kind], (1, found, named), strict=True)]
        if found if kind == "sound" else not (named or causes[:1] == [unnamed]):
            wrong.append((number, kind, problem.name, causes))
            tqdm.write(f"{kind} {number} ({problem.name}): {causes or 'nothing'} found")
        if number + 1 == (asked.sound if kind == "sound" else asked.faults):  # all kinds may take half an hour
            tqdm.write(f"{kind}: {number + 1} run, {sum(case[1] == kind for case in wrong)} wrong", file=sys.stderr)
    among = f", in {len(styles['sound'])} {style}" if style else ""
    lines = [
        _measure.header(f"False alarms and misses of {command}", notes),
        _table(counts, styles, style),
        f"\nSound {sound}: {asked.sound}{among}. False alarms: {alarms}. Target (no false alarm, no miss): "
        f"{'MISSED' if wrong else 'met'}.",
        f"Time: {time.perf_counter() - start:.0f} s.",
    ]
    tqdm.write(text := "\n".join(lines))
    if asked.output:
        _measure.write(asked.output, text, {"alarms": alarms, "counts": counts, "wrong": wrong})
    sys.exit(1 if wrong else 0)


def _table(counts: dict[str, list[int]], styles: Styles, style: str | None) -> str:
    head, more = ["kind", "planted", "found", "named right"], [f"in how many {style}"] if style else []
    rows = [[kind, *map(str, of), *([str(len(styles[kind]))] if style else [])] for kind, of in counts.items()]
    return _measure.markdown([tuple(row) for row in ([*head, *more], *rows)])


def _verdict(problem: Problem) -> tuple[bool, list[str]]:
    """Returns whether the law is said not to hold, and the causes that are named; or what was raised."""
    try:
        report = problem.report()
    except (TypeError, ValueError) as error:
        return True, [repr(error)]
    return not report.holds, [cause.kind for cause in report.causes]


def page(text: str) -> str:
    """Returns a page with the tables of faults that it asks for as they are now."""

    def table(name: str) -> str:
        rows = [(f"`{fault.name}`", fault.makes) for fault in TABLES[name]]
        head = ("named", "what becomes of the micro-batches")
        return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * 2, *rows))

    of = lambda found: f"{found[1]}\n\n{table(found[2])}\n"
    return re.sub(r"(<!-- faults: (\w+) -->)\n\n(?:\|.*\n)*", of, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
