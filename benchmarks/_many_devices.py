"""What a window over several devices becomes: what they say to each other, and the memory of one."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import optax_accum
from benchmarks import _fsdp
from benchmarks._measure import Tree
from benchmarks._one_device import OPTIMIZERS, WIDTH, Facts, layers, size
from optax_accum.accelerators import Target
from optax_accum.sharding import Collectives, count_collectives, state_sharding


def parallel(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what a data-parallel window says between devices, and its memory, with AdamW."""
    params, mesh = layers(), on.mesh()
    rows = lambda k: on.shapes(jax.ShapeDtypeStruct((k * mesh.size, WIDTH), jnp.float32), P("data"), mesh)

    def across(every: int, to: Tree) -> Any:
        tx = optax_accum.accumulate_gradients(OPTIMIZERS["AdamW"](), every, devices=optax_accum.Devices("data", to=to))
        state, out = _placed(tx, given)
        step = optax_accum.value_and_apply_gradients(_dense, tx)
        jitted = jax.jit(lambda *args: step(*args)[1:], donate_argnums=(0, 1), out_shardings=out)
        return on.compile(jitted.lower(given, state, rows(1)))

    def within(every: int, to: Tree) -> Any:
        step = optax_accum.value_and_grad(_dense, num_microbatches=every, devices=optax_accum.Devices("data", to=to))
        return on.compile(jax.jit(step).lower(given, rows(every)))

    with jax.set_mesh(mesh):
        given = on.shapes(params, mesh=mesh)
        for way, make in (("across calls", across), ("within a call", within)):
            for name, every, to in (("", 2, None), ("", 8, None), (", ZeRO-1", 8, P("data"))):
                yield f"{way}{name}, k = {every}", _window(make(every, to), size(params))


def _placed(tx: Any, params: Tree) -> tuple[Tree, Tree]:
    """Returns the shapes of a state where it belongs, and where a step returns parameters and state."""
    placed = state_sharding(tx, params)
    make = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
    state = jax.tree.map(make, jax.eval_shape(tx.init, params), placed)
    return state, (jax.tree.map(lambda leaf: leaf.sharding, params), placed)


WIRES = {"": None, ", bfloat16 wire": jnp.bfloat16}
RING = {"all-reduce": 2}  # how often a part goes around: an all-reduce adds up and tells, others do one of the two


def overlap(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what a window sends, and how much of it beside products: 8 layers, k = 8, 512 rows a device each."""
    mesh, layer = on.mesh(), jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    models = {
        "stacked": (_scanned, jax.ShapeDtypeStruct((8, *layer.shape), layer.dtype)),
        "unrolled": (_dense, {f"layer {i}": layer for i in range(8)}),
    }
    rows = lambda k: on.shapes(jax.ShapeDtypeStruct((k * 512 * mesh.size, 2048), jnp.float32), P("data"), mesh)
    with jax.set_mesh(mesh):
        for name, (loss, params) in models.items():
            given = on.shapes(params, mesh=mesh)
            compiled = lambda step, given=given, options=None: on.compile(
                jax.jit(step, compiler_options=options).lower(given, rows(8))
            )
            yield f"{name}, a scan by hand", _sent(compiled(_by_hand(loss, mesh)), params)
            for (wire, dtype), flag in itertools.product(WIRES.items(), (False, True)):
                step = optax_accum.value_and_grad(
                    loss, 8, devices=optax_accum.Devices("data", dtype=dtype, overlap=flag)
                )
                yield f"{name}, overlap={flag}{wire}", _sent(compiled(step), params)
            shards = P(None, "data") if name == "stacked" else P("data")  # of each layer
            for flag in (False, True):
                step = optax_accum.value_and_grad(loss, 8, devices=optax_accum.Devices("data", to=shards, overlap=flag))
                yield f"{name}, to shards (ZeRO-1), overlap={flag}", _sent(compiled(step), params)
            if name == "unrolled" and on.devices[0].platform != "tpu":
                apart = {"xla_gpu_reduce_scatter_combine_threshold_bytes": 0}
                yield f"{name}, to shards, overlap=True, uncombined", _sent(compiled(step, options=apart), params)
            for flag in (False, True):
                program = _closing(on, loss, given, rows(1), flag)
                yield f"{name}, across calls, static flush, overlap={flag}", _sent(program, params)


ON = "COLLECTIVE_PIPELINING_MODE_ON"
FUSED = "xla_tpu_enable_async_collective_fusion"
# What public scripts set that train large models on GPUs (NVIDIA's JAX-Toolbox) and on TPUs (MaxText).
SCRIPTS: dict[bool, dict[str, Any]] = {
    False: {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_highest_priority_async_stream": True,
        "xla_gpu_all_reduce_combine_threshold_bytes": 2**30,
        "xla_gpu_all_gather_combine_threshold_bytes": 2**27,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**26,
        "xla_gpu_pipeline_all_reduce": ON,
        "xla_gpu_pipeline_all_gather": ON,
        "xla_gpu_pipeline_reduce_scatter": ON,
        "xla_gpu_enable_while_loop_double_buffering": True,
    },
    True: {
        "xla_tpu_enable_data_parallel_all_reduce_opt": True,
        "xla_tpu_data_parallel_opt_different_sized_ops": True,
        FUSED: True,
        f"{FUSED}_fuse_all_gather": True,
        f"{FUSED}_multiple_steps": True,
        "xla_tpu_overlap_compute_collective_tc": True,
        "xla_enable_async_all_gather": True,
    },
}


def flags(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what flags of public scripts change of that, for layers in a scan and for unrolled ones."""
    mesh, layer = on.mesh(), jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    rows = on.shapes(jax.ShapeDtypeStruct((8 * 512 * mesh.size, 2048), jnp.float32), P("data"), mesh)

    def sent(loss: Any, params: Tree, options: dict[str, Any]) -> Facts:
        step = jax.jit(
            optax_accum.value_and_grad(loss, 8, devices=optax_accum.Devices("data", overlap=True)),
            compiler_options=options,
        )
        return _sent(on.compile(step.lower(on.shapes(params, mesh=mesh), rows)), params)

    stacked = _scanned, jax.ShapeDtypeStruct((8, *layer.shape), layer.dtype)
    with jax.set_mesh(mesh):
        scripts = SCRIPTS[on.devices[0].platform == "tpu"]
        yield "none", sent(*stacked, {})
        yield "those of public scripts", sent(*stacked, scripts)
        yield "the same, unrolled", sent(_dense, {f"layer {i}": layer for i in range(8)}, scripts)


def _by_hand(loss: Any, mesh: Any) -> Any:
    """Returns the gradients of 8 micro-batches as many write them: a scan over micro-batches of all devices."""

    def step(params: Tree, batch: jax.Array) -> Tree:
        micro_batches = jax.lax.with_sharding_constraint(
            batch.reshape(-1, 8, batch.shape[-1]).swapaxes(0, 1), jax.NamedSharding(mesh, P(None, "data"))
        )
        add = lambda sums, rows: (jax.tree.map(jnp.add, sums, jax.grad(loss)(params, rows)), None)
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), micro_batches)[0]

    return step


def _closing(on: Target, loss: Any, params: Tree, rows: Tree, overlap: bool) -> Any:
    """Compiles the micro-step that closes a window, as a static `flush` says."""
    devices = optax_accum.Devices("data", overlap=overlap)
    tx = optax_accum.accumulate_gradients(OPTIMIZERS["AdamW"](), None, devices=devices)
    step = optax_accum.value_and_apply_gradients(loss, tx)
    state, out = _placed(tx, params)
    jitted = jax.jit(lambda *args: step(*args, flush=True)[1:], donate_argnums=(0, 1), out_shardings=out)
    return on.compile(jitted.lower(params, state, rows))


def _sent(program: Any, params: Tree) -> Facts:
    """Returns what a device sends, in copies of the parameters, each part to its neighbour."""
    copy, large = size(params), count_collectives(program).select(min_bytes=1024)
    sent = [
        (op.behind, op.times * op.bytes * RING.get(op.kind, 1) * (1 - 1 / op.group))
        for op in large.operations
        if op.group
    ]
    return {
        "sent, P": sum(moved for _, moved in sent) / copy,
        "of it hidden, P": sum(moved for behind, moved in sent if behind) / copy,
        "temporary, P": program.memory_analysis().temp_size_in_bytes / copy,
    }


def _dense(params: Tree, x: jax.Array) -> jax.Array:
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def _scanned(params: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2)


def _window(program: Any, copy: int) -> Facts:
    found = count_collectives(program)
    moved = lambda kind: found.select(kind, min_bytes=1024).bytes / copy
    return {
        "collectives, held": len(found.select(place=("outside", "loop"))),
        "all-reduced, P": moved("all-reduce"),
        "scattered, P": moved("reduce-scatter"),
        "gathered, P": moved("all-gather"),
        "temporary, P": program.memory_analysis().temp_size_in_bytes / copy,
    }


def sharded(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what a window over sharded parameters gathers and adds up."""
    for way in _fsdp.WAYS:
        for k in (2, 32):
            found = _fsdp.cost(on, way, k, _fsdp.Sizes())
            yield f"{way}, k = {k}", {f"{name}, P": value for name, value in found._asdict().items()}


# Replicas of sharded parameters: half of the devices are one replica.

REPLICAS, REPLICA_SPECS = 2, {"up": P("shard"), "down": P(None, "shard")}  # of one layer


def replicated(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what a window over sharded parameters says between replicas, and inside one."""
    for way in REPLICATED:
        for k in (2, 8):
            yield f"{way}, k = {k}", between_replicas(on, way, k, _fsdp.Sizes())


def between_replicas(on: Target, way: str, k: int, sizes: _fsdp.Sizes) -> Facts:
    """Compiles the gradient of a window, and reads what it costs."""
    mesh, rows = on.mesh("replica", "shard", shape=(REPLICAS, len(on.devices) // REPLICAS)), P(("replica", "shard"))
    compiled = _fsdp.compiled(on, mesh, REPLICA_SPECS, rows, REPLICATED[way](k), sizes)
    found = count_collectives(compiled).select(min_bytes=1024)
    between = Collectives(tuple(op for op in found if op.group == REPLICAS))
    return {
        "between replicas, P": between.bytes / sizes.copy,
        "of it hidden, P": between.hidden / sizes.copy,
        "inside, P": (found.bytes - between.bytes) / sizes.copy,
        "inside hidden, P": (found.hidden - between.hidden) / sizes.copy,
        "temporary, P": compiled.memory_analysis().temp_size_in_bytes / sizes.copy,
    }


def _once(k: int) -> Callable[[Tree, Any], Tree]:
    """Shards are left to the partitioner; replicas exchange theirs after the window."""
    loss = lambda params, batch: _fsdp.loss_of(params, batch, jax.checkpoint(_fsdp.block_of))
    f = optax_accum.value_and_grad(loss, num_microbatches=k, devices="replica")
    return lambda params, batch: f(params, batch)[1]


def _by_layer(k: int) -> Callable[[Tree, Any], Tree]:
    """Each layer is gathered twice for all its micro-batches, its gradient scattered and exchanged once."""
    both = ("replica", "shard")
    block = optax_accum.microbatched(_fsdp.block_of, k, devices=optax_accum.Devices(both, to=REPLICA_SPECS))
    return jax.grad(lambda params, batch: _fsdp.loss_of(params, batch, block))


ONCE, BY_LAYER = 'value_and_grad(devices="replica")', "by layer"
REPLICATED = {_fsdp.SCAN: _fsdp.scan, ONCE: _once, BY_LAYER: _by_layer}
