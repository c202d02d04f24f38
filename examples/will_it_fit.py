"""How many micro-batches a decoder needs on an accelerator, from its shapes alone.

Run `python -m examples.will_it_fit`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_accum

Tree = Any
LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, ROWS = 6, 512, 8, 8192, 256, 64
TX = optax.adamw(1e-3)


def params() -> Tree:
    """Returns the shapes of the parameters: an embedding, and layers stacked for a scan."""
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    return {
        "embed": shape(VOCABULARY, WIDTH),
        "layers": {
            "qkv": shape(LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS),
            "out": shape(LAYERS, WIDTH, WIDTH),
            "up": shape(LAYERS, WIDTH, 4 * WIDTH),
            "down": shape(LAYERS, 4 * WIDTH, WIDTH),
        },
    }


def loss(params: Tree, tokens: jax.Array) -> jax.Array:
    """Returns the cross-entropy of the next token."""
    h, _ = jax.lax.scan(jax.checkpoint(_block), params["embed"][tokens], params["layers"])
    logits = _normed(h) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def _block(h: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
    q, k, v = jnp.moveaxis(jnp.einsum("blw,wnhd->blnhd", _normed(h), layer["qkv"]), 2, 0)
    h = h + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(h.shape) @ layer["out"]
    return h + jax.nn.gelu(_normed(h) @ layer["up"]) @ layer["down"], None


def _normed(h: jax.Array) -> jax.Array:
    return h * jax.lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6)


step_of_k = optax_accum.plan.of_loss(loss, TX)
args = params(), jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)


def main() -> None:
    """Plans for a budget of 2 GB."""
    print(optax_accum.plan.fit(step_of_k, *args, run=False, budget="2GB"))


if __name__ == "__main__":
    main()
