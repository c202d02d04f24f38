"""The equations of a traced program: operands, results, nested programs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax.extend import core

from optax_accum._core import compilers
from optax_accum._shared.hidden_draws import inner_programs as inner_programs

Fact = TypeVar("Fact")
CALLS = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr")
CHECKPOINTS = ("checkpoint", "remat2")


class Inside(NamedTuple):
    """A program that an equation runs: a body, a branch, a function.

    Attributes:
      program: the program, with or without its constants.
      takes: which operands of the equation it takes, by their places.
      carried: which of its inputs an iteration of a loop hands to the next, as its first results.
      gives: whether its results are the equation's; else they only tell if a loop goes on.
    """

    program: Any
    takes: Sequence[int]
    carried: slice = slice(0, 0)
    gives: bool = True

    def taken(self, operands: Sequence[Fact]) -> list[Fact]:
        """The operands that it takes, out of all of the equation's."""
        return [operands[place] for place in self.takes]

    def followed(
        self,
        known: Sequence[Fact],
        follow: Callable[[Any, list[Fact]], list[Fact]],
        join: Callable[[Fact, Fact], Fact],
    ) -> tuple[list[Fact], list[Fact]]:
        """What is known of its inputs and of its results, from what is known of the equation's operands.

        `follow` tells it for one iteration. In a loop it is followed again until what an iteration carries on joins
        nothing new to what it takes.
        """
        ins = self.taken(known)
        outs = follow(self.program, ins)
        while before := ins[self.carried]:
            after = [join(*pair) for pair in zip(before, outs, strict=False)]
            if after == before:
                break
            ins[self.carried] = after
            outs = follow(self.program, ins)
        return ins, outs


def programs_of(equation: Any) -> list[Inside]:
    """The programs that an equation runs: loops, branches, functions; not those of a solver or a derivative."""
    name, params, places = equation.primitive.name, equation.params, range(len(equation.invars))
    if name == "scan":
        consts, carried = compilers.sizes_of_scan(equation)
        return [Inside(params["jaxpr"], places, slice(consts, consts + carried))]
    if name == "while":
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        takes = [*places[:of_cond], *places[of_cond + of_body :]]
        goes_on = Inside(params["cond_jaxpr"], takes, gives=False)
        return [goes_on, Inside(params["body_jaxpr"], places[of_cond:], slice(of_body, None))]
    if name == "cond":
        return [Inside(branch, places[1:]) for branch in params["branches"]]
    return [Inside(params[key], places) for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params]


def all_equations(program: Any) -> Iterator[Any]:
    """Yields the equations of a traced program, and of all programs inside it."""
    for equation in program.eqns:
        yield from every_equation(equation)


def every_equation(equation: Any) -> Iterator[Any]:
    """Yields an equation, and all equations of the programs inside it."""
    yield equation
    for inner in inner_programs(equation):
        yield from all_equations(inner)


def operands(equation: Any) -> list[Any]:
    """The variables that an equation takes, without literals."""
    return [atom for atom in equation.invars if not isinstance(atom, core.Literal)]


def needed(program: Any, results: Iterable[int]) -> tuple[list[Any], set[Any]]:
    """The equations that some results of a program need, or that have effects, and all variables that they read."""
    read = {atom for atom in map(program.outvars.__getitem__, results) if isinstance(atom, core.Var)}
    found: list[Any] = []
    for equation in reversed(program.eqns):
        if equation.effects or not read.isdisjoint(equation.outvars):
            found.append(equation)
            read.update(operands(equation))
    return found[::-1], read


def is_cast_down(equation: Any) -> bool:
    if equation.primitive.name != "convert_element_type":
        return False
    before, after = equation.invars[0].aval.dtype, equation.params["new_dtype"]
    floating = jnp.issubdtype(before, jnp.inexact) and jnp.issubdtype(after, jnp.inexact)
    return floating and jnp.finfo(after).bits < jnp.finfo(before).bits


def collective_axes(equation: Any) -> tuple[str, ...]:
    """The axes of a mesh along which an equation itself takes something from other devices."""
    if equation.primitive.name in _ALONE:
        return ()
    named = (equation.params.get(key) for key in ("axes", "axis_name"))
    each = (name for names in named for name in (names if isinstance(names, list | tuple) else (names,)))
    return tuple(name for name in each if isinstance(name, str))


_ALONE = {"axis_index", "pvary", "pcast"}  # name an axis, and take nothing from other devices


def is_checkpoint(equation: Any) -> bool:
    return equation.primitive.name in CHECKPOINTS
