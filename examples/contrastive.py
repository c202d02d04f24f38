"""A contrastive loss of a whole batch, its N x N logits never whole, its encoder in micro-batches.

`python -m examples.contrastive` prints the memory that the compiler gives each way, and the error of the gradient.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

import optax_accum

WIDTH, LAYERS, TEMPERATURE = 64, 4, 0.1


def info_nce(x: jax.Array, y: jax.Array, block: int | None = None) -> jax.Array:
    """Returns the mean over pairs of `logsumexp_j(x_i . y_j / t) - x_i . y_i / t`, `block` rows of logits at a time.

    Each row of logits is made again in the backward pass, so of the N x N there are [block, N] at any time.
    """

    def loss(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, own = pair
        return jax.nn.logsumexp(y @ row / TEMPERATURE) - jnp.dot(row, own) / TEMPERATURE

    if block is None:
        return jnp.mean(jax.vmap(loss)((x, y)))
    return jnp.mean(jax.lax.map(jax.checkpoint(loss), (x, y), batch_size=block))


def symmetric(x: jax.Array, y: jax.Array, block: int | None = None) -> jax.Array:
    """Returns the loss of CLIP: each x among all y, and each y among all x."""
    return (info_nce(x, y, block) + info_nce(y, x, block)) / 2


def encode(params: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
    """Returns unit vectors [n, WIDTH]."""
    for layer in params["layers"]:
        rows = rows + jax.nn.gelu(rows @ layer)
    return rows / jnp.linalg.norm(rows, axis=1, keepdims=True)


def loss(params: Any, batch: Any, encode: Callable[..., jax.Array], block: int | None = None) -> jax.Array:
    """Returns the loss of a batch of pairs: two towers."""
    return symmetric(encode(params["x"], batch["x"]), encode(params["y"], batch["y"]), block)


def problem(rows: int) -> tuple[Any, Any]:
    """Returns parameters and a batch of noisy pairs."""
    keys = iter(jax.random.split(jax.random.key(0), 4))
    tower = lambda: {"layers": jax.random.normal(next(keys), (LAYERS, WIDTH, WIDTH)) / WIDTH}
    x = jax.random.normal(next(keys), (rows, WIDTH))
    return {"x": tower(), "y": tower()}, {"x": x, "y": x + jax.random.normal(next(keys), x.shape)}


def ways(block: int) -> dict[str, Callable[..., Any]]:
    """Returns the gradient of the loss in three ways."""
    small = optax_accum.microbatched(encode, microbatch_size=block)
    return {
        "whole": jax.grad(functools.partial(loss, encode=encode)),
        "encoder in micro-batches": jax.grad(functools.partial(loss, encode=small)),
        "and logits in blocks": jax.grad(functools.partial(loss, encode=small, block=block)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints temporary memory and errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--block", type=int, default=64)
    options = parser.parse_args(arguments)
    for rows in options.rows:
        params, batch = problem(rows)
        compiled = {name: jax.jit(way).lower(params, batch).compile() for name, way in ways(options.block).items()}
        whole = compiled["whole"](params, batch)
        largest = max(jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(whole))
        print(f"{rows} pairs; {rows} x {rows} logits are {4 * rows**2 / 2**20:.1f} MiB")
        for name, program in compiled.items():
            memory = cast(Any, program.memory_analysis()).temp_size_in_bytes / 2**20
            errors = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), program(params, batch), whole)
            error = max(jax.tree.leaves(errors)) / largest
            print(f"  {name:<26}{memory:8.1f} MiB of temporary memory, error of the gradient {error:.1e}")


if __name__ == "__main__":
    main()
