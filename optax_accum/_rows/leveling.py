"""The loops of a program of rows, in order: what each runs, and which rows it keeps for later ones.

What crosses from one loop to the next is a minimum cut, by bytes: what is cheap is made again. A program of a gradient
goes forward, then backward. What its backward loops take of the forward ones is made again, micro-batch by micro-batch,
from the rows with which a forward loop began, or from earlier ones, its bases, as far as a share of the forward pass
may run once more.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from optax_accum._core import compilers
from optax_accum._core.equations import every_equation, inner_programs
from optax_accum._rows import cuts
from optax_accum._rows.division import Division
from optax_accum._rows.levels import ONCE, Kind, Levels, Loop, Stage
from optax_accum._rows.linear import nonlinear_rules
from optax_accum._rows.pairing import paired_inside
from optax_accum._rows.program import Constant, Equation, Number, Program, Value, needed
from optax_accum._rows.registry import known

READING = 4  # what is kept anyway costs a fourth of its bytes where it is read
CHEAP = 0.25  # of the bytes of its results is what a cheap equation moves: it fuses with those that take them
PRICE = 0.4  # of a byte that an equation moves once more, beside one that is kept
STEPS = 6  # of the search for the fewest bases


def levels_of(
    program: Program,
    is_param: Sequence[bool],
    *,
    differentiated: bool = True,
    by_rows: bool = False,
    joins_all: bool = False,
    own: int | None = None,
    recompute: float = 0.0,
) -> Levels:
    """How a program runs.

    Args:
      program: the paired traces.
      is_param: which inputs are not the batch.
      differentiated: whether the program may be differentiated by them.
      by_rows: and by the batch, too.
      joins_all: whether whatever follows a sum linearly is done to its parts, even where that takes more memory.
      own: how many of the first outputs of the program of a gradient are the function's own.
      recompute: how much of the function may run once more for less memory, as a share of it.
    """
    differentiable = [differentiated and (is_ or by_rows) for is_ in is_param]
    division = Division(program, is_param, differentiable, joins_all=joins_all)
    stages = _Staging(division, own, recompute).stages()
    return Levels(
        program, division.kinds, division.of_params, division.differentiable, stages, division.bodies, division.folds
    )


def is_over_layers(equation: Equation, levels: Levels) -> bool:
    """Whether an equation is a loop over layers, or tokens, that can be evaluated level by level."""
    if equation.differs or any(map(compilers.makes_reference, every_equation(equation.single))):
        return False
    is_scan = equation.name == "scan" and equation.single.params["length"] == equation.double.params["length"]
    return is_scan and not levels.of_params.isdisjoint(equation.ins) and any(v.axis is not None for v in equation.ins)


def body_levels(equation: Equation, levels: Levels) -> Levels:
    consts, carried = compilers.sizes_of_scan(equation.single)
    (body,) = paired_inside(equation)
    is_param = [value in levels.of_params for value in equation.ins]
    is_param[consts : consts + carried] = [True] * carried  # made by the iteration before, of parameters
    by_rows = not levels.differentiable.isdisjoint(set(levels.program.inputs) - levels.of_params)
    return levels_of(body, is_param, differentiated=bool(levels.differentiable), by_rows=by_rows)


class _Staging:
    """The stages of a program, loop by loop: what each runs, and which rows it leaves for later ones."""

    def __init__(self, division: Division, own: int | None, recompute: float):
        self.division, self.program, self.equations = division, division.program, division.equations
        self.kinds, self.of_params = division.kinds, division.of_params
        self.made_by, self.loop_index = division.made_by, division.loop_index
        # A gradient's program goes forward up to the function's outputs, then backward: loop `turn` and later.
        outputs = self.program.outputs[:own]
        is_backward = own is not None and len(self.program.outputs) > own
        self.turn = max((self.loop_index.get(v, 0) for v in outputs), default=0) if is_backward else 1 << 30
        self.always: set[Value] = set()  # rows that equations on all rows take, or outputs
        self.frontier: set[Value] = set()  # rows that the last loop has left for later ones
        self.bases: set[Value] = self._bases(recompute) if is_backward else set()  # rows that backward loops begin with

    def stages(self) -> list[Stage]:
        there = {*self.program.inputs, *(v for e in self.equations for v in e.ins if isinstance(v, Constant | Number))}
        before, stages = self._before_loop(0, there), []
        for now in range(max(self.division.ready_at.values(), default=0) + 1):
            if loop := self._loop(now, there):
                there.update(loop.rows, loop.sums)
                stages.append(Stage(before, loop))
                before = []
            before += self._before_loop(now + 1, there)
        left = needed(self.program.outputs, self.made_by, there)
        return self._with_ends([*stages, Stage([*before, *self._in_order(left)])])

    def _with_ends(self, stages: list[Stage]) -> list[Stage]:
        """Tells each loop which of the rows that loops have kept nothing takes after it."""
        kept = {value for stage in stages if stage.loop for value in stage.loop.rows}
        later: set[Value] = set(self.program.outputs)
        found: list[Stage] = []
        for stage in reversed(stages):
            if loop := stage.loop:
                ends = [value for value in loop.takes if value in kept and value not in later]
                stage = dataclasses.replace(stage, loop=dataclasses.replace(loop, ends=ends))
                later.update(loop.takes)
            later.update(value for equation in stage.before_loop for value in equation.ins)
            found.append(stage)
        return found[::-1]

    def _before_loop(self, index: int, there: set[Value]) -> list[Equation]:
        """The equations that run once as soon as so many loops are over, and those that prepare the batch for them."""
        once = {e for e in self.equations if self.division.ready_at[e] == index and self._runs_once(e)}
        prepare = needed([value for equation in once for value in equation.ins], self.made_by, there)
        there.update(value for equation in once for value in equation.outs)
        return self._in_order(once | prepare)

    def _runs_once(self, equation: Equation) -> bool:
        """Whether an equation runs between loops; a reduction of rows does if the batch alone decides it."""
        is_of_batch = self.kinds[equation] is Kind.PARTIAL and self.division.folds.keys().isdisjoint(equation.outs)
        return self.kinds[equation] in ONCE or is_of_batch

    def _runs_in(self, equation: Equation) -> int:
        """The loop that is the first to run an equation."""
        return self.division.ready_at[equation] - (self.kinds[equation] is Kind.PARTIAL)

    def _loop(self, now: int, there: set[Value]) -> Loop | None:
        """The pass over the micro-batches that makes values for later levels; None if they need none."""
        sums = {value: fold for value, fold in self.division.folds.items() if self._is_summed(value, now)}
        whole = [e for e in self.equations if self.division.ready_at[e] > now and self.kinds[e] in ONCE]
        outputs = [value for value in self.program.outputs if self.loop_index.get(value, 0) == now]
        wanted = [*(value for equation in whole for value in equation.ins), *outputs]
        always = [value for value in dict.fromkeys(wanted) if self._is_made(value, now)]
        self.always.update(always)
        cut = self._crossing(now)
        rows = [value for value in dict.fromkeys([*cut, *always]) if value not in there]
        if not (rows or sums):
            return None
        equations = self._in_order(needed([*rows, *sums], self.made_by, there))
        takes = [value for e in equations for value in e.ins if value in there]
        onto = {value: self.made_by[value].ins[0] for value in sums if self.division.adds_to_more(self.made_by[value])}
        # Rows that no later loop takes are given up; one that takes them all the same makes them again.
        there.difference_update(self.frontier.difference(cut, self.always))
        self.frontier = set(cut)
        return Loop(equations, sums, rows, list(dict.fromkeys(takes)), onto)

    def _crossing(self, now: int) -> list[Value]:
        """The rows that a loop keeps for later ones: the fewest bytes from which these make what else they take."""
        later = [e for e in self.equations if not self._runs_once(e) and self._runs_in(e) > now]
        taken = [v for e in later for v in e.ins if self._is_made(v, now) and not self._is_taken_backward(v, e)]
        bases = [value for value in self.bases if self._is_made(value, now)]

        def is_made_again(value: Value) -> bool:
            """Whether a backward loop makes a value again, of bases, which are there."""
            return now >= self.turn > self.loop_index[value] and value not in self.always

        def bytes_of(value: Value) -> int:
            if value in self.always or value in self.bases or not self._is_made(value, now):
                return 0
            return size_of(value) // READING if is_made_again(value) else size_of(value)

        makes = {value: e for value, e in self.made_by.items() if value not in self.frontier}
        price_of = lambda equation: 0 if self._is_cheap(equation) else cuts.ALWAYS
        cut = cuts.smallest(taken, makes, bytes_of, price_of)
        return [*(value for value in cut if not is_made_again(value)), *bases]

    def _is_summed(self, value: Value, now: int) -> bool:
        """Whether a loop gives the parts of a value that is used after it, not only by what joins its parts."""
        if self.loop_index[value] != now + 1:
            return False
        uses = self.division.used_by.get(value, ())
        after = [e for e in uses if self.kinds[e] is not Kind.PARTIAL or self.division.ready_at[e] != now + 1]
        return bool(after) or value in self.program.outputs

    def _is_made(self, value: Value, now: int) -> bool:
        """Whether a value is rows that loops so far have made; rows that the batch alone decides are made again."""
        return self.division.is_of_loops(value) and value not in self.division.folds and self.loop_index[value] <= now

    def _is_taken_backward(self, value: Value, equation: Equation) -> bool:
        """Whether a backward loop takes a value of a forward one: it is made again from bases."""
        return self._runs_in(equation) >= self.turn > self.loop_index.get(value, 0)

    def _bases(self, recompute: float) -> set[Value]:
        """The rows from which backward loops make again what they take of forward ones.

        Kept for the whole batch, all that a backward pass takes would be as large as without micro-batches. So a
        backward loop begins with a few rows, its bases, and runs the forward loop once more for its micro-batch alone.
        With fewer bases it runs earlier forward loops, too: as many bases as `recompute` allows are left out, evenly.
        """
        wanted = self._wanted()
        best = self._bases_at(1.0, wanted)
        if not recompute or not wanted:
            return best
        allowed = recompute * self._cost_forward()
        low, high = 0.0, 1.0
        for _ in range(STEPS):
            share = (low + high) / 2
            found = self._bases_at(share, wanted)
            is_allowed = (
                sum(self._cost_recomputed(forward_loop, values, found) for forward_loop, values in wanted.items())
                <= allowed
            )
            low, high = (low, share) if is_allowed else (share, high)
            best = min(best, found, key=_bytes) if is_allowed else best
        return best

    def _cost_forward(self) -> float:
        """The bytes that all forward loops move."""
        loops = [e for e in self.equations if not self._runs_once(e) and self._runs_in(e) < self.turn]
        forward = [equation for equation in loops if not self.of_params.isdisjoint(equation.ins)]
        return sum(CHEAP * _bytes(e.outs) if self._is_cheap(e) else _cost(e) for e in forward)

    def _wanted(self) -> dict[int, list[Value]]:
        """The rows that backward loops take of forward ones, by the last forward loop that makes some of them."""
        by_loop: dict[int, dict[Value, None]] = {}
        for equation in self.equations:
            if not self._runs_once(equation) and self._runs_in(equation) >= self.turn:
                taken = (v for v in equation.ins if self._is_made(v, self.turn - 1))
                by_loop.setdefault(self._runs_in(equation), {}).update(dict.fromkeys(taken))
        wanted: dict[int, dict[Value, None]] = {}
        for values in by_loop.values():
            if values:
                wanted.setdefault(max(self.loop_index[value] for value in values), {}).update(values)
        return {forward_loop: list(wanted[forward_loop]) for forward_loop in sorted(wanted)}

    def _bases_at(self, share: float, wanted: dict[int, list[Value]]) -> set[Value]:
        """The bases, where a share of the forward loops have some, evenly."""
        kept: set[Value] = set()

        def bytes_of(value: Value) -> int:
            if not self._is_made(value, self.turn - 1):
                return 0
            return size_of(value) // READING if value in kept else size_of(value)

        for place, (forward_loop, values) in enumerate(wanted.items()):
            if int((place + 1) * share) == int(place * share):
                continue

            def price_of(equation: Equation, forward_loop: int = forward_loop) -> int:
                if self._recomputes_free(equation, forward_loop):
                    return 0
                is_before = share < 1 and self._runs_in(equation) == forward_loop - 1
                return int(PRICE * _cost(equation)) if is_before else cuts.ALWAYS

            kept.update(cuts.smallest(values, self.made_by, bytes_of, price_of))
        return kept

    def _recomputes_free(self, equation: Equation, forward_loop: int) -> bool:
        """Whether a backward loop may run an equation once more, whatever it costs: one of its forward loop."""
        return self._runs_in(equation) == forward_loop or self._is_cheap(equation)

    def _cost_recomputed(self, forward_loop: int, values: list[Value], bases: set[Value]) -> float:
        again = needed(values, self.made_by, bases)
        return sum(_cost(equation) for equation in again if not self._recomputes_free(equation, forward_loop))

    def _in_order(self, equations: set[Equation]) -> list[Equation]:
        return [equation for equation in self.equations if equation in equations]

    def _is_cheap(self, equation: Equation) -> bool:
        """Whether several loops may make a value again; a rule, a clip say, takes the cotangents of all at once."""
        perturbed = [value in self.division.differentiable for value in equation.ins]
        return is_cheap(equation.single) and not any(nonlinear_rules(equation.single, perturbed))


def is_cheap(equation: Any) -> bool:
    """Whether it costs less to run an equation of a traced program again than to keep its results."""
    inner = [each for program in inner_programs(equation) for each in program.eqns]
    return all(map(is_cheap, inner)) if inner else known(equation.primitive.name).is_cheap


def _cost(equation: Equation) -> int:
    """The bytes that an equation moves."""
    return _bytes((*equation.ins, *equation.outs))


def _bytes(values: Iterable[Value]) -> int:
    return sum(size_of(value) for value in values if value.axis is not None)


def size_of(value: Value) -> int:
    """The bytes of a value."""
    return value.aval.size * value.aval.dtype.itemsize
