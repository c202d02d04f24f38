"""An equation of a program of rows, evaluated for as many rows as its operands have.

Shapes have fewer rows, numbers stay the whole batch's: `1 / n`, say.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from optax_accum._core import compilers, custom_derivatives, evaluation
from optax_accum._core.equations import needed
from optax_accum._core.folds import SUM, Fold
from optax_accum._core.leaves import is_inexact
from optax_accum._rows import derivatives, locality
from optax_accum._rows.traces import COUPLED, Rows, View, axis_of, in_step, view_of

Values = Sequence[Any]


class Some(NamedTuple):
    """Some of the rows of a program.

    Attributes:
      rows: the numbers of rows of the two traces.
      size: the number of these rows.
      real: a bool for each of their units: False for a copy that fills up a micro-batch. None: all are in the batch.
    """

    rows: Rows
    size: int
    real: Any = None

    @property
    def all_rows(self) -> "Some":
        """For an equation that has nothing to do with rows: it runs as it is."""
        return Some(self.rows, self.rows[0])

    def are_real(self, length: int) -> Any:
        """Whether each row, of `length` along an axis, is in the batch; None: all are."""
        if self.real is None:
            return None
        return jnp.repeat(self.real, length // len(self.real), total_repeat_length=length)

    def without_filling(self, value: Any, axis: int | None, fold: Fold = SUM) -> Any:
        """Sets rows that are not in the batch to what changes no sum."""
        if self.real is None or axis is None:
            return value
        real = jnp.expand_dims(self.are_real(value.shape[axis]), [dim for dim in range(value.ndim) if dim != axis])
        return jnp.where(real, value, jnp.asarray(fold.nothing(value.dtype), value.dtype))


def evaluate(single: Any, double: Any, some: Some, values: Values) -> Values:
    """Evaluates an equation on values of some rows; `double` is its second trace."""
    if single.primitive.name in locality.NESTED:
        with source_info_util.user_context(single.source_info.traceback):  # for the lines of errors
            return _inside(single, double, some, evaluation.varying_as(values, [atom.aval for atom in single.invars]))
    params = {key: _resized(value, double.params.get(key), some) for key, value in single.params.items()}
    params |= _shardings(single, double, some)
    return evaluation.bind(single.replace(params=params), values)


def run(single: Any, double: Any, some: Some, values: Values, taken: Callable[..., Values] | None = None) -> list[Any]:
    """Evaluates a program that treats rows one by one; `taken` may change an equation's operands."""
    program, of_double = compilers.opened(single)[0], compilers.opened(double)[0]
    others = {id(a): b for a, b in in_step(program, of_double)}

    def bind(a: Any, operands: Values) -> Values:
        view = view_of(a, others[id(a)], some.rows)
        operands = taken(view, operands) if taken else operands
        has_none = not view.has_rows and not view.makes_rows
        return evaluate(a, a, some.all_rows, operands) if has_none else evaluate(a, view.double, some, operands)

    more = evaluation.varying_more(values, [var.aval for var in program.invars])
    results = evaluation.run(single, values, bind)
    return evaluation.varying_as(results, [atom.aval for atom in program.outvars], more)


def _shardings(single: Any, double: Any, some: Some) -> dict[str, Any]:
    """The parameters of an equation that say where its result lies; Explicit axes cannot cut every number of rows."""
    named = {key: single.params[key] for key in ("out_sharding", "sharding") if single.params.get(key) is not None}
    axis = view_of(single, double, some.rows).outs[0] if named else None
    if axis in (None, COUPLED):
        return {}
    rows = some.size if some.real is None else 1
    return {key: compilers.splittable_sharding(sharding, axis, rows) for key, sharding in named.items()}


def _resized(single: Any, double: Any, some: Some) -> Any:
    """A parameter for fewer rows: if the traces differ, it grows in proportion to the rows."""
    if type(single) is tuple and type(double) is tuple and len(single) == len(double):
        return tuple(_resized(a, b, some) for a, b in zip(single, double, strict=True))
    if isinstance(single, int) and isinstance(double, int) and single != double:
        return single * some.size // some.rows[0]
    return single


# Programs inside equations


def _inside(single: Any, double: Any, some: Some, values: Values) -> Values:
    length, of_double = single.params.get("length"), double.params.get("length")
    is_over_rows = length != of_double  # its body sees one row, and runs as it is
    inside = some.all_rows if is_over_rows else some
    pairs = locality.programs_inside(single, single if is_over_rows else double)

    def run_one(number: int, operands: Values) -> list[Any]:
        return run(*pairs[number], inside, operands)

    if not custom_derivatives.has_rule(single):
        return evaluation.run_inside(single, values, run_one, _resized(length, of_double, some))
    derivative = _custom_jvp if single.primitive.name == "custom_jvp_call" else _custom_vjp
    return derivative(functools.partial(run_one, 0), single, double, some)(*values)


def _custom_jvp(fun: Callable[[Values], Values], single: Any, double: Any, some: Some) -> Callable[..., Values]:
    """A function with the user's derivative, which is traced for the operands that move."""
    called = jax.custom_jvp(lambda *values: fun(values))

    def derivative(primals: Values, tangents: Values) -> tuple[Values, Values]:
        perturbed = [not _is_zero(tangent) and is_inexact(tangent) for tangent in tangents]
        traces = derivatives.derivative_of(single, double, derivatives.forward, perturbed)
        if some.size != some.rows[0] and not locality.are_local(*traces, some.rows, asks_rules=False):
            raise ValueError("The derivative rule of a function does not treat rows one by one if other operands move.")
        changed = (tangent for tangent, is_perturbed in zip(tangents, perturbed, strict=True) if is_perturbed)
        outs = run(*traces, some, [*primals, *changed])
        half = len(single.outvars)
        return outs[:half], outs[half:]

    called.defjvp(derivative, symbolic_zeros=True)
    return called


@functools.partial(jax.tree_util.register_dataclass, data_fields=["real", "values"], meta_fields=["perturbed"])
@dataclasses.dataclass(frozen=True)
class _Kept:
    """What a backward pass needs: its operands, and which of them a derivative perturbs."""

    real: Any
    values: Values
    perturbed: tuple[bool, ...]


def _custom_vjp(fun: Callable[[Values], Values], single: Any, double: Any, some: Some) -> Callable[..., Values]:
    """A function with the user's backward pass, which is traced, too, and recomputes its residuals."""
    called = jax.custom_vjp(lambda real, *values: fun(values))

    def forward(real: Any, *primals: Any) -> tuple[Values, _Kept]:
        values = [primal.value for primal in primals]
        perturbed = tuple(primal.perturbed and jnp.issubdtype(primal.value.dtype, jnp.inexact) for primal in primals)
        kept = _Kept(jax.tree.map(lambda primal: primal.value, real), values, perturbed)
        nothing = [False] * len(single.outvars)
        a, b = map(_live, derivatives.derivative_of(single, double, derivatives.primal, perturbed, nothing))
        is_local = locality.are_local(a, b, some.rows)
        return run(a, b, some._replace(real=kept.real), values) if is_local else fun(values), kept

    def backward(kept: _Kept, cotangents: Values) -> tuple[Any, ...]:
        takes = [is_inexact(var.aval) and not _is_zero(ct) for ct, var in zip(cotangents, single.outvars, strict=True)]
        traces = derivatives.derivative_of(single, double, derivatives.backward, kept.perturbed, takes)
        if some.size != some.rows[0] and not locality.adds_up(*traces, some.rows):
            raise ValueError("The derivative rule of a function does not treat rows one by one if other operands move.")
        given = [ct for ct, is_taken in zip(cotangents, takes, strict=True) if is_taken]
        grads = iter(_added_up(*traces, some._replace(real=kept.real), [*kept.values, *given]))
        return (None, *(next(grads) if is_perturbed else None for is_perturbed in kept.perturbed))

    called.defvjp(forward, backward, symbolic_zeros=True)
    return functools.partial(called, some.real)


def _live(program: Any) -> Any:
    """A program without the equations that its results do not need."""
    jaxpr = program.jaxpr
    return program.replace(jaxpr=jaxpr.replace(eqns=needed(jaxpr, range(len(jaxpr.outvars)))[0]))


def _is_zero(change: Any) -> bool:
    return isinstance(change, jax.custom_derivatives.SymbolicZero)


def _added_up(single: Any, double: Any, some: Some, values: Values) -> list[Any]:
    """Evaluates a user's backward pass; rows that are not in the batch add nothing to its sums over rows."""

    def taken(view: View, operands: Values) -> Values:
        return list(map(some.without_filling, operands, view.ins)) if locality.is_partial(view) else operands

    results = zip(single.jaxpr.outvars, double.jaxpr.outvars, run(single, double, some, values, taken), strict=True)
    return [some.without_filling(result, axis_of(a.aval, b.aval, some.rows)) for a, b, result in results]
