"""Every equation of every loss that a test has, checked alone: in micro-batches it is what it is for all rows."""

import contextlib
import inspect

import jax
import jax.numpy as jnp
import pytest

from optax_accum._rows import leveling, registry
from optax_accum._rows.registry import Known
from optax_accum._within.traced_call import UndividedError
from tests.rows import against, losses, mixed, programs, test_explain, test_made, test_rules
from tests.rows.soundness import traced, traced_gradient, unsound
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


def assert_sound(several, params, batch, parts, tolerance=2e-5):
    calls = [each(loss, params, batch, parts) for loss in several for each in (traced, traced_gradient)]
    assert sum(len(call.levels.kinds) for call in calls) > len(calls)
    assert unsound(*calls, tolerance=tolerance) == []


OF_TERMS, OF_RULES = in_groups(TERMS, 8), in_groups(test_rules.LOSSES, 6)


@pytest.mark.parametrize("first", sweep(OF_TERMS, but=list(OF_TERMS)[2:3]))
def test_each_equation_of_a_loss(first):
    """Of five micro-batches the last are filled up."""
    assert_sound(OF_TERMS[first], test_explain.PARAMS, test_explain.BATCH, 5)


@pytest.mark.parametrize("first", sweep(OF_RULES, but=list(OF_RULES)[:1]))
def test_each_equation_of_a_loss_with_rules_and_loops(first):
    assert_sound(OF_RULES[first], *against.values(), 5)


@pytest.mark.parametrize("kind", sweep([kind for kind in test_made.KINDS if kind != "references"], but=["in bodies"]))
def test_each_equation_of_a_loss_that_makes_rows(kind):
    divided = [loss for name, loss in test_made.KINDS[kind].items() if name not in test_made.WARNED]
    assert_sound(divided, test_made.PARAMS, test_made.X, 5)


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(0, 40, 5))
def test_each_equation_of_a_random_loss(first):
    several = [programs.Writer(number).loss() for number in range(first, first + 5)]
    assert_sound(several, *programs.values(jnp.float32), 5, tolerance=1e-3)


@pytest.mark.parametrize("first", sweep(range(0, 80, 8), but=[0]))
def test_each_equation_of_a_random_mixture(first):
    mixtures = [mixed.Mixture(number) for number in range(first, first + 8)]
    calls = []
    for mixture in mixtures:
        with contextlib.suppress(UndividedError):
            calls.append(traced_gradient(mixture.loss, *mixture.values(), min(3, mixture.n)))
    assert len(calls) >= 4
    assert unsound(*calls, tolerance=1e-4) == []


# What is false is found

x = jnp.sin(jnp.arange(24.0)).reshape(8, 3)


def said_of(loss, trace=traced):
    return unsound(trace(loss, jnp.ones(3), x, 3), tolerance=1e-5)


def test_a_false_value_is_found(monkeypatch):
    loss = lambda w, x: jnp.mean(jnp.flip(x * w[None], 0) ** 2 * x)
    assert said_of(loss) == []
    monkeypatch.setitem(registry._table, "rev", Known(local=lambda view: True))
    (said,) = said_of(loss)
    assert said.startswith("rev at test_soundness.py:")
    assert "is LOCAL, and its parts are not the whole" in said


def test_a_false_value_of_a_gradient_is_found(monkeypatch):
    loss = lambda w, x: jnp.mean(x * jnp.flip(w * jnp.tanh(x * w[None]).sum(0)[None] * x, 0))
    assert said_of(loss, traced_gradient) == []
    monkeypatch.setitem(registry._table, "rev", Known(local=lambda view: True))
    assert any(said.startswith("rev") and "LOCAL" in said for said in said_of(loss, traced_gradient))


@pytest.mark.parametrize("trace", [traced, traced_gradient])
def test_a_false_part_is_found(trace, monkeypatch):
    loss = lambda w, x: jnp.sum(jnp.exp(jax.lax.stop_gradient(jnp.max(x * w[None], 0))) * w)
    assert said_of(loss, trace) == []
    monkeypatch.setitem(registry._table, "reduce_max", Known(partial=registry.known("reduce_sum").partial))
    (said,) = said_of(loss, trace)
    assert said.startswith("reduce_max")
    assert "is PARTIAL" in said


def test_a_false_derivative_is_found(monkeypatch):
    twice = jax.custom_jvp(lambda x: 2 * x)
    twice.defjvp(lambda xs, ts: (twice(*xs), 2 * ts[0] - ts[0].mean(0, keepdims=True)))
    loss = lambda w, x: jnp.mean(twice(x * w[None]) ** 2)
    assert said_of(loss) == []
    monkeypatch.setitem(registry._table, "custom_jvp_call", Known(local=lambda view: True))
    with pytest.raises(ValueError, match="does not treat rows one by one"):
        said_of(loss)


def test_a_rule_that_is_not_linear_in_two_loops_is_found(monkeypatch):
    rule = test_rules.clips_cheaply
    centred = lambda h: jnp.mean((h - jnp.mean(h)) ** 3)
    assert said_of(lambda w, x: centred(rule(x * w[None]))) == []
    monkeypatch.setattr(leveling, "nonlinear_rules", lambda *_: ())
    (said,) = said_of(lambda w, x: centred(rule(x * w[None])))
    assert "runs in 2 loops" in said
