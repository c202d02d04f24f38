"""The cost of a window over sharded parameters (FSDP): bytes through the network, and memory, by way and k.

Run `python -m benchmarks.fsdp` for eight virtual CPU devices, `--target h100 --devices 8` for an accelerator that need
not be here. Nothing is run: programs are compiled from shapes, and read.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from benchmarks import _measure
from benchmarks._measure import Tree
from optax_accum.accelerators import Target, target

SCAN, ONCE, LAYER = "a scan, by hand", "gathered once, for the window", "by layer"
HOST = "by layer, boundaries on the host"
SPECS = {"up": P("data"), "down": P(None, "data")}  # of one layer

NOTES = """\
A window is one batch of {rows} rows on each of {devices} devices, cut into k micro-batches, for {layers} layers of
{millions:.0f} million float32 parameters in all, P. Bytes are those that a device gathers (all-gathers), adds up
(reduce-scatters and all-reduces) or moves in other ways, in copies of P; trip counts included. Hidden are those that
move while a product runs. Temporary memory is that of a device, in copies of P, which itself lies sharded.
Compiled, not run."""


class Sizes(NamedTuple):
    """The model and the batch."""

    layers: int = 16
    width: int = 2048
    hidden: int = 8192
    rows: int = 32  # of one device
    length: int = 256  # of a row

    @property
    def copy(self) -> int:
        """Bytes of the parameters, P."""
        return 8 * self.layers * self.width * self.hidden


class Cost(NamedTuple):
    """What one device moves in a window, and its temporary memory, in copies of the parameters."""

    gathered: float
    reduced: float
    others: float
    hidden: float  # of all three, what moves while a product runs
    temporary: float


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.fsdp", description=__doc__)
    parser.add_argument("--target", help='an accelerator, such as "h100" or "v5e:2x4"; by default the devices here')
    parser.add_argument("--devices", type=int, default=8, help="how many of them")
    parser.add_argument("--every", nargs="+", type=int, default=[2, 32], help="micro-batches of a window")
    options = parser.parse_args()
    on = target(options.target, num_devices=options.devices)
    if options.target:
        print(table(on, tuple(WAYS), options.every, Sizes()))
    else:  # a CPU has one memory
        print(table(on, (SCAN, ONCE, LAYER), options.every, Sizes(layers=4, width=128, hidden=512, length=16)))


def table(on: Target, ways: Sequence[str], every: Sequence[int], sizes: Sizes) -> str:
    """Returns the costs of each way and k as Markdown."""
    head = ("way", "micro-batches", "gathered / P", "reduced / P", "others / P", "hidden / P", "temporary / P")
    rows = [(way, str(k), *(f"{number:.2f}" for number in cost(on, way, k, sizes))) for way in ways for k in every]
    notes = NOTES.format(rows=sizes.rows, devices=len(on.devices), layers=sizes.layers, millions=sizes.copy / 4e6)
    title = f"FSDP windows, compiled for {len(on.devices)} x {on.devices[0].device_kind}"
    return f"{_measure.header(title, notes)}\n{_measure.markdown([head, *rows])}"


def cost(on: Target, way: str, k: int, sizes: Sizes) -> Cost:
    """Compiles the gradient of a window, and reads what it costs."""
    mesh = on.mesh()
    shape = lambda spec, *dims: jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, spec))
    params = {
        "up": shape(P(None, *SPECS["up"]), sizes.layers, sizes.width, sizes.hidden),
        "down": shape(P(None, *SPECS["down"]), sizes.layers, sizes.hidden, sizes.width),
    }
    batch = shape(P("data"), len(on.devices) * sizes.rows, sizes.length, sizes.width)
    with jax.set_mesh(mesh):
        jitted = jax.jit(WAYS[way](k), out_shardings=jax.tree.map(lambda leaf: leaf.sharding, params))
        compiled = on.compile(jitted.lower(params, batch))
    found = optax_accum.sharding.count_collectives(compiled).select(min_bytes=1024)
    gathered, reduced = found.select("all-gather").bytes, found.select(("all-reduce", "reduce-scatter")).bytes
    others = found.bytes - gathered - reduced
    numbers = gathered, reduced, others, found.hidden, compiled.memory_analysis().temp_size_in_bytes
    return Cost(*(number / sizes.copy for number in numbers))


# The ways, each `way(k)(params, batch) -> gradient`.


def scan(k: int) -> Callable[[Tree, Any], Tree]:
    """Every micro-batch gathers the parameters layer by layer, twice, and scatters its gradient."""

    def gradient(params: Tree, batch: Any) -> Tree:
        micro_batches = batch.reshape(-1, k, *batch.shape[1:]).swapaxes(0, 1)
        add = lambda acc, rows: (
            jax.tree.map(jnp.add, acc, jax.grad(loss_of)(params, rows, jax.checkpoint(block_of))),
            None,
        )
        acc, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), micro_batches)
        return jax.tree.map(lambda leaf: leaf / k, acc)

    return gradient


def _once(k: int) -> Callable[[Tree, Any], Tree]:
    """All parameters are gathered before the window, and all gradients scattered after it."""
    loss = lambda params, batch: loss_of(params, batch, jax.checkpoint(block_of))
    to = {name: P(None, *spec) for name, spec in SPECS.items()}
    f = optax_accum.value_and_grad(loss, num_microbatches=k, devices=optax_accum.Devices("data", to=to))
    return lambda params, batch: f(params, batch)[1]


def _by_layer(k: int) -> Callable[[Tree, Any], Tree]:
    """Each layer is gathered twice for all its micro-batches, and its gradient scattered once."""
    block = optax_accum.microbatched(block_of, k, devices=optax_accum.Devices("data", to=SPECS))
    return jax.grad(lambda params, batch: loss_of(params, batch, block))


def _on_host(k: int) -> Callable[[Tree, Any], Tree]:
    """As by layer, with the activations between layers in the host's memory until the backward pass."""
    block = optax_accum.microbatched(block_of, k, devices=optax_accum.Devices("data", to=SPECS))
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["boundary"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    named = lambda layer, h: block(layer, checkpoint_name(h, "boundary"))
    return jax.grad(lambda params, batch: loss_of(params, batch, jax.checkpoint(named, policy=policy)))


WAYS: dict[str, Callable[[int], Callable[[Tree, Any], Tree]]] = {
    SCAN: scan,
    ONCE: _once,
    LAYER: _by_layer,
    HOST: _on_host,
}


def block_of(layer: Tree, h: jax.Array) -> jax.Array:
    return h + jnp.tanh(h @ layer["up"]) @ layer["down"]


def loss_of(params: Tree, batch: jax.Array, block: Callable[[Tree, jax.Array], jax.Array]) -> jax.Array:
    h, _ = jax.lax.scan(lambda h, layer: (block(layer, h), None), batch, params)
    return jnp.mean(h**2)


if __name__ == "__main__":
    _measure.command(main)
