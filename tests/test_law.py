"""The law, stated once for all paths: the update equals the update of the whole batch."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_accum
from tests import paths, problems
from tests.tiers import sweep

ROWS = 12
PARTITIONS = [(12,), (4, 4, 4), (1,) * 12, (7, 5), (1, 10, 1)]


PATHS = {  # of a window: by `update` or `apply_gradients`, closed by a count or a flush, alone or in a chain
    "update": {"applies": False},
    "apply_gradients": {},
    "a window that the caller closes": {"every": None, "flush": bool},
    "a window cut short by a traced flush": {"every": 100, "flush": jnp.array, "applies": False},
    "in a chain": {"is_chained": True},
    "a sum": {"reduction": "sum", "of": ROWS},
}


def through(inner, start, batches, *, every=0, flush=None, applies=True, is_chained=False, of=1, **options):
    """One window of micro-batches, each weighted by its rows `of` so many."""
    tx = optax_accum.accumulate_gradients(inner, len(batches) if every == 0 else every, **options)
    tx = optax.chain(optax.identity(), tx) if is_chained else tx
    step = tx.update if not applies else functools.partial(optax_accum.apply_gradients, tx)
    if flush or not applies:
        step = jax.jit(step, static_argnames=["flush"] if flush is bool else [])
    state, now = tx.init(start), start
    for batch in batches:
        closes = {"flush": flush(batch is batches[-1])} if flush else {}
        made, state = step(problems.grad(now, batch), state, now, weight=len(batch[0]) / of, **closes)
        now = made if applies else optax.apply_updates(now, made)
    return now, state[1] if is_chained else state


@pytest.mark.quick
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sizes", PARTITIONS, ids=str)
def test_the_update_equals_the_update_of_the_whole_batch(path, sizes):
    start, batch, inner = problems.params(), problems.rows(ROWS), optax.adamw(0.1)
    whole, whole_state = problems.whole_batch_update(inner, start, batch)
    now, state = through(inner, start, problems.cut(batch, sizes), **PATHS[path])
    chex.assert_trees_all_close(now, whole, rtol=2e-5, atol=2e-6)
    chex.assert_trees_all_close(state.inner_opt_state, whole_state, rtol=2e-5, atol=2e-6)
    assert not np.allclose(now["w"], start["w"])  # and it compares something
    assert optax_accum.has_updated(state)


@pytest.mark.quick
def test_a_mean_of_means_breaks_it():
    """The comparison can fail: the same uneven partition without weights."""
    start, batch, inner = problems.params(), problems.rows(ROWS), optax.sgd(0.1)
    whole, _ = problems.whole_batch_update(inner, start, batch)
    tx = optax_accum.accumulate_gradients(inner, 3)
    state, now = tx.init(start), start
    for micro_batch in problems.cut(batch, (1, 10, 1)):
        now, state = optax_accum.apply_gradients(tx, problems.grad(now, micro_batch), state, now)
    assert not np.allclose(now["w"], whole["w"], rtol=1e-2)


@pytest.mark.quick
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_micro_step_is_the_inner_optimizer_bit_for_bit(reduction):
    start, batch, inner = problems.params(), problems.rows(ROWS), optax.adamw(0.1)
    tx = optax_accum.accumulate_gradients(inner, 1, reduction=reduction)
    grads = problems.grad(start, batch)
    expected, expected_state = jax.jit(inner.update)(grads, inner.init(start), start)
    updates, state = jax.jit(tx.update)(grads, tx.init(start), start)
    chex.assert_trees_all_equal(updates, expected)
    chex.assert_trees_all_equal(state.inner_opt_state, expected_state)


@pytest.mark.parametrize("apply", [False, True], ids=["update", "apply_gradients"])
def test_a_training_run_in_a_scan(apply):
    """Five windows of four, inside one scan: one trace, and a state whose type is a fixed point."""
    start, inner = problems.params(), optax.adam(optax.exponential_decay(0.1, 2, 0.5))
    tx = optax_accum.accumulate_gradients(inner, 4)
    x, y = problems.rows(5 * ROWS)
    batches = x.reshape(5, ROWS, 4), y.reshape(5, ROWS, 3)

    def update(carry, batch):
        params, state = carry
        updates, state = inner.update(jax.grad(problems.loss)(params, batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    def micro_step(carry, batch):
        params, state = carry
        grads = jax.grad(problems.loss)(params, batch)
        if apply:
            return optax_accum.apply_gradients(tx, grads, state, params), None
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    (whole, _), _ = jax.lax.scan(update, (start, inner.init(start)), batches)
    micro_batches = jax.tree.map(lambda b: b.reshape(20, 3, -1), batches)
    (now, state), _ = jax.lax.scan(micro_step, (start, tx.init(start)), micro_batches)
    chex.assert_trees_all_close(now, whole, rtol=1e-4, atol=1e-5)
    assert state.gradient_step == 5


def test_under_vmap_each_member_has_its_own_window():
    """An ensemble in one vmap, whose members are at different micro-steps."""
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 3)
    params, grads = jnp.ones((2, 4)), jnp.arange(8.0).reshape(2, 4)
    state = jax.vmap(tx.init)(params)
    state = state._replace(mini_step=jnp.array([0, 2], jnp.int32), weight=jnp.array([0.0, 2.0]))
    updates, state = jax.vmap(tx.update)(grads, state, params)
    assert np.all(updates[0] == 0)
    assert np.any(updates[1] != 0)
    np.testing.assert_array_equal(state.gradient_step, [0, 1])


def test_in_shard_map_with_reduced_gradients():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    tx = optax_accum.accumulate_gradients(optax.adam(0.1), 2)
    start, (x, y) = problems.params(), problems.rows(16)
    whole, _ = problems.whole_batch_update(optax.adam(0.1), start, (x, y))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(spec(), spec(), spec("data")), out_specs=(spec(), spec()))
    def step(params, state, batch):
        local = optax_accum.sharding.defer_reduction(params, "data")  # the gradient of this device's rows
        grads = jax.lax.pmean(jax.grad(problems.loss)(local, batch), "data")
        return optax_accum.apply_gradients(tx, grads, state, params)

    now, state = start, tx.init(start)
    for i in range(2):
        micro_batch = jax.tree.map(lambda b, i=i: b[8 * i : 8 * i + 8], (x, y))
        now, state = step(now, state, micro_batch)
    chex.assert_trees_all_close(now, whole, rtol=2e-5, atol=2e-6)


# Every public path, against an oracle in float64.

WEIGHTS = {
    "rows": (paths.mean_over_rows, None),
    "mask": (paths.mean_over_mask, paths.count),
    "ratio": (paths.ratio_over_mask, None),  # the mask, which only the loss counts
    "ratios": (paths.ratios, None),
}
by_weight = pytest.mark.parametrize("weight", [*sweep(["rows"]), pytest.param("mask", marks=pytest.mark.quick)])
TIES = ("ties",)
TAKES_A_RATIO = ("value_and_grad", "value_and_apply_gradients")  # these see what the loss returns
FEW = ("gathers", "slices", "ties", "takes the last")
TWO = ("gathers", "ties")  # over devices: each use is compiled into every loop, and half of the time is the compiler's


def check(path, uses, weight="rows", *, integers=False):
    mean, weigh = WEIGHTS[weight]
    start, want = paths.params(integers=integers), paths.whole(uses, mean, integers=integers)
    near(path(paths.loss_of(uses, mean), weigh, start, paths.rows()), want, start)


def near(now, want, start, parts=()):
    """Each leaf is where it should be: to rounding of what it is, and of how far it moved; of `parts` to bfloat16's."""
    norm = lambda a, b=0: np.linalg.norm(np.subtract(a, b, dtype=np.float64).ravel())
    leaves = list(zip(*map(jax.tree.leaves, (now, want, start, *parts)), strict=True))
    assert max(norm(right, before) for _, right, before, *_ in leaves) > 1e-3  # it compares something
    for leaf, right, before, *rounded in leaves:
        moved, coarse = norm(right, before), sum(map(norm, rounded))
        bound = 1e-6 * moved + 1.2e-7 * norm(before) + (2**-8 * (coarse + moved) if parts else 0)
        assert norm(leaf, right) <= bound, (leaf, right)


@by_weight
@pytest.mark.parametrize("path", paths.PATHS)
def test_every_path_makes_the_update_of_the_whole_batch(path, weight):
    check(paths.PATHS[path], FEW, weight)


@pytest.mark.parametrize(
    "path",
    sweep([f"{name}{how}" for name in TAKES_A_RATIO for how in ("", ", eager")], TAKES_A_RATIO),
)
def test_sums_over_counts_that_only_the_loss_knows(path):
    check(paths.PATHS[path], TIES, "ratio")


@pytest.mark.parametrize(
    "path", sweep([name for name in paths.PATHS if name.startswith("value_and_grad")], but=["value_and_grad"])
)
def test_several_terms_each_over_a_count_of_its_own(path):
    check(paths.PATHS[path], TIES, "ratios")


@pytest.mark.sweep
@pytest.mark.parametrize("mean", [paths.ratio_over_mask, paths.ratios])
def test_a_mean_of_quotients_breaks_it(mean):
    """The comparison can fail: each micro-batch's own quotient, and a mean of them over rows."""
    ratio, start, batch = paths.loss_of(TIES, mean), paths.params(), paths.rows()
    quotient = lambda params, batch: paths.value_of(ratio(params, batch))
    grads = jax.jit(optax_accum.reduce_microbatches(jax.grad(quotient), microbatch_size=5))(start, batch)
    assert not np.allclose(paths.moved(start, grads)["w"], paths.whole(TIES, mean)["w"], atol=1e-2)


@pytest.mark.parametrize(
    "path",
    sweep([name for name in paths.PATHS if name not in paths.TAKES_NO_INTEGERS], but=["update", *TAKES_A_RATIO[1:]]),
)
def test_integers_among_the_parameters_stay(path):
    check(paths.PATHS[path], FEW, integers=True)


@pytest.mark.parametrize("use", sweep(paths.USES, but=["chooses", "gathers", "scans", "ties"]))
@pytest.mark.parametrize("path", ["value_and_apply_gradients", *sweep(["value_and_grad, eager"])])
def test_whatever_a_loss_does_with_a_parameter(path, use):
    check(paths.PATHS[path], (use,))


NARROW = {  # and the micro-batches that it makes
    "apply_gradients": (paths.gradients, paths.cut(paths.rows())),
    "value_and_apply_gradients": (paths.micro_steps, paths.cut(paths.rows())),
}


@pytest.mark.parametrize("dtype", sweep([jnp.float16, jnp.bfloat16], but=[jnp.bfloat16]))
@pytest.mark.parametrize("path", NARROW)
def test_computed_in_a_narrow_dtype(path, dtype):
    """The loss rounds coarsely, nothing else does: its gradients are added as those in float32 are.

    No parameter is used twice where it is narrow, and no entry of it: such gradients JAX adds in the narrow dtype, and in
    place nobody does.
    """
    run, batches = NARROW[path]
    uses = tuple(use for use in FEW if use not in ("ties", "gathers"))
    loss, start = paths.loss_of(uses, paths.mean_over_mask, dtype), paths.params()
    near(run(loss, paths.count, start, paths.rows()), paths.added(loss, paths.count, start, batches), start)


def over(path, kind, **options):
    """The path over devices. What it is compared with is made outside of their mesh."""

    def run(*args):
        mesh = paths.mesh_of(kind)
        with jax.set_mesh(mesh):
            return path(mesh, *args, **options)

    return run


@pytest.mark.parametrize("kind", sweep(["Auto", "Explicit"], but=["Explicit"]))
@pytest.mark.parametrize("path", TAKES_A_RATIO)
def test_sums_over_counts_that_only_the_loss_knows_over_devices(path, kind):
    check(over(paths.SHARDED[path], kind), TIES, "ratio")
    if kind == "Auto":
        check(over(paths.MANUAL[path], kind, check_vma=True), TIES, "ratio")


@pytest.mark.sweep
@pytest.mark.parametrize("path", paths.OVERLAPPING)
def test_such_sums_where_the_last_backward_pass_adds_them_over_devices(path):
    check(over(paths.OVERLAPPING[path], "Explicit beside Auto"), TIES, "ratio")


@pytest.mark.parametrize("kind", sweep(["Auto", "Explicit"], but=["Auto"]))
@pytest.mark.parametrize(
    "path", [paths.sharded_within, functools.partial(paths.manual_within, check_vma=True)], ids=["mesh", "shard_map"]
)
def test_several_terms_over_devices(path, kind):
    check(over(path, kind), TIES, "ratios")


@pytest.mark.parametrize(
    ("kind", "weight", "uses"),
    [
        pytest.param("Explicit", "mask", TWO, marks=pytest.mark.quick),
        *sweep([("Auto", "rows", FEW)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", paths.SHARDED | paths.OVERLAPPING)
def test_every_path_over_devices(path, kind, weight, uses):
    check(over((paths.SHARDED | paths.OVERLAPPING)[path], kind), uses, weight)


@pytest.mark.parametrize("path", paths.TO_SHARDS)
def test_each_device_keeps_a_shard_of_the_sum(path):
    check(over(paths.TO_SHARDS[path], "Explicit beside Auto"), TIES, "mask")


@pytest.mark.parametrize(
    ("path", "kind"),
    [("value_and_grad", "Auto beside Explicit"), *sweep([("value_and_apply_gradients", "Explicit beside Auto")])],
)
def test_a_sum_that_crosses_the_network_in_bfloat16(path, kind):
    """To one rounding of each device's part, and one of their sum."""
    run, sizes = paths.IN_BFLOAT16[path]
    loss, start, batch = paths.loss_of(TIES, paths.mean_over_mask), paths.params(), paths.rows()
    now, want = over(run, kind)(loss, paths.count, start, batch), paths.whole(TIES, paths.mean_over_mask)
    share = lambda own: paths.count(own) / paths.count(batch)
    move = lambda p, whole, share: share * (whole - p)
    ends = [(paths.oracle(loss, start, own), share(own)) for own in paths.of_devices(batch, sizes)]
    near(now, want, start, [jax.tree.map(functools.partial(move, share=part), start, end) for end, part in ends])
    with pytest.raises(AssertionError):
        near(now, want, start)  # it is rounded


@pytest.mark.parametrize(
    ("kind", "check_vma", "weight", "uses"),
    [
        ("Auto", False, "rows", TWO),
        *sweep([("Explicit beside Auto", True, "mask", FEW), ("Auto", True, "mask", ("chooses",))]),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", paths.MANUAL)
def test_every_path_in_a_shard_map(path, kind, check_vma, weight, uses):
    check(over(paths.MANUAL[path], kind, check_vma=check_vma), uses, weight)
