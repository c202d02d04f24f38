"""`jit_step`: a train step in two programs, one that only adds and one that updates; called, lowered, compiled."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.core import Tracer

from optax_accum._across.calls import Calls, SplitCall, counters_of
from optax_accum._across.on_host import Decision
from optax_accum._across.programs import Counters, OtherTypesError, StepPrograms
from optax_accum._arguments import callables
from optax_accum._core.leaves import check_arrays

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
      `plan.fit(..., run=False)` takes either.

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

      Arrays that a call passes through unchanged are returned as the same
      objects.

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
    return JitStep(callables.as_step(step), donate_argnums)


class JitStep:
    """A train step in two programs: what `jit_step` returns.

    Attributes:
      one_program: why there is one program and not two; None where there
        are two, and before the first call.
    """

    def __init__(self, step: Callable[..., Any], donate_argnums: int | Sequence[int] | None):
        functools.update_wrapper(self, step)
        self._step, self._calls = step, Calls(step, donate_argnums)
        self._kinds: dict[Any, list[StepPrograms]] = {}  # several for models of other shapes
        self._counters = Counters()
        self.one_program: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._calls.taken_apart(args, kwargs)
        for programs in self._programs(call):
            if any(isinstance(call.trees[place], Tracer) for place in programs.counters):
                return self._step(*args, **kwargs)  # the step is traced as a part of a larger program
            with contextlib.suppress(OtherTypesError):
                return programs.run(call, self._counters)
        raise AssertionError("the last programs are new ones")

    def lower(self, *args: Any, **kwargs: Any) -> "LoweredStep":
        """Lowers both programs, for arrays or their shapes.

        With `flush=True` and an integer `every` it lowers the one that such
        calls run.
        """
        call = self._calls.taken_apart(args, kwargs)
        programs = self._new_programs(call)
        may_flush = call.flush is None and self._calls.takes_flush
        if call.flush is not True:
            held = [Decision(closes=False) for _ in programs.counters]
            programs.trace(call._replace(flush=False) if may_flush else call, held)
        if programs.single is None:
            closed = [Decision(closes=True) for _ in programs.counters]
            programs.trace(call._replace(flush=True) if may_flush and programs.by_caller else call, closed)
        return LoweredStep(self, call, programs)

    def _programs(self, call: SplitCall) -> Iterator[StepPrograms]:
        """Yields the programs for calls of this kind, new ones last."""
        kinds = self._kinds.setdefault((call.kind, call.flush), [])
        yield from kinds
        args, kwargs = call.arguments(call.trees)
        check_arrays("The arguments of a step of jit_step", (args, kwargs), "Close over all else: functools.partial.")
        kinds.append(self._new_programs(call))
        yield kinds[-1]

    def _new_programs(self, call: SplitCall) -> StepPrograms:
        return StepPrograms(self._step, self._calls.is_whole, self._say, counters_of(call.arguments, len(call.trees)))

    def _say(self, reason: str) -> None:
        if self.one_program is None:
            self.one_program = reason
            _log.info("jit_step compiles one program, and not two: %s.", reason)


# Ahead of time


class LoweredStep:
    """Both programs of a step, lowered: what `jit_step(step).lower` returns.

    Attributes:
      adds: the program of a call that only adds, a `jax.stages.Lowered`;
        None where there is one program.
      updates: the program of a call that updates, or of all calls. It
        holds all that the other does.
    """

    def __init__(self, step: JitStep, call: SplitCall, programs: StepPrograms):
        self._step, self._call, self._programs = step, call, programs
        self._lowered = {key: program.lower(call.trees) for key, program in programs.by_windows.items()}
        self.adds, self.updates = _two(self._lowered)

    @property
    def lowered(self) -> Any:
        """The program that holds most, for `plan.fit(..., run=False)`."""
        return self.updates

    def compile(self) -> "CompiledStep":
        """Compiles both programs."""
        compiled = {key: lowered.compile() for key, lowered in self._lowered.items()}
        return CompiledStep(self._step, self._call, self._programs.running(compiled), *_two(compiled))


class CompiledStep(JitStep):
    """Both programs of a step, compiled: what `jit_step(step).lower(...).compile()` returns.

    It is called like the step, with arrays of the shapes for which it was
    lowered.

    Attributes:
      adds: the program of a call that only adds, a `jax.stages.Compiled`;
        None where there is one program.
      updates: the program of a call that updates, or of all calls.
    """

    def __init__(self, step: JitStep, call: SplitCall, programs: StepPrograms, adds: Any, updates: Any):
        super().__init__(step._step, step._calls.donated)
        self.one_program, self.adds, self.updates = step.one_program, adds, updates
        self._kind, self._compiled = call.kind, programs

    def _programs(self, call: SplitCall) -> Iterator[StepPrograms]:
        if call.kind != self._kind:
            raise ValueError(
                "A compiled step takes arguments of the trees, shapes and dtypes for which it was lowered: others were "
                "given. Call what jit_step returned, or lower it for these."
            )
        yield self._compiled


def _two(things: dict[Any, Any]) -> tuple[Any, Any]:
    """The program that only adds, None if there is only one program, and the one that updates."""
    updates = [thing for windows, thing in things.items() if windows is None or any(windows[0])]
    adds = [thing for thing in things.values() if thing not in updates]
    return (adds or [None])[0], (updates or [None])[0]
