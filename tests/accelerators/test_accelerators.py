"""Reading programs whose answer is known, compiled for a CPU, a GPU and a TPU; and the accelerators themselves."""

import os
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import accelerators as facts
from optax_accum import accelerators, plan
from optax_accum.accelerators import _absent as absent
from optax_accum.accelerators import _targets as targets
from optax_accum.accelerators import count_traffic
from optax_accum.sharding import count_collectives
from tests import programs

N = 8192
SIZE = 4 * N * N  # above what a TPU's vector memory holds
NAMES = ["h100", "v5e:2x4"]


@pytest.fixture(params=["cpu", *programs.installed(*NAMES)])
def on(request):
    return programs.target(request.param)


def traffic(on, fun, *shapes, donate=0):
    """What `fun` of float32 arrays moves on one device."""
    alone = on.one()
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    with programs.as_shipped():
        return count_traffic(alone.compile(jax.jit(fun, donate_argnums=donate).lower(*map(alone.shapes, args))))


def test_one_pass_reads_and_writes(on):
    found = traffic(on, lambda x: jnp.sin(x) + 1, (N, N))
    assert found.always.bytes / SIZE == pytest.approx(2, abs=0.01)
    assert (found.always.copies, found.always.host) == (0, 0)
    assert found.least == found.most == found.always.bytes
    assert found.temporary < 0.01 * SIZE


def test_what_is_cast_is_written_as_it_becomes(on):
    found = traffic(on, lambda x: jnp.sin(x).astype(jnp.bfloat16), (N, N), donate=())
    assert found.always.bytes / SIZE == pytest.approx(1.5, abs=0.01)


def test_a_loop_counts_its_turns(on):
    found = traffic(on, lambda x: jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(x), x), (N, N))
    assert found.always.bytes / SIZE == pytest.approx(10, abs=0.01)
    assert len(found.parts) == 1


def test_a_turn_of_a_loop_of_unknown_length_is_a_part(on):
    found = traffic(on, lambda x, n: jax.lax.fori_loop(0, n[0].astype(int), lambda _, x: jnp.sin(x), x), (N, N), (1,))
    always, iteration = found.parts
    assert (always.within, iteration.within[0].split()[0]) == ((), "iteration")
    assert [always.bytes / SIZE, iteration.bytes / SIZE] == pytest.approx([0, 2], abs=0.01)
    assert (found.least, found.most) == (always.bytes, always.bytes + iteration.bytes)
    assert iteration.within[0] in str(found)


def test_each_branch_moves_its_own(on):
    """In a loop, as often as that iterates."""
    ways = [lambda x, y: 0.0, lambda x, y: jnp.sum(x), lambda x, y: jnp.sum(x) + jnp.sum(y)]
    choose = lambda x, y, n: jax.lax.switch(n[0].astype(int), ways, x, y)
    again = lambda x, y, n: jax.lax.fori_loop(0, 5, lambda i, sums: sums + choose(x, y, n + i + sums), 0.0)
    for fun, times in ((choose, 1), (again, 5)):
        found = traffic(on, fun, (N, N), (N, N), (1,), donate=())
        moved = sorted(part.bytes / SIZE for part in found.parts if part.within)
        assert moved == pytest.approx([0, times, 2 * times], abs=0.05)
        assert [found.least / SIZE, found.most / SIZE] == pytest.approx([0, 2 * times], abs=0.05)


def test_the_branch_that_is_taken_counts():
    """And one inside it; an index counts from 0, a flag has its false computation first."""
    found = count_traffic(BRANCHES)
    assert {part.within: part.bytes for part in found.parts} == {
        (): 32 + 2 * 4 + 4,  # what is read and written; a flag
        ("branch 0 of outer",): 0,
        ("branch 1 of outer",): 32,
        ("branch 1 of outer", "branch 0 of inner"): 64,
        ("branch 1 of outer", "branch 1 of inner"): 48,
    }
    assert (found.least, found.most, found.temporary) == (44, 44 + 32 + 64, None)


def test_a_slice_that_is_updated_is_not_the_array(on):
    found = traffic(on, lambda x, row: x.at[7].set(jnp.sin(row)), (N, N), (N,))
    assert 4 * N <= found.always.bytes <= 64 * N


@pytest.mark.parametrize("layers", [4, 16, 64])
def test_of_a_stack_a_layer_is_read(on, layers):
    """Sliced, written, read: by an asynchronous fusion (H100), by one inside another (TPU, which casts it first)."""
    fun = lambda x, stack: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]
    found = traffic(on, fun, (8, 1024), (layers, 1024, 1024), donate=())
    assert 1 <= found.most / (4 * layers * 1024**2) <= 3.2


def test_a_slice_that_is_written_in_a_fusion_counts_once(on):
    """Of 64 slices: each is read and written; and so is what is added to it. The result of the map is filled before."""
    add = lambda x, y: jax.lax.fori_loop(0, 64, lambda i, x: x.at[i].add(jnp.sin(y[i])), x)
    size = (64, 1024, 1024)
    for found in (traffic(on, add, size, size), traffic(on, lambda x: jax.lax.map(jnp.sin, x), size, donate=())):
        assert found.always.bytes / (4 * 64 * 1024**2) == pytest.approx(3, abs=0.01)


def test_fusions_count_with_what_they_read():
    """Asynchronous, nested; what is not looked at is not read, what is returned is."""
    (found,) = count_traffic(FUSIONS).parts
    layer = 4 * 256
    assert found.bytes == (
        2 * layer  # the layer that is sliced, and written
        + 2 * layer  # what is sliced inside another fusion, and the sum
        + 2 * 8 * layer  # all of it, which is returned beside a slice of it
        + layer
        + 3 * 4  # the index; and nothing of what is not looked at
    )


def test_copies_are_counted(on):
    found = traffic(on, lambda x: (x, x), (N, N), donate=())
    assert found.always.copies in (1, 2)  # one may be given out twice
    assert found.always.bytes / SIZE == pytest.approx(2 * found.always.copies, abs=0.01)
    with programs.as_shipped():
        small = jax.jit(lambda x: (x,)).lower(jnp.ones(8)).compile()
    assert (count_traffic(small).always.copies, count_traffic(small, min_copy=32).always.copies) == (0, 1)


@pytest.mark.parametrize("size", [1, 1 << 10, 1 << 20, 1 << 21])
def test_sums_of_any_size_are_counted(on, size):
    """Those of up to 4 MB an H100 makes with a kernel of its own, an asynchronous fusion (JAX 0.12)."""
    mesh = on.mesh()
    again = lambda x: jax.lax.fori_loop(0, 7, lambda _, x: jnp.sin(jax.lax.psum(x, "data")), x)
    mapped = jax.shard_map(again, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    with programs.as_shipped():
        found = count_collectives(on.compile(jax.jit(mapped).lower(on.shapes(jnp.ones(size), mesh=mesh))))
    assert [(op.kind, op.place, op.times, op.bytes, op.group) for op in found] == [
        ("all-reduce", "loop", 7, 4 * size, 8)
    ]


def test_collectives_in_loops_branches_and_scattered(on):
    """The same collectives on all three: trip counts, asynchronous pairs, branches."""
    mesh = on.mesh()

    def local(x):
        x = jax.lax.fori_loop(0, 7, lambda _, x: jnp.sin(jax.lax.psum(x, "data")), x)
        x = jax.lax.all_gather(2 * jax.lax.psum_scatter(x, "data", tiled=True), "data", tiled=True)
        return jax.lax.cond(x[0, 0] > 0, lambda: jax.lax.psum(jnp.cumsum(x, axis=0), "data"), lambda: x)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    x = on.shapes(jax.ShapeDtypeStruct((4096, 1024), jnp.float32), mesh=mesh)
    with programs.as_shipped():
        found = count_collectives(on.compile(jax.jit(mapped).lower(x)))
    size = 4 * 4096 * 1024
    assert {(op.kind, op.place, op.times, op.bytes, op.known) for op in found} == {
        ("all-reduce", "loop", 7, size, True),
        ("reduce-scatter", "outside", 1, size, True),
        ("all-gather", "outside", 1, size, True),
        ("all-reduce", "branch", 1, size, True),
    }


BRANCHES = """HloModule m

%double (a: f32[4]) -> f32[4] {
  %a = f32[4] parameter(0)
  ROOT %b = f32[4] add(%a, %a)
}

%keep (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4] parameter(0)
}

%twice (q: f32[4]) -> f32[4] {
  %q = f32[4] parameter(0)
  %r = f32[4] sine(%q)
  ROOT %s = f32[4] cosine(%r)
}

%once (t: f32[4]) -> f32[4] {
  %t = f32[4] parameter(0)
  %c = f32[4] constant({1, 2, 3, 4})
  ROOT %u = f32[4] multiply(%t, %c)
}

%deeper (v: f32[4]) -> f32[4] {
  %v = f32[4] parameter(0)
  %w = f32[4] fusion(%v), kind=kLoop, calls=%double
  %flag = pred[] constant(true)
  ROOT %inner = f32[4] conditional(%flag, %w, %w), true_computation=%once, false_computation=%twice
}

ENTRY %main (x: f32[4], i: s32[]) -> f32[4] {
  %x = f32[4] parameter(0)
  %i = s32[] parameter(1)
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %y = f32[4] negate(%x)
  ROOT %outer = f32[4] conditional(%j, %y, %y), branch_computations={%keep, %deeper}
}
"""


FUSIONS = """HloModule m

%layer (a: f32[8,256], i: s32[]) -> f32[1,256] {
  %a = f32[8,256] parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %b = f32[1,256] dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,256}
}

%outer (c: f32[8,256], j: s32[], unread: f32[8,256]) -> f32[1,256] {
  %c = f32[8,256] parameter(0)
  %j = s32[] parameter(1)
  %unread = f32[8,256] parameter(2)
  %inner = f32[1,256] fusion(%c, %j), kind=kLoop, calls=%layer
  ROOT %d = f32[1,256] add(%inner, %inner)
}

%both (e: f32[8,256], k: s32[]) -> (f32[8,256], f32[1,256]) {
  %e = f32[8,256] parameter(0)
  %k = s32[] parameter(1)
  %one = f32[1,256] fusion(%e, %k), kind=kLoop, calls=%layer
  ROOT %f = (f32[8,256], f32[1,256]) tuple(%e, %one)
}

ENTRY %main (x: f32[8,256], n: s32[]) -> f32[1,256] {
  %x = f32[8,256] parameter(0)
  %n = s32[] parameter(1)
  %start = ((f32[8,256], s32[]), f32[1,256], u32[]) fusion-start(%x, %n), kind=kLoop, calls=%layer
  %done = f32[1,256] fusion-done(%start)
  %sum = f32[1,256] fusion(%x, %n, %x), kind=kLoop, calls=%outer
  ROOT %pair = (f32[8,256], f32[1,256]) fusion(%x, %n), kind=kLoop, calls=%both
}
"""


def test_what_is_no_program():
    with pytest.raises(TypeError, match="count_traffic reads a compiled program"):
        count_traffic(3)
    with pytest.raises(ValueError, match="has an ENTRY"):
        count_traffic("nothing")


# Accelerators


def test_what_is_here_is_a_target():
    here = accelerators.target()
    assert here.devices == tuple(jax.devices())
    assert here.memory > 1 << 30
    assert accelerators.target(num_devices=2).devices == here.devices[:2]
    with pytest.raises(ValueError, match="There are 8 devices here"):
        accelerators.target(num_devices=9)


def test_its_mesh_and_shapes():
    here = accelerators.target()
    assert here.mesh().shape == {"data": 8}
    assert (here.one().devices, here.one().memory) == (here.devices[:1], here.memory)
    assert here.mesh("data", "model", shape=(4, 2)).shape == {"data": 4, "model": 2}
    with pytest.raises(ValueError, match="as many devices as"):
        here.mesh("data", shape=(4,))
    (leaf,) = here.shapes([jnp.ones((8, 2))], jax.P("data"))
    assert (leaf.shape, leaf.sharding.spec) == ((8, 2), jax.P("data"))


@pytest.mark.parametrize(
    ("name", "devices", "message"),
    [
        ("h1000", None, "must be one of a100, h100"),
        ("h100:2x2", None, "must be one of a100, h100"),
        ("v5e", None, "needs a topology"),
        ("v5e", 3, "one of 1, 4, 8"),
        ("v5p", 8, "needs a topology"),
        ("v5e:2x4", 4, "says how many chips"),
        ("v5e:big", None, "is written as"),
    ],
)
def test_unknown_targets(name, devices, message):
    with pytest.raises(ValueError, match=message):
        accelerators.target(name, num_devices=devices)


@pytest.mark.parametrize("devices", [0, -1, 1.5, True])
def test_a_number_of_devices_is_positive(devices):
    with pytest.raises((TypeError, ValueError), match="num_devices"):
        accelerators.target("h100", num_devices=devices)


@pytest.mark.parametrize(("name", "package"), [("h100", absent.NVIDIA), ("v5e:2x2", "pip install libtpu")])
def test_a_compiler_that_is_missing_is_named(name, package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=package):
        accelerators.target(name)


CHECKED = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


@pytest.fixture
def unchecked(monkeypatch):
    """NVIDIA's compiler as if it were installed; what is set for it is forgotten."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(
        "jax.experimental.topologies.get_topology_desc", lambda *_, **__: types.SimpleNamespace(devices=[])
    )
    monkeypatch.setenv(CHECKED, "")
    monkeypatch.delenv(CHECKED)


@pytest.mark.parametrize(("driver", "given", "want"), [(False, None, "1"), (True, None, None), (False, "0", "0")])
def test_jax_is_not_to_look_for_what_only_running_needs(unchecked, driver, given, want, tmp_path, monkeypatch):
    """Where no driver is, JAX would refuse to load the compiler for want of cuDNN."""
    monkeypatch.setattr(targets, "DRIVER", tmp_path if driver else tmp_path / "none")
    if given:
        monkeypatch.setenv(CHECKED, given)
    targets._gpus("h100", 1)
    assert os.environ.get(CHECKED) == want


def test_the_command_asks_for_its_targets_before_jax_is_used(tmp_path, monkeypatch):
    """Its header names the device that is here, which uses JAX."""
    asked, here = [], accelerators.target()
    monkeypatch.setattr(facts, "target", lambda name, **options: asked.append(name) or here)
    monkeypatch.setattr(facts._measure, "header", lambda *_: asked.append("header") or "")
    monkeypatch.setitem(facts.KINDS, "update", lambda on: [])
    options = ["--targets", "h100", "v5e:2x2", "--kinds", "update", "--facts", str(tmp_path / "facts.json")]
    monkeypatch.setattr("sys.argv", ["accelerators", *options])
    facts.main()
    assert asked == ["h100", "v5e:2x2", "header"]


def test_a_compiler_that_jax_did_not_load_is_named(unchecked, monkeypatch):
    """As where JAX was used before, and found no cuDNN: it does not say so again."""

    def refused(*args, **options):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", refused)
    other = types.SimpleNamespace(name="jax-cuda13-plugin", version="0.9.0")
    monkeypatch.setattr("importlib.metadata.distributions", lambda: [other])
    with pytest.raises(
        RuntimeError, match="did not load the compiler for h100.*JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1"
    ) as said:
        accelerators.target("h100")
    assert f"than JAX (jax-cuda13-plugin 0.9.0), install that of JAX: pip install --no-deps {absent.NVIDIA}" in str(
        said.value
    )


GPUS = ("a100", "h100", "h200", "b200", "t4") if programs.installed("h100") else ()
TPUS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2") if programs.installed("v5e:2x4") else ()


@pytest.mark.parametrize("name", [None, *GPUS, *TPUS])
def test_every_target_compiles(name):
    on = accelerators.target(name)
    lowered = jax.jit(lambda x: jnp.sin(x) + 1).lower(on.shapes(jnp.ones(1024)))
    assert on.compile(lowered).memory_analysis().output_size_in_bytes == 4096
    assert on.memory > 1e10 or name is None


@pytest.mark.parametrize("name", NAMES)
def test_what_a_compiler_refuses(name):
    """Other devices than those of the mesh, or of the target; a topology. This alone says what is missing."""
    if why_not := programs.why_not(name):
        pytest.skip(f"tests of programs for {name} need its compiler. {why_not}")
    shapes = programs.target(name).shapes(jnp.ones(8))
    with jax.set_mesh(accelerators.target().mesh()), pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(jnp.sin).lower(shapes).compile()
    with pytest.raises(ValueError, match=f"it was for 1 x cpu, and '{name}' is 8 x .* Lower with shapes"):
        programs.target(name).compile(jax.jit(jnp.sin).lower(jnp.ones(8)))
    if "v5e" in name:
        with pytest.raises(ValueError, match="cannot make the target name='v5e:3x3'"):
            accelerators.target("v5e:3x3")


@pytest.mark.parametrize("name", programs.installed(*NAMES))
def test_what_fits_there(name):
    """Of a GPU that is not here JAX takes three quarters, as one that is here says itself."""
    alone = programs.target(name).one()
    step, rows = jax.jit(lambda x: jnp.sin(x) + 1), jnp.ones((8, 128))
    how = {"batch_argnums": 0, "run": False, "target": alone, "progress": False}
    found = plan.fit(lambda _: step, rows, **how)
    assert (found.num_microbatches, found.rows[0]["arguments"]) == (1, rows.nbytes)
    assert found.budget == int(alone.memory * (0.75 if name == "h100" else 1))
    lowered_here = step.lower(rows)
    elsewhere = types.SimpleNamespace(lower=lambda rows: lowered_here)
    with pytest.raises(ValueError, match="must be lowered for all devices of the target.*name no other devices"):
        plan.fit(lambda _: elsewhere, rows, **how)
