"""How rows go into micro-batches: by units, the smallest blocks of rows that no axis of rows divides.

Unit u is in micro-batch u mod k, so the rows of a sharded batch do not move. Where k does not divide the units, the
last micro-batches are filled up with copies of the first units, which count for nothing. Of several devices each deals
out its own units.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import compilers


@dataclasses.dataclass(frozen=True)
class Units:
    """The `count` units of a device, dealt out to `microbatches` micro-batches of `size` units each."""

    count: int
    microbatches: int
    block: int = 1  # the rows of a unit
    devices: int = 1
    device: Any = 0  # the index of this one

    @property
    def size(self) -> int:
        return -(-self.count // self.microbatches)

    @property
    def fills(self) -> bool:
        """Whether some micro-batches are filled up with copies."""
        return self.size * self.microbatches != self.count

    def interleaved(self, leaf: jax.Array, axis: int) -> jax.Array:
        """All rows, with the micro-batch's index as the second axis: [size, microbatches, block, ...]."""
        rows = self.filled(self.first(leaf, axis))
        return compilers.reshaped(rows, self.size, self.microbatches, *rows.shape[1:])

    def first(self, leaf: jax.Array, axis: int) -> jax.Array:
        """All rows, with their units first: [count, block, ...]."""
        rows = jnp.moveaxis(leaf, axis, 0)
        return compilers.reshaped(rows, self.count, rows.shape[0] // self.count, *rows.shape[1:])

    def filled(self, rows: jax.Array) -> jax.Array:
        """Appends copies of the first units [count, ...], which fill up the last micro-batches."""
        return jnp.concatenate([rows, rows[: self.size * self.microbatches - self.count]]) if self.fills else rows

    def along(self, rows: jax.Array, axis: int) -> jax.Array:
        """The inverse of `first`, for some units."""
        return jnp.moveaxis(_joined(rows, 0), 0, axis)

    def micro_batch(self, interleaved: jax.Array, axis: int, index: Any) -> jax.Array:
        """The rows of one micro-batch, back along their axis."""
        rows = jax.lax.dynamic_index_in_dim(interleaved, index, axis=1, keepdims=False)
        return self.along(compilers.on_device(rows), axis)

    def split(self, leaf: jax.Array, axis: int) -> jax.Array:
        """All rows as micro-batches [k, ...], each with its rows along `axis`."""
        rows = jnp.moveaxis(self.interleaved(leaf, axis), 1, 0)
        return jnp.moveaxis(_joined(rows, 1), 1, axis + 1)

    def joined(self, parts: jax.Array, axis: int) -> jax.Array:
        """The inverse of `split`."""
        rows = jnp.moveaxis(parts, axis + 1, 1)
        rows = compilers.reshaped(rows, self.microbatches, self.size, rows.shape[1] // self.size, *rows.shape[2:])
        return self.along(_joined(jnp.moveaxis(rows, 0, 1), 0)[: self.count], axis)

    def share(self, indices: jax.Array, leaf: Any) -> Any:
        """The share that a micro-batch of these units has of a term of all rows of all devices."""
        return leaf * (jnp.sum(indices < self.count) / (self.count * self.devices)).astype(jnp.result_type(leaf))

    def indices(self, microbatch: Any) -> jax.Array:
        """The indices of one micro-batch's units; units from `count` on count for nothing."""
        return microbatch + self.microbatches * jnp.arange(self.size)

    def places(self, units: jax.Array, length: int) -> jax.Array:
        """The index of each row of these units along an axis of `length` entries, over all devices."""
        block = length // (self.devices * self.count)
        first = self.device * self.count
        return ((first + units % self.count)[:, None] * block + jnp.arange(block)[None]).reshape(-1)


def _joined(leaf: jax.Array, axis: int) -> jax.Array:
    """Merges an axis with the next."""
    first, second = leaf.shape[axis : axis + 2]
    return compilers.reshaped(leaf, *leaf.shape[:axis], first * second, *leaf.shape[axis + 2 :])
