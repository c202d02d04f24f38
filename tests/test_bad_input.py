"""Every bad argument gets the rule, the value and the remedy, when it is built or traced; and the remedies work."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

import optax_accum
import optax_accum.flax
from optax_accum import batching, checkpoint, sharding
from tests.problems import GONE

pytestmark = pytest.mark.quick

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}


def build(every=2, **options):
    return optax_accum.accumulate_gradients(optax.sgd(0.1), every, **options)


def update(tx, grads=PARAMS, state=None, params=PARAMS, **extra):
    return tx.update(grads, tx.init(PARAMS) if state is None else state, params, **extra)


@pytest.mark.parametrize(
    ("every", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (np.int32(0), ValueError),
        (True, TypeError),
        (np.bool_(True), TypeError),
        (jnp.array(True), TypeError),
        (2.0, TypeError),
        (np.float32(2), TypeError),
        (float("nan"), TypeError),
        (np.array([2]), TypeError),
        (jnp.array([2, 2]), TypeError),
        ("4", TypeError),
        (2**31, ValueError),
    ],
    ids=repr,
)
def test_every(every, error):
    with pytest.raises(error, match=r"every must be an integer >= 1.*every=.*(Pass|Use)"):
        build(every)


@pytest.mark.parametrize("every", [3, np.int32(3), np.uint8(3), np.array(3), jnp.array(3), None, lambda step: 3])
def test_every_that_is_fine(every):
    state = update(build(every), **({"flush": False} if every is None else {}))[1]
    assert state.mini_step == 1


def test_every_known_only_at_run_time_is_refused():
    with pytest.raises(TypeError, match="every must be an integer.*run time.*callable"):
        jax.jit(lambda every: update(build(every))[1])(2)


@pytest.mark.parametrize("count", [2.0, True, np.float32(2), np.array([2]), jnp.array(2.0)], ids=repr)
def test_a_callable_every_that_returns_no_integer(count):
    with pytest.raises(
        TypeError, match=r"must return an integer scalar: it returned .*jnp.asarray\(schedule\(step\), int\)"
    ):
        update(build(lambda step: count))


def test_the_remedy_for_a_schedule_of_floats():
    schedule = optax.piecewise_constant_schedule(2.0, {1: 2.0})
    with pytest.raises(TypeError, match="integer scalar"):
        update(build(schedule))
    tx = build(lambda step: jnp.asarray(schedule(step), int))
    _, state = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
    assert state.mini_step == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reduction": "average"}, ValueError, r'reduction must be one of "mean", "sum": reduction=\'average\''),
        ({"reduction": None}, ValueError, "reduction must be one of"),
        ({"nonfinite": "ignore"}, ValueError, r"nonfinite must be one of .*or a callable: nonfinite=\'ignore\'"),
        ({"nonfinite": True}, ValueError, "nonfinite must be one of"),
        ({"accumulator_dtype": jnp.int32}, TypeError, "accumulator_dtype must be a real floating.*int32.*jnp.float32"),
        ({"accumulator_dtype": jnp.complex64}, TypeError, "accumulator_dtype must be a real floating.*complex64"),
        ({"accumulator_dtype": "float99"}, TypeError, "accumulator_dtype must be a real floating.*float99"),
        ({"accumulator_dtype": jnp.float64}, ValueError, "float64.*jax_enable_x64"),
        ({"emit_dtype": jnp.int8}, TypeError, "emit_dtype must be a real floating.*int8"),
        ({"emit_dtype": "grad"}, TypeError, "emit_dtype must be.*'grad'"),
        ({"mean_args": "value"}, TypeError, r'mean_args must be a tuple of names.*\("value",\)'),
        ({"mean_args": None}, TypeError, r"mean_args must be a tuple of names: mean_args=None.*or \(\) for none"),
        ({"mean_args": (1,)}, TypeError, "mean_args must be a tuple of names"),
        ({"mean_args": ("weight",)}, ValueError, "mean_args must name extra arguments.*Leave out 'weight'"),
    ],
)
def test_the_other_arguments_of_the_factory(options, error, message):
    with pytest.raises(error, match=message):
        build(**options)


def test_gradients_of_another_tree():
    with pytest.raises(
        ValueError, match=r"tree of the state: at \['b'\] the gradients have no leaf and the state.*\(3,\)"
    ):
        update(build(), {"w": PARAMS["w"]})
    with pytest.raises(ValueError, match=r"at \['c'\] the gradients have shape \(1,\) and the state has no leaf.*init"):
        update(build(), {**PARAMS, "c": jnp.ones(1)})
    with pytest.raises(ValueError, match=r"at \['w'\] the gradients have shape .* and the state has no leaf"):
        update(build(), state=build().init({**PARAMS, "w": {"nested": PARAMS["w"]}}))


@pytest.mark.parametrize("apply", [False, True])
def test_gradients_that_are_none(apply):
    for params in (W, PARAMS):
        tx = build()
        state = tx.init(params)
        step = functools.partial(optax_accum.apply_gradients, tx) if apply else tx.update
        with pytest.raises(ValueError, match="Gradients must have.*: gradients=None. Pass what jax.grad returned"):
            step(None, state, params)
        assert step(params, state, params)[1].mini_step == 1  # the remedy
    with pytest.raises(ValueError, match="at the only leaf the gradients have no leaf and the state"):
        update(build(), (), build().init(W), W)


@pytest.mark.parametrize("apply", [False, True])
def test_gradients_of_another_shape(apply):
    tx = build()
    grads = {**PARAMS, "w": jnp.ones((3, 2))}
    message = r"at \['w'\] the gradients have shape \(3, 2\) and the state \(2, 3\).*init"
    step = jax.jit(lambda *a: optax_accum.apply_gradients(tx, *a) if apply else tx.update(*a))
    with pytest.raises(ValueError, match=message):
        step(grads, tx.init(PARAMS), PARAMS)


def test_a_complex_gradient_into_a_real_state():
    message = r"at \['b'\] the gradient has dtype complex64 and shape \(3,\), the state has float32 and \(3,\).*complex"
    with pytest.raises(TypeError, match=message):
        update(build(), {**PARAMS, "b": jnp.ones(3, jnp.complex64)})


def test_a_gradient_for_an_integer_parameter():
    tx = build()
    state = tx.init({"i": jnp.arange(2)})
    with pytest.raises(TypeError, match=r"floating-point parameter: the parameter at \['i'\].*float32.*optax.masked"):
        tx.update({"i": jnp.ones(2)}, state)


@pytest.mark.parametrize("every", [1, 2])
def test_an_optimizer_that_calculates_with_the_gradient_of_an_integer(every):
    params = {"w": jnp.ones(2), "n": jnp.arange(3)}
    loss = lambda params, x: jnp.mean(x @ params["w"])
    tx = optax_accum.accumulate_gradients(optax.adam(1e-3), every)
    with pytest.raises(TypeError) as caught:
        jax.jit(optax_accum.value_and_apply_gradients(loss, tx))(params, tx.init(params), jnp.ones((4, 2)))
    assert "An integer parameter has no gradient" in "\n".join(caught.value.__notes__)


def test_an_integer_gradient_for_a_float_parameter():
    tx = build()
    float0 = np.zeros(3, jax.dtypes.float0)
    with pytest.raises(TypeError, match=r"at \['b'\] it is float0 and.*init"):
        tx.update({**PARAMS, "b": float0}, tx.init(PARAMS))
    with pytest.raises(TypeError, match=r"floating-point dtype: at \['b'\] it is int32 .* as jax.grad returns it"):
        tx.update({**PARAMS, "b": jnp.ones(3, int)}, tx.init(PARAMS))


def test_a_single_leaf_is_named_too():
    tx = build()
    with pytest.raises(ValueError, match=r"at the only leaf the gradients have shape \(2,\)"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(3)))


@pytest.mark.parametrize(
    ("weight", "error"),
    [
        (jnp.ones(2), ValueError),
        (np.ones((1,)), ValueError),
        (1j, TypeError),
        (True, TypeError),
        ("3", TypeError),
        ([1.0], TypeError),
    ],
    ids=repr,
)
def test_weight(weight, error):
    with pytest.raises(error, match=r"weight must be a (scalar|real number): weight=.*Pass one number"):
        update(build(), weight=weight)


MISSPELT = {
    "weight": ("weights", "weigth", "weighr", "Weight", "wgt", "wt", "wieght", "sample_weight", "token_weights"),
    "flush": ("flushs", "flsh", "flus", "Flush", "flash", "FLUSH", "fulsh", "flush_now"),
}


@pytest.mark.parametrize(("name", "meant"), [(name, meant) for meant, names in MISSPELT.items() for name in names])
def test_a_misspelt_weight_does_not_get_lost(name, meant):
    with pytest.raises(TypeError, match=f"{name}= looks like a misspelt {meant}=.*Pass {meant}="):
        update(build(), **{name: 1.0})
    named = lambda grads, state, params=None, *, weights=None, **_: (jax.tree.map(lambda g: g * weights, grads), state)
    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), named)
    tx = optax_accum.accumulate_gradients(inner, 1)
    updates, _ = tx.update(
        jnp.ones(3), tx.init(jnp.ones(3)), weights=2.0, length=1.0, wait=1.0, w=1.0, loss=1.0, value_fn=max
    )
    assert updates.tolist() == [2, 2, 2]


def test_a_mean_argument_that_is_no_scalar():
    with pytest.raises(
        ValueError, match=r"value must be a scalar: value=float32\[2\].*loss.mean.*mean_args={'value': jnp"
    ):
        update(build(), value=jnp.ones(2))
    with pytest.raises(TypeError, match=r"value must be a real number.*mean_args={'value': jnp.zeros\(shape\)}"):
        update(build(), value={"loss": jnp.ones(2)})
    for example in (jnp.zeros(2), {"loss": jnp.zeros(2)}):  # the remedy
        tx = build(mean_args={"value": example})
        assert update(tx, value=jax.tree.map(jnp.ones_like, example))[1].mini_step == 1


@pytest.mark.parametrize("flush", [1, 1.0, "yes", jnp.ones(2, bool), jnp.int32(1)], ids=repr)
def test_flush(flush):
    with pytest.raises(TypeError, match="flush must be a bool.*flush="):
        update(build(), flush=flush)


def test_flush_that_is_missing():
    with pytest.raises(ValueError, match=r"every=None the caller closes the window: flush=None.*flush=False"):
        update(build(None))
    assert update(build(None), flush=False)[1].mini_step == 1  # the remedy


def test_a_state_without_an_accumulator():
    every, message = 4, r"Only every=1 works without an accumulator: every=4.*acc_grads=tx.init"
    tx, state = build(every), build(1).init(PARAMS)
    with pytest.raises(ValueError, match=message):
        update(tx, state=state)
    state = state._replace(acc_grads=tx.init(PARAMS).acc_grads)  # the remedy
    assert update(tx, state=state)[1].mini_step == 1


def test_a_state_that_is_not_ours():
    old = optax.MultiSteps(optax.sgd(0.1), 2).init(PARAMS)
    with pytest.raises(TypeError, match=r"AccumulationState: state=MultiStepsState.*from_multi_steps"):
        update(build(), state=old)
    assert update(build(), state=optax_accum.from_multi_steps(old, build()))[1].mini_step == 1  # the remedy


def test_apply_gradients_without_params():
    tx = build()
    with pytest.raises(ValueError, match=r"apply_gradients returns new parameters.*params=None"):
        optax_accum.apply_gradients(tx, PARAMS, tx.init(PARAMS), None)


def test_a_callable_policy_that_returns_no_bool():
    with pytest.raises(TypeError, match=r"callable nonfinite must return \(skip, info\).*float32\[3\].*jnp.any"):
        update(build(nonfinite=lambda grads, step, params: (grads["b"], ())))


def test_a_callable_policy_that_returns_a_bool_alone():
    message = r"callable nonfinite must return \(skip, info\): it returned bool\[\]. Return \(skip, \(\)\)"
    skip = lambda grads, step, params: jnp.isnan(grads["b"]).any()
    with pytest.raises(TypeError, match=message):
        build(nonfinite=skip).init(PARAMS)
    with pytest.raises(TypeError, match=message):
        update(build(nonfinite=lambda grads, step, params, info=0.0: skip(grads, step, params)))
    remedy = build(nonfinite=lambda *args: (skip(*args), ()))
    assert update(remedy)[1].mini_step == 1


@pytest.mark.parametrize("read", [optax_accum.has_updated, optax_accum.metrics])
def test_a_state_that_holds_none_or_several(read):
    with pytest.raises(ValueError, match="exactly one AccumulationState: tuple holds 0"):
        read(optax.adam(0.1).init(PARAMS))
    tx = optax.partition({"w": build(), "b": build()}, {"w": "w", "b": "b"})
    with pytest.raises(ValueError, match="exactly one AccumulationState: PartitionState holds 2"):
        read(tx.init(PARAMS))


def test_gradients_that_are_not_those_of_the_parameters():
    with pytest.raises(
        ValueError, match=r"shapes of the parameters: at \['w'\] the gradients have shape \(2, 3\).*\(3, 3\)"
    ):
        update(build(), params={**PARAMS, "w": jnp.ones((3, 3))})
    with pytest.raises(ValueError, match=r"tree of the parameters: at \['b'\].*parameters have no leaf"):
        update(build(), params={"w": PARAMS["w"]})


@pytest.mark.parametrize("every", [1, 2])
def test_a_gradient_of_a_parameter_that_is_masked(every):
    params, masked = {"a": jnp.ones(2), "b": jnp.ones(2)}, {"a": jnp.ones(2), "b": optax.MaskedNode()}
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), every)
    with pytest.raises(ValueError, match="must have the tree of the parameters"):
        tx.update(params, tx.init(params), masked)


def test_a_step_with_parameters_of_another_tree_names_them():
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2)
    step = optax_accum.value_and_apply_gradients(lambda p, x: jnp.sum(p["a"]) * x.mean(), tx)
    state = tx.init({"a": jnp.ones(2), "b": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"Parameters .* tree of the state: at \['b'\] the parameters have no leaf"):
        step({"a": jnp.ones(2)}, state, jnp.ones(3))
    with pytest.raises(ValueError, match=r"Parameters .* shapes of the state: at \['a'\] the parameters have shape"):
        step({"a": jnp.ones(3), "b": jnp.ones(2)}, state, jnp.ones(3))


def test_what_jax_value_and_grad_returns_is_recognised():
    with pytest.raises(ValueError, match=r"jax.value_and_grad returns \(value, grads\)"):
        update(build(), grads=(jnp.array(1.0), PARAMS), params=None)


def test_arguments_in_another_order():
    tx = build()
    with pytest.raises(TypeError, match=r"state=dict. The order is tx.update\(grads, state, params\)"):
        tx.update(tx.init(PARAMS), PARAMS, PARAMS)


def forgets(grads, step, params):
    return jnp.array(False), {"norm": jnp.float32(0)}


def remembers(grads, step, params, info={"norm": 0.0}):  # noqa: B006
    return jnp.array(False), {"norm": 2 * info["norm"]}


@pytest.mark.parametrize("rule", [forgets, remembers])
@pytest.mark.parametrize("as_nonfinite", [lambda rule: rule, optax_accum.discard_if], ids=["micro-batch", "window"])
def test_the_info_of_another_policy(as_nonfinite, rule):
    tx, state = build(nonfinite=as_nonfinite(rule)), build().init(PARAMS)
    with pytest.raises(ValueError, match=r"info of the tree .* the state has \(\).*tx.init\(params\).skip_state"):
        update(tx, state=state)
    state = state._replace(skip_state=tx.init(PARAMS).skip_state)  # the remedy
    assert update(tx, state=state)[1].mini_step == 1


def test_the_info_of_a_callable_policy_that_has_no_room_for_a_fraction():
    def risen(grads, step, params, info=0):
        return jnp.array(False), 0.9 * info + 0.1 * optax.tree.norm(grads)

    tx = build(nonfinite=risen)
    with pytest.raises(TypeError, match=r"info of a callable .* began as int32 and became float32.*info=0.0"):
        update(tx)


def _norms(begin):
    """An optimizer whose state is a moving average of norms, which begins as is given."""

    def step(updates, mean, params=None):
        mean = 0.5 * mean + 0.5 * optax.tree.norm(updates)
        return jax.tree.map(lambda update: update / mean, updates), mean

    return optax.GradientTransformation(lambda params: begin, step)


@pytest.mark.parametrize("every", [1, 2])
def test_an_inner_state_that_has_no_room_for_a_fraction(every):
    inner = lambda begin: optax_accum.accumulate_gradients(_norms(begin), every)
    run = lambda tx: optax_accum.apply_gradients(tx, PARAMS, tx.init(PARAMS), PARAMS, flush=True)
    with pytest.raises(TypeError, match=r"state of the inner optimizer must keep its dtypes.*int32 and became float32"):
        run(inner(0))
    with pytest.raises(TypeError, match=r"float32 and became complex64"):
        run(optax_accum.accumulate_gradients(optax.chain(_norms(0.0), _turned()), every))
    assert run(inner(jnp.zeros([])))[1].gradient_step == 1  # the remedy


def _turned():
    return optax.GradientTransformation(lambda params: jnp.ones([]), lambda updates, state, params=None: (updates, 1j))


@pytest.mark.parametrize(("announced", "summed"), [(("value",), ()), ((), ("value",))])
def test_a_state_that_sums_other_mean_arguments(announced, summed):
    tx, state = build(mean_args=announced), build(mean_args=summed).init(PARAMS)
    with pytest.raises(
        ValueError, match=r"a sum for each mean argument: 'value' is given.*tx.init\(params\).mean_args"
    ):
        update(tx, state=state, value=1.0)
    assert update(tx, state=state)[1].mini_step == 1  # it is not given
    state = state._replace(mean_args=tx.init(PARAMS).mean_args)  # the remedy
    assert update(tx, state=state, value=1.0)[1].mini_step == 1


def test_from_multi_steps():
    tx = build()
    with pytest.raises(ValueError, match="holds an optax.MultiStepsState: state=ScaleByAdamState"):
        optax_accum.from_multi_steps(optax.scale_by_adam().init(PARAMS), tx)
    old = optax.MultiSteps(optax.sgd(0.1), 2).init(PARAMS)
    with pytest.raises(TypeError, match="tx=.*inside a chain, pass it alone"):
        optax_accum.from_multi_steps(old, optax.chain(tx))
    assert update(tx, state=optax_accum.from_multi_steps(old, tx), value=1.0)[1].mini_step == 1  # the remedy


def _refuses_float32_over_bfloat16():
    return optax.novograd(0.1), optax.contrib.mechanize(optax.sgd(0.1))


@pytest.mark.parametrize("inner", _refuses_float32_over_bfloat16(), ids=["novograd", "mechanize"])
def test_the_optimizers_that_need_the_dtype_of_their_parameters(inner):
    params = jnp.ones(3, jnp.bfloat16)
    for every in (1, 2):
        tx = optax_accum.accumulate_gradients(inner, every)
        with pytest.raises((TypeError, ValueError)) as caught:
            jax.jit(tx.update)(params, tx.init(params), params)
        assert re.search('float32.*bfloat16.*emit_dtype="gradient"', "\n".join(caught.value.__notes__))
        tx = optax_accum.accumulate_gradients(inner, every, emit_dtype="gradient")  # the remedy
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
        assert updates.dtype == jnp.bfloat16


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


W, X = jnp.ones(3), jnp.arange(24.0).reshape(8, 3)
CUTS = {  # what takes a function, and how it is built
    "value_and_grad": lambda fun, **options: optax_accum.value_and_grad(fun, num_microbatches=2, **options),
    "value_and_apply_gradients": lambda fun, **options: optax_accum.value_and_apply_gradients(fun, build(), **options),
    "microbatched": lambda fun: optax_accum.microbatched(fun, 2),
    "reduce_microbatches": lambda fun, **options: optax_accum.reduce_microbatches(fun, 2, **options),
}


def test_the_number_of_micro_batches_may_stand_second():
    value, grad = optax_accum.value_and_grad(loss, 4)(W, X)
    np.testing.assert_allclose(value, loss(W, X), rtol=1e-6)
    np.testing.assert_allclose(grad, jax.grad(loss)(W, X), rtol=1e-6)
    with pytest.raises(TypeError, match=r"num_microbatches must be an integer >= 1.*pass argnums=\(0, 1\)"):
        optax_accum.value_and_grad(loss, (0, 1))  # as argnums stands in jax.value_and_grad
    with pytest.raises(ValueError, match="num_microbatches=0.*pass argnums=0"):
        optax_accum.value_and_grad(loss, 0)
    value, _ = optax_accum.value_and_grad(loss, 4, argnums=0)(W, X)  # the remedy
    np.testing.assert_allclose(value, loss(W, X), rtol=1e-6)


def test_the_names_of_others_in_value_and_grad():
    with pytest.raises(TypeError, match="has no accumulation_steps=: .*Pass it as num_microbatches="):
        optax_accum.value_and_grad(loss, accumulation_steps=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("every_k_schedule", 4, {"every": 4}),
        ("use_grad_mean", False, {"every": 4, "reduction": "sum"}),
        ("should_skip_update_fn", optax.skip_not_finite, {"every": 4, "nonfinite": optax.skip_not_finite}),
    ],
)
def test_the_names_of_multi_steps(name, value, remedy):
    *_, mine = remedy
    with pytest.raises(TypeError, match=f"has no {name}=: {name}=.*Pass .*{mine}="):
        optax_accum.accumulate_gradients(optax.sgd(0.1), **{"every": 4, name: value})
    assert optax_accum.accumulate_gradients(optax.sgd(0.1), **remedy).init(W).mini_step == 0


@pytest.mark.parametrize("cut", CUTS)
def test_what_is_no_function(cut):
    with pytest.raises(TypeError, match="fun must be a function: fun=3. Pass the"):
        CUTS[cut](3)


@pytest.mark.parametrize("cut", ["reduce_microbatches", "value_and_apply_gradients"])
@pytest.mark.parametrize("weight_fn", [3.0, lambda: 1.0, lambda w, x: 1.0], ids=["number", "none", "two"])
def test_a_weight_fn_that_does_not_take_the_batch(cut, weight_fn):
    with pytest.raises(
        TypeError, match=r"weight_fn (must be a function|gets the batch alone \(1 argument, .*takes \().*batch"
    ):
        CUTS[cut](loss, weight_fn=weight_fn)


@pytest.mark.parametrize("weight_fn", [len, jax.jit(lambda x: x.sum()), lambda *batch: 1.0, lambda x, factor=2.0: 1.0])
def test_a_weight_fn_that_takes_the_batch(weight_fn):
    assert jnp.isfinite(CUTS["reduce_microbatches"](loss, weight_fn=weight_fn)(W, X))


def test_a_factory_in_the_place_of_an_optimizer():
    message = r"tx must be an optimizer, with init and update: tx=<function adam.*Call it: optax.adam\(1e-3\)"
    with pytest.raises(TypeError, match=message):
        optax_accum.apply_gradients(optax.adam, W, build().init(W), W)
    with pytest.raises(TypeError, match=message):
        optax_accum.value_and_apply_gradients(loss, optax.adam)
    with pytest.raises(TypeError, match="Call it"):
        optax_accum.value_and_apply_gradients(loss, optax.MultiSteps)
    tx = optax.adam(1e-3)
    step = optax_accum.value_and_apply_gradients(loss, tx)  # the remedy
    assert jnp.isfinite(step(W, tx.init(W), X)[0])


def test_the_optimizer_in_the_place_of_the_loss():
    with pytest.raises(TypeError, match=r"fun must be a function: fun=.*value_and_apply_gradients\(fun, tx\)"):
        optax_accum.value_and_apply_gradients(build(), loss)
    with pytest.raises(TypeError, match="tx must be an optimizer.*tx=3. Pass an optimizer, such as"):
        optax_accum.value_and_apply_gradients(loss, 3)


@pytest.mark.parametrize("cut", ["value_and_grad", "value_and_apply_gradients", "microbatched"])
@pytest.mark.parametrize("labels", [np.array(["a"] * 8), np.array([None] * 8), np.array(["a"] * 8, object)])
def test_numpy_arrays_that_are_no_numbers(cut, labels):
    rows = lambda w, batch: batch["x"] @ w
    fun = CUTS[cut](rows if cut == "microbatched" else lambda w, batch: rows(w, batch).mean())
    call = lambda labels: fun(W, *([build().init(W)] if "apply_g" in cut else []), {"x": X, "label": labels})
    with pytest.raises(TypeError, match=r"A batch .* must hold arrays: at \['label'\] there is .*\[8\]. .*of numbers"):
        call(labels)
    call(np.unique(labels.astype(str), return_inverse=True)[1])  # the remedy


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.float16, np.complex64, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4])
def test_numpy_arrays_of_numbers(dtype):
    assert optax_accum.value_and_grad(lambda w, batch: loss(w, batch[0]), 2)(W, (X, np.ones(8, dtype)))[1].shape == (3,)


@pytest.mark.parametrize("tx", [build(), optax.sgd(0.1)], ids=["ours", "another"])
def test_a_model_that_holds_functions_as_parameters(tx):
    model = {"w": W, "activation": jnp.tanh}
    arrays = {"w": W, "activation": None}  # eqx.filter(model, eqx.is_inexact_array)
    with pytest.raises(TypeError, match=r"Parameters must hold arrays: at \['activation'\].*is_inexact_array"):
        optax_accum.apply_gradients(tx, arrays, tx.init(arrays), model)
    with pytest.raises(TypeError, match="Parameters must hold arrays"):
        build().update(arrays, build().init(arrays), model)
    assert optax_accum.apply_gradients(tx, arrays, tx.init(arrays), arrays)[0]["activation"] is None  # the remedy


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    "other", [optax.sgd(0.1), optax.adamw(0.1), optax.adabelief(0.1)], ids=["sgd", "adamw", "adabelief"]
)
def test_the_state_of_another_inner_optimizer(other, every):
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), every)
    state = optax_accum.accumulate_gradients(other, every).init(PARAMS)
    message = r"state must be that of this inner optimizer.*inner_opt_state=\(.*State, .*init gives \(ScaleByAdamState,"
    for given in [PARAMS, None] if every == 2 or "Belief" not in str(state) else []:  # as alone, it trains on
        with pytest.raises(ValueError, match=message):
            jax.jit(tx.update)(PARAMS, state, given)
    state = state._replace(inner_opt_state=tx.init(PARAMS).inner_opt_state)  # the remedy
    assert jax.jit(tx.update)(PARAMS, state, PARAMS)[1].mini_step == every - 1


def test_the_inner_state_of_other_parameters():
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 1)
    with pytest.raises(ValueError, match="of this inner optimizer and these parameters: inner_opt_state=PyTreeDef"):
        tx.update(PARAMS, tx.init({"w": W}), PARAMS)


def test_value_and_grad_still_names_the_role():
    with pytest.raises(ValueError, match=r"Add 2 to batch_argnums\.$"):
        optax_accum.value_and_grad(lambda w, x, y: loss(w, x - y), 2)(W, X, X)
    with pytest.raises(ValueError, match="outside batch_argnums"):
        optax_accum.value_and_grad(loss, 2)(W, (X, X[:6]))


def test_who_is_asked_whether_an_update_was_made():
    tx = build()
    with pytest.raises(
        AttributeError, match=r"an optimizer does not: tx.has_updated. Call optax_accum.has_updated\(state"
    ):
        tx.has_updated(tx.init(W))
    assert not hasattr(tx, "has_updated")
    assert not optax_accum.has_updated(tx.init(W))  # the remedy


def test_a_key_that_no_role_names():
    key, x = jax.random.key(0), jnp.ones((8, 3))
    rows = lambda w, x, key: jax.random.normal(key, x.shape[:1]) + x @ w
    with pytest.raises(ValueError, match="A random key must be named.*Pass rng_argnum=2"):
        optax_accum.reduce_microbatches(rows, 2, reduction="concat")(W, x, key)
    named = optax_accum.reduce_microbatches(rows, 2, reduction="concat", rng_argnum=2)(W, x, key)  # the remedy
    np.testing.assert_allclose(optax_accum.microbatched(rows, 2)(W, x, key), rows(W, x, key), rtol=1e-6)
    assert not np.allclose(named[::2], named[1::2])


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (4, r"The optimizer comes first: accumulate_gradients\(optax.adam"),
        (optax.sgd, "Call it"),
        (None, "Pass an optimizer"),
        (optax.MultiSteps(optax.sgd(0.1), 2), "the optimizer that optax.MultiSteps wraps"),
        (nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param), "Pass its tx"),
        ("adam", "Pass an optimizer"),
    ],
    ids=["swapped", "factory", "none", "MultiSteps", "nnx.Optimizer", "text"],
)
def test_what_is_no_optimizer_gets_the_remedy_that_fits(inner, message):
    with pytest.raises(TypeError, match=f"(?s)inner must be an optax.GradientTransformation: inner=.*{message}"):
        optax_accum.accumulate_gradients(inner, 4)


@pytest.mark.parametrize("every", [1, 2])
def test_windows_do_not_stand_in_windows(every):
    """They multiplied, and the inner one took micro-batches of any weight for equals."""
    ours = optax_accum.accumulate_gradients(optax.sgd(0.1), 2)
    for accumulates in (ours, *OTHER_WINDOWS):
        tx = optax_accum.accumulate_gradients(optax.chain(optax.clip(1.0), accumulates), every)
        with pytest.raises(ValueError, match=r"inner must not accumulate.*holds (Acc|Multi|Apply)\w*.*whole chain"):
            tx.init(PARAMS)


OTHER_WINDOWS = (
    optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    optax.chain(optax.apply_every(2), optax.sgd(0.1)),
)
IGNORES = r"ignores weight and flush.*accumulate_gradients\(inner, every\); from_multi_steps"


@pytest.mark.parametrize("tx", OTHER_WINDOWS, ids=["MultiSteps", "apply_every"])
def test_an_optimizer_that_accumulates_otherwise_is_not_given_weights(tx):
    """They were dropped, and each micro-step counted as an update."""
    state, loss = tx.init(PARAMS), lambda params, x: jnp.mean(x) * jnp.sum(params["w"])
    for extra in ({"weight": 30}, {"flush": True}, {"rows": 4}):
        with pytest.raises(ValueError, match=r"apply_gradients with weight, rows or flush.*" + IGNORES):
            optax_accum.apply_gradients(tx, PARAMS, state, PARAMS, **extra)
    params, _ = optax_accum.apply_gradients(tx, PARAMS, state, PARAMS)  # as with tx.update
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, PARAMS)
    with pytest.raises(ValueError, match=IGNORES):
        optax_accum.value_and_apply_gradients(loss, tx)(PARAMS, state, jnp.ones(3))
    with pytest.raises(ValueError, match="A train state or an optimizer of optax_accum.flax.*" + IGNORES):
        optax_accum.flax.linen.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    with pytest.raises(ValueError, match="A train state or an optimizer of optax_accum.flax.*" + IGNORES):
        optax_accum.flax.nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)


def test_a_module_of_nnx_is_no_tree_of_parameters():
    """Its running statistics stood still, without a word."""
    model, x = nnx.BatchNorm(3, rngs=nnx.Rngs(0)), jnp.ones((8, 3))
    loss = lambda model, x: jnp.mean(model(x) ** 2)
    tx = build()
    with pytest.raises(TypeError, match="module of NNX.*optax_accum.flax.nnx.value_and_grad"):
        optax_accum.value_and_grad(loss, 2)(model, x)
    across = "module of NNX.*Across calls use optax_accum.flax.nnx.Optimizer"
    with pytest.raises(TypeError, match=across):
        optax_accum.value_and_apply_gradients(loss, tx)(model, tx.init(PARAMS), x)
    with pytest.raises(TypeError, match=across):
        optax_accum.apply_gradients(tx, PARAMS, nnx.Optimizer(model, tx, wrt=nnx.Param), model)


def test_value_and_grad_of_a_module_names_only_options_that_it_has():
    model, fun = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    with pytest.raises(TypeError, match="A key in a batch argument.*as an argument of its own[.]"):
        optax_accum.flax.nnx.value_and_grad(fun, 2)(model, {"x": X, "key": KEY})
    with pytest.raises(ValueError, match=r"make the batch an argument, fun\(model, batch\)"):
        optax_accum.flax.nnx.value_and_grad(lambda model: fun(model, {"x": X}), 2)


def test_explain_says_what_to_pass_in_place_of_a_module():
    model, x = nnx.BatchNorm(3, rngs=nnx.Rngs(0)), jnp.ones((8, 3))
    fun = lambda model, x: jnp.mean(model(x) ** 2)
    message = (
        r"module of NNX.*graph, params, rest = nnx.split\(model, nnx.Param, ...\), and explain\(lambda params, batch, r"
    )
    with pytest.raises(TypeError, match=message):
        optax_accum.explain(fun, model, x)
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # the remedy
    found = optax_accum.explain(lambda params, batch, rest: fun(nnx.merge(graph, params, rest), batch), params, x, rest)
    assert found.couplings
    assert "each row takes a mean over rows" in found.reasons[0]


def test_a_one_where_jax_takes_argnums_is_asked_about():
    loss = lambda x, params: jnp.mean(x @ params["w"] + params["b"])
    with pytest.raises(ValueError, match="must have the same number of rows") as caught:
        optax_accum.value_and_grad(loss, 1)(jnp.ones((4, 3)), {"w": jnp.ones((3, 2)), "b": jnp.ones(2)})
    assert "pass it as argnums=1" in caught.value.__notes__[0]


@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun], ids=["jit", "eager"])
@pytest.mark.parametrize("every", [1, 2])
def test_an_optimizer_without_state_takes_no_other_one(jit, every):
    """It handed it back: the run went on without what the state was for."""
    adam, sgd = (optax_accum.accumulate_gradients(inner, every) for inner in (optax.adam(0.1), optax.sgd(0.1)))
    with pytest.raises(ValueError, match="must be that of this inner optimizer.*inner_opt_state="):
        jit(sgd.update)(PARAMS, adam.init(PARAMS), PARAMS)


@pytest.mark.parametrize("within", [True, False])
def test_a_number_of_rows_that_an_export_leaves_open(within):
    (rows,) = jax.export.symbolic_shape("rows")
    loss, tx, w = lambda w, x: jnp.mean(x * w), optax_accum.accumulate_gradients(optax.sgd(1.0), 2), jnp.float32(1)
    x = jax.ShapeDtypeStruct((rows,), jnp.float32)
    step = lambda **options: optax_accum.value_and_apply_gradients(loss, tx, **options)
    run = optax_accum.value_and_grad(loss, 2) if within else lambda w, x: step()(w, tx.init(w), x)
    with pytest.raises(ValueError, match=r"known when tracing: it is the symbolic dimension rows.*pass weight_fn"):
        jax.export.export(jax.jit(run))(w, x)
    weighed = lambda w, x: step(weight_fn=jnp.sum)(w, tx.init(w), x)[0]
    assert jax.export.export(jax.jit(weighed))(w, x).call(w, jnp.arange(3.0)) == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: batching.every_by_tokens(4), TypeError, r"counts must be a dict, .*: 4\. Write"),
        (lambda: batching.every_by_tokens({0: 2, float("nan"): 3}), ValueError, "counts must say what holds from 0"),
        (lambda: target(None), TypeError, "num_devices must be an integer >= 1: num_devices=None"),
        (lambda: target(0), ValueError, "num_devices must be an integer >= 1: num_devices=0"),
        (
            lambda: sharding.state_sharding(build(), PARAMS, offload=True),
            ValueError,
            "offload must name fields .* True",
        ),
        (lambda: sharding.count_collectives(jax.jit(jnp.sin).lower(1.0)), ValueError, r"Compile what was lowered"),
        (lambda: swapped(), TypeError, r"The order is optimizer\.update\(model, grads\)"),
    ],
)
def test_what_surrounds_a_window_is_checked(call, error, message):
    with pytest.raises(error, match=message):
        call()


def target(num_devices):
    return checkpoint.checkpoint_target(build(), PARAMS, num_devices)


def swapped():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = optax_accum.flax.nnx.Optimizer(model, build(), wrt=nnx.Param)
    optimizer.update(nnx.state(model, nnx.Param), model)


ROWS_LOSS = lambda p, x: jnp.mean(p * x**2)


@pytest.mark.parametrize("share", [-0.1, True, "save", float("nan"), float("inf")])
def test_a_share_of_a_forward_pass_that_is_none(share):
    for build_ in (functools.partial(optax_accum.value_and_grad, ROWS_LOSS, 2), explained):
        with pytest.raises(
            ValueError, match=f"recompute must be a number >= 0.*: recompute={share!r}. Pass 0.6 to run"
        ):
            build_(recompute=share)


def explained(**options):
    return optax_accum.explain(ROWS_LOSS, jnp.float32(1), X, **options)


def test_an_overlap_that_is_no_flag():
    with pytest.raises(TypeError, match="overlap must be True, False or None: overlap=1. Leave it out"):
        optax_accum.Devices("data", overlap=1)


def test_what_comes_in_another_order():
    with pytest.raises(TypeError, match=r"loss must be a function.*of_loss\(loss, tx\)"):
        optax_accum.plan.of_loss(optax.sgd(0.1), loss)
    with pytest.raises(TypeError, match="tx must be an optimizer"):
        optax_accum.plan.of_loss(loss, W)


def test_a_micro_batch_that_is_not_in_a_packing():
    packing = optax_accum.batching.token_microbatches([3, 2, 4], max_tokens=8)
    for index in (packing.num_microbatches, -1):
        with pytest.raises(IndexError, match=f"index={index}, and there are {packing.num_microbatches}"):
            packing.mask(index)


ADAM = optax.adam(0.1)
SCHEDULE_FREE = optax.contrib.schedule_free_adamw(0.1)


def mean_of_squares(params, x):
    return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)


def stepped(state):
    return optax_accum.value_and_apply_gradients(mean_of_squares, build())(PARAMS, state, jnp.ones((4, 2)))


def applied(tx, grads, state, params=PARAMS):
    return optax_accum.apply_gradients(tx, grads, state, params)


OWN_STATE = r"state=tuple. If it is that of the inner optimizer, go on with tx.init\(params\)._replace\(inner_opt_state"
ORDER = r"state=dict. The order is .*apply_gradients\(tx, grads, state, params\)"
FUNCTION = r"Gradients must hold arrays: at the only leaf there is <function .*jax.grad\(loss\)\(params, batch\)"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: update(build(), state=ADAM.init(PARAMS)), TypeError, OWN_STATE),
        (lambda: applied(build(), PARAMS, ADAM.init(PARAMS)), TypeError, OWN_STATE),
        (lambda: stepped(ADAM.init(PARAMS)), TypeError, OWN_STATE),
        (lambda: applied(build(), PARAMS, PARAMS, build().init(PARAMS)), TypeError, ORDER),
        (lambda: applied(build(), jax.grad(mean_of_squares), build().init(PARAMS)), TypeError, FUNCTION),
        (lambda: update(build(), jax.grad(mean_of_squares)), TypeError, FUNCTION),
        (lambda: applied(ADAM, jax.grad(mean_of_squares), ADAM.init(PARAMS)), TypeError, FUNCTION),
        (
            lambda: optax_accum.plan.fit(mean_of_squares, PARAMS, jnp.ones((4, 2))),
            TypeError,
            r"step_of_k is called with the number of micro-batches alone: it takes \(params, x\).*of_loss\(loss, tx",
        ),
        (
            lambda: optax.contrib.schedule_free_eval_params(build().init(PARAMS), PARAMS),
            AttributeError,
            "no field 'b1': it holds the state of the inner optimizer. Pass state.inner_opt_state",
        ),
        (lambda: build().gradient_transformation(), AttributeError, "is an Optax transformation: .* Pass tx itself"),
    ],
)
def test_what_people_take_for_something_else(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_remedies_for_these():
    tx = optax_accum.accumulate_gradients(ADAM, 2)
    state = tx.init(PARAMS)._replace(inner_opt_state=ADAM.init(PARAMS))
    assert tx.update(PARAMS, state, PARAMS)[1].mini_step == 1
    state = optax_accum.accumulate_gradients(SCHEDULE_FREE, 2).init(PARAMS)
    found = optax.contrib.schedule_free_eval_params(state.inner_opt_state, PARAMS)
    assert jax.tree.structure(found) == jax.tree.structure(PARAMS)
    assert not hasattr(state, "b1")


def test_dp_sgd_wrapped_says_what_to_do():
    tx = optax_accum.accumulate_gradients(optax.contrib.differentially_private_aggregate(1.0, 1.0, key=0), 1)
    with pytest.raises(ValueError, match="per_example_global_norm_clip") as caught:
        update(tx)
    assert "DP-SGD clips the gradient of each example" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("way", ["value_and_grad", "reduce_microbatches", "value_and_apply_gradients", "microbatched"])
def test_a_key_in_the_place_of_the_batch(way):
    """In Haiku's order, and in the old style: two numbers of it were taken for two rows."""
    fun = lambda w, key, x: jnp.mean((x @ w + jax.random.normal(key)) ** 2)
    key, x, tx = jax.random.PRNGKey(0), jnp.ones((4, 3)), build()
    run = {
        "value_and_grad": lambda: optax_accum.value_and_grad(fun, num_microbatches=1)(W, key, x),
        "reduce_microbatches": lambda: optax_accum.reduce_microbatches(jax.grad(fun), 1)(W, key, x),
        "microbatched": lambda: optax_accum.microbatched(fun, 1)(W, key, x),
        "value_and_apply_gradients": lambda: optax_accum.value_and_apply_gradients(fun, tx)(W, tx.init(W), key, x),
    }[way]
    remedy = "Pass batch_argnums=2." if way in ("value_and_grad", "microbatched") else "batch_argnums=2, rng_argnum=1"
    with pytest.raises(ValueError, match=f"argument 1 is one, of the old style.*{remedy}"):
        run()
    optax_accum.reduce_microbatches(jax.grad(fun), 2, batch_argnums=2, rng_argnum=1)(W, key, x)


def _mapped_loss(w, key, x):
    return jax.lax.pmean(jnp.mean((x @ w) ** 2) * jax.random.uniform(key), "data")


def _split(fun, *args, **options):
    return optax_accum.value_and_grad(fun, 2, **options)(*args)


def _over_devices(fun, *args, **options):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        return jax.jit(optax_accum.value_and_grad(fun, num_microbatches=1, devices="data", **options))(*args)


def _together(fun, **options):
    return optax_accum.value_and_grad(fun, 2, **options)


def _apart(fun, **options):
    return jax.value_and_grad(optax_accum.reduce_microbatches(fun, 2, **options))


def _on_its_axes(fun, *args, way=_together, **options):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data"))
    return jax.shard_map(way(fun, **options), mesh=mesh, in_specs=specs, out_specs=jax.sharding.PartitionSpec())(*args)


KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _split(loss, jnp.ones(3, int), X), "Only floating-point arguments .*Pass it as another argument[.]"),
        (lambda: _split(loss, W, KEY), "argument 1[.] Name the batch by batch_argnums[.]"),
        (lambda: _split(loss, W, {"x": X, "factors": [1.0, 2.0]}), "Numbers in a list are not split"),
        (lambda: _split(lambda w, x, y: loss(w, x + y), W, X, jnp.ones((8, 1))), "batch_argnums[.]"),
        (lambda: _split(lambda w, x: optax_accum.Ratio(loss(w, x), W), W, X), "the count of a Ratio must be"),
        (lambda: _split(loss, W, X, argnums=2), "argnums must name a parameter of fun: .*Pass its position"),
        (
            lambda: _over_devices(loss, W, X[:7]),
            r"must divide over the devices.*Pad .* to 8 rows, with a mask.*sum\(mask \* errors\) / jnp.sum\(mask\)",
        ),
    ],
)
def test_value_and_grad_names_only_options_that_it_has(call, message):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        call()
    assert not re.search(GONE, str(caught.value))


@pytest.mark.sweep
def test_the_remedy_of_a_loss_that_communicates_takes_its_key():
    """Its error names `reduce_microbatches`, which needs the key named."""
    options = {"batch_argnums": 2, "devices": "data"}
    with pytest.raises(ValueError, match=r"jax.value_and_grad\(optax_accum.reduce_microbatches\(loss, k") as caught:
        _on_its_axes(_mapped_loss, W, KEY, X, **options)
    assert not re.search(r"\b(rng_argnum|carry_argnum|aux_reduction)\b", str(caught.value))
    with pytest.raises(ValueError, match="A random key must be named.*Pass rng_argnum=1"):
        _on_its_axes(_mapped_loss, W, KEY, X, way=_apart, **options)
    value, grad = _on_its_axes(_mapped_loss, W, KEY, X, way=_apart, rng_argnum=1, **options)
    np.testing.assert_allclose(jnp.vdot(grad, W), 2 * value, rtol=1e-5)  # of a square


def test_the_remedy_for_rows_that_devices_do_not_divide():
    rows, mask = jnp.pad(X[:7], ((0, 1), (0, 0))), jnp.arange(8) < 7
    masked = lambda w, batch: jnp.sum(batch[1] * (batch[0] @ w) ** 2) / jnp.sum(batch[1])
    value, _ = _over_devices(masked, W, (rows, mask))
    np.testing.assert_allclose(value, loss(W, X[:7]), rtol=1e-6)


@pytest.mark.parametrize("closes", [lambda w: loss(w, X), jax.jit(lambda params: loss(params, X))], ids=["w", "jit"])
@pytest.mark.parametrize("way", ["value_and_grad", "reduce_microbatches", "value_and_apply_gradients"])
def test_a_loss_that_closes_over_its_batch(way, closes):
    with pytest.raises(ValueError, match=r"make the batch an argument, fun\((w|params), batch\)\."):
        CUTS[way](closes)


def test_rows_of_a_packing_that_are_not_those_of_its_lengths():
    """Longer rows were cut, and too few ended in an IndexError."""
    packing = batching.token_microbatches([3, 2, 4], max_tokens=8)
    rows = [np.arange(3), np.arange(2), np.arange(4)]
    with pytest.raises(ValueError, match="lengths counted: 3 rows, and 2 are given. Pass all rows"):
        packing.take(0, rows[:2])
    longer = [np.arange(9)] * 3
    with pytest.raises(ValueError, match=r"has 9, lengths\[\d\]=\d.*or rows that are padded in one array, np.stack"):
        packing.take(0, longer)
    assert packing.take(0, np.stack(longer)).shape == packing.take(0, rows).shape  # the remedy


def test_noise_of_one_micro_batch_is_not_a_number_and_says_so():
    loss = lambda w, x: jnp.mean((x @ w) ** 2)
    with pytest.warns(UserWarning, match="noise scale will be NaN.*two or more"):
        build(1, statistics=True)
    with pytest.warns(UserWarning, match="noise scale will be NaN.*two or more"):
        optax_accum.value_and_grad(loss, num_microbatches=1, statistics=True)(W, jnp.ones((4, 3)))
    optax_accum.value_and_grad(loss, 2, statistics=True)(W, jnp.ones((4, 3)))  # no warning
