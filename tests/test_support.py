"""The table of support is what runs: `python -m benchmarks.support` makes it, with each JAX."""

import json
import pathlib

import jax
import pytest

from benchmarks import support
from optax_accum._core.compilers import DEVICES, FLOOR
from tests import paths

ROOT = pathlib.Path(__file__).parent.parent
RECORD = json.loads(support.FACTS.read_text())
here = pytest.mark.skipif(jax.__version__ not in RECORD, reason="this JAX is in no row of the table")


def test_the_tables_of_the_page_are_those_of_the_record():
    text = (ROOT / "docs/support.md").read_text()
    assert support.page(text, RECORD) == text
    assert text.count("\n| JAX ") == 2


def test_every_path_is_right_on_every_version_that_does_not_refuse_it():
    number = lambda version: tuple(map(int, version.split(".")))[:3]
    assert number(min(RECORD, key=number)) == FLOOR
    for version, facts in RECORD.items():
        assert len(facts["one device"]) == len(paths.PATHS) - 1, version
        assert len(facts["several devices"]) == (number(version) >= DEVICES) * (
            2 * len(paths.SHARDED) + len(paths.MANUAL)
        )
        assert len(facts["of flax"]) == (2 if number(version) >= (0, 6) else 0)
        assert ("h100" in facts) == (number(version) >= DEVICES and number(version)[:2] != (0, 8))
        errors = [*facts["one device"].values(), *facts["several devices"].values(), *facts["of flax"].values()]
        assert all(error < support.RIGHT for error in errors), version


@here
def test_the_row_of_this_version_is_what_it_does():
    facts = RECORD[jax.__version__]
    assert support.added_in_place() == facts["added in place"]
    assert len(support.of_flax()) == len(facts["of flax"])
    assert support.decoder() == pytest.approx(facts["decoder"], abs=0.02)
