"""What runs in loops over micro-batches, and what runs once between two loops: the square root of a variance, say."""

import dataclasses
import enum
from collections.abc import Container, Sequence
from typing import NamedTuple

from optax_accum._core.folds import Fold
from optax_accum._rows.program import Equation, Program, Value


class Kind(enum.Enum):
    """Where an equation runs."""

    LOCAL = "for the rows of a micro-batch, in a loop"
    PARTIAL = "in parts in the loop, which are joined after it"
    WHOLE = "once, on all rows"
    MADE = "once; it takes no rows and makes some, which are split as a batch is"
    NO_ROWS = "once; it takes no rows and makes none"


ONCE = (Kind.WHOLE, Kind.MADE, Kind.NO_ROWS)


class Body(NamedTuple):
    """The body of a loop over layers, or a branch, that runs for some rows: where each of its equations runs."""

    program: Program
    kinds: dict[Equation, Kind]
    bodies: "dict[Equation, Bodies]"


class Bodies(NamedTuple):
    """The programs inside an equation that runs for some rows: the body of a loop over layers, or branches.

    Attributes:
      each: the programs; none for a loop over rows, whose body sees one row.
      are_sums: which of its results are parts of sums.
    """

    each: Sequence[Body]
    are_sums: Sequence[bool]


@dataclasses.dataclass(frozen=True)
class Loop:
    """One pass over the micro-batches.

    Attributes:
      equations: those that run for each micro-batch, in order.
      sums: values of which each micro-batch gives a part; and how the parts are joined.
      rows: values that the loop keeps for all rows: a later loop, an equation on all rows or an output takes them.
      takes: values that are there when it starts.
      ends: rows that it takes, and nothing after it: others are kept in their place.
      onto: values to which some sums are added when they are whole, as a scatter does.
    """

    equations: Sequence[Equation]
    sums: dict[Value, Fold]
    rows: Sequence[Value]
    takes: Sequence[Value]
    onto: dict[Value, Value]
    ends: Sequence[Value] = ()


@dataclasses.dataclass(frozen=True)
class Stage:
    """Equations that run once, and the loop after them; the last stage has none."""

    before_loop: Sequence[Equation]
    loop: Loop | None = None


@dataclasses.dataclass(frozen=True)
class Levels:
    """How a program runs."""

    program: Program
    kinds: dict[Equation, Kind]
    of_params: set[Value]  # what depends on the parameters: all but the batch, and what it decides alone
    differentiable: set[Value]  # what may be differentiated: nothing after a stop_gradient is
    stages: Sequence[Stage]
    bodies: dict[Equation, Bodies]  # of equations some of whose results are parts of sums
    folds: Container[Value]  # the values of which each micro-batch of a loop gives a part

    @property
    def loops(self) -> list[Loop]:
        """The passes over the micro-batches."""
        return [stage.loop for stage in self.stages if stage.loop]

    @property
    def coupling(self) -> list[Equation]:
        """The equations that take rows together and that parameters decide."""
        together = (equation for equation, kind in self.kinds.items() if kind in (Kind.PARTIAL, Kind.WHOLE))
        return [equation for equation in together if not self.of_params.isdisjoint(equation.ins)]
