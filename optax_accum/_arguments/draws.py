"""Random numbers that a function draws from a key that is not among its arguments."""

from collections.abc import Callable
from typing import Any

import jax

from optax_accum._arguments.roles import Call
from optax_accum._core.leaves import is_array, parted
from optax_accum._shared.draws import draws, hidden_draws


def may_hide(program: Any, call: Call) -> bool:
    """Whether a traced `fun(call)` may draw from a key that is not an argument; compares arrays by identity."""
    names = tuple(name for name in call.arguments if name != call.carry)  # some carries can be flattened only once
    arguments = set(map(id, jax.tree.leaves(call[names])))
    constants = [id(const) in arguments for const in program.consts]
    return bool(draws(program.jaxpr, [True] * len(program.jaxpr.invars), constants)[0])


def check_keys(fun: Callable[[Call], Any], part: Call, all_rows: Call) -> None:
    """Raises if `fun` draws numbers for each row from a key that is not an argument: all micro-batches get the same.

    `part` is the call for some rows, `all_rows` for all.
    """
    try:
        drawn = hidden_draws(*_flattened(fun, part))
        drawn_for_all = hidden_draws(*_flattened(fun, all_rows)) if drawn else []
    except Exception:  # fun takes one batch size only, or an axis that is not here: draws for each row are not known
        return
    for shape, shape_for_all in zip(drawn, drawn_for_all, strict=False):
        if shape != shape_for_all:
            raise ValueError(
                "A random key must be an argument of fun, or every micro-batch would draw the same numbers: fun draws "
                f"{list(shape)} from a key that it closes over, or makes. Pass the key as an argument and name it with "
                "rng_argnum; to share it on purpose, with whole_argnums."
            )


def _flattened(fun: Callable[[Call], Any], call: Call) -> tuple[Callable[[Any], Any], Any]:
    """`fun(call)` as a function of the arrays among its arguments, and these arrays."""
    names = tuple(call.arguments)
    arrays, filled = parted(call[names], lambda leaf: is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct))
    with_arrays = lambda arrays: call.with_values(names, filled(arrays))
    return lambda arrays: fun(with_arrays(arrays)), arrays
