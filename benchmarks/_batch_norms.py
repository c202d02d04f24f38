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
        return _cross_entropy(h.mean((1, 2)) @ params["out"], batch)

    return loss


def convnet_params(depth: int) -> Tree:
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    layers = [shape(3, 3, CHANNELS, CHANNELS) for _ in range(depth)]
    return {"first": shape(3, 3, 3, CHANNELS), "layers": layers, "out": shape(CHANNELS, 10)}


def _cross_entropy(logits: jax.Array, batch: Tree) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def resnet(params: Tree, batch: Tree) -> jax.Array:
    """The loss of a ResNet-50: bottlenecks of three convolutions, each with a BatchNorm."""

    def conv(x: jax.Array, layer: Tree, stride: int = 1) -> jax.Array:
        axes = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, layer["kernel"], (stride, stride), "SAME", dimension_numbers=axes)
        return normalised(x) * layer["scale"] + layer["bias"]

    x = jax.nn.relu(conv(batch["x"], params["first"], 2))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for stage, blocks in enumerate(params["stages"]):
        for number, block in enumerate(blocks):
            stride = 2 if stage and not number else 1
            h = jax.nn.relu(conv(x, block["down"]))
            h = jax.nn.relu(conv(h, block["middle"], stride))
            h = conv(h, block["up"])
            x = jax.nn.relu(h + (conv(x, block["beside"], stride) if "beside" in block else x))
    return _cross_entropy(x.mean((1, 2)) @ params["out"], batch)


def resnet_params(stages: tuple[int, ...] = (3, 4, 6, 3)) -> Tree:
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)

    def layer(size: int, taken: int, made: int) -> Tree:
        return {"kernel": shape(size, size, taken, made), "scale": shape(made), "bias": shape(made)}

    found, taken = [], 64
    for stage, count in enumerate(stages):
        width, blocks = 64 * 2**stage, []
        for number in range(count):
            block = {"down": layer(1, taken, width), "middle": layer(3, width, width), "up": layer(1, width, 4 * width)}
            blocks.append(block if number else {**block, "beside": layer(1, taken, 4 * width)})
            taken = 4 * width
        found.append(blocks)
    return {"first": layer(7, 3, 64), "stages": found, "out": shape(taken, 1000)}


def norms(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields the temporary memory of a gradient, and the bytes that it moves, beside those of the whole batch."""
    checkpointed = {"whole batch, a checkpoint a layer": jax.value_and_grad(convnet(jax.checkpoint))}
    for depth in (8, 24):
        yield from _compared(on, f"{depth} layers", convnet(), convnet_params(depth), (256, 64), 16, checkpointed)
    yield from _compared(on, "ResNet-50", resnet, resnet_params(), (64, 128), 8, {})


def _compared(
    on: Target,
    model: str,
    loss: Callable[..., Any],
    params: Tree,
    images: tuple[int, int],
    size: int,
    others: dict[str, Callable[..., Any]],
) -> Iterator[tuple[str, Facts]]:
    """The facts for so many images of that side, in micro-batches of a size."""
    number, side = images
    x = jax.ShapeDtypeStruct((number, side, side, 3), jnp.float32)
    batch = {"x": x, "y": jax.ShapeDtypeStruct((number,), jnp.int32)}
    cut = functools.partial(optax_accum.value_and_grad, loss, microbatch_size=size)
    ours = {f"value_and_grad, recompute={share}": cut(recompute=share) for share in (0.0, 0.6)}
    whole = None
    for name, way in {"whole batch": jax.value_and_grad(loss), **others, **ours}.items():
        program = compiled(on, way, params, batch, donate=())
        found = program.memory_analysis().temp_size_in_bytes, count_traffic(program).most
        whole = whole or found
        yield f"{model}, {name}", {"temporary / whole": found[0] / whole[0], "moved / whole": found[1] / whole[1]}
