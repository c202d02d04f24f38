"""How a program of rows is divided into levels: what kind each equation is, and after which loops it can run."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from optax_accum._core import compilers
from optax_accum._core.dtypes import is_narrow
from optax_accum._core.equations import every_equation, inner_programs, is_cast_down
from optax_accum._rows import derivatives, layers, locality, moving
from optax_accum._rows.levels import Body, Crossing, Kind, Levels, Loop, Stage
from optax_accum._rows.linear import nonlinear_rules
from optax_accum._rows.pairing import paired
from optax_accum._rows.program import Constant, Equation, Number, Program, Value
from optax_accum._rows.registry import known

FOLLOWS = frozenset(["add", "add_any", "convert_element_type", "div", "mul", "neg", "reduce_precision", "reshape", "squeeze", "sub", "transpose"])
MOST_ORIGINS = 2
_LAYOUT = frozenset(["reshape", "squeeze", "transpose"])
_AS_IT_IS = _LAYOUT | {"broadcast_in_dim", "convert_element_type", "copy", "max", "min", "select_n"}
_ONCE = (Kind.WHOLE, Kind.MADE, Kind.FREE)


def levels_of(
    program: Program,
    is_model: Sequence[bool],
    crossing: Crossing = Crossing.SAVE,
    *,
    moves: bool = True,
    joins_all: bool = False,
) -> Levels:
    """How a program runs; `is_model` says which inputs decide more than the batch does, as parameters do.

    `moves`: whether the program may be differentiated by them. `joins_all`: whether all that follows a sum linearly is
    done to its parts, for these to be whole, where it takes more memory, too.
    """
    division = _Division(program, is_model, moves, recomputes=crossing is Crossing.RECOMPUTE, joins_all=joins_all)
    kinds, model, moving = division.kinds, division.model, division.moving
    return Levels(program, kinds, model, moving, division.stages(), division.bodies, crossing)


def is_over_layers(equation: Equation, levels: Levels) -> bool:
    """Whether an equation is a loop over layers, or tokens, that can be evaluated level by level."""
    if equation.differs or any(map(compilers.makes_reference, every_equation(equation.single))):
        return False
    is_scan = equation.name == "scan" and equation.single.params["length"] == equation.double.params["length"]
    return is_scan and not levels.model.isdisjoint(equation.ins) and any(v.axis is not None for v in equation.ins)


def inside_layers(equation: Equation, levels: Levels) -> Levels:
    consts, carried = compilers.sizes_of_scan(equation.single)
    body = paired(equation.single.params["jaxpr"], equation.double.params["jaxpr"], equation.rows, equation)
    is_model = [value in levels.model for value in equation.ins]
    is_model[consts : consts + carried] = [True] * carried
    # What a scan stacks of its iterations lies on the device: XLA has no layout for it on the host.
    crossing = Crossing.SAVE if levels.crossing is Crossing.OFFLOAD else levels.crossing
    return levels_of(body, is_model, crossing, moves=bool(levels.moving))


class _Division:
    """The kind and the level of each equation of a program.

    The level of a value is the number of loops that must be over before it can be made. The batch alone decides values
    of level 0, whatever takes its rows together: that runs once, before the first loop.
    """

    def __init__(self, program: Program, is_model: Sequence[bool], moves: bool, *, recomputes: bool, joins_all: bool):
        self.recomputes, self.joins_all = recomputes, joins_all
        self.program, self.equations = program, _needed(program)
        self.model = {value for value, is_ in zip(program.inputs, is_model, strict=True) if is_}
        self.moving = set(self.model) if moves else set()
        self.rowless = {value for value in program.inputs if value.axis is None}  # what no row of the batch decides
        self.used_by: dict[Value, list[Equation]] = {value: [] for value in program.outputs}
        for equation in self.equations:
            for value in equation.ins:
                self.used_by.setdefault(value, []).append(equation)
        self.kinds: dict[Equation, Kind] = {}
        self.level: dict[Value, int] = {}
        self.at: dict[Equation, int] = {}
        self.made: dict[Value, Equation] = {}  # values that loops make
        self.same: set[Value] = set()  # and those of them that are the same for each micro-batch: a loop's counter, say
        self.parts: dict[Value, str] = {}  # values of which each micro-batch of a loop gives a part, and how they join
        self.bodies: dict[Equation, Body] = {}
        self.zeros = layers.Zeros()
        self.origins: dict[Value, Sequence[Value]] = {}
        for equation in self.equations:
            self._read(equation)
            self.zeros.read(equation)

    def _read(self, equation: Equation) -> None:
        if all(value in self.rowless or isinstance(value, Constant | Number) for value in equation.ins):
            self.rowless.update(equation.outs)
        moves = moving.of_results(equation.single, [value in self.moving for value in equation.ins])
        self.moving.update(value for value, moves_ in zip(equation.outs, moves, strict=True) if moves_)
        kind = self.kinds[equation] = self._kind(equation)
        at = max((self.level.get(value, 0) for value in equation.ins), default=0)
        in_loop = not self.model.isdisjoint(equation.ins)
        if in_loop:
            self.model.update(equation.outs)
            waits = any(self._is_of_loops(value) for value in equation.ins)
            once = kind is Kind.WHOLE or (kind in _ONCE and not self.same.isdisjoint(equation.ins))
            at += (kind is Kind.PARTIAL and not self._follows(equation)) or (once and waits)
        self.at[equation] = at
        self.level.update(dict.fromkeys(equation.outs, at))
        if kind is Kind.LOCAL:
            self.made.update(dict.fromkeys(equation.outs, equation))
            if equation.view.has_rows:
                self.same.update(value for value in equation.outs if value.axis is None)
        if equation in self.bodies:
            sums = [v for v, is_part in zip(equation.outs, self.bodies[equation].parts, strict=True) if is_part]
            self.same.difference_update(sums)
            self.parts.update(dict.fromkeys(sums, "sum"))
            self.level.update(dict.fromkeys(sums, at + 1))
        if kind is Kind.PARTIAL and in_loop:
            self.made.update(dict.fromkeys(equation.outs, equation))
            joins = "sum" if self._follows(equation) else known(equation.name).partial.joins
            self.parts.update(dict.fromkeys(equation.outs, joins))

    def _is_of_loops(self, value: Value) -> bool:
        """Whether a value is there when a loop is over, and not before."""
        return value in self.made and value in self.model and (value.axis is not None or value in self.same)

    def _follows(self, equation: Equation) -> bool:
        return not self.parts.keys().isdisjoint(equation.ins)

    def _kind(self, equation: Equation) -> Kind:
        """A table: what an equation takes and makes, and what a rule proves."""
        if self._joins(equation):
            return Kind.PARTIAL
        view = equation.view._replace(moves=[value in self.moving for value in equation.ins])
        if equation.name in locality.NESTED:  # a result that nobody uses may be anything; one without rows takes none
            pairs = zip(view.outs, equation.outs, strict=True)
            view = view._replace(outs=[axis for axis, value in pairs if value in self.used_by and axis is not None])
        if view.has_rows:
            if locality.is_local(view) and not equation.differs:
                repeats_rule = self.recomputes and self._has_nonlinear_rule(equation)
                return Kind.WHOLE if repeats_rule else Kind.LOCAL
            if self._is_partial(equation):
                return Kind.PARTIAL
            return Kind.LOCAL if self._has_body(equation) else Kind.WHOLE
        if view.makes_rows:
            is_made_again = locality.is_alike(view) or locality.is_positional(view)
            return Kind.LOCAL if is_made_again and not equation.differs else Kind.MADE
        return Kind.LOCAL if self._is_narrow(equation) or self._is_layout(equation) else Kind.FREE

    def _joins(self, equation: Equation) -> bool:
        """Whether an equation that follows a sum linearly is done to its parts: a transpose, say, or a sum of two sums."""
        if equation.name not in FOLLOWS or self._follows(equation) is False:
            return False
        taken = [value for value in dict.fromkeys(equation.ins) if value in self.parts]
        level = self.level[taken[0]]
        others = [value for value in equation.ins if value not in self.parts and value not in self.zeros]
        alone = all(self.parts[v] == "sum" and self.level[v] == level and len(self.used_by[v]) == 1 for v in taken)
        known_before = all(self.level.get(value, 0) < level and value not in self.made for value in others)
        from_layers = any(self.made[value] in self.bodies for value in taken) and not self.joins_all
        is_output = not set(taken).isdisjoint(self.program.outputs)
        more = any(map(self._adds_to_more, (self.made[value] for value in taken)))
        if not alone or is_output or not known_before or from_layers or more or not self.moving.isdisjoint(equation.ins):
            return False
        return layers.follows(equation, set(taken), self.zeros)

    def _adds_to_more(self, equation: Equation) -> bool:
        """Whether a scatter adds rows to something else than zeros."""
        return equation.name.startswith("scatter") and equation.ins[0] not in self.zeros

    def _has_body(self, equation: Equation) -> bool:
        """Whether an equation is a loop over layers that treats rows one by one, and adds over them."""
        if not self.moving.isdisjoint(equation.ins) or self.model.isdisjoint(equation.ins):
            return False
        body = layers.body_of(equation, self.zeros)
        if body is None:
            return False
        self.bodies[equation] = body
        return True

    def _is_partial(self, equation: Equation) -> bool:
        if equation.differs or not locality.is_partial(equation.view):
            return False
        return not (self._shares_ties(equation) or self._adds_to_made(equation))

    def _is_layout(self, equation: Equation) -> bool:
        """Whether an equation writes parameters in another order, which products in loops read as they are."""
        of_params = self.rowless.issuperset(equation.outs) and not self.model.isdisjoint(equation.ins)
        return of_params and equation.name in _LAYOUT and self.moving.isdisjoint(equation.ins)

    def _is_narrow(self, equation: Equation) -> bool:
        """Whether an equation makes narrow parameters: loops make them again, and add their gradient wide."""
        if self.moving.isdisjoint(equation.ins) or not equation.outs or derivatives.has_backward(equation):
            return False
        if not (equation.view.has_same_sizes and self.rowless.issuperset(equation.outs)):
            return False  # narrow, but of rows: a mean, say, is there once, when its loop is over
        begins = is_cast_down(equation.single)
        goes_on = any(value in self.made for value in equation.ins) and is_narrow(equation.outs[0].aval.dtype)
        return begins or goes_on

    def _shares_ties(self, equation: Equation) -> bool:
        """Whether an extreme is compared with the rows, as its gradient is, which the rows that attain it share.

        Made again in another loop, no row need be equal to it. So all rows are kept, and the extreme is taken of these.
        """
        if equation.name not in ("reduce_max", "reduce_min") or self.model.isdisjoint(equation.ins):
            return False
        result = equation.outs[0]
        if not jnp.issubdtype(result.aval.dtype, jnp.inexact):
            return False
        if result in self.moving:
            uses = self.used_by.get(result, [])
            return result in self.program.outputs or any(use.name != "stop_gradient" for use in uses)
        todo = [result]
        while todo:
            uses = self.used_by.get(todo.pop(), [])
            if any(use.name == "eq" for use in uses):
                return True
            todo += [value for use in uses if use.name in _AS_IT_IS for value in use.outs]
        return False

    def _adds_to_made(self, equation: Equation) -> bool:
        """Whether a scatter adds rows to narrow parameters, which exist in loops alone."""
        return equation.name.startswith("scatter") and equation.ins[0] in self.made

    def stages(self) -> list[Stage]:
        """The loops in order, each with the equations that run once before it."""
        there = {*self.program.inputs, *(v for e in self.equations for v in e.ins if isinstance(v, Constant | Number))}
        once, stages = self._once(0, there), []
        for now in range(max(self.at.values(), default=0) + 1):
            if loop := self._loop(now, there):
                there.update(loop.rows, loop.sums)
                stages.append(Stage(once, loop))
                once = []
            once += self._once(now + 1, there)
        left = self._closure(self.program.outputs, there)
        return [*stages, Stage([*once, *self._in_order(left)])]

    def _once(self, level: int, there: set[Value]) -> list[Equation]:
        """The equations that run once as soon as so many loops are over, and those that prepare the batch for them."""

        def is_now(e: Any) -> bool:
            return self.at[e] == level and (self.kinds[e] in _ONCE or self._is_of_batch(e))

        once = {equation for equation in self.equations if is_now(equation)}
        needed = self._closure([value for equation in once for value in equation.ins], there)
        there.update(value for equation in once for value in equation.outs)
        return self._in_order(once | needed)

    def _is_of_batch(self, equation: Equation) -> bool:
        """Whether the batch alone decides a reduction of its rows."""
        return self.kinds[equation] is Kind.PARTIAL and self.model.isdisjoint(equation.ins)

    def _loop(self, now: int, there: set[Value]) -> Loop | None:
        """The pass over the micro-batches that makes values for later levels; None if they need none."""
        sums = {value: joins for value, joins in self.parts.items() if self._is_summed(value, now)}
        later = [e for e in self.equations if self.at[e] > now and not (self.kinds[e] is Kind.PARTIAL and self.at[e] == now + 1)]
        in_loops = [e for e in later if self.kinds[e] in (Kind.LOCAL, Kind.PARTIAL)]
        whole = [e for e in later if self.kinds[e] in _ONCE]
        crossing = [origin for equation in in_loops for value in equation.ins for origin in self._origins(value)]
        taken = [] if self.recomputes else crossing
        outputs = [value for value in self.program.outputs if self.level.get(value, 0) == now]
        wanted = [*taken, *(value for equation in whole for value in equation.ins), *outputs]
        rows = [value for value in dict.fromkeys(wanted) if self._is_kept(value, now, there)]
        if not (rows or sums):
            return None
        equations = self._in_order(self._closure([*rows, *sums], there))
        takes = [value for e in equations for value in e.ins if value in there]
        onto = {value: self.made[value].ins[0] for value in sums if self._adds_to_more(self.made[value])}
        return Loop(equations, sums, rows, list(dict.fromkeys(takes)), onto)

    def _is_summed(self, value: Value, now: int) -> bool:
        """Whether a loop gives the parts of a value that is used after it, not only by what joins its parts."""
        if self.level[value] != now + 1:
            return False
        after = [e for e in self.used_by.get(value, ()) if self.kinds[e] is not Kind.PARTIAL or self.at[e] != now + 1]
        return bool(after) or value in self.program.outputs

    def _is_kept(self, value: Value, now: int, there: set[Value]) -> bool:
        """Whether a loop keeps a value for all rows; a value that the batch alone decides is made again."""
        made = value in self.made and value not in there and self.level[value] <= now and value not in self.parts
        return made and value in self.model and (value.axis is not None or value in self.same)

    def _origins(self, value: Value) -> Sequence[Value]:
        """The values of rows to keep for a later loop, which makes a value from them again where that is cheap.

        An activation of what one product gave, say, or the sum of two such: from no more than two, and none is larger.
        """
        if value not in self.origins:
            self.origins[value] = [value]
            equation = self.made.get(value)
            if equation is not None and value in self.model and self._may_repeat(equation):
                origins = dict.fromkeys(origin for taken in equation.ins for origin in self._origins(taken))
                rows = [each for each in origins if each in self.made and each in self.model and each.axis is not None]
                if len(rows) <= MOST_ORIGINS and all(size_of(each) <= size_of(value) for each in rows):
                    self.origins[value] = rows
        return self.origins[value]

    def _may_repeat(self, equation: Equation) -> bool:
        """Whether several loops may make a value again; a rule, a clip say, takes the cotangents of all at once."""
        return is_cheap(equation.single) and not self._has_nonlinear_rule(equation)

    def _has_nonlinear_rule(self, equation: Equation) -> bool:
        return any(nonlinear_rules(equation.single, [value in self.moving for value in equation.ins]))

    def _closure(self, wanted: Iterable[Value], there: set[Value]) -> set[Equation]:
        """The equations that make values which are not there yet."""
        needed: set[Equation] = set()
        todo = list(wanted)
        while todo:
            value = todo.pop()
            equation = None if value in there else self.made.get(value)
            if equation is not None and equation not in needed:
                needed.add(equation)
                todo += equation.ins
        return needed

    def _in_order(self, equations: set[Equation]) -> list[Equation]:
        return [equation for equation in self.equations if equation in equations]


def is_cheap(equation: Any) -> bool:
    """Whether it costs less to run an equation of a traced program again than to keep its results."""
    inner = [each for program in inner_programs(equation) for each in program.eqns]
    return all(map(is_cheap, inner)) if inner else known(equation.primitive.name).is_cheap


def size_of(value: Value) -> int:
    """The bytes of a value."""
    return value.aval.size * value.aval.dtype.itemsize


def _needed(program: Program) -> list[Equation]:
    """The equations that outputs need, and those that have effects, in order."""
    wanted = set(program.outputs)
    needed: list[Equation] = []
    for equation in reversed(program.equations):
        if equation.single.effects or not wanted.isdisjoint(equation.outs):
            needed.append(equation)
            wanted.update(equation.ins)
    return needed[::-1]
