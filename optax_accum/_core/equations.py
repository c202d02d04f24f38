"""The equations of a traced program: operands, results, nested programs."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from optax_accum._shared.draws import inner_programs as inner_programs


def all_equations(program: Any) -> Iterator[Any]:
    """Yields the equations of a traced program, and of all programs inside it."""
    for equation in program.eqns:
        yield from every_equation(equation)


def every_equation(equation: Any) -> Iterator[Any]:
    """Yields an equation, and all equations of the programs inside it."""
    yield equation
    for inner in inner_programs(equation):
        yield from all_equations(inner)


def operands(equation: Any) -> list[Any]:
    """The variables that an equation takes, without literals."""
    return [atom for atom in equation.invars if not isinstance(atom, core.Literal)]


def is_cast_down(equation: Any) -> bool:
    if equation.primitive.name != "convert_element_type":
        return False
    before, after = equation.invars[0].aval.dtype, equation.params["new_dtype"]
    floating = jnp.issubdtype(before, jnp.inexact) and jnp.issubdtype(after, jnp.inexact)
    return floating and jnp.finfo(after).bits < jnp.finfo(before).bits


def collective_axes(equation: Any) -> tuple[str, ...]:
    """The axes of a mesh along which an equation itself takes something from other devices."""
    if equation.primitive.name in _ALONE:
        return ()
    named = (equation.params.get(key) for key in ("axes", "axis_name"))
    each = (name for names in named for name in (names if isinstance(names, list | tuple) else (names,)))
    return tuple(name for name in each if isinstance(name, str))


_ALONE = {"axis_index", "pvary", "pcast"}  # name an axis, and take nothing from other devices


def is_checkpoint(equation: Any) -> bool:
    return equation.primitive.name in ("checkpoint", "remat2")
