"""A space: where partial sums live, and how they are added. This one has a single device.

A *partial sum* is one device's part of a sum: a row of an array [d, ...] over a mesh (`here`), or an array of its own
in a `jax.shard_map` (`several`).
"""

from collections.abc import Callable
from typing import Any

import jax

from optax_accum._arguments import checks
from optax_accum._arguments.roles import Call
from optax_accum._core import arithmetic, dtypes
from optax_accum._core.types import Flag, Name, Tree, Weight
from optax_accum._space.device import Device
from optax_accum._space.ending import Reduced

Local = Callable[..., tuple[Tree, Tree]]


class Space:
    """Where partial sums live. On one device nothing is partial: it returns its arguments."""

    communicates = False
    device = Device()

    # The doors: empty sums, and gradients and weights as they are added.

    def zeros(self, params: Tree, dtype: Any) -> Tree:
        """An empty accumulator."""
        return arithmetic.zeros(params, dtype)

    def scalar(self, params: Tree) -> jax.Array:
        """An empty sum of weights."""
        return self.sums(jax.ShapeDtypeStruct((), dtypes.default_float()), params)

    def sums(self, shapes: Tree, params: Tree) -> Tree:
        """Empty sums of these shapes."""
        return arithmetic.zeros_of(shapes)

    def grads(self, grads: Tree, acc: Tree, params: Tree) -> Tree:
        """The gradients of a micro-batch as they are added to `acc`, or, if it is (), as they are the sum."""
        return grads

    def weight(self, weight: Any, like: jax.Array, *, spread: bool) -> Weight:
        """The weight of a micro-batch as it is added to `like`; if it is to be spread, each device's part."""
        weight = checks.as_weight(weight)
        return weight.astype(like.dtype) if isinstance(weight, jax.Array) else weight

    # The sums of gradients.

    def reduced(self, acc: Tree | Reduced) -> tuple[Tree, dict[str, Tree]]:
        """`(total, left)`: the sum over devices, placed as `Devices(to=)` asks.

        A window's one reduction. `left` is {"acc_grads": buffer} if the sum was written into the accumulator's memory,
        else {}.
        """
        return (self._joined(acc.sums), {}) if isinstance(acc, Reduced) else self._reduced(acc)

    def held(self, acc: Tree | Reduced) -> dict[str, Tree]:
        """`acc_grads` unchanged, for a window that holds; empty if a sum over devices leaves nothing."""
        return {} if isinstance(acc, Reduced) or not self._is_in_place(acc) else {"acc_grads": acc}

    def _reduced(self, acc: Tree) -> tuple[Tree, dict[str, Tree]]:
        return acc, {"acc_grads": acc}

    def _joined(self, local: Tree) -> Tree:
        return local

    def _is_in_place(self, acc: Tree) -> bool:
        """Whether the sum over all devices is written over the partial sums."""
        return True

    def like(self, grads: Tree) -> Tree:
        """Leaves of the shapes and dtypes of the gradient of the whole batch."""
        return grads

    # The sums of scalars and outputs, and the flag that all devices must know.

    def total(self, sums: Tree) -> Tree:
        """Sums over all devices."""
        return sums

    def output(self, over: str, leaf: Any) -> Any:
        """Combines the devices' parts of an output for all devices: by "sum", "max", "min" or "concat"."""
        return leaf

    def outputs(self, over: Tree, leaves: Tree) -> Tree:
        """Combines outputs, each as its name says; sums go where `Devices(to=)` asks."""
        return jax.tree.map(self.output, over, leaves)

    def nonfinite(self, tree: Tree, counts: Flag) -> jax.Array:
        """Whether any device whose values count holds a NaN or an infinity in them."""
        return ~arithmetic.all_finite(tree) & counts

    # The work: a function on each device's own examples, and its results as users see them.

    def run(self, fun: Local, call: Call, *sums: Any, sharded: Name | None = None) -> tuple[Tree, Tree]:
        """Runs `fun(device, call, *sums) -> (local, same)` on each device, with its rows of the batch and of the sums.

        Of argument `sharded`, if there is one, each device has its own shard.
        """
        local, same = fun(self._device(call, sharded), call, *self.as_local(sums))
        return self.as_partial(local), same

    def _device(self, call: Call, sharded: Name | None = None) -> Device:
        return self.device

    def as_local(self, sums: Tree) -> Tree:
        """Each device's sums as the user gets them: [d, ...], or inside `jax.shard_map` this device's [...]."""
        return sums

    def as_partial(self, local: Tree) -> Tree:
        """Undoes `as_local`."""
        return local

    # The parameters: they are sharded where sums are.

    def shard(self, params: Tree) -> Tree:
        """The parameters, sharded as the update will be."""
        return params

    def gather(self, updates: Tree, params: Tree) -> Tree:
        """Reshards `updates` from the sharding of the update to the parameters' sharding."""
        return updates

    def check_params(self, params: Tree) -> None:
        """Raises if parameters would be gathered unasked."""

    def check_shared(self, params: Tree, results: Tree | None = None) -> None:
        """Raises if devices have parameters of their own, whose gradients would be added: if these are `results`."""

    def check_state(self, weight: jax.Array, *trees: Tree) -> None:
        """Raises for a state of other devices, by its weight."""
