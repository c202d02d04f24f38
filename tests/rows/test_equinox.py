"""Equinox, Diffrax and Optimistix: what the table says of their primitives is true; which of their loops are divided."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_accum
from tests.rows import equations
from tests.rows.against import farthest
from tests.rows.test_primitives import EQUINOX
from tests.tiers import sweep

eqx = pytest.importorskip("equinox", reason="pip install --group ecosystem")
eqxi = pytest.importorskip("equinox.internal")

ROWS, WIDTH = 16, 32


def primitives():
    """A case for each primitive, and one where rows lie along an axis that its rule refuses."""
    select = lambda pred, x, y: eqxi_select(pred, x, y, makes_false_steps=False)
    write = lambda xs, x, i: maybe_set(True, xs, x, i, kwargs={}, makes_false_steps=False)
    for name in ("nonbatchable", "nondifferentiable_backward", "nontraceable"):
        yield name, getattr(eqxi, name), ("2n3",), "local"
    yield "select_if_vmap", lambda x, y: select(jnp.array(True), x, y), ("n3", "n3"), "local"
    yield "maybe_set", write, ("4n3", "n3", "i:"), "local"
    yield "maybe_set", write, ("n3", "3", "i:"), "together"
    yield "vprim", jax.vmap(write, (0, 0, None)), ("n43", "n3", "i:"), "local"
    yield "vprim", jax.vmap(write), ("n43", "n3", "i:n"), "local"
    yield "vprim", jax.vmap(write, (1, 0, None)), ("4n3", "n3", "i:"), "local"
    yield "vprim", jax.vmap(write, (1, 1, None)), ("n43", "34", "i:"), "together"
    yield "unvmap_any", eqxi.unvmap_any, ("b:n3",), "partial"
    yield "unvmap_all", eqxi.unvmap_all, ("b:3n",), "partial"
    yield "unvmap_max", eqxi.unvmap_max, ("i:n",), "partial"


def maybe_set(*args, **options):
    from equinox.internal._loop.common import _maybe_set

    return _maybe_set(*args, **options)


def eqxi_select(*args, **options):
    from equinox.internal._loop.common import _select_if_vmap

    return _select_if_vmap(*args, **options)


def test_what_the_table_says_of_equinox_is_true():
    founds = []
    for name, fun, specs, says in primitives():
        found = equations.traced(name, fun, *specs)
        assert found.says == says, (name, specs)
        founds.append(found)
    equations.assert_true(founds, perturbed=lambda found: [])  # some have no derivative
    assert {name for name, *_ in primitives()} == EQUINOX


# Losses


def layer(p, y):
    return jnp.tanh(jnp.tanh(y @ p["in"]) @ p["out"])


def arguments():
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
    return {"in": normal(WIDTH, 2 * WIDTH) / 8, "out": normal(2 * WIDTH, WIDTH) / 8}, normal(ROWS, WIDTH)


def of_rows(one):
    """A loss of a function of one row."""
    return lambda p, rows: jnp.mean(jax.vmap(lambda y: one(p, y))(rows) ** 2)


def loop(kind, until=lambda y: True):
    def one(p, y):
        goes_on = lambda carry: (carry[0] < 6) & until(carry[1])
        step = lambda carry: (carry[0] + 1, carry[1] + layer(p, carry[1]))
        return eqxi.while_loop(goes_on, step, (0, y), max_steps=8, kind=kind)[1]

    return of_rows(one)


def small(y):
    """Whether a row goes on: each row of the test ends after another number of steps."""
    return jnp.sum(y**2) < 40


def ode(adjoint, **options):
    diffrax = pytest.importorskip("diffrax", reason="pip install --group ecosystem")

    def one(p, y):
        term = diffrax.ODETerm(lambda t, y, p: layer(p, y))
        how = {"adjoint": getattr(diffrax, adjoint)(), "max_steps": 16, **options}
        return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 1.0, 0.2, y, args=p, **how).ys[-1]

    return of_rows(one)


def adaptive():
    diffrax = pytest.importorskip("diffrax", reason="pip install --group ecosystem")
    control = diffrax.PIDController(rtol=1e-3, atol=1e-3)
    return ode("RecursiveCheckpointAdjoint", stepsize_controller=control)


def fixed_point():
    optx = pytest.importorskip("optimistix", reason="pip install --group ecosystem")

    def one(p, y):
        solver = optx.FixedPointIteration(rtol=1e-4, atol=1e-4)
        return optx.fixed_point(lambda z, _: layer(p, z) / 2 + y, solver, y, max_steps=16).value

    return of_rows(one)


LOSSES = {  # and whether the loop is divided
    "bounded": (lambda: loop("bounded"), True),
    "bounded, rows end": (lambda: loop("bounded", small), True),
    "checkpointed": (lambda: loop("checkpointed"), True),
    "checkpointed, rows end": (lambda: loop("checkpointed", small), True),
    "DirectAdjoint": (lambda: ode("DirectAdjoint"), True),
    "RecursiveCheckpointAdjoint": (lambda: ode("RecursiveCheckpointAdjoint"), True),
    "BacksolveAdjoint": (lambda: ode("BacksolveAdjoint"), True),
    "adaptive steps": (adaptive, False),
    "a fixed point": (fixed_point, True),
}


def compiled(fun):
    return jax.jit(fun).lower(*arguments()).compile()


@pytest.mark.parametrize("name", sweep(LOSSES, but=["bounded", "checkpointed"]))
def test_a_loop_of_equinox_is_the_whole_batchs(name):
    made, is_divided = LOSSES[name]
    loss = made()
    whole, ours = compiled(jax.value_and_grad(loss)), compiled(optax_accum.value_and_grad(loss, 4))
    assert farthest(ours(*arguments()), whole(*arguments())) < 2e-5
    memory = [program.memory_analysis().temp_size_in_bytes for program in (whole, ours)]
    assert (memory[1] < 0.7 * memory[0]) == is_divided, memory


@pytest.mark.parametrize("parts", sweep([2, 3], but=[3]))
def test_rows_that_end_at_different_steps(parts):
    """Each iteration asks all rows whether one goes on, as the whole batch does."""
    loss = loop("bounded", small)
    steps = lambda row: jax.lax.while_loop(
        lambda c: (c[0] < 6) & small(c[1]), lambda c: (c[0] + 1, c[1] + layer(arguments()[0], c[1])), (0, row)
    )[0]
    assert len(set(map(int, jax.vmap(steps)(arguments()[1])))) > 2
    got = jax.jit(optax_accum.value_and_grad(loss, parts))(*arguments())
    assert farthest(got, jax.value_and_grad(loss)(*arguments())) < 2e-5


def test_an_any_over_rows_that_a_loss_takes_is_of_all_rows():
    loss = lambda p, rows: jnp.mean(layer(p, rows)) * eqxi.unvmap_any(rows[:, 0] > 1.5)
    assert float(jnp.max(arguments()[1][:, 0])) > 1.5 > float(jnp.min(arguments()[1][:4, 0]))
    got = jax.jit(optax_accum.value_and_grad(loss, 4))(*arguments())
    assert farthest(got, jax.value_and_grad(loss)(*arguments())) < 2e-6


@eqx.filter_custom_vjp
def scaled(x, *, by):
    return jnp.sin(x) * by


@scaled.def_fwd
def _(perturbed, x, *, by):
    return scaled(x, by=by), None


@scaled.def_bwd
def _(kept, cotangent, perturbed, x, *, by):
    return jnp.cos(x) * by * cotangent


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("transform", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
def test_a_rule_of_equinox_with_float_keywords(transform, parts):
    loss = of_rows(lambda p, y: scaled(layer(p, y), by=jnp.float32(0.5) + jnp.abs(y)))
    got = transform(optax_accum.value_and_grad(loss, parts))(*arguments())
    assert farthest(got, jax.value_and_grad(loss)(*arguments())) < 2e-5
    assert "not linear" not in str(optax_accum.explain(loss, *arguments()))


@pytest.mark.sweep
def test_an_ode_is_explained():
    assert "custom_vjp_call" not in str(optax_accum.explain(ode("RecursiveCheckpointAdjoint"), *arguments()))
