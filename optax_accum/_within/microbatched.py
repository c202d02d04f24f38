"""`microbatched`: a function of a batch, computed exactly, micro-batch by micro-batch, from its traced program."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from optax_accum._arguments import callables
from optax_accum._arguments.roles import Roles
from optax_accum._core.types import Name
from optax_accum._within import by_level, splitting
from optax_accum._within.traced_call import UndividedError, trace_call, warn_undivided


@callables.renamed(
    "num_microbatches",
    crossing="Leave it out: its rows are saved. For less memory take value_and_grad, and recompute=.",
)
def microbatched(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    batch_argnums: Name | Sequence[Name] = 1,
) -> Callable[..., Any]:
    """Computes any function of a batch micro-batch by micro-batch, exactly.

        microbatched(loss, k)(params, batch) = loss(params, batch)

    Value, gradient and outputs are the whole batch's, whatever the loss:
    masks, terms with counts of their own, BatchNorm, normalised advantages,
    contrastive losses, dropout. Nothing is declared: the function is traced
    for the rows of the batch, and for twice as many. An axis that grows
    holds rows. Operations that treat rows one by one run in a loop over
    micro-batches; sums over rows are taken in parts there, and added;
    what else takes rows together runs once, on all rows.

    `value_and_grad` takes the gradient apart in the same way, and needs
    fewer loops and less memory. Take `microbatched` to differentiate
    yourself.

    Args:
      fun: any function of a batch that `jax.jit` can trace, for any number
        of rows.
      num_microbatches: the most micro-batches to make.
      microbatch_size: the rows of a micro-batch. Pass exactly one of these
        two.
      batch_argnums: the argument, or several, that hold the batch, by
        position or name: trees whose arrays have rows as their first axis.

    Returns:
      A function of the arguments of `fun`, which returns what `fun` does.

    Raises:
      TypeError, ValueError: invalid arguments.
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
      * A sum over rows that later rows need (BatchNorm) ends a loop; what
        crosses to the next loop is kept for all rows.
      * An operation that is not known runs on all rows: right, without
        saving memory. `explain` names it. So do lines that are another
        program for more rows; with mutable arrays, or where nothing of the
        two programs is alike, the whole function does, with a warning.
      * A rule of your own (`jax.custom_vjp`) that does not treat rows one
        by one, a clip of a parameter's gradient say: runs on all rows.
      * Callbacks and `jax.debug.print` run once, on all rows.

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
    sizes = splitting.as_sizes(num_microbatches, microbatch_size, 1)
    roles = Roles(fun, batch_argnums=batch_argnums, needs_params=False, of_whole_batch=True)
    fun = callables.as_function(fun)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = roles.bind(args, kwargs)
        others = [name for name in call.arguments if name not in call.batch]
        try:
            loss = trace_call(lambda call: call.apply(fun), call, sizes, others)
        except UndividedError as error:
            warn_undivided(error)
            return call.apply(fun)
        if loss.units.parts == 1:
            return call.apply(fun)
        return loss.returned(by_level.evaluate(loss.levels, loss.units, loss.device, loss.values))

    return run
