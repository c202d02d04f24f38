"""Reads the environments of `.ci/environments.toml`: for `.ci/run`, and printed as JSON for the workflows."""

import json
import pathlib
import sys
import tomllib

TABLE = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
COLUMNS = {
    "tests": ("name", "python", "install", "tests"),
    "facts": ("name", "python", "install", "compiler", "target"),
}
FACTS = "-e . chex hypothesis pytest tqdm"  # what their tests need


def rows(kind: str, *, nightly: bool = False) -> list[dict[str, str]]:
    """Returns the environments of a kind, each with all its columns: those of each push, or those of the night."""
    defaults = {"tests": {"tests": "tests"}, "facts": {"install": FACTS}}[kind]
    return [
        {column: ({"name": name} | defaults | row)[column] for column in COLUMNS[kind]}
        for name, row in TABLE[kind].items()
        if row.get("nightly", False) == nightly
    ]


if __name__ == "__main__":
    for kind in COLUMNS:  # a line for each output of a job
        print(f"{kind}={json.dumps(rows(kind, nightly='--nightly' in sys.argv))}")
