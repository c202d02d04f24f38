"""Losses of which each device takes something from the others: statistics of all rows, the negatives of all devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from tests.pairs import every_pair
from tests.tiers import one_of_each, sweep

DEVICES, ROWS = 4, 4  # in a micro-batch on each device
INNER = optax.adam(0.1, eps=1e-2)


def features(params, rows):
    return jnp.tanh(rows["x"] @ params["w"]) + params["b"][None]


def of_statistics(mean, gather):
    """Returns the loss of each row, normalised with the mean over all devices."""

    def loss(params, rows):
        z = features(params, rows)
        return jnp.sum((z - mean(z)) ** 3 + rows["x"] ** 2 * z, axis=-1)

    return loss


def of_negatives(mean, gather):
    """Returns the loss of each row against the rows of all devices."""

    def loss(params, rows):
        z = features(params, rows)
        return jax.nn.logsumexp(z @ gather(z).T, axis=-1)

    return loss


KINDS = {"statistics": of_statistics, "negatives": of_negatives}
ALONE = {"mean": lambda z: jnp.mean(z, axis=0, keepdims=True), "gather": lambda z: z}
AMONG = {
    "mean": lambda z: jax.lax.pmean(jnp.mean(z, axis=0, keepdims=True), "data"),
    "gather": lambda z: jax.lax.all_gather(z, "data", tiled=True),
}


def mean_of(kind):
    each = KINDS[kind](**AMONG)
    return lambda params, rows: jnp.sum(each(params, rows) * rows["mask"]) / jnp.maximum(rows["mask"].sum(), 1)


def ratio_of(kind):
    each = KINDS[kind](**AMONG)
    return lambda params, rows: optax_accum.Ratio(jnp.sum(each(params, rows) * rows["mask"]), rows["mask"].sum())


FORMS = {"mean": mean_of, "Ratio": ratio_of}


def problem():
    """Two micro-batches of rows that count, or not: each device has another number, and two of them once none."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: np.asarray(rng.normal(size=shape), np.float32)
    counts = np.array([[4, 0, 3, 2], [2, 4, 1, 0]])
    rows = {"x": draw(2, DEVICES, ROWS, 3), "mask": np.asarray(np.arange(ROWS) < counts[..., None], np.float32)}
    return {"w": draw(3, 3), "b": draw(3)}, rows


def expected(kind, params, rows):
    """Returns value, gradient and parameters after one update, of both micro-batches in one program of one device."""
    each = KINDS[kind](**ALONE)
    flat = jax.tree.map(lambda leaf: leaf.reshape(2, DEVICES * ROWS, *leaf.shape[3:]), rows)

    def loss(params):
        losses = jax.vmap(functools.partial(each, params))(flat)
        return jnp.sum(losses * flat["mask"]) / jnp.sum(flat["mask"])

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return value, grads, optax.apply_updates(params, INNER.update(grads, INNER.init(params), params)[0])


TYPES = [AxisType.Auto, AxisType.Explicit]


@pytest.fixture(params=TYPES, ids=str)
def mesh(request):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(request.param,), devices=jax.devices()[:DEVICES])
    with jax.set_mesh(mesh):
        yield mesh


def place(mesh, tree, spec):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def check(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


@jax.custom_vjp
def same(leaf):
    return leaf


same.defvjp(lambda leaf: (leaf, None), lambda _, cotangent: (cotangent,))


def told():
    """Returns an inner optimizer whose state ends with the value that it was given."""

    def update(grads, state, params=None, *, value, **_):
        updates, state = INNER.update(grads, state[0], params)
        return updates, (state, value)

    return optax.GradientTransformationExtraArgs(lambda params: (INNER.init(params), jnp.zeros([])), update)


def micro_steps(mesh, fun, tx, rows, params, **options):
    """Returns the parameters and the state after two micro-steps."""
    step = jax.jit(optax_accum.value_and_apply_gradients(fun, tx, **options))
    now = place(mesh, params, P())
    state = tx.init(now)
    for index in range(2):
        _, now, state = step(now, state, place(mesh, micro_batch(rows, index), P("data")))
    assert state.gradient_step == 1
    return now, state


def micro_batch(rows, index):
    return jax.tree.map(lambda leaf: leaf[index].reshape(DEVICES * ROWS, *leaf.shape[3:]), rows)


def count(rows):
    return rows["mask"].sum()


HOW = ("in place", "added after", "written", "looked at first")


FORMED = [*(("mean", how) for how in HOW), *(("Ratio", how) for how in HOW[:3])]


OVER_CALLS = every_pair(TYPES, KINDS, FORMED)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("mesh", "kind", "formed"),
    sweep(OVER_CALLS, but=[case for case in one_of_each(OVER_CALLS) if case[2] == FORMED[5]]),
    indirect=["mesh"],
    ids=str,
)
def test_over_calls(mesh, kind, formed):
    """The weight of a device is no factor of a gradient in which the losses of all have a part."""
    form, how = formed
    params, rows = problem()
    value, _, updated = expected(kind, params, rows)
    fun = FORMS[form](kind)
    if how == "added after":
        plain, fun = fun, lambda params, rows: plain(jax.tree.map(same, params), rows)
    policy = {"nonfinite": "skip"} if how == "looked at first" else {}
    tx = optax_accum.accumulate_gradients(told(), 2, devices="data", **policy)
    options = {"weight_fn": count if form == "mean" else None}
    now, state = micro_steps(mesh, fun, tx, rows, params, **options)
    check((now, state.inner_opt_state[1]), (updated, value))


def number(fun):
    """The same function, whose Ratio is divided."""

    def run(params, rows):
        found = fun(params, rows)
        return jnp.sum(found.total) / jnp.sum(found.count) if isinstance(found, optax_accum.Ratio) else found

    return run


@pytest.mark.parametrize(
    ("mesh", "kind", "form"),
    sweep(every_pair(TYPES, KINDS, FORMS), but=one_of_each(every_pair(TYPES, KINDS, FORMS))[:1]),
    indirect=["mesh"],
    ids=str,
)
def test_within_a_call(mesh, kind, form):
    """A micro-batch is run by all devices or by none: else they would wait for one another, or pair different ones."""
    params, rows = problem()
    value, grads, _ = expected(kind, params, rows)
    weigh = count if form == "mean" else None
    cut = optax_accum.reduce_microbatches(FORMS[form](kind), 2, weight_fn=weigh, devices="data")
    batch = jax.tree.map(lambda leaf: np.moveaxis(leaf, 0, 2).reshape(-1, *leaf.shape[3:]), rows)  # row r: of r mod 2
    run = jax.jit(jax.value_and_grad(number(cut)))
    check(run(place(mesh, params, P()), place(mesh, batch, P("data"))), (value, grads))


@pytest.mark.parametrize("form", FORMS)
def test_value_and_grad_refuses_them_by_name(mesh, form):
    """For partial sums, too."""
    params, rows = problem()
    message = (
        r"from the other devices of \('data',\) \(psum.*test_coupled.py:.*jax.value_and_grad\(.*reduce_microbatches"
    )
    for devices in ("data", optax_accum.Devices("data", to="partial")):
        cut = jax.jit(optax_accum.value_and_grad(FORMS[form]("statistics"), num_microbatches=1, devices=devices))
        with pytest.raises(ValueError, match=message):
            cut(params, place(mesh, micro_batch(rows, 0), P("data")))


@pytest.mark.parametrize("mesh", sweep(TYPES, but=[AxisType.Auto]), indirect=True, ids=str)
def test_partial_sums_of_weighed_losses(mesh):
    """Each has gradients of the losses of others, of which its own weight is no factor; a Ratio has its own count."""
    params, rows = problem()
    options = {"num_microbatches": 1, "devices": optax_accum.Devices("data", to="partial")}
    first = micro_batch(rows, 0)
    placed = place(mesh, params, P()), place(mesh, first, P("data"))
    with pytest.raises(ValueError, match="takes something from the other devices.*each device has its own weight"):
        jax.jit(optax_accum.reduce_microbatches(mean_of("statistics"), weight_fn=count, **options))(*placed)
    cut = number(optax_accum.reduce_microbatches(ratio_of("statistics"), **options))
    each = KINDS["statistics"](**ALONE)
    whole = lambda params: jnp.sum(each(params, first) * first["mask"]) / jnp.sum(first["mask"])
    check(jax.jit(jax.value_and_grad(cut))(*placed), jax.value_and_grad(whole)(params))


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", sweep(TYPES, but=[AxisType.Auto]), indirect=True, ids=str)
def test_what_takes_nothing_adds_no_number(mesh):
    """One that does adds its weight over the devices, beside what it takes."""
    params, rows = problem()
    alone = lambda params, rows: jnp.sum(features(params, rows) ** 2 * rows["mask"][:, None]) / rows["mask"].sum()
    tx = optax_accum.accumulate_gradients(INNER, 2, devices="data")
    collectives = []
    for fun in (alone, mean_of("statistics")):
        step = jax.jit(optax_accum.value_and_apply_gradients(fun, tx, weight_fn=count))
        now = place(mesh, params, P())
        program = step.lower(now, tx.init(now), place(mesh, micro_batch(rows, 0), P("data"))).compile()
        collectives.append(len(optax_accum.sharding.count_collectives(program).operations))
    assert collectives[0] < collectives[1]
