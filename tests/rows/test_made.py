"""Rows that no batch gave: taken from parameters, made by a loop or by position, in bodies, in maps, in references.

Each loss is named by what makes its rows. All losses of a kind are one program, which is compiled once.
"""

import inspect
import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from tests.rows import against
from tests.rows.against import farthest
from tests.tiers import sweep

pytestmark = pytest.mark.usefixtures("rank_promotion")

N, WIDTH = 12, 4
X = np.sin(np.arange(N * WIDTH, dtype=np.float32)).reshape(N, WIDTH)
PARAMS = {
    "w": np.cos(np.arange(WIDTH, dtype=np.float32)),
    "z": np.cos(np.arange(40 * WIDTH, dtype=np.float32)).reshape(40, WIDTH),
    "cls": np.full((1, 1, WIDTH), 0.3, np.float32),
    "s": np.float32([1, 2]),
}
AT_ONCE = "All rows run at once"


def square(rows):
    return jnp.mean(rows**2)


def hidden(p, x):
    return jnp.tanh(x * p["w"])


def rows_of(p, x):
    """As many rows of a table as the batch has."""
    return p["z"][: len(x)]


# Rows of parameters


def with_class_token(p, x):
    tokens = jnp.concatenate([jnp.tile(p["cls"], (len(x), 1, 1)), x[:, None]], axis=1)
    return square(jnp.tanh(tokens * p["w"]))


def with_broadcast_class_token(p, x):
    token = jnp.broadcast_to(p["cls"], (len(x), 1, WIDTH))
    return square(jnp.tanh(jnp.concatenate([token, x[:, None]], axis=1) * p["w"]))


def stacked_by_a_scan(p, x):
    stacked = lax.scan(lambda c, _: (jnp.sin(c + p["w"]), c), p["w"], None, length=len(x))[1]
    return square(stacked * x)


def normalised(p, x):
    y = x * p["w"] + rows_of(p, x)
    y = (y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-3)
    return square(jnp.tanh(y * p["z"][0]) * rows_of(p, x))


TAKEN = {
    "a term of its own": lambda p, x: square(x @ p["w"]) + square(rows_of(p, x)),
    "added": lambda p, x: square(jnp.tanh((x + rows_of(p, x)) @ p["w"])),
    "added, and the next rows": lambda p, x: square(x @ p["w"] + rows_of(p, x)[:, 1] + p["z"][1 : len(x) + 1, 0]),
    "from a row on": lambda p, x: square(x + lax.dynamic_slice(p["z"], (3, 0), (len(x), WIDTH))),
    "each third": lambda p, x: square(x * p["z"][: 3 * len(x) : 3]),
    "one for two": lambda p, x: square(x.reshape(-1, 8) * p["z"][: len(x) // 2].repeat(2, 1)),
    "sorted": lambda p, x: square(jnp.sort(rows_of(p, x), 0) * hidden(p, x)),
    "normalised with the batch": normalised,
    "a variance": lambda p, x: jnp.var(hidden(p, x) * rows_of(p, x)),
    "a ratio": lambda p, x: jnp.sum(hidden(p, x) * rows_of(p, x)) / jnp.sum(jnp.exp(x @ p["w"])),
    "the square of a sum": lambda p, x: square(hidden(p, x)) + jnp.sum(rows_of(p, x)) ** 2 / len(x),
    "contracted with the batch": lambda p, x: jnp.sum(jnp.sin(x.T @ rows_of(p, x))),
    "all pairs": lambda p, x: square(rows_of(p, x) @ rows_of(p, x).T * (x @ p["w"])[:, None]),
    "nothing of rows": lambda p, x: square(hidden(p, x)) + 0.1 * jnp.sum(p["z"] ** 2),
}
REPEATED = {
    "a class token, tiled": with_class_token,
    "a class token, broadcast": with_broadcast_class_token,
    "one row, tiled": lambda p, x: square(jnp.tile(p["z"][:1], (len(x), 1)) * hidden(p, x)),
    "three rows, tiled": lambda p, x: square(jnp.tile(p["z"][:3], (len(x) // 3, 1)) * x),
    "three rows, padded": lambda p, x: square(jnp.pad(p["z"][:3], ((0, len(x) - 3), (0, 0))) + hidden(p, x)),
    "along two axes": lambda p, x: square(jnp.tile(p["w"][:1], (len(x), len(x))) @ hidden(p, x)),
    "nothing but a broadcast": lambda p, x: jnp.mean(jnp.exp(jnp.broadcast_to(p["s"], (len(x), 2)))),
    "from a length of one": lambda p, x: square(lax.broadcast_in_dim(p["cls"][0], (len(x), WIDTH), (0, 1)) * x),
    "by a scan": stacked_by_a_scan,
    "a mean, tiled": lambda p, x: square(hidden(p, x) * jnp.tile(hidden(p, x).mean(0)[None], (len(x), 1))),
    "a mean, padded": lambda p, x: square(
        hidden(p, x) * jnp.pad(hidden(p, x).mean(0)[None], ((0, len(x) - 1), (0, 0)))
    ),
}

# In bodies


def counted(x):
    return lax.fori_loop(0, len(x), lambda i, s: s + 0.1, 0.0)


def over_layers(body):
    return lambda p, x: square(lax.scan(lambda c, w: (body(p, c, w), None), x, p["z"][:3])[0])


def with_tiled_rows(p, c, w):
    return jnp.tanh(c * w + jnp.tile(w[None], (len(c), 1)) + rows_of(p, c))


def in_a_branch(p, x):
    return square(lax.cond(p["w"][0] > 0, lambda: x * p["w"] + rows_of(p, x), lambda: x))


IN_BODIES = {
    "of a checkpoint": lambda p, x: square(jax.checkpoint(lambda p, x: jnp.tanh(x * p["w"] + rows_of(p, x)))(p, x)),
    "of layers": over_layers(lambda p, c, w: jnp.tanh(c * w + rows_of(p, c))),
    "of layers, checkpointed": over_layers(jax.checkpoint(with_tiled_rows)),
    "n steps in a checkpoint": lambda p, x: square(jax.checkpoint(lambda p, x: x * p["w"] * counted(x))(p, x)),
    "of a branch": in_a_branch,
    "n steps in layers": over_layers(lambda p, c, w: jnp.tanh(c * w * counted(c))),
    "n ones in a checkpoint": lambda p, x: square(
        jax.checkpoint(lambda p, x: x * p["w"] * jnp.sum(jnp.ones(len(x))))(p, x)
    ),
}

# In maps of each row, which see n

OF_ONE_ROW = {
    "n copies": lambda v, p, x: jnp.sum(jnp.full(len(x), v @ p["w"])),
    "the numbers of rows": lambda v, p, x: jnp.sum(jnp.arange(len(x)) * (v @ p["w"])),
    "n places": lambda v, p, x: jnp.sum(jnp.linspace(0, 1, len(x)) * (v @ p["w"])),
    "n steps": lambda v, p, x: lax.fori_loop(0, len(x), lambda i, s: s + v @ p["w"], 0.0),
    "n zeros": lambda v, p, x: jnp.sum(jnp.zeros((len(x), 5)) + jnp.tanh(v @ p["w"])),
    "n rows of a table": lambda v, p, x: jnp.sum(rows_of(p, x) @ v),
    "divided by n": lambda v, p, x: v @ p["w"] / len(x),
    "nothing of n": lambda v, p, x: jnp.tanh(v @ p["w"]),
    "n copies in a jit": lambda v, p, x: jax.jit(lambda v: jnp.sum(jnp.full(len(x), v @ p["w"])))(v),
    "n copies in a checkpoint": lambda v, p, x: jax.checkpoint(lambda v: jnp.sum(jnp.full(len(x), v @ p["w"])))(v),
}


def mapped(one):
    return lambda p, x: square(lax.map(lambda v: one(v, p, x), x))


def scanned(one):
    return lambda p, x: square(lax.scan(lambda _, v: (None, one(v, p, x)), None, x)[1])


def one_hot_places(p, x):
    one = lambda of: jnp.sum(jax.nn.one_hot(of[0], len(x)) * (of[1] @ p["w"]))
    return square(lax.map(one, (jnp.arange(len(x)), x)))


def in_batches_of(size):
    return lambda p, x: square(lax.map(lambda v: jnp.tanh(v @ p["w"]), x, batch_size=size))


MAPS = {name: mapped(one) for name, one in OF_ONE_ROW.items()} | {
    "a plain mean": lambda p, x: jnp.mean(lax.map(lambda v: jnp.sum(jnp.full(x.shape[0], v @ p["w"])), x)),
    "one-hot places": one_hot_places,
}
SCANS = {name: scanned(one) for name, one in OF_ONE_ROW.items()}

# Keys


def key_of_the_model(p):
    return jax.random.key(lax.stop_gradient(jnp.sum(p["w"]) * 100).astype(jnp.int32))


def of_keys(keys):
    return jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)


def of_numbers(key, numbers):
    return of_keys(jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers))


KEYS = {
    "of the model": lambda p, x: square(hidden(p, x) * jax.random.normal(key_of_the_model(p), x.shape)),
    "of the model, one a row": lambda p, x: square(
        hidden(p, x) * of_keys(jax.random.split(key_of_the_model(p), len(x)))
    ),
}
for generator in ("rbg", "unsafe_rbg", "threefry2x32"):
    key = lambda generator=generator: jax.random.key(3, impl=generator)
    KEYS |= {
        f"{generator}, one a row": lambda p, x, key=key: square(
            hidden(p, x) * of_keys(jax.random.split(key(), len(x)))
        ),
        f"{generator}, one for all": lambda p, x, key=key: square(hidden(p, x) * jax.random.normal(key(), x.shape)),
        f"{generator}, numbered": lambda p, x, key=key: square(hidden(p, x) * of_numbers(key(), jnp.arange(len(x)))),
    }

# Rules of the user's, in narrow numbers


def with_a_forward_rule(p, x):
    taken = jax.custom_jvp(lambda z: z[: len(x)] * 1.0)
    taken.defjvp(lambda primals, tangents: (taken(*primals), 3 * tangents[0][: len(x)]))
    return square(hidden(p, x) + taken(p["z"]))


def with_a_backward_rule(p, x):
    def clipped(z, ct):
        return (jnp.clip(jnp.zeros_like(z).at[: len(x)].add(ct), -0.01, 0.01),)

    taken = jax.custom_vjp(lambda z: z[: len(x)] * 1.0)
    taken.defvjp(lambda z: (taken(z), z), clipped)
    return square(hidden(p, x) + taken(p["z"]))


RULES = {"forward": with_a_forward_rule, "backward": with_a_backward_rule}


def narrow(array):
    return array.astype(jnp.bfloat16)


def wide_square(rows):
    return square(rows.astype(jnp.float32))


NARROW = {
    "rows of a narrow table": lambda p, x: wide_square(
        jnp.tanh((narrow(x) + narrow(p["z"])[: len(x)]) @ narrow(p["w"]))
    ),
    "narrow rows of a table": lambda p, x: square(x + narrow(rows_of(p, x))),
    "from a row on": lambda p, x: wide_square(narrow(x) + lax.dynamic_slice(narrow(p["z"]), (3, 0), (len(x), WIDTH))),
    "a variance": lambda p, x: jnp.var((narrow(x) * narrow(p["z"])[: len(x)]).astype(jnp.float32)),
    "one row, tiled": lambda p, x: wide_square(narrow(x) * jnp.tile(narrow(p["cls"])[0] * 2, (len(x), 1))),
}

# Mutable arrays, and programs that are others for more rows


def summed_in_a_loop(p, x):
    weights, total = jax.new_ref(p["w"] * 1.0), jax.new_ref(jnp.zeros(len(x)))

    def body(i, carry):
        total[...] += jnp.tanh(x @ weights[...])
        return carry

    lax.fori_loop(0, 3, body, ())
    return square(jax.freeze(total))


def written_once(p, x):
    total = jax.new_ref(jnp.zeros(len(x)))
    total[...] += jnp.tanh(x @ p["w"])
    return square(jax.freeze(total))


def written_in_a_jit(p, x):
    @jax.jit
    def run(x, w):
        total = jax.new_ref(jnp.zeros(len(x)))
        total[...] += jnp.tanh(x @ w)
        return jax.freeze(total)

    return square(run(x, p["w"]))


def of_parameters_alone(p, x):
    total = jax.new_ref(jnp.zeros(WIDTH))
    total[...] += jnp.sin(p["w"])
    total[...] = total[...] * 2
    return square(x * jax.freeze(total))


def even_or_odd(p, x):
    return square(hidden(p, x)) if len(x) % 2 else jnp.mean(x * p["w"])


def few_or_many(p, x):
    return square(hidden(p, x)) if len(x) > 16 else jnp.mean(x * p["w"])


def nothing_in_common(p, x):
    return jnp.mean(x @ p["w"]) if len(x) > 16 else jnp.mean(jnp.exp(x)) * p["w"][0]


def of_eighths(p, x):
    return square(hidden(p, x)) if len(x) % 8 else square(x * p["w"])


REFERENCES = {
    "in a loop": summed_in_a_loop,
    "written once": written_once,
    "in a jit": written_in_a_jit,
    "of parameters alone": of_parameters_alone,
}
OTHER_PROGRAMS = {
    "all prefixes": lambda p, x: square(lax.associative_scan(jnp.add, hidden(p, x)) / len(x)),
    "a map in fours": in_batches_of(4),
    "a map in eights": in_batches_of(8),
    "a branch by parity": even_or_odd,
    "a branch by size": few_or_many,
    "a branch by eighths": of_eighths,
    "nothing in common": nothing_in_common,
}

KINDS = {
    "taken": TAKEN,
    "repeated": REPEATED,
    "in bodies": IN_BODIES,
    "maps": MAPS,
    "scans": SCANS,
    "keys": KEYS,
    "rules": RULES,
    "narrow": NARROW,
    "references": REFERENCES,
    "other programs": OTHER_PROGRAMS,
}
TOLERANCE = {"narrow": 3e-2}
WARNED = {*REFERENCES, "nothing in common"}


def assert_whole(kind, names, parts):
    """The value and the gradient of these losses of a kind; a warning where all rows run at once, and only there."""
    losses = [KINDS[kind][name] for name in names]
    funs = [fun for loss in losses for fun in (jax.value_and_grad(loss), optax_accum.value_and_grad(loss, parts))]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        results = jax.jit(lambda *args: [fun(*args) for fun in funs])(PARAMS, X)
    assert sum(AT_ONCE in str(each.message) for each in found) == len(found)
    differences = {name: farthest(results[2 * i + 1], results[2 * i]) for i, name in enumerate(names)}
    assert {name: far for name, far in differences.items() if not far < TOLERANCE.get(kind, 2e-5)} == {}
    assert len(found) == sum(name in WARNED for name in names)


@pytest.mark.parametrize("kind", sweep(KINDS, but=["scans", "rules", "references", "other programs"]))
def test_each_third_loss_of_a_kind(kind):
    assert_whole(kind, list(KINDS[kind])[::3], 5)


@pytest.mark.sweep
@pytest.mark.parametrize("parts", [2, 5, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_all_losses_of_a_kind(kind, parts):
    assert_whole(kind, list(KINDS[kind]), parts)


def test_the_numbers_of_a_term_of_parameters():
    """The mean of a table's first n rows is no k-th of it, and does not take the first rows of each micro-batch."""
    params = {"w": jnp.ones(4), "z": jnp.ones((40, 3))}
    x = jnp.sin(jnp.arange(48.0)).reshape(12, 4)
    loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2) + jnp.mean(p["z"][: x.shape[0]] ** 2)
    value, grads = jax.jit(optax_accum.value_and_grad(loss, 4))(params, x)
    np.testing.assert_allclose(value, 2.9496, atol=5e-5)
    np.testing.assert_allclose(grads["z"], np.repeat([[0.0556], [0]], [12, 28], axis=0) * np.ones((1, 3)), atol=5e-5)
    assert_near_the_whole(loss, params, x, 4)


def assert_near_the_whole(loss, params, batch, parts):
    funs = optax_accum.value_and_grad(loss, parts), jax.value_and_grad(loss)
    got, want = (jax.jit(fun)(params, batch) for fun in funs)
    assert farthest(got, want) < 2e-5


def test_an_index_that_does_not_hold_the_number_of_rows():
    """The places of 300 rows, as 8-bit integers, begin again at zero: a gather by them takes no own rows."""
    batch = {"x": jnp.sin(jnp.arange(1200.0)).reshape(300, 4), "i": jnp.arange(300) % 4}
    places = lambda h: jnp.arange(len(h)).astype(jnp.uint8)
    loss = lambda p, b: square((b["x"] * p["w"])[places(b["x"]), b["i"]])
    assert_near_the_whole(loss, {"w": jnp.asarray(PARAMS["w"])}, batch, 5)


# Outside jit: losses that look at values


def looks_at_a_sum(p, x, mask):
    if x.sum() > 0.3:  # here
        return square(x @ p["w"])
    return square(x)


def counts(p, x, mask):
    count = int(mask.sum())  # here
    return jnp.sum((x @ p["w"]) ** 2 * mask) / count


def logs(p, x, mask):
    logging.info("%s rows count", float(mask.sum()))  # here
    return jnp.sum((x @ p["w"]) ** 2 * mask) / mask.sum()


def normalises_and_looks(p, x, mask):
    y = x * p["w"]
    y = (y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-3)
    if x[0, 1] > 0.3:  # here
        y = y * p["w"]
    return square(jnp.tanh(y))


def takes_the_rows_that_count(p, x, mask):
    return square(x[mask > 0] @ p["w"])  # here


LOOK = [looks_at_a_sum, counts, logs, normalises_and_looks, takes_the_rows_that_count]


@pytest.mark.parametrize("loss", sweep(LOOK, but=[takes_the_rows_that_count]), ids=lambda loss: loss.__name__)
def test_a_loss_that_looks_at_values_runs_all_rows_at_once_and_says_so(loss):
    args = PARAMS, jnp.asarray(X), jnp.asarray(np.arange(N) % 3 > 0, jnp.float32)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        got = optax_accum.value_and_grad(loss, 4, batch_argnums=(1, 2))(*args)
    assert farthest(got, jax.value_and_grad(loss)(*args)) < 2e-6
    (warning,) = found
    lines, first = inspect.getsourcelines(loss)
    (here,) = (first + number for number, line in enumerate(lines) if "# here" in line)
    assert f"The loss looks at values, which no trace has, at test_made.py:{here}. {AT_ONCE}" in str(warning.message)


# On two devices

ON_TWO = {
    "taken": ["a term of its own", "normalised with the batch", "one for two"],
    "repeated": ["a class token, tiled", "three rows, padded", "by a scan"],
    "in bodies": ["of layers, checkpointed", "n steps in a checkpoint"],
    "maps": ["n copies"],
    "keys": ["of the model, one a row", "rbg, one a row"],
}


@pytest.mark.parametrize("kind", sweep(ON_TWO, but=["repeated"]))
def test_each_of_two_devices_takes_its_own_rows(kind):
    """As parameters lie on both, and each has half of the batch."""
    losses = [KINDS[kind][name] for name in ON_TWO[kind]]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        funs = [optax_accum.value_and_grad(loss, 3, devices="data") for loss in losses]
        found = jax.jit(lambda *args: [fun(*args) for fun in funs])(put(PARAMS, P()), put(X, P("data")))
    want = jax.jit(lambda *args: [jax.value_and_grad(loss)(*args) for loss in losses])(PARAMS, X)
    assert dict(zip(ON_TWO[kind], map(farthest, found, want), strict=True)) == pytest.approx(
        dict.fromkeys(ON_TWO[kind], 0), abs=2e-5
    )


def test_a_mutable_array_is_refused_over_devices():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="has a mutable array of its own, at test_made.py"):
        jax.jit(optax_accum.value_and_grad(written_once, 3, devices="data"))(
            PARAMS, jax.device_put(X, NamedSharding(mesh, P("data")))
        )


# Bodies whose traces have the same operations, of other operands


def chosen(n, of_params, of_rows):
    """Another operand for more rows; with n = d it has the same shape for n rows."""
    return of_params if n <= 16 else of_rows


def in_a_checkpoint(p, x):
    return jax.checkpoint(lambda p, x: jnp.tanh(chosen(len(x), p, x)))(p, x)


def passed_through(p, x):
    return jax.checkpoint(lambda p, x: (chosen(len(x), p, x), jnp.sin(x)))(p, x)[0]


def in_a_scan_over_layers(p, x):
    def layer(h, w):
        return h + jnp.sin(chosen(len(x), jnp.tanh(w), jnp.tanh(h))), None

    return jax.lax.scan(layer, x, jnp.stack([p, p]))[0]


@pytest.mark.parametrize("body", [in_a_checkpoint, *sweep([passed_through, in_a_scan_over_layers])])
def test_a_body_that_takes_other_operands_for_more_rows(body):
    x = jnp.sin(jnp.arange(144.0)).reshape(12, 12)
    loss = lambda p, x: jnp.sum(body(p, x)) + jnp.mean(x @ p)
    against.assert_whole(loss, x + 1, x, ways=[(way, 3) for way in against.WAYS], tolerance=1e-5)


def test_numbers_of_rows_that_were_moved_are_no_own_rows():
    def loss(p, x):
        n = len(x)
        numbers = jax.lax.broadcasted_iota(jnp.int32, (n, 2), 0).reshape(2, n)
        return jnp.mean((x @ p)[numbers, jnp.arange(n)[None] % 4] * x[None, :, 0])

    x = jnp.sin(jnp.arange(48.0)).reshape(12, 4)
    against.assert_whole(loss, jnp.cos(jnp.arange(16.0)).reshape(4, 4), x, tolerance=1e-5)


def test_constants_that_depend_on_the_number_of_rows():
    """Of another rank, or more of them: the part that takes them runs on all rows."""
    few, many = np.ones(4, np.float32), np.ones((1, 4), np.float32)
    loss = lambda p, x: jnp.mean(jnp.tanh(x @ p) ** 2) + jnp.sum(p[0] * (few if len(x) <= 16 else many[0] + many[0]))
    x = jnp.sin(jnp.arange(48.0)).reshape(12, 4)
    against.assert_whole(loss, jnp.cos(jnp.arange(16.0)).reshape(4, 4), x, tolerance=1e-5)


def branches_for_each_row(p, x):
    """As many branches as rows."""
    branches = [lambda h, i=i: h * (i + 1) for i in range(len(x))]
    return jax.lax.switch(jax.lax.stop_gradient(p[0, 0] * 3).astype(jnp.int32), branches, x @ p)


def of_another_rank(p, x):
    """The same operation gives an array of another rank for more rows."""
    total = jnp.sum(jnp.tanh(x @ p), 1 if len(x) <= 16 else (0, 1))
    return total + jnp.zeros([len(x)])


@pytest.mark.parametrize("body", [*sweep([branches_for_each_row]), of_another_rank])
@pytest.mark.parametrize("wrap", [jax.checkpoint, *sweep([lambda body: body, jax.jit])])
def test_programs_that_are_others_for_more_rows_inside(body, wrap):
    x = jnp.sin(jnp.arange(48.0)).reshape(12, 4)
    loss = lambda p, x: jnp.mean(wrap(body)(p, x) ** 2)
    against.assert_whole(loss, jnp.cos(jnp.arange(16.0)).reshape(4, 4), x, tolerance=1e-5)
