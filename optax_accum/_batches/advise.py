"""Owns advice: how many micro-steps in a window pay, and what an optimizer's decay becomes with another batch."""

import dataclasses
import math

from optax_accum._arguments import checks


@dataclasses.dataclass(frozen=True)
class Advice:
    """What `advise` recommends. Printed, it shows its arithmetic.

    Attributes:
      every: the micro-steps in a window.
      global_batch: the examples in it.
      best: the optimum before rounding,
        `sqrt(noise_scale / microbatch_size * once / micro_step)`, where
        `once` is the time of optimizer and communication. None if the noise
        scale is not known.
      overhead: the share of the time that optimizer and communication take,
        with this window.
      speedup: the time to the same loss without accumulation, divided by
        the time with this window: below 1, accumulation is slower. None if
        the noise scale is not known.
      reason: why this window.
      lines: the arithmetic.
    """

    every: int
    global_batch: float
    best: float | None
    overhead: float
    speedup: float | None
    reason: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"every={self.every}: {self.reason}", *self.lines])


def advise(
    *,
    microbatch_size: float,
    micro_step: float,
    optimizer: float,
    communication: float = 0.0,
    noise_scale: float | None = None,
    global_batch: float | None = None,
    max_every: int = 1024,
) -> Advice:
    """Recommends how many micro-steps to accumulate.

    The advice follows from what micro-steps cost and how noisy gradients
    are. A window of k micro-steps of b examples takes a time `k m + f`,
    where `f` is what happens once. Training to a given loss takes about
    `1 + N / (k b)` times the windows that a batch without noise would need.
    The product

        T(k) = (1 + N / (k b)) (k m + f)

    is least at

        k = sqrt(N / b * f / m)

    so accumulation pays if the batch is below the noise scale *and*
    the optimizer or communication is slow.

    Args:
      microbatch_size: b, examples (or tokens) in a micro-step, on all
        devices.
      micro_step: m, seconds for the gradient of one micro-batch, measured
        or compiled; only ratios of times matter.
      optimizer: seconds for one call of the optimizer.
      communication: seconds for one reduction over the devices that no
        computation hides.
      noise_scale: N, `gradient_noise_scale(state).scale`, in examples (or
        tokens); None if it is not known.
      global_batch: examples that an update must have, because a recipe says
        so; otherwise None.
      max_every: the most micro-steps to recommend.

    Returns:
      An `Advice`: to be printed, or read field by field.

    Raises:
      ValueError: a time, a size or a noise scale that is negative, 0 where
        it divides, or NaN.

    Guarantees:
      * `global_batch` is given: the micro-steps that it takes, and what
        they cost.
      * `noise_scale` is None: `every=1`, unless what happens once takes
        over a tenth of the time.
      * A noise scale of infinity: `max_every`.

    Example:
      >>> from optax_accum.batching import advise
      >>> print(advise(microbatch_size=8, micro_step=0.10, optimizer=0.02,
      ...     noise_scale=32))
      every=1: do not accumulate. The optimizer is cheap, or the batch is
      near the noise scale.
      what happens once: 0.02 + 0 = 0.02, the time of 0.20 micro-steps
      noise scale: 32 / 8 = 4.00 micro-batches
      least time at sqrt(4.00 * 0.20) = 0.89 micro-steps
      overhead 16.7 %, speedup over every=1: 1.00

    References:
      The number of windows is that of S. McCandlish et al.,
      arXiv:1812.06162, a model of well-tuned SGD; docs/when_not.md has what
      it leaves out.
    """
    _check(microbatch_size=(microbatch_size, True), micro_step=(micro_step, True), optimizer=(optimizer, False))
    _check(communication=(communication, False))
    checks.as_count("max_every", max_every)
    once = optimizer + communication
    ratio = once / micro_step
    if math.isinf(ratio):
        raise ValueError(
            f"Times must be finite, and of one unit: optimizer={optimizer}, communication={communication}, "
            f"micro_step={micro_step}. Pass what was measured."
        )
    lines = [f"what happens once: {optimizer:g} + {communication:g} = {once:g}, the time of {ratio:.2f} micro-steps"]
    best = noisy = speedup = None
    if noise_scale is not None:
        _check(noise_scale=(noise_scale, False))
        noisy = noise_scale / microbatch_size
        best = math.sqrt(noisy * ratio) if ratio else 0.0
        lines += [
            f"noise scale: {noise_scale:g} / {microbatch_size:g} = {noisy:.2f} micro-batches",
            f"least time at sqrt({noisy:.2f} * {ratio:.2f}) = {best:.2f} micro-steps",
        ]
    every, reason = _chosen(global_batch, microbatch_size, best, ratio, max_every)
    if noisy is not None:
        speedup = _windows(1, noisy) * (1 + ratio) / (_windows(every, noisy) * (every + ratio))
    overhead = ratio / (every + ratio)
    said = "not known without a noise scale" if speedup is None else f"{speedup:.2f}"
    lines.append(f"overhead {100 * overhead:.1f} %, speedup over every=1: {said}")
    return Advice(every, every * microbatch_size, best, overhead, speedup, reason, tuple(lines))


def _chosen(
    global_batch: float | None, microbatch_size: float, best: float | None, ratio: float, max_every: int
) -> tuple[int, str]:
    """Returns the micro-steps in a window, and why."""
    if global_batch is not None:
        _check(global_batch=(global_batch, True))
        return math.ceil(global_batch / microbatch_size), f"what a batch of {global_batch:g} takes."
    if best is None:
        every = min(max(math.ceil(9 * ratio), 1), max_every) if ratio > 1 / 9 else 1
        if every == 1:
            return 1, "do not accumulate. What happens once takes at most a tenth of the time."
        return every, "what happens once then takes a tenth of the time. Measure the noise scale before you trust it."
    if best >= max_every:
        return max_every, "accumulate as much as you allow: the noise scale is far above."
    below = max(math.floor(best), 1)
    every = below if best * best <= below * (below + 1) else below + 1  # T(below) <= T(below + 1)
    if every == 1:
        return 1, "do not accumulate. The optimizer is cheap, or the batch is near the noise scale."
    return every, "accumulate. What happens once is dear, and the batch stays below the noise scale."


def _windows(every: int, noisy: float) -> float:
    """Returns how many windows are needed, in any unit."""
    return 1 / every if math.isinf(noisy) else 1 + noisy / every


def rescale_decay(decay: float, batch_from: float, batch_to: float) -> float:
    """Returns the decay of a moving average for another batch size.

        decay ** (batch_to / batch_from)

    The half-life in examples stays the same. For Adam's second moment
    (`b2`) this lets small batches train as well as large ones: try it
    before you accumulate to keep a recipe's batch.

    Args:
      decay: the decay that goes with `batch_from`, in [0, 1).
      batch_from: examples or tokens in an update, so far.
      batch_to: the same, from now on.

    Returns:
      The decay that goes with `batch_to`.

    Raises:
      ValueError: a decay outside [0, 1), or a batch that is not positive.

    Example:
      >>> from optax_accum.batching import rescale_decay
      >>> round(rescale_decay(0.95, batch_from=512, batch_to=1), 6)
      0.9999

    References:
      M. Marek et al., *Small batch size training for language models*,
      arXiv:2507.07101.
    """
    _check(decay=(decay, False), batch_from=(batch_from, True), batch_to=(batch_to, True))
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be in [0, 1): decay={decay!r}. Pass that of the optimizer, such as 0.999.")
    return float(decay ** (batch_to / batch_from))


def _check(**given: tuple[float, bool]) -> None:
    """Raises for a number that is negative or NaN; or 0, or infinite, where it must be `positive`."""
    for name, (value, positive) in given.items():
        if not hasattr(value, "__float__"):
            raise TypeError(f"{name} must be a number: {name}={value!r}. Pass what was measured.")
        if not value >= 0 or (positive and not 0 < value < math.inf):
            rule = "must be positive and finite" if positive else "must not be negative or NaN"
            raise ValueError(f"{name} {rule}: {name}={value!r}. Pass what was measured.")
