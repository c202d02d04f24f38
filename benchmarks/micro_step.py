"""The cost of one micro-step across calls, without forward and backward pass: ours, Optax's, and two functions by hand.

Run `python -m benchmarks.micro_step`. The ways take turns in one process. Before a time is printed, parameters are
compared with those of the whole batch.
"""

import time

import numpy as np

from benchmarks import _measure, _problems
from benchmarks._contenders import JAX_WAYS, OURS, UPDATE, WHOLE, Way

MODELS = ("AdamW, 4.2 M", "Muon, 4.2 M")
WAYS = (OURS, UPDATE, "optax.MultiSteps", "host loop, two functions")
NOTES = """\
Times are those of the fastest of the turns. P is one copy of the parameters. The difference is between the parameters
after one window and those of the whole batch, in units of the largest change in a leaf. By hand, one function adds and
another updates: a call more in a window."""


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--turns", type=int, default=15, help="windows of each way")
    parser.add_argument("--quick", action="store_true", help="AdamW alone, 5 turns")
    if parser.parse_args().quick:
        parser.set_defaults(turns=5)
    options = parser.parse_args()
    print(_measure.header("One micro-step across calls", NOTES))
    for model in MODELS[:1] if options.quick else MODELS:
        print(f"### {model}, k=8\n\n{table(_problems.make(model), options.turns)}\n")


def table(problem: _problems.Problem, turns: int) -> str:
    """Returns the times and the memory of each way, after all made the update of the whole batch."""
    ways = {name: JAX_WAYS[name](problem) for name in (WHOLE, *WAYS)}
    data = {name: way.place(problem.batches[0]) for name, way in ways.items()}
    for name, way in ways.items():
        way.update(data[name])
    whole = ways.pop(WHOLE).params()
    differences = {name: _problems.difference(way.params(), whole, problem.params) for name, way in ways.items()}
    _problems.judge(problem.name, differences)
    best = np.min([[_seconds(way, data[name]) for name, way in ways.items()] for _ in range(turns)], axis=0)
    head = ("contender", "ms / micro-step", "ms / window", "temporary memory / P", "difference")
    rows = []
    for (name, way), seconds in zip(ways.items(), best, strict=True):
        temporary = max(program.memory_analysis().temp_size_in_bytes for program, _ in way.programs(data[name]))
        times = _measure.digits(1e3 * seconds / problem.k), _measure.digits(1e3 * seconds)
        rows.append((name, *times, f"{temporary / problem.size:.3f}", f"{differences[name]:.0e}"))
    return _measure.markdown([head, *rows])


def _seconds(way: Way, data: list[_problems.Batch]) -> float:
    way.wait()
    start = time.perf_counter()
    way.update(data)
    way.wait()
    return time.perf_counter() - start


if __name__ == "__main__":
    _measure.command(main)
