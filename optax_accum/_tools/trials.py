"""Owns one step that is planned, with one of the options: lowered, and compiled as a search proposes. Chooses none."""

import contextlib
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from optax_accum._tools import search
from optax_accum._tools.counted import counted
from optax_accum._tools.footprint import Flops, Footprint, flops_of, footprint, text_key
from optax_accum._tools.plan import Compiled
from optax_accum._tools.search import Candidate
from optax_accum._tools.targets import Target

MakeStep = Callable[..., Any]  # returns a `jax.stages.Lowered`
Shapes = tuple[tuple[int, ...], ...]


class Trial:
    """A step with one of the options, and what was compiled of it.

    Attributes:
      option: the option, None without one.
      place: that of the option among those given.
      rows: those of an update on one device.
      peaks: the bytes of what was compiled.
      hopeless: what the step takes and returns is too much, however it is cut.
    """

    def __init__(self, make_step: MakeStep, target: Target, rows: int, place: int, given: tuple[Any, ...]):
        self.make_step, self.target, self.rows, self.place, self.given = make_step, target, rows, place, given
        self.option = given[0] if given else None
        self.every: Sequence[Candidate] = ()
        self.found: dict[Candidate, Footprint] = {}
        self.keys: dict[Candidate, str] = {}
        self._seen: dict[Candidate, _Seen] = {}
        self.peaks: search.Peaks = {}
        self.hopeless = False

    def search(self, every: Sequence[Candidate], limit: float, most: int, advance: Callable[[str, int], None]) -> None:
        """Compiles what the search proposes; the whole batch alone, if no cut can help."""
        self.every = every

        def measure(candidate: Candidate) -> float:
            if candidate not in self.found:
                advance(f"{candidate.number} of {counted(candidate.rows, 'row')}", 0)
                self._compile(candidate)
                advance("", 1)
            return self.found[candidate].peak

        self.peaks = search.search(every, measure, limit, 1)
        self.hopeless = self.alone > limit and _shapes(self.lower(every[0])) == _shapes(self.lower(every[-1]))
        if not self.hopeless:
            self.peaks = search.search(every, measure, limit, most)

    def lower(self, candidate: Candidate) -> jax.stages.Lowered:
        """Returns the step as it is lowered with so many micro-batches."""
        number = candidate.number
        wants_target = "target" in _parameters(self.make_step)
        try:
            lowered = self.make_step(number, *self.given, **({"target": self.target} if wants_target else {}))
        except Exception as error:
            raise ValueError(
                f"make_step({', '.join(map(repr, (number, *self.given)))}) must return a lowered step: it raised "
                f"{type(error).__name__}: {str(error).rstrip('.')}.{_SOME_NUMBERS * (number > 1)}"
            ) from error
        if not isinstance(lowered, jax.stages.Lowered):
            raise TypeError(
                f"make_step({number}) must return a lowered step: it returned {type(lowered).__name__}. Return "
                "jax.jit(step).lower(*shapes)."
            )
        return lowered

    def compiled(self, limit: float) -> list[Compiled]:
        """Returns what was compiled, fewest micro-batches first."""
        fits = lambda c: self.peaks[c] <= limit
        of = lambda c: (c, self.found[c], fits(c), self._of_update(c), self.place, self._calls(c))
        return [Compiled(self.option, *of(c)) for c in sorted(self.found)]

    @property
    def takes(self) -> Shapes:
        """The shapes of the arguments of what was compiled first."""
        return next(iter(self._seen.values())).takes

    @property
    def alone(self) -> float:
        """The bytes of arguments, and of outputs that replace none, of the fewest micro-batches."""
        found = self.found[min(self.found)]
        return found.arguments + found.kept

    @property
    def cost(self) -> float:
        """The FLOPs of an update, infinity where no program tells; where loops do not, those of the whole batch."""
        known = [float(flops) for c in self.found if (flops := self._of_update(c)) is not None]
        return min(known, default=math.inf)

    @property
    def ignores_number(self) -> bool:
        """Whether micro-batches of all sizes cost the same."""
        known = {c.rows: peak for c, peak in self.peaks.items() if math.isfinite(peak)}
        return len(known) > 1 and len(set(known.values())) == 1

    @functools.cached_property
    def _ends(self) -> tuple["_Seen", "_Seen"]:
        """A program of large micro-batches and one of small ones, which need not have been compiled."""
        seen = self._seen.copy()
        for candidate in (self.every[-1], self.every[len(self.every) // 2]):
            if candidate not in seen and (len(seen) == 1 or len({one.takes for one in seen.values()}) > 1):
                with contextlib.suppress(TypeError, ValueError):  # a step may take only some numbers
                    seen[candidate] = _Seen.of(candidate, self.lower(candidate))
        cuts = sorted(c for c in seen if c.number > 1)  # a window of one may hold no sum, and differ by that
        return seen[(cuts if len(cuts) > 1 else sorted(seen))[0]], seen[max(seen)]

    @functools.cached_property
    def _by_call(self) -> bool:
        """Whether a call takes one micro-batch: the smaller they are, the smaller are its arguments."""
        large, small = self._ends
        before, after = Counter(large.takes), Counter(small.takes)
        size = lambda shapes: sum(math.prod(shape) * times for shape, times in shapes.items())
        return 2 * size(after - before) < (1 + small.candidate.rows / large.candidate.rows) * size(before - after)

    @functools.cached_property
    def _once(self) -> float:
        """The FLOPs of branches to which no row adds, such as the optimizer's: one call of an update takes them."""
        large, small = self._ends
        if not (large.flops and small.flops):
            return 0
        less, more = small.flops.branches, large.flops.branches
        row = (more - less) / (large.candidate.rows - small.candidate.rows)
        return min(max(0, less - row * small.candidate.rows), less)

    def _calls(self, candidate: Candidate) -> float:
        """Returns the calls of an update, by rows."""
        return self.rows / candidate.rows if candidate.number > 1 and self._by_call else 1.0

    def _of_update(self, candidate: Candidate) -> int | None:
        """Returns the FLOPs of an update."""
        if (flops := self._seen[candidate].flops) is None:
            return None
        calls = self._calls(candidate)
        return sum(flops) if calls == 1 else round(calls * (sum(flops) - self._once) + self._once)

    def _compile(self, candidate: Candidate) -> None:
        lowered = self.lower(candidate)
        self.keys[candidate] = text_key(lowered, self.target)
        self._check_differs(candidate)
        self._seen[candidate] = _Seen.of(candidate, lowered)
        self.found[candidate] = footprint(lowered, self.target)

    def _check_differs(self, candidate: Candidate) -> None:
        same = [c for c, key in self.keys.items() if c.rows != candidate.rows and key == self.keys[candidate]]
        if same:
            raise ValueError(
                f"make_step must cut the batch as it is told: {same[0].number} and {candidate.number} micro-batches "
                f"are the same program, so all cost the same. {PASS_ON}"
            )


class _Seen(NamedTuple):
    """What is read of a program before it is compiled."""

    candidate: Candidate
    takes: Shapes
    flops: Flops | None  # of a call

    @classmethod
    def of(cls, candidate: Candidate, lowered: jax.stages.Lowered) -> "_Seen":
        """Reads a program."""
        return cls(candidate, _leaves(lowered.args_info), flops_of(lowered))


PASS_ON = "Pass its number on, value_and_grad(loss, num_microbatches=num_microbatches)."
_SOME_NUMBERS = " If it takes only some numbers, pass them as candidates=, such as the divisors of the batch."


def _shapes(lowered: jax.stages.Lowered) -> Shapes:
    """Returns the shapes of what a step takes and returns."""
    return _leaves(lowered.args_info) + _leaves(lowered.out_info)


def _leaves(tree: Any) -> Shapes:
    return tuple(leaf.shape for leaf in jax.tree.leaves(tree))


def _parameters(make_step: MakeStep) -> Iterable[str]:
    try:
        return inspect.signature(make_step).parameters
    except (TypeError, ValueError):
        return ()
