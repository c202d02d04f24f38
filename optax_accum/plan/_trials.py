"""One planned step with one option: lowered once, compiled for each number of micro-batches tried."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_accum._arguments.signature import signature_of
from optax_accum._core.messages import counted
from optax_accum.accelerators._footprint import Footprint, footprint, largest_product, text_key
from optax_accum.accelerators._targets import Target
from optax_accum.plan import _search as search
from optax_accum.plan._plan import Compiled
from optax_accum.plan._search import Candidate

MakeStep = Callable[..., Any]  # returns a `jax.stages.Lowered`


class Trial:
    """A step with one of the options, and its compiled programs.

    Attributes:
      option: the option, None without one.
      place: the place of the option among the given ones.
      every: the numbers of micro-batches to choose from; those that do not lower are left out.
      peaks: the bytes of what was compiled.
      errors: what numbers raised that do not lower.
    """

    def __init__(self, make_step: MakeStep, target: Target, place: int, given: tuple[Any, ...]):
        self.make_step, self.target, self.place, self.given = make_step, target, place, given
        self.option = given[0] if given else None
        self.every: list[Candidate] = []
        self.errors: dict[int, ValueError] = {}
        self._lowered: dict[int, jax.stages.Lowered] = {}
        self.found: dict[Candidate, Footprint] = {}
        self.keys: dict[Candidate, str] = {}
        self.peaks: search.Peaks = {}

    def prepare(self, every: Sequence[Candidate]) -> None:
        """Lowers the fewest micro-batches that lower, and the next, before anything is compiled."""
        self.every = [*every]
        for place in (0, 1):
            while len(self.every) > place and self.lowered(self.every[place].number) is None:
                del self.every[place]
        if len(self.every) > 1:
            self._check_number(*self.every[:2])

    def search(self, limit: float, advance: Callable[[str, int], None]) -> None:
        """Compiles the numbers that the search proposes; the whole batch alone, if no cut can help."""

        def measure(candidate: Candidate) -> float | None:
            advance(f"{candidate.number} of {counted(candidate.rows, 'row')}", 0)
            if self.lowered(candidate.number) is None:
                return None
            self._compile(candidate)
            advance("", 1)
            return self.found[candidate].peak

        self.peaks = search.search(self.every, measure, limit, lambda: self.least)
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
        wants_target = "target" in signature_of(self.make_step).keywords
        try:
            lowered = self.make_step(number, *self.given, **({"target": self.target} if wants_target else {}))
        except Exception as error:
            raise ValueError(
                f"make_step({', '.join(map(repr, (number, *self.given)))}) must return a lowered step: it raised "
                f"{type(error).__name__}: {str(error).rstrip('.')}.{_SOME_NUMBERS * (number > 1)}"
            ) from error
        lowered = getattr(lowered, "lowered", lowered)  # of a step in two programs, or of nnx.jit
        if not isinstance(lowered, jax.stages.Lowered):
            raise TypeError(
                f"make_step({number}) must return a lowered step: it returned {type(lowered).__name__}. Return "
                "jax.jit(step).lower(*shapes)."
            )
        return lowered

    def compiled(self, limit: float) -> list[Compiled]:
        """Returns the compiled programs, fewest micro-batches first."""
        return [Compiled(self.option, c, self.found[c], self.peaks[c] <= limit, self.place) for c in sorted(self.found)]

    @property
    def skipped(self) -> list[str]:
        """Why numbers were left out, or the option."""
        return [str(error) for error in self.errors.values()][: None if self.every else 1]

    @property
    def least(self) -> float:
        """The bytes of arguments, and of outputs that replace none; 0 where they shrink with the micro-batches."""
        shapes = {_shapes(self._lowered[candidate.number]) for candidate in self.every[:2]}
        found = self.found[min(self.found)]
        return found.arguments + found.unaliased if len(shapes) == 1 else 0.0

    @property
    def ignores_number(self) -> bool:
        """Whether micro-batches of all sizes cost the same."""
        known = {c.rows: peak for c, peak in self.peaks.items() if math.isfinite(peak)}
        return len(known) > 1 and len(set(known.values())) == 1

    def _compile(self, candidate: Candidate) -> None:
        lowered = self._lowered[candidate.number]
        self.keys[candidate] = text_key(lowered, self.target)
        self._check_differs(candidate)
        self.found[candidate] = footprint(lowered, self.target)

    def _check_number(self, *two: Candidate) -> None:
        """Raises where fewer micro-batches have the smaller products."""
        large, small = (largest_product(self._lowered[candidate.number]) for candidate in two)
        if 1.5 * large < small:
            raise ValueError(
                "make_step must take the number of micro-batches, and seems to take their rows: the largest product of "
                f"make_step({two[0].number}) has {large:.2e} FLOPs, that of make_step({two[1].number}) {small:.2e}. "
                f"{PASS_ON}"
            )

    def _check_differs(self, candidate: Candidate) -> None:
        same = [c for c, key in self.keys.items() if c.rows != candidate.rows and key == self.keys[candidate]]
        if same:
            raise ValueError(
                f"make_step must cut the batch as it is told: {same[0].number} and {candidate.number} micro-batches "
                f"are the same program, so all cost the same. {PASS_ON}"
            )


PASS_ON = "Pass its number on, value_and_grad(loss, num_microbatches=num_microbatches)."
_SOME_NUMBERS = " If it takes only some numbers, pass them as candidates=, such as the divisors of the batch."


def _shapes(lowered: jax.stages.Lowered) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of a step's arguments and results."""
    return tuple(leaf.shape for leaf in jax.tree.leaves((lowered.args_info, lowered.out_info)))
