"""Devices that must run the same program run loops and branches together, though each has rows of its own.

Inside a `jax.shard_map` over some axes of a mesh, the partitioner shards arrays over the others, and puts collectives
wherever it likes: also into a loop that each device runs for as long as its own rows need, or a branch that one device
takes and another does not. Devices then wait for others that never come. So a loop goes on while any device goes on,
and a device that is done keeps its carry; of a branch each device runs all sides, and selects. The values are the same.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import custom_derivatives, evaluation
from optax_accum._core.equations import CALLS, CHECKPOINTS, inner_programs, programs_of
from optax_accum._core.leaves import is_array, parted
from optax_accum._core.types import Axes, Tree
from optax_accum._rows.places import place_of
from optax_accum._space import mapped, meshes
from optax_accum._space.course import Course, may_be_decided, may_differ

Values = Sequence[Any]


def together(fun: Callable[..., Any], equations: Iterable[Any], differ: Tree, axes: Axes) -> Callable[..., Any]:
    """`fun`, whose loops and branches all devices run together; `fun` itself where no device has to wait.

    `equations` come from a trace of `fun`. `differ`, a prefix of the tree of its arguments, says which leaves differ
    along the `axes`; for other axes of a `jax.shard_map` types do.
    """
    manual = meshes.manual_axes()
    if not manual or not meshes.partitioned_axes() or not any(map(may_be_decided, equations)):
        return fun
    others = tuple(axis for axis in manual if axis not in axes)

    def flags_of(args: Any) -> list[bool]:
        along_axes = jax.tree.leaves(jax.tree.broadcast(differ if axes else False, args))
        pairs = zip(along_axes, jax.tree.leaves(args), strict=True)
        return [flag or may_differ(leaf, others) for flag, leaf in pairs if is_array(leaf)]

    return _rewritten(manual, flags_of, fun)


def _rewritten(axes: Axes, differ: Callable[[Any], list[bool]], fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, traced at each call, and run together."""

    @functools.wraps(fun)
    def run(*args: Any) -> Any:
        arrays, filled = parted(args, is_array)
        program, shapes = jax.make_jaxpr(lambda arrays: fun(*filled(arrays)), return_shape=True)(arrays)
        course = Course(program, axes, differ(args))
        if not course.decided:
            return fun(*args)
        return jax.tree.unflatten(jax.tree.structure(shapes), Together(course).run(program, arrays))

    return run


class Together:
    """Evaluates traced programs; what a device decides, all devices run."""

    def __init__(self, course: Course):
        self.course, self.axes = course, course.axes

    def run(self, program: Any, values: Values) -> list[Any]:
        return evaluation.run(program, values, self.bind)

    def bind(self, equation: Any, values: Values) -> Values:
        """Evaluates one equation; a program inside it anew, where its types no longer tell which values differ."""
        changes = self.course.changes(equation)
        if not changes and not (any(inner_programs(equation)) and self._differ_more(equation, values)):
            return evaluation.bind(equation, values)
        name, table = equation.primitive.name, _DECIDED if id(equation) in self.course.decided else _OTHERS
        evaluate = table.get(name, _run_rule if custom_derivatives.has_rule(equation) else None)
        if evaluate is not None:
            return evaluate(self, equation, evaluation.varying_together(values))
        if changes:
            self.refuse(equation, f"{name!r} calls them, and cannot be run otherwise")
        return evaluation.bind(equation, values)

    def any_device(self, more: jax.Array) -> jax.Array:
        """Whether any row of any device goes on."""
        flag = mapped.varying(jnp.any(more).astype(jnp.int32), self.axes)
        return jax.lax.psum(flag, self.axes) > 0

    def refuse(self, equation: Any, why: str) -> None:
        partitioned = ", ".join(map(repr, meshes.partitioned_axes()))
        raise ValueError(
            "With devices, all devices run together the loops and branches that a device's own rows decide, for arrays "
            f"may be sharded over other axes of the mesh ({partitioned}): at {place_of(equation)} {why}. Take that out "
            "of the loop or the branch (jnp.where selects without one); or leave out devices."
        )

    def _differ_more(self, equation: Any, values: Values) -> bool:
        """Whether values differ between devices that had another type when the program was traced."""
        pairs = zip(values, equation.invars, strict=True)
        return any(
            mapped.differs(value, self.axes) and not mapped.differs(atom.aval, self.axes) for value, atom in pairs
        )


# Loops and branches that devices decide


def _while(devices: Together, equation: Any, values: Values) -> Values:
    goes_on, body = programs_of(equation)
    batched = bool(goes_on.program.out_avals[0].shape)
    if not batched and equation.effects:
        devices.refuse(equation, f"a loop has effects ({_listed(equation.effects)}), which it would have too often")
    values = mapped.varying(list(values), devices.axes)
    fixed = values[: len(values) - len(equation.outvars)]

    def step(state: Any) -> Any:
        _, more, carry = state
        after = _alike(devices.run(body.program, body.taken([*fixed, *carry])), values)
        return state_of([evaluation.where_rows(more, new, old) for new, old in zip(after, carry, strict=True)])

    def state_of(carry: list[Any]) -> Any:
        (more,) = devices.run(goes_on.program, goes_on.taken([*fixed, *carry]))
        return devices.any_device(more), more, carry

    return jax.lax.while_loop(lambda state: state[0], step, state_of(list(values[len(fixed) :])))[2]


def _cond(devices: Together, equation: Any, values: Values) -> Values:
    if equation.effects:
        devices.refuse(
            equation, f"a branch has effects ({_listed(equation.effects)}), and all devices run all branches"
        )
    index, *operands = values
    branches = equation.params["branches"]
    index = jnp.clip(jnp.asarray(index).astype(jnp.int32), 0, len(branches) - 1)
    results: list[Any] = []
    for number, branch in enumerate(branches):
        taken = index == number
        found = devices.run(branch, [_if_taken(taken, value) for value in operands])
        pairs = zip(found, results, strict=True) if number else ()
        results = [evaluation.where_rows(taken, new, old) for new, old in pairs] or found
    return _alike(results, values)


def _if_taken(taken: jax.Array, value: Any) -> Any:
    """The value, whose gradient is zero where a branch is not taken: there it may be 0 / 0."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return value
    return evaluation.where_rows(taken, value, jax.lax.stop_gradient(value))


def _alike(results: Values, values: Values) -> list[Any]:
    return evaluation.varying_together(results, like=values)


def _listed(effects: Any) -> str:
    return ", ".join(sorted(str(effect) or type(effect).__name__ for effect in effects))


# Programs that other equations call


def _inside(devices: Together, equation: Any, values: Values) -> Values:
    programs, is_alike = programs_of(equation), equation.primitive.name in ("cond", "scan", "while")

    def run(number: int, operands: Values) -> list[Any]:
        results = devices.run(programs[number].program, operands)
        return _alike(results, values) if is_alike and programs[number].gives else results

    return evaluation.run_inside(equation, values, run)


def _linear_solve(devices: Together, equation: Any, values: Values) -> Values:
    jaxprs, lengths = equation.params["jaxprs"], equation.params["const_lengths"]
    rest, parts = list(values), []
    for length in lengths:
        parts.append(rest[:length])
        rest = rest[length:]
    consts, size = type(lengths)(*parts), len(rest)
    run = lambda name, value: _alike(devices.run(getattr(jaxprs, name), [*getattr(consts, name), *value]), values)

    def solver(name: str) -> Callable[..., Any]:
        def solve(_: Any, value: Values) -> tuple[list[Any], list[Any]]:
            found = run(name, value)
            return found[:size], found[size:]

        return solve

    transposed = None if jaxprs.transpose_solve is None else solver("transpose_solve")
    matvec = functools.partial(run, "matvec")
    result: Any = jax.lax.custom_linear_solve(matvec, rest, solver("solve"), transposed, has_aux=True)
    return [*result[0], *result[1]]


def _run_rule(devices: Together, equation: Any, values: Values) -> Values:
    differ = lambda args: [True for leaf in jax.tree.leaves(args) if is_array(leaf)]
    return custom_derivatives.rewritten(equation, functools.partial(_rewritten, devices.axes, differ))(*values)


_DECIDED: dict[str, Callable[[Together, Any, Values], Values]] = {"cond": _cond, "while": _while}
_OTHERS: dict[str, Callable[[Together, Any, Values], Values]] = {
    **dict.fromkeys((*CALLS, *CHECKPOINTS, "cond", "scan", "while"), _inside),
    "custom_linear_solve": _linear_solve,
}
