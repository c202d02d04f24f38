"""Owns what is measured of gradients: nothing, the weight of windows, or norms and noise. Knows no window or device."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, compilers, sinks
from optax_accum._core.arithmetic import Tree
from optax_accum._core.noise import ByGroup, Statistics, check_decay, smooth
from optax_accum._core.seen import new_seen, see
from optax_accum._core.state import AccumulationState, default_float

ALL = "all"  # the one group, where none are named


@dataclasses.dataclass(frozen=True)
class Layers:
    """A group for leaves that stack layers along their first axis.

    Layer i is measured apart, as `name/i`.
    """

    name: str


Group = str | Layers


@dataclasses.dataclass(frozen=True)
class Options:
    """What `statistics=` asks for.

    Attributes:
      decay: of the noise and the signal from one window to the next, each
        smoothed for itself: 0.99 is a mean over about the last 100 windows.
      groups: names for groups of leaves, which are measured apart: a prefix
        of the tree of the parameters with strings as leaves, as
        `optax.partition` takes, or `Layers("block")` where a leaf stacks
        layers, each of which is then a group. By default all leaves are one
        group.

    Raises:
      ValueError: a decay outside [0, 1).
    """

    decay: float = 0.99
    groups: Tree = None

    def __post_init__(self) -> None:
        check_decay(self.decay)


class Samples(NamedTuple):
    """Sums over the window, of each device its own: a gradient with a weight other than 0 is a sample.

    While `mini_step` is 0 they are those of the window before, which the next micro-step overwrites.
    """

    squares: ByGroup  # sum(w |g|^2)
    number: jax.Array  # of samples
    latest: ByGroup  # |g|^2 of the last micro-step, whatever became of it


class Meter:
    """What is measured of gradients. This one measures nothing."""

    fields: tuple[str, ...] = ()  # of the state, that it fills
    measures = False  # whether gradients are measured

    def samples(self, params: Tree, scalar: Callable[[], jax.Array]) -> Any:
        """Returns the sums before the first micro-batch; `scalar()` is an empty one."""
        return ()

    def blank(self, params: Tree) -> dict[str, Any]:
        """Returns what is known before the first window, by field of the state."""
        return {}

    def no_squares(self, params: Tree) -> list[jax.Array]:
        """Returns zeros for the squares of each leaf that has a gradient, where a backward pass is to take them."""
        return []

    def by_group(self, squares: Tree) -> Any:
        """Returns the squares of groups, from those of leaves."""
        return ()

    def squares(self, grads: Tree, like: jax.Array) -> Any:
        """Returns the squares of groups of a gradient that is written: [], or of partial sums like `like`, [d]."""
        return ()

    def sample(self, samples: Any, squares: Any, weight: Any, first: Any) -> Any:
        """Returns the sums with the squares of a micro-batch's gradient in them, or only these where `first`."""
        return samples

    def learn(self, state: AccumulationState, samples: Any, total: Tree, weight: jax.Array) -> dict[str, Any]:
        """Returns what is known after a window whose gradients add up to `total`, by field of the state."""
        return {}

    def beside(self, value: Any, samples: Any, mean: Tree, weight: jax.Array) -> Any:
        """Returns the value of a call whose gradient is `mean`, with the statistics if they are measured."""
        return value

    def refuse(self, why: str) -> None:
        """Raises an error where gradients cannot be measured, if they are to be."""


class Counting(Meter):
    """Counts the weight of windows."""

    fields = ("seen",)

    def blank(self, params: Tree) -> dict[str, Any]:
        return {"seen": new_seen()}

    def learn(self, state: AccumulationState, samples: Any, total: Tree, weight: jax.Array) -> dict[str, Any]:
        return {"seen": see(state.seen, jnp.asarray(weight, state.seen.rest.dtype))}


class Measuring(Counting):
    """Counts, and measures norms and noise, for which it reads each gradient once more."""

    fields = ("seen", "statistics")
    measures = True

    def __init__(self, options: Options):
        self.options = options

    def samples(self, params: Tree, scalar: Callable[[], jax.Array]) -> Samples:
        by_group = lambda: {name: scalar() for name in _groups(self.options, params)}
        return Samples(by_group(), scalar(), by_group())

    def blank(self, params: Tree) -> dict[str, Any]:
        by_group = lambda: {name: jnp.zeros([]) for name in _groups(self.options, params)}
        statistics = Statistics(by_group(), by_group(), by_group(), jnp.zeros([]), jnp.zeros([]))
        return super().blank(params) | {"statistics": statistics}

    def no_squares(self, params: Tree) -> list[jax.Array]:
        leaves: dict[Any, Any] = {}  # those whose squares are of one type begin with the same zeros: to trace is dear
        kinds = []
        for group, leaf in _named(self.options, params):
            kinds.append((jnp.shape(leaf)[:1] if isinstance(group, Layers) else (), compilers.varying_axes(leaf)))
            leaves.setdefault(kinds[-1], leaf)
        zeros = {kind: sinks.empty(leaf, kind[0], default_float()) for kind, leaf in leaves.items()}
        return [zeros[kind] for kind in kinds]

    def by_group(self, squares: Tree) -> ByGroup:
        return _added(_named(self.options, squares))

    def squares(self, grads: Tree, like: jax.Array) -> ByGroup:
        return squared_norms(self.options, grads, like)

    def sample(self, samples: Samples, squares: ByGroup, weight: Any, first: Any) -> Samples:
        return add(samples, squares, weight, first)

    def learn(self, state: AccumulationState, samples: Samples, total: Tree, weight: jax.Array) -> dict[str, Any]:
        weight = jnp.asarray(weight, state.seen.rest.dtype)
        squares = squared_norms(self.options, total, like=weight)  # of the mean, it would be written
        squares = jax.tree.map(lambda square: square * arithmetic.reciprocal(weight) ** 2, squares)
        statistics = smooth(state.statistics, alone(samples, squares, weight, state.mini_step), self.options.decay)
        return super().learn(state, samples, total, weight) | {"statistics": statistics}

    def beside(self, value: Any, samples: Samples, mean: Tree, weight: jax.Array) -> Any:
        return value, alone(samples, squared_norms(self.options, mean, like=weight), weight, samples.number)

    def refuse(self, why: str) -> None:
        raise ValueError(why)


def as_meter(statistics: Any, needs: tuple[str, ...] = ()) -> Meter:
    """Returns what `statistics=` asks for, and the fields of the state that a schedule needs."""
    if not isinstance(statistics, bool | Options):
        raise TypeError(
            f"statistics must be a bool, or optax_accum.statistics.Options: statistics={statistics!r}. Pass True."
        )
    if statistics:
        return Measuring(statistics if isinstance(statistics, Options) else Options())
    if "statistics" in needs:
        raise ValueError("every_by_noise reads the noise scale: statistics=False. Pass statistics=True.")
    return Counting() if "seen" in needs else Meter()


def squared_norms(options: Options, tree: Tree, like: jax.Array) -> ByGroup:
    """Returns `|g|^2` of each group: one number, or one for each row where `like` is [d], of leaves [d, ...]."""
    return _added((group, _squared_norm(leaf, like, group)) for group, leaf in _named(options, tree))


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
        latest=jax.tree.map(lambda new, old: new.astype(old.dtype), squares, samples.latest),
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
    steps = jnp.maximum(jnp.asarray(steps, weight.dtype), 1)  # none where nothing counts
    return Statistics(squares, noise, signal, known.astype(weight.dtype), weight / steps)


def _groups(options: Options, params: Tree) -> list[str]:
    """Returns the names of the groups; of all where parameters have no leaves, as those that Optax's tools make."""
    if not jax.tree.leaves(params):
        return [ALL] if options.groups is None else jax.tree.leaves(options.groups)
    return [name for group, leaf in _named(options, params) for name in _names(group, jnp.shape(leaf))]


def _names(group: Group, shape: tuple[int, ...]) -> list[str]:
    """Returns the names of the groups that a leaf belongs to: one, or one for each of its layers."""
    return [f"{group.name}/{layer}" for layer in range(shape[0])] if isinstance(group, Layers) else [group]


def _added(squares: Iterable[tuple[Group, jax.Array]]) -> ByGroup:
    """Returns the squares of leaves, added by group: [], or [d]; of layers they come with one more axis, the last."""
    found: ByGroup = {}
    for group, square in squares:
        layered = isinstance(group, Layers)
        for layer, name in enumerate(_names(group, square.shape[-1:])):
            part = square[..., layer] if layered else square
            found[name] = found[name] + part if name in found else part
    return found


def _named(options: Options, tree: Tree) -> list[tuple[Group, Any]]:
    """Returns each leaf that has a gradient with its group."""
    groups = ALL if options.groups is None else options.groups
    names = jax.tree.leaves(arithmetic.for_each_leaf("groups", groups, tree, "Name one group for each branch."))
    for name in names:
        if not isinstance(name, Group):
            raise TypeError(f'groups must have strings as leaves: {name!r}. Name a group, such as "embedding".')
    pairs = zip(names, jax.tree.leaves(tree), strict=True)
    return [(name, leaf) for name, leaf in pairs if jnp.issubdtype(getattr(leaf, "dtype", float), jnp.inexact)]


def _squared_norm(leaf: Any, like: jax.Array, group: Group) -> jax.Array:
    """Returns the sum of squares of a leaf, in the dtype of `like`, whose axes it leaves, and that of layers."""
    leaf = jnp.asarray(leaf)
    parts = (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)
    wide = [part.astype(like.dtype) for part in parts]
    left = like.ndim + isinstance(group, Layers)
    return sum(jnp.sum(part * part, axis=tuple(range(left, part.ndim))) for part in wide)  # type: ignore[return-value]
