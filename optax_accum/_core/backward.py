"""Owns the backward pass: a loss differentiated once, its gradient added inside that pass or after it."""

import dataclasses
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, compilers, flows, matching, ratio, sinks, tracing
from optax_accum._core.arithmetic import Tree, Weight
from optax_accum._core.parts import Parts
from optax_accum._core.sinks import Finish, Lent, Sink, Total
from optax_accum._core.weighing import Index, Weighing

MAY_BE_AGAIN = "the result may be differentiated again, as it always may outside jax.jit"

_log = logging.getLogger("optax_accum")


class Contribution(NamedTuple):
    """One micro-batch, differentiated."""

    loss: jax.Array  # [], as it was scaled, in at least float32
    backward: "Backward"
    parts: Parts  # what `fun` returned; the count of a Ratio is checked


def contribution(
    fun: Callable[[Tree], Parts],
    params: Tree,
    weighing: Weighing,
    index: Index,
    inside: "Inside | None" = None,
) -> Contribution:
    """Differentiates a micro-batch: runs `fun(params)` forward, with its loss scaled as it is weighed.

    `inside` tells how gradients are added inside the backward pass, if they are.
    """

    def scaled(params: Tree) -> tuple[jax.Array, Parts]:
        parts = fun(params)
        parts = parts._replace(loss=ratio.checked(parts.loss))
        return weighing.scaled(parts.loss, index), parts

    if inside is None:
        loss, backward, parts = jax.vjp(scaled, params, has_aux=True)
    else:
        loss, backward, parts = jax.vjp(inside.through(scaled, params), inside.targets(params), has_aux=True)
    return Contribution(loss, Backward(backward, loss, inside), parts)


class Targets(NamedTuple):
    """What a loss is differentiated by, so that its gradients can be added inside the backward pass."""

    leaves: list[Any]  # of each inexact parameter: itself, or its sink
    squares: Sequence[Any]  # what takes |g|^2 of each, or nothing


@dataclasses.dataclass(frozen=True)
class Inside:
    """How the gradients of a loss are added inside the backward pass.

    Attributes:
      sunk: for each inexact parameter the dtype of its sink, or None where it is differentiated itself.
      squares: zeros for `|g|^2` of each: [], or [n] with one number for each slice; empty if nobody asks.
      factor: what each gradient is multiplied by where it arises; None if the loss is scaled instead.
      totals: the accumulators, if this is their last gradient.
    """

    sunk: tuple[Any, ...]
    squares: Sequence[jax.Array] = ()
    factor: Weight | None = None
    totals: Sequence[Total] = ()

    def last(self, refs: Sequence[Any], finish: Sequence[Finish], counts: Any = True) -> "Inside":
        """Returns how the last gradient is added, if it counts (see `Total`): where it arises, the sum is finished."""
        dtypes = tuple(jnp.dtype(ref.dtype) for ref in refs)
        totals = [Total(ref, one, counts) for ref, one in zip(refs, finish, strict=True)]
        return dataclasses.replace(self, sunk=dtypes, totals=totals)

    def targets(self, params: Tree) -> Targets:
        """Returns what the loss is differentiated by."""
        shape = lambda param: () if self.totals else jnp.shape(param)
        leaves = [
            param if dtype is None else sinks.empty(param, shape(param), dtype)
            for param, dtype in zip(_inexact(params), self.sunk, strict=True)
        ]
        return Targets(leaves, list(self.squares))

    def through(self, fun: Callable[[Tree], Any], params: Tree) -> Callable[[Targets], Any]:
        """Returns `fun(params)` as a function of the targets."""
        if all(dtype is None for dtype in self.sunk):
            filled = tracing.parted(params, _is_inexact)[1]
            return lambda targets: fun(filled(targets.leaves))
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(params)

        def run(targets: Targets) -> Any:
            none = [None] * len(targets.leaves)
            squares, totals = targets.squares or none, self.totals or none
            lent = iter(map(self._lent, _inexact(params), self.sunk, targets.leaves, squares, totals))
            values = [next(lent) if _is_inexact(leaf) else leaf for leaf in jax.tree.leaves(params)]
            results = sinks.run(program.jaxpr, program.consts, values)
            return jax.tree.unflatten(jax.tree.structure(shapes), results)

        return run

    def _lent(self, param: Any, dtype: Any, target: Any, square: Any, total: Total | None) -> Any:
        factor = None if self.factor is None else jnp.asarray(self.factor)
        return target if dtype is None else Lent(param, Sink(target, square, factor), total)


class Backward:
    """The backward pass of a loss: it returns the gradient, or adds it to references."""

    def __init__(self, backward: Any, loss: jax.Array, inside: Inside | None = None):
        self.backward, self.one, self.inside = backward, jnp.ones_like(loss), inside
        self.grads: Tree | None = None  # once they are written

    def gradient(self) -> Tree:
        """Returns the gradient; asked twice, the same."""
        if self.grads is None:
            (self.grads,) = self.backward(self.one)
        return self.grads

    def add_to(self, refs: Sequence[Any], weight: Weight = 1.0) -> list[jax.Array]:
        """Adds `weight` times the gradient to the references of the inexact parameters, where each part of it arises.

        Returns `|g|^2` of each, without the weight, if somebody asked.
        """
        assert self.inside is not None
        scales = self.inside.factor is None
        one = self.one * jnp.asarray(weight, self.one.dtype) if scales else self.one
        if totals := self.inside.totals:  # they have the references already
            one, ready = compilers.ready_together(one, [total.ref[...] for total in totals])
            for total, value in zip(totals, ready, strict=True):
                total.ref[...] = value
            (targets,) = self.backward(one)
            for total in totals:
                total.finish_unused()
            squares: Sequence[Any] = targets.squares
        else:
            own = list(map(jax.new_ref, self.inside.squares))
            self.backward.with_refs(Targets(list(refs), own))(one)
            squares = list(map(jax.freeze, own))
        undone = arithmetic.reciprocal(weight) ** 2 if scales else 1.0
        return [square * undone for square in squares]


def add_to(
    acc: Tree,
    run: Callable[[Inside | None], tuple[Backward, Any]],
    weight: Weight,
    first: jax.Array,
    *,
    inside: Inside | None,
    vary: Callable[[Tree], Tree],
) -> tuple[Tree, list[jax.Array], Any]:
    """Returns `acc + weight * gradient`, or `weight * gradient` where `first`; `|g|^2`; and what `run` gives beside.

    What weighs nothing is not run, for its loss is often 0 / 0: what comes beside it is zeros. `vary` is that of the
    device.
    """

    def begun() -> Tree:
        if inside:
            return compilers.zeroed(acc, first)
        return jax.tree.map(lambda total: jnp.where(first, jnp.zeros_like(total), total), acc)  # has a derivative

    start = begun() if inside else acc

    def added() -> tuple[Tree, list[jax.Array], Any]:
        backward, beside = run(inside)
        if not inside:
            return arithmetic.add(start, backward.gradient(), weight, first), [], vary(beside)
        backward.one, ready = compilers.ready_together(backward.one, start)
        refs = jax.tree.map(jax.new_ref, ready)
        squares = backward.add_to(jax.tree.leaves(refs), weight)
        return jax.tree.map(jax.freeze, refs), vary(squares), vary(beside)

    def unrun() -> tuple[Tree, list[jax.Array], Any]:
        beside = arithmetic.zeros_of(jax.eval_shape(lambda: run(inside)[1]))
        return start if inside else begun(), vary(list(inside.squares) if inside else []), vary(beside)

    counts = tracing.known(weight != 0)
    if isinstance(counts, bool):
        return added() if counts else unrun()
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

    It is run whatever it weighs, for devices add a sum together. `finish` is, for each leaf, what is to become of the
    sum. Where only a loss that has run tells its weight, `weight` is None, and comes last beside the gradient.
    """
    refs = jax.tree.map(jax.new_ref, compilers.zeroed(acc, first))
    told: Any = jax.new_ref(vary(jnp.array(True))) if weight is None else tracing.known(weight != 0)
    backward, beside = run(inside.last(jax.tree.leaves(refs), finish, told))
    known = beside[-1] if weight is None else weight
    counts = tracing.known(known != 0)
    if weight is None:  # the loss has run, the backward pass has not
        told[...] = counts
    ran = backward.add_to(jax.tree.leaves(refs), known), beside
    squares, beside = tracing.selected(counts, ran, jax.tree.map(jnp.zeros_like, ran))
    return jax.tree.map(jax.freeze, refs), vary(squares), vary(beside)


def added_inside(
    asked: bool | None,
    params: Tree,
    acc: Tree,
    program: Any,
    squares: Sequence[jax.Array] = (),
    factor: Weight | None = None,
    unless: str | None = None,
) -> Inside | None:
    """Returns how gradients are added inside the backward pass; None where they are not, an error where that is asked.

    `program` is the loss, traced, with its constants; `squares` and `factor` are as in `Inside`; `unless` is why they
    are not to be.
    """
    path = matching.narrower(params, acc)
    why_not = compilers.why_not_in_place()
    if path is not None:
        why_not = (
            "needs accumulators at least as wide as the parameters, for a gradient is rounded before it is added: at "
            f"{path} they are narrower (parameters {arithmetic.dtypes(params)}, accumulators {arithmetic.dtypes(acc)})"
        )
    nests = not unless and flows.has_loop_or_branch(program.jaxpr)
    if why_not is None and nests and tracing.is_batched((params, acc, program.consts)):
        why_not = "is not possible under jax.vmap, for JAX batches no loop over references, nor a branch"
    if asked and why_not:
        raise TypeError(f"in_place=True {why_not}. Leave in_place=None.")
    if unless or why_not or asked is False:
        log_after(unless or (f"adding inside it {why_not}" if why_not else "in_place=False"))
        return None
    _log_inside(params, program.jaxpr)
    always = bool(squares) or factor is not None or not compilers.ADDS_TO_SLICES
    needs = map(operator.or_, flows.casts(program.jaxpr), flows.breaks(program.jaxpr))
    leaves = [pair for pair in zip(jax.tree.leaves(params), needs, strict=True) if _is_inexact(pair[0])]
    if not leaves:
        return None
    sunk = [
        total.dtype if always or needs or total.dtype != jnp.result_type(leaf) else None
        for (leaf, needs), total in zip(leaves, jax.tree.leaves(acc), strict=True)
    ]
    return Inside(tuple(sunk), squares, factor)


def log_after(reason: str) -> None:
    """Tells who asks why gradients are added after the backward pass."""
    _log.info("Gradients are added after the backward pass, as a tree: %s.", reason)


def _log_inside(params: Tree, program: Any) -> None:
    """Tells who asks where gradients are added inside the backward pass."""
    if not _log.isEnabledFor(logging.INFO):
        return
    pairs = zip(jax.tree.leaves_with_path(params), flows.leave_whole(program), strict=True)
    whole = [f"{jax.tree_util.keystr(path)} (`{function}`)" for (path, _), function in pairs if function]
    but = f" Some are written first, by the function in brackets: {', '.join(whole)}." if whole else ""
    _log.info("Gradients are added inside the backward pass.%s", but)


def at_leaves(params: Tree, squares: Sequence[jax.Array]) -> Tree:
    """Replaces each parameter that has a gradient by its entry of `squares`."""
    return tracing.parted(params, _is_inexact)[1](squares)


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _inexact(params: Tree) -> list[Any]:
    """Returns the parameters that have a gradient."""
    return [leaf for leaf in jax.tree.leaves(params) if _is_inexact(leaf)]


def bends(jaxpr: Any) -> bool:
    """Returns whether a factor in the cotangent could give another gradient than one on the gradient.

    Where a number has a shorter range than float32 (float16, float8), a large weight overflows and a small one
    vanishes; and a backward pass that the user wrote need not be linear (a clip).
    """
    widest = jnp.finfo(jnp.float32).maxexp
    for equation in tracing.equations(jaxpr):
        dtypes = [getattr(var.aval, "dtype", jnp.dtype(bool)) for var in equation.outvars]
        if any(jnp.issubdtype(d, jnp.floating) and jnp.finfo(d).maxexp < widest for d in dtypes):
            return True
        if equation.primitive.name.startswith("custom_vjp_call"):
            return True
    return False
