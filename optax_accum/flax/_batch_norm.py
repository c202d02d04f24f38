"""Running statistics of BatchNorm: micro-batches' merged into the batch's."""

import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import unfreeze

from optax_accum._core import dtypes
from optax_accum._core.leaves import for_each_leaf
from optax_accum._core.types import Tree


def batch_moments(new: Tree, old: Tree, momentum: Tree) -> Tree:
    """Returns moments of BatchNorm that can be averaged over micro-batches.

    They are the moments of the running statistics that each micro-batch
    would leave.

    BatchNorm returned `new = momentum old + (1 - momentum) statistics`.
    With `d` and `v`, the micro-batch's mean and variance minus the running
    ones,

        d_i,    v_i + d_i^2

    are linear in the weights; they come in at least float32. Average them by
    rows (in `reduce_microbatches`, `"mean"`), then call
    `merge_batch_stats`. `TrainState` and the train steps do so themselves.

    Args:
      new: the statistics that the model returned for one micro-batch, given
        `old`: a tree whose `mean` and `var` stand side by side, as Flax has
        them. A leaf without a partner is averaged.
      old: the running statistics before the update: the same for all its
        micro-batches.
      momentum: of the BatchNorm layers: 0.99 is Flax's default. A number,
        or a prefix of the tree made of numbers.

    Raises:
      ValueError: the trees or shapes differ; a momentum that is not in
        [0, 1).
    """
    check_stats(old, new)
    new, old = unfreeze(new), unfreeze(old)
    momenta = momentum_of_each(momentum, old)
    wide = lambda leaf: jnp.asarray(leaf, dtypes.wide(jnp.result_type(leaf)))
    less = jax.tree.map(lambda momentum, new, old: (wide(new) - wide(old)) / (1 - momentum), momenta, new, old)
    return _map_pairs(lambda mean, var: (mean, var + mean**2), less)


def merge_batch_stats(moments: Tree, old: Tree, momentum: Tree) -> Tree:
    """Returns the running statistics of BatchNorm after one update.

    They come from the mean `batch_moments` of its micro-batches, by the law
    of total variance, and one momentum step whatever the number of
    micro-batches:

        mean = sum_i n_i mean_i / n
        var  = sum_i n_i (var_i + mean_i^2) / n - mean^2

    The moments are taken about the running mean, to lose less to rounding:
    a mean of 1000 with a variance of 1 would lose that
    variance in float32.

    It is exact for the inputs that a layer has seen, if `fun` calls it
    once: a layer that is called twice makes two momentum steps, and its
    variance is then only approximate. But BatchNorm still normalises each
    micro-batch with its own statistics, so gradients, and the inputs of a
    second BatchNorm, are not the whole batch's; `verify_step` says so.

    Args:
      moments: the mean of `batch_moments` over the micro-batches, weighted
        by their rows.
      old: the running statistics before the update.
      momentum: of the BatchNorm layers, as given to `batch_moments`.

    Guarantees:
      * One micro-batch: the statistics that the model gave, to rounding.
      * The layers are in inference mode: `old`, bit for bit.
      * Variances that rounding would make negative: zero.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_accum.flax import batch_moments, merge_batch_stats
      >>> old = {"mean": jnp.zeros(1), "var": jnp.ones(1)}
      >>> def moments(mean):  # of a constant micro-batch
      ...     new = {"mean": 0.1 * jnp.array([mean])}
      ...     new["var"] = 0.9 * old["var"]
      ...     return batch_moments(new, old, 0.9)
      >>> first, second = moments(-1.0), moments(1.0)
      >>> mean = {name: (first[name] + second[name]) / 2 for name in old}
      >>> merged = merge_batch_stats(mean, old, 0.9)
      >>> print(merged["var"])  # variance 1, though each half has none
      [1.]
    """
    old = unfreeze(old)
    momenta = momentum_of_each(momentum, old)
    less = _map_pairs(lambda mean, second: (mean, second - mean**2), moments)
    step = lambda momentum, less, old: (old + (1 - momentum) * less).astype(old.dtype)
    return _map_pairs(lambda mean, var: (mean, jnp.maximum(var, 0)), jax.tree.map(step, momenta, less, old))


def check_stats(old: Tree, new: Tree) -> None:
    """Raises if there are no old statistics, or if the tree or a shape has changed."""
    if old is None:
        raise ValueError(
            "The state has no batch_stats: pass batch_stats=variables['batch_stats'] to TrainState.create."
        )
    old, new = unfreeze(old), unfreeze(new)
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    if jax.tree.structure(old) != jax.tree.structure(new) or shapes(old) != shapes(new):
        raise ValueError(f"batch_stats must keep their tree and shapes: {shapes(old)} became {shapes(new)}.")


def momentum_of_each(momentum: Tree, stats: Tree) -> Tree:
    """The momentum of each leaf of `stats`; raises for one outside [0, 1), or one that belongs to no layer."""
    for number in jax.tree.leaves(momentum, is_leaf=lambda node: node is None):
        is_number = isinstance(number, numbers.Real) and number is not False
        if not is_number or not 0 <= float(number) < 1:
            raise ValueError(
                "Merging batch_stats over micro-batches needs the momentum of the BatchNorm layers, a number in "
                f"[0, 1): momentum={momentum!r}. Pass what the layers have; flax.linen.BatchNorm has 0.99 unless told "
                "otherwise."
            )
    remedy = "Pass one number, or give each layer its own."
    return for_each_leaf("momentum", unfreeze(momentum), unfreeze(stats), remedy, tree_of="batch_stats")


def _map_pairs(fun: Callable[[Any, Any], tuple[Any, Any]], stats: Tree) -> Tree:
    """Applies `fun` to each pair of `mean` and `var` in one dict; other leaves stay as they are."""
    if not isinstance(stats, Mapping):
        return stats
    mapped = {name: _map_pairs(fun, node) for name, node in stats.items()}
    if {"mean", "var"} <= mapped.keys() and not isinstance(mapped["mean"], Mapping):  # a module may be named so
        mapped["mean"], mapped["var"] = fun(mapped["mean"], mapped["var"])
    return mapped
