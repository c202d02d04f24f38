"""In which order values have their rows: the batch's own, sorted by a key and sorted back, reversed, in halves.

Across calls rows must be separate. Tokens that are sorted by expert, multiplied, and sorted back are; a row that is
added to the row before it is not, and no weight makes micro-batches of such a loss add up.
"""

from collections.abc import Callable, Mapping, Sequence
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

    `why_not`: why rows in this order are certainly no separate rows, once they are reduced, if so. `joined`: the orders
    of what was joined.
    """

    by: Any
    why_not: str | None = None
    joined: tuple["Order", ...] = ()


OWN = Order(None)  # the batch's
SET = Order("set")  # the orders of the results are set already
_REDUCES = ("reduce_", "arg", "cum", "dot_general", "sort", "top_k")
_SAME = ("convert_element_type", "broadcast_in_dim", "reshape", "expand_dims", "device_put")
_PRODUCTS = ("mul", "and", "dot_general")


class Orders:
    """The orders of the rows of a program's values; equations are noted, and read, in order."""

    def __init__(self, of_params: set[Value], rules: "Mapping[str, Rule]"):
        self.of_params, self.rules = of_params, rules
        self.of: dict[Value, Order] = {}  # where it is not the batch's
        self.alike: set[Value] = set()  # rows that are all alike have every order
        # Rows along several axes, or cut off: why a reduction is none of rows.
        self.coupled: dict[Value, str | None] = {}
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
        if equation.differs or kind in (Kind.MADE, Kind.NO_ROWS):
            self.neutral.update(value for value in equation.outs if value.axis is not None)
            return False, None
        if any(value.axis == COUPLED for value in (*equation.ins, *equation.outs)):
            return self._read_coupled(equation)
        if kind is Kind.WHOLE:
            rule = self.rules.get(equation.name)
            found = rule(self, equation) if rule else None
            if isinstance(found, Order):
                self.of.update((value, found) for value in equation.outs if value.axis is not None and found is not SET)
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


# What an operation does to the order of rows: the order of its results, or why rows are certainly not separate there.
Rule = Callable[[Orders, Equation], Order | str | None]
