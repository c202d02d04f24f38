"""The end of a loss, after the loop over micro-batches: its outputs, its gradient, and which loop results it needs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_accum._core import compilers, evaluation
from optax_accum._rows import derivatives, faults, resized
from optax_accum._rows.levels import Loop
from optax_accum._rows.program import Constant, Equation, Number, Value
from optax_accum._rows.registry import known
from optax_accum._space import meshes
from optax_accum._within import by_level, partial
from optax_accum._within.by_level import Store, axis_of
from optax_accum._within.traced_call import TracedCall

Leaves = Sequence[Any]


class Given(NamedTuple):
    """The results of the loop: of its reductions, and the rows that it keeps."""

    parts: Leaves
    rows: Leaves


class End:
    """The equations after the loop, as a function of the loop's results and of the parameters."""

    def __init__(
        self,
        traced: TracedCall,
        store: Store,
        loop: Loop,
        before: Sequence[Equation],
        after: Sequence[Equation],
    ):
        self.traced, self.store, self.loop, self.before, self.after = traced, store, loop, before, after
        self.params = [store.whole(value) for value in model_inputs(traced)]
        types = [*map(partial.type_of_part, loop.parts), *map(self._type_of_rows, loop.rows)]
        self.inexact = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in types]
        self.of_params = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in self.params]
        zeros = [meshes.filled([], leaf, 0) for leaf in types]
        apart = frozenset(traced.device.apart)  # where each device has a batch of its own, all results differ
        still = evaluation.varying_as(zeros, types)
        still = evaluation.varying_as(still, still, apart.intersection(*map(compilers.varying_axes, self.params[:1])))
        self.still = [traced.device.vary(leaf) for leaf in still]
        given = _chosen(self.still, self.inexact)
        others = _chosen(self.still, [not moves for moves in self.inexact])
        params = _chosen(self.params, self.of_params)
        self.gradient = jax.make_jaxpr(jax.grad(self._loss, argnums=(0, 2)))(given, others, params)

    def _type_of_rows(self, value: Value) -> Any:
        shape = list(value.aval.shape)
        shape[axis_of(value)] //= self.traced.units.devices
        return value.aval.update(shape=tuple(shape))

    def outputs(self, given: Given, params: Leaves) -> Leaves:
        values = self.store.values | dict(zip(model_inputs(self.traced), params, strict=True))
        values.update(zip(self.loop.rows, given.rows, strict=True))
        end = Store(self.traced.units, self.traced.device, values)
        for equation in self.before:
            by_level.run_once(equation, self.traced.levels, end)
        for equation, part in zip(self.loop.parts, given.parts, strict=True):
            end.values[equation.outs[0]] = by_level.finished(equation, part, end)
        for equation in self.after:
            by_level.run_once(equation, self.traced.levels, end)
        return [jnp.asarray(end.whole(value)) for value in self.traced.levels.program.outputs]

    def _loss(self, given: Leaves, others: Leaves, params: Leaves) -> jax.Array:
        """The part of one device in the loss, which is the same on all devices."""
        rest = iter(others)
        leaves = _put(given, self.inexact, [None if moves else next(rest) for moves in self.inexact])
        parts = Given(leaves[: len(self.loop.parts)], leaves[len(self.loop.parts) :])
        return self.traced.device.part(self.outputs(parts, _put(params, self.of_params, self.params))[0])

    def known(self) -> tuple[Given | None, int | None]:
        """The cotangents of the loop's results, if they do not depend on these results; else None.

        If one scalar alone has a cotangent, which depends on the results, it gets 1, and its place is returned, too:
        the gradient is scaled at the end.
        """
        count = sum(self.inexact)
        depends = _depend(self.gradient.jaxpr, len(self.inexact))[:count]
        is_zero = _zeros(self.gradient.jaxpr)[:count]
        if not any(depends):
            return self.cotangents(Given(self.still, [])), None
        given = _chosen(self.still, self.inexact)
        at = is_zero.index(False)
        if is_zero.count(False) != 1 or given[at].shape or any(map(derivatives.has_backward, self.loop.equations)):
            return None, None  # a rule of the user's may do anything with cotangents: it needs them as they are
        if self.traced.device.differs_elsewhere(self.gradient.out_avals[at], self.traced.traced):
            return None, None  # a backward pass adds cotangents of other devices to its own: each with its factor
        return self._given(
            [None if zero else jnp.ones_like(leaf) for zero, leaf in zip(is_zero, given, strict=True)]
        ), at

    def cotangents(self, given: Given) -> Given:
        """The cotangents of the loop's results, None where they are zero."""
        count = sum(self.inexact)
        leaves = self._gradient([*given.parts, *given.rows], range(count))
        is_zero = _zeros(self.gradient.jaxpr)[:count]
        cotangents = self._given([None if zero else ct for zero, ct in zip(is_zero, leaves, strict=True)])
        return cotangents._replace(parts=jax.tree.map(self._over_devices, cotangents.parts))

    @property
    def needs(self) -> list[bool]:
        """Whether the cotangents depend on each result of the loop; reductions come first."""
        needed = _needed(self.gradient.jaxpr, sum(self.inexact))
        given, others = iter(needed[: sum(self.inexact)]), iter(needed[sum(self.inexact) :])
        return [next(given if moves else others) for moves in self.inexact]

    @property
    def adds(self) -> bool:
        """Whether the end of the loss adds to the gradient: it has a term of the parameters alone."""
        return not all(_zeros(self.gradient.jaxpr)[sum(self.inexact) :])

    def factor(self, given: Given, at: int) -> jax.Array:
        """The cotangent of sum `at`, which scales the gradient."""
        return self._over_devices(self._gradient([*given.parts, *given.rows], [at])[0])

    def _over_devices(self, cotangent: jax.Array) -> jax.Array:
        """Adds up the devices' cotangents of a value that all of them have alike."""
        return self.traced.device.joined("sum", cotangent)

    def direct(self, given: Given) -> list[Any]:
        """One device's part of the parameters' gradient from the equations after the loop; None for zeros."""
        count = sum(self.inexact)
        is_zero = _zeros(self.gradient.jaxpr)[count:]
        wanted = [count + place for place, zero in enumerate(is_zero) if not zero]
        grads = iter(self._gradient([*given.parts, *given.rows], wanted))
        flags = iter(is_zero)
        return [next(grads) if moves and not next(flags) else None for moves in self.of_params]

    def _gradient(self, given: Leaves, wanted: Sequence[int]) -> list[Any]:
        others = _chosen(given, [not moves for moves in self.inexact])
        values = [*_chosen(given, self.inexact), *others, *_chosen(self.params, self.of_params)]
        return _run(self.gradient, values, wanted)

    def _given(self, leaves: Leaves) -> Given:
        filled = _put(leaves, self.inexact, [None] * len(self.inexact))
        return Given(filled[: len(self.loop.parts)], filled[len(self.loop.parts) :])


def model_inputs(traced: TracedCall) -> list[Value]:
    """The inputs that are differentiated: the leaves of the parameters."""
    return [value for value in traced.levels.program.inputs if value in traced.levels.model]


def evaluate(equations: Sequence[Equation], env: dict[Value, Any]) -> None:
    """Evaluates equations that take no rows, and adds their results to `env`."""

    def read(value: Value) -> Any:
        if isinstance(value, Number | Constant):
            return value.array
        return env[value]

    for equation in equations:
        every = resized.Some(equation.rows, equation.rows[0])
        with faults.explained(equation):
            results = resized.evaluate(equation.single, equation.double, every, list(map(read, equation.ins)))
        env.update(zip(equation.outs, results, strict=True))


def _chosen(leaves: Leaves, flags: Sequence[bool]) -> list[Any]:
    return [leaf for leaf, chosen in zip(leaves, flags, strict=True) if chosen]


def _put(leaves: Leaves, flags: Sequence[bool], others: Leaves) -> list[Any]:
    rest = iter(leaves)
    return [next(rest) if chosen else other for chosen, other in zip(flags, others, strict=True)]


# A traced gradient


def _depend(program: Any, count: int) -> list[bool]:
    """Whether each output of a program depends on its first `count` inputs."""
    of_inputs = set(program.invars[:count])
    for equation in program.eqns:
        if any(isinstance(atom, core.Var) and atom in of_inputs for atom in equation.invars):
            of_inputs.update(equation.outvars)
    return [isinstance(atom, core.Var) and atom in of_inputs for atom in program.outvars]


def _needed(program: Any, count: int) -> list[bool]:
    """Whether the first `count` outputs of a program depend on each of its inputs."""
    wanted = {atom for atom in program.outvars[:count] if isinstance(atom, core.Var)}
    for equation in reversed(program.eqns):
        if not wanted.isdisjoint(equation.outvars):
            wanted.update(atom for atom in equation.invars if isinstance(atom, core.Var))
    return [var in wanted for var in program.invars]


def _zeros(program: Any) -> list[bool]:
    """Whether each output of a program is zero for all inputs."""
    zeros: set[Any] = set()

    def is_zero(atom: Any) -> bool:
        return not np.any(atom.val) if isinstance(atom, core.Literal) else atom in zeros

    for equation in program.eqns:
        if known(equation.primitive.name).linear and len(equation.invars) == 1 and is_zero(equation.invars[0]):
            zeros.update(equation.outvars)
    return list(map(is_zero, program.outvars))


def _run(traced: Any, values: Leaves, wanted: Sequence[int]) -> list[Any]:
    """Evaluates some outputs of a traced program, and only the equations that they need."""
    program = traced.jaxpr
    outputs = [program.outvars[place] for place in wanted]
    live = {atom for atom in outputs if isinstance(atom, core.Var)}
    needed: list[Any] = []
    for equation in reversed(program.eqns):
        if not live.isdisjoint(equation.outvars):
            needed.append(equation)
            live.update(atom for atom in equation.invars if isinstance(atom, core.Var))
    env: dict[Any, Any] = dict(zip((*program.constvars, *program.invars), (*traced.consts, *values), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for equation in reversed(needed):
        env.update(zip(equation.outvars, evaluation.bind(equation, list(map(read, equation.invars))), strict=True))
    return [jnp.asarray(read(atom)) for atom in outputs]
