"""NaN and infinity at every position of a window, in every `nonfinite` mode, and the window after."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from tests.pairs import every_pair

pytestmark = pytest.mark.quick

K = 3
GOOD = [jnp.array([1.0, -2.0]), jnp.array([3.0, 1.0]), jnp.array([-1.0, 4.0])]
PARAMS = jnp.array([1.0, 2.0])


ADAM = optax.adam(0.1)
INNER = optax.sgd(0.1, momentum=0.0)  # it has a state, and known answers


@functools.cache
def accumulate(every, inner=INNER, **options):
    """One transformation, and so one compilation, for all tests that ask for the same."""
    return optax_accum.accumulate_gradients(inner, every, **options)


@functools.cache
def compiled(tx):
    step = jax.jit(lambda *args, **kwargs: optax_accum.apply_gradients(tx, *args, **kwargs))
    return jax.jit(tx.update), step


def run(tx, grads, params=PARAMS, apply=False, **extra):
    """Returns the parameters, the state and the updates after each micro-step."""
    update, step = compiled(tx)
    state, trail = tx.init(params), []
    for grad in grads:
        before = params
        if apply:
            params, state = step(grad, state, params, **extra)
            updates = params - before
        else:
            updates, state = update(grad, state, params, **extra)
            params = optax.apply_updates(params, updates)
        trail.append(updates)
    return params, state, trail


def one_update(inner, grads, params=PARAMS, reduction=jnp.mean):
    updates, state = inner.update(reduction(jnp.stack(grads), axis=0), inner.init(params), params)
    return optax.apply_updates(params, updates), state


def with_fault(position, fault):
    return [jnp.array([fault, 1.0]) if i == position else grad for i, grad in enumerate(GOOD)]


FAULTS = [np.nan, np.inf, -np.inf]
faults = pytest.mark.parametrize(("fault", "position", "apply"), every_pair(FAULTS, range(K), [False, True]))


@faults
def test_propagate_shows_it_in_its_own_window_only(fault, position, apply):
    tx = accumulate(K)
    params, state, trail = run(tx, with_fault(position, fault), apply=apply)
    assert not np.isfinite(params[0])
    assert all(np.all(updates == 0) for updates in trail[:-1])
    if not apply:  # the parameters of the caller recover, and so does the window
        updates, state = None, state._replace(inner_opt_state=tx.init(PARAMS).inner_opt_state)
        for grad in GOOD:
            updates, state = tx.update(grad, state, PARAMS)
        np.testing.assert_allclose(updates, -0.1 * jnp.mean(jnp.stack(GOOD), 0), rtol=1e-6)


@faults
def test_skip_waits_for_another(fault, position, apply):
    tx = accumulate(K, nonfinite="skip")
    grads = [*GOOD[:position], jnp.array([fault, 1.0]), *GOOD[position:]]
    params, state, trail = run(tx, grads, apply=apply)
    expected, _ = one_update(INNER, GOOD)
    np.testing.assert_allclose(params, expected, rtol=1e-6)
    assert all(np.all(updates == 0) for updates in trail[:-1])
    assert (state.skipped, state.gradient_step, state.mini_step) == (1, 1, 0)


@faults
@pytest.mark.parametrize(("reduction", "reduce"), [("mean", jnp.mean), ("sum", jnp.sum)])
def test_omit_ends_on_time_with_the_rest(fault, position, apply, reduction, reduce):
    tx = accumulate(K, nonfinite="omit", reduction=reduction)
    params, state, _ = run(tx, with_fault(position, fault), apply=apply)
    rest = [grad for i, grad in enumerate(GOOD) if i != position]
    np.testing.assert_allclose(params, one_update(INNER, rest, reduction=reduce)[0], rtol=1e-6)
    assert (state.skipped, state.gradient_step, state.mini_step) == (1, 1, 0)


@faults
def test_discard_drops_the_window_and_nothing_else(fault, position, apply):
    inner = ADAM
    tx = accumulate(K, inner, nonfinite="discard")
    params, state, trail = run(tx, with_fault(position, fault), apply=apply)
    chex.assert_trees_all_equal(params, PARAMS)  # bit-identical
    chex.assert_trees_all_equal(state.inner_opt_state, inner.init(PARAMS))
    assert all(np.all(updates == 0) for updates in trail)
    assert (state.discarded, state.gradient_step, state.mini_step) == (1, 0, 0)
    assert not optax_accum.has_updated(state)


def test_discard_sees_what_overflows_where_it_is_emitted():
    """Four times 30,000 is too much for float16, though not for the float32 that they are added in."""
    tx = optax_accum.accumulate_gradients(
        optax.sgd(1.0), 4, reduction="sum", emit_dtype=jnp.float16, nonfinite="discard"
    )
    params = jnp.zeros(1, jnp.float16)
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update(jnp.full(1, 3e4, jnp.float16), state, params)
    assert (state.discarded, state.gradient_step) == (1, 0)
    assert np.all(updates == 0)


@pytest.mark.parametrize(
    ("fault", "nonfinite", "every"),
    every_pair(FAULTS, ["skip", "omit", "discard", optax.transforms.skip_not_finite], [1, K]),
)
def test_the_window_after_a_fault_is_untouched_by_it(fault, nonfinite, every):
    tx = accumulate(every, nonfinite=nonfinite)
    bad = [jnp.full(2, fault)] * every
    if nonfinite in ("omit", "discard"):
        assert run(tx, bad)[1].discarded == 1  # nothing of the window was left
    params, state, _ = run(tx, bad + GOOD[:every])
    np.testing.assert_allclose(params, one_update(INNER, GOOD[:every])[0], rtol=1e-6)
    assert state.gradient_step == 1


def test_a_callable_decides_and_its_info_is_kept():
    def skip_large(grads, gradient_step, params):
        del gradient_step, params
        norm = optax.tree.norm(grads)
        return norm > 10, {"norm": norm}

    tx = accumulate(2, nonfinite=skip_large)
    grads = [GOOD[0], jnp.array([300.0, 400.0]), GOOD[1]]
    params, state, _ = run(tx, grads)
    np.testing.assert_allclose(params, one_update(INNER, GOOD[:2])[0], rtol=1e-6)
    np.testing.assert_allclose(run(tx, grads[:2])[1].skip_state["norm"], 500.0)
    assert state.skipped == 1


def spike(gradient, gradient_step, params, info=jnp.inf):
    norm = optax.tree.norm(gradient)
    return ~(norm < 5 * info), jnp.where(norm < 5 * info, norm, info)


WINDOWS = [[1.0, 1.2], [90.0, 1.0], [np.nan, 1.0], [1.0, 2.0]]  # the second and the third are no usual windows
STEPS = {
    "update": lambda tx: compiled(tx)[0],
    "apply_gradients": lambda tx: compiled(tx)[1],
    "eager": lambda tx: lambda *args: optax_accum.apply_gradients(tx, *args),
    "jit_step": lambda tx: optax_accum.jit_step(
        lambda *args: optax_accum.apply_gradients(tx, *args), donate_argnums=()
    ),
}


@pytest.mark.parametrize(("way", "statistics"), [*[(way, False) for way in STEPS], ("apply_gradients", True)])
def test_a_rule_discards_windows_by_their_mean_gradient(way, statistics):
    tx = accumulate(2, ADAM, nonfinite=optax_accum.discard_if(spike), statistics=statistics)
    step, params, state, kept = STEPS[way](tx), PARAMS, tx.init(PARAMS), []
    for number, window in enumerate(WINDOWS):
        before, inner, noise = params, state.inner_opt_state, state.statistics
        for size in window:
            result, state = step(jnp.full(2, size), state, params)
            params = optax.apply_updates(params, result) if way == "update" else result
        if number in (1, 2):
            chex.assert_trees_all_equal((params, state.inner_opt_state, state.statistics), (before, inner, noise))
        else:
            kept.append(jnp.full(2, np.mean(window)))
        assert bool(optax_accum.has_updated(state)) == (number not in (1, 2))
    want, alone = PARAMS, ADAM.init(PARAMS)
    for gradient in kept:
        updates, alone = ADAM.update(gradient, alone, want)
        want = optax.apply_updates(want, updates)
    np.testing.assert_allclose(params, want, rtol=1e-6)
    assert (state.gradient_step, state.discarded, state.skipped) == (2, 2, 0)
    np.testing.assert_allclose(state.skip_state, 1.5 * np.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize("every", [1, None], ids=str)
def test_a_rule_on_windows_that_hold_nothing_or_end_when_told(every):
    tx = accumulate(every, nonfinite=optax_accum.discard_if(lambda gradient, *_: (jnp.max(gradient) > 2, ())))
    flush = {} if every else {"flush": True}
    params, state, _ = run(tx, [GOOD[0], GOOD[1], GOOD[0]], **flush)
    np.testing.assert_allclose(params, PARAMS - 0.2 * GOOD[0], rtol=1e-6)
    assert (state.gradient_step, state.discarded) == (2, 1)


def test_a_rule_on_windows_is_a_function_that_answers_as_one_on_micro_batches():
    with pytest.raises(TypeError, match=r"rule must be a function \(gradient, gradient_step, params\): rule=3"):
        optax_accum.discard_if(3)
    with pytest.raises(TypeError, match=r"rule of discard_if must return \(discard, info\): it returned bool"):
        accumulate(2, nonfinite=optax_accum.discard_if(lambda *_: True)).init(PARAMS)
    flags = optax_accum.discard_if(lambda gradient, *_: (gradient > 2, ()))
    with pytest.raises(TypeError, match=r"discard_if must return \(discard, info\) with a bool scalar.*bool\[2\]"):
        run(accumulate(2, nonfinite=flags), GOOD[:2])
    with pytest.raises(TypeError, match="rule of discard_if .* info has no default"):
        accumulate(2, nonfinite=optax_accum.discard_if(lambda gradient, step, params, info: (True, info)))


def test_skip_keeps_has_updated_honest():
    """`MultiSteps` says that it has updated after a micro-step that it skipped."""
    tx = accumulate(1, nonfinite="skip")
    _, state, _ = run(tx, [GOOD[0], jnp.array([np.nan, 0.0])])
    assert not optax_accum.has_updated(state)
    assert state.gradient_step == 1


def test_a_flush_closes_what_a_skipped_micro_batch_left():
    tx = accumulate(None, nonfinite="skip")
    state = tx.init(PARAMS)
    for grad, flush in [(GOOD[0], False), (GOOD[1], False), (jnp.array([np.nan, 0.0]), True)]:
        updates, state = tx.update(grad, state, PARAMS, flush=flush)
    np.testing.assert_allclose(PARAMS + updates, one_update(INNER, GOOD[:2])[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("nonfinite", "every", "flush"), every_pair(["omit", "skip"], [None, K], [True, jnp.array(True)])
)
def test_a_flush_of_a_fault_alone_makes_no_update(nonfinite, every, flush):
    """Under "omit" it was a micro-step, and its window is lost; under "skip" there was no window."""
    tx = accumulate(every, ADAM, nonfinite=nonfinite)
    updates, state = tx.update(jnp.array([np.nan, 1.0]), tx.init(PARAMS), PARAMS, flush=flush)
    assert np.all(updates == 0)
    chex.assert_trees_all_equal(state.inner_opt_state, ADAM.init(PARAMS))
    assert (state.skipped, state.discarded, state.batches) == (1, nonfinite == "omit", 1)
    assert (state.mini_step, state.gradient_step, state.weight) == (0, 0, 0)
    updates, _ = tx.update(GOOD[0], state, PARAMS, flush=flush)
    np.testing.assert_allclose(PARAMS + updates, one_update(ADAM, GOOD[:1])[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("nonfinite", "weight", "discarded"),
    [("propagate", np.inf, 1), ("propagate", np.nan, 0), ("discard", np.inf, 1), ("discard", np.nan, 1)],
)
@pytest.mark.parametrize("traced", [False, True])
def test_a_weight_that_is_not_finite_and_joins_its_window(nonfinite, weight, discarded, traced):
    """Infinity cannot divide a sum, whatever the policy; a NaN shows."""
    tx = accumulate(2, nonfinite=nonfinite)
    update, state = compiled(tx)[0] if traced else tx.update, tx.init(PARAMS)
    for w in (weight, 1.0):
        updates, state = update(GOOD[0], state, PARAMS, weight=w)
    assert np.all(updates == 0) if discarded else np.all(np.isnan(updates))
    assert (state.discarded, state.gradient_step) == (discarded, 1 - discarded)


@pytest.mark.parametrize("weight", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_counts_as_a_fault(weight):
    weights = [1.0, weight, 1.0, 1.0]
    grads = [GOOD[0], GOOD[0], GOOD[1], GOOD[2]]
    tx = accumulate(K, nonfinite="skip")
    state = tx.init(PARAMS)
    for grad, w in zip(grads, weights, strict=True):
        updates, state = tx.update(grad, state, PARAMS, weight=w)
    np.testing.assert_allclose(PARAMS + updates, one_update(INNER, GOOD)[0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "omit", "discard"])
def test_a_weight_of_zero_adds_nothing_even_of_a_nan(nonfinite, dtype):
    """A micro-batch whose tokens are all masked has the gradient 0 / 0."""
    tx = accumulate(K, nonfinite=nonfinite)
    (update, _), state = compiled(tx), tx.init(PARAMS)
    for grad, weight in [(GOOD[0], 1), (jnp.full(2, np.nan), 0), (GOOD[1], 1)]:
        updates, state = update(grad, state, PARAMS, weight=jnp.asarray(weight, dtype), value=grad[0])
    np.testing.assert_allclose(PARAMS + updates, one_update(INNER, GOOD[:2])[0], rtol=1e-6)
    assert (state.skipped, state.discarded) == (0, 0)


@pytest.mark.parametrize(("reduction", "every", "traced"), every_pair(["mean", "sum"], [1, 2, None], [False, True]))
def test_a_window_of_weight_zero_is_discarded(reduction, every, traced):
    inner = optax.adamw(0.1)
    tx = optax_accum.accumulate_gradients(inner, every, reduction=reduction)
    update = jax.jit(tx.update, static_argnames="flush") if traced else tx.update
    state = tx.init(PARAMS)
    for i in range(every or 2):
        flush = {"flush": i == 1} if every is None else {}
        updates, state = update(GOOD[0], state, PARAMS, weight=0.0, **flush)
    assert np.all(updates == 0)
    chex.assert_trees_all_equal(state.inner_opt_state, inner.init(PARAMS))
    assert (state.discarded, state.gradient_step, state.mini_step) == (1, 0, 0)
    updates, state = update(GOOD[0], state, PARAMS, **({"flush": True} if every is None else {}))
    assert np.any(updates != 0) or every == 2


@pytest.mark.parametrize(
    ("weight", "every", "apply"),
    every_pair([1e38, -1e38, 3e38, np.inf, jnp.float32(1e38), jnp.float32(3e38)], [1, 2], [False, True]),
)
def test_a_window_of_weights_that_overflow_is_discarded(weight, every, apply):
    """Their reciprocal is 0, or their sum infinite: an update of zeros, or NaN, counted as one."""
    params, state, _ = run(accumulate(every), [GOOD[0]] * every, apply=apply, weight=weight)
    np.testing.assert_array_equal(params, PARAMS)
    assert (state.discarded, state.gradient_step, state.mini_step) == (1, 0, 0)
    _, state, _ = run(accumulate(every, reduction="sum"), [GOOD[0]] * every, apply=apply, weight=1e38 * np.sign(weight))
    assert (state.discarded, state.gradient_step) == (0, 1)


def test_a_negative_weight_subtracts():
    """Unlearning: the mean is `sum(w g) / sum(w)` with the sign that the weights have."""
    tx = accumulate(2)
    state = tx.init(PARAMS)
    for grad, weight in [(GOOD[0], 3.0), (GOOD[1], -1.0)]:
        updates, state = tx.update(grad, state, PARAMS, weight=weight)
    np.testing.assert_allclose(updates, -0.1 * (3 * GOOD[0] - GOOD[1]) / 2, rtol=1e-6)


def test_multi_steps_is_poisoned_where_we_are_not():
    """The reason for this file, and a proof that the faults above are faults."""
    tx = optax.MultiSteps(INNER, K)
    update, state, updates = jax.jit(tx.update), tx.init(PARAMS), None
    for grad in with_fault(0, np.nan) + GOOD:
        updates, state = update(grad, state, PARAMS)
    assert np.isnan(updates[0])
