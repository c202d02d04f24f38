"""Owns what `verify` reports: the causes, their remedies, and how they print. Probes nothing."""

import dataclasses
import math
import textwrap

from optax_accum._core.counted import counted

DRAWS = 128  # keys over which a random loss is averaged
REMEDIES = {
    "weights": "Pass weight_fn (weight= across calls): what each mean divides by, such as mask.sum(). For means "
    "with their own denominators, return a dict of terms from fun and a dict with the same keys from weight_fn.",
    "sum": "Return the mean over rows (divide by their number), or a mean over tokens with its weight_fn. Across "
    'calls, accumulate_gradients(reduction="sum") adds as it is.',
    "coupled examples": "Compute what is per example with microbatched_apply and put the loss on top of all its rows "
    "(InfoNCE, ranking). Rows that belong together stay together with group_size. For BatchNorm use running statistics "
    "through carry_argnum, or LayerNorm or GroupNorm. Normalise data, such as advantages, before the call.",
    "shared key": "Pass rng_argnum, the key's position or name: each micro-batch then gets its own key. A key "
    "that is shared on purpose goes into whole_argnums. In a step of your own use jax.random.fold_in(key, i).",
    "low-precision accumulator": "Leave accumulator_dtype=None: at least float32, never narrower than the parameter.",
    "not rows": "Pass that leaf as an argument of its own, and name that in whole_argnums.",
    "never closes": "Return the new carry from the step, every time: what a jitted function keeps to itself is lost. "
    "Count micro-steps in the carry, and update when as many as the window have come.",
    "only the first gradient": "Add each micro-batch's gradient to the accumulator: acc + g, from zeros.",
    "only the last gradient": "Add each micro-batch's gradient, acc + g. Empty the accumulator only after an update.",
    "divided twice": "Divide once: either each loss, or the sum of the gradients. optax.MultiSteps divides, too.",
    "sum for a mean": "Divide the sum by what the whole batch's mean divides by: by k for k equal micro-batches.",
    "divided by the full k": "Divide by the number of micro-batches that came (flush=True does), or by their weights.",
    "mean of means": "Add w * g and divide by the sum of w, the rows or tokens of each micro-batch: weight= across "
    "calls, weight_fn within. Where micro-batches are always equal, pass uneven=False.",
    "clipping at each micro-step": "Clip the mean: put clipping inside what accumulates, "
    "accumulate_gradients(optax.chain(optax.clip_by_global_norm(1.0), optimizer), every).",
    "optimizer at each micro-step": "Let optimizer and schedule see one gradient for each window: "
    "accumulate_gradients(optimizer, every), with the schedule inside; apply_every comes first in a chain.",
    "moves while held": "Change parameters only where the window closes: decay, averages and noise belong there, too.",
    "low-precision sum": "Add gradients in float32: acc + g.astype(jnp.float32), from float32 zeros.",
    "NaN poison": "Start each window from zeros by jnp.where, not by 0 * acc, and leave out what is not finite: "
    'accumulate_gradients(..., nonfinite="skip").',
    "rows left out": "Let the rows that are left be one smaller micro-batch, and weigh each by its rows, as "
    "value_and_grad does. Where batches always divide, pass uneven=False.",
    "not emptied": "Start each window from zeros: where(mini_step == 0, 0, acc) + g.",
    "not known": "Check a model of more parameters, every + 4 or more of which the batch moves, or a smaller every: "
    "then the cause is named.",
    "another difference": "No probe explains it. For a plainer picture make the step with optax.sgd, and without what "
    "is random.",
    "mutable state": "Make fun pure: pass what changes as an argument, with carry_argnum, and let the loss of a "
    "training step not depend on what earlier micro-batches put there.",
}


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a loss changes when its batch is cut: its `kind`, what the probe saw, and what to do."""

    kind: str
    evidence: str

    @property
    def remedy(self) -> str:
        """What to change, in this library."""
        return REMEDIES[self.kind]


@dataclasses.dataclass(frozen=True)
class Report:
    """What `verify` or `verify_step` found: whether the law holds, how nearly, if not why. It prints.

    As a bool it is `holds`, so that `assert verify(...)` says what it seems to say; `check()` shows the report, too.
    """

    holds: bool
    errors: dict[str, float]  # "loss" and each leaf's path -> largest error / largest entry of what is averaged
    limits: dict[str, float]  # the same paths -> the largest error that counts as rounding, or as noise
    causes: tuple[Cause, ...]
    rows: int
    num_microbatches: int
    random: bool
    subject: str = "loss"
    draws: int = DRAWS
    notes: tuple[str, ...] = ()  # what was not tried, and why

    def check(self) -> None:
        """Raises an AssertionError with the report, unless the law holds: one line of a test."""
        if not self.holds:
            raise AssertionError(str(self))

    def __bool__(self) -> bool:
        return self.holds

    def __str__(self) -> str:
        same = "gradient" if self.subject == "loss" else "update"
        says = (
            f"holds: cut or whole, the {same} is the same" if self.holds else f"does NOT hold for this {self.subject}"
        )
        cuts = ", even and uneven" if self.subject == "loss" else ""  # of a step the notes say what was not tried
        lines = [f"The law {says} ({self.rows} rows, {self.num_microbatches} micro-batches{cuts})."]
        if self.random:
            lines.append(
                f"The {self.subject} is random: means over {self.draws} keys were compared, within six standard errors."
            )
        worst = sorted(self.errors, key=lambda path: -order(self.errors[path] / self.limits[path]))
        lines += [f"  {'error':>9}  {'limit':>9}  (relative to the largest entry of what is averaged)"] if worst else []
        lines += [f"  {self.errors[path]:9.1e}  {self.limits[path]:9.1e}  {path}" for path in worst[:8]]
        lines += [f"  and {counted(len(worst) - 8, 'other')}, nearer"] if len(worst) > 8 else []
        lines += [f"Not tried: {note}" for note in self.notes]
        for cause in self.causes:
            lines += [f"Cause: {cause.kind}. {cause.evidence}", f"Remedy: {cause.remedy}"]
        return "\n".join(textwrap.fill(line, 100, subsequent_indent="  ", replace_whitespace=False) for line in lines)


def order(error: float) -> float:
    """Returns the error as a key to sort by: a NaN is larger than anything."""
    return math.inf if math.isnan(error) else error
