"""Whether gradients are added inside the backward pass, to which accumulator, and why not."""

import dataclasses
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core import compilers, dtypes, matching, tracing
from optax_accum._core.leaves import by_path, is_inexact, parted
from optax_accum._core.traced import Traced
from optax_accum._core.types import Tree, Weight
from optax_accum._loss import follow, sinks
from optax_accum._loss.sinks import Finish, Lent, Sink, Total
from optax_accum._loss.weighing import Weighing

MAY_BE_AGAIN = "the result may be differentiated again, as it always may outside jax.jit"

_log = logging.getLogger("optax_accum")


class Targets(NamedTuple):
    """The inputs by which a loss is differentiated, so that the backward pass adds its gradients."""

    leaves: list[Any]  # of each inexact parameter: itself, or its sink
    squares: Sequence[Any]  # of each, takes |g|^2; empty if nothing is measured


@dataclasses.dataclass(frozen=True)
class Inside:
    """How the gradients of a loss are added inside the backward pass.

    Attributes:
      sunk: for each inexact parameter the dtype of its sink, or None where it is differentiated itself.
      squares: zeros for `|g|^2` of each: [], or [n] with one number for each slice; empty if nothing is measured.
      factor: multiplies each gradient where it arises; None if the loss is scaled instead.
      totals: the accumulators, if this is their last gradient.
    """

    sunk: tuple[Any, ...]
    squares: Sequence[jax.Array] = ()
    factor: Weight | None = None
    totals: Sequence[Total] = ()

    def last(self, refs: Sequence[Any], finish: Sequence[Finish], counts: Any) -> "Inside":
        """How the last gradient is added, if it counts (see `Total`): where it arises, the sum is finished."""
        totals = [Total(ref, finished, counts) for ref, finished in zip(refs, finish, strict=True)]
        return dataclasses.replace(self, sunk=tuple(jnp.dtype(ref.dtype) for ref in refs), totals=totals)

    def targets(self, params: Tree) -> Targets:
        def shape(param: Any) -> Any:
            return () if self.totals else jnp.shape(param)

        leaves = [
            param if dtype is None else sinks.empty(param, shape(param), dtype)
            for param, dtype in zip(parted(params, is_inexact)[0], self.sunk, strict=True)
        ]
        return Targets(leaves, list(self.squares))

    def through(self, fun: Callable[[Tree], Any], params: Tree) -> Callable[[Targets], Any]:
        """`fun(params)` as a function of the targets."""
        inexact, filled = parted(params, is_inexact)
        if all(dtype is None for dtype in self.sunk):
            return lambda targets: fun(filled(targets.leaves))
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(params)

        def run(targets: Targets) -> Any:
            none = [None] * len(targets.leaves)
            squares, totals = targets.squares or none, self.totals or none
            lent = filled(map(self._lent, inexact, self.sunk, targets.leaves, squares, totals))
            values = jax.tree.leaves(lent, is_leaf=lambda node: isinstance(node, Lent))
            return jax.tree.unflatten(jax.tree.structure(shapes), follow.run(program, values))

        return run

    def _lent(self, param: Any, dtype: Any, target: Any, square: Any, total: Total | None) -> Any:
        factor = None if self.factor is None else jnp.asarray(self.factor)
        return target if dtype is None else Lent(param, Sink(target, square, factor), total)


def added_inside(
    asked: bool | None,
    params: Tree,
    acc: Tree,
    loss: Traced,
    weighing: Weighing,
    squares: Sequence[jax.Array] = (),
    factor: Weight | None = None,
    why_not: str | None = None,
) -> Inside | None:
    """How gradients are added inside the backward pass; None if they are not, an error if that is `asked`.

    `squares` and `factor` are as in `Inside`; `why_not` is a reason of the caller's, which is no error.
    """
    impossible = _why_impossible(params, acc, loss, squares)
    nests = why_not is None and loss.has_loop_or_branch
    if impossible is None and nests and tracing.is_batched((params, acc, loss.program.consts, vars(weighing))):
        impossible = "is not possible under jax.vmap, for JAX batches no loop over references, nor a branch"
    if asked and impossible:
        raise TypeError(f"in_place=True {impossible}. Leave in_place=None.")
    why_not = why_not or (f"adding inside it {impossible}" if impossible else None)
    if why_not or asked is False:
        log_after(why_not or "in_place=False")
        return None
    _log_inside(params, loss)
    always = bool(squares) or factor is not None or not compilers.ADDS_TO_SLICES
    alone = map(operator.or_, follow.casts(loss.jaxpr), follow.breaks(loss.jaxpr))  # JAX cannot add to a reference
    leaves = [pair for pair in zip(jax.tree.leaves(params), alone, strict=True) if is_inexact(pair[0])]
    if not leaves:
        return None
    sunk = [
        total.dtype if always or is_alone or total.dtype != jnp.result_type(leaf) else None
        for (leaf, is_alone), total in zip(leaves, jax.tree.leaves(acc), strict=True)
    ]
    return Inside(tuple(sunk), squares, factor)


def _why_impossible(params: Tree, acc: Tree, loss: Traced, squares: Sequence[jax.Array]) -> str | None:
    path = matching.narrower(params, acc)
    if path is not None:
        return (
            "needs accumulators at least as wide as the parameters, for a gradient is rounded before it is added: at "
            f"{path} they are narrower (parameters {dtypes.names_in(params)}, accumulators {dtypes.names_in(acc)})"
        )
    too_old = compilers.why_not_in_place()
    if too_old is None and _forgets_mesh(loss, (acc, squares)):
        return (
            "is not possible where arrays lie on a mesh with Explicit axes, and the accumulators on none, for JAX adds "
            "to references of the same mesh only: call it under `with jax.set_mesh(mesh):`"
        )
    return too_old


def _forgets_mesh(loss: Traced, accumulators: Tree) -> bool:
    """Whether a loss has arrays on an Explicit mesh, and some accumulators are on none."""
    types = (var.aval for equation in loss.equations for var in equation.outvars)
    without = any(compilers.explicit_mesh(jax.typeof(leaf)) is None for leaf in jax.tree.leaves(accumulators))
    return without and any(compilers.explicit_mesh(kind) is not None for kind in types)


def log_after(reason: str) -> None:
    _log.info("Gradients are added after the backward pass, as a tree: %s.", reason)


def _log_inside(params: Tree, loss: Traced) -> None:
    if not _log.isEnabledFor(logging.INFO):
        return
    pairs = zip(by_path(params, ""), follow.leave_whole(loss.jaxpr), strict=True)
    written = [f"{path} (`{function}`)" for (path, _), function in pairs if function]
    but = f" Some are written first, by the function in brackets: {', '.join(written)}." if written else ""
    _log.info("Gradients are added inside the backward pass.%s", but)


def at_leaves(params: Tree, squares: Sequence[jax.Array]) -> Tree:
    """Replaces each parameter that has a gradient by its entry of `squares`."""
    return parted(params, is_inexact)[1](squares)
