"""Owns the question whether accumulation changes a loss, and why. Knows no optimizer."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from optax_accum._arguments import checks
from optax_accum._arguments.callables import as_function, as_weight_fn, as_weight_of
from optax_accum._arguments.roles import Call, Roles
from optax_accum._arguments.rows import check_groups, count_rows
from optax_accum._core.leaves import NOT_ARRAYS, by_path, check_arrays, is_inexact, short
from optax_accum._core.types import Name, Tree
from optax_accum._loss.parts import Returns
from optax_accum._loss.ratio import check_loss
from optax_accum._verify.loss import Loss, epsilons, grouped, uneven
from optax_accum._verify.loss_faults import MUTABLE, SHARED_KEY, causes
from optax_accum._verify.loss_probes import hidden_key
from optax_accum._verify.loss_runs import LossRuns
from optax_accum._verify.report import Cause, Report

SUMS = 2**-16  # the error beyond which sums in another dtype have lost something: 128 roundings of float32


def verify(
    fun: Callable[..., Any],
    params: Tree,
    batch: Tree,
    *args: Any,
    num_microbatches: int = 2,
    weight_fn: Callable[..., Any] | None = None,
    weight_of: Callable[[Any, Any], Any] | None = None,
    has_aux: bool = False,
    rng_argnum: Name | None = None,
    carry_argnum: Name | None = None,
    accumulator_dtype: Any = None,
    group_size: int = 1,
    batch_argnums: Name | Sequence[Name] = 1,
    whole_argnums: Name | Sequence[Name] = (),
    rtol: float | None = None,
) -> Report:
    """Checks whether accumulating a loss gives the whole batch's gradient.

        verify(loss, params, batch, num_microbatches=4).check()

    If it does not, the report names cause and remedy.

        whole = grad fun(params, batch)
        cut   = sum_i w_i grad fun(params, batch_i) / sum_i w_i

    A small batch is run whole, by `jax.value_and_grad`, and cut, by
    `optax_accum.value_and_grad` with your options, once into
    `num_microbatches` and once into micro-batches of unequal size. Where
    the two differ, a probe tests each possible cause. Run
    it once, on a batch like those of training: with masks of unequal
    length, say.

    Errors are relative to the size of what is averaged, the losses and
    gradients of the rows: a loss near 0, or gradients that nearly cancel,
    raise no alarm.

    Args:
      fun: the loss, called as `fun(params, batch, *args)`; what it returns
        is what `value_and_grad` takes: a number, a dict of terms, a `Ratio`
        (or a record that counts as one) or a dict of them.
      params: parameters at which the gradient is not zero; initial
        parameters will do.
      batch: a pytree of at least 4 rows, and of `num_microbatches` rows; so
        many groups with `group_size`. All of its arrays are cut along their
        first axis. Pass arrays without rows, such as a table or class
        weights, in `*args`, even if they are as long as the batch. Stacked
        micro-batches, as graphs for `stacked=True`, are not taken: check
        the step by `verify_step(..., within_call=True)`.
      *args: the other arguments of `fun`; random keys are found by their
        dtype.
      num_microbatches: into how many the batch is cut, 2 or more. Take many
        to see an accumulator of low precision.
      weight_fn: as `value_and_grad` takes it, and so the next five.
      weight_of: `weight_of(value, aux)`, for a weight that `fun` computes.
      has_aux: whether `fun` returns something beside the loss; it is not
        compared.
      rng_argnum: the argument that is a key, by its position in `fun` (the
        first of `*args` is 2) or its name.
      carry_argnum: the argument that is threaded through the micro-batches,
        by position or name.
      accumulator_dtype: the dtype in which gradients are added, or a prefix
        of `params` with several.
      group_size: how many consecutive rows belong together: the answers to
        one prompt, say, or pairs.
      batch_argnums: the arguments that hold the batch, by position or name,
        as `value_and_grad` takes them: with (1, 2) the first of `*args`
        does, too. `weight_fn` takes each of them.
      whole_argnums: the argument, or several, by position or name, that
        every micro-batch gets whole on purpose, though it has as many rows
        as the batch, or is a key.
      rtol: the largest relative error that counts as rounding. By default
        the square root of the machine epsilon of the narrowest float that
        `fun` computes with: 3e-4 for float32, 9e-2 for bfloat16; and 2e-5
        between sums in `accumulator_dtype` and in the default one, which
        differ in nothing else.

    Returns:
      A `Report`: `holds`, `errors` for each leaf, and `causes`, each with
      its evidence and remedy. Print it.

    Raises:
      TypeError, ValueError: too few rows, groups or micro-batches; an
        `rtol` that is not above 0; an argument with as many rows as the
        batch that is in neither `batch_argnums` nor `whole_argnums`; a loss
        that is no scalar, or that cannot take a micro-batch; a loss or
        gradient of the whole batch that is not finite; a gradient that is
        zero everywhere, for then nothing would be compared.

    Guarantees:
      The causes, known when running unless "(tracing)" is said:

      * `"weights"`: the loss divides by a count, and `weight_fn` returns
        another one.
      * `"sum"`: a sum over rows. The whole is its rows added up.
      * `"coupled examples"`: example j changes example i's term. Replacing
        two sets of rows changes the loss by another amount than the two
        changes together.
      * `"coupled examples"`, and which leaf: a loss that normalises a leaf
        of the batch over its rows.
      * `"shared key"`: a loss that changes with a key that `rng_argnum`
        does not name; or (tracing) rows drawn from a key that is no
        argument, because `fun` closes over it, or makes it.
      * `"low-precision sum"`: a narrow `accumulator_dtype`. A wide one
        gives another gradient.
      * `"mutable state"`: a loss that depends on the carry. Holding the
        carry fixed gives another gradient.
      * `"mutable state"`: a loss that differs between equal calls. Nothing
        is compared.
      * `"nonlinear derivative"`: a `jax.custom_vjp` that clips or rounds a
        gradient. A part of the loss has another part of the gradient.
      * `"not rows"`: a leaf of the batch without rows, as long as the
        batch. If it is not split, the gradients agree.

      Other cases, likewise:

      * A `Ratio`, or a dict of them: as `value_and_grad` divides it.
      * A loss over groups, without `group_size`: an error (tracing) that
        names the size with which it runs.
      * A random loss with `rng_argnum`: the mean gradients over 128 keys
        are compared. To name a cause, the loss is read at one key.
      * A random loss that only few outcomes change: gradients are also
        compared at one key for all micro-batches, without that noise.
      * A leaf below 1 % of the largest gradient: its error is relative to
        that 1 %.

    Example:
      A masked mean: rows with more tokens count for more.

      >>> import jax.numpy as jnp, optax_accum
      >>> def loss(w, batch):
      ...     error = (batch["x"] * w - 1) ** 2
      ...     return jnp.sum(batch["mask"] * error) / jnp.sum(batch["mask"])
      >>> x, w = jnp.arange(12.0).reshape(4, 3), jnp.float32(0.5)
      >>> mask = jnp.array([[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]])
      >>> batch = {"x": x, "mask": mask}
      >>> report = optax_accum.verify(loss, w, batch)
      >>> [cause.kind for cause in report.causes]
      ['weights']
      >>> weight_fn = lambda batch: batch["mask"].sum()
      >>> optax_accum.verify(loss, w, batch, weight_fn=weight_fn).holds
      True

    References:
      Mean of means: the gradient accumulation bug found in 2024 in several
      trainers (unsloth.ai/blog/gradient).
    """
    roles: dict[str, Any] = {"rng_argnum": rng_argnum, "carry_argnum": carry_argnum, "whole_argnums": whole_argnums}
    named = Roles(fun, batch_argnums=batch_argnums, **roles)
    fun, weight_fn = as_function(fun), as_weight_fn(weight_fn, named)
    call = named.bind((params, batch, *args), {})
    returns = Returns(has_aux, carry_argnum is not None, as_weight_of(weight_of, weight_fn))
    loss, batch, whole = _gathered(fun, weight_fn, returns, call, named)
    rows = _check(loss, batch, num_microbatches, group_size)
    rtol = checks.as_tolerance("rtol", rtol)
    call.check_shared(rows, keys=False)  # a probe looks for those
    batch = grouped(batch, group_size)
    if impure := _impure(loss, batch):
        return Report(False, {}, {}, (impure,), rows, num_microbatches, False)
    _check_sizes(loss, batch, rows // group_size, num_microbatches, group_size)
    limits = (_rounding(loss, batch), SUMS) if rtol is None else (rtol, rtol)
    count = rows // group_size
    runs = LossRuns(loss, batch, count, num_microbatches, accumulator_dtype, *limits, whole)
    if hidden := hidden_key(runs):  # value_and_grad refuses it
        return Report(False, {}, {}, (Cause(SHARED_KEY, hidden),), rows, num_microbatches, False)
    found = tuple(causes(runs))
    errors, limits = ({path: pair[i] for path, pair in runs.as_asked.items()} for i in (0, 1))
    return Report(runs.holds and not found, errors, limits, found, rows, num_microbatches, runs.random)


def _gathered(
    fun: Callable[..., Any], weight_fn: Callable[..., Any] | None, returns: Returns, call: Call, roles: Roles
) -> tuple[Loss, Tree, tuple[Name, ...]]:
    """Returns the loss as a function of one batch, that batch, and which of the other arguments stay whole.

    Several arguments that hold the batch are one dict, by the names of their parameters.
    """
    (params,), batches = call[call.params], call[call.batch]
    rest = tuple(n for n in call.arguments if n not in (*call.params, *call.batch))
    place: dict[Name | None, Name] = {n: at for at, n in enumerate(rest, start=2)}
    names = [str(roles.signature.parameter(n)) for n in call.batch]
    one = len(names) == 1
    parts = lambda batch: (batch,) if one else tuple(batch[name] for name in names)

    def of_one(params: Tree, batch: Tree, *args: Any) -> Any:
        given = dict(zip((*call.params, *call.batch, *rest), (params, *parts(batch), *args), strict=True))
        return call.with_arguments(given).apply(fun)

    weigh = None if weight_fn is None else lambda batch: weight_fn(*parts(batch))
    loss = Loss(of_one, params, call[rest], returns, weigh, place.get(call.rng), place.get(call.carry), rest)
    batch = batches[0] if one else dict(zip(names, batches, strict=True))
    return loss, batch, tuple(place[n] for n in call.whole if n in place)


def _check(loss: Loss, batch: Tree, num_microbatches: Any, group_size: Any) -> int:
    """Returns the number of rows, and raises for a batch or a number that leaves nothing to compare."""
    if checks.as_count("num_microbatches", num_microbatches) < 2:
        raise ValueError(f"There must be a cut to compare: num_microbatches={num_microbatches}. Pass 2 or more.")
    checks.as_count("group_size", group_size)
    checks.check_no_module([loss.params])
    check_arrays("params", loss.params, NOT_ARRAYS)
    for path, leaf in by_path(loss.params):
        if not is_inexact(leaf):
            raise TypeError(
                f"params must be of floating point, to be differentiated: at {path} there is {short(leaf)}. Pass it "
                "in *args."
            )
    rows, needed = count_rows(batch), group_size * max(4, num_microbatches)
    of_groups = "" if group_size == 1 else f" of group_size={group_size}, {needed // group_size} groups"
    if rows < needed:
        raise ValueError(
            f"verify needs {needed} rows or more{of_groups}, to cut them evenly and unevenly into num_microbatches="
            f"{num_microbatches}: the batch has {rows}. Pass a batch of {needed}; of stacked micro-batches, check the "
            "step with verify_step."
        )
    check_groups("the batch has", rows, group_size)
    return rows


def _check_sizes(loss: Loss, batch: Tree, count: int, num_microbatches: int, group_size: int) -> None:
    """Raises where `fun` cannot take a micro-batch, and says which option lets it: of what it takes, or holds whole."""
    even, odd = -(-count // num_microbatches), uneven(count, num_microbatches)
    for size in sorted({even, odd, count % odd}):
        error = loss.refusal(batch, size)
        if error is None:
            continue
        says = (
            f"fun must take a micro-batch of {size * group_size} of the {count * group_size} rows: it raised {error!r}."
        )
        takes = lambda g: count % g == 0 and not loss.refusal(batch, g) and not loss.refusal(batch, count - g)
        groups = [g * group_size for g in range(2, count // 2 + 1) if takes(g)]
        whole = lambda held, rest: not held.refusal(rest, 2) and not held.refusal(rest, 3)
        tables = [path for path, held, rest in loss.holding(batch) if whole(held, rest)]
        remedy = "Look for a number of rows that is written into fun."
        if tables:
            remedy = (
                f"With all of the leaf {tables[0]} it takes them: if its first axis is not rows, pass it as an "
                "argument of its own, and name that in whole_argnums."
            )
        if groups:
            remedy = f"If rows belong together, pass group_size={groups[0]}, with which it runs, and 4 groups or more."
        raise ValueError(f"{says} {remedy}") from error


def _impure(loss: Loss, batch: Tree) -> Cause | None:
    """Calls the loss three times with the same arguments, without compiling it."""
    check_loss(loss.terms(loss.params, batch, *loss.args), None)  # beside a Ratio value_and_grad refuses weight_fn
    values = [float(loss.total(loss.params, batch, *loss.args)) for _ in range(3)]
    if np.allclose(values, values[0], rtol=1e-5, atol=0, equal_nan=True):
        return None
    return Cause(MUTABLE, f"Called three times with the same arguments, fun returned {values}.")


def _rounding(loss: Loss, batch: Tree) -> float:
    """Returns the square root of the machine epsilon of the narrowest float in the computation of the loss."""
    total = lambda params, batch: loss.total(params, batch, *loss.args)
    return math.sqrt(max(epsilons(str(jax.make_jaxpr(total)(loss.params, batch))), default=2**-23))
