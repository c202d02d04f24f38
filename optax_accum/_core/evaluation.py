"""Equations of a traced program, evaluated; and along which axes of `jax.shard_map` their operands' types differ.

A trace of the rows of all devices has no axis of these: values that are evaluated vary along more axes than in it.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_accum._core import compilers
from optax_accum._core.equations import is_checkpoint, programs_of


def bind(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Evaluates one equation of a traced program."""
    if equation.primitive.name.startswith("custom_"):  # rules take arrays: constants of a traced program are NumPy's
        values = [jnp.asarray(value) if jnp.ndim(value) else value for value in values]
    values = varying_as(values, [atom.aval for atom in equation.invars])
    if equation.primitive.name == "reshard" and equation.params["dst_sharding"].mesh.empty:
        return values  # a gradient of what was traced on no mesh: it lies where it lies
    if equation.primitive.name == "pvary":  # which takes no value that varies already, as one evaluated here may
        return varying_together(values, like=[var.aval for var in equation.outvars])
    with equation.ctx.manager:
        return _results(equation, values)


def bind_elsewhere(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Evaluates one equation of numbers of a traced program where there is another mesh than in the trace."""
    kinds = [atom.aval.dtype for atom in equation.invars]  # a constant carries the mesh of its trace; NumPy's has none
    values = [v if isinstance(v, jax.Array) else np.asarray(v, kind) for v, kind in zip(values, kinds, strict=True)]
    values = varying_together(values)
    return values if equation.primitive.name in ("pvary", "reshard") else _results(equation, values)


def _results(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    with jax.named_scope(str(equation.source_info.name_stack)):
        results = equation.primitive.bind(*functions, *values, **params)
    return results if equation.primitive.multiple_results else [results]


def run(program: Any, values: Sequence[Any], bind: Callable[[Any, list[Any]], Any] = bind) -> list[Any]:
    """Evaluates a traced program; `bind` evaluates one equation."""
    jaxpr, consts = compilers.opened(program)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
    return in_order(jaxpr.eqns, env, jaxpr.outvars, bind)


def in_order(
    equations: Iterable[Any],
    env: dict[Any, Any],
    wanted: Iterable[Any],
    bind: Callable[[Any, list[Any]], Any] = bind,
    literal: Callable[[Any], Any] = lambda literal: literal.val,
) -> list[Any]:
    """Evaluates equations, each by `bind`, from the values of variables in `env`; returns those that are wanted.

    A value may be anything that `bind` and `literal` say of an array, whether it has a derivative, say.
    """
    read = lambda atom: literal(atom) if isinstance(atom, core.Literal) else env[atom]
    for equation in equations:
        env.update(zip(equation.outvars, bind(equation, list(map(read, equation.invars))), strict=True))
    return list(map(read, wanted))


def varying_together(values: Sequence[Any], like: Sequence[Any] = ()) -> list[Any]:
    """Marks all values as varying along each axis along which one of them, or of `like`, varies.

    An operation takes no others in `jax.shard_map`.
    """
    union = frozenset[str]().union(*map(compilers.varying_axes, (*values, *like)))
    return [compilers.as_varying(value, union) for value in values]


def varying_as(values: Sequence[Any], kinds: Sequence[Any], more: frozenset[str] | None = None) -> list[Any]:
    """Values of a traced program, each varying along the axes that its type in the trace has, and along `more`.

    By default those are the axes along which one of them varies, and its type in the trace does not: a trace of the
    rows of all devices has no axis of these.
    """
    more = varying_more(values, kinds) if more is None else more
    pairs = zip(values, kinds, strict=True)
    return [compilers.as_varying(value, compilers.varying_axes(kind) | more) for value, kind in pairs]


def varying_more(values: Sequence[Any], kinds: Sequence[Any]) -> frozenset[str]:
    """The axes along which one of these values varies, and its type in a trace does not."""
    pairs = zip(values, kinds, strict=True)
    return frozenset[str]().union(
        *(compilers.varying_axes(value) - compilers.varying_axes(kind) for value, kind in pairs)
    )


def run_inside(
    equation: Any, values: Sequence[Any], run: Callable[[int, list[Any]], list[Any]], length: Any = None
) -> list[Any]:
    """Evaluates an equation with other programs inside, as a call, a checkpoint, a loop or a branch.

    `run(number, operands)` evaluates them in place of those in `programs_of(equation)`; `length` is a scan's.
    """
    name = equation.primitive.name
    if name == "scan":
        return scanned(equation, values, functools.partial(run, 0), length)
    if name == "while":
        return _looped(equation, values, run)
    if name == "cond":
        index, *operands = values
        branches = [functools.partial(run, number) for number in range(len(equation.params["branches"]))]
        return jax.lax.switch(jnp.asarray(index).astype(jnp.int32), branches, operands)
    body = functools.partial(run, 0)
    if is_checkpoint(equation):
        options = {key: equation.params[key] for key in ("policy", "prevent_cse") if key in equation.params}
        body = jax.checkpoint(body, **options)
    return body(list(values))


def _looped(equation: Any, values: Sequence[Any], run: Callable[[int, list[Any]], list[Any]]) -> list[Any]:
    """A `while`; under `vmap` each row ends by itself, and keeps its carry."""
    predicate, body = programs_of(equation)
    fixed = values[: len(values) - len(equation.outvars)]
    goes_on = lambda carry: run(0, predicate.taken([*fixed, *carry]))[0]
    is_batched = bool(compilers.opened(predicate.program)[0].outvars[0].aval.shape)

    def step(carry: list[Any]) -> list[Any]:
        after = run(1, body.taken([*fixed, *carry]))
        if not is_batched:
            return after
        more = goes_on(carry)
        return [where_rows(more, new, old) for new, old in zip(after, carry, strict=True)]

    return jax.lax.while_loop(lambda carry: jnp.any(goes_on(carry)), step, list(values[len(fixed) :]))


def where_rows(more: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """New values for rows that go on, or old ones; `more` is one flag, or one for each index of the first axes."""
    if more.ndim:
        more = compilers.sharded_as(new, jax.lax.broadcast_in_dim(more, new.shape, tuple(range(more.ndim))))
    return jax.lax.select(*varying_together([more, new, old]))


def scanned(
    equation: Any, values: Sequence[Any], body: Callable[[list[Any]], Any], length: Any = None, *, settles: bool = False
) -> list[Any]:
    """Evaluates a `scan` with another body, a function of one iteration's constants, carry and slices.

    `settles`: whether its carry may vary along more axes than the types of the operands tell, see `settled`.
    """
    consts, carried = compilers.sizes_of_scan(equation)
    fixed, start, xs = values[:consts], list(values[consts : consts + carried]), list(values[consts + carried :])

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = body([*fixed, *carry, *x])
        return outs[:carried], outs[carried:]

    start = settled(step, start, xs, fixed) if settles else start
    options = {key: equation.params[key] for key in ("reverse", "unroll")}
    carry, ys = jax.lax.scan(step, start, xs, length=length or equation.params["length"], **options)
    return [*carry, *ys]


def settled(step: Callable[..., Any], carry: Any, xs: Any, given: Any = ()) -> Any:
    """The carry of a loop, varying along the axes along which an iteration makes it vary, which takes `given`, too."""
    some_vary = any(map(compilers.varying_axes, jax.tree.leaves((carry, xs, given))))
    if not some_vary:
        return carry
    after, _ = jax.eval_shape(step, carry, jax.tree.map(lambda leaf: leaf[0], xs))
    return jax.tree.map(lambda leaf, kind: varying_as([leaf], [kind])[0], carry, after)


def varying_type(kind: Any, axes: Iterable[str]) -> Any:
    """The type of an array that varies along these axes, too."""
    missing = sorted(frozenset(axes) - compilers.varying_axes(kind))
    return jax.make_jaxpr(lambda leaf: compilers.as_varying(leaf, missing))(kind).out_avals[0] if missing else kind
