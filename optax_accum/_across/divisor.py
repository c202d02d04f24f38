"""What the sum of a window is divided by: a table of two rows, mean and sum."""

from collections.abc import Callable
from typing import Any, NamedTuple

from optax_accum._core import arithmetic
from optax_accum._core.types import Flag, Weight
from optax_accum._shared.checks import one_of


class Divisor(NamedTuple):
    """Divides the sum of a window.

    Attributes:
      is_mean: whether the divisor is the sum of the weights, of which each device holds a part.
      divides: `weight -> flag`: whether a window of this weight makes an update.
      factor: `weight -> number`: multiplies the sum.
      unweighed: `rows -> weight`: for a micro-batch without a weight; `rows` may be the denominator of its loss.
    """

    is_mean: bool
    divides: Callable[[Weight], Flag]
    factor: Callable[[Weight], Weight]
    unweighed: Callable[[Any], Weight]


TABLE = {
    "mean": Divisor(True, arithmetic.divides, arithmetic.reciprocal, lambda rows: rows * 1.0),
    "sum": Divisor(False, lambda weight: weight != 0, lambda weight: 1.0, lambda rows: 1.0),
}


def as_divisor(reduction: str) -> Divisor:
    return TABLE[one_of("reduction", reduction, tuple(TABLE))]
