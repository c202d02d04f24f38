"""A traced program without the arrays that it only passes on: with fewer in and out, the host needs less time."""

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from optax_accum._core.types import Tree


class OtherTypesError(Exception):
    """Arguments have other shapes or dtypes than those for which a program was traced."""


class Forwarding(NamedTuple):
    """A compiled function of a list of trees, which is given only the trees that it reads.

    Attributes:
      run: `(donated, kept) -> results`, jitted or compiled.
      donated: takes the trees that the program may overwrite out of all trees.
      kept: takes the other trees that it reads out of all trees.
      results: takes the results of the function out of `[*results, *trees]`.
    """

    run: Any
    donated: Callable[[list[Tree]], tuple[Tree, ...]]
    kept: Callable[[list[Tree]], tuple[Tree, ...]]
    results: Callable[[list[Tree]], tuple[Tree, ...]]

    def lower(self, trees: list[Tree]) -> Any:
        return self.run.lower(self.donated(trees), self.kept(trees))

    def __call__(self, trees: list[Tree]) -> tuple[Tree, ...]:
        return self.results([*self.run(self.donated(trees), self.kept(trees)), *trees])


def forwarding(program: Any, ins: Sequence[Any], outs: Sequence[Any], may_donate: int, name: str) -> Forwarding:
    """Jits a traced program whose inputs and results are the leaves of these trees.

    A tree that the program returns as it came stays where it is: it is not donated, and is no result of the jitted
    program. The program may overwrite all others among the first `may_donate`.
    """
    jaxpr, of_inputs, of_results = program.jaxpr, _ranges(ins), _ranges(outs)
    passed = _passed(_sources(jaxpr), ins, outs)
    made = [number for number in range(len(outs)) if number not in passed]
    places = [place for number in made for place in of_results[number]]
    live, needed = _live(jaxpr, [jaxpr.outvars[place] for place in places])
    read = [number for number, leaves in enumerate(of_inputs) if not needed.isdisjoint(leaves)]
    donated = [number for number in read if number < may_donate and number not in passed.values()]
    kept = [number for number in read if number not in donated]
    fun = core.jaxpr_as_fun(program.replace(jaxpr=jaxpr.replace(eqns=live)))

    def run(donated_trees: Sequence[Tree], kept_trees: Sequence[Tree]) -> list[Tree]:
        arrays: list[Any] = [None] * len(jaxpr.invars)  # for inputs that no equation reads
        for number, tree in zip([*donated, *kept], [*donated_trees, *kept_trees], strict=True):
            leaves, treedef = jax.tree.flatten(tree)
            types = [program.in_avals[place] for place in of_inputs[number]]
            if treedef != ins[number] or list(map(jax.typeof, leaves)) != types:
                raise OtherTypesError
            arrays[of_inputs[number].start : of_inputs[number].stop] = leaves
        results = fun(*arrays)
        return [outs[number].unflatten([results[place] for place in of_results[number]]) for number in made]

    run.__name__ = run.__qualname__ = name
    numbers = {number: place for place, number in enumerate(made)}
    order = [numbers[i] if i in numbers else len(made) + passed[i] for i in range(len(outs))]
    return Forwarding(jax.jit(run, donate_argnums=0), _takes(donated), _takes(kept), _takes(order))


def _ranges(trees: Iterable[Any]) -> list[range]:
    """The numbers of the leaves of each tree, counted through all trees."""
    ends = [0, *itertools.accumulate(tree.num_leaves for tree in trees)]
    return list(itertools.starmap(range, itertools.pairwise(ends)))


def _passed(sources: Sequence[int | None], ins: Sequence[Any], outs: Sequence[Any]) -> dict[int, int]:
    """The input's number for each result that is a whole input; a second result of one input needs its own memory."""
    begins = {leaves.start: number for number, leaves in enumerate(_ranges(ins)) if leaves}
    of_inputs = _ranges(ins)
    passed: dict[int, int] = {}
    for number, leaves in enumerate(_ranges(outs)):
        found = [sources[place] for place in leaves]
        source = begins.get(found[0]) if found else None  # type: ignore[arg-type]
        if source is None or source in passed.values() or ins[source] != outs[number]:
            continue
        if found == list(of_inputs[source]):
            passed[number] = source
    return passed


def _sources(jaxpr: Any) -> list[int | None]:
    """The number of the input that each result is, or None; it looks into calls of jitted functions."""
    numbers = {var: number for number, var in enumerate(jaxpr.invars)}

    def number_of(atom: Any) -> int | None:
        return None if isinstance(atom, core.Literal) else numbers.get(atom)

    for equation in jaxpr.eqns:
        if equation.primitive.name in ("jit", "pjit"):
            inner = _sources(equation.params["jaxpr"].jaxpr)
            for var, source in zip(equation.outvars, inner, strict=True):
                number = None if source is None else number_of(equation.invars[source])
                if number is not None:
                    numbers[var] = number
    return list(map(number_of, jaxpr.outvars))


def _live(jaxpr: Any, results: Sequence[Any]) -> tuple[list[Any], set[int]]:
    """The equations on which results depend, or that have effects, and the numbers of the inputs that they read."""

    def is_var(atom: Any) -> bool:
        return not isinstance(atom, core.Literal)

    needed, live = set(filter(is_var, results)), []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            live.append(equation)
            needed.update(filter(is_var, equation.invars))
    return live[::-1], {number for number, var in enumerate(jaxpr.invars) if var in needed}


def _takes(places: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """A function that takes the elements at these places out of a list, as a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda found: tuple([found[place] for place in places])
