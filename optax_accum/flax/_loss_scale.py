"""float16: a loss scale that is divided out once per update and moves once per window."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

import optax_accum
from optax_accum._core.state import find_state
from optax_accum._core.types import Flag, Tree


def unscale() -> optax.GradientTransformationExtraArgs:
    """Divides gradients by the extra argument `scale`, once per update.

    Put it inside `accumulate_gradients`. For float16, with the scale of
    `flax.training.dynamic_scale.DynamicScale`:

        inner = optax.chain(unscale(), optax.adam(1e-3))
        tx = accumulate_gradients(inner, every=8, nonfinite="discard")

    Multiply the loss by the scale, pass `scale=` to every micro-step, and
    move it with `next_scale` when a window has closed.
    `DynamicScale.value_and_grad` itself is wrong with accumulation: it
    changes the scale at every micro-batch, so a window would add gradients
    of different scales.
    """

    def update(grads: Tree, state: Any, params: Tree = None, *, scale: Any, **_: Any) -> tuple[Tree, Any]:
        divisor = jnp.asarray(scale, jnp.float32)  # in float16, a scale of 65536 is infinite
        return jax.tree.map(lambda g: (g * (1 / divisor)).astype(g.dtype), grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), cast(Any, update))


def next_scale(dynamic_scale: Any, before: Tree, after: Tree) -> Any:
    """Returns the dynamic scale after a micro-step.

    The scale changes only when a window has closed.

    Args:
      dynamic_scale: a `flax.training.dynamic_scale.DynamicScale`.
      before: the optimizer state before the micro-step.
      after: the state after it, of
        `accumulate_gradients(..., nonfinite="discard")`. Other policies
        discard no window that overflows: the scale would only grow.

    Returns:
      The scale: larger after `growth_interval` updates in a row, smaller
      after a window that was discarded for an infinity or a NaN (not for
      being empty).
    """
    updated = optax_accum.has_updated(after)
    discarded = optax_accum.metrics(after)["discarded"] > optax_accum.metrics(before)["discarded"]
    discarded = jax.lax.cond(discarded, lambda: _overflowed(after), lambda: False)
    grow = updated & (dynamic_scale.fin_steps >= dynamic_scale.growth_interval)
    scale = jnp.asarray(dynamic_scale.scale, jnp.float32)
    grown = jnp.where(grow, jnp.minimum(scale * dynamic_scale.growth_factor, jnp.finfo(jnp.float32).max), scale)
    smallest = dynamic_scale.minimum_scale or 0.0
    scale = jnp.where(discarded, jnp.maximum(scale * dynamic_scale.backoff_factor, smallest), grown)
    steps = jnp.where(grow | discarded, 0, dynamic_scale.fin_steps + updated.astype(jnp.int32))
    return dynamic_scale.replace(scale=scale, fin_steps=steps)


def _overflowed(opt_state: Tree) -> Flag:
    """Whether the window that was just discarded is no empty one: its sum, which stays until the next, is not zero."""
    sums = jax.tree.leaves(find_state(opt_state).acc_grads)
    # every=1 keeps no sum: an empty window of one micro-batch counts as an overflow, too
    return functools.reduce(jnp.logical_or, [jnp.any(leaf != 0) for leaf in sums], not sums)
