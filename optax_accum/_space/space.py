"""Owns where partial sums live: on one device, over a mesh, or in a user's `jax.shard_map`. Asked once, by `here`.

A *partial sum* is what one device has of a sum. On several devices a tree of them has leaves [d, ...], one row for each
of the d devices along the axes, each row on its device; inside `jax.shard_map` [1, ...], this device's own.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, checks
from optax_accum._core.arithmetic import Tree, Weight
from optax_accum._core.roles import Call, Name
from optax_accum._core.state import default_float
from optax_accum._space import meshes, partials
from optax_accum._space.meshes import Axes

PARTIAL = "partial"  # as `reduce_to`: the sum goes nowhere
Local = Callable[..., tuple[Tree, Tree]]


def here(axes: Axes, to: Tree = None) -> "Space":
    """Returns the space of this trace: `to` says where a sum of gradients goes, everywhere unless it is given."""
    if not axes:
        return OneDevice()
    return Inside(axes, to) if meshes.is_manual(axes) else Partials(axes, to)


def check_options(axes: Axes, to: Tree, *, partial: bool) -> None:
    """Raises for a place of sums that nobody makes; `partial` says whether they may stay where they are."""
    if to is not None and not axes:
        raise ValueError(
            f"reduce_to says where the sum over reduce_axes goes: reduce_to={to!r}, reduce_axes=None. Name the axes, "
            "too, or leave it out."
        )
    if isinstance(to, str) and (to != PARTIAL or not partial):
        allowed = f' or "{PARTIAL}"' if partial else ""
        raise ValueError(f"reduce_to must be None, specs for the tree of the parameters{allowed}: reduce_to={to!r}.")


def device(axes: Axes) -> "Device":
    """Returns the device of this trace, inside what `Space.run` runs."""
    return Among(axes) if axes else Alone()


class Space(Protocol):
    """Where partial sums live. One device answers with what it was given."""

    communicates: bool

    # The doors: what is empty, and what is to be added, as it is added.
    def zeros(self, params: Tree, dtype: Any) -> Tree: ...
    def scalar(self, params: Tree) -> jax.Array: ...
    def grads(self, grads: Tree, acc: Tree) -> Tree: ...
    def weight(self, weight: Any, like: jax.Array, *, share: bool) -> Weight: ...

    # The sums: of scalars and outputs; of gradients, which go to their place; and what all must know.
    def total(self, sums: Tree) -> Tree: ...
    def reduced(self, acc: Tree) -> Tree: ...
    def output(self, reduction: str, leaf: Any) -> Any: ...
    def nonfinite(self, tree: Tree, weight: Weight) -> jax.Array: ...

    # The places: of the update, and back to those of the parameters.
    def shard(self, params: Tree) -> Tree: ...
    def gather(self, tree: Tree, params: Tree) -> Tree: ...

    # The work: a function on each device's own examples, and what came of it as users see it.
    def run(self, fun: Local, split: Sequence[int], args: Sequence[Any]) -> tuple[Tree, Tree]: ...
    def as_own(self, sums: Tree) -> Tree: ...
    def rows(self, own: Tree) -> Tree: ...
    def like(self, grads: Tree) -> Tree: ...
    def check_state(self, weight: jax.Array, *trees: Tree) -> None: ...
    def check_params(self, params: Tree) -> None: ...


class OneDevice:
    """Nothing is partial: the identity."""

    communicates = False

    def zeros(self, params: Tree, dtype: Any) -> Tree:
        return arithmetic.zeros(params, dtype)

    def scalar(self, params: Tree) -> jax.Array:
        return jnp.zeros([], default_float())

    def grads(self, grads: Tree, acc: Tree) -> Tree:
        return grads

    def weight(self, weight: Any, like: jax.Array, *, share: bool) -> Weight:
        return checks.as_weight(weight)

    def total(self, sums: Tree) -> Tree:
        return sums

    def reduced(self, acc: Tree) -> Tree:
        return acc

    def output(self, reduction: str, leaf: Any) -> Any:
        return leaf

    def nonfinite(self, tree: Tree, weight: Weight) -> jax.Array:
        """Returns whether something that counts holds a NaN or an infinity."""
        return ~arithmetic.all_finite((tree, weight)) & (weight != 0)

    def shard(self, params: Tree) -> Tree:
        return params

    def gather(self, tree: Tree, params: Tree) -> Tree:
        return tree

    def run(self, fun: Local, split: Sequence[int], args: Sequence[Any]) -> tuple[Tree, Tree]:
        return fun(Alone(), *args)

    def as_own(self, sums: Tree) -> Tree:
        return sums

    def rows(self, own: Tree) -> Tree:
        return own

    def like(self, grads: Tree) -> Tree:
        return grads

    def check_state(self, weight: jax.Array, *trees: Tree) -> None:
        pass

    def check_params(self, params: Tree) -> None:
        pass


class Partials:
    """Partial sums over a mesh: arrays [d, ...], which pass `jit`, branches and checkpoints like any others."""

    communicates = True

    def __init__(self, axes: Axes, to: Tree):
        self.axes, self.to = axes, to

    def zeros(self, params: Tree, dtype: Any) -> Tree:
        return partials.zero_rows(self._shapes(params, dtype), params, self.axes)

    def scalar(self, params: Tree) -> jax.Array:
        return partials.zero_scalars(params, self.axes)

    def grads(self, grads: Tree, acc: Tree) -> Tree:
        """Returns gradients that came as rows; raises where they have been reduced already."""
        partials.check_rows(grads, acc)
        return grads

    def weight(self, weight: Any, like: jax.Array, *, share: bool) -> Weight:
        """Returns a weight for each device: its own, or if `share` its part of that of them all."""
        weight = checks.as_weight(weight, like.shape[0])
        part = weight / like.shape[0] if share and not jnp.ndim(weight) else weight
        return partials.beside(jnp.broadcast_to(jnp.asarray(part, like.dtype), like.shape), like, self.axes)

    def total(self, sums: Tree) -> Tree:
        return self.as_own(sums) if self.to == PARTIAL else self._sum(sums)

    def reduced(self, acc: Tree) -> Tree:
        """Adds the rows [d, ...] of each leaf, the one reduction of a window: a reduce-scatter where `to` says so."""
        if self.to is None or self.to == PARTIAL:
            return self.total(acc)
        return jax.tree.map(
            lambda leaf, to: partials.scatter(leaf, to, self.axes), acc, meshes.shardings(self.to, acc, self.axes)
        )

    def output(self, reduction: str, leaf: Any) -> Any:
        """Returns an output of the whole batch, of those [d, ...] of each device's own examples."""
        if reduction not in ("mean", "sum", "max", "concat"):
            raise ValueError(
                f'With reduce_axes, each device has micro-batches of its own, and "{reduction}" of them is not one '
                'output. Take "mean", "sum", "max" or "concat".'
            )
        if reduction == "concat":
            return self._joined(leaf)
        if reduction == "max" and self.to != PARTIAL:
            return self._max(leaf)
        return self.total(leaf)

    def nonfinite(self, tree: Tree, weight: Weight) -> jax.Array:
        """Returns whether something that counts, on any device, holds a NaN or an infinity: one number from each."""
        rows = [leaf for leaf in jax.tree.leaves((tree, weight)) if not arithmetic.is_float0(leaf)]
        flags = ~jax.vmap(arithmetic.all_finite)(rows) & (weight != 0)
        return self._sum(flags.astype(jnp.int32)) > 0

    def shard(self, params: Tree) -> Tree:
        """Returns the parameters sharded as the update is to be, where that was asked for."""
        return params if self.to is None else meshes.place(params, meshes.shardings(self.to, params, self.axes))

    def gather(self, tree: Tree, params: Tree) -> Tree:
        """Undoes `shard`."""
        return tree if self.to is None else meshes.gather(tree, self.to, params, self.axes)

    def run(self, fun: Local, split: Sequence[int], args: Sequence[Any]) -> tuple[Tree, Tree]:
        """Runs `fun(device, *args)` on each device; see `partials.per_device`."""
        return partials.per_device(lambda *own: fun(self._device(), *own), self.axes, split, args)

    def as_own(self, sums: Tree) -> Tree:
        """Returns what each device has of its own as users see it: [d, ...], inside `jax.shard_map` its own [...]."""
        return sums

    def rows(self, own: Tree) -> Tree:
        """Undoes `as_own`."""
        return own

    def like(self, grads: Tree) -> Tree:
        """Returns zeros of the shapes and dtypes of the gradient of the whole batch."""
        return arithmetic.zeros_of(jax.eval_shape(lambda: self.reduced(grads)))

    def check_state(self, weight: jax.Array, *trees: Tree) -> None:
        """Raises for a state of other devices: `weight` is its."""
        partials.check_num_rows(weight, meshes.num_rows(meshes.mesh_of(self.axes, *trees), self.axes))

    def check_params(self, params: Tree) -> None:
        """Raises where parameters would be gathered unasked."""
        if self.to is None or self.to == PARTIAL:
            partials.check_replicated(params, self.axes)

    def _shapes(self, params: Tree, dtype: Any) -> Tree:
        return jax.eval_shape(lambda: arithmetic.zeros(params, dtype))

    def _device(self) -> "Among":
        return Among(self.axes, one_batch=self.to != PARTIAL)

    def _sum(self, rows: Tree) -> Tree:
        return jax.tree.map(partials.sum_rows, rows)

    def _max(self, rows: jax.Array) -> jax.Array:
        return jnp.max(rows, axis=0)

    def _joined(self, rows: jax.Array) -> jax.Array:
        return rows.reshape(-1, *rows.shape[2:])


class Inside(Partials):
    """Partial sums in a user's `jax.shard_map` over the axes: leaves [1, ...], this device's own."""

    def zeros(self, params: Tree, dtype: Any) -> Tree:
        zeros = lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype)
        return partials.varying(jax.tree.map(zeros, self._shapes(params, dtype)), self.axes)

    def scalar(self, params: Tree) -> jax.Array:
        return partials.varying(jnp.zeros([1], default_float()), self.axes)

    def grads(self, grads: Tree, acc: Tree) -> Tree:
        partials.check_own(grads, self.axes)
        return self.rows(grads)

    def weight(self, weight: Any, like: jax.Array, *, share: bool) -> Weight:
        weight = checks.as_weight(weight, like.shape[0])
        own = jnp.ndim(weight) or (isinstance(weight, jax.Array) and partials.differs(weight, self.axes))
        part = weight / jax.lax.psum(1, self.axes) if share and not own else weight
        return jnp.broadcast_to(jnp.asarray(part, like.dtype), like.shape)

    def reduced(self, acc: Tree) -> Tree:
        return self.total(acc)

    def shard(self, params: Tree) -> Tree:
        return params

    def gather(self, tree: Tree, params: Tree) -> Tree:
        return tree

    def run(self, fun: Local, split: Sequence[int], args: Sequence[Any]) -> tuple[Tree, Tree]:
        own, same = fun(self._device(), *args)
        return self.rows(own), same

    def as_own(self, sums: Tree) -> Tree:
        return jax.tree.map(lambda leaf: leaf if arithmetic.is_float0(leaf) else leaf[0], sums)

    def rows(self, own: Tree) -> Tree:
        return jax.tree.map(lambda leaf: leaf if arithmetic.is_float0(leaf) else jnp.asarray(leaf)[None], own)

    def _sum(self, rows: Tree) -> Tree:
        return jax.tree.map(lambda leaf: jax.lax.psum(leaf[0], self.axes), rows)

    def _max(self, rows: jax.Array) -> jax.Array:
        return jax.lax.pmax(rows[0], self.axes)

    def _joined(self, rows: jax.Array) -> jax.Array:
        return rows[0]

    def check_state(self, weight: jax.Array, *trees: Tree) -> None:
        partials.check_num_rows(weight, 1)

    def check_params(self, params: Tree) -> None:
        pass


class Alone:
    """The device of a space of one."""

    count = 1

    def own(self, call: Call) -> Call:
        return call

    def own_keys(self, keys: Tree) -> Tree:
        return keys

    def own_sums(self, sums: Tree) -> Tree:
        return sums

    def vary(self, tree: Tree) -> Tree:
        return tree

    def whole(self, value: Any) -> Any:
        return value

    def check_loss(self, loss: jax.Array) -> None:
        pass

    def check_carry(self, carry: Tree) -> None:
        pass


class Among:
    """One of several devices, seen from inside: `one_batch` says that their examples are those of one batch."""

    def __init__(self, axes: Axes, *, one_batch: bool = True):
        self.axes, self.one_batch = axes, one_batch

    @property
    def count(self) -> int:
        """The number of devices."""
        return jax.lax.psum(1, self.axes)

    def own(self, call: Call) -> Call:
        """Returns the call on this device: parameters whose gradients are not reduced, and a key of its own."""
        params: dict[Name, Any] = {name: self.vary(call.arguments[name]) for name in call.params}
        return call.with_arguments(params).own_key(self._index())

    def own_keys(self, keys: Tree) -> Tree:
        """Returns keys of this device's own, from those that all have."""
        own = lambda key: jax.vmap(jax.random.fold_in, (0, None))(key.reshape(-1), self._index()).reshape(key.shape)
        return jax.tree.map(own, keys)

    def own_sums(self, sums: Tree) -> Tree:
        """Returns this device's row [...] of partial sums [1, ...]."""
        return jax.tree.map(lambda leaf: leaf[0], sums)

    def vary(self, tree: Tree) -> Tree:
        """Returns `tree` as values that may differ between devices."""
        return partials.varying(tree, self.axes)

    def whole(self, value: Any) -> Any:
        """Adds a value over the devices that share one batch."""
        return jax.lax.psum(value, self.axes) if self.one_batch else value

    def check_loss(self, loss: jax.Array) -> None:
        """Raises where a loss has been averaged over the devices already: its gradient would be divided twice."""
        if partials.differs(self._index(), self.axes) and not partials.differs(loss, self.axes):
            raise ValueError(
                f"With reduce_axes, the loss must be that of each device's own rows: here it is the same on all "
                f"devices of {self.axes}. Leave jax.lax.pmean out of it."
            )

    def check_carry(self, carry: Tree) -> None:
        """Raises for a carry that differs between devices."""
        if any(partials.differs(leaf, self.axes) for leaf in jax.tree.leaves(carry)):
            raise ValueError(
                f"With reduce_axes, the carry must be the same on all devices: it differs over {self.axes}. Return "
                f"jax.lax.pmean(carry, {self.axes}) from fun; that communicates at every micro-batch."
            )

    def _index(self) -> jax.Array:
        return jax.lax.axis_index(self.axes)


Device = Alone | Among
