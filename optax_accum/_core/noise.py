"""Owns the estimates of gradient noise and signal: unbiased, smoothed, as one number. Measures nothing."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

ByGroup = dict[str, jax.Array]


class Statistics(NamedTuple):
    """Smoothed gradient noise and signal, updated once per window.

    `noise` is the variance of the gradient of one example (of one unit of
    weight), added up over all entries, `signal` the squared norm of the
    true gradient. `noise / known` and `signal / known` are their smoothed
    estimates.
    """

    squares: ByGroup  # |g|^2 of the gradient that was emitted last
    noise: ByGroup
    signal: ByGroup
    known: jax.Array  # the weight of what is in the two: 0 before a window with two samples
    step_weight: jax.Array  # the weight of a micro-step, a mean over the last window


def smooth(old: Statistics, new: Statistics, decay: float) -> Statistics:
    """Smooths noise and signal separately, from one call to the next.

    The calls are those of `value_and_grad(..., statistics=True)`.

    Args:
      old: what this function returned, or the statistics of the first call.
      new: the statistics of this call.
      decay: how much of the old is kept, in [0, 1).

    Returns:
      Statistics like both. What is not known (one micro-batch, a NaN)
      leaves noise and signal as they were.

    Raises:
      ValueError: a decay outside [0, 1).
    """
    check_decay(decay)
    kept = jnp.where(new.known > 0, decay, 1)
    mix = lambda old, new: kept * old + (1 - decay) * new  # what is not known is 0
    noise, signal = (jax.tree.map(mix, *pair) for pair in ((old.noise, new.noise), (old.signal, new.signal)))
    return new._replace(noise=noise, signal=signal, known=mix(old.known, new.known))


def check_decay(decay: float) -> None:
    """Raises unless this is how much of the old a smoothed estimate may keep."""
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be in [0, 1): decay={decay!r}. Pass 0.99 for about the last 100 windows.")


class NoiseScale(NamedTuple):
    """What `gradient_noise_scale` returns.

    Attributes:
      noise: float []. The variance of the gradient of one example, or
        token, added up over all entries.
      signal: float []. The squared norm of the true gradient.
      scale: float []. Their ratio, in examples or tokens: the batch whose
        mean gradient has as much noise as signal.
    """

    noise: jax.Array
    signal: jax.Array
    scale: jax.Array


def noise_scale(statistics: Statistics, group: str | None = None) -> NoiseScale:
    """Returns noise, signal and their ratio, of one group or of all together."""
    mean_of = lambda parts: (
        (sum(parts.values()) if group is None else parts[group]) / statistics.known
    )  # 0 / 0: not known
    noise, signal = mean_of(statistics.noise), mean_of(statistics.signal)
    scale = jnp.maximum(noise, 0) / jnp.where(signal > 0, signal, 1)
    return NoiseScale(noise, signal, jnp.where(signal <= 0, jnp.inf, scale))
