"""A train step and a batch to check it with: uneven micro-batches of masked tokens, and an early end.

Run `python -m examples.verified_step`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_accum import accumulate_gradients, apply_gradients, verify_step

Tree = Any
_RNG = np.random.default_rng(0)
batch = {
    "x": _RNG.normal(size=(16, 6, 4)).astype("float32"),  # [rows, tokens, features]
    "mask": (np.arange(6) < _RNG.integers(1, 7, (16, 1))).astype("float32"),
}


def loss(params: Tree, batch: Tree) -> jax.Array:
    """Returns the mean over tokens that are not masked."""
    of_token = jnp.tanh(batch["x"] @ params["w"] + params["b"]) ** 2
    return jnp.sum(batch["mask"] * of_token) / jnp.sum(batch["mask"])


def make_step(every: int) -> tuple[Callable[..., Any], Tree, Callable[..., Any]]:
    """Returns a train step for windows of `every` micro-batches, what it carries, and the step that ends the data."""
    tx = accumulate_gradients(optax.adam(1e-2), every)
    params = {"w": jnp.array([0.5, -0.3, 0.1, 0.4]), "b": jnp.array(0.1)}

    def step(carry: Tree, micro_batch: Tree, flush: bool = False) -> Tree:
        params, state = carry
        grads = jax.grad(loss)(params, micro_batch)
        return apply_gradients(tx, grads, state, params, weight=micro_batch["mask"].sum(), flush=flush)

    return jax.jit(step), (params, tx.init(params)), jax.jit(functools.partial(step, flush=True))


def main() -> None:
    """Prints the report."""
    print(verify_step(make_step, batch, every=4))


if __name__ == "__main__":
    main()
