"""Prints the environments of `.ci/environments.toml`: of one kind as lines for `.ci/run`, or all as JSON for ci.yml."""

import json
import pathlib
import sys
import tomllib

TABLE = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
COLUMNS = {
    "suite": ("name", "python", "install", "here"),
    "law": ("name", "python", "install", "here", "tests"),
    "facts": ("name", "python", "install", "compiler", "target"),
}
LAW = "tests/test_law.py tests/loss/test_in_place.py tests/pages/test_docs.py tests/pages/test_support.py"
DEFAULTS = {"suite": {"here": "suite"}, "law": {"here": "law", "tests": LAW}, "facts": {}}


def rows(kind: str) -> list[dict[str, str]]:
    """Returns the environments of a kind, each with all its columns."""
    return [
        {column: ({"name": name} | DEFAULTS[kind] | row)[column] for column in COLUMNS[kind]}
        for name, row in TABLE[kind].items()
    ]


if __name__ == "__main__":
    if sys.argv[1] == "--json":  # a line for each output of a job
        for kind in COLUMNS:
            print(f"{kind}={json.dumps(rows(kind))}")
    else:
        for row in rows(sys.argv[1]):
            print("|".join(row.values()))
