"""Owns calls outside `jit`: each is traced anew, and compiled once for each program that it turns out to be."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import core

from optax_accum._core import compilers, tracing

_PROGRAMS = 16  # compiled ones that each function keeps


def told(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fun` without its first argument: whether JAX differentiates what it returns."""
    return lambda *args, **kwargs: fun(tracing.is_differentiated((args, kwargs)), *args, **kwargs)


def compiled_once(fun: Callable[..., Any], *, unless: bool = False) -> Callable[..., Any]:
    """Does what `told` does, for a function whose loops are not to be compiled again at every call outside `jit`.

    What `fun` closes over may change between two calls, unlike under `jax.jit`: the second call is traced as well, and
    finds its compiled program only if that is the same. `unless` leaves it at `told`.
    """
    if unless:
        return told(fun)
    compiled = functools.lru_cache(_PROGRAMS)(lambda program: jax.jit(program.run))

    def call(*args: Any, **kwargs: Any) -> Any:
        if tracing.is_staged() or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return told(fun)(*args, **kwargs)
        arrays, filled = tracing.parted((args, kwargs), tracing.is_array)

        def traced(again: bool) -> tuple[Any, Any]:
            def of_arrays(*arrays: Any) -> Any:
                args, kwargs = filled(arrays)
                return fun(again, *args, **kwargs)

            return jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)

        again = tracing.is_differentiated(arrays)
        closed, shapes = traced(again)
        if not again and tracing.is_differentiated(closed.consts):  # what `fun` closes over
            closed, shapes = traced(True)
        program = _Program(compilers.text_of(closed.jaxpr), tuple(map(id, _unprinted(closed.jaxpr))), closed.jaxpr)
        results = compiled(program)(closed.consts, arrays)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


@dataclasses.dataclass(frozen=True)
class _Program:
    """A traced program, equal to another if both compute the same."""

    text: str
    unprinted: tuple[int, ...]  # the identities of what the text does not show
    jaxpr: Any = dataclasses.field(compare=False)

    def run(self, consts: list[Any], arrays: list[Any]) -> list[Any]:
        return core.eval_jaxpr(self.jaxpr, consts, *arrays)


def _unprinted(jaxpr: Any) -> Iterator[Any]:
    """Yields what the text of a program does not show: constants of programs inside, and backward passes of users."""
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("custom_vjp_call"):
            yield equation.params.get("bwd")
        for inner in jax.tree.leaves(list(equation.params.values())):
            yield from getattr(inner, "consts", ())
        for program in tracing.inner_programs(equation):
            yield from _unprinted(program)
