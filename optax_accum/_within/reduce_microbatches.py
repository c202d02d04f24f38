"""`reduce_microbatches`: any function of a batch, run one micro-batch after the other."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._arguments import callables, checks
from optax_accum._arguments.roles import Call, Roles
from optax_accum._arguments.rows import count_rows, is_split
from optax_accum._core import tracing
from optax_accum._core.leaves import is_array, parted
from optax_accum._core.types import Index, Name, Tree
from optax_accum._loss.ratio import LossParts, Returns
from optax_accum._shared.checks import as_function
from optax_accum._space.device import Device
from optax_accum._space.devices import Devices, as_devices
from optax_accum._space.here import here
from optax_accum._within import microbatches, reductions, shared, splitting

_AGAIN = (
    "What reduce_microbatches returns is not differentiated through jit where the number of micro-batches is traced "
    "(weight_fn). Differentiate inside fun, or take value_and_grad."
)


@callables.renamed(
    "num_microbatches",
    has_aux="Leave it out: reduction= covers all that fun returns.",
    argnums="Pass jax.value_and_grad(fun, argnums), or use optax_accum.value_and_grad.",
)
def reduce_microbatches(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    batch_argnums: Name | Sequence[Name] = 1,
    whole_argnums: Name | Sequence[Name] = (),
    weight_fn: Callable[..., Any] | None = None,
    rng_argnum: Name | None = None,
    carry_argnum: Name | None = None,
    reduction: Tree = "mean",
    devices: str | Sequence[str] | Devices | None = None,
) -> Callable[..., Any]:
    """Runs any function of a batch one micro-batch after the other.

        value, grads = reduce_microbatches(grad_fn, 8)(params, batch)

    The function may compute gradients, an evaluation, or metrics. Its
    results `x_i` for micro-batches with weights `w_i` are combined, leaf by
    leaf, into its result for the batch:

        mean:  sum_i s_i x_i,  s_i = w_i / sum_j w_j
        sum:   sum_i x_i
        max, min, concat, stack, last

    Sums are in at least float32. For a gradient function this stores one
    tree of gradients beside the sum; `value_and_grad` of the loss does not.

    Args:
      fun: any function of a batch, such as
        `jax.value_and_grad(loss, has_aux=True)`.
      num_microbatches: the most micro-batches to make.
      microbatch_size: the rows of a micro-batch. Pass exactly one of these
        two.
      batch_argnums: the argument, or several, that hold the batch, by
        position or name; see `value_and_grad`, also for the next two.
      whole_argnums: arguments with as many rows, and keys, that every
        micro-batch gets whole.
      weight_fn: `weight_fn(batch)`, how much a micro-batch counts in a
        mean. By default the number of its rows.
      rng_argnum: an argument that is a key: micro-batch i gets
        `jax.random.fold_in(key, i)`.
      carry_argnum: an argument that each micro-batch hands on to the next:
        `fun` returns `(result, carry)`.
      reduction: how to combine each leaf of the result, one name or a
        pytree prefix of names: `"mean"`, `"sum"`, `"max"`, `"min"`,
        `"concat"` (rows, in their order), `"stack"` (one for each
        micro-batch), or `"last"`. A `Ratio` is added, not averaged.
      devices: the mesh axes over which the batch is sharded: the results
        are reduced once, at the end; or `Devices(axes, to=)`, for the tree
        of the result. See `optax_accum.sharding`.

    Returns:
      A function of the arguments of `fun`, which returns what `fun` does.

    Raises:
      TypeError, ValueError: a reduction that does not fit; arguments whose
        roles do not. Otherwise as `value_and_grad`.

    Guarantees:
      Known when tracing:

      * The rows do not divide: one smaller micro-batch; nothing is padded
        or dropped.
      * A batch without rows (Poisson sampling): `fun` is not run. Means and
        sums are zeros, `"concat"` has no rows, `"max"` is `-inf`.
      * A batch that is split already, [k, m, ...]: its micro-batches are
        its rows. Pass `microbatch_size=1`, and let `fun` take `leaf[0]`.
      * The gradient of an integer (float0, from `allow_int=True`): stays.
      * `jax.grad` of the call: the whole batch's gradient. That of bfloat16
        arguments is added in float32, except of a carry. It keeps what
        every micro-batch needs for its backward pass, unlike
        `value_and_grad`. With `devices`, pass what has a gradient as an
        argument: the gradient of closed-over values crosses the network
        at each micro-batch.
      * A mean of integers; `"concat"` of what has no rows: an error.
      * `devices` with `"stack"` or `"last"`: an error.

      Known when running:

      * A weight of zero: its micro-batch is not run, and has zeros in
        `"concat"` and `"stack"`.
      * Weights that add to zero: zeros for a mean.

    Example:
      A ready gradient function, whose micro-batches have masks of different
      lengths:

      >>> import jax, jax.numpy as jnp, optax_accum
      >>> def loss(w, batch):
      ...     error = (batch["x"] * w - 1) ** 2
      ...     return jnp.sum(batch["mask"] * error) / jnp.sum(batch["mask"])
      >>> grad_fn = optax_accum.reduce_microbatches(
      ...     jax.value_and_grad(loss),
      ...     microbatch_size=4,
      ...     weight_fn=lambda batch: batch["mask"].sum())
      >>> batch = {"x": jnp.arange(10.0), "mask": jnp.arange(10) < 7}
      >>> value, grad = jax.jit(grad_fn)(0.0, batch)
      >>> print(value, grad.round(4))
      1.0 -6.0
    """
    reductions.check_names(reduction)
    roles = Roles(
        fun,
        needs_params=False,
        batch_argnums=batch_argnums,
        whole_argnums=whole_argnums,
        rng_argnum=rng_argnum,
        carry_argnum=carry_argnum,
    )
    rules = _Rules(
        fun=as_function(fun),
        returns=Returns(carry_argnum is not None, "carry_argnum", "(result, carry)"),
        sizes=splitting.as_sizes(num_microbatches, microbatch_size),
        weight_fn=callables.as_weight_fn(weight_fn, roles),
        reduction=reduction,
        devices=as_devices(devices, partial=True, of_gradients=False),
    )

    @functools.wraps(fun)
    def reduced(*args: Any, **kwargs: Any) -> Any:
        return _reduced(rules, roles.bind(args, kwargs))

    return reduced


class _Rules(NamedTuple):
    fun: Callable[..., Any]
    returns: Returns
    sizes: splitting.Sizes
    weight_fn: Callable[..., Any] | None
    reduction: Tree
    devices: Devices

    def parts(self, call: Call) -> LossParts:
        """Calls `fun`; its result stands in the place of a loss."""
        return self.returns.taken_apart(call.apply(self.fun))

    def outputs(self, shapes: Tree, split: splitting.Split) -> reductions.Outputs:
        return reductions.outputs_of(self.reduction, shapes, split)


def _reduced(rules: _Rules, call: Call) -> Any:
    checks.check_no_module(call.arguments.values(), "Use optax_accum.flax.nnx.reduce_microbatches.")
    run = functools.partial(_run_no_rows, rules)
    if not _is_empty(call[call.batch]):
        call.check_shared(count_rows(call[call.batch]))
        run = functools.partial(_on_device, rules, tracing.is_again(list(call.arguments.values())))
    space = here(rules.devices)
    local, carry = space.run(run, call)
    space.check_shared(call[call.params], local)
    results = space.outputs(reductions.over_devices(rules.reduction, local), local)
    return rules.returns.joined(LossParts(results, carry))


def _on_device(rules: _Rules, static: bool, device: Device, call: Call) -> tuple[Tree, Tree]:
    """Runs the micro-batches of one device in order; returns the outputs and the last carry."""
    names = tuple(name for name in call.arguments if name not in (*call.batch, call.rng, call.carry))
    values = shared.widened(call[names], tuple(map(device.gathers, names, call[names])))
    call = device.localized(call, tuple(name for name in (*call.batch, call.rng) if name is not None))
    call_fun = lambda call: rules.parts(call.with_values(names, shared.narrowed(call[names])))
    micro_batches = microbatches.split_call(call_fun, device, call.with_values(names, values), rules.sizes)
    traced = micro_batches.traced()
    if wide := shared.closed_over(traced.program.consts, values):
        micro_batches = dataclasses.replace(micro_batches, call_fun=functools.partial(_closing_over, wide, call_fun))
    micro_batches = micro_batches.in_loop(traced)
    static = static or tracing.is_differentiated(traced.program.consts)  # values that `fun` closes over
    device.check_axes(traced.program.out_avals)
    device.check_nested(traced)
    share, alive = microbatches.weigh(micro_batches, rules.weight_fn, traced)
    outputs = rules.outputs(traced.shapes.loss, micro_batches.split)
    if rules.weight_fn is not None and not static:
        micro_batches = micro_batches.undifferentiable(_AGAIN)

    def add(totals: Tree, index: Index, call: Call) -> tuple[Tree, LossParts]:
        with jax.named_scope("optax_accum.micro_batch"):
            parts = micro_batches.call_fun(call)
        return outputs.add(totals, parts.loss, index, share(index)), parts

    totals, carry = micro_batches.in_order(add, outputs.start(), alive, static=static)
    return outputs.finish(totals), carry


def _closing_over(wide: dict[int, Tree], call_fun: Callable[[Call], LossParts], call: Call) -> LossParts:
    """Calls `fun` with values that are widened, by their ids, in place of those that it closes over."""
    # Scalars of a batch are the same for all micro-batches: they count as closed over.
    arrays, filled = parted(list(call.arguments.values()), lambda leaf: is_array(leaf) and is_split(leaf))
    run = lambda arrays: call_fun(call.with_values(tuple(call.arguments), filled(arrays)))
    try:
        run, closed = jax.closure_convert(run, arrays)
    except tracing.NEEDS_VALUES:  # outside `jit` it may look at values
        return run(arrays)
    return run(arrays, *(shared.narrowed(wide.get(id(leaf), leaf)) for leaf in closed))


def _run_no_rows(rules: _Rules, device: Device, call: Call) -> tuple[Tree, Tree]:
    """The result for a batch without rows: `fun` is traced for one row, and not run."""
    one = lambda leaf: jnp.zeros((1, *leaf.shape[1:]), jnp.result_type(leaf)) if jnp.ndim(leaf) else leaf
    small = call.with_values(call.batch, jax.tree.map(one, call[call.batch]))
    shapes = jax.eval_shape(lambda: rules.parts(small))
    outputs = rules.outputs(shapes.loss, splitting.Split(0, 1, 0, 0))
    return device.vary(outputs.finish(outputs.start())), call.carried


def _is_empty(batch: Tree) -> bool:
    """Whether a batch has no rows; leaves that disagree are refused elsewhere."""
    rows = [leaf.shape[0] for leaf in jax.tree.leaves(batch) if is_split(leaf)]
    return bool(rows) and not any(rows)
