"""Whether a micro-step closes its window, where the host knows it: a state that says so while `jit_step` traces."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.tree_util import GetAttrKey

from optax_accum._across.policy import Policy
from optax_accum._across.schedules import Schedule
from optax_accum._core.state import AccumulationState


class NotOnHostError(Exception):
    """Only the device knows whether a call closes its window, for the reason in the message."""


class Decision:
    """Whether one call closes one window; the host decides it while the call is traced, when it sees the schedule.

    Attributes:
      closes: whether the call closes the window; None until the schedule has said it.
      schedule: when later calls close it; None until the window has been seen.
      asked: whether the step was told to close the window, by its caller or by itself.
    """

    def __init__(self, number: int | None = None, closes: bool | None = None):
        self.number, self.closes = number, closes  # this micro-step's in its window, or the answer itself
        self.schedule: Any = None
        self.asked = False

    def made(self, schedule: Schedule, policy: Policy, flush: Any) -> bool:
        """Whether the call closes the window; raises if the host cannot know it."""
        asked = schedule.asked(flush)
        if isinstance(asked, jax.Array):
            raise NotOnHostError("flush is an array, not a bool of Python")
        if not schedule.holds:
            raise NotOnHostError(f"each call makes an update (every={schedule.text})")
        if schedule.on_host is None:
            raise NotOnHostError(f"only the device knows when a window closes (every={schedule.text})")
        if policy.waits and not schedule.by_caller:
            raise NotOnHostError(f"only the device knows which micro-batches count (nonfinite={policy.text})")
        self.schedule, self.asked = schedule, asked
        if self.closes is None:
            self.closes = schedule.on_host(self.number or 0, asked)
        return self.closes


class Decided(AccumulationState):
    """A state in a program of `jit_step`; its pytree type says whether its micro-step has been made.

    A micro-step in a loop or a branch would change the type, so JAX raises: the host counts one micro-step a call.
    """

    decision: Decision
    spent: bool

    @classmethod
    def of(cls, fields: Iterable[Any], decision: Decision, *, spent: bool = False) -> "Decided":
        state = cls(*fields)
        state.decision, state.spent = decision, spent
        return state

    def _replace(self, **fields: Any) -> "Decided":  # type: ignore[override]
        if "mini_step" in fields:
            raise NotOnHostError("the step itself changes the window (discard_window, say)")
        return Decided.of(AccumulationState(*self)._replace(**fields), self.decision, spent=self.spent)


def _with_keys(state: Decided) -> tuple[Any, Any]:
    return [(GetAttrKey(name), getattr(state, name)) for name in state._fields], (state.decision, state.spent)


jax.tree_util.register_pytree_with_keys(
    Decided,
    _with_keys,
    lambda label, fields: Decided.of(fields, label[0], spent=label[1]),
    lambda state: (tuple(state), (state.decision, state.spent)),
)


def closes(schedule: Schedule, policy: Policy, state: AccumulationState, flush: Any) -> bool | None:
    """Whether the host says that this micro-step closes the window; None outside `jit_step`."""
    if not isinstance(state, Decided):
        return None
    if state.spent:
        raise NotOnHostError("the step makes several micro-steps in a call")
    return state.decision.made(schedule, policy, flush)


def plain(state: AccumulationState) -> AccumulationState:
    """The state without the decision, for the window to work on."""
    return AccumulationState(*state) if isinstance(state, Decided) else state


def alike(state: AccumulationState, like: AccumulationState) -> AccumulationState:
    """The state with the decision of `like`, if that has one."""
    return Decided.of(state, like.decision, spent=like.spent) if isinstance(like, Decided) else plain(state)


def spent(new: AccumulationState, old: AccumulationState) -> AccumulationState:
    """Marks a state whose micro-step has been made; outside `jit_step` nothing is marked."""
    return Decided.of(new, old.decision, spent=True) if isinstance(old, Decided) else new


def is_known(flush: Any) -> bool:
    """Whether the host knows the value of `flush`."""
    return flush is None or isinstance(flush, bool | np.bool_ | np.ndarray)
