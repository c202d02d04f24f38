"""Any function of a batch, computed micro-batch by micro-batch from its traced program, exactly."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from optax_accum._arguments import callables
from optax_accum._arguments.roles import Roles
from optax_accum._core.types import Name
from optax_accum._within import by_level, splitting
from optax_accum._within.traced import traced


def microbatched(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    batch_argnums: Name | Sequence[Name] = 1,
) -> Callable[..., Any]:
    """..."""
    sizes = splitting.as_sizes(num_microbatches, microbatch_size, 1)
    roles = Roles(fun, batch_argnums=batch_argnums, needs_params=False)
    fun = callables.as_function(fun)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = roles.bind(args, kwargs)
        others = [name for name in call.arguments if name not in call.batch]
        found = traced(fun, call, sizes, others)
        if found.units.parts == 1:
            return call.apply(fun)
        return found.returned(by_level.evaluate(found.levels, found.units, found.values))

    return run
