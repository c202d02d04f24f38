"""What becomes of a NaN: a table of policies, "skip" leaves the micro-batch out, and two entries for rules of users."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp

from optax_accum._arguments import checks
from optax_accum._core import arithmetic, dtypes
from optax_accum._core.state import AccumulationState
from optax_accum._core.types import Flag, Tree, Weight
from optax_accum._loss.weighing import Amount
from optax_accum._shared.arrays import short
from optax_accum._shared.checks import one_of
from optax_accum._space.space import Space

Name = Literal["propagate", "skip", "omit", "discard"]
Skip = Callable[..., tuple[jax.Array, Tree]]


class Policy(NamedTuple):
    """Decides about a micro-batch that is not finite.

    Attributes:
      screen: `(space, grads, amount, state, params) -> (skip, info)`, before it joins: is it left out?
      waits: whether a micro-batch that is left out is no micro-step: the window waits for another.
      accepts: `(space, total, weight) -> flag`: whether a window whose weight can divide its sum may emit it.
      needs_sum: whether `accepts` reads the sum, so that only a window that closes asks.
      rejects: `(gradient, state, params) -> (discard, info)`: whether a window makes no update, by the gradient that
        the inner optimizer would get; None if nothing asks.
      blank: `params -> info` before the first micro-step.
      text: the value of `nonfinite`, for a message.
    """

    screen: Callable[[Space, Tree, Amount, AccumulationState, Tree], tuple[Flag, Tree]]
    waits: bool = False
    accepts: Callable[[Space, Tree, Weight], Flag] = lambda space, total, weight: True
    needs_sum: bool = False
    rejects: Callable[[Tree, AccumulationState, Tree], tuple[Flag, Tree]] | None = None
    blank: Callable[[Tree], Tree] = lambda params: ()
    text: str = "a callable"

    @property
    def leaves_out(self) -> bool:
        """Whether it may leave out a micro-batch, so that no backward pass may add it before it has looked."""
        return self.screen is not _join_all


class WindowRule(NamedTuple):
    """A rule on the gradient of a window: see `discard_if`."""

    rule: Skip


def discard_if(rule: Skip) -> WindowRule:
    """Returns a `nonfinite` that discards windows by their mean gradient.

        tx = accumulate_gradients(inner, 8, nonfinite=discard_if(rule))

    For spikes: they show in the gradient of the whole batch; that of one
    micro-batch is too noisy to tell. A window that `rule`
    discards makes no update: parameters and the inner optimizer's state stay
    as they are, bit for bit, `has_updated` is False, and `discarded` counts
    it.

    Args:
      rule: `rule(gradient, gradient_step, params) -> (discard, info)`, as a
        callable `nonfinite`, but asked once per window: `gradient` is what
        `inner` would get, reduced over all devices; `params` may be None.
        `discard` is a bool scalar; `state.skip_state` holds the last `info`.
        A rule with a parameter `info` is given the last one, and at first
        the default of that parameter.

    Returns:
      What `accumulate_gradients(nonfinite=)` takes.

    Raises:
      TypeError: `rule` is no function, or returns something else.

    Guarantees:
      * A window whose gradient is not finite is discarded only if the rule
        says so: `~(norm < limit)` is True for a NaN.
      * `devices`: works, and costs no further reduction.
      * With `statistics`, a window that is discarded is no sample.

    Example:
      Gradients above a norm make no update (docs/nan_policy.md has a rule
      that learns which norm is usual):

      >>> import jax.numpy as jnp, optax, optax_accum
      >>> def spike(gradient, gradient_step, params):
      ...     norm = optax.tree.norm(gradient)
      ...     return ~(norm < 10), norm
      >>> tx = optax_accum.accumulate_gradients(
      ...     optax.sgd(0.1), every=2, nonfinite=optax_accum.discard_if(spike))
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> for size in (1.0, 1.2, 90.0, 1.0):  # the second window has a spike
      ...     updates, state = tx.update(jnp.full(2, size), state, params)
      >>> print(state.gradient_step, state.discarded, state.skip_state)
      1 1 64.34672
    """
    if not callable(rule):
        raise TypeError(f"rule must be a function (gradient, gradient_step, params): rule={short(rule)}. Pass one.")
    return WindowRule(rule)


def as_policy(nonfinite: Any, emit_dtype: Any) -> Policy:
    if isinstance(nonfinite, WindowRule):
        return _from_window_rule(nonfinite.rule)
    if callable(nonfinite):
        return _from_callable(cast(Skip, nonfinite))
    policy = TABLE[one_of("nonfinite", nonfinite, get_args(Name), " or a callable")]
    may_overflow = policy.needs_sum and emit_dtype is not None  # where the sum is finite
    return policy._replace(rejects=_nonfinite) if may_overflow else policy


def _join_all(space: Space, grads: Tree, amount: Amount, state: AccumulationState, params: Tree) -> tuple[Flag, Tree]:
    return False, state.skip_state


def _leave_out(space: Space, grads: Tree, amount: Amount, state: AccumulationState, params: Tree) -> tuple[Flag, Tree]:
    return space.nonfinite((grads, amount.numbers), amount.counts), state.skip_state


def _finite(space: Space, total: Tree, weight: Weight) -> Flag:
    return ~space.nonfinite((total, weight), True)


def _nonfinite(gradient: Tree, state: AccumulationState, params: Tree) -> tuple[Flag, Tree]:
    return ~arithmetic.all_finite(gradient), state.skip_state


TABLE = {
    "propagate": Policy(_join_all, text='"propagate"'),
    "skip": Policy(_leave_out, waits=True, text='"skip"'),
    "omit": Policy(_leave_out, text='"omit"'),
    "discard": Policy(_join_all, accepts=_finite, needs_sum=True, text='"discard"'),
}


def _from_callable(skip: Skip) -> Policy:
    """Takes a `should_skip_update_fn` of `optax.MultiSteps`, which may ask for its last `info`."""
    rule = _Rule(skip, "A callable nonfinite", "skip")
    return Policy(lambda space, grads, amount, *rest: rule.answer(grads, *rest), waits=True, blank=rule.blank)


def _from_window_rule(discard: Skip) -> Policy:
    rule = _Rule(discard, "The rule of discard_if", "discard")
    return Policy(_join_all, rejects=rule.answer, blank=rule.blank, text="discard_if")


_ADOPT = "Replace it: state._replace(skip_state=tx.init(params).skip_state)."


class _Rule:
    """A rule of the user's, which returns a flag and an `info`; messages call it `name`, and the flag `flag`."""

    def __init__(self, rule: Skip, name: str, flag: str):
        self._rule, self._name, self._returns = rule, name, f"{name} must return ({flag}, info)"
        self._flag, self._info = flag, inspect.signature(rule).parameters.get("info")  # if it is given the last one
        if self._info and self._info.default is inspect.Parameter.empty:
            raise TypeError(
                f"{name} with a parameter info must say what it is given first: info has no default. Write "
                "info=(0.0, 0), say."
            )

    def blank(self, params: Tree) -> Tree:
        """The info before the first gradient."""
        if self._info:
            return dtypes.strong(self._info.default)
        shapes = jax.eval_shape(self._rule, params, jnp.zeros([], jnp.int32), params)
        return arithmetic.zeros_of(self._checked(shapes)[1])

    def answer(self, grads: Tree, state: AccumulationState, params: Tree) -> tuple[Flag, Tree]:
        """The flag and the info for a gradient; raises for a state whose info is of another tree."""
        last, old = {}, state.skip_state
        if self._info:
            last, first = {"info": old}, self._info.default
            if jax.tree.structure(old) != jax.tree.structure(first):
                raise ValueError(
                    f"{self._name} must be given an info of the tree of its default, {first!r}: the state has "
                    f"{old!r}, of another policy. {_ADOPT}"
                )
        flag, info = self._checked(self._rule(grads, state.gradient_step, params, **last))
        if checks.dtype_and_shape(flag) != (jnp.bool_, ()):
            raise TypeError(
                f"{self._returns} with a bool scalar first: it returned {short(flag)}. Reduce it to one answer with "
                "jnp.any or jnp.all."
            )
        if jax.tree.structure(info) != jax.tree.structure(old):
            raise ValueError(
                f"{self._name} must return an info of the tree in the state: it returned {info!r}, the state has "
                f"{old!r}. For a state of another policy: {_ADOPT}"
            )
        remedy = "Make it what the default of the parameter info is, info=0.0 for a float; the state is made by init."
        checks.check_kinds(f"The info of {self._name[0].lower()}{self._name[1:]}", info, old, remedy)
        return jnp.asarray(flag), dtypes.cast_like(info, old)

    def _checked(self, answer: Any) -> Any:
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise TypeError(
                f"{self._returns}: it returned {short(answer)}. Return ({self._flag}, ()) where there is nothing to "
                "tell."
            )
        return answer
