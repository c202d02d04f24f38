"""Owns what the compilers of accelerators make of the library: bytes, copies, memory, collectives. Times nothing.

Run `python -m benchmarks.accelerators --targets h100 v5e:4x4`; no accelerator is needed, but its compiler is. `--facts
FILE` writes all as JSON, so that two versions of JAX can be compared.
"""

import argparse
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import optax_accum
from benchmarks import _measure, fsdp
from benchmarks._measure import Tree
from optax_accum.accelerators import Target, Traffic, count_traffic, target
from optax_accum.sharding import count_collectives, state_sharding

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "AdamW": lambda: optax.adamw(1e-3),
    "SGD, momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "Lion": lambda: optax.lion(1e-3),
    "Adafactor": lambda: optax.adafactor(1e-3),
    "Muon": lambda: optax.contrib.muon(1e-3),
}
POLICIES = ("propagate", "skip", "omit", "discard")
WIDTH, LAYERS = 4096, 4  # 256 MiB of parameters: above the 128 MiB of a TPU's vector memory
MODEL, HEADS, DEPTH, VOCABULARY, LENGTH = 1024, 8, 12, 8192, 512  # a decoder of 0.17e9 parameters
Facts = dict[str, float]


def main() -> None:
    """Prints a table for each target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--targets", nargs="+", default=["h100"], help="h100, a100, h200, b200, v5e:4x4, v5p:2x2x1, ..."
    )
    parser.add_argument("--facts", type=pathlib.Path, help="write the facts to FILE, as JSON")
    options = parser.parse_args()
    record, tables = {}, []
    for name in options.targets:
        many = target(name) if ":" in name else target(name, num_devices=8)
        facts = {kind: dict(tqdm(of(many), desc=f"{name}: {kind}", leave=False)) for kind, of in KINDS.items()}
        record[name] = {"jax": jax.__version__, "device": many.devices[0].device_kind, "facts": facts}
        tables += [f"### {name}, {len(many.devices)} devices\n", *(_table(kind, of) for kind, of in facts.items())]
    text = "\n".join([_measure.header("Compiled for accelerators, not timed", NOTES), *tables])
    print(text)
    if options.facts:
        _measure.write(options.facts, text, record)


NOTES = """\
P is one copy of the float32 parameters. Bytes are what instructions read and write in the device's memory; temporary
memory is what the compiler asks for beside arguments and results; both of one device, all donated that can be."""


def _table(kind: str, facts: dict[str, Facts]) -> str:
    columns = list(dict.fromkeys(name for row in facts.values() for name in row))
    show = lambda value: "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    rows = [[case, *(show(row.get(name)) for name in columns)] for case, row in facts.items()]
    return _measure.markdown([[kind, *columns], *rows]) + "\n"


# One device


def layers() -> Tree:
    """Returns the shapes of square matrices."""
    return {f"layer {i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(LAYERS)}


def size(params: Tree) -> int:
    """Returns the bytes of a tree of shapes."""
    return sum(leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(params))


def compiled(on: Target, step: Callable[..., Any], *args: Tree, donate: tuple[int, ...] = (0, 1)) -> Any:
    """Compiles a step for one device."""
    return on.compile(jax.jit(step, donate_argnums=donate).lower(*map(on.one().shapes, args)))


def traffic(on: Target, step: Callable[..., Any], tx: Any, params: Tree) -> Traffic:
    """Returns what a step `(params, state, grads) -> (params, state)` moves."""
    return count_traffic(compiled(on, step, params, jax.eval_shape(tx.init, params), params), min_copy=WIDTH * WIDTH)


def alone(inner: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns the step of an optimizer as Optax writes it."""

    def step(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def applied(tx: Any) -> Callable[..., Any]:
    """Returns the step of `apply_gradients`."""
    return lambda params, state, grads: optax_accum.apply_gradients(tx, grads, state, params)


def optimizers(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what a micro-step of `apply_gradients` moves, beside what the optimizer alone does."""
    params = layers()
    for name, make in OPTIMIZERS.items():
        inner = make()
        base = traffic(on, alone(inner), inner, params)
        yield (
            name,
            _micro_step(on, optax_accum.accumulate_gradients(inner, 8), params)
            | {
                "alone, P": base.most / size(params),
                "alone temporary, P": (base.temporary or 0) / size(params),
            },
        )


def policies(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what a micro-step moves under each policy, with AdamW."""
    for policy in POLICIES:
        tx = optax_accum.accumulate_gradients(OPTIMIZERS["AdamW"](), 8, nonfinite=policy)
        yield policy, _micro_step(on, tx, layers())


def _micro_step(on: Target, tx: Any, params: Tree) -> Facts:
    found = traffic(on, applied(tx), tx, params)
    copy = size(params)
    return {
        "held, P": found.least / copy,
        "held copies": found.always.copies,
        "emitting adds, P": (found.most - found.least) / copy,
        "temporary, P": (found.temporary or 0) / copy,
        "window of 8, P": (7 * found.least + found.most) / copy,
    }


def wrappers(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields the bytes of a window of 8 through `update` and `optax.apply_updates`, ours and Optax's."""
    params, inner = layers(), OPTIMIZERS["AdamW"]()
    for name, tx in (
        ("update", optax_accum.accumulate_gradients(inner, 8)),
        ("MultiSteps", optax.MultiSteps(inner, 8)),
    ):
        found = traffic(on, alone(tx), tx, params)  # type: ignore[arg-type]
        window = (7 * found.least + found.most) / size(params)
        yield name, {"window of 8, P": window, "temporary, P": (found.temporary or 0) / size(params)}


def offloaded(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what crosses to the host's memory and back where AdamW's two moments lie there."""
    params = layers()
    tx = optax_accum.accumulate_gradients(OPTIMIZERS["AdamW"](), 8)

    def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        # Devices that are not here have no memories to place an argument in, so the moments are sent there first.
        there = lambda leaf: jax.device_put(leaf, jax.memory.Space.Host) if leaf.ndim else leaf
        inner = jax.tree.map(there, state.inner_opt_state)
        return optax_accum.apply_gradients(tx, grads, state._replace(inner_opt_state=inner), params)

    found = count_traffic(compiled(on, step, params, jax.eval_shape(tx.init, params), params, donate=(0,)))
    emitting = max(part.host for part in found.parts if part.branches)
    yield "moments on the host", {"to and fro, emitting, P": emitting / size(params)}


# A decoder


def decoder() -> tuple[Callable[[Tree, Tree], jax.Array], Tree]:
    """Returns the loss of a decoder of stacked layers, each run again in the backward pass, and its parameters."""
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    params = {
        "embedding": shape(VOCABULARY, MODEL),
        "layers": {
            "qkv": shape(DEPTH, MODEL, 3 * MODEL),
            "out": shape(DEPTH, MODEL, MODEL),
            "up": shape(DEPTH, MODEL, 4 * MODEL),
            "down": shape(DEPTH, 4 * MODEL, MODEL),
        },
    }

    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    @jax.checkpoint
    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        qkv = (norm(x) @ w["qkv"]).reshape(*x.shape[:2], 3, HEADS, MODEL // HEADS)
        attended = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
        x = x + attended.reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(layer, params["embedding"][tokens[:, :-1]], params["layers"])
        logits = norm(x) @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss, params


def decoders(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields the memory of a decoder's step with Adam and 8 micro-batches: all that it holds at its peak."""
    loss, params = decoder()
    inner = optax.adam(1e-3)
    tokens = lambda rows: jax.ShapeDtypeStruct((rows, LENGTH + 1), jnp.int32)

    def memory(step: Callable[..., Any], tx: Any, rows: int) -> Facts:
        stats = compiled(on, step, params, jax.eval_shape(tx.init, params), tokens(rows)).memory_analysis()
        held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        return {"memory, P": (held + stats.temp_size_in_bytes) / size(params)}

    def update(gradient: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, state, batch: alone(inner)(params, state, gradient(params, batch)[1])

    ours = functools.partial(optax_accum.value_and_grad, loss, num_microbatches=8)
    microbatch = optax.microbatching.microbatch(
        jax.value_and_grad(loss), argnums=1, microbatch_size=1, accumulator=optax.microbatching.AccumulationType.MEAN
    )
    tx, peer = optax_accum.accumulate_gradients(inner, 8), optax.MultiSteps(inner, 8)

    def two(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        return optax_accum.apply_gradients(tx, jax.grad(loss)(params, batch), state, params)

    def multi_steps(params: Tree, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        return alone(peer)(params, state, jax.grad(loss)(params, batch))  # type: ignore[arg-type]

    fused = optax_accum.value_and_apply_gradients(loss, tx)
    yield "value_and_grad, in place", memory(update(ours()), inner, 8)
    yield "optax.microbatch", memory(update(microbatch), inner, 8)
    yield "value_and_apply_gradients", memory(lambda *args: fused(*args)[1:], tx, 1)
    yield "gradient, then apply_gradients", memory(two, tx, 1)
    # Above is what tests/test_facts.py asks; each takes a TPU's compiler half a minute.
    yield "gradient, then MultiSteps", memory(multi_steps, peer, 1)
    yield "value_and_grad, in a scan", memory(update(ours(in_place=False)), inner, 8)
    yield "whole batch", memory(update(jax.value_and_grad(loss)), inner, 8)


# Several devices


def parallel(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what a data-parallel window says between devices, and its memory, with AdamW."""
    if len(on.devices) == 1:
        return
    params, mesh = layers(), on.mesh()
    rows = on.shapes(jax.ShapeDtypeStruct((len(on.devices), WIDTH), jnp.float32), jax.P("data"), mesh)

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def across(every: int, to: Tree) -> Any:
        tx = optax_accum.accumulate_gradients(OPTIMIZERS["AdamW"](), every, reduce_axes="data", reduce_to=to)
        placed = state_sharding(tx, given)
        make = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
        state = jax.tree.map(make, jax.eval_shape(tx.init, given), placed)
        step = optax_accum.value_and_apply_gradients(loss, tx)
        out = (jax.tree.map(lambda leaf: leaf.sharding, given), placed)
        jitted = jax.jit(lambda *args: step(*args)[1:], donate_argnums=(0, 1), out_shardings=out)
        return on.compile(jitted.lower(given, state, rows))

    def within(every: int, to: Tree) -> Any:
        whole = jax.ShapeDtypeStruct((every * rows.shape[0], WIDTH), jnp.float32, sharding=rows.sharding)
        step = optax_accum.value_and_grad(loss, num_microbatches=every, reduce_axes="data", reduce_to=to)
        return on.compile(jax.jit(step).lower(given, whole))

    with jax.set_mesh(mesh):
        given = on.shapes(params, mesh=mesh)
        for way, make in (("across calls", across), ("within a call", within)):
            for name, every, to in (("", 2, None), ("", 8, None), (", ZeRO-1", 8, jax.P("data"))):
                yield f"{way}{name}, k = {every}", _window(make(every, to), size(params))


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
    for way in (fsdp.SCAN, fsdp.ONCE, fsdp.LAYER) if len(on.devices) > 1 else ():
        for k in (2, 32):
            found = fsdp.cost(on, way, k, fsdp.Sizes())
            yield f"{way}, k = {k}", {f"{name}, P": value for name, value in found._asdict().items()}


KINDS: dict[str, Callable[[Target], Iterator[tuple[str, Facts]]]] = {
    "apply_gradients, by optimizer": optimizers,
    "apply_gradients, by policy": policies,
    "update": wrappers,
    "offload": offloaded,
    "decoder": decoders,
    "data parallel": parallel,
    "FSDP": sharded,
}

if __name__ == "__main__":
    main()
