"""Owns one probe for each cause for which a step that accumulates breaks the law. Runs what `step_runs` offers."""

import numpy as np

from optax_accum._verify import carries
from optax_accum._verify.carries import Numbers
from optax_accum._verify.explanations import Change, Explanations
from optax_accum._verify.loss import largest
from optax_accum._verify.report import Cause, order
from optax_accum._verify.step_runs import DRAWS, Errors, Rows, StepRuns, mean, within
from optax_accum._verify.train_steps import spoilt

LONG = 16  # a long window holds so many others
SUMS = 2**-16  # the error beyond which sums have lost something: 128 roundings of float32


class StepProbes(StepRuns):
    """One probe for each cause."""

    def closing(self) -> list[Cause]:
        """The parameters never move, or not when the window ends."""
        k = self.cut.every
        if not self.moved:
            says = f"Two windows of {k} micro-batches changed no parameter; two updates with the whole batch did."
            return [self.never(says)]
        if self.within_call or k in self.moved or not self.moves_first:
            return []
        says = f"A window of {k} is to move the parameters at micro-step {k}; they moved at {self.moved} of {2 * k}."
        return [self.never(says)]

    def never(self, says: str) -> Cause:
        """Says that no window closes, unless one of equal micro-batches does: where entries are few, updates cancel."""
        equal = [self.even()[0]] * self.cut.every
        cancels = self.few and any(np.any(self.changes(self.cut, self.calls(equal))[0][name]) for name in self.params)
        return Cause("not known" if cancels else "never closes", says)

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
        if not early:
            return self.averages()
        if self.closing() or self.counters():
            return []
        cause = self.explanations.cause(mean(self.ends[0]), self.one_by_one)
        if cause and cause.kind == "optimizer at each micro-step":
            return [cause]
        says = f"The parameters moved at micro-steps {early} of {2 * self.cut.every}."
        return [Cause("not known" if self.explanations.silent else "moves while held", says)]

    def averages(self) -> list[Cause]:
        """What mirrors the parameters moves at a held micro-step, whatever the micro-batch: it is no sum of gradients.

        An average that starts as the parameters moves from the second window on.
        """
        if self.within_call:
            return []
        k, (_, other, *_) = self.cut.every, self.calls(self.even(1))
        start, here = self.seen[k : k + 2]
        there = self.cut.run(*self.lead(self.cut), self.calls(self.even()), [other])[-1]
        moves = lambda path: not np.array_equal(start[path], here[path]) and np.array_equal(here[path], there[path])
        found = sorted(name for name, leaf in self.leaves.items() if moves(leaf.cut))
        says = f"{', '.join(found[:3])} moved at micro-step {k + 1}, which holds, by the same whatever the micro-batch."
        return [Cause("moves while held", says)] if found else []

    def window(self) -> list[Cause]:
        """Two even windows do not change what the whole batches do."""
        if within(self.errors):
            return []
        if within(self.compared(self.ends[:1], self.even_rows[:1], self.ones[:1])):
            second = self.explanations.second(*(list(map(mean, runs)) for runs in (self.ends, self.ones)))
            return [second] if second else self.low_precision() or [self.unexplained(self.errors, "the second window")]
        cause = self.explanations.cause(mean(self.ends[0]), self.one_by_one) or self.dealt(self.even(), self.ends[0])
        if cause is None or cause.kind == "low-precision sum":
            return self.low_precision() or [self.unexplained(self.errors, "a window")]
        return [cause]

    def other(self, parts: Rows, *, last: bool = False) -> tuple[Errors, list[Cause]]:
        """A window of other micro-batches: of unequal ones, or fewer, of which the last one ends it."""
        (found,) = self.changes(self.cut, self.calls(parts), last=last)
        if self.moves_first and not any(np.any(found[name]) for name in self.params):
            ends = (
                f"that ends after {len(parts)} of {self.cut.every}"
                if len(parts) < self.cut.every
                else f"of {len(parts)}"
            )
            says = f"A window {ends} micro-batches changed no parameter."
            return {}, [self.never(says)]
        errors = self.compared([found], [np.concatenate(parts)])
        if within(errors):
            return errors, []
        explanations = self.explained(parts)
        cause = (
            self.left_out(parts, found, explanations)
            or explanations.cause(mean(found), None, self.explanations.linear)
            or self.dealt(parts, found)
        )
        for slot in self.explanations.linear:
            factor = explanations.factor(mean(found), slot)
            if last and factor and abs(factor * self.cut.every / len(parts) - 1) < explanations.near:
                says = f"A window that ends after {len(parts)} of {self.cut.every} gives {factor:.3g} of its mean."
                cause = Cause("divided by the full k", says)
        sizes = ", ".join(str(len(part) * self.group_size) for part in parts)
        return errors, [cause or self.unexplained(errors, f"a window of micro-batches of {sizes} rows")]

    def left_out(self, parts: Rows, found: Change, explanations: Explanations) -> Cause | None:
        """What came out is the update of as many rows as the micro-batches divide."""
        rows, k = np.concatenate(parts), len(parts)
        kept = rows[: len(rows) // k * k]
        if not self.within_call or len(kept) == len(rows):
            return None
        (of_kept,) = self.changes(self.one, [self.of(kept)])
        far = lambda other: max(
            explanations.distance(mean(found), other, slot) for slot in self.explanations.linear or explanations.slots
        )
        if not far(mean(of_kept)) < min(explanations.near, far(explanations.whole) / 4):
            return None
        rest = (len(rows) - len(kept)) * self.group_size
        says = f"What came out of {len(rows) * self.group_size} rows is the update without the last {rest}."
        return Cause("rows left out", says)

    def dealt(self, parts: Rows, found: Change) -> Cause | None:
        """What explains a step that deals out the rows of a batch to its micro-batches, one by one, as cards."""
        if not self.within_call:
            return None
        rows, k = np.concatenate(parts), len(parts)
        return self.explained([rows[number::k] for number in range(k)]).cause(mean(found))

    def unexplained(self, errors: Errors, where: str) -> Cause:
        """What is said of a difference that is no fault's own, or of which too few numbers tell."""
        name, (error, _) = max(errors.items(), key=lambda item: order(item[1][0] / item[1][1]))
        says = f"In {where} {name} is off by {error:.1e} of its change."
        if not self.few:
            return Cause("another difference", says)
        return Cause("not known", f"{says} Fewer numbers change than tell {self.cut.every} micro-batches apart.")

    def shared_key(self) -> list[Cause]:
        """A mean over k equal micro-batches varies with the key as one of them does, and not k times less.

        So does a sum, but for its size, which is that of the reference for k times the rows. Behind a clip what is
        sound varies less by less: as the reference does, unless its rows share their outcomes.
        """
        if not self.random:
            return []
        k, rows = self.cut.every, self.even()[0]
        equal = [np.full_like(rows, rows[0]) if self.within_call else rows] * k
        draws = 4 * DRAWS if self.few else DRAWS  # few numbers have less to average over
        changes = lambda steps, calls: self.changes(steps, calls, draws=draws)[0]
        one, whole = (changes(self.one, [self.of(rows)]) for rows in (equal[0], np.concatenate(equal)))
        cut = changes(self.cut, self.calls(equal))
        names = [name for slot in self.explanations.linear for name in self.explanations.slots[slot]]
        first, both = (np.concatenate([mean(c)[n].ravel() / self.scales[n] for n in names]) for c in (one, whole))
        size = k if abs(np.vdot(first, both)) > k**0.5 * np.vdot(first, first).real else 1
        before, after, apart = (sum(np.sum(np.var(c[n] / self.scales[n], 0)) for n in names) for c in (one, cut, whole))
        after, apart = after / size**2, apart / size**2
        sound = max(1 / k, apart / before) if apart < 0.95 * before else 1 / k
        if not after > before * sound**0.5:
            return []
        says = f"Over {draws} keys {k} equal micro-batches vary {after / before:.2f} times as much as one of them."
        return [Cause("shared key", says)]

    def low_precision(self) -> list[Cause]:
        """A window of the same micro-batches again and again does not change what one round of them does.

        Of a loss that is a sum it is to change as much more as the reference does, for all but the decay.
        """
        e = self.explanations
        if self.random or not e.rounds(mean(self.ends[0])):
            return []
        slots = e.linear or list(e.slots)
        names = [name for slot in slots for name in e.slots[slot]]
        limits = {name: SUMS * self.scales[name] + slack for name, slack in self.slack(self.even_rows[:1])[0].items()}
        beyond = lambda a, b: max(
            (largest(np.maximum(np.abs(a[n] - b[n])[0] - limits[n], 0)) / self.scales[n] for n in names), default=0.0
        )
        if self.epsilon < 1e-6 and not beyond(self.ends[0], self.ones[0]):
            return []
        k, many = self.cut.every, self.even() * LONG
        (again,) = self.changes(self.one, [self.of(np.concatenate(many))])
        (found,) = self.changes(self.longer(), self.calls(many))
        if max(e.fit(mean(again), slot)[0] for slot in slots) > LONG**0.5:
            found = {name: _along(self.ends[0][name], leaf / LONG, e.drift[name]) for name, leaf in found.items()}
        error = beyond(found, self.ends[0])
        says = f"The same {k} micro-batches {LONG} times over give another mean than once: it is off by {error:.1e}."
        return [Cause("low-precision sum", says)] if error else []

    def uncompared(self) -> list[str]:
        """What the reference changes, and nothing in the windows is compared with: sums, statistics, metrics."""
        compared = {self.leaves[name].one for names in self.slots.values() for name in names}
        seen = self.one.run(*([self.of(rows)] for rows in self.even_rows))
        changed = lambda path: path not in compared and not np.array_equal(seen[0][path], seen[-1][path])
        found = [name for path, name in carries.floats(self.one.carry).items() if changed(path)]
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return [f"{', '.join(found[:3])}{more} in the carry, which whole batches change"] if found else []

    def asked(self) -> list[str]:
        """A step that updates at each call may be one that cuts the batch of a call itself."""
        if self.within_call or self.moved != list(range(1, 2 * self.cut.every + 1)):
            return []
        says = "within_call=True, which a step needs that gets the whole batch in one call: this one moves at each call"
        return [says]

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


def _along(goal: np.ndarray, found: np.ndarray, drift: np.ndarray) -> np.ndarray:
    """Returns what was found, moved along the drift as near to a goal as that goes."""
    return found + drift * np.sum((goal - found) * drift) / max(float(np.sum(drift * drift)), 1e-300)
