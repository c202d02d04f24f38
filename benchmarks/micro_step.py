"""The cost of one micro-step across calls: ours, `optax.MultiSteps`, `optax.apply_every`, and the floor.

Run `python -m benchmarks.micro_step --quick`, or without `--quick` for all tables; each has its own process. Before
a table prints a time, the results are compared: the update of a window must be that of the inner optimizer on the mean
gradient.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import optax_accum
from benchmarks import _measure
from benchmarks._measure import Runner, Target, Tree, digits

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "SGD": lambda: optax.sgd(1e-2, momentum=0.9),
    "AdamW": lambda: optax.adamw(1e-2),
    "Adafactor": lambda: optax.adafactor(1e-2),
    "Muon": lambda: optax.contrib.muon(1e-2),
}
LAYERS = 16  # each of a matrix [width, width] and a bias [width]
WIDTHS = {"1.1M": 256, "4.2M": 512, "16.8M": 1024, "67.1M": 2048, "268.5M": 4096}

FLOOR = "floor: acc + g"
INNER = "inner optimizer alone"
APPLY = "ours: apply_gradients"
STATISTICS = "ours: apply_gradients, statistics"
UPDATE = "ours: update"
MULTI_STEPS = "optax.MultiSteps"
APPLY_EVERY = "optax.apply_every"

# Of the largest entry of a leaf. Rounding on CPU stays below 1e-5; a wrong divisor or a lost micro-step is far above.
TOLERANCE = 1e-3

NOTES = """\
Times are those of the fastest round; the contenders take turns. P is one copy of the parameters. The inner optimizer
alone has one call per window. The difference is between the update and inner state after one window and those of the
inner optimizer on the mean gradient, in units of the largest entry of a leaf; a way that makes another update has no
other number."""


class Case(NamedTuple):
    """One table."""

    optimizer: str
    size: str
    every: int

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.size[:-1]} M, k={self.every}"


class Problem(NamedTuple):
    """What all start from. The gradient of micro-step i is `grads + cos(i) ripple`, and `grads` when it is timed."""

    inner: optax.GradientTransformation
    every: int
    params: Tree
    grads: Tree
    ripple: Tree  # [as params], each entry at most half of that of `grads`


class Contender(NamedTuple):
    """`step(params, state, grads) -> (params, state)`, its first state, and where in it the inner optimizer's lies."""

    step: Callable[[Tree, Any, Tree], tuple[Tree, Any]]
    state: Any
    inner_state: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Measured:
    """The numbers of one table; each dict goes by contender; `difference` has those that are not timed, too."""

    case: Case
    rounds: int
    seconds: dict[str, float]  # per call
    temporary: dict[str, float]  # copies of the parameters
    difference: dict[str, float]  # from the inner optimizer on the mean gradient

    def window(self, name: str) -> float:
        """Seconds per window, in which the inner optimizer alone has one call."""
        return self.seconds[name] * (1 if name == INNER else self.case.every)

    @property
    def ideal(self) -> float:
        """Seconds for what a window cannot do without: k adds and one update."""
        return self.window(FLOOR) + self.window(INNER)


def main() -> None:
    options = _options()
    if options.here:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
        (case,) = _cases(options)
        print(json.dumps(dataclasses.asdict(_measured(case, options.seconds, options.rounds))))
        return
    said = [_measure.header("One micro-step across calls", NOTES)]
    tqdm.write(said[-1])
    tables = []
    for case in (progress := tqdm(list(_cases(options)), unit="table", leave=False, disable=None)):
        progress.set_description(str(case))
        tables.append(_elsewhere(case, options.seconds, options.rounds))
        said.append(_rendered(tables[-1]))
        tqdm.write(said[-1])
    verdicts = [_measure.judged(target, tables) for target in _targets()]
    said.append(_measure.targets_text(verdicts))
    tqdm.write(said[-1])
    if options.output:
        _measure.write(options.output, "\n".join(said), _record(tables, verdicts))


_SIZES = "parameters; in small trees the 0.2 ms of dispatching a call show"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro_step", description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--sizes", nargs="+", choices=WIDTHS, default=["4.2M", "16.8M"], help=_SIZES)
    parser.add_argument("--every", nargs="+", type=int, default=[1, 2, 8, 32], help="micro-steps in a window")
    parser.add_argument("--rounds", type=int, default=30, help="at most; the compared window is the first")
    parser.add_argument("--seconds", type=float, default=10, help="of timing per table; two rounds are always made")
    parser.add_argument("--quick", action="store_true", help="one table: AdamW, 4.2M, k=8, 5 seconds")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=_measure.writable, help="write the tables here, too: .json, or else Markdown")
    # As defaults: an option that is given beside --quick still counts.
    quick = {"optimizers": ["AdamW"], "sizes": ["4.2M"], "every": [8], "seconds": 5}
    if parser.parse_args().quick:
        parser.set_defaults(**quick)
    options = parser.parse_args()
    if min(*options.every, options.rounds) < 1:
        parser.error(f"--every and --rounds count from 1: every={options.every}, rounds={options.rounds}.")
    return options


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    for optimizer in options.optimizers:
        for size in options.sizes:
            for every in options.every:
                yield Case(optimizer, size, every)


def _elsewhere(case: Case, seconds: float, rounds: int) -> Measured:
    """Measures in a fresh process: leftovers of other cases in a process's memory cost some programs twice."""
    asked = ["--optimizers", case.optimizer, "--sizes", case.size, "--every", str(case.every)]
    command = [
        sys.executable,
        "-m",
        "benchmarks.micro_step",
        "--here",
        *asked,
        f"--seconds={seconds}",
        f"--rounds={rounds}",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)  # it has said why
    found = json.loads(done.stdout.splitlines()[-1])
    return Measured(**found | {"case": Case(*found["case"])})


def _measured(case: Case, seconds: float, rounds: int) -> Measured:
    """Compares what the contenders compute in one window, which is the first round, then times the other rounds."""
    problem = _problem(case)
    contenders = _contenders(problem)
    runners = {name: _compiled(name, contender, problem) for name, contender in contenders.items()}
    difference = _compared(case, problem, contenders, runners)
    runners = {name: runner for name, runner in runners.items() if _same_update(case, name)}
    return Measured(
        case=case,
        rounds=_measure.interleave(list(runners.values()), seconds, rounds),
        seconds={name: runner.best for name, runner in runners.items()},
        temporary={name: _measure.temporary_copies(runner, problem.params) for name, runner in runners.items()},
        difference=difference,
    )


def _problem(case: Case) -> Problem:
    random = np.random.default_rng(0)
    width = WIDTHS[case.size]
    layer = lambda: {"w": random.standard_normal([width, width], np.float32), "b": np.ones(width, np.float32)}
    tree = lambda: {f"layer_{i}": jax.tree.map(jnp.asarray, layer()) for i in range(LAYERS)}
    grads = tree()
    # No entry changes its sign within the window: where a mean cancels, its rounding is not that of its terms.
    ripple = jax.tree.map(lambda grad: 0.5 * grad * jnp.cos(10 * grad), grads)
    params = jax.tree.map(lambda leaf: 0.02 * leaf, tree())
    return Problem(OPTIMIZERS[case.optimizer](), case.every, params, grads, ripple)


def _contenders(problem: Problem) -> dict[str, Contender]:
    inner, every, params = problem.inner, problem.every, problem.params
    accumulate = optax_accum.accumulate_gradients(inner, every)
    measure = optax_accum.accumulate_gradients(inner, every, statistics=True)
    multi_steps = optax.MultiSteps(inner, every)
    chain = optax.chain(inner, optax.apply_every(every))
    apply = lambda tx: lambda params, state, grads: optax_accum.apply_gradients(tx, grads, state, params)
    same = lambda state: state
    wrapped = lambda state: state.inner_opt_state
    return {
        FLOOR: Contender(_floor_step, jax.tree.map(jnp.zeros_like, params), same),
        INNER: Contender(_update_step(inner), inner.init(params), same),
        APPLY: Contender(apply(accumulate), accumulate.init(params), wrapped),
        STATISTICS: Contender(apply(measure), measure.init(params), wrapped),
        UPDATE: Contender(_update_step(accumulate), accumulate.init(params), wrapped),
        MULTI_STEPS: Contender(_update_step(multi_steps), multi_steps.init(params), wrapped),
        APPLY_EVERY: Contender(_update_step(chain), chain.init(params), lambda state: state[0]),
    }


def _floor_step(params: Tree, acc: Tree, grads: Tree) -> tuple[Tree, Tree]:
    return params, jax.tree.map(jnp.add, acc, grads)


def _update_step(tx: Any) -> Callable[[Tree, Any, Tree], tuple[Tree, Any]]:
    def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def _compiled(name: str, contender: Contender, problem: Problem) -> Runner:
    calls = min(problem.every, 4) if name == INNER else problem.every
    return _measure.compile_donated(name, contender.step, (problem.params, contender.state), (problem.grads,), calls)


def _compared(
    case: Case, problem: Problem, contenders: dict[str, Contender], runners: dict[str, Runner]
) -> dict[str, float]:
    """Returns how far each is from the inner optimizer on the mean gradient, after one window; exits if too far."""

    def result(name: str) -> tuple[Tree, Any]:
        params, state = runners[name].carry
        return jax.tree.map(jnp.subtract, params, problem.params), contenders[name].inner_state(state)

    window = [(_gradient(problem.grads, problem.ripple, jnp.cos(i)),) for i in range(problem.every)]
    runners[FLOOR].run(window)
    runners[INNER].run([(jax.tree.map(lambda total: total / problem.every, runners[FLOOR].carry[1]),)])
    expected = result(INNER)
    if not all(bool(jnp.any(leaf)) for leaf in jax.tree.leaves(expected[0])):
        raise SystemExit(f"{case}: nothing to compare: the inner optimizer left some parameters where they were.")
    difference = {}
    for name in (APPLY, STATISTICS, UPDATE, MULTI_STEPS, APPLY_EVERY):
        runners[name].run(window)
        difference[name] = _measure.relative_difference(result(name), expected)
        _judge(case, name, difference[name])
    return difference


@jax.jit
def _gradient(grads: Tree, ripple: Tree, share: jax.Array) -> Tree:
    return jax.tree.map(lambda g, r: g + share * r, grads, ripple)


def _judge(case: Case, name: str, difference: float) -> None:
    agrees = difference <= TOLERANCE
    if _same_update(case, name) and not agrees:
        raise SystemExit(
            f"{case}: {name} is not the update of the inner optimizer on the mean gradient: "
            f"difference={difference:.1e}, tolerance={TOLERANCE:.1e}."
        )
    if not _same_update(case, name) and agrees:
        raise SystemExit(f"{case}: the comparison is blind: {name} passes, and for k > 1 it is another update.")


def _same_update(case: Case, name: str) -> bool:
    """`optax.apply_every` sums the updates of k calls of the inner optimizer: the same for k=1 alone."""
    return name != APPLY_EVERY or case.every == 1


def _rendered(table: Measured) -> str:
    head = ("contender", "ms / micro-step", "ms / window", "window / ideal", "temporary memory / P", "difference")
    ideal = ("ideal: k adds + one update", *_times(table.ideal, table), "", "")
    rows = [_row(table, name) for name in dict.fromkeys([*table.seconds, *table.difference])]
    text = _measure.markdown([head, *rows[:2], ideal, *rows[2:]], left=(0, 5))
    return f"### {table.case}\n\n{text}\n\nRounds: {table.rounds}.\n"


def _row(table: Measured, name: str) -> Sequence[str]:
    difference = f"{table.difference[name]:.0e}".replace("0e+00", "0") if name in table.difference else ""
    if name not in table.seconds:
        return name, *4 * ("",), f"{difference}: n/a, another update"
    return (name, *_times(table.window(name), table), f"{table.temporary[name]:.3f}", difference)


def _times(window: float, table: Measured) -> tuple[str, str, str]:
    return digits(1e3 * window / table.case.every), digits(1e3 * window), f"{window / table.ideal:.2f}"


def _targets() -> list[Target]:
    gain = lambda ours: lambda table: table.window(MULTI_STEPS) / table.window(ours)
    ideal = lambda table: table.window(APPLY) / table.ideal
    measured = lambda table: table.window(STATISTICS) / table.window(APPLY)
    beyond = lambda ours: lambda table: table.temporary[ours] - table.temporary[INNER]
    adamw = lambda *sizes: lambda case: case.optimizer == "AdamW" and case.size in sizes and case.every == 8
    muon = lambda case: case.optimizer == "Muon" and case.every == 8
    always = lambda case: True
    return [
        Target("micro-step, MultiSteps / apply_gradients", adamw("16.8M"), gain(APPLY), 12, at_least=True),
        Target("micro-step, MultiSteps / update", adamw("16.8M"), gain(UPDATE), 2.5, at_least=True),
        Target("micro-step, MultiSteps / update", adamw("4.2M"), gain(UPDATE), 6, at_least=True),
        Target("window, apply_gradients / ideal", adamw(*WIDTHS), ideal, 1.2),
        Target("window, apply_gradients / ideal, all tables", always, ideal, 1.2),
        Target("window, apply_gradients with statistics / without", always, measured, 1.4),
        Target("temporary memory of update beyond inner's, P", always, beyond(UPDATE), 1.0),
        Target("temporary memory of apply_gradients beyond inner's, P", always, beyond(APPLY), 0.02),
        Target("window, MultiSteps / apply_gradients", muon, gain(APPLY), 7, at_least=True),
        Target("window, MultiSteps / update", muon, gain(UPDATE), 7, at_least=True),
    ]


def _record(tables: Sequence[Measured], verdicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "machine": _measure.machine(),
        "statistic": "fastest round",
        "tables": [dataclasses.asdict(table) | {"case": table.case._asdict()} for table in tables],
        "targets": verdicts,
    }


if __name__ == "__main__":
    _measure.command(main)
