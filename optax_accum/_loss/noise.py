"""Gradient noise: estimates of noise and signal, from squared norms by group of leaves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

ALL = "all"  # the one group, where none are named
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


class Samples(NamedTuple):
    """Sums over the window, each device's own: a gradient with a weight other than 0 is a sample.

    While `mini_step` is 0 they still hold the last window, which the next micro-step overwrites.
    """

    squares: ByGroup  # sum(w |g|^2)
    number: jax.Array  # of samples
    latest: ByGroup  # |g|^2 of the last micro-step, whatever became of it


def measure_window(samples: Samples, squares: ByGroup, weight: jax.Array, steps: Any) -> Statistics:
    """The statistics of one window, with nothing smoothed: unbiased, and zeros where they are not known.

    With weights `b_i`, `B = sum b_i`, K samples `g_i`, and `g` their weighted mean,

        noise = (sum_i b_i |g_i|^2 - B |g|^2) / (K - 1)        signal = |g|^2 - noise / B

    References:
      S. McCandlish et al., *An empirical model of large-batch training*, arXiv:1812.06162, appendix A, has the case of
      two sizes; weighing by `b_i` makes it the estimate of K uneven ones.
    """
    spare = jnp.where(samples.number > 1, samples.number - 1, 1)
    noise = {name: (total - weight * squares[name]) / spare for name, total in samples.squares.items()}
    signal = {name: squares[name] - noise[name] / weight for name in noise}
    known = (samples.number > 1) & jnp.isfinite(sum(noise.values()) + sum(signal.values()))
    noise, signal = jax.tree.map(lambda part: jnp.where(known, part, 0), (noise, signal))
    steps = jnp.maximum(jnp.asarray(steps, weight.dtype), 1)  # none where nothing counts
    return Statistics(squares, noise, signal, known.astype(weight.dtype), weight / steps)


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
      ValueError: a decay outside [0, 1); statistics of other groups.
    """
    check_decay(decay)
    if set(old.noise) != set(new.noise):
        raise ValueError(
            f"Both statistics must be of the same groups: old has {', '.join(old.noise)}, new has "
            f"{', '.join(new.noise)}. Begin anew with the statistics of this call."
        )
    old_weight = jnp.where(new.known > 0, decay, 1)

    def mix(old: Any, new: Any) -> Any:
        return old_weight * old + (1 - decay) * new  # what is not known is 0

    noise, signal = (jax.tree.map(mix, *pair) for pair in ((old.noise, new.noise), (old.signal, new.signal)))
    return new._replace(noise=noise, signal=signal, known=mix(old.known, new.known))


def check_decay(decay: float) -> None:
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be in [0, 1): decay={decay!r}. Pass 0.99 for about the last 100 windows.")


class NoiseScale(NamedTuple):
    """The result of `gradient_noise_scale`.

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
    total = lambda parts: sum(parts.values()) if group is None else parts[group]
    noise, signal = (total(parts) / statistics.known for parts in (statistics.noise, statistics.signal))  # 0 / 0: NaN
    scale = jnp.maximum(noise, 0) / jnp.where(signal > 0, signal, 1)
    return NoiseScale(noise, signal, jnp.where(signal <= 0, jnp.inf, scale))
