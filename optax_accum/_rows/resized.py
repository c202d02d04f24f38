"""An equation of a program of rows, evaluated for as many rows as its operands have.

Shapes have fewer rows, numbers stay the whole batch's: `1 / n`, say.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from optax_accum._core import compilers, evaluation
from optax_accum._core.folds import SUM, Fold
from optax_accum._core.leaves import is_inexact
from optax_accum._rows import derivatives, locality
from optax_accum._rows.traces import COUPLED, Rows, axis_of, in_step, view_of

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
    of_name = NESTED.get(single.primitive.name)
    if of_name is not None:
        with source_info_util.user_context(single.source_info.traceback):  # for the lines of errors
            return of_name(single, double, some, evaluation.varying_as(values, [atom.aval for atom in single.invars]))
    params = {key: _resized(value, double.params.get(key), some) for key, value in single.params.items()}
    params |= _shardings(single, double, some)
    return evaluation.bind(single.replace(params=params), values)


def run(single: Any, double: Any, some: Some, values: Values, taken: Callable[..., Values] | None = None) -> list[Any]:
    """Evaluates a program that treats rows one by one; `taken` may change an equation's operands."""
    (program, consts), (of_double, _) = compilers.opened(single), compilers.opened(double)
    env: dict[Any, Any] = dict(zip((*program.constvars, *program.invars), (*consts, *values), strict=True))
    more = evaluation.varying_more(values, [var.aval for var in program.invars])
    read = lambda atom: atom.val if isinstance(atom, core.Literal) else env[atom]
    for a, b in in_step(program, of_double):
        operands = list(map(read, a.invars))
        operands = taken(a, b, operands) if taken else operands
        view = view_of(a, b, some.rows)
        has_none = not view.has_rows and not view.makes_rows
        results = evaluate(a, a, some.all_rows, operands) if has_none else evaluate(a, b, some, operands)
        env.update(zip(a.outvars, results, strict=True))
    return evaluation.varying_as(list(map(read, program.outvars)), [atom.aval for atom in program.outvars], more)


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


def _called(single: Any, double: Any, some: Some, values: Values) -> Values:
    key = next(key for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in single.params)
    return run(single.params[key], double.params[key], some, values)


def _checkpoint(single: Any, double: Any, some: Some, values: Values) -> Values:
    options = {key: single.params[key] for key in ("policy", "prevent_cse") if key in single.params}
    body = functools.partial(run, single.params["jaxpr"], double.params["jaxpr"], some)
    return jax.checkpoint(body, **options)(values)


def _scan(single: Any, double: Any, some: Some, values: Values) -> Values:
    params = single.params
    is_over_rows = params["length"] != double.params["length"]  # its body sees one row, and runs as it is
    of_double, inside = (params, some.all_rows) if is_over_rows else (double.params, some)
    body = functools.partial(run, params["jaxpr"], of_double["jaxpr"], inside)
    return evaluation.scanned(single, values, body, _resized(params["length"], double.params["length"], some))


def _while(single: Any, double: Any, some: Some, values: Values) -> Values:
    params = single.params
    of_cond, of_body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    run_inside = lambda key, fixed, carry: run(params[key], double.params[key], some, [*fixed, *carry])
    goes_on = lambda carry: run_inside("cond_jaxpr", values[:of_cond], carry)[0]

    def step(carry: list[Any]) -> list[Any]:
        after, more = run_inside("body_jaxpr", values[of_cond:of_body], carry), goes_on(carry)
        return [_where(more, new, old) for new, old in zip(after, carry, strict=True)] if more.ndim else after

    return jax.lax.while_loop(lambda carry: jnp.any(goes_on(carry)), step, list(values[of_body:]))


def _where(more: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Takes new values for rows that go on: in a `while` under `vmap`, each row ends by itself."""
    more = compilers.sharded_as(new, jax.lax.broadcast_in_dim(more, new.shape, tuple(range(more.ndim))))
    return jax.lax.select(more, new, old)


def _cond(single: Any, double: Any, some: Some, values: Values) -> Values:
    index, *operands = values
    pairs = zip(single.params["branches"], double.params["branches"], strict=True)
    branches = [functools.partial(run, *pair, some) for pair in pairs]
    return jax.lax.switch(jnp.asarray(index).astype(jnp.int32), branches, operands)


def _custom(derivative: Callable[..., Any], single: Any, double: Any, some: Some, values: Values) -> Values:
    return derivative(functools.partial(_called, single, double, some), single, double, some)(*values)


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
        return fun(values), _Kept(jax.tree.map(lambda primal: primal.value, real), values, perturbed)

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


def _is_zero(change: Any) -> bool:
    return isinstance(change, jax.custom_derivatives.SymbolicZero)


def _added_up(single: Any, double: Any, some: Some, values: Values) -> list[Any]:
    """Evaluates a user's backward pass; rows that are not in the batch add nothing to its sums over rows."""

    def taken(a: Any, b: Any, operands: Values) -> Values:
        view = view_of(a, b, some.rows)
        return list(map(some.without_filling, operands, view.ins)) if locality.is_partial(view) else operands

    results = zip(single.jaxpr.outvars, double.jaxpr.outvars, run(single, double, some, values, taken), strict=True)
    return [some.without_filling(result, axis_of(a.aval, b.aval, some.rows)) for a, b, result in results]


NESTED: dict[str, Callable[[Any, Any, Some, Values], Values]] = {
    **dict.fromkeys(("jit", "pjit", "closed_call"), _called),
    **dict.fromkeys(("checkpoint", "remat2"), _checkpoint),
    **dict.fromkeys(("custom_vjp_call", "custom_vjp_call_jaxpr"), functools.partial(_custom, _custom_vjp)),
    "cond": _cond,
    "custom_jvp_call": functools.partial(_custom, _custom_jvp),
    "scan": _scan,
    "while": _while,
}
