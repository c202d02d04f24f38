"""The table of what each way to accumulate can do: every cell is what a small program did.

Run `python -m benchmarks.features` for the table, `--write` to put it into docs/compared.md. A cell says yes or no with
the number that decided; "not run" where a package is missing; "n/a" where a way leaves the matter to its user.
"""

import importlib.metadata
import importlib.util
import pathlib
import re
from collections.abc import Mapping

from benchmarks import _measure
from benchmarks._contenders import OURS, WAYS, WHOLE
from tests import programs
from tests.pages.features import FEATURES, Feature

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "compared.md"
MARK = {"yes": "✓", "no": "✗", "n/a": "-", "not run": "?"}
BEGIN, END = "<!-- what python -m benchmarks.features --write found -->", "<!-- end -->"
COLUMNS = {"optax_accum": OURS} | {name: name for name in WAYS if name != WHOLE and not name.startswith("ours")}


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/compared.md")
    options = parser.parse_args()
    with programs.as_shipped():
        found = {feature.name: {column: cell(feature, column) for column in COLUMNS} for feature in FEATURES}
    print(f"## What each library can do\n\n{_table(found)}\n\n{explained()}\n\n{versions()}")
    if options.write:
        before, rest = PAGE.read_text().split(BEGIN)
        text = f"{before}{BEGIN}\n\n{marked(found)}\n\n{END}{rest.split(END, 1)[1]}"
        _measure.write(PAGE, text.rstrip("\n"))


def marked(found: Mapping[str, Mapping[str, str]]) -> str:
    """Returns the page's text of cells, by row and column: marks, and what they mean."""
    marks = {name: {column: MARK[verdict(text)] for column, text in row.items()} for name, row in found.items()}
    upright = f'<div class="marks">\n\n{_table(marks)}\n\n</div>'  # headings stand upright there
    return f"{upright}\n\n{explained()}\n\n{versions()}"


def _table(cells: Mapping[str, Mapping[str, str]]) -> str:
    rows = [(name, *row.values()) for name, row in cells.items()]
    return _measure.markdown([("", *COLUMNS), *rows], left=range(len(COLUMNS) + 1))


def verdict(text: str) -> str:
    """Returns what a cell says, without its number: a key of `MARK`."""
    return text.partition(" (")[0]


def explained() -> str:
    """Returns what the program of each row does, as Markdown."""
    return "\n".join(f"* **{feature.name}**: {feature.said}" for feature in FEATURES)


def versions() -> str:
    """Returns what was installed."""
    packages = ["jax", "optax", *dict.fromkeys(package for way in WAYS.values() for package in way.needs)]
    there = [name for name in packages if importlib.util.find_spec(name)]
    return f"Found with {', '.join(f'{name} {importlib.metadata.version(name)}' for name in there)}, on a CPU."


def cell(feature: Feature, column: str) -> str:
    """Returns what a program did."""
    way = COLUMNS[column]
    if any(importlib.util.find_spec(package) is None for package in WAYS[way].needs):
        return "not run"
    outcome = feature.program(way)
    return "n/a" if outcome is None else str(outcome)


def committed(column: str, text: str) -> dict[str, str]:
    """Returns the marks of a column of a page, by the name of the row."""
    folded = text.split('<div class="marks">')[1].strip().split("\n\n")[0]
    lines = [re.split(r" *\| *", line)[1:-1] for line in folded.splitlines()]
    return {line[0]: line[lines[0].index(column)] for line in lines[2:]}


if __name__ == "__main__":
    _measure.command(main)
