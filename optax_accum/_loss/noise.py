"""Gradient noise: squared norms by group of leaves, estimates of noise and signal."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, compilers
from optax_accum._core.dtypes import default_float
from optax_accum._core.leaves import by_path, for_each_leaf
from optax_accum._core.types import Tree

ALL = "all"  # the one group, where none are named
ByGroup = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Layers:
    """A group for leaves that stack layers along their first axis.

    Layer i is measured separately, as `name/i`.
    """

    name: str


Group = str | Layers


def names_of(groups: Tree, params: Tree) -> list[str]:
    """The names of the groups with leaves; all names if parameters have no leaves, as Optax's tools make some."""
    if not jax.tree.leaves(params):
        return [ALL] if groups is None else jax.tree.leaves(groups)
    names: dict[str, Group] = {}
    for group, leaf in _with_group(groups, params):
        for name in _names(group, jnp.shape(leaf)):
            if names.setdefault(name, group) != group:
                raise ValueError(
                    f"Two groups must not have one name: {name!r} is {names[name]!r} and {group!r}. Rename one."
                )
    return list(names)


def no_squares(groups: Tree, params: Tree) -> list[jax.Array]:
    """Zeros for the squares of each leaf that has a gradient: [], or [n] for n layers."""
    leaves: dict[Any, Any] = {}  # squares of one type begin with the same zeros: tracing is slow
    kinds = []
    for group, leaf in _with_group(groups, params):
        kinds.append((jnp.shape(leaf)[:1] if isinstance(group, Layers) else (), compilers.varying_axes(leaf)))
        leaves.setdefault(kinds[-1], leaf)
    zeros = {kind: _empty(leaf, kind[0]) for kind, leaf in leaves.items()}
    return [zeros[kind] for kind in kinds]


def _empty(param: Any, shape: tuple[int, ...]) -> jax.Array:
    """Zeros, which differ between devices where the parameter does; a lone zero would be a constant, of no mesh."""
    zeros = jnp.sum(jnp.zeros((1, *shape), default_float()), axis=0)
    return compilers.as_varying(zeros, compilers.varying_axes(param))


def squared_norms(groups: Tree, tree: Tree, like: jax.Array) -> ByGroup:
    """`|g|^2` of each group: one number, or one for each row where `like` is [d], of leaves [d, ...]."""

    def squared_norm(group: Group, leaf: Any) -> jax.Array:
        return arithmetic.squared_norm(jnp.asarray(leaf), like.dtype, like.ndim + isinstance(group, Layers))

    return _added((group, squared_norm(group, leaf)) for group, leaf in _with_group(groups, tree))


def by_group(groups: Tree, squares: Tree) -> ByGroup:
    return _added(_with_group(groups, squares))


def _added(squares: Iterable[tuple[Group, jax.Array]]) -> ByGroup:
    """The squares of leaves, added by group: [], or [d]; squares of layers come with one more axis, the last."""
    sums: ByGroup = {}
    for group, square in squares:
        for layer, name in enumerate(_names(group, square.shape[-1:])):
            part = square[..., layer] if isinstance(group, Layers) else square
            sums[name] = sums[name] + part if name in sums else part
    return sums


def _names(group: Group, shape: tuple[int, ...]) -> list[str]:
    return [f"{group.name}/{layer}" for layer in range(shape[0])] if isinstance(group, Layers) else [group]


def _with_group(groups: Tree, tree: Tree) -> list[tuple[Group, Any]]:
    groups = ALL if groups is None else groups
    each = jax.tree.leaves(
        for_each_leaf("groups", groups, tree, "Name one group for each branch; of a module of NNX, in an nnx.State.")
    )
    pairs = list(zip(each, by_path(tree), strict=True))
    for group, (path, leaf) in pairs:
        if not isinstance(group, Group):
            raise TypeError(f'groups must have strings as leaves: {group!r}. Name a group, such as "embedding".')
        if isinstance(group, Layers) and not jnp.ndim(leaf):
            raise ValueError(
                f"Layers are stacked along the first axis of a leaf: {group!r} has {path}, one number. Name a string "
                "for it."
            )
    return [(group, leaf) for group, (_, leaf) in pairs if jnp.issubdtype(getattr(leaf, "dtype", float), jnp.inexact)]


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


def with_sample(samples: Samples, squares: ByGroup, weight: Any, first: Any) -> Samples:
    """The sums with a sample in them, or only this where `first`. A gradient of weight 0 is no sample."""
    if squares.keys() != samples.squares.keys():
        raise ValueError(
            f"The groups of statistics must be those of the state: groups={list(squares)}, and the state has "
            f"{list(samples.squares)}. Between two windows, take those of a new state, new = tx.init(params): "
            "state._replace(samples=new.samples, statistics=new.statistics)."
        )
    return Samples(
        squares=arithmetic.add(samples.squares, squares, weight, first),
        number=arithmetic.add(samples.number, jnp.asarray(weight != 0), 1.0, first),
        latest=jax.tree.map(lambda new, old: new.astype(old.dtype), squares, samples.latest),
    )


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
