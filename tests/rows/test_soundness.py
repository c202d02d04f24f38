"""Every equation of every loss that a test has, and of its gradient, alone: micro-batches compute what all rows give."""

import contextlib
import inspect

import jax
import jax.numpy as jnp
import pytest

from tests.engine import set_rules
from tests.rows import against, equations, losses, mixed, programs, test_explain, test_made, test_rules
from tests.tiers import sweep

pytestmark = pytest.mark.usefixtures("rank_promotion")

TERMS = {
    name: loss
    for name, loss in vars(losses).items()
    if inspect.isfunction(loss) and list(inspect.signature(loss).parameters) == ["params", "batch"] and name != "nll"
}


def in_groups(table, size):
    """Several losses of a table each: they are one program."""
    names = list(table)
    return {names[at]: [table[name] for name in names[at : at + size]] for at in range(0, len(names), size)}


def different(cases):
    """The equations of losses and of their gradients that micro-batches run, but for those like an earlier one.

    A case is a loss, its parameters and a batch.
    """
    found = {}
    for loss, params, batch in cases:
        rows = len(jax.tree.leaves(batch)[0])
        twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), batch)
        for fun in (loss, jax.value_and_grad(loss)):
            with contextlib.suppress(TypeError, ValueError):  # it fails, or is another program, for more rows
                traces = [jax.make_jaxpr(fun)(params, some) for some in (batch, twice)]
                for pair in equations.every(*traces, jax.tree.leaves((params, batch)), (rows, 2 * rows)):
                    found.setdefault((str(pair.single), str(pair.double)), pair)
    return [pair for pair in found.values() if pair.says in equations.IN_LOOPS]


def assert_sound(cases, tolerance=2e-5):
    founds = different(cases)
    assert len(founds) > 5
    equations.assert_true(founds, tolerance)


OF_TERMS, OF_RULES = in_groups(TERMS, 8), in_groups(test_rules.LOSSES, 6)


@pytest.mark.parametrize("first", sweep(OF_TERMS, but=list(OF_TERMS)[2:3]))
def test_each_equation_of_a_loss(first):
    assert_sound([(loss, test_explain.PARAMS, test_explain.BATCH) for loss in OF_TERMS[first]])


@pytest.mark.parametrize("first", sweep(OF_RULES, but=list(OF_RULES)[:1]))
def test_each_equation_of_a_loss_with_rules_and_loops(first):
    assert_sound([(loss, *against.values()) for loss in OF_RULES[first]])


@pytest.mark.parametrize("kind", sweep([kind for kind in test_made.KINDS if kind != "references"], but=["in bodies"]))
def test_each_equation_of_a_loss_that_makes_rows(kind):
    divided = [loss for name, loss in test_made.KINDS[kind].items() if name not in test_made.WARNED]
    assert_sound([(loss, test_made.PARAMS, test_made.X) for loss in divided])


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(0, 40, 5))
def test_each_equation_of_a_random_loss(first):
    several = [programs.Writer(number).loss() for number in range(first, first + 5)]
    assert_sound([(loss, *programs.values(jnp.float32)) for loss in several], tolerance=1e-3)


@pytest.mark.parametrize("first", sweep(range(0, 80, 4), but=[0]))
def test_each_equation_of_a_random_mixture(first):
    mixtures = [mixed.Mixture(number) for number in range(first, first + 4)]
    assert_sound([(mixture.loss, *mixture.values()) for mixture in mixtures], tolerance=1e-4)


def test_a_false_value_is_found(monkeypatch):
    rows = jnp.sin(jnp.arange(24.0)).reshape(8, 3)
    loss = lambda w, x: jnp.mean(jax.lax.cumsum(x * w[None], 0) ** 2)
    assert_sound([(loss, jnp.ones(3), rows)])
    set_rules(monkeypatch, "cumsum", local=lambda view: True)
    with pytest.raises(AssertionError, match="cumsum"):
        assert_sound([(loss, jnp.ones(3), rows)])
