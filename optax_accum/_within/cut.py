"""One call on one device: its micro-batches differentiated one by one, and added up."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._arguments import checks
from optax_accum._arguments.roles import Call
from optax_accum._core import arithmetic, compilers, dtypes, tracing
from optax_accum._core.leaves import is_inexact, parted
from optax_accum._core.traced import Traced
from optax_accum._core.types import Index, Tree
from optax_accum._loss import ratio
from optax_accum._loss.backward import Adding, Backward, contribution
from optax_accum._loss.parts import Parts
from optax_accum._loss.weighing import ByShare
from optax_accum._space.device import Device
from optax_accum._space.ending import Ending
from optax_accum._within import gradients, microbatches, reductions, weights
from optax_accum._within.microbatches import Alive, Iteration, MicroBatches
from optax_accum._within.rules import CallRules


class Sums(NamedTuple):
    """The sums over the micro-batches of one device."""

    loss: jax.Array  # [], the sum of the micro-batches' contributions
    counted: Any  # the sum of the counts that their losses return, [], or () where counts are known
    grads: Any  # the sum of their gradients: leaf by leaf; in the end a tree
    outputs: Any
    samples: Any  # of the meter
    weight: jax.Array | None = None  # [], in the end: this device's part of the weight of all micro-batches


@dataclasses.dataclass(frozen=True)
class Cut:
    """One call: its micro-batches, their weights, and the shapes that `fun` returns for them."""

    rules: CallRules
    micro_batches: MicroBatches
    weighing: ByShare
    alive: Alive
    shapes: Parts  # that `fun` returns for a full micro-batch
    types: Sequence[Any]  # of its leaves, inside `jax.shard_map`
    outputs: reductions.Outputs  # how each auxiliary output is reduced
    empty: Tree  # the accumulator before the first micro-batch
    kinds: Tree  # the reduction of each leaf's gradients
    static: bool  # whether the loop passes all micro-batches, run or not
    how: Adding | None = None  # how gradients are added inside the backward pass, if they are
    ending: Ending | None = None  # of the window, if the last backward pass adds gradients over the devices, too
    scale: float = 1.0  # of gradients until all are added

    def add_up(self) -> tuple[Sums, Tree]:
        """Adds up the micro-batches' contributions; returns the sums, and the last carry."""
        in_order = self.micro_batches.in_order
        sums, carry = in_order(self.add, self.start(), self.alive, static=self.static, last_apart=bool(self.ending))
        return self.finish(sums), carry

    def start(self) -> Sums:
        """The sums before the first micro-batch."""
        grads = gradients.start(self.empty, self.kinds)

        def scalar() -> Any:
            return jnp.zeros([], dtypes.default_float())

        samples = self.rules.meter.samples(gradients.added(self.params, self.kinds), scalar)
        loss = jnp.zeros([], dtypes.accumulator_dtype(self.loss_dtype, None))
        return Sums(loss, self.weighing.nothing, grads, self.outputs.start(), samples)

    def add(self, sums: Sums, iteration: Iteration) -> tuple[Sums, Parts]:
        with jax.named_scope("optax_accum.micro_batch"):
            loss, backward, parts = self.contribution(iteration)
        with jax.named_scope("optax_accum.add"):
            grads, squares = gradients.add(sums.grads, backward, self.kinds, self._adding(iteration.index))
            samples = self._sampled(sums.samples, backward, parts.loss, iteration.index, squares)
        weight = self.weighing.of_output(parts.loss, iteration.index, iteration.rows)
        outputs = self.outputs.add(sums.outputs, parts.aux, iteration.index, weight)
        counted = jax.tree.map(jnp.add, sums.counted, self.weighing.counted(parts.loss))
        return Sums(sums.loss + loss, counted, grads, outputs, samples), parts

    def finish(self, sums: Sums) -> Sums:
        grads = gradients.finish(sums.grads, self.empty)
        if self.scale != 1:
            grads = jax.tree.map(lambda leaf: leaf * jnp.asarray(1 / self.scale, leaf.dtype), grads)
        return sums._replace(
            loss=self.weighing.finished(sums.loss, self.loss_dtype),
            grads=grads if self.ending is None else self.ending.reduced(grads),
            outputs=self.outputs.finish(sums.outputs, lambda: self.device.total(sums.counted)),
            weight=self.weighing.weight_of(sums.counted, self.device.count),
        )

    def contribution(self, iteration: Iteration) -> tuple[jax.Array, Backward, Parts]:
        """Differentiates one micro-batch."""
        call = iteration.call

        def fun(params: Any) -> Any:
            return self.micro_batches.parts(call.with_values(call.params, params))

        return contribution(fun, call[call.params], self.weighing, iteration.index, self.scale)

    def _adding(self, index: Index) -> Adding | None:
        """How the gradient of a micro-batch is added; the last one's finishes the sums."""
        is_last = isinstance(index, int) and index == self.micro_batches.split.last
        if self.how and self.ending and is_last:
            return dataclasses.replace(self.how, finish=self.ending.finish)
        return self.how

    @property
    def params(self) -> tuple[Tree, ...]:
        call = self.micro_batches.call
        return call[call.params]

    @property
    def device(self) -> Device:
        return self.micro_batches.device

    @property
    def loss_dtype(self) -> Any:
        return ratio.dtype_of(self.shapes.loss)

    def _sampled(self, samples: Any, backward: Backward, loss: Any, index: Index, squares: list[jax.Array]) -> Any:
        """Adds `w |g|^2` of a gradient, which comes scaled, to the meter's sums."""
        meter = self.rules.meter
        if not meter.measures:
            return samples
        if squares:
            at_leaves = parted(self.params, is_inexact)[1](squares)
            by_group = meter.by_group(gradients.added(at_leaves, self.kinds))
        else:
            by_group = meter.squares(gradients.added(backward.gradient(), self.kinds), like=samples.number)
        return meter.sample(samples, by_group, self.weighing.of_sample(loss, index) / self.scale**2, False)


def cut(rules: CallRules, device: Device, call: Call, again: bool) -> Cut:
    """Cuts the batch of a call on one device; `again` says that the sums are to be differentiated again."""
    checks.check_differentiable(call[call.params])
    call = device.localized(call, call.params)
    params = call[call.params]
    empty, kinds = arithmetic.zeros(params, rules.accumulator_dtype), rules.kinds(params)
    empty = jax.tree.map(compilers.on_mesh_of, params, empty)
    micro_batches = microbatches.of_call(rules.parts, device, call, rules.sizes)
    traced = micro_batches.traced(call.params)
    if rules.reads is not None and rules.weight_fn is None:
        rules = dataclasses.replace(rules, weight_fn=rules.reads(call))
    micro_batches = micro_batches.with_fast_convolutions(traced)
    again = again or tracing.is_differentiated(traced.program.consts)  # values that `fun` closes over
    static = again or rules.in_place is False
    shapes, types = traced.shapes, traced.program.out_avals
    device.check_nested(traced)
    device.check_loss(traced, types[: len(jax.tree.leaves(shapes.loss))])
    count = functools.partial(_counts, rules, micro_batches, shapes, static)
    weighing, alive = weights.weigh(micro_batches, rules.weight_fn, shapes.loss, traced, count)
    weighing.check_meter(rules.meter)
    if device.count * micro_batches.split.parts == 1:
        rules.meter.warn_of_one_sample()
    split, counted = micro_batches.split, weighing.counts_outputs
    scale = 1.0 if counted else _scale(rules, device.count * split.parts, kinds, traced)
    outputs = reductions.outputs_of(rules.aux_reduction, shapes.aux, split, counted=counted)
    how = Adding(rules.meter.no_squares(params)) if tracing.is_staged() else None
    return Cut(
        rules=rules,
        micro_batches=micro_batches,
        weighing=weighing,
        alive=alive,
        shapes=shapes,
        types=types,
        outputs=outputs,
        empty=empty,
        kinds=kinds,
        static=static,
        how=how,
        ending=device.ending(empty, None if how and gradients.are_added(kinds) else "gradients that are all added"),
        scale=scale,
    )


def _scale(rules: CallRules, parts: int, kinds: Tree, traced: Traced) -> float:
    """The factor of gradients while they are added.

    float16 would round a micro-batch's small share of the gradient to zero: a power of two makes it as large as the
    whole. A user's own rule may do anything with a larger cotangent: beside one nothing is scaled.
    """
    wide = not any(map(dtypes.is_short, jax.tree.leaves(rules.accumulator_dtype)))
    if not (traced.is_short and wide and gradients.are_added(kinds)) or traced.has_rule:
        return 1.0
    return 2.0 ** math.ceil(math.log2(parts))


def _counts(
    rules: CallRules, micro_batches: MicroBatches, shapes: Parts, static: bool, alive: Alive
) -> dict[str, jax.Array]:
    """Runs the micro-batches forward, and adds up this device's counts of the loss's terms."""
    if rules.devices.is_partial:
        raise ValueError(
            "A loss of several Ratios is divided by what all devices count, and its gradient is whole: "
            'devices has to="partial". Leave it out; or return one Ratio.'
        )

    def add(counts: dict[str, jax.Array], iteration: Iteration) -> tuple[dict[str, jax.Array], Parts]:
        parts = micro_batches.parts(iteration.call)
        return jax.tree.map(jnp.add, counts, ratio.counts(parts.loss)), parts

    with jax.named_scope("optax_accum.count"):
        counts = {name: jnp.zeros([], dtypes.default_float()) for name in shapes.loss}
        return micro_batches.in_order(add, counts, alive, static=static)[0]
