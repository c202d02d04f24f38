"""`explain`: reads a traced loss, before anything runs."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from optax_accum._arguments import checks
from optax_accum._core.types import Name
from optax_accum._explain.answers import Subject, answer_of, weight_fn
from optax_accum._explain.explanation import PLAIN, Coupling, Explanation
from optax_accum._rows import locality
from optax_accum._rows.leveling import body_levels, is_over_layers
from optax_accum._rows.levels import Kind, Levels
from optax_accum._rows.program import Equation, Value
from optax_accum._within.call_rules import CallRules, as_rules
from optax_accum._within.traced_call import TracedCall
from optax_accum._within.whole_batch import traced_gradient

_OF_MODULES = (
    "Explain a function of its arrays: graph, params, rest = nnx.split(model, nnx.Param, ...), and explain("
    "lambda params, batch, rest: fun(nnx.merge(graph, params, rest), batch), params, batch, rest)."
)
_NUMBER = "Leave it out: what explain says does not depend on the number of micro-batches."


def explain(
    fun: Callable[..., Any],
    *args: Any,
    argnums: Name | Sequence[Name] = 0,
    has_aux: bool = False,
    batch_argnums: Name | Sequence[Name] = 1,
    recompute: float | None = None,
    **kwargs: Any,
) -> Explanation:
    """Explains how a loss is split into micro-batches, and what they weigh.

        print(explain(loss, params, batch))

    It traces the loss and runs nothing. It says at which lines the loss
    takes rows together, how many loops go through the micro-batches, what
    is kept for all rows between them, and how much a micro-batch counts if
    you accumulate across calls: what the loss divides by, or why no weight
    gives the whole batch's gradient. This does not depend on the number of
    micro-batches.

    Example:
      A masked mean: the loss divides by the number of tokens.

      >>> import jax, jax.numpy as jnp, optax_accum
      >>> def loss(w, batch):
      ...     error = (batch["x"] @ w - batch["y"]) ** 2
      ...     return jnp.sum(batch["mask"] * error) / jnp.sum(batch["mask"])
      >>> batch = {"x": jnp.ones((16, 3)), "y": jnp.zeros(16)}
      >>> batch["mask"] = jnp.arange(16) < 7
      >>> found = optax_accum.explain(loss, jnp.ones(3), batch)
      >>> found.one_pass, found.kept_bytes
      (True, 0)
      >>> found.weights[0].of
      ("batch['mask']",)
      >>> print(found.weight(batch))  # pass it as weight_fn
      7.0

    Args:
      fun: the loss, called as `fun(*args, **kwargs)`; it returns a number,
        or a dict of terms, which are added.
      *args: the arguments of `fun`: arrays, or `jax.ShapeDtypeStruct`s in
        place of them.
      argnums: the argument to differentiate, or several, by position or
        name, as in `jax.value_and_grad`.
      has_aux: `fun` returns `(loss, aux)`.
      batch_argnums: the argument, or several, that hold the batch: trees
        whose arrays have rows along their first axis.
      recompute: as in `optax_accum.value_and_grad`: with more of it, less is
        kept.
      **kwargs: the arguments of `fun` that come by keyword.

    Returns:
      An `Explanation`. Print it, or read its fields: `couplings`, `loops`,
      `one_pass`, `kept_bytes`, `whole`, `weight`, `weights`, `reduction`,
      `verdict`, `reasons`. It holds no arrays.

    Raises:
      TypeError, ValueError: invalid arguments; a loss that is no real
        scalar, or that cannot be divided: `fun` is traced for n rows and for
        2n, to see which axes hold rows, and the two have nothing in common,
        or it has mutable arrays of its own; a module of NNX, with what to
        pass in its place.

    Guarantees:
      `loops`, `one_pass` and `kept_bytes` are those of the program that
      `value_and_grad` runs: the loss and its gradient. For a loss without a
      gradient, a `while_loop` say, they are those of the loss alone.

      `weight(batch)` is the denominator for the rows of `batch`, of any
      number of rows. There is a weight only if the traced loss shows that
      denominators add up over micro-batches; else `reasons` says why not.
      It may be called inside `jit`. Known when tracing:

      * A mean over rows: the number of rows.
      * A masked mean: the sum of the mask, also where the mask is divided
        before the product, or both sums are means.
      * A denominator that one sum decides, `maximum(sum, 1)`, `sum + 1e-6`,
        `sqrt(sum)`: the sum itself. Steps that read their loss multiply by
        what it divides by (`grad_weight`), so that a micro-batch whose sum
        is 0, or 0.5 under `maximum(sum, 1)`, adds what it adds in the whole
        batch; a quotient that is 0 where the sum is 0 adds nothing there.
        Beside another term, and as a `weight_fn`, it is exact where the
        denominator is the sum (1 and more), or the sum is 0, and the loss.
      * A sum over rows that nothing divides: 1, and `reduction` is "sum".
        Beside a term that takes no rows: none, for that term would count in
        every call.
      * Terms without rows (weight decay) beside means: they change nothing.
      * Terms with denominators of their own: `weight` returns a list of
        them, or a dict if `fun` returns a dict.
      * A loss without rows: 1.
      * A mean over groups of consecutive rows: the number of rows, and
        `group` says how many rows make a group.
      * A denominator that the model decides, or that depends on another
        argument than the batch: none, with the line. The model's: return a
        `Ratio`.
      * Rows that take a sum over all rows (BatchNorm, advantages that are
        normalised over the batch), or are compared with one another
        (contrastive losses), or numbered: none, with the lines.
      * A `jax.custom_vjp` whose rule is not linear in the cotangent (a
        clip): none, for a micro-batch's cotangents are larger.
      * A `Ratio`: none; it says itself what it counts. If its total or its
        count certainly does not add up, the lines.
    """
    checks.check_flag("has_aux", has_aux, may_be_none=False)
    rules = as_rules(fun, 1, argnums=argnums, has_aux=has_aux, batch_argnums=batch_argnums, recompute=recompute)
    checks.check_no_module((*args, *kwargs.values()), _OF_MODULES)
    for name in kwargs.keys() & {"num_microbatches", "microbatch_size"}:
        if not rules.roles.signature.takes(name):
            raise TypeError(f"explain has no {name}=: {name}={kwargs[name]!r}. {_NUMBER}")
    arguments: dict[Name, Any] = {**dict(enumerate(args)), **kwargs}
    subject = Subject.of(rules.fun, rules.roles, arguments, has_aux)
    return subject.ask(lambda found: _explained(rules, subject, found))


def _explained(rules: CallRules, subject: Subject, found: TracedCall) -> Explanation:
    levels, units, answer = found.levels, found.units, answer_of(subject, found)
    run = _run(rules, found)
    reasons = list(map(str, answer.reasons))
    if not (answer.terms or reasons):
        reasons = ["The loss returns a Ratio, which says itself how much it counts."]
    weights = () if reasons else answer.weights
    return Explanation(
        rows=units.count * units.block,
        group=units.block,
        couplings=couplings_of(levels, answer.places),
        loops=loops_of(run),
        one_pass=loops_of(run) == 1,
        kept_bytes=bytes_kept(run),
        weight=None if reasons else weight_fn(subject),
        weights=weights,
        reduction="sum" if any(weight.text == PLAIN for weight in weights) else "mean",
        verdict=answer.verdict,
        reasons=tuple(dict.fromkeys(reasons)),
    )


def _run(rules: CallRules, found: TracedCall) -> Levels:
    """How the program runs that computes the loss and its gradient; of a loss without a gradient, the loss's own."""
    try:
        return traced_gradient(rules, found.call).levels
    except Exception:  # of a rule of the user's, say: the loss itself has been traced
        return found.levels


class Site(NamedTuple):
    """An equation that takes rows together, in a program that runs `times` times."""

    equation: Equation
    kind: Kind
    times: int = 1
    kept: frozenset[Value] = frozenset()  # the operands and results that are kept for all rows
    of_batch: bool = False  # whether the batch alone decides it


def sites_of(levels: Levels, times: int = 1) -> Iterator[Site]:
    """Yields the equations that take rows together and that the model decides, also inside loops over layers."""
    kept = kept_by(levels)
    for equation in levels.coupling:
        if is_over_layers(equation, levels):
            yield from sites_of(body_levels(equation, levels), times * equation.single.params["length"])
        else:
            touched = kept.intersection((*equation.ins, *equation.outs))
            yield Site(equation, levels.kinds[equation], times, frozenset(touched))


def kept_by(levels: Levels) -> set[Value]:
    """The values that are kept for all rows between two loops."""
    taken = {value for loop in levels.loops for value in loop.takes}
    taken.update(value for stage in levels.stages for equation in stage.before_loop for value in equation.ins)
    kept = {value for loop in levels.loops for value in loop.rows if value in taken}
    wholes = [equation for equation in levels.coupling if levels.kinds[equation] is Kind.WHOLE]
    kept.update(value for equation in wholes for value in equation.outs if value.axis is not None)
    return kept


def loops_of(levels: Levels) -> int:
    """The number of loops over the micro-batches, also inside loops over layers."""
    return len(levels.loops) + sum(length * loops_of(inner) for inner, length in _inner(levels))


def bytes_kept(levels: Levels) -> int:
    """The most bytes that are kept for all rows between loops, at the same time."""
    last: dict[Value, int] = {}  # the stage that is the last to take a value
    for at, stage in enumerate(levels.stages):
        last.update((value, at) for equation in stage.before_loop for value in equation.ins)
        last.update((value, at) for value in (stage.loop.takes if stage.loop else ()))
    whole = {value for equation in levels.coupling if levels.kinds[equation] is Kind.WHOLE for value in equation.outs}
    kept: set[Value] = set()
    most = 0
    for at, stage in enumerate(levels.stages):
        made = {value for equation in stage.before_loop for value in equation.outs if value.axis is not None}
        kept = {value for value in kept if last.get(value, -1) >= at} | (made & whole)
        most = max(most, sum(map(bytes_of, kept)))
        kept.update(stage.loop.rows if stage.loop else ())
        kept = {value for value in kept if last.get(value, -1) > at}
        most = max(most, sum(map(bytes_of, kept)))
    return most + max((bytes_kept(inner) for inner, _ in _inner(levels)), default=0)


def _inner(levels: Levels) -> list[tuple[Levels, int]]:
    over = [equation for equation in levels.coupling if is_over_layers(equation, levels)]
    return [(body_levels(equation, levels), equation.single.params["length"]) for equation in over]


def bytes_of(value: Value) -> int:
    """The bytes of a value, for all rows."""
    return math.prod(value.aval.shape) * value.aval.dtype.itemsize


def couplings_of(levels: Levels, places: set[Any]) -> tuple[Coupling, ...]:
    """The lines at which rows are taken together, one `Coupling` for each: by the batch alone, if among `places`."""
    of_model = list(sites_of(levels))
    by_line: dict[Any, list[Site]] = {}
    for site in (*sites_of_batch(levels, places - {site.equation.place for site in of_model}), *of_model):
        by_line.setdefault((site.equation.place, site.times), []).append(site)
    return tuple(map(_coupling, by_line.values()))


def sites_of_batch(levels: Levels, places: set[Any]) -> Iterator[Site]:
    """Yields the equations at these `places` that take rows together and that the batch alone decides."""
    for equation, kind in levels.kinds.items():
        of_batch = levels.of_params.isdisjoint(equation.ins)
        if kind in (Kind.PARTIAL, Kind.WHOLE) and of_batch and equation.place in places:
            yield Site(equation, kind, of_batch=True)


def _coupling(sites: list[Site]) -> Coupling:
    first = sites[0]
    results = [value for site in sites for value in site.equation.outs]
    largest = max(results, key=bytes_of)
    kept = frozenset[Value]().union(*(site.kept for site in sites))
    unknown = [name for site in sites for name in locality.unknown(site.equation.view)]
    return Coupling(
        place=first.equation.place,
        primitives=tuple(dict.fromkeys(site.equation.name for site in sites)),
        in_parts=not first.of_batch and all(site.kind is Kind.PARTIAL for site in sites),
        shape=tuple(largest.aval.shape),
        dtype=str(largest.aval.dtype),
        kept_bytes=first.times * sum(map(bytes_of, kept)),
        times=first.times,
        unknown=tuple(dict.fromkeys(unknown)),
        of_batch=first.of_batch,
    )
