"""What a micro-step costs the host: the Python time of Linen and NNX train steps, which an accelerator waits for.

Run `python -m benchmarks.host_time`. The model is deep and narrow: there are many arrays, and little to compute. The
paths take turns, and each turn gives a ratio to Linen's. Before a time is printed, parameters are compared.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import optax_accum
from benchmarks import _measure
from optax_accum import flax as accum

EVERY, WIDTH = 4, 4
CALLS = 2 * EVERY  # of a turn
BATCH = (jnp.ones((8, WIDTH)), jnp.zeros((8, WIDTH)))
LINEN = "Linen, `train_step`"


class _Run(NamedTuple):
    """A path: a micro-step, which changes what it works on, and the parameters of that."""

    step: Callable[[], Any]
    params: Callable[[], Any]

    def seconds(self) -> float:
        """Returns the median of the calls of a turn, each without what runs on after it."""
        self.step()  # the caches of the processor are its own again, as in training
        times = []
        for _ in range(CALLS):
            start = time.thread_time()
            result = self.step()
            times.append(time.thread_time() - start)
            jax.block_until_ready((result, self.params()))
        return float(np.median(times))


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--layers", type=int, default=40, help="layers of the model, with a kernel and a bias each")
    parser.add_argument("--turns", type=int, default=25, help=f"turns of each path, of {CALLS} micro-steps")
    options = parser.parse_args()
    notes = (
        f"CPU time of the calling thread, medians of one run on this machine: {options.turns} turns of each path, of "
        f"{CALLS} micro-steps."
    )
    print(_measure.header(f"Host time of a micro-step, {options.layers} layers, Adam", notes))
    print(_table(options.layers, options.turns))


def _table(layers: int, turns: int) -> str:
    """Returns the time of a micro-step of each path as a multiple of Linen's."""
    runs = {
        LINEN: _linen(_Module(layers)),
        "NNX, `train_step`": _train_step(_Module(layers)),
        "NNX, `jit_step(train_step)`": _train_step(_Module(layers), accum.nnx.jit_step),
        "NNX, our `Optimizer` under `nnx.jit`": _under_jit(_Module(layers)),
        "NNX, Flax's `Optimizer` around `optax.MultiSteps` under `nnx.jit`": _flax(_Module(layers)),
    }
    for _ in range(2 * EVERY):
        for run in runs.values():
            run.step()
    for name, run in runs.items():
        error = _measure.relative_difference(run.params(), runs[LINEN].params())
        assert error < 1e-4, (name, error)
    times = np.array([[run.seconds() for run in runs.values()] for _ in range(turns)])
    rows = [("micro-step", "/ Linen", "quartiles of the turns", "ms"), *_measure.by_turns(runs, times)]
    ratio = float(np.median(times[:, 1] / times[:, 0]))
    reached = _measure.verdict("train_step, NNX / Linen", ratio, 3, f"median of {turns} turns")
    return f"### By path\n\n{_measure.markdown(rows)}\n\n{_measure.targets_text([reached])}"


class _Module(nnx.Module):
    def __init__(self, layers: int):
        rngs = nnx.Rngs(0)
        self.layers = nnx.data([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + nnx.tanh(layer(x))
        return x


class _LinenModule(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = x + nn.tanh(nn.Dense(WIDTH)(x))
        return x


def _squares(out: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((out - y) ** 2)


def _loss(model: Any, batch: Any) -> jax.Array:
    return _squares(model(batch[0]), batch[1])


def _transformation() -> optax.GradientTransformation:
    return optax_accum.accumulate_gradients(optax.adam(1e-3), EVERY)


def _linen(start: _Module) -> _Run:
    model = _LinenModule(len(start.layers))
    params = {
        f"Dense_{number}": {"kernel": jnp.copy(layer.kernel[...]), "bias": jnp.copy(layer.bias[...])}
        for number, layer in enumerate(start.layers)
    }
    state = accum.linen.TrainState.create(apply_fn=model.apply, params=params, tx=_transformation(), metrics=("loss",))
    fun = lambda params, batch, key, state: (_squares(state.apply_fn({"params": params}, batch[0]), batch[1]), {})
    step, key = accum.linen.train_step(fun, num_microbatches=1), jax.random.key(0)

    def run() -> Any:
        nonlocal state
        state, metrics = step(state, BATCH, key)
        return metrics

    ordered = lambda: [state.params[f"Dense_{n}"][name] for n in range(len(params)) for name in ("bias", "kernel")]
    return _Run(run, ordered)


def _train_step(model: _Module, compiled: Callable[..., Any] = lambda step: step) -> _Run:
    optimizer = accum.nnx.Optimizer(model, _transformation(), wrt=nnx.Param, metrics=("loss",))
    return _nnx(model, optimizer, compiled(accum.nnx.train_step(_loss, num_microbatches=1)))


def _step(model: _Module, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
    loss, grads = nnx.value_and_grad(_loss)(model, batch)
    optimizer.update(model, grads)
    return loss


def _under_jit(model: _Module) -> _Run:
    optimizer = accum.nnx.Optimizer(model, _transformation(), wrt=nnx.Param)
    return _nnx(model, optimizer, nnx.jit(_step, donate_argnums=(0, 1)))


def _flax(model: _Module) -> _Run:
    optimizer = nnx.Optimizer(model, optax.MultiSteps(optax.adam(1e-3), EVERY), wrt=nnx.Param)
    return _nnx(model, optimizer, nnx.jit(_step))  # MultiSteps begins with arrays that are one: not to be donated


def _nnx(model: _Module, optimizer: nnx.Optimizer, step: Callable[..., Any]) -> _Run:
    params = lambda: [variable[...] for layer in model.layers for variable in (layer.bias, layer.kernel)]
    return _Run(lambda: step(model, optimizer, BATCH), params)


if __name__ == "__main__":
    _measure.command(main)
