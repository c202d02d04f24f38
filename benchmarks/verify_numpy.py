"""What `verify_step` says of loops in NumPy: 42 ways to a fault behind 33 optimizers, and sound ones.

Run `python -m benchmarks.verify_numpy`; `--loops 60` takes a sample. Nothing is compiled: twice 400 loops take four
minutes. Of the first 400 a third have no clip, a third clip by norm, a third by value; all others clip by norm. A fault
that leaves the update unchanged is none, and another optimizer is drawn. The exit status is 1 if a sound loop is said
to differ.
"""

import collections
import sys

from tqdm import tqdm

from benchmarks import _measure
from tests.verify.planted_numpy import PLANTS, judged, verdict

NOTES = """\
Right: the first cause is the one planted. Misnamed: it is another fault. Unnamed: the difference is found and not
explained. Refused: a random step of which nothing is linear in the gradient. Harmless: behind none of these optimizers
does the fault change an update, as a factor before a clip that always acts."""
TABLES = {"No clip, one by norm, or one by value": "", "Behind a clip by norm that acts": "norm"}
KINDS = [*PLANTS, "sound", "sound", "sound"]
HIDDEN = 5  # units of the hidden layer
OUTCOMES = ("right", "unnamed", "misnamed", "missed", "refused", "harmless")


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--loops", type=int, default=400, help="of each table")
    loops = parser.parse_args().loops
    alarms = 0
    tqdm.write(_measure.header("What verify_step says of loops in NumPy", NOTES).rstrip())
    for title, clip in TABLES.items():
        counts = counted(loops, clip)
        tqdm.write(f"\n### {title}\n\n{table(counts)}")
        alarms += counts["sound"]["misnamed"] + counts["sound"]["unnamed"]
    sys.exit(1 if alarms else 0)


def table(counts: dict[str, collections.Counter[str]]) -> str:
    """Returns the outcomes of each fault, and of all."""
    faults = {what: of for what, of in counts.items() if what != "sound"}
    counts = counts | {"all faults": sum(faults.values(), collections.Counter())}
    rows = [(what, *(str(of[outcome]) for outcome in OUTCOMES)) for what, of in counts.items()]
    return _measure.markdown([("planted", *OUTCOMES), *rows])


def counted(loops: int, clip: str) -> dict[str, collections.Counter[str]]:
    """Returns the outcomes of each kind of loop, and prints what is not right."""
    counts: dict[str, collections.Counter[str]] = {what: collections.Counter() for what in KINDS}
    for number in tqdm(range(loops), unit="loop", leave=False, disable=None):
        what = KINDS[number % len(KINDS)]
        one, outcome = judged(number, None if what == "sound" else what, clip, HIDDEN)
        counts[what][outcome] += 1
        if outcome not in ("right", "refused", "harmless"):
            tqdm.write(f"{number} ({one.name}): {outcome}: {verdict(one)}", file=sys.stderr)
    return counts


if __name__ == "__main__":
    _measure.command(main)
