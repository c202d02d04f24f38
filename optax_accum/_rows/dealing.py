"""Which rows each device gets: whole groups. What runs on all rows is gathered, and need not divide.

`h[: n // 2]` runs on all rows. With three rows on each device its half has no whole number of rows there: it stays in
one piece, and what takes it runs on all rows, too.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from optax_accum._rows import locality
from optax_accum._rows.places import Place, is_of, own_place
from optax_accum._rows.program import Constant, Equation, Program, Value, lengths_inside
from optax_accum._rows.traces import COUPLED


def dealt_out(program: Program, devices: int) -> Program:
    """Returns a program whose units of rows divide over the devices.

    Raises:
      ValueError: an operation takes consecutive rows together that are on two devices.
    """
    if program.units % devices == 0:
        return program
    dealing = _Dealing(program.rows[0], devices)
    return dataclasses.replace(program, equations=[dealing.dealt_out(equation) for equation in program.equations])


@dataclasses.dataclass(frozen=True)
class _Dealing:
    rows: int
    devices: int

    def dealt_out(self, equation: Equation) -> Equation:
        self._keep_whole([value for value in equation.ins if isinstance(value, Constant)])
        is_local = not equation.differs and locality.is_local(equation.view)
        if is_local:
            for value in filter(self._is_uneven, equation.outs):
                raise self._error(equation.single, equation.place, value.aval.shape[value.axis])
        self._keep_whole(equation.outs)
        if equation.differs:
            return equation
        is_divided = is_local or (equation.name == "scan" and all(value.axis != COUPLED for value in equation.ins))
        for inner, length in lengths_inside(equation.single, equation.double, equation.rows):
            if length % self.devices and is_divided:
                raise self._error(inner, own_place(inner) or equation.place, length)
            if length % self.devices:
                return dataclasses.replace(equation, differs=True)
        return equation

    def _keep_whole(self, values: Iterable[Value]) -> None:
        for value in filter(self._is_uneven, values):
            value.axis = COUPLED

    def _is_uneven(self, value: Value) -> bool:
        axis = value.axis
        return axis is not None and axis != COUPLED and value.aval.shape[axis] % self.devices != 0

    def _error(self, single: Any, place: Place, length: int) -> ValueError:
        group, here = self.rows // math.gcd(self.rows, length), self.rows // self.devices
        what, remedy = single.primitive.name, f"Give each device a multiple of {group} rows, or take fewer devices."
        if is_of(single, "map", "loops.py") or is_of(single, "_scan_leaf.<locals>.f", "loops.py"):
            what = "lax.map with a batch_size"
            remedy = f"Take a batch_size that divides {here}, or jax.vmap: micro-batches keep its memory small."
        return ValueError(
            f"A group of rows must be on one device: {what} at {place} takes {group} rows together, and each of "
            f"{self.devices} devices has {here}. {remedy}"
        )
