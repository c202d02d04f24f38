"""Rules: whether an equation treats rows one by one, reduces them in parts, or makes rows that are alike.

A rule is asked of an equation whose parameters are the same for n rows and for 2 n, but for sizes.
"""

import math
from collections.abc import Sequence

from optax_accum._rows import draws
from optax_accum._rows.registry import Rule
from optax_accum._rows.traces import Axis, View

# Rules for equations that may treat rows one by one


def elementwise(view: View) -> bool:
    """The rule of an operation on the entries of its operands, such as `add`.

    All operands and results that have rows have them along the same axis.
    """
    return len({axis for axis in (*view.ins, *view.outs) if axis is not None}) == 1


def each_alike(view: View) -> bool:
    return list(view.ins) == list(view.outs)


def dot(view: View) -> bool:
    (left_summed, right_summed), (left_batch, right_batch) = view.params["dimension_numbers"]
    left, right = view.ins
    if left is not None and right is not None:
        return left in left_batch and right in right_batch and left_batch.index(left) == right_batch.index(right)
    return left not in left_summed and right not in right_summed


def not_reduced(view: View) -> bool:
    axes = view.params["axes"] if "axes" in view.params else view.params["dimensions"]
    return all(axis not in axes for axis in view.ins if axis is not None) and _one(view.ins)


def not_along(key: str) -> Rule:
    return lambda view: _one(view.ins) and view.ins[0] is not None and view.ins[0] != view.params[key]


def _one(axes: Sequence[Axis]) -> bool:
    return len({axis for axis in axes if axis is not None}) == 1


def broadcast(view: View) -> bool:
    axis = view.ins[0]
    return axis is not None and view.params["broadcast_dimensions"][axis] == view.outs[0] and _kept(view)


def _kept(view: View) -> bool:
    """Whether the first operand and the result have equally many rows."""
    before, after = view.ins[0], view.outs[0]
    return before is not None and after is not None and view.shape_in(0)[before] == view.shape_out()[after]


def reshape(view: View) -> bool:
    before, after = view.ins[0], view.outs[0]
    in_blocks = math.prod(view.shape_in(0)[:before]) == math.prod(view.shape_out()[:after])
    return in_blocks and view.params.get("dimensions") is None


def sliced(view: View) -> bool:
    """All rows; or, with strides, one of each few: `x[0::2]` and `x[1::2]`, as of pairs."""
    axis, strides = view.ins[0], view.params.get("strides")
    if axis is None or axis != view.outs[0] or any(other is not None for other in view.ins[1:]):
        return False
    step = strides[axis] if strides else 1
    is_of_each = view.shape_in(0)[axis] == step * view.shape_out()[axis]
    return is_of_each and (step == 1 or view.params["start_indices"][axis] < step)


def split(view: View) -> bool:
    return view.ins[0] != view.params["axis"] and all(axis == view.ins[0] for axis in view.outs)


def pad(view: View) -> bool:
    """No rows are added; or as many to each one, as in the gradient of a slice with strides."""
    axis = view.ins[0]
    low, high, between = view.params["padding_config"][axis or 0]
    return view.ins[1] is None and axis == view.outs[0] and low >= 0 <= high and low + high == between


def dynamic_update(view: View) -> bool:
    operand, update, *starts = view.ins
    full = operand is not None and update is not None and view.shape_in(0)[operand] == view.shape_in(1)[update]
    return operand == update and full and all(axis is None for axis in starts)


def concatenate(view: View) -> bool:
    return view.params["dimension"] != view.outs[0] and None not in view.ins and elementwise(view)


def stack(view: View) -> bool:
    return (
        None not in view.ins and _one(view.ins) and view.outs[0] == view.ins[0] + (view.params["axis"] <= view.ins[0])
    )


def unstack(view: View) -> bool:
    return view.ins[0] != view.params["axis"]


def tile(view: View) -> bool:
    axis = view.outs[0]
    return axis is not None and view.params["reps"][axis] == 1


def convolution(view: View) -> bool:
    numbers = view.params["dimension_numbers"]
    apart = view.ins[0] == numbers.lhs_spec[0] and view.outs[0] == numbers.out_spec[0]
    return view.ins[1] is None and apart and view.params["batch_group_count"] == 1


def window(view: View) -> bool:
    """A pooling window must not reach from row to row."""
    axis, params = view.ins[0], view.params
    if axis is None or not elementwise(view):
        return False
    alone = lambda key, value: key not in params or tuple(params[key])[axis] == value
    ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    return all(alone(key, 1) for key in ones) and ("padding" not in params or tuple(params["padding"][axis]) == (0, 0))


def gather(view: View) -> bool:
    numbers, (table, at) = view.params["dimension_numbers"], view.ins
    if table is None:  # rows of indices into a table that all rows share
        return at is not None and at < len(view.shape_in(1)) - 1
    if at is not None:
        return _batched(numbers.operand_batching_dims, numbers.start_indices_batching_dims, table, at)
    whole = view.params["slice_sizes"][table] == view.shape_in(0)[table]
    return whole and table not in numbers.start_index_map and table not in numbers.collapsed_slice_dims


def _batched(ours: Sequence[int], theirs: Sequence[int], our: int, their: int) -> bool:
    return our in ours and list(ours).index(our) < len(theirs) and theirs[list(ours).index(our)] == their


def scatter(view: View) -> bool:
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


def fft(view: View) -> bool:
    return leading_axes(len(view.params["fft_lengths"]))(view)


def bitcast(view: View) -> bool:
    return _kept(view) and view.ins[0] == view.outs[0]


def sorting(view: View) -> bool:
    return None not in view.ins and elementwise(view) and view.ins[0] != view.params["dimension"]


def wrapped(view: View) -> bool:
    axis = view.ins[0]
    return axis == view.outs[0] and axis is not None and axis < min(len(view.shape_in(0)), len(view.shape_out()))


def drawn(rule: Rule) -> Rule:
    """The rule of an operation on keys: other generators than threefry draw for all keys at once."""
    return lambda view: draws.is_threefry(view.single.invars[0].aval) and rule(view)


# Rules for equations that take something from other devices, along axes of a mesh: of each row, the same row's. Who has
# other rows is no question of the table: along the axes of rows, no loss is read (`_within/whole_batch`).


def joined(view: View) -> bool:
    """The rule of `psum`: an array's own axes may be named, too, as `jax.vmap(axis_name=)` leaves them."""
    own = {axis for axis in view.params["axes"] if isinstance(axis, int)}
    return _one(view.ins) and all(
        axis is not None and axis not in own and out == axis - sum(other < axis for other in own)
        for axis, out in zip(view.ins, view.outs, strict=True)
    )


def all_gathered(view: View) -> bool:
    (axis,), at = view.ins, view.params["all_gather_dimension"]
    if view.params["tiled"]:
        return axis != at and view.outs[0] == axis
    return axis is not None and view.outs[0] == axis + (at <= axis)


def reduce_scattered(view: View) -> bool:
    (axis,), at = view.ins, view.params["scatter_dimension"]
    return axis is not None and axis != at and view.outs[0] == axis - (at < axis and not view.params["tiled"])


def all_to_all(view: View) -> bool:
    axis = view.ins[0]
    return axis not in (view.params["split_axis"], view.params["concat_axis"]) and view.outs[0] == axis


# Rules for equations that reduce rows in parts


def reduced(view: View) -> bool:
    return view.ins[0] in view.params["axes"] and len(view.ins) == 1


def flags(view: View) -> bool:
    return reduced(view) and view.single.invars[0].aval.dtype == bool  # of integers, these are sums of bits


def contracted(view: View) -> bool:
    (left_summed, right_summed), _ = view.params["dimension_numbers"]
    left, right = view.ins
    both = left in left_summed and right in right_summed
    return both and left_summed.index(left) == right_summed.index(right)


def sums_to_kernel(view: View) -> bool:
    """A convolution over rows, the gradient of a kernel: rows are the features over which it adds."""
    numbers = view.params["dimension_numbers"]
    return (view.ins[0], view.ins[1]) == (numbers.lhs_spec[1], numbers.rhs_spec[1]) and (
        view.params["feature_group_count"] == 1
    )


def scattered(view: View) -> bool:
    operand, at, updates = view.ins
    places = _scatter_axes(view)
    return operand is None and at is not None and at < len(places) and places[at] == updates


# Rules for equations that make rows from nothing


def repeated(view: View) -> bool:
    """Whether a broadcast repeats one entry along rows."""
    dims = list(view.params["broadcast_dimensions"])
    return view.outs[0] not in dims or view.shape_in(0)[dims.index(view.outs[0])] == 1


def tiled(view: View) -> bool:
    same_rank = len(view.shape_in(0)) == len(view.shape_out())
    return same_rank and view.outs[0] is not None and view.shape_in(0)[view.outs[0]] == 1
