"""Every public path from a batch to updated parameters, under one signature, and losses that use parameters in all ways.

A path is `path(loss, weigh, start, batch) -> params`: one update with `sgd(LR)`, the batch cut into uneven micro-batches.
`loss(params, batch)` is a mean over what `weigh(batch)` counts; `weigh` is None for a mean over rows, which every path
must take for granted.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from tests import programs

LR, ROWS, SIZES = 0.1, 12, (2, 8, 2)  # few sizes: each is compiled
SGD = optax.masked(  # Optax's own functions take no float0, the gradient of an integer
    optax.sgd(LR), lambda tree: jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact), tree)
)


def params(*, integers=False):
    """A tree with leaves to slice, index, gather, tie and ignore; and integers sorted before and after the others."""
    draw = lambda seed, *shape: jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)
    tree = {"table": draw(0, 5, 4), "w": draw(1, 4, 4), "pos": draw(2, 6, 4), "unused": draw(3, 2), "scale": draw(4)}
    return {"a": jnp.arange(3), **tree, "z": jnp.int32(2)} if integers else tree


def rows():
    rng = np.random.default_rng(5)
    mask = np.array([1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 1], np.float32)
    x = rng.normal(size=(ROWS, 4)).astype("f")
    return {"x": x, "token": rng.integers(0, 5, ROWS).astype("i"), "mask": mask, "y": x[:, 0] ** 2}


def mean_over_rows(terms, batch):
    return jnp.mean(terms)


def mean_over_mask(terms, batch):
    return jnp.sum(batch["mask"] * terms) / jnp.maximum(jnp.sum(batch["mask"]), 1)


def ratio_over_mask(terms, batch):
    """The same, of which only the loss knows the denominator."""
    return optax_accum.Ratio(jnp.sum(batch["mask"] * terms), jnp.sum(batch["mask"]))


def ratios(terms, batch):
    """Two terms, each with a denominator that only the loss knows: of one the parameters decide it."""
    near = terms < 3
    return {
        "mask": ratio_over_mask(terms, batch),
        "near": optax_accum.Ratio(2 * jnp.sum(jnp.where(near, terms, 0)), near.sum()),
    }


def value_of(loss):
    """The loss of a whole batch as a number."""
    if isinstance(loss, dict):
        return sum(map(value_of, loss.values()))
    return loss.total / loss.count if isinstance(loss, optax_accum.Ratio) else loss


def count(batch):
    return batch["mask"].sum()


def one_of_three(p, row, token):
    """Branches of which each takes other parameters, or one of them twice."""
    branches = (
        lambda row: row @ p["w"],
        lambda row: (row + p["pos"][1]) * p["pos"][2] * p["scale"],
        lambda row: row * p["pos"][2],
    )
    return jax.lax.switch(token % 3, branches, row)


USES = {
    "gathers": lambda p, x, b: x + p["table"][b["token"]],
    "slices": lambda p, x, b: x + p["pos"][:4].sum(0)[None],
    "takes the first": lambda p, x, b: x * p["pos"][0][None],
    "takes the last": lambda p, x, b: x * p["pos"][-1][None],
    "slices dynamically": lambda p, x, b: x + jax.lax.dynamic_slice(p["pos"], (1, 0), (1, 4)),
    "strides": lambda p, x, b: x + p["pos"][::2].mean(0)[None],
    "ties": lambda p, x, b: (x @ p["w"]) @ p["w"].T,
    "transposes": lambda p, x, b: x @ p["w"].T,
    "scans": lambda p, x, b: jax.lax.scan(lambda x, row: (jnp.tanh(x * row[None]), None), x, p["pos"])[0],
    "recomputes": lambda p, x, b: jax.checkpoint(lambda w: x @ w[:, ::-1])(p["w"]),
    "scales": lambda p, x, b: x * p["scale"],
    "chooses": lambda p, x, b: jax.lax.map(lambda row: one_of_three(p, *row), (x, b["token"])),
}


def loss_of(uses, mean=mean_over_rows, dtype=None):
    """A loss of those uses, computed in `dtype`."""

    def loss(params, batch):
        cast = lambda leaf: leaf.astype(dtype) if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        b = jax.tree.map(cast, batch)
        x = b["x"]
        for use in uses:
            x = jnp.tanh(USES[use](jax.tree.map(cast, params), x, b))
        return mean(jnp.sum((x - b["y"][:, None]) ** 2, 1).astype(batch["x"].dtype), batch)

    return loss


@functools.cache
def whole(uses, mean, *, integers=False):
    """The update of the whole batch for the loss of those uses."""
    return oracle(loss_of(uses, mean), params(integers=integers), rows())


def oracle(loss, start, batch):
    """The update of the whole batch, in float64."""
    with programs.enable_x64():
        wide = lambda leaf: np.asarray(leaf, np.float64 if np.issubdtype(leaf.dtype, np.floating) else leaf.dtype)
        params, batch = jax.tree.map(lambda leaf: jnp.asarray(wide(leaf)), (start, batch))
        grads = jax.jit(jax.grad(lambda *args: value_of(loss(*args)), allow_int=True))(params, batch)
        move = lambda p, g: np.asarray(p) if g.dtype == jax.dtypes.float0 else np.asarray(p - LR * g)
        return jax.tree.map(move, params, grads)


def added(loss, weigh, start, batches):
    """The update of these micro-batches, whose gradients are added in float64: of a loss that is rounded more coarsely."""
    counts = [float(weigh(batch)) for batch in batches]
    grad = jax.jit(jax.grad(lambda params, batch, share: share * loss(params, batch)))
    grads = [grad(start, batch, np.float32(n / sum(counts))) for batch, n in zip(batches, counts, strict=True)]
    return jax.tree.map(lambda p, *g: np.asarray(p) - LR * np.sum(np.asarray(g, np.float64), 0), start, *grads)


def cut(batch, sizes=SIZES):
    ends = np.cumsum(sizes)
    return [jax.tree.map(lambda leaf, a=end - n, b=end: leaf[a:b], batch) for end, n in zip(ends, sizes, strict=True)]


def weights(weigh, batches):
    return [len(batch["x"]) if weigh is None else weigh(batch) for batch in batches]


# Across calls.


def gradients(loss, weigh, start, batch, *, apply=True, tx=None):
    tx = optax_accum.accumulate_gradients(SGD, len(SIZES)) if tx is None else tx
    grad = jax.jit(jax.grad(loss, allow_int=True))
    state, now, batches = tx.init(start), start, cut(batch)
    for micro_batch, weight in zip(batches, weights(weigh, batches), strict=True):
        grads = grad(now, micro_batch)
        if apply:
            now, state = optax_accum.apply_gradients(tx, grads, state, now, weight=weight)
        else:
            updates, state = tx.update(grads, state, now, weight=weight)
            now = optax_accum.apply_gradients(optax.identity(), updates, optax.EmptyState(), now)[0]
    return now


def in_a_chain(loss, weigh, start, batch):
    tx = optax.chain(optax.identity(), optax_accum.accumulate_gradients(SGD, len(SIZES)))
    return gradients(loss, weigh, start, batch, tx=tx)


def micro_steps(loss, weigh, start, batch, *, tx=None, jit=jax.jit, **options):
    """`value_and_apply_gradients`, with its default arguments."""
    tx = optax_accum.accumulate_gradients(SGD, len(SIZES)) if tx is None else tx
    options = options if weigh is None else {"weight_fn": weigh, **options}
    step = jit(optax_accum.value_and_apply_gradients(loss, tx, **options))
    state, now = tx.init(start), start
    for micro_batch in cut(batch):
        _, now, state = step(now, state, micro_batch)
    return now


def micro_steps_of_a_sum(loss, weigh, start, batch):
    """`reduction="sum"` of losses that are this micro-batch's part of the mean."""
    total = sum(weights(weigh, cut(batch)))
    part = lambda params, batch: loss(params, batch) * (len(batch["x"]) if weigh is None else weigh(batch)) / total
    tx = optax_accum.accumulate_gradients(SGD, len(SIZES), reduction="sum")
    return micro_steps(part, None, start, batch, tx=tx)


# Within a call.


def moved(start, grads):
    return jax.tree.map(lambda p, g: np.asarray(p) - np.float32(LR) * np.asarray(g), start, grads)


def within(loss, weigh, start, batch, *, jit=jax.jit, **options):
    options = {"microbatch_size": 5, **options}
    value, grads = jit(optax_accum.value_and_grad(loss, **options))(start, batch)
    np.testing.assert_allclose(value, value_of(jax.jit(loss)(start, batch)), rtol=1e-6)
    return moved(start, grads)


def within_and_across(loss, weigh, start, batch):
    """`value_and_grad` in each micro-step of a window."""
    tx = optax_accum.accumulate_gradients(SGD, len(SIZES))
    grad = jax.jit(optax_accum.value_and_grad(loss, num_microbatches=2))
    state, now, batches = tx.init(start), start, cut(batch)
    for micro_batch, weight in zip(batches, weights(weigh, batches), strict=True):
        now, state = optax_accum.apply_gradients(tx, grad(now, micro_batch)[1], state, now, weight=weight)
    return now


def accumulated(loss, weigh, start, batch):
    """A ready gradient function."""
    grad = optax_accum.reduce_microbatches(jax.grad(loss), microbatch_size=4, weight_fn=weigh)
    return moved(start, jax.jit(grad)(start, batch))


PATHS = {
    "update": functools.partial(gradients, apply=False),
    "apply_gradients": gradients,
    "in a chain": in_a_chain,
    "value_and_apply_gradients": micro_steps,
    "value_and_apply_gradients, in two programs": functools.partial(
        micro_steps, jit=functools.partial(optax_accum.jit_step, donate_argnums=())
    ),
    "value_and_apply_gradients, eager": functools.partial(micro_steps, jit=lambda step: step),
    "value_and_apply_gradients of a sum": micro_steps_of_a_sum,
    "value_and_apply_gradients in a chain": lambda *args: micro_steps(
        *args, tx=optax.chain(optax.identity(), optax_accum.accumulate_gradients(SGD, len(SIZES)))
    ),
    "value_and_grad": within,
    "value_and_grad, eager": functools.partial(within, jit=lambda grad: grad),
    "value_and_grad, number": functools.partial(within, microbatch_size=None, num_microbatches=5),
    "both": within_and_across,
    "reduce_microbatches": accumulated,
}
TAKES_NO_INTEGERS = [
    name for name in PATHS if name.startswith("value_and_grad") or name in ("both", "reduce_microbatches")
]


# Over devices: a mesh of two axes, so that what is not named is left alone.

KINDS = {
    "Auto": (AxisType.Auto, AxisType.Auto),
    "Explicit": (AxisType.Explicit, AxisType.Explicit),
    "Auto beside Explicit": (AxisType.Auto, AxisType.Explicit),
    "Explicit beside Auto": (AxisType.Explicit, AxisType.Auto),
}


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("data", "other"), axis_types=KINDS[kind], devices=jax.devices()[:4])


def mesh_with_tp(data, tp, kind="Auto"):
    """A mesh whose second axis is the model's."""
    kinds = AxisType.Auto, getattr(AxisType, kind)
    return jax.make_mesh((data, tp), ("data", "tp"), axis_types=kinds, devices=jax.devices()[: data * tp])


def on_mesh(mesh, tree, spec):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def sharded_state(tx, start):
    where = optax_accum.sharding.state_sharding(tx, start)
    return jax.jit(tx.init, out_shardings=where)(start), where


def sharded_within(mesh, loss, weigh, start, batch, **how):
    devices = optax_accum.Devices("data", **how)
    grad = jax.jit(optax_accum.value_and_grad(loss, microbatch_size=4, devices=devices))
    start = on_mesh(mesh, start, P())
    return moved(start, grad(start, on_mesh(mesh, batch, P("data")))[1])


def sharded_accumulated(mesh, loss, weigh, start, batch):
    grad = optax_accum.reduce_microbatches(jax.grad(loss), microbatch_size=4, weight_fn=weigh, devices="data")
    start = on_mesh(mesh, start, P())
    return moved(start, jax.jit(grad)(start, on_mesh(mesh, batch, P("data"))))


def sharded_micro_steps(mesh, loss, weigh, start, batch, *, every=3, of_devices=None, **options):
    """`value_and_apply_gradients`; where `every` is None, a static flush closes the window of three."""
    options = options if weigh is None else {"weight_fn": weigh, **options}
    tx = optax_accum.accumulate_gradients(SGD, every, devices=optax_accum.Devices("data", **(of_devices or {})))
    now = on_mesh(mesh, start, P())
    state, _ = sharded_state(tx, now)
    step = jax.jit(optax_accum.value_and_apply_gradients(loss, tx, **options), static_argnames="flush")
    batches = cut(batch)
    for micro_batch in batches:
        flush = every is None and micro_batch is batches[-1]
        _, now, state = step(now, state, on_mesh(mesh, micro_batch, P("data")), flush=flush)
    return now


def of_devices(batch, sizes):
    """The rows that each of two devices has of these micro-batches."""
    halves = [
        cut(micro_batch, (size // 2, size // 2)) for micro_batch, size in zip(cut(batch, sizes), sizes, strict=True)
    ]
    return [jax.tree.map(lambda *parts: np.concatenate(parts), *own) for own in zip(*halves, strict=True)]


def sharded_both(mesh, loss, weigh, start, batch, *, nonfinite="propagate"):
    """`value_and_grad(devices=Devices("data", to="partial"))`, then `apply_gradients`."""
    tx = optax_accum.accumulate_gradients(SGD, 2, devices="data", nonfinite=nonfinite)
    now = on_mesh(mesh, start, P())
    state, _ = sharded_state(tx, now)
    grad = optax_accum.value_and_grad(loss, num_microbatches=2, devices=optax_accum.Devices("data", to="partial"))

    @jax.jit
    def step(params, state, batch, weight):
        return optax_accum.apply_gradients(tx, grad(params, batch)[1], state, params, weight=weight)

    for rows, micro_batch in zip((4, 8), cut(batch, (4, 8)), strict=True):
        halves = cut(micro_batch, (rows // 2, rows // 2))  # each device's own rows
        weight = jnp.asarray([jnp.float32(w) for w in weights(weigh, halves)])
        now, state = step(now, state, on_mesh(mesh, micro_batch, P("data")), weight)
    return now


def in_shard_map(mesh, fun, tx, start, batch, *, check_vma):
    """Runs `fun(params, state, micro_batch) -> (params, state)` in a user's `jax.shard_map`, one window."""
    now = on_mesh(mesh, start, P())
    state, where = sharded_state(tx, now)
    specs = jax.tree.map(lambda sharding: sharding.spec, where)
    specs = (P(), specs)
    step = jax.jit(
        jax.shard_map(
            fun,
            mesh=mesh,
            in_specs=(*specs, P("data")),
            out_specs=specs,
            axis_names={"data"},
            check_vma=check_vma,
        )
    )
    for micro_batch in cut(batch):
        now, state = step(now, state, on_mesh(mesh, micro_batch, P("data")))
    return now, state


def manual_micro_steps(mesh, loss, weigh, start, batch, *, check_vma, **options):
    options = options if weigh is None else {"weight_fn": weigh, **options}
    tx = optax_accum.accumulate_gradients(SGD, len(SIZES), devices="data")
    step = optax_accum.value_and_apply_gradients(loss, tx, **options)
    fun = lambda params, state, batch: step(params, state, batch)[1:]
    return in_shard_map(mesh, fun, tx, start, batch, check_vma=check_vma)[0]


def manual_gradients(mesh, loss, weigh, start, batch, *, check_vma):
    """Plain gradients of each device's own rows, by `defer_reduction`."""
    tx = optax_accum.accumulate_gradients(SGD, len(SIZES), devices="data")

    def fun(params, state, batch):
        grads = jax.grad(loss)(optax_accum.sharding.defer_reduction(params, "data"), batch)
        weight = jnp.float32(len(batch["x"])) if weigh is None else weigh(batch)
        return optax_accum.apply_gradients(tx, grads, state, params, weight=weight[None])

    return in_shard_map(mesh, fun, tx, start, batch, check_vma=check_vma)[0]


def manual_both(mesh, loss, weigh, start, batch, *, check_vma):
    tx = optax_accum.accumulate_gradients(SGD, len(SIZES), devices="data")
    grad = optax_accum.value_and_grad(loss, microbatch_size=2, devices=optax_accum.Devices("data", to="partial"))

    def fun(params, state, batch):
        weight = jnp.float32(len(batch["x"])) if weigh is None else weigh(batch)
        return optax_accum.apply_gradients(tx, grad(params, batch)[1], state, params, weight=weight[None])

    return in_shard_map(mesh, fun, tx, start, batch, check_vma=check_vma)[0]


def manual_within(mesh, loss, weigh, start, batch, *, check_vma):
    grad = optax_accum.value_and_grad(loss, microbatch_size=4, devices="data")
    run = jax.shard_map(
        lambda params, batch: grad(params, batch)[1],
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
        check_vma=check_vma,
    )
    return moved(start, jax.jit(run)(on_mesh(mesh, start, P()), on_mesh(mesh, batch, P("data"))))


SHARDED = {
    "value_and_grad": sharded_within,
    "reduce_microbatches": sharded_accumulated,
    "value_and_apply_gradients": sharded_micro_steps,
    "both": sharded_both,
    "both, skip": functools.partial(sharded_both, nonfinite="skip"),
    "both, discard": functools.partial(sharded_both, nonfinite="discard"),
}
OVERLAPPING = {
    "value_and_grad, overlapping": functools.partial(sharded_within, overlap=True),
    "value_and_apply_gradients, overlapping": functools.partial(
        sharded_micro_steps, every=None, of_devices={"overlap": True}
    ),
}
SHARDS = {"table": P(None, "data"), "w": P("data"), "pos": P("data"), "unused": P("data"), "scale": P()}
TO_SHARDS = {
    "value_and_grad": functools.partial(sharded_within, to=SHARDS),
    "value_and_apply_gradients": functools.partial(sharded_micro_steps, of_devices={"to": SHARDS}),
}
IN_BFLOAT16 = {  # and the micro-batches that are cut from the batch before devices have their rows
    "value_and_grad": (functools.partial(sharded_within, dtype=jnp.bfloat16), (ROWS,)),
    "value_and_apply_gradients": (
        functools.partial(sharded_micro_steps, of_devices={"dtype": jnp.bfloat16}),
        SIZES,
    ),
}
MANUAL = {
    "value_and_grad": manual_within,
    "value_and_apply_gradients": manual_micro_steps,
    "defer_reduction": manual_gradients,
    "both": manual_both,
}
