"""Changes of a state between micro-steps: its window is given up, or it goes on from one of `optax.MultiSteps`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum._across import outcomes
from optax_accum._across.transformation import rules_of
from optax_accum._arguments import callables, checks
from optax_accum._core import arithmetic, dtypes, leaves
from optax_accum._core.state import AccumulationState, map_states, new_state, no_means, states_in
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


@callables.renamed("every in accumulate_gradients")
def from_multi_steps(state: Tree, tx: optax.GradientTransformation) -> Tree:
    """Turns the state of a running `optax.MultiSteps` into ours.

    The state may be in the middle of a window. `optax.MultiSteps` keeps the
    mean of the window's gradients, we keep their sum:
    `acc_grads = mean * mini_step`.

    Args:
      state: an `optax.MultiStepsState`, or any optimizer state with some
        inside; the rest is returned as it is.
      tx: what `accumulate_gradients(inner, every)` returned, with the same
        `inner`; `reduction="sum"` if it was `use_grad_mean=False`. Where it
        stands inside a chain, pass it alone.

    Returns:
      The state to continue with in `tx`.

    Raises:
      ValueError: `state` holds no `optax.MultiStepsState`.
      TypeError: `tx` is not what `accumulate_gradients` returned.

    Guarantees:
      * In the middle of a window: the window goes on, and each of its
        micro-batches has weight 1.
      * Between windows: the next micro-step starts a window.
      * Another `every` than before: the window closes at
        `mini_step + 1 >= every`, with the right mean.
      * `every=1`: the accumulator of `MultiSteps` is kept until a state is
        made with `init`.
      * `should_skip_update_fn` was given: the counters go on, and its
        `skip_state` with them.
      * The other `reduction`: it is not detected, and the current window is
        divided wrongly.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> params = jnp.ones(3)
      >>> old = optax.MultiSteps(optax.adam(0.1), 4)
      >>> _, old_state = old.update(jnp.ones(3), old.init(params), params)
      >>> tx = optax_accum.accumulate_gradients(optax.adam(0.1), every=4)
      >>> state = optax_accum.from_multi_steps(old_state, tx)
      >>> _, state = tx.update(jnp.ones(3), state, params)
      >>> state.mini_step.item(), state.weight.item()
      (2, 2.0)
    """
    rules = rules_of(tx)
    if rules is None:
        raise TypeError(
            f"from_multi_steps needs the transformation in which the run goes on: tx={short(tx)}. Pass what "
            "accumulate_gradients(inner, every) returned; if that stands inside a chain, pass it alone."
        )
    divisor, examples = rules.divisor, rules.mean_args
    if not states_in(state, optax.MultiStepsState):
        raise ValueError(
            f"from_multi_steps needs a state that holds an optax.MultiStepsState: state={type(state).__name__}. "
            "Pass what `optax.MultiSteps.init` or `.update` returned."
        )

    def convert(node: Any) -> Any:
        mini_step = jnp.asarray(node.mini_step, jnp.int32)
        factor = mini_step if divisor.is_mean else jnp.ones_like(mini_step)
        return new_state(
            node.inner_opt_state,
            jax.tree.map(lambda acc: acc * factor.astype(acc.dtype), node.acc_grads),
            no_means(examples, node.acc_grads, arithmetic.zeros_of),
            mini_step.astype(dtypes.default_float()),
            mini_step=mini_step,
            gradient_step=jnp.asarray(node.gradient_step, jnp.int32),
            skip_state=node.skip_state,
            emitted=jnp.asarray((node.mini_step == 0) & (node.gradient_step > 0)),
        )

    return map_states(convert, leaves.unwrapped(state), kind=optax.MultiStepsState)
