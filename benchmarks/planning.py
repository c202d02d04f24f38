"""How right a plan is: the memory that it predicts and that a process then holds, and the time that it takes.

Run `python -m benchmarks.planning` for five models on the device here, `--models mlp gru` for some of them, and with
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

from benchmarks import _decoder, _measure
from benchmarks._measure import Tree
from optax_accum import plan
from optax_accum.accelerators import Target, target

NOTES = """\
Foretold is what the plan says that a step holds at its peak: arguments, outputs, temporary memory. Measured is what a
fresh process holds at most while it makes two steps, less its overhead: what it held when the step was compiled and
nothing of it allocated. The first k of a model is the plan's; the second, the next fewer. All of the budget is used
(safety=1)."""
ON_CPU = """\
On a CPU that is resident memory, and the overhead is Python, JAX with its threads (a small product was run), the
program. The allocator gives back what is freed (MALLOC_MMAP_THRESHOLD_=65536); as it comes, glibc keeps freed pieces of
up to 32 MB."""
ON_DEVICES = """\
On this device that is what its own statistics say (`memory_stats`: peak_bytes_in_use), taken from an allocator that
reserves nothing ahead (XLA_PYTHON_CLIENT_PREALLOCATE=false)."""


class Model(NamedTuple):
    """A loss of `params(), batch(rows)`, and the budget that it is planned for."""

    loss: Callable[[Tree, Any], jax.Array]
    params: Tree
    batch: Callable[[int], Any]
    rows: int
    budget: str


class Measured(NamedTuple):
    """One row of the table: a number of micro-batches, bytes foretold and held, and whether the plan chose it."""

    model: str
    k: int
    chosen: bool
    budget: int
    foretold: float
    measured: float
    overhead: float
    took: str

    @property
    def error(self) -> float:
        """The share by which the plan is above what was held."""
        return self.foretold / self.measured - 1

    @property
    def held(self) -> bool:
        """Whether the budget was kept."""
        return self.measured <= self.budget

    def __str__(self) -> str:
        return f"{self.model}, k = {self.k}"


def main() -> None:
    """Prints the tables, and whether the targets are met."""
    parser = _measure.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="which of the five")
    parser.add_argument("--target", help='an accelerator, such as "h100"; then a large decoder is planned for it')
    parser.add_argument("--devices", type=int, default=8, help="how many of them")
    parser.add_argument("--run", nargs=2, metavar=("MODEL", "K"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= ALLOCATORS  # before a device is asked for
    if options.run:
        print(json.dumps(held(options.run[0], int(options.run[1]))))
    elif options.target:
        print(large(target(options.target, options.devices)))
    else:
        platform = jax.devices()[0].platform
        notes = f"{NOTES}\n\n{ON_CPU if platform == 'cpu' else ON_DEVICES}"
        print(_measure.header(f"Foretold and measured, on platform {platform}", notes))
        found = [row for name in options.models for row in rows_of(name)]
        print(f"{_rendered(found)}\n")
        print(_measure.targets_text(verdicts(found)))


ALLOCATORS = {"MALLOC_MMAP_THRESHOLD_": "65536", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def verdicts(found: list[Measured]) -> list[dict[str, Any]]:
    """The numbers to reach: a plan is right, and keeps its budget; the next fewer micro-batches do not."""
    plans, fewer = ([each for each in found if each.chosen is chosen] for chosen in (True, False))
    share = lambda each: 100 * each.measured / each.budget
    return [
        _measure.worst("error of a plan, % up or down", plans, lambda each: 100 * abs(each.error), 5),
        _measure.worst("held by a plan, % of its budget", plans, share, 100),
        _measure.worst("held by the next fewer, % of it", fewer, share, 100, at_least=True),
    ]


def rows_of(name: str) -> list[Measured]:
    """Returns the table's rows of a model: the chosen number of micro-batches, and the next fewer."""
    model = MODELS[name]()
    start = time.perf_counter()
    found = plan.fit(steps(model), *arguments(model), run=False, budget=model.budget, safety=1, progress=False)
    took = f"{time.perf_counter() - start:.0f} s, {len(found.rows)} programs"
    fewer = max((k for k in range(1, model.rows) if -(-model.rows // k) > found.microbatch_size), default=0)
    row = lambda k, took: Measured(
        name, k, k == found.num_microbatches, found.budget, **_of_process(name, k), took=took
    )
    return [row(found.num_microbatches, took), *([row(fewer, "")] if fewer else [])]


def _of_process(name: str, k: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.planning", "--run", name, str(k)]
    out = subprocess.run(command, env=os.environ | ALLOCATORS, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def _rendered(found: list[Measured]) -> str:
    head = ("model", "budget", "k", "foretold", "measured", "error", "overhead", "in the budget", "plan took")
    size = lambda size: f"{size / 1e6:.0f} MB"
    rows = []
    for each in found:
        sizes = size(each.foretold), size(each.measured), f"{each.error:+.1%}", size(each.overhead)
        rows.append((each.model, size(each.budget), str(each.k), *sizes, "yes" if each.held else "no", each.took))
    return _measure.markdown([head, *rows])


def held(name: str, k: int) -> dict[str, float]:
    """Makes two steps, and returns what was foretold, what this process held at most, and its overhead."""
    model, on = MODELS[name](), target(None, 1)
    compiled = steps(model)(k).lower(*on.shapes(arguments(model))).compile()
    memory = compiled.memory_analysis()
    given = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    filled = lambda leaf: jnp.full(leaf.shape, 0.01 if leaf.dtype == jnp.float32 else 1, leaf.dtype)
    fill = jax.jit(lambda: jax.tree.map(filled, _shapes(compiled))).lower().compile()
    jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ x), x))(
        jnp.ones((256, 256))
    ).block_until_ready()
    overhead = _in_use(on.devices[0])
    values = fill()
    for _ in range(2):
        params, state, *rest = values
        params, state, _value = compiled(params, state, *rest)
        values = (params, state, *rest)
    jax.block_until_ready(values)
    return {
        "foretold": given + memory.temp_size_in_bytes,
        "measured": _most_in_use(on.devices[0]) - overhead,
        "overhead": overhead,
    }


def _in_use(device: Any) -> int:
    """Returns the memory in use: of this process on a CPU, else as the device counts it."""
    if device.platform != "cpu":
        return device.memory_stats()["bytes_in_use"]
    ctypes.CDLL(None).malloc_trim(0)  # what compiling left behind
    Path("/proc/self/clear_refs").write_text("5")  # the largest so far is what there is now
    return _most_in_use(device)


def _most_in_use(device: Any) -> int:
    """Returns the peak of the memory in use; an accelerator counts from the start of its process."""
    if device.platform != "cpu":
        return device.memory_stats()["peak_bytes_in_use"]
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def steps(model: Model) -> Any:
    """Returns the model's step, by its number of micro-batches."""
    return plan.of_loss(model.loss, optax.adam(1e-3))


def arguments(model: Model) -> tuple[Tree, Tree]:
    """Returns the shapes of the parameters and of the batch."""
    return model.params, model.batch(model.rows)


def _shapes(compiled: Any) -> Tree:
    return jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), compiled.args_info)[0]


def _shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


# Five kinds of models.


def mlp() -> Model:
    """Two wide matrices."""

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.gelu(x @ params["up"]) @ params["down"] - x) ** 2)

    params = {"up": _shape(2048, 16384), "down": _shape(16384, 2048)}
    return Model(loss, params, lambda rows: _shape(rows, 2048), 4096, "1.6GB")


def decoder() -> Model:
    """Layers in a scan, each checkpointed, and a head as wide as the vocabulary."""
    layers = {"qkv": _shape(6, 512, 3, 8, 64), "out": _shape(6, 512, 512), "up": _shape(6, 512, 2048)}
    params = {"embed": _shape(8192, 512), "layers": {**layers, "down": _shape(6, 2048, 512)}}
    normed = lambda h: h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)

    def block(h: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        q, k, v = jnp.moveaxis(jnp.einsum("blw,wnhd->blnhd", normed(h), layer["qkv"]), 2, 0)
        h = h + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(h.shape) @ layer["out"]
        return h + jax.nn.gelu(normed(h) @ layer["up"]) @ layer["down"], None

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(jax.checkpoint(block), params["embed"][tokens], params["layers"])
        logits = normed(h) @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    return Model(loss, params, lambda rows: _shape(rows, 256, dtype=jnp.int32), 32, "700MB")


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


def large(on: Target, rows: int = 512, length: int = 2048) -> str:
    """Returns the plan of a decoder of a billion parameters, sharded over the devices, and the seconds it took."""
    loss, params = _decoder.decoder(
        lambda w: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), w), _decoder.Sizes(2048, 16, 24, 32_768)
    )
    mesh, specs = on.mesh(), jax.tree.map(lambda leaf: P(*[None] * (leaf.ndim - 2), "data"), params)
    params = jax.tree.map(lambda leaf, spec: on.shapes(leaf, spec, mesh), params, specs)
    tokens = on.shapes(_shape(rows, length, dtype=jnp.int32), P("data"), mesh)
    start = time.perf_counter()
    found = plan.fit(plan.of_loss(loss, optax.adamw(1e-3)), params, tokens, run=False, target=on)
    seconds = time.perf_counter() - start
    billions = sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e9
    title = f"{billions:.2f}e9 parameters, FSDP, {rows} rows of {length} tokens: {seconds:.0f} s to plan on this CPU"
    return f"{_measure.header(title, '')}\n```\n{found}\n```"


if __name__ == "__main__":
    _measure.command(main)
