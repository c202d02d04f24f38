"""Resuming a run: after a crash, on another number of devices, with all processes in agreement."""

import hashlib
from typing import Any

import jax
import numpy as np
import optax

from optax_accum._core import compilers
from optax_accum._core.state import holds_partial_sums, map_states, states_in
from optax_accum._core.types import Tree
from optax_accum._shared.checks import as_count, as_positive
from optax_accum.sharding._shardings import state_sharding

_PARTIAL = ("acc_grads", "weight", "mean_args", "samples")  # the fields that are partial sums of several devices


def redistribute(state: Tree, num_devices: int | None) -> Tree:
    """Redistributes a state's partial sums to another number of devices.

    With it, a run continues on other devices. A window in flight keeps its
    sum and its weight: partial sum i is added to number
    `i mod num_devices`.

    Args:
      state: an optimizer state with an `AccumulationState`, made with or
        without `devices`; of arrays that this process can read whole,
        such as the NumPy arrays of a checkpoint.
      num_devices: the devices along the axes, or None to go on without
        `devices`.

    Returns:
      The state, its partial sums as NumPy arrays; place it with
      `jax.device_put(state, state_sharding(tx, params))`.

    Raises:
      ValueError: `state` holds no `AccumulationState`, or `num_devices` is
        below 1; a TypeError if it is no integer.

    Guarantees:
      * The same number of devices: the same state, bit for bit.
      * Another number: the same sums, to rounding.
      * A state without `devices`: its sum is the first partial sum.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
      >>> _, state = tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
      >>> moved = optax_accum.checkpoint.redistribute(state, 2)
      >>> moved.acc_grads.shape, moved.weight.tolist()
      ((2, 3), [1.0, 0.0])
    """
    as_positive("num_devices", num_devices)
    if not states_in(state):
        raise ValueError(f"redistribute needs a state that holds an AccumulationState: state={type(state).__name__}.")

    def convert(node: Any) -> Any:
        old = node.weight.shape[0] if holds_partial_sums(node) else None
        move = lambda leaf: _moved(leaf, old, num_devices)
        return node._replace(**{name: jax.tree.map(move, getattr(node, name)) for name in _PARTIAL})

    return map_states(convert, state)


def checkpoint_target(tx: optax.GradientTransformation, params: Tree, num_devices: int, **options: Any) -> Tree:
    """Returns the target to restore a state saved on `num_devices` devices.

    Args:
      tx: an optimizer, alone or in a chain.
      params: the parameters, or their shapes, placed on the current mesh.
      num_devices: the devices along the axes when the state was saved.
        Save the number beside the state.
      **options: those of `state_sharding`.

    Returns:
      A tree like the state, for `orbax.checkpoint`: shapes with the
      current shardings. If the number of devices has changed, the partial
      sums are NumPy arrays: pass what was restored to `redistribute`, then
      to `jax.device_put` with `state_sharding`.

    Raises:
      ValueError: as `state_sharding`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_accum
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",),
      ...     axis_types=(jax.sharding.AxisType.Auto,))
      >>> params = jax.device_put(jnp.ones(3), NamedSharding(mesh, P()))
      >>> tx = optax_accum.accumulate_gradients(
      ...     optax.adam(1e-3), every=4, devices="data")
      >>> before = 2 * jax.device_count()
      >>> target = optax_accum.checkpoint.checkpoint_target(
      ...     tx, params, num_devices=before)
      >>> target.acc_grads.shape == (before, 3)
      True
    """
    as_count("num_devices", num_devices)
    where = state_sharding(tx, params, **options)
    mesh = jax.tree.leaves(where)[0].mesh
    with compilers.tracing_on(mesh):
        shapes = jax.eval_shape(tx.init, params)
    if all(node.weight.shape in ((), (num_devices,)) for node in states_in(shapes)):
        return jax.tree.map(_shape, shapes, where)

    def target(node: Any, where: Any) -> Any:
        # Zeros that take no memory: Orbax reads their shape, their dtype, and that they are NumPy arrays.
        saved = lambda leaf: np.broadcast_to(np.zeros([], leaf.dtype), (num_devices, *leaf.shape[1:]))
        fields = {name: jax.tree.map(saved, getattr(node, name)) for name in _PARTIAL}
        return jax.tree.map(_shape, node, where)._replace(**fields)

    return map_states(target, shapes, where, others=_shape)


def _shape(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def check_processes(**facts: Any) -> None:
    """Raises if the processes of a run were given different arguments.

    A run whose processes differ hangs, or gives wrong results. Call this in
    every process before the first step; it communicates once.

    Args:
      **facts: what must be the same, by name, of values that print:
        `every=4`, `batch=jax.tree.map(jnp.shape, batch)`.

    Raises:
      ValueError: in every process, with the name and the value of the first
        fact that differs.

    Guarantees:
      * One process: nothing is done.
      * A process that never calls it: the others wait as long as the
        collectives of JAX do.
      * Facts that take more than 4000 bytes together: all are compared, and
        the first 4000 are shown.

    Example:
      >>> import optax_accum
      >>> optax_accum.checkpoint.check_processes(every=4, rows=64)
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils  # loads much that a single process does not need

    text = repr({name: str(value) for name, value in sorted(facts.items())}).encode()
    digest = hashlib.sha256(text).digest()
    mine = np.frombuffer(digest + text[:4000].ljust(4000), np.uint8)
    rows = [bytes(row) for row in multihost_utils.process_allgather(mine)]
    shown = [row[len(digest) :].decode(errors="replace").rstrip() for row in rows]
    for number, row in enumerate(rows):
        if row != rows[0]:
            raise ValueError(
                f"The processes of a run must agree: process 0 has {shown[0]}, process {number} has {shown[number]}. "
                "Start all of them with the same settings."
            )


def _moved(leaf: Any, old: int | None, new: int | None) -> Any:
    """Adds partial sums [old, ...], or one sum [...] for None, into partial sums [new, ...] of the same sum."""
    if old == new:
        return leaf
    sums = np.asarray(leaf) if old is not None else np.asarray(leaf)[None]
    count = new or 1
    padded = np.concatenate([sums, np.zeros((-len(sums) % count, *sums.shape[1:]), sums.dtype)])
    moved = padded.reshape(-1, count, *sums.shape[1:]).sum(axis=0, dtype=sums.dtype)
    return moved if new is not None else moved[0]
