"""`microbatched_apply`: a forward pass in micro-batches that the backward pass runs again."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._arguments import callables, draws, results
from optax_accum._arguments.roles import Call, Roles
from optax_accum._arguments.rows import count_rows, is_split
from optax_accum._core.leaves import is_array, parted
from optax_accum._core.types import Name, Tree
from optax_accum._space.device import Device
from optax_accum._space.devices import Devices, as_devices
from optax_accum._space.here import here
from optax_accum._within import loops, shared, splitting


def microbatched_apply(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    batch_argnums: Name | Sequence[Name] = 1,
    whole_argnums: Name | Sequence[Name] = (),
    group_size: int = 1,
    rng_argnum: Name | None = None,
    devices: str | Sequence[str] | Devices | None = None,
) -> Callable[..., Any]:
    """Runs a function in micro-batches that the backward pass recomputes.

        microbatched_apply(fun, k)(params, batch) = fun(params, batch)

    It returns the outputs of all rows, with the memory of one micro-batch.

    Use it for losses that couple examples (contrastive, ranking, load
    balancing): their gradient is not a sum of micro-batch gradients. With
    this function, any loss of all outputs has the whole batch's exact
    gradient, with respect to parameters, batch and anything that
    `fun` closes over. The price is a second forward pass.

    Use it also for layers whose parameters are sharded (FSDP): with
    `devices`, each device splits its own rows, and `fun` sees whole
    parameters. They are gathered once for all micro-batches, and once more
    in the backward pass; their gradients are added on each device and
    scattered once. The network traffic does not grow with k: docs/fsdp.md.

    Args:
      fun: `fun(params, batch)` returns a tree of arrays with one row for
        each example, and treats each row independently.
      num_microbatches: the most micro-batches to make.
      microbatch_size: the rows of a micro-batch. Pass exactly one of these
        two.
      batch_argnums: the argument, or several, that hold the batch, by
        position or name; see `value_and_grad`, also for the next three.
      whole_argnums: arguments with as many rows, and keys, that every
        micro-batch gets whole.
      group_size: this many consecutive rows always stay in one micro-batch.
      rng_argnum: an argument that is a key: micro-batch i gets
        `jax.random.fold_in(key, i)`, the same in both passes.
      devices: the mesh axes over which the batch is sharded, or
        `Devices(axes, to=specs)`: how the parameters, argument 0 here, are
        sharded over these axes, and their gradients, too; see
        `optax_accum.sharding`. In a scan over layers, pass the specs of one
        layer. By default parameters are replicated, and gradients are
        reduced once.

    Returns:
      A function of the arguments of `fun`, which returns its outputs for
      the whole batch, in the order of the rows.

    Raises:
      ValueError: an output without a row for each example; an argument that
        is a key and that no role names, or another with as many rows as the
        batch; specs that do not shard over these axes, or not evenly;
        rows that the devices do not divide. Otherwise as `value_and_grad`.

    Guarantees:
      Known when tracing:

      * The rows do not divide: one smaller micro-batch; nothing is padded
        or dropped.
      * bfloat16 parameters: their gradient is added in float32, over
        devices too, and cast down once.
      * `devices` and a key: `fold_in(fold_in(key, device), i)`, the
        same in both passes.
      * `Devices(to=)` inside a `jax.shard_map` over these axes: an error that
        says how to gather there.
      * A flag, a name or a function among the arguments: stays what it is.
      * Forward mode (`jvp`, `jacfwd`, `hessian`): works, in bfloat16 too.
      * Several calls in one loss (two towers): each has its own
        micro-batches.

      Known when compiling:

      * Other arguments of `fun` that have gradients: added on each device,
        and reduced once. Values that it closes over: reduced at each
        micro-batch, and on some meshes an error of JAX; pass them.
      * Other mesh axes (tensor): left to the partitioner.

      Never known:

      * `fun` couples examples (BatchNorm): its output is not the whole
        batch's; see `verify`.

    Example:
      In-batch softmax over 8 rows, two at a time:

      >>> import jax, jax.numpy as jnp, optax_accum
      >>> encode = lambda params, x: jnp.tanh(x @ params)
      >>> def loss(params, x, y, encode):
      ...     logits = encode(params, x) @ encode(params, y).T
      ...     return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)))
      >>> params, x, y = jnp.eye(3), jnp.ones((8, 3)), jnp.ones((8, 3))
      >>> small = optax_accum.microbatched_apply(encode, microbatch_size=2)
      >>> whole = jax.grad(loss)(params, x, y, encode)
      >>> cut = jax.grad(loss)(params, x, y, small)
      >>> bool(jnp.allclose(whole, cut))
      True

    References:
      * L. Gao et al., *Scaling deep contrastive learning batch size under
        memory limited setup* (GradCache), 2021.
      * J. Lamy-Poirier, *Layered gradient accumulation and modular pipeline
        parallelism*, arXiv:2106.02679.
    """
    callables.as_function(fun)
    sizes = splitting.as_sizes(num_microbatches, microbatch_size, group_size)
    devices = as_devices(devices, of_gradients=False)
    roles = Roles(
        fun, batch_argnums=batch_argnums, whole_argnums=whole_argnums, rng_argnum=rng_argnum, needs_params=False
    )

    @functools.wraps(fun)
    def applied(*args: Any, **kwargs: Any) -> Any:
        call = roles.bind(args, kwargs)
        call.check_shared(count_rows(call[call.batch]))
        rows = splitting.split_rows(call[call.batch], sizes, 1).size
        draws.check_keys(lambda call: call.apply(fun), _shapes(call, rows), _shapes(call))
        space = here(devices)
        for name in call.params:
            space.check_params(call.arguments[name])

        def on_device(device: Any, call: Any) -> Any:
            return (_on_device(fun, sizes, device, call), None)

        outputs, _ = space.run(on_device, call, sharded=next(iter(call.params), None))
        return jax.tree.map(functools.partial(space.output, "concat"), outputs)

    return applied


def _shapes(call: Call, rows: int | None = None) -> Call:
    """The call with shapes in place of arrays; with `rows`, the batch has so many."""

    def shape(name: Name, leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        cut = rows is not None and name in call.batch and is_split(leaf)
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]) if cut else jnp.shape(leaf), jnp.result_type(leaf))

    named = call.arguments.items()
    return call.with_arguments({name: jax.tree.map(functools.partial(shape, name), arg) for name, arg in named})


def _on_device(fun: Callable[..., Any], sizes: splitting.Sizes, device: Device, call: Call) -> Any:
    """The outputs of one device's micro-batches, in the order of its rows."""
    call = device.fold_key(call)
    batches = call[call.batch]
    split = splitting.split_rows(batches, sizes, device.count)
    names = tuple(name for name in call.arguments if name not in call.batch)
    gathers = tuple(map(device.gathers, names, call[names]))
    arrays, filled = parted(shared.widened(call[names], gathers), is_array)

    def outputs_of(arrays: Sequence[Any], micro_batches: Sequence[Tree], index: Any) -> Any:
        values = (*shared.narrowed(filled(arrays)), *micro_batches)
        return call.with_values((*names, *call.batch), values).fold_key(index).apply(fun)

    def differ(arrays: Any, micro_batches: Any, index: Any) -> Any:
        return [False] * len(jax.tree.leaves(arrays)), jax.tree.map(lambda _: True, micro_batches), False

    in_step = device.in_step(outputs_of, None, differ)
    run = functools.partial(loops.recomputed(in_step, (call[names], batches)), arrays)
    return _mapped(run, split, batches, shared.Closure(arrays))


def _mapped(
    outputs_of: Callable[[Sequence[Tree], Any], Any],
    split: splitting.Split,
    batches: Sequence[Tree],
    closure: shared.Closure,
) -> Any:
    interleaved, filled = parted(splitting.interleaved(split, batches), is_split)

    def micro(xs: Any) -> Any:
        return outputs_of(splitting.ungrouped(split, filled(xs[0])), xs[1])

    slices = [jnp.moveaxis(leaf, 1, 0) for leaf in interleaved], jnp.arange(split.full)
    outputs = loops.mapped(closure.opened(micro, jax.tree.map(lambda leaf: leaf[0], slices)), slices)
    results.check_rows(outputs, split.size)
    outputs = jax.tree.map(functools.partial(splitting.original_order, split), outputs)
    if not split.rest:
        return outputs
    left, filled = parted(splitting.remainder(split, batches), is_split)
    rest = closure.opened(lambda left: outputs_of(filled(left), split.full), left)(left)
    results.check_rest(outputs, rest, split.size, split.rest)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), outputs, rest)
