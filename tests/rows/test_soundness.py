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

TERMS = [
    loss
    for name, loss in vars(losses).items()
    if inspect.isfunction(loss) and list(inspect.signature(loss).parameters) == ["params", "batch"] and name != "nll"
]
IN_BODIES = list(test_made.IN_BODIES.values())
MADE = [
    loss
    for kind, several in test_made.KINDS.items()
    for name, loss in several.items()
    if kind not in ("references", "in bodies") and name not in test_made.WARNED
]


def mixtures(numbers):
    return [(mixture.loss, *mixture.values()) for mixture in map(mixed.Mixture, numbers)]


CASES = {  # losses, each with its parameters and a batch; and how far apart results may be
    "some losses": (lambda: [(loss, test_explain.PARAMS, test_explain.BATCH) for loss in TERMS[16:24]], 2e-5),
    "with some rules": (lambda: [(loss, *against.values()) for loss in [*test_rules.LOSSES.values()][:6]], 2e-5),
    "in bodies": (lambda: [(loss, test_made.PARAMS, test_made.X) for loss in IN_BODIES], 2e-5),
    "some mixtures": (lambda: mixtures(range(4)), 1e-4),
    "losses": (lambda: [(loss, test_explain.PARAMS, test_explain.BATCH) for loss in TERMS], 2e-5),
    "with rules and loops": (lambda: [(loss, *against.values()) for loss in test_rules.LOSSES.values()], 2e-5),
    "that make rows": (lambda: [(loss, test_made.PARAMS, test_made.X) for loss in MADE], 2e-5),
    "random": (lambda: [(programs.Writer(n).loss(), *programs.values(jnp.float32)) for n in range(40)], 1e-3),
    "mixtures": (lambda: mixtures(range(80)), 1e-4),
}
AT_ONCE = 5  # losses of which the equations are one program


def equations_of(cases):
    """The equations of losses and of their gradients that micro-batches run."""
    found = []
    for loss, params, batch in cases:
        rows = len(jax.tree.leaves(batch)[0])
        twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), batch)
        for fun in (loss, jax.value_and_grad(loss)):
            with contextlib.suppress(TypeError, ValueError):  # it fails, or is another program, for more rows
                traces = [jax.make_jaxpr(fun)(params, some) for some in (batch, twice)]
                found += equations.every(*traces, jax.tree.leaves((params, batch)), (rows, 2 * rows))
    return [pair for pair in found if pair.says in equations.IN_LOOPS]


def assert_sound(cases, tolerance=2e-5):
    """One equation of each kind, which is enough: sizes apart, the others are the same."""
    seen = set()
    for first in range(0, len(cases), AT_ONCE):
        kinds = {pair.kind: pair for pair in equations_of(cases[first : first + AT_ONCE])}
        equations.assert_true([pair for kind, pair in kinds.items() if kind not in seen], tolerance)
        seen |= kinds.keys()
    assert len(seen) > 5


@pytest.mark.parametrize("cases", sweep(CASES, but=["in bodies"]))
def test_each_kind_of_equation_of_losses(cases):
    make, tolerance = CASES[cases]
    assert_sound(make(), tolerance)


def test_a_false_value_is_found(monkeypatch):
    rows = jnp.sin(jnp.arange(24.0)).reshape(8, 3)
    loss = lambda w, x: jnp.mean(jax.lax.cumsum(x * w[None], 0) ** 2)
    assert_sound([(loss, jnp.ones(3), rows)])
    set_rules(monkeypatch, "cumsum", local=lambda view: True)
    with pytest.raises(AssertionError, match="cumsum"):
        assert_sound([(loss, jnp.ones(3), rows)])
