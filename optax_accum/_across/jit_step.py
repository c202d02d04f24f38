"""Two programs for a train step, one that only adds and one that updates: `jit_step`, and which of them a call runs."""

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from optax_accum._across import on_host
from optax_accum._across.calls import Call, Calls, around_states, counters_of
from optax_accum._across.on_host import Decided, Decision, NotOnHostError
from optax_accum._arguments import callables
from optax_accum._core.forwarding import Forwarding, OtherTypesError
from optax_accum._core.forwarding import forwarding as forwarding_of
from optax_accum._core.leaves import check_arrays
from optax_accum._core.state import map_states, states_in
from optax_accum._core.types import Tree

_log = logging.getLogger("optax_accum")


def jit_step(step: Callable[..., Any], *, donate_argnums: int | Sequence[int] | None = None) -> "JitStep":
    """Compiles a train step into two programs; each call runs one.

        train_step = jit_step(step)
        value, params, state = train_step(params, state, batch)

    Most micro-steps only add a gradient. The program for those neither
    takes nor returns the inner optimizer's state, and does not overwrite
    the parameters; the other program makes the update. `jax.jit(step)`
    compiles one program with a branch, which hands all these arrays in and
    out at every call: with many small arrays this takes the host longer
    than the addition.

    The host knows which program a call needs: by a Python `flush`, or by an
    integer `every`, for which it counts the calls. It reads the counter of
    a state only if the last call has not returned this state (the first
    call, a checkpoint, `discard_window`); no other call waits for the
    device.

    Args:
      step: a function that makes one micro-step and returns the new state:
        what `value_and_apply_gradients` returned, a step of your own around
        `apply_gradients`, or a train step of `optax_accum.flax.linen`. If it
        is jitted, the function inside is taken. Arguments are arrays, or
        trees of them; close over all else. Call its argument that closes a
        window `flush`. (For modules of NNX, which a step changes in place:
        `optax_accum.flax.nnx.jit_step`.)
      donate_argnums: positions of arguments that a call may overwrite. By
        default the first, and the second if the state is there:
        `(params, state, ...)`; none if neither holds a state of
        `accumulate_gradients`.

    Returns:
      A `JitStep`: a function of the arguments of `step`. Its
      `one_program` says why there is only one program, if so.
      `lower(...)` lowers both for shapes, `.compile()` compiles both;
      `plan_microbatches` takes either.

    Raises:
      TypeError: `step` is no function; an argument is no array, or a
        module of NNX.
      ValueError: `donate_argnums` names no argument by position; a compiled
        step is called with arguments of other shapes, or in a way for which
        it was not compiled.

    Guarantees:
      The results of `jax.jit(step)`: parameters, state, sums, bit for bit,
      unless the compiler rounds a program without a branch otherwise.

      Two programs:

      * `every` is an integer: counted on the host. With a different
        `every` in a resumed run, windows close as they would there.
      * `every=None`, and `flush` is a bool of Python. With an integer
        `every`, `flush=True` compiles one more program when it is first
        used.
      * A window that is discarded, has weight zero or a NaN: decided on
        the device, as ever.

      One program, with the reason in `one_program` and, at level INFO, on
      the logger "optax_accum":

      * `every=1`: each call makes an update.
      * `every` is a function of `gradient_step`, or a schedule by tokens or
        noise; `flush` is an array.
      * `nonfinite="skip"` or a function, with an integer `every`: what is
        left out does not count. With `every=None` there are two.
      * The step makes its micro-step in a loop or a branch, makes several
        in a call, or calls `discard_window`.
      * The optimizer does not accumulate, or not as we do.

      Of arrays that a call hands through, the result holds the very ones
      that were passed.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.5), every=2)
      >>> loss = lambda w, x: jnp.mean((w - x) ** 2)
      >>> step = optax_accum.value_and_apply_gradients(loss, tx)
      >>> train_step = optax_accum.jit_step(step)
      >>> w = jnp.array(0.0)
      >>> state = tx.init(w)
      >>> for x in (1.0, 3.0):
      ...     _, w, state = train_step(w, state, jnp.array([x]))
      ...     print(w)
      0.0
      2.0
    """
    callables.as_function(step, "step", "Pass the train step, not what it returns.")
    if hasattr(step, "lower") and hasattr(step, "__wrapped__"):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return JitStep(step, donate_argnums)


class _Program(NamedTuple):
    """A program for calls of one kind."""

    run: Forwarding
    tree: Any  # of the results, in parts
    counters: tuple[int, ...]  # which parts are the numbers of micro-steps in windows
    closes: tuple[bool, ...] | None  # which windows it closes; None where the device decides
    flush: Any  # for which it was traced


class _Programs:
    """The programs for calls of one kind.

    Attributes:
      counters: which parts of the arguments are the numbers of micro-steps in windows.
      due: for each window `(number, asked) -> bool`, whether a micro-step closes it, once the step has been traced.
      by_caller: whether the caller alone closes windows.
      known: the programs by the windows that they close, and whether the caller asked for that.
      single: the one program for all calls, where the host does not know which windows close.
    """

    def __init__(self, counters: list[int]):
        self.counters = counters
        self.due: list[Callable[[int, bool], bool]] = []
        self.by_caller = False
        self.known: dict[tuple[tuple[bool, ...], bool], _Program] = {}
        self.single: _Program | None = None


class JitStep:
    """A train step in two programs: what `jit_step` returns.

    Attributes:
      one_program: why there is one program and not two; None where there
        are two, and before the first call.
    """

    def __init__(self, step: Callable[..., Any], donate_argnums: int | Sequence[int] | None):
        functools.update_wrapper(self, step)
        self._step, self._calls = step, Calls(step, donate_argnums)
        self._kinds: dict[Any, list[_Programs]] = {}  # several, if parts inside differ: the parameters of two models
        self._last: tuple[Sequence[Any], list[int]] = (), []  # the counters that the last call returned, in two forms
        self.one_program: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._calls.taken_apart(args, kwargs)
        for programs in self._programs(call):
            if any(isinstance(call.parts[place], Tracer) for place in programs.counters):
                return self._step(*args, **kwargs)  # a part of somebody's program
            with contextlib.suppress(OtherTypesError):
                return self._run(programs, call)
        raise AssertionError("the last programs are new ones")

    def lower(self, *args: Any, **kwargs: Any) -> "LoweredStep":
        """Lowers both programs, for arrays or their shapes.

        With `flush=True` and an integer `every` it lowers the one that such
        calls run.
        """
        call = self._calls.taken_apart(args, kwargs)
        programs = _Programs(counters_of(call.arguments(call.parts), call.parts))
        says = call.flush is None and self._calls.takes_flush
        if call.flush is not True:
            held = [Decision(closes=False) for _ in programs.counters]
            self._traced(programs, call._replace(flush=False) if says else call, held)
        if programs.single is None:
            closed = [Decision(closes=True) for _ in programs.counters]
            self._traced(programs, call._replace(flush=True) if says and programs.by_caller else call, closed)
        return LoweredStep(self, call, programs)

    def _programs(self, call: Call) -> Iterator[_Programs]:
        """Yields the programs for calls of this kind, new ones last."""
        kinds = self._kinds.setdefault((call.kind, call.flush), [])
        yield from kinds
        args, kwargs = call.arguments(call.parts)
        check_arrays("The arguments of a step of jit_step", (args, kwargs), "Close over all else: functools.partial.")
        kinds.append(_Programs(counters_of(call.arguments(call.parts), call.parts)))
        yield kinds[-1]

    def _run(self, programs: _Programs, call: Call) -> Any:
        """Runs the program that a call needs, and remembers the numbers of micro-steps after it."""
        program, numbers = programs.single, []
        if program is None:
            numbers = [number + 1 for number in self._numbers([call.parts[place] for place in programs.counters])]
            asked = call.flush is True
            closes = tuple([due(number, asked) for due, number in zip(programs.due, numbers, strict=False)])
            program = programs.known.get((closes, asked))
        if program is None:
            program = self._traced(programs, call, list(map(Decision, numbers)))
        results = program.run(call.parts)
        self._last = (), []
        if program.closes is not None:
            counts = [0 if closes else number for closes, number in zip(program.closes, numbers, strict=True)]
            self._last = [results[place] for place in program.counters], counts
        return program.tree.unflatten(results)

    def _numbers(self, counters: Sequence[Any]) -> list[int]:
        """Returns the numbers of micro-steps in these windows; the device is asked if they come from elsewhere."""
        last, numbers = self._last
        if len(last) == len(counters) and all(map(operator.is_, last, counters)):
            return numbers
        return list(map(int, counters))

    def _traced(self, programs: _Programs, call: Call, decisions: Sequence[Decision]) -> _Program:
        """Traces the program for these decisions, or the single one where the host cannot decide."""
        try:
            if not decisions:
                raise NotOnHostError("no argument holds a state of accumulate_gradients, so each call is one program")
            program = self._program(call, decisions)
            programs.due = [_due(decision, call.flush) for decision in decisions if decision.due]
            programs.by_caller = all(decision.by_caller for decision in decisions)
            programs.known[program.closes or (), call.flush is True] = program
        except NotOnHostError as error:
            program = programs.single = self._program(call, None)
            self._say(str(error))
        except (TypeError, ValueError) as error:  # a loop or a branch, whose types differ after a micro-step
            program = programs.single = self._program(call, None)
            self._say(f"the step cannot be traced with a window that the host closes: {error}")
        return program

    def _say(self, reason: str) -> None:
        if self.one_program is None:
            self.one_program = reason
            _log.info("jit_step compiles one program, and not two: %s.", reason)

    def _program(self, call: Call, decisions: Sequence[Decision] | None) -> _Program:
        leaves, tree = jax.tree.flatten(call.parts)

        def run(leaves: list[Any]) -> Any:
            args, kwargs = call.arguments(tree.unflatten(leaves))
            kwargs |= {} if call.flush is None else {"flush": call.flush}
            if decisions is None:
                return self._step(*args, **kwargs)
            of = iter(decisions)
            args, kwargs = map_states(lambda state: Decided.of(state, next(of)), (args, kwargs))
            return self._unmarked(self._step(*args, **kwargs), decisions)

        traced, shapes = jax.make_jaxpr(run, return_shape=True)(leaves)
        closes = None if decisions is None else tuple([bool(decision.closes) for decision in decisions])
        suffix = "" if closes is None else "_updates" if any(closes) else "_adds"
        around = list(map(id, around_states(shapes)))
        parts, of_parts = jax.tree.flatten(
            shapes, is_leaf=lambda node: id(node) not in around and self._calls.is_part(node)
        )
        ins, outs = (list(map(jax.tree.structure, trees)) for trees in (call.parts, parts))
        name = getattr(self._step, "__name__", "step") + suffix
        forwarding = forwarding_of(traced, ins, outs, call.may_donate, name)
        return _Program(forwarding, of_parts, tuple(counters_of(shapes, parts)), closes, call.flush)

    def _unmarked(self, results: Tree, decisions: Sequence[Decision]) -> Tree:
        """Returns the results with states of the usual type; raises unless each window has had its micro-step."""
        states = states_in(results)
        made = [state.decision for state in states if isinstance(state, Decided) and state.spent]
        if made != list(decisions):
            raise NotOnHostError("the step does not make one micro-step of each state, and return it")
        return map_states(on_host.plain, results)


def _due(decision: Decision, flush: bool | None) -> Callable[[int, bool], bool]:
    """Returns whether a later call closes a window; a step that asks for it by itself does so at every call."""
    due, by_itself = decision.due, decision.asked and flush is not True
    assert due is not None

    def is_due(number: int, asked: bool) -> bool:
        return due(number, asked or by_itself)

    return is_due


class LoweredStep:
    """Both programs of a step, lowered: what `jit_step(step).lower` returns.

    Attributes:
      adds: the program of a call that only adds, a `jax.stages.Lowered`;
        None where there is one program.
      updates: the program of a call that updates, or of all calls. It
        holds all that the other does.
    """

    def __init__(self, step: JitStep, call: Call, programs: _Programs):
        self._step, self._call, self._programs = step, call, programs
        self._lowered = {key: program.run.lower(call.parts) for key, program in _all(programs).items()}
        self.adds, self.updates = _two(self._lowered)

    @property
    def lowered(self) -> Any:
        """The program that holds most, for `plan_microbatches`."""
        return self.updates

    def compile(self) -> "CompiledStep":
        """Compiles both programs."""
        return CompiledStep(
            self._step, self._call, self._programs, {of: lowered.compile() for of, lowered in self._lowered.items()}
        )


class CompiledStep(JitStep):
    """Both programs of a step, compiled: what `jit_step(step).lower(...).compile()` returns.

    It is called like the step, with arrays of the shapes for which it was
    lowered.

    Attributes:
      adds: the program of a call that only adds, a `jax.stages.Compiled`;
        None where there is one program.
      updates: the program of a call that updates, or of all calls.
    """

    def __init__(self, step: JitStep, call: Call, programs: _Programs, compiled: dict[Any, Any]):
        super().__init__(step._step, step._calls.donated)
        self.one_program = step.one_program
        self.adds, self.updates = _two(compiled)
        self._kind = call.kind
        self._of_kind = _Programs(programs.counters)
        self._of_kind.due, self._of_kind.by_caller = programs.due, programs.by_caller
        for key, program in _all(programs).items():
            of_it = program._replace(run=program.run._replace(run=compiled[key]))
            if key is None:
                self._of_kind.single = of_it
            else:
                self._of_kind.known[key] = of_it

    def _programs(self, call: Call) -> Iterator[_Programs]:
        if call.kind != self._kind:
            raise ValueError(
                "A compiled step takes arguments of the trees, shapes and dtypes for which it was lowered: others were "
                "given. Call what jit_step returned, or lower it for these."
            )
        yield self._of_kind

    def _traced(self, programs: _Programs, call: Call, decisions: Sequence[Decision]) -> _Program:
        raise ValueError(
            f"No program was compiled for a call with flush={call.flush}. Call what jit_step returned, or lower the "
            "step for flush=True, too."
        )


def _all(programs: _Programs) -> dict[Any, _Program]:
    """Returns the programs by the windows that they close; under None the single one."""
    return dict(programs.known) if programs.single is None else {None: programs.single}


def _two(things: dict[Any, Any]) -> tuple[Any, Any]:
    """Returns the one that only adds, if there is one, and the other."""
    adds = [thing for key, thing in things.items() if key is not None and not any(key[0])]
    updates = [thing for key, thing in things.items() if key is None or any(key[0])]
    return (adds or [None])[0], (updates or [None])[0]
