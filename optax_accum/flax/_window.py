"""What a window sums beside gradients: metrics and statistics, for Linen and NNX."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_accum._arguments.signature import closest
from optax_accum._core import arithmetic, dtypes, sums
from optax_accum._core.leaves import is_array
from optax_accum._core.state import (
    AccumulationState,
    check_no_other_window,
    holds_partial_sums,
    holds_sum,
    map_states,
    states_in,
    warn_of_no_window,
)
from optax_accum._core.sums import WeightedSum
from optax_accum._core.types import Tree
from optax_accum._space import mapped
from optax_accum.flax._batch_norm import batch_moments, merge_batch_stats


class MicroStep(NamedTuple):
    """What one micro-step did to its window.

    Attributes:
      first: whether it began the window, so that all sums begin anew.
      counts: whether its micro-batch counts: not where the gradient was skipped or omitted.
      emitted: whether it made an update.
      weight: what the window weighed before it, on all devices.
    """

    first: Any
    counts: Any
    emitted: Any
    weight: Any = 0.0

    @classmethod
    def between(cls, before: AccumulationState | None, after: AccumulationState | None) -> "MicroStep":
        """Compares two states; an optimizer that does not accumulate updates at every call."""
        if before is None or after is None:
            return cls(first=True, counts=True, emitted=jnp.array(True))
        begins = (before.mini_step == 0) & (after.batches != before.batches)  # false if an empty window is flushed
        return cls(begins, after.skipped == before.skipped, after.emitted, mapped.totals(before.weight, before.weight))

    def stepped(self, new: Tree, old: Tree) -> Tree:
        """`new` if this micro-step made an update, else `old`."""
        return jax.tree.map(lambda new, old: jnp.where(self.emitted, new, old), new, old)


def find_window(opt_state: Tree) -> AccumulationState | None:
    """The one `AccumulationState` in an optimizer's state; None if it does not accumulate."""
    check_no_other_window(opt_state, "A train state or an optimizer of optax_accum.flax")
    found = states_in(opt_state)
    if len(found) > 1:
        raise ValueError(
            f"The optimizer must have one window: it holds {len(found)} of accumulate_gradients. Wrap the whole of it "
            "once, accumulate_gradients(optax.partition(...), every)."
        )
    return found[0] if found else None


def with_partial_sums(opt_state: Tree, changed: Callable[[Tree], Tree]) -> Tree:
    """Applies `changed` to the partial sums in an optimizer's state, if it holds any."""

    def convert(state: AccumulationState) -> AccumulationState:
        partial = holds_partial_sums(state) and holds_sum(state)
        return state._replace(acc_grads=changed(state.acc_grads)) if partial else state

    return map_states(convert, opt_state)


def zero_sums(values: Tree) -> WeightedSum:
    """Zeros of the shapes of `values`, in at least float32, with weight 0."""
    return WeightedSum(jax.tree.map(lambda leaf: jnp.zeros_like(wide(leaf)), values), jnp.zeros([]))


def zero_metrics(names: Iterable[str]) -> dict[str, WeightedSum]:
    if isinstance(names, str):
        raise TypeError(f"metrics must be a tuple of names: metrics={names!r}. Pass ({names!r},).")
    return {name: zero_sums(jnp.zeros([])) for name in names}


def weighted(values: Tree, weight: Any) -> WeightedSum:
    """One micro-batch's `weight * values`, in at least float32; zeros for a weight of 0."""
    return WeightedSum(arithmetic.add(None, jax.tree.map(wide, values), weight, first=True), jnp.asarray(weight))


def wide(value: Any) -> jax.Array:
    """Casts a number or an array to at least float32. A Python or NumPy int of 2^40 would overflow int32."""
    if not isinstance(value, jax.Array):
        value = np.asarray(value, float)
    return jnp.asarray(value, dtypes.wide(jnp.result_type(value)))


def add(totals: WeightedSum, part: WeightedSum, micro_step: MicroStep) -> WeightedSum:
    """Adds a micro-batch's part to the sums of the window, or begins it anew."""
    return arithmetic.add(totals, part, jnp.where(micro_step.counts, 1, 0), micro_step.first)


def add_metrics(
    totals: dict[str, WeightedSum],
    metrics: Mapping[str, Any] | WeightedSum | None,
    weight: jax.Array,
    micro_step: MicroStep,
    grad_weight: Any = None,
) -> dict[str, WeightedSum]:
    """Adds a micro-batch's metrics (nothing for None) to the window's; raises if other names were announced.

    A train step of the library has weighed them: it gives their sums, and the loss is divided as its gradient.
    """
    if isinstance(metrics, WeightedSum):
        part = metrics
    else:
        check_metrics(metrics := dict.fromkeys(totals, 0.0) if metrics is None else metrics)
        part = weighted(dict(metrics), weight)
    if (names := sorted(part.total)) != sorted(totals):
        announced = f"with metrics={tuple(sorted(totals))}" if totals else "without metrics"
        raise ValueError(
            f"TrainState.create, or Optimizer, must be given the names of the metrics: it was created {announced}, and "
            f"the step measures {names}. Create it with metrics={tuple(names)}."
        )
    weights = dict.fromkeys(totals, part.weight)
    if metrics is part and callable(grad_weight):
        before = jnp.where(micro_step.first, 0, totals["loss"].weight)
        weights["loss"] = jnp.asarray(grad_weight(micro_step.weight + part.weight)) - before
    return {name: add(totals[name], WeightedSum(part.total[name], weights[name]), micro_step) for name in totals}


def check_given(totals: dict[str, WeightedSum], metrics: Any, weight: Any) -> None:
    """Raises if metrics were announced and a micro-batch that may count comes without them."""
    may_count = weight is None or isinstance(weight, Tracer) or np.any(weight)
    if totals and metrics is None and may_count:
        raise ValueError(
            "Each micro-step must be given the metrics that were announced, or their means over the window would be "
            f"wrong: metrics={tuple(sorted(totals))} were, and apply_gradients, or update, has metrics=None. Pass a "
            "dict of them; only a call with weight=0 needs none. Or create it without metrics."
        )


def add_stats(
    moments: WeightedSum, new: Tree, old: Tree, momentum: Tree, weight: jax.Array, micro_step: MicroStep
) -> tuple[WeightedSum, Tree]:
    """Adds a micro-batch's statistics to the moments; returns them, and the statistics, which an update changes."""
    moments = add(moments, weighted(batch_moments(new, old, momentum), weight), micro_step)
    return moments, micro_step.stepped(merge_batch_stats(sums.mean(moments), old, momentum), old)


def check_metrics(metrics: Any) -> None:
    kind = lambda value: "number" if isinstance(value, jax.Array) else type(value).__name__
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a dict of scalars: they are a {kind(metrics)}. Give each a name.")
    for name, value in metrics.items():
        is_number = isinstance(value, bool | int | float) or is_array(value)
        if not is_number or not np.isrealobj(value):
            of = "complex number" if is_number else kind(value)
            raise TypeError(f"A metric must be a real scalar: {name!r} is a {of}. Give each number a name of its own.")
        if jnp.ndim(value):
            raise ValueError(f"A metric must be a scalar: {name!r} has shape {jnp.shape(value)}. Pass its mean.")


def extra_args(
    window: AccumulationState | None, kwargs: dict[str, Any], own: Sequence[str], metrics: Any, **given: Any
) -> dict[str, Any]:
    """The optimizer's keyword arguments: `kwargs`; with a window also `given`, without None.

    Raises for a misspelling of one of our `own` arguments, which would go to the optimizer and be lost.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if window is None and (given or metrics is not None):
        warn_of_no_window()
    for name in kwargs:
        if meant := closest(name, own, 0.85):
            raise TypeError(
                f"{name}= looks like a misspelt {meant}=, and would go to the optimizer: {name!r}. Pass {meant}=."
            )
    return kwargs if window is None else {**kwargs, **given}


def mean_metrics(totals: dict[str, WeightedSum]) -> dict[str, jax.Array]:
    """The weighted means of the metrics; NaN if no micro-batch has counted."""
    return {name: sums.mean(totals[name], empty=jnp.nan) for name in totals}


def as_weight(weight: Any) -> jax.Array:
    """The weight of a whole micro-batch, given as one number or one per device; None is 1."""
    return jnp.sum(jnp.asarray(1.0 if weight is None else weight, jnp.result_type(float)))
