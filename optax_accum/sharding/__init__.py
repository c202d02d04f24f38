"""Accumulation over devices: one reduction per window.

`state_sharding` returns the state's shardings.

`devices` names the mesh axis, or axes, over which the batch is sharded:
`devices="data"`. Each device then adds its own gradients to its own partial
sum (arrays [d, ...] for d devices). The partial sums are added over the
devices once, when the window closes or the call ends. XLA's partitioner
handles the other mesh axes.

* `value_and_grad(fun, ..., devices="data")`: the rows of all devices are
  one batch, and each device splits its own rows.
* `accumulate_gradients(inner, every, devices="data")`: gradients must be
  partial sums. These come from `value_and_apply_gradients`, from
  `value_and_grad(..., devices=Devices("data", to="partial"))`, or, inside a
  `jax.shard_map` over these axes, from a gradient with respect to
  `defer_reduction(params, axes)`. A weight is one number for each device
  [d] (inside `jax.shard_map` that device's own), or one number, shared
  equally by the devices. A mean argument is one for each device or the same
  for all. A device's key is `fold_in(fold_in(key, device), i)`.
* `microbatched(block, ..., devices=Devices("data", to=specs))`: a
  layer whose parameters are sharded as `specs` say is gathered once for all
  its micro-batches, and its gradient scattered once (FSDP): docs/fsdp.md.

`Devices(axes, to=)` says where the sum goes:

* None: to every device.
* `PartitionSpec`s or `NamedSharding`s, as a prefix of the parameters' tree,
  such as `shard_over(params, "data")`. Where they name a reduced axis, the
  reduction is a reduce-scatter, each device updates its shard, and the
  parameters are gathered afterwards (ZeRO-1). With several `argnums`, a
  tuple of such.
* `"partial"`, for `value_and_grad` and `reduce_microbatches`: nowhere.
  Loss, gradients and outputs are those of each device, [d, ...] (inside
  `jax.shard_map` its own [...]).

`Devices(axes, dtype=jnp.bfloat16)` sends half the bytes: each device rounds
its sum once, receives the others' (all-to-all) and adds them in the dtype
of the sums; if the sum goes to all devices, it is rounded once more on the
way. With `u = 2**-8` the error is at most
`u (sum_i |p_i| + |sum_i p_i|)` for partial sums `p_i`. Off by default. A
leaf is added in its own dtype if the devices divide none of its dimensions,
or if `to` scatters two of them.

`Devices(axes, overlap=True)` adds gradients over the devices inside the
backward pass of the last micro-batch, also layer by layer inside a scan, so
that the reduction overlaps the matrix products that follow.
`value_and_apply_gradients` does so if a static `flush=True` closes the
window. This micro-batch is compiled separately, and all devices run it,
also if its weight is zero. On GPUs it is on by default for 64 MiB of sums
or more, without `to`: docs/fsdp.md.

Known when building:

* A callable `nonfinite`: an error; it would need the reduced gradient.

Known when tracing:

* Rows, or `microbatch_size`, that the devices do not divide: an error.
* No such axis; no mesh in reach; a state for other devices: an error that
  says what to call.
* Gradients that have been reduced already; a loss averaged with `pmean`: an
  error.
* A carry that differs between devices; outputs `"stack"` and `"last"`: an
  error.
* Parameters sharded over the axis (FSDP): an error that says what it costs;
  with `Devices(to=)`, they are gathered. Inside `jit` on an Auto mesh their
  sharding is invisible: `value_and_grad` gathers them.
* The same in a `jax.shard_map` of yours, whose devices have shards that the
  loss gathers, or experts of their own: an error, except with
  `to="partial"`, for the gradient of a shard is whole on its device.
  With `check_vma=False` nothing tells shards from what all have, and the
  gradients of different shards are added, which is wrong: take
  `to="partial"`, and add up only those of shared parameters.
* `Devices(dtype=)` inside `jax.shard_map`: needs `check_vma=False`, as does
  `overlap=True`.
* A mesh with Auto and Explicit axes: both work.
* `fun` communicates, and a device's weight is 0: the device runs it too,
  because others wait; keep its loss finite. With `to="partial"`: an
  error.

* Other axes of several devices (tensor parallelism), unless the loss runs
  in a `jax.shard_map` over all of them: a device whose weight is 0 runs the
  micro-batch all the same, and leaves it out, because collectives over the
  other axes may wait for it. NaNs of it (0 / 0) are left out, too, except
  those of a `Ratio`.

Known when compiling:

* A micro-step that only accumulates: no collective at all, but with
  `nonfinite="skip"` or `"omit"` one flag, on which devices agree.
* `nonfinite="discard"`: they agree on one flag when the window closes.

Known when running:

* A step on Auto axes without `out_shardings`: shardings may change, and it
  compiles twice; pin them.
"""

from optax_accum._space.several import defer_reduction
from optax_accum.accelerators._collectives import Collective, Collectives, count_collectives
from optax_accum.sharding._shardings import shard_over, state_sharding

__all__ = ["Collective", "Collectives", "count_collectives", "defer_reduction", "shard_over", "state_sharding"]
