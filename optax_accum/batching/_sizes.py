"""Windows that grow: by tokens, by weight, by noise."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from optax_accum._across.schedules import Schedule, by_count, by_weight
from optax_accum._arguments import checks
from optax_accum._core.state import AccumulationState
from optax_accum._core.sums import has_seen
from optax_accum._loss.noise import noise_scale
from optax_accum._shared.checks import as_count


def every_by_tokens(counts: Mapping[float, int]) -> Schedule:
    """Returns an `every` that changes with the number of tokens seen.

    Args:
      counts: the micro-steps in a window, a dict from tokens seen to the
        window length from then on: `{0: 768, 250e9: 1536}`. Tokens are what
        the weights count, so with a weight for each example they are
        examples.

    Returns:
      What `accumulate_gradients` takes as `every`. One program serves all
      lengths. The state keeps the count, `metrics(state)["seen"]`, exactly,
      far beyond what a float32 can count.

    Raises:
      TypeError, ValueError: no count from 0 on; a negative number of
        tokens; a count below 1, or no integer.

    Guarantees:
      * A threshold is passed within a window: the next window is the first
        of the new length.
      * A window that was discarded: its tokens do not count.
      * A run goes on with other counts: they hold from the next micro-step
        on.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> every = optax_accum.batching.every_by_tokens({0: 1, 200: 2})
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every)
      >>> state = tx.init(jnp.ones(3))
      >>> for _ in range(6):
      ...     _, state = tx.update(jnp.ones(3), state, weight=100)
      ...     print(state.gradient_step, optax_accum.metrics(state)["seen"])
      1 100.0
      2 200.0
      2 200.0
      3 400.0
      3 400.0
      4 600.0
    """
    if not callable(getattr(counts, "values", None)):
        raise TypeError(f"counts must be a dict, from tokens to micro-steps: {counts!r}. Write {{0: 4, 1e9: 8}}, say.")
    if not counts or any(math.isnan(start) for start in counts) or min(counts) != 0:
        raise ValueError(
            f"counts must say what holds from 0 tokens on, and then from more: counts={dict(counts)}. Write "
            "{0: 4, 1e9: 8}, say."
        )
    (_, first), *others = [(start, as_count("every", counts[start])) for start in sorted(counts)]

    def every(state: AccumulationState) -> jax.Array:
        count = jnp.asarray(first, jnp.int32)
        for start, larger in others:
            count = jnp.where(has_seen(state.seen, start), larger, count)
        return count

    return by_count(every, needs=("seen",), text="every_by_tokens(...)")


def every_by_weight(weight: float) -> Schedule:
    """Returns an `every` whose windows close at a total weight.

    A window of so many examples, or tokens, however many each micro-batch
    has: `every_by_weight(4096)`.

    Args:
      weight: what the weights of a window must add up to, at least.

    Returns:
      What `accumulate_gradients` takes as `every`.

    Raises:
      ValueError: no number above 0.

    Guarantees:
      * The micro-batch that reaches the weight is the window's last, and
        joins it whole: a window may weigh more, and is divided by what it
        weighs.
      * A micro-batch that is left out weighs nothing: the window waits.
      * No weight is given: each micro-step of `tx.update` weighs 1, and
        each of `value_and_apply_gradients` its rows.
      * A window whose weights never reach it: stays open; `flush` closes
        it.
      * `devices`: the weight of all devices counts, so each micro-step
        adds up one number over them.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> every = optax_accum.batching.every_by_weight(100)
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every)
      >>> state = tx.init(jnp.ones(3))
      >>> for rows in (60, 30, 30, 100):
      ...     _, state = tx.update(jnp.ones(3), state, weight=rows)
      ...     print(optax_accum.has_updated(state))
      False
      False
      True
      True
    """
    if checks.dtype_and_shape(weight)[0].kind not in "iuf" or not 0 < float(weight) < math.inf:
        raise ValueError(f"weight must be a number above 0: weight={weight!r}. Pass the examples in a window, say.")
    return by_weight(float(weight), text=f"every_by_weight({weight})")


def every_by_noise(at_least: int, at_most: int) -> Schedule:
    """Returns an `every` that makes the batch as large as the noise scale.

    It follows the gradient noise scale, between two bounds.

    Args:
      at_least: micro-steps in a window, at least 2: from one gradient alone
        no noise can be measured.
      at_most: micro-steps in a window.

    Returns:
      What `accumulate_gradients` takes as `every`, with `statistics=True`.
      One program serves all lengths. The state determines the length of
      the next window, so a resumed run makes the same windows.

    Raises:
      TypeError, ValueError: no integers, bounds that cross, or a lower one
        below 2.

    Guarantees:
      * Nothing is known yet: `at_least`.
      * No signal can be told from the noise: `at_most`.
      * The noise scale falls: windows become shorter again.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> every = optax_accum.batching.every_by_noise(2, 64)
      >>> tx = optax_accum.accumulate_gradients(
      ...     optax.sgd(0.1), every, statistics=True)
      >>> state = tx.init(jnp.ones(1))
      >>> for grads in ([4.0], [2.0], [5.0]):
      ...     _, state = tx.update(jnp.array(grads), state, weight=16)
      >>> state.gradient_step.item(), state.mini_step.item()
      (1, 1)
    """
    low, high = as_count("at_least", at_least), as_count("at_most", at_most)
    if not 2 <= low <= high:
        raise ValueError(
            f"Bounds must not cross, and begin at 2: at_least={at_least}, at_most={at_most}. Pass the smallest first."
        )

    def every(state: AccumulationState) -> jax.Array:
        statistics = state.statistics
        wanted = jnp.ceil(noise_scale(statistics).scale / statistics.step_weight)
        wanted = jnp.where(jnp.isnan(wanted), low, wanted)  # not known yet
        return jnp.clip(wanted, low, high).astype(jnp.int32)

    return by_count(every, needs=("statistics",), text="every_by_noise(...)")
