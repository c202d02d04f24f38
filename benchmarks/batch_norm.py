"""Models of Flax with BatchNorm, whole and in micro-batches of one call: gradient and running statistics, memory, time.

Run `python -m benchmarks.batch_norm`. The ways take turns in one process; each turn gives ratios of CPU time. Before a
time is printed, gradients and running statistics are compared.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from tqdm import tqdm

import optax_accum
from benchmarks import _measure
from benchmarks._measure import Tree

K, ROWS = 8, 64
TOLERANCE = 1e-4  # of the largest entry of all gradients, of each statistic
NOTES = f"""\
{ROWS} images or graphs, k = {K}, float32. Error: the largest difference from the whole batch's gradient, of its largest
entry, and from its running statistics. Memory: temporary memory of the compiled program, with what crosses from one
BatchNorm to the next saved, or in part recomputed (`recompute=0.6`). Time: the whole batch's is 1; medians of the
turns."""
COLUMNS = ("model", "error", "memory, whole batch", "saved", "recomputed", "time, saved", "time, recomputed")

_norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9)


class _ResNet(nn.Module):
    """Nine residual blocks, whose norms come first."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False)
        x = conv(16, (3, 3))(x)
        for width, stride in ((16, 1), (32, 2), (64, 2)):
            for block in range(3):
                h = nn.relu(_norm()(x))
                strides = stride if block == 0 else 1
                inner = nn.relu(_norm()(conv(width, (3, 3), strides=strides)(h)))
                x = (x if block else conv(width, (1, 1), strides=strides)(h)) + conv(width, (3, 3))(inner)
        return nn.Dense(10)(nn.relu(_norm()(x)).mean((1, 2)))


class _ConvNeXt(nn.Module):
    """Blocks of a depthwise convolution, a BatchNorm in place of its LayerNorm, and two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(32, (4, 4), strides=4)(x)
        for _ in range(4):
            h = nn.Conv(32, (7, 7), feature_group_count=32, use_bias=False)(x)
            x = x + nn.Dense(32)(nn.gelu(nn.Dense(128)(_norm()(h))))
        return nn.Dense(10)(x.mean((1, 2)))


class _GraphNet(nn.Module):
    """Messages along the edges of a graph, [nodes, nodes], with a BatchNorm over the nodes of all graphs."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        edges = jnp.abs(x[..., :1] - x[..., 0][:, None, :]) < 0.5  # between nodes that are near
        edges = edges / edges.sum(-1, keepdims=True)
        x = nn.Dense(64)(x)
        for _ in range(4):
            h = nn.Dense(64, use_bias=False)(edges @ x)
            x = x + nn.relu(_norm()(h))
        return nn.Dense(10)(x.mean(1))


MODELS = {
    "ResNet, 19 BatchNorms": (_ResNet(), (ROWS, 32, 32, 3)),
    "ConvNeXt, 4 BatchNorms": (_ConvNeXt(), (ROWS, 32, 32, 3)),
    "graph network, 4 BatchNorms": (_GraphNet(), (ROWS, 48, 8)),
}


def problem(model: nn.Module, shape: tuple[int, ...]) -> tuple[Callable[..., Any], Tree, jax.Array]:
    """Returns a loss with running statistics, its parameters, and a batch."""
    batch = jax.random.normal(jax.random.key(1), shape)
    variables = jax.jit(model.init)(jax.random.key(0), batch[:2])
    statistics = variables["batch_stats"]

    def loss(params: Tree, batch: jax.Array) -> tuple[jax.Array, Tree]:
        variables = {"params": params, "batch_stats": statistics}
        logits, new = model.apply(variables, batch, mutable="batch_stats")
        target = batch.reshape(len(batch), -1).mean(1, keepdims=True)
        return jnp.mean((logits - target) ** 2), new["batch_stats"]

    return loss, variables["params"], batch


def measured(name: str, turns: int) -> tuple[str, ...]:
    """Returns a row of the table, after all ways gave the same gradient and statistics."""
    loss, params, batch = problem(*MODELS[name])
    ours = [functools.partial(optax_accum.value_and_grad, recompute=share) for share in (0, 0.6)]
    ways = [jax.value_and_grad(loss, has_aux=True), *(way(loss, K, has_aux=True) for way in ours)]
    programs = [jax.jit(way).lower(params, batch).compile() for way in ways]
    results = (program(params, batch) for program in programs)
    whole, *found = ((statistics, grads) for (_, statistics), grads in results)
    error = max(_measure.gradient_difference(each, whole) for each in found)
    if not error <= TOLERANCE:
        raise SystemExit(f"{name}: another gradient or other statistics, {error:.1e}.")
    times = np.array([[_measure.cpu_seconds(program, params, batch) for program in programs] for _ in range(turns)])
    _, *ratios = np.median(times / times[:, :1], axis=0)
    memory = [f"{program.memory_analysis().temp_size_in_bytes / 1e6:.0f} MB" for program in programs]
    return name, f"{error:.0e}", *memory, *(f"{ratio:.1f}" for ratio in ratios)


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--turns", type=int, default=7, help="how often each program is run")
    options = parser.parse_args()
    tqdm.write(_measure.header("BatchNorm in Flax", NOTES))
    rows = [measured(name, options.turns) for name in tqdm(MODELS, leave=False, disable=None)]
    tqdm.write(_measure.markdown([COLUMNS, *rows]))


if __name__ == "__main__":
    _measure.command(main)
