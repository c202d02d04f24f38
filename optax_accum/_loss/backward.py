"""The backward pass of a micro-batch: its gradient, or sums to which it is added where it arises."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import adding, arithmetic, compilers, dtypes, flags
from optax_accum._core.adding import Finish
from optax_accum._core.leaves import is_inexact, parted
from optax_accum._core.types import Flag, Tree, Weight
from optax_accum._loss import ratio
from optax_accum._loss.ratio import LossParts
from optax_accum._loss.weighing import ByCount, ByWeight

Fun = Callable[[Tree], LossParts]  # of the parameters


def contribution(fun: Fun, params: Tree, weighing: ByWeight | ByCount) -> tuple[jax.Array, "Backward", LossParts]:
    """Differentiates a micro-batch: returns its weighed loss [], its backward pass, and the parts of `fun`'s result."""
    inexact, filled = parted(params, is_inexact)
    run = lambda inexact: forward(fun, filled(inexact), weighing)
    loss, backward, parts = jax.vjp(run, inexact, has_aux=True)
    return loss, Backward(backward, jnp.ones_like(loss), params), parts


def forward(fun: Fun, params: Tree, weighing: ByWeight | ByCount) -> tuple[jax.Array, LossParts]:
    """The loss of a micro-batch as it is weighed, and the result of `fun`."""
    parts = fun(params)
    parts = parts._replace(loss=ratio.checked(parts.loss))
    return weighing.scaled(parts.loss), parts


@dataclasses.dataclass(frozen=True)
class Adding:
    """How a gradient is added to sums.

    Attributes:
      squares: zeros for `|g|^2` of each inexact parameter: [], or [n] with one number for each slice; empty if nothing
        is measured.
      scales: whether the weight multiplies each gradient where it arises; else it multiplies the loss.
      finish: for each the function that finishes its sum (see `adding.Sum`), if this is its last gradient.
    """

    squares: Sequence[jax.Array] = ()
    scales: bool = False
    finish: Sequence[Finish] | None = None


class Backward:
    """The backward pass of a loss, which returns the gradient or adds it to sums."""

    def __init__(self, backward: Any, cotangent: jax.Array, params: Tree):
        self.backward, self.cotangent, self.params = backward, cotangent, params

    def gradient(self) -> Tree:
        """The gradient; that of an integer is a zero of a type of its own."""
        return dtypes.gradients_like(self.params, self.backward(self.cotangent)[0])

    def add_to(self, totals: Sequence[Any], how: Adding, weight: Weight, counts: Flag) -> tuple[list[Any], list[Any]]:
        """Adds `weight` times the gradient to totals, where each part of it arises: one for each inexact parameter.

        If it does not count, zeros are added. Returns the totals, and the unweighted `|g|^2` of each if it is measured.
        """
        cotangent = self.cotangent if how.scales else self.cotangent * jnp.asarray(weight, self.cotangent.dtype)
        scale = jnp.asarray(weight if how.scales else 1.0, dtypes.default_float())
        scale = scale if counts is True else jnp.where(counts, scale, 0)
        scale = scale if how.scales or counts is not True else None
        program = jax.make_jaxpr(lambda cotangent: self.backward(cotangent)[0])(cotangent)
        zeros = how.squares or [None] * len(totals)
        finish = how.finish or [None] * len(totals)
        sums = [adding.Sum(total, zero, scale, end) for total, zero, end in zip(totals, zeros, finish, strict=True)]
        adding.run(program, [cotangent], sums)
        undone = 1.0 if how.scales else arithmetic.reciprocal(weight) ** 2
        return [one.total for one in sums], [one.square * undone for one in sums if how.squares]


def add_to(
    acc: Tree,
    run: Callable[[], tuple[Backward, Any]],
    weight: Weight | None,
    first: jax.Array,
    *,
    rest: Callable[[], Any],
    how: Adding | None,
    vary: Callable[[Tree], Tree],
    together: bool = False,
) -> tuple[Tree, list[jax.Array], Any]:
    """Returns `acc + weight * gradient`, or `weight * gradient` where `first`; `|g|^2`; and the rest of `run`'s result.

    A micro-batch of weight 0 is not run, for its loss is often 0 / 0: the rest, which `rest` computes alone, is zeros.
    Where devices run `together`, or add a sum together in this backward pass, it is run, and adds zeros. For a Ratio
    pass `weight=None`: the result of `run` then has its amount last. Without `how` the gradient is written before it is
    added. `vary` is `device.vary`.
    """
    start = compilers.zeroed(acc, first) if how else acc

    def added(weight: Weight | None = weight, *, selects: bool = False) -> tuple[Tree, list[jax.Array], Any]:
        backward, returned = run()
        actual = returned[-1].grad_weight if weight is None else weight
        counts = flags.known(actual != 0) if selects else True
        kept = returned if weight is None else _where(counts, returned)  # a known weight of 0: as if it had not run
        if not how:
            total = arithmetic.add(start, backward.gradient(), actual, first)
            return flags.selected(counts, total, acc), [], vary(kept)
        backward.cotangent, ready = compilers.ready_together(backward.cotangent, start)
        leaves, treedef = jax.tree.flatten(ready)
        totals, squares = backward.add_to(leaves, how, actual, counts)
        return treedef.unflatten(totals), vary(_where(counts, squares)), vary(kept)

    def unrun() -> tuple[Tree, list[jax.Array], Any]:
        returned = arithmetic.zeros_of(jax.eval_shape(rest))
        if how:
            return start, vary(list(how.squares)), vary(returned)
        return jax.tree.map(lambda sum_: jnp.where(first, jnp.zeros_like(sum_), sum_), acc), [], vary(returned)

    if weight is None or (how and how.finish):
        return added(selects=True)
    counts = flags.known(weight != 0)
    if isinstance(counts, bool):
        return added() if counts else unrun()
    return added(selects=True) if together else compilers.branch(counts, added, unrun)


def _where(counts: Flag, tree: Tree) -> Tree:
    return flags.selected(counts, tree, jax.tree.map(jnp.zeros_like, tree))
