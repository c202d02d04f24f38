"""`value_and_grad` and `microbatched`: the law within a call, for any cut, weight, dtype and path."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from tests import problems, programs
from tests.problems import GONE
from tests.tiers import sweep

START, BATCH = problems.params(), problems.rows(12)
WHOLE = jax.jit(jax.value_and_grad(problems.loss))(START, BATCH)
CUTS = [{"num_microbatches": k} for k in (1, 2, 5, 7, 12)] + [{"microbatch_size": b} for b in (1, 5, 12, 64)]


def close(actual, expected, rtol=2e-5, atol=2e-6):
    chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=atol)


@pytest.mark.sweep
def test_the_gradient_equals_the_gradient_of_the_whole_batch():
    """However it is cut: all of them are one program, which is compiled once."""
    funs = {str(cut): optax_accum.value_and_grad(problems.loss, **cut) for cut in CUTS}
    found = jax.jit(lambda *args: {name: fun(*args) for name, fun in funs.items()})(START, BATCH)
    close(found, dict.fromkeys(found, WHOLE))


@pytest.mark.sweep
def test_terms_may_be_named_by_numbers_and_switched_off():
    """And have denominators of their own, as those of `test_law_any_loss` have."""
    masks = [(jnp.arange(12) < 7).astype(jnp.float32), (jnp.arange(12) % 3 == 0).astype(jnp.float32)]
    rows = lambda params, x, power: jnp.sum(jnp.abs(x @ params["w"]) ** power, 1)

    def terms(params, batch):
        x, masks = batch
        over = lambda mask, power: jnp.sum(mask * rows(params, x, power)) / jnp.maximum(mask.sum(), 1)
        return {0: over(masks[0], 2), 1: over(masks[1], 1), 2: 0}

    batch = BATCH[0], masks
    whole = jax.value_and_grad(lambda params, batch: sum(terms(params, batch).values()))(START, batch)
    close(jax.jit(optax_accum.value_and_grad(terms, 4))(START, batch), whole)


@pytest.mark.sweep
def test_in_place_what_a_scan_reads_has_its_gradient_in_order():
    """JAX 0.7.2 wrote it from the other end (jax#32411)."""
    numbers = jnp.arange(5.0)
    loss = lambda x, rows: jax.lax.scan(lambda total, pair: (total + pair[0] * pair[1], None), 0.0, (x, numbers))[0]
    call = optax_accum.value_and_grad(loss, num_microbatches=2)
    np.testing.assert_allclose(jax.jit(call)(jnp.ones(5), jnp.zeros((2, 1)))[1], numbers)
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), every=1000)
    step = optax_accum.value_and_apply_gradients(loss, tx)
    state = jax.jit(step)(jnp.ones(5), tx.init(jnp.ones(5)), jnp.zeros((1, 1)))[2]
    np.testing.assert_allclose(state.acc_grads, numbers)


@pytest.mark.sweep
def test_auxiliary_outputs_are_those_of_the_whole_batch():
    """Of any shape and dtype, also of a batch that k does not divide."""

    def loss(params, batch):
        x, y = batch
        error = jnp.sum((x @ params["w"] - y) ** 2, 1)
        aux = {"rows": x @ params["w"], "count": len(x), "max": error.max(), "any": error > 5, "best": error.argmin()}
        return error.mean(), aux | {"last": x[-1], "half": error.mean().astype(jnp.bfloat16), "gram": x.T @ x}

    whole, ours = jax.value_and_grad(loss, has_aux=True), optax_accum.value_and_grad(loss, 5, has_aux=True)
    (_, want), _ = whole(START, BATCH)
    (_, aux), _ = jax.jit(ours)(START, BATCH)
    close(aux, want, rtol=1e-2 if aux["half"].dtype != jnp.bfloat16 else 2e-5)
    assert jax.tree.map(jnp.result_type, aux) == jax.tree.map(jnp.result_type, want)


@pytest.mark.sweep
def test_several_differentiated_and_several_batch_arguments():
    loss = lambda a, x, b, y, scale: scale * jnp.mean((x @ a + b[None] - y) ** 2)
    args = START["w"], BATCH[0], jnp.ones(3), BATCH[1], 2.0
    whole = jax.value_and_grad(loss, argnums=(0, 2))(*args)
    f = optax_accum.value_and_grad(loss, microbatch_size=5, argnums=(0, 2), batch_argnums=(1, -2))
    close(jax.jit(f)(*args), whole)


@pytest.mark.sweep
def test_scalars_in_a_batch_stay_whole_and_numpy_is_fine():
    loss = lambda w, batch, *, power: jnp.mean(batch["scale"] * jnp.abs(batch["x"] * w) ** power)
    batch = {"x": np.arange(10.0, dtype=np.float32), "scale": 3.0, "none": None}
    whole = jax.value_and_grad(loss)(jnp.array(2.0), batch, power=2)
    close(optax_accum.value_and_grad(loss, microbatch_size=4)(jnp.array(2.0), batch, power=2), whole)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_dtypes(dtype):
    w = jnp.asarray([1.0, -0.5, 0.25], dtype)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 3)), dtype)
    loss = lambda w, x: jnp.mean(jnp.abs(x @ w).astype(jnp.float32) ** 2)
    value, grads = jax.jit(optax_accum.value_and_grad(loss, num_microbatches=4))(w, x)
    named = jax.jit(optax_accum.value_and_grad(loss, num_microbatches=4, accumulator_dtype=jnp.float32))(w, x)[1]
    assert named.dtype == (jnp.complex64 if dtype == jnp.complex64 else jnp.float32)
    np.testing.assert_allclose(named.astype(dtype), grads)
    whole_value, whole = jax.value_and_grad(loss)(w, x)
    assert grads.dtype == whole.dtype == dtype
    np.testing.assert_allclose(value, whole_value, rtol=1e-6)
    wide = np.complex64 if dtype == jnp.complex64 else np.float32
    np.testing.assert_allclose(grads.astype(wide), whole.astype(wide), rtol=float(jnp.finfo(dtype).eps))


@pytest.mark.sweep
@pytest.mark.parametrize("devices", [None, *sweep(["data"])])
@pytest.mark.parametrize("run", [lambda grad: grad, *sweep([jax.jit])], ids=["eager", "jit"])
def test_a_gradient_that_is_asked_for_in_float32_is_never_rounded_to_bfloat16(run, devices):
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(64, 16)), jnp.float32), jnp.asarray(rng.normal(size=64), jnp.float32)
    w = jnp.asarray(rng.normal(size=16), jnp.bfloat16)
    loss = lambda w, x, y: jnp.mean((x @ w.astype(jnp.float32) - y) ** 2)
    options = {"batch_argnums": (1, 2), "accumulator_dtype": jnp.float32, "devices": devices}
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        got = run(optax_accum.value_and_grad(loss, 4, **options))(w, x, y)[1]
    chex.assert_trees_all_close(got, jax.grad(loss)(w.astype(jnp.float32), x, y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", [*sweep([lambda grad: grad]), jax.jit], ids=["eager", "jit"])
def test_a_nan_in_one_micro_batch_shows(run):
    x = BATCH[0].at[5].set(jnp.nan)
    value, grads = run(optax_accum.value_and_grad(problems.loss, num_microbatches=4))(START, (x, BATCH[1]))
    assert np.isnan(value)
    assert np.isnan(grads["w"]).all()


def stacked_problem(layers=8, width=64):
    rng = np.random.default_rng(0)
    params = {"layers": jnp.asarray(rng.normal(size=(layers, width, width)) / 8, jnp.float32), "out": jnp.ones(width)}

    def loss(params, x):
        layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
        h, _ = jax.lax.scan(layer, x, params["layers"])
        return jnp.mean((h @ params["out"]) ** 2)

    return loss, params, jnp.asarray(rng.normal(size=(16, width)), jnp.float32)


def temporary(f, *args):
    return programs.compiled(jax.jit(f).lower(*args)).memory_analysis().temp_size_in_bytes


@pytest.mark.sweep
def test_in_place_keeps_no_gradient_beside_the_sum():
    """A loop that adds trees of gradients has one beside it."""
    loss, params, x = stacked_problem()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    def by_hand(params, x):
        add = lambda sums, x: (jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, x)), None)
        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
        return jax.tree.map(lambda leaf: leaf / 8, jax.lax.scan(add, zeros, x.reshape(8, 2, -1))[0])

    ours = optax_accum.value_and_grad(loss, num_microbatches=8)
    assert temporary(by_hand, params, x) - temporary(ours, params, x) > 0.7 * size
    close(jax.jit(ours)(params, x), jax.jit(by_hand)(params, x))


@pytest.mark.sweep
def test_fewer_rows_at_a_time_take_less_memory():
    loss, params, _ = stacked_problem(layers=2)
    x = jnp.ones((512, 64))
    assert temporary(optax_accum.value_and_grad(loss, num_microbatches=16), params, x) < 0.5 * temporary(
        jax.value_and_grad(loss), params, x
    )


# In place across calls.


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("nonfinite", "weight"),
    [
        ("propagate", {}),
        ("propagate", {"weight": 2.0}),
        ("propagate", {"weight": jnp.float32(3)}),
        ("discard", {"weight": 2.0}),
        ("skip", {"weight": jnp.float32(3)}),
    ],
)
def test_value_and_apply_gradients_is_the_two_calls(nonfinite, weight):
    loss, params, x = stacked_problem(layers=2, width=16)
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 2, nonfinite=nonfinite)

    def two(params, state, x, **extra):
        value, grads = jax.value_and_grad(loss)(params, x)
        extra = {"weight": len(x), **extra}
        return value, *optax_accum.apply_gradients(tx, grads, state, params, value=value, **extra)

    steps = [jax.jit(optax_accum.value_and_apply_gradients(loss, tx)), jax.jit(two)]
    results = []
    for step in steps:
        now, state = params, tx.init(params)
        for i in range(5):
            value, now, state = step(now, state, x[i : i + 4], **weight)
        results.append((value, now, state))
    close(*results, rtol=1e-4, atol=2e-5)
    assert not np.allclose(now["layers"], params["layers"])
    assert state.gradient_step == 2


@pytest.mark.sweep
def test_a_micro_step_in_place_has_no_gradient_tree():
    loss, params, x = stacked_problem()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 8)

    def two(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return value, *optax_accum.apply_gradients(tx, grads, state, params)

    memory = []
    for step in (optax_accum.value_and_apply_gradients(loss, tx), two):
        compiled = programs.compiled(jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), x[:2]))
        memory.append(compiled.memory_analysis().temp_size_in_bytes / size)
    assert memory[0] < 0.4 < 1.0 < memory[1]


@pytest.mark.sweep
def test_value_and_apply_gradients_skips_the_backward_pass_of_weight_zero():
    loss = lambda w, x, mask: jnp.sum(mask * (w - x) ** 2) / mask.sum()
    tx = optax_accum.accumulate_gradients(optax.sgd(0.5), 2)
    step = jax.jit(optax_accum.value_and_apply_gradients(loss, tx, batch_argnums=(1, 2)))
    w, state = jnp.array(0.0), tx.init(jnp.array(0.0))
    for mask in (jnp.zeros(2), jnp.ones(2)):
        _, w, state = step(w, state, jnp.array([1.0, 3.0]), mask, weight=mask.sum())
    np.testing.assert_allclose(w, 2.0)


@pytest.mark.sweep
@pytest.mark.parametrize("every", [1, 2])
def test_value_and_apply_gradients_falls_back(every):
    """bfloat16 parameters, every=1, another optimizer, auxiliary outputs."""
    loss = lambda w, x: (jnp.mean((w[None] - x) ** 2).astype(jnp.float32), x.sum())
    for tx in (optax_accum.accumulate_gradients(optax.sgd(0.5), every), optax.polyak_sgd()):
        w = jnp.ones(3, jnp.bfloat16)
        (value, aux), new, _ = optax_accum.value_and_apply_gradients(loss, tx, has_aux=True)(
            w, tx.init(w), jnp.zeros((2, 3))
        )
        assert (value, aux, new.dtype) == (1, 0, jnp.bfloat16)


# microbatched.


def towers():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(8, 8)) / 3, jnp.float32), "t": jnp.float32(0.5)}
    x, y = (jnp.asarray(rng.normal(size=(14, 8)), jnp.float32) for _ in range(2))
    return params, x, y


def encode(params, x):
    z = jnp.tanh(x @ params["w"]) @ params["w"]
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def info_nce(a, b, params):
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(jnp.exp(params["t"]) * a @ b.T)))


def ranking(a, b, params):
    score = jnp.sum(a * b, -1)
    return jnp.mean(jax.nn.softplus(score[:, None] - score[None]))


def balance(a, b, params):
    load = jnp.mean(jax.nn.softmax(a), 0)
    return jnp.sum(load * jnp.log(load)) + jnp.mean(b) * params["t"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("loss", "cut"),
    [
        (ranking, {"microbatch_size": 4}),
        *sweep([(info_nce, {"num_microbatches": 7}), (balance, {"microbatch_size": 4})]),
    ],
)
def test_losses_that_couple_examples_have_the_gradient_of_the_batch(loss, cut):
    params, x, y = towers()
    small = optax_accum.microbatched(encode, **cut)
    total = lambda f: jax.jit(jax.value_and_grad(lambda p, x, y: loss(f(p, x), f(p, y), p), argnums=(0, 1, 2)))
    close(total(small)(params, x, y), total(encode)(params, x, y), rtol=1e-5, atol=1e-6)
    read = jax.jit(optax_accum.value_and_grad(lambda p, b: loss(encode(p, b[0]), encode(p, b[1]), p), **cut))
    close(read(params, (x, y))[1], total(encode)(params, x, y)[1][0], rtol=1e-5, atol=1e-6)
    naive = jax.jit(
        optax_accum.reduce_microbatches(jax.grad(lambda p, b: loss(encode(p, b[0]), encode(p, b[1]), p)), **cut)
    )
    assert not np.allclose(naive(params, (x, y))["w"], total(encode)(params, x, y)[1][0]["w"], rtol=1e-2)


def test_the_gradient_of_bfloat16_parameters_is_added_in_float32():
    w, x = jnp.ones(1, jnp.bfloat16), jnp.full((512, 1), 0.01, jnp.bfloat16)
    f = optax_accum.microbatched(lambda w, x: x * w[None], 512)
    grad = jax.jit(jax.grad(lambda w: jnp.sum(f(w, x).astype(jnp.float32))))
    np.testing.assert_allclose(grad(w).astype(float), 512 * x[0, 0])


@pytest.mark.sweep
@pytest.mark.parametrize("run", [jax.jit, lambda fun: fun], ids=["jit", "outside jit"])
def test_so_is_that_of_bfloat16_parameters_that_the_function_closes_over(run):
    w, x = jnp.ones(2, jnp.bfloat16), jnp.full((7, 2), 0.5)  # in bfloat16, 256 + 1 is 256
    x = x.at[0].set(256).at[3].set(0)

    def total(w):
        outputs = optax_accum.microbatched(
            lambda x: x * w.astype(jnp.float32)[None], microbatch_size=2, batch_argnums=0
        )
        return jnp.sum(outputs(x))

    np.testing.assert_array_equal(
        run(jax.grad(total))(w), jax.grad(lambda w: jnp.sum(x * w.astype(jnp.float32)[None]))(w)
    )


@pytest.mark.sweep
def test_the_forward_pass_keeps_one_micro_batch():
    params = {"layers": jnp.ones((6, 32, 32)) / 32}
    run = lambda p, x: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])[0][:, :4]
    x = jnp.ones((1024, 32))
    grad = lambda f: temporary(jax.grad(lambda p, x: jnp.sum(f(p, x).mean(0) ** 2)), params, x)
    assert grad(optax_accum.microbatched(run, microbatch_size=64)) < grad(run) / 3


# Bad input.

MEAN = lambda w, x, *rest: jnp.mean(w * x)
X = jnp.ones(6)


@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2, "microbatch_size": 3}], ids=["neither", "both"])
@pytest.mark.parametrize("wrap", [optax_accum.value_and_grad, optax_accum.microbatched])
def test_one_of_number_and_size(wrap, options):
    with pytest.raises(ValueError, match="Exactly one of num_microbatches and microbatch_size.*Pass one"):
        wrap(MEAN, **options)


def test_a_batch_that_is_a_micro_batch_stays_whole():
    """What the error recommends if neither is given."""
    with pytest.raises(ValueError, match=r"To accumulate across calls alone, pass num_microbatches=1\.$"):
        optax_accum.value_and_grad(MEAN)
    grad = optax_accum.value_and_grad(MEAN, num_microbatches=1)
    assert jax.tree.map(float, grad(2.0, X)) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_microbatches": 0}, ValueError, "num_microbatches must be an integer >= 1: num_microbatches=0"),
        ({"num_microbatches": 2.0}, TypeError, "num_microbatches must be an integer"),
        ({"microbatch_size": True}, TypeError, "microbatch_size must be an integer"),
        ({"num_microbatches": 2, "argnums": 1.0}, TypeError, "argnums must be the position or the name of an"),
        ({"num_microbatches": 2, "batch_argnums": ()}, TypeError, "batch_argnums must be the position or the name"),
        ({"weight_fn": len}, TypeError, r"has no weight_fn=: .*the traced loss .* tells it.*reduce_microbatches\("),
        ({"num_microbatches": 2, "accumulator_dtype": int}, TypeError, "accumulator_dtype must be a real floating"),
    ],
)
def test_arguments_of_the_factory(options, error, message):
    with pytest.raises(error, match=message):
        optax_accum.value_and_grad(MEAN, **options)


def loss_with(value):
    return lambda w, x: value(jnp.mean(w * x), x)


@pytest.mark.parametrize(
    ("fun", "options", "batch", "error", "message"),
    [
        (
            MEAN,
            {},
            {"a": X, "b": jnp.ones(4)},
            ValueError,
            r"same number of rows: the leaf \[0\]\['a'\] has 6.*\['b'\] has 4",
        ),
        (MEAN, {"num_microbatches": 7}, X, ValueError, "num_microbatches=7, and the batch has 6 rows"),
        (MEAN, {}, jnp.ones(0), ValueError, r"must have rows.*shape\[0\]=0"),
        (MEAN, {}, 3.0, ValueError, "must have a leaf with rows"),
        (MEAN, {}, (X, jax.random.key(0)), TypeError, "key in a batch argument.*as an argument of its own"),
        (MEAN, {"batch_argnums": 0}, X, ValueError, "argnums=0 and batch_argnums=0 name the same one.*microbatched"),
        (loss_with(lambda m, x: x), {}, X, TypeError, r"real scalar loss.*float32\[6\]"),
        (loss_with(lambda m, x: (m, m)), {}, X, TypeError, "real scalar loss, or a dict"),
        (loss_with(lambda m, x: m), {"has_aux": True}, X, TypeError, r"must return a pair, \(loss, aux\)"),
        (loss_with(lambda m, x: jnp.int32(1)), {}, X, TypeError, r"real scalar loss.*int32\[\]"),
    ],
)
def test_bad_input_at_trace_time(fun, options, batch, error, message):
    options = {"num_microbatches": 2, **options}
    with pytest.raises(error, match=message) as caught:
        jax.jit(optax_accum.value_and_grad(fun, **options))(jnp.array(1.0), batch)
    assert not re.search(GONE, str(caught.value))


def test_integers_cannot_be_differentiated():
    with pytest.raises(TypeError, match=r"argnums holds int32 at \[0\]\['i'\]"):
        optax_accum.value_and_grad(lambda p, x: jnp.mean(p["i"] * x), num_microbatches=2)({"i": 3}, X)


# Weights that cancel, and those that reach a narrow number


@pytest.mark.sweep
@pytest.mark.parametrize("weight", [1e5, 1e-6])
def test_a_weight_in_float16(weight):
    """A large one would overflow in the cotangent, a small one vanish: the gradient is added after the backward pass."""
    params = {"w": jnp.linspace(-1, 1, 4)}
    loss = lambda p, x: jnp.mean((x.astype(jnp.float16) @ p["w"].astype(jnp.float16) - 1) ** 2).astype(jnp.float32)
    tx, x = optax_accum.accumulate_gradients(optax.sgd(1.0), 1 + 1), jnp.linspace(0, 1, 12).reshape(3, 4)
    step = jax.jit(optax_accum.value_and_apply_gradients(loss, tx))
    now, state = params, tx.init(params)
    for _ in range(2):
        _, now, state = step(now, state, x, weight=weight)
    want = jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))
    close(now, want, rtol=1e-3)


@pytest.mark.sweep
def test_a_backward_pass_that_is_not_linear():
    """A clip in a `custom_vjp` acts on the gradient of the micro-batch, not on that times its weight."""

    @jax.custom_vjp
    def clipped(w):
        return w

    clipped.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
    loss = lambda w, x: jnp.mean(clipped(w) * x)
    tx, w = optax_accum.accumulate_gradients(optax.sgd(1.0), 2), jnp.float32(0)
    state = tx.init(w)
    step = jax.jit(optax_accum.value_and_apply_gradients(loss, tx))
    for x in (jnp.full(4, 3.0), jnp.full(2, 0.05)):
        _, w, state = step(w, state, x, weight=len(x))
    np.testing.assert_allclose(w, -(4 * 0.1 + 2 * 0.05) / 6, rtol=1e-6)


@pytest.mark.parametrize("to", ["partial", jax.sharding.PartitionSpec()])
def test_devices_without_axes(to):
    with pytest.raises(ValueError, match="added over mesh axes: axes=None, and to given. Name the axes"):
        optax_accum.Devices(None, to=to)


@pytest.mark.parametrize(
    "outputs",
    [lambda x: jnp.ones(3), jnp.sum, lambda x: x.squeeze(), lambda x: x @ x.T],
    ids=["of no row", "of all rows", "of rows", "of pairs of rows"],
)
def test_outputs_of_any_shape_are_those_of_all_rows(outputs):
    x = jnp.arange(10.0)[:, None]
    close(optax_accum.microbatched(lambda w, x: {"z": w * outputs(x)}, microbatch_size=3)(2.0, x)["z"], 2 * outputs(x))


def test_a_tuple_is_no_loss():
    with pytest.raises(TypeError, match=r"it returned a tuple of 2. If that is \(loss, aux\), pass has_aux=True"):
        optax_accum.value_and_grad(lambda w, x: (w * x.mean(), {}), num_microbatches=2)(jnp.float32(1), jnp.ones(4))


def test_parameters_that_are_python_numbers():
    f = optax_accum.value_and_grad(lambda p, x: p["a"] * jnp.mean(x) + p["b"] ** 2, num_microbatches=2)
    for call in (f, jax.jit(f)):
        value, grads = call({"a": 2.0, "b": jnp.float32(3)}, jnp.arange(4.0))
        close((value, grads), (12.0, {"a": 1.5, "b": 6.0}))


@pytest.mark.sweep
def test_what_a_loss_closes_over_is_differentiated_again():
    """Hyperparameters of a loss, by the gradient that it gives, twice."""
    w, x = jnp.eye(4), jnp.linspace(-1, 1, 24).reshape(6, 4)

    def outer(gradient, scale):
        def loss(w, x):
            return jnp.mean(jax.lax.scan(lambda h, _: (jnp.tanh(h @ w * scale), None), x, None, length=2)[0] ** 2)

        return jnp.sum(gradient(loss)(w, x)[1] ** 2)

    ours = functools.partial(outer, lambda loss: optax_accum.value_and_grad(loss, 3))
    want = functools.partial(outer, jax.value_and_grad)
    for derivative in (jax.grad, jax.hessian):
        np.testing.assert_allclose(jax.jit(derivative(ours))(0.5), jax.jit(derivative(want))(0.5), rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("how", [{}, {"statistics": True}], ids=str)
def test_shares_of_a_gradient_do_not_vanish_in_float16(how):
    """That of one micro-batch in 128 would be below the smallest number."""
    x, y = np.random.default_rng(0).normal(size=(2, 128, 4)).astype("f") * 0.01
    half = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float16), tree)
    errors = lambda w, batch: batch[0] @ w - batch[1]
    loss = lambda w, batch: jnp.mean(errors(*half((w, batch))).astype(jnp.float32) ** 2)
    want = jax.grad(lambda w, batch: jnp.mean(errors(w, batch) ** 2))
    value, got = jax.jit(optax_accum.value_and_grad(loss, 128, **how))(jnp.zeros((4, 4)), (x, y))
    np.testing.assert_allclose(got, want(jnp.zeros((4, 4)), (x, y)), rtol=0, atol=1e-7)
    assert np.max(np.abs(got)) > 1e-6
    if "statistics" in how:
        _, measured = jax.jit(optax_accum.value_and_grad(lambda w, b: jnp.mean(errors(w, b) ** 2), 128, **how))(
            jnp.zeros((4, 4)), (x, y)
        )[0]
        chex.assert_trees_all_close(value[1], measured, rtol=1e-2)


@pytest.mark.sweep
def test_nor_do_they_at_the_cast_of_a_float16_parameter():
    """Which the loss casts up before it is used: the backward pass ends in float16."""
    loss = lambda w, x: jnp.mean(x * w.astype(jnp.float32))
    w, x = jnp.float16(1), jnp.full(64, 3e-6)  # a share of it is less than half of the smallest number
    got = jax.jit(optax_accum.value_and_grad(loss, 64, accumulator_dtype=jnp.float32))(w, x)[1]
    np.testing.assert_allclose(got, 3e-6, rtol=0.02)
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2)
    step = jax.jit(optax_accum.value_and_apply_gradients(loss, tx))
    _, _, state = step(w, tx.init(w), x, weight=1e-4)
    np.testing.assert_allclose(state.acc_grads / 1e-4, 3e-6, rtol=0.02)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("way", ["value_and_grad", "reduce_microbatches", "value_and_apply_gradients"])
def test_a_loss_writes_to_a_reference(way, dtype):
    """Once for each micro-batch, as a log does; or once for the whole batch, as in `jax.value_and_grad`."""

    @jax.jit
    def run(w, x):
        log = jax.new_ref(jnp.zeros([], dtype))

        def loss(w, x):
            log[...] += x[0].astype(dtype)
            return jnp.mean((x * w.astype(jnp.float32)) ** 2)

        if way == "value_and_apply_gradients":
            tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 1)
            return w - optax_accum.value_and_apply_gradients(loss, tx)(w, tx.init(w), x)[1], log[...]
        if way == "reduce_microbatches":
            return optax_accum.reduce_microbatches(jax.grad(loss), 2)(w, x), log[...]
        return optax_accum.value_and_grad(loss, 2)(w, x)[1], log[...]

    grad, log = run(dtype(1), jnp.arange(1.0, 5.0))
    assert (grad, log) == (15, 3 if way == "reduce_microbatches" else 1)
