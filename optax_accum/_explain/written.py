"""What a sum over rows adds up, written as a user would: `table[batch['i']]`, `batch['ids'] > 0`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from optax_accum._rows.denominators import Denominator
from optax_accum._rows.program import Constant, Equation, Number, Program, Value

_LONGEST = 60
_INFIX = {
    **{"add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%", "pow": "**"},
    **{"gt": ">", "lt": "<", "ge": ">=", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^"},
}
_PREFIX = {"neg": "-", "not": "~"}
_NAMES = {"reduce_or": "any", "reduce_and": "all", "dot_general": "dot", "iota": "arange"}
_SAME = frozenset(
    [
        *(
            "broadcast_in_dim",
            "convert_element_type",
            "copy",
            "copy_p",
            "device_put",
            "expand_dims",
            "reduce_precision",
        ),
        *("reshape", "sharding_constraint", "squeeze", "stop_gradient", "transpose"),
    ]
)


class _UnwritableError(Exception):
    """An expression is too long, or has an array without a name."""


def summed(program: Program, denominator: Denominator, inputs: Sequence[str], fun: Callable[..., Any]) -> str:
    """Writes what a denominator adds up over rows; "" where that is too long, or no single sum.

    `inputs` are the names of the program's inputs. Arrays that `fun` closes over have the names that they have there.
    """
    makes = denominator.makes
    if makes is None or makes.name != "reduce_sum":
        return ""
    writer = _Writer(program, inputs, fun)
    if writer.sum_in(getattr(denominator.by, "value", None)) is not makes:
        return ""
    try:
        return writer.written(makes.ins[0], inside=True)
    except (_UnwritableError, RecursionError):
        return ""


class _Writer:
    def __init__(self, program: Program, inputs: Sequence[str], fun: Callable[..., Any]):
        self.names: dict[Value, str] = dict(zip(program.inputs, inputs, strict=True))
        self.makers = {value: equation for equation in program.equations for value in equation.outs}
        self.closed_over = _closed_over(fun)

    def maker(self, value: Any) -> Equation | None:
        """The equation that makes a value, before casts and changes of its shape; None for inputs and numbers."""
        equation = self.makers.get(value)
        while equation is not None and equation.name in _SAME:
            equation = self.makers.get(equation.ins[0])
        return equation

    def sum_in(self, value: Any) -> Equation | None:
        """The equation that makes a sum, before it is multiplied with a number or divided by one."""
        equation = self.maker(value)
        while equation is not None and equation.name in ("mul", "div"):
            others = [operand for operand in equation.ins if not isinstance(operand, Number)]
            if len(others) != 1:
                return equation
            equation = self.maker(others[0])
        return equation

    def written(self, value: Value, *, inside: bool = False) -> str:
        """Writes a value; in parentheses if it is `inside` another expression and has an operator."""
        while (equation := self.makers.get(value)) is not None and equation.name in _SAME:
            value = equation.ins[0]
        text, has_operator = (self._leaf(value), False) if equation is None else self._expression(equation)
        text = f"({text})" if inside and has_operator else text
        if len(text) > _LONGEST:
            raise _UnwritableError
        return text

    def _leaf(self, value: Value) -> str:
        if value in self.names:
            return self.names[value]
        array = getattr(value, "array", None)
        if isinstance(value, Number) or np.size(array) == 1:
            number = np.asarray(array).item()
            return f"{number:g}" if isinstance(number, float) else str(number)
        if isinstance(value, Constant) and id(array) in self.closed_over:
            return self.closed_over[id(array)]
        raise _UnwritableError

    def _expression(self, equation: Equation) -> tuple[str, bool]:
        """An operation as text, and whether it needs parentheses inside another one."""
        name, ins = equation.name, equation.ins
        if name in _INFIX:
            return f" {_INFIX[name]} ".join(self.written(value, inside=True) for value in ins), True
        if name in _PREFIX:
            return _PREFIX[name] + self.written(ins[0], inside=True), True
        if name == "integer_pow":
            return f"{self.written(ins[0], inside=True)} ** {equation.single.params['y']}", True
        if name == "gather":
            return f"{self.written(ins[0], inside=True)}[{self.written(self._index(ins[1]))}]", False
        if name == "slice":
            return f"{self.written(ins[0], inside=True)}[{_slices(equation)}]", False
        if name == "select_n" and len(ins) == 3:
            test, otherwise, then = map(self.written, ins)
            return f"where({test}, {then}, {otherwise})", False
        return f"{_name_of(equation)}({', '.join(map(self.written, ins))})", False

    def _index(self, value: Value) -> Value:
        """The index that a user passed, before `where(index < 0, index + length, index)`."""
        equation = self.maker(value)
        if equation is None or equation.name != "select_n":
            return value
        test = self.maker(equation.ins[0])
        is_negative = test is not None and test.name == "lt" and getattr(test.ins[1], "number", None) == 0
        return equation.ins[1] if is_negative else value


def _slices(equation: Equation) -> str:
    """The slices of an array, `:, 1:` say."""
    params, shape = equation.single.params, equation.ins[0].aval.shape
    strides = params["strides"] or (1,) * len(shape)
    along: list[str] = []
    for first, last, step, size in zip(params["start_indices"], params["limit_indices"], strides, shape, strict=True):
        bounds = f"{first or ''}:{last - size if last < size else ''}"
        along.append(bounds if step == 1 else f"{bounds}:{step}")
    while len(along) > 1 and along[-1] == ":":
        along.pop()
    return ", ".join(along)


def _name_of(equation: Equation) -> str:
    """The name of a function that is called; else of the operation."""
    params = equation.single.params
    program = params.get("call_jaxpr") or params.get("jaxpr")
    info = getattr(getattr(program, "jaxpr", program), "debug_info", None)
    called = getattr(info, "func_name", "").rpartition(".")[2]
    return called if called.isidentifier() else _NAMES.get(equation.name, equation.name.removeprefix("reduce_"))


def _closed_over(fun: Callable[..., Any]) -> Mapping[int, str]:
    """The names of the arrays that a function closes over, by `id`."""
    fun = inspect.unwrap(fun)
    code, cells = getattr(fun, "__code__", None), getattr(fun, "__closure__", None) or ()
    names = dict(getattr(fun, "__globals__", {}))
    for name, cell in zip(code.co_freevars if code else (), cells, strict=False):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # it is empty yet
            continue
    return {id(value): name for name, value in names.items() if hasattr(value, "dtype") and hasattr(value, "shape")}
