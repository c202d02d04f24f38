"""What is known of primitives: a row for each, but for those of which nothing is.

A question about rows asks the row of its equation's primitive. Without a row, or without a rule for the question, the
answer is the one that is always right: the equation runs once, on all rows, and nothing is linear or cheap.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from optax_accum._core.folds import SUM, Fold
from optax_accum._rows.traces import View

Rule = Callable[[View], bool]
Group = Callable[[int], Iterable[int]] | tuple[int, ...]  # operands by their places, or by how many there are
FIRST = ((0,),)
PRODUCT = ((0,), (1,))
TOGETHER = (range,)
REST = (lambda count: range(1, count),)


def _nothing(equation: Any) -> bool:
    return False


def _along_axes(equation: Any, values: Sequence[Any], wide: Callable[[Any], Any], along: Callable[..., Any]) -> Any:
    return along(values[0].astype(wide(values[0].dtype)), axis=equation.params["axes"])


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How rows are reduced in parts, one for each micro-batch.

    The parts of the batch, joined, are the result for the batch:

        f(x) = fold.along([f(x_1), ..., f(x_k)], axis=0)

    Attributes:
      rule: whether an equation that takes rows and makes none reduces them so.
      fold: how parts are joined, also over devices.
      part: `part(equation, operands, wide, along)` is the part of some rows:
        the operands have only these; `wide(dtype)` is the dtype of sums, and
        `along` the fold's. By default `along(operand, axis=)`, with
        `equation.params["axes"]` and the only operand.
    """

    rule: Rule
    fold: Fold = SUM
    part: Callable[..., jax.Array] = _along_axes


@dataclasses.dataclass(frozen=True)
class Positional:
    """How an equation without rows makes rows, each by its place and nothing else.

    Attributes:
      rule: whether an equation does.
      at: computes `(equation, operands, axis, places [m])`: m rows along the axis, those at these places.
    """

    rule: Rule
    at: Callable[[Any, Sequence[Any], int, jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a primitive. Rules are asked of equations whose parameters differ in sizes alone.

    Attributes:
      local: whether block u of each result depends on block u of the operands that have rows, on the others, and on
        nothing that has an entry for each row; its derivative, too.
      partial: how it reduces rows in parts.
      alike: whether an equation without rows makes rows that are all alike.
      positional: how it makes rows by their places.
      linear: groups of operands; it is linear in each group if the other operands are fixed.
      is_affine: whether an equation of it adds a constant, and is thus linear in none.
      is_cheap: whether it costs less to run it again than to keep its result for all rows.
    """

    local: Rule = _nothing
    partial: Reduction = Reduction(_nothing)
    alike: Rule = _nothing
    positional: Positional | None = None
    linear: Sequence[Group] = ()
    is_affine: Callable[[Any], bool] = _nothing
    is_cheap: bool = False

    def linear_groups(self, equation: Any) -> list[frozenset[int]]:
        """The groups of operands in which an equation is linear."""
        if self.is_affine(equation):
            return []
        count = len(equation.invars)
        return [frozenset(group(count) if callable(group) else group) for group in self.linear]


_NOT_KNOWN = Known()
_table: dict[str, Known] = {}


def known(name: str) -> Known:
    """The row of a primitive."""
    return _table.get(name, _NOT_KNOWN)


def is_known(name: str) -> bool:
    return name in _table


def names() -> frozenset[str]:
    return frozenset(_table)


def register(names: str, **rules: Any) -> None:
    """Adds a row for each of these names, which spaces divide.

    Raises:
      ValueError: there is a row already: what two libraries say of one name would not be known.
    """
    for name in names.split():
        if name in _table:
            raise ValueError(f"A primitive is registered once: {name!r} is registered already. Leave it out.")
        _table[name] = Known(**rules)
