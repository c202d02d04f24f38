"""Owns the micro-batches of one call: the call of `fun` for each, in their order. Differentiates nothing."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from optax_accum._core import compilers, tracing
from optax_accum._core.arithmetic import Tree
from optax_accum._core.roles import Call
from optax_accum._core.rows import count_rows
from optax_accum._core.tracing import Flag
from optax_accum._core.weighing import Index
from optax_accum._within import loops, splitting
from optax_accum._within.splitting import Split

Flags = tuple[Flag, Flag]  # for the full micro-batches, all or [k], and for the remainder


class Alive(NamedTuple):
    """Which micro-batches are run.

    Attributes:
      here: those of this device.
      turns: those that have a turn, here or on another device: what one micro-batch hands on to the next is handed on
        by all devices, so that it stays the same on all.
    """

    here: Flags
    turns: Flags


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """A batch that is cut: full micro-batches, and the remainder, whose index is their number."""

    call: Call  # of the whole batch
    split: Split
    stacked: Tree  # the full micro-batches: leaves [b, k, ...]
    rest: Tree  # the remainder: leaves [r, ...]

    def rows(self, index: Index) -> Any:
        """Returns the arguments that hold the batch, of one micro-batch."""
        is_rest = isinstance(index, int) and index == self.split.full
        return self.rest if is_rest else splitting.micro_batch(self.split, self.stacked, index)

    def call_of(self, index: Index, rows: Any, carry: Tree) -> Call:
        """Returns the call of `fun` for one micro-batch: its rows, its own key, the carry."""
        call = self.call.own_key(index).with_arguments(dict(zip(self.call.batch, rows, strict=True)))
        if call.carry is None:
            return call
        own = jax.tree.map(lambda leaf: leaf, carry)  # some may be used only once
        return call.with_arguments({call.carry: own})

    def first(self, carry: Tree) -> Call:
        """Returns the call of `fun` for the first one."""
        return self.call_of(0, self.rows(0), carry)

    def in_order(
        self,
        add: Callable[[tuple[Any, Tree], Index, Any], tuple[Any, Tree]],
        totals: tuple[Any, Tree],
        alive: Alive,
        carried: Callable[[Call], Tree],
        *,
        unroll: bool,
        static: bool,
        last_apart: bool = False,
    ) -> tuple[Any, Tree]:
        """Runs `sums, carry = add((sums, carry), index, rows)` for micro-batches that are alive, the remainder last.

        One that is alive on another device only is run for what it hands on, `carried`. With `last_apart` the last of
        all is in no loop, and is run, alive or not; in the end it counts if it is.
        """

        def run(index: Any, totals: Any, *, after: bool = unroll) -> Any:
            rows = self.rows(index)
            if after:  # else compilers begin with it at once, and keep what it needs
                rows, totals = compilers.ready_together(rows, totals)
            return add(totals, index, rows)

        def one(index: Any, totals: Any) -> Any:
            if alive.here is alive.turns:
                return run(index, totals)
            here = self._at(index, alive.here)
            totals = loops.if_alive(here, functools.partial(run, index), totals, static=static)
            hand_on = lambda totals: (totals[0], carried(self.call_of(index, self.rows(index), totals[1])))
            return loops.if_alive(tracing.negated(here), hand_on, totals, static=static)

        full, (turns, rest) = self.split.full, alive.turns
        order = functools.partial(loops.in_order, add=one, unroll=unroll, static=static)
        if not last_apart:
            return loops.if_alive(rest, functools.partial(one, full), order(full, turns, totals=totals), static=static)
        if not self.split.rest:
            full, turns = full - 1, turns if isinstance(turns, bool) else turns[:-1]
        totals = order(full, turns, totals=totals)
        sums, carry = run(self.split.last, totals, after=True)
        sums = tracing.selected(self.last_of(alive.here), sums, totals[0])
        return sums, tracing.selected(self.last_of(alive.turns), carry, totals[1])

    def _at(self, index: Index, flags: Flags) -> Flag:
        """Returns the flag of one micro-batch."""
        if isinstance(index, int) and index == self.split.full:
            return flags[1]
        return flags[0] if isinstance(flags[0], bool) else flags[0][index]

    def last_of(self, flags: Flags) -> Flag:
        """Returns the flag of the last micro-batch."""
        return self._at(self.split.last, flags)

    def undifferentiable(self, message: str) -> "MicroBatches":
        """Returns the same; whoever differentiates what is made of it, through a `jit` between, gets the message."""
        values = self.stacked, self.rest, list(self.call.arguments.values())
        stacked, rest, arguments = tracing.refuse_differentiation(values, message)
        call = self.call.with_arguments(dict(zip(self.call.arguments, arguments, strict=True)))
        return MicroBatches(call, self.split, stacked, rest)


def cut(call: Call, sizes: splitting.Sizes, devices: int) -> MicroBatches:
    """Cuts the batch of a call: what one of so many devices has of it."""
    batches = list(call[call.batch])
    split = splitting.split_rows(batches, sizes, devices)
    rest = splitting.remainder(split, batches) if split.rest else None
    stacked = batches if sizes.stacked else splitting.stacked(split, batches)
    return MicroBatches(call, split, stacked, rest)


def whole_batch(call: Call, sizes: splitting.Sizes) -> Call:
    """Returns the call with a batch whose rows come first, checked: nothing that has as many is shared unasked."""
    if sizes.stacked:
        batch = splitting.rows_first(list(call[call.batch]))
        call = call.with_arguments(dict(zip(call.batch, batch, strict=True)))
        call.check_shared(None)
    else:
        call.check_shared(count_rows(call[call.batch]))
    return call
