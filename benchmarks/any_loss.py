"""Whole batches and the same micro-batch by micro-batch, of losses that take rows together: error, memory and time.

Run `python -m benchmarks.any_loss`. Nothing is declared of a loss. Times are CPU times of two programs in turns.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import optax_accum
from benchmarks import _measure
from benchmarks._measure import Tree

ROWS, K, LAYERS, WIDTH, HIDDEN, WORDS, LENGTH = 512, 16, 4, 64, 512, 128, 16
TOLERANCE = 1e-5  # of the largest entry of a leaf

NOTES = f"""\
{ROWS} rows, k = {K}, float32. Error: the largest difference from `jax.value_and_grad` of the whole batch, of the
largest entry of a leaf. Memory: temporary memory of the compiled program. Time: the whole batch's is 1; median of the
turns."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss and its arguments."""

    name: str
    fun: Callable[[Tree, Tree], jax.Array]
    params: Tree
    batch: Tree
    recompute: float = 0


def losses() -> list[Loss]:
    """Returns the losses, of a residual network and of a decoder."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)

    net = {"up": normal(LAYERS, WIDTH, HIDDEN), "down": normal(LAYERS, HIDDEN, WIDTH), "out": normal(WIDTH, 10)}
    rows = {
        "x": normal(ROWS, WIDTH) * np.sqrt(WIDTH),
        "y": jnp.asarray(random.integers(10, size=ROWS)),
        "mask": jnp.asarray(random.random(ROWS) < 0.7, jnp.float32),
        "reward": jnp.asarray(random.normal(size=ROWS), jnp.float32),
    }
    decoder = {"table": normal(WORDS, WIDTH), **{name: net[name] for name in ("up", "down")}}
    tokens = {"tokens": jnp.asarray(random.integers(WORDS, size=(ROWS, LENGTH)))}
    tokens["mask"] = jnp.asarray(np.arange(LENGTH) < random.integers(1, LENGTH, size=(ROWS, 1)), jnp.float32)
    of_rows = {
        "masked mean": masked_mean,
        "BatchNorm in each layer": batch_norm,
        "BatchNorm, layers in a scan": scanned_batch_norm,
        "dropout": dropout,
        "advantages normalised over the batch": normalised,
        "contrastive, n x n scores": contrastive,
    }
    found = [Loss(name, fun, net, rows) for name, fun in of_rows.items()]
    recomputed = Loss("BatchNorm in each layer, recompute=1", batch_norm, net, rows, recompute=1)
    return [Loss("decoder, padded, tied, remat", padded_decoder, decoder, tokens), *found, recomputed]


def _each(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]


def _mean(each: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(each * mask) / jnp.sum(mask)


def _normed(x: jax.Array) -> jax.Array:
    return (x - x.mean(0, keepdims=True)) * jax.lax.rsqrt(x.var(0, keepdims=True) + 1e-5)


def _layer(h: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jnp.tanh(h @ up) @ down


def _features(params: Tree, h: jax.Array, after: Callable[[jax.Array], jax.Array]) -> jax.Array:
    for up, down in zip(params["up"], params["down"], strict=True):
        h = h + after(_layer(h, up, down))
    return h


def masked_mean(params: Tree, batch: Tree) -> jax.Array:
    h = _features(params, batch["x"], lambda h: h)
    return _mean(_each(h @ params["out"], batch["y"]), batch["mask"])


def batch_norm(params: Tree, batch: Tree) -> jax.Array:
    return _mean(_each(_features(params, batch["x"], _normed) @ params["out"], batch["y"]), batch["mask"])


def scanned_batch_norm(params: Tree, batch: Tree) -> jax.Array:
    def layer(h: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return h + _normed(_layer(h, *weights)), None

    h, _ = jax.lax.scan(layer, batch["x"], (params["up"], params["down"]))
    return _mean(_each(h @ params["out"], batch["y"]), batch["mask"])


def dropout(params: Tree, batch: Tree) -> jax.Array:
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, (LAYERS, *batch["x"].shape))
    h = batch["x"]
    for layer, (up, down) in enumerate(zip(params["up"], params["down"], strict=True)):
        h = h + jnp.where(kept[layer], _layer(h, up, down), 0)
    return _mean(_each(h @ params["out"], batch["y"]), batch["mask"])


def normalised(params: Tree, batch: Tree) -> jax.Array:
    advantage = (batch["reward"] - batch["reward"].mean()) / (batch["reward"].std() + 1e-6)
    return jnp.mean(_each(_features(params, batch["x"], lambda h: h) @ params["out"], batch["y"]) * advantage)


def contrastive(params: Tree, batch: Tree) -> jax.Array:
    z = _features(params, batch["x"], lambda h: h)
    z = z / jnp.linalg.norm(z, axis=1, keepdims=True)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(z @ z.T / 0.1)))


def padded_decoder(params: Tree, batch: Tree) -> jax.Array:
    @jax.checkpoint
    def layer(h: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return h + _layer(h, *weights), None

    h, _ = jax.lax.scan(layer, params["table"][batch["tokens"]], (params["up"], params["down"]))
    return _mean(_each(h @ params["table"].T, batch["tokens"]), batch["mask"])


def measured(loss: Loss, turns: int) -> tuple[str, ...]:
    """Returns a row of the table, after both ways gave the same value and gradient."""
    ways = jax.value_and_grad(loss.fun), optax_accum.value_and_grad(loss.fun, K, recompute=loss.recompute)
    whole, ours = (jax.jit(way).lower(loss.params, loss.batch).compile() for way in ways)
    error = _measure.relative_difference(ours(loss.params, loss.batch), whole(loss.params, loss.batch))
    if not error <= TOLERANCE:
        raise SystemExit(f"{loss.name}: another gradient, {error:.1e}.")
    args = loss.params, loss.batch
    ratios = [_measure.cpu_seconds(ours, *args) / _measure.cpu_seconds(whole, *args) for _ in range(turns)]
    memory = [f"{program.memory_analysis().temp_size_in_bytes / 1e6:.1f} MB" for program in (whole, ours)]
    return loss.name, f"{error:.0e}", *memory, f"{np.median(ratios):.2f}"


def main() -> None:
    parser = _measure.parser(__doc__)
    parser.add_argument("--turns", type=int, default=9, help="how often each program is run")
    options = parser.parse_args()
    tqdm.write(_measure.header("Any loss", NOTES))
    table = [("loss", "error", "memory, whole batch", "memory, k = 16", "time")]
    table += [measured(loss, options.turns) for loss in tqdm(losses(), leave=False, disable=None)]
    tqdm.write(_measure.markdown(table))


if __name__ == "__main__":
    _measure.command(main)
