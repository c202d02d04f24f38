"""Extra arguments of the inner optimizer: which it gets as their mean over the window, and which as the last call gave."""

import functools
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optax_accum
from optax_accum import checkpoint, sharding
from tests.across.test_optimizers import OPTIMIZERS
from tests.tiers import sweep

pytestmark = pytest.mark.quick


def newton():
    """Preconditions with a metric that is passed to it, as Gauss-Newton and natural gradients do."""

    def update(updates, state, params=None, *, metric, **_):
        return jax.tree.map(lambda g: -jnp.linalg.solve(metric["w"], g), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


METRIC = {"w": jnp.zeros((1, 1))}
ROWS = [(jnp.array([1.0]), {"w": jnp.array([[1.0]])}), (jnp.array([3.0]), {"w": jnp.array([[3.0]])})]


@pytest.mark.parametrize(
    "example", [METRIC, lambda params: METRIC, jax.eval_shape(lambda: METRIC)], ids=["arrays", "a function", "shapes"]
)
def test_a_tree_is_averaged_over_the_window(example):
    tx = optax_accum.accumulate_gradients(newton(), 2, mean_args={"metric": example, "value": 0.0})
    state, update = tx.init(jnp.zeros(1)), jax.jit(tx.update)
    types = jax.tree.map(jax.typeof, state)
    for _ in range(2):
        for grads, metric in ROWS:
            updates, state = update(grads, state, jnp.zeros(1), metric=metric, value=1.0)
            assert jax.tree.map(jax.typeof, state) == types
        np.testing.assert_allclose(updates, -1)  # mean gradient 2, mean metric 2
    assert state.mean_args["metric"].mean == {"w": 2.0}
    assert state.mean_args["value"].mean == 1


@pytest.mark.sweep
def test_a_tree_is_weighted_and_left_out_like_its_gradient():
    tx = optax_accum.accumulate_gradients(newton(), 3, mean_args={"metric": METRIC}, nonfinite="omit")
    state = tx.init(jnp.zeros(1))
    bad = jnp.array([jnp.nan]), {"w": jnp.array([[7.0]])}
    for (grads, metric), weight in zip([ROWS[0], bad, ROWS[1]], (3, 5, 1), strict=True):
        updates, state = tx.update(grads, state, jnp.zeros(1), metric=metric, weight=weight)
    np.testing.assert_allclose(updates, -1)
    np.testing.assert_allclose(state.mean_args["metric"].mean["w"], [[1.5]])


def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("of", ["one device", "all devices"])
def test_a_tree_over_devices(of):
    """Eight devices: one metric of each, or one that all have."""
    with jax.set_mesh(mesh()):
        params = jax.device_put(jnp.zeros(1), NamedSharding(mesh(), PartitionSpec()))
        tx = optax_accum.accumulate_gradients(newton(), 2, mean_args={"metric": METRIC}, devices="data")
        state = jax.jit(tx.init, out_shardings=sharding.state_sharding(tx, params))(params)
        assert state.mean_args["metric"].total["w"].sharding.spec == PartitionSpec("data")
        grads, each = np.arange(16.0, dtype=np.float32).reshape(2, 8, 1) + 1, np.ones((2, 8, 1, 1), np.float32)
        each *= np.arange(16.0).reshape(2, 8, 1, 1)
        metrics = each if of == "one device" else each.mean(axis=1)
        for grad, metric in zip(grads, metrics, strict=True):
            updates, state = jax.jit(tx.update)(grad, state, params, metric={"w": metric})
    np.testing.assert_allclose(updates, -grads.mean() / each.mean(), rtol=1e-6)
    np.testing.assert_allclose(state.mean_args["metric"].mean["w"], [[each.mean()]], rtol=1e-6)
    moved = checkpoint.redistribute(jax.tree.map(np.asarray, state), 2)
    np.testing.assert_allclose(moved.mean_args["metric"].mean["w"], [[each.mean()]], rtol=1e-6)


def test_a_tree_inside_a_shard_map():
    inner = optax.chain(newton(), optax.contrib.reduce_on_plateau())
    examples = {"metric": METRIC, "value": 0.0}
    tx = optax_accum.accumulate_gradients(inner, 2, mean_args=examples, devices="data")

    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=PartitionSpec(None, "data"), out_specs=PartitionSpec())
    def run(grads):
        params = jnp.zeros(1)
        state = tx.init(params)
        for grad in grads:
            updates, state = tx.update(grad, state, params, metric={"w": grad[:, None] / 2}, value=grad[0])
        return updates

    np.testing.assert_allclose(jax.jit(run)(jnp.arange(16.0).reshape(2, 8) + 1), -2, rtol=1e-6)


def test_a_tree_through_a_whole_micro_step():
    """The metric is data of the batch; `fun` does not name it, so it is the optimizer's."""
    tx = optax_accum.accumulate_gradients(newton(), 2, mean_args={"metric": METRIC})
    step = jax.jit(optax_accum.value_and_apply_gradients(lambda w, x: jnp.mean(w * x), tx))
    params, state = jnp.zeros(1), tx.init(jnp.zeros(1))
    for x, metric in ROWS:
        _, params, state = step(params, state, x, metric=metric)
    np.testing.assert_allclose(params, -1)


@pytest.mark.parametrize(
    ("metric", "error", "message"),
    [
        ({"w": jnp.zeros((1, 2))}, ValueError, r"metric at \['w'\] has shape \(1, 2\), and the example \(1, 1\)"),
        (jnp.zeros((1, 1)), ValueError, r"the tree of the example of metric.*tx.init\(params\).mean_args"),
        (
            {"w": jnp.zeros((1, 1), int)},
            TypeError,
            r"metric at \['w'\] is int32, and its sum float32. Pass a tree like",
        ),
        ({"w": jnp.zeros((1, 1), complex)}, TypeError, r"metric at \['w'\] is complex64"),
    ],
)
def test_a_tree_that_is_not_like_its_example(metric, error, message):
    tx = optax_accum.accumulate_gradients(newton(), 2, mean_args={"metric": METRIC})
    with pytest.raises(error, match=message):
        tx.update(jnp.ones(1), tx.init(jnp.zeros(1)), jnp.zeros(1), metric=metric)


@pytest.mark.parametrize(
    "example",
    [jnp.zeros(2, int), 1, True, "w", lambda params: jnp.arange(3)],
    ids=["integers", "a number", "a bool", "a word", "a function"],
)
def test_an_example_without_a_mean(example):
    with pytest.raises(TypeError, match=r"must be a tree of floating-point arrays.*mean_args\['metric'\].*jnp.zeros"):
        optax_accum.accumulate_gradients(newton(), 2, mean_args={"metric": example}).init(jnp.zeros(1))


def test_a_running_multi_steps_takes_up_a_tree():
    old = optax.MultiSteps(optax.sgd(1.0), 2).init(jnp.zeros(1))
    example = lambda params: {"w": jnp.outer(params, params)}
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2, mean_args={"metric": example})
    state = optax_accum.from_multi_steps(old, tx)
    assert state.mean_args["metric"].total["w"].shape == (1, 1)


# A gradient by its name.


def line_search():
    return optax.chain(optax.sgd(4.0), optax.scale_by_backtracking_linesearch(5, slope_rtol=0.6))


LOSS = lambda w, x: jnp.mean(jnp.log(jnp.cosh(x @ w - 1)))


@pytest.mark.parametrize(
    "make", [*sweep([lambda: optax.lbfgs(memory_size=3)]), line_search], ids=["lbfgs", "line search"]
)
def test_an_optimizer_that_takes_the_gradient_by_name_gets_that_of_the_window(make):
    x, inner = jnp.asarray(np.random.default_rng(0).normal(size=(12, 3)), jnp.float32), make()
    tx = optax_accum.accumulate_gradients(inner, 3)
    whole = lambda w: LOSS(w, x)

    @jax.jit
    def update(w, state):
        value, grad = jax.value_and_grad(LOSS)(w, x)
        updates, state = inner.update(grad, state, w, value=value, grad=grad, value_fn=whole)
        return optax.apply_updates(w, updates), state

    @jax.jit
    def micro_step(w, state, rows):
        value, grad = jax.value_and_grad(LOSS)(w, rows)
        return optax_accum.apply_gradients(
            tx, grad, state, w, weight=rows.shape[0], value=value, grad=grad, value_fn=whole
        )

    want = now = jnp.zeros(3)
    want_state, state = inner.init(want), tx.init(now)
    for _ in range(3):
        want, want_state = update(want, want_state)
        for rows in (x[:2], x[2:7], x[7:]):
            now, state = micro_step(now, state, rows)
    np.testing.assert_allclose(now, want, rtol=1e-4)


def given(seen):
    """An optimizer that says what it was given."""

    def update(updates, state, params=None, **extra_args):
        seen.append(extra_args)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def test_a_grad_of_another_tree_is_passed_on():
    """Only what is the gradient's stand-in is taken for it."""
    seen = []
    tx = optax_accum.accumulate_gradients(given(seen), None)
    state = tx.init(jnp.zeros(2))
    for grad in (jnp.ones(2), jnp.full(2, 3.0)):
        _, state = tx.update(grad, state, grad=grad, flush=bool(grad[0] == 3))
    np.testing.assert_allclose(seen[-1]["grad"], 2)
    for other in (0.5, {"a": jnp.ones(2)}, jnp.ones(3), None):
        tx = optax_accum.accumulate_gradients(given(seen), 1)
        tx.update(jnp.ones(2), tx.init(jnp.zeros(2)), grad=other)
        assert seen[-1]["grad"] is other


def test_the_gradient_by_name_over_devices():
    seen = []
    with jax.set_mesh(mesh()):
        params = jax.device_put(jnp.zeros(1), NamedSharding(mesh(), PartitionSpec()))
        tx = optax_accum.accumulate_gradients(given(seen), 1, devices="data")
        grads = jnp.arange(8.0)[:, None]
        updates, _ = tx.update(grads, tx.init(params), params, grad=grads)
    np.testing.assert_allclose(seen[0]["grad"], updates)
    np.testing.assert_allclose(updates, 3.5)


# The table of docs/faq.md.

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3) / 4 + 1, "b": jnp.array([-1.0, 0.5, 2.0])}


def reads(inner):
    """Which arguments an optimizer of Optax computes with, or calls."""
    called, inner = set(), optax.with_extra_args_support(inner)

    def spy(name, of):
        def fun(params, *_, obj_fn=None, grad_fn=None):  # a line search hands on what its function names
            called.add(name)
            return of(lambda p: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)))(params)

        return fun

    functions = {name: spy(name, lambda fun: fun) for name in ("value_fn", "obj_fn")} | {
        "grad_fn": spy("grad_fn", jax.grad)
    }

    def update(state, value, grad):
        extra_args = {"value": value, "grad": grad, **functions}
        kinds = {each.name: each.kind for each in inspect.signature(inner.update).parameters.values()}
        named = extra_args if inspect.Parameter.VAR_KEYWORD in kinds.values() else kinds.keys() & extra_args
        return inner.update(PARAMS, state, PARAMS, **{name: extra_args[name] for name in named})

    state = inner.init(PARAMS)
    program = jax.make_jaxpr(update)(state, jnp.float32(1), PARAMS).jaxpr
    used = {id(var) for equation in program.eqns for var in equation.invars}
    used = [id(var) in used for var in program.invars[len(jax.tree.leaves(state)) :]]
    return called | {name for name, of in (("value", used[:1]), ("grad", used[1:])) if any(of)}


def test_the_table_of_optimizers_that_are_given_more_is_true():
    with jax.numpy_rank_promotion("allow"):  # Optax's own arithmetic
        found = {name: reads(inner) for name, inner in OPTIMIZERS.items()}
    found["optax.contrib.sam"] = reads(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True))
    wrappers = {"optax.snapshot", "optax.conditionally_transform", "optax.conditionally_mask"}  # hand all on
    found = {name.split(".")[-1]: read for name, read in found.items() if read and name not in wrappers}
    section = Path("docs/faq.md").read_text().split("## Does it work with Muon")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", section, flags=re.MULTILINE)
    assert len(rows) == 5
    table = {argument: set(re.findall(r"`([\w.]+)`", names)) for argument, names in rows}
    assert table == {key: {name for name, read in found.items() if key in read} for key in table}
