"""In which order values have their rows: the batch's own, sorted by a key and sorted back, reversed, in halves.

Across calls rows must be separate. Tokens that are sorted by expert, multiplied, and sorted back are; a row that is
added to the row before it is not, and no weight makes micro-batches of such a loss add up.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_accum._rows import constants
from optax_accum._rows.levels import Kind
from optax_accum._rows.program import Equation, Number, Value
from optax_accum._rows.traces import COUPLED

BY_RANK, BY_PLACE = "takes rows by their rank among all", "takes rows by their place in the batch"
MEETS, COMPARED = "each row meets other rows", "each row is compared with all rows"
ADDED = "each row takes all rows before it"


class Order(NamedTuple):
    """An order of rows that an operation `by` made.

    `why_not`: why rows in this order are certainly no separate rows, once they are reduced, if so. `parts`: the orders
    of what was joined.
    """

    by: Any
    why_not: str | None = None
    parts: tuple["Order", ...] = ()


OWN = Order(None)  # the batch's
_REDUCES = ("reduce_", "arg", "cum", "dot_general", "sort", "top_k")
_SAME = ("convert_element_type", "broadcast_in_dim", "reshape", "expand_dims", "device_put")
_PRODUCTS = ("mul", "and", "dot_general")


class Orders:
    """The orders of the rows of a program's values; equations are noted, and read, in order."""

    def __init__(self, of_params: set[Value]):
        self.of_params = of_params
        self.of: dict[Value, Order] = {}  # where it is not the batch's
        self.alike: set[Value] = set()  # rows that are all alike have every order
        self.coupled: dict[
            Value, str | None
        ] = {}  # rows along several axes, or cut off: why a reduction is none of rows
        self.neutral: set[Value] = set()  # rows that no row of the batch decides, as a diagonal
        self.other_groups: dict[Value, int] = {}  # the case that a choice by this takes for rows of other groups
        self.made_by: dict[Value, Equation] = {}
        self.permutations: dict[Value, Equation] = {}  # from an index to the sort that returns it
        self.undone: dict[Value, Equation] = {}  # from the index that sorts back, to that sort
        self.sizes: set[Value] = set()  # how many rows have each key by which they are sorted

    def note(self, equation: Equation) -> None:
        self.made_by.update(dict.fromkeys(equation.outs, equation))

    def read(self, equation: Equation, kind: Kind) -> tuple[bool, str | None]:
        """Whether an operation keeps rows separate though it takes all of them; and why it certainly does not."""
        if equation.differs or kind in (Kind.MADE, Kind.FREE):
            self.neutral.update(value for value in equation.outs if value.axis is not None)
            return False, None
        if any(value.axis == COUPLED for value in (*equation.ins, *equation.outs)):
            return self._read_coupled(equation)
        if kind is Kind.WHOLE:
            rule = _RULES.get(equation.name)
            found = rule(self, equation) if rule else None
            if isinstance(found, Order):
                self.of.update(
                    (value, found) for value in equation.outs if value.axis is not None and found is not _SET
                )
            is_separate = isinstance(found, Order) and all(value.axis is not None for value in equation.outs)
            return is_separate, found if isinstance(found, str) else None
        with_rows = [value for value in equation.ins if value.axis is not None]
        if self.neutral.issuperset(with_rows):
            self.neutral.update(value for value in equation.outs if value.axis is not None)
        orders = {self.order(value) for value in with_rows if value not in self.alike}
        if not orders:
            self.alike.update(equation.outs)
            return True, None
        if len(orders) > 1:
            return False, f"{equation.name} where {MEETS}"
        (order,) = orders
        self.of.update((value, order) for value in equation.outs if value.axis is not None and order != OWN)
        return True, order.why_not if kind is Kind.PARTIAL else None

    def keep(self, equation: Equation, rows: Sequence[Value]) -> bool:
        """Notes that an equation has its rows in the order of these values; False if they have several."""
        orders = {self.order(value) for value in rows if value not in self.alike}
        is_one = len(orders) == 1 and not self.neutral.intersection(rows)
        self.of.update((value, order) for value in equation.outs for order in orders if is_one and order != OWN)
        return is_one

    def order(self, value: Value) -> Order:
        return self.of.get(value, OWN)

    def _read_coupled(self, equation: Equation) -> tuple[bool, str | None]:
        """An operation on rows along several axes, as n x n scores are, or on some of the rows."""
        rows = [value for value in equation.ins if value.axis is not None]
        if self.neutral.issuperset(rows):
            self.neutral.update(equation.outs)
            return False, None
        known = self._known(equation, rows)
        certain = known[0] if known and None not in known else None
        if all(value.axis != COUPLED for value in equation.outs):
            is_reduced = equation.name.startswith(_REDUCES) and certain is not None
            makers = [self.made_by.get(value) for value in equation.ins]
            are_slices = all(made is not None and made.name == "slice" for made in makers)
            if not is_reduced and equation.name == "concatenate" and are_slices and BY_PLACE in known:  # a roll
                self.of.update(dict.fromkeys(equation.outs, Order(equation)))
            return False, certain if is_reduced else None
        if not known:
            certain = COMPARED
            if equation.name in ("slice", "dynamic_slice"):
                certain = BY_RANK if self.order(equation.ins[0]).by else BY_PLACE
            elif equation.name in ("eq", "ne") and self.of_params.isdisjoint(equation.ins):
                certain = None  # whether two rows are of one group
                self.other_groups.update(dict.fromkeys(equation.outs, int(equation.name == "ne")))
            elif equation.name == "pad":
                certain = None  # rows that are added, as zeros are, count for nothing
        if equation.name == "not" and equation.ins[0] in self.other_groups:
            self.other_groups[equation.outs[0]] = 1 - self.other_groups[equation.ins[0]]
        self.coupled.update(dict.fromkeys(equation.outs, certain))
        return False, certain if constants.reduces_growing(equation) else None

    def _known(self, equation: Equation, rows: Sequence[Value]) -> list[str | None]:
        """Why a reduction of each operand is certainly none of rows; None for each of which that is not known."""
        known = [self.coupled[value] for value in rows if value in self.coupled]
        if equation.name == "select_n":
            cases = self._cases_apart(equation)
            return known if cases is None else [constants.choose(cases, list(map(self.coupled.get, equation.ins[1:])))]
        if equation.name in _PRODUCTS:
            masks = [place for place, value in enumerate(equation.ins) if value in self.neutral]
            entries = [constants.entries_apart(equation, place, self.made_by) for place in masks]
            return known if all(each is None or any(each) for each in entries) else [None]
        return known

    def _cases_apart(self, equation: Equation) -> list[Any] | None:
        """The cases that a choice takes where two rows meet, as far as they are known; None if it is by no mask."""
        test = equation.ins[0]
        if test in self.other_groups:
            return [self.other_groups[test]]
        return constants.entries_apart(equation, 0, self.made_by) if test in self.neutral else None

    # Indices

    def index(self, value: Value) -> Value:
        """The index that an operation takes, before it was cast, reshaped and made positive."""
        while (made := self.made_by.get(value)) is not None:
            if made.name in _SAME and len(made.ins) == 1:
                value = made.ins[0]
            elif self._is_made_positive(made) or (made.name == "max" and self.is_number(made.ins[0], 0)):
                value = made.ins[1]
            else:
                break
        return value

    def _is_made_positive(self, made: Equation) -> bool:
        """Whether an equation adds the length to an index if it is negative."""
        test = self.made_by.get(made.ins[0]) if made.name == "select_n" and len(made.ins) == 3 else None
        return test is not None and test.name == "lt" and test.ins[0] is made.ins[1] and self.is_number(test.ins[1], 0)

    def is_number(self, value: Value, number: float) -> bool:
        """Whether a value is a literal, or repeats one."""
        literal = self.index(value)
        return isinstance(literal, Number) and bool(np.all(literal.number == number))

    def sort_of(self, index: Value) -> Equation | None:
        return self.permutations.get(self.index(index))

    def numbers_rows(self, value: Value) -> bool:
        """Whether a value says which row is where: their numbers, perhaps sorted, or how many have each key."""
        made = self.made_by.get(self.index(value))
        if value in self.sizes:
            return True
        return self.sort_of(value) is not None or (made is not None and made.name == "iota")


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
    parts = tuple(map(orders.order, equation.ins))
    return None if any(part.why_not for part in parts) else Order("joined", parts=parts)


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
    count = len(order.parts)
    if count and length * count == operand.aval.shape[operand.axis or 0] and begin % length == 0:
        return order.parts[begin // length]
    return Order(("rows", order, begin, length), BY_PLACE if order == OWN else BY_RANK)


def _split(orders: Orders, equation: Equation) -> Order | None:
    operand, sizes = equation.ins[0], equation.single.params["sizes"]
    if operand.axis != equation.single.params["axis"]:
        return None
    for number, (result, size) in enumerate(zip(equation.outs, sizes, strict=True)):
        orders.of[result] = _part(orders, equation, operand, number * size, size)
    return None if len(set(sizes)) > 1 else _SET


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


_SET = Order("set")  # the orders of the results are set already
_Rule = Callable[[Orders, Equation], Order | str | None]
_RULES: dict[str, _Rule] = {
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
