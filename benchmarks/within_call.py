"""The cost of one update within a call: ours by `value_and_grad`, `optax.microbatch`, a hand-written scan.

Run `python -m benchmarks.within_call --quick`, or without `--quick` for all tables. Before a table prints a time, every
gradient is compared with that of the whole batch.
"""

import argparse
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import optax_accum
from benchmarks import _measure
from benchmarks._measure import Target, Tree, digits

WHOLE = "whole batch"
SCAN = "hand-written scan"
MICROBATCH = "optax.microbatch"
OURS = "ours"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
OPTIMIZERS = {"Adam": lambda: optax.adam(1e-3), "SGD": lambda: optax.sgd(1e-3, momentum=0.9)}
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # of the largest entry of a leaf
ROWS, LENGTH, WIDTH, LAYERS = 32, 16, 128, 8  # rows of a batch, tokens of a row

NOTES = """\
A step is the gradient of a batch of 32 rows in k micro-batches and one update, parameters and state donated. Times are
those of the fastest round; the contenders take turns. P is one float32 copy of the parameters; total memory is what the
compiler counts for temporaries, arguments and results, less what is aliased. The difference is between the gradients
and those of the whole batch, in units of the largest entry of a leaf."""


class Case(NamedTuple):
    """One table."""

    model: str
    dtype: str
    optimizer: str
    k: int

    def __str__(self) -> str:
        return f"{self.model}, {self.dtype}, {self.optimizer}, k={self.k}"


@dataclasses.dataclass(frozen=True)
class Measured:
    """The numbers of one table; each dict goes by contender."""

    case: Case
    rounds: int
    seconds: dict[str, float]  # per step
    compile_seconds: dict[str, float]
    temporary: dict[str, float]  # P
    total: dict[str, float]  # P
    difference: dict[str, float]


def main() -> None:
    options = _options()
    said = [_measure.header("One update within a call", NOTES)]
    tqdm.write(said[-1])
    tables = []
    for case in tqdm(list(_cases(options)), unit="table", leave=False, disable=None):
        tables.append(_measured(case, options.seconds))
        said.append(_rendered(tables[-1]))
        tqdm.write(said[-1])
    said.append(_contrastive())
    tqdm.write(said[-1])
    verdicts = [_measure.judged(target, tables) for target in _targets()]
    said.append(_measure.targets_text(verdicts))
    tqdm.write(said[-1])
    if options.output:
        _measure.write(options.output, "\n".join(said), {"machine": _measure.machine(), "targets": verdicts})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.within_call", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--every", nargs="+", type=int, default=[1, 2, 8, 32], help="micro-batches; divides 32")
    parser.add_argument("--seconds", type=float, default=4, help="for the timings of one table")
    parser.add_argument("--quick", action="store_true", help="one table")
    parser.add_argument("--output", type=_measure.writable, help="write the tables here, too: .json, or else Markdown")
    if parser.parse_args().quick:
        parser.set_defaults(models=["stacked"], dtypes=["float32"], optimizers=["Adam"], every=[8])
    options = parser.parse_args()
    if any(k < 1 or ROWS % k for k in options.every):
        parser.error(f"--every must divide {ROWS}: {options.every}.")
    return options


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    for model in options.models:
        for dtype in options.dtypes:
            for optimizer in options.optimizers:
                for k in options.every:
                    if optimizer == "Adam" or k == 8:  # momentum-SGD is reported at one k
                        yield Case(model, dtype, optimizer, k)


def _measured(case: Case, seconds: float) -> Measured:
    loss, params, batch = MODELS[case.model](DTYPES[case.dtype])
    gradients = _gradients(loss, case.k)
    expected = jax.jit(gradients[WHOLE])(params, batch)
    difference = {name: _compared(case, name, jax.jit(g)(params, batch), expected) for name, g in gradients.items()}
    tx, runners, compile_seconds = OPTIMIZERS[case.optimizer](), {}, {}
    for name, gradient in gradients.items():
        start = time.perf_counter()
        runners[name] = _measure.compile_donated(name, _step(gradient, tx), (params, tx.init(params)), (batch,))
        compile_seconds[name] = time.perf_counter() - start
    copies = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    memory = {name: runner.compiled.memory_analysis() for name, runner in runners.items()}
    return Measured(
        case=case,
        rounds=_measure.interleave(list(runners.values()), seconds, 1000),
        seconds={name: runner.best for name, runner in runners.items()},
        compile_seconds=compile_seconds,
        temporary={name: m.temp_size_in_bytes / copies for name, m in memory.items()},
        total={name: _total(m) / copies for name, m in memory.items()},
        difference=difference,
    )


def _total(memory: Any) -> int:
    arguments, results = memory.argument_size_in_bytes, memory.output_size_in_bytes
    return memory.temp_size_in_bytes + arguments + results - memory.alias_size_in_bytes


def _compared(case: Case, name: str, got: Tree, expected: Tree) -> float:
    difference = _measure.relative_difference(*(optax.tree.cast(tree, jnp.float32) for tree in (got, expected)))
    if not difference <= TOLERANCE[case.dtype]:
        raise SystemExit(f"{case}: the gradient of {name} is not that of the whole batch: difference={difference:.1e}.")
    return difference


def _step(gradient: Callable[..., Tree], tx: optax.GradientTransformation) -> Callable[..., tuple[Tree, Any]]:
    def step(params: Tree, state: Any, batch: Tree) -> tuple[Tree, Any]:
        updates, state = tx.update(gradient(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    return step


def _gradients(loss: Callable[..., Any], k: int) -> dict[str, Callable[..., Tree]]:
    return {
        WHOLE: jax.grad(loss),
        SCAN: functools.partial(_hand_written, loss, k),
        MICROBATCH: functools.partial(_optax_microbatch, loss, k),
        OURS: lambda params, batch: optax_accum.value_and_grad(loss, num_microbatches=k)(params, batch)[1],
    }


def _hand_written(loss: Callable[..., Any], k: int, params: Tree, batch: Tree) -> Tree:
    """The loop that users write, here with float32 sums."""

    def body(carry: tuple[Tree, jax.Array], micro_batch: Tree) -> tuple[tuple[Tree, jax.Array], None]:
        value, grads = jax.value_and_grad(loss)(params, micro_batch)
        return (
            jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), carry[0], grads),
            carry[1] + value,
        ), None

    start = optax.tree.zeros_like(params, dtype=jnp.float32), jnp.zeros([])
    micro_batches = jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)
    (grads, _), _ = jax.lax.scan(body, start, micro_batches)
    return jax.tree.map(lambda total, param: (total / k).astype(param.dtype), grads, params)


def _optax_microbatch(loss: Callable[..., Any], k: int, params: Tree, batch: Tree) -> Tree:
    mean = optax.microbatching.AccumulationType.MEAN
    f = optax.microbatch(jax.value_and_grad(loss), argnums=1, microbatch_size=ROWS // k, accumulator=mean)
    return f(params, batch)[1]


def _rendered(table: Measured) -> str:
    head = ("contender", "ms / step", "compile s", "temporary / P", "total / P", "difference")
    rows = [
        (
            name,
            digits(1e3 * table.seconds[name]),
            f"{table.compile_seconds[name]:.2f}",
            f"{table.temporary[name]:.2f}",
            f"{table.total[name]:.2f}",
            f"{table.difference[name]:.0e}",
        )
        for name in table.seconds
    ]
    return f"### {table.case}\n\n{_measure.markdown([head, *rows])}\n\nRounds: {table.rounds}.\n"


def _targets() -> list[Target]:
    gain = lambda other: lambda table: table.seconds[OURS] / table.seconds[other]
    memory = lambda table: table.total[OURS] / table.total[MICROBATCH]
    compiling = lambda table: table.compile_seconds[OURS] / table.compile_seconds[SCAN]
    stacked = lambda case: (case.model, case.dtype, case.optimizer, case.k) == ("stacked", "float32", "Adam", 8)
    cut = lambda case: case.k > 1 and case.dtype == "float32"
    return [
        Target("time, ours / hand-written scan", stacked, gain(SCAN), 1.03),
        Target("time, ours / hand-written scan, all of float32", cut, gain(SCAN), 1.03),
        Target("time, ours / optax.microbatch", stacked, gain(MICROBATCH), 1.0),
        Target("time, ours / optax.microbatch, all of float32", cut, gain(MICROBATCH), 1.0),
        Target("total memory, ours / optax.microbatch", stacked, memory, 0.85),
        Target("compile time, ours / hand-written scan", stacked, compiling, 1.1),
    ]


# Models: a loss, parameters and a batch.


def _attention(h: jax.Array, layer: Tree) -> jax.Array:
    """One layer of a decoder: causal attention of one head, then a wide product; h [b, LENGTH, WIDTH]."""
    norm = lambda h: h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-3)
    q, k, v = jnp.split(norm(h) @ layer["qkv"], 3, axis=-1)
    scores = jnp.where(np.tri(LENGTH, dtype=bool), q @ k.mT / WIDTH**0.5, -1e9)
    h = h + jax.nn.softmax(scores) @ v
    return h + jax.nn.gelu(norm(h) @ layer["up"]) @ layer["down"]


def _layers(random: np.random.Generator, dtype: Any) -> Tree:
    normal = lambda *shape: jnp.asarray(random.normal(size=shape) / shape[-2] ** 0.5, dtype)
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return {name: normal(LAYERS, *shape) for name, shape in shapes.items()}


def _transformer(stacked: bool, dtype: Any) -> tuple[Callable[..., Any], Tree, Tree]:
    random = np.random.default_rng(0)
    layers = _layers(random, dtype)
    params = {"layers": layers if stacked else [jax.tree.map(lambda x, i=i: x[i], layers) for i in range(LAYERS)]}
    batch = jnp.asarray(random.normal(size=(ROWS, LENGTH, WIDTH)), dtype)
    layer = jax.checkpoint(_attention)

    def loss(params: Tree, h: jax.Array) -> jax.Array:
        start = h
        if stacked:
            h, _ = jax.lax.scan(lambda h, weights: (layer(h, weights), None), h, params["layers"])
        else:
            for weights in params["layers"]:
                h = layer(h, weights)
        return jnp.mean((h[:, :-1] - start[:, 1:]).astype(jnp.float32) ** 2)

    return loss, params, batch


def _cnn(dtype: Any) -> tuple[Callable[..., Any], Tree, Tree]:
    random = np.random.default_rng(0)
    widths = (3, 32, 64, 64)
    kernel = lambda i, o: jnp.asarray(random.normal(size=(3, 3, i, o)) / (9 * i) ** 0.5, dtype)
    params = [kernel(i, o) for i, o in itertools.pairwise(widths)]
    batch = jnp.asarray(random.normal(size=(ROWS, 16, 16, 3)), dtype)

    def loss(params: Tree, h: jax.Array) -> jax.Array:
        for kernel in params:
            h = jnp.tanh(
                jax.lax.conv_general_dilated(h, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
        return jnp.mean(h.mean((1, 2)).astype(jnp.float32) ** 2)

    return loss, params, batch


MODELS = {
    "stacked": functools.partial(_transformer, True),
    "unrolled": functools.partial(_transformer, False),
    "CNN": _cnn,
}


def _contrastive(rows: int = 1024, chunk: int = 64) -> str:
    """InfoNCE over all rows: the whole forward pass against `microbatched`."""
    random = np.random.default_rng(0)
    params = {"layers": _layers(random, jnp.float32), "t": jnp.float32(1)}
    x = jnp.asarray(random.normal(size=(rows, LENGTH, WIDTH)), jnp.float32)
    y = x + jnp.asarray(random.normal(size=x.shape), jnp.float32) / 2

    def encode(params: Tree, h: jax.Array) -> jax.Array:
        for i in range(2):
            h = _attention(h, jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]))
        z = h.mean(1)
        return z / jnp.linalg.norm(z, axis=-1, keepdims=True)

    def loss(encode: Callable[..., Any], params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = jnp.exp(params["t"]) * encode(params, x) @ encode(params, y).T
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)))

    small = optax_accum.microbatched(encode, microbatch_size=chunk)
    whole, cut = (jax.jit(jax.grad(functools.partial(loss, f))).lower(params, x, y).compile() for f in (encode, small))
    error = _measure.relative_difference(cut(params, x, y), whole(params, x, y))
    megabytes = [c.memory_analysis().temp_size_in_bytes / 1e6 for c in (whole, cut)]
    met = "met" if megabytes[1] <= megabytes[0] / 5 and error <= 1e-6 else "MISSED"
    return (
        f"### Contrastive, {rows} rows in chunks of {chunk}\n\nTemporary memory {megabytes[0]:.0f} MB whole, "
        f"{megabytes[1]:.0f} MB cut: 1/{megabytes[0] / megabytes[1]:.1f} (target 1/5). "
        f"Gradient error {error:.1e} (target 1e-6): {met}.\n"
    )


if __name__ == "__main__":
    _measure.command(main)
