"""The comparison with what people would use instead: one model, its data and k, each way in a fresh process.

Run `python -m benchmarks.peers --quick`, or without `--quick` for all tables. Before a table prints a time, the
parameters of all ways after the same batches are compared with those of the whole batch.
"""

import contextlib
import importlib.util
import os
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from tqdm import tqdm

from benchmarks import _measure, _problems
from benchmarks._contenders import OURS, WAYS
from benchmarks._measure import digits
from benchmarks._problems import difference, judge
from benchmarks._process import Process

MODELS = ("CNN on digits", "decoder of stacked layers", "MLP with Muon", "model of 2000 leaves")

NOTES = """\
An update is made of one batch, cut into k micro-batches; "whole batch" makes it in one piece. Each way runs in a fresh
process; they take turns (the largest run one by one), and times are those of the fastest turn. Time and memory are
ratios to `apply_gradients` first. Memory is the largest resident memory of the process, with its libraries, its
compiler and a copy of the first parameters; program is what the compiler counts for the largest program (arguments,
results, temporaries), in copies P of the parameters. Compile is the time of the first update less the fastest. Host
is the CPU time of the calling thread for each micro-step; PyTorch computes in that thread, JAX does when there is
little to compute. A call costs the host something for each array that it takes and returns: with 2000 leaves that is
nearly all of the time, and one call for an update takes a tenth of eight that carry the state. Difference: the
parameters after the compared batches and those of the whole batch, in units of the largest change in a leaf. XLA for
CPUs runs convolutions many times slower in a loop (jax-ml/jax#12868): for the CNN the hand-written scan is unrolled,
`optax.microbatch` and the scan as in MaxText are as they come."""


class Case(NamedTuple):
    """One table."""

    problem: str
    k: int = 8
    size: int | None = None
    ways: Sequence[str] = tuple(WAYS)

    def __str__(self) -> str:
        return f"{self.problem}, k={self.k}"


class Row(NamedTuple):
    """What one way took; seconds of an update, host seconds of a micro-step, bytes."""

    seconds: float
    host: float
    compile: float
    peak: int
    program: int | None
    difference: float


class Table(NamedTuple):
    """The numbers of one case; what did not run says why."""

    case: Case
    rows: dict[str, Row]
    absent: dict[str, str]
    copy: int  # bytes of the parameters


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=30, help="of timing for a table; two rounds are always made")
    parser.add_argument("--quick", action="store_true", help="the CNN alone, 5 seconds")
    if parser.parse_args().quick:
        parser.set_defaults(models=MODELS[:1], seconds=5)
    options = parser.parse_args()
    tqdm.write(_measure.header("Side by side", NOTES))
    for model in tqdm(options.models, unit="table", leave=False, disable=None):
        tqdm.write(_rendered(measured(Case(model), options.seconds)))


def measured(case: Case, seconds: float = 5, rounds: int = 20) -> Table:
    """Compares the parameters of all ways, then times them in turn; what cannot run says why."""
    problem = _problems.make(case.problem, case.k, case.size)
    absent = {name: reason for name in case.ways if (reason := why_not(name, problem))}
    there = [name for name in case.ways if name not in absent]
    rows: dict[str, Row] = {}
    whole = None
    for group in _groups(there, problem):
        with contextlib.ExitStack() as stack:
            processes = [Process(name, case.problem, case.k, case.size) for name in group]
            for process in processes:
                stack.callback(process.close)
            for process in processes:
                process.begin()
            whole = whole or processes[0].params  # the first way is the whole batch
            differences = {process.name: difference(process.params, whole, problem.params) for process in processes}
            judge(case, differences)
            _in_turn(processes, seconds * len(group) / len(there), rounds)
            for process in processes:
                process.end()
            rows |= {process.name: _row(process, case.k, differences[process.name]) for process in processes}
    return Table(case, rows, absent, problem.size)


def _groups(names: list[str], problem: _problems.Problem) -> list[list[str]]:
    """Returns the ways that run together: all, or one by one where they would not fit into half of the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    each = 400e6 + 8 * problem.size + 1e6 * len(problem.params)  # compiling takes about so much for each leaf
    return [names] if len(names) * each < memory / 2 else [[name] for name in names]


def why_not(name: str, problem: _problems.Problem) -> str:
    """Returns why a way is not run here, or ""."""
    way = WAYS[name]
    missing = [package for package in way.needs if importlib.util.find_spec(package) is None]
    if missing:
        return f"not run: {', '.join(missing)} is not installed"
    return f"n/a: {reason}" if (reason := way.refuses(problem)) else ""


def _in_turn(processes: Sequence[Process], seconds: float, rounds: int) -> None:
    for done in range(rounds):
        if done >= 2 and sum(sum(p.seconds) for p in processes) * (done + 1) > seconds * done:
            break
        for process in processes:
            process.update()


def _row(process: Process, k: int, difference: float) -> Row:
    facts = process.facts
    host = statistics.median(process.host) / k
    best = min(process.seconds)
    return Row(best, host, max(0, facts["seconds"] - best), facts["peak"], facts["program"], difference)


def _rendered(table: Table) -> str:
    ours = table.rows[OURS]
    head = ("way", "time / ours", "memory / ours", "program / P", "host, ms", "ms", "compile, s", "MB", "difference")
    lines = [head]
    for name in table.case.ways:
        if name in table.absent:
            lines.append((f"{name}: {table.absent[name]}", *[""] * (len(head) - 1)))
            continue
        row = table.rows[name]
        ratios = f"{row.seconds / ours.seconds:.2f}", f"{row.peak / ours.peak:.2f}"
        program = f"{row.program / table.copy:.1f}" if row.program else ""
        rest = f"{row.compile:.1f}", f"{row.peak / 1e6:.0f}", f"{row.difference:.0e}"
        lines.append((name, *ratios, program, digits(1e3 * row.host), digits(1e3 * row.seconds), *rest))
    return f"### {table.case}\n\n{_measure.markdown(lines)}\n"


if __name__ == "__main__":
    _measure.command(main)
