"""`accumulate_gradients`: accumulation across calls as an Optax transformation."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import jax
import optax

from optax_accum._across import outcomes, policy
from optax_accum._across.accumulator import as_divisor
from optax_accum._across.inner import check_accumulates_once, check_no_lookahead
from optax_accum._across.schedules import Every, as_schedule
from optax_accum._across.window import MicroBatch, WindowRules, micro_step, weighed
from optax_accum._arguments import callables, checks
from optax_accum._core import dtypes
from optax_accum._core.leaves import NOT_ARRAYS, NOT_GRADIENTS, check_arrays, own_buffers
from optax_accum._core.state import AccumulationState, as_mean_args, new_state, no_means
from optax_accum._core.types import Axes, Tree
from optax_accum._loss.meter import Options, as_meter
from optax_accum._loss.weighing import Amount
from optax_accum._shared.checks import as_positive
from optax_accum._space.devices import Devices, as_devices
from optax_accum._space.here import here, here_for
from optax_accum._space.space import Space


@callables.renamed(
    "every",
    every_k_schedule="Pass it as every=, an integer or a callable.",
    use_grad_mean='Pass reduction="sum" for False; "mean" is the default.',
    should_skip_update_fn="Pass it as nonfinite=.",
)
def accumulate_gradients(
    inner: optax.GradientTransformation,
    every: Every,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    accumulator_dtype: Any = None,
    emit_dtype: Any = None,
    nonfinite: policy.Name | policy.Skip | policy.WindowRule = "propagate",
    mean_args: Sequence[str] | Mapping[str, Tree] = ("value",),
    devices: str | Sequence[str] | Devices | None = None,
    statistics: bool | Options = False,
) -> "Accumulating":
    """Wraps an optimizer so that it updates once per window of micro-steps.

        tx = accumulate_gradients(optax.adamw(1e-3), every=8)

    Each update uses the gradient of the whole batch. Over a window of
    micro-batches with gradients `g_i` and weights `w_i`, `inner` sees

        mean:  g = sum_i w_i g_i / sum_i w_i
        sum:   g = sum_i w_i g_i

    only when the window closes: that is the optimizer step. Every other
    micro-step only accumulates: updates are zeros, and the state of `inner`
    does not change.
    Schedules inside `inner` count updates. Put clipping inside as well:
    outside, it would clip each micro-batch's gradient.

    Example:
      Four micro-batches of unequal length, weighted by their tokens:

      >>> import jax, jax.numpy as jnp, optax, optax_accum
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(1.0), every=4)
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> for tokens in (10, 30, 20, 40):
      ...     grads = jnp.array([1.0, tokens])  # of a mean over tokens
      ...     updates, state = tx.update(
      ...         grads, state, params, weight=tokens)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params)
      [ -1. -30.]

    Args:
      inner: any Optax optimizer.
      every: the micro-steps in a window: an integer >= 1; a callable of
        `gradient_step`, evaluated at run time (a value below 1 counts as
        1); a schedule of `optax_accum.batching`; or `None`: the caller
        closes each window with `flush`. A window closes when
        `mini_step + 1 >= every`, so a resumed run may change `every`.
      reduction: `"mean"`, for losses that are means; or `"sum"`, for losses
        that are sums.
      accumulator_dtype: the dtype of the sums: a real floating-point dtype,
        or a pytree prefix of the parameters with several. Complex leaves
        take its width. By default, and where it is None, at least float32,
        and never narrower than the gradient.
      emit_dtype: the dtype in which `inner` sees the gradient: by default
        the accumulator's; `"gradient"` for that of the gradients passed in,
        as `optax.MultiSteps` does; or a real floating-point dtype.
      nonfinite: what to do with a micro-batch whose gradient or weight
        holds a NaN or an infinity. `"propagate"`: the window's update has
        the NaN, and so do the parameters; the next window's accumulator is
        clean (a mean whose weights add to infinity makes no update).
        `"skip"`: it is left out, and the window waits for
        another. `"omit"`: it is left out, and the window ends on time with
        the rest; with none, it makes no update. `"discard"`: its window
        makes no update. Or a callable
        `(grads, gradient_step, params) -> (skip, info)`, as
        `optax.MultiSteps` takes; `state.skip_state` holds its `info`. A
        callable with a parameter `info` is given what it returned last, and
        at first the default of that parameter: docs/nan_policy.md. Or
        `discard_if(rule)`, for a rule on the window's own gradient.
      mean_args: extra arguments which `inner` gets as their weighted mean
        over the window: the names of scalars; or a dict from names to
        examples (0.0 for a scalar, a tree of floating-point arrays or
        shapes), or to functions of the parameters that return one.
      devices: the mesh axes over which the batch is sharded, for one
        reduction per window, or `Devices`; see `optax_accum.sharding`.
      statistics: whether to measure gradients: their norms, and the noise
        in them; see `optax_accum.statistics`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with an
      `AccumulationState`. Its `update` takes by keyword, also through
      `optax.chain`, the extra arguments of `inner` (those that are not in
      `mean_args` as the closing micro-step gives them), and

      * `weight`: how much this micro-batch counts, a real scalar. For a
        mean over tokens, their number.
      * `rows`: the number of its rows, an integer: its weight in a mean if
        you pass no `weight`; 1 by default.
      * `grad_weight`: what its gradient, and `value`, is multiplied by; its
        `weight` by default. If its loss keeps its denominator from zero,
        pass the function that does so: for `total / maximum(count, 1)`
        `weight=count, grad_weight=lambda count: jnp.maximum(count, 1)`.
        Then a total is added, too, where the count is 0, and their sum is
        divided by this function of the window's weight.
      * `flush`: a bool scalar; `True` closes the window with this
        micro-batch and divides by the weight that is in it. With a Python
        bool that is true, or with `every=None`, no branch is compiled.

    Raises:
      TypeError, ValueError: invalid arguments, when you build or trace. At
        run time nothing raises.

    Guarantees:
      The update equals that of the whole batch, to rounding. The state
      keeps types, shapes and shardings (a restored state also its
      accumulator's dtype); updates and inner state have the dtypes that
      `inner` alone would give them.

      Known when tracing:

      * `every=1`: runs `inner` at every call; no accumulator, no branch. To
        raise `every` with its state is an error.
      * An extra argument spelt nearly `weight` or `flush`: an error, unless
        `inner` reads it.
      * `None`, `MaskedNode`, empty leaves, float0: pass through. Leaves that
        an outer `optax.masked` masks have no accumulator.
      * A name in `mean_args` that the state was not created with: an error.
      * The state of `inner`, or `info`, changes from integer to float or to
        complex: an error.
      * A mean argument is missing at some micro-steps: its mean is that of
        the others. Missing at the closing one: `inner` does not get it.
      * Under `jax.vmap`: a window for each member; the branch becomes a
        select, so `inner` always runs.

      Known when running:

      * Weight 0: adds nothing, not even a NaN, but the micro-step counts
        (with a `grad_weight`, that decides). Weight below 0: subtracts.
      * The weights add to 0, or `"discard"` gives up the window: zero
        updates, inner state untouched, `discarded + 1`. If `grad_weight`
        is a function, what it returns for 0 divides; not with `"omit"`,
        which might have left out all.
      * A mean whose weights add to more than 8.5e37 (`1 / tiny` of their
        dtype), or to infinity: the same. To NaN: the update is NaN.
      * `flush` with weight 0 on an empty window: nothing; `discarded` and
        `batches` stay.
      * `"skip"` or a callable leaves a micro-batch out: zero updates,
        window and counters as they were, `skipped + 1`.
      * `"omit"` leaves a micro-batch out: weight 0, `skipped + 1`.
      * `flush` on a micro-batch that is left out: closes the window with
        the rest. In an empty window there is no rest: no update. `"omit"`
        counts the window, `discarded + 1`; for `"skip"` it stays empty.
      * A NaN in a mean argument: shows in its mean. Policies look at
        gradients and weights.

    References:
      The state and the callable `nonfinite` follow `optax.MultiSteps`; the
      errors of adding in low precision are analysed in N. Higham, *The
      accuracy of floating point summation*, SIAM J. Sci. Comput. 14 (1993).
    """
    optimizer, schedule, divisor = callables.as_transformation(inner), as_schedule(every), as_divisor(reduction)
    rules = WindowRules(
        inner=optimizer,
        schedule=schedule,
        divisor=divisor,
        policy=policy.as_policy(nonfinite, emit_dtype),
        meter=as_meter(statistics, schedule.needs),
        accumulator_dtype=checks.as_float_dtypes("accumulator_dtype", accumulator_dtype),
        emit_dtype=emit_dtype if emit_dtype == "gradient" else checks.as_float_dtype("emit_dtype", emit_dtype),
        mean_args=as_mean_args(mean_args),
        devices=as_devices(devices),
    )
    if callable(nonfinite) and rules.devices.axes:
        raise ValueError(
            "A callable nonfinite looks at the gradient of a micro-batch, which no device has whole: "
            f'devices={rules.devices.axes}. Take "skip", "omit" or "discard", or discard_if(rule).'
        )
    if not divisor.is_mean:
        rules.meter.refuse(
            'Statistics compare means of micro-batches: reduction="sum" and statistics are given. Take "mean", with '
            "weights, or leave statistics out."
        )
    if not (schedule.holds or rules.devices.axes):
        rules.meter.warn_of_one_sample()
    emitting = functools.partial(update, rules, outcomes.updates_of)
    tx = Accumulating(functools.partial(_init, rules), cast(Any, emitting))
    tx.rules = rules
    return tx


class Accumulating(optax.GradientTransformationExtraArgs):
    """A gradient transformation that also carries its rules: the result of `accumulate_gradients`."""

    rules: WindowRules | None = None  # `tx._replace(...)` has none, and is an optimizer like any other

    @property
    def has_updated(self) -> NoReturn:
        """Says where to ask instead, as `optax.MultiSteps` is asked."""
        raise AttributeError(
            "The state knows whether an update was made, an optimizer does not: tx.has_updated. Call "
            "optax_accum.has_updated(state)."
        )

    @property
    def gradient_transformation(self) -> NoReturn:
        """Says that this is one already: `optax.MultiSteps` is asked for one."""
        raise AttributeError(
            "What accumulate_gradients returns is an Optax transformation: tx.gradient_transformation. Pass tx itself."
        )

    if TYPE_CHECKING:  # Optax knows no state
        init: Callable[[Tree], AccumulationState]  # type: ignore[assignment]


def rules_of(tx: Any) -> WindowRules | None:
    """The rules of a transformation that `accumulate_gradients` made; None for another, such as a chain."""
    return tx.rules if isinstance(tx, Accumulating) else None


def axes_of(tx: Any) -> Axes:
    """The axes over which this transformation reduces; () if it does not tell, as a chain."""
    rules = rules_of(tx)
    return rules.devices.axes if rules else ()


def _init(rules: WindowRules, params: Tree) -> AccumulationState:
    check_arrays("Parameters", params, NOT_ARRAYS)
    check_no_lookahead(params)
    space = here_for(rules.devices, rules.meter, params)
    acc_grads = space.zeros(params, rules.accumulator_dtype) if rules.schedule.holds else ()
    inner_opt_state = own_buffers(dtypes.strong(rules.inner.init(space.shard(params))), params)
    check_accumulates_once(inner_opt_state)
    scalar = lambda: space.scalar(params)
    return new_state(
        inner_opt_state,
        acc_grads,
        no_means(rules.mean_args, params, lambda shapes: space.sums(shapes, params)),
        scalar(),
        skip_state=rules.policy.blank(params),
        samples=rules.meter.samples(params, scalar),
        **rules.meter.blank(params),
    )


def update(
    rules: WindowRules,
    outcome: Callable[[Space, Any], outcomes.Outcome],
    /,
    grads: Tree,
    state: AccumulationState,
    params: Tree | None = None,
    *,
    weight: Any = None,
    rows: int | jax.Array | None = None,
    grad_weight: float | jax.Array | Callable[[jax.Array], jax.Array] | None = None,
    flush: Any = None,
    **extra_args: Any,
) -> tuple[Tree, AccumulationState]:
    """Makes a micro-step: converts gradient and weight for the space here, and adds them to the window."""
    check_arrays("Gradients", grads, NOT_GRADIENTS)
    space = here(rules.devices)
    grads = space.grads(grads, getattr(state, "acc_grads", ()), params)
    if not isinstance(rows, jax.Array):  # a trace asks whether rows are read
        rows = as_positive("rows", rows) or 1
    weight = rules.divisor.unweighed(rows) if weight is None else weight
    amount = weighed(rules, space, Amount.given(weight, grad_weight), state)
    batch = MicroBatch(grads, amount, flush, extra_args)
    return micro_step(rules, space, batch, state, params, outcome(space, params))
