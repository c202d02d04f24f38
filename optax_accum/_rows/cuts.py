"""Which rows to keep for a later loop: the fewest bytes from which it makes what it takes, a minimum cut.

An equation may run again at a price. Each value is either kept, for its bytes, or made again, of values that are kept
or made again themselves.
"""

import collections
from collections.abc import Callable, Iterable
from typing import Any

from optax_accum._rows.program import Equation, Value

ALWAYS = 1 << 62  # the price of what cannot be


def smallest(
    wanted: Iterable[Value],
    made: dict[Value, Equation],
    bytes_of: Callable[[Value], int],
    price_of: Callable[[Equation], int],
) -> list[Value]:
    """The values to keep, of which the `wanted` ones are made. Of equal sets the earliest: more is made of it.

    Args:
      wanted: the values that a later loop takes.
      made: the equations that make values.
      bytes_of: what it costs to keep a value; 0 for one that is there anyway.
      price_of: what it costs to run an equation again; `ALWAYS` for one that must not.
    """
    # A value is two nodes. The edge between them costs its bytes: cut, it is kept. The edge from the source costs
    # what its equation does: cut, that runs again, of values that are kept themselves or made again.
    network = _Network()
    todo, seen = list(dict.fromkeys(wanted)), dict[Value, None]()
    for value in todo:
        network.edge((value, "kept"), network.sink, ALWAYS)
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen[value] = None
        size, equation = bytes_of(value), made.get(value)
        network.edge((value, "made"), (value, "kept"), size)
        if not size:
            continue
        price = ALWAYS if equation is None else price_of(equation)
        network.edge(network.source, (value, "made"), price)
        if equation is not None and price < ALWAYS:
            for taken in equation.ins:
                network.edge((taken, "kept"), (value, "made"), ALWAYS)
                todo.append(taken)
    before = network.before_the_cut()
    return [v for v in seen if (v, "made") in before and (v, "kept") not in before and bytes_of(v)][::-1]


class _Network:
    """A flow network; edges go from the source to the sink."""

    def __init__(self) -> None:
        self.source, self.sink = object(), object()
        self.left: dict[Any, dict[Any, int]] = collections.defaultdict(lambda: collections.defaultdict(int))

    def edge(self, begin: Any, end: Any, capacity: int) -> None:
        self.left[begin][end] += capacity
        self.left[end][begin] += 0

    def before_the_cut(self) -> set[Any]:
        """What the source reaches when no more can flow: one side of the earliest of the minimum cuts."""
        while self.sink in (before := self._reached()):
            path, end = [], self.sink
            while end is not self.source:
                path.append((before[end], end))
                end = before[end]
            least = min(self.left[a][b] for a, b in path)
            for a, b in path:
                self.left[a][b] -= least
                self.left[b][a] += least
        return set(before)

    def _reached(self) -> dict[Any, Any]:
        """The nodes to which more can flow, nearest first until the sink; each with the node before it."""
        before: dict[Any, Any] = {self.source: None}
        todo = collections.deque([self.source])
        while todo and self.sink not in before:
            begin = todo.popleft()
            for end, left in self.left[begin].items():
                if left > 0 and end not in before:
                    before[end] = begin
                    todo.append(end)
        return before
