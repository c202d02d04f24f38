"""What is paid once for each call outside `jit`, and once for each compilation: Python time, memory, compile time.

Run `python -m benchmarks.calls`. Before a time is printed, results are compared.
"""

import argparse
import functools
import gc
import itertools
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_accum
from benchmarks import _measure

Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=500, help="calls over which memory is watched")
    parser.add_argument("--leaves", type=int, default=600, help="leaves of the parameters of what is compiled")
    parser.add_argument("--turns", type=int, default=7, help="how often each is compiled")
    options = parser.parse_args()
    print(_measure.header("Calls outside jit, and compilations", "Times of one run on this machine."))
    print(_eager(options.calls))
    print(_policies(options.leaves, options.turns))
    for dtype, statistics in itertools.product((jnp.bfloat16, jnp.float32), (False, True)):
        print(_in_place(dtype, statistics, options.leaves, options.turns))


def _eager(calls: int) -> str:
    """Returns the time of calls outside `jit` as a multiple of plain JAX on micro-batches, and what many calls keep."""
    random = np.random.default_rng(0)
    params = {"layers": [jnp.asarray(random.normal(size=(32, 32)) / 6, jnp.float32) for _ in range(6)]}
    batch = {"x": jnp.asarray(random.normal(size=(24, 32)), jnp.float32), "y": jnp.ones((24, 32))}

    def encode(params: Any, x: jax.Array) -> jax.Array:
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer)
        return x

    def loss(params: Any, batch: Any, encode: Callable[..., jax.Array] = encode) -> jax.Array:
        return jnp.mean((encode(params, batch["x"]) - batch["y"]) ** 2)

    tx = optax_accum.accumulate_gradients(optax.sgd(0.1), 4)
    state, whole = tx.init(params), jax.value_and_grad(loss)
    cut = optax_accum.value_and_grad(loss, num_microbatches=4)
    step = optax_accum.value_and_apply_gradients(loss, tx)
    small = optax_accum.microbatched(encode, 4)
    k = 4
    parts = [jax.tree.map(lambda rows, i=i: rows[i::k], batch) for i in range(k)]
    plain = f"{k} x jax.value_and_grad, of a micro-batch"
    coupled = f"{k} x jax.value_and_grad, of a checkpointed encoder"
    again = jax.value_and_grad(functools.partial(loss, encode=jax.checkpoint(encode)))
    measured: dict[str, tuple[Call, str]] = {  # and what each is compared with
        plain: (lambda: [whole(params, part) for part in parts], plain),
        "value_and_grad": (lambda: cut(params, batch), plain),
        f"{k} x value_and_apply_gradients": (lambda: _window(step, params, state, parts), plain),
        coupled: (lambda: [again(params, part) for part in parts], coupled),
        "microbatched, differentiated": (lambda: whole(params, batch, small), coupled),
    }
    for name in ("value_and_grad", "microbatched, differentiated"):
        error = _measure.relative_difference(measured[name][0](), whole(params, batch))
        assert error < 1e-5, (name, error)
    first = {name: _seconds(call, 1) for name, (call, _) in measured.items()}
    later = {name: min(_seconds(call, 5) for _ in range(5)) for name, (call, _) in measured.items()}
    rows = [("call", "first, ms", "later, ms", "/ plain JAX", f"kept by {calls} calls, kB")]
    for name, (call, beside) in measured.items():
        times = f"{1e3 * first[name]:.0f}", f"{1e3 * later[name]:.1f}", f"{later[name] / later[beside]:.2f}"
        rows.append((name, *times, f"{_kept(call, calls):.0f}"))
    ratio = later["value_and_grad"] / later[plain]
    reached = _measure.verdict(f"later calls of value_and_grad / {plain}", ratio, 1.5, "outside jit")
    return f"### Outside jit\n\n{_measure.markdown(rows)}\n\n{_measure.targets_text([reached])}\n"


def _window(step: Callable[..., Any], params: Any, state: Any, parts: list[Any]) -> tuple[Any, Any]:
    for part in parts:
        _, params, state = step(params, state, part)
    return params, state


def _policies(leaves: int, turns: int) -> str:
    """Returns the time that each policy takes to compile over many small leaves, as a multiple of "propagate"."""
    params = {str(i): jnp.ones((8, 8)) for i in range(leaves)}

    def compiled(nonfinite: str) -> tuple[float, Any]:
        tx = optax_accum.accumulate_gradients(optax.adam(1e-3), 4, nonfinite=nonfinite)
        state = tx.init(params)
        step = jax.jit(lambda p, s, g: optax_accum.apply_gradients(tx, g, s, p), donate_argnums=(0, 1))
        seconds, program = _compiled(step, params, state, params)
        return seconds, program(*jax.tree.map(jnp.copy, (params, state)), params)[1].acc_grads

    return _compilations(f"{leaves} leaves, adam", compiled, ("propagate", "skip", "omit", "discard"), 1.3, turns)


def _in_place(dtype: Any, statistics: bool, leaves: int, turns: int) -> str:
    """Returns the time that a gradient takes to compile, as a multiple of one that is added by hand."""
    random = np.random.default_rng(0)
    params = [jnp.asarray(random.normal(size=(8, 8)) / 3, dtype) for _ in range(leaves)]
    batch = jnp.asarray(random.normal(size=(8, 8)), dtype)
    loss = lambda params, x: jnp.mean(functools.reduce(lambda x, w: x + jnp.tanh(x @ w), params, x).astype("f") ** 2)

    def compiled(way: str) -> tuple[float, Any]:
        def by_hand(params: Any, batch: Any) -> tuple[Any, Any]:
            def add(sums: Any, x: Any) -> tuple[Any, None]:
                return jax.tree.map(
                    lambda total, part: total + part / 4, sums, jax.value_and_grad(loss)(params, x)
                ), None

            zeros = jnp.float32(0), [jnp.zeros(leaf.shape) for leaf in params]
            return jax.lax.scan(add, zeros, batch.reshape(4, 2, 8))[0]

        options = {"num_microbatches": 4, "accumulator_dtype": jnp.float32, "statistics": statistics}
        call = by_hand if way == "by hand" else optax_accum.value_and_grad(loss, **options)
        seconds, program = _compiled(jax.jit(call), params, batch)
        return seconds, program(params, batch)[1]  # the norms are added up in another order

    of = f"{leaves} {jnp.dtype(dtype)} leaves, float32 sums" + (", statistics" if statistics else "")
    return _compilations(of, compiled, ("by hand", "in place"), 1.2, turns, 2**-6)


def _compilations(
    of: str,
    compiled: Callable[[str], tuple[float, Any]],
    ways: tuple[str, ...],
    most: float,
    turns: int,
    tolerance: float = 0.0,
) -> str:
    """Returns the time that each way takes to trace and compile, as a multiple of the first; the second has a goal."""
    results = [compiled(way)[1] for way in ways]  # compiles what a process compiles once, too
    assert all(_measure.relative_difference(each, results[0]) <= tolerance for each in results), (
        f"of {ways} one is wrong"
    )
    times = np.array([[compiled(way)[0] for way in ways] for _ in range(turns)])
    rows = [("way", f'/ "{ways[0]}"', "quartiles of the turns", "ms"), *_measure.by_turns(ways, times)]
    ratio = float(np.median(times[:, 1] / times[:, 0]))
    where = f"{of}, median of {turns} turns"
    reached = _measure.verdict(f'to trace and compile, "{ways[1]}" / "{ways[0]}"', ratio, most, where)
    return f"### To trace and compile: {of}\n\n{_measure.markdown(rows)}\n\n{_measure.targets_text([reached])}\n"


def _compiled(step: Any, *args: Any) -> tuple[float, Any]:
    start = time.process_time()
    program = step.lower(*args).compile()
    return time.process_time() - start, program


def _seconds(call: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        _ready(call())
    return (time.perf_counter() - start) / calls


def _ready(results: Any) -> None:
    jax.block_until_ready([leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array)])


def _kept(call: Call, calls: int) -> float:
    """Returns the growth of the process in kB."""
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(calls):
        _ready(call())
    gc.collect()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


if __name__ == "__main__":
    _measure.command(main)
