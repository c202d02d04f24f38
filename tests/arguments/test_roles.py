"""Roles name arguments by position or name; what every micro-batch would share unasked is refused; groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from tests.pairs import every_pair
from tests.tiers import one_of_each, sweep

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
    return optax_accum.reduce_microbatches(jax.value_and_grad(fun), microbatch_size=4, **options)(*args)


def micro_step(fun, w, *args, **options):
    return optax_accum.value_and_apply_gradients(fun, TX, **options)(w, TX.init(W), *args)


FACTORIES = pytest.mark.parametrize("run", [cut, micro_step])


@pytest.mark.parametrize("run", [cut, *sweep([micro_step])])
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


@pytest.mark.sweep
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


@pytest.mark.sweep
def test_each_micro_step_draws_numbers_of_its_own():
    """As in `reduce_microbatches`: micro-step i of a window has `fold_in(key, i)`, whether or not it reduces."""
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


@pytest.mark.parametrize("name", [17, -4, "y"])
@FACTORIES
def test_a_role_names_a_parameter_that_is_there(run, name):
    with pytest.raises(ValueError, match=rf"batch_argnums={name!r}, and fun takes \(w, x\)\. Pass its position"):
        run(lambda w, x: jnp.mean((x @ w) ** 2), W, X, batch_argnums=name)


@pytest.mark.parametrize("run", [cut, micro_step])
def test_negative_numbers_count_from_the_back(run):
    loss = lambda w, scale, x: scale * jnp.mean((x @ w) ** 2)
    last, named = (run(loss, W, 2.0, X, batch_argnums=number) for number in (-1, 2))
    jax.tree.map(np.testing.assert_array_equal, last, named)


@pytest.mark.sweep
def test_negative_numbers_deal_out_rows_to_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    loss = lambda w, scale, x: scale * jnp.mean((x @ w) ** 2)
    x = jnp.concatenate([X, X])
    with jax.set_mesh(mesh):
        tx = optax_accum.accumulate_gradients(optax.sgd(0.5), None, devices="data")
        step = optax_accum.value_and_apply_gradients(loss, tx, batch_argnums=-1)
        _, w, state = step(W, jax.jit(tx.init)(W), 2.0, x, flush=True)
    np.testing.assert_allclose(w, W - 0.5 * jax.grad(loss)(W, 2.0, x), rtol=1e-5)
    assert optax_accum.metrics(state)["gradient_step"] == 1


# By position and by name


def linear(w, x, y, carry, key, table):
    loss = jnp.mean((x @ w - y) ** 2) + jnp.sum(table) * jnp.sum(w) + 0 * jax.random.normal(key)
    return loss, carry + jnp.sum(x)


TABLE = jnp.linspace(0, 1, 12)
ARGUMENTS = {"x": X, "y": Y, "carry": jnp.float32(0), "key": KEY, "table": TABLE}
ROLES = {  # by position, by name, and both
    "positions": {"batch_argnums": (1, 2), "carry_argnum": 3, "rng_argnum": 4, "whole_argnums": 5},
    "from the back": {"batch_argnums": (-5, -4), "carry_argnum": -3, "rng_argnum": -2, "whole_argnums": (-1,)},
    "names": {"batch_argnums": ("x", "y"), "carry_argnum": "carry", "rng_argnum": "key", "whole_argnums": "table"},
    "both": {"batch_argnums": (1, "y"), "carry_argnum": 3, "rng_argnum": "key", "whole_argnums": ["table"]},
}
# So many arguments after the parameters are given by position. What binds them is the same for all functions, so that one
# function is called in every way, and the others in each.
CALLS = every_pair(ROLES, range(6), [False, True])
EACH = one_of_each(CALLS)
IN_EACH_WAY = pytest.mark.parametrize(("named", "by_position", "jit"), sweep(EACH, but=EACH[2:]))


def split(arguments, count):
    """The first by position, the others by keyword, in another order."""
    names = list(arguments)
    return [arguments[name] for name in names[:count]], {name: arguments[name] for name in reversed(names[count:])}


@pytest.mark.quick
@pytest.mark.parametrize(("named", "by_position", "jit"), CALLS)
def test_roles_by_position_or_name_in_calls_by_either(named, by_position, jit):
    f = optax_accum.value_and_grad(linear, microbatch_size=5, has_aux=True, batch_argnums=ROLES[named]["batch_argnums"])
    args, kwargs = split(ARGUMENTS, by_position)
    (loss, carry), grad = (jax.jit(f) if jit else f)(W, *args, **kwargs)
    want = jax.value_and_grad(linear, has_aux=True)(W, **ARGUMENTS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ((loss, carry), grad), want)


@pytest.mark.sweep
@IN_EACH_WAY
def test_roles_of_a_micro_step(named, by_position, jit):
    def loss(w, x, y, carry, key, table):
        return linear(w, x, y, carry, key, table)[0]

    options = {**ROLES[named]}
    options["whole_argnums"] = (options.pop("carry_argnum"), *np.atleast_1d(options["whole_argnums"]).tolist())
    step = optax_accum.value_and_apply_gradients(loss, TX, **options)
    w, state = W, TX.init(W)
    for rows in (slice(0, 5), slice(5, 12)):  # they count by their rows
        args, kwargs = split({**ARGUMENTS, "x": X[rows], "y": Y[rows]}, by_position)
        _, w, state = (jax.jit(step) if jit else step)(w, state, *args, **kwargs)
    np.testing.assert_allclose(w, W - 0.5 * jax.grad(loss)(W, **ARGUMENTS), rtol=1e-5)


@IN_EACH_WAY
def test_a_function_of_rows_needs_no_role_but_the_batch(named, by_position, jit):
    outputs = lambda w, x, y, carry, key, table: x @ w - y + carry + jnp.sum(table) + 0 * jax.random.normal(key)
    f = optax_accum.microbatched(outputs, microbatch_size=5, batch_argnums=ROLES[named]["batch_argnums"])
    args, kwargs = split(ARGUMENTS, by_position)
    got = (jax.jit(f) if jit else f)(W, *args, **kwargs)
    np.testing.assert_allclose(got, outputs(W, **ARGUMENTS), rtol=1e-5)


@pytest.mark.parametrize("argnums", [0, "w", (0,), ("w",)])
def test_what_is_differentiated_by_name_and_passed_by_keyword(argnums):
    f = optax_accum.value_and_grad(squares, 3, argnums=argnums, batch_argnums=("y", "x"))
    want = jax.grad(squares)(W, X, Y)
    for args, kwargs in (((W,), {"x": X, "y": Y}), ((), {"y": Y, "x": X, "w": W})):
        grads = f(*args, **kwargs)[1]
        np.testing.assert_allclose(grads if argnums in (0, "w") else grads[0], want, rtol=1e-5)


def test_each_micro_batch_has_a_key_of_its_own_whichever_way_it_comes():
    want = sum(jax.grad(noisy)(W, X[i::3], jax.random.fold_in(KEY, i)) for i in range(3)) / 3
    for named in (2, -1, "key"):
        f = optax_accum.reduce_microbatches(jax.grad(noisy), 3, rng_argnum=named)
        for grads in (f(W, X, KEY), f(W, X, key=KEY), f(W, key=KEY, x=X)):
            np.testing.assert_allclose(grads, want, rtol=1e-5)


def partial_of_first(cfg, w, x, y):
    return cfg * squares(w, x, y)


def only_by_keyword(w, *, x, y):
    return squares(w, x, y)


def any_keyword(w, **batch):
    return squares(w, **batch)


def any_position(w, *batch):
    return squares(w, *batch)


@functools.wraps(squares)
def wrapper(*args, **kwargs):
    return squares(*args, **kwargs)


@functools.wraps(squares)
def adds_an_argument(w, scale, x, y):
    return scale * squares(w, x, y)


class Callable:
    def __call__(self, w, x, y):
        return squares(w, x, y)


KINDS = {  # fun, how its batch is named, how it is called
    "keyword-only": (only_by_keyword, ("x", "y"), (), {"x": X, "y": Y}),
    "**kwargs": (any_keyword, ("x", "y"), (), {"x": X, "y": Y}),
    "*args": (any_position, (1, -1), (X, Y), {}),
    "partial of the first": (functools.partial(partial_of_first, 1.0), (1, "y"), (X,), {"y": Y}),
    "partial of a keyword": (functools.partial(squares, y=Y[0]), "x", (X,), {}),
    "wrapper": (wrapper, (1, 2), (X,), {"y": Y}),
    "jit": (jax.jit(squares), (-2, -1), (), {"x": X, "y": Y}),
    "checkpoint": (jax.checkpoint(squares), (1, 2), (), {"x": X, "y": Y}),
    "adds an argument": (adds_an_argument, (2, "y"), (1.0, X), {"y": Y}),
    "object": (Callable(), ("x", "y"), (X, Y), {}),
    "method": (Callable().__call__, (1, 2), (X,), {"y": Y}),
}


@pytest.mark.parametrize(
    "kind", sweep(KINDS, but=KINDS.keys() - {"keyword-only", "partial of a keyword", "jit", "checkpoint"})
)
def test_functions_of_every_kind(kind):
    fun, batch, args, kwargs = KINDS[kind]
    want = jax.grad(fun)(W, *args, **kwargs)
    got = optax_accum.value_and_grad(fun, microbatch_size=5, batch_argnums=batch)(W, *args, **kwargs)[1]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    tx = optax_accum.accumulate_gradients(optax.sgd(0.5), 1)
    step = optax_accum.value_and_apply_gradients(fun, tx, batch_argnums=batch)
    np.testing.assert_allclose(step(W, tx.init(W), *args, **kwargs)[1], W - 0.5 * want, rtol=1e-5)
    cut = optax_accum.reduce_microbatches(jax.grad(fun), microbatch_size=5, batch_argnums=batch)
    np.testing.assert_allclose(cut(W, *args, **kwargs), want, rtol=1e-5)


def test_what_is_accumulated_needs_no_parameters():
    """A call with some by position and some by keyword ended in an error of JAX; names of all arguments did, too."""
    fun = lambda *args, **kwargs: sum(map(jnp.sum, (*args, *kwargs.values())))
    calls = {("x", "y"): ((), {"x": X, "y": Y}), (0, "y"): ((X,), {"y": Y}), (0, 1): ((X, Y), {})}
    for batch, (args, kwargs) in calls.items():
        cut = optax_accum.reduce_microbatches(fun, 3, batch_argnums=batch, reduction="sum")
        np.testing.assert_allclose(cut(*args, **kwargs), X.sum() + Y.sum(), rtol=1e-5)
    named = optax_accum.reduce_microbatches(
        lambda x, y: jnp.sum(x) + jnp.sum(y), 3, batch_argnums=("x", "y"), reduction="sum"
    )
    np.testing.assert_allclose(named(X, Y), X.sum() + Y.sum(), rtol=1e-5)


def test_fun_is_called_as_the_user_does():
    def loss(w, x, /, y, scale=None, *, flag=True):
        assert scale is None
        assert flag
        return squares(w, x, y)

    f = optax_accum.value_and_grad(loss, 3, batch_argnums=("x", "y"))
    np.testing.assert_allclose(f(W, X, y=Y)[1], jax.grad(squares)(W, X, Y), rtol=1e-5)


def test_a_keyword_that_is_none_goes_to_fun():
    """It went to the optimizer, and `fun` lacked it."""
    loss = lambda w, x, mask: jnp.mean((x @ w) ** 2) if mask is None else jnp.nan
    step = optax_accum.value_and_apply_gradients(loss, TX)
    np.testing.assert_allclose(step(W, TX.init(W), X, mask=None)[0], jnp.mean((X @ W) ** 2), rtol=1e-6)


def test_an_argument_that_no_role_names():
    with pytest.raises(ValueError, match=r"argument 'y' has shape.*Add 'y' to batch_argnums\.$"):
        optax_accum.value_and_grad(squares, num_microbatches=2)(W, X, y=Y)
    gradient = functools.partial(optax_accum.reduce_microbatches, jax.grad(squares), 2)
    with pytest.raises(
        ValueError,
        match=r"argument 'y' has shape.*Add 'y' to batch_argnums.*if every micro-batch needs all of it.*pass whole_argnums='y'",
    ):
        gradient()(W, X, y=Y)
    with pytest.raises(ValueError, match="argument 'key' is a key. Pass rng_argnum='key'.*whole_argnums='key'"):
        optax_accum.reduce_microbatches(jax.grad(noisy), 2)(W, X, key=KEY)
    whole = gradient(whole_argnums="y")
    with pytest.raises(TypeError, match="shape"):  # and it is whole
        whole(W, X, y=Y)


@pytest.mark.parametrize("batch", [2, -1])
def test_a_plan_for_a_batch_that_comes_last(batch):
    loss = lambda w, scale, x: scale * jnp.mean((x @ w) ** 2)
    how = {"batch_argnums": batch, "budget": "1GB", "progress": False, "candidates": [2]}
    found = optax_accum.plan.fit(optax_accum.plan.of_loss(loss, optax.sgd(0.5)), W, 2.0, X, run=False, **how)
    assert (found.global_batch, found.num_microbatches) == (12, 2)


@FACTORIES
@pytest.mark.parametrize("role", ["batch_argnums", "whole_argnums", "rng_argnum"])
@pytest.mark.parametrize("name", [2, "y"])
def test_an_argument_that_does_not_come(run, role, name):
    loss = lambda w, x, y=None: jnp.mean((x @ w) ** 2)
    message = (
        rf"{role} must name an argument that is passed: {role}={name!r} is not, in a call with 2 by position and no"
    )
    with pytest.raises(ValueError, match=message):
        run(loss, W, X, **{role: name})


@FACTORIES
@pytest.mark.parametrize(("batch", "whole"), [(1, "x"), ("x", 1), ("x", -1)])
def test_an_argument_has_one_role(run, batch, whole):
    with pytest.raises(ValueError, match=r"one role: .*_argnums=.* and whole_argnums=.* name the same one\. Pass"):
        run(lambda w, x: 0.0, None, batch_argnums=batch, whole_argnums=whole)  # when it is built
    with pytest.raises(ValueError, match=r"one role: batch_argnums=1 and whole_argnums=-1 name"):
        run(lambda w, *x: 0.0, W, X, whole_argnums=-1)  # which only a call tells


@FACTORIES
@pytest.mark.parametrize("given", [1.0, True, None, {"x"}, (1, None), b"x"], ids=repr)
def test_what_names_no_argument(run, given):
    with pytest.raises(TypeError, match="batch_argnums must be the position or the name of an argument, or a tuple"):
        run(squares, None, batch_argnums=given)
    if given is not None:
        with pytest.raises(TypeError, match="rng_argnum must be the position or the name of an argument, or None"):
            run(squares, None, rng_argnum=given)


@pytest.mark.parametrize("run", [cut, micro_step])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_numbers_in_a_batch_is_refused(run, jit, kind):
    def loss(w, batch):
        return jnp.mean((batch["x"] @ w - jnp.stack(list(map(jnp.asarray, batch["y"])))) ** 2)

    labelled = lambda y: run(loss, W, {"x": X, "y": y})
    labels = kind(map(float, range(len(X))))
    with pytest.raises(
        TypeError, match=rf"Numbers in a {kind.__name__} are not split.*argument 1\['y'\] holds 12.*jnp"
    ):
        (jax.jit(labelled) if jit else labelled)(labels)
    if run is micro_step:  # a loop over rows in Python is another program for more of them
        with pytest.warns(UserWarning, match="counts by its rows"):
            labelled(jnp.asarray(labels))
    run(lambda w, batch: squares(w, batch[0], batch[1] + batch[2][0] * batch[3]), W, (X, Y, (1, 2.0), np.float32(3)))


@pytest.mark.parametrize("jit", [False, True])
def test_a_keyword_that_fun_names_goes_to_fun(jit):
    def loss(w, x, y, *, scale=1.0, train=False):
        return scale * squares(w, x, y) * (10 if train else 1)

    seen = []

    def update(grads, state, params=None, *, height, **extra):
        seen.append((height, sorted(extra)))
        return jax.tree.map(lambda g: g * extra.get("width", 1.0), grads), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = optax_accum.accumulate_gradients(inner, 1)
    step = optax_accum.value_and_apply_gradients(loss, tx)
    step = jax.jit(step, static_argnames=("train", "height")) if jit else step
    value, *_ = step(W, tx.init(W), X, y=0 * Y[:1], scale=2.0, train=True, height=3, width=4.0)
    np.testing.assert_allclose(value, 20 * squares(W, X, 0 * Y), rtol=1e-6)
    assert (3, ["value", "width"]) in seen
    assert not any("train" in extra for _, extra in seen)


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("jit", [True, False])
def test_a_keyword_that_nobody_reads_is_refused(accumulates, jit):
    """What `fun` would take as one of its **kwargs goes to the optimizer, which has nothing to do with it."""
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 1) if accumulates else optax.adam(0.1)
    for loss in (lambda w, x, **kwargs: squares(w, x, 0 * x[:, 0]), lambda w, x: squares(w, x, 0 * x[:, 0])):
        step = optax_accum.value_and_apply_gradients(loss, tx)
        step = jax.jit(step, static_argnames="train") if jit else step
        with pytest.raises(TypeError, match=r"'train' is neither, and fun is \(w, x(, \*\*kwargs)?\). Name it there"):
            step(W, tx.init(W), X, train=True)
    with pytest.raises(TypeError, match="'rows' is neither"):
        step(W, tx.init(W), X, rows=3)


def test_a_keyword_that_a_member_of_a_chain_reads():
    scaled = lambda grads, state, params=None, *, factor, **_: (optax.tree.scale(factor, grads), state)
    member = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), scaled)
    for tx in (
        optax.chain(optax.sgd(1.0), member),
        optax_accum.accumulate_gradients(optax.chain(optax.sgd(1.0), member), 1),
    ):
        step = optax_accum.value_and_apply_gradients(lambda w, x: squares(w, x, 0 * x[:, 0]), tx)
        once, twice = (step(W, tx.init(W), X, factor=factor)[1] for factor in (1.0, 2.0))
        np.testing.assert_allclose(twice - W, 2 * (once - W), rtol=1e-4)


def test_the_number_of_rows_is_an_integer():
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 2)
    assert tx.update(W, tx.init(W), W, rows=3)[1].weight == 3
    for rows in ("a", 2.5, 0):
        with pytest.raises((TypeError, ValueError), match="rows must be an integer >= 1"):
            tx.update(W, tx.init(W), W, rows=rows)


def test_parameters_may_have_as_many_rows_as_the_batch():
    weights = jnp.arange(float(len(X) ** 2)).reshape(len(X), len(X)) / 1e3
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(len(X), len(X))), jnp.float32)
    small = optax_accum.microbatched(lambda w, x: x @ w[0], 2)
    np.testing.assert_allclose(small([weights], batch), batch @ weights, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize(
    "options", [*sweep([{"num_microbatches": 4}, {"microbatch_size": 4}]), {"num_microbatches": 6}], ids=str
)
def test_groups_stay_together(options):
    whole = jax.jit(jax.grad(in_groups))(W, X)
    found = jax.jit(optax_accum.value_and_grad(in_groups, **options))(W, X)[1]
    np.testing.assert_allclose(found, whole, rtol=1e-5)  # nothing said: the loss tells
    torn = jax.jit(optax_accum.reduce_microbatches(jax.grad(in_groups), num_microbatches=3))(W, X)
    assert not np.allclose(torn, whole, rtol=1e-3)  # each by itself they are torn apart
    groups = X.reshape(-1, 2, *X.shape[1:])  # as rows: the remedy
    merged = lambda w, x: jax.grad(in_groups)(w, x.reshape(-1, *x.shape[2:]))
    got = jax.jit(optax_accum.reduce_microbatches(merged, **options))(W, groups)
    np.testing.assert_allclose(got, whole, rtol=1e-5)


def test_outputs_of_groups_come_back_in_order():
    swap = lambda w, x: (x @ w).reshape(-1, 2)[:, ::-1].reshape(-1)
    apply = optax_accum.microbatched(swap, microbatch_size=8)
    np.testing.assert_allclose(apply(W, X), swap(W, X), rtol=1e-6)


@pytest.mark.sweep
def test_groups_over_devices():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        f = optax_accum.value_and_grad(in_groups, microbatch_size=4, devices="data")
        whole = jax.jit(jax.grad(in_groups))(W, X)
        np.testing.assert_allclose(jax.jit(f)(W, X)[1], whole, rtol=1e-5)
        merged = lambda w, x: in_groups(w, x.reshape(-1, *x.shape[2:]))
        tx = optax_accum.accumulate_gradients(optax.sgd(1.0), 1, devices="data")
        step = jax.jit(optax_accum.value_and_apply_gradients(merged, tx))
        groups = X.reshape(-1, 2, *X.shape[1:])  # as rows: each device takes three
        np.testing.assert_allclose(step(W, jax.jit(tx.init)(W), groups)[1], W - whole, rtol=1e-5)


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

    got = optax_accum.microbatched(encode, 3)(W, X, True, "tower", jnp.tanh)
    np.testing.assert_allclose(got, jnp.tanh(X @ W), rtol=1e-6)


# A key that fun closes over, or makes.

DROPS = jax.random.key(3)


def dropped(w, x, y, key=None):
    kept = jax.random.bernoulli(DROPS if key is None else key, 0.9, x.shape)
    return squares(w, jnp.where(kept, x, 0), y)


METHODS = {
    "reduce_microbatches": lambda fun, **roles: optax_accum.reduce_microbatches(
        jax.grad(fun), 3, batch_argnums=(1, 2), **roles
    ),
}


@pytest.mark.parametrize("jit", [*sweep([jax.jit]), lambda fun: fun], ids=["jit", "eager"])
@pytest.mark.parametrize("method", METHODS)
def test_a_key_that_no_argument_holds_is_refused(method, jit):
    """Every micro-batch drew the same mask, without a word."""
    make, message = METHODS[method], "A random key must be an argument of fun"
    with pytest.raises(ValueError, match=message):
        jit(make(lambda w, x, y: dropped(w, x, y)))(W, X, Y)
    with pytest.raises(ValueError, match=message):  # a key of the step
        jit(lambda w, x, y, key: make(lambda w, x, y: dropped(w, x, y, key))(w, x, y))(W, X, Y, DROPS)
    jit(make(dropped, rng_argnum="key"))(W, X, Y, key=DROPS)
    jit(make(dropped, whole_argnums="key"))(W, X, Y, key=DROPS)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_drawn_for_all_rows_alike_may_come_from_any_key(method):
    """Random features; and a loss that only takes micro-batches of one size tells nothing."""
    features = lambda w, x, y: squares(w, x * jax.random.normal(DROPS, x.shape[1:])[None], y)
    found = METHODS[method](features)(W, X, Y)
    np.testing.assert_allclose(found, jax.grad(features)(W, X, Y), rtol=1e-5)
    size = len(X) // 3
    METHODS[method](lambda w, x, y: dropped(w, x.reshape(size, -1), y.reshape(size, -1)[:, 0]))(W, X, Y)


def test_a_function_that_holds_its_key_draws_for_each_row_what_it_draws_in_the_whole_batch():
    own = lambda w, x: jax.random.bernoulli(DROPS, 0.5, x.shape) * (x @ w)[:, None]
    for size in ({"num_microbatches": 1}, {"num_microbatches": 3}, {"microbatch_size": 2 * len(X)}):
        np.testing.assert_array_equal(optax_accum.microbatched(own, **size)(W, X), own(W, X))
        optax_accum.value_and_grad(lambda w, x: own(w, x).mean(), **size)(W, X)
