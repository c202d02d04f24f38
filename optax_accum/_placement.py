"""Owns where a state lives: its shardings, its memory, its rows on another number of devices. Adds no gradient."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from optax_accum import _mesh
from optax_accum._mesh import Axes
from optax_accum._state import AccumulationState

Tree = Any
OFFLOADABLE = ("acc_grads", "inner_opt_state")
_ROWS = ("acc_grads", "weight", "mean_args")  # the fields that have rows under reduce_axes


def state_sharding(
    tx: optax.GradientTransformation,
    params: Tree,
    *,
    reduce_axes: str | Sequence[str] | None = None,
    reduce_to: Tree = None,
    offload: str | Sequence[str] = (),
) -> Tree:
    """Returns where each leaf of `tx.init(params)` belongs, for `jax.jit(tx.init, out_shardings=...)`.

    An optimizer state that is made without them is replicated, or lies on the first device. Here each leaf that
    belongs to a parameter (by its path and its shape) is sharded as that parameter is; an accumulator under
    `reduce_axes` has its rows on their devices; all else is replicated.

    Args:
      tx: an optimizer, alone or in a chain.
      params: the parameters, placed on a mesh; or their shapes, `jax.ShapeDtypeStruct`s with a `sharding`.
      reduce_axes: as given to `accumulate_gradients`; needed only where that is inside a chain.
      reduce_to: as given to `accumulate_gradients`, likewise: the state of the inner optimizer is sharded so (ZeRO-1).
      offload: `"acc_grads"`, `"inner_opt_state"` or both: the arrays that are kept in the host's memory. A micro-step
        moves them to the device where it uses them: the accumulator each time, the inner optimizer's state when a
        window emits.

    Returns:
      A tree of `NamedSharding`s like the state. Its `.spec`s serve as specs of a `jax.shard_map` as well.

    Raises:
      ValueError: no parameter lies on a mesh; the state has rows and `reduce_axes` is not known; another name in
        `offload`.

    Guarantees:
      | case | result |
      |---|---|
      | a statistic of another shape than its parameter (Adafactor's) | replicated |
      | `offload` of the inner state | its moments; counters stay on the device |
      | `offload` of the inner state and donation | do not donate the state: JAX mixes up the two memories |
      | `offload` on the CPU before JAX 0.12 | XLA cannot move arrays inside `jit`: an error of XLA |

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_accum
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> params = jax.device_put({"w": jnp.ones((8, 4))}, NamedSharding(mesh, P()))
      >>> tx = optax_accum.accumulate_gradients(optax.adam(1e-3), every=4, reduce_axes="data")
      >>> with jax.set_mesh(mesh):
      ...     state = jax.jit(tx.init, out_shardings=optax_accum.state_sharding(tx, params))(params)
      >>> state.acc_grads["w"].sharding.spec[0]
      'data'
    """
    ours = getattr(tx.update, "__self__", None)
    axes = _mesh.as_axes(reduce_axes) or getattr(ours, "reduce_axes", ())
    reduce_to = getattr(ours, "reduce_to", None) if reduce_to is None else reduce_to
    offload = (offload,) if isinstance(offload, str) else tuple(offload)
    for name in offload:
        if name not in OFFLOADABLE:
            raise ValueError(f"offload must name fields of the state: {name!r} is none of {', '.join(OFFLOADABLE)}.")
    mesh = _mesh.mesh_of(axes, params)
    with jax.sharding.use_abstract_mesh(cast(Any, getattr(mesh, "abstract_mesh", mesh))):
        state = jax.eval_shape(tx.init, params)
        to = None if reduce_to is None else _mesh.shardings(reduce_to, params, axes)
    return _Placement(params, to, mesh, axes, offload).of(state)


def shard_over(params: Tree, reduce_axes: str | Sequence[str]) -> Tree:
    """Returns shardings for `reduce_to`: each parameter's own, with `reduce_axes` on the first dimension they divide.

    Args:
      params: the parameters, placed on a mesh; or their shapes, `jax.ShapeDtypeStruct`s with a `sharding`.
      reduce_axes: the axes over which the update is to be sharded.

    Returns:
      A tree of `NamedSharding`s. A parameter that is sharded over these axes already (FSDP) keeps its sharding; one
      with no free dimension that divides stays replicated over them.

    Raises:
      ValueError: no parameter lies on a mesh, or the mesh lacks an axis.

    Example:
      >>> import jax, jax.numpy as jnp, optax_accum
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> params = jax.device_put(jnp.ones((3, 8)), NamedSharding(mesh, P()))
      >>> optax_accum.shard_over(params, "data").mesh.axis_names
      ('data',)
    """
    axes = _mesh.as_axes(reduce_axes)
    mesh = _mesh.mesh_of(axes, params)
    devices = _mesh.num_rows(mesh, axes)

    def over(param: Any) -> NamedSharding:
        spec = _whole_spec(_mesh.spec_of(param), param.ndim)
        taken = any(set(_mesh.names_of(entry)) & set(axes) for entry in spec)
        free = [n for n, entry in enumerate(spec) if entry is None and param.shape[n] and param.shape[n] % devices == 0]
        if not taken and free:
            spec[free[0]] = axes
        return NamedSharding(cast(Any, mesh), PartitionSpec(*spec))

    return jax.tree.map(over, params)


def redistribute(state: Tree, num_devices: int | None) -> Tree:
    """Returns a state with its rows for another number of devices, for a run that goes on elsewhere.

    A window in flight keeps its sum and its weight: row i is added to row `i mod num_devices`.

    Args:
      state: an optimizer state with an `AccumulationState`, made with or without `reduce_axes`; of arrays that this
        process can read whole, such as the NumPy arrays of a checkpoint.
      num_devices: the devices along `reduce_axes`, or None to go on without `reduce_axes`.

    Returns:
      The state, its rows as NumPy arrays; place it with `jax.device_put(state, state_sharding(tx, params))`.

    Raises:
      ValueError: `state` holds no `AccumulationState`, or `num_devices` is below 1.

    Guarantees:
      | case | result |
      |---|---|
      | the same number of devices | the same state, bit for bit |
      | another number | the same sums, to rounding |
      | a state made without `reduce_axes` | its sum is in the first row |

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=2)
      >>> _, state = tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
      >>> rows = optax_accum.redistribute(state, 2)
      >>> rows.acc_grads.shape, rows.weight.tolist()
      ((2, 3), [1.0, 0.0])
    """
    if num_devices is not None and num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, or None: num_devices={num_devices}.")
    is_ours = lambda node: isinstance(node, AccumulationState)
    if not any(map(is_ours, jax.tree.leaves(state, is_leaf=is_ours))):
        raise ValueError(f"redistribute needs a state that holds an AccumulationState: state={type(state).__name__}.")

    def convert(node: Any) -> Any:
        if not is_ours(node):
            return node
        old = node.weight.shape[0] if node.weight.ndim else None
        move = lambda leaf: _moved(leaf, old, num_devices)
        return node._replace(**{name: jax.tree.map(move, getattr(node, name)) for name in _ROWS})

    return jax.tree.map(convert, state, is_leaf=is_ours)


def checkpoint_target(tx: optax.GradientTransformation, params: Tree, num_devices: int, **options: Any) -> Tree:
    """Returns what to restore a saved state into, when it was saved on `num_devices` devices.

    Args:
      tx: an optimizer, alone or in a chain.
      params: the parameters, or their shapes, placed on the mesh of today.
      num_devices: the devices along `reduce_axes` when the state was saved. Save the number beside the state.
      **options: those of `state_sharding`.

    Returns:
      A tree like the state, for `orbax.checkpoint`: shapes with the shardings of today. If the number of devices has
      changed, the rows are NumPy arrays: pass what was restored to `redistribute`, then to `jax.device_put` with
      `state_sharding`.

    Raises:
      ValueError: as `state_sharding`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_accum
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> params = jax.device_put(jnp.ones(3), NamedSharding(mesh, P()))
      >>> tx = optax_accum.accumulate_gradients(optax.adam(1e-3), every=4, reduce_axes="data")
      >>> target = optax_accum.checkpoint_target(tx, params, num_devices=2 * jax.device_count())
      >>> target.acc_grads.shape == (2 * jax.device_count(), 3)
      True
    """
    where = state_sharding(tx, params, **options)
    mesh = jax.tree.leaves(where)[0].mesh
    with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
        shapes = jax.eval_shape(tx.init, params)
    is_ours = lambda node: isinstance(node, AccumulationState)
    rows = [node.weight.shape for node in jax.tree.leaves(shapes, is_leaf=is_ours) if is_ours(node)]
    if all(shape in ((), (num_devices,)) for shape in rows):
        return jax.tree.map(_shape, shapes, where)

    def target(node: Any, where: Any) -> Any:
        if not is_ours(node):
            return _shape(node, where)
        # Zeros that take no memory: Orbax reads their shape, their dtype, and that they are NumPy arrays.
        saved = lambda leaf: np.broadcast_to(np.zeros([], leaf.dtype), (num_devices, *leaf.shape[1:]))
        fields = {name: jax.tree.map(saved, getattr(node, name)) for name in _ROWS}
        return jax.tree.map(_shape, node, where)._replace(**fields)

    return jax.tree.map(target, shapes, where, is_leaf=is_ours)


def _shape(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def check_processes(**facts: Any) -> None:
    """Raises unless all processes of a run were given the same: a run whose processes differ hangs, or is wrong.

    Call it in every process before the first step; it communicates once.

    Args:
      **facts: what must be the same, by name, of values that print: `every=4`, `batch=jax.tree.map(jnp.shape, batch)`.

    Raises:
      ValueError: in every process, with the name and the value of the first fact that differs.

    Guarantees:
      | case | result |
      |---|---|
      | one process | nothing is done |
      | a process that never calls it | the others wait as long as the collectives of JAX do |
      | facts that take more than 4000 bytes together | the first 4000 are compared |

    Example:
      >>> import optax_accum
      >>> optax_accum.check_processes(every=4, rows=64)
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils  # loads much that a single process does not need

    text = repr({name: str(value) for name, value in sorted(facts.items())}).encode()[:4000]
    mine = np.frombuffer(text.ljust(4000), np.uint8)
    texts = [bytes(row).decode(errors="replace").rstrip() for row in multihost_utils.process_allgather(mine)]
    for number, text in enumerate(texts):
        if text != texts[0]:
            raise ValueError(
                f"The processes of a run must agree: process 0 has {texts[0]}, process {number} has {text}. Start all "
                "of them with the same settings."
            )


def _moved(leaf: Any, old: int | None, new: int | None) -> Any:
    """Returns rows [old, ...], or a sum [...] for None, as rows [new, ...] with the same sum."""
    if old == new:
        return leaf
    rows = np.asarray(leaf) if old is not None else np.asarray(leaf)[None]
    count = new or 1
    padded = np.concatenate([rows, np.zeros((-len(rows) % count, *rows.shape[1:]), rows.dtype)])
    moved = padded.reshape(-1, count, *rows.shape[1:]).sum(axis=0, dtype=rows.dtype)
    return moved if new is not None else moved[0]


class _Placement:
    """The shardings of one state."""

    def __init__(self, params: Tree, to: Tree, mesh: Any, axes: Axes, offload: tuple[str, ...]):
        self.mesh, self.axes, self.offload = mesh, axes, offload
        keep = lambda node: isinstance(node, NamedSharding)
        inner = jax.tree.leaves(to, is_leaf=keep) if to is not None else jax.tree.leaves(params)
        self.params = [
            (path, leaf.shape, _whole_spec(_mesh.spec_of(leaf), leaf.ndim), _target(other, leaf.ndim))
            for (path, leaf), other in zip(jax.tree.leaves_with_path(params), inner, strict=True)
        ]

    def of(self, state: Tree) -> Tree:
        """Returns the sharding of each leaf: our own states field by field, all else by the parameter it belongs to."""
        is_ours = lambda node: isinstance(node, AccumulationState)
        one = lambda path, node: self._fields(node) if is_ours(node) else self._like_param(path, node)
        return jax.tree.map_with_path(one, state, is_leaf=is_ours)

    def _fields(self, state: AccumulationState) -> AccumulationState:
        rows = bool(state.weight.ndim)
        if rows and not self.axes:
            raise ValueError(
                "The state holds rows for each device, and the axes are inside the chain where state_sharding cannot "
                "read them. Pass reduce_axes= (and reduce_to=) as given to accumulate_gradients."
            )
        scalar = self._named(self.axes) if rows else self._named()
        replicated = jax.tree.map(lambda _: self._named(), state)
        return replicated._replace(
            acc_grads=self._by_path(state.acc_grads, "acc_grads", rows=rows),
            inner_opt_state=self._by_path(state.inner_opt_state, "inner_opt_state", sharded=True),
            weight=scalar,
            mean_args=jax.tree.map(lambda _: scalar, state.mean_args),
        )

    def _by_path(self, tree: Tree, field: str, **how: bool) -> Tree:
        memory = "pinned_host" if field in self.offload else None
        place: Callable[..., Any] = lambda path, leaf: self._like_param(path, leaf, memory=memory, **how)
        return jax.tree.map_with_path(place, tree)

    def _like_param(
        self, path: Any, leaf: Any, *, rows: bool = False, sharded: bool = False, memory: str | None = None
    ) -> NamedSharding:
        """Returns the sharding of the parameter with the longest path in which that of the leaf ends."""
        shape = leaf.shape[1:] if rows else leaf.shape
        found = [param for param in self.params if param[1] == shape and path[len(path) - len(param[0]) :] == param[0]]
        if not found:
            return self._named()
        _, _, spec, to = max(found, key=lambda param: len(param[0]))
        spec = to if sharded else spec
        if rows:
            spec = [self.axes, *(_mesh.without(entry, self.axes) for entry in spec)]
        return self._named(*spec, memory=memory)

    def _named(self, *spec: Any, memory: str | None = None) -> NamedSharding:
        entries = (entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry for entry in spec)
        sharding = NamedSharding(self.mesh, PartitionSpec(*entries))
        return sharding if memory is None else sharding.with_memory_kind(memory)


def _target(to: Any, ndim: int) -> list[Any]:
    return _whole_spec(to.spec if isinstance(to, NamedSharding) else _mesh.spec_of(to), ndim)


def _whole_spec(spec: PartitionSpec | None, ndim: int) -> list[Any]:
    """Returns one entry for each dimension."""
    entries = list(spec or ())
    return entries + [None] * (ndim - len(entries))
