"""Trains a small language model on padded text: a script to start from.

python -m examples.train --within 4    # the loader gives 32 rows, which run in 4 micro-batches
python -m examples.train --across 4    # the loader gives 8 rows, and every fourth call makes an update

With `--checkpoints DIR`, a run that was stopped goes on from its last checkpoint, in the middle of a window, too.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tqdm
from flax import linen as nn

import optax_accum

ROWS, LENGTH, WIDTH, SEED, SAVE_EVERY = 32, 96, 64, 0, 50
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--within", type=int, default=1, help="micro-batches in a call")
parser.add_argument("--across", type=int, default=1, help="calls for an update")
parser.add_argument("--updates", type=int, default=100)
parser.add_argument("--checkpoints", type=Path, help="where to save, and to go on from")
TEXTS = [found.__doc__ for found in vars(jnp).values() if isinstance(found.__doc__, str)]


class Model(nn.Module):
    """A decoder of two layers on bytes."""

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> Any:  # noqa: D102
        h = nn.Embed(128, WIDTH)(tokens) + self.param("place", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        for _ in range(2):
            mask = nn.make_causal_mask(tokens)
            h += nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(h), mask=mask)
            h += nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(h))))
            h = nn.Dropout(0.1, deterministic=not train)(h)
        return nn.Dense(128)(nn.LayerNorm()(h))


def batch_of(call: int, rows: int) -> dict[str, np.ndarray]:
    """The rows of a call, beginnings of texts, padded: after a restart the same ones."""
    order = np.random.default_rng(SEED).permutation(len(TEXTS))
    tokens = np.zeros((rows, LENGTH + 1), "i")
    for row in range(rows):
        text = TEXTS[order[(call * rows + row) % len(TEXTS)]].encode("ascii", "ignore")[: LENGTH + 1]
        tokens[row, : len(text)] = list(text)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:], "mask": (tokens[:, 1:] > 0).astype("f")}


def loss(params: Any, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    """The mean over tokens that are not padded."""
    logits: Any = Model().apply({"params": params}, batch["x"], train=True, rngs={"dropout": key})
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return jnp.sum(batch["mask"] * each) / jnp.sum(batch["mask"])


def main(arguments: list[str] | None = None) -> tuple[Any, list[float]]:
    """Trains; returns the state, and the loss of each update that this run made."""
    args = parser.parse_args(arguments)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 10, args.updates + 10)  # counts updates
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    tx = optax_accum.accumulate_gradients(inner, every=args.across)
    grad_fn = optax_accum.value_and_grad(loss, num_microbatches=args.within)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, batch: dict[str, jax.Array]) -> Any:
        value, grads = grad_fn(state["params"], batch, jax.random.fold_in(jax.random.key(SEED), state["calls"]))
        tokens = batch["mask"].sum()  # how much these rows count in the update
        params, opt = optax_accum.apply_gradients(tx, grads, state["opt"], state["params"], weight=tokens, value=value)
        mean = optax.incremental_update(params, state["ema"], 0.05)
        ema = jax.tree.map(functools.partial(jnp.where, optax_accum.has_updated(opt)), mean, state["ema"])
        return {"params": params, "opt": opt, "ema": ema, "calls": state["calls"] + 1}

    params = Model().init(jax.random.key(SEED), jnp.zeros((1, LENGTH), "i"), train=False)["params"]
    opt, ema = tx.init(params), jax.tree.map(jnp.copy, params)
    state: Any = {"params": params, "opt": opt, "ema": ema, "calls": jnp.int32(0)}
    manager = ocp.CheckpointManager(args.checkpoints.absolute()) if args.checkpoints else None
    if manager and manager.latest_step() is not None:
        state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state))

    losses, calls = [], args.updates * args.across
    bar = tqdm.trange(int(state["calls"]), calls, initial=int(state["calls"]), total=calls)
    try:
        for call in bar:
            state = train_step(state, batch_of(call, ROWS // args.across))
            if optax_accum.has_updated(state["opt"]):
                losses.append(float(state["opt"].mean_args["value"].mean))  # over the window
                bar.set_postfix(loss=f"{losses[-1]:.3f}", update=int(state["opt"].gradient_step))
            if manager and ((call + 1) % SAVE_EVERY == 0 or call + 1 == calls):
                manager.save(call + 1, args=ocp.args.StandardSave(state))
    finally:
        if manager:
            manager.close()  # when the last checkpoint is complete
    return state, losses


if __name__ == "__main__":
    main()
