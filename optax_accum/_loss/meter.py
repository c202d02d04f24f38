"""What is measured of gradients: nothing, the weight of windows, or norms and noise."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, messages, sums
from optax_accum._core.state import AccumulationState
from optax_accum._core.types import Tree
from optax_accum._loss import noise
from optax_accum._loss.noise import ByGroup


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

    def no_squares(self, params: Tree) -> list[jax.Array]:
        """Zeros for the squares of each leaf that has a gradient, if a backward pass is to take them."""
        return []

    def by_group(self, squares: Tree) -> Any:
        return ()

    def squares(self, grads: Tree, like: jax.Array) -> Any:
        """The squares of groups of a gradient that is written: [], or of partial sums like `like`, [d]."""
        return ()

    def sample(self, samples: Any, squares: Any, weight: Any, first: Any) -> Any:
        """The sums with the squares of a micro-batch's gradient in them, or only these where `first`."""
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
        by_group = lambda: {name: scalar() for name in noise.names_of(self.groups, params)}
        return noise.Samples(by_group(), scalar(), by_group())

    def blank(self, params: Tree) -> dict[str, Any]:
        by_group = lambda: {name: jnp.zeros([]) for name in noise.names_of(self.groups, params)}
        statistics = noise.Statistics(by_group(), by_group(), by_group(), jnp.zeros([]), jnp.zeros([]))
        return super().blank(params) | {"statistics": statistics}

    def no_squares(self, params: Tree) -> list[jax.Array]:
        return noise.no_squares(self.groups, params)

    def by_group(self, squares: Tree) -> ByGroup:
        return noise.by_group(self.groups, squares)

    def squares(self, grads: Tree, like: jax.Array) -> ByGroup:
        return noise.squared_norms(self.groups, grads, like)

    def sample(self, samples: noise.Samples, squares: ByGroup, weight: Any, first: Any) -> noise.Samples:
        return noise.with_sample(samples, squares, weight, first)

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
