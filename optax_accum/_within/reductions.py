"""How outputs of micro-batches become the batch's outputs: a table of reductions."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._core import dtypes, evaluation
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

    name: Any  # or the function that merges two
    over: str  # how devices' parts are joined: `Space.output` refuses a name that it does not know
    start: Callable[[jax.ShapeDtypeStruct, Split], Any]
    add: Callable[[Any, jax.Array, Index, Any], Any]  # state, output, index, share
    finish: Callable[[Any, jax.ShapeDtypeStruct], Any] = _cast
    check: Callable[[Any, str, jax.ShapeDtypeStruct, "Outputs"], None] = lambda *_: None  # raises where it does not fit
    weighted: bool = False  # an output counts as much as its micro-batch does
    rows: bool = False  # an output has one row for each example: the remainder's has fewer


class Outputs(NamedTuple):
    """How the outputs of micro-batches are reduced to the batch's outputs."""

    reductions: Tree  # of each leaf
    shapes: Tree  # for a full micro-batch
    split: Split
    option: str  # that names the reductions
    counted: bool  # whether the weights in a mean come out of `fun`: it is divided by their sum, at the end

    def start(self) -> Tree:
        def start(reduction: Reduction, shape: Any) -> Any:
            differing = lambda leaf: evaluation.varying_as([leaf], [shape])[0]
            return jax.tree.map(differing, reduction.start(shape, self.split))

        return jax.tree.map(start, self.reductions, self.shapes)

    def add(self, totals: Tree, outputs: Tree, index: Index, share: Any) -> Tree:
        """Adds the outputs of a micro-batch; `share` is its share, or its weight, in a mean."""
        if self.split.is_rest(index):
            check_rest(self, outputs)

        def add(reduction: Reduction, total: Any, output: Any) -> Any:
            output = jnp.asarray(output)
            if self._divides(reduction):
                output = jnp.where(share == 0, jnp.zeros_like(output), output)  # or it is 0 / 0
            return reduction.add(total, output, index, share)

        return jax.tree.map(add, self.reductions, totals, outputs)

    def finish(self, totals: Tree, weight: Callable[[], Any]) -> Tree:
        """The outputs of the batch, or of one device's part; `weight()` is the weight of the batch."""
        divides = any(map(self._divides, jax.tree.leaves(self.reductions)))
        sum_of_weights = weight() if divides else jnp.ones([])

        def finish(reduction: Reduction, total: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
            total = ratio.divided(total, sum_of_weights) if self._divides(reduction) else total
            return reduction.finish(total, shape)

        return jax.tree.map(finish, self.reductions, totals, self.shapes)

    def _divides(self, reduction: Reduction) -> bool:
        return self.counted and reduction.weighted


def outputs_of(
    names: Tree, shapes: Tree, split: Split, option: str = "aux_reduction", *, counted: bool = False
) -> Outputs:
    """How outputs of these shapes are reduced; raises where a reduction does not fit."""
    expected = Outputs(_reductions_of(names, shapes, option), shapes, split, option, counted)

    pairs = zip(jax.tree.leaves(expected.reductions), jax.tree.leaves_with_path(shapes), strict=True)
    for reduction, (path, shape) in pairs:
        where = _where(option, path)
        _check_data(where, shape)
        reduction.check(reduction.name, where, shape, expected)
    return expected


def over_devices(names: Tree, outputs: Tree, option: str = "aux_reduction") -> Tree:
    """The name by which `Space.output` joins the devices' parts of each leaf."""
    return jax.tree.map(lambda reduction: reduction.over, _reductions_of(names, outputs, option))


def names_of(names: Tree, tree: Tree, option: str, tree_of: str = "the output") -> Tree:
    """The name of each leaf's reduction; `names` is a prefix of the tree."""
    return for_each_leaf(option, names, tree, "Name one reduction, or one for each branch.", tree_of)


def _reductions_of(names: Tree, tree: Tree, option: str) -> Tree:
    def of_node(node: Any, named: Any) -> Any:
        adds = ratio.is_record(node)

        def reduction_of(name: Any, leaf: Any) -> Reduction:
            if dtypes.is_float0(leaf):
                return _NO_NUMBER  # the gradient of an integer
            reduction = _merging(name) if callable(name) else REDUCTIONS[name]
            # The mean of a `Ratio` is one sum over another: both are added.
            return REDUCTIONS["sum"] if adds and reduction.weighted else reduction

        return jax.tree.map(reduction_of, named, node)

    return jax.tree.map(of_node, tree, names_of(names, tree, option), is_leaf=ratio.is_record)


def check_rest(expected: Outputs, outputs: Tree) -> None:
    split = expected.split

    def check_leaf(path: Any, reduction: Reduction, shape: jax.ShapeDtypeStruct, output: Any) -> None:
        output_shape, rows = jnp.shape(output), reduction.rows
        if output_shape != ((split.rest, *shape.shape[1:]) if rows else shape.shape):
            rule = "one row for each example" if rows else "one shape in all micro-batches"
            raise ValueError(
                f'"{reduction.name}" needs {rule}: {_where(expected.option, path)} has shape {shape.shape} for '
                f"{split.size} rows and {output_shape} for the remainder of {split.rest}. "
                + ('Take "stack", or another reduction.' if rows else 'Reduce it over its rows, or take "concat".')
            )

    jax.tree.map_with_path(check_leaf, expected.reductions, expected.shapes, outputs)


def check_names(option: str, names: Tree, allowed: Iterable[str], *, merges: bool = False) -> None:
    """Raises unless every leaf of `names` names a reduction, or `merges` two outputs."""
    also = ", or a function that merges two" if merges else ""
    for name in jax.tree.leaves(names, is_leaf=lambda node: node is None):
        if not (merges and callable(name)) and name not in list(allowed):
            raise ValueError(f"{option} must be one of {', '.join(allowed)}{also}: {name!r}. Choose one of these.")


def _where(option: str, path: Any) -> str:
    what = "the result" if option == "reduction" else "the auxiliary output"
    return f"{what} at {jax.tree_util.keystr(path)}" if path else what


def _check_data(where: str, shape: jax.ShapeDtypeStruct) -> None:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        raise TypeError(f"What is reduced is data: {where} is a key. Return jax.random.key_data(key), or leave it out.")


def _check_inexact(name: str, where: str, shape: jax.ShapeDtypeStruct, expected: Outputs) -> None:
    if not jnp.issubdtype(shape.dtype, jnp.inexact):
        raise TypeError(
            f'"mean", the default, needs floating-point numbers: {where} has dtype {shape.dtype}. Take '
            f'{expected.option}="sum" (or a prefix of the output, {{"count": "sum", "loss": "mean"}}) for counts; cast '
            "it to float32 for a mean."
        )


def _check_ordered(name: str, where: str, shape: jax.ShapeDtypeStruct, expected: Outputs) -> None:
    if jnp.issubdtype(shape.dtype, jnp.complexfloating):
        raise TypeError(
            f'"{name}" needs numbers that are ordered: {where} has dtype {shape.dtype}. Take "mean" or "sum".'
        )


def _check_rows(name: str, where: str, shape: jax.ShapeDtypeStruct, expected: Outputs) -> None:
    split = expected.split
    if split.stacked:
        raise ValueError(f'A stacked batch has outputs "stack"ed: "concat" was asked for {where}. Take "stack".')
    if not shape.ndim or shape.shape[0] != split.size:
        raise ValueError(
            f'"concat" needs one row for each example: {where} has shape {shape.shape} for a micro-batch of '
            f'{split.size} rows. Take "stack", or another reduction.'
        )


def _check_merged(merge: Callable[[Any, Any], Any], where: str, shape: jax.ShapeDtypeStruct, expected: Outputs) -> None:
    try:
        merged = jax.eval_shape(merge, shape, shape)
    except Exception as error:
        error.add_note(f"A function that merges two outputs is called with two arrays, leaf by leaf; here for {where}.")
        raise
    if not hasattr(merged, "dtype") or (merged.shape, merged.dtype) != (shape.shape, shape.dtype):
        raise TypeError(
            f"A function that merges two outputs returns one like them: of {shape.dtype}{list(shape.shape)} it "
            f"makes {merged}, for {where}. Cast or reshape what it returns."
        )


def _wide(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.int32  # a sum of them counts
    return dtypes.accumulator_dtype(dtype, None) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def _zeros(shape: jax.ShapeDtypeStruct, split: Split) -> jax.Array:
    return meshes.filled([], shape, 0, _wide(shape.dtype))


def _filled(number: Callable[[Any], Any], shape: jax.ShapeDtypeStruct, split: Split) -> jax.Array:
    return meshes.filled([], shape, number(shape.dtype))


def _scaled(total: jax.Array, output: jax.Array, index: Index, share: Any) -> jax.Array:
    return total + output.astype(total.dtype) * jnp.asarray(share, total.dtype)


def _combined(combine: Callable[[Any, Any], jax.Array]) -> Callable[..., jax.Array]:
    return lambda total, output, *_: combine(total, output)


def _merging(merge: Callable[[Any, Any], Any]) -> Reduction:
    """The reduction by a function that merges two outputs; it begins with the first micro-batch's."""

    def add(total: tuple[jax.Array, jax.Array], output: jax.Array, *_: Any) -> tuple[jax.Array, jax.Array]:
        begun, value = total
        merged = merge(jnp.where(begun, value, output), output)  # never with zeros, which merge may not take
        return jnp.array(True), jnp.where(begun, merged, output)

    start = lambda shape, _: (jnp.array(False), meshes.filled([], shape, 0))
    return Reduction(merge, str(merge), start, add, lambda total, _: total[1], _check_merged)


def _stack(shape: jax.ShapeDtypeStruct, split: Split) -> jax.Array:
    return meshes.filled([split.parts], shape, 0)


def _rows(shape: jax.ShapeDtypeStruct, split: Split) -> tuple[jax.Array, jax.Array]:
    """Room for the rows of the full micro-batches, interleaved, and of the remainder [r, ...]."""
    together = () if split.group == 1 else (split.group,)
    one = meshes.filled([], shape, 0).reshape(split.size // split.group, 1, *together, *shape.shape[1:])
    full = jnp.broadcast_to(one, (len(one), split.full, *one.shape[2:]))
    return full, jnp.zeros((split.rest, *shape.shape[1:]), shape.dtype)


def _put_rows(rows: Any, output: jax.Array, index: Index, share: Any) -> Any:
    full, rest = rows
    count, number, *shape = full.shape
    if isinstance(index, int) and index == number:
        return full, output
    return full.at[:, index].set(output.reshape(count, *shape)), rest


def _joined(rows: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
    full, rest = rows
    full = jax.lax.collapse(full, 0, full.ndim - len(shape.shape) + 1)
    return jnp.concatenate([full, rest]) if len(rest) else full


_ROWS = (
    Reduction("mean", "sum", _zeros, _scaled, check=_check_inexact, weighted=True),
    Reduction("sum", "sum", _zeros, lambda a, b, *_: a + b.astype(a.dtype)),
    Reduction("max", "max", functools.partial(_filled, dtypes.lowest), _combined(jnp.maximum), check=_check_ordered),
    Reduction("min", "min", functools.partial(_filled, dtypes.highest), _combined(jnp.minimum), check=_check_ordered),
    Reduction("last", "last", lambda shape, _: meshes.filled([], shape, 0), lambda _, output, *__: output),
    Reduction("stack", "stack", _stack, lambda stack, output, index, *_: stack.at[index].set(output)),
    Reduction("concat", "concat", _rows, _put_rows, _joined, _check_rows, rows=True),
)
_NO_NUMBER = Reduction(
    "last", "last", lambda *_: (), lambda *_: (), lambda _, shape: np.zeros(shape.shape, jax.dtypes.float0)
)
REDUCTIONS = {row.name: row for row in _ROWS}
