"""`value_and_grad`: value and gradient of a batch, micro-batch by micro-batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._arguments import callables, checks
from optax_accum._arguments.roles import Call
from optax_accum._arguments.rows import count_rows
from optax_accum._core import dtypes, tracing
from optax_accum._core.types import Name
from optax_accum._loss.meter import Options
from optax_accum._space.devices import Devices
from optax_accum._space.here import here_for
from optax_accum._within import whole_batch
from optax_accum._within.call_rules import CallRules, as_rules
from optax_accum._within.outputs import joined

_BY_ITSELF = (
    "Leave it out: the traced loss of the whole batch tells it. Where each micro-batch is to count by itself, take "
    "jax.value_and_grad(optax_accum.reduce_microbatches(fun, num_microbatches, ...))."
)


@callables.renamed(
    "num_microbatches",
    **dict.fromkeys(("whole_argnums", "weight_fn", "rng_argnum", "carry_argnum"), _BY_ITSELF),
)
def value_and_grad(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    argnums: Name | Sequence[Name] = 0,
    has_aux: bool = False,
    batch_argnums: Name | Sequence[Name] = 1,
    accumulator_dtype: Any = None,
    devices: str | Sequence[str] | Devices | None = None,
    statistics: bool | Options = False,
    recompute: float | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """Replaces `jax.value_and_grad`, one micro-batch at a time.

        value, grads = value_and_grad(loss, 8)(params, batch)

    Same call, same return, same numbers, less memory: value, gradient and
    `aux` are the whole batch's, to rounding. The traced loss of the whole
    batch tells how its rows belong together, so any loss is exact, and
    nothing is declared: masks, several terms, BatchNorm, contrastive losses,
    dropout (`microbatched` says how, and what it guarantees). With
    `devices` the rows of all devices are one batch. The gradient is traced,
    too: a parameter's is a sum over rows, and inside `jit` each micro-batch's
    part is added to it where it arises, so no second tree of gradients is
    stored. Where the loss is linear in sums over rows, as a masked mean is,
    each micro-batch runs once, forward and backward. If k divides the rows,
    row r is in micro-batch `r mod k`, so the rows of a sharded batch need
    not move.

    To let each micro-batch count by itself (ghost BatchNorm), take
    `jax.value_and_grad(reduce_microbatches(loss, k))`; also for a loss that
    communicates with the other `devices` inside `jax.shard_map`, which is
    refused here. A collective along any other axis (tensor parallelism)
    treats rows one by one.

    Example:
      A masked mean over normalised rows, with dropout:

      >>> import jax, jax.numpy as jnp, optax_accum
      >>> def loss(w, batch, key):
      ...     x = batch["x"] - batch["x"].mean(0, keepdims=True)
      ...     kept = jax.random.bernoulli(key, 0.9, x.shape)
      ...     error = (jnp.where(kept, x, 0) @ w - batch["y"]) ** 2
      ...     return jnp.sum(batch["mask"] * error) / jnp.sum(batch["mask"])
      >>> grad_fn = optax_accum.value_and_grad(loss, microbatch_size=4)
      >>> batch = {"x": jnp.eye(10, 3), "y": jnp.ones(10)}
      >>> batch["mask"] = jnp.arange(10) < 7
      >>> args = jnp.ones(3), batch, jax.random.key(0)
      >>> value, grad = jax.jit(grad_fn)(*args)
      >>> whole, _ = jax.value_and_grad(loss)(*args)
      >>> bool(jnp.allclose(value, whole))
      True

    Args:
      fun: the loss of the whole batch, for any number of rows: a real
        scalar; a dict of scalar terms, which are added; a `Ratio(total,
        count)`, which is divided; or a dict of those.
      num_microbatches: the most micro-batches to make, n at most, of
        `ceil(n / num_microbatches)` rows each. It is the second positional
        argument, where `jax.value_and_grad` has `argnums`.
      microbatch_size: the rows of a micro-batch. Pass exactly one of these
        two.
      argnums: the argument to differentiate, or several, as in
        `jax.value_and_grad`.
      has_aux: `fun` returns `(loss, aux)`.
      batch_argnums: the argument, or several, that hold the batch: trees
        whose arrays are split along their first axis; scalars stay whole, and
        a list of them is refused. Here, and wherever arguments are named,
        `1`, `"x"` and `(1, "mask")` are positions in `fun` and names of its
        parameters: either way, a call may pass the argument by position or
        by keyword.
      accumulator_dtype: the dtype to add in, and to return, or a pytree
        prefix of dtypes. By default, and where it is None, sums are in at
        least float32, and gradients come back in the parameters' dtypes.
      devices: the mesh axes over which the batch is sharded, for one
        reduction per call, or `Devices`; see `optax_accum.sharding`.
      statistics: whether to measure gradients; the function then returns
        `((value, statistics), gradient)`. See `optax_accum.statistics`.
      recompute: the share of a forward pass, by the bytes that it reads and
        writes, that may run once more, so that fewer activations (those
        before each BatchNorm) are kept for the backward loops. With more
        than 1, layers may run several times. By default 0.6 on an
        accelerator, and 0, none, on a CPU. It changes nothing where one
        loop is enough, and nothing inside a scan over layers.

    Returns:
      A function of the arguments of `fun`, which returns what
      `jax.value_and_grad(fun, argnums, has_aux)` returns.

    Raises:
      TypeError, ValueError: invalid arguments, when you build or trace; a
        loss that takes something from the other `devices`.
      Exception: what the loss raises for 2n rows, if it does: it is traced
        for n rows and for 2n, to find the axes that hold rows. A note says
        what to do.

    Guarantees:
      Known when tracing:

      * `aux` is what `fun` returns for the whole batch, to the last leaf.
      * An argument that differs between devices, as its type tells, and is
        used after a sum over rows: an error.
      * A loss that takes rows together (BatchNorm), or is not linear in its
        sums over rows (a variance, a balance term): several loops, forward,
        then backward. Values that pass from one loop to a later one are
        kept for all rows, or computed again. A backward loop runs its
        forward loop once more in any case. `statistics` need all gradients
        in one loop. `explain` shows loops and bytes.
      * Random numbers (threefry): each micro-batch draws those that its
        rows have in the whole batch. Other generators draw for all rows.
      * Rows that k does not divide: the last micro-batches are filled up
        with rows that count for nothing.
      * Rows that parameters make (a class token that is tiled, `p[:n]`):
        each micro-batch takes those at its own places.
      * Lines that are another program for 2n rows (`if n % 2`,
        `lax.associative_scan`): they run on all rows. Where the two programs
        have nothing in common, or the loss has mutable arrays of its own
        (`jax.new_ref`), all of it does: exact, with a warning that names the
        line, and no memory is saved; with `devices` or `statistics` an error.
      * A batch in the memory of the host (`pinned_host`): each micro-batch
        is brought to the device by the loop that takes it.
      * Groups of rows (`x.reshape(-1, 4)`): micro-batches are of whole
        groups, and so must be the rows of each device: else an error names
        the line. With `h[: n // 2]` devices need not divide the half.
      * A batch that is split already, [k, m, ...]: `fun` takes it as k rows
        (`jax.vmap` over them, and a mean).
      * `Devices(to="partial")`: each device has a batch of its own, and
        random keys of its own, with its index folded in.
      * A loss below 32 bits: return `loss.astype(jnp.float32)`.
      * bfloat16 parameters, or float32 ones that `fun` casts: their
        gradients are added in float32.
      * A `jax.custom_vjp` in `fun`: its rule is traced like the rest. A clip
        of a parameter's gradient clips the whole of it. Inside `jit` the
        rule may close over a value that `fun` computes; outside that is an
        error of JAX.
      * A parameter that is used twice: the parts of its gradient are added
        one by one; the sum is the same to rounding.
      * Differentiated again (`hessian`), also through a `jit` or
        `jax.checkpoint`; `jax.vmap`: the same numbers. The second
        derivatives by bfloat16 arrays are added in bfloat16: take them by
        float32 ones.

      Known when running:

      * A denominator of zero: what `fun` returns for it, NaN perhaps, as in
        the whole batch. A micro-batch whose rows are all masked is no
        special case.
      * Called outside `jit`: the micro-batches run one after the other.
        `fun` is traced all the same; if it looks at values, which no trace
        has, all rows run at once, with a warning that names the line.
        Gradients are added after the backward pass, and nothing is made
        again. Nothing is compiled, but with `devices`, where every call is:
        use `jit`.

    References:
      A minimum cut by bytes chooses what is kept, as in PyTorch's
      `min_cut_rematerialization_partition`. `optax.microbatch` interleaves
      rows in the same way.
    """
    rules = as_rules(
        fun,
        num_microbatches,
        microbatch_size=microbatch_size,
        argnums=argnums,
        has_aux=has_aux,
        batch_argnums=batch_argnums,
        accumulator_dtype=accumulator_dtype,
        devices=devices,
        statistics=statistics,
        recompute=recompute,
    )

    @functools.wraps(rules.fun)
    def compute(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return _differentiated(rules, rules.roles.bind(args, kwargs))

    return compute


def _differentiated(rules: CallRules, call: Call) -> tuple[Any, Any]:
    checks.check_no_module(call[call.params])
    checks.check_differentiable(call[call.params], of_whole_batch=True)
    again = tracing.is_again(list(call.arguments.values()))
    _check_batch(rules, call)
    call = call.with_values(call.params, jax.tree.map(jnp.asarray, call[call.params]))
    space = here_for(rules.devices, rules.meter, call[call.params])
    local, outputs = space.run(lambda device, call: whole_batch.differentiated(rules, device, call, again), call)
    value = joined(space, local.outputs, outputs)
    grads = space.reduced(local.grads)[0]
    samples, weight = space.total((local.samples, local.weight))
    value = rules.meter.with_statistics(value, samples, grads, weight)
    grads = dtypes.as_gradients(grads, call[call.params], rules.accumulator_dtype)
    return value, grads[0] if rules.single else grads


def _check_batch(rules: CallRules, call: Call) -> None:
    """Raises for a batch whose leaves have no rows in common: the parameters, perhaps, where 1 was meant as argnums."""
    try:
        count_rows(call[call.batch])
    except ValueError as error:
        if rules.sizes.num_microbatches == 1 and len(jax.tree.leaves(call[call.batch])) > 1:
            error.add_note("If the second argument was meant as in jax.value_and_grad, pass it as argnums=1.")
        raise
