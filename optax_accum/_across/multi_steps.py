"""From a state of `optax.MultiSteps` to one of ours, in mid-window too."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum._across.transformation import rules_of
from optax_accum._arguments import callables
from optax_accum._core import arithmetic, dtypes, leaves
from optax_accum._core.state import map_states, new_state, no_means, states_in
from optax_accum._core.types import Tree
from optax_accum._shared.arrays import short


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
