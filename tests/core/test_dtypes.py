"""Dtypes: gradients are cast up once, sums do not stall, and wrapping changes no dtype."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from tests import programs
from tests.engine import holds
from tests.pairs import every_pair

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64]
INNERS = {"sgd": optax.sgd(0.1, momentum=0.9), "adamw": optax.adamw(0.1), "rmsprop": optax.rmsprop(0.1)}


def gradient(dtype, seed, shape=(16,)):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) + (1j * rng.normal(size=shape) if jnp.issubdtype(dtype, complex) else 0)
    return jnp.asarray(values, dtype)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("dtype", "inner", "emit_dtype", "every"), every_pair(DTYPES, INNERS, [None, "gradient", jnp.float32], [1, 3])
)
def test_wrapping_changes_no_dtype(dtype, inner, emit_dtype, every):
    inner = INNERS[inner]
    params, grads = gradient(dtype, 0), gradient(dtype, 1)
    tx = optax_accum.accumulate_gradients(inner, every, emit_dtype=emit_dtype)
    expected, _expected_state = jax.eval_shape(inner.update, grads, inner.init(params), params)
    state = tx.init(params)
    dtypes = lambda tree: jax.tree.map(lambda leaf: leaf.dtype, tree)
    for _ in range(every):
        updates, state = jax.eval_shape(tx.update, grads, state, params)
    assert updates.dtype == expected.dtype
    assert dtypes(state.inner_opt_state) == dtypes(inner.init(params))
    new, _ = jax.eval_shape(lambda *a: optax_accum.apply_gradients(tx, *a), grads, tx.init(params), params)
    assert new.dtype == dtype


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("dtype", "named", "expected"),
    [
        (jnp.bfloat16, None, jnp.float32),
        (jnp.float16, None, jnp.float32),
        (jnp.float8_e4m3fn, None, jnp.float32),
        (jnp.float32, None, jnp.float32),
        (jnp.float64, None, jnp.float64),
        (jnp.complex64, None, jnp.complex64),
        (jnp.complex128, None, jnp.complex128),
        (jnp.float32, jnp.bfloat16, jnp.bfloat16),
        (jnp.complex64, jnp.bfloat16, jnp.complex64),
        (jnp.complex64, jnp.float64, jnp.complex128),
    ],
)
def test_the_dtype_of_the_accumulator(dtype, named, expected):
    state = optax_accum.accumulate_gradients(optax.identity(), 2, accumulator_dtype=named).init(jnp.zeros(2, dtype))
    assert state.acc_grads.dtype == expected


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_many(dtype):
    """64 micro-batches against the mean in float64; `emit_dtype=None` leaves it at float32's rounding."""
    grads = [gradient(dtype, seed) for seed in range(64)]
    tx = optax_accum.accumulate_gradients(optax.identity(), 64)
    state, update = tx.init(grads[0]), jax.jit(tx.update)
    for grad in grads[:-1]:
        _, state = update(grad, state)
    kind = np.complex128 if dtype == jnp.complex64 else np.float64
    seen = []
    spy = optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (seen.append(g) or g, s))
    optax_accum.accumulate_gradients(spy, 64).update(grads[-1], state._replace(inner_opt_state=()))
    np.testing.assert_allclose(seen[0], np.mean([np.asarray(g, kind) for g in grads], 0), rtol=1e-5, atol=1e-6)


def test_bfloat16_sums_do_not_stall():
    """512 x 0.01 in bfloat16 stops at 4: half of every later addend is rounded away."""
    small = jnp.full(4, 0.01, jnp.bfloat16)
    tx = optax_accum.accumulate_gradients(optax.identity(), 512, reduction="sum", emit_dtype="gradient")
    narrow = optax_accum.accumulate_gradients(
        optax.identity(), 512, reduction="sum", emit_dtype="gradient", accumulator_dtype=jnp.bfloat16
    )

    def run(tx):
        def step(state, _):
            updates, state = tx.update(small, state)
            return state, updates

        return jax.lax.scan(step, tx.init(small), None, length=512)[1][-1]

    np.testing.assert_allclose(run(tx).astype(float), 512 * small.astype(float))
    np.testing.assert_allclose(run(narrow).astype(float), 4.0)  # and the comparison compares something


def test_a_narrow_accumulator_still_multiplies_in_float32():
    """A weight of 259 tokens would be 260 in bfloat16, and 1.5 times that 390."""
    grads = jnp.full(4, 1.5, jnp.float32)
    tx = optax_accum.accumulate_gradients(optax.identity(), 2, accumulator_dtype=jnp.bfloat16)
    state = tx.init(grads)
    assert state.acc_grads.dtype == jnp.bfloat16
    _, state = tx.update(grads, state, weight=jnp.float32(259))
    np.testing.assert_array_equal(state.acc_grads.astype(float), 388)  # 388.5


def test_complex_gradients_keep_their_imaginary_part():
    grads = [jnp.array([1 + 2j, -3j]), jnp.array([3 - 4j, 1j])]
    tx = optax_accum.accumulate_gradients(optax.identity(), 2)
    state = tx.init(grads[0])
    for grad, weight in zip(grads, (1.0, 3.0), strict=True):
        updates, state = tx.update(grad, state, weight=jnp.float32(weight))
    np.testing.assert_allclose(updates, (grads[0] + 3 * grads[1]) / 4)


@pytest.mark.sweep
@pytest.mark.usefixtures("x64")
def test_float64_and_complex128():
    params = {"f": jnp.array([1.0 + 1e-12]), "c": jnp.array([1e-12 + 1j])}
    tx = optax_accum.accumulate_gradients(optax.adamw(0.1), 3)
    update, state = jax.jit(tx.update), tx.init(params)
    types = jax.tree.map(jax.typeof, state)
    for weight in (1, 2.0, jnp.float32(3)):
        updates, state = update(params, state, params, weight=weight, value=jnp.float32(1))
        assert jax.tree.map(jax.typeof, state) == types
    assert (state.acc_grads["f"].dtype, state.acc_grads["c"].dtype) == (jnp.float64, jnp.complex128)
    np.testing.assert_allclose(state.acc_grads["f"] / 6, params["f"], rtol=1e-15)
    expected, _ = optax.adamw(0.1).update(params, optax.adamw(0.1).init(params), params)
    chex.assert_trees_all_close(updates, expected, rtol=1e-12)
    assert optax_accum.accumulate_gradients(optax.sgd(0.1), 2, accumulator_dtype=jnp.float64).init(params)


@pytest.mark.usefixtures("x64")
def test_a_float32_value_stays_float32_under_x64():
    inner = optax.GradientTransformationExtraArgs(
        lambda p: (), lambda g, s, p=None, *, value: (jax.tree.map(lambda x: x * value, g), s)
    )
    tx = optax_accum.accumulate_gradients(inner, 2)
    grads = jnp.ones(2, jnp.float32)
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads), value=jnp.float32(1))
    assert updates.dtype == jnp.float32


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"statistics": True}, {"nonfinite": "skip"}], ids=str)
def test_a_state_of_32_bits_goes_on_under_x64_and_back(options):
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 2, **options)
    params = jnp.ones(2)
    step = optax_accum.value_and_apply_gradients(lambda w, x: jnp.mean((x * w) ** 2), tx)
    states = [tx.init(params)]
    for wide in (False, True, False):
        with programs.enable_x64() if wide else contextlib.nullcontext():
            args = {"value": jnp.float32(1), "weight": jnp.ones([])}
            states.append(tx.update(params, states[-1], params, **args)[1])
            one = lambda state, grads, args=args: (tx.update(grads, state, grads, **args)[1], ())
            scan = lambda state, one=one: jax.lax.scan(one, state, jnp.stack([params] * 3))[0]
            states.append(
                jax.eval_shape(lambda *given, args=args: tx.update(*given, **args)[1], params, states[-1], params)
            )
            states.append(jax.eval_shape(lambda *given: step(*given, weight=3.0)[2], params, states[-1], params))
            states.append(jax.eval_shape(scan, states[-1]))
            states.append(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), states[-1]))
    dtypes = [[leaf.dtype for leaf in jax.tree.leaves(state)] for state in states]
    assert all(found == dtypes[0] for found in dtypes)


@pytest.mark.usefixtures("strict_dtypes")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"accumulator_dtype": "bfloat16"}, {"nonfinite": "skip"}], ids=str)
def test_our_own_arithmetic_promotes_nothing(dtype, options):
    tx = optax_accum.accumulate_gradients(optax.identity(), 2, **options)
    grads, given = gradient(dtype, 0), {"value": jnp.float32(1), "flush": jnp.array(True)}
    for weight in (1.0, jnp.float32(2), jnp.int32(3)):
        updates, _ = jax.eval_shape(tx.update, grads, tx.init(grads), grads, weight=weight, **given)
        assert updates.dtype == dtype


@pytest.mark.usefixtures("strict_dtypes")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_nor_does_it_where_parameters_are_narrow(dtype):
    """On every path of a loss."""
    w, x = jnp.ones((3, 2), dtype), jnp.ones((8, 3), dtype)
    loss = lambda w, x: jnp.mean(jnp.square((x @ w).astype(jnp.float32)))
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 2)
    grad = jax.eval_shape(optax_accum.value_and_grad(loss, 3), w, x)[1]
    step = optax_accum.value_and_apply_gradients(loss, tx)
    assert (grad.dtype, jax.eval_shape(step, w, tx.init(w), x)[1].dtype) == (dtype, dtype)


@pytest.mark.parametrize(
    ("dtype", "other", "expected"),
    [
        (jnp.float32, jnp.bfloat16, True),
        (jnp.float16, jnp.bfloat16, False),
        (jnp.bfloat16, jnp.float16, False),
        (jnp.float32, jnp.float8_e4m3fn, True),
        (jnp.float32, jnp.complex64, False),
        (jnp.complex64, jnp.float32, True),
    ],
)
def test_which_dtype_has_the_numbers_of_another(dtype, other, expected):
    assert holds(dtype, other) is expected


def test_mixed_dtypes_in_one_tree():
    params = {"a": gradient(jnp.bfloat16, 0), "b": gradient(jnp.float32, 1), "c": gradient(jnp.complex64, 2)}
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 2)
    step, state = jax.jit(lambda *a: optax_accum.apply_gradients(tx, *a)), tx.init(params)
    new = params
    for _ in range(2):
        new, state = step(params, state, new)
    assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, params)
    assert [x.dtype for x in jax.tree.leaves(state.acc_grads)] == [jnp.float32, jnp.float32, jnp.complex64]


def test_bfloat16_gradients_over_float32_parameters():
    params, grads = gradient(jnp.float32, 0), gradient(jnp.bfloat16, 1)
    tx = optax_accum.accumulate_gradients(optax.adamw(0.1), 2)
    updates, _ = tx.update(grads, tx.init(params), params, flush=True)
    expected, _ = optax.adamw(0.1).update(grads, optax.adamw(0.1).init(params), params)
    assert updates.dtype == expected.dtype


F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
TREE = {"a": {"w": jnp.ones(3, jnp.bfloat16), "none": None}, "b": [jnp.ones(2, jnp.bfloat16), jnp.ones(())]}


@pytest.mark.parametrize(
    ("named", "expected", "returned"),
    [
        ({"a": jnp.bfloat16, "b": None}, [BF16, F32, F32], [BF16, BF16, F32]),
        ({"a": None, "b": ["bfloat16", "float16"]}, [F32, BF16, F16], [BF16, BF16, F16]),
        ({"a": {"w": None, "none": None}, "b": jnp.float32}, [F32, F32, F32], [BF16, F32, F32]),
    ],
    ids=["branch", "leaves", "to the leaf"],
)
def test_a_prefix_of_accumulator_dtypes(named, expected, returned):
    """The same accumulators across calls and within one; what is not named comes back in the parameter's dtype."""
    state = optax_accum.accumulate_gradients(optax.sgd(0.1), 2, accumulator_dtype=named).init(TREE)
    assert [leaf.dtype for leaf in jax.tree.leaves(state.acc_grads)] == expected
    loss = lambda tree, x: jnp.mean(x) * sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(tree))
    _, grads = optax_accum.value_and_grad(loss, num_microbatches=2, accumulator_dtype=named)(TREE, jnp.arange(4.0))
    assert [leaf.dtype for leaf in jax.tree.leaves(grads)] == returned
    assert [float(jnp.ravel(leaf)[0]) for leaf in jax.tree.leaves(grads)] == [1.5, 1.5, 1.5]


def test_accumulators_that_stall_are_those_that_were_named():
    """512 times 5.12, of which a bfloat16 sum loses a tenth and more."""
    loss = lambda tree, x: sum(jnp.mean((leaf.astype(jnp.float32) * x) ** 2) for leaf in tree.values())
    params = {"narrow": jnp.bfloat16(1), "wide": jnp.bfloat16(1)}
    options = {"num_microbatches": 512, "accumulator_dtype": {"narrow": jnp.bfloat16, "wide": None}}
    _, grads = jax.jit(optax_accum.value_and_grad(loss, **options))(params, jnp.full(512, 1.6))
    assert grads["wide"] == 5.125  # 5.12 in bfloat16
    assert abs(float(grads["narrow"]) / 5.12 - 1) > 0.1


@pytest.mark.parametrize("narrow", ["a", "b"])
def test_of_parameters_with_one_gradient_none_is_added_in_the_dtype_of_another(narrow):
    """It is added once, in the widest: of two dtypes, that of the last leaf was taken."""
    loss = lambda tree, x: jnp.mean(jnp.square((tree["a"] + tree["b"]) * x))
    options = {"num_microbatches": 512, "accumulator_dtype": {"a": None, "b": None, narrow: jnp.bfloat16}}
    params = {"a": jnp.float32(0.5), "b": jnp.float32(0.5)}
    _, grads = jax.jit(optax_accum.value_and_grad(loss, **options))(params, jnp.full(512, 1.6))
    wide = grads["b" if narrow == "a" else "a"]
    assert (wide.dtype, grads[narrow].dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(wide, 2 * 1.6**2, rtol=1e-5)


def test_several_arguments_have_dtypes_of_their_own():
    loss = lambda a, x, b: jnp.mean(x) * (a + b).astype(jnp.float32)
    options = {"num_microbatches": 2, "argnums": (0, 2), "accumulator_dtype": (jnp.float32, None)}
    _, grads = optax_accum.value_and_grad(loss, **options)(jnp.bfloat16(1), jnp.arange(4.0), jnp.bfloat16(1))
    assert [grad.dtype for grad in grads] == [jnp.float32, jnp.bfloat16]


@pytest.mark.parametrize("named", [{"a": jnp.float32}, [jnp.float32], {"a": {"v": None}, "b": None}], ids=str)
def test_accumulator_dtypes_of_another_tree(named):
    message = "accumulator_dtype must be a prefix of the tree of the parameters.*Name one dtype"
    with pytest.raises(ValueError, match=message):
        optax_accum.accumulate_gradients(optax.sgd(0.1), 2, accumulator_dtype=named).init(TREE)
    grad = optax_accum.value_and_grad(lambda tree, x: x.mean(), num_microbatches=2, accumulator_dtype=named)
    with pytest.raises(ValueError, match=message):
        grad(TREE, jnp.arange(4.0))


def test_a_leaf_of_accumulator_dtypes_that_is_no_float():
    with pytest.raises(TypeError, match="accumulator_dtype must be a real floating.*int32"):
        optax_accum.accumulate_gradients(optax.sgd(0.1), 2, accumulator_dtype={"a": None, "b": jnp.int32})
