"""What is measured of gradients: nothing, the weight of windows, or norms and noise by group of leaves."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, compilers, messages, sums
from optax_accum._core.dtypes import default_float
from optax_accum._core.leaves import by_path, for_each_leaf
from optax_accum._core.state import AccumulationState
from optax_accum._core.types import Tree
from optax_accum._loss import noise
from optax_accum._loss.noise import ALL, ByGroup


@dataclasses.dataclass(frozen=True)
class Layers:
    """A group for leaves that stack layers along their first axis.

    Layer i is measured separately, as `name/i`.
    """

    name: str


Group = str | Layers


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `statistics=`.

    Attributes:
      decay: how much of noise and signal, smoothed separately, a window
        keeps: 0.99 averages about the last 100 windows.
      groups: names for groups of leaves, which are measured separately: a
        prefix of the tree of the parameters with strings as leaves, as
        `optax.partition` takes, or `Layers("block")` where a leaf stacks
        layers, each of which is then a group. By default all leaves are one
        group.

    Raises:
      ValueError: a decay outside [0, 1).
    """

    decay: float = 0.99
    groups: Tree = None

    def __post_init__(self) -> None:
        noise.check_decay(self.decay)


class Meter:
    """Measures gradients. This base class measures nothing."""

    fields: tuple[str, ...] = ()  # of the state, filled by this meter
    measures = False  # whether gradients are measured

    def samples(self, params: Tree, scalar: Callable[[], jax.Array]) -> Any:
        """The sums before the first micro-batch; `scalar()` is an empty one."""
        return ()

    def blank(self, params: Tree) -> dict[str, Any]:
        """The initial values of its state fields."""
        return {}

    def zero_squares(self, params: Tree) -> list[jax.Array]:
        """Zeros for the squares of each leaf that has a gradient: [], or [n] for n layers; none if none are taken."""
        return []

    def by_group(self, squares: Tree) -> Any:
        return ()

    def squares(self, grads: Tree, like: jax.Array) -> Any:
        """The squares of groups of a gradient that lies in memory: [], or of partial sums like `like`, [d]."""
        return ()

    def sample(self, samples: Any, squares: Any, weight: Any, first: Any) -> Any:
        """The sums with the squares of a micro-batch's gradient in them, or only these where `first`.

        A gradient of weight 0 is no sample.
        """
        return samples

    def learn(self, state: AccumulationState, samples: Any, total: Tree, weight: jax.Array) -> dict[str, Any]:
        """The new values of its state fields after a window whose gradients add up to `total`."""
        return {}

    def with_statistics(self, value: Any, samples: Any, mean: Tree, weight: jax.Array) -> Any:
        """The value of a call whose gradient is `mean`, with the statistics if they are measured."""
        return value

    def refuse(self, why: str) -> None:
        """Raises an error if gradients are to be measured."""

    def warn_of_one_sample(self) -> None:
        """Warns, if noise is to be measured, that each window has one gradient, which tells nothing of noise."""


class Counting(Meter):
    """Counts the weight of windows."""

    fields = ("seen",)

    def blank(self, params: Tree) -> dict[str, Any]:
        return {"seen": sums.Seen(jnp.zeros([], jnp.int32), jnp.zeros([]))}

    def learn(self, state: AccumulationState, samples: Any, total: Tree, weight: jax.Array) -> dict[str, Any]:
        return {"seen": sums.see(state.seen, jnp.asarray(weight, state.seen.rest.dtype))}


class Measuring(Counting):
    """Counts, and measures norms and noise, for which it reads each gradient once more."""

    fields = ("seen", "statistics")
    measures = True

    def __init__(self, options: Options):
        self.groups, self.decay = options.groups, options.decay

    def samples(self, params: Tree, scalar: Callable[[], jax.Array]) -> noise.Samples:
        by_group = lambda: {name: scalar() for name in self._names(params)}
        return noise.Samples(by_group(), scalar(), by_group())

    def blank(self, params: Tree) -> dict[str, Any]:
        by_group = lambda: {name: jnp.zeros([]) for name in self._names(params)}
        statistics = noise.Statistics(by_group(), by_group(), by_group(), jnp.zeros([]), jnp.zeros([]))
        return super().blank(params) | {"statistics": statistics}

    def zero_squares(self, params: Tree) -> list[jax.Array]:
        leaves: dict[Any, Any] = {}  # squares of one type begin with the same zeros: tracing is slow
        kinds = []
        for group, leaf in self._with_group(params):
            kinds.append((jnp.shape(leaf)[:1] if isinstance(group, Layers) else (), compilers.varying_axes(leaf)))
            leaves.setdefault(kinds[-1], leaf)
        zeros = {kind: _empty(leaf, kind[0]) for kind, leaf in leaves.items()}
        return [zeros[kind] for kind in kinds]

    def by_group(self, squares: Tree) -> ByGroup:
        return _added(self._with_group(squares))

    def squares(self, grads: Tree, like: jax.Array) -> ByGroup:
        def squared_norm(group: Group, leaf: Any) -> jax.Array:
            return arithmetic.squared_norm(jnp.asarray(leaf), like.dtype, like.ndim + isinstance(group, Layers))

        return _added((group, squared_norm(group, leaf)) for group, leaf in self._with_group(grads))

    def sample(self, samples: noise.Samples, squares: ByGroup, weight: Any, first: Any) -> noise.Samples:
        if squares.keys() != samples.squares.keys():
            raise ValueError(
                f"The groups of statistics must be those of the state: groups={list(squares)}, and the state has "
                f"{list(samples.squares)}. Between two windows, take those of a new state, new = tx.init(params): "
                "state._replace(samples=new.samples, statistics=new.statistics)."
            )
        return noise.Samples(
            squares=arithmetic.add(samples.squares, squares, weight, first),
            number=arithmetic.add(samples.number, jnp.asarray(weight != 0), 1.0, first),
            latest=jax.tree.map(lambda new, old: new.astype(old.dtype), squares, samples.latest),
        )

    def learn(self, state: AccumulationState, samples: noise.Samples, total: Tree, weight: jax.Array) -> dict[str, Any]:
        weight = jnp.asarray(weight, state.seen.rest.dtype)
        squares = self.squares(total, like=weight)  # the mean would be written to memory
        squares = jax.tree.map(lambda square: square * arithmetic.reciprocal(weight) ** 2, squares)
        statistics = noise.measure_window(samples, squares, weight, state.mini_step)
        learnt = {"statistics": noise.smooth(state.statistics, statistics, self.decay)}
        return super().learn(state, samples, total, weight) | learnt

    def with_statistics(self, value: Any, samples: noise.Samples, mean: Tree, weight: jax.Array) -> Any:
        return value, noise.measure_window(samples, self.squares(mean, like=weight), weight, samples.number)

    def refuse(self, why: str) -> None:
        raise ValueError(why)

    def warn_of_one_sample(self) -> None:
        messages.warn(
            "Noise is measured between the gradients of micro-batches or devices, and here is one of each: noise, "
            "signal and the noise scale will be NaN (norms are measured). Make two or more micro-batches."
        )

    def _names(self, params: Tree) -> list[str]:
        """The names of the groups with leaves; all names if parameters have no leaves, as Optax's tools make some."""
        if not jax.tree.leaves(params):
            return [ALL] if self.groups is None else jax.tree.leaves(self.groups)
        names: dict[str, Group] = {}
        for group, leaf in self._with_group(params):
            for name in _names_in(group, jnp.shape(leaf)):
                if names.setdefault(name, group) != group:
                    raise ValueError(
                        f"Two groups must not have one name: {name!r} is {names[name]!r} and {group!r}. Rename one."
                    )
        return list(names)

    def _with_group(self, tree: Tree) -> list[tuple[Group, Any]]:
        """The leaves that have a gradient, each with its group."""
        groups = ALL if self.groups is None else self.groups
        remedy = "Name one group for each branch; of a module of NNX, in an nnx.State."
        each = jax.tree.leaves(for_each_leaf("groups", groups, tree, remedy))
        pairs = list(zip(each, by_path(tree), strict=True))
        for group, (path, leaf) in pairs:
            if not isinstance(group, Group):
                raise TypeError(f'groups must have strings as leaves: {group!r}. Name a group, such as "embedding".')
            if isinstance(group, Layers) and not jnp.ndim(leaf):
                raise ValueError(
                    f"Layers are stacked along the first axis of a leaf: {group!r} has {path}, one number. Name a "
                    "string for it."
                )
        is_inexact = lambda leaf: jnp.issubdtype(getattr(leaf, "dtype", float), jnp.inexact)
        return [(group, leaf) for group, (_, leaf) in pairs if is_inexact(leaf)]


def _empty(param: Any, shape: tuple[int, ...]) -> jax.Array:
    """Zeros, which differ between devices where the parameter does; a lone zero would be a constant, of no mesh."""
    zeros = jnp.sum(jnp.zeros((1, *shape), default_float()), axis=0)
    return compilers.as_varying(zeros, compilers.varying_axes(param))


def _added(squares: Iterable[tuple[Group, jax.Array]]) -> ByGroup:
    """The squares of leaves, added by group: [], or [d]; squares of layers come with one more axis, the last."""
    added: ByGroup = {}
    for group, square in squares:
        for layer, name in enumerate(_names_in(group, square.shape[-1:])):
            part = square[..., layer] if isinstance(group, Layers) else square
            added[name] = added[name] + part if name in added else part
    return added


def _names_in(group: Group, shape: tuple[int, ...]) -> list[str]:
    return [f"{group.name}/{layer}" for layer in range(shape[0])] if isinstance(group, Layers) else [group]


def as_meter(statistics: Any, needs: tuple[str, ...] = ()) -> Meter:
    """The meter for `statistics=`, which also fills the state fields that a schedule needs."""
    if not isinstance(statistics, bool | Options):
        raise TypeError(
            f"statistics must be a bool, or optax_accum.statistics.Options: statistics={statistics!r}. Pass True."
        )
    if statistics:
        return Measuring(statistics if isinstance(statistics, Options) else Options())
    if "statistics" in needs:
        raise ValueError("every_by_noise reads the noise scale: statistics=False. Pass statistics=True.")
    return Counting() if "seen" in needs else Meter()
