"""A loss traced for n rows and for 2 n, as one list of equations whose values know their axes of rows."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from optax_accum._core import compilers
from optax_accum._rows import locality
from optax_accum._rows.own_rows import of_own_rows
from optax_accum._rows.places import Place, calls_library, own_place, place_of
from optax_accum._rows.traces import COUPLED, Axis, OtherProgramError, Rows, View, axis_of, in_step, view_of


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
    """An equation, for n rows (`single`) and for 2 n (`double`); `caller` is the call, or the loop, that holds it."""

    single: Any
    double: Any
    ins: Sequence[Value]
    outs: Sequence[Value]
    rows: Rows
    caller: "Equation | None" = None

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

    @property
    def units(self) -> int:
        """The number of blocks of rows that no axis of rows divides: n, or fewer if rows are grouped."""
        along = [value.aval.shape[value.axis] for value in self.inputs if value.axis not in (None, COUPLED)]
        for equation in self.equations:
            along += _lengths(equation.single, equation.double, self.rows)
        return math.gcd(self.rows[0], *along)


def _lengths(single: Any, double: Any, rows: Rows) -> Iterator[int]:
    """Yields the lengths of the axes of rows, of an equation's results and inside it."""
    for result, axis in zip(single.outvars, view_of(single, double, rows).outs, strict=True):
        if axis not in (None, COUPLED):
            yield result.aval.shape[axis]
    for programs in locality.programs_inside(single, double):
        pairs = in_step(*(compilers.opened(program)[0] for program in programs))
        with contextlib.suppress(OtherProgramError):  # it runs once, on all rows
            for pair in pairs:
                yield from _lengths(*pair, rows)


def paired(single: Any, double: Any, rows: Rows, caller: Equation | None = None) -> Program:
    """Pairs two traces, for `rows` rows each, equation by equation; inlines the functions that they call.

    `caller` is the equation that holds the program, if there is one.

    Raises:
      OtherProgramError: they differ in more than the number of rows.
    """
    equations: list[Equation] = []
    pairs = zip(single.jaxpr.invars, double.jaxpr.invars, strict=True)
    inputs = [Value(a.aval, axis_of(a.aval, b.aval, rows)) for a, b in pairs]
    return Program(inputs, equations, _inlined(single, double, inputs, equations, rows, caller), rows)


def _inlined(
    single: Any,
    double: Any,
    inputs: Sequence[Value],
    equations: list[Equation],
    rows: Rows,
    caller: Equation | None,
) -> list[Value]:
    """Appends the equations of two traces; returns their results."""
    (of_single, consts), (of_double, double_consts) = compilers.opened(single), compilers.opened(double)
    if len(consts) != len(double_consts):
        raise OtherProgramError("it closes over other arrays")
    env = dict(zip(of_single.invars, inputs, strict=True))
    for var, array, double_array in zip(of_single.constvars, consts, double_consts, strict=True):
        env[var] = Constant(array, axis_of(jax.typeof(array), jax.typeof(double_array), rows), double_array)

    def read(single: Sequence[Any], double: Sequence[Any]) -> list[Value]:
        pairs = zip(single, double, strict=True)
        return [Number(a, b) if isinstance(a, core.Literal) else env[a] for a, b in pairs]

    for a, b in in_step(of_single, of_double):
        ins, view = read(a.invars, b.invars), view_of(a, b, rows)
        outs = [Value(var.aval, axis) for var, axis in zip(a.outvars, view.outs, strict=True)]
        equation = Equation(a, b, ins, outs, rows, caller)
        gather = of_own_rows(equation, equations) if equation.name == "gather" else None
        if gather is not None:
            for_all, for_more = (
                jax.make_jaxpr(gather.fun)(*(_type(value, rows, size) for value in gather.ins)) for size in rows
            )
            outs = _inlined(for_all, for_more, gather.ins, equations, rows, equation)
        elif _is_inlined(equation):
            outs = _inlined(_inner(a), _inner(b), ins, equations, rows, equation)
        else:
            equations.append(equation)
        env.update(zip(a.outvars, outs, strict=True))
    return read(of_single.outvars, of_double.outvars)


def _type(value: Value, rows: Rows, size: int) -> jax.ShapeDtypeStruct:
    shape = list(value.aval.shape)
    if value.axis is not None and value.axis != COUPLED:
        shape[value.axis] = shape[value.axis] * size // rows[0]
    return jax.ShapeDtypeStruct(tuple(shape), value.aval.dtype)


def _is_inlined(equation: Equation) -> bool:
    """Whether the equations inside an equation replace it.

    A checkpoint that takes rows together is dropped: each loop recomputes the residuals of its backward pass.
    """
    if equation.name in ("jit", "pjit"):
        return compilers.is_plain_jit(equation.single)
    if equation.name in ("checkpoint", "remat2"):
        return not locality.is_local(equation.view)
    return equation.name == "closed_call"


def _inner(eqn: Any) -> Any:
    return eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
