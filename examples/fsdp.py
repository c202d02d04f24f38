"""Trains a small decoder whose parameters are sharded, gathered once a layer for all micro-batches of a window.

Run `python -m examples.fsdp`: eight virtual devices train it so, then with whole batches and a copy of the parameters
on each, and all losses and parameters are compared. Copy `loss` and `train_step`.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":  # read when JAX is imported
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum

Tree = Any
Block = Callable[[Tree, jax.Array], jax.Array]
LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, ROWS, STEPS = 4, 64, 4, 32, 16, 64, 10
LAYER = {  # shapes of one layer, each sharded over its first dimension
    "qkv": (WIDTH, 3, HEADS, WIDTH // HEADS),
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}
SPECS = {name: P("data") for name in LAYER}
TX = optax.sgd(0.3, momentum=0.9)


def block(layer: Tree, h: jax.Array) -> jax.Array:
    """Returns rows [b, length, width] after causal attention and an MLP: each row for itself."""
    q, k, v = jnp.moveaxis(jnp.einsum("blw,wnhd->blnhd", _normed(h), layer["qkv"]), 2, 0)
    h = h + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(h.shape) @ layer["out"]
    return h + jax.nn.gelu(_normed(h) @ layer["up"]) @ layer["down"]


def loss(block: Block, params: Tree, tokens: jax.Array) -> jax.Array:
    """Returns the cross-entropy of the next token: an embedding, the layers in a scan, a head."""
    h, _ = jax.lax.scan(lambda h, layer: (block(layer, h), None), params["embed"][tokens], params["layers"])
    logits = _normed(h) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def train_step(block: Block, params: Tree, state: Any, tokens: jax.Array) -> tuple[Tree, Any, jax.Array]:
    """Makes one update: the optimizer works on the shards of gradients and parameters."""
    value, grads = jax.value_and_grad(functools.partial(loss, block))(params, tokens)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def main() -> None:
    """Trains in micro-batches and with the whole batch, and compares."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        in_parts = optax_accum.microbatched(block, 4, devices=optax_accum.Devices("data", to=SPECS))
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, 1)) + np.arange(LENGTH) ** 2
        tokens = jax.device_put(tokens.astype(np.int32) % VOCABULARY, NamedSharding(mesh, P("data")))
        cut = _train(in_parts, _params(mesh, SPECS), tokens)
        whole = _train(block, _params(mesh, dict.fromkeys(LAYER, P())), tokens)
    difference = max(
        float(jnp.max(jnp.abs(a - b))) for a, b in zip(jax.tree.leaves(cut), jax.tree.leaves(whole), strict=True)
    )
    print(f"largest difference of a loss or a parameter: {difference:.1e}")
    assert difference < 1e-4
    print("The training in micro-batches equals the whole batch.")


def _train(block: Block, params: Tree, tokens: jax.Array) -> tuple[list[float], Tree]:
    """Returns the losses, and the parameters at the end."""
    state, losses = TX.init(params), list[float]()
    step = jax.jit(functools.partial(train_step, block), donate_argnums=(0, 1))
    for _ in range(STEPS):
        params, state, value = step(params, state, tokens)
        losses.append(float(value))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses, params


def _params(mesh: Any, specs: Tree) -> Tree:
    """Returns parameters, the layers stacked and each of them sharded as `specs` says."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: (rng.normal(size=shape) / WIDTH**0.5).astype(np.float32)
    place = lambda leaf, *spec: jax.device_put(leaf, NamedSharding(mesh, P(*spec)))
    layers = {name: place(draw(LAYERS, *shape), None, *specs[name]) for name, shape in LAYER.items()}
    return {"embed": place(draw(VOCABULARY, WIDTH)), "layers": layers}


def _normed(h: jax.Array) -> jax.Array:
    return h * jax.lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6)


if __name__ == "__main__":
    main()
