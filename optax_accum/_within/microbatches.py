"""The micro-batches of one call: the call of `fun` for each, with its rows, its key and the carry of the one before."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_accum._arguments import checks
from optax_accum._arguments.roles import Call
from optax_accum._arguments.rows import is_split
from optax_accum._core import compilers, dtypes, tracing
from optax_accum._core.flags import known, negated, selected
from optax_accum._core.leaves import by_path, check_arrays
from optax_accum._core.traced import Traced, trace_or_run
from optax_accum._core.types import Flag, Index, Tree
from optax_accum._loss.ratio import LossParts
from optax_accum._shared.arrays import short
from optax_accum._shared.hidden_draws import draws, hidden_draws
from optax_accum._space.device import Device
from optax_accum._within import splitting


class Alive(NamedTuple):
    """Which micro-batches are run.

    Attributes:
      local: micro-batches that run on this device.
      anywhere: micro-batches that run on any device. All devices run them, at least for the carry, which must
        stay the same on all.
      all_devices_run: whether a collective may force every device to run every micro-batch; one that is not alive
        here is left out of the sums.
    """

    local: Flag  # all, or [m], the remainder last
    anywhere: Flag
    all_devices_run: bool = False

    @property
    def differ(self) -> bool:
        """Whether devices may run different micro-batches."""
        return self.local is not self.anywhere


CallFun = Callable[[Call], LossParts]
Add = Callable[[Any, Index, Call], tuple[Any, LossParts]]  # adds the results of a micro-batch to sums
Done = tuple[Any, Tree]  # the sums, and the last carry


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one device: the full ones, and the remainder, whose index is the number of full ones."""

    call_fun: CallFun
    device: Device
    call: Call  # of the whole batch
    split: splitting.Split
    interleaved: Tree  # the full micro-batches: leaves [b, k, ...]
    rest: Tree  # the remainder: leaves [r, ...]

    def call_of(self, index: Index, carry: Tree) -> Call:
        """The call of `fun` for one micro-batch: its rows, its own key, the carry."""
        rows = self.rest if self.split.is_rest(index) else splitting.micro_batch(self.interleaved, index)
        call = self.call.fold_key(index).with_values(self.call.batch, rows)
        if call.carry is not None:
            carried = jax.tree.map(lambda leaf: leaf, carry)  # some may be used only once
            call = call.with_arguments({call.carry: carried})
        return call

    def traced(self) -> Traced:
        """Traces `fun` for the first micro-batch."""
        first = self.call_of(0, self.call.carried)

        def parts_of() -> LossParts:
            parts = self.call_fun(first)
            for what, part in zip(("What fun returns", "The carry of fun"), parts, strict=True):
                check_arrays(what, part, "Return arrays and numbers, and register a class of them as a pytree.")
            return parts

        loss = trace_or_run(parts_of)
        if _may_hide(loss.program, first):
            _check_keys(self.call_fun, self.call_of(0, self.call.carried), self.call)
        _check_carry(self.call.carried, loss.shapes.second)
        return loss

    def in_loop(self, loss: Traced) -> "MicroBatches":
        """The same for a loop, see `Device.in_loop`; `loss` is the trace of one micro-batch."""
        names, own = tuple(self.call.arguments), {*self.call.batch, self.call.rng}  # its rows, and its key
        run = lambda *values: self.call_fun(self.call.with_values(names, values))
        run = self.device.in_loop(run, loss.jaxpr.eqns, tuple(name in own for name in names))
        return dataclasses.replace(self, call_fun=lambda call: run(*call[names]))

    def in_order(self, add: Add, sums: Any, alive: Alive, *, static: bool = False) -> Done:
        """Runs `sums, parts = add(sums, index, call)` for the micro-batches that are alive, the remainder last.

        Returns the sums and the last carry. A micro-batch that is alive on another device only is run for its carry.
        """

        def run(index: Any, done: Done) -> Done:
            sums, carry = done
            sums, parts = add(sums, index, self.call_of(index, carry))
            return self.device.vary(sums), self._handed_on(parts)

        def hand_on(index: Any, done: Done) -> Done:
            sums, carry = done
            return sums, self._handed_on(self.call_fun(self.call_of(index, carry)))

        def run_iteration(index: Any, done: Done) -> Done:
            if not alive.differ:
                return run(index, done)
            local = flag_at(alive.local, index)
            if alive.all_devices_run:
                sums, carry = run(index, done)
                return selected(local, sums, done[0]), carry
            done = _if_alive(local, functools.partial(run, index), done, static=static)
            return _if_alive(negated(local), functools.partial(hand_on, index), done, static=static)

        start, full = (self.device.vary(sums), self.call.carried), self.split.full
        done = _in_loop(full, alive.anywhere, run_iteration, start, static=static)
        if not self.split.rest:
            return done
        last = flag_at(alive.anywhere, full)
        return _if_alive(last, functools.partial(run_iteration, full), done, static=static)

    def undifferentiable(self, message: str) -> "MicroBatches":
        """The same micro-batches, which raise `message` when they are differentiated through a `jit`."""
        values = self.interleaved, self.rest, list(self.call.arguments.values())
        interleaved, rest, arguments = tracing.refuse_differentiation(values, message)
        call = self.call.with_values(tuple(self.call.arguments), arguments)
        return dataclasses.replace(self, call=call, interleaved=interleaved, rest=rest)

    def _handed_on(self, parts: LossParts) -> Tree:
        self.device.check_carry(parts.second)
        return dtypes.strong(parts.second)


def flag_at(flags: Flag, index: Index) -> Flag:
    return flags if isinstance(flags, bool) else flags[index]


def _in_loop(count: int, alive: Flag, run: Callable[..., Done], done: Done, *, static: bool) -> Done:
    """Runs the first `count` micro-batches, those that are `alive`, in order.

    Their number may be traced; a `static` loop runs all iterations, and JAX can differentiate it again. Outside `jit`
    there is no loop.
    """
    staged = tracing.is_staged()
    if not count:
        return done
    if staged and not (isinstance(alive, bool) or static):
        alive = alive[:count]
        order = jnp.argsort(jnp.logical_not(alive), stable=True)
        return jax.lax.fori_loop(0, jnp.sum(alive), lambda step, done: run(order[step], done), done)

    def iteration(index: Any, done: Done) -> Done:
        return _if_alive(flag_at(alive, index), functools.partial(run, index), done, static=static)

    if staged and count > 1:
        return jax.lax.fori_loop(0, count, iteration, done)
    for index in range(count):
        done = iteration(index, done)
    return done


def _if_alive(alive: Flag, run: Callable[[Done], Done], done: Done, *, static: bool) -> Done:
    """Runs one micro-batch if it is alive: in a branch, or where none can be, in a loop of at most one iteration."""
    alive = known(alive)
    if isinstance(alive, bool):
        return run(done) if alive else done
    if static:
        return compilers.branch(alive, lambda: run(done), lambda: done)
    return jax.lax.fori_loop(0, alive.astype(int), lambda _, done: run(done), done)


def split_call(call_fun: CallFun, device: Device, call: Call, sizes: splitting.Sizes) -> MicroBatches:
    """Splits one device's part of the batch of a call; `call_fun` calls `fun`."""
    batches = list(call[call.batch])
    split = splitting.split_rows(batches, sizes, device.count)
    rest = splitting.remainder(split, batches) if split.rest else None
    return MicroBatches(call_fun, device, call, split, splitting.interleaved(split, batches), rest)


# How much each counts, known from the data before the first one runs


def weigh(
    micro_batches: MicroBatches, weight_fn: Callable[..., Any] | None, traced: Traced
) -> tuple[Callable[[Index], Any], Alive]:
    """The share `w_i / sum(w)` of each micro-batch, and which of them run; `traced` is `fun` for one micro-batch."""
    split, device = micro_batches.split, micro_batches.device
    together = device.runs_together(traced)
    if weight_fn is None:
        rows = split.rows * device.total(1)
        return lambda index: (split.rest if split.is_rest(index) else split.size) / rows, Alive(True, True, together)
    shares = _shares(micro_batches, weight_fn)
    local = device.agreed(traced, shares != 0)
    alone = micro_batches.call.carry is None and not together
    return shares.__getitem__, Alive(local, local if alone else device.any_of(local), together)


def _shares(micro_batches: MicroBatches, weight_fn: Callable[..., Any]) -> jax.Array:
    """The share of each micro-batch, [m]; 0 if the total is 0, and NaN, which shows, if it overflowed.

    The weights are added in the default float dtype, so that counts of tokens cannot overflow, and over the devices
    that have parts of one batch.
    """
    split, interleaved = micro_batches.split, micro_batches.interleaved
    axes = jax.tree.map(lambda leaf: 1 if is_split(leaf) else None, interleaved)
    weigh = lambda *rows: _weight(weight_fn(*rows))
    try:
        weights = jax.vmap(weigh, in_axes=axes, axis_size=split.full)(*interleaved)
    except jax.errors.ConcretizationTypeError as error:
        error.add_note("weight_fn must return the traced number: leave out int(), float() and .item().")
        raise
    if split.rest:
        weights = jnp.append(weights, _weight(weight_fn(*micro_batches.rest)))
    total = micro_batches.device.total(jnp.sum(weights))
    return jnp.where(jnp.isinf(total), jnp.nan, weights / jnp.where(total == 0, jnp.inf, total))


def _weight(weight: Any) -> jax.Array:
    """The weight, in the dtype in which they are added."""
    if isinstance(weight, Mapping):
        raise TypeError(
            f"weight_fn returns one number for a micro-batch: it returned {sorted(weight)}. For terms with "
            "denominators of their own take value_and_grad of their sum."
        )
    return jnp.asarray(checks.as_weight(weight, name="weight_fn's result"), dtypes.default_float())


def _may_hide(program: Any, call: Call) -> bool:
    """Whether a traced `fun(call)` may draw from a key that is not an argument; compares arrays by identity."""
    names = tuple(name for name in call.arguments if name != call.carry)  # some carries can be flattened only once
    arguments = set(map(id, jax.tree.leaves(call[names])))
    constants = [id(const) in arguments for const in program.consts]
    return bool(draws(program.jaxpr, [True] * len(program.jaxpr.invars), constants)[0])


def _check_keys(fun: Callable[[Call], Any], part: Call, all_rows: Call) -> None:
    """Raises if `fun` draws numbers for each row from a key that is not an argument: all micro-batches get the same.

    `part` is the call for some rows, `all_rows` for all.
    """
    try:
        drawn = hidden_draws(*part.of_arrays(fun))
        drawn_for_all = hidden_draws(*all_rows.of_arrays(fun)) if drawn else []
    except Exception:  # fun takes one batch size only, or an axis that is not here: draws for each row are not known
        return
    for shape, shape_for_all in zip(drawn, drawn_for_all, strict=False):
        if shape != shape_for_all:
            raise ValueError(
                "A random key must be an argument of fun, or every micro-batch would draw the same numbers: fun draws "
                f"{list(shape)} from a key that it closes over, or makes. Pass the key as an argument and name it with "
                "rng_argnum; to share it on purpose, with whole_argnums."
            )


def _check_carry(carry: Any, new: Any) -> None:
    """Raises unless the carry that `fun` returns has the tree, shapes and dtypes of the one it was given."""
    old, new_tree = jax.tree.structure(carry), jax.tree.structure(new)
    if old != new_tree:
        raise TypeError(
            f"The carry must keep its tree: it came as {old} and left as {new_tree}. Return from fun a carry of the "
            "first tree."
        )
    for (path, a), b in zip(by_path(carry, "its only leaf"), jax.tree.leaves(new), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise TypeError(
                f"The carry must keep its type: at {path} it came as {short(a)} and left as {short(b)}. Cast it back "
                "in fun."
            )
