"""Owns what a function that a space runs sees of it: a device with examples, keys and sums of its own."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic
from optax_accum._core.arithmetic import Tree, Weight
from optax_accum._core.roles import Call, Name
from optax_accum._space import mapped
from optax_accum._space.meshes import Axes


def device(axes: Axes) -> "Device":
    """Returns the device of this trace, inside what `Space.run` runs."""
    return Among(axes) if axes else Device()


class Device:
    """What a function that a space runs sees of it: on one device nothing."""

    @property
    def count(self) -> int:
        """The number of devices."""
        return 1

    def own(self, call: Call) -> Call:
        """Returns the call on this device: parameters whose gradients are not reduced, and a key of its own."""
        return call

    def own_key(self, call: Call) -> Call:
        """Returns the call with a key of this device's own."""
        return call

    def own_keys(self, keys: Tree) -> Tree:
        """Returns keys of this device's own, from those that all have."""
        return keys

    def own_sums(self, sums: Tree) -> Tree:
        """Returns this device's row [...] of partial sums [1, ...]."""
        return sums

    def vary(self, tree: Tree) -> Tree:
        """Returns `tree` as values that may differ between devices."""
        return tree

    def gathers(self, name: Name, arg: Tree) -> Tree:
        """Returns, for each leaf of an argument, the function that makes it whole, of what this device has of it."""
        return jax.tree.map(lambda _: self.vary, arg)

    def whole(self, value: Any) -> Any:
        """Adds a value over the devices that share one batch."""
        return value

    def couples(self, program: Callable[[], Any]) -> bool:
        """Returns whether a traced program takes something from other devices, whose losses then share a gradient."""
        return False

    def even(self, weight: Weight) -> tuple[Weight, Weight]:
        """Returns a weight that all devices have in common, and the factor of this device's loss that goes with it."""
        return weight, 1.0

    def check_loss(self, loss: jax.Array) -> None:
        """Raises where a loss has been averaged over the devices already: its gradient would be divided twice."""

    def check_carry(self, carry: Tree) -> None:
        """Raises for a carry that differs between devices."""


class Among(Device):
    """One of several devices, seen from inside.

    `one_batch` says that their examples are those of one batch, `shards` how arguments are sharded of which each has
    a shard.
    """

    def __init__(self, axes: Axes, *, one_batch: bool = True, shards: Mapping[Name, Tree] = MappingProxyType({})):
        self.axes, self.one_batch, self.shards = axes, one_batch, shards

    @property
    def count(self) -> int:
        return jax.lax.psum(1, self.axes)

    def own(self, call: Call) -> Call:
        params: dict[Name, Any] = {name: self.vary(call.arguments[name]) for name in call.params}
        return self.own_key(call.with_arguments(params))

    def own_key(self, call: Call) -> Call:
        return call.own_key(self._index())

    def own_keys(self, keys: Tree) -> Tree:
        own = lambda key: jax.vmap(jax.random.fold_in, (0, None))(key.reshape(-1), self._index()).reshape(key.shape)
        return jax.tree.map(own, keys)

    def own_sums(self, sums: Tree) -> Tree:
        return jax.tree.map(lambda leaf: leaf[0], sums)

    def vary(self, tree: Tree) -> Tree:
        return mapped.varying(tree, self.axes)

    def gathers(self, name: Name, arg: Tree) -> Tree:
        if name not in self.shards:
            return super().gathers(name, arg)
        whole = lambda _, to: functools.partial(mapped.whole, to=to, axes=self.axes)
        return jax.tree.map(whole, arg, self.shards[name])

    def whole(self, value: Any) -> Any:
        return jax.lax.psum(value, self.axes) if self.one_batch else value

    def couples(self, program: Callable[[], Any]) -> bool:
        return mapped.communicates(program(), self.axes)

    def even(self, weight: Weight) -> tuple[Weight, Weight]:
        if not isinstance(weight, jax.Array):
            return weight, 1.0  # the rows, of which all have as many
        mean = jax.lax.pmean(weight, self.axes)
        return self.vary(mean), jnp.where(mean == 0, 0, weight * arithmetic.reciprocal(mean))

    def check_loss(self, loss: jax.Array) -> None:
        if mapped.differs(self._index(), self.axes) and not mapped.differs(loss, self.axes):
            raise ValueError(
                f"With reduce_axes, the loss must be that of each device's own rows: here it is the same on all "
                f"devices of {self.axes}. Leave jax.lax.pmean out of it."
            )

    def check_carry(self, carry: Tree) -> None:
        if any(mapped.differs(leaf, self.axes) for leaf in jax.tree.leaves(carry)):
            raise ValueError(
                f"With reduce_axes, the carry must be the same on all devices: it differs over {self.axes}. Return "
                f"jax.lax.pmean(carry, {self.axes}) from fun; that communicates at every micro-batch."
            )

    def _index(self) -> jax.Array:
        return jax.lax.axis_index(self.axes)
