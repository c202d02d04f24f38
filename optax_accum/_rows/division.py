"""What kind each equation of a program is, and which loop it is in: `x - mean(x)` is LOCAL, one loop after `x`."""

from collections.abc import Sequence

import jax.numpy as jnp

from optax_accum._core.dtypes import is_narrow
from optax_accum._core.equations import is_cast_down
from optax_accum._core.folds import SUM, Fold
from optax_accum._rows import derivatives, layers, locality, perturbation
from optax_accum._rows.levels import ONCE, Bodies, Kind
from optax_accum._rows.program import Constant, Equation, Number, Program, Value
from optax_accum._rows.registry import known

FOLLOWS = frozenset(
    [
        "add",
        "add_any",
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "div",
        "dynamic_update_slice",
        "mul",
        "neg",
        "pad",
        "reduce_precision",
        "reduce_sum",
        "reshape",
        "squeeze",
        "stack",
        "sub",
        "transpose",
    ]
)
ADDS = ("add", "add_any", "sub")
SMALL = 128  # entries
_LAYOUT = frozenset(["reshape", "squeeze", "transpose"])
_AS_IT_IS = _LAYOUT | {"broadcast_in_dim", "convert_element_type", "copy", "max", "min", "select_n"}


class Division:
    """The kind of each equation of a program, and the loop index of each value.

    Rows of index 1 are made in loop 1; whatever else has index 1 is there when loop 0 is over, and loop 1 may take it.
    In `x - mean(x)` of activations x, x has 0, the mean 1, the difference 1. Values that the batch alone decides have
    0, even where all its rows are taken together: that runs once, before the first loop.
    """

    def __init__(self, program: Program, is_param: Sequence[bool], differentiable: Sequence[bool], *, joins_all: bool):
        self.joins_all = joins_all
        self.program, self.equations = program, _needed(program)
        self.of_params = {value for value, is_ in zip(program.inputs, is_param, strict=True) if is_}
        self.differentiable = {value for value, is_ in zip(program.inputs, differentiable, strict=True) if is_}
        self.rowless = {value for value in program.inputs if value.axis is None}  # what no row of the batch decides
        self.used_by: dict[Value, list[Equation]] = {value: [] for value in program.outputs}
        for equation in self.equations:
            for value in equation.ins:
                self.used_by.setdefault(value, []).append(equation)
        self.alone = self._alone() if joins_all else set()
        self.kinds: dict[Equation, Kind] = {}
        self.loop_index: dict[Value, int] = {}
        self.ready_at: dict[Equation, int] = {}  # the loop index of its results
        self.made_by: dict[Value, Equation] = {}  # values that loops make
        self.unbatched: set[Value] = set()  # of these, the same for each micro-batch: the counter of a loop over layers
        self.folds: dict[Value, Fold] = {}  # values of which each micro-batch of a loop gives a part
        self.bodies: dict[Equation, Bodies] = {}
        self.zeros = layers.Zeros()
        for equation in self.equations:
            self._classify(equation)
            self.zeros.read(equation)

    def _alone(self) -> set[Equation]:
        """The equations that the batch alone decides, whose results are used for nothing but to be added to a gradient.

        Of such is the gradient of a parameter in which the loss is linear. It need not be there before the first loop.
        """
        of_params, zeros = set(self.of_params), layers.Zeros()
        for equation in self.equations:
            zeros.read(equation)
            if not of_params.isdisjoint(equation.ins):
                of_params.update(equation.outs)
        alone, taken = set(), set[Value]()
        for equation in reversed(self.equations):
            if not taken.isdisjoint(equation.outs):
                taken.update(equation.ins)
            elif of_params.isdisjoint(equation.ins):
                alone.add(equation)
            else:
                every = set(equation.ins)
                follows = [v for v in every if any(layers.follows(equation, sums, zeros) for sums in ({v}, every))]
                taken.update(every.difference(follows))
        return alone

    def _classify(self, equation: Equation) -> None:
        if all(value in self.rowless or isinstance(value, Constant | Number) for value in equation.ins):
            self.rowless.update(equation.outs)
        perturbed = perturbation.results_of(equation.single, [value in self.differentiable for value in equation.ins])
        self.differentiable.update(value for value, is_ in zip(equation.outs, perturbed, strict=True) if is_)
        kind = self.kinds[equation] = self._kind(equation)
        in_loop = not self.of_params.isdisjoint(equation.ins) or (kind is Kind.PARTIAL and equation in self.alone)
        index = self.ready_at[equation] = self._index(equation, kind, in_loop)
        self.loop_index.update(dict.fromkeys(equation.outs, index))
        if in_loop:
            self.of_params.update(equation.outs)
        if kind is Kind.LOCAL:
            self.made_by.update(dict.fromkeys(equation.outs, equation))
            if equation.view.has_rows or not self.unbatched.isdisjoint(equation.ins):
                self.unbatched.update(value for value in equation.outs if value.axis is None)
        if equation in self.bodies:
            sums = [v for v, is_part in zip(equation.outs, self.bodies[equation].are_sums, strict=True) if is_part]
            self.unbatched.difference_update(sums)
            self.folds.update(dict.fromkeys(sums, SUM))
            self.loop_index.update(dict.fromkeys(sums, index + 1))
        if kind is Kind.PARTIAL and in_loop:
            self.made_by.update(dict.fromkeys(equation.outs, equation))
            fold = SUM if self._follows(equation) else known(equation.name).partial.fold
            self.folds.update(dict.fromkeys(equation.outs, fold))

    def _index(self, equation: Equation, kind: Kind, in_loop: bool) -> int:
        """The loop index of an equation's results: the largest of its operands', or one more.

        One more if it runs once and takes rows that a loop makes: all of them are there when that loop is over. Also if
        it adds up rows in a loop. What follows a sum linearly is done to its parts, in that loop: nothing waits.
        """
        waits = [kind in ONCE and self.is_of_loops(value) for value in equation.ins]
        indices = (self.loop_index.get(value, 0) + more for value, more in zip(equation.ins, waits, strict=True))
        begins_sum = in_loop and kind is Kind.PARTIAL and not self._follows(equation)
        return max(indices, default=0) + begins_sum

    def is_of_loops(self, value: Value) -> bool:
        """Whether a value is there when a loop is over, and not before."""
        return value in self.made_by and value in self.of_params and (value.axis is not None or value in self.unbatched)

    def _follows(self, equation: Equation) -> bool:
        return not self.folds.keys().isdisjoint(equation.ins)

    def _kind(self, equation: Equation) -> Kind:
        """A table: what an equation takes and makes, and what a rule proves."""
        if self._joins(equation):
            return Kind.PARTIAL
        view = equation.view._replace(perturbed=[value in self.differentiable for value in equation.ins])
        if equation.name in locality.NESTED:  # a result that nobody uses may be anything; one without rows takes none
            pairs = zip(view.outs, equation.outs, strict=True)
            view = view._replace(outs=[axis for axis, value in pairs if value in self.used_by and axis is not None])
        if view.has_rows:
            if locality.is_local(view) and not equation.differs:
                return Kind.LOCAL
            if self._is_partial(equation):
                return Kind.PARTIAL
            return Kind.LOCAL if self._has_body(equation) else Kind.WHOLE
        if view.makes_rows:
            is_made_again = locality.is_alike(view) or locality.is_positional(view)
            return Kind.LOCAL if is_made_again and not equation.differs else Kind.MADE
        if self._is_narrow(equation) or self._is_layout(equation) or self._is_of_counters(equation):
            return Kind.LOCAL
        return Kind.NO_ROWS

    def _joins(self, equation: Equation) -> bool:
        """Whether an equation that follows sums linearly is done to their parts: a transpose, or a sum of two."""
        if equation.name not in FOLLOWS or not self._follows(equation):
            return False
        if equation.name == "broadcast_in_dim" and equation.outs[0].aval.size != equation.ins[0].aval.size:
            return False
        # Parts are there for a moment, in one loop: all come from it, what is taken beside them is there before it, and
        # nobody else takes them, so that the sum before this step is never there.
        taken = [value for value in dict.fromkeys(equation.ins) if value in self.folds]
        index = self.loop_index[taken[0]]
        others = [value for value in equation.ins if value not in self.folds and value not in self.zeros]
        alone = all(self.folds[v] is SUM and self.loop_index[v] == index and len(self.used_by[v]) == 1 for v in taken)
        known_before = all(self.loop_index.get(value, 0) < index and value not in self.made_by for value in others)
        is_of_two = equation.name in ("add", "add_any") or self.joins_all
        from_layers = any(self.made_by[value] in self.bodies for value in taken) and not is_of_two
        is_output = not set(taken).isdisjoint(self.program.outputs)
        more = any(map(self.adds_to_more, (self.made_by[value] for value in taken)))
        is_refused = is_output or from_layers or more or not self.differentiable.isdisjoint(equation.ins)
        if is_refused or not (alone and known_before):
            return False
        return self._adds_shares(equation, others) or layers.follows(equation, set(taken), self.zeros)

    def _adds_shares(self, equation: Equation, others: Sequence[Value]) -> bool:
        """Whether a term that no row decides, decay say, is added to a sum: each micro-batch adds its share of it."""
        if not self.joins_all or equation.name not in ADDS or not self.rowless.issuperset(others):
            return False
        avals = [value.aval for value in (*equation.ins, *equation.outs)]
        return len({(aval.shape, aval.dtype) for aval in avals}) == 1 and jnp.issubdtype(avals[0].dtype, jnp.inexact)

    def adds_to_more(self, equation: Equation) -> bool:
        """Whether a scatter adds rows to something else than zeros."""
        return equation.name.startswith("scatter") and equation.ins[0] not in self.zeros

    def _has_body(self, equation: Equation) -> bool:
        """Whether an equation is a loop over layers, or a branch, that treats rows one by one, and adds over them."""
        if not self.differentiable.isdisjoint(equation.ins) or self.of_params.isdisjoint(equation.ins):
            return False
        bodies = layers.bodies_of(equation, self.zeros)
        if bodies is None:
            return False
        self.bodies[equation] = bodies
        return True

    def _is_partial(self, equation: Equation) -> bool:
        if equation.differs or not locality.is_partial(equation.view):
            return False
        return not (self._shares_ties(equation) or self._adds_to_made(equation))

    def _is_layout(self, equation: Equation) -> bool:
        """Whether an equation only writes parameters in another order, or a number: loops do it where they need it."""
        if equation.name == "broadcast_in_dim" and all(isinstance(value, Number) for value in equation.ins):
            return True  # zeros, for a sum to begin with
        takes_params = self.rowless.issuperset(equation.outs) and not self.of_params.isdisjoint(equation.ins)
        return takes_params and equation.name in _LAYOUT and self.differentiable.isdisjoint(equation.ins)

    def _is_of_counters(self, equation: Equation) -> bool:
        """Whether an equation takes a loop's counter: each micro-batch does it again, and no loop must end for it.

        Not where a derivative passes, since a user's rule takes the whole cotangent, and only small results: what is
        used after its loop is kept for each micro-batch.
        """
        last = max((self.loop_index.get(value, 0) for value in equation.ins), default=0)
        counters = [value for value in self.unbatched.intersection(equation.ins) if self.loop_index[value] == last]
        if not counters or equation.single.effects or not self.differentiable.isdisjoint(equation.ins):
            return False
        return max(value.aval.size for value in equation.outs) <= SMALL

    def _is_narrow(self, equation: Equation) -> bool:
        """Whether an equation makes narrow parameters: loops make them again, and add their gradient wide."""
        if self.differentiable.isdisjoint(equation.ins) or not equation.outs or derivatives.has_backward(equation):
            return False
        if not (equation.view.has_same_sizes and self.rowless.issuperset(equation.outs)):
            return False  # narrow, but of rows: a mean, say, is there once, when its loop is over
        begins = is_cast_down(equation.single)
        goes_on = any(value in self.made_by for value in equation.ins) and is_narrow(equation.outs[0].aval.dtype)
        return begins or goes_on

    def _shares_ties(self, equation: Equation) -> bool:
        """Whether an extreme is compared with the rows, as its gradient is, which the rows that attain it share.

        Made again in another loop, no row need be equal to it. So all rows are kept, and the extreme is taken of these.
        """
        if equation.name not in ("reduce_max", "reduce_min"):
            return False
        result = equation.outs[0]
        if not jnp.issubdtype(result.aval.dtype, jnp.inexact):
            return False
        if result in self.differentiable:
            uses = self.used_by.get(result, [])
            return result in self.program.outputs or any(use.name != "stop_gradient" for use in uses)
        if self.of_params.isdisjoint(equation.ins):
            return False
        todo = [result]
        while todo:
            uses = self.used_by.get(todo.pop(), [])
            if any(use.name == "eq" for use in uses):
                return True
            todo += [value for use in uses if use.name in _AS_IT_IS for value in use.outs]
        return False

    def _adds_to_made(self, equation: Equation) -> bool:
        """Whether a scatter adds rows to narrow parameters, which exist in loops alone."""
        return equation.name.startswith("scatter") and equation.ins[0] in self.made_by and self.adds_to_more(equation)


def _needed(program: Program) -> list[Equation]:
    """The equations that outputs need, and those that have effects, in order."""
    wanted = set(program.outputs)
    needed: list[Equation] = []
    for equation in reversed(program.equations):
        if equation.single.effects or not wanted.isdisjoint(equation.outs):
            needed.append(equation)
            wanted.update(equation.ins)
    return needed[::-1]
