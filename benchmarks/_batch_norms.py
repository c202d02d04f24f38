"""What exact BatchNorm holds and moves in micro-batches, beside the whole batch, with and without checkpoints."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_accum
from benchmarks._measure import Tree
from benchmarks._one_device import Facts, compiled
from optax_accum.accelerators import Target, count_traffic

CHANNELS = 64


def normalised(x: jax.Array) -> jax.Array:
    mean, square = x.mean((0, 1, 2)), (x * x).mean((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(jnp.maximum(square - mean * mean, 0) + 1e-5)


def convnet(checkpoint: Callable[..., Any] = lambda fun: fun) -> Callable[[Tree, Tree], jax.Array]:
    """The loss of residual layers of a 3 x 3 convolution and a BatchNorm, on images of 64 x 64."""

    def norm(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return normalised(
            jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )

    layer = checkpoint(lambda h, kernel: h + jax.nn.relu(norm(h, kernel)))

    def loss(params: Tree, batch: Tree) -> jax.Array:
        h = jax.nn.relu(norm(batch["x"], params["first"]))
        for kernel in params["layers"]:
            h = layer(h, kernel)
        logits = h.mean((1, 2)) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return loss


def convnet_params(depth: int) -> Tree:
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    layers = [shape(3, 3, CHANNELS, CHANNELS) for _ in range(depth)]
    return {"first": shape(3, 3, 3, CHANNELS), "layers": layers, "out": shape(CHANNELS, 10)}


def norms(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields the temporary memory of a gradient, and the bytes that it moves, beside those of the whole batch."""
    images = jax.ShapeDtypeStruct((256, 64, 64, 3), jnp.float32), jax.ShapeDtypeStruct((256,), jnp.int32)
    batch = dict(zip("xy", images, strict=True))
    cut = functools.partial(optax_accum.value_and_grad, convnet(), microbatch_size=16)
    ways = {
        "whole batch": jax.value_and_grad(convnet()),
        "whole batch, a checkpoint a layer": jax.value_and_grad(convnet(jax.checkpoint)),
        **{f"value_and_grad, recompute={share}": cut(recompute=share) for share in (0.0, 0.6)},
    }
    for depth in (8, 24):
        programs = {name: compiled(on, way, convnet_params(depth), batch, donate=()) for name, way in ways.items()}
        found = {
            name: (of.memory_analysis().temp_size_in_bytes, count_traffic(of).most) for name, of in programs.items()
        }
        whole = found["whole batch"]
        for name, (temporary, moved) in found.items():
            facts = {"temporary / whole": temporary / whole[0], "moved / whole": moved / whole[1]}
            yield f"{depth} layers, {name}", facts
