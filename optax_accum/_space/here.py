"""Owns the question *where?*, which the door of each public function asks once, while tracing. Adds nothing."""

from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optax_accum._arguments import checks
from optax_accum._core import compilers, dtypes
from optax_accum._core.types import Tree
from optax_accum._space import meshes
from optax_accum._space.several import InShardMap, OverMesh, PartialInShardMap, PartialOverMesh, ToShards
from optax_accum._space.space import PARTIAL, Reduction, Space


def here(reduction: Reduction) -> Space:
    """Returns the space of this trace."""
    compilers.warn_of_stale_products()
    axes, to, _ = reduction
    if not axes:
        return Space()
    inside = meshes.is_manual(axes)
    if not inside:
        meshes.check_no_other_map(axes)
    if reduction.is_partial:
        return (PartialInShardMap if inside else PartialOverMesh)(reduction)
    if to is None:
        return (InShardMap if inside else OverMesh)(reduction)
    if inside:
        raise ValueError(
            f"Inside jax.shard_map over {axes} the sum goes everywhere: reduce_to={to!r}. Leave it out; gather there "
            "what came in sharded (jax.lax.all_gather), and shard what comes out of the shard_map."
        )
    return ToShards(reduction)


def with_replicated(to: Tree) -> Tree:
    """Extends `reduce_to` to a pair of sums: the second goes to all devices."""
    return to if to is None or isinstance(to, str) else (to, PartitionSpec())


def as_reduction(reduce_axes: Any, to: Tree, dtype: Any = None, *, partial: bool = False) -> Reduction:
    """Returns the reduction that these options describe, checked; `partial` allows `reduce_to="partial"`."""
    axes = meshes.as_axes(reduce_axes)
    if to is not None and not axes:
        raise ValueError(
            f"reduce_to says where the sum over reduce_axes goes: reduce_to={to!r}, reduce_axes=None. Name the axes, "
            "too, or leave it out."
        )
    if isinstance(to, str) and (to != PARTIAL or not partial):
        allowed = f' or "{PARTIAL}"' if partial else ""
        raise ValueError(f"reduce_to must be None, specs for the tree of the parameters{allowed}: reduce_to={to!r}.")
    if dtype is not None and (not axes or to == PARTIAL):
        raise ValueError(
            "reduce_dtype is the dtype in which gradients are added over reduce_axes: "
            f"reduce_dtype={dtype!r}, reduce_axes={reduce_axes!r}, reduce_to={to!r}. Leave it out."
        )
    dtype = checks.as_float_dtype("reduce_dtype", dtype)
    if dtype is not None and dtypes.is_short(dtype):
        raise ValueError(
            "reduce_dtype must have the range of float32, for a sum beyond it would be lost: "
            f"reduce_dtype={dtype.name} ends at {float(jnp.finfo(dtype).max):g}. Pass jnp.bfloat16."
        )
    return Reduction(axes, to, dtype)
