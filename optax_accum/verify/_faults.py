"""The table of a step's faults, in the order in which they are asked for."""

from optax_accum.verify import _probes as probes
from optax_accum.verify._report import Fault

SHARED_KEY = Fault(
    "shared key",
    "All micro-batches draw the same random numbers.",
    "Over many keys, a window of equal micro-batches varies as much as a single one.",
    "Give each micro-batch a key of its own: jax.random.fold_in(key, i). value_and_apply_gradients does it "
    "with rng_argnum; in value_and_grad rows draw what they do in the whole batch.",
    {"beside": probes.shared_key},
    "Seed once, before the loop, and not before each micro-batch.",
)
NOT_TOLD = Fault(
    "cannot tell",
    "Perhaps what they should: rounding moves the whole batch's update too.",
    "The whole batch's own update is off by a tenth or more if inputs and parameters are off by a few last digits.",
    "Check in float32 or float64, with optax.sgd, and pass labels as integers: what rounds or compares its inputs, as "
    "astype(int) does, jumps.",
    {"blind": probes.blind, "unexplained": probes.unclear},
    "Check in float32 or float64, with plain gradient descent, and pass labels as integers: what rounds or compares "
    "its inputs jumps.",
)
# When a probe is asked. "moves": first, about the calls at which parameters move. "beside" and "other": if even windows
# are right, about these, and about windows of other micro-batches. "unexplained": if a window is wrong and nothing else
# explains it. "always": in any case. "blind": if nothing was found. A wrong window is explained by step_windows.
FAULTS = (
    Fault(
        "never closes",
        "None of them makes an update.",
        "The parameters do not move.",
        "Return the new carry from the step, every time: jit discards a change that is not returned. Count "
        "micro-steps in the carry, and update when as many as the window have come. Pass within_call=True only if the "
        "step takes the whole batch and splits it.",
        {"moves": probes.stays, "other": probes.stays_open},
        "Return the carry from the step, every time. Count micro-batches, and update when as many as the window have "
        "come. Pass within_call=True only if the step takes the whole batch and splits it.",
    ),
    Fault(
        "closes at another micro-step",
        "One of them makes an update that is not the last of its window.",
        "The parameters move, but not at the micro-step that ends a window.",
        "Update at the last micro-step of a window: where (n + 1) % every == 0, if n counts micro-steps from 0.",
        {"moves": probes.ends_elsewhere},
    ),
    Fault(
        "optimizer at each micro-step",
        "Each micro-batch makes an update, or counts as one for the schedule.",
        "An Optax counter goes up too often; or the parameters moved by several updates, or by their mean; or the "
        "moments are right, and the update is a multiple of the right one.",
        "Let optimizer and schedule see one gradient for each window: accumulate_gradients(optimizer, every), with the "
        "schedule inside; apply_every comes first in a chain.",
        {"moves": probes.updates},
        "Step the optimizer and the schedule once for each window, where it closes.",
    ),
    Fault(
        "moves while held",
        "The parameters, or an average of them, move at each micro-batch, not only when the window ends.",
        "They change at a micro-step that should only accumulate.",
        "Change parameters only where the window closes: decay, averages and noise belong there, too.",
        {"moves": probes.moves},
    ),
    Fault(
        "short window dropped",
        "Those of a last window that is short make no update.",
        "The parameters do not move at the last micro-batch of the data, if that does not fill a window.",
        "Update at the last micro-batch of the data, too: apply_gradients(..., flush=True).",
        {"other": probes.dropped},
        "Flush: call the optimizer's step and zero_grad() at the last micro-batch of the data, too.",
    ),
    Fault(
        "divided by the full k",
        "Micro-batches of a short last window count too little.",
        "The update is too small by the missing part of the window.",
        "Divide by the number of micro-batches that came, or by their weights: apply_gradients(..., flush=True) does.",
        {"other": probes.by_the_full_k},
        "Divide the sum of the gradients by the number of micro-batches that came, or by their rows.",
    ),
    Fault(
        "rows left out",
        "Rows left over after division by `every`, or a whole micro-batch, count for nothing.",
        "The update equals that of the other rows alone.",
        "Add the gradient of every micro-batch. Let the rows that are left be one smaller micro-batch, and weight each "
        "by its rows; value_and_grad does. Where batches always divide, pass uneven=False.",
        {"other": probes.left_out},
        "Add the gradient of every micro-batch. Let the rows that are left be one smaller micro-batch, and weigh each "
        "by its rows. Where batches always divide, pass uneven=False.",
    ),
    Fault(
        "only the first gradient",
        "The first micro-batch counts, the others do not.",
        "The update equals that of the first micro-batch alone, or a part of it.",
        "Add each micro-batch's gradient to the accumulator: acc + g, from zeros.",
        {},
        "Add each micro-batch's gradient. In PyTorch, call zero_grad() only after an update.",
    ),
    Fault(
        "only the last gradient",
        "The last micro-batch counts, the others do not.",
        "The update equals that of the last micro-batch alone, or a part of it.",
        "Add each micro-batch's gradient, acc + g. Empty the accumulator only after an update.",
        {},
        "Add each micro-batch's gradient. In PyTorch, call zero_grad() only after an update.",
    ),
    Fault(
        "emptied in mid-window",
        "The sum is set to zero inside the window (`zero_grad` too often): earlier micro-batches count for nothing.",
        "The update equals that of the last few micro-batches, or a part of it.",
        "Empty the accumulator only after an update, never between two micro-batches of one window.",
        {},
        "Call zero_grad() only after the optimizer's step, never between two micro-batches of one window.",
    ),
    Fault(
        "low-precision sum",
        "Their gradients are added in bfloat16 or float16.",
        "Repeating the same micro-batches many times changes their mean.",
        "Add gradients in float32: acc + g.astype(jnp.float32), from float32 zeros.",
        {"beside": probes.rounded, "unexplained": lambda off: probes.rounded(off.runs)},
        "Add gradients in float32. In PyTorch .grad has the dtype of the parameters: keep these in float32, with "
        "autocast.",
    ),
    Fault(
        "sum for a mean",
        "Their gradients are added and never divided.",
        "The update uses a multiple of the whole batch's gradient.",
        "Divide the sum by what the whole batch's mean divides by: by k for k equal micro-batches.",
        {},
    ),
    Fault(
        "divided twice",
        "The sum of their gradients is divided once too often.",
        "The update uses a fraction of the whole batch's gradient.",
        "Divide once: either each loss, or the sum of the gradients. optax.MultiSteps divides, too.",
        {},
        "Divide once: either each loss, or the sum of the gradients. Some trainers divide, too.",
    ),
    Fault(
        "wrong divisor",
        "The sum of their gradients is divided by another number than the whole batch's.",
        "The update uses a multiple of the whole batch's gradient, neither k times it nor 1/k of it.",
        "Divide the sum by what the whole batch's mean divides by: its rows, or its tokens.",
        {},
    ),
    Fault(
        "mean of means",
        "Each micro-batch counts the same, though they have different numbers of rows or tokens.",
        "The update uses the unweighted mean of their gradients; the whole batch's gradient is a weighted mean.",
        "Add w * g and divide by the sum of w, the rows or tokens of each micro-batch: apply_gradients(..., weight=w), "
        "or value_and_grad of the loss within a call. Where micro-batches are always equal, pass uneven=False.",
        {},
        "Add the sums of the losses, and divide once by all rows or tokens of the window. Where micro-batches are "
        "always equal, pass uneven=False.",
    ),
    Fault(
        "wrong weights",
        "Micro-batches that should count the same, or as their rows or tokens, count otherwise.",
        "Their shares in the update go with the micro-batches, and neither are equal nor go with a count.",
        "Weigh each micro-batch by what the whole batch's mean divides by: apply_gradients(..., weight=w), where w is "
        "its rows or its tokens.",
        {},
        "Weigh each micro-batch by what the whole batch's mean divides by: its rows, or its tokens.",
    ),
    Fault(
        "weighed by place",
        "How much a micro-batch counts depends on its place in the window.",
        "Their shares in the update stay with the places if the micro-batches change theirs.",
        "Add each gradient as it is, acc + g, and divide once, where the window closes: (acc + g) / 2 halves the "
        "earlier ones each time, acc + g / n counts the later ones less.",
        {},
    ),
    Fault(
        "clipping the running sum",
        "The sum so far is clipped at each micro-batch, not the whole sum once.",
        "The update equals a sum that is clipped after each micro-batch is added to it.",
        "Clip where the window closes: put clipping inside what accumulates, "
        "accumulate_gradients(optax.chain(optax.clip_by_global_norm(1.0), optimizer), every).",
        {},
        "Clip once for each window: call clip_grad_norm_ just before the optimizer's step, not after each backward().",
    ),
    Fault(
        "clipping at each micro-step",
        "The gradient of each micro-batch is clipped, not that of the window.",
        "The update uses a mean of smaller gradients; the whole batch's gradient is a multiple of such a mean.",
        "Clip the mean: put clipping inside what accumulates, "
        "accumulate_gradients(optax.chain(optax.clip_by_global_norm(1.0), optimizer), every).",
        {},
        "Clip the mean of the window, just before the optimizer's step.",
    ),
    Fault(
        "coupled examples",
        "Each micro-batch compares its rows with one another, not with those of the whole batch.",
        "No weighted sum of their gradients is the whole batch's; or a constant added to a leaf of the batch changes "
        "nothing.",
        "Within a call take value_and_grad, which is exact for such a loss. Across calls normalise data, such as "
        "advantages, over the whole batch, before it is split; pass group_size=, where groups of rows belong together; "
        "for BatchNorm use running statistics, LayerNorm or GroupNorm.",
        {},
        "Normalise data, such as advantages, over the whole batch, before it is split. Put losses that compare rows on "
        "top of all rows of the window. Pass group_size=, where groups of rows belong together. For BatchNorm use "
        "running statistics, LayerNorm or GroupNorm.",
    ),
    Fault(
        "not emptied",
        "The sum is not set to zero (`zero_grad` forgotten): the last window counts in the next one, too.",
        "The first window is right; the second one's update contains its sum again.",
        "Start each window from zeros: where(mini_step == 0, 0, acc) + g.",
        {},
        "Empty the accumulator after each update: zero_grad() in PyTorch.",
    ),
    Fault(
        "counter not emptied",
        "A counter of micro-batches, rows or tokens goes on in the next window.",
        "The first window is right; the second one is divided by the counts of both, or closes at other micro-steps.",
        "Set the counter back to 0 with the accumulator, after each update.",
        {"moves": probes.goes_on_counting},
    ),
    Fault(
        "stale parameters",
        "Their gradients are those of parameters before the last update.",
        "The first window is right; the second one's gradient is taken where the first one began.",
        "Compute each gradient from the parameters in the carry: a function that closes over them keeps the old ones.",
        {},
        "Compute each gradient from the parameters as they are now, not from a copy made before the update.",
    ),
    SHARED_KEY,
    Fault(
        "NaN poison",
        "After one NaN, all later windows are NaN.",
        "After a NaN, whole batches train again, and windows do not.",
        "Start each window from zeros by jnp.where, not by 0 * acc, and leave out what is not finite: "
        'accumulate_gradients(..., nonfinite="skip").',
        {"always": probes.poison},
        "Empty the accumulator after each window, also after one whose update is left out.",
    ),
    NOT_TOLD,
    Fault(
        "not known",
        "One of these, or something else: too few parameters change to tell.",
        "An update changes `every + 3` numbers or fewer.",
        "Check a model of more parameters, every + 4 or more of which the batch moves, or a smaller every: then the "
        "cause is named.",
        {
            "moves": probes.moves_somehow,
            "other": lambda o: probes.stays_open(o, somehow=True),
            "unexplained": probes.unknown,
        },
    ),
    Fault(
        "another difference",
        "Something else.",
        "No probe explains it.",
        "For a plainer picture make the step with optax.sgd, and without what is random.",
        {"unexplained": probes.unexplained},
        "For a plainer picture take plain gradient descent, and leave out what is random.",
    ),
)
PLANTED = FAULTS[:-3]  # the last three name no fault
