"""From a state of `optax.MultiSteps` to one of ours, in mid-window too."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from optax_accum._across.divisor import as_divisor
from optax_accum._core import arithmetic, dtypes
from optax_accum._core.state import as_mean_args, map_states, new_state, no_means, states_in
from optax_accum._core.types import Tree


def from_multi_steps(
    state: Tree,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    mean_args: Sequence[str] | Mapping[str, Tree] = ("value",),
) -> Tree:
    """Turns the state of a running `optax.MultiSteps` into ours.

    The state may be in the middle of a window. `optax.MultiSteps` keeps the
    mean of the window's gradients, we keep their sum:
    `acc_grads = mean * mini_step`.

    Args:
      state: an `optax.MultiStepsState`, or any optimizer state with some
        inside; the rest is returned as it is.
      reduction: `"mean"` for `MultiSteps(use_grad_mean=True)`, its default;
        `"sum"` for `use_grad_mean=False`.
      mean_args: what `accumulate_gradients` is given as `mean_args`.

    Returns:
      The state to continue with in `accumulate_gradients(inner, every)`,
      with the same `inner`.

    Raises:
      ValueError: `reduction` is neither, or `state` holds no
        `optax.MultiStepsState`.
      TypeError: `mean_args` is no tuple of names.

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
      * The wrong `reduction`: it is not detected, and the current window is
        divided wrongly.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> params = jnp.ones(3)
      >>> old = optax.MultiSteps(optax.adam(0.1), 4)
      >>> _, old_state = old.update(jnp.ones(3), old.init(params), params)
      >>> tx = optax_accum.accumulate_gradients(optax.adam(0.1), every=4)
      >>> state = optax_accum.from_multi_steps(old_state)
      >>> _, state = tx.update(jnp.ones(3), state, params)
      >>> state.mini_step.item(), state.weight.item()
      (2, 2.0)
    """
    divisor = as_divisor(reduction)
    examples = as_mean_args(mean_args)
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

    return map_states(convert, state, kind=optax.MultiStepsState)
