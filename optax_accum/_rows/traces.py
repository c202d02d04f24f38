"""A function traced for n rows and for 2 n: where its values have rows.

An axis of rows is one whose length grows with the number of rows. For n rows it need not have length n: rows may be
merged with tokens (n T), or split into groups (n / g).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from optax_accum._rows.places import place_of

Axis = int | None
Rows = tuple[int, int]  # the numbers of rows of the two traces: n and 2 n
COUPLED = -1  # in place of an axis: rows along several axes, or along one in an unknown order


# Parameters that may differ with the number of rows: sizes, and programs, which are looked into.
_SIZES = frozenset(["__axis_size", "length", "limit_indices", "new_sizes", "reps", "shape", "sizes", "slice_sizes"])
_PROGRAMS = frozenset(
    [
        *("branches", "bwd", "body_jaxpr", "call_jaxpr", "cond_jaxpr", "ctx_mesh", "debug_info", "ft_in", "ft_out"),
        *("fun_jaxpr", "fwd_jaxpr_thunk", "in_avals", "jaxpr", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "name", "out_avals"),
        *("out_sharding", "out_trees", "sharding", "update_consts", "update_jaxpr", "_split_transpose"),
    ]
)


class OtherProgramError(ValueError):
    """The function is another program for 2 n rows."""


class View(NamedTuple):
    """An equation of a traced loss, as rules are asked of it.

    A loss is traced for n rows and for 2 n: an axis that grows has rows.
    Parameters and shapes are those for n rows.

    Attributes:
      single: the equation for n rows.
      double: the equation for 2 n rows. Its parameters differ in sizes alone.
      ins: the axis of rows of each operand; None without rows.
      outs: the axis of rows of each result; None without rows.
      rows: n and 2 n.
      asks_rules: whether derivatives that users wrote must be local, too.
      perturbed: which operands a derivative perturbs; None if unknown.
    """

    single: Any
    double: Any
    ins: Sequence[Axis]
    outs: Sequence[Axis]
    rows: Rows
    asks_rules: bool = True
    perturbed: Sequence[bool] | None = None

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.single.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the equation for n rows."""
        return self.single.params

    def shape_in(self, operand: int) -> tuple[int, ...]:
        """The shape of an operand, for n rows."""
        return self.single.invars[operand].aval.shape

    def shape_out(self, result: int = 0) -> tuple[int, ...]:
        """The shape of a result, for n rows."""
        return self.single.outvars[result].aval.shape

    @property
    def has_rows(self) -> bool:
        """Whether an operand has rows."""
        return any(axis is not None for axis in self.ins)

    @property
    def makes_rows(self) -> bool:
        """Whether a result has rows."""
        return any(axis is not None for axis in self.outs)

    @property
    def has_same_numbers(self) -> bool:
        """Whether the two equations differ in sizes alone, along axes of rows."""
        double = self.double.params
        is_size = lambda key, value: key in _SIZES and self._differs_along_rows(value, double.get(key))
        return all(
            key in _PROGRAMS or equal(value, double.get(key)) or is_size(key, value)
            for key, value in self.params.items()
        )

    def _differs_along_rows(self, single: Any, double: Any) -> bool:
        """Whether sizes, one for each axis, differ along axes of rows alone; `n` in `x[:, :n:9]` is a number."""
        if not isinstance(single, tuple):
            return True
        differ = {axis for axis, (a, b) in enumerate(zip(single, double, strict=True)) if a != b}
        return differ <= {*self.ins, *self.outs}

    @property
    def has_same_sizes(self) -> bool:
        """Whether not even sizes differ, outside of programs inside."""
        double = self.double.params
        sizes = ((value, double.get(key)) for key, value in self.params.items() if key in _SIZES)
        return self.has_same_numbers and all(equal(*pair) for pair in sizes)


def equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or bool(a != a and b != b)  # a gather may fill with NaN
    except Exception:  # arrays among the parameters
        return False


def axis_of(single: Any, double: Any, rows: Rows) -> Axis:
    """The axis along which two types differ in proportion to the rows; None without rows.

    `COUPLED` if several axes differ, or one does not grow in proportion to the rows, as in `v[1:]`.
    """
    pairs = list(zip(getattr(single, "shape", ()), getattr(double, "shape", ()), strict=True))
    differ = [axis for axis, (a, b) in enumerate(pairs) if a != b]
    if not differ:
        return None
    (a, b), (n, m) = pairs[differ[0]], rows
    return differ[0] if len(differ) == 1 and a * m == b * n else COUPLED


def view_of(single: Any, double: Any, rows: Rows, asks_rules: bool = True) -> View:
    """Two equations as the tables of primitives take them."""
    axes = lambda a, b: [axis_of(x.aval, y.aval, rows) for x, y in zip(a, b, strict=True)]
    return View(
        single, double, axes(single.invars, double.invars), axes(single.outvars, double.outvars), rows, asks_rules
    )


def pair_key(equation: Any) -> tuple[Any, ...]:
    """What two equations must share to be a pair: the primitive, and how many operands, branches and axes there are."""
    ranks = tuple(len(getattr(var.aval, "shape", ())) for var in (*equation.invars, *equation.outvars))
    return equation.primitive.name, len(equation.invars), len(equation.params.get("branches", ())), ranks


def in_step(single: Any, double: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the equations of two programs in pairs.

    Raises:
      OtherProgramError: two equations are no pair; or a variable has rows where it is made, and none, or others, where
        it is taken: with other operands, another program has the same primitives.
    """
    shapes: dict[Any, Any] = {}  # of a variable, for 2 n rows

    def check(ours: Sequence[Any], others: Sequence[Any]) -> None:
        for a, b in zip(ours, others, strict=True):
            shape = getattr(b.aval, "shape", ())
            is_same = not isinstance(a, core.Var) or shapes.setdefault(a, shape) == shape
            if not is_same or len(getattr(a.aval, "shape", ())) != len(shape):
                raise OtherProgramError("it takes other arrays")

    if any(len(a) != len(b) for a, b in ((single.invars, double.invars), (single.outvars, double.outvars))):
        raise OtherProgramError("it takes or returns other arrays")
    check(single.invars, double.invars)
    for a, b in zip(single.eqns, double.eqns, strict=False):
        if pair_key(a) != pair_key(b):
            raise OtherProgramError(
                f"at {place_of(a)} it has {a.primitive.name}, and for twice as many rows {b.primitive.name}"
            )
        check((*a.invars, *a.outvars), (*b.invars, *b.outvars))
        yield a, b
    if len(single.eqns) != len(double.eqns):
        more = max(single.eqns, double.eqns, key=len)[min(len(single.eqns), len(double.eqns))]
        raise OtherProgramError(f"at {place_of(more)} only one of the two has {more.primitive.name}")
    check(single.outvars, double.outvars)
