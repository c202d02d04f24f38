"""The counts of `verify_step`: false alarms in sound steps, and misses among planted faults of each kind.

Run `python -m benchmarks.verify_step`, or with `--steps 10 --faults 4` for a sample. With `--few` models have four
parameters, with `--rare` optimizers and losses are rarer ones. The exit status is 1 if there is a false alarm or a
miss.
"""

import collections
import functools
import sys
import time

import jax
from tqdm import tqdm

from benchmarks import _measure
from tests.verify.planted import KINDS, Problem, fault, sound_step

SOUND = "sound"
NOTES = """\
Each step is run by `verify_step` as a user would run it. Found: the law is said not to hold. Named right: the first
cause is the one that was planted."""


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--steps", type=int, default=50, help="sound steps")
    parser.add_argument("--faults", type=int, default=20, help="planted faults of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--few", action="store_true", help="four parameters, where a cause may be not known")
    parser.add_argument("--rare", action="store_true", help="partial and factored states, averages, advantages, ...")
    asked = parser.parse_args()
    of = functools.partial(functools.partial, few=asked.few, rare=asked.rare)
    unnamed = "not known" if asked.few else "another difference" if asked.rare else None  # an answer, and no wrong one
    jax.config.update("jax_disable_most_optimizations", True)  # compiling is most of the time
    start = time.perf_counter()
    cases = [(SOUND, functools.partial(of(sound_step), number)) for number in range(asked.steps)]
    cases += [
        (kind, functools.partial(of(fault), kind, number)) for kind in asked.kinds for number in range(asked.faults)
    ]
    found, named, styles = collections.Counter[str](), collections.Counter[str](), collections.defaultdict(set)
    wrong = 0
    for kind, make in tqdm(cases, unit="step", leave=False, disable=None):
        problem = make()
        holds, causes = judged(problem)
        styles[kind].add(problem.name.split(",")[0])
        found[kind] += not holds
        named[kind] += causes[:1] == [kind]
        if not (holds if kind == SOUND else causes[:1] in ([kind], [unnamed])):
            wrong += 1
            tqdm.write(f"{kind} ({problem.name}): {causes or 'nothing'} found", file=sys.stderr)
    head = ("kind", "planted", "found", "named right", "in how many kinds of loop")
    number = str(asked.faults)
    rows = [(kind, number, str(found[kind]), str(named[kind]), str(len(styles[kind]))) for kind in asked.kinds]
    print(_measure.header("False alarms and misses of verify_step", NOTES))
    print(_measure.markdown([head, *rows]))
    print(f"\nSound steps: {asked.steps}, in {len(styles[SOUND])} kinds of loop. False alarms: {found[SOUND]}.")
    print(f"Target (no false alarm, no miss): {'MISSED' if wrong else 'met'}.")
    print(f"Time: {time.perf_counter() - start:.0f} s.")
    sys.exit(1 if wrong else 0)


def judged(problem: Problem) -> tuple[bool, list[str]]:
    """Returns whether the law is said to hold, and the causes that are named; or what was raised."""
    try:
        report = problem.report()
    except (TypeError, ValueError) as error:
        return False, [repr(error)]
    return report.holds, [cause.kind for cause in report.causes]


if __name__ == "__main__":
    _measure.command(main)
