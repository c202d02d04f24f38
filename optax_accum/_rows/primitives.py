"""JAX's own primitives: the row of each in the registry, and the rules that it takes.

`negative` treats rows one by one wherever they lie; `reduce_sum` does along other axes, and over rows it adds parts;
`sort` along rows has no rule, and so takes all of them at once.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import dtypes
from optax_accum._rows import draws
from optax_accum._rows.registry import FIRST, PRODUCT, REST, TOGETHER, Positional, Reduction, Rule, register
from optax_accum._rows.traces import Axis, View

# Rules for equations that may treat rows one by one


def elementwise(view: View) -> bool:
    """The rule of an operation on the entries of its operands, such as `add`.

    All operands and results that have rows have them along the same axis.
    """
    return len({axis for axis in (*view.ins, *view.outs) if axis is not None}) == 1


def _each_alike(view: View) -> bool:
    return list(view.ins) == list(view.outs)


def _dot(view: View) -> bool:
    (left_summed, right_summed), (left_batch, right_batch) = view.params["dimension_numbers"]
    left, right = view.ins
    if left is not None and right is not None:
        return left in left_batch and right in right_batch and left_batch.index(left) == right_batch.index(right)
    return left not in left_summed and right not in right_summed


def _not_reduced(view: View) -> bool:
    axes = view.params["axes"] if "axes" in view.params else view.params["dimensions"]
    return all(axis not in axes for axis in view.ins if axis is not None) and _one(view.ins)


def _not_along(key: str) -> Rule:
    return lambda view: _one(view.ins) and view.ins[0] is not None and view.ins[0] != view.params[key]


def _one(axes: Sequence[Axis]) -> bool:
    return len({axis for axis in axes if axis is not None}) == 1


def _broadcast(view: View) -> bool:
    axis = view.ins[0]
    return axis is not None and view.params["broadcast_dimensions"][axis] == view.outs[0] and _kept(view)


def _kept(view: View) -> bool:
    """Whether the first operand and the result have equally many rows."""
    before, after = view.ins[0], view.outs[0]
    return before is not None and after is not None and view.shape_in(0)[before] == view.shape_out()[after]


def _reshape(view: View) -> bool:
    before, after = view.ins[0], view.outs[0]
    in_blocks = math.prod(view.shape_in(0)[:before]) == math.prod(view.shape_out()[:after])
    return in_blocks and view.params.get("dimensions") is None


def _slice(view: View) -> bool:
    return view.ins[0] == view.outs[0] and _kept(view) and all(axis is None for axis in view.ins[1:])


def _split(view: View) -> bool:
    return view.ins[0] != view.params["axis"] and all(axis == view.ins[0] for axis in view.outs)


def _pad(view: View) -> bool:
    axis = view.ins[0]
    return view.ins[1] is None and axis == view.outs[0] and tuple(view.params["padding_config"][axis or 0]) == (0, 0, 0)


def _dynamic_update(view: View) -> bool:
    operand, update, *starts = view.ins
    full = operand is not None and update is not None and view.shape_in(0)[operand] == view.shape_in(1)[update]
    return operand == update and full and all(axis is None for axis in starts)


def _concatenate(view: View) -> bool:
    return view.params["dimension"] != view.outs[0] and None not in view.ins and elementwise(view)


def _stack(view: View) -> bool:
    return (
        None not in view.ins and _one(view.ins) and view.outs[0] == view.ins[0] + (view.params["axis"] <= view.ins[0])
    )


def _unstack(view: View) -> bool:
    return view.ins[0] != view.params["axis"]


def _tile(view: View) -> bool:
    axis = view.outs[0]
    return axis is not None and view.params["reps"][axis] == 1


def _convolution(view: View) -> bool:
    numbers = view.params["dimension_numbers"]
    apart = view.ins[0] == numbers.lhs_spec[0] and view.outs[0] == numbers.out_spec[0]
    return view.ins[1] is None and apart and view.params["batch_group_count"] == 1


def _window(view: View) -> bool:
    """A pooling window must not reach from row to row."""
    axis, params = view.ins[0], view.params
    if axis is None or not elementwise(view):
        return False

    def alone(key: Any, value: Any) -> Any:
        return key not in params or tuple(params[key])[axis] == value

    ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    return all(alone(key, 1) for key in ones) and ("padding" not in params or tuple(params["padding"][axis]) == (0, 0))


def _gather(view: View) -> bool:
    numbers, (table, at) = view.params["dimension_numbers"], view.ins
    if table is None:  # rows of indices into a table that all rows share
        return at is not None and at < len(view.shape_in(1)) - 1
    if at is not None:
        return _batched(numbers.operand_batching_dims, numbers.start_indices_batching_dims, table, at)
    whole = view.params["slice_sizes"][table] == view.shape_in(0)[table]
    return whole and table not in numbers.start_index_map and table not in numbers.collapsed_slice_dims


def _batched(ours: Sequence[int], theirs: Sequence[int], our: int, their: int) -> bool:
    return our in ours and list(ours).index(our) < len(theirs) and theirs[list(ours).index(our)] == their


def _scatter(view: View) -> bool:
    numbers, (operand, at, updates) = view.params["dimension_numbers"], view.ins
    if operand is None or updates is None or operand != view.outs[0]:
        return False
    if at is not None:
        places = _scatter_axes(view)
        in_order = at < len(places) and places[at] == updates
        return in_order and _batched(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, operand, at)
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [axis for axis in range(len(view.shape_in(0))) if axis not in gone]
    if view.shape_in(0)[operand] != view.shape_in(2)[updates]:
        return False
    if operand not in window or operand in numbers.scatter_dims_to_operand_dims:
        return False
    return numbers.update_window_dims[window.index(operand)] == updates


def _scatter_axes(view: View) -> list[int]:
    """The axes of a scatter's updates that belong to the axes of its indices."""
    windows = view.params["dimension_numbers"].update_window_dims
    return [axis for axis in range(len(view.shape_in(2))) if axis not in windows]


def leading_axes(count: int) -> Rule:
    """The rule of an operation on the last `count` axes, such as `cholesky`.

    Rows lie before these, along the same axis of all operands and results.
    """

    def rule(view: View) -> bool:
        axes = [(axis, len(view.shape_in(i)) - count) for i, axis in enumerate(view.ins)]
        return all(axis is not None and axis < limit for axis, limit in axes) and elementwise(view)

    return rule


def _fft(view: View) -> bool:
    return leading_axes(len(view.params["fft_lengths"]))(view)


def _bitcast(view: View) -> bool:
    return _kept(view) and view.ins[0] == view.outs[0]


def _sorted(view: View) -> bool:
    return None not in view.ins and elementwise(view) and view.ins[0] != view.params["dimension"]


def _wrapped(view: View) -> bool:
    axis = view.ins[0]
    return axis == view.outs[0] and axis is not None and axis < min(len(view.shape_in(0)), len(view.shape_out()))


def _drawn(rule: Rule) -> Rule:
    """The rule of an operation on keys: other generators than threefry draw for all keys at once."""
    return lambda view: draws.is_threefry(view.single.invars[0].aval) and rule(view)


# Rules for equations that reduce rows in parts


def _reduced(view: View) -> bool:
    return view.ins[0] in view.params["axes"] and len(view.ins) == 1


def _flags(view: View) -> bool:
    return _reduced(view) and view.single.invars[0].aval.dtype == bool  # of integers, these are sums of bits


def _contracted(view: View) -> bool:
    (left_summed, right_summed), _ = view.params["dimension_numbers"]
    left, right = view.ins
    both = left in left_summed and right in right_summed
    return both and left_summed.index(left) == right_summed.index(right)


def _scattered(view: View) -> bool:
    operand, at, updates = view.ins
    places = _scatter_axes(view)
    return operand is None and at is not None and at < len(places) and places[at] == updates


def _product(equation: Any, values: Sequence[Any], wide: Callable[[Any], Any], over: Any) -> jax.Array:
    (left, right), params = values, equation.params
    dtype = wide(equation.outvars[0].aval.dtype)
    return jax.lax.dot_general(
        left, right, params["dimension_numbers"], params["precision"], preferred_element_type=dtype
    )


def _added(equation: Any, values: Sequence[Any], wide: Callable[[Any], Any], over: Any) -> jax.Array:
    operand, at, updates = values
    zeros = jnp.zeros(operand.shape, wide(operand.dtype))
    options = {key: equation.params[key] for key in ("dimension_numbers", "unique_indices", "mode")}
    return jax.lax.scatter_add(zeros, at, updates.astype(zeros.dtype), **options)  # filled rows are not in order


def _as_it_is(equation: Any, values: Sequence[Any], wide: Any, over: Callable[..., jax.Array]) -> jax.Array:
    return over(values[0], axis=equation.params["axes"])


_SUM = Reduction(_reduced)
_MAX = Reduction(_reduced, "max", jnp.max, dtypes.lowest, _as_it_is)
_MIN = Reduction(_reduced, "min", jnp.min, dtypes.highest, _as_it_is)
_AND = Reduction(_flags, "min", jnp.all, dtypes.highest, _as_it_is)
_OR = Reduction(_flags, "max", jnp.any, dtypes.lowest, _as_it_is)

# Rules for equations that make rows from nothing


def _repeated(view: View) -> bool:
    """Whether a broadcast repeats one entry along rows."""
    dims = list(view.params["broadcast_dimensions"])
    return view.outs[0] not in dims or view.shape_in(0)[dims.index(view.outs[0])] == 1


def _tiled(view: View) -> bool:
    same_rank = len(view.shape_in(0)) == len(view.shape_out())
    return same_rank and view.outs[0] is not None and view.shape_in(0)[view.outs[0]] == 1


# The table

register(
    """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz conj cos cosh digamma eq
    erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le lgamma log log1p
    log2 logistic lt max min ne nextafter not one_minus_square or polygamma population_count pow random_gamma_grad
    regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square tan tanh threefry2x32 xor zeta
    """,
    local=elementwise,
    is_cheap=True,
)
register(
    "convert_element_type copy device_put imag name neg real reduce_precision stop_gradient",
    local=elementwise,
    linear=FIRST,
    is_cheap=True,
)
register("add add_any complex sub", local=elementwise, linear=TOGETHER, is_cheap=True)
register("mul", local=elementwise, linear=PRODUCT, is_cheap=True)
register("div", local=elementwise, linear=FIRST, is_cheap=True)
register("select_n", local=elementwise, linear=REST, is_cheap=True)

register("reduce_sum", local=_not_reduced, partial=_SUM, linear=FIRST)
register("reduce_max", local=_not_reduced, partial=_MAX)
register("reduce_min", local=_not_reduced, partial=_MIN)
register("reduce_and", local=_not_reduced, partial=_AND)
register("reduce_or", local=_not_reduced, partial=_OR)
register("argmax argmin reduce_prod reduce_xor", local=_not_reduced)
register("cumsum", local=_not_along("axis"), linear=FIRST)
register("cumlogsumexp cummax cummin cumprod", local=_not_along("axis"))
register("reduce_window_sum", local=_window, linear=FIRST)
register("reduce_window reduce_window_max reduce_window_min", local=_window)
register("select_and_gather_add select_and_scatter_add", local=_window, linear=FIRST)

register("dot_general", local=_dot, partial=Reduction(_contracted, part=_product), linear=PRODUCT)
register("conv_general_dilated", local=_convolution, linear=PRODUCT)
register("triangular_solve", local=leading_axes(2), linear=((1,),))
register("cholesky eigh geqrf householder_product lu qr svd", local=leading_axes(2))
register("fft", local=_fft, linear=FIRST)

register("broadcast_in_dim", local=_broadcast, alike=_repeated, linear=FIRST, is_cheap=True)
register("reshape", local=_reshape, linear=FIRST, is_cheap=True)
register("squeeze", local=_not_reduced, linear=FIRST, is_cheap=True)
register("tile", local=_tile, alike=_tiled, linear=FIRST)
register("iota", alike=lambda view: view.outs[0] != view.params["dimension"])
register("transpose", local=lambda view: view.params["permutation"][view.outs[0]] == view.ins[0], linear=FIRST)
register("rev", local=_not_reduced, linear=FIRST)
register("slice dynamic_slice", local=_slice, linear=FIRST)
register("split", local=_split, linear=FIRST)
register("unstack", local=_unstack, linear=FIRST)
register("concatenate", local=_concatenate, linear=TOGETHER)
register("stack", local=_stack, linear=TOGETHER)
register("pad", local=_pad, linear=TOGETHER)
register("dynamic_update_slice", local=_dynamic_update, linear=((0, 1),))
register("optimization_barrier", local=_each_alike)
register("reshard sharding_constraint", local=_each_alike, linear=FIRST)
register("pcast pvary", local=elementwise, linear=FIRST)
register("psum psum_invariant", linear=TOGETHER)
register("bitcast_convert_type", local=_bitcast)

register("gather", local=_gather, linear=FIRST)
register("scatter-add", local=_scatter, partial=Reduction(_scattered, part=_added), linear=((0, 2),))
register("scatter", local=_scatter, linear=((0, 2),))
register("scatter-max scatter-min scatter-mul scatter-sub", local=_scatter)
register("sort", local=_sorted)
register("top_k", local=lambda view: view.ins[0] != view.params.get("axis", len(view.shape_in(0)) - 1))

register("random_wrap random_unwrap", local=_wrapped)
register("random_fold_in", local=_drawn(elementwise))
register("random_split", local=_drawn(_wrapped))
register("random_bits", local=_drawn(_wrapped), positional=Positional(draws.is_drawn_by_rows, draws.at))
