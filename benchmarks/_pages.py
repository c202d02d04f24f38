"""Tables of the docs and a row of the README, made of what stands in benchmarks/RESULTS.md; the table of faults.

`python -m benchmarks._pages` writes them after their marks, `<!-- results: packing -->`.
"""

import pathlib
import re
from collections.abc import Callable

from benchmarks import _measure, _results
from optax_accum.verify import _faults as step_faults

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/RESULTS.md"
Row = dict[str, str]


def rows(page: str, program: str, heading: str = "") -> list[Row]:
    """Returns the rows of the first table that a program printed, or of that under a heading."""
    parts = (part for text in _results.sections(page) for part, _ in _results.split(text)[1])
    (body,) = (part.text for part in parts if part.name == program)
    table = re.search(r"(?:^\|.*\n?)+", body[body.index(heading) :], re.MULTILINE)[0]
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]


SHOWN = [
    ("log-normal", "4096", "1"),
    ("log-normal", "8192", "8"),
    ("paragraphs", "1024", "1"),
    ("paragraphs", "2048", "2"),
]


def packing(page: str) -> list[tuple[str, ...]]:
    """Returns how full micro-batches by tokens are, by default and with fewer buckets."""
    table = [("lengths, budget, devices", "micro-batches / fewest", "filled", "programs", "24 buckets", "16", "8")]
    for lengths, budget, devices in SHOWN:
        of = {
            row["buckets"]: row
            for row in rows(page, "packing")
            if row["lengths"].startswith(lengths) and (row["budget"], row["devices"]) == (budget, devices)
        }
        filled = {buckets: f"{float(row['filled'].strip('%')):.0f} %" for buckets, row in of.items()}
        number = int(re.search(r"\d+", of["default"]["lengths"])[0])
        name = f"{number:,} {lengths}, {budget} tokens, {devices}"
        made = f"{of['default']['micro-batches']} / {of['default']['fewest']}"
        table.append((name, made, filled.pop("default"), of["default"]["shapes"], *filled.values()))
    return table


STACKED = "decoder of stacked layers"
WAYS = {
    "ours: apply_gradients": "`accumulate_gradients` and `apply_gradients`",
    "ours: update": "`accumulate_gradients`, `update`, `optax.apply_updates`",
    "optax.MultiSteps": "`optax.MultiSteps`, `optax.apply_updates`",
}


def micro_step(page: str) -> list[tuple[str, ...]]:
    """Returns the times of micro-steps, relative to the first."""
    found = {row["contender"]: row for row in rows(page, "micro_step", "#### AdamW, 4.2 M, k=8")}
    time = lambda way: float(found[way]["ms / micro-step"])
    relative = lambda way: f"{time(way) / time(next(iter(WAYS))):.1f}"
    memory = lambda way: f"{float(found[way]['temporary memory / P']):.0f}"
    return [("micro-step", "relative time", "temporary memory"), *((WAYS[w], relative(w), memory(w)) for w in WAYS)]


def batch_norm(page: str) -> list[tuple[str, ...]]:
    """Returns memory and time of each way in one cell: seven columns of numbers are wider than a phone."""
    megabytes = lambda cell: cell.removesuffix(" MB")
    both = lambda row, way: f"{megabytes(row[way])}, {row[f'time, {way}']}x"
    cells = lambda row: (row["model"], row["error"], megabytes(row["memory, whole batch"]), both(row, "saved"))
    found = [(*cells(row), both(row, "recomputed")) for row in rows(page, "batch_norm")]
    return [("model", "error", "whole batch", "saved", "recomputed"), *found]


def _as_printed(program: str) -> Callable[[str], list[tuple[str, ...]]]:
    def table(page: str) -> list[tuple[str, ...]]:
        found = rows(page, program)
        return [tuple(found[0]), *(tuple(row.values()) for row in found)]

    return table


def side_by_side(page: str) -> str:
    """Returns the README's row of times, relative to the whole batch's."""
    found = {row["way"]: float(row["time / ours"]) for row in rows(page, "peers", f"#### {STACKED}, k=8") if row["ms"]}
    ways = ("optax.MultiSteps", "hand-written scan", "ours: value_and_grad")
    times = [f"{found[way] / found['whole batch']:.1f}" for way in ways]
    return f"| time, {STACKED}, 2 CPU cores | 1 | {' | '.join(times)}, `value_and_grad` |"


TABLES: dict[str, tuple[str, Callable[[str], list[tuple[str, ...]]]]] = {
    "packing": ("docs/tokens.md", packing),
    "micro_step": ("docs/benchmarks.md", micro_step),
    "any_loss": ("docs/any_loss.md", _as_printed("any_loss")),
    "models": ("docs/any_loss.md", _as_printed("models")),
    "batch_norm": ("docs/flax.md", batch_norm),
}


def written(path: str, text: str, results: str) -> str:
    """Returns a page with its tables, or its row, as they are in the results."""
    for name, (where, make) in TABLES.items():
        if where == path:
            text = _measure.filled(text, f"results: {name}", lambda _, make=make: _measure.markdown(make(results)))
    if path == "README.md":
        text = re.sub(r"^\| time, .*$", lambda _: side_by_side(results), text, flags=re.MULTILINE)
    return text


FAULTS = "docs/check_your_step.md"


def faults_written(text: str) -> str:
    """Returns a page with the faults that `verify_step` names after its mark."""
    rows = [(f"`{fault.name}`", fault.makes) for fault in step_faults.FAULTS]
    head = ("named", "what becomes of the micro-batches")
    table = "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * 2, *rows))
    return _measure.filled(text, "faults: verify_step", lambda _: table)


def main() -> None:
    results = RESULTS.read_text()
    for path in (*dict.fromkeys(where for where, _ in TABLES.values()), "README.md"):
        (ROOT / path).write_text(written(path, (ROOT / path).read_text(), results))
    (ROOT / FAULTS).write_text(faults_written((ROOT / FAULTS).read_text()))


if __name__ == "__main__":
    main()
