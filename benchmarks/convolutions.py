"""What convolutions cost on a CPU: gradients in micro-batches, against the whole batch and loops by hand.

Run `python -m benchmarks.convolutions`. The ways take turns in one process; each turn gives ratios of CPU time. Before
a time is printed, gradients are compared.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import optax_accum
from benchmarks import _measure

K = 8
WHOLE, SCAN, UNROLLED = "the whole batch", "a scan by hand", "by hand, without a loop"
OURS, STEP = "`value_and_grad`", "`value_and_apply_gradients`, in a branch (`weight_fn`)"
TOLERANCE = 1e-4  # of the largest gradient: rounding, in another order
Tree = Any
Ways = dict[str, Callable[..., Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9, help="turns of each way")
    options = parser.parse_args()
    notes = (
        f"Medians of {options.turns} turns of CPU time of the process, k = {K}. Temporary memory as the compiler says. "
        f"Without a loop, each of the {K} micro-batches is in the program, behind a barrier."
    )
    print(_measure.header("Convolutions on a CPU", notes))
    verdicts = []
    for name, (model, shape) in MODELS.items():
        times, table = _within_a_call(model, shape, options.turns)
        of = lambda way, times=times: times[:, list(WAYS).index(way)]
        ratio, to_unrolled = (float(np.median(of(OURS) / of(base))) for base in (WHOLE, UNROLLED))
        verdicts.append(_measure.verdict(f"{OURS} / {WHOLE}", ratio, 1.0, name))
        verdicts.append(_measure.verdict(f"{OURS} / {UNROLLED}", to_unrolled, 1.05, name))
        print(f"### {name}, {' x '.join(map(str, shape))}\n\n{table}\n")
    model, shape = next(iter(MODELS.values()))
    print(f"### A micro-step, a CNN, {shape[0] // K} images\n\n{_across_calls(model, shape, options.turns)}\n")
    print(_measure.targets_text(verdicts))


# Models


class _CNN(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (32, 64):
            x = nn.avg_pool(nn.tanh(nn.Conv(width, (3, 3))(x)), (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


class _ResNet(nn.Module):
    norm: Callable[[], nn.Module]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(
            nn.Conv, use_bias=False
        )  # before BatchNorm its gradient would be zero, but for rounding
        x = conv(16, (3, 3))(x)
        for width, stride in ((16, 1), (32, 2), (64, 2)):
            h = nn.relu(self.norm()(x))
            h = nn.relu(self.norm()(conv(width, (3, 3), strides=stride)(h)))
            x = conv(width, (1, 1), strides=stride)(x) + conv(width, (3, 3))(h)
        return nn.Dense(10)(nn.relu(self.norm()(x)).mean((1, 2)))


class _UNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kept = []
        for width in (8, 16):
            x = nn.relu(nn.Conv(width, (3, 3))(x))
            kept.append(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        for width in (16, 8):
            x = nn.ConvTranspose(width, (2, 2), strides=(2, 2))(x)
            x = nn.relu(nn.Conv(width, (3, 3))(jnp.concatenate([x, kept.pop()], axis=-1)))
        return nn.Conv(1, (1, 1))(x).mean((1, 2))


_group_norm = functools.partial(nn.GroupNorm, num_groups=8)
_batch_norm = functools.partial(nn.BatchNorm, use_running_average=False)
MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "CNN": (_CNN(), (256, 16, 16, 3)),
    "ResNet, GroupNorm": (_ResNet(_group_norm), (64, 32, 32, 3)),
    "ResNet, BatchNorm": (_ResNet(_batch_norm), (64, 32, 32, 3)),
    "U-Net": (_UNet(), (64, 32, 32, 3)),
}


def _problem(model: nn.Module, shape: tuple[int, ...]) -> tuple[Callable[..., jax.Array], Tree, jax.Array]:
    batch = jax.random.normal(jax.random.key(1), shape)
    variables = jax.jit(model.init)(jax.random.key(0), batch[:2])
    others = {name: tree for name, tree in variables.items() if name != "params"}

    def loss(params: Tree, batch: jax.Array) -> jax.Array:
        logits, _ = model.apply({"params": params, **others}, batch, mutable=list(others))
        return jnp.mean((logits - batch.mean((1, 2, 3))[:, None]) ** 2)

    return loss, variables["params"], batch


# Ways


def _scan(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def grad(params: Tree, batch: jax.Array) -> tuple[jax.Array, Tree]:
        def add(sums: Any, part: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, part)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros([]), params))
        sums, _ = jax.lax.scan(add, zeros, batch.reshape(K, -1, *batch.shape[1:]))
        return jax.tree.map(lambda leaf: leaf / K, sums)

    return grad


def _unrolled(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def grad(params: Tree, batch: jax.Array) -> tuple[jax.Array, Tree]:
        sums = jax.tree.map(jnp.zeros_like, (jnp.zeros([]), params))
        for part in batch.reshape(K, -1, *batch.shape[1:]):
            part, sums = jax.lax.optimization_barrier((part, sums))
            sums = jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, part))
        return jax.tree.map(lambda leaf: leaf / K, sums)

    return grad


WAYS: dict[str, Callable[..., Any]] = {
    WHOLE: jax.value_and_grad,
    SCAN: _scan,
    UNROLLED: _unrolled,
    OURS: functools.partial(optax_accum.value_and_grad, num_microbatches=K),
}
INEXACT_BY_HAND = [MODELS["ResNet, BatchNorm"][0]]  # it takes rows together
EXACT = (WHOLE, OURS)


def _within_a_call(model: nn.Module, shape: tuple[int, ...], turns: int) -> tuple[np.ndarray, str]:
    """Returns times [turn, way], and their table."""
    loss, params, batch = _problem(model, shape)
    ways = {name: jax.jit(way(loss)).lower(params, batch).compile() for name, way in WAYS.items()}
    wanted = ways[WHOLE](params, batch)[1]
    for name, way in ways.items():
        error = _measure.relative_difference(way(params, batch)[1], wanted)
        assert error < TOLERANCE or (model in INEXACT_BY_HAND and name not in EXACT), (name, error)
    return _timed({name: functools.partial(way, params, batch) for name, way in ways.items()}, ways, turns)


def _across_calls(model: nn.Module, shape: tuple[int, ...], turns: int) -> str:
    """Returns the table of a micro-step that only accumulates."""
    loss, params, batch = _problem(model, (shape[0] // K, *shape[1:]))
    tx = optax_accum.accumulate_gradients(optax.adamw(1e-3), every=2**30)
    state = tx.init(params)
    grad = jax.jit(jax.value_and_grad(loss)).lower(params, batch).compile()
    options: dict[str, dict[str, Any]] = {
        "`value_and_apply_gradients`": {},
        STEP: {"weight_fn": lambda batch: jnp.sum(batch > 0)},
    }
    ways: dict[str, Any] = {"the gradient alone": grad}
    runs = {"the gradient alone": functools.partial(grad, params, batch)}
    for name, chosen in options.items():
        step = optax_accum.value_and_apply_gradients(loss, tx, **chosen)
        ways[name] = jax.jit(step).lower(params, state, batch).compile()
        runs[name] = functools.partial(ways[name], params, state, batch)
    return _timed(runs, ways, turns)[1]


def _timed(runs: Ways, compiled: dict[str, Any], turns: int) -> tuple[np.ndarray, str]:
    """Returns times [turn, way] and their table, with temporary memory."""
    for run in runs.values():
        jax.block_until_ready(run())
    times = np.array([[_measure.cpu_seconds(run) for run in runs.values()] for _ in range(turns)])
    head = "CPU time", f"/ {next(iter(runs))}", "quartiles of the turns", "ms", "temporary memory, MB"
    megabytes = [f"{way.memory_analysis().temp_size_in_bytes / 1e6:.1f}" for way in compiled.values()]
    rows = [(*row, mb) for row, mb in zip(_measure.by_turns(runs, times), megabytes, strict=True)]
    return times, _measure.markdown([head, *rows])


if __name__ == "__main__":
    _measure.command(main)
