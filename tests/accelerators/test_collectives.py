"""`count_collectives` against programs whose collectives are known, written by hand and compiled."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from tests import programs
from tests.versions import since

BYTES = 4 * 8 * 16


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def found(mesh, fun, out_specs=None, **arguments):
    """The collectives of `fun`, which each device runs on its own [8, 16] floats."""
    local = lambda x: fun(x[0], **arguments)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=out_specs or P(), check_vma=False)
    x = jax.device_put(jnp.ones((8, 8, 16)), NamedSharding(mesh, P("data")))
    return optax_accum.sharding.count_collectives(programs.compiled(jax.jit(mapped).lower(x)))


def psum(x):
    return jax.lax.psum(x, "data")


def test_each_kind(mesh):
    everywhere = P("data")
    for kind, fun, out_specs, moved in (
        ("all-reduce", psum, P(), BYTES),
        ("all-gather", lambda x: jax.lax.all_gather(x, "data"), P(), 8 * BYTES),
        ("reduce-scatter", lambda x: jax.lax.psum_scatter(x, "data", tiled=True), everywhere, BYTES),
        ("all-to-all", lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True), everywhere, BYTES),
        (
            "collective-permute",
            lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)]),
            everywhere,
            BYTES,
        ),
    ):
        (op,) = found(mesh, fun, out_specs)
        assert (op.kind, op.place, op.times, op.known, op.bytes) == (kind, "outside", 1, True, moved)
        assert op.group == (None if kind == "collective-permute" else 8)


def test_trip_counts_multiply(mesh):
    def fun(x):
        inner = lambda _, x: jnp.sin(psum(x))
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.cos(jax.lax.fori_loop(0, 5, inner, x)), x)

    (op,) = found(mesh, fun)
    assert (op.place, op.times, op.known) == ("loop", 15, True)
    counted = found(mesh, fun)
    assert (counted.count, counted.bytes) == (15, 15 * BYTES)
    assert str(counted).split() == ["all-reduce", "in", "loops", "15", "runs", f"{15 * BYTES:,}", "bytes"]


def test_a_loop_of_unknown_length(mesh):
    def fun(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1e6, lambda x: psum(x) + 1, x)

    (op,) = found(mesh, fun)
    assert (op.place, op.times, op.known) == ("loop", 1, False)
    assert "unknown length" in str(found(mesh, fun))


def test_branches_and_loops_inside_them(mesh):
    def fun(x, loop):
        many = lambda x: jax.lax.fori_loop(0, 4, lambda _, x: jnp.sin(psum(x)), x)
        return jax.lax.cond(jnp.sum(psum(x[0])) > 3, many if loop else psum, lambda x: x, x)

    for loop in (False, True):
        counted = found(mesh, fun, loop=loop)
        (inside,), (outside,) = counted.select(place="branch"), counted.select(place="outside")
        assert (inside.times, inside.bytes, outside.bytes) == (4 if loop else 1, BYTES, 64)


def test_several_arrays_in_one_operation(mesh):
    (op,) = found(mesh, lambda x: jax.lax.psum((x, x[0], x[0, 0]), "data"))
    assert op.bytes == BYTES + 64 + 4


def test_none_and_what_is_no_program(mesh):
    counted = found(mesh, lambda x: x + 1, P("data"))
    assert (len(counted), counted.count, counted.bytes, str(counted)) == (0, 0, 0, "no collectives")
    with pytest.raises(TypeError, match="Pass jax.jit"):
        optax_accum.sharding.count_collectives(3)
    with pytest.raises(ValueError, match="has an ENTRY"):
        optax_accum.sharding.count_collectives("nothing")
    with pytest.raises(ValueError, match="kind must be one of"):
        counted.select("allreduce")
    with pytest.raises(ValueError, match="place must be one of"):
        counted.select(place="inside")


def test_texts_of_other_backends():
    """Asynchronous pairs, other notations of groups, tuples: as GPUs and TPUs print them."""
    text = """HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}

%wrapped (p: bf16[4,128]) -> bf16[128] {
  %p = bf16[4,128]{1,0} parameter(0)
  ROOT %rs = bf16[1,128]{1,0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}

%fused_psum (q: f32[16]) -> f32[16] {
  %q = f32[16]{0} parameter(0)
  ROOT %psum = f32[16]{0} all-reduce(%q), replica_groups={{0,1},{2,3}}, to_apply=%add
}

ENTRY %main (x: f32[16], y: bf16[4,128]) -> f32[16] {
  %x = f32[16]{0:T(256)} parameter(0)
  %y = bf16[4,128]{1,0:T(8,128)(2,1)} parameter(1)
  %ars = f32[16]{0:T(256)} all-reduce-start(%x), replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="jit(f)/psum"}
  %ard = f32[16]{0} all-reduce-done(%ars)
  %ags = (f32[16]{0}, f32[64]{0}) all-gather-start(%ard), replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, dimensions={0}
  %agd = f32[64]{0} all-gather-done(%ags)
  %rss = ((bf16[4,128]{1,0}), bf16[1,128]{1,0}) async-start(%y), calls=%wrapped
  %rsd = bf16[1,128]{1,0} async-done(%rss)
  %fs = ((f32[16]{0}), f32[16]{0}) fusion-start(%ard), kind=kCustom, calls=%fused_psum
  ROOT %out = f32[16]{0} fusion-done(%fs)
}
"""
    counted = optax_accum.sharding.count_collectives(text)
    assert [(op.kind, op.bytes, op.group) for op in counted] == [
        ("all-reduce", 64, 2),
        ("all-gather", 256, 4),
        ("reduce-scatter", 1024, 4),
        ("all-reduce", 64, 2),
    ]
    assert counted.operations[0].source == "jit(f)/psum"


def test_a_function_called_twice_counts_twice():
    text = """HloModule m

%f (p: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  ROOT %r = f32[4] all-reduce(%p), replica_groups={}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  %one = f32[4] call(%x), to_apply=%f
  ROOT %two = f32[4] call(%one), to_apply=%f
}
"""
    assert optax_accum.sharding.count_collectives(text).count == 2


def test_a_fused_reduce_scatter_of_a_tpu_is_one():
    """As a TPU's compiler writes it: an all-reduce and the slice that is kept, in one custom fusion."""
    (found,) = optax_accum.sharding.count_collectives("""HloModule m
%all-reduce-scatter.1 (input: f32[64]) -> f32[16] {
  %input = f32[64] parameter(0)
  %zero = s32[] constant(0)
  %all-reduce.2 = f32[64] all-reduce(%input), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %slice = f32[16] dynamic-slice(%all-reduce.2, %zero), dynamic_slice_sizes={16}
}

ENTRY %main (x: f32[64]) -> f32[16] {
  %x = f32[64] parameter(0)
  ROOT %fusion = f32[16] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}
""")
    assert (found.kind, found.bytes, found.group) == ("reduce-scatter", 256, 4)


HIDDEN = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%gemm (l: f32[8,8], r: f32[8,8]) -> f32[8,8] {
  %l = f32[8,8] parameter(0)
  %r = f32[8,8] parameter(1)
  ROOT %dot = f32[8,8] dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%wrapped (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  ROOT %psum = f32[8,8] all-reduce(%p), replica_groups={}, to_apply=%add
}

%body (s: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %s = (s32[], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,8] get-tuple-element(%s), index=1
  %start = f32[8,8] all-reduce-start(%x), replica_groups={}, to_apply=%add
  %y = f32[8,8] fusion(%x, %x), kind=kCustom, calls=%gemm
  %z = f32[8,8] custom-call(%x, %y), custom_call_target="__cublas$gemm"
  %sorted = f32[8,8] custom-call(%z), custom_call_target="__cub$DeviceRadixSort"
  %done = f32[8,8] all-reduce-done(%start)
  %again = f32[8,8] fusion(%x, %x), kind=kCustom, calls=%gemm
  ROOT %t = (s32[], f32[8,8]) tuple(%i, %done)
}

%condition (s: (s32[], f32[8,8])) -> pred[] {
  %s = (s32[], f32[8,8]) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  %zero = s32[] constant(0)
  %start = ((f32[8,8]), f32[8,8]) async-start(%x), calls=%wrapped
  %tuple = (s32[], f32[8,8]) tuple(%zero, %x)
  %update = ((f32[8,8]), f32[8,8]) async-update(%start)
  %while = (s32[], f32[8,8]) while(%tuple), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %done = f32[8,8] async-done(%update)
  %waited = ((f32[8,8]), f32[8,8]) fusion-start(%done), kind=kCustom, calls=%wrapped
  %got = f32[8,8] fusion-done(%waited)
  %last = f32[8,8] convolution(%got, %got), dim_labels=bf_io->bf
  %alone = f32[8,8] all-reduce(%last), replica_groups={}, to_apply=%add
  ROOT %never = f32[8,8] all-reduce-start(%alone), replica_groups={}, to_apply=%add
}
"""


def test_behind_how_many_products_a_collective_runs():
    counted = optax_accum.sharding.count_collectives(HIDDEN)
    assert [(op.place, op.behind) for op in counted] == [
        ("outside", 1),  # the loop
        ("loop", 2),  # a fusion and a call of cuBLAS, not the sort
        ("outside", 0),  # awaited at once
        ("outside", 0),  # not asynchronous
        ("outside", 0),  # nothing follows
    ]
    assert [op.beside for op in counted] == [2 * 260, 2 * 3 * 256, 0, 0, 0]  # a loop's state; two products of three
    assert (counted.hidden, counted.exposed) == (4 * 256, 3 * 256)
    assert counted.hidden + counted.exposed == counted.bytes
    first, second, third, total = str(counted).splitlines()
    assert "behind" not in first
    assert second.endswith("1 runs            256 bytes, behind 1 product of 520 bytes")
    assert third.endswith("768 bytes, behind 2 products of 1,536 bytes")
    assert total == "in all                                 7 runs          1,792 bytes, 1,024 hidden, 768 exposed"
    assert "exposed" not in str(type(counted)(counted.operations[2:]))  # where nothing is hidden


def test_one_that_ends_in_the_next_turn_has_the_rest_of_its_own():
    text = HIDDEN.replace("%done = f32[8,8] all-reduce-done(%start)\n", "").replace("(%i, %done)", "(%i, %start)")
    (op,) = optax_accum.sharding.count_collectives(text).select(place="loop")
    assert op.behind == 3


def test_one_that_is_awaited_in_the_next_turn_has_the_products_before_that():
    """Both turns: one product after the start, two before what was started a turn ago is awaited."""
    body = HIDDEN[HIDDEN.index("%body") : HIDDEN.index("%condition (s")]
    pipelined = """%body (s: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %s = (s32[], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,8] get-tuple-element(%s), index=1
  %y = f32[8,8] custom-call(%i, %i), custom_call_target="__cublas$gemm"
  %z = f32[8,8] custom-call(%y, %y), custom_call_target="__cublas$gemm"
  %done = f32[8,8] all-reduce-done(%x)
  %start = f32[8,8] all-reduce-start(%z), replica_groups={}, to_apply=%add
  %w = f32[8,8] custom-call(%done, %done), custom_call_target="__cublas$gemm"
  ROOT %t = (s32[], f32[8,8]) tuple(%i, %start)
}

"""
    (op,) = optax_accum.sharding.count_collectives(HIDDEN.replace(body, pipelined)).select(place="loop")
    assert op.behind == 3


def test_one_that_a_gpu_is_told_to_await_hides_nothing():
    start = "%start = f32[8,8] all-reduce-start(%x), replica_groups={}, to_apply=%add"
    sync = ', backend_config={"collective_backend_config":{"is_sync":true}}'
    assert not optax_accum.sharding.count_collectives(HIDDEN.replace(start, start + sync)).select(place="loop").hidden


@since(0, 11, why="overlapping")
@pytest.mark.parametrize("name", programs.installed("h100"))
def test_what_a_gpu_starts_early(name):
    """Its compiler awaits a reduction behind a product that does not need the sum; without one, at once."""
    on = programs.target(name)
    x = jax.ShapeDtypeStruct((8 * 2048, 2048), jnp.float32, sharding=NamedSharding(on.mesh(), P("data")))
    for products in (1, 0):
        local = lambda x: (psum(x.T @ x), jnp.tanh(x @ x) @ x if products else x)  # noqa: B023
        fun = jax.shard_map(local, mesh=on.mesh(), in_specs=P("data"), out_specs=(P(), P("data")), check_vma=False)
        with programs.as_shipped():
            (op,) = optax_accum.sharding.count_collectives(on.compile(jax.jit(fun).lower(x)))
        assert (op.bytes, op.behind) == (4 * 2048**2, products)


def test_a_tpu_names_a_collective_in_each_stage_and_it_is_one():
    """As its compiler writes it: a fusion that starts it, one that multiplies meanwhile, and one that ends it."""
    text = """HloModule m
%begin (p: u16[8]) -> (u16[8], u16[64]) {
  %p = u16[8] parameter(0)
  %gather.1 = u16[64] all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %started = (u16[8], u16[64]) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.2 (a: u16[8], b: f32[8,8]) -> (f32[8,8], u16[64]) {
  %a = u16[8] parameter(0)
  %b = f32[8,8] parameter(1)
  %product = f32[8,8] convolution(%b, %b), dim_labels=bf_io->bf
  %gather.2 = u16[64] all-gather(%a), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %both = (f32[8,8], u16[64]) tuple(%product, %gather.2)
}

%end (q: u16[64]) -> u16[64] {
  %q = u16[64] parameter(0)
  %gather.3 = u16[64] all-gather(%q), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %ended = u16[64] custom-call(%gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: u16[8], w: f32[8,8]) -> u16[64] {
  %x = u16[8]{0:T(256)} parameter(0)
  %w = f32[8,8] parameter(1)
  %start = (u16[8], u16[64]) fusion(%x), kind=kCustom, calls=%begin
  %part = u16[8] get-tuple-element(%start), index=0
  %step = (f32[8,8], u16[64]) fusion(%part, %w), kind=kOutput, calls=%async_collective_fusion.2
  %rest = u16[64] get-tuple-element(%step), index=1
  %done = u16[64] fusion(%rest), kind=kCustom, calls=%end
  %after = f32[8,8] convolution(%w, %w), dim_labels=bf_io->bf
  ROOT %again = u16[64] copy(%done)
}
"""
    (op,) = optax_accum.sharding.count_collectives(text)
    assert (op.kind, op.bytes, op.group, op.behind) == ("all-gather", 128, 8, 1)


def test_what_a_permute_of_a_tpu_keeps_for_itself_is_not_sent():
    (op,) = optax_accum.sharding.count_collectives("""HloModule permute
ENTRY %main (p: f32[128,128]) -> f32[128,128] {
  %p = f32[128,128]{1,0} parameter(0)
  %s = (f32[128,128]{1,0}, f32[128,128]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), channel_id=1
  ROOT %d = f32[128,128]{1,0} collective-permute-done(%s)
}
""")
    assert op.bytes == 4 * 128 * 128
