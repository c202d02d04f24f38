"""The fold: one loop over the micro-batches, whose rows are kept and whose sums are added in place.

    for i in range(k): rows[i], parts = part(i); sums += parts

Each part is added where the program of a micro-batch makes it, so no second tree of sums is there.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import adding, compilers, evaluation, tracing
from optax_accum._core.folds import SUM, Fold
from optax_accum._space import meshes


@dataclasses.dataclass(frozen=True)
class Result:
    """What becomes of a result of the micro-batches.

    Attributes:
      fold: how their parts are joined; None for rows, which are stacked.
      dtype: in which a sum is added; None for its own.
      square: zeros for `|part|^2` of a sum, if it is measured.
      over: the array of `xs` in whose place rows are stacked: nothing else takes it.
      finish: what the sum is mapped to, where the last part has been added: see `adding.Sum`.
    """

    fold: Fold | None = None
    dtype: Any = None
    square: Any = None
    over: int | None = None
    finish: adding.Finish | None = None


Sampled = tuple[Any, Callable[[Any, list[Any], Any], Any]]  # samples, and a function that adds squares of a micro-batch
NOTHING: Sampled = ((), lambda samples, squares, index: samples)


def folded(
    part: Callable[[Any, list[Any]], list[Any]],
    xs: list[jax.Array],
    count: int,
    results: Sequence[Result],
    sampled: Sampled = NOTHING,
) -> tuple[list[jax.Array], Any]:
    """Runs `part(index, rows of xs)` for each micro-batch; returns its results, joined, and the samples."""
    samples, sample = sampled
    program = jax.make_jaxpr(part)(jnp.int32(0), [leaf[0] for leaf in xs])
    start: list[Any] = []
    avals: list[Any] = list(program.out_avals)
    for place, (aval, result) in enumerate(zip(avals, results, strict=True)):
        if result.fold is not None:
            leaf = meshes.filled([], aval, result.fold.nothing(aval.dtype), result.dtype)
        else:
            leaf = _empty(count, aval, xs, place) if result.over is None else xs[result.over]
        start.append(evaluation.varying_as([leaf], [aval])[0])
    places = {result.over: place for place, result in enumerate(results) if result.over is not None}

    def step(index: Any, state: Any, *, ends: bool = False) -> Any:
        index, (leaves, samples) = jnp.asarray(index, jnp.int32), state
        # Rows are read from the array that is written: one from before the loop would have to be there as well.
        sources = [leaves[places[at]] if at in places else leaf for at, leaf in enumerate(xs)]
        rows = [jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False) for leaf in sources]
        sums = [_sum(leaf, result, ends) for leaf, result in zip(leaves, results, strict=True)]
        found = adding.run(program, [index, *rows], sums)
        after: list[Any] = []
        for leaf, new, result, added in zip(leaves, found, results, sums, strict=True):
            if added is not None:
                after.append(added.total)
            elif result.fold is None:
                after.append(jax.lax.dynamic_update_index_in_dim(leaf, new, index, 0))
            else:
                after.append(result.fold.join(leaf, new))
        squares = [added.square for added in sums if added is not None and added.square is not None]
        return after, sample(samples, squares, index)

    state = start, samples
    if not tracing.is_staged():  # there a loop would be compiled at every call
        for index in range(count):
            state = step(index, state)
        return state
    if not any(result.finish for result in results):
        return jax.lax.fori_loop(0, count, step, state)
    state = jax.lax.fori_loop(0, count - 1, step, state)
    # The last micro-batch runs after the loop: what finishes a sum, an all-reduce, must run once, not for each of them.
    return step(*compilers.ready_together(jnp.int32(count - 1), state), ends=True)


def _empty(count: int, row: Any, xs: list[jax.Array], place: int) -> jax.Array:
    """An array for rows, filled with a number of the running program, another one for each array.

    XLA makes the zeros of all loops of a program beforehand: memory for all at the same time. Of two arrays with one
    number it makes one, and a copy.
    """
    number: Any = 0
    if xs and xs[-1].size and compilers.explicit_sharding(xs[-1]) is None:  # else it would be on one device alone
        last = xs[-1].ravel()[0].real
        number = jnp.where(last > 0, place, place + 0.5) if last.dtype != bool else jnp.where(last, place, place + 0.5)
        number = 0 if evaluation.varying_more([number], [row]) else number
    return meshes.filled([count], row, number)


def _sum(leaf: Any, result: Result, ends: bool) -> adding.Sum | None:
    return adding.Sum(leaf, result.square, finish=result.finish if ends else None) if result.fold is SUM else None
