"""Owns what `verify` reports: the causes, their remedies, and how they print. Probes nothing."""

import dataclasses
import math
import textwrap

DRAWS = 128  # keys over which a random loss is averaged
REMEDIES = {
    "weights": "Pass weight_fn (weight= across calls): what each mean divides by, such as mask.sum(). For means "
    "with their own denominators, return a dict of terms from fun and a dict with the same keys from weight_fn.",
    "sum": "Return the mean over rows (divide by their number), or a mean over tokens with its weight_fn. Across "
    'calls, accumulate_gradients(reduction="sum") adds as it is.',
    "coupled examples": "Compute what is per example with microbatched_apply and put the loss on top of all its rows "
    "(InfoNCE, ranking). Rows that belong together stay together with group_size. For BatchNorm use running statistics "
    "through carry_argnum, or LayerNorm or GroupNorm.",
    "shared key": "Pass rng_argnum, the number of the key's argument: each micro-batch then gets its own key. A key "
    "that is shared on purpose goes into whole_argnums.",
    "low-precision accumulator": "Leave accumulator_dtype=None: at least float32, never narrower than the parameter.",
    "not rows": "Pass that leaf as an argument of its own, and name that in whole_argnums.",
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
    """What `verify` found: whether the law holds, how nearly, and if not why. Printed, it fills a screen at most."""

    holds: bool
    errors: dict[str, float]  # "loss" and each leaf's path -> largest error / largest entry of what is averaged
    limits: dict[str, float]  # the same paths -> the largest error that counts as rounding, or as noise
    causes: tuple[Cause, ...]
    rows: int
    num_microbatches: int
    random: bool

    def __str__(self) -> str:
        says = "holds: cut or whole, the gradient is the same" if self.holds else "does NOT hold for this loss"
        lines = [f"The law {says} ({self.rows} rows, {self.num_microbatches} micro-batches, even and uneven)."]
        if self.random:
            lines.append(f"The loss is random: means over {DRAWS} keys were compared, within six standard errors.")
        worst = sorted(self.errors, key=lambda path: -order(self.errors[path] / self.limits[path]))
        lines += [f"  {'error':>9}  {'limit':>9}  (relative to the largest entry of what is averaged)"] if worst else []
        lines += [f"  {self.errors[path]:9.1e}  {self.limits[path]:9.1e}  {path}" for path in worst[:8]]
        lines += [f"  and {len(worst) - 8} leaves that are nearer"] if len(worst) > 8 else []
        for cause in self.causes:
            lines += [f"Cause: {cause.kind}. {cause.evidence}", f"Remedy: {cause.remedy}"]
        return "\n".join(textwrap.fill(line, 100, subsequent_indent="  ", replace_whitespace=False) for line in lines)


def order(error: float) -> float:
    """Returns the error as a key to sort by: a NaN is larger than anything."""
    return math.inf if math.isnan(error) else error
