"""One of 8 devices as the function that a space runs sees it: an eighth of the rows, a key of its own, partial sums."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._arguments.roles import Call
from optax_accum._core import arithmetic, compilers, convolutions
from optax_accum._core.equations import collective_axes
from optax_accum._core.folds import MAX, MIN, SUM, Fold
from optax_accum._core.leaves import is_array, parted
from optax_accum._core.traced import Traced
from optax_accum._core.types import Axes, Name, Tree, Weight
from optax_accum._shared.arrays import is_key
from optax_accum._space import collectives, mapped, meshes
from optax_accum._space.ending import Ending, Endings
from optax_accum._space.together import together


@dataclasses.dataclass(frozen=True)
class Device:
    """One of the devices along the axes, as seen by the function that a space runs; without axes the only one.

    Attributes:
      axes: the names of the mesh axes.
      one_batch: whether the examples of all devices are one batch.
      dtype: in which gradients cross the network.
      endings: which windows end with a backward pass that adds gradients over the devices.
      shards: by name, how the arguments are sharded of which each device has a shard.
      alike: the axes along which devices have the same arguments, but for their rows and keys.
      apart: the axes along which each device has a batch, and a loss, of its own.
    """

    axes: Axes = ()
    one_batch: bool = True
    dtype: Any = None
    endings: Endings = dataclasses.field(default_factory=Endings)
    shards: Mapping[Name, Tree] = dataclasses.field(default_factory=dict)
    alike: Axes = ()
    apart: Axes = ()

    @property
    def count(self) -> int:
        return jax.lax.psum(1, self.axes)

    @property
    def is_alone(self) -> bool:
        return not self.axes

    @property
    def index(self) -> Any:
        return jax.lax.axis_index(self.axes) if self.axes else 0

    def localized(self, call: Call, names: tuple[Name, ...]) -> Call:
        """Makes the named arguments and the key this device's own, so that no gradient is reduced."""
        arrays, filled = parted(call[names], is_array)
        call = call.with_values(names, filled(self.vary(arrays)))
        return call.fold_key(self.index) if self.axes else call

    def fold_keys(self, keys: Tree) -> Tree:
        """Folds keys that all of several devices have into keys of this device's own; other leaves stay."""
        every = jax.vmap(jax.random.fold_in, (0, None))

        def fold(leaf: Any) -> Any:
            if not is_key(leaf):
                return leaf
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jax.random.fold_in(leaf, self.index)
            return every(leaf.reshape(-1), self.index).reshape(leaf.shape)

        return jax.tree.map(fold, keys)

    def vary(self, tree: Tree) -> Tree:
        """Marks values as ones that may differ between devices."""
        return mapped.varying(tree, self.axes)

    def has_own(self, leaf: Any) -> bool:
        """Whether the type of a value tells that each device may have another."""
        return mapped.differs(leaf, self.axes)

    def other_axes(self, leaf: Any) -> frozenset[str]:
        """The axes of `jax.shard_map`, but for the devices', along which a value may differ."""
        return compilers.varying_axes(leaf) - {*self.axes, *self.apart}

    def gathers(self, name: Name, arg: Tree) -> Tree:
        """For each leaf of an argument, the function that gathers it from the devices' shards, if it has some."""
        if name not in self.shards:
            return jax.tree.map(lambda _: self.vary, arg)
        gather = lambda _, to: functools.partial(mapped.gathered, to=to, axes=self.axes)
        return jax.tree.map(gather, arg, self.shards[name])

    def add_up(self, leaf: jax.Array) -> jax.Array:
        """Adds a leaf over all devices; each has the sum as its own."""
        return leaf if self.count == 1 else self.vary(collectives.add_up(leaf, self.axes, self.dtype))

    def with_endings(self, **fields: Any) -> "Device":
        return dataclasses.replace(self, endings=dataclasses.replace(self.endings, **fields))

    def ending(self, sums: Tree, missing: str | None = None) -> Ending | None:
        """How the last backward pass adds these sums over the devices, if it does; raises if that is asked for in vain.

        `missing` is a condition, in words, that the caller does not meet.
        """
        ending = self.endings.ending(sums, self.add_up, missing)
        if ending is not None:
            collectives.check_narrow(self.dtype, sums)
        return ending

    def joined(self, fold: Fold, part: jax.Array) -> jax.Array:
        """The devices' parts, joined; an extreme is not differentiated."""
        part = part if fold is SUM else jax.lax.stop_gradient(part)
        over_devices = {SUM: jax.lax.psum, MAX: jax.lax.pmax, MIN: jax.lax.pmin}[fold]
        return self.vary(over_devices(part, self.axes)) if self.axes else part

    def gathered(self, rows: jax.Array, axis: int) -> jax.Array:
        gather = functools.partial(jax.lax.all_gather, axis_name=self.axes, axis=axis, tiled=True)
        return mapped.beside_explicit(gather, rows)

    def own(self, rows: jax.Array, axis: int) -> jax.Array:
        """The part that this device has of the rows of all devices."""
        size = rows.shape[axis] // self.count
        return jax.lax.dynamic_slice_in_dim(rows, self.index * size, size, axis)

    def part(self, value: jax.Array) -> jax.Array:
        """One device's part of a value that all devices have alike: the value's gradient is a sum over devices."""
        return jnp.asarray(value) / self.count if self.axes else value

    def with_whole_cotangent(self, value: Any) -> Any:
        """The value, with the sum of its cotangents over all devices."""
        return _with_cotangent(lambda ct: self.joined(SUM, ct), value)

    def with_part_of_cotangent(self, value: Any) -> Any:
        """The value, with this device's part of a cotangent that all devices have alike."""
        return _with_cotangent(self.part, value)

    def from_first(self, tree: Tree) -> Tree:
        """The values of the first device, with types that tell that they are the same on all devices."""
        return jax.tree.map(self._from_first, tree) if self.axes else tree

    def _from_first(self, leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(self._from_first(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        if leaf.dtype == bool:
            return self._from_first(leaf.astype(jnp.int32)).astype(bool)
        return jax.lax.psum(jnp.where(self.index == 0, leaf, jnp.zeros_like(leaf)), self.axes)

    def total(self, value: Any) -> Any:
        """Adds a value over the devices that share one batch."""
        return jax.lax.psum(value, self.axes) if self.one_batch else value

    # A loss that communicates has one gradient with the losses of other devices, also where they weigh differently.

    def communicates(self, loss: Traced) -> bool:
        """Whether a loss takes something from the other devices; along other axes it may do so, row by row."""
        return bool(self.collectives(loss))

    def collectives(self, loss: Traced) -> list[Any]:
        """The equations by which a loss takes something from the other devices."""
        return [equation for equation in loss.collectives if not set(self.axes).isdisjoint(collective_axes(equation))]

    def agreed(self, loss: Traced, alive: Tree) -> Tree:
        """Which micro-batches run: if the loss communicates, all devices run each one that any device runs.

        Raises if per-device gradients are asked of such a loss: it has one joint gradient, which no per-device weight
        can scale.
        """
        if not self.communicates(loss):
            return alive
        if not self.one_batch:
            raise ValueError(
                f"A loss that takes something from the other devices of {self.axes} has one gradient, which the weight "
                "of one device does not scale: partial sums are asked for, and each device has its own weight. Leave "
                'out the weights, or to="partial" (in a train step: devices of its optimizer).'
            )
        return self.any_of(alive)

    def runs_together(self, loss: Traced) -> bool:
        """Whether all devices must run a micro-batch that any runs, though each has a gradient of its own.

        A device may have to wait for others: a collective over one axis may need the devices of all, as a permute does,
        and over axes that are not manual, compilers put collectives in as they like.
        """
        may_wait = bool(meshes.partitioned_axes()) or bool(loss.collectives)
        return bool(self.axes) and not self.communicates(loss) and may_wait

    def in_step(self, fun: Callable[..., Any], equations: Sequence[Any], differ: Tree) -> Callable[..., Any]:
        """`fun`, whose loops and branches all devices run together where one may have to wait for others.

        `equations` come from a trace of `fun`; `differ`, a prefix of the tree of its arguments, says which leaves a
        device has alone.
        """
        return together(fun, equations, differ, self.alike)

    def in_loop(self, fun: Callable[..., Any], equations: Sequence[Any], differ: Tree) -> Callable[..., Any]:
        """`in_step` for a function that a loop or a branch runs: its convolutions are fast on a CPU there, too."""
        return convolutions.fast_in_loops(self.in_step(fun, equations, differ), equations)

    def any_of(self, flags: Tree) -> Tree:
        any_of = lambda flag: flag if isinstance(flag, bool) else jax.lax.psum(flag.astype(jnp.int32), self.axes) > 0
        return jax.tree.map(any_of, flags) if self.axes else flags

    def mean_and_factor(self, loss: Traced) -> Callable[[Weight], tuple[Weight, Weight]]:
        """A function that splits a weight into its mean over devices and the loss's factor `weight / mean`."""

        def shared(weight: Weight) -> tuple[Weight, Weight]:
            mean = jax.lax.pmean(weight, self.axes)
            return self.vary(mean), jnp.where(mean == 0, 0, weight * arithmetic.reciprocal(mean))

        unscaled = lambda weight: (weight, 1.0)
        if not self.communicates(loss):
            return unscaled
        # A Python number is the number of rows, which all devices have alike.
        return lambda weight: shared(weight) if isinstance(weight, jax.Array) else unscaled(weight)

    def check_loss(self, loss: Traced, types: Sequence[Any]) -> None:
        """Raises where a loss, of these types, is averaged over the devices: its gradient would be divided twice."""
        same = not any(mapped.differs(aval, self.axes) for aval in types)
        if same and self.communicates(loss) and mapped.types_track_devices(self.axes):
            raise ValueError(
                f"With devices, the loss must be that of each device's own rows: here it is the same on all "
                f"devices of {self.axes}. Leave jax.lax.pmean out of it."
            )

    def check_nested(self, loss: Traced) -> None:
        """Raises for a loss with a `jax.shard_map` of its own that JAX cannot differentiate here."""
        if self.axes:
            mapped.check_nested(loss, self.axes)

    def check_axes(self, results: Sequence[Any], *, of_optimizer: bool = False) -> None:
        """Raises inside a `jax.shard_map` over axes that are not named, where results differ between devices.

        `results` are the types of a function's results here; `of_optimizer`: the optimizer is to be told the axes.
        """
        axes = frozenset(self.axes).union(*map(compilers.varying_axes, results))
        if axes > set(self.axes):
            named = tuple(sorted(axes))
            remedy = 'for that of all their rows, with Devices(to="partial") where you add over the devices yourself'
            raise ValueError(
                "Inside jax.shard_map, a loss or an output that differs between devices needs devices: it differs "
                f"over {named}, and devices={self.axes or None}. Pass devices={named} "
                f"{'to accumulate_gradients' if of_optimizer else remedy}; or return jax.lax.pmean(loss, {named})."
            )

    def check_carry(self, carry: Tree) -> None:
        if any(mapped.differs(leaf, self.axes) for leaf in jax.tree.leaves(carry)):
            raise ValueError(
                f"With devices, the carry must be the same on all devices: it differs over {self.axes}. Return "
                f"jax.lax.pmean(carry, {self.axes}) from fun; that communicates at every micro-batch."
            )


def _with_cotangent(change: Callable[[Any], Any], value: Any) -> Any:
    if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return value

    @jax.custom_vjp
    def same(value: Any) -> Any:
        return value

    same.defvjp(lambda value: (value, None), lambda _, ct: (change(ct),))
    return same(value)
