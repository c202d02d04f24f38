"""Owns the plan: the fewest micro-batches that fit, of programs that are compiled and not run. Knows no model."""

import dataclasses
import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from optax_accum._core import checks
from optax_accum._tools import budgets, search
from optax_accum._tools.footprint import Footprint, count_flops, footprint, text_key
from optax_accum._tools.plan import Compiled, Plan
from optax_accum._tools.search import Candidate
from optax_accum._tools.targets import Target
from optax_accum._tools.targets import target as find_target

MakeStep = Callable[..., Any]  # returns a `jax.stages.Lowered`


def plan_microbatches(
    make_step: MakeStep,
    global_batch: int,
    *,
    target: str | Target | None = None,
    budget: int | float | str | None = None,
    num_devices: int | None = None,
    options: Sequence[Any] | None = None,
    candidates: Iterable[int] | None = None,
    safety: float = 0.9,
    max_compilations: int = 6,
    progress: bool = True,
) -> Plan:
    """Returns the fewest micro-batches with which a step fits, before anything is allocated.

    The step is compiled from shapes, for the accelerator that is here or one that is not, and the compiler tells what
    it holds at its peak:

        arguments + outputs - donated arguments that outputs take the place of + temporary memory + the program

    which is close to a line in the rows of a micro-batch. The line proposes the next size, a compilation decides: what
    is returned was compiled, and fits.

    Args:
      make_step: `make_step(num_microbatches)` returns `jax.jit(step).lower(*shapes)`, of any step: ours, or one of your
        own. With a parameter `target` it is given the `Target` to lower for. `optax_accum.plan.of_loss` and
        `optax_accum.plan.of_step` make one.
      global_batch: the rows of one update, over all devices.
      target: an accelerator, by its name or as `optax_accum.accelerators.target` returns it; None for the devices here.
      budget: the memory of one device: bytes, or text ("80GB", "7.5 GiB"). By default the target's own; of a CPU what
        is free.
      num_devices: how many devices share a micro-batch: those of a `Target` or a topology, else 1.
      options: the step is planned with each, as `make_step(num_microbatches, option)`: policies of `jax.checkpoint`,
        offload, lengths. Chosen is what fits with the fewest FLOPs (nothing computed twice), then with the fewest
        micro-batches.
      candidates: the numbers of micro-batches to choose from; by default all, since the last may be smaller. For a step
        that takes only some, such as the divisors of the batch.
      safety: the part of the budget to use. The compiler does not count other processes, fragmentation, and what the
        runtime keeps for itself.
      max_compilations: for each option.
      progress: whether to show a bar over the compilations, with tqdm if it is installed.

    Returns:
      A `Plan`. Printed it is a table; it has `num_microbatches`, `sizes`, `option`, `rows` and `plot()`.

    Raises:
      ValueError: nothing fits: the smallest peak, the budget, and the ways on. A budget or a number that cannot be; a
        builder that raises, ignores its number, or lowers for other devices.
      TypeError: the builder returns no lowered step.
      RuntimeError: the target's compiler is not installed, or tells nothing about memory.

    Guarantees:
      | case | result |
      |---|---|
      | the whole batch fits | one micro-batch, one compilation |
      | memory grows with the rows of a micro-batch | no size with fewer was compiled and fits |
      | it does not | the widest gap is halved while compilations are left; `Plan.open`, and the table says so |
      | `max_compilations` are spent | the fewest that were compiled and fit; likewise |
      | a compiler that stops for want of memory (TPU) | does not fit; its bytes are what it says |
      | a step that was compiled in this process | is not compiled again |
      | several devices | bytes of one; rows of the device that has most |
      | a CPU as several devices | each has its share of what is free |

    Example:
      >>> import jax, jax.numpy as jnp, optax_accum
      >>> loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> w, batch = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((1024, 64), "float32")
      >>> def make_step(num_microbatches):
      ...     step = optax_accum.value_and_grad(loss, num_microbatches=num_microbatches)
      ...     return jax.jit(step).lower(w, batch)
      >>> plan = optax_accum.plan_microbatches(make_step, 1024, budget="1GB", progress=False)
      >>> plan.num_microbatches, plan.sizes
      (1, (1024,))
    """
    rows = _positive("global_batch", global_batch)
    most = _most(max_compilations)
    _check_safety(safety)
    on, devices = _target(target, num_devices)
    size = budgets.memory_of(on, here=target is None, devices=devices) if budget is None else budgets.as_bytes(budget)
    limit = safety * size
    every = _candidates(-(-rows // devices), candidates)
    steps = [_Step(make_step, option, on, given) for option, given in _options(options)]
    with _bar(progress, most * len(steps)) as advance:
        for step in steps:
            step.search(every, limit, most, advance)
    return _chosen(
        steps, every, Plan(None, None, rows, devices, on.name, size, limit, (), getattr(make_step, "copy", None))
    )


class _Step:
    """A step with one of the options, and what was compiled of it."""

    def __init__(self, make_step: MakeStep, option: Any, target: Target, given: bool):
        self.make_step, self.option, self.target = make_step, option, target
        self.given = (option,) if given else ()
        self.found: dict[Candidate, Footprint] = {}
        self.flops: dict[Candidate, int | None] = {}
        self.keys: dict[Candidate, str] = {}
        self.peaks: search.Peaks = {}

    def search(self, every: Sequence[Candidate], limit: float, most: int, advance: Callable[[str, int], None]) -> None:
        """Compiles what the search proposes."""

        def measure(candidate: Candidate) -> float:
            advance(f"{candidate.number} of {candidate.rows} rows", 0)
            lowered = self.lower(candidate.number)
            self.keys[candidate] = text_key(lowered, self.target)
            self._check_differs(candidate)
            self.found[candidate] = footprint(lowered, self.target)
            self.flops[candidate] = count_flops(lowered)
            self._check_arguments(candidate, limit)
            advance("", 1)
            return self.found[candidate].peak

        self.peaks = search.search(every, measure, limit, most)

    def lower(self, number: int) -> jax.stages.Lowered:
        """Returns the step as it is lowered with so many micro-batches."""
        wants_target = "target" in _parameters(self.make_step)
        try:
            lowered = self.make_step(number, *self.given, **({"target": self.target} if wants_target else {}))
        except Exception as error:
            raise ValueError(
                f"make_step({', '.join(map(repr, (number, *self.given)))}) must return a lowered step: it raised "
                f"{type(error).__name__}: {error} If it takes only some numbers, pass them as candidates=, such as "
                "the divisors of the batch."
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
        return [Compiled(self.option, c, self.found[c], fits(c), self.flops[c]) for c in sorted(self.found)]

    @property
    def cost(self) -> float:
        """The FLOPs of an update; where its loops have no known length those of the whole batch at once."""
        known = [flops for flops in self.flops.values() if flops is not None]
        return float(min(known, default=0))

    def _check_differs(self, candidate: Candidate) -> None:
        same = [c for c, key in self.keys.items() if c.rows != candidate.rows and key == self.keys[candidate]]
        if same:
            raise ValueError(
                f"make_step must cut the batch as it is told: {same[0].number} and {candidate.number} micro-batches "
                "are the same program, so all cost the same. Pass its number on, value_and_grad(loss, "
                "num_microbatches=num_microbatches)."
            )

    def _check_arguments(self, candidate: Candidate, limit: float) -> None:
        found = self.found[candidate]
        if found.arguments + found.kept > limit:
            raise ValueError(
                f"The budget must hold what the step is given and returns: {budgets.as_text(found.arguments)} of "
                f"arguments and {budgets.as_text(found.kept)} of outputs that replace none, limit="
                f"{budgets.as_text(limit)}. No number of micro-batches changes that. {_WAYS_FOR_ARGUMENTS}"
            )


_WAYS_FOR_ARGUMENTS = (
    "Donate parameters and state (donate_argnums), shard them (FSDP, or ZeRO-1 with reduce_to), or keep the moments on "
    'the host (state_sharding(tx, params, offload="inner_opt_state")).'
)
_WAYS = (
    "Recompute activations (jax.checkpoint, and its policies as options=), offload them, shard the parameters (FSDP), "
    "or cut layer by layer (microbatched_apply): docs/planning.md."
)


def _chosen(steps: Sequence[_Step], every: Sequence[Candidate], plan: Plan) -> Plan:
    """Returns the plan with what was compiled, and the cheapest that fits."""
    compiled = tuple(one for step in steps for one in step.compiled(plan.limit))
    plan = dataclasses.replace(plan, compiled=compiled)
    fitting = [(step, fit) for step in steps if (fit := search.best(step.peaks, plan.limit))]
    if not fitting:
        least = min(compiled, key=lambda one: one.footprint.peak)
        error = ValueError(
            f"Nothing fits: the smallest peak is {budgets.as_text(least.footprint.peak)}, with "
            f"{least.candidate.number} micro-batches, and the limit {budgets.as_text(plan.limit)}, of a budget of "
            f"{budgets.as_text(plan.budget)}. {_WAYS}"
        )
        error.add_note(str(plan))
        raise error
    least = min(step.cost for step, _ in fitting) or 1.0
    step, fit = min(fitting, key=lambda one: (round(one[0].cost / least, 2), one[1]))
    more = search.proposed(every, step.peaks, plan.limit) is not None
    return dataclasses.replace(
        plan, num_microbatches=fit.number, option=step.option, open=more or not search.grows(step.peaks)
    )


def _target(target: str | Target | None, num_devices: int | None) -> tuple[Target, int]:
    """Returns the accelerator, and how many of its devices share a micro-batch."""
    number = checks.as_positive("num_devices", num_devices)
    if isinstance(target, Target):
        on = target
    elif target is None:
        on = find_target(None, number or 1)
    else:
        on = find_target(target, number)
    if number and number != len(on.devices):
        raise ValueError(
            f"num_devices must be the number of devices of the target: num_devices={number}, and {on.name} has "
            f"{len(on.devices)}. Leave it out."
        )
    return on, len(on.devices)


def _most(max_compilations: int) -> int:
    most = _positive("max_compilations", max_compilations)
    if most < 2:
        raise ValueError(
            "max_compilations must be at least 2, the whole batch and the smallest micro-batches: max_compilations="
            f"{most}. Pass 6, the default, or one number as candidates=."
        )
    return most


def _check_safety(safety: Any) -> None:
    rule = f"safety must be a number above 0 and at most 1: safety={safety!r}. Pass 0.9 to use 90 % of the budget."
    if isinstance(safety, bool) or not isinstance(safety, int | float | np.integer | np.floating):
        raise TypeError(rule)
    if not 0 < safety <= 1:
        raise ValueError(rule)


def _candidates(rows: int, numbers: Iterable[int] | None) -> list[Candidate]:
    if numbers is None:
        return search.candidates(rows)
    asked = [_positive("candidates", number) for number in numbers]
    if not asked or max(asked) > rows:
        raise ValueError(
            f"There must be a row for each micro-batch on each device: candidates={asked}, and there are {rows} rows. "
            f"Pass numbers from 1 to {rows}."
        )
    return search.candidates(rows, asked)


def _options(options: Sequence[Any] | None) -> list[tuple[Any, bool]]:
    if options is None:
        return [(None, False)]
    if isinstance(options, str) or not options:
        raise ValueError(f'options must be a sequence of what make_step takes second: options={options!r}. Pass ["a"].')
    return [(option, True) for option in options]


def _positive(name: str, value: Any) -> int:
    number = checks.as_positive(name, value)
    if number is None:
        raise TypeError(f"{name} must be an integer >= 1: {name}=None. Pass 1 for the smallest.")
    return number


def _parameters(make_step: MakeStep) -> Iterable[str]:
    try:
        return inspect.signature(make_step).parameters
    except (TypeError, ValueError):
        return ()


@contextmanager
def _bar(progress: bool, total: int) -> Generator[Callable[[str, int], None]]:
    """Yields what is told which program comes, and how many are done; it shows a bar, if tqdm is there."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        progress = False
    if not progress:
        yield lambda what, done: None
        return
    with tqdm(total=total, desc="compiling", unit="program") as bar:  # type: ignore[possibly-unbound]

        def advance(what: str, done: int) -> None:
            bar.set_postfix_str(what, refresh=bool(what))
            bar.update(done)

        yield advance
        bar.total = bar.n  # fewer were needed
        bar.refresh()
