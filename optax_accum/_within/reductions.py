"""How outputs of micro-batches become the batch's outputs: a table of reductions."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._core import dtypes, evaluation
from optax_accum._core.folds import MAX, MIN, Fold
from optax_accum._core.leaves import for_each_leaf
from optax_accum._core.types import Index, Tree
from optax_accum._loss import ratio
from optax_accum._space import meshes
from optax_accum._within.splitting import Split


def _cast(total: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    return total if jnp.issubdtype(shape.dtype, jnp.bool_) else total.astype(shape.dtype)  # or the count of bools


@dataclasses.dataclass(frozen=True)
class Reduction:
    """`finish(add(add(start(...), x_0, ...), x_1, ...))` is the output for the batch."""

    name: str
    start: Callable[[jax.ShapeDtypeStruct, Split], Any]
    add: Callable[[Any, jax.Array, Index, Any], Any]  # state, output, index, share
    finish: Callable[[Any, jax.ShapeDtypeStruct], Any] = _cast
    check: Callable[[Any, str, jax.ShapeDtypeStruct, "Outputs"], None] = lambda *_: None  # raises where it does not fit
    rows: bool = False  # an output has one row for each example: the remainder's has fewer


class Outputs(NamedTuple):
    """How the outputs of micro-batches are reduced to the batch's outputs."""

    reductions: Tree  # of each leaf
    shapes: Tree  # for a full micro-batch
    split: Split

    def start(self) -> Tree:
        def start(reduction: Reduction, shape: Any) -> Any:
            differing = lambda leaf: evaluation.varying_as([leaf], [shape])[0]
            return jax.tree.map(differing, reduction.start(shape, self.split))

        return jax.tree.map(start, self.reductions, self.shapes)

    def add(self, totals: Tree, outputs: Tree, index: Index, share: Any) -> Tree:
        """Adds the outputs of a micro-batch; `share` is its share in a mean."""
        if self.split.is_rest(index):
            check_rest(self, outputs)

        add = lambda reduction, total, output: reduction.add(total, jnp.asarray(output), index, share)
        return jax.tree.map(add, self.reductions, totals, outputs)

    def finish(self, totals: Tree) -> Tree:
        """The outputs of the batch, or of one device's part."""
        return jax.tree.map(lambda reduction, *leaf: reduction.finish(*leaf), self.reductions, totals, self.shapes)


def outputs_of(names: Tree, shapes: Tree, split: Split) -> Outputs:
    """How outputs of these shapes are reduced; raises where a reduction does not fit."""
    expected = Outputs(_reductions_of(names, shapes), shapes, split)

    pairs = zip(jax.tree.leaves(expected.reductions), jax.tree.leaves_with_path(shapes), strict=True)
    for reduction, (path, shape) in pairs:
        where = _where(path)
        _check_data(where, shape)
        reduction.check(reduction.name, where, shape, expected)
    return expected


def over_devices(names: Tree, outputs: Tree) -> Tree:
    """The name by which `Space.output` joins the devices' parts of each leaf; parts of a mean are added."""
    name = lambda reduction: "sum" if reduction.name == "mean" else reduction.name
    return jax.tree.map(name, _reductions_of(names, outputs))


def _reductions_of(names: Tree, tree: Tree) -> Tree:
    """The reduction of each leaf; `names` is a prefix of the tree."""

    def reductions_in(node: Any, named: Any) -> Any:
        adds = ratio.is_record(node)

        def reduction_of(name: Any, leaf: Any) -> Reduction:
            if dtypes.is_float0(leaf):
                return _NO_NUMBER  # the gradient of an integer
            # The mean of a `Ratio` is one sum over another: both are added.
            return REDUCTIONS["sum" if adds and name == "mean" else name]

        return jax.tree.map(reduction_of, named, node)

    each = for_each_leaf("reduction", names, tree, "Name one reduction, or one for each branch.", "the output")
    return jax.tree.map(reductions_in, tree, each, is_leaf=ratio.is_record)


def check_rest(expected: Outputs, outputs: Tree) -> None:
    split = expected.split

    def check_leaf(path: Any, reduction: Reduction, shape: jax.ShapeDtypeStruct, output: Any) -> None:
        output_shape, rows = jnp.shape(output), reduction.rows
        if output_shape != ((split.rest, *shape.shape[1:]) if rows else shape.shape):
            rule = "one row for each example" if rows else "one shape in all micro-batches"
            raise ValueError(
                f'"{reduction.name}" needs {rule}: {_where(path)} has shape {shape.shape} for '
                f"{split.size} rows and {output_shape} for the remainder of {split.rest}. "
                + ('Take "stack", or another reduction.' if rows else 'Reduce it over its rows, or take "concat".')
            )

    jax.tree.map_with_path(check_leaf, expected.reductions, expected.shapes, outputs)


def check_names(names: Tree) -> None:
    """Raises unless every leaf of `names` names a reduction."""
    for name in jax.tree.leaves(names, is_leaf=lambda node: node is None):
        if name not in list(REDUCTIONS):
            also = ' For a function that merges two results, take "stack", and merge those.' if callable(name) else ""
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}: {name!r}. Choose one of these.{also}")


def _where(path: Any) -> str:
    return f"the result at {jax.tree_util.keystr(path)}" if path else "the result"


def _check_data(where: str, shape: jax.ShapeDtypeStruct) -> None:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        raise TypeError(f"What is reduced is data: {where} is a key. Return jax.random.key_data(key), or leave it out.")


def _check_inexact(name: str, where: str, shape: jax.ShapeDtypeStruct, expected: Outputs) -> None:
    if not jnp.issubdtype(shape.dtype, jnp.inexact):
        raise TypeError(
            f'"mean", the default, needs floating-point numbers: {where} has dtype {shape.dtype}. Take '
            'reduction="sum" (or a prefix of the output, {"count": "sum", "loss": "mean"}) for counts; cast '
            "it to float32 for a mean."
        )


def _check_ordered(name: str, where: str, shape: jax.ShapeDtypeStruct, expected: Outputs) -> None:
    if jnp.issubdtype(shape.dtype, jnp.complexfloating):
        raise TypeError(
            f'"{name}" needs numbers that are ordered: {where} has dtype {shape.dtype}. Take "mean" or "sum".'
        )


def _check_rows(name: str, where: str, shape: jax.ShapeDtypeStruct, expected: Outputs) -> None:
    split = expected.split
    if not shape.ndim or shape.shape[0] != split.size:
        raise ValueError(
            f'"concat" needs one row for each example: {where} has shape {shape.shape} for a micro-batch of '
            f'{split.size} rows. Take "stack", or another reduction.'
        )


def _zeros(shape: jax.ShapeDtypeStruct, split: Split) -> jax.Array:
    is_bool = jnp.issubdtype(shape.dtype, jnp.bool_)  # a sum of them counts
    return meshes.filled([], shape, 0, jnp.int32 if is_bool else dtypes.of_sum(shape.dtype))


def _filled(fold: Fold, shape: jax.ShapeDtypeStruct, split: Split) -> jax.Array:
    return meshes.filled([], shape, fold.nothing(shape.dtype))


def _scaled(total: jax.Array, output: jax.Array, index: Index, share: Any) -> jax.Array:
    return total + output.astype(total.dtype) * jnp.asarray(share, total.dtype)


def _combined(fold: Fold) -> Callable[..., jax.Array]:
    return lambda total, output, *_: fold.join(total, output)


def _stack(shape: jax.ShapeDtypeStruct, split: Split) -> jax.Array:
    return meshes.filled([split.microbatches], shape, 0)


def _rows(shape: jax.ShapeDtypeStruct, split: Split) -> tuple[jax.Array, jax.Array]:
    """Room for the rows of the full micro-batches, interleaved, and of the remainder [r, ...]."""
    one = meshes.filled([], shape, 0)[:, None]
    full = jnp.broadcast_to(one, (split.size, split.full, *shape.shape[1:]))
    return full, jnp.zeros((split.rest, *shape.shape[1:]), shape.dtype)


def _put_rows(rows: Any, output: jax.Array, index: Index, share: Any) -> Any:
    full, rest = rows
    if isinstance(index, int) and index == full.shape[1]:
        return full, output
    return full.at[:, index].set(output), rest


def _joined(rows: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
    full, rest = rows
    full = jax.lax.collapse(full, 0, 2)
    return jnp.concatenate([full, rest]) if len(rest) else full


_ROWS = (
    Reduction("mean", _zeros, _scaled, check=_check_inexact),
    Reduction("sum", _zeros, lambda a, b, *_: a + b.astype(a.dtype)),
    Reduction("max", functools.partial(_filled, MAX), _combined(MAX), check=_check_ordered),
    Reduction("min", functools.partial(_filled, MIN), _combined(MIN), check=_check_ordered),
    Reduction("last", lambda shape, _: meshes.filled([], shape, 0), lambda _, output, *__: output),
    Reduction("stack", _stack, lambda stack, output, index, *_: stack.at[index].set(output)),
    Reduction("concat", _rows, _put_rows, _joined, _check_rows, rows=True),
)
_NO_NUMBER = Reduction("last", lambda *_: (), lambda *_: (), lambda _, shape: np.zeros(shape.shape, jax.dtypes.float0))
REDUCTIONS = {row.name: row for row in _ROWS}
