"""Owns what the compilers of accelerators make of the library: bytes, copies, memory, collectives. Times nothing.

Run `python -m benchmarks.accelerators --targets h100`; no accelerator is needed, but its compiler is. `--facts FILE`
adds them to a JSON of targets and versions of JAX, where a change shows as a diff; with `--page docs/accelerators.md`
nothing is compiled, and the tables of that page become those of the JSON.
"""

import argparse
import functools
import json
import pathlib
import re
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
    """Prints the tables of each target, or writes those of a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--targets", nargs="+", default=["h100"], help="h100, a100, h200, b200, v5e:4x4, v5p:2x2x1, ..."
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="of facts; all by default")
    parser.add_argument("--facts", type=_measure.writable, default=FACTS, help="the JSON to add them to, or to show")
    parser.add_argument(
        "--page", type=_measure.writable, help="the Markdown file whose tables are to be those of the JSON"
    )
    options = parser.parse_args()
    record = json.loads(options.facts.read_text()) if options.facts.exists() else {}
    if options.page:
        options.page.write_text(page(options.page.read_text(), record))
        return
    print(_measure.header("Compiled for accelerators, not timed", NOTES))
    for name in options.targets:
        many = target(name) if ":" in name else target(name, num_devices=8)
        here = f"{name}, JAX {jax.__version__}"
        for kind in options.kinds:
            found = {case: _rounded(row) for case, row in tqdm(KINDS[kind](many), desc=f"{name}: {kind}", leave=False)}
            record.setdefault(here, {})[kind] = found
            options.facts.write_text(json.dumps(record, indent=1) + "\n")
            print(table(kind, {here: record[here]}), flush=True)


FACTS = pathlib.Path(__file__).with_suffix(".json")
NOTES = """\
P is one copy of the float32 parameters. Bytes are what instructions read and write in the device's memory; temporary
memory is what the compiler asks for beside arguments and results; both of one device, all donated that can be."""


def table(kind: str, record: dict[str, Any]) -> str:
    """Returns the facts of a kind as Markdown, a row for all targets that have the same."""
    of = {name: facts[kind] for name, facts in record.items() if facts.get(kind)}
    columns = list(dict.fromkeys(fact for rows in of.values() for row in rows.values() for fact in row))
    lines = []
    for case in dict.fromkeys(case for rows in of.values() for case in rows):
        same: dict[tuple[str, ...], list[str]] = {}
        for name, rows in of.items():
            if case in rows:
                cells = (f"{rows[case][fact]:g}" if fact in rows[case] else "" for fact in columns)
                same.setdefault(tuple(cells), []).append(name)
        for cells, names in same.items():
            lines.append([case, "all" if len(names) == len(record) else "; ".join(names), *cells])
    return _measure.markdown([[kind, "compiled for", *columns], *lines], left=(0, 1)) + "\n"


def page(text: str, record: dict[str, Any]) -> str:
    """Returns a page with the table of the record after each mark `<!-- facts: KIND -->`."""
    marked = re.compile(r"(<!-- facts: (.*) -->\n)(?:\n\|.*(?:\n\|.*)*\n)?")
    return marked.sub(lambda found: f"{found[1]}\n{table(found[2], record)}", text)


def _rounded(row: Facts) -> Facts:
    return {name: round(value, 2) for name, value in row.items()}


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


def decoder(cast: Callable[[Tree], Tree] = lambda w: w) -> tuple[Callable[[Tree, Tree], jax.Array], Tree]:
    """Returns the loss of a decoder of stacked layers, each run again in the backward pass, and its parameters.

    Each layer is given its parameters as `cast` returns them.
    """
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
        w = cast(w)
        qkv = (norm(x) @ w["qkv"]).reshape(*x.shape[:2], 3, HEADS, MODEL // HEADS)
        attended = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
        x = x + attended.reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        embedding = cast(params["embedding"])
        x, _ = jax.lax.scan(layer, embedding[tokens[:, :-1]], params["layers"])
        logits = (norm(x) @ embedding.T).astype(jnp.float32)
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


def narrow(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields the memory of float32 sums beside a decoder that computes in bfloat16: temporary, and the gradient."""
    to = lambda dtype: lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
    loss, wide = decoder()
    low = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), wide)
    tokens = jax.ShapeDtypeStruct((8, LENGTH + 1), jnp.int32)
    ours = functools.partial(optax_accum.value_and_grad, num_microbatches=8, accumulator_dtype=jnp.float32)

    @jax.custom_vjp
    def door(like: jax.Array, leaf: jax.Array) -> jax.Array:  # its gradient is float32, and goes to `like`
        return leaf

    door.defvjp(lambda like, leaf: (leaf, None), lambda _, grad: (grad.astype(jnp.float32), jnp.zeros_like(grad)))

    def doored(params: Tree, tokens: jax.Array) -> Any:
        like = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        through = lambda like, tokens, params: loss(jax.tree.map(door, like, params), tokens)
        return ours(through, in_place=True)(like, tokens, params)

    for name, step, params in (
        ("bfloat16 parameters, added after", ours(loss), low),
        ("bfloat16 parameters, in place through a custom_vjp", doored, low),
        ("float32 parameters, cast in each layer, in place", ours(decoder(to(jnp.bfloat16))[0]), wide),
        (
            "float32 parameters, cast before, in place",
            ours(lambda *args: loss(to(jnp.bfloat16)(args[0]), args[1])),
            wide,
        ),
    ):
        stats = compiled(on, step, params, tokens, donate=()).memory_analysis()
        memory = stats.temp_size_in_bytes + stats.output_size_in_bytes
        yield name, {"memory beside the parameters, P": memory / size(wide)}


# The loop over micro-batches


def cuts(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what it takes to cut a batch in 8: in copies of the batch, B, whose rows are as wide as the model."""
    batch, params = jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32), list(layers().values())[:1]
    loss = lambda params, x: jnp.mean(jnp.tanh(x @ params[0]) ** 2)

    def consecutive(params: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
        add = lambda acc, rows: (jax.tree.map(jnp.add, acc, jax.value_and_grad(loss)(params, rows)), None)
        start = (jnp.zeros([]), jax.tree.map(jnp.zeros_like, params))
        return jax.lax.scan(add, start, x.reshape(8, -1, WIDTH))[0]

    for name, step in (
        ("row r in micro-batch r mod 8", optax_accum.value_and_grad(loss, num_microbatches=8)),
        ("the same, unroll=True", optax_accum.value_and_grad(loss, num_microbatches=8, unroll=True)),
        ("consecutive rows, by hand", consecutive),
    ):
        program = compiled(on, step, params, batch, donate=())
        found = count_traffic(program, min_copy=size(batch) // 8)
        yield (
            name,
            {
                "moved, B": found.most / size(batch),
                "copies of a micro-batch": found.always.copies,
                "temporary, B": (found.temporary or 0) / size(batch),
            },
        )


def products(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields the products of 4 checkpointed layers by cuBLAS; one with beta = 1 adds to what it writes."""
    if on.devices[0].platform not in ("gpu", "cuda"):
        return
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))

    def stacked(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

    def unrolled(w: list[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean(functools.reduce(lambda x, w: layer(x, w)[0], w, x) ** 2)

    matrices = list(layers().values())
    stack = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32)
    for name, loss, params in (("a scan over layers", stacked, stack), ("layers one by one", unrolled, matrices)):
        for in_place in (True, False):
            step = jax.jit(optax_accum.value_and_grad(loss, num_microbatches=8, in_place=in_place))
            lowered = step.lower(*map(on.one().shapes, (params, batch)))
            # Which kernels are best is found by timing, on a GPU: here those of cuBLAS, whose text says beta.
            options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
            program = lowered.compile(compiler_options=options)  # type: ignore[arg-type]
            gemms = [line for line in program.as_text().splitlines() if '"__cublas$' in line]
            found = count_traffic(program)
            yield (
                f"{name}, {'in place' if in_place else 'added after'}",
                {
                    "products": len(gemms),
                    "with beta = 1, in place": sum(
                        '"beta":1' in line and "output_to_operand_aliasing" in line for line in gemms
                    ),
                    "moved, P": found.most / size(params),
                    "temporary, P": (found.temporary or 0) / size(params),
                },
            )


# Several devices


def parallel(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what a data-parallel window says between devices, and its memory, with AdamW."""
    if len(on.devices) == 1:
        return
    params, mesh = layers(), on.mesh()
    rows = lambda k: on.shapes(jax.ShapeDtypeStruct((k * mesh.size, WIDTH), jnp.float32), jax.P("data"), mesh)

    def across(every: int, to: Tree) -> Any:
        tx = optax_accum.accumulate_gradients(OPTIMIZERS["AdamW"](), every, reduce_axes="data", reduce_to=to)
        placed = state_sharding(tx, given)
        make = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
        state = jax.tree.map(make, jax.eval_shape(tx.init, given), placed)
        step = optax_accum.value_and_apply_gradients(_dense, tx)
        out = (jax.tree.map(lambda leaf: leaf.sharding, given), placed)
        jitted = jax.jit(lambda *args: step(*args)[1:], donate_argnums=(0, 1), out_shardings=out)
        return on.compile(jitted.lower(given, state, rows(1)))

    def within(every: int, to: Tree) -> Any:
        step = optax_accum.value_and_grad(_dense, num_microbatches=every, reduce_axes="data", reduce_to=to)
        return on.compile(jax.jit(step).lower(given, rows(every)))

    with jax.set_mesh(mesh):
        given = on.shapes(params, mesh=mesh)
        for way, make in (("across calls", across), ("within a call", within)):
            for name, every, to in (("", 2, None), ("", 8, None), (", ZeRO-1", 8, jax.P("data"))):
                yield f"{way}{name}, k = {every}", _window(make(every, to), size(params))


def by_jax(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what JAX's own sums over devices become, after the micro-batches of a call."""
    if len(on.devices) == 1:
        return
    params, mesh = layers(), on.mesh()
    batch = on.shapes(jax.ShapeDtypeStruct((8 * mesh.size, WIDTH), jnp.float32), jax.P("data"), mesh)
    gradients = optax_accum.value_and_grad(_dense, num_microbatches=8, reduce_axes="data", reduce_to="partial")
    scatter = functools.partial(jax.lax.psum_scatter, tiled=True)
    for name, add, to in (("psum", jax.lax.psum, jax.P()), ("psum_scatter", scatter, jax.P("data"))):
        each = lambda rows: jax.tree.map(lambda row: add(row[0], "data"), rows)  # noqa: B023
        summed = jax.shard_map(each, mesh=mesh, in_specs=jax.P("data"), out_specs=to)
        step = lambda *args: summed(gradients(*args)[1])  # noqa: B023
        with jax.set_mesh(mesh):
            yield (
                f"jax.lax.{name}",
                _window(on.compile(jax.jit(step).lower(on.shapes(params, mesh=mesh), batch)), size(params)),
            )


def _dense(params: Tree, x: jax.Array) -> jax.Array:
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


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
    "bfloat16": narrow,
    "cut": cuts,
    "matrix products": products,
    "data parallel": parallel,
    "data parallel, summed by JAX": by_jax,
    "FSDP": sharded,
}

if __name__ == "__main__":
    _measure.command(main)
