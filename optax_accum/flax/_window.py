"""What a window sums beside gradients: metrics and statistics, for Linen and NNX."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_accum._across.transformation import axes_of, rules_of
from optax_accum._arguments.roles import Call
from optax_accum._arguments.rows import count_rows
from optax_accum._core import dtypes, messages, sums
from optax_accum._core.leaves import is_array
from optax_accum._core.state import (
    AccumulationState,
    check_no_other_window,
    holds_partial_sums,
    holds_sum,
    map_states,
    states_in,
)
from optax_accum._core.sums import WeightedSum
from optax_accum._core.types import Tree
from optax_accum._explain.weighing import Weigher
from optax_accum._loss.ratio import Ratio, as_ratio, check_single, divided
from optax_accum._space.device import Device
from optax_accum._space.devices import PARTIAL, Devices, as_devices
from optax_accum._space.here import here
from optax_accum.flax._batch_norm import batch_moments, merge_batch_stats


class Weighing(NamedTuple):
    """How micro-batches of a train step count.

    Attributes:
      weight_fn: as a user says, or the optimizer; or None.
      weigher: else as their loss tells, where a window averages several calls; or None: by their rows.
    """

    weight_fn: Callable[..., Any] | None
    weigher: Weigher | None = None

    @classmethod
    def chosen(cls, tx: Any, opt_state: Tree, weight_fn: Callable[..., Any] | None, weigher: Weigher) -> "Weighing":
        """Chooses for an optimizer."""
        rules, window = rules_of(tx), find_window(opt_state)
        if weight_fn is not None or window is None:
            return cls(weight_fn)
        if rules is not None and not rules.divisor.is_mean:
            return cls(lambda *_: jnp.ones([]))  # losses are added, and gradients
        return cls(None, weigher if holds_sum(window) else None)

    @property
    def options(self) -> dict[str, Any]:
        """The options of micro-batches that count each by itself."""
        return {"weight_fn": self.weight_fn, "reads": self.weigher and self.weigher.weight_fn}

    def of(self, call: Call) -> Any:
        """Returns the weight of the batch of a call on one device; None if it counts by its rows."""
        if self.weight_fn is not None:
            return self.weight_fn(*call[call.batch])
        return None if self.weigher is None else self.weigher.weight(call)

    def over_devices(self, call: Call, options: Mapping[str, Any]) -> Any:
        """Returns the weight of the batch of a call on all devices, each of which reads the loss of its rows."""
        axes = as_devices(options.get("devices"), partial=True).axes
        if self.weigher is None or not axes:
            return self.of(call)
        weights: list[jax.Array | None] = []

        def of_device(device: Device, call: Call) -> tuple[jax.Array, None]:
            weights.append(self.of(call))
            return jnp.zeros([]) if weights[-1] is None else weights[-1], None

        space = here(Devices(axes))
        weight, _ = space.run(of_device, call)
        return None if weights[-1] is None else space.total(weight)


class MicroStep(NamedTuple):
    """What one micro-step did to its window.

    Attributes:
      first: whether it began the window, so that all sums begin anew.
      counts: whether its micro-batch counts: not where the gradient was skipped or omitted.
      emitted: whether it made an update.
    """

    first: Any
    counts: Any
    emitted: Any

    @classmethod
    def between(cls, before: AccumulationState | None, after: AccumulationState | None) -> "MicroStep":
        """Reads it off two states; an optimizer that does not accumulate updates at every call."""
        if before is None or after is None:
            return cls(first=True, counts=True, emitted=jnp.array(True))
        begins = (before.mini_step == 0) & (after.batches != before.batches)  # not where an empty window is flushed
        return cls(begins, after.skipped == before.skipped, after.emitted)

    def stepped(self, new: Tree, old: Tree) -> Tree:
        """Returns what steps once per update: the new if this made one."""
        return jax.tree.map(lambda new, old: jnp.where(self.emitted, new, old), new, old)


def find_window(opt_state: Tree) -> AccumulationState | None:
    """Returns the one `AccumulationState` in an optimizer's state, or None if it does not accumulate."""
    check_no_other_window(opt_state, "A train state or an optimizer of optax_accum.flax")
    found = states_in(opt_state)
    if len(found) > 1:
        raise ValueError(
            f"The optimizer must have one window: it holds {len(found)} of accumulate_gradients. Wrap the whole of it "
            "once, accumulate_gradients(optax.partition(...), every)."
        )
    return found[0] if found else None


def with_partial_sums(opt_state: Tree, changed: Callable[[Tree], Tree]) -> Tree:
    """Returns an optimizer's state with other partial sums in place of those that it holds, if it holds any."""

    def convert(state: AccumulationState) -> AccumulationState:
        partial = holds_partial_sums(state) and holds_sum(state)
        return state._replace(acc_grads=changed(state.acc_grads)) if partial else state

    return map_states(convert, opt_state)


@functools.cache
def warn_once() -> None:
    """Says that window features were asked of an optimizer that does not accumulate."""
    messages.warn(
        "weight, flush and metrics belong to a window, and this optimizer has none: each call is an update. Wrap it in "
        "optax_accum.accumulate_gradients."
    )


def zero_sums(values: Tree) -> WeightedSum:
    """Returns sums of nothing yet, in at least float32."""
    return WeightedSum(jax.tree.map(lambda leaf: jnp.zeros_like(wide(leaf)), values), jnp.zeros([]))


def zero_metrics(names: Iterable[str]) -> dict[str, WeightedSum]:
    """Returns a sum for each named metric."""
    if isinstance(names, str):
        raise TypeError(f"metrics must be a tuple of names: metrics={names!r}. Pass ({names!r},).")
    return {name: zero_sums(jnp.zeros([])) for name in names}


def weighted(values: Tree, weight: Any) -> WeightedSum:
    """Returns the sums of one micro-batch, in at least float32."""
    return WeightedSum(jax.tree.map(lambda leaf: weight * wide(leaf), values), weight)


def wide(value: Any) -> jax.Array:
    """Returns a number or an array in at least float32; 2^40 of Python or NumPy is no int32."""
    if not isinstance(value, jax.Array):
        value = np.asarray(value, float)
    return jnp.asarray(value, dtypes.wide(jnp.result_type(value)))


def add(totals: WeightedSum, values: Tree, weight: jax.Array, micro_step: MicroStep) -> WeightedSum:
    """Adds `weight * values` to the sums of the window, or begins it anew."""
    return sums.add(totals, values, jnp.where(micro_step.counts, weight, 0), micro_step.first)


def add_metrics(
    totals: dict[str, WeightedSum], metrics: Mapping[str, Any] | None, weight: jax.Array, micro_step: MicroStep
) -> dict[str, WeightedSum]:
    """Adds the metrics of a micro-batch, or nothing, to the window's; raises if they were not announced."""
    if metrics is None:
        metrics, weight = dict.fromkeys(totals, 0.0), jnp.zeros([])
    if sorted(metrics) != sorted(totals):
        announced = f"with metrics={tuple(sorted(totals))}" if totals else "without metrics"
        raise ValueError(
            f"TrainState.create, or Optimizer, must be given the names of the metrics: it was created {announced}, and "
            f"the step measures {sorted(metrics)}. Create it with metrics={tuple(sorted(metrics))}."
        )
    check_metrics(metrics)
    return {name: add(totals[name], wide(metrics[name]), weight, micro_step) for name in totals}


def check_given(totals: dict[str, WeightedSum], metrics: Any, weight: Any) -> None:
    """Raises where metrics that a window averages do not come with a micro-batch that may count."""
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
    """Adds the statistics that a micro-batch left to the moments of the window; they step when it emits."""
    moments = add(moments, batch_moments(new, old, momentum), weight, micro_step)
    return moments, micro_step.stepped(merge_batch_stats(sums.mean(moments), old, momentum), old)


def check_metrics(metrics: Any) -> None:
    """Raises unless metrics are a dict of real scalars."""

    def kind(value: Any) -> Any:
        return "number" if isinstance(value, jax.Array) else type(value).__name__

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
    """Returns what the optimizer is given by keyword: `given` as far as it is, where there is a window.

    Raises for a misspelt argument of our `own`, which would pass for one of the optimizer and be lost.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if window is None and (given or metrics is not None):
        warn_once()
    for name in kwargs:
        if meant := difflib.get_close_matches(name, own, n=1, cutoff=0.85):
            raise TypeError(
                f"{name}= looks like a misspelt {meant[0]}=, and would go to the optimizer: {name!r}. Pass {meant[0]}=."
            )
    return kwargs if window is None else {**kwargs, **given}


def check_options(owner: str, options: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Raises for an option of `optax_accum.value_and_grad` that its caller here sets itself."""
    for name, remedy in own.items():
        if name in options:
            raise TypeError(f"{owner} sets {name} itself: {name}={options[name]!r}. {remedy}")


def check_step_options(owner: str, options: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Raises for an option of `optax_accum.value_and_grad` that a train step sets itself."""
    check_options(owner, options, own)
    if as_devices(options.get("devices"), partial=True).to is not None:
        raise TypeError(
            f"{owner} has from its optimizer where sums go: devices={options['devices']}. Leave to out, and give it to "
            "accumulate_gradients."
        )


def pair(out: Any) -> tuple[Any, Any]:
    """Returns what `fun` returned with `has_aux`, if it is a pair."""
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"With has_aux=True fun must return (loss, aux): it returned {out!r}. Or leave out has_aux.")
    return out


def mean_metrics(totals: dict[str, WeightedSum]) -> dict[str, jax.Array]:
    """Returns the weighted means of the metrics; NaN where no micro-batch has counted."""
    return {name: sums.mean(totals[name], empty=jnp.nan) for name in totals}


def own_buffers(state: Tree, params: Tree) -> Tree:
    """Copies arrays that a new state shares with the parameters or holds twice: a buffer is donated only once."""
    seen = {id(leaf) for leaf in jax.tree.leaves(params)}

    def own(leaf: Any) -> Any:
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, state)


def where_sums_go(tx: Any, opt_state: Tree, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a train step with where its sums go, as its optimizer has it."""
    window, own = find_window(opt_state), axes_of(tx)
    partial = window is not None and holds_partial_sums(window)
    devices = as_devices(options.get("devices"))
    axes = devices.axes or own
    if own and axes != own:
        raise ValueError(
            f"A train step adds over the devices of its optimizer: devices={axes}, and accumulate_gradients was "
            f"given {own}. Leave it out of the step."
        )
    if partial and not axes:
        raise ValueError(
            "The state holds partial sums, one for each device, and the axes are inside the chain where a train step "
            "cannot read them. Pass devices= as given to accumulate_gradients."
        )
    if partial and (devices.dtype is not None or devices.overlap):
        raise ValueError(
            "The optimizer of a train step adds gradients over the devices: the dtype and the overlap of "
            f"devices={devices} would do nothing. Leave them out, and give dtype to accumulate_gradients."
        )
    return {**options, "devices": dataclasses.replace(devices, axes=axes or None, to=PARTIAL if partial else None)}


def has_partial_sums(options: Mapping[str, Any]) -> bool:
    """Returns whether each device keeps its own sum."""
    return as_devices(options.get("devices"), partial=True).is_partial


def over_devices(own: Tree, options: Mapping[str, Any], reduction: str = "sum") -> Tree:
    """Reduces per-device outputs over all devices; does nothing unless each keeps its own sum."""
    if not has_partial_sums(options):
        return own
    space = here(Devices(as_devices(options["devices"], partial=True).axes))
    return jax.tree.map(lambda leaf: space.output(reduction, space.as_partial(leaf)), own)


def as_weight(weight: Any) -> jax.Array:
    """Returns the weight of a whole micro-batch, given as one number or as one for each device."""
    return jnp.sum(jnp.asarray(1.0 if weight is None else weight, jnp.result_type(float)))


def measured(loss: Any, metrics: Any, batch: Tree, weigh: Callable[[], Any]) -> WeightedSum:
    """Returns the sums of the metrics of a train step's micro-batch: the loss is one of them, as one number.

    `weigh` returns how much the micro-batch counts, or None; it is not asked of a `Ratio`, which says it itself.
    """
    loss = as_ratio(loss)
    if isinstance(loss, tuple):
        raise TypeError("A train step takes a loss that is one scalar: fun returned a tuple. Pass has_aux=True.")
    check_single(loss)
    check_metrics(metrics)
    if "loss" in metrics:
        raise ValueError("A train step measures the loss itself: metrics has a 'loss', too. Give it another name.")
    if isinstance(loss, Ratio):
        loss = loss.checked()
        return weighted({"loss": divided(jnp.asarray(loss.total), loss.count), **metrics}, loss.count)
    return weighted({"loss": loss, **metrics}, weight_of(batch, weigh()))


def weight_of(batch: Tree, weight: Any = None) -> jax.Array:
    """Returns how much a micro-batch of a train step counts: by default its rows."""
    weight = count_rows(batch) if weight is None else weight
    if isinstance(weight, Mapping):
        raise ValueError(
            f"A train step takes one weight for a micro-batch: weight_fn returned {sorted(weight)}. For terms with "
            "denominators of their own, take value_and_grad."
        )
    return jnp.asarray(weight, jnp.result_type(float))
