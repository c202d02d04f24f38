"""Owns one probe for each cause for which a step that accumulates breaks the law. Runs what `step_runs` offers."""

import numpy as np

from optax_accum._tools import carries
from optax_accum._tools.carries import Numbers
from optax_accum._tools.loss import largest
from optax_accum._tools.report import Cause, order
from optax_accum._tools.step_runs import DRAWS, Errors, Rows, StepRuns, mean, within
from optax_accum._tools.train_steps import spoilt

LONG = 16  # a long window holds so many others
SUMS = 2**-16  # the error beyond which sums have lost something: 128 roundings of float32


class StepProbes(StepRuns):
    """One probe for each cause."""

    def closing(self) -> list[Cause]:
        """The parameters never move, or not when the window ends."""
        k = self.cut.every
        if not self.moved:
            says = f"Two windows of {k} micro-batches changed no parameter; make_step(1) did on the whole batch."
            return [Cause("never closes", says)]
        if self.within_call or k in self.moved or not self.moves_first:
            return []
        says = f"A window of {k} is to move the parameters at micro-step {k}; they moved at {self.moved} of {2 * k}."
        return [Cause("never closes", says)]

    def counters(self) -> list[Cause]:
        """What transformations of Optax call `count` goes up by more than one in a window."""
        runs = [self.one.run(*([self.of(rows)] for rows in self.even_rows)), self.seen]
        for path, other in carries.aligned(*(carries.counters(steps.carry) for steps in (self.one, self.cut))).items():
            once, often = (int(run[-1][at] - run[0][at]) for run, at in zip(runs, (path, other), strict=True))
            if 0 < once < often:
                says = f"{'/'.join(other)} counted {often} in two windows, where it is to count {once}."
                return [Cause("optimizer at each micro-step", says)]
        return []

    def held(self) -> list[Cause]:
        """The parameters move at micro-steps that hold."""
        early = [] if self.within_call else [n for n in self.moved if n % self.cut.every]
        if not early or self.closing() or self.counters():
            return []
        cause = self.explanations.cause(mean(self.ends[0]), self.one_by_one)
        if cause and cause.kind == "optimizer at each micro-step":
            return [cause]
        return [Cause("moves while held", f"The parameters moved at micro-steps {early} of {2 * self.cut.every}.")]

    def window(self) -> list[Cause]:
        """Two even windows do not change what the whole batches do."""
        if within(self.errors):
            return []
        if within(self.compared(self.ends[:1], self.even_rows[:1], self.ones[:1])):
            second = self.explanations.second(*(list(map(mean, runs)) for runs in (self.ends, self.ones)))
            return [second] if second else self.low_precision() or [_unexplained(self.errors, "the second window")]
        cause = self.explanations.cause(mean(self.ends[0]), self.one_by_one)
        if cause is None or cause.kind == "low-precision sum":
            return self.low_precision() or [_unexplained(self.errors, "a window")]
        return [cause]

    def other(self, parts: Rows, *, last: bool = False) -> tuple[Errors, list[Cause]]:
        """A window of other micro-batches: of unequal ones, or fewer, of which the last one ends it."""
        (found,) = self.changes(self.cut, self.calls(parts), last=last)
        if not any(np.any(found[name]) for name, leaf in self.leaves.items() if leaf.slot == "params"):
            says = f"A window that ends after {len(parts)} of {self.cut.every} micro-batches changed no parameter."
            return {}, [Cause("never closes", says)]
        errors = self.compared([found], [np.concatenate(parts)])
        if within(errors):
            return errors, []
        explanations = self.explained(parts)
        cause = explanations.cause(mean(found), None, self.explanations.linear)
        for slot in self.explanations.linear:
            factor = explanations.factor(mean(found), slot)
            if last and factor and abs(factor * self.cut.every / len(parts) - 1) < explanations.near:
                says = f"A window that ends after {len(parts)} of {self.cut.every} gives {factor:.3g} of its mean."
                cause = Cause("divided by the full k", says)
        sizes = ", ".join(str(len(part) * self.group_size) for part in parts)
        return errors, [cause or _unexplained(errors, f"a window of micro-batches of {sizes} rows")]

    def shared_key(self) -> list[Cause]:
        """A mean over k equal micro-batches varies with the key as one of them does, and not k times less."""
        if not self.random:
            return []
        k, rows = self.cut.every, self.even()[0]
        equal = [np.full_like(rows, rows[0]) if self.within_call else rows] * k
        (one,), (cut,) = self.changes(self.one, [self.of(equal[0])]), self.changes(self.cut, self.calls(equal))
        names = [name for slot in self.explanations.linear for name in self.explanations.slots[slot]]
        before, after = (sum(np.sum(np.var(c[n] / self.scales[n], 0)) for n in names) for c in (one, cut))
        if not after > before * k**-0.5:
            return []
        says = f"Over {DRAWS} keys {k} equal micro-batches vary {after / before:.2f} times as much as one of them."
        return [Cause("shared key", says)]

    def low_precision(self) -> list[Cause]:
        """A window of the same micro-batches again and again does not change what one round of them does."""
        names = [name for slot in self.explanations.linear for name in self.explanations.slots[slot]]
        if self.random:
            return []
        limits = {name: SUMS * self.scales[name] + slack for name, slack in self.slack(self.even_rows[:1])[0].items()}
        beyond = lambda a, b: max(
            (largest(np.maximum(np.abs(a[n] - b[n])[0] - limits[n], 0)) / self.scales[n] for n in names), default=0.0
        )
        if self.epsilon < 1e-6 and not beyond(self.ends[0], self.ones[0]):
            return []
        k, many = self.cut.every, self.even() * LONG
        error = beyond(self.changes(self.longer(), self.calls(many))[0], self.ends[0])
        says = f"The same {k} micro-batches {LONG} times over give another mean than once: it is off by {error:.1e}."
        return [Cause("low-precision sum", says)] if error else []

    def poison(self) -> list[Cause]:
        """After a NaN whole batches go on training, and windows do not."""
        parts, at = self.even(), self.cut.every // 2
        calls, whole = self.calls(parts), self.of(np.concatenate(parts))
        size = len(parts[at]) * self.group_size
        bad = spoilt(whole, slice(at * size, (at + 1) * size))
        first = [bad] if self.within_call else [*calls[:at], spoilt(calls[at], slice(None)), *calls[at + 1 :]]
        one, cut = self.one.run([bad], [whole, whole]), self.cut.run(first, [*calls, *calls])
        params = [leaf for leaf in self.leaves.values() if leaf.slot == "params"]

        def trains(seen: list[Numbers], paths: list[carries.Path]) -> bool:
            finite = all(np.all(np.isfinite(seen[-1][path])) for path in paths)
            return finite and any(not np.array_equal(seen[-1][path], seen[1][path]) for path in paths)

        if trains(cut, [leaf.cut for leaf in params]) or not trains(one, [leaf.one for leaf in params]):
            return []
        says = "After a micro-batch of NaN two clean windows train nothing, or make NaN. Whole batches do train."
        return [Cause("NaN poison", says)]


def _unexplained(errors: Errors, where: str) -> Cause:
    name, (error, _) = max(errors.items(), key=lambda item: order(item[1][0] / item[1][1]))
    return Cause("another difference", f"In {where} {name} is off by {error:.1e} of its change.")
