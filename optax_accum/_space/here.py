"""Where sums live in this trace: each public function asks once."""

from optax_accum._core import compilers
from optax_accum._space import meshes
from optax_accum._space.devices import Devices
from optax_accum._space.several import InShardMap, OverMesh, PartialInShardMap, PartialOverMesh, ToShards
from optax_accum._space.space import Space


def here(devices: Devices) -> Space:
    """Returns the space of this trace."""
    compilers.warn_of_stale_products()
    axes = devices.axes
    if not axes:
        return Space()
    inside = meshes.is_manual(axes)
    if not inside:
        meshes.check_no_other_map(axes)
    if devices.is_partial:
        return (PartialInShardMap if inside else PartialOverMesh)(devices)
    if devices.to is None:
        return (InShardMap if inside else OverMesh)(devices)
    if inside:
        raise ValueError(
            f"Inside jax.shard_map over {axes} the sum goes everywhere: to={devices.to!r}. Leave it out; gather there "
            "what came in sharded (jax.lax.all_gather), and shard what comes out of the shard_map."
        )
    return ToShards(devices)
