"""The cost of a window on many devices: reductions, bytes and time, for eight virtual ones, or on paper for more.

Run `python -m benchmarks.sharded` for the tables of eight virtual devices and how they grow from two, and `--paper` to
compile only, for 8, 64 and 256. Before a table prints anything, every contender's update is compared with that of the
whole batch.
"""

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

DEVICES = int(os.environ.get("OPTAX_ACCUM_BENCH_DEVICES", "8"))
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"

import jax  # noqa: E402  the number of devices is read when JAX is imported
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from tqdm import tqdm  # noqa: E402

import optax_accum  # noqa: E402
from benchmarks import _measure  # noqa: E402
from benchmarks._measure import Target, Tree, digits  # noqa: E402

NAIVE, MICROBATCH, MAXTEXT = "scan, by hand", "optax.microbatch", "scan, as in MaxText"
MULTI_STEPS = "optax.MultiSteps"
WITHIN, ACROSS, ZERO = "ours: within a call", "ours: across calls", "ours: across calls, ZeRO-1"
OURS = (WITHIN, ACROSS, ZERO)
ROWS, WIDTH, HIDDEN, LAYERS = 4, 128, 512, 4  # rows of a device in a micro-batch
SMALL = 1024  # bytes; what moves less is a loss, a weight, a flag
TOLERANCE = 1e-4
INNER = optax.adam(1e-3, eps=1e-3)

NOTES = """\
A window is k micro-batches of {rows} rows on each device and one update. Counted in the compiled program, trip counts
included, with collectives above {small} bytes: reductions are all-reduces and reduce-scatters, moves all others. Bytes
are those of one device, in copies of the parameters P. Held: collectives of any size in a micro-step that does not
close its window. A scan by hand whose k the devices divide reduces nothing, since it gathers the rows: every device
computes all micro-batches. Keras, PyTorch, accelerate and `optax.apply_every` have no form for a mesh of their own.
Times are those of the fastest round; the contenders take turns, their arguments donated; virtual devices share the
cores of the host, so only large ratios mean something."""


PAPER = """\
Compiled from shapes alone; nothing is allocated. A window is k micro-batches of 4 rows on each of d devices and one
update. What a device sends is that of a ring: 2 (d - 1) / d for each P that is all-reduced, (d - 1) / d for each that
is reduce-scattered or gathered."""


class Step(NamedTuple):
    """A jitted micro-step, or a whole window, and what it is called with."""

    jitted: Any
    start: tuple[Tree, Any]  # parameters, state
    calls: int  # in a window
    batch: Callable[[Tree, int], Tree]  # the micro-batch of each call


@dataclasses.dataclass(frozen=True)
class Row:
    """The numbers of one contender."""

    reductions: int
    reduced: float
    moves: int
    moved: float
    held: int
    seconds: float


class Case(NamedTuple):
    """One table."""

    devices: int
    k: int

    def __str__(self) -> str:
        return f"{self.devices} devices, k={self.k}"


@dataclasses.dataclass(frozen=True)
class Measured:
    """The numbers of one table; `rows` goes by contender."""

    case: Case
    rows: dict[str, Row]


def main() -> None:
    """Prints the tables, then each target with what was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.sharded", description=__doc__)
    parser.add_argument("--every", nargs="+", type=int, default=[1, 2, 8, 32], help="micro-batches of a window")
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4, 8], help="how many virtual ones")
    parser.add_argument("--seconds", type=float, default=4, help="for the timings of one table")
    parser.add_argument("--paper", action="store_true", help="compile only, for 8, 64 and 256 devices")
    parser.add_argument("--paper-rows", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=_measure.writable, help="write the tables here, too")
    options = parser.parse_args()
    if options.paper_rows:
        for row in _paper_rows():
            print("|".join(row))
        return
    if options.here:
        for k in options.every:
            print(json.dumps(dataclasses.asdict(_measured(k, options.seconds))), flush=True)
        return
    text = _paper() if options.paper else _tables(options)
    print(text)
    if options.output:
        _measure.write(options.output, text, None)


def _tables(options: argparse.Namespace) -> str:
    measured = [table for devices in tqdm(options.devices, desc="devices") for table in _elsewhere(devices, options)]
    most = [table for table in measured if table.case.devices == max(options.devices)]
    verdicts = _measure.targets_text([_measure.judged(target, measured) for target in _targets()])
    header = _measure.header("A window on many devices", NOTES.format(rows=ROWS, small=SMALL))
    return "\n".join([header, *map(_rendered, most), *_growth(measured), verdicts])


def _elsewhere(devices: int, options: argparse.Namespace) -> list[Measured]:
    """Measures in a process with so many devices."""
    asked = ["--here", "--seconds", str(options.seconds), "--every", *map(str, options.every)]
    out = _said(devices, asked).splitlines()
    tables = [json.loads(line) for line in out if line.startswith("{")]
    rows = [{name: Row(**row) for name, row in table["rows"].items()} for table in tables]
    return [Measured(Case(*table["case"]), of) for table, of in zip(tables, rows, strict=True)]


def _said(devices: int, asked: list[str]) -> str:
    environment = {**os.environ, "OPTAX_ACCUM_BENCH_DEVICES": str(devices), "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "benchmarks.sharded", *asked]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def _growth(measured: list[Measured]) -> Iterator[str]:
    """Yields the reductions and the times of each contender with more devices."""
    k = max(table.case.k for table in measured)
    grown = [table for table in measured if table.case.k == k]
    numbers = {
        "reduced / P": lambda table, row: f"{row.reduced:.2f}",
        "time / ours, within a call": lambda table, row: f"{row.seconds / table.rows[WITHIN].seconds:.2f}",
    }
    for what, number in numbers.items() if len(grown) > 1 else ():
        head = (what, *(f"{table.case.devices} devices" for table in grown))
        rows = [(name, *(number(table, table.rows[name]) for table in grown)) for name in grown[0].rows]
        yield f"### How it grows with devices, k={k}: {what}\n\n{_measure.markdown([head, *rows])}\n"


def _measured(k: int, seconds: float) -> Measured:
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        params = jax.device_put(_params(), NamedSharding(mesh, P()))
        batch = jax.device_put(_batch(k), NamedSharding(mesh, P("data")))
        steps = _steps(mesh, params, k)
        want = _whole(params, batch)
        for name, step in steps.items():
            difference = _measure.relative_difference(_window(step, batch)[0], want)
            if not difference <= TOLERANCE:
                raise SystemExit(f"k={k}: the update of {name} is not that of the whole batch: {difference:.1e}.")
        runners = {name: _runner(name, step, batch) for name, step in steps.items()}
        _measure.interleave(list(runners.values()), seconds, 1000)
        rows = {name: _counted(step, params, batch, runners[name].best) for name, step in steps.items()}
    return Measured(Case(DEVICES, k), rows)


def _steps(mesh: Any, params: Tree, k: int) -> dict[str, Step]:
    """Returns every contender; all cut the same batch, which is sharded over the devices."""
    replicated = NamedSharding(mesh, P())
    state = jax.device_put(INNER.init(params), replicated)

    def within(gradient: Callable[..., Tree]) -> Step:
        def step(params: Tree, state: Any, batch: Tree) -> tuple[Tree, Any]:
            updates, state = INNER.update(gradient(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        return Step(
            jax.jit(step, donate_argnums=(0, 1), out_shardings=replicated), (params, state), 1, lambda batch, _: batch
        )

    def across(to: Tree) -> Step:
        tx = optax_accum.accumulate_gradients(INNER, k, devices=optax_accum.Devices("data", to=to))
        where = optax_accum.sharding.state_sharding(tx, params)
        micro_step = optax_accum.value_and_apply_gradients(_loss, tx)
        step = jax.jit(lambda *args: micro_step(*args)[1:], donate_argnums=(0, 1), out_shardings=(replicated, where))
        return Step(step, (params, jax.jit(tx.init, out_shardings=where)(params)), k, _micro_batch)

    multi = optax.MultiSteps(INNER, k)

    def multi_step(params: Tree, state: Any, batch: Tree) -> tuple[Tree, Any]:
        updates, state = multi.update(jax.grad(_loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    mean = optax.microbatching.AccumulationType.MEAN
    rows = ROWS * mesh.size
    theirs = optax.microbatch(jax.grad(_loss), argnums=1, microbatch_size=rows, accumulator=mean)
    ours = optax_accum.value_and_grad(_loss, num_microbatches=k, devices="data")
    multi_state = jax.device_put(multi.init(params), replicated)
    return {
        NAIVE: within(functools.partial(_by_hand, k)),
        MICROBATCH: within(theirs),
        MAXTEXT: within(functools.partial(_as_in_maxtext, k)),
        MULTI_STEPS: Step(
            jax.jit(multi_step, donate_argnums=(0, 1), out_shardings=replicated), (params, multi_state), k, _micro_batch
        ),
        WITHIN: within(lambda params, batch: ours(params, batch)[1]),
        ACROSS: across(None),
        ZERO: across(optax_accum.sharding.shard_over(params, "data")),
    }


def _by_hand(k: int, params: Tree, batch: Tree) -> Tree:
    """The loop that users write: rows in order, so a micro-batch lies on some of the devices only."""
    split = jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)
    add = lambda total, micro: (jax.tree.map(jnp.add, total, jax.grad(_loss)(params, micro)), None)
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), split)
    return jax.tree.map(lambda leaf: leaf / k, total)


def _as_in_maxtext(k: int, params: Tree, batch: Tree) -> Tree:
    """A scan over micro-batches that are sharded again: adds gradients of sums, divides by the total weight."""

    def split(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x.reshape(k, -1, *x.shape[1:]), P(None, "data"))

    def summed(params: Tree, micro: Tree) -> tuple[jax.Array, jax.Array]:
        weight = jnp.float32(jax.tree.leaves(micro)[0].shape[0])
        return _loss(params, micro) * weight, weight

    def add(carry: Any, micro: Tree) -> tuple[Any, None]:
        grads, weight = jax.grad(summed, has_aux=True)(params, micro)
        return (jax.tree.map(jnp.add, carry[0], grads), carry[1] + weight), None

    start = jax.tree.map(jnp.zeros_like, params), jnp.float32(0)
    (total, weight), _ = jax.lax.scan(add, start, jax.tree.map(split, batch))
    return jax.tree.map(lambda leaf: leaf / weight, total)


def _window(step: Step, batch: Tree) -> tuple[Tree, Any]:
    carry = jax.tree.map(jnp.copy, step.start)
    for call in range(step.calls):
        carry = step.jitted(*carry, step.batch(batch, call))
    return carry


def _runner(name: str, step: Step, batch: Tree) -> _measure.Runner:
    micro_batches = [step.batch(batch, call) for call in range(step.calls)]

    def window(params: Tree, state: Any) -> tuple[Tree, Any]:
        carry = params, state
        for micro_batch in micro_batches:
            carry = step.jitted(*carry, micro_batch)
        return carry

    return _measure.Runner(name, window, jax.tree.map(jnp.copy, step.start))


def _micro_batch(batch: Tree, call: int) -> Tree:
    """Returns the rows of one call, equally many of each device."""

    def take(x: jax.Array) -> jax.Array:
        rows = np.asarray(x).reshape(DEVICES, -1, ROWS, *x.shape[1:])[:, call]
        return jax.device_put(rows.reshape(-1, *x.shape[1:]), x.sharding)

    return jax.tree.map(take, batch)


def _counted(step: Step, params: Tree, batch: Tree, seconds: float) -> Row:
    found = optax_accum.sharding.count_collectives(step.jitted.lower(*step.start, step.batch(batch, 0)).compile())
    return _row(found, step.calls, _copies(params), seconds)


def _row(found: optax_accum.sharding.Collectives, calls: int, copy: int, seconds: float = 0.0) -> Row:
    """Returns the numbers of a window: what stands outside branches runs at each call, the rest at the last."""
    reductions, always = ("all-reduce", "reduce-scatter"), ("outside", "loop")
    moves = ("all-gather", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")

    def window(kinds: tuple[str, ...]) -> tuple[int, float]:
        large = found.select(kinds, min_bytes=SMALL)
        each, once = large.select(place=always), large.select(place="branch")
        return calls * each.count + once.count, (calls * each.bytes + once.bytes) / copy

    return Row(*window(reductions), *window(moves), found.select(place=always).count if calls > 1 else 0, seconds)


def _copies(params: Tree) -> int:
    return sum(4 * leaf.size for leaf in jax.tree.leaves(params))


def _rendered(table: Measured) -> str:
    head = ("contender", "reductions", "reduced / P", "moves", "moved / P", "held", "ms / window")
    rows = [
        (
            name,
            str(r.reductions),
            f"{r.reduced:.2f}",
            str(r.moves),
            f"{r.moved:.2f}",
            str(r.held),
            digits(1e3 * r.seconds),
        )
        for name, r in table.rows.items()
    ]
    return f"### {table.case}\n\n{_measure.markdown([head, *rows])}\n"


def _targets() -> list[Target]:
    anyone = lambda case: True
    worst = lambda value: lambda table: float(max(value(table.rows[name]) for name in OURS))
    return [
        Target("copies of the gradient reduced in a window, ours", anyone, worst(lambda row: row.reduced), 1.0),
        Target("reductions in a window, within a call", anyone, lambda table: float(table.rows[WITHIN].reductions), 1),
        Target("reductions in a window, across calls", anyone, lambda table: float(table.rows[ACROSS].reductions), 1),
        Target("collectives in a held micro-step, ours", anyone, worst(lambda row: row.held), 0),
        Target("rows moved by the split, ours", anyone, lambda table: float(table.rows[WITHIN].moves), 0),
    ]


# On paper: nothing is allocated.


def _paper() -> str:
    rows = []
    for devices in tqdm((8, 64, 256), desc="devices"):
        out = _said(devices, ["--paper-rows"])
        rows += [line.split("|") for line in out.splitlines() if line.count("|") == 6]
    head = ("devices d", "k", "way", "reductions", "reduced / P", "gathered / P", "sent by a device / P")
    return f"{_measure.header('Scale, on paper', PAPER)}\n{_measure.markdown([head, *rows], left=(2,))}"


def _paper_rows() -> Iterator[tuple[str, ...]]:
    """Yields rows of programs that are compiled for abstract arrays on `DEVICES` devices."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    shape = lambda spec: lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    params = jax.tree.map(shape(P()), jax.eval_shape(_params))
    copy = _copies(params)
    with jax.set_mesh(mesh):
        for k in (1, 4, 16, 64):
            batch = jax.tree.map(shape(P("data")), jax.eval_shape(functools.partial(_batch, k)))
            ours = optax_accum.value_and_grad(_loss, num_microbatches=k, devices="data")
            to = optax_accum.sharding.shard_over(params, "data")
            gradients = {
                "one for each micro-batch": functools.partial(_as_in_maxtext, k),
                "ours: all-reduce": lambda params, batch, ours=ours: ours(params, batch)[1],
            }
            for way, gradient in gradients.items():
                found = optax_accum.sharding.count_collectives(jax.jit(gradient).lower(params, batch).compile())
                yield _paper_row(k, way, _row(found, 1, copy), passes=2)  # an all-reduce goes round the ring twice
            row = _row(_zero(params, to, batch, k, mesh), 1, copy)
            yield _paper_row(k, "ours: reduce-scatter, all-gather", row, passes=1)


def _paper_row(k: int, way: str, row: Row, passes: int) -> tuple[str, ...]:
    sent = (passes * row.reduced + (row.moved if passes == 1 else 0)) * (DEVICES - 1) / DEVICES
    numbers = (f"{number:.2f}" for number in (row.reduced, row.moved, sent))
    return str(DEVICES), str(k), way, str(row.reductions), *numbers


def _zero(params: Tree, to: Tree, batch: Tree, k: int, mesh: Any) -> optax_accum.sharding.Collectives:
    """Returns the collectives of a window whose update is sharded: the last micro-step, its k micro-batches within."""
    tx = optax_accum.accumulate_gradients(INNER, every=1, devices=optax_accum.Devices("data", to=to))
    where = optax_accum.sharding.state_sharding(tx, params)
    placed = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    state = jax.tree.map(placed, jax.eval_shape(tx.init, params), where)
    cut = optax_accum.value_and_grad(_loss, num_microbatches=k, devices=optax_accum.Devices("data", to="partial"))

    def window(params: Tree, state: Any, batch: Tree) -> tuple[Tree, Any]:
        return optax_accum.apply_gradients(tx, cut(params, batch)[1], state, params)

    jitted = jax.jit(window, out_shardings=(NamedSharding(mesh, P()), where))
    return optax_accum.sharding.count_collectives(jitted.lower(params, state, batch).compile())


# The model: residual layers in a scan, and a head.


def _params() -> Tree:
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, *shape: jax.random.normal(key, shape) / shape[-2] ** 0.5
    return {
        "up": draw(keys[0], LAYERS, WIDTH, HIDDEN),
        "down": draw(keys[1], LAYERS, HIDDEN, WIDTH),
        "bias": jnp.zeros((LAYERS, 1, HIDDEN)),
    }


def _batch(k: int) -> Tree:
    rows = ROWS * DEVICES * k
    keys = jax.random.split(jax.random.key(1))
    return {"x": jax.random.normal(keys[0], (rows, WIDTH)), "y": jax.random.normal(keys[1], (rows, WIDTH))}


def _loss(params: Tree, batch: Tree) -> jax.Array:
    layer = lambda h, weights: (h + jnp.tanh(h @ weights["up"] + weights["bias"]) @ weights["down"], None)
    h, _ = jax.lax.scan(layer, batch["x"], params)
    return jnp.mean((h - batch["y"]) ** 2)


@jax.jit
def _whole(params: Tree, batch: Tree) -> Tree:
    updates, _ = INNER.update(jax.grad(_loss)(params, batch), INNER.init(params), params)
    return optax.apply_updates(params, updates)


if __name__ == "__main__":
    _measure.command(main)
