"""`microbatched`: a function of a batch, computed exactly, micro-batch by micro-batch, from its traced program."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from optax_accum._arguments import callables
from optax_accum._arguments.roles import Call, Roles
from optax_accum._core.types import Name, Tree
from optax_accum._shared.checks import as_function
from optax_accum._space.device import Device
from optax_accum._space.devices import Devices, as_devices
from optax_accum._space.here import here
from optax_accum._within import by_level, shared, splitting
from optax_accum._within.outputs import joined, placed
from optax_accum._within.traced_call import UndividedError, on_device, trace_call, warn_undivided


@callables.renamed(
    "num_microbatches",
    **dict.fromkeys(("rng_argnum", "whole_argnums"), "Leave it out: the traced function tells it."),
)
def microbatched(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    batch_argnums: Name | Sequence[Name] = 1,
    devices: str | Sequence[str] | Devices | None = None,
) -> Callable[..., Any]:
    """Computes any function of a batch micro-batch by micro-batch, exactly.

        microbatched(loss, k)(params, batch) = loss(params, batch)

    Value, gradient and outputs are the whole batch's, whatever the loss:
    masks, terms with counts of their own, BatchNorm, normalised advantages,
    contrastive losses, dropout. Nothing is declared: the function is traced
    for the rows of the batch, and for twice as many. An axis that grows
    holds rows. Operations that treat rows one by one run in a loop over
    micro-batches; sums over rows are taken in parts there, and added;
    any other operation that combines rows runs once, on all rows.

    `value_and_grad` takes the gradient apart in the same way, and needs
    fewer loops and less memory. Take `microbatched` to differentiate
    yourself: a function of rows under a loss of your own (an encoder, under
    blocks of logits), or a layer whose parameters are sharded (FSDP). With
    `devices` a sharded layer is gathered once for all micro-batches, and
    once more in the backward pass; its gradient is added on each device and
    scattered once. The network traffic does not grow with k: docs/fsdp.md.

    Args:
      fun: any function of a batch that `jax.jit` can trace, for any number
        of rows.
      num_microbatches: the most micro-batches to make.
      microbatch_size: the rows of a micro-batch. Pass exactly one of these
        two.
      batch_argnums: the argument, or several, that hold the batch, by
        position or name: trees whose arrays have rows as their first axis.
      devices: the mesh axes over which the batch is sharded: the rows of
        all devices are one batch. Or `Devices(axes, to=specs)`: how the
        parameters, argument 0 here, are sharded over these axes, and their
        gradients, too; see `optax_accum.sharding`. In a scan over layers,
        pass the specs of one layer. By default parameters are replicated,
        and gradients are reduced once.

    Returns:
      A function of the arguments of `fun`, which returns what `fun` does.

    Raises:
      TypeError, ValueError: invalid arguments; specs that do not shard over
        these axes, or not evenly; rows that the devices do not divide.
      Exception: what the function raises for twice as many rows; a note
        says what to do.

    Guarantees:
      Known when tracing:

      * Rows that k does not divide: the last micro-batches are filled up
        with rows that count for nothing.
      * Groups of rows (`x.reshape(-1, 4)`): micro-batches are of whole
        groups. There are at most as many as groups.
      * Sums over rows are in at least float32, and so are gradients of
        bfloat16 parameters.
      * Random numbers (threefry): each micro-batch draws those that its
        rows have in the whole batch. Other generators draw for all rows.
      * A sum over rows that later rows need (BatchNorm) ends a loop;
        values that the next loop needs are kept for all rows.
      * An operation that is not known runs on all rows: right, without
        saving memory. `explain` names it. So do lines that are another
        program for more rows; with mutable arrays, or where nothing of the
        two programs is alike, the whole function does, with a warning.
      * A rule of your own (`jax.custom_vjp`) that does not treat rows one
        by one, a clip of a parameter's gradient say: runs on all rows.
      * Callbacks and `jax.debug.print` run once, on all rows.
      * Forward mode (`jvp`, `jacfwd`, `hessian`): works, in bfloat16 too.
      * `Devices(to=)` inside a `jax.shard_map` over these axes: an error that
        says how to gather there.
      * Values that `fun` closes over have their gradients added over the
        devices at each micro-batch; pass them as arguments instead.

    References:
      * L. Gao et al., *Scaling deep contrastive learning batch size under
        memory limited setup* (GradCache), 2021.
      * J. Lamy-Poirier, *Layered gradient accumulation and modular pipeline
        parallelism*, arXiv:2106.02679.

    Example:
      A normalised layer:

      >>> import jax, jax.numpy as jnp, optax_accum
      >>> def loss(w, x):
      ...     h = jnp.tanh(x * w)
      ...     h = (h - h.mean()) / (h.std() + 1e-3)
      ...     return jnp.mean(h ** 3)
      >>> x = jnp.arange(8.0)
      >>> whole = jax.grad(loss)(0.5, x)
      >>> small = jax.grad(optax_accum.microbatched(loss, 4))(0.5, x)
      >>> bool(jnp.allclose(whole, small))
      True
    """
    sizes = splitting.as_sizes(num_microbatches, microbatch_size)
    roles = Roles(fun, batch_argnums=batch_argnums, needs_params=False, of_whole_batch=True)
    fun, over = as_function(fun), as_devices(devices, of_gradients=False)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        call, space = roles.bind(args, kwargs), here(over)
        for name in call.params:
            space.check_params(call.arguments[name])
        on_device = functools.partial(_on_device, fun, sizes)
        return joined(space, *space.run(on_device, call, sharded=next(iter(call.params), None)))

    return run


def _on_device(fun: Callable[..., Any], sizes: splitting.Sizes, device: Device, call: Call) -> tuple[Tree, Tree]:
    """The outputs of one device's rows, and those that all devices have alike."""
    others = tuple(name for name in call.arguments if name not in call.batch)
    wide = shared.widened(call[others], tuple(map(device.gathers, others, call[others])))
    call = call.with_values(others, shared.narrowed(wide))
    try:
        traced = trace_call(lambda call: call.apply(fun), call, sizes, others, device, by_rows=True)
    except UndividedError as error:
        if not device.is_alone:
            error.add_note("Over devices micro-batches cannot run at once. Change that line.")
            raise
        warn_undivided(error)
        return None, on_device(call).apply(fun)
    if device.is_alone and traced.units.microbatches == 1:
        return None, on_device(call).apply(fun)
    call = call.with_values((*others, *call.batch), (*wide, *traced.call[call.batch]))
    values = shared.arrays_of(list(call.arguments.values()))
    outputs = traced.returned(by_level.evaluate(traced.levels, traced.units, traced.device, values))
    return placed(device, traced, outputs)
