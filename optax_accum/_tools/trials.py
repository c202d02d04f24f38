"""Owns one step that is planned, with one of the options: lowered, and compiled as a search proposes. Chooses none."""

import contextlib
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
        self._flops: dict[Candidate, Flops | None] = {}
        self._takes: dict[Candidate, Shapes] = {}
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
        return next(iter(self._takes.values()))

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
    def by_call(self) -> bool:
        """Whether a call takes one micro-batch: the smaller they are, the smaller are its arguments."""
        takes = self._takes.copy()
        for candidate in (self.every[-1], self.every[len(self.every) // 2]):
            if candidate not in takes and (len(takes) == 1 or len(set(takes.values())) > 1):
                with contextlib.suppress(TypeError, ValueError):  # a step may take only some numbers
                    takes[candidate] = _leaves(self.lower(candidate).args_info)
        cuts = sorted(c for c in takes if c.number > 1)  # a window of one may hold no sum, and differ by that
        large, small = (cuts if len(cuts) > 1 else sorted(takes))[0], max(takes)
        before, after = (Counter(takes[c]) for c in (large, small))
        size = lambda shapes: sum(math.prod(shape) * times for shape, times in shapes.items())
        return 2 * size(after - before) < (1 + small.rows / large.rows) * size(before - after)

    def _calls(self, candidate: Candidate) -> float:
        """Returns the calls of an update, by rows."""
        return self.rows / candidate.rows if candidate.number > 1 and self.by_call else 1.0

    def _of_update(self, candidate: Candidate) -> int | None:
        """Returns the FLOPs of an update; a branch is taken in one of its calls."""
        flops = self._flops[candidate]
        return None if flops is None else round(self._calls(candidate) * flops.always) + flops.branches

    def _compile(self, candidate: Candidate) -> None:
        lowered = self.lower(candidate)
        self.keys[candidate] = text_key(lowered, self.target)
        self._check_differs(candidate)
        self._takes[candidate] = _leaves(lowered.args_info)
        self.found[candidate] = footprint(lowered, self.target)
        self._flops[candidate] = flops_of(lowered)

    def _check_differs(self, candidate: Candidate) -> None:
        same = [c for c, key in self.keys.items() if c.rows != candidate.rows and key == self.keys[candidate]]
        if same:
            raise ValueError(
                f"make_step must cut the batch as it is told: {same[0].number} and {candidate.number} micro-batches "
                f"are the same program, so all cost the same. {PASS_ON}"
            )


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
