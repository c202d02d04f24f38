"""A window over sharded parameters (FSDP), by way and k: what a device gathers, adds up, moves, and its memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from benchmarks._measure import Tree
from optax_accum.accelerators import Target

SCAN, ONCE, LAYER = "a scan, by hand", "gathered once, for the window", "by layer"
HOST = "by layer, boundaries on the host"
SPECS = {"up": P("data"), "down": P(None, "data")}  # of one layer


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


def cost(on: Target, way: str, k: int, sizes: Sizes) -> Cost:
    """Compiles the gradient of a window, and reads what it costs."""
    program = compiled(on, on.mesh(), SPECS, P("data"), WAYS[way](k), sizes)
    found = optax_accum.sharding.count_collectives(program).select(min_bytes=1024)
    gathered, reduced = found.select("all-gather").bytes, found.select(("all-reduce", "reduce-scatter")).bytes
    others = found.bytes - gathered - reduced
    numbers = gathered, reduced, others, found.hidden, program.memory_analysis().temp_size_in_bytes
    return Cost(*(number / sizes.copy for number in numbers))


def compiled(on: Target, mesh: Any, specs: Tree, rows: P, gradient: Callable[..., Any], sizes: Sizes) -> Any:
    """Compiles the gradient of a window, of parameters whose layers are sharded so, and of so sharded rows."""
    shape = lambda spec, *dims: jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, spec))
    dims = {"up": (sizes.width, sizes.hidden), "down": (sizes.hidden, sizes.width)}
    params = {name: shape(P(None, *spec), sizes.layers, *dims[name]) for name, spec in specs.items()}
    batch = shape(rows, len(on.devices) * sizes.rows, sizes.length, sizes.width)
    with jax.set_mesh(mesh):
        jitted = jax.jit(gradient, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, params))
        return on.compile(jitted.lower(params, batch))


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
