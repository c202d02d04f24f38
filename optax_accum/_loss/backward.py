"""The backward pass: a loss differentiated once, its gradient added inside that pass or after it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, compilers, flags
from optax_accum._core.types import Flag, Index, Tree, Weight
from optax_accum._loss import ratio
from optax_accum._loss.inside import Inside, Targets
from optax_accum._loss.parts import Parts
from optax_accum._loss.sinks import Finish
from optax_accum._loss.weighing import Weighing


def contribution(
    fun: Callable[[Tree], Parts],
    params: Tree,
    weighing: Weighing,
    index: Index,
    inside: Inside | None = None,
    scale: float = 1.0,
) -> tuple[jax.Array, "Backward", Parts]:
    """Differentiates a micro-batch: returns its weighed loss [], its backward pass, and the parts of `fun`'s result.

    `inside`: how gradients are added inside the backward pass; None if they are not. They are multiplied by `scale`.
    """
    scaled = functools.partial(forward, fun, weighing=weighing, index=index)
    run, targets = (inside.through(scaled, params), inside.targets(params)) if inside else (scaled, params)
    loss, backward, parts = jax.vjp(run, targets, has_aux=True)
    return loss, Backward(backward, jnp.full_like(loss, scale), inside), parts


def forward(fun: Callable[[Tree], Parts], params: Tree, weighing: Weighing, index: Index) -> tuple[jax.Array, Parts]:
    """The loss of a micro-batch as it is weighed, and the result of `fun`."""
    parts = fun(params)
    parts = parts._replace(loss=ratio.checked(parts.loss))
    return weighing.scaled(parts.loss, index), parts


class Backward:
    """The backward pass of a loss, which returns the gradient or adds it to references."""

    def __init__(self, backward: Any, cotangent: jax.Array, inside: Inside | None):
        self.backward, self.cotangent, self.inside = backward, cotangent, inside
        self.grads: Tree | None = None  # once they are written

    def gradient(self) -> Tree:
        if self.grads is None:
            (self.grads,) = self.backward(self.cotangent)
        return self.grads

    def add_to(self, refs: Sequence[Any], weight: Weight = 1.0) -> list[jax.Array]:
        """Adds `weight` times the gradient to the references of the inexact parameters, where each part of it arises.

        Returns the unweighted `|g|^2` of each, if these are measured.
        """
        assert self.inside is not None
        scales = self.inside.factor is None
        cotangent = self.cotangent * jnp.asarray(weight, self.cotangent.dtype) if scales else self.cotangent
        if totals := self.inside.totals:  # they have the references already
            cotangent, ready = compilers.ready_together(cotangent, [total.ref[...] for total in totals])
            for total, value in zip(totals, ready, strict=True):
                total.ref[...] = value
            (targets,) = self.backward(cotangent)
            for total in totals:
                total.finish_unused()
            squares: Sequence[Any] = targets.squares
        else:
            targets = Targets(list(refs), list(map(jax.new_ref, self.inside.squares)))
            self.backward.with_refs(targets)(cotangent)
            squares = list(map(jax.freeze, targets.squares))
        undone = arithmetic.reciprocal(weight) ** 2 if scales else 1.0
        return [square * undone for square in squares]


def add_to(
    acc: Tree,
    run: Callable[[Inside | None], tuple[Backward, Any]],
    weight: Weight,
    first: jax.Array,
    *,
    rest: Callable[[], Any],
    inside: Inside | None,
    vary: Callable[[Tree], Tree],
    together: bool = False,
) -> tuple[Tree, list[jax.Array], Any]:
    """Returns `acc + weight * gradient`, or `weight * gradient` where `first`; `|g|^2`; and the rest of `run`'s result.

    A micro-batch of weight 0 is not run, for its loss is often 0 / 0: the rest, which `rest` computes alone, is zeros.
    Where devices run `together`, it is run, and the weight, as the factor of `inside`, drops its gradient. The weight
    of a Ratio cannot be that factor: a second accumulator then has the sum without the gradient. `vary` is
    `device.vary`.
    """

    def begun() -> Tree:
        if inside:
            return compilers.zeroed(acc, first)
        return jax.tree.map(lambda total: jnp.where(first, jnp.zeros_like(total), total), acc)  # differentiable

    start = begun() if inside else acc

    def added() -> tuple[Tree, list[jax.Array], Any]:
        backward, returned = run(inside)
        if not inside:
            return arithmetic.add(start, backward.gradient(), weight, first), [], vary(returned)
        backward.cotangent, ready = compilers.ready_together(backward.cotangent, start)
        refs = jax.tree.map(jax.new_ref, ready)
        squares = backward.add_to(jax.tree.leaves(refs), weight)
        return jax.tree.map(jax.freeze, refs), vary(squares), vary(returned)

    def unrun() -> tuple[Tree, list[jax.Array], Any]:
        returned = arithmetic.zeros_of(jax.eval_shape(rest))
        return start if inside else begun(), vary(list(inside.squares) if inside else []), vary(returned)

    counts = flags.known(weight != 0)
    if isinstance(counts, bool):
        return added() if counts else unrun()
    if together:
        total, *others = added()
        if inside and inside.factor is None:
            total = flags.selected(counts, total, start)
        return total, *_where(counts, others)
    return compilers.branch(counts, added, unrun)


def add_last(
    acc: Tree,
    run: Callable[[Inside], tuple[Backward, Any]],
    weight: Weight | None,
    first: jax.Array,
    *,
    inside: Inside,
    finish: Sequence[Finish],
    vary: Callable[[Tree], Tree],
) -> tuple[Tree, list[jax.Array], Any]:
    """Adds the last gradient of a window, in a backward pass that also adds each sum over the devices: see `add_to`.

    It is run whatever its weight, for devices add a sum together. `finish`: one function per leaf, as in `Total`. For a
    Ratio pass `weight=None`; the result of `run` then has its weight last.
    """
    refs = jax.tree.map(jax.new_ref, compilers.zeroed(acc, first))
    counts_ref: Any = jax.new_ref(vary(jnp.array(True))) if weight is None else flags.known(weight != 0)
    backward, returned = run(inside.last(jax.tree.leaves(refs), finish, counts_ref))
    actual = returned[-1] if weight is None else weight
    counts = flags.known(actual != 0)
    if weight is None:  # the loss has run, the backward pass has not
        counts_ref[...] = counts
    squares = _where(counts, backward.add_to(jax.tree.leaves(refs), actual))
    if weight is not None:  # what was known to weigh nothing has no loss, as if it had not run
        returned = _where(counts, returned)
    return jax.tree.map(jax.freeze, refs), vary(squares), vary(returned)


def _where(counts: Flag, tree: Tree) -> Tree:
    return flags.selected(counts, tree, jax.tree.map(jnp.zeros_like, tree))
