"""How right the plan's search is: its answers against brute force over the divisors, and what they take to find.

Run `python -m benchmarks.plan_search` for thirty small models of many kinds on the device here, `--models mlp decoder`
for some of them. All divisors are compiled; then each budget that lies between two of their peaks is searched.
"""

import argparse
import itertools
from typing import Any, NamedTuple

import optax
from tqdm import tqdm

from benchmarks import _measure
from benchmarks._small_models import MODELS, Small
from optax_accum import plan
from optax_accum.plan import _search as search

NOTES = """\
Each divisor of the rows is compiled. A budget lies between two peaks, above all or below all. Right is the fewest
micro-batches that fit, or that none does. Planned is one of the budgets of each model, in the middle, by
`plan.fit` itself."""


class Found(NamedTuple):
    """What the search answered for a model, over its budgets."""

    name: str
    divisors: int
    monotone: bool
    answers: list[tuple[int | None, int | None]]  # right, and found
    asked: list[int]  # compilations
    planned: bool  # the plan of the middle budget is right

    @property
    def case(self) -> str:
        """What the targets name."""
        return self.name

    @property
    def wrong(self) -> int:
        """The budgets whose answer is not the best."""
        return sum(right != found for right, found in self.answers)

    @property
    def times(self) -> float:
        """How many times the best number of micro-batches was answered, at most; infinity where none was."""
        return max(found / right if found else float("inf") for right, found in self.answers if right)


def main() -> None:
    """Prints the table, and whether the targets are met."""
    parser = argparse.ArgumentParser(prog="benchmarks.plan_search", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="which of the thirty")
    options = parser.parse_args()
    print(_measure.header("The plan's search against brute force", NOTES))
    found = [found_of(name, MODELS[name]) for name in tqdm(options.models, leave=False, disable=None)]
    print(f"{_rendered(found)}\n")
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


def found_of(name: str, model: Small) -> Found:
    """Compiles all divisors of a model, and searches each budget."""
    step_of_k, args = plan.of_loss(model.loss, optax.adam(1e-3)), (model.params, model.batch)
    ask = lambda **options: plan.fit(step_of_k, *args, run=False, safety=1, progress=False, **options)
    every = search.candidates(model.rows)
    rows = {c: ask(candidates=[c.number], budget="1TB").rows[0] for c in every}
    peaks = {c: row["peak"] for c, row in rows.items()}
    least = rows[every[0]]["arguments"] + rows[every[0]]["unaliased"]
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


def _rendered(found: list[Found]) -> str:
    head = ("model", "divisors", "monotone", "budgets", "wrong", "times the best", "compilations", "most", "planned")
    rows = [
        (
            each.name,
            str(each.divisors),
            "yes" if each.monotone else "no",
            str(len(each.asked)),
            str(each.wrong),
            f"{each.times:.2g}",
            f"{sum(each.asked) / len(each.asked):.1f}",
            str(max(each.asked)),
            "right" if each.planned else "WRONG",
        )
        for each in found
    ]
    return _measure.markdown([head, *rows])


if __name__ == "__main__":
    _measure.command(main)
