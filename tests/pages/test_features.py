"""The table of what each way can do is what its programs do: our column, that of `optax.MultiSteps`, and the page."""

import pytest

from benchmarks import features
from benchmarks._contenders import JAX_WAYS, MultiSteps, OursAcross
from tests.pages import features as programs
from tests.tiers import sweep

FEATURES = {feature.name: feature for feature in features.FEATURES}
PAGE = features.PAGE.read_text()
COLUMNS = ("optax_accum", "optax.MultiSteps")


@pytest.mark.parametrize("column", sweep(COLUMNS, but=COLUMNS[:1]))
@pytest.mark.parametrize("name", FEATURES)
def test_a_cell_of_the_page_is_what_its_program_says(name, column):
    found = features.MARK[features.verdict(features.cell(FEATURES[name], column))]
    assert features.committed(column, PAGE)[name] == found
    assert found == features.MARK["yes"] or column != "optax_accum"


def test_the_page_has_every_row_and_column():
    for column in features.COLUMNS:
        assert list(features.committed(column, PAGE)) == list(FEATURES), column
    assert features.explained() in PAGE


def test_a_missing_package_is_neither_yes_nor_no(monkeypatch):
    monkeypatch.setattr(MultiSteps, "needs", ("a_package_that_nobody_has",))
    assert features.cell(FEATURES["uneven weights"], "optax.MultiSteps") == "not run"


def test_a_way_that_loses_a_micro_batch_does_not_pass(monkeypatch):
    update = OursAcross.update
    monkeypatch.setattr(OursAcross, "update", lambda way, data: update(way, [data[0], *data[:3]]))
    assert features.cell(FEATURES["the update of the whole batch"], "optax_accum").startswith("no (")


@pytest.mark.sweep
@pytest.mark.parametrize("way", [name for name in JAX_WAYS if name not in COLUMNS and "ours" not in name])
def test_every_way_of_jax_makes_the_update_of_the_whole_batch(way):
    assert programs._even(way).holds
