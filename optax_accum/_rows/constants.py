"""What no row of a batch decides, computed while a loss is read: numbers, and entries of masks.

How many entries an array has is a number for n rows, and another for 2 n. A product with `jnp.eye(n)`, or
`jnp.where(jnp.eye(n), scores, 0)`, leaves each row its own of n x n scores; a product with `2 * jnp.eye(n) - 1` does
not: the entries off the diagonal, where different rows meet, are computed one by one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_accum._core import evaluation
from optax_accum._rows import rules
from optax_accum._rows.program import Constant, Equation, Number, Value
from optax_accum._rows.registry import known

Place = tuple[int, ...]
MadeBy = Mapping[Value, Equation]
MOST = 64  # entries of an array that is computed


def is_known(array: Any) -> bool:
    """Whether an array holds numbers, and their values are known when tracing."""
    return not isinstance(array, Tracer) and jnp.issubdtype(jnp.result_type(array), np.number)


def computed(equation: Equation, numbers: Sequence[Constant | Number | None]) -> list[Constant] | None:
    """The results of an equation of small constants; None if it takes anything else."""
    small = all(value.aval.size <= MOST for value in (*equation.ins, *equation.outs))
    if equation.differs or not numbers or not small or equation.single.effects:
        return None
    given = [number for number in numbers if number is not None and number.double is not None]
    if len(given) < len(numbers) or not all(is_known(number.array) for number in given):
        return None
    if not all(jnp.issubdtype(value.aval.dtype, np.number) for value in equation.outs):
        return None
    try:
        with jax.ensure_compile_time_eval():
            single = evaluation.bind(equation.single, [jnp.asarray(number.array) for number in given])
            double = evaluation.bind(equation.double, [jnp.asarray(number.double) for number in given])
    except Exception:  # what only a compiler understands, as a sharding
        return None
    return [Constant(a, None, b) for a, b in zip(map(np.asarray, single), map(np.asarray, double), strict=True)]


# Entries


def growing(single: Any, double: Any) -> list[int]:
    """The axes along which the types of a value for n rows and for 2 n differ."""
    return [axis for axis, (a, b) in enumerate(zip(single.aval.shape, double.aval.shape, strict=True)) if a != b]


def reduces_growing(equation: Equation) -> bool:
    """Whether a reduction is over an axis that grows, also where its result has rows along several axes."""
    if equation.name.startswith("reduce_"):
        over: Sequence[int] = equation.single.params.get("axes", ())
    elif equation.name == "dot_general":
        (over, _), _ = equation.single.params["dimension_numbers"]
    else:
        return False
    return not set(growing(equation.single.invars[0], equation.double.invars[0])).isdisjoint(over)


def entries_apart(equation: Equation, operand: int, made_by: MadeBy) -> list[Any] | None:
    """The entries of an operand at which the first row meets the last one, as far as they are known.

    None if the operand has rows along one axis alone.
    """
    value, types = equation.ins[operand], (equation.single.invars[operand], equation.double.invars[operand])
    axes = growing(*types)
    if len(axes) < 2:
        return None
    last = [size - 1 if axis in axes else 0 for axis, size in enumerate(value.aval.shape)]
    places = [tuple(0 if axis == first else at for axis, at in enumerate(last)) for first in axes]
    found: dict[tuple[Value, Place], Any] = {}
    entries = [_entry(value, place, made_by, found) for place in places]
    return [entry for entry in entries if entry is not None]


def choose(cases: Sequence[Any], certain: Sequence[str | None]) -> str | None:
    """What is certain of a choice: of one of the cases taken where two rows meet; of all if it is not known which."""
    places = {int(case) for case in cases} or range(len(certain))
    found = [certain[place] for place in places]
    return next(filter(None, found), None) if cases or None not in found else None


def _entry(value: Value, place: Place, made_by: MadeBy, found: dict[tuple[Value, Place], Any]) -> Any:
    if (value, place) not in found:
        found[value, place] = _computed(value, place, made_by, found)
    return found[value, place]


def _computed(value: Value, place: Place, made_by: MadeBy, found: dict[tuple[Value, Place], Any]) -> Any:
    if isinstance(value, Constant | Number):
        return None if isinstance(value.array, Tracer) else np.asarray(value.array)[place]
    made = made_by.get(value)
    if made is None or made.differs:
        return None
    if made.name == "iota":
        return np.asarray(place[made.single.params["dimension"]], value.aval.dtype)
    places = _places_of_operands(made, place)
    entries = [_entry(*pair, made_by, found) for pair in zip(made.ins, places, strict=True)] if places else [None]
    if any(entry is None for entry in entries):
        return None
    return entries[0] if made.name in _MOVES else _evaluated(made, entries)


def _evaluated(equation: Equation, entries: Sequence[Any]) -> Any:
    try:
        with jax.ensure_compile_time_eval():
            return np.asarray(evaluation.bind(equation.single, entries)[0])
    except Exception:  # what takes no single entries
        return None


_MOVES = ("broadcast_in_dim", "reshape")


def _places_of_operands(equation: Equation, place: Place) -> list[Place]:
    """Where the operands have what an equation makes at a place; empty if that is not known."""
    shapes = [value.aval.shape for value in equation.ins]
    if equation.name == "reshape" and equation.single.params["dimensions"] is None:
        number = np.ravel_multi_index(place, equation.outs[0].aval.shape)
        return [tuple(map(int, np.unravel_index(number, shapes[0])))]
    if equation.name == "broadcast_in_dim":
        place = tuple(place[axis] for axis in equation.single.params["broadcast_dimensions"])
    elif known(equation.name).local is not rules.elementwise:
        return []
    return [tuple(at if size > 1 else 0 for at, size in zip(place, shape, strict=False)) for shape in shapes]
