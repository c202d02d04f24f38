"""What each way to accumulate takes to trace and compile: in turns, in one process, in CPU time.

Run `python -m benchmarks.compile_time`. Before a time is printed, the parameters after an update are compared.
"""

import argparse
import time

import numpy as np
from tqdm import tqdm

from benchmarks import _measure, _problems
from benchmarks._ways import JAX_WAYS, OURS, OURS_WITHIN

MODELS = ("decoder of stacked layers", "MLP with Muon")
WAYS = ("optax.MultiSteps", "hand-written scan", "optax.microbatch", OURS, OURS_WITHIN)  # the first is 1
TOLERANCE = 1e-3  # of the largest parameter of a leaf; rounding stays far below
GOAL = 1.2

NOTES = """\
An update of k micro-batches, traced, lowered and compiled: CPU time of all threads, in one process, where the ways take
turns. Each ratio is that of one turn; medians and quartiles are of all turns."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--every", type=int, default=8, help="micro-batches of an update")
    parser.add_argument("--turns", type=int, default=9, help="how often each is compiled")
    options = parser.parse_args()
    tqdm.write(_measure.header("Compile time", NOTES))
    verdicts = []
    for model in options.models:
        times = measured(_problems.make(model, options.every), options.turns)
        rows = [("way", f"/ {WAYS[0]}", "quartiles of the turns", "ms"), *_measure.by_turns(WAYS, times)]
        tqdm.write(f"### {model}, k={options.every}\n\n{_measure.markdown(rows)}\n")
        for way in (OURS, OURS_WITHIN):
            ratio = float(np.median(times[:, WAYS.index(way)] / times[:, 0]))
            where = f"{model}, median of {options.turns} turns"
            verdicts.append(_measure.verdict(f"{way} / {WAYS[0]}, to compile", ratio, GOAL, where))
    tqdm.write(_measure.targets_text(verdicts))


def measured(problem: _problems.Problem, turns: int) -> np.ndarray:
    """Returns seconds [turn, way], after all ways made the same update."""
    results = [_compiled(problem, way, update=True)[1] for way in WAYS]  # compiles what a process compiles once, too
    errors = [_measure.relative_difference(each, results[0]) for each in results]
    if not max(errors) <= TOLERANCE:
        raise SystemExit(f"{problem.name}: one of {WAYS} makes another update: {errors}.")
    progress = tqdm(range(turns), unit="turn", leave=False, disable=None)
    return np.array([[_compiled(problem, way)[0] for way in WAYS] for _ in progress])


def _compiled(problem: _problems.Problem, way: str, update: bool = False) -> tuple[float, _problems.Params]:
    """Returns the CPU seconds of a way's programs, made anew, and the parameters after an update, if one is made."""
    runs = JAX_WAYS[way](problem)
    data = runs.place(problem.batches[0])
    start = time.process_time()
    runs.programs(data)
    seconds = time.process_time() - start
    if update:
        runs.update(data)
    return seconds, runs.params()


if __name__ == "__main__":
    _measure.command(main)
