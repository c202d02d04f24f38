"""A call of a train step: the weights of its micro-batches, the devices of its sums, its metrics."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._across.transformation import axes_of, rules_of
from optax_accum._arguments.roles import Call, Roles
from optax_accum._arguments.rows import count_rows
from optax_accum._core.state import holds_partial_sums
from optax_accum._core.sums import WeightedSum
from optax_accum._core.types import Tree
from optax_accum._explain.weigher import Weigher
from optax_accum._loss.ratio import Ratio, as_ratio, check_single, divided, kept_from_zero
from optax_accum._loss.weighing import Amount
from optax_accum._space.device import Device
from optax_accum._space.devices import PARTIAL, Devices, as_devices, has_several
from optax_accum._space.here import here
from optax_accum.flax._window import check_metrics, find_window, weighted


class StepWeighing(NamedTuple):
    """How micro-batches of a train step count.

    Attributes:
      weight_fn: the user's; if the optimizer takes a sum, a function that returns 1; or None.
      read: `read(call, total=...)` reads off the loss how a call counts, and raises where calls do not add up; None
        where each micro-batch counts by itself, or no window averages several, of calls or of devices.
      in_window: whether calls join a window.
    """

    weight_fn: Callable[..., Any] | None
    read: Callable[..., Amount | None] | None = None
    in_window: bool = True

    @classmethod
    def chosen(
        cls,
        tx: Any,
        opt_state: Tree,
        weight_fn: Callable[..., Any] | None,
        fun: Callable[..., Any] | None,
        options: Mapping[str, Any],
    ) -> "StepWeighing":
        """How those of calls of `fun` count. Without `fun` each counts by itself."""
        rules, window = rules_of(tx), find_window(opt_state)
        if window is None:
            return cls(weight_fn, in_window=False)
        read, is_weighed = None, weight_fn is not None
        takes_a_sum = rules is not None and not rules.divisor.is_mean
        if fun is not None and has_several(window):
            weigher = Weigher(fun, Roles(fun), has_aux=True, axes=devices_of(options).axes)
            read = functools.partial(weigher.amount, takes_a_sum=takes_a_sum, is_weighed=is_weighed)
        if takes_a_sum and not is_weighed:
            weight_fn = lambda *_: jnp.ones([])  # losses are added, and gradients
        return cls(weight_fn, read)

    def differentiated(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The loss whose gradient a call adds: a `Ratio` that counts nothing in a window still adds its total."""

        @functools.wraps(fun)
        def kept(*args: Any) -> tuple[Any, Any]:
            loss, aux = fun(*args)
            loss = as_ratio(loss)
            return (Ratio(loss.total, kept_from_zero(loss.count)) if isinstance(loss, Ratio) else loss), aux

        return kept if self.in_window else fun

    def summed(
        self, options: Mapping[str, Any], call: Call, outputs: tuple[Any, Any], sums_of: Callable[..., Any]
    ) -> Any:
        """The sums of a call, as it counts in its window; with partial sums each device's own.

        They come from `sums_of(call, loss, extra, weigh)`, where `weigh()` is the weight, an `Amount`, or None for the
        number of its rows.
        """

        def read(device: Device, call: Call) -> Amount | None:  # each device reads the loss of its rows
            return None if self.read is None else self.read(call, total=device.total)

        def counted(read: Amount | None, call: Call, outputs: tuple[Any, Any]) -> Any:
            weigh = lambda: self.weight_fn(*call[call.batch]) if self.weight_fn else read
            return sums_of(call, *outputs, weigh)

        devices = devices_of(options)
        if not devices.is_partial:
            _, amount = here(Devices(devices.axes or None)).run(lambda *local: ((), read(*local)), call)
            return counted(amount, call, outputs)
        space = here(devices)
        on_device = lambda device, call, outputs: (counted(read(device, call), call, outputs), None)
        local, _ = space.run(on_device, call, space.as_partial(outputs))
        return space.as_local(local)


def devices_of(options: Mapping[str, Any]) -> Devices:
    return as_devices(options.get("devices"), partial=True)


def check_options(owner: str, options: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Raises for an option of `optax_accum.value_and_grad` that `owner` sets itself; `own` maps each to its remedy."""
    for name, remedy in own.items():
        if name in options:
            raise TypeError(f"{owner} sets {name} itself: {name}={options[name]!r}. {remedy}")


def check_step_options(owner: str, options: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """As `check_options`; a train step also takes the sharding of its sums (`Devices.to`) from the optimizer."""
    check_options(owner, options, own)
    if devices_of(options).to is not None:
        raise TypeError(
            f"{owner} has from its optimizer where sums go: devices={options['devices']}. Leave to out, and give it to "
            "accumulate_gradients."
        )


def where_sums_go(tx: Any, opt_state: Tree, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a train step, with the axes and the partial sums of its optimizer."""
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


def over_devices(own: Tree, options: Mapping[str, Any], reduction: str = "sum") -> Tree:
    """Reduces per-device outputs over all devices; does nothing without partial sums."""
    devices = devices_of(options)
    if not devices.is_partial:
        return own
    space = here(Devices(devices.axes))
    return jax.tree.map(lambda leaf: space.output(reduction, space.as_partial(leaf)), own)


class Measured(NamedTuple):
    """What a train step measures of a call.

    Attributes:
      sums: the weighted metrics, and its loss among them.
      grad_weight: what its gradient is multiplied by: a number, or a function of its weight; None for its weight.
    """

    sums: WeightedSum
    grad_weight: Any


def checked_loss(loss: Any, metrics: Any) -> Any:
    """The loss of a train step, a `Ratio` if it is one's record; raises for one that is no scalar, or such metrics."""
    loss = as_ratio(loss)
    if isinstance(loss, tuple):
        raise TypeError("A train step takes a loss that is one scalar: fun returned a tuple. Pass has_aux=True.")
    check_single(loss)
    check_metrics(metrics)
    if "loss" in metrics:
        raise ValueError("A train step measures the loss itself: metrics has a 'loss', too. Give it another name.")
    return loss


def measured(loss: Any, metrics: Any, batch: Tree, weigh: Callable[[], Any]) -> Measured:
    """The weighted metrics of a train step's micro-batch, and its loss among them.

    `weigh` returns the micro-batch's weight, or its `Amount`; None weighs it by rows. It is not called for a `Ratio`:
    its count is the weight.
    """
    if isinstance(loss, Ratio):
        loss = loss.checked()
        amount = Amount.of_ratio(loss.total, loss.count)
        loss = divided(jnp.asarray(loss.total), kept_from_zero(loss.count))
    else:
        amount = weigh()
        amount = amount if isinstance(amount, Amount) else Amount.of(weight_of(batch, amount))
    of_loss, (others, weight) = weighted({"loss": loss}, amount.grad_weight), weighted(metrics, amount.weight)
    return Measured(WeightedSum({**of_loss.total, **others}, weight), amount.multiplies)


def weight_of(batch: Tree, weight: Any = None) -> jax.Array:
    """The weight as an array: by default the number of rows. Raises for a weight for each term."""
    weight = count_rows(batch) if weight is None else weight
    if isinstance(weight, Mapping):
        raise ValueError(
            f"A train step takes one weight for a micro-batch: weight_fn returned {sorted(weight)}. For terms with "
            "denominators of their own, take value_and_grad."
        )
    return jnp.asarray(weight, jnp.result_type(float))
