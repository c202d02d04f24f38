"""Sums over devices that cross the network in a narrow dtype: rounded once by each device, added in a wide one."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core.types import Axes
from optax_accum._space import mapped


def add_up(leaf: jax.Array, axes: Axes, dtype: Any = None) -> jax.Array:
    """Returns the sum of a leaf over devices, for all of them, inside `jax.shard_map`.

    With a dtype each device rounds its own to it and sends each other one its part, adds the parts that it gets in the
    dtype of the leaf, and sends that sum, rounded, to all. A leaf of which no dimension can be dealt out is added as it
    is.
    """

    def wide(leaf: Any) -> Any:
        return add_wide(leaf, axes)

    dim = dealt(leaf.shape, axes)
    if dim is None or not _is_wider(leaf, dtype):
        return wide(leaf)

    def add(leaf: jax.Array) -> jax.Array:
        part = _scattered(leaf, axes, dim, dtype)
        return _read(jax.lax.all_gather(_sent(part, dtype), axes, axis=dim, tiled=True), leaf.dtype, dtype)

    return _derived_as(wide, add, axes)(leaf)


def add_wide(leaf: jax.Array, axes: Axes) -> jax.Array:
    """Returns the sum of a leaf over devices: of complex numbers in two parts, for constant ones end XLA on a CPU."""
    if jnp.iscomplexobj(leaf):
        return jax.lax.complex(jax.lax.psum(leaf.real, axes), jax.lax.psum(leaf.imag, axes))
    return jax.lax.psum(leaf, axes)


def dealt(shape: Sequence[int], axes: Axes) -> int | None:
    """Returns the first dimension that can be dealt out to the devices, inside `jax.shard_map`."""
    devices = jax.lax.psum(1, axes)
    return next((dim for dim, size in enumerate(shape) if size and size % devices == 0), None)


def scatter(leaf: jax.Array, axes: Axes, dim: int, dtype: Any = None) -> jax.Array:
    """Returns this device's part, along a dimension, of the sum of a leaf over devices."""
    wide = functools.partial(jax.lax.psum_scatter, axis_name=axes, scatter_dimension=dim, tiled=True)
    if not _is_wider(leaf, dtype):
        return wide(leaf)
    return _derived_as(wide, lambda leaf: _scattered(leaf, axes, dim, dtype), axes)(leaf)


def _scattered(leaf: jax.Array, axes: Axes, dim: int, dtype: Any) -> jax.Array:
    parts = jax.lax.all_to_all(_sent(leaf, dtype), axes, split_axis=dim, concat_axis=dim, tiled=True)
    parts = parts.reshape(*leaf.shape[:dim], jax.lax.psum(1, axes), -1, *leaf.shape[dim + 1 :])
    return jnp.sum(_read(parts, leaf.dtype, dtype), axis=dim)


def _derived_as(wide: Callable[[jax.Array], jax.Array], add: Callable[[jax.Array], jax.Array], axes: Axes) -> Any:
    """Returns a sum with the derivative of another: integers have none."""
    run = jax.custom_jvp(add)

    @run.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        total = run(*primals)
        return total, mapped.varying(wide(*tangents), tuple(axis for axis in axes if mapped.differs(total, (axis,))))

    return run


def check(dtype: Any, acc: Any) -> None:
    """Raises unless sums of this tree are wider than the dtype that they are to cross the network in."""
    for leaf in jax.tree.leaves(acc):
        added = dtype is not None and jnp.issubdtype(leaf.dtype, jnp.inexact)
        if added and jnp.finfo(leaf.dtype).bits < jnp.finfo(dtype).bits:
            raise ValueError(
                f"Devices(dtype=) must not be wider than the sums: dtype={jnp.dtype(dtype).name}, and sums are in "
                f"{leaf.dtype.name}. Leave it out."
            )


# As integers: a compiler may send a narrow float as a wide one, or move the rounding behind the network.


def _sent(leaf: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(leaf.astype(dtype), f"uint{jnp.finfo(dtype).bits}")


def _read(bits: jax.Array, wide: Any, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, dtype).astype(wide)


def _is_wider(leaf: jax.Array, dtype: Any) -> bool:
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return dtype is not None and floating and jnp.finfo(leaf.dtype).bits > jnp.finfo(dtype).bits
