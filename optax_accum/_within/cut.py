"""Owns one call: its batch cut, the micro-batches differentiated one by one and added up. Sees one device only."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, checks, compilers, ratio, tracing
from optax_accum._core.arithmetic import Tree
from optax_accum._core.backward import Backward, adds_in_place, differentiate
from optax_accum._core.meter import Meter
from optax_accum._core.roles import Call, Roles
from optax_accum._core.rows import count_rows
from optax_accum._core.state import default_float
from optax_accum._space.device import Device
from optax_accum._space.meshes import Axes
from optax_accum._space.space import PARTIAL
from optax_accum._within import gradients, loops, reductions, splitting
from optax_accum._within.gradients import Leaves
from optax_accum._within.reductions import REDUCTIONS

_AGAIN = (
    "What value_and_grad returns is not differentiated again through jit or jax.checkpoint, where gradients are added "
    "in place or the number of micro-batches is traced (weight_fn). Pass in_place=False to value_and_grad."
)


class Totals(NamedTuple):
    """What is added up over the micro-batches, and what each hands on to the next."""

    loss: jax.Array  # [], sum of share times loss; of the totals of a Ratio
    counted: jax.Array | None  # [], sum of the counts of a Ratio
    grads: Any  # sum of share times gradient, leaf by leaf; None while a reference holds it
    carry: Tree
    outputs: Any
    samples: Any = ()  # of the meter; in the end with this device's part of the weight


class Parts(NamedTuple):
    """What `fun` returns, by role."""

    loss: Any  # [], or a dict of terms, each [], or a Ratio, or a dict of them
    carry: Tree
    aux: Tree


@dataclasses.dataclass(frozen=True)
class Rules:
    """What `value_and_grad` was asked for, and the functions that do it."""

    fun: Callable[..., Any]
    roles: Roles
    sizes: splitting.Sizes
    single: bool
    has_aux: bool
    weight_fn: Callable[..., Any] | None
    aux_reduction: Tree
    grad_reduction: Tree  # this and the next: a prefix of the tuple of differentiated arguments
    accumulator_dtype: Tree
    in_place: bool | None
    unroll: bool
    meter: Meter
    reduce_axes: Axes
    reduce_to: Tree

    def kinds(self, params: Tree) -> Tree:
        """Returns what becomes of the gradients of each leaf of the differentiated arguments."""
        return reductions.names_of(self.grad_reduction, params, "grad_reduction", "the parameters")

    def parts(self, call: Call) -> Parts:
        """Calls `fun` and takes apart what it returns."""
        out = call.apply(self.fun)
        if not self.has_aux and call.carry is None:
            return Parts(out, None, None)
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(
                f"With has_aux or carry_argnum, fun must return a pair, loss first: it returned {out!r}. Return "
                "(loss, aux), or leave out the option."
            )
        if call.carry is None:
            return Parts(out[0], None, out[1])
        if not self.has_aux:
            return Parts(out[0], out[1], None)
        if not isinstance(out[1], tuple) or len(out[1]) != 2:
            raise TypeError(f"With has_aux and carry_argnum, fun returns (loss, (aux, carry)): it returned {out!r}.")
        return Parts(out[0], out[1][1], out[1][0])

    def joined(self, parts: Parts) -> Any:
        """Puts together what `parts` took apart."""
        if not self.roles.named["carry_argnum"]:
            return (parts.loss, parts.aux) if self.has_aux else parts.loss
        return parts.loss, ((parts.aux, parts.carry) if self.has_aux else parts.carry)


class Cut:
    """One call: the batch cut, the shares of its micro-batches, and what `fun` will return for each.

    `again` says that this is to be differentiated again, which takes a sum beside the backward pass.
    """

    def __init__(self, rules: Rules, device: Device, call: Call, again: bool):
        self.rules, self.device = rules, device
        self.call = call = device.own(call)
        self.static = again or rules.unroll or rules.in_place is False
        self.batches = list(call[call.batch])
        self.split = splitting.split_rows(self.batches, rules.sizes, device.count)
        self.shares, self.rest_share, self.weight = splitting.shares(
            self.split, self.batches, rules.weight_fn, device.whole
        )
        self.terms = isinstance(self.shares, dict)  # of the loss, each with a share of its own; outputs go by rows
        self.stacked = splitting.stacked(self.split, self.batches)
        self.params = call[call.params]
        checks.check_differentiable(self.params)
        self.carry = None if call.carry is None else arithmetic.strong(call.arguments[call.carry])
        self.alive = splitting.live(self.shares), splitting.live(self.rest_share)  # the others are not run
        self.shapes = self._shapes()
        self.ratio = ratio.is_ratio(self.shapes.loss)
        program = functools.cache(lambda: jax.make_jaxpr(lambda: rules.parts(self._first_call()))().jaxpr)
        if rules.weight_fn or self.ratio:
            device.check_uncoupled(program)
        if rules.weight_fn and device.couples(program):
            self.alive = device.agreed(self.alive)
        self.rows = splitting.live_rows(self.split, self.alive, device.whole) if self.terms else None
        self.divisors = self._divisors() if ratio.are_terms(self.shapes.loss) else None
        self.reductions = reductions.names_of(rules.aux_reduction, self.shapes.aux)
        reductions.check(self.reductions, self.shapes.aux, self.split)
        self.start_grads = arithmetic.zeros(self.params, rules.accumulator_dtype)
        self.kinds = rules.kinds(self.params)
        self.in_place = rules.meter.unseen and not (again or rules.unroll) and self._adds_in_place()
        if self.in_place or (rules.weight_fn is not None and not self.static):
            self._refuse_differentiation()

    def add_up(self) -> Totals:
        """Adds each micro-batch's share of the gradient, and finishes what was added up."""
        refs, totals = self.start()
        return self.finish(refs, self.in_order(functools.partial(self.add, refs), totals))

    def start(self) -> tuple[Leaves, Totals]:
        """Returns the references that gradients are added to in place, if any, and the totals before the first."""
        refs, grads = gradients.start(self.start_grads, self.kinds, in_place=self.in_place)
        empty = lambda name, shape: REDUCTIONS[name].start(shape, self.split)
        outputs = jax.tree.map(empty, self.reductions, self.shapes.aux)
        loss = jnp.zeros([], self._loss_dtype(wide=True))
        counted = jnp.zeros([], default_float()) if self.ratio else None
        return refs, self._varying(Totals(loss, counted, grads, self.carry, outputs, self._no_samples()))

    def _divisors(self) -> dict[str, jax.Array]:
        """Runs the micro-batches forward for what they count, and returns the reciprocal of each term's sum."""
        if self.rules.reduce_to == PARTIAL:
            raise ValueError(
                "A loss of several Ratios is divided by what all devices count, and its gradient is whole: "
                'reduce_to="partial" was asked for. Leave reduce_to out; or return one Ratio.'
            )

        def add(sums: Any, micro_batches: list[Tree], share: Any, index: Any) -> Any:
            counts, carry = sums
            parts = self.rules.parts(self._micro_call(micro_batches, carry, index))
            counts = {name: counts[name] + term.checked().count for name, term in parts.loss.items()}
            return self.device.vary(counts), arithmetic.strong(parts.carry)

        with jax.named_scope("optax_accum.count"):
            counts = {name: jnp.zeros([], default_float()) for name in self.shapes.loss}
            counts, _ = self.in_order(add, (self.device.vary(counts), self.carry))
            return {name: ratio.share(self.device.whole(count)) for name, count in counts.items()}

    def in_order(self, add: Callable[..., Any], totals: Any) -> Any:
        """Runs `totals = add(totals, micro_batches, share, index)` for the micro-batches that count, the rest last."""

        def whole(index: Any, totals: Any) -> Any:
            rows = splitting.micro_batch(self.split, self.stacked, index)
            if self.rules.unroll:
                rows, totals = compilers.ready_together(rows, totals)
            return add(totals, rows, self._share(index), index)

        def rest(totals: Any) -> Any:
            rows = splitting.remainder(self.split, self.batches)
            return add(totals, rows, self.rest_share, self.split.whole)

        alive, rest_alive = self.alive
        totals = loops.in_order(self.split.whole, alive, whole, totals, unroll=self.rules.unroll, static=self.static)
        return loops.if_alive(rest_alive, rest, totals, static=self.static)

    def add(self, refs: Leaves, totals: Totals, micro_batches: Any, share: Any, index: Any) -> Totals:
        """Adds a micro-batch."""
        with jax.named_scope("optax_accum.micro_batch"):
            loss, backward, parts = self._differentiate(self._micro_call(micro_batches, totals.carry, index), share)
            self.device.check_loss(loss)
        with jax.named_scope("optax_accum.add"):
            grads = gradients.add(refs, totals.grads, backward, self.kinds)
            samples = self._with_sample(totals.samples, backward, share, parts)
        if isinstance(index, int) and index == self.split.whole:
            reductions.check_rest(self.reductions, self.shapes.aux, parts.aux, self.split)
        weight = share if self.rows is None else count_rows(micro_batches) / self.rows
        added = lambda name, total, output: REDUCTIONS[name].add(total, jnp.asarray(output), index, weight)
        outputs = jax.tree.map(added, self.reductions, totals.outputs, parts.aux)
        counted = totals.counted + parts.loss.count if self.ratio else None
        carry = arithmetic.strong(parts.carry)
        return self._varying(Totals(totals.loss + loss, counted, grads, carry, outputs, samples))

    def finish(self, refs: Leaves, totals: Totals) -> Totals:
        """Returns the sums, the outputs of the batch among them."""
        grads = gradients.finish(refs, totals.grads, self.start_grads)
        finished = lambda name, total, shape: REDUCTIONS[name].finish(total, shape)
        aux = jax.tree.map(finished, self.reductions, totals.outputs, self.shapes.aux)
        loss = totals.loss.astype(self._loss_dtype(wide=self.ratio))
        weight = jnp.asarray(totals.counted if self.ratio else self._one_weight() / self.device.count)
        return Totals(loss, totals.counted, grads, totals.carry, aux, (totals.samples, weight))

    def _no_samples(self) -> Any:
        if not self.rules.meter.unseen and (self.terms or self.divisors is not None):
            raise ValueError(
                "Statistics take one weight for each micro-batch: here each term of the loss has its own. Leave "
                "statistics out, or return a loss of one term."
            )
        params = gradients.added(self.params, self.kinds)
        return self.rules.meter.samples(params, lambda: jnp.zeros([], default_float()))

    def _one_weight(self) -> Any:
        return 1.0 if self.terms or self.divisors is not None else self.weight

    def _with_sample(self, samples: Any, backward: Backward, share: Any, parts: Parts) -> Any:
        """Adds `w |g|^2`, of a gradient that is scaled by its share of the weights, or by the count of a Ratio."""
        if self.rules.meter.unseen:
            return samples
        grads = gradients.added(backward.gradient(), self.kinds)
        scale, weight = (parts.loss.count, 1) if self.ratio else (share, self.weight)
        weight = jnp.where(jnp.asarray(scale) == 0, 0, weight * arithmetic.reciprocal(scale))
        return self.rules.meter.sample(samples, grads, weight, False, like=samples.number)

    def _adds_in_place(self) -> bool:
        """Returns whether gradients are added inside the backward pass."""
        first = lambda: self._differentiate(self._first_call(), self._share(0))[1]
        return adds_in_place(self.rules.in_place, self.params, self.start_grads, first)

    def _varying(self, totals: Totals) -> Totals:
        """Returns the totals as values that differ between devices; the carry may not."""
        self.device.check_carry(totals.carry)
        return self.device.vary(totals._replace(carry=None))._replace(carry=totals.carry)

    def _refuse_differentiation(self) -> None:
        """Lets nobody differentiate this again through a `jit`: JAX cannot, and its errors do not say what can."""
        values = self.params, self.stacked, self.batches, list(self.call.arguments.values())
        self.params, self.stacked, self.batches, arguments = tracing.refuse_differentiation(values, _AGAIN)
        self.call = self.call.with_arguments(dict(zip(self.call.arguments, arguments, strict=True)))

    def _share(self, index: Any) -> Any:
        """Returns the share of whole micro-batch `index`, or of each term."""
        return self.shares if isinstance(self.shares, float) else jax.tree.map(lambda s: s[index], self.shares)

    def _first_call(self) -> Call:
        """Returns the call of `fun` for the first whole micro-batch."""
        return self._micro_call(splitting.micro_batch(self.split, self.stacked, 0), self.carry, 0)

    def _micro_call(self, micro_batches: Sequence[Tree], carry: Tree, index: Any) -> Call:
        """Returns the call of `fun` for one micro-batch: its rows, its own key, the carry."""
        call = self.call.own_key(index).with_arguments(dict(zip(self.call.batch, micro_batches, strict=True)))
        if call.carry is None:
            return call
        return call.with_arguments({call.carry: jax.tree.map(lambda leaf: leaf, carry)})  # some may be used only once

    def _differentiate(self, call: Call, share: Any) -> tuple[jax.Array, Backward, Parts]:
        def contribution(params: tuple[Tree, ...]) -> tuple[jax.Array, Parts]:
            parts = self.rules.parts(call.with_arguments(dict(zip(call.params, params, strict=True))))
            parts = parts._replace(loss=ratio.checked(parts.loss))
            factor = share if self.divisors is None else self.divisors
            return _weighted(ratio.totals(parts.loss), 1.0 if self.ratio else factor), parts

        return differentiate(contribution, self.params)

    def _shapes(self) -> Parts:
        """Returns the shapes that `fun` returns for a whole micro-batch, after checking them."""
        shapes = jax.eval_shape(lambda: self.rules.parts(self._first_call()))
        ratio.check_loss(shapes.loss, self.shares if self.rules.weight_fn else None)
        checks.check_carry(self.carry, shapes.carry)
        return shapes

    def _loss_dtype(self, *, wide: bool) -> Any:
        dtype = jnp.result_type(*(leaf.dtype for leaf in jax.tree.leaves(ratio.totals(self.shapes.loss))))
        return arithmetic.accumulator_dtype(dtype, None) if wide else dtype


def _weighted(loss: Any, share: Any) -> jax.Array:
    """Returns this micro-batch's share of the loss; the backward pass of a loss below 32 bits rounds the share."""

    def term(loss: Any, share: Any) -> jax.Array:
        loss = jnp.asarray(loss)  # or a number: a term that is switched off
        wide = loss.astype(arithmetic.accumulator_dtype(loss.dtype, None))
        return wide * jnp.asarray(share, wide.dtype)

    if not isinstance(share, dict):
        return sum(term(leaf, share) for leaf in jax.tree.leaves(loss))  # type: ignore[return-value]
    return sum(jnp.where(share[key] != 0, term(loss[key], share[key]), 0) for key in share)  # type: ignore[return-value]
