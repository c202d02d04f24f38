"""What each way to accumulate, and each policy, takes to trace and compile: in turns, in one process, in CPU time.

Run `python -m benchmarks.compile_time`. Before a time is printed, the parameters after an update are compared.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import optax_accum
from benchmarks import _measure, _problems
from benchmarks._contenders import JAX_WAYS, OURS

MODELS = (
    "MLP",
    "MLP with Muon",
    "CNN on digits",
    "decoder of stacked layers",
    "decoder in bfloat16",
    "decoder in a Python loop",
    "model of 100 leaves",
)
BY_HAND, OURS_WITHIN = "hand-written scan", "ours: value_and_grad"
WAYS = (BY_HAND, "optax.MultiSteps", "optax.microbatch", OURS, OURS_WITHIN)
TOLERANCE = 1e-3  # of the largest parameter of a leaf; rounding stays far below
BFLOAT16 = 2e-2  # the same, of a loss that computes in bfloat16
GOAL = 1.05
POLICIES, LEAVES = ("propagate", "skip", "omit", "discard"), 600

NOTES = """\
An update of k micro-batches, traced, lowered and compiled: CPU time of all threads, in one process, where the ways take
turns. Each ratio is to the hand-written scan of the same turn; the medians of all turns, and for ours the quartiles."""


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--every", type=int, default=8, help="micro-batches of an update")
    parser.add_argument("--turns", type=int, default=9, help="how often each is compiled")
    options = parser.parse_args()
    tqdm.write(_measure.header("Compile time", NOTES))
    rows: list[tuple[str, ...]] = [(f"k={options.every}", f"{BY_HAND}, ms", *WAYS[1:])]
    verdicts = []
    for model in options.models:
        times = measured(_problems.make(model, options.every), options.turns)
        ratios = times / times[:, :1]
        rows.append((model, _measure.digits(1e3 * float(np.median(times[:, 0]))), *_cells(ratios[:, 1:])))
        ratio = float(np.median(ratios[:, WAYS.index(OURS_WITHIN)]))
        where = f"{model}, median of {options.turns} turns"
        verdicts.append(_measure.verdict(f"{OURS_WITHIN} / {BY_HAND}, to compile", ratio, GOAL, where))
    tqdm.write(f"{_measure.markdown(rows)}\n")
    times = policies(options.turns)
    head = ("nonfinite=", f"/ {POLICIES[0]}", "quartiles of the turns", "ms")
    table = _measure.markdown([head, *_measure.by_turns(POLICIES, times)])
    tqdm.write(f"### A micro-step of {LEAVES} leaves, Adam\n\n{table}\n")
    ratio = float(np.median(times[:, 1] / times[:, 0]))
    verdicts.append(_measure.verdict('to trace and compile, "skip" / "propagate"', ratio, 1.3, f"{LEAVES} leaves"))
    tqdm.write(_measure.targets_text(verdicts))


def _cells(ratios: np.ndarray) -> list[str]:
    """Returns the median of each way but the first, with quartiles where a way is ours."""
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75], axis=0)
    return [
        f"{m:.2f} ({a:.2f} to {b:.2f})" if way in (OURS, OURS_WITHIN) else f"{m:.2f}"
        for way, m, a, b in zip(WAYS[1:], middle, low, high, strict=True)
    ]


def measured(problem: _problems.Problem, turns: int) -> np.ndarray:
    """Returns seconds [turn, way], after all ways made the same update."""
    results = [_compiled(problem, way, update=True)[1] for way in WAYS]  # compiles what a process compiles once, too
    errors = [_measure.relative_difference(each, results[0]) for each in results]
    if not max(errors) <= (BFLOAT16 if "bfloat16" in problem.name else TOLERANCE):
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


def policies(turns: int) -> np.ndarray:
    """Returns seconds [turn, policy] that a micro-step over many small leaves takes."""
    params = {str(number): jnp.ones((8, 8)) for number in range(LEAVES)}

    def seconds(nonfinite: str) -> float:
        tx = optax_accum.accumulate_gradients(optax.adam(1e-3), 4, nonfinite=nonfinite)
        step = jax.jit(lambda p, s, g: optax_accum.apply_gradients(tx, g, s, p), donate_argnums=(0, 1))
        state, start = tx.init(params), time.process_time()
        step.lower(params, state, params).compile()
        return time.process_time() - start

    seconds(POLICIES[0])  # compiles what a process compiles once, too
    return np.array([[seconds(policy) for policy in POLICIES] for _ in range(turns)])


if __name__ == "__main__":
    _measure.command(main)
