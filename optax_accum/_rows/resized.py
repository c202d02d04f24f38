"""An equation of a program of rows, evaluated for as many rows as its operands have.

Shapes are those of fewer rows, numbers those of all: `1 / n` stays.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from optax_accum._core import compilers
from optax_accum._rows import locality
from optax_accum._rows.traces import Rows, in_step

Values = Sequence[Any]


def evaluate(long: Any, other: Any, rows: Rows, size: int, values: Values) -> Values:
    """Evaluates an equation, of which there are traces for `rows` rows, on values of `size` rows each."""
    of_name = NESTED.get(long.primitive.name)
    if of_name is not None:
        return of_name(long, other, rows, size, values)
    params = {key: _resized(value, other.params.get(key), rows, size) for key, value in long.params.items()}
    return compilers.bind(long.replace(params=params), values)


def run(long: Any, other: Any, rows: Rows, size: int, values: Values) -> list[Any]:
    """Evaluates a program of which every equation treats rows one by one."""
    (program, consts), (of_other, _) = compilers.opened(long), compilers.opened(other)
    env: dict[Any, Any] = dict(zip((*program.constvars, *program.invars), (*consts, *values), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for a, b in in_step(program, of_other):
        env.update(zip(a.outvars, evaluate(a, b, rows, size, list(map(read, a.invars))), strict=True))
    return list(map(read, program.outvars))


def _resized(long: Any, other: Any, rows: Rows, size: int) -> Any:
    """Returns a parameter for fewer rows: where the traces differ it grows in proportion to the rows."""
    if type(long) is tuple and type(other) is tuple and len(long) == len(other):
        return tuple(_resized(a, b, rows, size) for a, b in zip(long, other, strict=True))
    if isinstance(long, int) and isinstance(other, int) and long != other:
        return long * size // rows[0]
    return long


# Programs inside equations


def _called(long: Any, other: Any, rows: Rows, size: int, values: Values) -> Values:
    key = "jaxpr" if "jaxpr" in long.params else "call_jaxpr"
    return run(long.params[key], other.params[key], rows, size, values)


def _checkpoint(long: Any, other: Any, rows: Rows, size: int, values: Values) -> Values:
    options = {key: long.params[key] for key in ("policy", "prevent_cse") if key in long.params}
    body = functools.partial(run, long.params["jaxpr"], other.params["jaxpr"], rows, size)
    return jax.checkpoint(body, **options)(values)


def _scan(long: Any, other: Any, rows: Rows, size: int, values: Values) -> Values:
    params = long.params
    consts, carried = compilers.sizes_of_scan(long)
    fixed, start, xs = values[:consts], values[consts : consts + carried], values[consts + carried :]

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        out = run(params["jaxpr"], other.params["jaxpr"], rows, size, [*fixed, *carry, *x])
        return out[:carried], out[carried:]

    options = {key: params[key] for key in ("reverse", "unroll")}
    length = _resized(params["length"], other.params["length"], rows, size)
    carry, ys = jax.lax.scan(step, list(start), list(xs), length=length, **options)
    return [*carry, *ys]


def _while(long: Any, other: Any, rows: Rows, size: int, values: Values) -> Values:
    params = long.params
    of_cond, of_body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def of(key: str, fixed: Values) -> Callable[[list[Any]], list[Any]]:
        return lambda carry: run(params[key], other.params[key], rows, size, [*fixed, *carry])

    condition, body = of("cond_jaxpr", values[:of_cond]), of("body_jaxpr", values[of_cond:of_body])
    return jax.lax.while_loop(lambda carry: condition(carry)[0], body, list(values[of_body:]))


def _cond(long: Any, other: Any, rows: Rows, size: int, values: Values) -> Values:
    index, *operands = values
    pairs = zip(long.params["branches"], other.params["branches"], strict=True)
    branches = [functools.partial(run, *pair, rows, size) for pair in pairs]
    return jax.lax.switch(jnp.asarray(index).astype(jnp.int32), branches, operands)


def _custom(derivative: Callable[..., Any], long: Any, other: Any, rows: Rows, size: int, values: Values) -> Values:
    return derivative(functools.partial(_called, long, other, rows, size), long, other, rows, size)(*values)


def _custom_jvp(fun: Callable[[Values], Values], long: Any, other: Any, rows: Rows, size: int) -> Callable[..., Values]:
    """Returns a function with the user's derivative, which was traced too."""
    called = jax.custom_jvp(lambda *values: fun(values))
    traces = locality.derivative_of(long, other, locality.forward)

    @called.defjvp
    def _(primals: Values, tangents: Values) -> tuple[Values, Values]:
        moving = [tangent for tangent in tangents if tangent.dtype != jax.dtypes.float0]
        outs = run(*traces, rows, size, [*primals, *moving])
        half = len(long.outvars)
        return outs[:half], outs[half:]

    return called


def _custom_vjp(fun: Callable[[Values], Values], long: Any, other: Any, rows: Rows, size: int) -> Callable[..., Values]:
    """Returns a function with the user's backward pass, which was traced too: it computes again what it needs."""
    called = jax.custom_vjp(lambda *values: fun(values))
    traces = locality.derivative_of(long, other, locality.backward)
    inexact = [jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in long.invars]
    of_inexact = [jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in long.outvars]

    def backward(values: Values, cotangents: Values) -> tuple[Any, ...]:
        given = [ct for ct, moves in zip(cotangents, of_inexact, strict=True) if moves]
        found = iter(run(*traces, rows, size, [*values, *given]))
        return tuple(next(found) if moves else None for moves in inexact)

    called.defvjp(lambda *values: (fun(values), values), backward)
    return called


NESTED: dict[str, Callable[[Any, Any, Rows, int, Values], Values]] = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call"), _called),
    **dict.fromkeys(("checkpoint", "remat2"), _checkpoint),
    **dict.fromkeys(("custom_vjp_call", "custom_vjp_call_jaxpr"), functools.partial(_custom, _custom_vjp)),
    "cond": _cond,
    "custom_jvp_call": functools.partial(_custom, _custom_jvp),
    "scan": _scan,
    "while": _while,
}
