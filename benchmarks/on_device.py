"""Whether this accelerator agrees with its compiler's figures: the time of a copy, the memory that is held.

Run `python -m benchmarks.on_device` where there is a GPU or a TPU; `--small` tries the program on anything. Each way
runs in a fresh process, whose memory is its own. Before a time is printed, parameters and moments are compared.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import optax_accum
from benchmarks import _decoder, _measure
from benchmarks._measure import Tree
from benchmarks._one_device import alone
from optax_accum.accelerators import count_traffic

EVERY, WARM_UP, WINDOWS, TOLERANCE = 8, 2, 10, 1e-3
NOTES = """\
AdamW, windows of 8. The first, whose micro-batches differ, is compared; the first two are dropped. Held and emitting
are the means of a micro-step's time, a window is their sum; / copy is the time of the bytes that the compiler counts,
at the speed of `x + 1`, so that 1.0 is the most that the memory gives. Foretold is what the compiler says that a
program holds at its peak, measured is the device's own largest number of bytes in use. Within a call there is one
update and nothing is held."""


class Way(NamedTuple):
    """`programs[i](*carry, *constants) -> carry`: a window calls `held` micro-steps of the first, then the last."""

    programs: list[Any]
    carry: tuple[Any, ...]
    constants: tuple[Any, ...]
    held: int = EVERY - 1

    @property
    def foretold(self) -> int:
        """The bytes that the larger program holds at its peak."""
        stats = [program.memory_analysis() for program in self.programs]
        held = lambda of: of.argument_size_in_bytes + of.output_size_in_bytes - of.alias_size_in_bytes
        return max(held(of) + of.temp_size_in_bytes for of in stats)


def main() -> None:
    """Prints the tables."""
    parser = _measure.parser(__doc__)
    parser.add_argument("--small", action="store_true", help="small arrays, on any machine: it says nothing of times")
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measured(options.way, options.small)))
        return
    # A TPU is one process's: this one asks for it when the others have ended.
    found = {name: _in_a_process(name, options.small) for name in tqdm(WAYS, leave=False, disable=None)}
    check_reversed_scan()
    print(_measure.header("On this accelerator", NOTES))
    copy, wrong = seconds_of_a_byte(options.small), list[str]()
    for group in dict.fromkeys(name.split(":")[0] for name in WAYS):
        ways = {name: facts for name, facts in found.items() if name.startswith(group)}
        wrong += others(ways)
        print(table(group, {name: facts for name, facts in ways.items() if name not in wrong}, copy), flush=True)
    if wrong:
        raise SystemExit(f"These make another update than the first of their table: {', '.join(wrong)}.")


def check_reversed_scan() -> None:
    """Raises where the gradient of what a scan reads, added in place, comes out in the wrong order (jax#32411)."""
    times = jnp.arange(5.0)
    loss = lambda x, _: jax.lax.scan(lambda total, pair: (total + pair[0] * pair[1], None), 0.0, (x, times))[0]
    step = optax_accum.value_and_grad(loss, num_microbatches=2, batch_argnums=1)
    got = jax.jit(step)(jnp.ones(5), jnp.zeros((2, 1)))[1]
    np.testing.assert_allclose(got, times, err_msg="A scan's gradient is in the wrong order.")


def measured(name: str, small: bool) -> dict[str, Any]:
    """Returns the numbers of a way, and those by which its update is compared."""
    if jax.devices()[0].platform == "cpu" and not small:
        raise SystemExit("There is no accelerator here: JAX finds a CPU. --small tries the program on it.")
    way = WAYS[name](small)
    carry, constants, held, emitting = way.carry, way.constants, list[float](), list[float]()
    for number in range(way.held + 1):
        carry = way.programs[-1 if number == way.held else 0](*carry, *_varied(constants, number))
    compared = carry[0], optax.tree_utils.tree_get(carry[1], "mu")  # the first moment is a tenth of the mean gradient
    norms = [float(jnp.linalg.norm(leaf)) for leaf in jax.tree.leaves(compared)]
    for window in range(1, WARM_UP + (1 if small else WINDOWS)):
        start = time.perf_counter()
        for _ in range(way.held):
            carry = way.programs[0](*carry, *constants)
        jax.block_until_ready(carry)
        middle = time.perf_counter()
        carry = jax.block_until_ready(way.programs[-1](*carry, *constants))
        if window >= WARM_UP:
            held.append((middle - start) / max(way.held, 1))
            emitting.append(time.perf_counter() - middle)
    stats = jax.devices()[0].memory_stats() or {}
    first, last = (count_traffic(program) for program in (way.programs[0], way.programs[-1]))
    return {
        "held": float(np.mean(held)),
        "emitting": float(np.mean(emitting)),
        "calls": way.held,
        "bytes": way.held * first.least + last.most,
        "foretold": way.foretold,
        "measured": stats.get("peak_bytes_in_use"),
        "norms": norms,
    }


def _varied(batch: Tree, number: int) -> Tree:
    """Returns a micro-batch of its own for each number: gradients of other sizes, other tokens."""
    other = lambda leaf: leaf * (1 + number) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf + number
    return jax.tree.map(other, batch)


def others(found: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the ways that make another update than the first."""
    first = next(iter(found.values()))["norms"]
    return [name for name, facts in found.items() if not np.allclose(facts["norms"], first, rtol=TOLERANCE)]


def table(group: str, found: dict[str, dict[str, Any]], copy: float) -> str:
    """Returns the table of ways that make the same update."""
    rows = []
    for name, facts in found.items():
        window = facts["calls"] * facts["held"] + facts["emitting"]
        milliseconds = [1e3 * facts["held"] if facts["calls"] else 0.0, 1e3 * facts["emitting"], 1e3 * window]
        peak, foretold = facts["measured"], facts["foretold"]
        rows.append(
            (
                name.split(": ")[1],
                *map(_measure.digits, milliseconds),
                f"{window / facts['bytes'] / copy:.2f}",
                f"{foretold / 1e6:.0f} MB",
                f"{peak / 1e6:.0f} MB" if peak else "n/a",
                f"{foretold / peak - 1:+.1%}" if peak else "n/a",
            )
        )
    head = (group, "held, ms", "emitting, ms", "window, ms", "/ copy", "foretold", "measured", "error")
    return _measure.markdown([head, *rows]) + "\n"


def _in_a_process(name: str, small: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.on_device", "--way", name, *["--small"] * small]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)  # it has said why
    return json.loads(done.stdout.splitlines()[-1])


def seconds_of_a_byte(small: bool) -> float:
    """Returns the seconds that `x + 1` takes for each byte that it reads or writes."""
    x = jnp.ones((64 if small else 1 << 14, 1 << 14))
    copy, times = jax.jit(lambda x: x + 1, donate_argnums=0), list[float]()
    for _ in range(WARM_UP + 3):
        start = time.perf_counter()
        for _ in range(20):
            x = copy(x)
        jax.block_until_ready(x)
        times.append((time.perf_counter() - start) / 20)
    return min(times[WARM_UP:]) / (2 * x.nbytes)


# Across calls: square matrices and their gradient.


def _matrices(small: bool) -> Tree:
    side = 64 if small else 8192
    return {f"layer {i}": jax.ShapeDtypeStruct((side, side), jnp.float32) for i in range(4)}


def _way(
    steps: list[Callable[..., Any]], tx: Any, params: Tree, batch: Callable[[Tree], Any], held: int = EVERY - 1
) -> Way:
    """Compiles steps `(params, state, batch) -> (params, state)`; all arrays are made by one program, in place."""
    fill = lambda shapes: jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1 / 64, leaf.dtype), shapes)
    params, state, rows = jax.jit(lambda: (fill(params), tx.init(fill(params)), batch(fill(params))))()
    donated = [jax.jit(step, donate_argnums=(0, 1)).lower(params, state, rows).compile() for step in steps]
    return Way(donated, (params, state), (rows,), held)


def _across(tx: Any, *steps: Callable[..., Any]) -> Callable[[bool], Way]:
    return lambda small: _way(list(steps), tx, _matrices(small), lambda p: p)


def _apply(tx: Any, **options: Any) -> Callable[..., Any]:
    return lambda p, s, g: optax_accum.apply_gradients(tx, g, s, p, **options)


# Within a call, and a micro-batch in each: a decoder.


def _decoded(small: bool) -> tuple[Callable[..., Any], Tree, Callable[[int], Callable[[Tree], jax.Array]]]:
    sizes, length = (_decoder.Sizes(64, 2, 2, 128), 16) if small else (_decoder.FULL, _decoder.LENGTH)
    loss, params = _decoder.decoder(sizes=sizes)
    tokens = lambda rows: lambda _: jnp.arange(rows * (length + 1)).reshape(rows, -1) % length % sizes.vocabulary
    return loss, params, tokens


def _within(small: bool, how: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Way:
    loss, params, tokens = _decoded(small)
    gradient, inner = how(loss), optax.adamw(1e-3)
    step = lambda params, state, batch: alone(inner)(params, state, gradient(params, batch)[1])
    return _way([step], inner, params, tokens(EVERY), held=0)


def _microbatch(loss: Callable[..., Any]) -> Callable[..., Any]:
    mean = optax.microbatching.AccumulationType.MEAN
    return optax.microbatching.microbatch(jax.value_and_grad(loss), argnums=1, microbatch_size=1, accumulator=mean)


def _fused(small: bool) -> Way:
    loss, params, tokens = _decoded(small)
    step = optax_accum.value_and_apply_gradients(loss, COUNTED)
    return _way([lambda *args: step(*args)[1:]], COUNTED, params, lambda p: tokens(EVERY)(p)[:1])


COUNTED, TOLD = (optax_accum.accumulate_gradients(optax.adamw(1e-3), every) for every in (EVERY, None))
MULTI_STEPS: Any = optax.MultiSteps(optax.adamw(1e-3), EVERY)
WAYS: dict[str, Callable[[bool], Way]] = {
    "across calls: apply_gradients": _across(COUNTED, _apply(COUNTED)),
    "across calls: apply_gradients, static flush": _across(TOLD, _apply(TOLD, flush=False), _apply(TOLD, flush=True)),
    "across calls: update": _across(COUNTED, alone(COUNTED)),
    "across calls: optax.MultiSteps": _across(MULTI_STEPS, alone(MULTI_STEPS)),
    "within a call: the whole batch": lambda small: _within(small, jax.value_and_grad),
    "within a call: value_and_grad": lambda small: _within(small, lambda loss: optax_accum.value_and_grad(loss, EVERY)),
    "within a call: optax.microbatch": lambda small: _within(small, _microbatch),
    "a decoder's micro-step: value_and_apply_gradients": _fused,
}


if __name__ == "__main__":
    _measure.command(main)
