"""Do the report, docs, remedies, tests and benchmarks read the same table of faults?"""

import inspect
import re

import jax
import pytest

import optax_accum
from benchmarks import _pages
from optax_accum.verify import _faults as step_faults
from tests import ROOT
from tests.verify import planted, test_verify_step

FUNCTIONS = {"verify_step": optax_accum.verify_step}
EVERY = [pytest.param("verify_step", fault, id=f"verify_step, {fault.name}") for fault in step_faults.FAULTS]
OTHERS = {"weight", "flush"}  # what apply_gradients hands on to accumulate_gradients


def test_the_page_shows_the_tables():
    """`python -m benchmarks._pages` writes them."""
    text = (ROOT / _pages.FAULTS).read_text()
    assert _pages.faults_written(text) == text
    assert all(f"| `{fault.name}` | {fault.makes} |" in text for fault in step_faults.FAULTS)


@pytest.mark.parametrize(("name", "fault"), EVERY)
def test_a_row_is_whole_and_the_function_says_it(name, fault):
    assert all(len(field) > 9 for field in (fault.makes, fault.told, fault.remedy))
    assert fault.name in FUNCTIONS[name].__doc__
    assert fault.probes.keys() <= ASKED[name]
    assert all(
        probe.__doc__ or probe.__name__ == "<lambda>" or "<locals>" in probe.__qualname__
        for probe in fault.probes.values()
    )


ASKED = {
    "verify_step": {"moves", "beside", "other", "unexplained", "always", "blind"},
}


@pytest.mark.sweep
def test_each_row_has_a_planted_fault():
    steps = [fault.name for fault in step_faults.PLANTED]
    assert list(planted.KINDS) == steps
    assert sorted(steps) == sorted(test_verify_step.FAULTS)
    assert [fault.name for fault in step_faults.FAULTS if fault not in step_faults.PLANTED] == [
        "cannot tell",
        "not known",
        "another difference",
    ]
    for kind in steps:
        assert planted.fault(kind, 0).name


@pytest.mark.parametrize(("name", "fault"), EVERY)
def test_a_remedy_names_only_options_that_there_are(name, fault):
    """Of the function itself, or of another one that it names."""
    named = {
        option
        for option in re.findall(r"(\w+)=|\b(\w+_(?:argnums?|fn|size|dtype))\b", fault.remedy + fault.elsewhere)
        for option in option
        if option
    }
    functions = [
        FUNCTIONS[name],
        *(getattr(optax_accum, other) for other in optax_accum.__all__ if re.search(rf"\b{other}\b", fault.remedy)),
    ]
    known = {
        option for function in functions if callable(function) for option in inspect.signature(function).parameters
    }
    known |= OTHERS if "apply_gradients(" in fault.remedy else set()
    assert named <= known


def test_what_is_named_that_is_not_there_is_found():
    fault = step_faults.FAULTS[0]._replace(remedy="Pass sharing_argnum=2.")
    with pytest.raises(AssertionError):
        test_a_remedy_names_only_options_that_there_are("verify_step", fault)


def test_the_first_twelve_steps_with_each_fault_can_be_made():
    for kind in planted.KINDS:
        assert len({planted.fault(kind, number).name for number in range(12)}) > 1


@pytest.mark.usefixtures("rank_promotion")
def test_rarer_problems_are_sound_too():
    assert jax.tree.leaves(planted.sound_step(0, rare=True).batch)


def test_the_page_counts_the_kinds_as_the_table_and_the_results_do():
    """It said 16 of a table of 18."""
    (said,) = re.findall(r"each of\s+the (\d+) kinds\s+above", (ROOT / _pages.FAULTS).read_text())
    planted_kinds = {row["kind"] for row in _pages.rows(_pages.RESULTS.read_text(), "verify_step")}
    assert planted_kinds == set(planted.KINDS)
    assert int(said) == len(planted.KINDS)
