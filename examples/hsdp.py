"""Trains a small decoder on two replicas, each with its parameters sharded (HSDP): replicas exchange a shard a window.

Run `python -m examples.hsdp`: eight virtual devices, 2 x 4, train it so, then with whole batches and a copy of the
parameters on each, and all losses and parameters are compared; so are the bytes between replicas for windows of 2 and 8
micro-batches. Copy `train_step` and `_placed`.
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
from examples import fsdp

Tree = Any
REPLICAS, STEPS = 2, 10
TX = optax.sgd(0.3, momentum=0.9)


def train_step(
    gradient: Callable[..., tuple[jax.Array, Tree]], params: Tree, state: Any, tokens: jax.Array
) -> tuple[Tree, Any, jax.Array]:
    """Makes one update: gradients come sharded as the parameters are, and the optimizer works on shards."""
    value, grads = gradient(params, tokens)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def in_parts(k: int) -> Callable[..., tuple[jax.Array, Tree]]:
    """Returns the gradient of a window of k micro-batches: what "shard" does is left to the compiler."""
    return optax_accum.value_and_grad(_loss, num_microbatches=k, devices="replica")


def main() -> None:
    """Trains in micro-batches and with the whole batch, and compares."""
    shape = (REPLICAS, jax.device_count() // REPLICAS)
    mesh = jax.make_mesh(shape, ("replica", "shard"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        tokens = np.random.default_rng(0).integers(0, fsdp.VOCABULARY, (fsdp.ROWS, 1)) + np.arange(fsdp.LENGTH) ** 2
        tokens = tokens.astype(np.int32) % fsdp.VOCABULARY
        tokens = jax.device_put(tokens, NamedSharding(mesh, P(("replica", "shard"))))
        cut = _train(in_parts(4), _placed(mesh, P("shard")), tokens)
        whole = _train(jax.value_and_grad(_loss), _placed(mesh, P()), tokens)
        exchanged = [_between_replicas(in_parts(k), _placed(mesh, P("shard")), tokens) for k in (2, 8)]
    difference = max(
        float(jnp.max(jnp.abs(a - b))) for a, b in zip(jax.tree.leaves(cut), jax.tree.leaves(whole), strict=True)
    )
    print(f"largest difference of a loss or a parameter: {difference:.1e}")
    print(f"bytes between replicas, a window: {exchanged[0]:,} for k = 2, {exchanged[1]:,} for k = 8")
    assert difference < 1e-4
    assert exchanged[0] == exchanged[1]
    print("The training in micro-batches equals the whole batch.")


def _loss(params: Tree, tokens: jax.Array) -> jax.Array:
    return fsdp.loss(jax.checkpoint(fsdp.block), params, tokens)


def _placed(mesh: Any, spec: P) -> Tree:
    """Returns parameters: the layers stacked, each sharded over its first dimension as `spec` says."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: (rng.normal(size=shape) / fsdp.WIDTH**0.5).astype(np.float32)
    place = lambda leaf, *spec: jax.device_put(leaf, NamedSharding(mesh, P(*spec)))
    layers = {name: place(draw(fsdp.LAYERS, *shape), None, *spec) for name, shape in fsdp.LAYER.items()}
    return {"embed": place(draw(fsdp.VOCABULARY, fsdp.WIDTH), *spec), "layers": layers}


def _train(gradient: Callable[..., Any], params: Tree, tokens: jax.Array) -> tuple[list[float], Tree]:
    """Returns the losses, and the parameters at the end."""
    state, losses = TX.init(params), list[float]()
    where = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    step = jax.jit(functools.partial(train_step, gradient), donate_argnums=(0, 1), out_shardings=(*where, None))
    for _ in range(STEPS):
        params, state, value = step(params, state, tokens)
        losses.append(float(value))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses, params


def _between_replicas(gradient: Callable[..., Any], params: Tree, tokens: jax.Array) -> int:
    """Returns the bytes that the devices of one group of replicas add up in a window."""
    where = jax.tree.map(lambda leaf: leaf.sharding, params)
    lowered = jax.jit(gradient, out_shardings=(None, where)).lower(params, tokens)
    found = optax_accum.sharding.count_collectives(lowered.compile())
    return sum(op.times * op.bytes for op in found if op.group == REPLICAS)


if __name__ == "__main__":
    main()
