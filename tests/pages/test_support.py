"""The table of support is what runs: `python -m benchmarks.support` makes it, with each JAX."""

import json
import re
import subprocess
import sys
import tomllib

import jax
import pytest
import yaml

from benchmarks import support
from tests import ROOT, paths
from tests.engine import versions

RECORD = json.loads(support.FACTS.read_text())
here = pytest.mark.skipif(jax.__version__ not in RECORD, reason="this JAX is in no row of the table")


@pytest.mark.parametrize("page", ["docs/support.md", "benchmarks/QUIRKS.md"])
def test_the_table_of_a_page_is_that_of_the_record(page):
    text = (ROOT / page).read_text()
    assert support.page(text, RECORD) == text
    assert text.count("\n| JAX ") == 1


def test_every_path_is_right_on_every_version():
    number = lambda version: tuple(map(int, version.split(".")))[:3]
    assert number(min(RECORD, key=number)) == versions.FLOOR
    for version, facts in RECORD.items():
        assert len(facts["one device"]) == len(paths.PATHS) - 1, version
        assert len(facts["several devices"]) == 2 * len(paths.SHARDED) + len(paths.MANUAL)
        assert len(facts["of flax"]) == 2
        assert ("h100" in facts) == (number(version)[:2] != (0, 8))
        errors = [*facts["one device"].values(), *facts["several devices"].values(), *facts["of flax"].values()]
        assert all(error < support.RIGHT for error in errors), version


@pytest.mark.sweep
@here
def test_the_row_of_this_version_is_what_it_does():
    facts = RECORD[jax.__version__]
    assert len(support.of_flax()) == len(facts["of flax"])
    assert support.decoder() == pytest.approx(facts["decoder"], abs=0.02)


# The environments that it is tested in.

CI = ROOT / ".ci"


def environments():
    return tomllib.loads((CI / "environments.toml").read_text())


@pytest.mark.parametrize(("workflow", "options"), [("ci", []), ("nightly", ["--nightly"])])
def test_a_workflow_takes_its_environments_from_the_table(workflow, options):
    """The script prints each with all its columns; the workflow names no version of JAX, and asks for columns that are there."""
    command = [sys.executable, CI / "environments.py", *options]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kinds = {kind: json.loads(rows) for kind, _, rows in (line.partition("=") for line in printed.splitlines())}
    jobs = yaml.safe_load((ROOT / f".github/workflows/{workflow}.yml").read_text())["jobs"]
    assert f"environments.py {' '.join(options)}".strip() + " >>" in json.dumps(jobs["environments"])
    assert set(jobs["environments"]["outputs"]) == set(kinds) == {"tests", "facts"}
    for kind, rows in kinds.items():
        assert f"needs.environments.outputs.{kind}" in jobs[kind]["strategy"]["matrix"]["include"]
        asked = set(re.findall(r"matrix\.(\w+)", json.dumps(jobs[kind])))
        assert [row["name"] for row in rows if not asked <= row.keys() or not all(row.values())] == []
        assert not re.search(r"jax\w*==\d", json.dumps(jobs[kind]))


def test_the_legs_of_a_machine_are_the_jobs_of_the_workflow():
    """The leg of the docs does what two jobs do, of which one is in docs.yml."""
    legs = subprocess.run(
        [sys.executable, CI / "everything.py", "--list"], check=True, capture_output=True, text=True
    ).stdout
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    others = {"environments", "tests", "facts", "other_libraries"}
    rows = [row for kind in environments().values() for row, columns in kind.items() if "nightly" not in columns]
    assert sorted(legs.split()) == sorted([*rows, *(set(jobs) - others), "docs"])


def test_each_file_and_option_of_the_environments_is_there():
    for name, row in environments()["tests"].items():
        for part in row.get("tests", "tests").split():
            assert part == "--sweep" or (ROOT / part).exists(), (name, part)


def test_programs_are_kept_between_the_runs_of_a_workflow():
    """Where the suite puts them."""
    for workflow in ("ci", "nightly"):
        for step in yaml.safe_load((ROOT / f".github/workflows/{workflow}.yml").read_text())["jobs"]["tests"]["steps"]:
            if step.get("uses", "").startswith("actions/cache@"):
                assert step["with"]["path"] == ".pytest_cache/d"
                break
        else:
            pytest.fail(f"{workflow}.yml keeps no programs")


def test_a_workflow_names_no_python():
    """Those of the table come from it, all others from `.ci/python`, or from `.ci/oldest_python`."""
    newest, oldest = ((CI / name).read_text().strip() for name in ("python", "oldest_python"))
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert (environments()["tests"]["newest"]["python"], requires) == (newest, f">={oldest}")
    for path in (ROOT / ".github/workflows").iterdir():
        assert not re.search(r"\b3\.1[1-9]\b", path.read_text()), path
    assert not re.search(r"\b3\.1\d", (CI / "run").read_text())


def test_the_environments_are_the_versions_that_are_promised():
    """The oldest JAX, each Python of the classifiers, and what Colab has."""
    rows = environments()["tests"].values()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = {row["python"] for row in rows}
    assert pythons == set(re.findall(r":: (3\.\d+)", " ".join(project["classifiers"])))
    assert f"jax=={'.'.join(map(str, versions.FLOOR))}" in (CI / "colab.txt").read_text().splitlines()
    assert any("-r .ci/colab.txt" in row["install"] for row in rows)
