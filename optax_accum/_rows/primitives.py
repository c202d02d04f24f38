"""What each primitive of JAX does with rows: a table.

A primitive without an entry is taken to couple rows, which is always right: it runs once, on all of them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from optax_accum._rows.traces import Axis, View

Rule = Callable[[View], bool]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHAPES = _names(  # parameters that may differ with the number of rows: shapes, and programs, which are looked into
    """
    branches bwd body_jaxpr call_jaxpr cond_jaxpr ctx_mesh debug_info ft_in ft_out fun_jaxpr fwd_jaxpr_thunk
    in_avals jaxpr jvp_jaxpr_fun jvp_jaxpr_thunk length limit_indices name new_sizes out_avals out_sharding
    out_trees shape sharding sizes slice_sizes update_consts update_jaxpr _split_transpose
    """
)


def same_numbers(view: View) -> bool:
    """Whether the traces for n rows and for 2 n differ only in shapes."""
    double = view.double.params
    return all(key in _SHAPES or equal(value, double.get(key)) for key, value in view.params.items())


def equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or bool(a != a and b != b)  # a gather may fill with NaN
    except Exception:  # arrays among the parameters
        return False


# Rules for equations that may treat rows one by one


def _on_one_axis(view: View) -> bool:
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
    return view.params["dimension"] != view.outs[0] and None not in view.ins and _on_one_axis(view)


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
    if axis is None or not _on_one_axis(view):
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


def _leading(trailing: int) -> Rule:
    """The rule of an operation on the last axes: rows must lie before them."""

    def rule(view: View) -> bool:
        axes = [(axis, len(view.shape_in(i)) - trailing) for i, axis in enumerate(view.ins)]
        return all(axis is not None and axis < limit for axis, limit in axes) and _on_one_axis(view)

    return rule


def _solve(view: View) -> bool:
    return _leading(2)(view)


def _fft(view: View) -> bool:
    return _leading(len(view.params["fft_lengths"]))(view)


def _bitcast(view: View) -> bool:
    return _kept(view) and view.ins[0] == view.outs[0]


def _wrapped(view: View) -> bool:
    axis = view.ins[0]
    return axis == view.outs[0] and axis is not None and axis < min(len(view.shape_in(0)), len(view.shape_out()))


ELEMENTWISE = _names(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
    conj convert_element_type copy cos cosh device_put digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    igamma igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul name
    ne neg nextafter not one_minus_square or polygamma population_count pow random_fold_in random_gamma_grad real
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta
    """
)
_REDUCED = _names("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")

LOCAL: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _on_one_axis),
    **dict.fromkeys(_REDUCED, _not_reduced),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), _not_along("axis")),
    **dict.fromkeys(("cholesky", "triangular_solve", "householder_product"), _solve),
    **dict.fromkeys(("eigh", "lu", "qr", "svd", "geqrf"), _solve),
    **dict.fromkeys(("random_wrap", "random_unwrap", "random_bits", "random_split"), _wrapped),
    **dict.fromkeys(("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"), _window),
    **dict.fromkeys(("select_and_scatter_add", "select_and_gather_add"), _window),
    **dict.fromkeys(("slice", "dynamic_slice"), _slice),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-max", "scatter-min", "scatter-sub"), _scatter),
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "dynamic_update_slice": _dynamic_update,
    "fft": _fft,
    "gather": _gather,
    **dict.fromkeys(("optimization_barrier", "reshard", "sharding_constraint"), _each_alike),
    "pad": _pad,
    "reshape": _reshape,
    "rev": lambda view: view.ins[0] not in view.params["dimensions"],
    "sort": lambda view: None not in view.ins and _on_one_axis(view) and view.ins[0] != view.params["dimension"],
    "split": _split,
    "stack": _stack,
    "squeeze": lambda view: view.ins[0] not in view.params["dimensions"],
    "tile": _tile,
    "top_k": lambda view: view.ins[0] != view.params.get("axis", len(view.shape_in(0)) - 1),
    "transpose": lambda view: view.params["permutation"][view.outs[0]] == view.ins[0],
    "unstack": _unstack,
}


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


PARTIAL: dict[str, Rule] = {
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), _reduced),
    **dict.fromkeys(("reduce_and", "reduce_or"), _flags),
    "scatter-add": _scattered,
    "dot_general": _contracted,
}

# Rules for equations that make rows from nothing

ALIKE: dict[str, Rule] = {
    "broadcast_in_dim": lambda view: view.outs[0] not in view.params["broadcast_dimensions"],
    "iota": lambda view: view.outs[0] != view.params["dimension"],
}
