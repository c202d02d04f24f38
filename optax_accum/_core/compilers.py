"""What compilers and versions of JAX do differently: each difference once, with the workaround.

`tests/quirks.py` says why each stands here, and what `accelerators._absent` does for absent accelerators.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.custom_batching import custom_vmap

from optax_accum._core import versions
from optax_accum._core.types import Flag, Tree

# Branches


def branch(flag: Flag, on_true: Callable[[], Any], on_false: Callable[[], Any]) -> Any:
    """Calls one of two functions when running: `lax.cond`, in the form that compiles well."""
    if versions.JAX >= (0, 11, 1):
        return jax.lax.cond(flag, on_true, on_false)
    return jax.lax.switch(jnp.asarray(flag).astype(jnp.int32), [on_false, on_true])


def returned(tree: Tree) -> Tree:
    """On a TPU, puts an optimization barrier around `tree`, so that a branch really returns a tree that it only reads.

    Without, XLA leaves the result out of the branch, reads it early, and keeps it in memory.
    """
    return _returned(tree) if jax.tree.leaves(tree) else tree


@jax.custom_jvp
def _returned(tree: Tree) -> Tree:
    return jax.lax.platform_dependent(tree, tpu=_barrier, default=lambda tree: tree)


_returned.defjvp(lambda trees, tangents: (_returned(*trees), *tangents))  # a custom_vmap has no transpose


@custom_vmap
def _barrier(tree: Tree) -> Tree:
    return jax.tree.map(jax.lax.optimization_barrier, tree)  # else XLA leaves the result out


@_barrier.def_vmap
def _(size: int, batched: list[Tree], tree: Tree) -> tuple[Tree, Tree]:
    return tree, batched[0]  # a branch becomes a select, which would read the leaves once more


def as_written(product: jax.Array, *operands: Any) -> jax.Array:
    """On a CPU, keeps XLA from transposing a float32 product of bfloat16 arrays, which it compiles and cannot run."""
    if all(operand.dtype == jnp.bfloat16 for operand in operands) and product.dtype != jnp.bfloat16:
        return jax.lax.platform_dependent(product, cpu=jax.lax.optimization_barrier, default=lambda leaf: leaf)
    return product


# Sums

NOTHING = -0.0  # x + NOTHING is x, for x = -0.0 too


def zeroed(tree: Tree, first: jax.Array) -> Tree:
    """Zeros where `first`, else the tree as it is: in place, once a window."""
    return _zeroed(tree, first) if jax.tree.leaves(tree) else tree


@jax.custom_jvp
def _zeroed(tree: Tree, first: jax.Array) -> Tree:
    iterations = first.astype(jnp.int32)
    zeros = lambda leaf: sharded_as(leaf, jnp.zeros_like(leaf))  # JAX forgets it where no `jax.set_mesh` says it
    return jax.lax.fori_loop(0, iterations, lambda _, tree: jax.tree.map(zeros, tree), tree)


def _select_zeros(primals: tuple[Tree, jax.Array], tangents: tuple[Tree, Any]) -> tuple[Tree, Tree]:
    """A loop of a length that only the device knows has no backward pass."""
    first = primals[1]
    return _zeroed(*primals), jax.tree.map(lambda leaf: jnp.where(first, jnp.zeros_like(leaf), leaf), tangents[0])


_zeroed.defjvp(_select_zeros)


def explicit_sharding(leaf: Any) -> Any:
    """The sharding over Explicit axes that the type of an array tells; else None."""
    sharding = getattr(jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return sharding if mesh is not None and jax.sharding.AxisType.Explicit in mesh.axis_types else None


def splittable_sharding(sharding: Any, axis: int, rows: int) -> Any:
    """A sharding without that along an axis, if Explicit axes cannot cut so many rows evenly."""
    spec: Any = getattr(sharding, "spec", ())
    entry = spec[axis] if axis < len(spec) else None
    names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
    if rows % math.prod(sharding.mesh.shape[name] for name in names) == 0:
        return sharding
    return type(sharding)(sharding.mesh, type(spec)(*spec[:axis], None, *spec[axis + 1 :]))


def sharded_as(kind: Any, leaf: jax.Array) -> jax.Array:
    sharding = explicit_sharding(kind)
    return leaf if sharding is None else jax.sharding.reshard(leaf, sharding)


def reshaped(leaf: jax.Array, *shape: int) -> jax.Array:
    """Like `reshape`; JAX 0.9 splits no axis over Explicit axes beside an axis of one."""
    if explicit_sharding(leaf) is None or 1 not in (*leaf.shape, *shape):
        return leaf.reshape(shape)
    leaf = jax.lax.squeeze(leaf, [axis for axis, size in enumerate(leaf.shape) if size == 1])
    leaf = leaf.reshape([size for size in shape if size != 1])
    return jax.lax.expand_dims(leaf, [axis for axis, size in enumerate(shape) if size == 1])


def ready_together(*trees: Tree) -> tuple[Tree, ...]:
    """The same trees, none of which is used before all are there."""
    if versions.JAX >= (0, 11, 2):
        return jax.lax.optimization_barrier(trees)
    leaves, treedef = jax.tree.flatten(trees)
    alike: dict[frozenset[str], list[int]] = {}  # the results of one barrier have one type
    for i, leaf in enumerate(leaves):
        alike.setdefault(varying_axes(leaf), []).append(i)
    for places in alike.values():
        for i, leaf in zip(places, _ready_together([leaves[i] for i in places]), strict=True):
            leaves[i] = leaf
    return treedef.unflatten(leaves)


@jax.custom_jvp
def _ready_together(leaves: list[Any]) -> list[Any]:
    return jax.lax.optimization_barrier(leaves)


def _jvp_together(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
    is_zero = lambda tangent: isinstance(tangent, jax.custom_derivatives.SymbolicZero)
    ready = iter(jax.lax.optimization_barrier([tangent for tangent in tangents[0] if not is_zero(tangent)]))
    return _ready_together(*primals), [tangent if is_zero(tangent) else next(ready) for tangent in tangents[0]]


_ready_together.defjvp(_jvp_together, symbolic_zeros=True)


def extremes(real: jax.Array) -> list[jax.Array]:
    """Values that are finite if and only if the array is: one reduction, if a CPU writes no magnitudes, else two."""
    if versions.JAX >= (0, 10, 2):
        return [jnp.max(jnp.abs(real))]
    return [jnp.max(real), jnp.min(real)]


# References, which functions may have of their own


def is_reference(leaf: Any) -> bool:
    """Whether a leaf is a reference, which no function can return; `jax.Ref` does not tell before JAX 0.8."""
    return type(jax.typeof(leaf)).__name__ == "AbstractRef"


def makes_reference(equation: Any) -> bool:
    return any(type(var.aval).__name__ == "AbstractRef" for var in equation.outvars)


# Equations of traced programs


def opened(program: Any) -> tuple[Any, Sequence[Any]]:
    """The program inside an equation, and its constants."""
    return (program.jaxpr, program.consts) if hasattr(program, "jaxpr") else (program, ())


def sizes_of_scan(equation: Any) -> tuple[int, int]:
    """The number of constants among the operands of a `scan`, and the number of carried values."""
    if "num_consts" in equation.params:
        return equation.params["num_consts"], equation.params["num_carry"]
    consts, carry, _ = equation.params["ft_in"].unpack()
    return len(consts), len(carry)


def is_plain_jit(equation: Any) -> bool:
    """Whether a `jit` says nothing of shardings, so that its function may be called instead."""
    named = (*equation.params["in_shardings"], *equation.params["out_shardings"])
    return all(type(sharding).__name__ == "UnspecifiedValue" for sharding in named)


# Types


def varying_axes(leaf: Any) -> frozenset[str]:
    """The axes over which a value inside `jax.shard_map` may differ between devices."""
    leaf = leaf.inner_aval if type(leaf).__name__ == "AbstractRef" else leaf
    kind: Any = leaf if isinstance(leaf, ShapedArray | jax.ShapeDtypeStruct) else jax.typeof(leaf)
    varying = kind.manual_axis_type and kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma
    return frozenset(varying or ())  # a `jax.ShapeDtypeStruct` need not say it


def as_varying(leaf: Any, axes: Iterable[str]) -> Any:
    """Marks a value as one that may differ along these axes, too."""
    missing = tuple(sorted({*axes} - varying_axes(leaf)))
    if not missing:
        return leaf
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(leaf, missing, to="varying")
    return jax.lax.pvary(leaf, missing)  # type: ignore[attr-defined]


def tracing_on(mesh: Any) -> Any:
    """A context in which a mesh without devices is in reach."""
    return jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh))


def check_concrete(mesh: Any) -> None:
    """Raises for a mesh that only `jax.set_mesh` has set, where shardings over it say nothing of devices."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        remedy = "Pass parameters that lie on it: jax.device_put(params, NamedSharding(mesh, PartitionSpec()))."
        versions.require("A sharding over a mesh that only jax.set_mesh names", (0, 8, 0), remedy)


# Memory of the host


def on_host(leaf: Any) -> bool:
    """Whether an array, or a value inside jit, lies in the memory of the host."""
    if versions.JAX < versions.HOST or not isinstance(leaf, jax.Array):
        return False
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def on_device(tree: Tree) -> Tree:
    """Moves leaves that lie in host memory to the device."""
    move = lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if on_host(leaf) else leaf
    return jax.tree.map(move, tree)


def to_memory_of(tree: Tree, like: Tree) -> Tree:
    """Moves leaves to host memory where the leaf of `like` lies there."""
    move = lambda leaf, old: jax.device_put(leaf, jax.memory.Space.Host) if on_host(old) else leaf
    return jax.tree.map(move, tree, like)
