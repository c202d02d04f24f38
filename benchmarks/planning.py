"""Owns how right a plan is: what the compiler foretells against what a process holds, and what a plan takes to make.

Run `python -m benchmarks.planning` for five models on this CPU, `--models mlp gru` for some of them, and with
`--target h100 --devices 8` for a decoder of a billion parameters, sharded (FSDP), on an accelerator that is not here.
"""

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from benchmarks import _measure
from benchmarks._measure import Tree
from optax_accum import plan
from optax_accum.accelerators import Target, target

NOTES = """\
Foretold is what the plan says that a step holds at its peak: arguments, outputs, temporary memory. Measured is the
largest resident memory of a fresh process while it makes two steps, less its overhead: what it held when the step
was compiled and nothing of it allocated, which is Python, JAX with its threads (a small product was run), the
program. The allocator gives back what is freed (MALLOC_MMAP_THRESHOLD_=65536); as it comes, glibc keeps freed pieces
of up to 32 MB. The first k of a model is the plan's; the second, the next fewer. All of
the budget is used (safety=1)."""


class Model(NamedTuple):
    """A loss of `params(), batch(rows)`, and the budget that it is planned for."""

    loss: Callable[[Tree, Any], jax.Array]
    params: Tree
    batch: Callable[[int], Any]
    rows: int
    budget: str
    options: dict[str, Any] = {}  # noqa: RUF012


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.planning", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="which of the five")
    parser.add_argument("--target", help='an accelerator, such as "h100"; then a large decoder is planned for it')
    parser.add_argument("--devices", type=int, default=8, help="how many of them")
    parser.add_argument("--run", nargs=2, metavar=("MODEL", "K"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(held(options.run[0], int(options.run[1]))))
    elif options.target:
        print(large(target(options.target, options.devices)))
    else:
        print(_measure.header("Foretold and measured, on the CPU", NOTES))
        head = (
            "model",
            "rows",
            "budget",
            "k",
            "foretold",
            "measured",
            "error",
            "overhead",
            "in the budget",
            "plan took",
        )
        print(_measure.markdown([head, *(row for name in options.models for row in rows_of(name))]))


def rows_of(name: str) -> list[tuple[str, ...]]:
    """Returns the table's rows of a model: the chosen number of micro-batches, and the next fewer."""
    model = MODELS[name]()
    start = time.perf_counter()
    found = plan.plan_microbatches(builder(model), model.rows, budget=model.budget, safety=1, progress=False)
    seconds = time.perf_counter() - start
    fewer = max((k for k in range(1, model.rows) if -(-model.rows // k) > found.microbatch_size), default=0)
    rows = []
    for k, took in ((found.num_microbatches, f"{seconds:.0f} s, {len(found.rows)} programs"), (fewer, "")):
        command = [sys.executable, "-m", "benchmarks.planning", "--run", name, str(k)]
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        of = json.loads(out.splitlines()[-1])
        error = of["foretold"] / of["measured"] - 1
        sizes = [f"{of[what] / 1e6:.0f} MB" for what in ("foretold", "measured")]
        fits = "yes" if of["measured"] <= found.budget else "no"
        overhead = f"{of['overhead'] / 1e6:.0f} MB"
        rows.append((name, str(model.rows), model.budget, str(k), *sizes, f"{error:+.1%}", overhead, fits, took))
    return rows


def held(name: str, k: int) -> dict[str, float]:
    """Makes two steps, and returns what was foretold, what this process held at most, and its overhead."""
    model, on = MODELS[name](), target(None, 1)
    make_step = builder(model)
    compiled = make_step(k, on).compile()
    memory = compiled.memory_analysis()
    given = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    filled = lambda leaf: jnp.full(leaf.shape, 0.01 if leaf.dtype == jnp.float32 else 1, leaf.dtype)
    fill = jax.jit(lambda: jax.tree.map(filled, _shapes(compiled))).lower().compile()
    jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ x), x))(
        jnp.ones((256, 256))
    ).block_until_ready()
    ctypes.CDLL(None).malloc_trim(0)  # what compiling left behind
    Path("/proc/self/clear_refs").write_text("5")  # the largest so far is what there is now
    overhead = _resident("VmHWM")
    values = fill()
    for _ in range(2):
        params, state, *rest = values
        params, state, _value = compiled(params, state, *rest)
        values = (params, state, *rest)
    jax.block_until_ready(values)
    return {
        "foretold": given + memory.temp_size_in_bytes,
        "measured": _resident("VmHWM") - overhead,
        "overhead": overhead,
    }


def builder(model: Model) -> plan.Builder:
    """Returns the model's step."""
    return plan.of_loss(model.loss, optax.adam(1e-3), model.params, model.batch(model.rows), **model.options)


def _shapes(compiled: Any) -> Tree:
    return jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), compiled.args_info)[0]


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


# Five kinds of models.


def mlp() -> Model:
    """Two wide matrices."""

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.gelu(x @ params["up"]) @ params["down"] - x) ** 2)

    params = {"up": _shape(2048, 16384), "down": _shape(16384, 2048)}
    return Model(loss, params, lambda rows: _shape(rows, 2048), 4096, "1.5GB")


def decoder() -> Model:
    """Layers in a scan, each checkpointed, and a head as wide as the vocabulary."""
    layers = {"qkv": _shape(6, 512, 3, 8, 64), "out": _shape(6, 512, 512), "up": _shape(6, 512, 2048)}
    params = {"embed": _shape(8192, 512), "layers": {**layers, "down": _shape(6, 2048, 512)}}
    return Model(decoder_loss(), params, lambda rows: _shape(rows, 256, dtype=jnp.int32), 32, "700MB")


def unet() -> Model:
    """Convolutions down and up again; micro-batches one by one, since XLA's loops slow them on a CPU."""
    convolve = lambda x, w, stride=1: jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        across = jax.nn.relu(convolve(x, params["in"]))
        deep = jax.nn.relu(convolve(across, params["down"], 2))
        up = jax.image.resize(deep, (*across.shape[:3], deep.shape[3]), "nearest")
        return jnp.mean(convolve(jax.nn.relu(convolve(up, params["up"])) + across, params["out"]) ** 2)

    params = {"in": _shape(3, 3, 3, 16), "down": _shape(3, 3, 16, 32), "up": _shape(3, 3, 32, 16)}
    params |= {"out": _shape(3, 3, 16, 4)}
    return Model(loss, params, lambda rows: _shape(rows, 192, 192, 3), 64, "500MB")


def gru() -> Model:
    """A recurrence over long rows."""

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            gate = jax.nn.sigmoid(x @ params["gate_in"] + h @ params["gate"])
            h = gate * h + (1 - gate) * jnp.tanh(x @ params["new_in"] + h @ params["new"])
            return h, h

        _, out = jax.lax.scan(step, jnp.zeros((x.shape[0], 512)), x.swapaxes(0, 1))
        return jnp.mean(out**2)

    params = {name: _shape(64, 512) for name in ("gate_in", "new_in")}
    params |= {name: _shape(512, 512) for name in ("gate", "new")}
    return Model(loss, params, lambda rows: _shape(rows, 128, 64), 1024, "700MB")


def recommender() -> Model:
    """A large table of embeddings, of which a batch reads few rows, and many items to choose from."""

    def loss(params: Tree, batch: Tree) -> jax.Array:
        logits = jnp.tanh(params["table"][batch["seen"]].mean(1) @ params["up"]) @ params["items"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()

    params = {"table": _shape(200_000, 256), "up": _shape(256, 1024), "items": _shape(1024, 10_000)}
    ids = lambda *dims: _shape(*dims, dtype=jnp.int32)
    return Model(loss, params, lambda rows: {"seen": ids(rows, 32), "next": ids(rows)}, 4096, "1.25GB")


MODELS: dict[str, Callable[[], Model]] = {f.__name__: f for f in (mlp, decoder, unet, gru, recommender)}


def decoder_loss(dtype: Any = jnp.float32) -> Callable[[Tree, jax.Array], jax.Array]:
    """Returns the loss of a decoder, computed in `dtype`."""
    normed = lambda h: h * jax.lax.rsqrt(jnp.mean(h.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6).astype(dtype)

    def block(h: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        layer = jax.tree.map(lambda leaf: leaf.astype(dtype), layer)
        q, k, v = jnp.moveaxis(jnp.einsum("blw,wnhd->blnhd", normed(h), layer["qkv"]), 2, 0)
        h = h + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(h.shape) @ layer["out"]
        return h + jax.nn.gelu(normed(h) @ layer["up"]) @ layer["down"], None

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        embed = params["embed"].astype(dtype)
        h, _ = jax.lax.scan(jax.checkpoint(block), embed[tokens], params["layers"])
        logits = (normed(h) @ embed.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    return loss


def large(on: Target, rows: int = 512, length: int = 2048) -> str:
    """Returns the plan of a decoder of a billion parameters, sharded over the devices, and the seconds it took."""
    mesh, layers, width = on.mesh(), 24, 2048
    shape = lambda spec, *dims, dtype=jnp.float32: on.shapes(_shape(*dims, dtype=dtype), spec, mesh)
    params = {
        "embed": shape(P("data"), 32_768, width),
        "layers": {
            "qkv": shape(P(None, "data"), layers, width, 3, 16, width // 16),
            "out": shape(P(None, "data"), layers, width, width),
            "up": shape(P(None, "data"), layers, width, 4 * width),
            "down": shape(P(None, None, "data"), layers, 4 * width, width),
        },
    }
    tokens = shape(P("data"), rows, length, dtype=jnp.int32)
    start = time.perf_counter()
    found = plan.plan_microbatches(
        plan.of_loss(decoder_loss(jnp.bfloat16), optax.adamw(1e-3), params, tokens), rows, target=on
    )
    seconds = time.perf_counter() - start
    billions = sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e9
    title = f"{billions:.2f}e9 parameters, FSDP, {rows} rows of {length} tokens: {seconds:.0f} s to plan on this CPU"
    return f"{_measure.header(title, '')}\n```\n{found}\n```"


if __name__ == "__main__":
    _measure.command(main)
