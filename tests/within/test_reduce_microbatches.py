"""`reduce_microbatches`: any function of a batch, cut, is that of the whole batch."""

import contextlib
import functools
import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from optax_accum.sharding import count_collectives
from tests.problems import normal
from tests.tiers import sweep

PARAMS = {"w": normal(0, 8, 4), "b": normal(1, 4) * 0}
BATCH = {"x": normal(2, 32, 8), "mask": jnp.asarray(np.arange(32) % 3 > 0)}
SIZES = [{"num_microbatches": 4}, {"microbatch_size": 12}, {"num_microbatches": 1}]
COUNT = lambda batch: batch["mask"].sum()


def loss(params, batch):
    errors = jnp.sum(jnp.tanh(batch["x"] @ params["w"] + params["b"][None]) ** 2, 1)
    tokens = batch["mask"].sum()
    mean = jnp.sum(batch["mask"] * errors) / tokens
    return mean, {"tokens": tokens, "errors": errors, "largest": errors.max(), "smallest": errors.min(), "mean": mean}


GRADIENT = jax.jit(jax.value_and_grad(loss, has_aux=True))
AUX = {"tokens": "sum", "errors": "concat", "largest": "max", "smallest": "min", "mean": "mean"}
REDUCTION = (("mean", AUX), "mean")
WEIGHT = {"reduction": REDUCTION, "weight_fn": COUNT}


@pytest.mark.sweep
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_gradient_function_with_all_that_it_returns(size):
    f = optax_accum.reduce_microbatches(GRADIENT, **size, **WEIGHT)
    for run in (jax.jit(f), f) if size is SIZES[1] else (jax.jit(f),):
        chex.assert_trees_all_close(run(PARAMS, BATCH), GRADIENT(PARAMS, BATCH), rtol=1e-5, atol=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", sweep([AxisType.Auto, AxisType.Explicit], but=[AxisType.Explicit]), ids=str)
@pytest.mark.parametrize("size", sweep(SIZES[:2], but=SIZES[1:2]), ids=str)
def test_over_devices_all_is_reduced_once(size, kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    f = optax_accum.reduce_microbatches(GRADIENT, devices="data", **size, **WEIGHT)
    with jax.set_mesh(mesh):
        args = jax.device_put(PARAMS, NamedSharding(mesh, P())), jax.device_put(BATCH, NamedSharding(mesh, P("data")))
        run = jax.jit(f).lower(*args).compile()
    got, want = jax.device_get(run(*args)), GRADIENT(PARAMS, BATCH)
    order = lambda tree: ((tree[0][0], {**tree[0][1], "errors": np.sort(tree[0][1]["errors"])}), tree[1])
    chex.assert_trees_all_close(order(got), order(want), rtol=1e-5, atol=1e-6)
    assert not count_collectives(run).select(place="loop").operations


@pytest.mark.sweep
def test_a_gradient_goes_where_it_is_to_be():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    to = (P(), {"w": P("data"), "b": P()})
    gradient = jax.value_and_grad(lambda *args: loss(*args)[0])
    f = optax_accum.reduce_microbatches(gradient, 4, weight_fn=COUNT, devices=optax_accum.Devices("data", to=to))
    with jax.set_mesh(mesh):
        args = jax.device_put(PARAMS, NamedSharding(mesh, P())), jax.device_put(BATCH, NamedSharding(mesh, P("data")))
        run = jax.jit(f).lower(*args).compile()
    value, grads = run(*args)
    chex.assert_trees_all_close(jax.device_get((value, grads)), gradient(PARAMS, BATCH), rtol=1e-5, atol=1e-6)
    assert grads["w"].sharding.spec == P("data")
    assert count_collectives(run).select("reduce-scatter").count == 1


def test_keys_carries_and_stacks():
    def fun(batch, key, carry):
        noise = jax.random.normal(key)
        return {"noise": noise, "last": noise, "stack": carry}, carry + 1

    names = {"noise": "mean", "last": "last", "stack": "stack"}
    options = {"batch_argnums": 0, "rng_argnum": 1, "carry_argnum": 2, "reduction": names}
    key = jax.random.key(0)
    out, carry = jax.jit(optax_accum.reduce_microbatches(fun, 4, **options))(BATCH["x"], key, 0)
    noise = [jax.random.normal(jax.random.fold_in(key, i)) for i in range(4)]
    want = {"noise": sum(noise) / 4, "last": noise[-1], "stack": jnp.arange(4)}
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), out, want)
    assert carry == 4


@pytest.mark.sweep
def test_what_weighs_nothing_does_not_count():
    """0 / 0 among them; all of nothing is zeros."""
    mask = (jnp.arange(32) % 4 == 1).astype(jnp.float32)  # of bools, XLA makes 0 of 0 / 0
    batch = {**BATCH, "mask": mask}
    want = GRADIENT(PARAMS, batch)
    f = jax.jit(optax_accum.reduce_microbatches(GRADIENT, 4, **WEIGHT))
    (value, aux), grads = f(PARAMS, batch)
    chex.assert_trees_all_close((value, grads), (want[0][0], want[1]), rtol=1e-5, atol=1e-6)
    assert aux["tokens"] == 8
    (value, _), grads = f(PARAMS, {**BATCH, "mask": jnp.zeros(32)})
    chex.assert_trees_all_equal((value, grads), jax.tree.map(jnp.zeros_like, (value, grads)))


def test_a_batch_without_rows():
    """As Poisson sampling makes: zero sums, no rows, and a mean of nothing."""
    empty = jax.tree.map(lambda leaf: leaf[:0], BATCH)
    f = optax_accum.reduce_microbatches(GRADIENT, microbatch_size=4, reduction=REDUCTION)
    (value, aux), grads = jax.jit(f)(PARAMS, empty)
    chex.assert_trees_all_equal((value, grads), jax.tree.map(jnp.zeros_like, (value, grads)))
    assert aux["errors"].shape == (0,)
    assert aux["tokens"] == 0
    assert aux["largest"] == -jnp.inf


def test_a_result_that_devices_do_not_divide_is_refused():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    f = optax_accum.reduce_microbatches(lambda w, x: w * x.mean(), 2, devices=optax_accum.Devices("data", to=P("data")))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"shard each parameter evenly.*\(6,\).*over \[4\] devices"),
    ):
        jax.jit(f)(jnp.ones(6), jax.device_put(jnp.ones(32), NamedSharding(mesh, P("data"))))


@pytest.mark.sweep
@pytest.mark.parametrize("to", [None, "partial", "data"])
def test_a_batch_without_rows_goes_where_others_do(to):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    options = {"devices": optax_accum.Devices("data", to=P("data") if to == "data" else to)}
    f = jax.jit(optax_accum.reduce_microbatches(lambda *args: GRADIENT(*args)[1]["w"], microbatch_size=4, **options))
    with jax.set_mesh(mesh):
        rows = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
        some, none = f(PARAMS, rows), f(PARAMS, jax.tree.map(lambda leaf: leaf[:0], rows))
    assert (none.shape, none.sharding) == (some.shape, some.sharding)
    assert not np.any(none)


def test_means_of_large_weights_fit_into_their_dtype():
    """Of float16, a sum of weights times values would not."""
    gradient = lambda w, x: (w * x.mean()).astype(jnp.float16)
    f = optax_accum.reduce_microbatches(gradient, 4, weight_fn=lambda x: jnp.float32(2.0**20))
    np.testing.assert_allclose(f(jnp.ones(3), jnp.full(8, 0.5)), 0.5)


def test_what_counts_itself_is_added():
    """A `Ratio`, or a record that counts as one, is not averaged."""
    ratio = lambda x: {"loss": optax_accum.Ratio(x.sum(), x.shape[0]), "largest": x.mean()}
    got = jax.jit(optax_accum.reduce_microbatches(ratio, microbatch_size=4, batch_argnums=0))(jnp.arange(10.0))
    chex.assert_trees_all_close(got, ratio(jnp.arange(10.0)))
    assert isinstance(got["loss"], optax_accum.Ratio)


def test_sums_are_in_float32():
    gradient = lambda w, x: jnp.ones_like(w) * x.mean().astype(w.dtype)
    w, x = jnp.ones(3, jnp.bfloat16), jnp.full(4096, 0.01)
    f = jax.jit(optax_accum.reduce_microbatches(gradient, 512, reduction="sum"))
    np.testing.assert_allclose(f(w, x).astype(jnp.float32), 5.12, rtol=1e-2)


@pytest.mark.sweep
def test_clipped_gradients_of_single_examples():
    """Those of DP-SGD: each is clipped by itself, so cutting changes nothing."""

    def clipped(params, batch):
        one = jax.grad(lambda params, x: jnp.sum(jnp.tanh(x @ params["w"] + params["b"]) ** 2))
        grads = jax.vmap(one, (None, 0))(params, batch["x"])
        norms = jax.vmap(optax.tree.norm)(grads)
        scale = jnp.minimum(1, 0.5 / norms)
        return jax.tree.map(lambda leaf: jnp.tensordot(scale, leaf, 1), grads)

    got = jax.jit(optax_accum.reduce_microbatches(clipped, microbatch_size=6, reduction="sum"))(PARAMS, BATCH)
    chex.assert_trees_all_close(got, clipped(PARAMS, BATCH), rtol=1e-5, atol=1e-5)


@pytest.mark.sweep
def test_it_is_differentiated():
    f = optax_accum.reduce_microbatches(lambda p, b: loss(p, b)[0], 4, weight_fn=COUNT)
    want = jax.grad(lambda p: loss(p, BATCH)[0])(PARAMS)
    chex.assert_trees_all_close(jax.grad(lambda p: f(p, BATCH))(PARAMS), want, rtol=1e-5, atol=1e-6)


WHERE = ["argument", "closure", "scalar of the batch"]


@pytest.mark.parametrize(
    "where",
    [*sweep(WHERE, but=["closure"]), *sweep(f"mesh, {where}" for where in WHERE)],
)
def test_its_gradient_by_bfloat16_is_added_in_float32(where):
    """JAX adds what a loop gives back in the dtype of the value: the sum stalls at 4."""
    fun = lambda w, x: jnp.sum(w * x.sum().astype(w.dtype))
    w, x = jnp.ones(3, jnp.bfloat16), jnp.full(512, 0.01)

    def total(w, x):
        options = {"reduction": "sum", "microbatch_size": 2, "devices": "data"}
        if not over_devices:
            options = {"reduction": "sum", "microbatch_size": 1}
        if where.endswith("closure"):
            return optax_accum.reduce_microbatches(lambda x: fun(w, x), batch_argnums=0, **options)(x)
        if where.endswith("batch"):
            of_scalars = lambda batch: fun(jnp.stack([*batch["w"].values()]), batch["x"])
            return optax_accum.reduce_microbatches(of_scalars, batch_argnums=0, **options)(
                {"w": {0: w[0], 1: w[1], 2: w[2]}, "x": x}
            )
        return optax_accum.reduce_microbatches(fun, **options)(w, x)

    over_devices = where.startswith("mesh")
    with (
        jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)))
        if over_devices
        else contextlib.nullcontext()
    ):
        got = jax.jit(jax.grad(total))(w, x)
        if not over_devices:
            chex.assert_trees_all_equal(jax.grad(total)(w, x[:96]), jax.jit(jax.grad(total))(w, x[:96]))
            chex.assert_trees_all_close(jax.jit(jax.jvp, static_argnums=0)(total, (w, x), (w, x))[1], 30.72, rtol=1e-2)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), 5.12, rtol=4e-3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reduction": "median"}, ValueError, "reduction must be one of mean, .*'median'. Choose one of these"),
        ({"reduction": jnp.maximum}, ValueError, 'take "stack", and merge those'),
        ({"weight_fn": lambda batch: "many"}, TypeError, "weight_fn's result"),
        ({"num_microbatches": 33}, ValueError, "Pass num_microbatches=32 at most"),
    ],
    ids=["name", "function", "no weight", "too many"],
)
def test_what_does_not_fit_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        optax_accum.reduce_microbatches(lambda p, b: loss(p, b)[0], **{"num_microbatches": 4, **options})(PARAMS, BATCH)


def test_a_result_that_cannot_be_reduced_is_refused():
    f = lambda fun, **options: optax_accum.reduce_microbatches(fun, 4, batch_argnums=0, **options)(jnp.arange(8.0))
    with pytest.raises(TypeError, match=r"What fun returns must hold arrays.*'text'.*Return arrays and numbers"):
        f(lambda x: {"mean": x.mean(), "text": "fine"})
    with pytest.raises(TypeError, match=r"the result has dtype int32. Take reduction=\"sum\""):
        f(lambda x: jnp.int32(1))
    with pytest.raises(TypeError, match=r"With carry_argnum, fun must return a pair, \(result, carry\)"):
        optax_accum.reduce_microbatches(lambda c, x: x.mean(), 4, carry_argnum=0)(0.0, jnp.arange(8.0))
    with pytest.raises(ValueError, match="must have the same number of rows"):
        optax_accum.reduce_microbatches(lambda x, y: x.mean(), 4, batch_argnums=(0, 1))(jnp.ones(8), jnp.ones(0))


@pytest.mark.sweep
def test_the_weight_comes_out_of_the_loss():
    """Across calls: the mean over tokens that only the loss counts."""
    _, want = GRADIENT(PARAMS, BATCH)

    def of_tokens(params, batch):
        mean, aux = loss(params, batch)
        return optax_accum.Ratio(aux["tokens"] * mean, aux["tokens"]), aux

    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 3)
    step = jax.jit(optax_accum.value_and_apply_gradients(of_tokens, tx, has_aux=True))
    params, state = PARAMS, tx.init(PARAMS)
    for rows in (slice(0, 5), slice(5, 20), slice(20, 32)):
        (found, _), params, state = step(params, state, jax.tree.map(lambda leaf: leaf[rows], BATCH))  # noqa: B023
    chex.assert_trees_all_close(params, jax.tree.map(jnp.subtract, PARAMS, want), rtol=1e-5, atol=1e-6)
    assert jnp.ndim(found) == 0


class Metric(NamedTuple):
    """A record such as trainers have."""

    unreduced: jax.Array
    weight: jax.Array


def test_a_record_of_a_trainer_is_a_ratio():
    optax_accum.Ratio.register(Metric, total="unreduced", count="weight")
    metric = lambda p, b: Metric(loss(p, b)[0] * COUNT(b), COUNT(b))
    want = jax.value_and_grad(lambda p: loss(p, BATCH)[0])(PARAMS)
    got = jax.jit(optax_accum.value_and_grad(metric, microbatch_size=12))(PARAMS, BATCH)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)
    both = jax.jit(optax_accum.value_and_grad(lambda *args: {"a": metric(*args), "b": metric(*args)}, 4))
    chex.assert_trees_all_close(both(PARAMS, BATCH), jax.tree.map(lambda x: 2 * x, want), rtol=1e-5, atol=1e-6)

    class Perplexity(Metric):
        pass

    got = jax.jit(optax_accum.value_and_grad(lambda *args: Perplexity(*metric(*args)), 4))(PARAMS, BATCH)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="Pass its type"):
        optax_accum.Ratio.register(Metric(0, 1), "unreduced", "weight")
    optax_accum.Ratio.register(Metric, total="sum", count="weight")  # the class is this test's
    with pytest.raises(TypeError, match="Metric has no 'sum'"):
        optax_accum.value_and_grad(metric, 4)(PARAMS, BATCH)


@pytest.mark.sweep
def test_a_batch_that_comes_cut():
    reduction = ("mean", {**AUX, "errors": "stack"}), "mean"
    stacked = jax.tree.map(lambda leaf: leaf.reshape(4, 8, *leaf.shape[1:]), BATCH)
    one = lambda batch: jax.tree.map(lambda leaf: leaf[0], batch)
    of_one = lambda params, batch: GRADIENT(params, one(batch))
    options = {"microbatch_size": 1, "weight_fn": lambda batch: COUNT(one(batch)), "reduction": reduction}
    (value, aux), grads = jax.jit(optax_accum.reduce_microbatches(of_one, **options))(PARAMS, stacked)
    (want, one), gradient = GRADIENT(PARAMS, BATCH)
    chex.assert_trees_all_close((value, grads), (want, gradient), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(aux["errors"], one["errors"].reshape(4, 8), rtol=1e-5)


def test_a_carry_is_the_same_on_all_devices():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    fun = lambda x, carry: (jnp.mean(x), carry + 1)
    options = {"batch_argnums": 0, "carry_argnum": 1, "devices": "data"}
    with jax.set_mesh(mesh):
        x = jax.device_put(BATCH["x"], NamedSharding(mesh, P("data")))
        mean, carry = jax.jit(optax_accum.reduce_microbatches(fun, 4, **options))(x, 0)
        np.testing.assert_allclose(mean, np.mean(BATCH["x"]), atol=1e-6)
        assert carry == 4
        differs = lambda x, carry: (jnp.mean(x), carry + jnp.sum(x))
        with pytest.raises(ValueError, match="the carry must be the same on all devices"):
            jax.jit(optax_accum.reduce_microbatches(differs, 4, **options))(x, jnp.float32(0))


@pytest.mark.sweep
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_gradient_of_an_integer_stays(reduction):
    """A ready gradient function with `allow_int=True` returns float0 for it, of which nothing can be added."""
    params, x = {"w": jnp.float32(2), "steps": jnp.arange(3)}, jnp.arange(1.0, 11)
    grad = jax.grad(lambda params, x: jnp.mean(params["w"] * x) + 0.0 * params["steps"][0], allow_int=True)
    for wrap in (jax.jit, lambda fun: fun):
        found = wrap(optax_accum.reduce_microbatches(grad, 4, reduction=reduction))(params, x)
        assert (found["steps"].dtype, found["steps"].shape) == (jax.dtypes.float0, (3,))
        parts = [x[0:9:3], x[1:9:3], x[2:9:3], x[9:]] if reduction == "sum" else [x]
        np.testing.assert_allclose(found["w"], sum(part.mean() for part in parts), rtol=1e-6)


@pytest.mark.parametrize("to", [None, "partial", P("data")], ids=str)
def test_the_gradient_of_an_integer_stays_over_devices(to):
    params = {"w": jnp.arange(8.0), "steps": jnp.int32(3)}
    grad = jax.grad(lambda params, x: jnp.mean(x) * jnp.sum(params["w"]), allow_int=True)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("data")))
        found = jax.jit(optax_accum.reduce_microbatches(grad, 2, devices=optax_accum.Devices("data", to=to)))(params, x)
    assert found["steps"].dtype == jax.dtypes.float0
    means = np.reshape([1.5, 5.5, 9.5, 13.5], (4, 1)) if to == "partial" else 7.5
    np.testing.assert_allclose(found["w"], means * np.ones(found["w"].shape))


def test_an_error_names_the_place_in_what_fun_returns():
    fun = lambda x: {"text": "a", "mean": x.mean()}
    with pytest.raises(TypeError, match=re.escape("What fun returns must hold arrays: at ['text'] there is 'a'.")):
        optax_accum.reduce_microbatches(fun, 4, batch_argnums=0)(jnp.arange(8.0))


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("gradient_accumulation_steps", "num_microbatches"),
        ("has_aux", "reduction="),
        ("argnums", "jax.value_and_grad"),
    ],
)
def test_options_of_other_functions_are_refused_with_their_name_here(option, remedy):
    with pytest.raises(TypeError, match=f"reduce_microbatches has no {option}=.*{re.escape(remedy)}"):
        optax_accum.reduce_microbatches(lambda w, x: x.mean(), **{option: 3})
