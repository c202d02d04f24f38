"""Which loops and branches of a traced program take a course that a device's own rows decide.

Values that differ between devices are followed from the inputs. Types do not tell it: parameters have the type of
values that differ, so that no gradient is reduced; and the counter of a loop that each device leaves at its own time
has the type of a value that all devices have alike.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_accum._core import compilers, evaluation
from optax_accum._core.custom_derivatives import differentiated, has_rule
from optax_accum._core.equations import collective_axes, every_equation, inner_programs, programs_of
from optax_accum._core.types import Axes
from optax_accum._space import mapped

Differ = list[bool]  # for each value, whether it may differ between devices


class Course:
    """The course of a program inside `jax.shard_map` over these axes; `differ` says which of its inputs do."""

    def __init__(self, program: Any, axes: Axes, differ: Differ):
        self.axes = axes
        self.decided: dict[int, Any] = {}  # by id, the equations whose course each device decides
        self.asks_rules = True  # a rule often calls its own function: rules inside rules are asked when they run
        self.walk(program, differ, [may_differ(const, axes) for const in program.consts])

    def changes(self, equation: Any) -> bool:
        """Whether a device decides the course of an equation, or of one inside it."""
        return bool(self.decided) and any(id(inner) in self.decided for inner in every_equation(equation))

    def walk(self, program: Any, differ: Differ, of_consts: Sequence[bool] = ()) -> Differ:
        """Finds the equations that devices decide; returns which results differ."""
        jaxpr = compilers.opened(program)[0]
        known = dict.fromkeys(jaxpr.constvars, False) | dict(zip(jaxpr.invars, differ, strict=True))
        known.update(zip(jaxpr.constvars, of_consts, strict=False))
        return evaluation.in_order(jaxpr.eqns, known, jaxpr.outvars, self._follow, literal=lambda _: False)

    def _follow(self, equation: Any, differ: Differ) -> Differ:
        rule = _RULES.get(equation.primitive.name, _follow_rule if has_rule(equation) else _other)
        return rule(self, equation, differ)

    def decide(self, equation: Any) -> Differ:
        self.decided[id(equation)] = equation
        return [True] * len(equation.outvars)


def may_differ(leaf: Any, axes: Axes) -> bool:
    """Whether the type of a value leaves it open that it differs; under `check_vma=False` types tell nothing."""
    return bool(axes) and (mapped.differs(leaf, axes) or not mapped.types_track_devices(axes))


def may_be_decided(equation: Any) -> bool:
    """Whether an equation has a loop or a branch inside, or a derivative rule that may have one."""
    return any(inner.primitive.name in ("while", "cond") or has_rule(inner) for inner in every_equation(equation))


# What an equation does to values that differ


def _while(course: Course, equation: Any, differ: Differ) -> Differ:
    goes_on, body = programs_of(equation)
    taken, _ = body.followed(differ, course.walk, operator.or_)
    carry = taken[body.carried]
    operands = lambda carry: [*differ[: len(differ) - len(carry)], *carry]
    (decided,) = course.walk(goes_on.program, goes_on.taken(operands(carry)))
    if not decided:
        return carry
    course.walk(body.program, body.taken(operands([True] * len(carry))))
    return course.decide(equation)


def _scan(course: Course, equation: Any, differ: Differ) -> Differ:
    (body,) = programs_of(equation)
    return body.followed(differ, course.walk, operator.or_)[1]


def _cond(course: Course, equation: Any, differ: Differ) -> Differ:
    outs = [course.walk(branch.program, branch.taken(differ)) for branch in programs_of(equation)]
    return course.decide(equation) if differ[0] else [any(each) for each in zip(*outs, strict=True)]


def _follow_rule(course: Course, equation: Any, differ: Differ) -> Differ:
    """A function with a derivative of the user's own, in which loops and branches may stand, too."""
    derivative = lambda values: differentiated(equation, values)
    outs, before = _other(course, equation, differ), len(course.decided)
    if not course.asks_rules:
        return outs
    try:
        program = jax.make_jaxpr(derivative)([atom.aval for atom in equation.invars])
    except Exception:  # the rule raises, wherever it is differentiated
        return outs
    course.asks_rules = False
    course.walk(program, [any(differ)] * len(program.jaxpr.invars), [any(differ)] * len(program.consts))
    course.asks_rules = True
    if len(course.decided) > before:
        course.decide(equation)
    return outs


def _other(course: Course, equation: Any, differ: Differ) -> Differ:
    outs = [any(differ) and not _agrees(course, equation)] * len(equation.outvars)
    if equation.primitive.name == "axis_index":
        return [equation.params["axis_name"] in course.axes]
    for program in () if equation.primitive.name in _KERNELS else inner_programs(equation):
        is_called = len(program.invars) == len(differ) and len(program.outvars) == len(outs)
        found = course.walk(program, differ if is_called else [any(differ)] * len(program.invars))
        outs = found if is_called else outs
    return outs


def _agrees(course: Course, equation: Any) -> bool:
    """Whether an equation joins the values of all devices: all have the same result."""
    joins = equation.primitive.name.startswith(("psum", "pmax", "pmin", "all_gather"))
    of_all = set(course.axes) <= set(collective_axes(equation))
    return joins and of_all and equation.params.get("axis_index_groups") is None


_KERNELS = {"pallas_call"}  # their loops wait for nobody
_RULES: dict[str, Callable[[Course, Any, Differ], Differ]] = {"while": _while, "scan": _scan, "cond": _cond}
