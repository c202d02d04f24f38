"""What `verify_step` says of loops in NumPy: 42 ways to a fault behind 33 optimizers, and sound ones.

Run `python -m benchmarks.verify_numpy`; `--loops 60` takes a sample. Nothing is compiled: twice 400 loops take four
minutes. Of the first 400 a third have no clip, a third clip by norm, a third by value; all others clip by norm. A fault
that leaves the update unchanged is none, and another optimizer is drawn. The exit status is 1 if a sound loop is said
to differ.
"""

import argparse
import collections
import sys

from tqdm import tqdm

from benchmarks import _measure
from tests.verify.planted_numpy import CLIPS, PLANTS, judged, verdict

NOTES = """\
Right: the first cause is the one planted. Misnamed: it is another fault. Unnamed: the difference is found and not
explained. Refused: a random step of which nothing is linear in the gradient. Harmless: behind none of these optimizers
does the fault change an update, as a factor before a clip that always acts."""


HEADS = {"drawn": "No clip, one by norm, or one by value", "norm": "Behind a clip by norm that acts"}
OUTCOMES = ("right", "unnamed", "misnamed", "missed", "refused", "harmless")


def table(counts: dict[str, collections.Counter[str]]) -> str:
    """Returns the outcomes of each fault, and of all."""
    faults = {what: of for what, of in counts.items() if what != "sound"}
    counts = counts | {"all faults": sum(faults.values(), collections.Counter())}
    rows = [(what, *(str(of[outcome]) for outcome in OUTCOMES)) for what, of in counts.items()]
    return _measure.markdown([("planted", *OUTCOMES), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verify_numpy", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--loops", type=int, default=400)
    parser.add_argument("--what", choices=(*PLANTS, "sound"), nargs="+", default=[*PLANTS, "sound", "sound", "sound"])
    parser.add_argument("--clip", choices=("drawn", *CLIPS), nargs="+", default=["drawn", "norm"])
    parser.add_argument("--hidden", type=int, default=5, help="units of the hidden layer")
    parser.add_argument("--output", type=_measure.writable)
    asked = parser.parse_args()
    counts = {
        clip: counted(asked.loops, asked.what, "" if clip == "drawn" else clip, asked.hidden) for clip in asked.clip
    }
    tables = [f"### {HEADS.get(clip, clip)}\n\n{table(of)}" for clip, of in counts.items()]
    tqdm.write(
        text := "\n\n".join([_measure.header("What verify_step says of loops in NumPy", NOTES).rstrip(), *tables])
    )
    if asked.output:
        _measure.write(
            asked.output, text, {clip: {what: dict(n) for what, n in of.items()} for clip, of in counts.items()}
        )
    alarms = sum(of["sound"]["misnamed"] + of["sound"]["unnamed"] for of in counts.values() if "sound" in of)
    sys.exit(1 if alarms else 0)


def counted(loops: int, kinds: list[str], clip: str, hidden: int) -> dict[str, collections.Counter[str]]:
    """Returns the outcomes of each kind of loop, and prints what is not right."""
    counts: dict[str, collections.Counter[str]] = {what: collections.Counter() for what in kinds}
    for number in tqdm(range(loops), unit="loop", leave=False, disable=None):
        what = kinds[number % len(kinds)]
        one, outcome = judged(number, None if what == "sound" else what, clip, hidden)
        counts[what][outcome] += 1
        if outcome not in ("right", "refused", "harmless"):
            tqdm.write(f"{number} ({one.name}): {outcome}: {verdict(one)}", file=sys.stderr)
    return counts


if __name__ == "__main__":
    _measure.command(main)
