"""Two traces of a loss, for n rows and for 2 n, paired equation by equation: an axis that grows holds rows.

Where the traces differ, as a scan that is unrolled for each power of two does, the equations for n rows are one, which
runs on all rows; before and after it the traces are pairs again.
"""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from optax_accum._core import compilers, evaluation
from optax_accum._core.equations import is_checkpoint, operands
from optax_accum._rows import locality
from optax_accum._rows.own_rows import rewrite_own_rows
from optax_accum._rows.places import place_of
from optax_accum._rows.program import Constant, Equation, Number, Program, Value
from optax_accum._rows.running_sums import rewrite_running_sums
from optax_accum._rows.traces import COUPLED, OtherProgramError, Rows, axis_of, pair_key, view_of


def paired(single: Any, double: Any, rows: Rows, caller: Equation | None = None) -> Program:
    """Pairs two traces, for `rows` rows each, equation by equation; inlines the functions that they call.

    `caller` is the equation that holds the program, if there is one.

    Raises:
      OtherProgramError: they have nothing in common that takes rows.
    """
    pairs = zip(single.jaxpr.invars, double.jaxpr.invars, strict=True)
    inputs = [Value(a.aval, axis_of(a.aval, b.aval, rows)) for a, b in pairs]
    pairing = _Pairing(rows)
    outputs = pairing.inlined(single, double, inputs, caller)
    equations = pairing.equations
    if pairing.first_difference and not any(e.view.has_rows and not e.differs for e in equations):
        raise OtherProgramError(pairing.first_difference)
    return Program(inputs, equations, outputs, rows)


def paired_inside(equation: Equation) -> list[Program]:
    """The programs inside an equation, see `paired`."""
    pairs = locality.programs_inside(equation.single, equation.double)
    return [paired(*pair, equation.rows, equation) for pair in pairs]


class _Pairing:
    """The equations of two traces, in pairs, so far."""

    def __init__(self, rows: Rows):
        self.rows = rows
        self.equations: list[Equation] = []
        self.first_difference = ""
        self.untyped: set[Value] = set()  # constants and results of what differs: who takes them says where rows are
        self.loose: set[Value] = set()  # all that ever were: nothing tells their counterparts in the other trace

    def inlined(self, single: Any, double: Any, inputs: Sequence[Value], caller: Equation | None) -> list[Value]:
        """Appends the equations of two programs; returns their results."""
        (of_single, consts), (of_double, double_consts) = compilers.opened(single), compilers.opened(double)
        env: dict[Any, Value] = dict(zip((*of_single.invars, *of_double.invars), (*inputs, *inputs), strict=True))
        are_pairs = list(map(jnp.ndim, consts)) == list(map(jnp.ndim, double_consts))
        for place, (var, array) in enumerate(zip(of_single.constvars, consts, strict=True)):
            double_array = double_consts[place] if are_pairs else None
            axis = axis_of(jax.typeof(array), jax.typeof(double_array), self.rows) if are_pairs else None
            env[var] = Constant(array, axis, double_array)
            if are_pairs:
                env[of_double.constvars[place]] = env[var]
            else:
                self.untyped.add(env[var])
                self.loose.add(env[var])
        for ours, others, are_pair in _aligned(of_single, of_double):
            if not (are_pair and self.append(ours[0], others[0], env, caller)):
                self.append_whole(ours, others, of_single, env, caller)
        return self.outputs(of_single.outvars, of_double.outvars, env)

    def outputs(self, single: Sequence[Any], double: Sequence[Any], env: dict[Any, Value]) -> list[Value]:
        """The values that two programs return; what has its rows along other axes there is whole."""
        found: list[Value] = []
        for a, b in zip(single, double, strict=True):
            values = self.operands([a], [b], env)
            if values is None and self.are_wired_alike([a], [b], env):
                env[a].axis = COUPLED
            elif values is None:  # the program for twice as many rows returns another value
                (returned,) = jax.make_jaxpr(jax.jit(lambda value: value))(_struct(a.aval)).eqns
                if makers := [equation for equation in self.equations if env[a] in equation.outs]:
                    returned = returned.replace(source_info=makers[-1].single.source_info)
                values = [Value(a.aval, None)]
                self.equations.append(Equation(returned, returned, [env[a]], values, self.rows, None, True))
            found += values or [env[a]]
        return found

    def are_wired_alike(self, single: Sequence[Any], double: Sequence[Any], env: dict[Any, Value]) -> bool:
        """Whether two equations take the same values: a Python `if` on the number of rows may choose others."""
        pairs = [
            (env[a], env.get(b) if isinstance(b, core.Var) else None)
            for a, b in zip(single, double, strict=True)
            if isinstance(a, core.Var)
        ]
        return all(value is other or (other is None and value in self.loose) for value, other in pairs)

    def operands(self, single: Sequence[Any], double: Sequence[Any], env: dict[Any, Value]) -> list[Value] | None:
        """The values that two equations take; None where these differ, or have their rows along other axes."""
        if not self.are_wired_alike(single, double, env):
            return None
        values: list[Value] = []
        for a, b in zip(single, double, strict=True):
            if isinstance(a, core.Literal):
                values.append(Number(a, b if isinstance(b, core.Literal) else None))
                continue
            value, axis = env[a], axis_of(a.aval, b.aval, self.rows)
            if value in self.untyped:
                self.untyped.remove(value)
                value.axis = axis
            if value.axis != axis:
                return None
            values.append(value)
        return values

    def append(self, a: Any, b: Any, env: dict[Any, Value], caller: Equation | None) -> bool:
        """Appends a pair of equations; False if they are none."""
        ins = self.operands(a.invars, b.invars, env)
        if ins is None:
            return False
        outs = [Value(var.aval, axis) for var, axis in zip(a.outvars, view_of(a, b, self.rows).outs, strict=True)]
        equation = Equation(a, b, ins, outs, self.rows, caller)
        rewritten = rewrite_own_rows(equation, self.equations) or rewrite_running_sums(equation)
        if rewritten is not None:
            fun, values = rewritten
            single, double = (jax.make_jaxpr(fun)(*(_type(v, self.rows, size) for v in values)) for size in self.rows)
            outs = self.inlined(single, double, values, equation)
        elif _is_inlined(equation):
            before = len(self.equations)
            try:
                ins = self.computed_again(equation) if _computes_again(equation) else ins
                (programs,) = locality.programs_inside(a, b)
                outs = self.inlined(*programs, ins, equation)
            except OtherProgramError:
                del self.equations[before:]
                return False
        else:
            self.equations.append(equation)
        env.update(zip((*a.outvars, *b.outvars), (*outs, *outs), strict=True))
        return True

    def computed_again(self, equation: Equation) -> list[Value]:
        """The operands of a checkpoint in a backward pass: rows behind a barrier, so that no compiler keeps results."""
        rows = [value for value in equation.ins if value.axis not in (None, COUPLED)]
        if not rows:
            return list(equation.ins)
        single, double = (
            jax.make_jaxpr(jax.lax.optimization_barrier)([_type(value, self.rows, size) for value in rows]).eqns[0]
            for size in self.rows
        )
        behind = {value: Value(value.aval, value.axis) for value in rows}
        self.equations.append(Equation(single, double, list(behind), list(behind.values()), self.rows, equation))
        return [behind.get(value, value) for value in equation.ins]

    def append_whole(
        self, ours: Sequence[Any], others: Sequence[Any], program: Any, env: dict[Any, Value], caller: Equation | None
    ) -> None:
        """Appends the equations of the trace for n rows that have no counterparts, as one."""
        if not self.first_difference:
            self.first_difference = _difference(ours, others)
        if not ours:
            return
        made = [var for equation in ours for var in equation.outvars]
        takes = dict.fromkeys(var for equation in ours for var in operands(equation) if var not in made)
        inside = {id(equation) for equation in ours}
        used = {var for equation in program.eqns if id(equation) not in inside for var in operands(equation)}
        used.update(atom for atom in program.outvars if isinstance(atom, core.Var))
        gives = [var for var in made if var in used]
        outs = [Value(var.aval, None) for var in gives]
        self.untyped.update(outs)
        self.loose.update(outs)
        whole = _as_one(ours, list(takes), gives)
        self.equations.append(Equation(whole, whole, [env[var] for var in takes], outs, self.rows, caller, True))
        env.update(zip(gives, outs, strict=True))


def _aligned(single: Any, double: Any) -> Iterator[tuple[Sequence[Any], Sequence[Any], bool]]:
    """Yields the equations of two programs: one of each where they are a pair, else all between two pairs."""
    ours, others = list(map(pair_key, single.eqns)), list(map(pair_key, double.eqns))
    blocks = [("equal", 0, len(ours), 0, len(others))]
    if ours != others:
        blocks = difflib.SequenceMatcher(None, ours, others, autojunk=False).get_opcodes()
    for tag, first, last, begin, end in blocks:
        if tag == "equal":
            yield from (([a], [b], True) for a, b in zip(single.eqns[first:last], double.eqns[begin:end], strict=True))
        else:
            yield single.eqns[first:last], double.eqns[begin:end], False


def _difference(ours: Sequence[Any], others: Sequence[Any]) -> str:
    if len(ours) == len(others) == 1 and _name(ours) == _name(others):
        return f"at {place_of(ours[0])} {_name(ours)} takes other arrays for twice as many rows"
    if ours and others:
        return f"at {place_of(ours[0])} it has {_name(ours)}, and for twice as many rows {_name(others)}"
    return f"at {place_of((*ours, *others)[0])} only one of the two has {_name((*ours, *others))}"


def _name(equations: Sequence[Any]) -> str:
    return equations[0].primitive.name


def _as_one(equations: Sequence[Any], takes: Sequence[Any], gives: Sequence[Any]) -> Any:
    """Equations as a single one, which calls them, at the line of the first."""
    if len(equations) == 1:
        first = equations[0]
        if list(gives) == list(first.outvars) and list(takes) == list(first.invars):
            return first

    run = jax.jit(lambda *values: evaluation.in_order(equations, dict(zip(takes, values, strict=True)), gives))
    (call,) = jax.make_jaxpr(run)(*(_struct(var.aval) for var in takes)).eqns
    return call.replace(source_info=equations[0].source_info)


def _type(value: Value, rows: Rows, size: int) -> jax.ShapeDtypeStruct:
    shape = list(value.aval.shape)
    if value.axis is not None and value.axis != COUPLED:
        shape[value.axis] = shape[value.axis] * size // rows[0]
    return jax.ShapeDtypeStruct(tuple(shape), value.aval.dtype)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak, sharding=compilers.explicit_sharding(aval))


def _is_inlined(equation: Equation) -> bool:
    """Whether the equations inside an equation replace it.

    A checkpoint that takes rows together is dropped: each loop recomputes the residuals of its backward pass.
    """
    if equation.name in ("jit", "pjit"):
        return compilers.is_plain_jit(equation.single)
    if is_checkpoint(equation.single):
        return not locality.is_local(equation.view)
    return equation.name == "closed_call"


def _computes_again(equation: Equation) -> bool:
    """Whether an equation is a checkpoint in a backward pass, from which XLA must not take what it has already."""
    params = equation.single.params
    return bool(params.get("differentiated") and params.get("prevent_cse"))
