"""One call of a train step: differentiate a micro-batch, then let the optimizer hold or update."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_accum._across import accumulator, on_host, outcomes, schedules
from optax_accum._across.inner import check_extra_args, ignored_args, is_data
from optax_accum._across.loss import Added, Done, Loss
from optax_accum._across.window import MicroBatch, WindowRules, check_state, micro_step, weighed
from optax_accum._arguments import checks, rows
from optax_accum._arguments.roles import Call, Roles
from optax_accum._arguments.signature import signature_of
from optax_accum._core import dtypes, flags
from optax_accum._core.leaves import NOT_ARRAYS, check_arrays, is_inexact
from optax_accum._core.state import (
    AccumulationState,
    check_no_other_window,
    map_states,
    micro_step_of,
    states_in,
)
from optax_accum._core.types import Flag, Tree
from optax_accum._loss.weighing import Amount
from optax_accum._space.devices import has_several
from optax_accum._space.here import here_for
from optax_accum._space.space import Space


class Keywords(NamedTuple):
    """The keyword arguments of a call."""

    weight: Any
    flush: Any
    extra_args: Mapping[str, Any]


def adds_up(state: Tree) -> bool:
    """Whether an optimizer, or a part of it, adds micro-batches up, of calls or of devices."""
    return any(map(has_several, states_in(state)))


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of any optimizer, which gets the gradient of a micro-batch and its weight."""

    loss: Loss
    roles: Roles
    inner: optax.GradientTransformationExtraArgs  # takes the keyword arguments that nobody else names
    mean_args: Iterable[str]  # the keyword arguments that are averaged over a window

    def step(self, params: Tree, state: Tree, args: Sequence[Any], keywords: Keywords) -> tuple[Any, Tree, Tree]:
        """Differentiates one micro-batch, and applies its gradient: the value, the parameters, the state."""
        checks.check_no_module([params], checks.MODULES_ACROSS_CALLS)
        check_arrays("Parameters", params, NOT_ARRAYS)
        params = jax.tree.map(jnp.asarray, params)
        call, keywords = self._bound((params, *args), keywords)
        self._check(call, weighted=keywords.weight is not None or self.loss.weight_fn is not None)
        space = self.space(state, call)
        self._check_read(keywords.extra_args, state, params)
        if keywords.weight is not None:
            keywords = keywords._replace(weight=self.weighed(space, keywords.weight, state))
        index = micro_step_of(state, keyed=call.rng is not None)
        closes = self.closes(state, keywords.flush)
        joins = {"in_window": adds_up(state), "takes_a_sum": self.takes_a_sum(keywords, state, params)}
        add = functools.partial(self.loss.add, flush=closes, **joins)
        done, _ = space.run(lambda *local: (add(*local), None), call, self.accumulator(state), keywords.weight, index)
        return space.as_local(done.value), *self.apply(space, done, keywords, state, params)

    def takes_a_sum(self, keywords: Keywords, state: Tree, params: Tree) -> bool:
        """Whether a window inside the optimizer takes sums: then it ignores the rows of a micro-batch."""
        args = params, map_states(on_host.plain, state), params  # what `jit_step` decides, this trace must not
        extra_args = {"value": jnp.zeros([]), "flush": keywords.flush, **keywords.extra_args, "rows": jnp.ones([])}
        return adds_up(state) and bool(ignored_args(self.inner, ["rows"], args, extra_args))

    def closes(self, state: Tree, flush: Any) -> Flag | None:
        """Whether this micro-step closes its window; None if nobody has said it."""
        return None if flush is None else flags.known(schedules.as_flush(flush))

    def inner_state(self, state: Tree) -> Tree:
        return state

    def space(self, state: Tree, call: Call) -> Space:
        """The space in which the micro-batch is differentiated; raises for a state from another space."""
        return Space()

    def weighed(self, space: Space, weight: Any, state: Tree) -> Any:
        return weight

    def accumulator(self, state: Tree) -> Tree | None:
        """The sum to which a backward pass may add; None if it may not."""
        return None

    def apply(self, space: Space, done: Done, keywords: Keywords, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """The parameters and the state after the micro-batch."""
        amount = done.amount
        named = keywords.weight is not None or self.loss.weight_fn or isinstance(amount.weight, jax.Array)
        check_no_other_window(state, "value_and_apply_gradients")
        counted = {"weight": amount.weight} if named else {"rows": int(amount.weight)}
        if amount.multiplies is not None:
            counted["grad_weight"] = amount.multiplies
        extra_args = {"value": done.loss, **counted, "flush": keywords.flush, **keywords.extra_args}
        updates, state = optax.with_extra_args_support(self.inner).update(done.grads, state, params, **extra_args)
        return outcomes.apply_updates(params, updates), state

    def _bound(self, args: Sequence[Any], keywords: Keywords) -> tuple[Call, Keywords]:
        """Binds the arguments of `fun`, also those given by keyword; the other keywords are the optimizer's."""
        signature, given = self.roles.signature, keywords._asdict()
        names = {name for name in ("weight", "flush") if given[name] is not None} | keywords.extra_args.keys()
        if both := sorted(names & self._inner_names & signature.keywords_after(len(args))):
            raise TypeError(
                f"A keyword argument must be for fun or for the optimizer: {both[0]!r} is an argument of both. Pass "
                "that of fun by position, or give it another name there."
            )
        roles = {name for named in self.roles.named.values() for name in named}
        of_fun = names & (set(signature.keywords) - self._inner_names | roles)
        call = self.roles.bind(args, {name: arg for name, arg in keywords.extra_args.items() if name in of_fun})
        rest = {name: arg for name, arg in keywords.extra_args.items() if name not in of_fun}
        return call, keywords._replace(extra_args=rest)

    @property
    def _inner_names(self) -> set[str]:
        """The keyword arguments that the optimizer names."""
        return {"weight", "flush", *self.mean_args, *signature_of(self.inner.update).keywords_after(3)}

    def _check_read(self, extra_args: Mapping[str, Any], state: Tree, params: Tree) -> None:
        """Raises for a keyword argument that nobody reads, such as one that `fun` takes as one of its **kwargs."""
        if "grad_weight" in extra_args:
            raise TypeError(
                "value_and_apply_gradients reads off the loss what multiplies its gradient: grad_weight= is given. "
                "Leave weight= and grad_weight= out; or call apply_gradients, which takes both."
            )
        args = params, self.inner_state(state), params
        names = extra_args.keys() - self._inner_names
        check_extra_args(self.inner, names, args, extra_args)
        for name in (name for name in ignored_args(self.inner, names, args, extra_args) if is_data(extra_args[name])):
            raise TypeError(
                f"A keyword argument must be named by fun or read by the optimizer: {name!r} is neither, and fun is "
                f"{self.roles.signature}. Name it there, or leave it out."
            )

    def _check(self, call: Call, *, weighted: bool) -> None:
        """Raises for a batch without rows or with unequal ones, and for arguments that micro-batches share unasked."""
        batch = call[call.batch]
        has_rows = any(map(rows.is_split, jax.tree.leaves(batch)))
        if call.batch and not (has_rows or weighted):
            raise ValueError(
                "A micro-batch counts by its rows unless it is weighted: the batch arguments hold scalars only. Pass "
                "weight=, or batch_argnums=() if the loss has no batch."
            )
        call.check_shared(rows.count_rows(batch) if has_rows else None)


@dataclasses.dataclass(frozen=True)
class AccumulatingStep(Step):
    """A micro-step: the gradient is added to the window, where it arises if it can be."""

    rules: WindowRules

    def closes(self, state: AccumulationState, flush: Any) -> Flag | None:
        decided = on_host.closes(self.rules.schedule, self.rules.policy, state, flush)
        return super().closes(state, flush) if decided is None else decided

    def takes_a_sum(self, keywords: Keywords, state: Tree, params: Tree) -> bool:
        return not self.rules.divisor.is_mean

    def inner_state(self, state: AccumulationState) -> Tree:
        return state.inner_opt_state

    def space(self, state: Tree, call: Call) -> Space:
        check_state(state)
        space = here_for(self.rules.devices, self.rules.meter, call.arguments[0])
        space.check_state(state.weight, call[tuple(call.arguments)])
        return space

    def weighed(self, space: Space, weight: Any, state: AccumulationState) -> Any:
        return weighed(self.rules, space, Amount.of(weight), state).weight

    def accumulator(self, state: AccumulationState) -> Tree | None:
        return None if self.rules.policy.leaves_out else accumulator.so_far(state)

    def apply(
        self, space: Space, done: Done, keywords: Keywords, state: AccumulationState, params: Tree
    ) -> tuple[Tree, Tree]:
        value = {"value": done.loss} if "value" in self.mean_args else {}
        named = keywords.weight  # converted for this space
        amount = weighed(self.rules, space, done.amount, state) if named is None else Amount.of(named)
        batch = MicroBatch(done.grads, amount, keywords.flush, {**value, **keywords.extra_args})
        if isinstance(done.grads, Added):
            like = dtypes.gradients_like(params, filter(is_inexact, jax.tree.leaves(params)))
            batch = batch._replace(grads=like, added=done.grads)
        return micro_step(self.rules, space, batch, state, params, outcomes.new_params(space, params))
