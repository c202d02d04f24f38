"""Convolutions that a CPU computes fast in loops and branches, too: forward, backward and differentiated again.

XLA's CPU compiler has a fast kernel for convolutions of one form: batch first, channels last, kernels with space first.
It brings convolutions to that form in the entry computation alone. Convolutions in loops and branches stay as they
are, and gradients of convolutions are never of that form: each becomes a loop over single numbers.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from optax_accum._core import compilers, custom_derivatives, evaluation, tracing
from optax_accum._core.equations import every_equation
from optax_accum._core.leaves import parted

PLAIN = jax.lax.conv_general_dilated_p


def fast_in_loops(fun: Callable[..., Any], equations: Iterable[Any]) -> Callable[..., Any]:
    """`fun` for a loop or a branch, with fast convolutions on a CPU.

    `equations` come from a trace of `fun`: without a convolution among them, `fun` stays as it is.
    """
    if not tracing.is_staged() or jax.default_backend() != "cpu":
        return fun
    return _rewritten(fun) if any(map(_convolves, equations)) else fun


def _convolves(equation: Any) -> bool:
    return any(inner.primitive is PLAIN for inner in every_equation(equation))


def _rewritten(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, traced at each call, and run with fast convolutions."""

    @functools.wraps(fun)
    def run(*args: Any) -> Any:
        arrays, filled = parted(args, lambda leaf: isinstance(leaf, jax.Array))  # `fun` may look at NumPy's
        program, shapes = jax.make_jaxpr(lambda arrays: fun(*filled(arrays)), return_shape=True)(arrays)
        return jax.tree.unflatten(jax.tree.structure(shapes), evaluation.run(Rewriting().program(program), arrays))

    return run


class Rewriting:
    """Traced programs with `CONVOLUTION` for each convolution; a program that occurs twice stays one program."""

    def __init__(self) -> None:
        self.done: dict[int, tuple[Any, Any]] = {}  # by id, beside the program that has the id

    def program(self, program: Any) -> Any:
        if id(program) not in self.done:
            jaxpr = compilers.opened(program)[0]
            new = jaxpr.replace(eqns=list(map(self.equation, jaxpr.eqns)))
            self.done[id(program)] = program, program.replace(jaxpr=new) if hasattr(program, "jaxpr") else new
        return self.done[id(program)][1]

    def equation(self, equation: Any) -> Any:
        if not _convolves(equation):
            return equation
        if equation.primitive is PLAIN:
            return equation.replace(primitive=CONVOLUTION)
        if custom_derivatives.has_rule(equation):
            return _with_rule(equation)
        return equation.replace(params={key: jax.tree.map(self._inside, p) for key, p in equation.params.items()})

    def _inside(self, leaf: Any) -> Any:
        is_program = isinstance(getattr(leaf, "jaxpr", leaf), core.Jaxpr)
        return self.program(leaf) if is_program else leaf


# Derivatives of the user's own, which JAX traces when it differentiates


def _with_rule(equation: Any) -> Any:
    """A call of a function with a rule, traced, as one equation.

    The equation of the new rule cannot be made of the old one: its parameters are functions of JAX's own. Inside a jit
    its trace is one equation, whatever else the rule needs, and that can take the old one's place.
    """
    called = custom_derivatives.rewritten(equation, _rewritten)
    traced = jax.make_jaxpr(jax.jit(called))(*(atom.aval for atom in equation.invars))
    (call,) = traced.jaxpr.eqns
    return equation if traced.consts else call.replace(invars=equation.invars, outvars=equation.outvars)


# The convolution: JAX's rules for its own, and another lowering on a CPU


def _plain(*operands: Any, **params: Any) -> Any:
    return PLAIN.bind(*operands, **params)


def _canonical(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """The convolution in the form for which a CPU has a kernel."""
    numbers, rank = params["dimension_numbers"], lhs.ndim
    batch, channels, *space = numbers.lhs_spec
    outs, ins, *window = numbers.rhs_spec
    lhs, rhs = jnp.transpose(lhs, (batch, *space, channels)), jnp.transpose(rhs, (*window, ins, outs))
    middle = tuple(range(1, rank - 1))
    last_first = (0, rank - 1, *middle)
    canonical = jax.lax.ConvDimensionNumbers(last_first, (rank - 1, rank - 2, *range(rank - 2)), last_first)
    out = _plain(lhs, rhs, **{**params, "dimension_numbers": canonical})
    batch, channels, *space = numbers.out_spec
    order = (batch, *space, channels)
    return jnp.transpose(out, [order.index(axis) for axis in range(rank)])


def _transpose_left(cotangent: jax.Array, lhs: Any, rhs: jax.Array, **params: Any) -> jax.Array:
    """The cotangent of the array that is convolved."""
    rule = functools.partial(ad.primitive_transposes[PLAIN], **params)
    unknown = ad.UndefinedPrimal(lhs.aval)
    return _rewritten(lambda cotangent, rhs: rule(cotangent, unknown, rhs)[0])(cotangent, rhs)


def _transpose_right(cotangent: jax.Array, lhs: jax.Array, rhs: Any, **params: Any) -> jax.Array:
    """The cotangent of the kernels."""
    rule = functools.partial(ad.primitive_transposes[PLAIN], **params)
    unknown = ad.UndefinedPrimal(rhs.aval)
    return _rewritten(lambda cotangent, lhs: rule(cotangent, lhs, unknown)[1])(cotangent, lhs)


def _batched(operands: Sequence[Any], along: Sequence[int | None], **params: Any) -> tuple[Any, int]:
    """Many convolutions, as JAX computes them together, and the axis along which they are."""
    batch, channels, *_ = params["dimension_numbers"].out_spec
    axis = batch if along[1] is None else channels  # as JAX has it
    together = jax.vmap(functools.partial(_plain, **params), in_axes=tuple(along), out_axes=axis)
    return _rewritten(together)(*operands), axis


def _convolution() -> Any:
    primitive = core.Primitive(PLAIN.name)  # so that a lookup by name finds both
    primitive.def_impl(_plain)
    primitive.def_abstract_eval(lambda *operands, **params: PLAIN.abstract_eval(*operands, **params)[0])
    ad.defbilinear(primitive, _transpose_left, _transpose_right)
    batching.primitive_batchers[primitive] = _batched
    mlir.register_lowering(primitive, mlir.lower_fun(_plain, multiple_results=False))
    mlir.register_lowering(primitive, mlir.lower_fun(_canonical, multiple_results=False), platform="cpu")
    return primitive


CONVOLUTION = _convolution()
