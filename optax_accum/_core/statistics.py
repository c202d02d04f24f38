"""Owns what the gradients of a window tell: their norms, and the noise in them. Knows neither windows nor devices."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic
from optax_accum._core.arithmetic import Tree

ByGroup = dict[str, jax.Array]
ALL = "all"  # the one group, where none are named
_UNIT = 2**20  # below this, float32 counts in sixteenths


@dataclasses.dataclass(frozen=True)
class Options:
    """What `statistics=` asks for.

    Attributes:
      decay: of the noise and the signal from one window to the next, each smoothed for itself: 0.99 is a mean over
        about the last 100 windows.
      groups: names for groups of leaves, which are measured apart: a prefix of the tree of the parameters with strings
        as leaves, as `optax.partition` takes. By default all leaves are one group.

    Raises:
      ValueError: a decay outside [0, 1).
    """

    decay: float = 0.99
    groups: Tree = None

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(
                f"decay must be in [0, 1): decay={self.decay!r}. Pass 0.99 for about the last 100 windows."
            )


class Samples(NamedTuple):
    """Sums over the window, of each device its own: a gradient with a weight other than 0 is a sample.

    While `mini_step` is 0 they are those of the window before, which the next micro-step overwrites.
    """

    squares: ByGroup  # sum(w |g|^2)
    number: jax.Array  # of samples
    latest: ByGroup  # |g|^2 of the last micro-step, whatever became of it


class Statistics(NamedTuple):
    """What windows have told. Changes when one emits.

    `noise` is the variance of the gradient of one example (of one unit of weight), added up over all entries, `signal`
    the squared norm of the true gradient. `noise / known` and `signal / known` are their smoothed estimates.
    """

    squares: ByGroup  # |g|^2 of the gradient that was emitted last
    noise: ByGroup
    signal: ByGroup
    known: jax.Array  # the weight of what is in the two: 0 before a window with two samples
    step_weight: jax.Array  # the weight of a micro-step, a mean over the last window


class Seen(NamedTuple):
    """The weight of all windows that have emitted: `2**20 * units + rest`.

    A float32 alone would stall at 2**24 examples; this counts whole numbers to 2**51, in windows below 15 million.
    """

    units: jax.Array  # int32 []
    rest: jax.Array  # float [], below 2**20


def as_options(statistics: Any) -> Options | None:
    """Returns what `statistics=` asks for."""
    if isinstance(statistics, Options):
        return statistics
    if not isinstance(statistics, bool):
        raise TypeError(
            f"statistics must be a bool, or optax_accum.statistics.Options: statistics={statistics!r}. Pass True."
        )
    return Options() if statistics else None


def new_samples(options: Options, params: Tree, scalar: Callable[[], jax.Array]) -> Samples:
    """Returns the sums before the first micro-batch; `scalar()` is an empty one."""
    by_group = lambda: {name: scalar() for name in _groups(options, params)}
    return Samples(by_group(), scalar(), by_group())


def new_statistics(options: Options, params: Tree) -> Statistics:
    """Returns what is known before the first window."""
    by_group = lambda: {name: jnp.zeros([]) for name in _groups(options, params)}
    return Statistics(by_group(), by_group(), by_group(), jnp.zeros([]), jnp.zeros([]))


def new_seen() -> Seen:
    """Returns the count of nothing."""
    return Seen(jnp.zeros([], jnp.int32), jnp.zeros([]))


def squared_norms(options: Options, tree: Tree, like: jax.Array) -> ByGroup:
    """Returns `|g|^2` of each group: one number, or one for each row where `like` is [d], of leaves [d, ...]."""
    found: ByGroup = {}
    for name, leaf in _named(options, tree):
        found[name] = found.get(name, jnp.zeros_like(like)) + _squared_norm(leaf, like)
    return found


def add(samples: Samples, squares: ByGroup, weight: Any, first: Any) -> Samples:
    """Returns the sums with a sample in them, or only this where `first`. What weighs nothing is no sample."""
    if squares.keys() != samples.squares.keys():
        raise ValueError(
            f"The groups of statistics must be those of the state: groups={list(squares)}, and the state has "
            f"{list(samples.squares)}. Between two windows, take those of a new state, new = tx.init(params): "
            "state._replace(samples=new.samples, statistics=new.statistics)."
        )
    return Samples(
        squares=arithmetic.add(samples.squares, squares, weight, first),
        number=arithmetic.add(samples.number, jnp.asarray(weight != 0), 1.0, first),
        latest=squares,
    )


def alone(samples: Samples, squares: ByGroup, weight: jax.Array, steps: Any) -> Statistics:
    """Returns the statistics of one window, with nothing smoothed: unbiased, and zeros where they are not known.

    With weights `b_i`, `B = sum b_i`, K samples `g_i`, and `g` their weighted mean,

        noise = (sum_i b_i |g_i|^2 - B |g|^2) / (K - 1)        signal = |g|^2 - noise / B

    References:
      S. McCandlish et al., *An empirical model of large-batch training*, arXiv:1812.06162, appendix A, has the case of
      two sizes; weighing by `b_i` makes it that of K uneven ones.
    """
    spare = jnp.where(samples.number > 1, samples.number - 1, 1)
    noise = {name: (total - weight * squares[name]) / spare for name, total in samples.squares.items()}
    signal = {name: squares[name] - noise[name] / weight for name in noise}
    known = (samples.number > 1) & jnp.isfinite(sum(noise.values()) + sum(signal.values()))
    noise, signal = jax.tree.map(lambda part: jnp.where(known, part, 0), (noise, signal))
    return Statistics(squares, noise, signal, known.astype(weight.dtype), weight / jnp.asarray(steps, weight.dtype))


def smooth(old: Statistics, new: Statistics, decay: float) -> Statistics:
    """Smooths noise and signal, each for itself, over calls of `value_and_grad(..., statistics=True)`.

    Args:
      old: what this function returned, or the statistics of the first call.
      new: the statistics of this call.
      decay: how much of the old is kept, in [0, 1).

    Returns:
      Statistics like both. What is not known (one micro-batch, a NaN) leaves noise and signal as they were.

    Raises:
      ValueError: a decay outside [0, 1).
    """
    decay = Options(decay).decay
    kept = jnp.where(new.known > 0, decay, 1)
    mix = lambda old, new: kept * old + (1 - decay) * new  # what is not known is 0
    noise, signal = (jax.tree.map(mix, *pair) for pair in ((old.noise, new.noise), (old.signal, new.signal)))
    return new._replace(noise=noise, signal=signal, known=mix(old.known, new.known))


class NoiseScale(NamedTuple):
    """What `gradient_noise_scale` returns.

    Attributes:
      noise: float []. The variance of the gradient of one example, or token, added up over all entries.
      signal: float []. The squared norm of the true gradient.
      scale: float []. Their ratio, in examples or tokens: the batch whose mean gradient has as much noise as signal.
    """

    noise: jax.Array
    signal: jax.Array
    scale: jax.Array


def noise_scale(statistics: Statistics, group: str | None = None) -> NoiseScale:
    """Returns noise, signal and their ratio, of one group or of all together."""
    of = lambda parts: (sum(parts.values()) if group is None else parts[group]) / statistics.known  # 0 / 0: not known
    noise, signal = of(statistics.noise), of(statistics.signal)
    scale = jnp.maximum(noise, 0) / jnp.where(signal > 0, signal, 1)
    return NoiseScale(noise, signal, jnp.where(signal <= 0, jnp.inf, scale))


def metrics(samples: Samples, statistics: Statistics, seen: Seen) -> dict[str, jax.Array]:
    """Returns the scalars worth logging, by name; those of a group end in its name."""
    found: dict[str, jax.Array] = {"seen": _UNIT * seen.units.astype(seen.rest.dtype) + seen.rest} if seen else {}
    if not statistics:
        return found
    names = [] if set(statistics.noise) == {ALL} else list(statistics.noise)
    for group in (None, *names):
        whole = lambda parts: jnp.mean(sum(parts.values()) if group is None else parts[group])  # noqa: B023
        end = "" if group is None else f"/{group}"
        found[f"gradient_norm{end}"] = jnp.sqrt(whole(statistics.squares))
        found[f"micro_gradient_norm{end}"] = jnp.sqrt(whole(samples.latest))
        noise, signal, scale = noise_scale(statistics, group)
        found |= {f"gradient_noise{end}": noise, f"gradient_signal{end}": signal, f"noise_scale{end}": scale}
    return found


def see(seen: Seen, weight: jax.Array) -> Seen:
    """Returns the count with a window's weight in it, if that is a number."""
    rest = seen.rest + jnp.where(jnp.isfinite(weight), weight, 0)
    units = jnp.floor(rest / _UNIT)
    return Seen(seen.units + units.astype(jnp.int32), rest - units * _UNIT)


def has_seen(seen: Seen, weight: float) -> jax.Array:
    """Returns whether so much has been seen."""
    units, rest = divmod(weight, _UNIT)
    units = int(min(units, 2**31 - 1))
    return (seen.units > units) | ((seen.units == units) & (seen.rest >= rest))


def _groups(options: Options, params: Tree) -> list[str]:
    """Returns the names of the groups; of all where parameters have no leaves, as those that Optax's tools make."""
    if not jax.tree.leaves(params):
        return [ALL] if options.groups is None else jax.tree.leaves(options.groups)
    return [name for name, _ in _named(options, params)]


def _named(options: Options, tree: Tree) -> list[tuple[str, Any]]:
    """Returns each leaf that has a gradient with the name of its group."""
    groups = ALL if options.groups is None else options.groups
    names = jax.tree.leaves(arithmetic.for_each_leaf("groups", groups, tree, "Name one group for each branch."))
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f'groups must have strings as leaves: {name!r}. Name a group, such as "embedding".')
    pairs = zip(names, jax.tree.leaves(tree), strict=True)
    return [(name, leaf) for name, leaf in pairs if jnp.issubdtype(getattr(leaf, "dtype", float), jnp.inexact)]


def _squared_norm(leaf: Any, like: jax.Array) -> jax.Array:
    """Returns the sum of squares of a leaf, in the dtype of `like`, whose axes it leaves."""
    leaf = jnp.asarray(leaf)
    parts = (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)
    wide = [part.astype(like.dtype) for part in parts]
    return sum(jnp.sum(part * part, axis=tuple(range(like.ndim, part.ndim))) for part in wide)  # type: ignore[return-value]
