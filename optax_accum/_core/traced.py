"""A function, traced once, and facts about its program."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core

from optax_accum._core import custom_derivatives, dtypes, tracing
from optax_accum._core.equations import all_equations, collective_axes
from optax_accum._core.types import Tree


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """The program of a function, with its constants, and the shapes of its results.

    `run` computes the function without tracing it again.
    """

    program: Any
    shapes: Tree
    run: Callable[..., Any]

    @property
    def jaxpr(self) -> Any:
        """The program without its constants."""
        return self.program.jaxpr

    @functools.cached_property
    def equations(self) -> Sequence[Any]:
        """All equations, also of programs inside it: of loops, branches and functions."""
        return tuple(all_equations(self.jaxpr))

    @functools.cached_property
    def collectives(self) -> Sequence[Any]:
        """The equations that take something from other devices, along the axes of `jax.shard_map`."""
        return tuple(filter(collective_axes, self.equations))

    @functools.cached_property
    def is_short(self) -> bool:
        """Whether one of its numbers has a shorter range than float32, as float16: a small one vanishes.

        Inputs count, too: the gradient of a parameter that is cast up at once is cast down.
        """
        outcomes = (var for equation in self.equations for var in equation.outvars)
        return any(dtypes.is_short(getattr(var.aval, "dtype", bool)) for var in (*self.jaxpr.invars, *outcomes))

    @functools.cached_property
    def has_rule(self) -> bool:
        """Whether the user wrote a part of the backward pass, which need not be linear (a clip)."""
        return any(equation.primitive.name.startswith("custom_vjp_call") for equation in self.equations)

    @functools.cached_property
    def runs_alone(self) -> bool:
        """Whether it can be differentiated as it is: no derivative rule in it closes over a traced value."""
        called = list(filter(custom_derivatives.has_rule, self.equations))
        return not (called and _close_over_values(called))


def trace(fun: Callable[..., Any], *args: Any) -> Traced:
    program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    run, treedef = core.jaxpr_as_fun(program), jax.tree.structure(shapes)
    return Traced(program, shapes, lambda *args: jax.tree.unflatten(treedef, run(*jax.tree.leaves(args))))


def trace_or_run(fun: Callable[..., Any], *args: Any) -> Traced:
    """Traces `fun`. Outside `jit` it may look at values: then it is run, and only its result is known."""
    if tracing.is_staged():
        return trace(fun, *args)
    try:
        traced = trace(fun, *args)
    except tracing.NEEDS_VALUES:
        result = fun(*args)
        traced = trace(lambda *_: result, *args)
    return dataclasses.replace(traced, run=fun)


def _close_over_values(called: Sequence[Any]) -> bool:
    """Whether functions with derivative rules close over traced values: their derivatives alone then have constants."""
    found = []

    def differentiate(operands: Sequence[Sequence[Any]]) -> None:
        for rule, values in zip(called, operands, strict=True):
            try:
                custom_derivatives.differentiated(rule, values)
            except jax.errors.UnexpectedTracerError:  # some versions of JAX raise
                found.append(rule)
            except Exception:  # the rule itself does, wherever it is differentiated
                continue

    try:
        program = jax.make_jaxpr(differentiate)([[atom.aval for atom in rule.invars] for rule in called])
    except Exception:  # operands that nobody can stand in for, as references
        return True
    return bool(found) or any(isinstance(const, Tracer) for const in program.consts)
