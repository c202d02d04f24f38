"""The table of support: what holds on a version of JAX, and what its compilers make of it.

Run `python -m benchmarks.support` with each JAX: it adds what it finds to benchmarks/support.json. An environment that
has NVIDIA's compiler adds what that says. `--page docs/support.md`, or `benchmarks/QUIRKS.md`, writes the table of that
page and runs nothing.
"""

import functools
import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Callable
from typing import Any

from tests import paths, programs  # first: they ask for eight devices

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import optax_accum
from benchmarks import _decoder, _measure, _one_device
from optax_accum import accelerators
from tests.quirks import QUIRKS

FACTS = pathlib.Path(__file__).with_suffix(".json")
RIGHT = 2e-6  # of the largest parameter: rounding
DECODER = _decoder.Sizes(model=256, heads=4, depth=8, vocabulary=1024)
USED = ("gathers", "slices", "ties", "recomputes")


def main() -> None:
    """Adds a version to the table, or writes the page."""
    parser = _measure.parser(__doc__)
    parser.add_argument("--page", type=_measure.writable, help="a Markdown file whose table is to be that of the JSON")
    options = parser.parse_args()
    record = json.loads(FACTS.read_text()) if FACTS.exists() else {}
    if options.page:
        options.page.write_text(page(options.page.read_text(), record))
        return
    found = record.setdefault(jax.__version__, {})
    found |= {key: ask() for key, ask in tqdm(QUESTIONS.items(), leave=False) if ask is not None}
    ordered = sorted(record.items(), key=lambda item: list(map(int, item[0].split("."))))
    FACTS.write_text(json.dumps(dict(ordered), indent=1) + "\n")
    print(table({jax.__version__: found}))


def page(text: str, record: dict[str, Any]) -> str:
    """Returns a page with its tables after their marks."""
    tables = {"support": table(record), "quirks": of_quirks()}
    return _measure.filled(text, f"({'|'.join(tables)})", lambda mark: tables[mark[2]])


def of_quirks() -> str:
    """Returns the table of `tests.quirks`."""
    number = lambda version: ".".join(map(str, version)).removesuffix(".0")
    until = lambda quirk: f"before {number(quirk.until)}" if quirk.until else "all"
    rows = [[until(quirk), quirk.happens, quirk.instead, quirk.evidence] for quirk in QUIRKS]
    return _measure.markdown([["JAX", "what happens", "what is done instead", "seen"], *rows], left=range(4))


def table(record: dict[str, Any]) -> str:
    """Returns a row for each version of JAX."""
    head = ["JAX", "Python, Flax", "one device", "several devices", "Flax", "decoder", "H100"]
    return _measure.markdown([head, *(_row(*item) for item in reversed(record.items()))], left=range(len(head)))


def _row(version: str, facts: dict[str, Any]) -> list[str]:
    of = lambda errors: f"{sum(error < RIGHT for error in errors.values())}/{len(errors)}"
    held = facts.get("h100")
    return [
        version,
        f"{facts['python']}, {facts['flax']}",
        of(facts["one device"]),
        of(facts["several devices"]),
        of(facts["of flax"]),
        f"{facts['decoder']:.2f}",
        f"{held['held, P']:g} + {held['emitting adds, P']:g}; {held['temporary, P']:g}" if held else "refused",
    ]


def errors(runs: dict[str, Callable[[], Any]], want: Any) -> dict[str, float]:
    """Returns by how much parameters after an update differ, relative to the largest."""
    found = {}
    for name, run in tqdm(runs.items(), leave=False):
        got = run()
        found[name] = _largest(jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), got, want)) / _largest(want)
    return found


def _largest(tree: Any) -> float:
    """Returns the largest magnitude: a NaN, if there is one."""
    return float(np.max([np.max(np.abs(leaf)) for leaf in jax.tree.leaves(tree)]))


def one_device() -> dict[str, float]:
    """Returns the error of each path on one device, of a loss over masked rows."""
    loss, start, batch = paths.loss_of(USED, paths.mean_over_mask), paths.params(), paths.rows()
    runs = {name: functools.partial(path, loss, paths.count, start, batch) for name, path in paths.PATHS.items()}
    del runs["value_and_apply_gradients of a sum"]  # for losses that are sums
    return errors(runs, paths.oracle(loss, start, batch))


def several_devices() -> dict[str, float]:
    """Returns the same over a mesh of two axes, of either kind, and inside a `jax.shard_map`."""
    loss, start, batch = paths.loss_of(USED, paths.mean_over_mask), paths.params(), paths.rows()

    def on_mesh(path: Callable[..., Any], kind: str, **options: Any) -> Any:
        mesh = paths.mesh_of(kind)
        with jax.set_mesh(mesh):
            return path(mesh, loss, paths.count, start, batch, **options)

    runs: dict[str, Callable[[], Any]] = {}
    for name, path in paths.SHARDED.items():
        runs |= {f"{name}, {kind}": functools.partial(on_mesh, path, kind) for kind in ("Auto", "Explicit")}
    for name, path in paths.MANUAL.items():
        runs |= {f"{name}, shard_map": functools.partial(on_mesh, path, "Auto", check_vma=True)}
    return errors(runs, paths.oracle(loss, start, batch))


def of_flax() -> dict[str, float]:
    """Returns the same of a window of the train state of Linen and of the optimizer of NNX."""
    from flax import nnx

    from optax_accum import flax as accum

    x, y = np.random.default_rng(0).normal(size=(2, 12, 4)).astype("f")
    parts = [slice(0, 2), slice(2, 10), slice(10, 12)]
    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 3)
    loss = lambda params, rows: jnp.mean((x[rows] @ params["kernel"] + params["bias"][None] - y[rows]) ** 2)
    start = {"kernel": jnp.ones((4, 4)), "bias": jnp.zeros(4)}

    def linen() -> Any:
        state = accum.linen.TrainState.create(apply_fn=None, params=start, tx=tx)
        for rows in parts:
            size = rows.stop - rows.start
            state = state.apply_gradients(grads=jax.grad(loss)(state.params, rows), weight=size)
        return state.params

    def of_nnx() -> Any:
        model = nnx.Linear(4, 4, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
        optimizer = accum.nnx.Optimizer(model, tx, wrt=nnx.Param)
        for rows in parts:
            grads = nnx.grad(lambda model, rows=rows: jnp.mean((model(x[rows]) - y[rows]) ** 2))(model)
            optimizer.update(model, grads, weight=rows.stop - rows.start)
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    with jax.default_matmul_precision("float32"):
        want = jax.tree.map(lambda p, g: p - 0.1 * g, start, jax.grad(loss)(start, slice(0, 12)))
        return errors({"Linen": linen, "NNX": of_nnx}, want)


def decoder() -> float:
    """Returns the temporary memory of a small decoder's gradient in 8 micro-batches, on the CPU, in P."""
    loss, params = _decoder.decoder(sizes=DECODER)
    step = jax.jit(optax_accum.value_and_grad(loss, num_microbatches=8))
    compiled = programs.compiled(step.lower(params, jax.ShapeDtypeStruct((8, 65), jnp.int32)))
    return round(compiled.memory_analysis().temp_size_in_bytes / _one_device.size(params), 2)


def h100() -> dict[str, float]:
    """Returns what a micro-step of AdamW moves, by the H100's compiler."""
    tx = optax_accum.accumulate_gradients(optax.adamw(1e-3), 8)
    found = _one_device.micro_step(accelerators.target("h100"), tx, _one_device.layers())
    return {name: round(value, 2) for name, value in found.items()}


_GPU = any(name.startswith("jax_cuda") for name in importlib.metadata.packages_distributions())
_HERE: dict[str, Callable[[], Any]] = {
    "python": lambda: ".".join(platform.python_version_tuple()[:2]),
    "flax": lambda: importlib.metadata.version("flax"),
    "one device": one_device,
    "several devices": several_devices,
    "of flax": of_flax,
    "decoder": decoder,
}
QUESTIONS: dict[str, Callable[[], Any]] = {"h100": h100} if _GPU else _HERE

if __name__ == "__main__":
    _measure.command(main)
