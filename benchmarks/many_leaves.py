"""What a micro-step costs with many small arrays: one program, two programs of `jit_step`, and functions by hand.

Run `python -m benchmarks.many_leaves`. The ways take turns in one process; each turn gives ratios of CPU time. Before a
time is printed, parameters are compared.
"""

import time

import jax
import numpy as np

from benchmarks import _measure, _problems
from benchmarks._contenders import Across, HostLoop, MultiSteps, OursAcross, OursInTwoPrograms

BY_HAND, ONE, TWO, THEIRS = "two functions by hand", "`jax.jit`", "`jit_step`", "`optax.MultiSteps`"
WAYS: dict[str, type[Across]] = {BY_HAND: HostLoop, ONE: OursAcross, TWO: OursInTwoPrograms, THEIRS: MultiSteps}
TOLERANCE = 1e-5  # of the largest parameter of a leaf
GOALS = {100: 1.2, 600: 0.8, 2000: 0.8}


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--leaves", type=int, nargs="+", default=list(GOALS), help="arrays of 8 numbers each")
    parser.add_argument("--every", type=int, default=8, help="micro-steps of a window")
    parser.add_argument("--turns", type=int, default=15, help="windows of each way")
    options = parser.parse_args()
    notes = (
        f"SGD with momentum, {options.every} micro-steps a window: CPU time of all threads, in one process, where the "
        f"ways take turns. Medians of {options.turns} windows. A micro-step that adds is one of the first "
        f"{options.every - 1}; by hand, one function adds and another updates."
    )
    print(_measure.header("Micro-steps with many small arrays", notes))
    verdicts = []
    for leaves in options.leaves:
        adding, window = measured(leaves, options.every, options.turns)
        for what, times in (("a micro-step that adds", adding), ("a window", window)):
            head = (what, f"/ {BY_HAND}", "quartiles of the turns", "ms")
            table = _measure.markdown([head, *_measure.by_turns(WAYS, times)])
            print(f"### {leaves} arrays, {what}\n\n{table}\n")
        if leaves in GOALS:
            ratio = float(np.median(adding[:, list(WAYS).index(TWO)] / adding[:, 0]))
            what = f"{TWO} / {BY_HAND}, a micro-step that adds"
            verdicts.append(_measure.verdict(what, ratio, GOALS[leaves], f"{leaves} arrays"))
    print(_measure.targets_text(verdicts))


def measured(leaves: int, every: int, turns: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns seconds [turn, way] of a micro-step that adds, and of a window, after all ways made the same update."""
    problem = _problems.make("model of 2000 leaves", every, leaves)
    ways = {name: way(problem) for name, way in WAYS.items()}
    data = {name: way.place(problem.batches[0]) for name, way in ways.items()}
    for name, way in ways.items():
        way.update(data[name])
    for name, way in ways.items():
        error = _measure.relative_difference(way.params(), ways[BY_HAND].params())
        assert error < TOLERANCE, (name, error)
    times = np.array([[_seconds(way, data[name]) for name, way in ways.items()] for _ in range(turns)])
    return times[..., 0], times[..., 1]


def _seconds(way: Across, data: list[tuple[jax.Array, ...]]) -> tuple[float, float]:
    """Returns the CPU time of a micro-step that adds, and of a window."""
    way.wait()
    start = time.process_time()
    way.hold(data[:-1])
    way.wait()
    added = time.process_time()
    way.update(data[-1:])
    way.wait()
    return (added - start) / (len(data) - 1), time.process_time() - start


if __name__ == "__main__":
    _measure.command(main)
