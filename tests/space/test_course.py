"""Loops and branches whose course a device's own rows decide, where the partitioner shards over another axis.

The programs hung: XLA had put a permute over "tp" into a loop that each device ran at its own pace. So they run in a
process of their own, all of one test in one, under a limit of time.
"""

import contextlib
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import optax_accum
from tests import ROOT, engine, paths
from tests.space import test_together
from tests.tiers import sweep

ROWS, WIDTH, TP = 8, 8, 4
SECONDS = 240  # most of it to compile; a program that waits for ever would be ended
W = (np.random.default_rng(0).normal(size=(4, WIDTH)) * 0.5).astype("f")
BATCH = {
    "x": np.random.default_rng(1).normal(size=(ROWS, 4)).astype("f"),
    "n": np.int32([1, 9, 2, 7, 3, 2, 1, 1]),  # the rows of one device need many more iterations
}


def turned(h):
    return jnp.tanh(jnp.roll(h, 1, -1))


def mean(h):
    return jnp.mean(h * jnp.arange(WIDTH)[None])


def over_rows(f, w, batch):
    """Row by row, one after the other."""
    return mean(lax.map(lambda row: f(row[0], row[1], w), (batch["x"], batch["n"])))


def iterated(w, batch):
    """`vmap` of a loop of as many iterations as each row says."""
    f = lambda x, n: lax.stop_gradient(lax.fori_loop(0, n, lambda i, h: turned(h), x @ w)) * (x @ w)
    return mean(jax.vmap(f)(batch["x"], batch["n"]))


def early_exit(w, batch):
    """`vmap` of a solver that ends when a row has converged."""
    solved = lambda x: lax.while_loop(lambda h: jnp.sum(h**2) > 0.5, turned, x)
    h = batch["x"] @ w
    return mean(h * lax.stop_gradient(jax.vmap(solved)(h)))


def one_row_at_a_time(w, batch):
    """A loop that no `vmap` has batched, and its counter, which has the type of a value that all devices have alike."""

    def f(x, n, w):
        count, h = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, turned(c[1])), (0, x @ w))
        number = lax.cond(n > 3, lambda: 1, lambda: 4)
        return lax.stop_gradient(lax.fori_loop(0, count + number, lambda _, h: turned(h), h)) * (x @ w)

    return over_rows(f, w, batch)


def a_branch(w, batch):
    """A branch of each row, which takes the parameters, and one of three."""

    def f(x, n, w):
        h = lax.cond(n > 5, lambda x: turned(x @ w), lambda x: x @ w, x)
        return lax.switch(n // 3, [turned, lambda h: h * 2, lambda h: turned(turned(h))], h)

    return over_rows(f, w, batch)


def guarded(w, batch):
    """The branch that is not taken has an infinite derivative."""

    def f(x, n, w):
        h = x @ w
        some = jnp.sum(h**2) * (n < 5)
        return lax.cond(n < 5, lambda s, h: jnp.sqrt(s) * turned(h), lambda s, h: jnp.roll(h, 2, -1) * s, some, h)

    return over_rows(f, w, batch)


def derivative_of_ones_own(w, batch):
    """The backward pass alone has a loop."""

    @jax.custom_vjp
    def f(x, n):
        return jnp.roll(x, 1, -1)

    back = lambda n, ct: (lax.fori_loop(0, n, lambda i, h: jnp.roll(h, -1, -1) * 0.9, ct), None)
    f.defvjp(lambda x, n: (f(x, n), n), back)
    return mean(jax.vmap(f)(batch["x"] @ w, batch["n"]) ** 2)


def layers(w, batch):
    """Both inside a scan over layers, recomputed."""

    def row(h, n):
        deep = lax.stop_gradient(lax.fori_loop(0, n, lambda i, h: turned(h), h))
        return lax.cond(n > 2, lambda h: jnp.roll(h, 1, -1) * deep, lambda h: h + deep, h)

    layer = lambda h, _: (lax.map(lambda r: jax.checkpoint(row)(*r), (h, batch["n"])), None)
    return mean(lax.scan(jax.checkpoint(layer), batch["x"] @ w, None, length=2)[0] ** 2)


def coupled(w, batch):
    """A loop, a mean over rows, and another loop: level by level within a call."""
    deep = lambda h, n: lax.stop_gradient(lax.fori_loop(0, n, lambda i, h: turned(h), h))
    h = batch["x"] @ w
    h = h * jax.vmap(deep)(h, batch["n"])
    h = h - jnp.mean(h, axis=0, keepdims=True)
    return mean(h**2 * jax.vmap(deep)(h, batch["n"]))


def conjugate_gradients(w, batch):
    """JAX's solver, whose derivative is another solve."""

    def f(x, n):
        product = lambda v: v * (1 + jnp.arange(WIDTH) * n) + 0.1 * (jnp.roll(v, 1) + jnp.roll(v, -1))
        return jax.scipy.sparse.linalg.cg(product, x @ w, maxiter=20)[0]

    return mean(jax.vmap(f)(batch["x"], jnp.float32(batch["n"])) ** 2)


LOSSES = {
    loss.__name__: loss
    for loss in (iterated, early_exit, one_row_at_a_time, a_branch, guarded, derivative_of_ones_own, layers)
}
LOSSES_WITHIN = {**LOSSES, "coupled": coupled}
LOSSES_ACROSS = {**LOSSES, "conjugate_gradients": conjugate_gradients}


def within(loss, w, batch, **options):
    return optax_accum.value_and_grad(loss, 2, devices="data", **options)(w, batch)[1]


def in_parts(loss, w, batch):
    devices = optax_accum.Devices("data", to="partial")
    return jnp.mean(optax_accum.value_and_grad(loss, 2, devices=devices)(w, batch)[1], axis=0)


def accumulated(loss, w, batch):
    return optax_accum.reduce_microbatches(jax.grad(loss), 2, devices="data")(w, batch)


def across(loss, w, batch, every=2, **options):
    tx = optax_accum.accumulate_gradients(optax.sgd(1.0), every, devices="data")
    step = optax_accum.value_and_apply_gradients(loss, tx, weight_fn=lambda batch: 1.0, **options)
    now, state = w, tx.init(w)
    for _ in range(every):
        _, now, state = step(now, state, batch)
    return w - now


def applied(loss, w, batch):
    """The rows of outputs, in micro-batches."""
    encode = lambda w, batch: jax.vmap(lambda x, n: lax.fori_loop(0, n, lambda i, h: turned(h), x @ w))(*batch)
    cut = optax_accum.microbatched(encode, 2, devices="data")
    rows = cut(w, (batch["x"], batch["n"]))
    return jax.grad(lambda w: mean(lax.stop_gradient(rows) * (batch["x"] @ w)))(w)


def in_a_shard_map(loss, w, batch, check_vma=True):
    """Over the axis of the rows alone."""
    run = jax.shard_map(
        functools.partial(across, loss, every=1),
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
        check_vma=check_vma,
    )
    return run(w, batch)


WAYS = {
    "within": (within, LOSSES_WITHIN),
    "in parts": (in_parts, LOSSES),
    "reduce_microbatches": (accumulated, LOSSES_ACROSS),
    "across": (across, LOSSES_ACROSS),
    "microbatched": (applied, {"iterated": iterated}),
    "in a shard_map": (in_a_shard_map, {"iterated": iterated, "a_branch": a_branch}),
    "in a shard_map, unchecked": (functools.partial(in_a_shard_map, check_vma=False), {"iterated": iterated}),
}


def placed(mesh):
    return paths.on_mesh(mesh, W, P(None, "tp")), paths.on_mesh(mesh, BATCH, P("data"))


def compare(way, data, tp, names):
    """In a process of its own: each loss against plain JAX."""
    run, losses = WAYS[way]
    mesh = paths.mesh_with_tp(data, tp)
    with jax.set_mesh(mesh):
        for name in names:
            found = np.asarray(jax.jit(functools.partial(run, losses[name]))(*placed(mesh)))
            np.testing.assert_allclose(found, jax.grad(losses[name])(W, BATCH), rtol=1e-4, atol=1e-6, err_msg=name)
            print(name, flush=True)


def compared(*arguments):
    """The losses that a process has compared."""
    call = f"from tests.space import test_course; test_course.compare(*{arguments!r})"
    command = [sys.executable, "-c", call]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.split()


@contextlib.contextmanager
def on(mesh):
    """The parameters and the batch on a mesh that is in reach."""
    with jax.set_mesh(mesh):
        yield placed(mesh)


CASES = [(way, name) for way, (_, losses) in WAYS.items() for name in losses]
IN_EACH_RUN = [
    ("within", "coupled"),
    ("in parts", "one_row_at_a_time"),
    ("reduce_microbatches", "conjugate_gradients"),
    ("across", "layers"),
    ("microbatched", "iterated"),
    ("in a shard_map", "a_branch"),
    ("in a shard_map, unchecked", "iterated"),
]


@pytest.mark.parametrize(("way", "name"), sweep(CASES, but=IN_EACH_RUN))
def test_no_device_leaves_them_before_others(way, name):
    """The facts of the program; a process that waits for ever takes long to be seen."""
    run, losses = WAYS[way]
    with on(paths.mesh_with_tp(2, TP)) as args:
        program = jax.make_jaxpr(functools.partial(run, losses[name]))(*args)
    assert not test_together.varying_choices(program.jaxpr)


@pytest.mark.parametrize("way", sweep(WAYS, but=["across"]))
def test_the_gradient_is_that_of_the_whole_batch_and_comes(way, request):
    names = list(WAYS[way][1])
    few = way in ("within", "across") and not request.config.option.sweep
    names = ["iterated", "a_branch"] if few else names
    assert compared(way, 2, TP, names) == names


@pytest.mark.sweep
@pytest.mark.parametrize(("data", "tp"), [(1, 1), (1, 8), (2, 1), (4, 2)])
def test_the_gradient_on_other_meshes(data, tp):
    for way in ("within", "across"):
        assert compared(way, data, tp, ["iterated", "a_branch"]) == ["iterated", "a_branch"]


@pytest.mark.sweep
@pytest.mark.parametrize("way", [*sweep(["across"]), "within"])
@pytest.mark.parametrize("tp", [1, *sweep([TP])])
def test_a_loss_whose_rows_decide_nothing_stays_as_it_is(way, tp, monkeypatch):
    """Byte for byte: what parameters decide, scans and JAX's own derivative rules; and all losses where nobody waits."""

    def decided_by_parameters(w, batch):
        h = jax.nn.gelu(jax.nn.relu(batch["x"] @ w))
        h = lax.cond(jnp.sum(w) > 100, turned, lambda h: h * 2, h)
        count = jnp.int32(w[0, 0] * 0) + 3
        deep = lax.stop_gradient(lax.fori_loop(0, count, lambda i, h: turned(h), h))
        return mean(lax.scan(lambda h, _: (turned(h), None), h * deep, None, length=2)[0])

    for loss in [decided_by_parameters] if tp > 1 else [decided_by_parameters, iterated, a_branch]:
        texts = []
        for together in (True, False):
            if not together:
                monkeypatch.setattr(engine.device, "together", lambda fun, *_: fun)
            with on(paths.mesh_with_tp(2, tp)) as args:
                texts.append(jax.jit(functools.partial(WAYS[way][0], loss)).lower(*args).as_text())
            monkeypatch.undo()
        assert texts[0] == texts[1]


def printing(of_loop):
    def f(x, n, w):
        def step(h):
            jax.debug.print("{}", n)
            return turned(h)

        if of_loop:
            return lax.stop_gradient(lax.fori_loop(0, n, lambda i, h: step(h), lax.stop_gradient(x @ w))) * (x @ w)
        return lax.cond(n > 5, step, lambda h: h, x @ w)

    return functools.partial(over_rows, f)


@pytest.mark.parametrize("way", ["across", *sweep(["within", "reduce_microbatches"])])
@pytest.mark.parametrize(("of_loop", "message"), [(True, "a loop has effects"), (False, "a branch has effects")])
def test_what_would_happen_too_often_is_refused_by_line(way, of_loop, message):
    loss = printing(of_loop)
    with on(paths.mesh_with_tp(2, TP)) as args:
        with pytest.raises(ValueError, match=rf"\('tp'\): at test_course.py:\d+ {message} \(.*leave out devices"):
            jax.jit(functools.partial(WAYS[way][0], loss)).lower(*args)
        jax.jit(optax_accum.value_and_grad(lambda w, batch: loss(w, batch), 2)).lower(*args)  # the remedy
    with on(paths.mesh_with_tp(2, 1)) as args:  # nobody waits
        jax.jit(functools.partial(WAYS[way][0], loss)).lower(*args)


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["within", "across"])
def test_a_loop_over_explicit_axes_keeps_its_shardings(way):
    """There JAX wants a mask to be sharded as what it selects."""
    shrunk = lambda i, h: jnp.tanh(h - 0.1 * jnp.sum(h, axis=-1, keepdims=True))

    def loss(w, batch):
        f = lambda x, n: lax.stop_gradient(lax.fori_loop(0, n, shrunk, x @ w)) * (x @ w)
        return jnp.mean(jax.vmap(f)(batch["x"], batch["n"]) ** 2)

    with on(paths.mesh_with_tp(2, TP, "Explicit")) as args:
        found = jax.jit(functools.partial(WAYS[way][0], loss))(*args)
    np.testing.assert_allclose(np.asarray(found), jax.grad(loss)(W, BATCH), rtol=1e-4, atol=1e-6)


def hanging():
    """A program that hangs without it, for the next test."""
    engine.device.together = lambda fun, *_: fun
    compare("across", 2, TP, ["iterated"])


@pytest.mark.sweep
def test_the_guard_can_fail():
    """The same program as devices would run it alone."""
    call = [sys.executable, "-c", "from tests.space import test_course; test_course.hanging()"]
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(call, capture_output=True, timeout=15, cwd=ROOT, check=False)
