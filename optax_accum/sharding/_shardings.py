"""Where a state lives: its shardings and its memory."""

from collections.abc import Sequence
from typing import Any, cast

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from optax_accum._across.transformation import rules_of
from optax_accum._core import compilers, versions
from optax_accum._core.state import AccumulationState, holds_partial_sums, map_states
from optax_accum._core.types import Axes, Tree
from optax_accum._space import meshes
from optax_accum._space.devices import Devices, as_devices, check_replicated

OFFLOADABLE = ("acc_grads", "inner_opt_state")


def state_sharding(
    tx: optax.GradientTransformation,
    params: Tree,
    devices: str | Sequence[str] | Devices | None = None,
    *,
    offload: str | Sequence[str] = (),
) -> Tree:
    """Returns the sharding of each leaf of `tx.init(params)`.

    Give the result to `jax.jit(tx.init, out_shardings=...)`.

    Without these shardings, an optimizer state is replicated, or lies on
    the first device. Here each leaf that belongs to a parameter
    (by its path and its shape) is sharded as that parameter is; an
    accumulator under `devices` has its partial sums on them;
    all else is replicated.

    Args:
      tx: an optimizer, alone or in a chain.
      params: the parameters, placed on a mesh; or their shapes,
        `jax.ShapeDtypeStruct`s with a `sharding`.
      devices: as given to `accumulate_gradients`; needed only where that
        is inside a chain. The state of the inner optimizer is sharded as
        `Devices(to=)` says (ZeRO-1).
      offload: `"acc_grads"`, `"inner_opt_state"` or both: the arrays that
        are kept in the host's memory. A micro-step moves them to the device
        where it uses them: the accumulator each time, the inner optimizer's
        state at an update.

    Returns:
      A tree of `NamedSharding`s like the state. Its `.spec`s serve as specs
      of a `jax.shard_map` as well.

    Raises:
      ValueError: no parameter lies on a mesh; the state has partial sums
        and `devices` is not known; a parameter is sharded over them and
        `to` is None; another name in `offload`.

    Guarantees:
      * A statistic of another shape than its parameter (Adafactor's):
        replicated.
      * `offload` of the inner state: its moments; counters stay on the
        device.
      * `offload` of the inner state and donation: do not donate the state,
        because JAX mixes up the two memories.
      * `offload` before JAX 0.10: a `NotImplementedError` that says so.
      * `offload` on the CPU before JAX 0.12: XLA cannot move arrays inside
        `jit`; an error of XLA.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_accum
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",),
      ...     axis_types=(jax.sharding.AxisType.Auto,))
      >>> params = {"w": jnp.ones((8, 4))}
      >>> params = jax.device_put(params, NamedSharding(mesh, P()))
      >>> tx = optax_accum.accumulate_gradients(
      ...     optax.adam(1e-3), every=4, devices="data")
      >>> with jax.set_mesh(mesh):
      ...     shardings = optax_accum.sharding.state_sharding(tx, params)
      ...     state = jax.jit(tx.init, out_shardings=shardings)(params)
      >>> state.acc_grads["w"].sharding.spec[0]
      'data'
    """
    rules = rules_of(tx)
    given, own = as_devices(devices), rules.devices if rules else Devices(None)
    axes = given.axes or own.axes
    to = own.to if given.to is None else given.to
    several = not isinstance(offload, str) and hasattr(offload, "__iter__")
    offload = tuple(offload) if several else (cast(str, offload),)
    for name in offload:
        if name not in OFFLOADABLE:
            raise ValueError(f"offload must name fields of the state: {name!r} is none of {', '.join(OFFLOADABLE)}.")
        versions.require("offload", versions.HOST, "Leave out offload.")
    mesh = meshes.mesh_of(axes, params)
    compilers.check_concrete(mesh)
    if axes and to is None:
        check_replicated(params, axes)  # inside jit, sharding is invisible on an Auto mesh
    with compilers.tracing_on(mesh):
        state = jax.eval_shape(tx.init, params)
        to = None if to is None else meshes.shardings(to, params, axes)
    return _Placement(params, to, mesh, axes, offload).of(state)


def shard_over(params: Tree, axes: str | Sequence[str]) -> Tree:
    """Returns shardings for `Devices(to=)`, one for each parameter.

    Each is the parameter's own, with these axes on the first dimension
    that they divide.

    Args:
      params: the parameters, placed on a mesh; or their shapes,
        `jax.ShapeDtypeStruct`s with a `sharding`.
      axes: the mesh axes over which the update is to be sharded.

    Returns:
      A tree of `NamedSharding`s. A parameter that is sharded over these
      axes already (FSDP) keeps its sharding; one with no free dimension
      that divides stays replicated over them.

    Raises:
      ValueError: no parameter lies on a mesh, or the mesh lacks an axis.

    Example:
      >>> import jax, jax.numpy as jnp, optax_accum
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",),
      ...     axis_types=(jax.sharding.AxisType.Auto,))
      >>> sharding = NamedSharding(mesh, P())
      >>> params = jax.device_put(jnp.ones((3, 8)), sharding)
      >>> optax_accum.sharding.shard_over(params, "data").mesh.axis_names
      ('data',)
    """
    axes = meshes.as_axes(axes)
    mesh = meshes.mesh_of(axes, params)
    devices = meshes.num_devices(mesh, axes)

    def over(param: Any) -> NamedSharding:
        spec = _whole_spec(meshes.spec_of(param), param.ndim)
        taken = any(set(meshes.names_of(entry)) & set(axes) for entry in spec)
        free = [n for n, entry in enumerate(spec) if entry is None and param.shape[n] and param.shape[n] % devices == 0]
        if not taken and free:
            spec[free[0]] = axes
        return NamedSharding(cast(Any, mesh), PartitionSpec(*spec))

    return jax.tree.map(over, params)


class _Placement:
    """The shardings of one state."""

    def __init__(self, params: Tree, to: Tree, mesh: Any, axes: Axes, offload: tuple[str, ...]):
        self.mesh, self.axes, self.offload = mesh, axes, offload
        keep = lambda node: isinstance(node, NamedSharding)
        inner = jax.tree.leaves(to, is_leaf=keep) if to is not None else jax.tree.leaves(params)
        self.params = [
            (path, leaf.shape, _whole_spec(meshes.spec_of(leaf), leaf.ndim), _target(other, leaf.ndim))
            for (path, leaf), other in zip(jax.tree.leaves_with_path(params), inner, strict=True)
        ]

    def of(self, state: Tree) -> Tree:
        """The sharding of each leaf: our own states field by field, all else by the parameter that it belongs to."""
        paths = jax.tree.map_with_path(lambda path, _: path, state)
        like_param = lambda leaf, path: self._like_param(path, leaf)
        return map_states(lambda node, _: self._fields(node), state, paths, others=like_param)

    def _fields(self, state: AccumulationState) -> AccumulationState:
        partial = holds_partial_sums(state)
        if partial and not self.axes:
            raise ValueError(
                "The state holds partial sums, one for each device, and the axes are inside the chain where "
                "state_sharding cannot read them. Pass devices= as given to accumulate_gradients."
            )
        scalar = self._named(self.axes) if partial else self._named()
        replicated = jax.tree.map(lambda _: self._named(), state)
        return replicated._replace(
            acc_grads=self._by_path(state.acc_grads, "acc_grads", partial=partial),
            inner_opt_state=self._by_path(state.inner_opt_state, "inner_opt_state", sharded=True),
            weight=scalar,
            mean_args=self._by_path(state.mean_args, "mean_args", partial=partial),
            samples=jax.tree.map(lambda _: scalar, state.samples),
        )

    def _by_path(self, tree: Tree, field: str, *, partial: bool = False, sharded: bool = False) -> Tree:
        memory = "pinned_host" if field in self.offload else None
        place = lambda path, leaf: self._like_param(path, leaf, partial=partial, sharded=sharded, memory=memory)
        return jax.tree.map_with_path(place, tree)

    def _like_param(
        self, path: Any, leaf: Any, *, partial: bool = False, sharded: bool = False, memory: str | None = None
    ) -> NamedSharding:
        """The sharding of the parameter with the longest path in which the leaf's path ends; replicated without one."""
        shape = leaf.shape[1:] if partial else leaf.shape
        found = [param for param in self.params if param[1] == shape and path[len(path) - len(param[0]) :] == param[0]]
        if not found:
            return self._named(self.axes) if partial else self._named()
        _, _, spec, to = max(found, key=lambda param: len(param[0]))
        spec = to if sharded else spec
        if partial:
            spec = [self.axes, *(meshes.without(entry, self.axes) for entry in spec)]
        return self._named(*spec, memory=memory)

    def _named(self, *spec: Any, memory: str | None = None) -> NamedSharding:
        entries = (entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry for entry in spec)
        sharding = NamedSharding(self.mesh, PartitionSpec(*entries))
        return sharding if memory is None else sharding.with_memory_kind(memory)


def _target(to: Any, ndim: int) -> list[Any]:
    return _whole_spec(to.spec if isinstance(to, NamedSharding) else meshes.spec_of(to), ndim)


def _whole_spec(spec: PartitionSpec | None, ndim: int) -> list[Any]:
    """One entry for each dimension."""
    entries = list(spec or ())
    return entries + [None] * (ndim - len(entries))
