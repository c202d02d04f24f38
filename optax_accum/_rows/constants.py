"""What constants of a program decide, for n rows and for 2 n: the number of entries of an array, say."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_accum._core import evaluation
from optax_accum._rows.program import Constant, Equation, Number

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
