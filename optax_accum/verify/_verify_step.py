"""`verify_step`: whether a train step that accumulates keeps the law, and if not, why."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import optax

from optax_accum._shared.arrays import Tree
from optax_accum.verify import _causes as why
from optax_accum.verify import _faults as faults
from optax_accum.verify import _foreign as foreign
from optax_accum.verify import _params as step_params
from optax_accum.verify import _probes as step_probes
from optax_accum.verify._calls import StepRunner, reference
from optax_accum.verify._checks import check_batch, check_reference
from optax_accum.verify._errors import StepErrors
from optax_accum.verify._report import Cause, Errors, Report, badness, found
from optax_accum.verify._runs import FEW_DRAWS

CLEAR = 2 / 3  # the part of a limit that an error over few keys may take
NO_DOUBT = 0.8  # the part of the allowed variation that few keys may show
OTHERS = 4  # windows of other micro-batches for a model of few parameters


def verify_step(
    make_step: Callable[[int], Any],
    batch: Tree,
    *,
    every: int = 4,
    within_call: bool = False,
    uneven: bool = True,
    optimizer: optax.GradientTransformation | None = None,
    loss: Callable[..., Any] | None = None,
    params: Callable[[Tree], Tree] | None = None,
    group_size: int = 1,
    rtol: float | None = None,
) -> Report:
    """Tells whether a train step accumulates as it should, and if not, why.

        verify_step(make_step, batch).check()

    The report also names the remedy. The step need not use JAX.

        step, carry = make_step(every)
        carry = step(carry, micro_batch)    # for each micro-batch

    `make_step(1)` is the reference: its step gets the whole batch. Both run
    two windows from the same carry, and the parameters and the optimizer's
    state are compared; then windows of unequal micro-batches, and one with
    NaN. Where they differ, the update of each known fault is computed from
    the micro-batches' updates and compared with yours. With few parameters,
    any change is some mixture of those updates; a fault is then named only
    if it agrees to rounding.

    Args:
      make_step: called with the length of a window, returns
        `(step, carry)`, the same carry each time. Where a window may end
        early, it returns `(step, carry, last_step)`; the last micro-batch
        of the data is given to `last_step`. A carry is a pytree: of arrays,
        a Flax TrainState, NNX modules, the lists of Keras' stateless calls,
        modules and optimizers of PyTorch. If it holds JAX's arrays alone,
        the step is JAX's: it gets JAX's arrays, and is traced once, to see
        its dtypes. Any other runs as it is, and gets arrays of the
        batch's own kind.
      batch: a pytree of arrays with rows, JAX's, NumPy's or PyTorch's,
        `2 * every` of them or more. Scalars and keys in it stay whole.
      every: the length of the window, 2 or more.
      within_call: whether one call of `step` gets the whole batch and splits
        it into `every` micro-batches itself.
      uneven: whether micro-batches may have unequal numbers of rows, as at
        the end of an epoch.
      optimizer: with `loss`, in place of `make_step(1)`: the reference is
        then its update with the gradient of the whole batch's loss.
      loss: called as `loss(params, batch)`.
      params: returns the parameters in a carry. By default they are the
        entry "params", or all `nnx.Param`, or the first
        part of the carry that is not all zeros.
      group_size: how many consecutive rows belong together.
      rtol: the largest relative error that counts as rounding. By default
        the square root of the machine epsilon of the narrowest float in the
        step, 3e-4 for float32. The effect of rounding on the reference is
        added to it: the reference is run with its inputs off by a few last
        digits and its rows in other orders.

    Returns:
      A `Report`. In a test write `verify_step(...).check()`.

    Raises:
      TypeError, ValueError: a tensor that requires a gradient in the carry;
        a batch too small to split; an `rtol` that is not above 0; a
        `make_step` that returns something else, or other parameters each
        time; a step that returns nothing; a carry without parameters; a
        reference whose update is zero, or not finite, or moves one or two
        numbers only; a random step whose key is neither in the carry nor in
        the batch, or of which nothing is linear in the gradient.

    Guarantees:
      The faults that it names, all known when running:

      * `"never closes"`: no update at all.
      * `"closes at another micro-step"`: none when the window ends.
      * `"short window dropped"`: no update at the end of the data.
      * `"only the first gradient"`, `"only the last gradient"`: one
        micro-batch counts.
      * `"emptied in mid-window"`: the sum is set to zero too early.
      * `"sum for a mean"`, `"divided twice"`, `"divided by the full k"`,
        `"wrong divisor"`: of the sum of the gradients.
      * `"mean of means"`: micro-batches of different sizes count the same.
      * `"wrong weights"`: they count by something else than their sizes.
      * `"weighed by place"`: later ones count more, or less.
      * `"clipping at each micro-step"`: clipping, by norm or by value, of
        each gradient.
      * `"clipping the running sum"`: clipping of the sum so far, each time.
      * `"optimizer at each micro-step"`: an optimizer or a schedule that
        counts micro-steps.
      * `"moves while held"`: parameters that change in a window.
      * `"shared key"`: one key for all micro-batches.
      * `"low-precision sum"`: a sum in bfloat16 or float16.
      * `"NaN poison"`: a NaN outlives its window, and on whole batches does
        not.
      * `"coupled examples"`: BatchNorm, contrastive losses.
      * `"rows left out"`: a micro-batch does not count, or, within a call,
        the rows that `every` does not divide.
      * `"not emptied"`: `zero_grad` is forgotten: the sum of a window is in
        the next one, too.
      * `"counter not emptied"`: its counts are.
      * `"stale parameters"`: gradients where the window before began.
      * `"another difference"`: a difference that no probe explains.
      * `"not known"`: the cause cannot be told, because an update changes
        `every + 3` numbers or fewer.
      * `"cannot tell"`: rounding moves the reference by a tenth or more.

      Also:

      * A random step: means over keys are compared, of what is linear in
        the gradient.
      * A step that refuses unequal micro-batches: said under "Not tried".
      * Noise added to each gradient, as by DP-SGD, is not seen: its mean is 0.

    Example:
      A loop that forgets to divide.

      >>> import jax, jax.numpy as jnp, optax_accum
      >>> def make_step(every):
      ...     def step(carry, batch):
      ...         w, total, n = carry
      ...         error = lambda w: batch["x"] @ w - batch["y"]
      ...         total += jax.grad(lambda w: jnp.mean(error(w) ** 2))(w)
      ...         closes = (n + 1) % every == 0
      ...         w = jnp.where(closes, w - 0.1 * total, w)
      ...         return w, jnp.where(closes, 0, total), n + 1
      ...     return step, (jnp.ones((5, 3)), jnp.zeros((5, 3)), 0)
      >>> x = jax.random.normal(jax.random.key(0), (8, 5))
      >>> batch = {"x": x, "y": jnp.zeros((8, 3))}
      >>> report = optax_accum.verify_step(make_step, batch)
      >>> [cause.kind for cause in report.causes]
      ['sum for a mean']
    """
    arrays = foreign.opened("batch", batch)
    every, count = check_batch(arrays, every, group_size)
    rtol = _as_tolerance(rtol)
    cut, one = StepRunner(make_step, batch, every), None if optimizer or loss else StepRunner(make_step, batch, 1)
    finds = params, params
    if one is None:
        one = StepRunner(reference(optimizer, loss, step_params.subtree(cut.carry, params)), batch, 1)
        finds = None, params
    runs = StepErrors(one, cut, foreign.cuttable(arrays, one.is_jax), count, group_size, within_call, rtol, finds)
    step_params.check(one.carry, cut.carry, *finds)
    runs.settle()
    return _decided_early(runs, uneven) or _report(runs, uneven)


def _decided_early(runs: StepErrors, uneven: bool) -> Report | None:
    """The report of a random step over few keys, if it holds by a margin: most steps do."""
    if not runs.random or runs.few:
        return None
    few = dataclasses.replace(runs, draws=FEW_DRAWS)
    try:
        report = _report(few, uneven)
    except ValueError:  # more keys may show what is linear in the gradient
        return None
    clear = all(report.errors[name] <= CLEAR * limit for name, limit in report.limits.items())
    return report if report.holds and clear and few.keys_vary < NO_DOUBT else None


def _report(runs: StepErrors, uneven: bool) -> Report:
    rows, every = runs.count * runs.group_size, runs.cut.every
    if hidden := check_reference(runs):
        hidden = dataclasses.replace(hidden, of_jax=runs.cut.is_jax)
        told = hidden.fault is not faults.NOT_TOLD
        return Report(False, {}, {}, (hidden,), rows, every, told, runs.draws, told=told)
    causes, pairs, notes = _compared(runs, uneven)
    errors, limits = ({name: pair[i] for name, pair in pairs.items()} for i in (0, 1))
    causes = causes or list(found(faults.FAULTS, "blind", runs, pairs))
    all_causes = tuple(dataclasses.replace(cause, of_jax=runs.cut.is_jax) for cause in causes)
    told = any(cause.fault is not faults.NOT_TOLD for cause in causes) or not causes
    return Report(not causes, errors, limits, all_causes, rows, every, runs.random, runs.draws, tuple(notes), told)


def _compared(runs: StepErrors, uneven: bool) -> tuple[list[Cause], Errors, list[str]]:
    """The causes, the errors, and notes on tests left out. If even windows are right, others are run."""
    causes = why.causes_of_moves(runs)
    if not runs.moved:
        return causes, {}, []
    causes = causes or why.causes_of_a_window(runs)
    errors, notes = dict(runs.errors), [*step_probes.asked(runs), *step_probes.uncompared(runs)]
    if not causes:
        causes = list(found(faults.FAULTS, "beside", runs))
        for parts, last in _others(runs, uneven, notes):
            try:
                more, cause = why.cause_of_another(runs, parts, last=last)
            except Exception as error:  # whatever a user's step raises for a size that it does not take
                sizes = [len(part) * runs.group_size for part in parts]
                notes.append(f"micro-batches of {sizes} rows, which the step refuses: {str(error)[:100]!r}")
                continue
            if cause and cause.fault not in [other.fault for other in causes]:
                causes.append(cause)
            for name, pair in more.items():
                errors[name] = max(errors[name], pair, key=badness)
    try:
        causes += found(faults.FAULTS, "always", runs)
    except (Exception, SystemExit) as error:  # a step may end a run whose loss is not finite
        notes.append(f"a micro-batch of NaN, at which the step raises {error!r:.100}")
    return causes, errors, notes


def _others(runs: StepErrors, uneven: bool, notes: list[str]) -> Iterator[tuple[list[np.ndarray], bool]]:
    """Yields windows of unequal micro-batches, and one that ends early."""
    even, k = runs.even(), runs.cut.every
    for seed in range(OTHERS if runs.few and not runs.random else 0):  # what one window hides may show in another
        yield np.split(np.random.default_rng(seed).permutation(np.concatenate(even)), k), False
    if not uneven:
        notes.append("micro-batches of unequal size (uneven=False)")
    elif runs.within_call:
        yield np.array_split(np.concatenate(even)[:-1], k), False
    else:
        size, rows = len(even[0]), np.concatenate(even)
        ends = np.cumsum([size + (1, -1)[n % 2] for n in range(k // 2 * 2)])
        yield np.split(rows, ends[: k - 1]), False
    if runs.cut.last is not None:
        yield even[: -(-k // 2)], True
    elif not runs.within_call:
        notes.append("a window that ends early: make_step returns no last_step")


def _as_tolerance(rtol: Any) -> float | None:
    if rtol is None or (hasattr(rtol, "__float__") and 0 < float(rtol) < float("inf")):
        return None if rtol is None else float(rtol)
    raise ValueError(f"rtol must be a finite number above 0: rtol={rtol!r}. Leave it out for its default.")
