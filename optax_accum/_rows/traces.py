"""A function traced for n rows and for fewer: where its values have rows.

An axis of rows is one whose length grows with the number of rows. For n rows it need not have length n: rows may be
merged with tokens (n T), or split into groups (n / g).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from optax_accum._rows.places import place_of

Axis = int | None
Rows = tuple[int, int]  # how many rows the two traces have
COUPLED = -1  # in place of an axis: rows along several axes, or along one in an unknown order


class OtherProgramError(ValueError):
    """The function is another program for fewer rows."""


class View(NamedTuple):
    """An equation, for n rows and for fewer, with the axes of rows of its operands and results."""

    long: Any
    short: Any
    ins: Sequence[Axis]
    outs: Sequence[Axis]
    rows: Rows
    asks: bool = True  # whether rules of the user's inside it are asked, too

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.long.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the equation for n rows."""
        return self.long.params

    def shape_in(self, operand: int) -> tuple[int, ...]:
        """Returns the shape of an operand, for n rows."""
        return self.long.invars[operand].aval.shape

    def shape_out(self, result: int = 0) -> tuple[int, ...]:
        """Returns the shape of a result, for n rows."""
        return self.long.outvars[result].aval.shape

    @property
    def has_rows(self) -> bool:
        """Whether an operand has rows."""
        return any(axis is not None for axis in self.ins)


def axis_of(long: Any, short: Any, rows: Rows) -> Axis:
    """Returns the axis along which two types differ as the numbers of rows do: None without rows.

    `COUPLED` where several axes differ, or one does not grow in proportion to the rows, as in `v[1:]`.
    """
    pairs = list(zip(getattr(long, "shape", ()), getattr(short, "shape", ()), strict=True))
    differ = [axis for axis, (a, b) in enumerate(pairs) if a != b]
    if not differ:
        return None
    (a, b), (n, m) = pairs[differ[0]], rows
    return differ[0] if len(differ) == 1 and a * m == b * n else COUPLED


def view_of(long: Any, short: Any, rows: Rows, asks: bool = True) -> View:
    """Returns two equations as the table of primitives takes them."""

    def axes(a: Sequence[Any], b: Sequence[Any]) -> list[Axis]:
        return [axis_of(x.aval, y.aval, rows) for x, y in zip(a, b, strict=True)]

    return View(long, short, axes(long.invars, short.invars), axes(long.outvars, short.outvars), rows, asks)


def in_step(long: Any, short: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the equations of two programs, two by two."""
    for a, b in zip(long.eqns, short.eqns, strict=False):
        if a.primitive.name != b.primitive.name or len(a.invars) != len(b.invars) or len(a.outvars) != len(b.outvars):
            raise OtherProgramError(
                f"at {place_of(a)} it has {a.primitive.name}, and for fewer rows {b.primitive.name}"
            )
        yield a, b
    if len(long.eqns) != len(short.eqns):
        more = max(long.eqns, short.eqns, key=len)[min(len(long.eqns), len(short.eqns))]
        raise OtherProgramError(f"at {place_of(more)} only one of the two has {more.primitive.name}")
