"""The programs of a train step for calls of one kind: which of them a call runs, and how each is traced."""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from optax_accum._across import on_host
from optax_accum._across.calls import CallParts, around_states, counters_of
from optax_accum._across.on_host import Decided, Decision, NotOnHostError
from optax_accum._core.forwarding import Forwarding, forwarding
from optax_accum._core.state import map_states, states_in
from optax_accum._core.types import Tree


class StepProgram(NamedTuple):
    """A program for calls of one kind."""

    run: Forwarding
    tree: Any  # of the results, in parts
    counters: tuple[int, ...]  # which parts are the numbers of micro-steps in windows
    closes: tuple[bool, ...] | None  # which windows it closes; None where the device decides
    flush: Any  # for which it was traced


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
      is_part: whether a node of arguments or results is not taken apart.
      say: is called with the reason for a single program.
      counters: which parts of the arguments are the numbers of micro-steps in windows.
      due: for each window `(number, asked) -> bool`, whether a micro-step closes it, once the step has been traced.
      by_caller: whether the caller alone closes windows.
      known: the programs by the windows that they close, and whether the caller asked for that.
      single: the one program for all calls, where the host does not know which windows close.
    """

    step: Callable[..., Any]
    is_part: Callable[[Any], bool]
    say: Callable[[str], None]
    counters: list[int]
    due: list[Callable[[int, bool], bool]] = dataclasses.field(default_factory=list)
    by_caller: bool = False
    known: dict[tuple[tuple[bool, ...], bool], StepProgram] = dataclasses.field(default_factory=dict)
    single: StepProgram | None = None

    def run(self, call: CallParts, counters: Counters) -> Any:
        program, numbers = self.single, []
        if program is None:
            numbers = [number + 1 for number in counters.read([call.parts[place] for place in self.counters])]
            asked = call.flush is True
            closes = tuple([due(number, asked) for due, number in zip(self.due, numbers, strict=False)])
            program = self.known.get((closes, asked)) or self.trace(call, list(map(Decision, numbers)))
        results = program.run(call.parts)
        if program.closes is None:
            counters.keep((), ())
        else:
            after = [0 if closes else number for closes, number in zip(program.closes, numbers, strict=True)]
            counters.keep([results[place] for place in program.counters], after)
        return program.tree.unflatten(results)

    def trace(self, call: CallParts, decisions: Sequence[Decision]) -> StepProgram:
        """Traces the program for these decisions, or the single one where the host cannot decide."""
        try:
            if not decisions:
                raise NotOnHostError("no argument holds a state of accumulate_gradients, so each call is one program")
            program = self._traced(call, decisions)
            self.due = [_due(decision, call.flush) for decision in decisions if decision.due]
            self.by_caller = all(decision.by_caller for decision in decisions)
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
        known = {
            windows: program._replace(run=program.run._replace(run=compiled[windows]))
            for windows, program in self.by_windows.items()
        }
        single = known.pop(None, None)
        return _Compiled(self.step, self.is_part, self.say, self.counters, self.due, self.by_caller, known, single)

    def _traced(self, call: CallParts, decisions: Sequence[Decision] | None) -> StepProgram:
        leaves, tree = jax.tree.flatten(call.parts)

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
        parts, of_parts = jax.tree.flatten(shapes, is_leaf=lambda node: id(node) not in around and self.is_part(node))
        ins, outs = (list(map(jax.tree.structure, trees)) for trees in (call.parts, parts))
        name = getattr(self.step, "__name__", "step") + suffix
        compiled = forwarding(traced, ins, outs, call.may_donate, name)
        return StepProgram(compiled, of_parts, tuple(counters_of(shapes, parts)), closes, call.flush)


class _Compiled(StepPrograms):
    def trace(self, call: CallParts, decisions: Sequence[Decision]) -> StepProgram:
        raise ValueError(
            f"No program was compiled for a call with flush={call.flush}. Call what jit_step returned, or lower the "
            "step for flush=True, too."
        )


def _unmarked(results: Tree, decisions: Sequence[Decision]) -> Tree:
    """Removes the decisions from states in the results; raises unless each window has had its micro-step."""
    made = [state.decision for state in states_in(results) if isinstance(state, Decided) and state.spent]
    if made != list(decisions):
        raise NotOnHostError("the step does not make one micro-step of each state, and return it")
    return map_states(on_host.plain, results)


def _due(decision: Decision, flush: bool | None) -> Callable[[int, bool], bool]:
    """Whether a later call closes a window; a step that asks for it by itself does so at every call."""
    due, by_itself = decision.due, decision.asked and flush is not True
    assert due is not None
    return lambda number, asked: due(number, asked or by_itself)
