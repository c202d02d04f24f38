"""Losses with rules, loops, branches and shapes of every kind: any of them is computed as for the whole batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_accum
from tests.rows.against import ROWS, WAYS, assert_whole, couplings, farthest, values, whole
from tests.tiers import sweep

LOSSES, EACH = {}, []


def loss(fun):
    """Adds a loss to those that are compared in each run."""
    EACH.append(fun.__name__)
    return another(fun)


def another(fun):
    """Adds one whose rule, loop or sum over rows is that of another, to the sweep."""
    LOSSES[fun.__name__] = fun
    return fun


def dense(p, b):
    """Hidden states [n, 4]."""
    return jnp.tanh(b["x"] @ p["w"] + p["b"][None])


def masked(rows, b):
    """The mean of rows that count."""
    return jnp.sum(rows * b["mask"]) / jnp.sum(b["mask"])


def log_likelihood(p, b, hidden):
    """Of labels [n]."""
    return jnp.take_along_axis(jax.nn.log_softmax(hidden @ p["out"]), b["label"][:, None], axis=-1)[:, 0]


# Rules of the user's


@jax.custom_jvp
def cube(x):
    return x**3


@cube.defjvp
def _(primals, tangents):
    return cube(primals[0]), 3.5 * primals[0] ** 2 * tangents[0]  # as nobody would derive it


@jax.custom_jvp
def scaled_by(x, count):
    return x * count[:, None]


@scaled_by.defjvp
def _(primals, tangents):
    x, count = primals
    return scaled_by(x, count), 2 * count[:, None] * tangents[0]


@another
def custom_jvp(p, b):
    return masked(jnp.sum(cube(dense(p, b)), 1), b)


@another
def custom_jvp_of_integers(p, b):
    return masked(jnp.sum(scaled_by(dense(p, b), b["label"]), 1), b)


@another
def custom_jvp_over_rows(p, b):
    @jax.custom_jvp
    def centred(x):
        return x - jnp.mean(x, axis=0, keepdims=True)

    centred.defjvp(lambda primals, tangents: (centred(*primals), 2 * centred(*tangents)))
    return jnp.mean(centred(dense(p, b)) ** 3)


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, ct: (ct @ kept[1].T, 1.5 * (kept[0].T @ ct)))


@another
def custom_vjp(p, b):
    return masked(jnp.sum(jnp.tanh(product(b["x"], p["w"])), 1), b)


@jax.custom_vjp
def clips_parameters(x, w):
    return x @ w


clips_parameters.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda kept, ct: (ct @ kept[1].T, jnp.clip(kept[0].T @ ct, -0.05, 0.05))
)


@another
def custom_vjp_that_clips_parameters(p, b):
    return masked(jnp.sum(jnp.tanh(clips_parameters(dense(p, b), p["w"])), 1), b)


@jax.custom_vjp
def clips_rows(x):
    return x


clips_rows.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.03, 0.03),))


@another
def custom_vjp_that_clips_rows(p, b):
    return masked(jnp.sum(clips_rows(dense(p, b)) ** 2, 1), b)


@another
def custom_vjp_that_clips_rows_in_a_ratio(p, b):
    rows = jnp.sum(clips_rows(dense(p, b)) ** 2, 1)
    return jnp.sum(rows) / jnp.sum(jax.lax.stop_gradient(rows) > 0.5)


@jax.custom_vjp
def injects(x, term):
    return x


injects.defvjp(lambda x, term: (x, term), lambda term, ct: (ct, jnp.ones_like(term)))


@another
def custom_vjp_that_injects_a_term(p, b):
    balance = jnp.sum(jnp.mean(jax.nn.softmax(dense(p, b)), 0) ** 2)
    return masked(jnp.sum(injects(dense(p, b), balance), 1), b)


@another
def custom_vjp_that_injects_a_term_of_each_row(p, b):
    hidden = dense(p, b)
    return masked(jnp.sum(injects(hidden, jnp.sum(hidden**2, 1)), 1), b)


@another
def custom_vjp_that_injects_a_term_of_each_row_in_a_ratio(p, b):
    hidden = dense(p, b)
    rows = jnp.sum(injects(hidden, jnp.sum(hidden**2, 1)) ** 2, 1)
    return jnp.sum(rows) / jnp.sum(rows > 1)


@jax.custom_vjp
def spreads(x):
    return x


spreads.defvjp(lambda x: (x, None), lambda _, ct: (jnp.broadcast_to(jnp.sum(ct, 0), ct.shape),))


@another
def custom_vjp_that_spreads_a_sum(p, b):
    return masked(jnp.sum(spreads(dense(p, b)) ** 2, 1), b)


@jax.custom_vjp
def rounds(x, w):
    return x @ w


rounds.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, ct: (ct @ kept[1].T, (kept[0].T @ ct * 100).astype(jnp.int32).astype(ct.dtype)),
)


@loss
def custom_vjp_that_rounds_a_sum(p, b):
    return masked(jnp.sum(rounds(dense(p, b), p["w"]), 1), b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x, factor):
    return factor * x


scaled.defvjp(lambda x, factor: (factor * x, x), lambda factor, x, ct: (2 * factor * ct * x,))


@another
def custom_vjp_with_a_static_argument(p, b):
    return masked(jnp.sum(scaled(dense(p, b), 3.0), 1), b)


@jax.custom_vjp
def looked_up(table, index):
    return table[index]


looked_up.defvjp(
    lambda table, index: (table[index], (index, table)),
    lambda kept, ct: (2 * jnp.zeros_like(kept[1]).at[kept[0]].add(ct), None),
)


@loss
def custom_vjp_of_integers(p, b):
    return masked(jnp.sum(jnp.tanh(looked_up(p["table"], b["label"])), 1), b)


# Loops and branches


def layer(hidden, p):
    return hidden + jnp.tanh(hidden @ p["w"]) * p["scale"][None]


@another
def scan_over_layers(p, b):
    hidden, _ = jax.lax.scan(lambda h, w: (layer(h, w), None), b["x"], p["layers"])
    return -masked(log_likelihood(p, b, hidden), b)


@another
def scan_over_layers_with_rows_in_outputs(p, b):
    hidden, all_of_them = jax.lax.scan(lambda h, w: (layer(h, w), h), b["x"], p["layers"])
    return masked(jnp.sum(hidden, 1), b) + jnp.mean(all_of_them**2)


@another
def scan_over_layers_with_nothing_of_rows_carried(p, b):
    def body(number, w):
        return 0.9 * number, jnp.tanh(b["x"] @ w["w"]) * number

    number, all_of_them = jax.lax.scan(body, jnp.ones([], p["b"].dtype), p["layers"])
    return jnp.mean(all_of_them**2) * number


@another
def scan_that_adds_up_rows(p, b):
    def body(carry, w):
        h, total = carry
        h = layer(h, w)
        return (h, total + jnp.mean(h**2)), jnp.max(jax.lax.stop_gradient(h))

    (hidden, total), largest = jax.lax.scan(body, (b["x"], jnp.zeros([], p["b"].dtype)), p["layers"])
    return -masked(log_likelihood(p, b, hidden), b) + total / 3 + jnp.sum(largest) * total


@another
def scan_over_layers_in_checkpoints(p, b):
    body = jax.checkpoint(lambda h, w: (layer(h, w), None), policy=jax.checkpoint_policies.dots_saveable)
    hidden, _ = jax.lax.scan(body, p["table"][b["t"]].reshape(-1, 4), p["layers"])
    return jnp.mean(jnp.reshape(hidden**2, (-1, 6, 4)).mean((1, 2)) * b["mask"])


@loss
def map_over_rows(p, b):
    return jnp.mean(jax.lax.map(lambda x: jnp.tanh(x @ p["w"]).sum(), b["x"]) ** 2)


@another
def map_over_blocks_of_rows(p, b):
    return jnp.mean(jax.lax.map(lambda x: jnp.tanh(x @ p["w"]).sum(), b["x"], batch_size=4) ** 2)


@another
def map_over_blocks_of_rows_with_a_rest(p, b):
    return jnp.mean(jax.lax.map(lambda x: jnp.tanh(x @ p["w"]).sum(), b["x"], batch_size=5) ** 2)


@another
def scan_over_rows_that_carries(p, b):
    def body(carry, x):
        carry = jnp.tanh(carry + x @ p["w"])
        return carry, carry

    last, all_of_them = jax.lax.scan(body, p["b"], b["x"])
    return jnp.mean(all_of_them**2) + jnp.sum(last)


@another
def fori_loop(p, b):
    hidden = jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["w"]) * (1 + i), b["x"])
    return masked(jnp.sum(hidden, 1), b)


@another
def fori_loop_in_a_checkpoint(p, b):
    @jax.checkpoint
    def block(p, x):
        return jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["w"]) * (1 + i), x)

    return masked(jnp.sum(block(p, b["x"]), 1), b)


@another
def while_that_nobody_differentiates(p, b):
    start = jax.lax.stop_gradient(dense(p, b))
    _, found = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sqrt(jnp.abs(c[1]) + 1)), (0, start))
    return masked(jnp.sum(found * dense(p, b), 1), b)


@another
def while_that_rows_end(p, b):
    start = jax.lax.stop_gradient(dense(p, b))
    found = jax.lax.while_loop(lambda h: jnp.sum(jnp.abs(h)) > 0.1, lambda h: h / 2, start)
    return masked(jnp.sum(found * dense(p, b), 1), b) * 100


@another
def while_of_each_row(p, b):
    start = jax.lax.stop_gradient(dense(p, b)[:, 0])
    halved = jax.vmap(lambda h: jax.lax.while_loop(lambda h: jnp.abs(h) > 0.1, lambda h: h / 2, h))
    return masked(halved(start) * dense(p, b)[:, 1], b)


@another
def switch_with_a_scalar(p, b):
    index = jnp.argmax(p["b"])
    branches = [jnp.sin, jnp.cos, lambda h: h @ p["w"], lambda h: h - jnp.mean(h, 1, keepdims=True)]
    return masked(jnp.sum(jax.lax.switch(index, branches, dense(p, b)), 1), b)


@another
def cond_that_takes_rows_together(p, b):
    hidden = dense(p, b)
    return jnp.mean(jax.lax.cond(jnp.mean(hidden) > 0, lambda h: h - jnp.mean(h, 0)[None], lambda h: h**2, hidden) ** 2)


@another
def cond_of_each_row(p, b):
    rule = lambda h, y: jax.lax.cond(y > 0, jnp.sin, jnp.cos, h)
    return masked(jnp.sum(jax.vmap(rule)(dense(p, b), b["y"]), 1), b)


@another
def a_jit_with_shardings(p, b):
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    inner = jax.jit(lambda h: jnp.tanh(h @ p["w"]), in_shardings=there, out_shardings=there)
    return masked(jnp.sum(inner(dense(p, b)), 1), b)


# Shapes


@another
def tokens_first_merged_with_rows(p, b):
    tokens = b["t"].T.reshape(-1)
    hidden = jnp.tanh(p["table"][tokens] @ p["w"]).reshape(6, -1, 4)
    return masked(jnp.sum(hidden, (0, 2)), b)


@another
def rows_in_groups_inside_a_scan(p, b):
    def body(h, w):
        h = jnp.tanh(h @ w["w"]).reshape(-1, 4, 4)
        return (h - jnp.mean(h, 1, keepdims=True)).reshape(-1, 4), None

    return masked(jnp.sum(jax.lax.scan(body, b["x"], p["layers"])[0], 1), b)


@another
def some_of_the_rows(p, b):
    value = dense(p, b)
    return jnp.mean(value[: len(value) // 2] ** 2) + jnp.mean(value[::4]) + value[0, 0] + value[-1, 1]


@another
def added_to_the_first_half(p, b):
    value = dense(p, b)
    half = value[: len(value) // 2]
    return jnp.mean(value.at[: len(half)].add(half) ** 2)


@another
def starts_that_depend_on_the_rows(p, b):
    wide = jnp.tanh(b["x"] @ jnp.tile(p["w"], (1, 12)))
    start = 2 * len(b["x"]) // 3
    return jnp.mean(jax.lax.slice_in_dim(wide, start, start + 3, axis=1) ** 2) if start + 3 <= 48 else None


@another
def labels_taken_by_position(p, b):
    scores = jax.nn.log_softmax(dense(p, b) @ p["out"])
    return -masked(scores[jnp.arange(len(scores)), b["label"]], b)


@another
def sums_by_segment_that_are_linear(p, b):
    return jnp.sum(jax.ops.segment_sum(dense(p, b), b["label"], 5) * jnp.arange(5.0)[:, None])


@another
def added_to_a_parameter(p, b):
    return jnp.sum(p["table"].at[b["label"]].add(dense(p, b)) * jnp.arange(7.0)[:, None])


@another
def added_to_what_a_parameter_decides(p, b):
    return jnp.sum(jnp.tanh(p["table"]).at[b["label"]].add(dense(p, b)) * jnp.arange(7.0)[:, None])


@another
def added_to_a_parameter_and_squared(p, b):
    return jnp.sum(jnp.tanh(p["table"]).at[b["label"]].add(dense(p, b)) ** 2)


@another
def largest_of_rows_with_ties(p, b):
    x = jnp.concatenate([b["x"][:1]] * 2 + [b["x"][2:]])  # the first two rows are the same
    return jnp.sum(jnp.max(-jnp.abs(x @ p["w"]) * (x[:, :1] != x[0, 0]), axis=0)) + jnp.max(jnp.sum(x @ p["w"], 1))


@another
def nothing_but_parameters(p, b):
    return jnp.sum(p["w"] ** 2)


@another
def flags_over_rows(p, b):
    hidden = dense(p, b)
    flags = jnp.any(hidden > 0.9, 0) * 1.0 + jnp.all(hidden < 0.5, 0)
    return jnp.sum(jnp.mean(hidden, 0) * flags) + jnp.mean(hidden)


@another
def bits_over_rows(p, b):
    bits = jax.lax.reduce(b["label"] + 8, np.int32(-1), jax.lax.bitwise_and, (0,))
    bits += jax.lax.reduce(b["label"], np.int32(0), jax.lax.bitwise_or, (0,))
    return jnp.mean(dense(p, b)) * bits


@another
def bits_of_the_model_over_rows(p, b):
    hidden = dense(p, b)
    labels = jnp.argmax(hidden, 1).astype(jnp.int32)
    bits = jax.lax.reduce(labels + 8, np.int32(-1), jax.lax.bitwise_and, (0,))
    bits += jax.lax.reduce(labels, np.int32(0), jax.lax.bitwise_or, (0,))
    bits += jax.lax.reduce(labels, np.int32(0), jax.lax.bitwise_xor, (0,))
    return jnp.mean(hidden) * bits


@another
def complex_numbers(p, b):
    wave = jnp.fft.fft(jnp.tanh(b["x"] @ p["w"]), axis=-1)
    largest = jax.lax.stop_gradient(jnp.max(wave, axis=0))
    return (
        jnp.mean(jnp.abs(wave) ** 2)
        + jnp.real(jnp.sum(jnp.mean(wave, 0) ** 2))
        + jnp.mean(jnp.real(wave * largest[None]))
    )


@another
def small_integers_over_rows(p, b):
    hidden = dense(p, b)
    count = jnp.sum((hidden > 0).astype(jnp.uint8) * jnp.uint8(30), axis=0, dtype=jnp.uint8)
    return jnp.sum(jnp.mean(hidden, 0) * count) + jnp.max(count)


@pytest.mark.parametrize("name", sweep(LOSSES, but=EACH))
def test_a_loss_is_the_whole_batchs(name, x64):
    """In each run by both functions, in the sweep by one: the next loss by the other. The last micro-batch is smaller."""
    ways = WAYS if name in EACH else WAYS[list(LOSSES).index(name) % 2 :][:1]
    assert_whole(LOSSES[name], *values(dtype=jnp.float64), ways=[(way, 5) for way in ways])


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(LOSSES)[::3])
def test_a_loss_is_the_whole_batchs_by_the_other_function_and_cut_otherwise(name, x64):
    number = list(LOSSES).index(name)
    assert_whole(LOSSES[name], *values(dtype=jnp.float64), ways=[(WAYS[1 - number % 2], (2, ROWS)[number // 2 % 2])])


@pytest.mark.parametrize(
    "name", ["custom_jvp", "custom_vjp", "custom_vjp_that_clips_rows", *sweep(["scan_over_layers"]), "fori_loop"]
)
def test_rules_and_loops_of_each_row_run_row_by_row(name):
    assert whole(LOSSES[name], *values()) == []


def test_a_rectifier_is_one_loop():
    """Its rule calls the function that it is the rule of."""
    assert whole(lambda p, b: jnp.mean(jax.nn.relu(b["x"] @ p["w"])), *values()) == []


def test_a_norm_over_rows_is_three_reductions():
    def loss(p, b):
        h = b["x"] @ p["w"]
        mean = jnp.mean(h, 0)
        return jnp.mean((h - mean[None]) ** 2)

    assert couplings(loss, *values()) == ["reduce_sum", "reduce_sum"]
    assert whole(loss, *values()) == []


@pytest.mark.sweep
def test_derivatives_of_other_kinds():
    """Forward mode, second derivatives, many parameters at once, shapes alone, outside jit."""
    params, batch = values()
    loss = _of_scale
    parts = optax_accum.microbatched(loss, 5)
    w = params["layers"]["scale"]
    for transform in [
        lambda f: jax.jvp(lambda w: f(w, batch), (w,), (w,)),
        lambda f: jax.hessian(f)(w, batch),
        lambda f: jax.vmap(lambda w: f(w, batch))(jnp.stack([w, 2 * w])),
        lambda f: f(w, batch),
    ]:
        want, got = transform(loss), jax.jit(lambda transform=transform: transform(parts))()
        assert farthest(got, want) < 2e-5
    assert jax.eval_shape(parts, w, batch) == jax.eval_shape(loss, w, batch)
    assert farthest(parts(w, batch), loss(w, batch)) < 2e-6


def _of_scale(scale, batch):
    hidden = batch["x"] * scale[0][None]
    return jnp.mean((hidden - jnp.mean(hidden, 0)[None]) ** 3) + jnp.mean(jnp.tanh(hidden) ** 2)


def test_masks_are_the_whole_batchs_bit_for_bit():
    params, batch = values()
    drawn = lambda p, b: jnp.where(jax.random.bernoulli(jax.random.key(3), 0.7, b["x"].shape), b["x"], 0)
    for parts in (2, 5):
        np.testing.assert_array_equal(
            jax.jit(optax_accum.microbatched(drawn, parts))(params, batch), drawn(params, batch)
        )


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_narrow_parameters(dtype):
    """As near to the gradient in float32 as the whole batch's is."""

    def loss(p, b):
        p = jax.tree.map(lambda leaf: leaf.astype(dtype), p)
        hidden = jnp.tanh(p["table"].at[b["label"]].add(b["x"].astype(dtype)) @ p["w"])
        groups = jax.ops.segment_sum(jnp.tanh(b["x"].astype(dtype) @ p["w"]), b["label"], 5)
        return jnp.mean(hidden.astype(jnp.float32) ** 2) + jnp.mean(groups.astype(jnp.float32) ** 2)

    assert_whole(loss, *values(), tolerance=5e-2)


@jax.custom_vjp
def clips_cheaply(x):
    return x * 1.0


clips_cheaply.defvjp(lambda x: (x * 1.0, None), lambda _, ct: (jnp.clip(ct, -1e-3, 1e-3),))


@pytest.mark.parametrize(("rule", "recompute"), [(clips_cheaply, 0.0), (clips_rows, 4.0)])
def test_a_rule_that_is_not_linear_is_given_the_whole_cotangent(rule, recompute):
    def loss(p, b):
        hidden = rule(dense(p, b))
        return jnp.mean((hidden - jnp.mean(hidden)) ** 3)

    args, way = values(), optax_accum.value_and_grad(loss, 4, recompute=recompute)
    got, want = jax.jit(lambda *args: (way(*args), jax.value_and_grad(loss)(*args)))(*args)
    assert farthest(got, want) < 1e-5


@jax.custom_vjp
def adds_to_ones(w, x):
    return x @ w


adds_to_ones.defvjp(
    lambda w, x: (x @ w, (w, x)),
    lambda kept, ct: (jnp.ones(4).at[jnp.zeros(len(ct), int)].add(ct), ct[:, None] * kept[0][None]),
)


def test_a_rule_whose_sum_over_rows_begins_with_a_constant():
    """In parts, each would begin with it."""
    assert_whole(lambda w, x: jnp.mean(adds_to_ones(w, x) ** 2), jnp.ones(4), values()[1]["x"], tolerance=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("wrap", [lambda step: step, *sweep([jax.jit, jax.checkpoint])])
def test_an_operation_with_more_operands_for_more_rows(wrap):
    params, batch = values()
    params["bias"] = jnp.ones([1, 4])
    step = lambda p, h: h + p["bias"] if len(h) > ROWS else jnp.tanh(h)
    assert_whole(lambda p, b: jnp.mean(wrap(step)(p, dense(p, b)) ** 2), params, batch, tolerance=1e-5)


def test_a_loss_for_one_number_of_rows():
    with pytest.raises((TypeError, ValueError)) as error:
        optax_accum.value_and_grad(lambda p, b: jnp.mean((b["x"] @ p["w"]).reshape(12, 4)), 2)(*values())
    assert "take sizes from the batch" in "".join(error.value.__notes__)


def test_an_assertion_about_the_number_of_rows_says_what_to_do():
    def loss(p, b):
        assert len(b["x"]) == 12
        return jnp.mean(b["x"] @ p["w"])

    with pytest.raises(AssertionError) as error:
        optax_accum.value_and_grad(loss, 2)(*values())
    assert "It raises for 2n rows" in "".join(error.value.__notes__)


@pytest.mark.sweep
def test_a_value_without_entries_that_crosses_levels():
    def loss(w, x):
        h = jnp.tanh(x * w[None])
        h = h - h.mean(0, keepdims=True)
        none = h[:, :0] - h[:, :0].mean(0, keepdims=True)
        return jnp.sum(none) + jnp.mean((h - (h**2).mean(0, keepdims=True)) ** 3)

    args = jnp.ones(3), jnp.linspace(-1, 1, 24).reshape(8, 3)
    got = jax.jit(optax_accum.value_and_grad(loss, 4))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, jax.value_and_grad(loss)(*args))


@pytest.mark.sweep
def test_levels_are_differentiated_again():
    """Through a `jit`, too."""

    def loss(w, x):
        h = x * w[None]
        return jnp.mean(((h - h.mean(0, keepdims=True)) * h) ** 2)

    w, x = jnp.ones(3), jnp.linspace(-1, 1, 24).reshape(8, 3)
    value, grad = (lambda w, at=at: optax_accum.value_and_grad(loss, 4)(w, x)[at] for at in (0, 1))
    ways = jax.hessian(value), jax.hessian(jax.jit(value)), jax.jacfwd(jax.jit(grad)), jax.jacrev(jax.jit(grad))
    for way in ways:
        np.testing.assert_allclose(way(w), jax.hessian(loss)(w, x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [*sweep(["jvp"]), "vjp"])
def test_a_rule_that_closes_over_a_value_of_the_loss(kind):
    """Inside jit; outside it is an error, as the docstring of `value_and_grad` says."""
    x = jnp.arange(12.0).reshape(6, 2)

    def loss(w, x):
        scale = x.mean()

        @{"jvp": jax.custom_jvp, "vjp": jax.custom_vjp}[kind]
        def same(w):
            return w

        if kind == "jvp":
            same.defjvp(lambda primals, tangents: (primals[0], tangents[0] * scale))
        else:
            same.defvjp(lambda w: (w, None), lambda _, cotangent: (cotangent * scale,))
        return jnp.mean((x @ same(w)) ** 2)

    compute, w = optax_accum.value_and_grad(loss, 3), jnp.ones(2)
    np.testing.assert_allclose(jax.jit(compute)(w, x)[1], jax.grad(loss)(w, x), rtol=1e-5)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        compute(w, x)


# Rules that refuse operands which the loss does not move


@functools.partial(jax.custom_vjp)
def scaled_sine(x, scale):
    return jnp.sin(x) * scale


def _scaled_sine_forward(x, scale):
    if scale.perturbed:
        raise RuntimeError("The scale has no derivative.")
    return scaled_sine(x.value, scale.value), (x.value, scale.value)


def _scaled_sine_backward(kept, cotangent):
    x, scale = kept
    return jnp.cos(x) * scale * cotangent, None


scaled_sine.defvjp(_scaled_sine_forward, _scaled_sine_backward, symbolic_zeros=True)


@jax.custom_jvp
def constant(x):
    return x


@constant.defjvp
def _(primals, tangents):
    raise RuntimeError("It has no derivative.")


REFUSING = {
    "in the loss": lambda p, b: scaled_sine(b["x"] @ p["w"], jnp.abs(b["x"])),
    "of a constant": lambda p, b: scaled_sine(b["x"] @ p["w"], constant(jnp.abs(b["x"]))),
    "after a mean": lambda p, b: scaled_sine(dense(p, b) - jnp.mean(dense(p, b), 0)[None], b["x"]),
    "in a checkpoint": lambda p, b: jax.checkpoint(lambda h, x: scaled_sine(h @ p["w"], x))(dense(p, b), b["x"]),
    "in a scan": lambda p, b: jax.lax.scan(
        lambda h, w: (scaled_sine(h @ w, constant(b["x"])), None), b["x"], p["layers"]["w"]
    )[0],
    "carried beside": lambda p, b: jax.lax.scan(
        lambda c, w: ((scaled_sine(c[0] @ w, c[1]), c[1] * 2), None), (b["x"], b["x"]), p["layers"]["w"]
    )[0][0],
    "in a branch": lambda p, b: jax.lax.cond(
        jnp.sum(jnp.abs(p["w"])) > 0, lambda h, x: scaled_sine(h, x), lambda h, x: h, dense(p, b), b["x"]
    ),
    "of each row": lambda p, b: jax.vmap(lambda x: scaled_sine(x @ p["w"], constant(x)))(b["x"]),
}


def refusing(name):
    return lambda p, b: masked(jnp.sum(REFUSING[name](p, b) ** 2, 1), b)


@pytest.mark.sweep
@pytest.mark.parametrize("parts", [[5, 3], *sweep([[3, 2], [2, 5]])], ids=str)
@pytest.mark.parametrize("name", sweep(REFUSING, but=["of each row"]))
def test_a_rule_is_moved_by_no_more_than_the_loss_moves(name, parts, x64):
    ways = zip(WAYS, parts, strict=True)
    assert_whole(refusing(name), *values(dtype=jnp.float64), ways=ways)
    assert whole(refusing(name), *values()) == []


@pytest.mark.sweep
def test_a_rule_is_moved_by_no_more_outside_jit():
    loss = refusing("in the loss")
    assert farthest(optax_accum.value_and_grad(loss, 3)(*values()), jax.value_and_grad(loss)(*values())) < 2e-6


@pytest.mark.parametrize("name", REFUSING)
def test_a_linear_rule_that_refuses_others_has_a_weight(name):
    assert "not linear" not in str(optax_accum.explain(refusing(name), *values()))


def test_a_rule_that_refuses_what_the_loss_moves_refuses_it_here():
    loss = lambda p, b: jnp.mean(scaled_sine(b["x"] @ p["w"], b["x"] @ p["w"]))
    with pytest.raises(RuntimeError, match="The scale has no derivative"):
        optax_accum.value_and_grad(loss, 3)(*values())
    assert "custom_vjp_call of all rows at once" in str(optax_accum.explain(loss, *values()))


# Results without rows of loops that have some: each micro-batch makes them, and one of them has their gradient


def beside_rows(p, b):
    """Hidden states [n, 4], a power of sums of parameters [], and a number of layers."""

    def layer(carry, w):
        hidden, scale, count = carry
        return (jnp.tanh(hidden @ w) * scale, scale * jnp.sum(w) ** 2, count + 1), None

    return jax.lax.scan(layer, (b["x"], jnp.sum(p["b"]), 0), p["layers"]["w"])[0]


def scaled_mean(p, b):
    hidden, scale, count = beside_rows(p, b)
    return jnp.mean(hidden) * scale + scale**2 * count


def scaled_after_a_mean(p, b):
    hidden, scale, count = beside_rows(p, b)
    centred = (hidden - jnp.mean(hidden, 0)[None]) * scale
    return masked(jnp.sum(centred**2, 1), b) + jnp.where(count > 2, scale, 0)


def scaled_on_all_rows(p, b):
    hidden, scale, _ = beside_rows(p, b)
    return jnp.mean(hidden**2) + jnp.sum(jnp.sort(dense(p, b), 0) * scale)


@pytest.mark.parametrize("parts", [[5, 2], *sweep([[2, 5]])], ids=str)
@pytest.mark.parametrize("loss", [*sweep([scaled_mean, scaled_after_a_mean]), scaled_on_all_rows])
def test_a_loop_over_rows_may_make_what_has_none(loss, parts, x64):
    assert_whole(loss, *values(dtype=jnp.float64), ways=zip(WAYS, parts, strict=True))
    assert "scan" not in couplings(loss, *values())


def test_what_has_no_rows_counts_once_across_calls():
    summed = lambda p, b: jnp.sum(beside_rows(p, b)[0]) + beside_rows(p, b)[1]
    averaged = lambda p, b: jnp.mean(beside_rows(p, b)[0]) + beside_rows(p, b)[1]
    text = lambda loss: str(optax_accum.explain(loss, *values())).split("Across calls")[1]
    assert "no weight" in text(summed)
    assert "is its number of rows" in text(averaged)


def chunked(p, b, carry=jnp.float32, **options):
    """A loss in chunks of two rows, which a loop adds up: of the loss, and of the tokens that count."""
    add = jax.checkpoint(lambda total, x, m: total + jnp.sum(m[:, None] * jnp.tanh(x @ p["w"])).astype(carry))
    step = lambda c, xs: ((add(c[0], *xs), c[1] + jnp.sum(xs[1])), jnp.sum(xs[0]))
    chunks = b["x"].reshape(-1, 2, 4), b["mask"].reshape(-1, 2)
    (total, count), ys = jax.lax.scan(step, (jnp.asarray(0.5, carry), 0.0), chunks, **options)
    return total.astype(jnp.float32) / count + jnp.mean(ys**2)


@pytest.mark.parametrize("options", [{}, *sweep([{"reverse": True}, {"unroll": 2}])], ids=str)
def test_a_loop_that_adds_rows_up_is_a_map_and_a_sum(options):
    loss = functools.partial(chunked, **options)
    assert_whole(loss, *values(), tolerance=1e-5)
    assert whole(loss, *values()) == []


def test_a_running_sum_in_bfloat16_stays_one():
    """It is rounded at each step, as in the whole batch."""
    loss = functools.partial(chunked, carry=jnp.bfloat16)
    assert whole(loss, *values()) == ["scan"]
    assert_whole(loss, *values(), tolerance=1e-2)
