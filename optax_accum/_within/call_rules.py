"""The options of `value_and_grad`, checked: of which arguments, in how many micro-batches, added in which dtype."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from optax_accum._arguments import checks
from optax_accum._arguments.roles import Roles
from optax_accum._core.types import Tree
from optax_accum._loss.meter import Meter, Options, as_meter
from optax_accum._loss.ratio import Returns
from optax_accum._shared.checks import as_function
from optax_accum._space.devices import Devices, as_devices
from optax_accum._within import splitting

RECOMPUTED = 0.6  # of a forward pass, on an accelerator


@dataclasses.dataclass(frozen=True)
class CallRules:
    """The options of `value_and_grad`, and `fun`."""

    fun: Callable[..., Any]
    roles: Roles
    returns: Returns
    sizes: splitting.Sizes
    single: bool
    accumulator_dtype: Tree  # a prefix of the tuple of differentiated arguments
    meter: Meter
    devices: Devices
    recompute: float | None = None

    @property
    def recompute_share(self) -> float:
        """How much of a forward pass may run once more; by default none on a CPU, where it does not pay."""
        if self.recompute is None:
            return 0.0 if jax.default_backend() == "cpu" else RECOMPUTED
        return self.recompute


def as_rules(
    fun: Any,
    num_microbatches: Any = None,
    *,
    microbatch_size: Any = None,
    argnums: Any = 0,
    has_aux: bool = False,
    batch_argnums: Any = 1,
    accumulator_dtype: Any = None,
    devices: Any = None,
    statistics: Any = False,
    recompute: Any = None,
) -> CallRules:
    """Checks the options of `value_and_grad`, whatever a user passes."""
    _check_no_argnums(num_microbatches)
    single = isinstance(argnums, int | str)

    def as_tuple(prefix: Tree) -> Tree:
        """Returns an option for the argument that is differentiated as one for the tuple of them."""
        return (prefix,) if single else tuple(prefix) if isinstance(prefix, list) else prefix

    if isinstance(statistics, Options) and statistics.groups is not None:
        statistics = dataclasses.replace(statistics, groups=as_tuple(statistics.groups))
    roles = Roles(fun, argnums=argnums, batch_argnums=batch_argnums, of_whole_batch=True)
    over, meter = as_devices(devices, partial=True), as_meter(statistics)
    if over.is_partial:
        meter.refuse('Statistics take the sum of gradients: devices has to="partial". Leave it out.')
    elif over.to is not None:
        over = dataclasses.replace(over, to=as_tuple(over.to))
    return CallRules(
        fun=as_function(fun),
        roles=roles,
        returns=Returns(has_aux),
        sizes=splitting.as_sizes(num_microbatches, microbatch_size),
        single=single,
        accumulator_dtype=as_tuple(checks.as_float_dtypes("accumulator_dtype", accumulator_dtype)),
        meter=meter,
        devices=over,
        recompute=_as_recompute(recompute),
    )


def _as_recompute(share: Any) -> float | None:
    if share is None:
        return None
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < float("inf"):
        raise ValueError(
            f"recompute must be a number >= 0, a share of a forward pass: recompute={share!r}. Pass 0.6 to run up to "
            "60 % of a forward pass once more."
        )
    return float(share)


def _check_no_argnums(num_microbatches: Any) -> None:
    """Raises for what `jax.value_and_grad` takes as its second argument, unless it could be a number."""
    if isinstance(num_microbatches, tuple | list | str) or (type(num_microbatches) is int and num_microbatches == 0):
        raise (ValueError if num_microbatches == 0 else TypeError)(
            f"num_microbatches must be an integer >= 1: num_microbatches={num_microbatches!r}. It is the second "
            f"argument here; for that of jax.value_and_grad, pass argnums={num_microbatches!r}."
        )
