"""Facts of the compiled program: inner calls, branches, temporary memory, sharding. Time is the benchmark's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optax_accum
from benchmarks import _in_place
from tests import programs
from tests.tiers import sweep
from tests.versions import needs_references

PARAMS = {f"layer{i}": {"w": jnp.ones((256, 256)), "b": jnp.ones(256)} for i in range(4)}
SIZE = sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS))


def counted(inner):
    """Returns `inner` and the list that a host callback fills at each of its calls."""
    calls = []

    def update(updates, state, params=None, **extra):
        jax.debug.callback(lambda: calls.append(1))
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update), calls


@pytest.mark.parametrize(
    ("nonfinite", "apply"), [("propagate", False), ("skip", True), ("omit", False), ("discard", True)]
)
def test_the_inner_optimizer_runs_once_a_window(apply, nonfinite):
    inner, calls = counted(optax.adam(0.1))
    tx = optax_accum.accumulate_gradients(inner, 4, nonfinite=nonfinite)
    step = jax.jit(lambda *a: optax_accum.apply_gradients(tx, *a) if apply else tx.update(*a))
    params, state = jnp.ones(3), tx.init(jnp.ones(3))
    for _ in range(12):
        _, state = step(params, state, params)
    jax.effects_barrier()
    assert len(calls) == 3


@pytest.mark.parametrize("apply", [False, True], ids=["update", "apply_gradients"])
@pytest.mark.parametrize("flush", [False, True])
def test_a_static_flush_compiles_no_cond(apply, flush):
    tx = optax_accum.accumulate_gradients(optax.adamw(0.1), None)
    step = lambda *a, **k: optax_accum.apply_gradients(tx, *a, **k) if apply else tx.update(*a, **k)
    trace = lambda flush: str(jax.make_jaxpr(step)(PARAMS, tx.init(PARAMS), PARAMS, flush=flush))
    static = str(jax.make_jaxpr(lambda *a: step(*a, flush=flush))(PARAMS, tx.init(PARAMS), PARAMS))
    assert "cond[" not in static
    assert "cond[" in trace(jnp.array(flush))  # and the search can find one
    assert ("sqrt" in static) == flush  # a held micro-step holds nothing of the optimizer


@pytest.mark.sweep
def test_every_one_compiles_no_cond_and_no_select():
    tx, inner = optax_accum.accumulate_gradients(optax.adamw(0.1), 1), optax.adamw(0.1)
    jaxpr = str(jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS))
    assert "cond[" not in jaxpr
    assert len(re.findall("f32.256,256. = select_n", jaxpr)) == 0
    ours = compiled(lambda p, s, g: tx.update(g, s, p), PARAMS, tx.init(PARAMS), PARAMS)
    alone = compiled(lambda p, s, g: inner.update(g, s, p), PARAMS, inner.init(PARAMS), PARAMS)
    assert ours.memory_analysis().temp_size_in_bytes <= alone.memory_analysis().temp_size_in_bytes + 0.02 * SIZE


def compiled(step, *args):
    return programs.compiled(jax.jit(step, donate_argnums=(0, 1)).lower(*args))


def temporary(step, *args):
    """Temporary memory, in copies of the parameters; parameters and state are donated, in their order."""
    return compiled(step, *args).memory_analysis().temp_size_in_bytes / SIZE


def applied(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.sweep
@pytest.mark.parametrize("inner", [*sweep([optax.sgd(0.1, momentum=0.9)]), optax.adamw(0.1)], ids=["sgd", "adamw"])
def test_temporary_memory(inner):
    """`update` needs the zeros that it returns; `apply_gradients` needs nothing beyond the inner optimizer."""
    tx = optax_accum.accumulate_gradients(inner, 8)
    fused = lambda params, state, grads: optax_accum.apply_gradients(tx, grads, state, params)
    alone = temporary(applied(inner), PARAMS, inner.init(PARAMS), PARAMS)
    assert temporary(applied(tx), PARAMS, tx.init(PARAMS), PARAMS) - alone <= 1.01
    assert temporary(fused, PARAMS, tx.init(PARAMS), PARAMS) - alone <= 0.02
    multi = optax.MultiSteps(inner, 8)
    assert temporary(applied(multi), PARAMS, multi.init(PARAMS), PARAMS) - alone > 1.5


@pytest.mark.sweep
@pytest.mark.parametrize("nonfinite", ["skip", "omit", "discard"])
def test_a_policy_costs_no_memory(nonfinite):
    tx = optax_accum.accumulate_gradients(optax.adamw(0.1), 8, nonfinite=nonfinite)
    fused = lambda params, state, grads: optax_accum.apply_gradients(tx, grads, state, params)
    assert temporary(fused, PARAMS, tx.init(PARAMS), PARAMS) <= 0.02


@needs_references
def test_a_window_begins_in_place_without_a_select_over_the_accumulator():
    """A select would read and write the whole sum in every micro-step. With "skip" the sum is selected as it is added."""
    select = re.compile(r"f32\[256,256\] = (?:select_n|jit\[name=_where)")

    def traced(nonfinite):
        loss = lambda params, x: jnp.mean((x @ params["layer0"]["w"]) ** 2)
        tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 8, nonfinite=nonfinite)
        step = optax_accum.value_and_apply_gradients(loss, tx)
        return str(jax.make_jaxpr(step)(PARAMS, tx.init(PARAMS), jnp.ones((2, 256))))

    assert not select.search(traced("propagate"))
    assert select.search(traced("skip"))


@pytest.mark.sweep
@needs_references
@pytest.mark.parametrize(
    ("case", "mixture"), [("tied embedding", "bfloat16"), *sweep([("scan", "bfloat16"), ("scan", "float32")])]
)
def test_in_place_micro_batches_need_the_memory_of_one(case, mixture):
    """With statistics, a layer's gradient more, of 16 layers. What is added by hand has its gradients beside the sum."""
    ways = _in_place.Ways(programs.target("cpu"), _in_place.CASES[case], _in_place.MIXTURES[mixture], 4)
    with programs.as_shipped():
        one = ways.alone()
        inside, measured, after = (
            ways.temporary(ways.compiled(way)) for way in (ways.ours(), ways.ours(statistics=True), ways.by_hand)
        )
    assert inside <= one + 0.04
    assert measured <= inside + 0.07
    assert inside <= after - 0.4


def test_only_a_closing_window_asks_whether_it_is_finite():
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 8, nonfinite="discard")
    step = lambda *a: optax_accum.apply_gradients(tx, *a)
    program = jax.make_jaxpr(step)(PARAMS, tx.init(PARAMS), PARAMS)
    outside = [equation.primitive.name for equation in program.eqns]
    assert outside.count("cond") == 1
    assert "is_finite" in str(program)
    assert "is_finite" not in outside


@pytest.mark.sweep
def test_arguments_donated_in_another_order_are_copied():
    """Why the docstring of `apply_gradients` asks for the order in which they come back."""
    tx = optax_accum.accumulate_gradients(optax.adamw(0.1), 8)
    crossed = lambda state, params, grads: optax_accum.apply_gradients(tx, grads, state, params)
    assert temporary(crossed, tx.init(PARAMS), PARAMS, PARAMS) > 0.5


# Of DoG the state begins as the parameters themselves, of L-BFGS as one array twice.
SHARING = {"dog": optax.contrib.dog(), "lbfgs": optax.lbfgs(0.1, linesearch=None), "adam": optax.adam(0.1)}


@pytest.mark.parametrize("inner", SHARING.values(), ids=SHARING)
def test_a_donated_state_shares_no_buffer(inner):
    tx = optax_accum.accumulate_gradients(inner, 2, mean_args=("value", "accuracy"))
    step = jax.jit(
        lambda params, state, grads: optax_accum.apply_gradients(tx, grads, state, params), donate_argnums=(0, 1)
    )
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    for _ in range(3):
        params, state = step(params, state, {"w": jnp.ones(3)})
    assert state.gradient_step == 1


def test_a_profile_shows_add_hold_emit_and_the_inner_optimizer():
    tx = optax_accum.accumulate_gradients(optax.adamw(0.1), 2)
    text = jax.jit(tx.update).lower(PARAMS, tx.init(PARAMS), PARAMS).as_text(debug_info=True)
    for scope in ("optax_accum.add", "optax_accum.hold", "optax_accum.emit", "optax_accum.inner"):
        assert scope in text


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("axis_type", "apply"), [(jax.sharding.AxisType.Auto, True), (jax.sharding.AxisType.Explicit, False)], ids=str
)
def test_the_sharding_of_the_state_is_kept(axis_type, apply):
    """8 devices: `jit(init)` puts it where `out_shardings` says, and no micro-step moves it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    shard = lambda leaf: NamedSharding(mesh, PartitionSpec(*["data", None][: leaf.ndim]))
    params = jax.device_put(PARAMS, jax.tree.map(shard, PARAMS))
    inner = optax.adamw(0.1)
    tx = optax_accum.accumulate_gradients(inner, 2)
    shardings = jax.tree.map(shard, jax.eval_shape(tx.init, params))

    traces = []

    def step(params, state, grads):
        traces.append(1)
        if apply:
            return optax_accum.apply_gradients(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        state = jax.jit(tx.init, out_shardings=shardings)(params)
        program = jax.jit(step, donate_argnums=(0, 1))
        grads, before = jax.tree.map(jnp.copy, params), jax.tree.map(np.asarray, params)
        for _ in range(2):
            params, state = program(params, state, grads)
            kept = jax.tree.map(lambda leaf, s: leaf.sharding.is_equivalent_to(s, leaf.ndim), state, shardings)
            assert all(jax.tree.leaves(kept))
        assert len(traces) == 1
    expected, _ = applied(inner)(before, inner.init(before), before)
    np.testing.assert_allclose(params["layer0"]["w"], expected["layer0"]["w"], rtol=1e-5)


@pytest.mark.parametrize("nonfinite", ["propagate", "discard"])
def test_for_a_tpu_the_sum_is_a_result_of_the_branch_that_reads_it(nonfinite):
    """Not of the select that a branch becomes under `vmap`. tests/accelerators/test_facts.py says what it is for: Muon's memory."""
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 4, nonfinite=nonfinite)
    step = lambda params, state: optax_accum.apply_gradients(tx, params, state, params)
    each = lambda make: jax.eval_shape(jax.vmap(make), jnp.ones((2, 3)))

    def barriers(step, *args, platform="tpu"):
        text = jax.jit(step).trace(*args).lower(lowering_platforms=(platform,)).as_text()
        return text.count("optimization_barrier")

    one = (jnp.ones(3), tx.init(jnp.ones(3)))
    assert barriers(step, *one) == 1
    assert barriers(step, *one, platform="cpu") == 0
    for mapped in (jax.vmap(step), jax.vmap(jax.jit(step))):
        assert barriers(mapped, jnp.ones((2, 3)), each(tx.init)) == 0


@pytest.mark.sweep
def test_an_update_can_be_differentiated():
    """By what it learns from, through the branch, with what is a TPU's alone in it."""
    tx = optax_accum.accumulate_gradients(optax.sgd(0.5), 2)

    def end(rate):
        params, state = jnp.ones(3), tx.init(jnp.ones(3))
        for _ in range(4):
            params, state = optax_accum.apply_gradients(tx, rate * params, state, params)
        return jnp.sum(params)

    for f in (jax.jit(jax.grad(end)), jax.jit(jax.jacfwd(end)), jax.grad(jax.jit(end))):
        assert f(0.1) == pytest.approx(-3 * (1 - 0.05), rel=1e-6)  # 3 (1 - rate / 2)^2
