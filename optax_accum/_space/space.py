"""Owns where partial sums live: on one device, over a mesh, or in a user's `jax.shard_map`. Asked once, by `here`.

A *partial sum* is what one device has of a sum. On several devices a tree of them has leaves [d, ...], one row for each
of the d devices along the axes, each row on its device; inside `jax.shard_map` [1, ...], this device's own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, checks, tracing
from optax_accum._core.arithmetic import Tree, Weight
from optax_accum._core.state import default_float
from optax_accum._space import meshes, mismatch, partials
from optax_accum._space.device import Among, Device
from optax_accum._space.meshes import Axes

PARTIAL = "partial"  # as `reduce_to`: the sum goes nowhere
Local = Callable[..., tuple[Tree, Tree]]


def here(axes: Axes, to: Tree = None) -> "Space":
    """Returns the space of this trace: `to` says where a sum of gradients goes, everywhere unless it is given."""
    if not axes:
        return Space()
    if not meshes.is_manual(axes):
        return OverMesh(axes, to)
    if to is not None and to != PARTIAL:
        raise ValueError(
            f"Inside jax.shard_map over {axes} the sum goes everywhere: reduce_to={to!r}. Leave it out; gather there "
            "what came in sharded (jax.lax.all_gather), and shard what comes out of the shard_map."
        )
    return InShardMap(axes, to)


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


class Space:
    """Where partial sums live. On one device nothing is partial: it answers with what it was given."""

    communicates = False

    # The doors: what is empty, and what is to be added, as it is added.

    def zeros(self, params: Tree, dtype: Any) -> Tree:
        """Returns an empty accumulator."""
        return arithmetic.zeros(params, dtype)

    def scalar(self, params: Tree) -> jax.Array:
        """Returns an empty sum of weights."""
        return jnp.zeros([], default_float())

    def grads(self, grads: Tree, acc: Tree) -> Tree:
        """Returns the gradients of a micro-batch as they are added to `acc`."""
        return grads

    def weight(self, weight: Any, like: jax.Array, *, share: bool) -> Weight:
        """Returns the weight of a micro-batch as it is added to `like`; if `share`, each device's part of it."""
        return checks.as_weight(weight)

    # The sums: of scalars and outputs; of gradients, which go to their place; and what all must know.

    def total(self, sums: Tree) -> Tree:
        """Returns sums over all devices."""
        return sums

    def reduced(self, acc: Tree) -> Tree:
        """Returns the sum of the gradients over all devices, where it belongs: the one reduction of a window."""
        return acc

    def reduced_in_place(self, acc: Tree) -> tuple[Tree, Tree]:
        """Returns what `reduced` does, and what then lies in the place of the partial sums: None if these do."""
        return self.reduced(acc), None

    def held(self, acc: Tree) -> Tree:
        """Returns what lies there where nothing was reduced: partial sums, or None as `reduced_in_place` does."""
        return None

    def like(self, grads: Tree) -> Tree:
        """Returns leaves of the shapes and dtypes of the gradient of the whole batch."""
        return grads

    def output(self, reduction: str, leaf: Any) -> Any:
        """Returns an output of the whole batch, of what each device has of it."""
        return leaf

    def nonfinite(self, tree: Tree, weight: Weight) -> jax.Array:
        """Returns whether something that counts, on any device, holds a NaN or an infinity."""
        return ~arithmetic.all_finite((tree, weight)) & (weight != 0)

    # The places: of the update, and back to those of the parameters.

    def shard(self, params: Tree) -> Tree:
        """Returns the parameters sharded as the update is to be."""
        return params

    def gather(self, tree: Tree, params: Tree) -> Tree:
        """Undoes `shard`."""
        return tree

    # The work: a function on each device's own examples, and what came of it as users see it.

    def run(
        self, fun: Local, split: Sequence[int], args: Sequence[Any], sharded: int | None = None
    ) -> tuple[Tree, Tree]:
        """Runs `fun(device, *args) -> (own, same)` on each device, the arguments `split` dealt out by rows.

        Of argument `sharded`, if there is one, each device has the shard that `to` says.
        """
        return fun(Device(), *args)

    def as_own(self, sums: Tree) -> Tree:
        """Returns what each device has of its own as users see it: [d, ...], inside `jax.shard_map` its own [...]."""
        return sums

    def rows(self, own: Tree) -> Tree:
        """Undoes `as_own`."""
        return own

    def check_state(self, weight: jax.Array, *trees: Tree) -> None:
        """Raises for a state of other devices: `weight` is its."""

    def check_params(self, params: Tree) -> None:
        """Raises where parameters would be gathered unasked."""


class Several(Space):
    """Partial sums on several devices. Below are those of a mesh, and those inside a `jax.shard_map`."""

    communicates = True

    def __init__(self, axes: Axes, to: Tree):
        self.axes, self.to = axes, to

    def total(self, sums: Tree) -> Tree:
        return self.as_own(sums) if self.to == PARTIAL else self._sum(sums)

    def reduced(self, acc: Tree) -> Tree:
        return self.total(acc)

    def like(self, grads: Tree) -> Tree:
        return arithmetic.zeros_of(jax.eval_shape(lambda: self.reduced(grads)))

    def output(self, reduction: str, leaf: Any) -> Any:
        if reduction not in ("mean", "sum", "max", "concat"):
            raise ValueError(
                f'With reduce_axes, each device has micro-batches of its own, and "{reduction}" of them is not one '
                'output. Take "mean", "sum", "max" or "concat".'
            )
        if reduction == "concat":
            return self._joined(leaf)
        return self._max(leaf) if reduction == "max" and self.to != PARTIAL else self.total(leaf)

    def nonfinite(self, tree: Tree, weight: Weight) -> jax.Array:
        rows = [leaf for leaf in jax.tree.leaves((tree, weight)) if not arithmetic.is_float0(leaf)]
        flags = ~jax.vmap(arithmetic.all_finite)(rows) & (weight != 0)
        return self._sum(flags.astype(jnp.int32)) > 0  # one number from each device

    def _shapes(self, params: Tree, dtype: Any) -> Tree:
        return jax.eval_shape(lambda: arithmetic.zeros(params, dtype))

    def _device(self) -> Device:
        return Among(self.axes, one_batch=self.to != PARTIAL)

    def _sum(self, rows: Tree) -> Tree:
        raise NotImplementedError

    def _max(self, rows: jax.Array) -> jax.Array:
        raise NotImplementedError

    def _joined(self, rows: jax.Array) -> jax.Array:
        raise NotImplementedError


class OverMesh(Several):
    """Partial sums over a mesh: arrays [d, ...], which pass `jit`, branches and checkpoints like any others."""

    def zeros(self, params: Tree, dtype: Any) -> Tree:
        return partials.zero_rows(self._shapes(params, dtype), params, self.axes)

    def scalar(self, params: Tree) -> jax.Array:
        return partials.zero_scalars(params, self.axes)

    def grads(self, grads: Tree, acc: Tree) -> Tree:
        mismatch.check_rows(grads, acc)
        return grads

    def weight(self, weight: Any, like: jax.Array, *, share: bool) -> Weight:
        weight = checks.as_weight(weight, mismatch.num_devices_of(like, self.axes))
        part = weight / like.shape[0] if share and not jnp.ndim(weight) else weight
        return partials.beside(jnp.broadcast_to(jnp.asarray(part, like.dtype), like.shape), like, self.axes)

    def reduced(self, acc: Tree) -> Tree:
        if self.to is None or self.to == PARTIAL:
            return self.total(acc)
        scatter = lambda leaf, to: partials.scatter(leaf, to, self.axes)
        return jax.tree.map(scatter, acc, meshes.shardings(self.to, acc, self.axes))

    def reduced_in_place(self, acc: Tree) -> tuple[Tree, Tree]:
        return partials.sum_in_place(acc, self.axes) if self._goes_everywhere(acc) else (self.reduced(acc), None)

    def held(self, acc: Tree) -> Tree:
        return acc if self._goes_everywhere(acc) else None

    def shard(self, params: Tree) -> Tree:
        return params if self.to is None else meshes.place(params, meshes.shardings(self.to, params, self.axes))

    def gather(self, tree: Tree, params: Tree) -> Tree:
        return tree if self.to is None else meshes.gather(tree, self.to, params, self.axes)

    def run(
        self, fun: Local, split: Sequence[int], args: Sequence[Any], sharded: int | None = None
    ) -> tuple[Tree, Tree]:
        if sharded is None or self.to is None:
            return partials.per_device(lambda *own: fun(self._device(), *own), self.axes, split, args)
        to = meshes.shardings(self.to, args[sharded], self.axes)
        meshes.check_shards(to, args[sharded], self.axes)
        local = lambda *own: fun(Among(self.axes, shards={sharded: to}), *own)
        return partials.per_device(local, self.axes, split, args, {sharded: to})

    def check_state(self, weight: jax.Array, *trees: Tree) -> None:
        mismatch.check_num_devices(weight, meshes.num_devices(meshes.mesh_of(self.axes, *trees), self.axes))

    def check_params(self, params: Tree) -> None:
        if self.to is None or self.to == PARTIAL:
            mismatch.check_replicated(params, self.axes)

    def _goes_everywhere(self, acc: Tree) -> bool:
        """Returns whether the sum goes to all devices of a mesh that is known, inside jit."""
        return self.to is None and tracing.is_staged() and meshes.in_reach(acc) is not None

    def _sum(self, rows: Tree) -> Tree:
        return jax.tree.map(partials.sum_rows, rows)

    def _max(self, rows: jax.Array) -> jax.Array:
        return jnp.max(rows, axis=0)

    def _joined(self, rows: jax.Array) -> jax.Array:
        return rows.reshape(-1, *rows.shape[2:])


class InShardMap(Several):
    """Partial sums in a user's `jax.shard_map` over the axes: leaves [1, ...], this device's own."""

    def zeros(self, params: Tree, dtype: Any) -> Tree:
        zeros = lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype)
        return partials.varying(jax.tree.map(zeros, self._shapes(params, dtype)), self.axes)

    def scalar(self, params: Tree) -> jax.Array:
        return partials.varying(jnp.zeros([1], default_float()), self.axes)

    def grads(self, grads: Tree, acc: Tree) -> Tree:
        mismatch.check_own(grads, self.axes)
        return self.rows(grads)

    def weight(self, weight: Any, like: jax.Array, *, share: bool) -> Weight:
        weight = checks.as_weight(weight, mismatch.num_devices_of(like, self.axes))
        own = jnp.ndim(weight) or (isinstance(weight, jax.Array) and partials.differs(weight, self.axes))
        part = weight / jax.lax.psum(1, self.axes) if share and not own else weight
        return jnp.broadcast_to(jnp.asarray(part, like.dtype), like.shape)

    def reduced_in_place(self, acc: Tree) -> tuple[Tree, Tree]:
        total = self.reduced(acc)
        return total, partials.varying(self.rows(total), self.axes)

    def held(self, acc: Tree) -> Tree:
        return acc

    def run(
        self, fun: Local, split: Sequence[int], args: Sequence[Any], sharded: int | None = None
    ) -> tuple[Tree, Tree]:
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
        mismatch.check_num_devices(weight, 1)
