"""What the compilers of accelerators make of the library: `benchmarks.accelerators` reads it, these are its bounds."""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_accum
from benchmarks import _fsdp, _many_devices, _one_device
from benchmarks import accelerators as facts
from tests import programs, tiers
from tests.engine import collectives, compilers
from tests.versions import JAX, needs_references, since

TARGETS = programs.installed("h100", "v5e:4x4")
if not TARGETS:
    pytest.skip("needs the compiler of NVIDIA or of TPUs: docs/accelerators.md says how", allow_module_level=True)


@functools.cache
def read(kind, name, cases=None):
    """The facts of a kind, by case; of so many cases."""
    with programs.as_shipped():
        return dict(itertools.islice(facts.KINDS[kind](programs.target(name)), cases))


@pytest.mark.parametrize("name", TARGETS)
def test_a_held_micro_step_adds_and_an_emitting_one_is_the_optimizer(name):
    for optimizer, row in read("apply_gradients, by optimizer", name).items():
        assert row["held, P"] == pytest.approx(3, abs=0.02), optimizer
        assert row["held copies"] == 0, optimizer
        assert row["emitting adds, P"] <= row["alone, P"] + 1.02, optimizer
        assert row["temporary, P"] <= row["alone temporary, P"] + 0.012, optimizer


@pytest.mark.parametrize("name", TARGETS)
def test_what_each_policy_reads(name):
    held = {policy: row["held, P"] for policy, row in read("apply_gradients, by policy", name).items()}
    reads = {"propagate": 3, "skip": 4, "omit": 4, "discard": 3}  # a TPU may keep one leaf of four in vector memory
    assert all(reads[policy] - 0.26 <= moved <= reads[policy] + 0.02 for policy, moved in held.items()), held
    assert all(row["temporary, P"] < 0.02 for row in read("apply_gradients, by policy", name).values())


@needs_references
@pytest.mark.parametrize("name", TARGETS)
def test_in_place_a_window_is_reset_once(name):
    """By a loop of at most one turn, which only the first micro-step makes."""
    inside, after = read("value_and_apply_gradients", name).values()
    assert 1 <= inside["opening adds, P"] <= 1.76
    assert after["opening adds, P"] == 0
    assert inside["held, P"] <= after["held, P"] + (0.6 if "v5e" in name else 0.01)
    assert inside["emitting adds, P"] <= 7.01
    assert inside["temporary, P"] <= after["temporary, P"] + 0.03


@needs_references
@pytest.mark.parametrize("name", TARGETS)
def test_a_weight_costs_nothing_and_what_weighs_nothing_moves_nothing(name):
    """On a TPU a loop in its place would move 1.5 P more, and take 0.8 P of temporary memory."""
    rows = read("weights", name)
    assert rows["weight_fn"]["at least, P"] <= 0.26
    for kind in ("weight_fn", "Ratio"):
        assert rows[kind]["at most, P"] <= rows["rows"]["at most, P"] + 0.2, kind
        assert rows[kind]["temporary, P"] <= rows["rows"]["temporary, P"] + 0.03, kind


@pytest.mark.parametrize("name", TARGETS)
def test_update_moves_no_more_than_multi_steps(name):
    """Of gradients that are arguments, it needs a place for updates: 1 P, except for an H100 with JAX 0.12."""
    rows = read("update", name)
    assert rows["update"]["temporary, P"] <= rows["MultiSteps"]["temporary, P"] + 1.01
    assert rows["update"]["window of 8, P"] <= rows["MultiSteps"]["window of 8, P"] + 0.02


@since(0, 10, why="offload")
@pytest.mark.parametrize("name", TARGETS)
def test_moments_on_the_host_come_and_go_once_in_a_window(name):
    """With JAX 0.12 a GPU copies them in a held micro-step, where they lie."""
    facts = read("offload", name)["moments on the host"]
    assert facts["to and fro, emitting, P"] == pytest.approx(4, abs=0.01)
    assert facts["within the host, held, P"] <= (2.01 if name == "h100" else 0)


@since(0, 10, why="offload")
@pytest.mark.parametrize("name", programs.installed("v5e:4x4"))  # an H100's compiler puts all into the device's memory
def test_a_batch_on_the_host_takes_the_memory_of_a_micro_batch(name):
    on, width, size = programs.target(name), 512, 256
    here = on.one().shapes(jax.ShapeDtypeStruct((width, width), jnp.float32))
    loss = lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
    step = jax.jit(optax_accum.value_and_grad(loss, microbatch_size=size))
    found = []
    for rows in (4 * size, 32 * size):
        host = here.sharding.with_memory_kind("pinned_host")
        batch = jax.ShapeDtypeStruct((rows, width), jnp.float32, sharding=host)
        memory = on.compile(step.lower(here, batch)).memory_analysis()
        found.append(memory.argument_size_in_bytes + memory.temp_size_in_bytes)
        assert memory.host_argument_size_in_bytes == 4 * rows * width
    assert found[1] <= 1.05 * found[0] < 4 * width * (width + 3 * size)


@needs_references
@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_in_place(name):
    memory = {case: row["memory, P"] for case, row in read("decoder", name, cases=6).items()}
    assert memory["value_and_grad, in place"] <= 0.90 * memory["optax.microbatch"]
    assert memory["value_and_apply_gradients"] < memory["gradient, then apply_gradients"]


@pytest.mark.parametrize("name", TARGETS)
def test_a_train_step_needs_no_more_memory_than_with_multi_steps(name):
    """Its gradient makes place for the updates. On a TPU, two gradients of a tied embedding of 0.05 P lie longer."""
    memory = {case: row["memory, P"] for case, row in read("decoder", name, cases=6).items()}
    most = memory["gradient, then MultiSteps"] + (0.07 if "v5e" in name else 0)
    assert memory["gradient, then apply_gradients"] <= most
    assert memory["gradient, then update"] <= most


@pytest.mark.parametrize("name", TARGETS)
def test_a_window_is_reduced_once(name):
    for case, row in read("data parallel", name).items():
        assert row["collectives, held"] == 0 or "across" not in case, case
        if "call" in case and "ZeRO-1" not in case:
            assert row["all-reduced, P"] == pytest.approx(1, abs=0.01), case
            assert row["temporary, P"] <= (0.01 if JAX >= (0, 8) else 1.01), case


@pytest.mark.parametrize("name", TARGETS)
def test_zero_one_is_a_reduce_scatter(name):
    """On 4 x 4 chips in two stages: at once it is an all-reduce, and as much memory again."""
    for case, row in read("data parallel", name).items():
        if "ZeRO-1" in case:
            assert row["all-reduced, P"] == 0, case
            assert row["scattered, P"] == pytest.approx(1.125 if name == "v5e:4x4" else 1, abs=0.01), case
            assert row["temporary, P"] <= 1.02, case


@since(0, 11, why="overlapping")
@pytest.mark.parametrize("name", programs.installed("h100"))
def test_the_reduction_is_hidden_behind_the_last_backward_pass(name):
    """In the same memory for layers in a scan; unrolled, with one more set of the activations of a micro-batch."""
    rows = read("overlap", name)
    for model, more in (("stacked", 0.1), ("unrolled", 0.3)):
        before, now = (rows[f"{model}, overlap={flag}"] for flag in (False, True))
        assert before["of it hidden, P"] == 0, model
        assert now["sent, P"] == pytest.approx(before["sent, P"], rel=1e-3), model
        assert now["of it hidden, P"] >= 0.8 * now["sent, P"], model
        assert now["temporary, P"] <= before["temporary, P"] + more, model
        before, now = (rows[f"{model}, across calls, static flush, overlap={flag}"] for flag in (False, True))
        assert now["of it hidden, P"] >= 0.8 * now["sent, P"], model
        assert now["temporary, P"] <= before["temporary, P"] + 0.01, model


@since(0, 11, why="overlapping")
@pytest.mark.parametrize("name", programs.installed("h100"))
def test_what_goes_to_shards_is_hidden_too(name):
    """Layer by layer in a scan; unrolled XLA combines what is scattered, unless an option says otherwise."""
    rows = read("overlap", name)
    stacked, after = (rows[f"stacked, to shards (ZeRO-1), overlap={flag}"] for flag in (True, False))
    apart = rows["unrolled, to shards, overlap=True, uncombined"]
    for row in (stacked, apart):
        assert row["sent, P"] == pytest.approx(0.875, rel=1e-3)
        assert row["of it hidden, P"] >= 0.8 * row["sent, P"]
    assert stacked["temporary, P"] <= after["temporary, P"] + 0.1
    assert after["of it hidden, P"] == 0


@since(0, 11, why="overlapping")
@pytest.mark.parametrize("name", TARGETS)
def test_a_narrow_wire_halves_what_is_sent(name):
    """In the same memory. Two collectives come one after the other for each layer: one has a product beside it."""
    rows = read("overlap", name)
    for model, flag in itertools.product(("stacked", "unrolled"), (False, True)):
        wide, narrow = (rows[f"{model}, overlap={flag}{wire}"] for wire in ("", ", bfloat16 wire"))
        assert narrow["sent, P"] == pytest.approx(wide["sent, P"] / 2, rel=1e-3), (model, flag)
        hidden = 0.4 * flag if name == "h100" else 0
        assert narrow["of it hidden, P"] >= hidden * narrow["sent, P"], (model, flag)
        assert narrow["temporary, P"] <= wide["temporary, P"] + 0.05, (model, flag)


@pytest.mark.parametrize("name", TARGETS)
def test_a_batch_is_cut_without_a_copy(name):
    rows = read("cut", name, cases=1)
    assert [row["copies of a micro-batch"] for row in rows.values()] == [0]


@needs_references
@pytest.mark.parametrize("name", programs.installed("h100"))
def test_in_place_the_weight_gradient_is_added_by_the_product_that_makes_it(name):
    """Checkpointed, too: cuBLAS adds to what it writes (beta = 1)."""
    rows = read("in place", name, cases=6).values()
    assert [row["beta = 1, in place"] for row in rows if name == "h100"] == (
        [4] * 3 + [5] * 3 if name == "h100" else []
    )


# A TPU's compiler takes long: each run has the layers in a scan, the sweep a tied embedding and a checkpoint, too.
in_place = pytest.mark.parametrize(
    ("name", "cases"),
    [(name, 2 if "v5e" in name else 6) for name in TARGETS]
    + tiers.sweep((name, 6) for name in TARGETS if "v5e" in name),
)


@needs_references
@in_place
def test_in_place_micro_batches_need_the_memory_of_one(name, cases):
    """Beside it lies one gradient of an embedding: before JAX 0.11, of one that is tied, two."""
    rows = read("in place", name, cases)
    for case, row in rows.items():
        embedding = 0.04 * ("tied" in case) * (1 if JAX >= (0, 11) else 2)
        assert row["in place, P"] <= row["one micro-batch, P"] + 0.02 + embedding, case
        assert row["in place, P"] <= row["by hand, P"] - 0.35, case
    if cases == 6:
        assert rows["tied embedding, bfloat16"]["in place, P"] <= 0.55


@needs_references
@in_place
def test_norms_are_taken_where_gradients_are_added(name, cases):
    """On a GPU a gradient is added by the product that makes it, but for its norm a layer's is written."""
    for case, row in read("in place", name, cases).items():
        written = 0.105 if name == "h100" else 0
        assert row["with statistics, P"] <= row["in place, P"] + 0.02 + written, case


@pytest.mark.parametrize("name", programs.installed("h100", "v5e:2x4"))
def test_by_layer_the_traffic_of_sharded_parameters_does_not_grow(name):
    """As that of no loop over micro-batches: what a scan gathers grows with k."""
    with programs.as_shipped():
        two, many = (_fsdp.cost(programs.target(name), _fsdp.LAYER, k, _fsdp.Sizes()) for k in (2, 32))
        scan = _fsdp.cost(programs.target(name), _fsdp.SCAN, 32, _fsdp.Sizes())
    assert two[:3] == pytest.approx(many[:3], rel=1e-6)
    assert sum(many[:3]) <= 5
    assert sum(scan[:3]) > 10 * sum(many[:3])
    assert many.temporary < 1.1


@pytest.mark.parametrize("name", tiers.sweep(programs.installed("h100", "v5e:2x4"), programs.installed("h100")))
def test_replicas_exchange_one_shard_whatever_k_is(name):
    """As in no loop over micro-batches: where layers are stacked, a scan exchanges it for each."""
    on = programs.target(name)
    with programs.as_shipped():
        between = lambda way, k: _many_devices.between_replicas(
            on, way, k, _fsdp.Sizes(layers=4, width=1024, hidden=4096)
        )
        ours = [between(way, k) for way in (_many_devices.ONCE, _many_devices.BY_LAYER) for k in (2, 8)]
        scan = between(_fsdp.SCAN, 8)
    shard = _many_devices.REPLICAS / len(on.devices)
    assert [row["between replicas, P"] for row in ours] == pytest.approx([shard] * 4, rel=0.01)
    assert scan["between replicas, P"] == pytest.approx(8 * shard, rel=0.01)
    if name == "h100":
        assert [row["of it hidden, P"] for row in ours[:2]] == pytest.approx([shard] * 2, rel=0.01)
    assert ours[1]["temporary, P"] <= scan["temporary, P"] + 0.02


# What compilers still do, so that something else is done instead: a test that fails says that a quirk may go. It is a
# release of a compiler that changes that, no commit, so the sweep asks.

newest = since(0, 12, why="what its compilers do decides whether a quirk may go")
H100, V5E = ([pytest.param(name)] if name in TARGETS else [] for name in ("h100", "v5e:4x4"))


def fact(kind, case, name, column, cases=None):
    """One fact, asked anew."""
    jax.clear_caches()
    with programs.as_shipped():
        return dict(itertools.islice(facts.KINDS[kind](programs.target(name)), cases))[case][column]


@pytest.mark.sweep
@newest
@pytest.mark.parametrize("name", V5E)
def test_a_tpu_still_reads_early_what_a_branch_reads(name, monkeypatch):
    monkeypatch.setattr(compilers, "returned", lambda tree: tree)
    monkeypatch.setattr(_one_device, "OPTIMIZERS", {"Muon": _one_device.OPTIMIZERS["Muon"]})
    assert fact("apply_gradients, by optimizer", "Muon", name, "temporary, P") > 0.7


@pytest.mark.sweep
@newest
@pytest.mark.parametrize("name", H100)
def test_zeros_still_lie_beside_a_loop(name, monkeypatch):
    ours = read("decoder", name, cases=6)["gradient, then update"]["memory, P"]
    monkeypatch.setattr(compilers, "NOTHING", 0.0)
    assert fact("decoder", "gradient, then update", name, "memory, P", cases=5) > ours + 0.05


@pytest.mark.sweep
@newest
@pytest.mark.parametrize("name", H100)
def test_a_select_over_references_still_moves_them(name, monkeypatch):
    kind, case = "value_and_apply_gradients", "added inside the backward pass"
    ours = read(kind, name)[case]["held, P"]
    select = lambda tree, first: jax.tree.map(lambda leaf: jnp.where(first, jnp.zeros_like(leaf), leaf), tree)
    monkeypatch.setattr(compilers, "zeroed", select)
    assert fact(kind, case, name, "held, P", cases=1) > ours + 1.9


@pytest.mark.sweep
@newest
@pytest.mark.parametrize("name", H100)
def test_gradients_still_wait_for_the_accumulator(name, monkeypatch):
    shape = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    params, rows = [shape] * 12, jax.ShapeDtypeStruct((64, 2048), jnp.float32)
    loss = lambda params, x: jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), params, x) ** 2)
    tx, on = optax_accum.accumulate_gradients(optax.adamw(1e-3), 8), programs.target(name).one()

    def temporary():
        step = optax_accum.value_and_apply_gradients(loss, tx)
        args = map(on.shapes, (params, jax.eval_shape(tx.init, params), rows))
        lowered = jax.jit(lambda *args: step(*args)[1:], donate_argnums=(0, 1)).lower(*args)
        with programs.as_shipped():
            return on.compile(lowered).memory_analysis().temp_size_in_bytes / (12 * 4 * 2048**2)

    ours = temporary()
    monkeypatch.setattr(compilers, "ready_together", lambda *trees: trees)
    assert temporary() > ours + 0.02


@pytest.mark.sweep
@newest
@pytest.mark.parametrize("name", V5E)
def test_a_reduce_scatter_over_a_square_is_still_an_all_reduce(name, monkeypatch):
    monkeypatch.setattr(collectives, "CHIPS", 1 << 30)
    assert fact("data parallel", "within a call, ZeRO-1, k = 8", name, "all-reduced, P") > 0.9


@pytest.mark.sweep
@newest
@pytest.mark.parametrize("name", V5E)
def test_an_all_reduce_of_a_tpu_is_still_not_in_place(name, monkeypatch):
    monkeypatch.setattr(collectives, "LARGE", 1 << 60)
    assert fact("data parallel", "within a call, k = 2", name, "temporary, P", cases=4) > 0.9


def normed(x, kernel):
    """A layer with BatchNorm."""
    h = x @ kernel
    h = (h - h.mean(0, keepdims=True)) * jax.lax.rsqrt(h.var(0, keepdims=True) + 1e-5)
    return x + jax.nn.gelu(h)


def one_by_one(kernels, x):
    for kernel in kernels:
        x = normed(x, kernel)
    return jnp.mean(x**2)


def copies_of_the_batch(way, name, layers):
    """The temporary memory of a gradient of layers with BatchNorm, in copies of their batch."""
    rows, width = 1 << 15, 256
    on = programs.target(name).one()
    shapes = [
        jax.ShapeDtypeStruct((layers, width, width), jnp.float32),
        jax.ShapeDtypeStruct((rows, width), jnp.float32),
    ]
    with programs.as_shipped():
        compiled = on.compile(jax.jit(way).lower(*map(on.shapes, shapes)))
    return compiled.memory_analysis().temp_size_in_bytes / (4 * rows * width)


@pytest.mark.parametrize("name", programs.installed("h100"))
def test_what_levels_keep_is_less_than_the_whole_batch_keeps(name):
    """BatchNorm in eight layers: an array begins where its loop does, and what is cheap is made again."""
    ways = jax.value_and_grad(one_by_one), optax_accum.value_and_grad(one_by_one, 16)
    whole, ours = (copies_of_the_batch(way, name, layers=8) for way in ways)
    assert ours < min(2 * 8, whole)


@newest
@pytest.mark.parametrize("name", TARGETS)
def test_what_crosses_levels_is_kept_once_or_not_at_all(name):
    """Made again, a few of the layers' rows are there, and the batch in the order of micro-batches."""

    def copies(share):
        return copies_of_the_batch(optax_accum.value_and_grad(one_by_one, 16, recompute=share), name, layers=8)

    assert copies_of_the_batch(jax.value_and_grad(one_by_one), name, layers=8) > 8
    assert copies(0) < 2 * 8 + 1
    assert copies(4.0) < 4
    assert copies(4.0) < copies(1.0) < copies(0)
