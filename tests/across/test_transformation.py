"""The contract of `accumulate_gradients` and `apply_gradients`, line by line; the law itself is in test_law.py."""

import typing
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from tests.engine import warn_of_no_window

pytestmark = pytest.mark.quick

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3) - 2, "b": jnp.array([0.5, -0.5, 1.0])}
GRADS = [jax.tree.map(lambda p, i=i: jnp.cos(p + i), PARAMS) for i in range(8)]
SGD = optax.sgd(1.0)


def mean(grads):
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *grads)


def close(updates, grads):
    chex.assert_trees_all_close(updates, jax.tree.map(lambda g: -g, mean(grads)), rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_a_held_update_adds_nothing_to_the_bit(jit):
    tx = optax_accum.accumulate_gradients(SGD, 2)
    params = jnp.array([-0.0, 0.0, 1e-30, -jnp.inf])
    update = jax.jit(tx.update) if jit else tx.update
    updates, _ = update(jnp.ones(4), tx.init(params), params)
    now = optax.apply_updates(params, updates)
    assert np.asarray(now).tobytes() == np.asarray(params).tobytes()


def test_the_step_is_a_pair_of_pure_functions_of_arrays():
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 2)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    chex.assert_tree_all_finite(tx.init(PARAMS))
    state = tx.init(PARAMS)
    first, second = (tx.update(GRADS[0], state, PARAMS) for _ in range(2))
    chex.assert_trees_all_equal(first, second)


@pytest.mark.parametrize(
    ("apply", "options"),
    [(True, {}), (False, {"nonfinite": "skip"}), (True, {"nonfinite": "discard"}), (False, {"reduction": "sum"})],
    ids=str,
)
def test_the_state_is_a_fixed_point_and_traced_once(apply, options):
    """Types, weak types and shapes stay, so one compilation serves every micro-step, first, held and emitted."""
    inner = optax.inject_hyperparams(optax.adamw)(0.1)  # its hyperparameters start as weak types
    tx = optax_accum.accumulate_gradients(inner, 2, **options)

    traces = []

    @jax.jit
    def step(grads, state, params, weight):
        traces.append(1)
        if apply:
            return optax_accum.apply_gradients(tx, grads, state, params, weight=weight, value=1.0)
        return tx.update(grads, state, params, weight=weight, value=1.0)

    state, params = tx.init(PARAMS), PARAMS
    types = jax.tree.map(jax.typeof, state)
    for grads in GRADS[:5]:
        result, state = step(grads, state, params, 2.0)
        assert jax.tree.map(jax.typeof, state) == types
        params = result if apply else params
    assert len(traces) == 1


@pytest.mark.parametrize("apply", [False, True], ids=["update", "apply_gradients"])
def test_a_held_micro_step_changes_nothing(apply):
    tx = optax_accum.accumulate_gradients(optax.adamw(0.1), 3)
    state = tx.init(PARAMS)
    if apply:
        params, new = optax_accum.apply_gradients(tx, GRADS[0], state, PARAMS)
        chex.assert_trees_all_equal(params, PARAMS)
    else:
        updates, new = tx.update(GRADS[0], state, PARAMS)
        chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, PARAMS))  # exact zeros
    chex.assert_trees_all_equal(new.inner_opt_state, state.inner_opt_state)
    assert (new.mini_step, new.gradient_step) == (1, 0)


def test_no_counter_wraps():
    tx = optax_accum.accumulate_gradients(SGD, None, nonfinite="omit")
    full = {name: jnp.int32(2**31 - 1) for name in ("mini_step", "gradient_step", "skipped", "discarded")}
    bad = jax.tree.map(lambda g: g * jnp.nan, GRADS[0])
    for flush in (False, True):
        _, state = tx.update(bad, tx.init(PARAMS)._replace(**full), PARAMS, flush=flush)
        counts = {name: getattr(state, name) for name in full}
        assert counts == {**full, "mini_step": 0 if flush else 2**31 - 1}


def test_apply_gradients_is_update_and_apply_updates():
    for inner in (optax.adamw(0.1), optax_accum.accumulate_gradients(optax.adamw(0.1), 2)):
        state = fused_state = inner.init(PARAMS)
        params = fused = PARAMS
        for grads in GRADS[:4]:
            updates, state = inner.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            fused, fused_state = optax_accum.apply_gradients(inner, grads, fused_state, fused)
            chex.assert_trees_all_equal(params, fused)
            chex.assert_trees_all_equal(state, fused_state)


def test_apply_gradients_passes_extra_arguments_to_any_transformation():
    tx = optax.chain(optax.identity(), optax_accum.accumulate_gradients(SGD, None))
    params, _state = optax_accum.apply_gradients(tx, GRADS[0], tx.init(PARAMS), PARAMS, flush=True, weight=3.0)
    chex.assert_trees_all_close(params, jax.tree.map(jnp.subtract, PARAMS, GRADS[0]), rtol=1e-6)
    plain = optax.GradientTransformation(SGD.init, SGD.update)
    optax_accum.apply_gradients(plain, GRADS[0], plain.init(PARAMS), PARAMS, value=1.0)


def test_every_may_follow_the_updates():
    """A schedule of the window's length: 1, then 2, then 0 (which acts as 1), then 3."""
    lengths = jnp.array([1, 2, 0, 3])
    tx = optax_accum.accumulate_gradients(SGD, lambda step: lengths[step])
    update, state, emitted = jax.jit(tx.update), tx.init(PARAMS), []
    for grads in GRADS[:7]:
        updates, state = update(grads, state, PARAMS)
        emitted.append(bool(optax_accum.has_updated(state)))
    assert emitted == [True, False, True, True, False, False, True]
    close(updates, GRADS[4:7])


@pytest.mark.parametrize(("before", "after", "closes"), [(5, 3, 3), (2, 4, 4), (5, 1, 3), (None, 3, 3), (5, 2, 3)])
def test_every_may_change_in_the_middle_of_a_window(before, after, closes):
    """A resumed run: two micro-steps in the window, then another `every` (for 2: one micro-step)."""
    done = 1 if before == 2 else 2
    tx = optax_accum.accumulate_gradients(SGD, before)
    state = tx.init(PARAMS)
    for grads in GRADS[:done]:
        _, state = tx.update(grads, state, PARAMS, flush=False)
    tx = optax_accum.accumulate_gradients(SGD, after)
    update = jax.jit(tx.update)
    for i in range(done, closes):
        assert not optax_accum.has_updated(state)
        updates, state = update(GRADS[i], state, PARAMS)
    assert optax_accum.has_updated(state)
    close(updates, GRADS[:closes])
    for i in range(after):  # and the window after is a whole one
        updates, state = update(GRADS[i], state, PARAMS)
    close(updates, GRADS[:after])


@pytest.mark.parametrize("flush", [True, np.bool_(True), jnp.array(True)], ids=["static", "numpy", "traced"])
@pytest.mark.parametrize("every", [None, 5])
def test_flush_closes_the_window_with_the_divisor_of_what_is_in_it(every, flush):
    tx = optax_accum.accumulate_gradients(SGD, every)
    state = tx.init(PARAMS)
    for i, grads in enumerate(GRADS[:3]):
        updates, state = tx.update(grads, state, PARAMS, flush=flush if i == 2 else flush ^ True)
    close(updates, GRADS[:3])
    _, state = tx.update(GRADS[3], state, PARAMS, flush=False)
    updates, state = tx.update(GRADS[4], state, PARAMS, flush=flush)
    close(updates, GRADS[3:5])
    assert state.gradient_step == 2


def test_a_flush_on_time_is_no_second_update():
    tx = optax_accum.accumulate_gradients(SGD, 2)
    state = tx.init(PARAMS)
    for flush in (False, True):
        _, state = tx.update(GRADS[0], state, PARAMS, flush=flush)
    assert (state.gradient_step, state.mini_step) == (1, 0)


def test_no_parameters_are_needed_by_an_inner_optimizer_that_needs_none():
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 2)
    _, state = tx.update(GRADS[0], tx.init(PARAMS))
    _, state = tx.update(GRADS[1], state)
    assert state.gradient_step == 1


# Extra arguments.


def test_extra_arguments_reach_inner_through_a_chain_and_value_as_its_mean():
    seen = []

    def update(updates, state, params=None, *, value, note, **rest):
        seen.append((note, rest))
        return jax.tree.map(lambda u: jnp.full_like(u, value), updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = optax.chain(optax.identity(), optax_accum.accumulate_gradients(inner, 3))
    state = tx.init(PARAMS)
    for grads, value, weight in zip(GRADS[:3], (1.0, 2.0, 6.0), (1, 2, 1), strict=True):
        updates, state = tx.update(grads, state, PARAMS, value=value, weight=weight, note="static")
    chex.assert_trees_all_close(updates, jax.tree.map(lambda p: jnp.full_like(p, 11 / 4), PARAMS))
    assert set(map(str, seen)) == {"('static', {})"}  # neither weight nor flush goes further


def test_reduce_on_plateau_sees_the_loss_of_the_window():
    """`MultiSteps` shows it the loss of the last micro-batch, which rises while the loss of the window falls."""
    inner = optax.chain(SGD, optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    tx = optax_accum.accumulate_gradients(inner, 2)
    state = tx.init(PARAMS)
    for low, high in [(5.0, 5.0), (3.0, 6.0), (1.0, 7.0), (0.0, 7.5)]:
        for value in (low, high):
            _, state = tx.update(GRADS[0], state, PARAMS, value=value)
    plateau = state.inner_opt_state[1]
    assert plateau.scale == 1.0
    np.testing.assert_allclose(plateau.best_value, 3.75)


def test_polyak_takes_its_step_from_the_loss_of_the_window():
    inner = optax.polyak_sgd(max_learning_rate=10.0)
    tx = optax_accum.accumulate_gradients(inner, 2)
    state = tx.init(PARAMS)
    for grads, value in zip(GRADS[:2], (1.0, 3.0), strict=True):
        updates, state = tx.update(grads, state, PARAMS, value=value)
    expected, _ = inner.update(mean(GRADS[:2]), inner.init(PARAMS), PARAMS, value=2.0)
    chex.assert_trees_all_close(updates, expected, rtol=1e-5)


def test_a_mean_argument_is_the_mean_of_the_micro_steps_that_gave_it():
    inner = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None, *, accuracy: (jax.tree.map(lambda u: u * 0 + accuracy, updates), state),
    )
    tx = optax_accum.accumulate_gradients(inner, 3, mean_args=("accuracy",))
    state = tx.init(PARAMS)
    _, state = tx.update(GRADS[0], state, PARAMS, accuracy=0.2)
    _, state = tx.update(GRADS[1], state, PARAMS, accuracy=jnp.float32(np.nan), weight=0.0)
    updates, state = tx.update(GRADS[2], state, PARAMS, accuracy=0.6)
    chex.assert_trees_all_close(updates, jax.tree.map(lambda p: jnp.full_like(p, 0.4), PARAMS), rtol=1e-6)
    _, state = tx.update(GRADS[0], state, PARAMS, accuracy=0.75)  # the next window begins anew
    assert jax.tree.leaves(state.mean_args) == [0.75, 1]
    assert state.mean_args["accuracy"].mean == 0.75
    assert np.isnan(tx.init(PARAMS).mean_args["accuracy"].mean)
    assert type(state.mean_args["accuracy"])(jnp.array([1.0, 5.0]), jnp.array([2.0, 1.0])).mean == 2  # of two devices


# Trees and leaves.


def test_none_masked_and_empty_leaves_pass_through():
    params = {"w": jnp.ones(2), "none": None, "empty": jnp.zeros((0, 3)), "scalar": jnp.array(1.0)}
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 2)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert updates["none"] is None
    assert updates["empty"].shape == (0, 3)
    masked = {"w": jnp.ones(2), "frozen": optax.MaskedNode()}
    updates, _ = tx.update(masked, tx.init(masked), masked)
    assert updates["frozen"] == optax.MaskedNode()


@pytest.mark.parametrize("every", [1, 2])
def test_float0_passes_through(every):
    """What `jax.grad(..., allow_int=True)` gives for an integer parameter; the inner optimizer leaves it alone."""
    params = {"w": jnp.ones(2), "table": jnp.arange(3)}
    grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2) + p["table"][1], allow_int=True)(params)
    inner = optax.masked(optax.sgd(0.25), {"w": True, "table": False})
    tx = optax_accum.accumulate_gradients(inner, every)
    step = jax.jit(lambda *args: optax_accum.apply_gradients(tx, *args))
    state, new = tx.init(params), params
    for _ in range(every):
        updates, _ = tx.update(grads, state, params)
        assert updates["table"].dtype == jax.dtypes.float0
        new, state = step(grads, state, new)
    np.testing.assert_allclose(new["w"], 0.5)
    np.testing.assert_array_equal(new["table"], params["table"])


@pytest.mark.parametrize("wrap", ["partition", "masked"])
def test_frozen_parameters_cost_no_accumulator(wrap):
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 2)
    if wrap == "partition":
        tx = optax.partition({"train": tx, "freeze": optax.set_to_zero()}, {"w": "freeze", "b": "train"})
    else:
        tx = optax.masked(tx, {"w": False, "b": True})
    state = tx.init(PARAMS)
    sizes = [leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert sizes == [3, 3, 3]  # two moments and one accumulator, of "b" alone
    for grads in GRADS[:2]:
        updates, state = jax.jit(tx.update)(grads, state, PARAMS)
    assert np.any(updates["b"] != 0)


def test_frozen_parameters_inside_have_accumulators():
    """docs/faq.md says which way round."""
    inner = optax.masked(optax.adam(0.1), {"w": False, "b": True})
    state = optax_accum.accumulate_gradients(inner, 2).init(PARAMS)
    assert [leaf.size for leaf in jax.tree.leaves(state.acc_grads)] == [3, 6]
    partition = optax.partition(
        {"train": optax.adam(0.1), "freeze": optax.set_to_zero()}, {"w": "freeze", "b": "train"}
    )
    state = optax_accum.accumulate_gradients(partition, 2).init(PARAMS)
    assert [leaf.size for leaf in jax.tree.leaves(state.acc_grads)] == [3, 6]


def test_every_one_allocates_no_accumulator():
    inner = optax.adam(0.1)
    size = lambda state: sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim)
    state = optax_accum.accumulate_gradients(inner, 1).init(PARAMS)
    assert size(state) == size(inner.init(PARAMS))
    assert size(optax.MultiSteps(inner, 1).init(PARAMS)) > size(state)


def test_abstract_init():
    tx = optax_accum.accumulate_gradients(optax.adamw(0.1), 2, nonfinite=optax.transforms.skip_not_finite)
    shapes = jax.eval_shape(tx.init, PARAMS)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), shapes) == jax.tree.map(
        lambda s: (s.shape, s.dtype), tx.init(PARAMS)
    )
    out = jax.eval_shape(tx.update, PARAMS, shapes, PARAMS)
    assert jax.tree.structure(out[1]) == jax.tree.structure(shapes)


def test_the_tools_of_optax_see_into_the_state():
    tx = optax_accum.accumulate_gradients(optax.inject_hyperparams(optax.adam)(0.1), 2)
    state = tx.init(PARAMS)
    np.testing.assert_allclose(optax.tree.get(state, "learning_rate"), 0.1)
    state = optax.tree.set(state, learning_rate=jnp.float32(0.5))
    np.testing.assert_allclose(state.inner_opt_state.hyperparams["learning_rate"], 0.5)
    marked = optax.tree.map_params(tx, lambda _: "parameter", state, transform_non_params=lambda _: "other")
    assert marked.acc_grads == {"w": "parameter", "b": "parameter"}
    assert marked.mini_step == "other"


@pytest.mark.parametrize("groups", [None, {"w": "matrix", "b": "vector"}])
def test_the_tools_of_optax_see_into_a_state_with_statistics(groups):
    options = optax_accum.statistics.Options(groups=groups)
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 2, statistics=options)
    state = tx.init(PARAMS)
    marked = optax.tree.map_params(tx, lambda _: "parameter", state, transform_non_params=lambda _: "other")
    assert marked.inner_opt_state[0].mu == marked.acc_grads == {"w": "parameter", "b": "parameter"}
    assert set(jax.tree.leaves((marked.samples, marked.statistics))) == {"other"}


@pytest.mark.sweep
def test_an_inner_optimizer_may_hold_a_typed_key():
    tx = optax_accum.accumulate_gradients(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), 2)
    state = tx.init(PARAMS)
    for grads in GRADS[:2]:
        updates, state = jax.jit(tx.update)(grads, state, PARAMS)
    assert np.any(updates["w"] != 0)


def test_eager_calls_compile_no_cond(monkeypatch):
    """Outside jit the branch is known; a cond would be compiled again at every call."""
    monkeypatch.setattr(jax.lax, "cond", lambda *_: pytest.fail("compiled a cond"))
    for options in ({}, {"nonfinite": "discard"}, {"nonfinite": "skip"}):
        tx = optax_accum.accumulate_gradients(optax.scale(0.1), 2, **options)
        state = tx.init(PARAMS)
        for grads in GRADS[:4]:
            _, state = tx.update(grads, state, PARAMS)
        assert state.gradient_step == 2


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_inner_state_of_python_numbers(jit):
    """As `optax.inject_hyperparams` leaves it with a schedule that returns a Python integer."""
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=lambda step: 1)
    tx = optax_accum.accumulate_gradients(inner, 2)
    params = jnp.zeros(3)
    state = tx.init(params)
    update = jit(tx.update)
    for _ in range(2):
        updates, state = update(jnp.ones(3), state, params)
    assert updates.tolist() == [-1, -1, -1]


# What other people's optimizers and programs do


def watched():
    return optax.chain(SGD, optax.monitor({"norm": optax.tree.norm}))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_inner_state_that_grows_at_its_first_update(jit):
    """`optax.monitor` has another tree after its first update: fine where no branch has to give the same tree."""
    for every, extra in ((1, {}), *([] if jit is jax.jit else [(None, {"flush": True})])):
        tx = optax_accum.accumulate_gradients(watched(), every)
        state = tx.init(PARAMS)
        for _ in range(2):
            params, state = jit(lambda g, s, p, tx=tx, extra=extra: optax_accum.apply_gradients(tx, g, s, p, **extra))(
                GRADS[0], state, PARAMS
            )
        close(jax.tree.map(jnp.subtract, params, PARAMS), GRADS[:1])
        np.testing.assert_allclose(optax.tree.get(state, "norm"), optax.tree.norm(GRADS[0]), rtol=1e-6)


def test_an_inner_state_that_grows_in_a_window():
    tx = optax_accum.accumulate_gradients(watched(), 2)
    with pytest.raises(ValueError, match=r"must keep the tree of its state.*optax.chain\(accumulate_gradients"):
        jax.jit(tx.update)(GRADS[0], tx.init(PARAMS), PARAMS)
    tx = optax.chain(optax_accum.accumulate_gradients(SGD, 2), optax.monitor({"norm": optax.tree.norm}))
    state = tx.init(PARAMS)
    for grads in GRADS[:2]:
        updates, state = tx.update(grads, state, PARAMS)
    close(updates, GRADS[:2])
    np.testing.assert_allclose(optax.tree.get(state, "norm"), optax.tree.norm(mean(GRADS[:2])), rtol=1e-6)


@pytest.mark.parametrize("every", [1, 2])
def test_a_hyperparameter_set_by_hand(every):
    """Outside jit, as a notebook does: a Python number in the inner state."""
    tx = optax_accum.accumulate_gradients(optax.inject_hyperparams(optax.sgd)(0.1), every)
    state, params = tx.init(PARAMS), PARAMS
    state.inner_opt_state.hyperparams["learning_rate"] = 0.5
    for grads in GRADS[:every]:
        params, state = optax_accum.apply_gradients(tx, grads, state, params)
    want = jax.tree.map(lambda p, g: p - 0.5 * g, PARAMS, mean(GRADS[:every]))
    chex.assert_trees_all_close(params, want, rtol=1e-6)


def test_parameters_that_are_one_integer_array():
    tx = optax_accum.accumulate_gradients(optax.set_to_zero(), 2)
    params, grads = jnp.arange(3), np.zeros(3, jax.dtypes.float0)
    now, state = optax_accum.apply_gradients(tx, grads, tx.init(params), params)
    chex.assert_trees_all_equal(now, params)
    assert state.mini_step == 1


def test_float0_through_a_chain():
    params = {"n": jnp.arange(3), "w": jnp.ones(2)}
    grads = {"n": np.zeros(3, jax.dtypes.float0), "w": jnp.ones(2)}
    inner = optax.masked(SGD, {"n": False, "w": True})
    tx = optax.chain(optax.identity(), optax_accum.accumulate_gradients(inner, 1))
    now, _ = optax_accum.apply_gradients(tx, grads, tx.init(params), params)
    chex.assert_trees_all_equal(now, {"n": params["n"], "w": jnp.zeros(2)})


def test_a_member_of_a_chain_may_take_weights():
    """`weights=` looks like a slip for `weight=`, unless something inside reads it."""
    read = lambda updates, state, params=None, *, weights, **_: (jax.tree.map(lambda u: u * weights, updates), state)
    scale = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), read)
    maybe = lambda updates, state, params=None, *, weights=1.0, **_: read(updates, state, weights=weights)
    optional = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), maybe)
    for member in (scale, optional):
        tx = optax_accum.accumulate_gradients(optax.chain(member, SGD), 1)
        updates, _ = tx.update(GRADS[0], tx.init(PARAMS), PARAMS, weights=2.0)
        close(updates, [jax.tree.map(lambda g: 2 * g, GRADS[0])])
    tx = optax_accum.accumulate_gradients(optax.chain(optax.identity(), SGD), 1)
    for value in (2.0, np.ones(3), {"a": jnp.ones(3)}, "all"):
        with pytest.raises(
            TypeError, match="does not read it: 'weights'. Pass weight=, or put what reads weights inside"
        ):
            tx.update(GRADS[0], tx.init(PARAMS), PARAMS, weights=value)


@pytest.mark.parametrize("wrap", [np.asarray, lambda two: {"a": two}], ids=["NumPy", "tree"])
def test_a_member_of_a_chain_may_take_a_tree_of_weights(wrap):
    scaled = lambda updates, weights: jax.tree.map(lambda u: u * jnp.asarray(sum(jax.tree.leaves(weights))), updates)
    maybe = lambda updates, state, params=None, *, weights=1.0, **_: (scaled(updates, weights), state)
    member = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), maybe)
    tx = optax_accum.accumulate_gradients(optax.chain(member, SGD), 1)
    updates, _ = tx.update(GRADS[0], tx.init(PARAMS), PARAMS, weights=wrap(np.float32(2)))
    close(updates, [jax.tree.map(lambda g: 2 * g, GRADS[0])])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, np.int16, jnp.uint32])
def test_a_callable_every_of_another_width(dtype):
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), lambda step: dtype(3))
    state, emitted = tx.init(jnp.ones(2)), []
    for _ in range(6):
        _, state = tx.update(jnp.ones(2), state)
        emitted.append(bool(state.emitted))
    assert emitted == [False, False, True, False, False, True]


def test_a_callable_every_of_64_bits(x64, strict_dtypes):
    tx = optax_accum.accumulate_gradients(SGD, lambda step: jnp.asarray(2, jnp.int64))
    state = jax.jit(tx.init)(PARAMS)
    for grads in GRADS[:2]:
        _, state = jax.jit(tx.update)(grads, state, PARAMS)
    assert optax_accum.has_updated(state)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8])
def test_a_weight_is_counted_in_32_bits(dtype):
    """One rule in both mechanisms."""
    tx = optax_accum.accumulate_gradients(SGD, 2)
    with pytest.raises(TypeError, match="weight must be counted in at least 32 bits"):
        tx.update(GRADS[0], tx.init(PARAMS), PARAMS, weight=jnp.asarray(3, dtype))
    loss = lambda w, x: jnp.mean(w * x)
    step = optax_accum.value_and_apply_gradients(loss, tx, weight_fn=lambda x: jnp.asarray(3, dtype))
    for run in (
        lambda: step(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2)),
        lambda: optax_accum.reduce_microbatches(jax.grad(loss), 2, weight_fn=lambda x: jnp.asarray(3, dtype))(
            jnp.float32(1), jnp.ones(4)
        ),
    ):
        with pytest.raises(TypeError, match="weight_fn's result must be counted in at least 32 bits"):
            run()


def test_states_and_trees_that_are_not_the_right_ones():
    loss = lambda p, x: jnp.mean(p["w"][None] * x)
    params, trains = {"w": jnp.ones(3), "n": jnp.int32(1)}, lambda tree: {name: name == "w" for name in tree}
    tx = optax_accum.accumulate_gradients(optax.masked(SGD, trains), 2)
    step = optax_accum.value_and_apply_gradients(loss, tx)
    with pytest.raises(TypeError, match="must be what `init` returned"):
        step(params, optax.MultiSteps(SGD, 2).init(params), jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="tree of the state"):
        step(params, tx.init({"w": jnp.ones(3)}), jnp.ones((2, 3)))
    _, now, state = step(params, tx.init(params), jnp.ones((2, 3)))
    assert (state.mini_step, now["n"]) == (1, 1)


# What is returned.


def test_it_carries_its_rules_and_a_changed_one_does_not():
    """`_replace` makes an optimizer like any other: what was replaced is what runs."""
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert isinstance(tx.init(PARAMS), optax_accum.AccumulationState)
    calls = []

    def update(*args, **kwargs):
        calls.append(args)
        return tx.update(*args, **kwargs)

    changed, state = tx._replace(update=update), tx.init(PARAMS)
    params, _ = optax_accum.apply_gradients(changed, GRADS[0], state, PARAMS)
    assert len(calls) == 1
    chex.assert_trees_all_equal(params, PARAMS)  # held


def test_options_with_few_values_are_literals():
    """So a type checker finds `nonfinite="skipp"`."""
    hints = typing.get_type_hints(optax_accum.accumulate_gradients)
    assert {"propagate", "skip", "omit", "discard"} == set(typing.get_args(typing.get_args(hints["nonfinite"])[0]))
    assert typing.get_args(hints["reduction"]) == ("mean", "sum")


def test_a_place_of_sums_that_there_is_not():
    with pytest.raises(
        ValueError, match="must be None, specs for the tree of the parameters, or \"partial\": to='partail'"
    ):
        optax_accum.Devices("data", to="partail")
    with pytest.raises(ValueError, match="The sum must go somewhere here"):
        optax_accum.accumulate_gradients(optax.sgd(1.0), 2, devices=optax_accum.Devices("data", to="partial"))


@pytest.mark.quick
@pytest.mark.parametrize(("first", "is_whole"), [("gradients", True), ("critic", False)])
def test_two_optimizers_are_updated_together_if_both_gradients_come_first(first, is_whole):
    """As docs/recipes.md says of GANs; if one is applied first, the last micro-batch alone sees it."""
    rows = np.random.default_rng(0).normal(size=(8, 3)).astype("f")
    critic_loss = lambda c, m, x: jnp.mean((x @ c - 1) ** 2 + (x @ m @ c) ** 2)
    maker_loss = lambda m, c, x: jnp.mean((x @ m @ c - 1) ** 2)
    critic, maker = start = jnp.ones(3), jnp.eye(3)
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=4)
    of_critic, of_maker = map(tx.init, start)
    for x in np.split(rows, 4):
        to_critic, to_maker = jax.grad(critic_loss)(critic, maker, x), jax.grad(maker_loss)(maker, critic, x)
        critic, of_critic = optax_accum.apply_gradients(tx, to_critic, of_critic, critic)
        if first == "critic":
            to_maker = jax.grad(maker_loss)(maker, critic, x)
        maker, of_maker = optax_accum.apply_gradients(tx, to_maker, of_maker, maker)
    whole = start[1] - 0.1 * jax.grad(maker_loss)(start[1], start[0], rows)
    np.testing.assert_allclose(critic, start[0] - 0.1 * jax.grad(critic_loss)(*start, rows), rtol=1e-5)
    assert np.allclose(maker, whole, atol=1e-6) == is_whole


def test_a_weight_for_an_optimizer_that_does_not_accumulate_is_said_to_do_nothing():
    """An optimizer that was not wrapped: an update at every call. Once, and only where something is lost."""
    tx, params = optax.sgd(0.1), jnp.ones(2)
    warn_of_no_window.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for given in ({}, {"weight": 3.0}, {"flush": True}):
            optax_accum.apply_gradients(tx, params, tx.init(params), params, **given)
    assert ["this optimizer has none" in str(warning.message) for warning in caught] == [True]
    assert caught[0].filename == __file__
    warn_of_no_window.cache_clear()
    chained = optax.chain(optax_accum.accumulate_gradients(tx, every=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optax_accum.apply_gradients(chained, params, chained.init(params), params, weight=3.0)
