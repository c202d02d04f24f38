"""What operations on all rows do to their order: a table.

`x[argsort(key)]` has its rows sorted by key, and `zeros.at[argsort(key)].set(...)` puts these back into the batch's own
order; `x[::-1]` reverses them; of `x[:n // 2]` it is certain that rows are taken by their place.
"""

from optax_accum._rows.orders import ADDED, BY_PLACE, BY_RANK, OWN, SET, Order, Orders, Rule
from optax_accum._rows.program import Equation, Value


def _sort(orders: Orders, equation: Equation) -> Order | None:
    if equation.ins[0].aval.ndim != 1:  # each column has an order of its own
        return None
    order = Order(equation)
    for operand, result in zip(equation.ins, equation.outs, strict=True):
        if orders.numbers_rows(operand) and orders.sort_of(operand) is None:
            orders.permutations[result] = equation
            key = orders.sort_of(equation.ins[0])
            if key is not None and equation.single.params["num_keys"] == 1:
                orders.undone[result] = key
    return order


def _gather(orders: Orders, equation: Equation) -> Order | str | None:
    operand, index = equation.ins
    order, numbers = orders.order(operand), equation.single.params["dimension_numbers"]
    if operand.axis is None or tuple(numbers.start_index_map) != (operand.axis,):
        return None
    if index.axis is not None and index.aval.size != operand.aval.shape[operand.axis]:
        return None
    if orders.undone.get(orders.index(index)) is order.by is not None:
        return OWN
    sort = orders.sort_of(index)
    if sort is not None and order == OWN:
        return Order(sort)
    is_at_places = order.by is not None and order.by.name == "sort" and index.axis is None
    return BY_RANK if is_at_places else None


def _scatter(orders: Orders, equation: Equation) -> Order | None:
    operand, index, updates = equation.ins
    sort, numbers = orders.sort_of(index), equation.single.params["dimension_numbers"]
    along = tuple(numbers.scatter_dims_to_operand_dims) == (operand.axis,)
    is_back = sort is not None and orders.order(updates) == Order(sort) and orders.order(operand) == OWN
    return OWN if along and is_back else None


def _joined(orders: Orders, equation: Equation) -> Order | None:
    lengths = {value.aval.shape[equation.outs[0].axis or 0] for value in equation.ins}
    along = equation.single.params["dimension"] == equation.outs[0].axis
    if not along or len(lengths) > 1 or any(value.axis != equation.outs[0].axis for value in equation.ins):
        return None
    made = [orders.made_by.get(value) for value in equation.ins]
    slices = {(each.ins[0], each.single.params["start_indices"]) for each in made if each and each.name == "slice"}
    if len(slices) == len(made) and len({operand for operand, _ in slices}) == 1:
        return Order(equation)  # all rows of one array, in another order: a roll
    joined = tuple(map(orders.order, equation.ins))
    return None if any(part.why_not for part in joined) else Order("joined", joined=joined)


def _sliced(orders: Orders, equation: Equation) -> Order | str | None:
    (operand, *_), axis, params = equation.ins, equation.outs[0].axis, equation.single.params
    if axis is None or axis != operand.axis or equation.name != "slice":
        is_sorted = getattr(orders.order(operand).by, "name", "") == "sort"
        return BY_RANK if is_sorted and operand.axis is not None else None
    begin, length = params["start_indices"][axis], equation.outs[0].aval.shape[axis]
    return _part(orders, equation, operand, begin, length)


def _part(orders: Orders, equation: Equation, operand: Value, begin: int, length: int) -> Order:
    """Some consecutive rows: one of the values that were joined, or rows by their rank or their place."""
    order = orders.order(operand)
    count = len(order.joined)
    if count and length * count == operand.aval.shape[operand.axis or 0] and begin % length == 0:
        return order.joined[begin // length]
    return Order(("rows", order, begin, length), BY_PLACE if order == OWN else BY_RANK)


def _split(orders: Orders, equation: Equation) -> Order | None:
    operand, sizes = equation.ins[0], equation.single.params["sizes"]
    if operand.axis != equation.single.params["axis"]:
        return None
    for number, (result, size) in enumerate(zip(equation.outs, sizes, strict=True)):
        orders.of[result] = _part(orders, equation, operand, number * size, size)
    return None if len(set(sizes)) > 1 else SET


def _ragged(orders: Orders, equation: Equation) -> Order | None:
    """Rows that are sorted by a key, and multiplied by the matrix of their key: its sizes count the keys."""
    rows, _, sizes = equation.ins
    order = orders.order(rows)
    key = order.by.ins[0] if order.by is not None and getattr(order.by, "name", "") == "sort" else None
    if key is None or not _counts(orders, sizes, key):
        return None
    orders.sizes.add(sizes)
    return order


def _counts(orders: Orders, sizes: Value, key: Value) -> bool:
    """Whether a value counts how often a key is 0, 1, ...: by adding ones at the keys, or by comparing them."""
    key, made = orders.index(key), orders.made_by.get(orders.index(sizes))
    if made is None:
        return False
    if made.name == "scatter-add":
        zeros, at, ones = made.ins
        return orders.index(at) is key and orders.is_number(zeros, 0) and orders.is_number(ones, 1)
    compared = orders.made_by.get(orders.index(made.ins[0])) if made.name == "reduce_sum" else None
    if compared is None or compared.name != "eq":
        return False
    others = [orders.made_by.get(orders.index(value)) for value in compared.ins if orders.index(value) is not key]
    return len(others) == 1 and others[0] is not None and others[0].name == "iota"


RULES: dict[str, Rule] = {
    "sort": _sort,
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "concatenate": _joined,
    "slice": _sliced,
    "dynamic_slice": _sliced,
    "split": _split,
    "rev": lambda orders, equation: Order(equation),
    "top_k": lambda orders, equation: BY_RANK,
    "ragged_dot_general": _ragged,
    "ragged_dot": _ragged,
    **dict.fromkeys(
        ("cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod"),
        lambda orders, equation: Order(equation, ADDED) if equation.outs[0] in orders.of_params else None,
    ),
}
