"""The gradient of a loss whose rows come together in its end alone: a sum over micro-batches, by known cotangents.

What the batch alone decides is computed first. If the loss is then linear in what the loop over micro-batches gives,
each is run once: its cotangents are known before the first. Else what they depend on is computed first, forward.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_accum._core import compilers
from optax_accum._rows import locality, resized
from optax_accum._rows.levels import Kind, Loop
from optax_accum._rows.program import Constant, Equation, Number, Value
from optax_accum._within import by_level
from optax_accum._within.by_level import REDUCTIONS, Store, axis_of
from optax_accum._within.traced import Traced

Leaves = Sequence[Any]


class Given(NamedTuple):
    """What the loop gives: the results of reductions, and the rows that it keeps."""

    parts: Leaves
    rows: Leaves


@dataclasses.dataclass(frozen=True)
class OnePass:
    """A loss whose rows need one pass.

    Attributes:
      store: what the batch alone decides.
      before: what the parameters alone decide. It runs in the loop, so that its gradient is added there.
      after: the equations that follow the loop.
      known: the cotangents of what the loop gives, None where they are zero; None if they depend on that.
      factor: the end of the loss tells a factor of them, and of the gradient.
      end: the gradient of what follows the loop.
      is_measured: whether the gradient of each micro-batch is measured.
    """

    traced: Traced
    store: Store
    loop: Loop
    before: Sequence[Equation]
    after: Sequence[Equation]
    known: Given | None
    factor: int | None
    end: "End"
    is_measured: bool = False

    @property
    def measured(self) -> "OnePass":
        """The same, each gradient measured: a factor that the end tells comes from a forward pass, first."""
        of_all = {} if self.factor is None else {"known": None, "factor": None}
        return dataclasses.replace(self, is_measured=True, **of_all)

    @functools.cached_property
    def cotangents(self) -> Given:
        """The cotangents of what the loop gives, None where they are zero."""
        return self.end.cotangents(_first_pass(self)) if self.known is None else self.known

    @property
    def taken(self) -> list[Value]:
        """The values that the loop takes and that the parameters do not decide."""
        inner = [value for equation in self.before for value in equation.ins]
        model = self.traced.levels.model
        takes = dict.fromkeys([*self.loop.takes, *inner])
        return [value for value in takes if value not in model and not isinstance(value, Number)]

    @property
    def fixed(self) -> Leaves:
        """What all micro-batches take whole."""
        return [jnp.asarray(self.store.whole(value)) for value in self.taken if value.axis is None]

    @property
    def batch(self) -> dict[str, Any]:
        """What is split into micro-batches: arrays whose units come first."""
        units = self.traced.units
        total = units.size * units.parts
        along = [(jnp.asarray(self.store.whole(v)), axis_of(v)) for v in self.taken if v.axis is not None]
        pairs = zip(self.cotangents.rows, self.loop.rows, strict=True)
        cotangents = [None if ct is None else units.first(ct, axis_of(value)) for ct, value in pairs]

        def with_zeros(leaf: jax.Array) -> jax.Array:
            return jnp.concatenate([leaf, jnp.zeros((total - units.number, *leaf.shape[1:]), leaf.dtype)])

        return {
            "units": jnp.arange(total),
            "rows": [units.filled(units.first(leaf, axis)) for leaf, axis in along],
            "cotangents": jax.tree.map(with_zeros, cotangents) if units.fills else cotangents,
        }

    def contribution(self, params: Leaves, batch: dict[str, Any], fixed: Leaves) -> tuple[jax.Array, Given]:
        """Returns a micro-batch's part of what is differentiated, over its share of the rows; and what it gives."""
        units, numbers = self.traced.units, batch["units"]
        env: dict[Value, Any] = dict(zip(_model_inputs(self.traced), params, strict=True))
        env.update(zip([value for value in self.taken if value.axis is None], fixed, strict=True))
        with_rows = [value for value in self.taken if value.axis is not None]
        env.update((v, units.along(rows, axis_of(v))) for v, rows in zip(with_rows, batch["rows"], strict=True))
        _evaluate(self.before, env)
        rows, parts = by_level.of_micro_batch(self.loop, units, env, numbers)
        pairs = zip(rows, self.loop.rows, strict=True)
        first = [_units_first(row, axis_of(value), len(numbers)) for row, value in pairs]
        products = map(_product, (*self.cotangents.parts, *batch["cotangents"]), (*parts, *first))
        share = self.weight(batch) / (self.total * units.devices)
        return sum(products, jnp.zeros([])) / share, Given(parts, first)

    def weight(self, batch: dict[str, Any]) -> Any:
        """Returns the number of rows of a micro-batch; measured, of those that do not fill it up."""
        units, numbers = self.traced.units, batch["units"]
        return units.block * (jnp.sum(numbers < units.number) if self.is_filled else len(numbers))

    @property
    def is_filled(self) -> bool:
        """Whether rows that fill up the last micro-batches must not count: a measured gradient is one of its rows."""
        return self.is_measured and self.traced.units.fills

    @property
    def total(self) -> int:
        """The number of rows of all micro-batches."""
        units = self.traced.units
        return units.block * (units.number if self.is_filled else units.size * units.parts)

    @property
    def reductions(self) -> Given:
        """The names of the reductions that join what micro-batches give."""
        return Given([REDUCTIONS[e.name].name for e in self.loop.parts], ["concat"] * len(self.loop.rows))

    def joined(self, given: Given) -> Given:
        """Returns what the loop gives, as the program has it."""
        units = self.traced.units
        pairs = zip(given.rows, self.loop.rows, strict=True)
        rows = [units.along(leaf[: units.number], axis_of(value)) for leaf, value in pairs]
        return Given(list(map(self.traced.device.joined, self.reductions.parts, given.parts)), rows)

    def outputs(self, given: Given) -> Leaves:
        """Returns the outputs of the loss."""
        return self.end.outputs(given, self.end.params)


def one_pass(traced: Traced) -> OnePass | None:
    """Returns the loss as a pass with known cotangents, if there is one loop; its first output is differentiated."""
    levels = traced.levels
    if len(levels.loops) != 1 or len(levels.stages) != 2:
        return None
    first, last = levels.stages
    assert first.loop is not None
    before = [equation for equation in first.once if not levels.model.isdisjoint(equation.ins)]
    if any(levels.kinds[equation] is not Kind.FREE for equation in before):
        return None
    if any(locality.has_backward(equation) for equation in before):
        return None  # a rule for the gradient of a parameter, a clip say, takes the whole of it
    store = Store(traced.units, traced.device, dict(zip(levels.program.inputs, traced.values, strict=True)))
    for equation in first.once:
        if equation not in before:
            by_level.run_once(equation, levels, store)
    printed = [equation for equation in before if equation.long.effects and not equation.outs]
    if printed:  # once, and not wherever its operands are made again
        _evaluate(before, dict(store.values))
        before = [equation for equation in before if equation not in printed]
    end = End(traced, store, first.loop, before, last.once)
    return OnePass(traced, store, first.loop, before, last.once, *end.known(), end)


def is_one_pass(traced: Traced) -> bool:
    """Returns whether each micro-batch runs once."""
    once = one_pass(traced)
    return once is not None and once.known is not None


def _first_pass(once: OnePass) -> Given:
    """Runs the loop forward, as far as the cotangents depend on what it gives; all else are zeros."""
    traced, loop = once.traced, once.loop
    env = dict(once.store.values)
    _evaluate(once.before, env)
    needs = iter(once.end.needs)
    parts = [equation for equation in loop.parts if next(needs)]
    rows = [value for value in loop.rows if next(needs)]
    wanted = {*rows, *(value for equation in parts for value in equation.ins)}
    equations: list[Equation] = []
    for equation in reversed(loop.equations):
        if not wanted.isdisjoint(equation.outs):
            equations.append(equation)
            wanted.update(equation.ins)
    part = Loop(equations[::-1], parts, rows, [value for value in loop.takes if value in wanted])
    found_rows, totals = by_level.results_of(part, traced.levels, Store(traced.units, traced.device, env))
    found: dict[Any, Any] = dict(zip(parts, totals, strict=True))
    found |= {value: traced.units.joined(leaf, axis_of(value)) for value, leaf in zip(rows, found_rows, strict=True)}
    pairs = zip((*loop.parts, *loop.rows), once.end.still, strict=True)
    leaves = [found.get(key, zeros) for key, zeros in pairs]
    return Given(leaves[: len(loop.parts)], leaves[len(loop.parts) :])


class End:
    """What follows the loop, as a function of what the loop gives and of the parameters."""

    def __init__(self, traced: Traced, store: Store, loop: Loop, before: Sequence[Equation], after: Sequence[Equation]):
        self.traced, self.store, self.loop, self.before, self.after = traced, store, loop, before, after
        self.params = [store.whole(value) for value in _model_inputs(traced)]
        types = [*map(by_level.type_of_part, loop.parts), *map(self._type_of_rows, loop.rows)]
        self.inexact = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in types]
        self.of_params = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in self.params]
        zeros = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in types]
        self.still = compilers.varying_together([*zeros, *self.params])[: len(zeros)]
        given = _chosen(self.still, self.inexact)
        others = _chosen(self.still, [not moves for moves in self.inexact])
        params = _chosen(self.params, self.of_params)
        self.gradient = jax.make_jaxpr(jax.grad(self._loss, argnums=(0, 2)))(given, others, params)

    def _type_of_rows(self, value: Value) -> jax.ShapeDtypeStruct:
        """Returns the type of the rows of this device."""
        shape = list(value.long.shape)
        shape[axis_of(value)] //= self.traced.units.devices
        return jax.ShapeDtypeStruct(tuple(shape), value.long.dtype)

    def outputs(self, given: Given, params: Leaves) -> Leaves:
        """Returns the outputs of the loss."""
        values = self.store.values | dict(zip(_model_inputs(self.traced), params, strict=True))
        _evaluate(self.before, values)
        values.update(zip(self.loop.rows, given.rows, strict=True))
        end = Store(self.traced.units, self.traced.device, values)
        for equation, part in zip(self.loop.parts, given.parts, strict=True):
            end.values[equation.outs[0]] = by_level.finished(equation, part, end)
        for equation in self.after:
            by_level.run_once(equation, self.traced.levels, end)
        return [jnp.asarray(end.whole(value)) for value in self.traced.levels.program.outputs]

    def _loss(self, given: Leaves, others: Leaves, params: Leaves) -> jax.Array:
        """Returns this device's part of the loss, which all devices compute."""
        rest = iter(others)
        leaves = _put(given, self.inexact, [None if moves else next(rest) for moves in self.inexact])
        parts = Given(leaves[: len(self.loop.parts)], leaves[len(self.loop.parts) :])
        return self.traced.device.part(self.outputs(parts, _put(params, self.of_params, self.params))[0])

    def known(self) -> tuple[Given | None, int | None]:
        """Returns the cotangents of what the loop gives, where they do not depend on what it gives.

        If there is one sum alone whose cotangent does, its place is returned too: the gradient is scaled in the end.
        """
        count = sum(self.inexact)
        depends = _depend(self.gradient.jaxpr, len(self.inexact))[:count]
        is_zero = _zeros(self.gradient.jaxpr)[:count]
        if not any(depends):
            return self.cotangents(Given(self.still, [])), None
        given = _chosen(self.still, self.inexact)
        at = is_zero.index(False)
        if is_zero.count(False) != 1 or given[at].shape or any(map(locality.has_backward, self.loop.equations)):
            return None, None  # a rule of the user's may do anything with cotangents: it needs them as they are
        return self._given(
            [None if zero else jnp.ones_like(leaf) for zero, leaf in zip(is_zero, given, strict=True)]
        ), at

    def cotangents(self, given: Given) -> Given:
        """Returns the cotangents of what the loop gives; None where they are zero."""
        count = sum(self.inexact)
        found = self._gradient([*given.parts, *given.rows], range(count))
        is_zero = _zeros(self.gradient.jaxpr)[:count]
        cotangents = self._given([None if zero else ct for zero, ct in zip(is_zero, found, strict=True)])
        return cotangents._replace(parts=jax.tree.map(self._over_devices, cotangents.parts))

    @property
    def needs(self) -> list[bool]:
        """Which of the results of the loop, reductions first, the cotangents depend on."""
        needed = _needed(self.gradient.jaxpr, sum(self.inexact))
        given, others = iter(needed[: sum(self.inexact)]), iter(needed[sum(self.inexact) :])
        return [next(given if moves else others) for moves in self.inexact]

    @property
    def adds(self) -> bool:
        """Whether the end of the loss adds a gradient by the parameters: a term of the parameters alone."""
        return not all(_zeros(self.gradient.jaxpr)[sum(self.inexact) :])

    def factor(self, given: Given, at: int) -> jax.Array:
        """Returns the cotangent of one sum."""
        return self._over_devices(self._gradient([*given.parts, *given.rows], [at])[0])

    def _over_devices(self, cotangent: jax.Array) -> jax.Array:
        """Returns the cotangent of a value that all devices have alike."""
        return self.traced.device.joined("sum", cotangent)

    def direct(self, given: Given) -> list[Any]:
        """Returns this device's part of the gradient by the parameters of what follows the loop; None for zeros."""
        count = sum(self.inexact)
        is_zero = _zeros(self.gradient.jaxpr)[count:]
        wanted = [count + place for place, zero in enumerate(is_zero) if not zero]
        found = iter(self._gradient([*given.parts, *given.rows], wanted))
        flags = iter(is_zero)
        return [next(found) if moves and not next(flags) else None for moves in self.of_params]

    def _gradient(self, given: Leaves, wanted: Sequence[int]) -> list[Any]:
        others = _chosen(given, [not moves for moves in self.inexact])
        values = [*_chosen(given, self.inexact), *others, *_chosen(self.params, self.of_params)]
        return _run(self.gradient, values, wanted)

    def _given(self, leaves: Leaves) -> Given:
        filled = _put(leaves, self.inexact, [None] * len(self.inexact))
        return Given(filled[: len(self.loop.parts)], filled[len(self.loop.parts) :])


def _model_inputs(traced: Traced) -> list[Value]:
    return [value for value in traced.levels.program.inputs if value in traced.levels.model]


def _evaluate(equations: Sequence[Equation], env: dict[Value, Any]) -> None:
    def read(value: Value) -> Any:
        if isinstance(value, Number | Constant):
            return value.number if isinstance(value, Number) else value.array
        return env[value]

    for equation in equations:
        every = resized.Some(equation.rows, equation.rows[0])
        results = resized.evaluate(equation.long, equation.short, every, list(map(read, equation.ins)))
        env.update(zip(equation.outs, results, strict=True))


def _chosen(leaves: Leaves, flags: Sequence[bool]) -> list[Any]:
    return [leaf for leaf, chosen in zip(leaves, flags, strict=True) if chosen]


def _put(leaves: Leaves, flags: Sequence[bool], others: Leaves) -> list[Any]:
    rest = iter(leaves)
    return [next(rest) if chosen else other for chosen, other in zip(flags, others, strict=True)]


def _units_first(leaf: jax.Array, axis: int, units: int) -> jax.Array:
    rows = jnp.moveaxis(leaf, axis, 0)
    return rows.reshape(units, rows.shape[0] // units, *rows.shape[1:])


def _product(cotangent: Any, value: Any) -> jax.Array:
    if cotangent is None:
        return jnp.zeros([])
    wide = jnp.promote_types(value.dtype, jnp.float32)
    product = cotangent.astype(wide) * value.astype(wide)
    return jnp.real(product) if product.ndim == 0 else jnp.sum(jnp.real(product))


# A traced gradient


def _depend(program: Any, count: int) -> list[bool]:
    """Returns which outputs of a program depend on the first of its inputs."""
    of_inputs = set(program.invars[:count])
    for equation in program.eqns:
        if any(isinstance(atom, core.Var) and atom in of_inputs for atom in equation.invars):
            of_inputs.update(equation.outvars)
    return [isinstance(atom, core.Var) and atom in of_inputs for atom in program.outvars]


def _needed(program: Any, count: int) -> list[bool]:
    """Returns which inputs of a program the first of its outputs depend on."""
    wanted = {atom for atom in program.outvars[:count] if isinstance(atom, core.Var)}
    for equation in reversed(program.eqns):
        if not wanted.isdisjoint(equation.outvars):
            wanted.update(atom for atom in equation.invars if isinstance(atom, core.Var))
    return [var in wanted for var in program.invars]


_ZERO_OF_ZERO = {
    *("broadcast_in_dim", "convert_element_type", "neg", "reshape", "transpose", "squeeze"),
    *("pvary", "pcast", "psum", "psum_invariant", "reshard", "sharding_constraint"),
}


def _zeros(program: Any) -> list[bool]:
    """Returns which outputs of a program are zeros whatever it takes."""
    zeros: set[Any] = set()

    def is_zero(atom: Any) -> bool:
        return not np.any(atom.val) if isinstance(atom, core.Literal) else atom in zeros

    for equation in program.eqns:
        if equation.primitive.name in _ZERO_OF_ZERO and is_zero(equation.invars[0]):
            zeros.update(equation.outvars)
    return list(map(is_zero, program.outvars))


def _run(traced: Any, values: Leaves, wanted: Sequence[int]) -> list[Any]:
    """Returns some outputs of a traced program; equations that others need are not evaluated."""
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
        env.update(zip(equation.outvars, compilers.bind(equation, list(map(read, equation.invars))), strict=True))
    return [jnp.asarray(read(atom)) for atom in outputs]
