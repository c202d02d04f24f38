"""What a state tells of a run: `metrics`, `mean_grads`, `gradient_noise_scale`, as totals over devices."""

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, compilers
from optax_accum._core.state import find_state
from optax_accum._core.sums import as_number
from optax_accum._core.types import Axes, Tree
from optax_accum._loss.noise import ALL, NoiseScale, Samples, Statistics, noise_scale
from optax_accum._space import mapped

_COUNTS = ("mini_step", "gradient_step", "weight", "skipped", "discarded", "batches")


def metrics(state: Tree) -> dict[str, jax.Array]:
    """Returns the scalars worth logging at every micro-step.

    Args:
      state: an `AccumulationState`, or any optimizer state that holds
        exactly one.

    Returns:
      A dict of scalars:

      * `mini_step`, `gradient_step`: int32.
      * `weight`: `sum(w)` in the window so far, in the default float dtype;
        0 again when the window has closed.
      * `skipped` (micro-batches), `discarded` (windows) and `batches`: int32
        totals since `init`.
      * `seen`, with `statistics` or `every_by_tokens`: the weight of all
        windows that have made an update.

      With `statistics`, also:

      * `gradient_norm`: the norm of the last window's gradient.
      * `micro_gradient_norm`: that of the last micro-batch; on several
        devices the root mean square over devices.
      * `gradient_noise`, `gradient_signal`, `noise_scale`: NaN until two
        micro-batches have made an update.
      * the last five by group, such as `noise_scale/embedding`.

      On several devices `weight` is their total; inside `jax.shard_map`
      this communicates. Under `check_vma=False`, `weight` and
      `micro_gradient_norm` are those of one device.

    Raises:
      ValueError: `state` holds none, or several.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=4)
      >>> state = tx.init(jnp.ones(3))
      >>> _, state = tx.update(jnp.ones(3), state, weight=7.0)
      >>> found = optax_accum.metrics(state)
      >>> {name: value.item() for name, value in found.items()}
      {'mini_step': 1, 'gradient_step': 0, 'weight': 7.0, 'skipped': 0,
       'discarded': 0, 'batches': 1}
    """
    window = find_state(state)
    counts = {name: getattr(window, name) for name in _COUNTS}
    axes = mapped.axes_of(jnp.asarray(window.weight))
    counts["weight"] = mapped.totals(window.weight, window.weight)
    seen = {"seen": as_number(window.seen)} if window.seen else {}
    return counts | seen | (_measured(window.samples, window.statistics, axes) if window.statistics else {})


def mean_grads(state: Tree) -> Tree:
    """Returns the weighted mean of the gradients in the window so far.

    The tree, and the units, of `acc_grads` in `optax.MultiStepsState`; in
    our state `acc_grads` is a sum. For a log of the window's gradient at
    each update, put `optax.snapshot` first inside the wrapper instead:
    docs/once_per_update.md.

    Args:
      state: an `AccumulationState`, or any optimizer state that holds
        exactly one.

    Returns:
      `sum(w g) / sum(w)`, in the dtypes of the accumulator. Zeros before
      the first micro-step of a window; `()` for `every=1`, which keeps
      nothing.

    Raises:
      ValueError: `state` holds none, or several.

    Guarantees:
      * `reduction="sum"`: the mean as well.
      * The weights add to 0: the sum.
      * Several devices: the mean over all of them. This communicates;
        inside `jax.shard_map` under `check_vma=False` it is the mean of one
        device.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=4)
      >>> state = tx.init(jnp.ones(2))
      >>> for value, rows in ((1.0, 16), (5.0, 48)):
      ...     _, state = tx.update(
      ...         jnp.full(2, value), state, weight=rows)
      >>> print(optax_accum.mean_grads(state))
      [4. 4.]
    """
    window = find_state(state)
    total, weight = mapped.totals((compilers.on_device(window.acc_grads), window.weight), window.weight)
    factor, has_begun = arithmetic.reciprocal(weight), jnp.asarray(window.mini_step) > 0
    return jax.tree.map(lambda leaf: jnp.where(has_begun, arithmetic.scaled(leaf, factor, leaf.dtype), 0), total)


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


def _measured(samples: Samples, statistics: Statistics, axes: Axes) -> dict[str, jax.Array]:
    """Norms and noise by name; for a group, the name ends in the group's name."""
    scalars: dict[str, jax.Array] = {}
    latest = jax.tree.map(lambda squares: jax.lax.pmean(jnp.mean(squares), axes), samples.latest)
    names = [] if set(statistics.noise) == {ALL} else list(statistics.noise)
    for group in (None, *names):
        group_of = lambda parts, group=group: sum(parts.values()) if group is None else parts[group]
        end = "" if group is None else f"/{group}"
        scalars[f"gradient_norm{end}"] = jnp.sqrt(group_of(statistics.squares))
        scalars[f"micro_gradient_norm{end}"] = jnp.sqrt(group_of(latest))
        noise, signal, scale = noise_scale(statistics, group)
        scalars |= {f"gradient_noise{end}": noise, f"gradient_signal{end}": signal, f"noise_scale{end}": scale}
    return scalars
