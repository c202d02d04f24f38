"""Functions of ours under JAX's transformations, and outside `jit`: they work, or name the option that does."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import optax_accum
from tests.tiers import sweep

rng = np.random.default_rng(0)
W = jnp.asarray(rng.normal(size=3), jnp.float32)
BATCH = {"x": jnp.asarray(rng.normal(size=(7, 3)), jnp.float32), "y": jnp.ones(7)}
TX = optax_accum.accumulate_gradients(optax.sgd(0.5), 2)


def loss(w, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2)


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def count(batch):
    return batch["y"].sum()


HESSIAN = jax.jit(jax.hessian(loss))(W, BATCH)
WAYS = {
    "jacfwd": lambda f: jax.jacfwd(lambda w: f(w, BATCH)[1])(W),
    "jacrev": lambda f: jax.jacrev(lambda w: f(w, BATCH)[1])(W),
    "hessian": lambda f: jax.hessian(lambda w: f(w, BATCH)[0])(W),
    "jit of jacfwd": lambda f: jax.jit(jax.jacfwd(lambda w: f(w, BATCH)[1]))(W),
    "jacfwd of jit": lambda f: jax.jacfwd(jax.jit(lambda w: f(w, BATCH)[1]))(W),
    "jacrev of jit": lambda f: jax.jacrev(jax.jit(lambda w: f(w, BATCH)[1]))(W),
    "hessian of jit": lambda f: jax.hessian(jax.jit(lambda w: f(w, BATCH)[0]))(W),
    "jacrev of checkpoint": lambda f: jax.jacrev(jax.checkpoint(lambda w: f(w, BATCH)[1]))(W),
}


@pytest.mark.parametrize("way", sweep(WAYS, but=["jacrev of jit"]))
def test_value_and_grad_is_differentiated_again(way):
    f = optax_accum.value_and_grad(loss, num_microbatches=3)
    np.testing.assert_allclose(WAYS[way](f), HESSIAN, rtol=1e-5, atol=1e-6)


@jax.custom_vjp
def rounded(x):
    """Whose backward pass takes it for the identity."""
    return jnp.round(4 * x) / 4


rounded.defvjp(lambda x: (rounded(x), x.sum(0)), lambda _, ct: (ct,))


@jax.custom_vjp
def turned(x, y):
    """Whose derivative is another one, and depends on its operands."""
    return x * y, x


turned.defvjp(lambda x, y: (turned(x, y), (x, y)), lambda kept, ct: (ct[0] * jnp.sin(kept[1]) + ct[1], 2 * ct[0]))


@pytest.mark.sweep
@pytest.mark.parametrize("cut", ["value_and_grad", *sweep(["microbatched"])])
@pytest.mark.parametrize("rule", [rounded, *sweep([lambda x: turned(x, x**2)[0]])])
def test_a_backward_pass_by_the_user_is_differentiated_again(rule, cut):
    """A forward pass that calls its function again keeps the rule in a second derivative, which was that without it."""
    loss = lambda w, batch: jnp.mean((jnp.tanh(rule(batch["x"] * w[None])).sum(-1) - batch["y"]) ** 2)
    of_whole = jax.value_and_grad(loss)
    ours = optax_accum.value_and_grad(loss, 3)
    if cut == "microbatched":
        ours = jax.value_and_grad(optax_accum.microbatched(loss, 3))
    penalty = lambda f: jax.jit(jax.grad(lambda w: jnp.sum(f(w, BATCH)[1] ** 2)))(W)
    np.testing.assert_allclose(penalty(ours), penalty(of_whole), rtol=1e-5, atol=1e-6)
    assert jnp.abs(penalty(of_whole)).max() > 1e-3


@pytest.mark.sweep
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_under_vmap(run):
    ws = jnp.stack([W, -W, 2 * W])
    cut = optax_accum.value_and_grad(loss, num_microbatches=3)
    got, want = (run(jax.vmap(f, (0, None)))(ws, BATCH) for f in (cut, jax.value_and_grad(loss)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


@pytest.mark.sweep
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("weighted", ["", "weight_fn", "weight"])
def test_micro_steps_under_vmap(weighted, jit):
    """An ensemble: each member with a weight of its own, one of them zero."""
    ws, weight = jnp.stack([W, -W, 2 * W]), jnp.array([1.0, 0.0 if weighted == "weight" else 1.0, 2.0])
    tx = optax_accum.accumulate_gradients(optax.sgd(0.5), None)
    step = optax_accum.value_and_apply_gradients(loss, tx, weight_fn=count if weighted == "weight_fn" else None)
    own = lambda weight: {"weight": weight} if weighted == "weight" else {}
    run = lambda w, state, weight: step(w, state, BATCH, flush=True, **own(weight))
    _, now, _ = jit(jax.vmap(run))(ws, jax.vmap(tx.init)(ws), weight)
    moved = ws - 0.5 * jax.vmap(jax.grad(loss), (0, None))(ws, BATCH)
    np.testing.assert_allclose(now, jnp.where((weight == 0)[:, None], ws, moved), rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("way", [jax.jacfwd, jax.jacrev])
def test_what_a_loss_closes_over_is_differentiated(way):
    def gradient(scale, value_and_grad):
        return value_and_grad(lambda w, batch: loss(scale * w, batch))(W, BATCH)[1]

    cut = lambda fun: optax_accum.value_and_grad(fun, num_microbatches=3)
    got, want = (way(lambda scale, f=f: gradient(scale, f))(2.0) for f in (cut, jax.value_and_grad))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_microbatched_in_forward_mode(dtype):
    encode = lambda w, x: jnp.tanh(x @ w)
    cut = optax_accum.microbatched(encode, 3)
    w, x = W.astype(dtype), BATCH["x"].astype(dtype)
    got, want = (jax.jit(jax.jacfwd(f))(w, x) for f in (cut, encode))
    np.testing.assert_allclose(got.astype("f"), want.astype("f"), rtol=4 * float(jnp.finfo(dtype).eps))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "way", [jax.hessian, lambda f: jax.jacrev(jax.grad(f)), lambda f: jax.jit(jax.jacfwd(jax.grad(f)))]
)
def test_second_derivatives_in_bfloat16(way):
    """They were zeros: a gradient that is sent elsewhere, to be added in float32, was a constant."""
    x = jnp.linspace(-1, 1, 21, dtype=jnp.bfloat16).reshape(7, 3)
    w = jnp.array([0.5, -1, 2], jnp.bfloat16)
    encode = lambda w, x: jnp.sin(x @ w).astype(jnp.float32)
    whole, cut = (
        way(lambda w, f=f: jnp.sum(f(w, x) ** 2))(w).astype(jnp.float32)
        for f in (encode, optax_accum.microbatched(encode, microbatch_size=3))
    )
    assert jnp.max(jnp.abs(whole)) > 1
    np.testing.assert_allclose(cut, whole, rtol=float(jnp.finfo(jnp.bfloat16).eps))


@pytest.mark.sweep
def test_a_micro_step_is_differentiated_again():
    step = optax_accum.value_and_apply_gradients(loss, optax_accum.accumulate_gradients(optax.sgd(0.5), None))
    tx = optax_accum.accumulate_gradients(optax.sgd(0.5), None)
    move = lambda w: step(w, tx.init(w), BATCH, flush=True)[1]
    np.testing.assert_allclose(jax.jacfwd(move)(W), jnp.eye(3) - 0.5 * HESSIAN, rtol=1e-5, atol=1e-6)


@jax.custom_vjp
def identity(x):
    return x


identity.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent,))


@pytest.mark.sweep
@pytest.mark.parametrize("weighted", ["", "weight_fn", "weight"])
def test_a_weighted_micro_step_is_differentiated_through_a_jit(weighted):
    weight_fn = count if weighted == "weight_fn" else None
    step = jax.jit(optax_accum.value_and_apply_gradients(loss, TX, weight_fn=weight_fn))
    own = {"weight": jnp.array(2.0)} if weighted == "weight" else {}

    def move(w):
        _, w, state = step(w, TX.init(w), BATCH, **own)
        return step(w, state, BATCH, **own)[1]

    np.testing.assert_allclose(jax.jacrev(move)(W), jnp.eye(3) - 0.5 * HESSIAN, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("around", [*sweep([jax.jit]), jax.checkpoint], ids=["jit", "checkpoint"])
def test_a_micro_step_is_differentiated_through_a_jit(around):
    """By the parameters and by the batch, as the same step by hand is."""
    step = around(optax_accum.value_and_apply_gradients(loss, TX))

    def moved(w, x):
        state = TX.init(w)
        for _ in range(2):
            _, w, state = step(w, state, {**BATCH, "x": x})
        return w.sum()

    by_hand = lambda w, x: jnp.sum(w - 0.5 * jax.grad(loss)(w, {**BATCH, "x": x}))
    got, want = (jax.grad(f, (0, 1))(W, BATCH["x"]) for f in (moved, by_hand))
    close(got, want)


@pytest.mark.sweep
@pytest.mark.parametrize("jit", [False, True])
def test_a_micro_batch_without_weight_has_no_derivative(jit):
    """Its loss is 0 / 0."""
    fun = lambda w, batch: jnp.sum(batch["y"] * jnp.tanh(batch["x"] @ w) ** 2) / batch["y"].sum()
    step = optax_accum.value_and_apply_gradients(fun, TX, weight_fn=count)

    def move(w, *factors):
        state = TX.init(w)
        for factor in factors:
            _, w, state = step(w, state, BATCH | {"y": factor * BATCH["y"]})
        return w.sum()

    grad = jax.grad(move)
    grad = jax.jit(grad) if jit else grad
    close(grad(W, 1.0, 0.0), jax.grad(lambda w: jnp.sum(w - 0.5 * jax.grad(fun)(w, BATCH)))(W))


# Outside jit


def compilations(run):
    """How often XLA compiled while `run` ran."""
    seen = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: seen.append(event) if event == "/jax/core/compile/backend_compile_duration" else None
    )
    try:
        run()
    finally:
        jax.monitoring.clear_event_listeners()
    return len(seen)


def eager_calls():
    cut = optax_accum.value_and_grad(loss, num_microbatches=3)
    encode = optax_accum.microbatched(lambda w, x: jnp.tanh(x @ w), 3)
    step = optax_accum.value_and_apply_gradients(loss, TX)
    state = TX.init(W)
    return {
        "value_and_grad": lambda: cut(W, BATCH),
        "value_and_grad, differentiated": lambda: jax.grad(lambda w: cut(w, BATCH)[0])(W),
        "microbatched": lambda: encode(W, BATCH["x"]),
        "microbatched, differentiated": lambda: jax.grad(lambda w: encode(w, BATCH["x"]).sum())(W),
        "value_and_apply_gradients": lambda: step(W, state, BATCH, weight=3),
    }


@pytest.mark.sweep
@pytest.mark.parametrize("name", eager_calls())
def test_a_second_call_outside_jit_compiles_nothing(name):
    """Not a program of its own; the first compiles what JAX compiles for each operation."""
    call = eager_calls()[name]
    call()
    assert compilations(jax.jit(lambda: jnp.cos(jnp.ones(len(name) + 2)))) > 0  # that compilations are seen
    assert compilations(call) == 0


def test_a_state_over_devices_is_made_by_one_program():
    """Its scalars have another; from the second state on JAX knows it."""
    tx = optax_accum.accumulate_gradients(optax.sgd(0.5), 2, devices="data", statistics=True)
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))):
        tx.init(W)
        assert compilations(lambda: tx.init(W)) <= 1


@pytest.mark.sweep
def test_what_a_loss_closes_over_may_change_between_calls():
    """Unlike under `jax.jit`: numbers, arrays, constants, the user's own derivatives, callbacks."""
    factor, table, strength, inner, tell = 1.0, jnp.ones(3), 1.0, jax.jit(lambda w: w), 1.0

    @jax.custom_vjp
    def reverse(w):
        return w

    reverse.defvjp(lambda w: (w, None), lambda _, g: (-strength * g,))

    @jax.custom_jvp
    def forward(w):
        return w

    forward.defjvp(lambda w, t: (w[0], strength * t[0]))

    def plain(w, x):
        told = jax.pure_callback(lambda: np.float32(tell), jax.ShapeDtypeStruct((), np.float32))
        return x @ forward(reverse(inner(w * table) * factor)) * told

    encode = optax_accum.microbatched(plain, 3)
    grad = lambda f: jax.grad(lambda w: f(w, BATCH["x"]).sum())(W)
    seen = []
    for change in ("nothing", "factor", "table", "strength", "inner", "tell"):
        if change == "factor":
            factor = 2.0
        elif change == "table":
            table = jnp.array([1.0, 2.0, 3.0])
        elif change == "strength":
            strength = 5.0
        elif change == "inner":
            const = jnp.array([3.0, 2.0, 1.0])
            inner = jax.jit(lambda w, const=const: w * const)
        elif change == "tell":
            tell = 7.0
        np.testing.assert_allclose(grad(encode), grad(plain), rtol=1e-5)
        seen.append(tuple(np.asarray(grad(encode)).tolist()))
    assert len(set(seen)) == len(seen)


def coupled(w, batch):
    shift = jnp.ones(3) * w  # what the function closes over
    return jnp.mean(optax_accum.microbatched(lambda w, x: x @ (w + shift), 3)(w, batch["x"]) ** 2)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "f", [optax_accum.value_and_grad(loss, num_microbatches=3), jax.grad(coupled)], ids=["value_and_grad", "coupled"]
)
def test_many_calls_outside_jit_keep_nothing(f):
    f(W, BATCH)
    gc.collect()
    before, arrays = len(gc.get_objects()), len(jax.live_arrays())
    for _ in range(30):
        f(W, BATCH)
    gc.collect()
    assert len(gc.get_objects()) - before < 2000
    assert len(jax.live_arrays()) - arrays < 5


def test_outside_jit_a_loss_may_look_at_values():
    """As `jax.value_and_grad` lets it; a trace has none."""

    def looks(w, batch):
        value = loss(w, batch)
        scale = 1.0 if float(batch["x"].sum()) > 1e9 or value > 0 else 5.0
        return scale * value

    def turned(w, x):
        return x @ w if float(jnp.sum(w)) != 1e9 else -x @ w

    whole = jax.value_and_grad(looks)(W, BATCH)
    cut = optax_accum.value_and_grad(looks, num_microbatches=7)
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 1)
    with pytest.warns(
        UserWarning, match=r"looks at values, which no trace has, at test_again.py:\d+\. All rows run at"
    ):
        close(cut(W, BATCH), whole)
    close(optax_accum.reduce_microbatches(jax.value_and_grad(looks), num_microbatches=7)(W, BATCH), whole)
    close(optax_accum.value_and_apply_gradients(looks, tx)(W, tx.init(W), BATCH)[:2], (whole[0], W - whole[1]))
    with pytest.warns(UserWarning, match="looks at values"):
        close(optax_accum.microbatched(turned, 3)(W, BATCH["x"]), BATCH["x"] @ W)
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(cut)(W, BATCH)


@pytest.mark.sweep
def test_under_disable_jit_a_loss_sees_its_numbers():
    seen = []

    def watched(w, batch):
        seen.append(batch["x"][0, 0] > 100)
        return loss(w, batch)

    with jax.disable_jit():
        got = optax_accum.value_and_grad(watched, num_microbatches=7)(W, BATCH)
    np.testing.assert_allclose(got[1], jax.grad(loss)(W, BATCH), rtol=1e-5)


STILL = {  # parameters act without a derivative, or not alone, on rows that have one
    "stop_gradient": lambda p, x: jnp.sin(x) * jax.lax.stop_gradient(p),
    "where": lambda p, x: jnp.where(p > 0, jnp.sin(x), jnp.cos(x)),
    "cond": lambda p, x: jax.lax.cond(p > 0, jnp.sin, jnp.cos, x),
    "integers": lambda p, x: jnp.sin(x) * (10 * p).astype(int),
    "mean": lambda p, x: (jnp.sin(x) - jnp.mean(jnp.sin(x) * jax.lax.stop_gradient(p))) ** 2,
    "largest": lambda p, x: (jnp.sin(x) - jnp.max(jnp.sin(x) * jax.lax.stop_gradient(p))) ** 2 * p,
    "scan": lambda p, x: jax.lax.scan(lambda h, w: (h * jax.lax.stop_gradient(w), None), jnp.sin(x), p + jnp.arange(3))[
        0
    ],
}


@pytest.mark.sweep
@pytest.mark.parametrize("argnum", [*sweep([0]), 1], ids=["parameters", "batch"])
@pytest.mark.parametrize("name", sweep(STILL, but=["scan"]))
def test_the_gradient_by_rows_on_which_parameters_act_without_one(name, argnum):
    """It was zero: only parameters were thought to have a derivative between two loops."""
    p, x = jnp.float32(0.3), jnp.arange(1.0, 8)
    of = lambda f: jax.jit(jax.grad(lambda p, x: jnp.sum(f(p, x) * jnp.arange(2.0, 9)), argnum))(p, x)
    want = of(STILL[name])
    close(of(optax_accum.microbatched(STILL[name], 3)), want)
    assert argnum == 0 or np.any(np.abs(want) > 0.1)
    loss = lambda p, x: jnp.sum(STILL[name](p, x) * p * x)
    small, whole = optax_accum.value_and_grad(loss, 3), jax.value_and_grad(loss)
    close(jax.grad(lambda *args: small(*args)[1], argnum)(p, x), jax.grad(lambda *args: whole(*args)[1], argnum)(p, x))


@jax.custom_vjp
def unit(w):
    """Its gradient has norm 1, as a clip has: a rule that takes the whole cotangent."""
    return w


unit.defvjp(lambda w: (w, None), lambda _, g: (g / jnp.linalg.norm(g),))
BY_COUNTER = {
    "cond": lambda i, w: jax.lax.cond(i > 2, unit, lambda w: w, w),
    "switch": lambda i, w: jax.lax.switch(i - 2, [lambda w: w, unit], w),
    "scan": lambda i, w: jax.lax.scan(lambda w, _: (unit(w), None), w * i, jnp.arange(2))[0],
    "jit": lambda i, w: jax.jit(lambda i, w: unit(w * i))(i, w),
    "after": lambda i, w: unit(w * i),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", sweep(BY_COUNTER, but=["after"]))
def test_a_rule_on_parameters_that_a_counter_decides_takes_the_whole_cotangent(name):
    """The counter of a loop over layers is the same for each micro-batch; what a derivative makes of it is not."""
    params = {"layers": jnp.asarray(rng.normal(size=(3, 4, 4)), jnp.float32), "w": jnp.eye(4)}
    x = jnp.asarray(rng.normal(size=(12, 4)), jnp.float32)

    def loss(params, x):
        layer = lambda carry, w: ((carry[0] + 1, jnp.tanh(carry[1] @ w)), None)
        (count, h), _ = jax.lax.scan(layer, (0, x), params["layers"])
        return jnp.mean(h @ BY_COUNTER[name](count, params["w"]))

    want = jax.jit(jax.grad(loss))(params, x)
    close(jax.jit(jax.grad(optax_accum.microbatched(loss, 5)))(params, x), want)
    close(jax.jit(optax_accum.value_and_grad(loss, 5))(params, x)[1], want)


@pytest.mark.sweep
def test_what_a_counter_decides_is_not_kept_for_each_micro_batch():
    """Decay that grows with the counter of a loop: its gradient is as large as the parameters."""
    params, x = {"w": jnp.eye(4), "u": jnp.ones((256, 256))}, jnp.ones((16, 4))

    def loss(params, x):
        (count, h), _ = jax.lax.scan(lambda c, _: ((c[0] + 1, c[1] @ params["w"]), None), (0, x), jnp.arange(3))
        return jnp.mean(h**2) + count * jnp.sum(params["u"] ** 2)

    program = jax.jit(optax_accum.value_and_grad(loss, 8)).lower(params, x).compile()
    assert program.memory_analysis().temp_size_in_bytes < params["u"].nbytes
    close(program(params, x), jax.value_and_grad(loss)(params, x))


EXTREMES = {
    "max": lambda s, x: jnp.sum(x.max(0) * s),
    "min of some": lambda s, x: jnp.sum(jnp.where(x > 0, x, 9.0).min(0) * s),
    "scaled": lambda s, x: jnp.sum(x / jnp.abs(x).max(0)[None] * s[None]),
}


@pytest.mark.parametrize("name", sweep(EXTREMES, but=["max"]))
def test_the_gradient_of_an_extreme_of_the_batch_over_devices(name):
    """The devices' extremes were joined by one without a derivative."""
    s, x = jnp.array([1.0, 2.0]), jnp.asarray(rng.normal(size=(8, 2)), jnp.float32)
    want = jax.grad(EXTREMES[name], (0, 1))(s, x)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
        got = jax.jit(jax.grad(optax_accum.microbatched(EXTREMES[name], 2, devices="data"), (0, 1)))(s, rows)
    close(jax.device_get(got), want)
