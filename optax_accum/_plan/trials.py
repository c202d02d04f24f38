"""Owns one step that is planned, with one of the options: lowered, and compiled as a search proposes. Chooses none."""

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from optax_accum._compiled.footprint import Flops, Footprint, flops_of, footprint, text_key
from optax_accum._compiled.targets import Target
from optax_accum._core.counted import counted
from optax_accum._plan import search
from optax_accum._plan.plan import Compiled
from optax_accum._plan.search import Candidate

MakeStep = Callable[..., Any]  # returns a `jax.stages.Lowered`
Shapes = tuple[tuple[int, ...], ...]


class Trial:
    """A step with one of the options, and what was compiled of it.

    Attributes:
      option: the option, None without one.
      place: that of the option among those given.
      every: the numbers of micro-batches to choose from; those that do not lower are left out.
      rows: those of an update on one device.
      peaks: the bytes of what was compiled.
      errors: what numbers raised that do not lower.
    """

    def __init__(self, make_step: MakeStep, target: Target, place: int, given: tuple[Any, ...]):
        self.make_step, self.target, self.place, self.given = make_step, target, place, given
        self.option = given[0] if given else None
        self.rows = 0
        self.every: list[Candidate] = []
        self.errors: dict[int, ValueError] = {}
        self._lowered: dict[int, jax.stages.Lowered] = {}
        self.found: dict[Candidate, Footprint] = {}
        self.keys: dict[Candidate, str] = {}
        self._seen: dict[Candidate, _Seen] = {}
        self.peaks: search.Peaks = {}

    def prepare(self, every: Sequence[Candidate], rows: int) -> None:
        """Lowers the fewest micro-batches that lower, and the next, before anything is compiled."""
        self.every, self.rows = [*every], rows
        for place in (0, 1):
            while len(self.every) > place and self.lowered(self.every[place].number) is None:
                del self.every[place]
        if len(self.every) > 1:
            self._check_number(*map(self._see, self.every[:2]))

    def search(self, limit: float, most: int | None, advance: Callable[[str, int], None]) -> None:
        """Compiles what the search proposes; the whole batch alone, if no cut can help."""

        def measure(candidate: Candidate) -> float | None:
            advance(f"{candidate.number} of {counted(candidate.rows, 'row')}", 0)
            if self.lowered(candidate.number) is None:
                return None
            self._compile(candidate)
            advance("", 1)
            return self.found[candidate].peak

        self.peaks = search.search(self.every, measure, limit, most, lambda: self.least)
        self.every = [c for c in self.every if c.number not in self.errors]

    def lowered(self, number: int) -> jax.stages.Lowered | None:
        """Returns the step as it is lowered with so many micro-batches, None where it raises."""
        if number not in self._lowered and number not in self.errors:
            try:
                self._lowered[number] = self._lower(number)
            except ValueError as error:
                self.errors[number] = error
        return self._lowered.get(number)

    def _lower(self, number: int) -> jax.stages.Lowered:
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
    def skipped(self) -> list[str]:
        """Why numbers were left out, or the option."""
        return [str(error) for error in self.errors.values()][: None if self.every else 1]

    @property
    def takes(self) -> Shapes:
        """The shapes of the arguments of what was compiled first."""
        return next(iter(self._seen.values())).takes

    @property
    def least(self) -> float:
        """The bytes of arguments, and of outputs that replace none; 0 where they shrink with the micro-batches."""
        shapes = {_shapes(self._lowered[candidate.number]) for candidate in self.every[:2]}
        found = self.found[min(self.found)]
        return found.arguments + found.kept if len(shapes) == 1 else 0.0

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
            differ = len(seen) == 1 or len({one.takes for one in seen.values()}) > 1
            if candidate not in seen and differ and self.lowered(candidate.number):
                seen[candidate] = self._see(candidate)
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
        return flops.all if calls == 1 else round(calls * (flops.all - self._once) + self._once)

    def _compile(self, candidate: Candidate) -> None:
        lowered = self._lowered[candidate.number]
        self.keys[candidate] = text_key(lowered, self.target)
        self._check_differs(candidate)
        self._see(candidate)
        self.found[candidate] = footprint(lowered, self.target)

    def _see(self, candidate: Candidate) -> "_Seen":
        if candidate not in self._seen:
            self._seen[candidate] = _Seen.of(candidate, self._lowered[candidate.number])
        return self._seen[candidate]

    def _check_number(self, large: "_Seen", small: "_Seen") -> None:
        """Raises where fewer micro-batches have the smaller products."""
        if large.flops and small.flops and 1.5 * large.flops.largest < small.flops.largest:
            raise ValueError(
                "make_step must take the number of micro-batches, and seems to take their rows: the largest product of "
                f"make_step({large.candidate.number}) has {large.flops.largest:.2e} FLOPs, that of make_step("
                f"{small.candidate.number}) {small.flops.largest:.2e}. {PASS_ON}"
            )

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
