"""How right the plan's search is: its answers against brute force over the divisors, and what they take to find.

Run `python -m benchmarks.plan_search` for the public models of `benchmarks.models`, `--models GPT-2 T5` for some. All
divisors are compiled; then each budget that lies between two of their peaks is searched.
"""

import itertools
import math
from typing import Any, NamedTuple

import optax
from tqdm import tqdm

from benchmarks import _measure
from optax_accum import plan
from optax_accum.plan import _search as search
from tests import programs
from tests.public_models import MODELS, made

ROWS, WIDTH = 256, 64
NOTES = f"""\
{ROWS} rows, width {WIDTH}, Adam. Each divisor of the rows is compiled. A budget lies between two peaks, above all or
below all. Right is the fewest micro-batches that fit, or that none does. Planned is one of the budgets of each model,
in the middle, by `plan.fit` itself."""
HEAD = ("model", "divisors", "monotone", "budgets", "wrong", "times the best", "compilations", "most", "planned")


class Found(NamedTuple):
    """What the search answered for a model, over its budgets."""

    name: str
    divisors: int
    monotone: bool
    answers: list[tuple[int | None, int | None]]  # right, and found
    asked: list[int]  # compilations
    planned: bool  # the plan of the middle budget is right

    @property
    def wrong(self) -> int:
        """The budgets whose answer is not the best."""
        return sum(right != found for right, found in self.answers)

    @property
    def times(self) -> float:
        """How many times the best number of micro-batches was answered, at most; infinity where none was."""
        return max(found / right if found else math.inf for right, found in self.answers if right)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        monotone, planned = "yes" if self.monotone else "no", "right" if self.planned else "WRONG"
        mean = f"{sum(self.asked) / len(self.asked):.1f}"
        counts = str(len(self.asked)), str(self.wrong), f"{self.times:.2g}", mean, str(max(self.asked))
        return self.name, str(self.divisors), monotone, *counts, planned


def main() -> None:
    """Prints the table, and whether the targets are met."""
    parser = _measure.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="which of them")
    options = parser.parse_args()
    print(_measure.header("The plan's search against brute force", NOTES))
    with programs.as_shipped():
        found = [found_of(name) for name in tqdm(options.models, leave=False, disable=None)]
    print(f"{_measure.markdown([HEAD, *(each.cells for each in found)])}\n")
    print(_measure.targets_text(verdicts(found)))


def verdicts(found: list[Found]) -> list[dict[str, Any]]:
    """The numbers to reach."""
    asked = [number for each in found for number in each.asked]
    budgets = f"{len(asked)} budgets of {len(found)} models"
    worst = max(found, key=lambda each: max(each.asked))
    return [
        _measure.verdict("wrong answers", sum(each.wrong for each in found), 0, budgets),
        _measure.verdict("wrong plans", sum(not each.planned for each in found), 0, f"{len(found)} models"),
        _measure.verdict("compilations, mean", sum(asked) / len(asked), 4, budgets),
        _measure.verdict("compilations, most", max(asked), 7, worst.name),
    ]


def found_of(name: str, rows: int = ROWS, width: int = WIDTH) -> Found:
    """Compiles all divisors of a model, and searches each budget."""
    loss, params, batch, args, has_aux = made(name, rows, width)
    value = lambda *given: loss(*given, *args)[0] if has_aux else loss(*given, *args)
    step_of_k = plan.of_loss(value, optax.adam(1e-3))
    ask = lambda **options: plan.fit(step_of_k, params, batch, run=False, safety=1, progress=False, **options)
    every = search.candidates(rows)
    of = {c: ask(candidates=[c.number], budget="1TB").rows[0] for c in every}
    peaks = {c: row["peak"] for c, row in of.items()}
    least = of[every[0]]["arguments"] + of[every[0]]["unaliased"]
    sizes = sorted({*peaks.values()})
    budgets = [sizes[0] - 1, *((a + b) / 2 for a, b in itertools.pairwise(sizes)), sizes[-1] + 1]
    number = lambda c: c.number if c else None
    answers, asked = [], []
    for budget in budgets:
        measured = search.search(every, peaks.__getitem__, budget, lambda: least)
        answers.append((number(search.best(peaks, budget)), number(search.best(measured, budget))))
        asked.append(len(measured))
    middle = len(budgets) // 2
    planned = ask(budget=int(budgets[middle])).num_microbatches == answers[middle][0]
    return Found(name, len(every), search.grows(peaks), answers, asked, planned)


if __name__ == "__main__":
    _measure.command(main)
