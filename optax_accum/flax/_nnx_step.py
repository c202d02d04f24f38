"""NNX's train step: micro-batches within the call, windows across calls."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from optax_accum._arguments import checks
from optax_accum._arguments.callables import as_weight_fn, check_called_with
from optax_accum._arguments.roles import Call, Roles
from optax_accum._core.sums import mean as weighted_mean
from optax_accum._core.types import Tree
from optax_accum._loss.ratio import Returns
from optax_accum.flax import _calls, _window
from optax_accum.flax._calls import StepWeighing
from optax_accum.flax._nnx import loss_of_arrays, value_and_grad
from optax_accum.flax._nnx_jit import jit_in_place
from optax_accum.flax._nnx_optimizer import Optimizer
from optax_accum.flax._versions import as_pure


def train_step(
    fun: Callable[..., Any],
    *,
    weight_fn: Callable[..., Any] | None = None,
    exact: bool = True,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., dict[str, jax.Array]]:
    """Returns a jitted NNX train step that accumulates.

    The step splits its batch into micro-batches, accumulates across calls,
    averages metrics over the window, and donates model and optimizer.

    Args:
      fun: `fun(model, batch) -> loss`, or, with `has_aux`,
        `(loss, metrics)`, a dict of scalars. Random keys come from the
        model.
      weight_fn: `weight_fn(batch)` is how much a call counts in its window.
        By default what the traced loss divides by: a sum over a mask, or
        the number of rows, and rows with a warning where nothing shows that
        this is right; 1 if the optimizer takes a sum; a `Ratio` says it
        itself. Statistics always count by rows. Within a call all rows are
        taken together, as in `value_and_grad`; with `devices` in the
        optimizer those of each device, which is weighed by it.
      exact: whether the update is to be the whole batch's, so that a loss
        whose calls certainly do not add up raises, however they are weighed
        (BatchNorm by the statistics of a call). False: each call counts by
        itself, by `weight_fn` or by its rows, and the loss is not read.
      wrt: the variables to train, as given to the `Optimizer`.
      has_aux: `fun` returns metrics.
      **options: those of `value_and_grad`: `num_microbatches` (1 if your
        loader delivers micro-batches) or `microbatch_size`, and others.
        `devices` of `accumulate_gradients` need not be repeated here.

    Returns:
      A jitted `step(model, optimizer, batch, flush=None) -> metrics`, which
      donates the model and the optimizer, an `Optimizer` of this module
      created with `metrics=("loss", ...)`, and changes the values of their
      variables. It sees changes that you make to the model between steps.
      With many small arrays, `jit_step` of it takes the host less time.
      The metrics are those of the window so far; of the call, if the
      optimizer does not accumulate.

    Raises:
      TypeError: the optimizer is one of Flax's own; a metric that is no
        real number; an option that `train_step` sets itself.
      ValueError: a metric of the name `"loss"`; an optimizer of your own
        that changes more than values; a window of several calls whose
        gradients do not add up, however they are weighed (BatchNorm,
        several denominators, a sum for a mean), unless `exact=False`.
        `optax_accum.explain` shows the lines.
    """
    _calls.check_step_options("optax_accum.flax.nnx.train_step", options, _OWN_OPTIONS)
    checks.check_flag("exact", exact, may_be_none=False)
    check_called_with(fun, "model", "batch")

    def with_metrics(model: Any, batch: Tree) -> tuple[Any, Any]:
        loss, metrics = Returns(has_aux).taken_apart(fun(model, batch))
        metrics = metrics if has_aux else {}
        return loss, (_calls.checked_loss(loss, metrics), metrics)

    def sums_of(call: Call, loss: Any, metrics: Any, weigh: Callable[[], Any]) -> tuple[_calls.Measured, jax.Array]:
        (batch,) = call[call.batch]
        return _calls.measured(loss, metrics, batch, weigh), _calls.weight_of(batch)

    value_and_grad(with_metrics, wrt=wrt, has_aux=True, **options)  # raises its errors when the step is built
    as_weight_fn(weight_fn, Roles(with_metrics))

    @jit_in_place
    def step(model: Any, optimizer: Any, batch: Tree, flush: Any = None) -> dict[str, jax.Array]:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "The second argument of a train step must be an optax_accum.flax.nnx.Optimizer: it is a "
                f"{type(optimizer).__module__}.{type(optimizer).__qualname__}. Create it with that; the order is "
                "(model, optimizer, batch)."
            )
        opt_state = as_pure(optimizer.opt_state)
        placed = _calls.where_sums_go(optimizer.tx, opt_state, options)
        of_arrays, call = loss_of_arrays(with_metrics, model, batch, wrt)
        of_loss = of_arrays if exact else None
        weighing = StepWeighing.chosen(optimizer.tx, opt_state, weight_fn, of_loss, placed)
        compute = value_and_grad(weighing.differentiated(with_metrics), wrt=wrt, has_aux=True, **placed)
        (_, outputs), grads = compute(model, batch)
        (sums, grad_weight), rows = weighing.summed(placed, call, outputs, sums_of)
        totals, rows = _calls.over_devices((sums, rows), placed)
        if _window.find_window(opt_state) is None:  # each call is an update
            optimizer.update(model, grads, flush=flush)
            return weighted_mean(totals)
        weights = {"weight": sums.weight, "grad_weight": grad_weight, "stats_weight": rows}
        optimizer.update(model, grads, metrics=totals, flush=flush, **weights)
        return optimizer.window_metrics()

    return step


_OWN_OPTIONS: dict[str, str] = dict.fromkeys(
    ("argnums",),
    "Leave it out; for a step of another form, take optax_accum.flax.nnx.value_and_grad and optimizer.update.",
)
