"""What every micro-batch would share unasked is refused; groups stay together; batches come by keyword."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum

X = jnp.asarray(np.random.default_rng(0).normal(size=(12, 3)), jnp.float32)
Y = jnp.arange(12.0)
W = jnp.ones(3)
KEY = jax.random.key(0)
TX = optax_accum.accumulate_gradients(optax.sgd(0.5), 2)


def squares(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def noisy(w, x, key):
    return jnp.mean((x @ w + jax.random.normal(key, (len(x),))) ** 2)


def cut(fun, *args, **options):
    return optax_accum.value_and_grad(fun, microbatch_size=4, **options)(*args)


def micro_step(fun, w, *args, **options):
    return optax_accum.value_and_apply_gradients(fun, TX, **options)(w, TX.init(w), *args)


def applied(fun, *args, **options):
    rows = lambda w, x, *rest: fun(w, x, *rest) + 0 * x[:, 0]
    return optax_accum.microbatched_apply(rows, microbatch_size=4, **options)(*args)


FACTORIES = pytest.mark.parametrize("run", [cut, micro_step, applied])


@FACTORIES
def test_another_argument_with_as_many_rows_is_refused(run):
    with pytest.raises(ValueError, match=r"argument 2 has shape \(12,\).*batch_argnums.*pass whole_argnums=2"):
        run(squares, W, X, Y)
    run(squares, W, X, Y, batch_argnums=(1, 2))


def test_declared_whole_it_is_whole():
    table = jnp.arange(12.0)
    loss = lambda w, x, table: jnp.mean((x @ w) ** 2) + jnp.mean(table) * jnp.sum(w)
    got = cut(loss, W, X, table, whole_argnums=2)
    np.testing.assert_allclose(got[1], jax.grad(loss)(W, X, table), rtol=1e-5)


@FACTORIES
@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(0), jax.random.split(KEY, 3)], ids=["new", "old", "several"])
def test_a_key_that_no_role_names_is_refused(run, key):
    with pytest.raises(ValueError, match=r"random key must be named.*argument 2 is a key.*rng_argnum=2"):
        run(noisy, W, X, key)


@pytest.fixture
def hardware_keys():
    """Keys of the old style have 4 words then, as in runs on TPUs."""
    before = jax.config.jax_default_prng_impl
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    yield jax.random.PRNGKey(0)
    jax.config.update("jax_default_prng_impl", before)


def test_old_keys_of_another_kind(hardware_keys):
    """They were shared by all micro-batches unasked, and refused as `rng_argnum`."""
    with pytest.raises(ValueError, match=r"random key must be named.*argument 2 is a key.*rng_argnum=2"):
        cut(noisy, W, X, hardware_keys)
    got = cut(noisy, W, X, hardware_keys, rng_argnum=2)
    parts = [jax.grad(noisy)(W, X[i::3], jax.random.fold_in(hardware_keys, i)) for i in range(3)]
    np.testing.assert_allclose(got[1], sum(parts) / 3, rtol=1e-5)


def test_an_array_of_keys_is_no_key():
    with pytest.raises(TypeError, match=r"rng_argnum must name a random key.* it is key<fry>\[3\]\."):
        cut(noisy, W, X, jax.random.split(KEY, 3), rng_argnum=2)


def test_a_key_may_be_shared_on_purpose():
    shared = lambda w, x, key: jnp.mean((x @ w) ** 2) * jax.random.normal(key)
    got = cut(shared, W, X, KEY, whole_argnums=2)
    np.testing.assert_allclose(got[1], jax.grad(shared)(W, X, KEY), rtol=1e-5)


def test_a_tree_of_keys():
    loss = lambda w, x, keys: jnp.mean((x @ w) ** 2) * jax.random.normal(keys["dropout"])
    got = cut(loss, W, X, {"dropout": KEY}, rng_argnum=2)
    parts = [jax.grad(loss)(W, X[i::3], {"dropout": jax.random.fold_in(KEY, i)}) for i in range(3)]
    np.testing.assert_allclose(got[1], sum(parts) / 3, rtol=1e-5)
    with pytest.raises(TypeError, match="rng_argnum must name a random key"):
        cut(loss, W, X, {"dropout": 3}, rng_argnum=2)


def test_each_micro_step_draws_numbers_of_its_own():
    """As in `value_and_grad`: micro-step i of a window has `fold_in(key, i)`, whether or not it reduces."""
    rows = [X[:6], X[6:]]
    step = jax.jit(optax_accum.value_and_apply_gradients(noisy, TX, rng_argnum=2))
    w, state = W, TX.init(W)
    for x in rows:
        _, w, state = step(w, state, x, KEY)
    grads = [jax.grad(noisy)(W, x, jax.random.fold_in(KEY, i)) for i, x in enumerate(rows)]
    np.testing.assert_allclose(w, W - 0.5 * sum(grads) / 2, rtol=1e-5)


def test_which_micro_step_of_several_windows():
    tx = optax.chain(TX, TX)
    step = optax_accum.value_and_apply_gradients(noisy, tx, rng_argnum=2)
    with pytest.raises(ValueError, match="holds 2 windows"):
        step(W, tx.init(W), X, KEY)


@pytest.mark.parametrize("number", [17, -4])
@FACTORIES
def test_a_role_names_an_argument_that_is_there(run, number):
    with pytest.raises(ValueError, match=f"batch_argnums={number}, and there are 2"):
        run(lambda w, x: jnp.mean((x @ w) ** 2), W, X, batch_argnums=number)


@pytest.mark.parametrize("run", [cut, micro_step])
def test_negative_numbers_count_from_the_back(run):
    loss = lambda w, scale, x: scale * jnp.mean((x @ w) ** 2)
    last, named = (run(loss, W, 2.0, X, batch_argnums=number) for number in (-1, 2))
    jax.tree.map(np.testing.assert_array_equal, last, named)


def test_negative_numbers_deal_out_rows_to_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    loss = lambda w, scale, x: scale * jnp.mean((x @ w) ** 2)
    x = jnp.concatenate([X, X])
    with jax.set_mesh(mesh):
        tx = optax_accum.accumulate_gradients(optax.sgd(0.5), None, reduce_axes="data")
        step = optax_accum.value_and_apply_gradients(loss, tx, batch_argnums=-1)
        _, w, state = step(W, jax.jit(tx.init)(W), 2.0, x, flush=True)
    np.testing.assert_allclose(w, W - 0.5 * jax.grad(loss)(W, 2.0, x), rtol=1e-5)
    assert optax_accum.metrics(state)["gradient_step"] == 1


# Batches by keyword


def test_a_batch_by_keyword():
    loss = lambda w, *, x, y: jnp.mean((x @ w - y) ** 2)
    f = optax_accum.value_and_grad(loss, microbatch_size=5, batch_argnames=("x", "y"))
    got = f(W, x=X, y=Y)
    np.testing.assert_allclose(got[1], jax.grad(lambda w: squares(w, X, Y))(W), rtol=1e-5)
    step = optax_accum.value_and_apply_gradients(loss, TX, batch_argnames=("x", "y"))
    state, w = TX.init(W), W
    for i in range(2):
        _, w, state = step(w, state, x=X[6 * i : 6 * i + 6], y=Y[6 * i : 6 * i + 6])
    np.testing.assert_allclose(w, W - 0.5 * got[1], rtol=1e-4)


def test_a_batch_by_keyword_is_refused_unless_it_is_named():
    with pytest.raises(ValueError, match="argument 'y' has shape.*batch_argnames"):
        optax_accum.value_and_grad(squares, num_microbatches=2)(W, X, y=Y)
    with pytest.raises(ValueError, match="batch_argnums=1, and there are 1.*batch_argnames"):
        optax_accum.value_and_grad(squares, num_microbatches=2)(W, x=X, y=Y)
    whole = optax_accum.value_and_grad(squares, num_microbatches=2, whole_argnames="y")
    with pytest.raises(TypeError, match="shape"):  # and it is whole
        whole(W, X, y=Y)


@FACTORIES
def test_a_batch_by_keyword_that_does_not_come(run):
    with pytest.raises(
        ValueError, match="batch_argnames must name.*'y' is not, and none are. Pass y=, or.*batch_argnums"
    ):
        run(squares, W, X, Y, batch_argnames="y")


@pytest.mark.parametrize("run", [cut, micro_step])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_numbers_in_a_batch_is_refused(run, jit, kind):
    def loss(w, batch):
        return jnp.mean((batch["x"] @ w - jnp.stack(list(map(jnp.asarray, batch["y"])))) ** 2)

    labelled = lambda y: run(loss, W, {"x": X, "y": y})
    labels = kind(map(float, range(len(X))))
    with pytest.raises(TypeError, match=rf"Numbers in a {kind.__name__} are not cut.*argument 1\['y'\] holds 12.*jnp"):
        (jax.jit(labelled) if jit else labelled)(labels)
    labelled(jnp.asarray(labels))
    run(lambda w, batch: squares(w, batch[0], batch[1] + batch[2][0] * batch[3]), W, (X, Y, (1, 2.0), np.float32(3)))


@pytest.mark.parametrize("jit", [False, True])
def test_a_keyword_that_fun_names_goes_to_fun(jit):
    def loss(w, x, y, *, scale=1.0, train=False):
        return scale * squares(w, x, y) * (10 if train else 1)

    seen = []

    def update(grads, state, params=None, *, height, **extra):
        seen.append((height, sorted(extra)))
        return grads, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = optax_accum.accumulate_gradients(inner, 1)
    step = optax_accum.value_and_apply_gradients(loss, tx)
    step = jax.jit(step, static_argnames=("train", "height")) if jit else step
    value, *_ = step(W, tx.init(W), X, y=0 * Y[:1], scale=2.0, train=True, height=3, width=4.0)
    np.testing.assert_allclose(value, 20 * squares(W, X, 0 * Y), rtol=1e-6)
    assert (3, ["value", "width"]) in seen
    assert not any("train" in extra for _, extra in seen)


@pytest.mark.parametrize("name", ["weight", "flush", "value", "height"])
@pytest.mark.parametrize("accumulates", [True, False])
def test_a_keyword_that_both_name_is_refused(name, accumulates):
    update = lambda grads, state, params=None, *, height=1.0, **_: (grads, state)
    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    if accumulates:
        tx = optax_accum.accumulate_gradients(tx, 1)
    scope = {"squares": squares}
    exec(f"def loss(w, x, y, {name}=1.0): return squares(w, x, y)", scope)
    step = optax_accum.value_and_apply_gradients(scope["loss"], tx, whole_argnums=2)
    with pytest.raises(TypeError, match=f"for fun or for the optimizer: '{name}' is an argument of both. Pass that"):
        step(W, tx.init(W), X, Y, **{name: True if name == "flush" else 1.0})
    step(W, tx.init(W), X, Y, 2.0, **{name: True if name == "flush" else 1.0})


def test_a_loss_without_a_batch_and_one_without_rows():
    loss = lambda w, scale=1.0: jnp.sum(scale * w**2)
    step = optax_accum.value_and_apply_gradients(loss, TX, batch_argnums=())
    assert optax_accum.metrics(step(W, TX.init(W))[2])["weight"] == 1
    step = optax_accum.value_and_apply_gradients(loss, TX)
    with pytest.raises(ValueError, match=r"Pass weight=, or batch_argnums=\(\)"):
        step(W, TX.init(W), 2.0)
    assert optax_accum.metrics(step(W, TX.init(W), 2.0, weight=3)[2])["weight"] == 3


# Groups


def in_groups(w, x):
    """A loss over pairs of rows, as in GRPO: each counts against the mean of its pair."""
    scores = (x @ w).reshape(-1, 2)
    return jnp.mean((scores - scores.mean(1, keepdims=True)) ** 2 * jnp.array([[1.0, 3.0]]))


@pytest.mark.parametrize("options", [{"num_microbatches": 4}, {"microbatch_size": 4}, {"num_microbatches": 6}], ids=str)
def test_groups_stay_together(options):
    whole = jax.grad(in_groups)(W, X)
    torn = optax_accum.value_and_grad(in_groups, num_microbatches=3)(W, X)[1]
    assert not np.allclose(torn, whole, rtol=1e-3)  # without the option they are torn apart
    for extra in ({}, {"unroll": True}, {"weight_fn": lambda x: len(x)}):
        got = optax_accum.value_and_grad(in_groups, group_size=2, **options, **extra)(W, X)[1]
        np.testing.assert_allclose(got, whole, rtol=1e-5)


def test_outputs_of_groups_come_back_in_order():
    loss = lambda w, x: (in_groups(w, x), (x @ w).reshape(-1, 2)[:, ::-1].reshape(-1))
    f = optax_accum.value_and_grad(loss, microbatch_size=8, group_size=2, has_aux=True, aux_reduction="concat")
    (_, rows), _ = jax.jit(f)(W, X)
    np.testing.assert_allclose(rows, loss(W, X)[1], rtol=1e-6)
    swap = lambda w, x: (x @ w).reshape(-1, 2)[:, ::-1].reshape(-1)
    apply = optax_accum.microbatched_apply(swap, microbatch_size=8, group_size=2)
    np.testing.assert_allclose(apply(W, X), swap(W, X), rtol=1e-6)


def test_groups_over_devices():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        f = optax_accum.value_and_grad(in_groups, microbatch_size=4, group_size=2, reduce_axes="data")
        np.testing.assert_allclose(jax.jit(f)(W, X)[1], jax.grad(in_groups)(W, X), rtol=1e-5)
        with pytest.raises(ValueError, match="group_size=4, and each of 2 devices has 6 rows"):
            optax_accum.value_and_grad(in_groups, num_microbatches=1, group_size=4, reduce_axes="data")(W, X)
        tx = optax_accum.accumulate_gradients(optax.sgd(0.5), 1, reduce_axes="data")
        step = optax_accum.value_and_apply_gradients(in_groups, tx, group_size=4)
        with pytest.raises(ValueError, match="group_size=4, and each of 2 devices has 6 rows"):
            step(W, jax.jit(tx.init)(W), X)


@FACTORIES
def test_groups_that_do_not_divide(run):
    with pytest.raises(ValueError, match=r"group_size must divide.*group_size=5, and .* has 12 rows"):
        run(in_groups, W, X, group_size=5)


def test_a_micro_batch_of_groups():
    with pytest.raises(ValueError, match="group_size=3, and a micro-batch"):
        cut(in_groups, W, X, group_size=3)
    with pytest.raises(ValueError, match="6 groups of 2 rows.*num_microbatches=6 at most"):
        optax_accum.value_and_grad(in_groups, num_microbatches=7, group_size=2)(W, X)


# What is no array


@FACTORIES
def test_no_array_in_a_batch(run):
    with pytest.raises(TypeError, match=r"A batch \(argument 1\) must hold arrays: at \['name'\] there is 'digits'"):
        run(lambda w, batch: jnp.mean(batch["x"] @ w), W, {"x": X, "name": "digits"})


def test_no_array_among_the_parameters():
    model = {"w": W, "activation": jnp.tanh}
    loss = lambda model, x: jnp.mean(model["activation"](x @ model["w"]))
    with pytest.raises(TypeError, match=r"must hold arrays: at .*'activation'.*is_inexact_array"):
        optax_accum.value_and_grad(loss, num_microbatches=2)(model, X)
    with pytest.raises(TypeError, match=r"must hold arrays: at .*'activation'"):
        TX.init(model)
    with pytest.raises(TypeError, match=r"must hold arrays: at .*'activation'"):
        optax_accum.value_and_apply_gradients(loss, TX)(model, TX.init({"w": W}), X)


def test_flags_names_and_functions_stay_what_they_are():
    def encode(w, x, train, name, act):
        assert (train, name) == (True, "tower")
        return act(x @ w)

    got = optax_accum.microbatched_apply(encode, 3)(W, X, True, "tower", jnp.tanh)
    np.testing.assert_allclose(got, jnp.tanh(X @ W), rtol=1e-6)
