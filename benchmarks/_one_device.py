"""What a program for one device becomes: micro-steps by optimizer and by policy, cuts, offload."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_accum
from benchmarks._measure import Tree
from optax_accum.accelerators import Target, Traffic, count_traffic

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "AdamW": lambda: optax.adamw(1e-3),
    "SGD, momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "Lion": lambda: optax.lion(1e-3),
    "Adafactor": lambda: optax.adafactor(1e-3),
    "Muon": lambda: optax.contrib.muon(1e-3),
}
POLICIES = ("propagate", "skip", "omit", "discard")
WIDTH, LAYERS = 4096, 4  # 256 MiB of parameters: above the 128 MiB of a TPU's vector memory
Facts = dict[str, float]


def layers() -> Tree:
    """Returns the shapes of square matrices."""
    return {f"layer {i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(LAYERS)}


def size(params: Tree) -> int:
    """Returns the bytes of a tree of shapes."""
    return sum(leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(params))


def compiled(on: Target, step: Callable[..., Any], *args: Tree, donate: tuple[int, ...] = (0, 1)) -> Any:
    """Compiles a step for one device."""
    return on.compile(jax.jit(step, donate_argnums=donate).lower(*map(on.one().shapes, args)))


def traffic(on: Target, step: Callable[..., Any], tx: Any, params: Tree) -> Traffic:
    """Returns what a step `(params, state, grads) -> (params, state)` moves."""
    return count_traffic(compiled(on, step, params, jax.eval_shape(tx.init, params), params), min_copy=WIDTH * WIDTH)


def alone(inner: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns the step of an optimizer as Optax writes it."""

    def step(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def applied(tx: Any) -> Callable[..., Any]:
    """Returns the step of `apply_gradients`."""
    return lambda params, state, grads: optax_accum.apply_gradients(tx, grads, state, params)


def optimizers(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what a micro-step of `apply_gradients` moves, beside what the optimizer alone does."""
    params = layers()
    for name, make in OPTIMIZERS.items():
        inner = make()
        base = traffic(on, alone(inner), inner, params)
        yield (
            name,
            micro_step(on, optax_accum.accumulate_gradients(inner, 8), params)
            | {"alone, P": base.most / size(params), "alone temporary, P": (base.temporary or 0) / size(params)},
        )


def policies(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what a micro-step moves under each policy, with AdamW."""
    for policy in POLICIES:
        tx = optax_accum.accumulate_gradients(OPTIMIZERS["AdamW"](), 8, nonfinite=policy)
        yield policy, micro_step(on, tx, layers())


def micro_step(on: Target, tx: Any, params: Tree) -> Facts:
    found = traffic(on, applied(tx), tx, params)
    copy = size(params)
    return {
        "held, P": found.least / copy,
        "held copies": found.always.copies,
        "emitting adds, P": (found.most - found.least) / copy,
        "temporary, P": (found.temporary or 0) / copy,
        "window of 8, P": (7 * found.least + found.most) / copy,
    }


def backward(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what a micro-step of `value_and_apply_gradients` moves: 64 rows, forward, backward, AdamW."""
    ways = {"added inside the backward pass": optax_accum.value_and_apply_gradients, "added after it": _after}
    for name, build in ways.items():
        found, copy = _backward_step(on, _product, build)
        opening = sum(part.bytes for part in found.parts if any("iteration" in place for place in part.within))
        yield (
            name,
            {
                "held, P": found.least / copy,
                "opening adds, P": opening / copy,
                "emitting adds, P": (found.most - found.least - opening) / copy,
                "temporary, P": (found.temporary or 0) / copy,
            },
        )


def _after(loss: Callable[..., Any], tx: Any) -> Callable[..., Any]:
    """Returns a micro-step that has the gradient first."""

    def step(params: Tree, state: Tree, x: jax.Array) -> tuple[jax.Array, Tree, Tree]:
        value, grads = jax.value_and_grad(loss)(params, x)
        return value, *optax_accum.apply_gradients(tx, grads, state, params)

    return step


def weighed(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what such a micro-step moves where its weight is known when it runs, and may be 0."""
    count = lambda x: jnp.sum(x[:, 0] > 0)
    ratio = lambda params, x: optax_accum.Ratio(_product(params, x) * count(x), count(x))
    for name, loss, weight_fn in (("rows", _product, None), ("weight_fn", _product, count), ("Ratio", ratio, None)):
        found, copy = _backward_step(on, loss, weight_fn=weight_fn)
        yield (
            name,
            {
                "at least, P": found.least / copy,
                "at most, P": found.most / copy,
                "temporary, P": (found.temporary or 0) / copy,
            },
        )


def _product(params: Tree, x: jax.Array) -> jax.Array:
    return jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), params.values(), x) ** 2)


def _backward_step(
    on: Target,
    loss: Callable[..., Any],
    build: Callable[..., Any] = optax_accum.value_and_apply_gradients,
    **options: Any,
) -> tuple[Traffic, int]:
    """Returns the traffic of a micro-step in place, and a copy's bytes: 64 rows, a window of 8."""
    params, rows = layers(), jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    tx = optax_accum.accumulate_gradients(OPTIMIZERS["AdamW"](), 8)
    step = build(loss, tx, **options)
    in_order = lambda params, state, x: step(params, state, x)[1:]  # as they are donated
    return count_traffic(compiled(on, in_order, params, jax.eval_shape(tx.init, params), rows)), size(params)


def wrappers(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields the bytes of a window of 8 through `update` and `optax.apply_updates`, ours and Optax's, and by hand."""
    params, inner = layers(), OPTIMIZERS["AdamW"]()
    ours, peer = optax_accum.accumulate_gradients(inner, 8), optax.MultiSteps(inner, 8)
    for name, step, tx in (
        ("update", alone(ours), ours),
        ("MultiSteps", alone(peer), peer),  # type: ignore[arg-type]
        ("by hand, in lax.cond", *_by_hand(inner)),
    ):
        found = traffic(on, step, tx, params)
        window = (7 * found.least + found.most) / size(params)
        yield name, {"window of 8, P": window, "temporary, P": (found.temporary or 0) / size(params)}


def _by_hand(inner: optax.GradientTransformation) -> tuple[Callable[..., Any], Any]:
    """Returns the step of a window of 8 as one writes it first, and what makes its state."""

    def step(params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        count, acc, inner_state = state
        acc = jax.tree.map(lambda a, g: jnp.where(count == 0, 0, a) + g, acc, grads)
        emit = lambda: alone(inner)(params, inner_state, jax.tree.map(lambda a: a / 8, acc))
        params, inner_state = jax.lax.cond(count == 7, emit, lambda: (params, inner_state))
        return params, ((count + 1) % 8, acc, inner_state)

    def init(params: Tree) -> Tree:
        return jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params), inner.init(params)

    return step, optax.GradientTransformation(init, inner.update)


def offloaded(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what crosses to the host's memory and back where AdamW's two moments lie there."""
    params = layers()
    tx = optax_accum.accumulate_gradients(OPTIMIZERS["AdamW"](), 8)

    def step(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        # Devices that are not here have no memories to place an argument in, so the moments are sent there first.
        there = lambda leaf: jax.device_put(leaf, jax.memory.Space.Host) if leaf.ndim else leaf
        inner = jax.tree.map(there, state.inner_opt_state)
        return optax_accum.apply_gradients(tx, grads, state._replace(inner_opt_state=inner), params)

    found = count_traffic(compiled(on, step, params, jax.eval_shape(tx.init, params), params, donate=(0,)))
    held, emitting = sorted(part.host / size(params) for part in found.parts if part.within)
    yield "moments on the host", {"to and fro, emitting, P": emitting, "within the host, held, P": held}


def cuts(on: Target) -> Iterator[tuple[str, Facts]]:
    """Yields what it takes to cut a batch in 8: in copies of the batch, B, whose rows are as wide as the model."""
    batch, params = jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32), list(layers().values())[:1]
    loss = lambda params, x: jnp.mean(jnp.tanh(x @ params[0]) ** 2)
    program = compiled(on, optax_accum.value_and_grad(loss, num_microbatches=8), params, batch, donate=())
    found = count_traffic(program, min_copy=size(batch) // 8)
    yield (
        "row r in micro-batch r mod 8",
        {
            "moved, B": found.most / size(batch),
            "copies of a micro-batch": found.always.copies,
            "temporary, B": (found.temporary or 0) / size(batch),
        },
    )


def is_gpu(on: Target) -> bool:
    """Returns whether an accelerator is a GPU."""
    return on.devices[0].platform in ("gpu", "cuda")


def by_cublas(on: Target, lowered: Any) -> Any:
    """Compiles for an accelerator; a GPU multiplies by cuBLAS alone, whose text says beta.

    Which kernels are best a GPU finds by timing them.
    """
    if not is_gpu(on):
        return on.compile(lowered)
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False})


def sums_in_products(program: Any) -> int:
    """Returns how many products of cuBLAS add to what they write."""
    products = (line for line in program.as_text().splitlines() if '"__cublas$' in line)
    return sum('"beta":1' in line and "output_to_operand_aliasing" in line for line in products)
