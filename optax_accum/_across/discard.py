"""`discard_window`: gives up a window's sum so far."""

from typing import Any

import jax.numpy as jnp

from optax_accum._across import outcomes
from optax_accum._arguments import checks
from optax_accum._core.state import AccumulationState, map_states, states_in
from optax_accum._core.types import Flag, Tree
from optax_accum._shared.arrays import short


def discard_window(state: Tree, when: Any = True) -> Tree:
    """Drops the micro-batches added since the last update.

        state = discard_window(state)
        state = discard_window(state, when=kl > limit)

    For a run that gives up a half-finished batch: PPO that stops at a bound
    of the KL divergence, a worker that is preempted, an epoch whose rest is
    left out. Parameters and inner optimizer need no change: a window that
    has made no update has not touched them.

    Args:
      state: an `AccumulationState`, or any optimizer state that holds one
        or several.
      when: a bool, or a bool scalar that only the running program knows.

    Returns:
      The state. The next micro-step begins a window.

    Raises:
      TypeError: `when` is no bool scalar.
      ValueError: `state` holds no `AccumulationState`.

    Guarantees:
      * Training goes on, bit for bit, as if the window's micro-batches had
        not been given.
      * A window with a micro-step in it: `discarded + 1`, and `has_updated`
        is False. An empty one: nothing changes.
      * `batches` and `skipped` keep what they have counted: the loader has
        moved on.
      * Nothing is copied or cleared: the next micro-step overwrites sums.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=4)
      >>> _, state = tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
      >>> state = optax_accum.discard_window(state)
      >>> state.mini_step.item(), state.discarded.item()
      (0, 1)
    """
    if checks.dtype_and_shape(when) != (jnp.bool_, ()):
        raise TypeError(
            f"when must be a bool, or a bool scalar: when={short(when)}. Pass when=jnp.any(kl > limit), say."
        )
    if not states_in(state):
        raise ValueError(
            f"discard_window needs a state that holds an AccumulationState: state={type(state).__name__}. Pass the "
            "state of accumulate_gradients, or of a chain around it."
        )
    return map_states(lambda window: _without_window(window, when), state)


def _without_window(state: AccumulationState, when: Flag) -> AccumulationState:
    gives_up = jnp.asarray(when) & (state.mini_step > 0)
    return state._replace(
        mini_step=jnp.where(gives_up, 0, state.mini_step),
        weight=jnp.where(gives_up, 0, state.weight),
        emitted=state.emitted & ~gives_up,
        discarded=outcomes.count(state.discarded, gives_up),
    )
