"""Convolutions in loops and branches: the numbers of JAX's own, in the form for which a CPU has a kernel."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from tests import programs, tiers
from tests.engine import convolutions

LAST, FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
CANONICAL = {"[b, f]x[i, o]->[b, f]", "[b, 0, f]x[0, i, o]->[b, 0, f]", "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"}
CANONICAL.add("[b, 0, 1, 2, f]x[0, 1, 2, i, o]->[b, 0, 1, 2, f]")


class Case(NamedTuple):
    """A convolution: the shapes of a batch and of kernels, and how they are convolved."""

    batch: tuple[int, ...]
    kernels: tuple[int, ...]
    numbers: Any = LAST
    options: Any = None
    dtype: Any = jnp.float32

    def arrays(self):
        keys = jax.random.split(jax.random.key(0))
        return [jax.random.normal(key, shape).astype(self.dtype) for key, shape in zip(keys, self[:2], strict=True)]

    def __call__(self, batch, kernels):
        options = {"window_strides": (1,) * (len(self.batch) - 2), "padding": "SAME", **(self.options or {})}
        return jax.lax.conv_general_dilated(batch, kernels, dimension_numbers=self.numbers, **options)


CASES = {
    "two dimensions": Case((4, 5, 6, 3), (3, 2, 3, 4)),
    "channels first": Case((4, 3, 5, 6), (4, 3, 3, 2), FIRST),
    "one dimension": Case((4, 6, 3), (3, 3, 4), ("NWC", "WIO", "NWC")),
    "three dimensions": Case((2, 3, 4, 3, 2), (2, 3, 2, 2, 3), ("NDHWC", "DHWIO", "NDHWC")),
    "no dimension": Case((4, 3), (3, 2), ("NC", "IO", "NC"), {"padding": ()}),
    "space between": Case((5, 3, 4, 6), (3, 4, 2, 3), ("HCNW", "IOHW", "CWNH")),
    "strides": Case((4, 5, 6, 3), (3, 2, 3, 4), options={"window_strides": (2, 3)}),
    "dilated": Case((4, 5, 6, 3), (2, 2, 3, 4), options={"rhs_dilation": (2, 1)}),
    "transposed": Case((4, 3, 3, 3), (3, 2, 3, 4), options={"lhs_dilation": (2, 2), "padding": ((1, 2), (0, 1))}),
    "groups": Case((4, 5, 6, 4), (3, 2, 2, 6), options={"feature_group_count": 2}),
    "depthwise, causal": Case(
        (4, 6, 3), (3, 1, 3), ("NWC", "WIO", "NWC"), {"feature_group_count": 3, "padding": ((2, 0),)}
    ),
    "groups of the batch": Case((4, 5, 6, 3), (3, 2, 3, 4), options={"batch_group_count": 2}),
    "bfloat16": Case((4, 5, 6, 3), (3, 2, 3, 4), dtype=jnp.bfloat16),
    "complex": Case((4, 5, 6, 3), (3, 2, 3, 4), dtype=jnp.complex64),
}


def rewritten(fun, *args):
    """A function as it stands in a loop."""
    return convolutions.fast_in_loops(fun, jax.make_jaxpr(fun)(*args).eqns)


def as_it_is(fun, *args):
    return fun


def assert_same(of, *args, rtol=1e-5):
    """Compares what `of` computes of a function that is rewritten with what it computes of the function as it is."""
    got, wanted = jax.jit(lambda *args: (of(rewritten, *args), of(as_it_is, *args)))(*args)
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.complex128) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


def forms(fun, *args, platform="cpu"):
    """The forms of all convolutions of a program."""
    text = jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    found = set(re.findall(r"dim_numbers = (\[.*?\]x\[.*?\]->\[.*?\])", text))
    assert found
    return found


def gradients(of, case):
    """The value and the gradients of a sum of cubes, for `assert_same` and `forms`."""

    def fun(*arrays):
        convolved = of(lambda *arrays: case(*arrays))(*arrays)
        return jnp.sum(jnp.abs(convolved).astype(jnp.float32) ** 3)

    return lambda wrap, *args: jax.value_and_grad(wrap(fun, *args), (0, 1))(*args)


def itself(fun):
    return fun


EACH_RUN = ["two dimensions", "space between", "groups", "groups of the batch", "bfloat16", "complex"]


@pytest.mark.sweep
@pytest.mark.parametrize("name", tiers.sweep(CASES, but=EACH_RUN))
def test_value_and_gradients_are_those_of_jax(name):
    case = CASES[name]
    assert_same(gradients(itself, case), *case.arrays(), rtol=2e-2 if case.dtype == jnp.bfloat16 else 1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_of_the_form_of_the_kernel(name):
    """Forward and backward: those that JAX makes are not."""
    case = CASES[name]
    fun, args = gradients(itself, case), case.arrays()
    assert forms(functools.partial(fun, rewritten), *args) <= CANONICAL
    assert not forms(functools.partial(fun, as_it_is), *args) <= CANONICAL


def scanned(fun):
    return lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(fun(x, w)), None), x, jnp.stack([w, -w]))[0]


def of_a_while(fun):
    """JAX does not differentiate one whose number of iterations is traced."""

    def run(x, w):
        turn = lambda _, h: jnp.tanh(fun(h, jax.lax.stop_gradient(w)))
        return fun(x * jax.lax.fori_loop(0, jnp.int32(w.sum() > 0) + 1, turn, jax.lax.stop_gradient(x)), w)

    return run


def in_a_branch(fun):
    return lambda x, w: jax.lax.cond(w.sum() > 100, lambda x, w: x, fun, x, w)


def with_jvp(fun):
    """A function with a derivative of the user's: twice its own."""
    called = jax.custom_jvp(lambda x, w, number: fun(x, w) * number)

    @called.defjvp
    def _(primals, tangents):
        out, tangent = jax.jvp(lambda x, w: fun(x, w) * primals[2], primals[:2], tangents[:2])
        return out, 2 * tangent

    return lambda x, w: called(x, w, jnp.arange(3)[2])  # an integer has no tangent


def with_vjp(fun):
    called = jax.custom_vjp(lambda x, w, number: (fun(x, w) * number, number))

    def backward(residuals, cotangents):
        x, w, number = residuals
        grads = jax.vjp(lambda x, w: fun(x, w) * number, x, w)[1](jnp.clip(cotangents[0], -1, 1))
        return (*grads, None)

    called.defvjp(lambda *args: (called(*args), args), backward)
    return lambda x, w: called(x, w, jnp.arange(3)[2])[0]


def twice(fun):
    """One function that is called twice: it is one in the program, too."""
    jitted = jax.jit(lambda x, w: jnp.tanh(fun(x, w)))
    return lambda x, w: jitted(jitted(x, w), w)


def batched(fun):
    return lambda x, w: jax.vmap(fun, (None, 0))(x, jnp.stack([w, -w, 2 * w]))


NESTS = {
    "jit": jax.jit,
    "two calls": twice,
    "checkpoint": jax.checkpoint,
    "scan": scanned,
    "checkpoint in a scan": lambda fun: scanned(jax.checkpoint(fun)),
    "while": of_a_while,
    "branch": in_a_branch,
    "vmap": batched,
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "custom_vjp in a scan": lambda fun: scanned(with_vjp(fun)),
    "custom_jvp in a checkpoint": lambda fun: jax.checkpoint(with_jvp(fun)),
}
SQUARE = Case((2, 3, 4, 3), (3, 3, 3, 3))


@pytest.mark.parametrize("name", tiers.sweep(NESTS, but=["jit", "checkpoint", "vmap", "custom_jvp", "custom_vjp"]))
def test_programs_inside_are_rewritten_too(name):
    fun = gradients(NESTS[name], SQUARE)
    assert_same(fun, *SQUARE.arrays())
    assert forms(functools.partial(fun, rewritten), *SQUARE.arrays()) <= CANONICAL


def test_a_function_that_is_called_twice_is_in_the_program_once():
    fun = jax.jit(rewritten(twice(SQUARE), *SQUARE.arrays()))
    assert fun.lower(*SQUARE.arrays()).as_text().count("stablehlo.convolution") == 1


def forward(fun, x, w):
    return jax.jvp(fun, (x, w), (w.sum() + x, 2 * w))


def product_with_hessian(fun, x, w):
    """Forward over reverse."""
    return jax.jvp(jax.grad(fun, 1), (x, w), (w.sum() + x, 2 * w))


def gradient_of_a_gradient(fun, x, w):
    return jax.grad(lambda w: jnp.sum(jax.grad(fun)(x, w) ** 2))(w)


def two_at_once(fun, x, w):
    return jax.vmap(jax.grad(fun, (0, 1)), (0, None))(jnp.stack([x, 2 * x]), w)


def each_with_its_own(fun, x, w):
    return jax.vmap(jax.grad(fun, (0, 1)))(jnp.stack([x, 2 * x]), jnp.stack([w, -w]))


WAYS = [forward, product_with_hessian, gradient_of_a_gradient, two_at_once, each_with_its_own]


@pytest.mark.parametrize(
    "way", tiers.sweep(WAYS, but=[forward, product_with_hessian, two_at_once]), ids=lambda way: way.__name__
)
def test_whatever_is_made_of_it(way):
    fun = lambda x, w: jnp.sum(jnp.tanh(SQUARE(x, w)) ** 2)
    of = lambda wrap, *args: way(wrap(fun, *args), *args)
    assert_same(of, *SQUARE.arrays())
    assert forms(functools.partial(of, rewritten), *SQUARE.arrays()) <= CANONICAL


# Where a loss stands in a loop, or in a branch


def features(params, batch):
    h = jax.nn.relu(SQUARE(batch["x"], params["a"]))
    return SQUARE(h, params["b"]).mean((1, 2))


def loss(params, batch):
    return jnp.mean((features(params, batch) - batch["y"]) ** 2)


def normalised(params, batch):
    h = SQUARE(batch["x"], params["a"])
    h = jax.nn.relu((h - h.mean((0, 1, 2), keepdims=True)) / (h.std((0, 1, 2), keepdims=True) + 1e-3))
    return jnp.mean((SQUARE(h, params["b"]).mean((1, 2)) - batch["y"]) ** 2)


def by_pairs(params, batch):
    f = optax_accum.microbatched(lambda params, x: features(params, {"x": x}), 2)(params, batch["x"])
    return jnp.mean((f @ f.T - batch["y"] @ batch["y"].T) ** 2)


def step(params, batch, **options):
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
    run = optax_accum.value_and_apply_gradients(loss, tx, **options)
    return jax.lax.fori_loop(0, 2, lambda _, carry: run(*carry, batch)[1:], (params, tx.init(params)))[0]


def weigh(batch):
    return batch["y"].sum()


grad = functools.partial(optax_accum.value_and_grad, num_microbatches=2)
PATHS = {
    "value_and_grad": grad(loss),
    "level by level": grad(normalised),
    "a remainder": optax_accum.value_and_grad(loss, microbatch_size=3),
    "reduce_microbatches": optax_accum.reduce_microbatches(jax.value_and_grad(loss), 2),
    "reduce_microbatches, weighed": optax_accum.reduce_microbatches(jax.value_and_grad(loss), 2, weight_fn=weigh),
    "gradient of reduce_microbatches": jax.value_and_grad(optax_accum.reduce_microbatches(loss, 2)),
    "microbatched": jax.value_and_grad(optax_accum.microbatched(loss, 2)),
    "microbatched, coupled": jax.value_and_grad(optax_accum.microbatched(normalised, 2)),
    "microbatched, in a loss": jax.value_and_grad(by_pairs),
    "value_and_apply_gradients": step,
    "value_and_apply_gradients, weighed": functools.partial(step, weight_fn=weigh),
    "twice": jax.hessian(lambda params, batch: grad(loss)(params, batch)[0]),
}
PARAMS = {"a": SQUARE.arrays()[1], "b": 0.1 * SQUARE.arrays()[1]}
BATCH = {"x": jnp.arange(4 * 36.0).reshape(4, 3, 4, 3) / 144, "y": jnp.arange(12.0).reshape(4, 3)}


@pytest.mark.sweep
@pytest.mark.parametrize("name", PATHS)
def test_the_loss_of_each_path_is_rewritten(name):
    assert forms(PATHS[name], PARAMS, BATCH) <= CANONICAL


@pytest.mark.sweep
@pytest.mark.parametrize("name", tiers.sweep(PATHS, but=["reduce_microbatches", "value_and_apply_gradients"]))
def test_for_an_accelerator_nothing_changes(name, monkeypatch):
    def program():
        text = jax.jit(PATHS[name]).trace(PARAMS, BATCH).lower(lowering_platforms=("tpu",)).as_text()
        names = list(dict.fromkeys(re.findall(r"@\w+", text)))  # an old JAX numbers functions otherwise
        return re.sub(r"@\w+", lambda found: f"@{names.index(found[0])}", text)

    with_it = program()
    monkeypatch.setattr(convolutions, "fast_in_loops", as_it_is)
    jax.clear_caches()
    assert program() == with_it


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "axis_type"),
    [("loss", AxisType.Auto), ("with a rule", AxisType.Explicit), ("normalised", AxisType.Explicit)],
    ids=str,
)
def test_over_devices(name, axis_type):
    ruled = with_jvp(lambda x, w: SQUARE(x, w))
    fun = {
        "loss": loss,
        "normalised": normalised,
        "with a rule": lambda params, batch: jnp.mean((ruled(batch["x"], params["a"]).mean((1, 2)) - batch["y"]) ** 2),
    }[name]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:2])
    params, batch = (
        jax.device_put(tree, NamedSharding(mesh, spec)) for tree, spec in ((PARAMS, P()), (BATCH, P("data")))
    )
    over = optax_accum.value_and_grad(fun, 2, devices="data")
    with jax.set_mesh(mesh):
        assert forms(over, params, batch) <= CANONICAL
        got = jax.jit(over)(params, batch)
    wanted = jax.jit(jax.value_and_grad(fun))(PARAMS, BATCH)
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_without_a_convolution_a_loss_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(convolutions, "_rewritten", None)  # who rewrites calls it
    dense = lambda params, batch: jnp.mean((batch["x"].sum((1, 2)) @ params["a"].sum((0, 1)) - batch["y"]) ** 2)
    lowered = jax.jit(optax_accum.value_and_grad(dense, 2)).lower(PARAMS, BATCH)
    assert "stablehlo.convolution" not in lowered.as_text()


def test_outside_jit_there_is_no_loop():
    assert convolutions.fast_in_loops(loss, jax.make_jaxpr(loss)(PARAMS, BATCH).eqns) is loss


@pytest.mark.sweep
def test_in_a_loop_xla_still_leaves_a_gradient_of_a_convolution_as_it_is():
    """What `convolutions` is for: in the entry computation the compiler brings it to the form of the kernel itself."""

    def labels(fun):
        text = programs.compiled(jax.jit(fun).lower(PARAMS, BATCH)).as_text()
        return set(re.findall(r"dim_labels=(\w+->\w+)", text))

    in_a_loop = lambda params, batch: jax.lax.map(
        lambda b: jax.grad(loss)(params, jax.tree.map(lambda x: x[None], b)), batch
    )
    assert labels(jax.grad(loss)) == labels(PATHS["value_and_grad"]) == {"b01f_01io->b01f"}
    assert labels(in_a_loop) > {"b01f_01io->b01f"}
