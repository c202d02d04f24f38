"""Two traces of a loss as one list of equations whose values know their axes of rows: of [4, 3] and [8, 3], axis 0."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from optax_accum._core import compilers
from optax_accum._rows import locality
from optax_accum._rows.places import Place, calls_library, own_place, place_of
from optax_accum._rows.traces import COUPLED, Axis, OtherProgramError, Rows, View, in_step, view_of


class Value:
    """A value of the program: its type for n rows, and its axis of rows."""

    def __init__(self, aval: Any, axis: Axis):
        self.aval, self.axis = aval, axis


class Constant(Value):
    """An array that the program holds, for n rows; `double` is the array for 2 n."""

    def __init__(self, array: Any, axis: Axis, double: Any = None):
        super().__init__(jax.typeof(array), axis)
        self.array, self.double = array, double


class Number(Value):
    """A literal of the program, for n rows; `double` is the literal for 2 n, None if there is none."""

    def __init__(self, literal: Any, double: Any = None):
        super().__init__(literal.aval, None)
        self.array = self.number = literal.val
        self.double = getattr(double, "val", None)


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """An equation, for n rows (`single`) and for 2 n (`double`); `caller`: the jit or scan around it."""

    single: Any
    double: Any
    ins: Sequence[Value]
    outs: Sequence[Value]
    rows: Rows
    caller: "Equation | None" = None
    differs: bool = False  # whether the two traces differ here: it is run as it is for n rows, and never divided

    @property
    def name(self) -> str:
        return self.single.primitive.name

    @property
    def view(self) -> View:
        """The equation as the tables of primitives take it."""
        ins, outs = ([value.axis for value in values] for values in (self.ins, self.outs))
        return View(self.single, self.double, ins, outs, self.rows)

    @property
    def place(self) -> Place:
        """The line of the user's code that it comes from: for a function of a library, the line of the call."""
        if self.caller is None:
            return place_of(self.single)
        user_line = None if calls_library(self.caller.single) else own_place(self.single)
        return user_line or self.caller.place

    def __repr__(self) -> str:
        return f"{self.name} at {self.place}"


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function of rows."""

    inputs: Sequence[Value]
    equations: Sequence[Equation]
    outputs: Sequence[Value]
    rows: Rows

    @functools.cached_property
    def made_by(self) -> dict[Value, Equation]:
        """From each value to the equation that makes it."""
        return {value: equation for equation in self.equations for value in equation.outs}

    @property
    def units(self) -> int:
        """The number of blocks of rows that no axis of rows divides: n, or fewer if rows are grouped."""
        along = [value.aval.shape[value.axis] for value in self.inputs if value.axis not in (None, COUPLED)]
        for equation in self.equations:
            along += [value.aval.shape[value.axis] for value in equation.outs if value.axis not in (None, COUPLED)]
            if not equation.differs:
                along += [length for _, length in lengths_inside(equation.single, equation.double, self.rows)]
        return math.gcd(self.rows[0], *along)


def needed(wanted: Iterable[Value], made_by: Mapping[Value, Equation], there: Container[Value] = ()) -> set[Equation]:
    """The equations that make values which are not there yet."""
    found: set[Equation] = set()
    todo = list(wanted)
    while todo:
        value = todo.pop()
        equation = None if value in there else made_by.get(value)
        if equation is not None and equation not in found:
            found.add(equation)
            todo += equation.ins
    return found


def lengths_inside(single: Any, double: Any, rows: Rows) -> Iterator[tuple[Any, int]]:
    """Yields the lengths of the axes of rows inside an equation, each with the equation that has it."""
    for programs in locality.programs_inside(single, double):
        pairs = in_step(*(compilers.opened(program)[0] for program in programs))
        with contextlib.suppress(OtherProgramError):  # it runs once, on all rows
            for a, b in pairs:
                for result, axis in zip(a.outvars, view_of(a, b, rows).outs, strict=True):
                    if axis not in (None, COUPLED):
                        yield a, result.aval.shape[axis]
                yield from lengths_inside(a, b, rows)
