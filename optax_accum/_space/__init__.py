"""Where partial sums live: on one device, over a mesh, or inside a `jax.shard_map` of the user.

Each public function calls `here` once; it chooses. `mapped` runs on each device, `ending` adds up in the last backward
pass of a window, `Devices(to=)` says whether every device gets the sum or each its shard.
"""
