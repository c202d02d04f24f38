"""The noise scale of the gradients, read from the state."""

from optax_accum._core.state import find_state
from optax_accum._core.types import Tree
from optax_accum._loss.noise import NoiseScale, Statistics, noise_scale


def gradient_noise_scale(state: Tree, group: str | None = None) -> NoiseScale:
    """Returns the noise of the gradient, its signal, and their ratio.

    The ratio is the gradient noise scale. The variance of the mean gradient
    of a batch of B examples is `noise / B`. Where that equals the signal,
    at `B = scale`, twice the batch saves a quarter of the updates, and half
    the batch takes 1.5 times as many.

    Args:
      state: an optimizer state that holds exactly one `AccumulationState`,
        of an `accumulate_gradients(..., statistics=True)`; or the
        statistics that `value_and_grad(..., statistics=True)` returned.
      group: the name of a group of leaves, if groups were named; else all
        leaves together.

    Returns:
      A `NoiseScale` of smoothed estimates, in the unit of the weights:
      examples, or tokens.

    Raises:
      ValueError: the state holds no statistics, or no such group.
      TypeError: the statistics come with a value, as from a call.

    Guarantees:
      Noise and signal are unbiased for every choice of the sizes of
      micro-batches, before they are smoothed and divided; they are smoothed
      separately, because the mean of ratios is not the ratio of means.

      * One micro-batch in each window, on one device: NaN, which means not
        known; whoever builds or traces it so gets a warning.
      * A window with a NaN, or that was discarded: leaves the estimates as
        they were.
      * A micro-batch that is left out, or has a weight of 0: is no sample.
      * The signal comes out at 0 or below: the scale is infinite, because
        no window can tell the signal from noise.
      * `devices`: each device's own gradient is a sample, so `every=1`
        will do.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> tx = optax_accum.accumulate_gradients(
      ...     optax.sgd(0.1), every=2, statistics=True)
      >>> state = tx.init(jnp.ones(1))
      >>> for grads in (3.0, 5.0):  # each the mean of 8 examples
      ...     _, state = tx.update(jnp.array([grads]), state, weight=8)
      >>> found = optax_accum.statistics.gradient_noise_scale(state)
      >>> noise, signal, scale = found
      >>> print(f"{noise:.1f} / {signal:.1f} = {scale:.2f} examples")
      16.0 / 15.0 = 1.07 examples

    References:
      S. McCandlish et al., *An empirical model of large-batch training*,
      arXiv:1812.06162.
    """
    if type(state) is tuple and any(isinstance(part, Statistics) for part in state):
        raise TypeError(
            "The noise scale is that of the statistics alone: this is (value, statistics), as value_and_grad returns "
            "it. Pass the second."
        )
    statistics = state if isinstance(state, Statistics) else find_state(state).statistics
    if not statistics:
        raise ValueError(
            "Gradients were not measured: state.statistics=(). Pass statistics=True to accumulate_gradients."
        )
    if group is not None and group not in statistics.noise:
        raise ValueError(f"group must be one of {', '.join(statistics.noise)}: group={group!r}. Choose one of these.")
    return noise_scale(statistics, group)
