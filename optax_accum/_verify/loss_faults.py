"""Owns the table of the faults of a loss, and the order in which they are asked for."""

import itertools

from optax_accum._verify import loss_probes as probes
from optax_accum._verify.loss_runs import LossRuns
from optax_accum._verify.report import Cause, Fault, found

MUTABLE = Fault(
    "mutable state",
    "Later micro-batches depend on earlier ones, through the carry or a variable.",
    "The gradient changes if each micro-batch starts from the first carry; or equal calls of `fun` differ.",
    "Make fun pure: pass what changes as an argument, with carry_argnum, and let the loss of a training step not "
    "depend on what earlier micro-batches put there.",
    {"options": probes.state},
)
SHARED_KEY = Fault(
    "shared key",
    "All micro-batches draw the same random numbers.",
    "The loss changes with a key that `rng_argnum` does not name, or draws from a key that is not an argument.",
    "Make the key an argument of fun, and name it with rng_argnum: each micro-batch then gets its own key. A key that "
    "is shared on purpose goes into whole_argnums.",
    {"options": probes.shared_key},
)
FAULTS = (  # options are asked all; of a wrong formula the first that shows is the cause
    SHARED_KEY,
    Fault(
        "low-precision sum",
        "Their gradients are added in bfloat16 or float16.",
        "The default accumulator gives another gradient.",
        "Leave accumulator_dtype=None: at least float32, never narrower than the parameter.",
        {"options": probes.low_precision},
    ),
    MUTABLE,
    Fault(
        "nonlinear derivative",
        "A rule of the user, as a clip in a `jax.custom_vjp`, takes the gradient of each micro-batch.",
        "A part of the loss does not have the same part of the gradient.",
        "Clip or round gradients in the optimizer, which sees that of the whole batch: optax.clip. If the rule adds a "
        "term to the gradient, add that term to the loss instead. A rule that takes the gradients of rows one by one "
        "may stay.",
        {"formula": probes.nonlinear},
    ),
    Fault(
        "not rows",
        "Each micro-batch gets a part of a table that it needs whole.",
        "If that leaf is not split, the gradients agree.",
        "Pass that leaf as an argument of its own, and name that in whole_argnums. If it holds examples, as in MMD, "
        "that would keep all of them whole: put the loss on top of microbatched_apply.",
        {"formula": probes.not_rows},
    ),
    Fault(
        "coupled examples",
        "Each micro-batch compares its rows with one another, not with those of the whole batch.",
        "A constant added to a leaf of the batch does not change the loss; or replacing two sets of rows at once "
        "changes it by another amount than both changes alone together, whatever the weights.",
        "Normalise data, such as advantages, over the whole batch, before the call. Compute what is per example with "
        "microbatched_apply and put the loss on top of all its rows (InfoNCE, ranking). Rows that belong together stay "
        "together with group_size; what a row needs of the next one, as in TD learning, goes into a leaf of its own. "
        "For BatchNorm use running statistics through carry_argnum, or LayerNorm or "
        "GroupNorm.",
        {"formula": probes.coupled},
    ),
    Fault(
        "sum",
        "Each micro-batch returns a sum; the mean of the sums is too small.",
        "The loss of the batch is the sum of the losses of its rows.",
        "Return the mean over rows (divide by their number), or a mean over tokens with its weight_fn. Across calls, "
        'accumulate_gradients(reduction="sum") adds as it is.',
        {"formula": probes.total},
    ),
    Fault(
        "weights",
        "Each micro-batch divides by its own tokens, and all count the same.",
        "Other weights than those in use make the loss a sum over rows.",
        "Pass a weight_fn that returns the number that each mean divides by, such as mask.sum(); "
        "value_and_apply_gradients takes it, too. For "
        "means with their own denominators, return a dict of terms from fun and a dict with the same keys from "
        "weight_fn. If only fun knows the denominator, pass weight_of, or return a Ratio. Importance weights that are "
        "divided by their maximum or mean are to be divided before the call, over the whole batch.",
        {"formula": probes.weights},
    ),
)


def causes(runs: LossRuns) -> list[Cause]:
    """Returns why the law does not hold: what is wrong with the options, and with the formula of the loss."""
    formula = [] if runs.sound_formula else itertools.islice(found(FAULTS, "formula", runs), 1)
    return [*found(FAULTS, "options", runs), *formula]
