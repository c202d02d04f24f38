"""Do the report, docs, remedies, tests and benchmarks read the same two tables of faults?"""

import inspect
import re

import jax
import pytest

import optax_accum
from benchmarks import _rare_losses, _verdicts, verify, verify_step
from optax_accum._verify import loss_faults, step_faults
from tests.tiers import sweep
from tests.verify import test_verify, test_verify_step

FUNCTIONS = {"verify": optax_accum.verify, "verify_step": optax_accum.verify_step}
EVERY = [pytest.param(name, fault, id=f"{name}, {fault.name}") for name, of in _verdicts.TABLES.items() for fault in of]
OTHERS = {"weight", "flush"}  # what apply_gradients hands on to accumulate_gradients


def test_the_page_shows_the_tables():
    """`python -m benchmarks._verdicts` writes them."""
    text = _verdicts.PAGE.read_text()
    assert _verdicts.page(text) == text
    for faults in _verdicts.TABLES.values():
        assert all(f"| `{fault.name}` | {fault.makes} |" in text for fault in faults)


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
    "verify": {"options", "formula"},
    "verify_step": {"moves", "beside", "other", "unexplained", "always", "blind"},
}


def test_each_row_has_a_planted_fault():
    losses, steps = ([fault.name for fault in of] for of in (loss_faults.FAULTS, step_faults.PLANTED))
    assert list(verify.KINDS) == losses == [kind for kind in losses if verify.FAULTS[kind]]
    assert set(losses) == {kind for kind, *_ in test_verify.PLANTED.values()}
    assert list(verify_step.KINDS) == steps
    assert sorted(steps) == sorted(test_verify_step.FAULTS)
    assert [fault.name for fault in step_faults.FAULTS if fault not in step_faults.PLANTED] == [
        "cannot tell",
        "not known",
        "another difference",
    ]
    for kind in steps:
        assert verify_step.fault(kind, 0).name


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
    fault = loss_faults.FAULTS[0]._replace(remedy="Pass sharing_argnum=2.")
    with pytest.raises(AssertionError):
        test_a_remedy_names_only_options_that_there_are("verify", fault)


# Its limits are those of gradients, which are compiled.
COSTLY = ["nonlinear derivative"]


@pytest.mark.usefixtures("rank_promotion")
@pytest.mark.parametrize("kind", [*(kind for kind in verify.KINDS if kind not in COSTLY), *sweep(COSTLY)])
def test_the_first_twelve_losses_with_each_fault_can_be_made(kind):
    """Draws from a seed choose how a fault is planted: a name that only a rare one reads is read here."""
    for rare in (False, True)[: 1 + (kind in _rare_losses.FAULTS)]:
        for number in range(12):
            problem = verify.fault(kind, number, rare=rare)
            assert jax.tree.leaves(jax.eval_shape(problem.fun, problem.params, problem.batch, *problem.args))


def test_the_first_twelve_steps_with_each_fault_can_be_made():
    for kind in verify_step.KINDS:
        assert len({verify_step.fault(kind, number).name for number in range(12)}) > 1


@pytest.mark.usefixtures("rank_promotion")
def test_rarer_problems_are_sound_too():
    assert verify.sound_loss(1, rare=True).report().holds
    assert jax.tree.leaves(verify_step.sound_step(0, rare=True).batch)
