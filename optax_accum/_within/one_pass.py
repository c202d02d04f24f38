"""The gradient of a loss whose rows come together in its end alone: a sum over micro-batches, by known cotangents.

Values that the batch alone decides are computed first. If the loss is then linear in the results of the loop over
micro-batches, each micro-batch runs once: the cotangents are known before the first. Else a forward pass comes first,
for the results on which the cotangents depend.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core.equations import has_loop
from optax_accum._rows import derivatives
from optax_accum._rows.levels import Kind, Loop
from optax_accum._rows.program import Equation, Number, Value
from optax_accum._within import by_level
from optax_accum._within.by_level import Store, axis_of
from optax_accum._within.end import End, Given, Leaves, evaluate, model_inputs
from optax_accum._within.partial import reduction_of
from optax_accum._within.traced_call import TracedCall


@dataclasses.dataclass(frozen=True)
class OnePass:
    """A loss whose rows need one pass.

    Attributes:
      store: the inputs, and the values that the batch alone decides.
      before: the equations of parameters without rows. They run in the loop, so that their gradient is added there;
        of rows that they make, each micro-batch takes its own.
      after: the equations that follow the loop.
      known: the cotangents of the loop's results, None where they are zero; None if they depend on the results.
      factor_at: the place of the sum whose cotangent scales the gradient, and is known only at the end of the loss.
      end: the end of the loss, and its gradient.
      is_measured: whether the gradient of each micro-batch is measured.
    """

    traced: TracedCall
    store: Store
    loop: Loop
    before: Sequence[Equation]
    after: Sequence[Equation]
    known: Given | None
    factor_at: int | None
    end: End
    is_measured: bool = False

    @property
    def measured(self) -> "OnePass":
        """The same, with each gradient measured: a factor that only the end tells comes from a forward pass, first."""
        of_all = {} if self.factor_at is None else {"known": None, "factor_at": None}
        return dataclasses.replace(self, is_measured=True, **of_all)

    @functools.cached_property
    def cotangents(self) -> Given:
        """The cotangents of the loop's results, None where they are zero."""
        return self.end.cotangents(_first_pass(self)) if self.known is None else self.known

    @property
    def taken(self) -> list[Value]:
        """The values that the loop takes and that do not depend on the parameters."""
        inner = [value for equation in self.before for value in equation.ins]
        model = self.traced.levels.model
        takes = dict.fromkeys([*self.loop.takes, *inner])
        return [value for value in takes if value not in model and not isinstance(value, Number)]

    @property
    def made(self) -> list[Value]:
        """The rows that the loop takes and that parameters make."""
        made = {value for equation in self.before for value in equation.outs if value.axis is not None}
        return [value for value in self.loop.takes if value in made]

    @property
    def fixed(self) -> Leaves:
        """The values that all micro-batches take whole."""
        return [jnp.asarray(self.store.whole(value)) for value in self.taken if value.axis is None]

    @property
    def batch(self) -> dict[str, Any]:
        """The arrays that are split into micro-batches; their units come first."""
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
        """A micro-batch's part of the differentiated sum, over its share of the rows; and its results."""
        units, numbers = self.traced.units, batch["units"]
        env: dict[Value, Any] = dict(zip(model_inputs(self.traced), params, strict=True))
        env.update(zip([value for value in self.taken if value.axis is None], fixed, strict=True))
        with_rows = [value for value in self.taken if value.axis is not None]
        env.update((v, units.along(rows, axis_of(v))) for v, rows in zip(with_rows, batch["rows"], strict=True))
        evaluate(self.before, env)
        env.update((v, units.chosen(env[v], axis_of(v), numbers)) for v in self.made)
        rows, parts = by_level.of_micro_batch(self.loop, units, env, numbers)
        pairs = zip(rows, self.loop.rows, strict=True)
        first = [_units_first(row, axis_of(value), len(numbers)) for row, value in pairs]
        products = map(_product, (*self.cotangents.parts, *batch["cotangents"]), (*parts, *first))
        products = map(self.traced.device.added_elsewhere, products)
        share = self.weight(batch) / (self.total * units.devices)
        return sum(products, jnp.zeros([])) / share, Given(parts, first)

    def weight(self, batch: dict[str, Any]) -> Any:
        """The number of rows of a micro-batch; if gradients are measured, without the rows that fill it up."""
        units, numbers = self.traced.units, batch["units"]
        return units.block * (jnp.sum(numbers < units.number) if self.is_filled else len(numbers))

    @property
    def is_filled(self) -> bool:
        """Whether rows that fill up the last micro-batches must not count: they would change a measured gradient."""
        return self.is_measured and self.traced.units.fills

    @property
    def total(self) -> int:
        """The number of rows of all micro-batches."""
        units = self.traced.units
        return units.block * (units.number if self.is_filled else units.size * units.parts)

    @property
    def reductions(self) -> Given:
        """The names of the reductions that join the micro-batches' results."""
        return Given([reduction_of(equation).joins for equation in self.loop.parts], ["concat"] * len(self.loop.rows))

    def joined(self, given: Given) -> Given:
        """The loop's results as the program has them."""
        units = self.traced.units
        pairs = zip(given.rows, self.loop.rows, strict=True)
        rows = [units.along(leaf[: units.number], axis_of(value)) for leaf, value in pairs]
        return Given(list(map(self.traced.device.joined, self.reductions.parts, given.parts)), rows)

    def outputs(self, given: Given) -> Leaves:
        return self.end.outputs(given, self.end.params)


def one_pass(traced: TracedCall) -> OnePass | None:
    """The loss as one pass over its rows, None if one loop is not enough; its first output is differentiated."""
    levels = traced.levels
    if len(levels.loops) != 1 or len(levels.stages) != 2:
        return None
    first, last = levels.stages
    assert first.loop is not None
    if any(value.axis is None for value in first.loop.rows):
        return None  # each micro-batch makes it, and one of them has its gradient
    before = [equation for equation in first.once if not levels.model.isdisjoint(equation.ins)]
    if any(levels.kinds[equation] is Kind.WHOLE or equation.view.has_rows for equation in before):
        return None
    if any(levels.kinds[equation] is Kind.MADE and has_loop(equation.single) for equation in before):
        return None  # it would run in each micro-batch
    if any(derivatives.has_backward(equation) for equation in before):
        return None  # a rule for the gradient of a parameter, a clip say, takes the whole of it
    store = Store(traced.units, traced.device, dict(zip(levels.program.inputs, traced.values, strict=True)))
    for equation in first.once:
        if equation not in before:
            by_level.run_once(equation, levels, store)
    printed = [equation for equation in before if equation.single.effects and not equation.outs]
    if printed:  # once, and not wherever its operands are made again
        evaluate(before, dict(store.values))
        before = [equation for equation in before if equation not in printed]
    end = End(traced, store, first.loop, before, last.once)
    return OnePass(traced, store, first.loop, before, last.once, *end.known(), end)


def is_one_pass(traced: TracedCall) -> bool:
    once = one_pass(traced)
    return once is not None and once.known is not None


def _first_pass(once: OnePass) -> Given:
    """Runs the loop forward, as far as the cotangents depend on its results; all other results are zeros."""
    traced, loop = once.traced, once.loop
    store = Store(traced.units, traced.device, dict(once.store.values))
    for equation in once.before:
        by_level.run_once(equation, traced.levels, store)
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
    found_rows, totals = by_level.results_of(part, traced.levels, store)
    results: dict[Any, Any] = dict(zip(parts, totals, strict=True))
    results |= {value: traced.units.joined(leaf, axis_of(value)) for value, leaf in zip(rows, found_rows, strict=True)}
    pairs = zip((*loop.parts, *loop.rows), once.end.still, strict=True)
    leaves = [results.get(key, zeros) for key, zeros in pairs]
    return Given(leaves[: len(loop.parts)], leaves[len(loop.parts) :])


def _units_first(leaf: jax.Array, axis: int, units: int) -> jax.Array:
    rows = jnp.moveaxis(leaf, axis, 0)
    return rows.reshape(units, rows.shape[0] // units, *rows.shape[1:])


def _product(cotangent: Any, value: Any) -> jax.Array:
    if cotangent is None:
        return jnp.zeros([])
    wide = jnp.promote_types(value.dtype, jnp.float32)
    product = cotangent.astype(wide) * value.astype(wide)
    return jnp.real(product) if product.ndim == 0 else jnp.sum(jnp.real(product))
