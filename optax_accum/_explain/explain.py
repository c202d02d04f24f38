"""What is found in a traced loss, before anything runs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_accum._arguments import callables, checks
from optax_accum._arguments.roles import Roles
from optax_accum._core.types import Name
from optax_accum._explain import couplings
from optax_accum._explain.explanation import Explanation, Weight
from optax_accum._explain.weighing import Subject, terms_of, weight_fn, weight_of
from optax_accum._rows.denominators import Found
from optax_accum._within import splitting
from optax_accum._within.one_pass import one_pass
from optax_accum._within.traced import Traced


def explain(
    fun: Callable[..., Any],
    *args: Any,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
    argnums: Name | Sequence[Name] = 0,
    has_aux: bool = False,
    batch_argnums: Name | Sequence[Name] = 1,
    **kwargs: Any,
) -> Explanation:
    """..."""
    roles = Roles(fun, argnums=argnums, batch_argnums=batch_argnums)
    call = roles.bind(args, kwargs)
    checks.check_no_module(call[call.params])
    told = (num_microbatches, microbatch_size) != (None, None)
    sizes = splitting.as_sizes(num_microbatches if told else 1, microbatch_size, 1)
    names = {name: str(roles.signature.parameter(name)) for name in call.arguments}
    subject = Subject(callables.as_function(fun), call, sizes, has_aux, names)
    return subject.ask(lambda found: _explained(subject, found, told))


def _explained(subject: Subject, found: Traced, told: bool) -> Explanation:
    levels, units = found.levels, found.units
    terms = terms_of(subject, found)
    weights, reasons = _weights(subject, terms)
    return Explanation(
        rows=units.number * units.block,
        num_microbatches=units.parts if told else None,
        group=units.block,
        couplings=tuple(couplings.couplings_of(levels)),
        loops=couplings.loops_of(levels),
        one_pass=one_pass(found) is not None,
        kept_bytes=couplings.bytes_kept(levels),
        weight=None if reasons else weight_fn(subject),
        weights=weights,
        terms=tuple(name for name in terms or () if name is not None),
        reduction="sum" if not reasons and any(weight.text == "1" for weight in weights) else "mean",
        reasons=reasons,
    )


def _weights(subject: Subject, terms: dict[str | None, Found] | None) -> tuple[tuple[Weight, ...], tuple[str, ...]]:
    """Returns the weights of the terms of a loss, or why there are none."""
    if terms is None:
        return (), ("The loss returns a Ratio, which says itself how much it counts.",)
    reasons = [str(reason) for term in terms.values() for reason in term.reasons]
    weights = [weight_of(subject, one) for term in terms.values() for one in term.denominators]
    return tuple(weights), tuple(dict.fromkeys(reasons))
