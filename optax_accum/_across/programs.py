"""The programs of a train step for calls of one kind: which of them a call runs, and how each is traced.

A program takes the trees that it reads and returns those that it makes. A held micro-step of Adam neither takes nor
returns the moments, and returns no parameters: with fewer arrays in and out, the host needs less time.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from optax_accum._across import on_host
from optax_accum._across.calls import SplitCall, around_states, counters_of
from optax_accum._across.on_host import Decided, Decision, NotOnHostError
from optax_accum._core.equations import needed
from optax_accum._core.state import map_states, states_in
from optax_accum._core.types import Tree


class OtherTypesError(Exception):
    """Arguments have other shapes or dtypes than those for which a program was traced."""


class StepProgram(NamedTuple):
    """A compiled step for calls of one kind: a function of their trees.

    Attributes:
      run: `(donated, kept) -> made`, jitted or compiled.
      donated: chooses the trees that the program may overwrite.
      kept: chooses the other trees that it reads.
      results: chooses the results of the step out of `[*made, *trees]`.
      joined: of the results, the tree whose leaves they are.
      counters: which results are the numbers of micro-steps in windows.
      closes: which windows it closes; None where the device decides.
    """

    run: Any
    donated: Callable[[list[Any]], tuple[Any, ...]]
    kept: Callable[[list[Any]], tuple[Any, ...]]
    results: Callable[[list[Any]], tuple[Any, ...]]
    joined: Any
    counters: list[int]
    closes: tuple[bool, ...] | None

    def __call__(self, trees: list[Tree]) -> tuple[Tree, ...]:
        return self.results([*self.run(self.donated(trees), self.kept(trees)), *trees])

    def lower(self, trees: list[Tree]) -> Any:
        return self.run.lower(self.donated(trees), self.kept(trees))


class Counters:
    """The numbers of micro-steps in windows, counted on the host; read from the device for a state from elsewhere."""

    def __init__(self) -> None:
        self._last: Sequence[Any] = ()  # the arrays that the last call returned
        self._numbers: list[int] = []

    def read(self, arrays: Sequence[Any]) -> list[int]:
        if len(self._last) == len(arrays) and all(map(operator.is_, self._last, arrays)):
            return self._numbers
        return list(map(int, arrays))

    def keep(self, arrays: Sequence[Any], numbers: Iterable[int]) -> None:
        """Remembers the numbers in arrays that a call returns."""
        self._last, self._numbers = arrays, list(numbers)


@dataclasses.dataclass(eq=False)
class StepPrograms:
    """The programs for calls of one kind.

    Attributes:
      step: the function that they run.
      is_whole: whether a node of arguments or results is not taken apart.
      say: is called with the reason for a single program.
      counters: which trees of the arguments are the numbers of micro-steps in windows.
      due: for each window `(number, asked) -> bool`, whether a micro-step closes it, once the step has been traced.
      by_caller: whether the caller alone closes windows.
      known: the programs by the windows that they close, and whether the caller asked for that.
      single: the one program for all calls, where the host does not know which windows close.
      complete: whether the programs were compiled ahead of time, so that no other is traced.
    """

    step: Callable[..., Any]
    is_whole: Callable[[Any], bool]
    say: Callable[[str], None]
    counters: list[int]
    due: list[Callable[[int, bool], bool]] = dataclasses.field(default_factory=list)
    by_caller: bool = False
    known: dict[tuple[tuple[bool, ...], bool], StepProgram] = dataclasses.field(default_factory=dict)
    single: StepProgram | None = None
    complete: bool = False

    def run(self, call: SplitCall, counters: Counters) -> Any:
        program, numbers = self.single, []
        if program is None:
            numbers = [number + 1 for number in counters.read([call.trees[place] for place in self.counters])]
            asked = call.flush is True
            closes = tuple([due(number, asked) for due, number in zip(self.due, numbers, strict=False)])
            program = self.known.get((closes, asked)) or self.trace(call, list(map(Decision, numbers)))
        results = program(call.trees)
        if program.closes is None:
            counters.keep((), ())
        else:
            after = [0 if closes else number for closes, number in zip(program.closes, numbers, strict=True)]
            counters.keep([results[place] for place in program.counters], after)
        return program.joined.unflatten(results)

    def trace(self, call: SplitCall, decisions: Sequence[Decision]) -> StepProgram:
        """Traces the program for these decisions, or the single one where the host cannot decide."""
        if self.complete:
            raise ValueError(
                f"No program was compiled for a call with flush={call.flush}. Call what jit_step returned, or lower "
                "the step for flush=True, too."
            )
        try:
            if not decisions:
                raise NotOnHostError("no argument holds a state of accumulate_gradients, so each call is one program")
            program = self._traced(call, decisions)
            self.due = [_due(decision, call.flush) for decision in decisions]
            self.by_caller = all(decision.schedule.by_caller for decision in decisions)
            self.known[program.closes or (), call.flush is True] = program
            return program
        except NotOnHostError as error:
            reason = str(error)
        except (TypeError, ValueError) as error:  # a loop or a branch, whose types differ after a micro-step
            reason = f"the step cannot be traced with a window that the host closes: {error}"
        self.single = self._traced(call, None)
        self.say(reason)
        return self.single

    @property
    def by_windows(self) -> dict[Any, StepProgram]:
        """The programs by the keys of `known`; a single one by None."""
        return dict(self.known) if self.single is None else {None: self.single}

    def running(self, compiled: dict[Any, Any]) -> "StepPrograms":
        """The same programs, compiled; there will be no others."""
        known = {windows: program._replace(run=compiled[windows]) for windows, program in self.by_windows.items()}
        return dataclasses.replace(self, single=known.pop(None, None), known=known, complete=True)

    def _traced(self, call: SplitCall, decisions: Sequence[Decision] | None) -> StepProgram:
        """Traces the step for a call; with `decisions` the host says which windows close."""
        leaves, tree = jax.tree.flatten(call.trees)

        def run(leaves: list[Any]) -> Any:
            args, kwargs = call.arguments(tree.unflatten(leaves))
            kwargs |= {} if call.flush is None else {"flush": call.flush}
            if decisions is None:
                return self.step(*args, **kwargs)
            made = iter(decisions)
            args, kwargs = map_states(lambda state: Decided.of(state, next(made)), (args, kwargs))
            return _unmarked(self.step(*args, **kwargs), decisions)

        traced, shapes = jax.make_jaxpr(run, return_shape=True)(leaves)
        closes = None if decisions is None else tuple([bool(decision.closes) for decision in decisions])
        suffix = "" if closes is None else "_updates" if any(closes) else "_adds"
        around = list(map(id, around_states(shapes)))
        results, joined = jax.tree.flatten(shapes, is_leaf=lambda node: id(node) not in around and self.is_whole(node))
        ins, outs = (list(map(jax.tree.structure, trees)) for trees in (call.trees, results))
        name = getattr(self.step, "__name__", "step") + suffix
        compiled = _compiled(traced, ins, outs, call.may_donate, name)
        return StepProgram(*compiled, joined, counters_of(joined.unflatten, len(outs)), closes)


def _due(decision: Decision, flush: bool | None) -> Callable[[int, bool], bool]:
    """Whether a later call closes a window; a step that asks for it by itself does so at every call."""
    due, by_itself = decision.schedule.on_host, decision.asked and flush is not True
    return lambda number, asked: due(number, asked or by_itself)


def _unmarked(results: Tree, decisions: Sequence[Decision]) -> Tree:
    """Removes the decisions from states in the results; raises unless each window has had its micro-step."""
    made = [state.decision for state in states_in(results) if isinstance(state, Decided) and state.spent]
    if made != list(decisions):
        raise NotOnHostError("the step does not make one micro-step of each state, and return it")
    return map_states(on_host.plain, results)


def _compiled(
    program: Any, ins: Sequence[Any], outs: Sequence[Any], may_donate: int, name: str
) -> tuple[Any, Any, Any, Any]:
    """Jits a traced program whose inputs and results are the leaves of these trees: `run, donated, kept, results`.

    A tree that the program returns as it came stays where it is: it is not donated, and is no result of the jitted
    program. The program may overwrite all others among the first `may_donate`.
    """
    jaxpr, of_inputs, of_results = program.jaxpr, _leaves_of(ins), _leaves_of(outs)
    passed = _passed(jaxpr, ins, outs)
    made = [number for number in range(len(outs)) if number not in passed]
    equations, variables = needed(jaxpr, [place for number in made for place in of_results[number]])
    read = [n for n, leaves in enumerate(of_inputs) if any(jaxpr.invars[place] in variables for place in leaves)]
    donated = [number for number in read if number < may_donate and number not in passed.values()]
    kept = [number for number in read if number not in donated]
    evaluate = core.jaxpr_as_fun(program.replace(jaxpr=jaxpr.replace(eqns=equations)))

    def run(donated_trees: Sequence[Tree], kept_trees: Sequence[Tree]) -> list[Tree]:
        arrays: list[Any] = [None] * len(jaxpr.invars)  # no equation reads the others
        for number, tree in zip([*donated, *kept], [*donated_trees, *kept_trees], strict=True):
            leaves, treedef = jax.tree.flatten(tree)
            types = [program.in_avals[place] for place in of_inputs[number]]
            if treedef != ins[number] or list(map(jax.typeof, leaves)) != types:
                raise OtherTypesError
            arrays[of_inputs[number].start : of_inputs[number].stop] = leaves
        results = evaluate(*arrays)
        return [outs[number].unflatten([results[place] for place in of_results[number]]) for number in made]

    run.__name__ = run.__qualname__ = name
    place_of = {number: place for place, number in enumerate(made)}
    place_of |= {number: len(made) + source for number, source in passed.items()}
    order = [place_of[number] for number in range(len(outs))]
    return jax.jit(run, donate_argnums=0), _chooses(donated), _chooses(kept), _chooses(order)


def _leaves_of(trees: Iterable[Any]) -> list[range]:
    """The numbers of the leaves of each tree, counted through all trees."""
    ends = [0, *itertools.accumulate(tree.num_leaves for tree in trees)]
    return list(itertools.starmap(range, itertools.pairwise(ends)))


def _passed(jaxpr: Any, ins: Sequence[Any], outs: Sequence[Any]) -> dict[int, int]:
    """The input's number for each result that is a whole input; a second result of one input needs its own memory."""
    sources = _sources(jaxpr)
    inputs: dict[tuple[int | None, ...], int] = {
        tuple(leaves): number for number, leaves in enumerate(_leaves_of(ins)) if leaves
    }
    passed: dict[int, int] = {}
    for number, leaves in enumerate(_leaves_of(outs)):
        source = inputs.get(tuple([sources[place] for place in leaves]))
        if source is not None and source not in passed.values() and ins[source] == outs[number]:
            passed[number] = source
    return passed


def _sources(jaxpr: Any) -> list[int | None]:
    """The number of the input that each result is, or None; also through calls of jitted functions."""
    numbers = {var: number for number, var in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("jit", "pjit"):
            for var, source in zip(equation.outvars, _sources(equation.params["jaxpr"].jaxpr), strict=True):
                atom = None if source is None else equation.invars[source]
                if atom is not None and not isinstance(atom, core.Literal) and atom in numbers:
                    numbers[var] = numbers[atom]
    return [None if isinstance(atom, core.Literal) else numbers.get(atom) for atom in jaxpr.outvars]


def _chooses(places: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """A function that chooses the elements at these places of a list, as a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda found: tuple([found[place] for place in places])
