"""Where partial sums live: on one device, over a mesh, or inside a `jax.shard_map` of the user."""
