"""The collectives of a compiled program: which, where, how often."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from optax_accum._shared.checks import counted
from optax_accum.accelerators import _programs as programs
from optax_accum.accelerators._programs import Computation, Instruction

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program.

    Attributes:
      kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`,
        `"all-to-all"`, `"collective-permute"`, ...
      place: `"branch"`: inside a conditional, so it may not run; else
        `"loop"`: inside a loop; else `"outside"`.
      times: how often it runs when its branch is taken: the product of the
        trip counts of the loops around it.
      known: whether all these trip counts are known when compiling; those
        that are not count as 1.
      bytes: of one run, on one device: the larger of what goes in and what
        comes out.
      group: how many devices take part, or None where the program does not
        say.
      source: the operation of the user's program that it came from, as the
        compiler names it.
      behind: how many matrix products or convolutions stand between its
        start and its end; a loop that holds some counts as one. 0 for a
        collective that is awaited at once: nothing hides it.
      beside: the bytes that these products read and write. A large
        collective is not hidden by a small product, so compare them.
    """

    kind: str
    place: str
    times: int
    known: bool
    bytes: int
    group: int | None
    source: str
    behind: int = 0
    beside: int = 0


@dataclasses.dataclass(frozen=True)
class Collectives:
    """What `count_collectives` found; prints as a table.

    If any bytes are hidden, the table's last line says how many, and how
    many are exposed.

    Attributes:
      operations: the collective operations, in the order of the program.
      count: how many run, trip counts included.
      bytes: how many bytes they move on one device, trip counts included.
      hidden: those of them that move while products run.
      exposed: the others.
    """

    operations: tuple[Collective, ...]

    def select(
        self, kind: str | Iterable[str] | None = None, place: str | Iterable[str] | None = None, min_bytes: int = 0
    ) -> "Collectives":
        """Selects by kind and place.

        Returns those of the given kinds and places that move at least
        `min_bytes` in one run.
        """
        kinds, places = _names(kind, KINDS, "kind"), _names(place, ("outside", "loop", "branch"), "place")
        chosen = (op for op in self.operations if op.kind in kinds and op.place in places and op.bytes >= min_bytes)
        return Collectives(tuple(chosen))

    @property
    def count(self) -> int:
        """How many run, trip counts included."""
        return sum(op.times for op in self.operations)

    @property
    def bytes(self) -> int:
        """How many bytes they move on one device, trip counts included."""
        return sum(op.times * op.bytes for op in self.operations)

    @property
    def hidden(self) -> int:
        """The bytes that move beside a product, so that they may cost no time."""
        return self.bytes - self.exposed

    @property
    def exposed(self) -> int:
        """How many of the bytes move while no product runs."""
        return sum(op.times * op.bytes for op in self.operations if not op.behind)

    def __len__(self) -> int:
        return len(self.operations)

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.operations)

    def __str__(self) -> str:
        if not self.operations:
            return "no collectives"
        lines = []
        for place, where in {"outside": "outside", "branch": "in branches", "loop": "in loops"}.items():
            operations = self.select(place=place)
            for kind, *products in sorted({(op.kind, op.behind, op.beside) for op in operations}):
                some = Collectives(tuple(op for op in operations.select(kind) if [op.behind, op.beside] == products))
                behind, beside = products
                hidden = f", behind {counted(behind, 'product')} of {beside:,} bytes" if behind else ""
                unknown = "" if all(op.known for op in some) else ", in loops of unknown length counted once"
                lines.append(f"{kind:<20} {where:<12} {some.count:>6} runs {some.bytes:>14,} bytes{hidden}{unknown}")
        if self.hidden:
            sums = f"{self.bytes:>14,} bytes, {self.hidden:,} hidden, {self.exposed:,} exposed"
            lines.append(f"{'in all':<33} {self.count:>6} runs {sums}")
        return "\n".join(lines)


def count_collectives(compiled: Any) -> Collectives:
    """Returns the collectives of a compiled program, by kind and by place.

    The place tells whether a collective stands in a loop or in a branch.

    Args:
      compiled: `jax.jit(f).lower(...).compile()`, or the text of its
        `as_text()`.

    Returns:
      A `Collectives`: select by kind and place, then read `count` and
      `bytes`. `bytes` are those of one device.

    Raises:
      TypeError: `compiled` is neither.
      ValueError: the text is not that of a compiled program.

    Guarantees:
      * A collective in a loop of n steps: `times` is n, and n m inside a
        loop of m steps.
      * A loop whose length is known only when running: `times` is 1,
        `known` is False.
      * A collective in a branch, in a loop too: `place` is `"branch"`; it
        may not run.
      * Several arrays in one operation, as the compiler combines them: one
        operation, the bytes of all.
      * An asynchronous pair (`-start`, `-done`), or one of a TPU, fused
        with what it runs beside (`AsyncCollectiveStart`, `...Done`): one
        operation; `behind` counts the products between them.
      * A TPU's fusion of an all-reduce and the slice that is kept: a
        reduce-scatter.
      * A function that is called from several places: its collectives, for
        each of them.

    Example:
      >>> import jax, jax.numpy as jnp, optax_accum
      >>> compiled = jax.jit(jnp.sum).lower(jnp.ones(8)).compile()
      >>> optax_accum.sharding.count_collectives(compiled).count
      0

    References:
      The text is XLA's HLO (https://openxla.org/xla/operation_semantics).
    """
    operations: list[Collective] = []
    program = programs.ProgramText.read(compiled, "count_collectives")
    behind: dict[str, tuple[int, int]] = {}  # of a started operation, by the computation that it runs
    for ran in program.run(into_fusions=True):
        products = behind.get(ran.computation.name, (0, 0))
        if program.stage(ran.instruction) == "Start" and '"is_sync":true' not in ran.instruction.rest:
            lines = program.behind(ran.computation, ran.instruction)
            sizes = [ran.computation.sizes(line.operands) + programs.size_of(line.shape) for line in lines]
            products = len(lines), sum(sizes)
        behind.update(dict.fromkeys(ran.instruction.inlined, products))
        kind = ran.instruction.opcode.removesuffix("-start")
        if ran.computation.name.startswith("all-reduce-scatter"):  # a TPU's, fused: an all-reduce and a slice
            kind = kind.replace("all-reduce", "reduce-scatter")
        if kind in KINDS and program.stages.get(ran.computation.name) not in ("Step", "Done"):  # they name it again
            place = "branch" if ran.in_branch else "loop" if ran.in_loop else "outside"
            source = re.search(r'op_name="([^"]*)"', ran.instruction.rest)
            group, moved = _group(ran.instruction.rest), _moved(ran.computation, ran.instruction)
            name = source[1] if source else ""
            operations.append(Collective(kind, place, ran.times, ran.known, moved, group, name, *products))
    return Collectives(tuple(operations))


_CONTEXT = re.compile(r"u32\[\](?:\{[^}]*\})?")  # two numbers beside the array that a TPU permutes: they are not sent


def _moved(computation: Computation, instruction: Instruction) -> int:
    """The bytes read or the bytes written, whichever are more; a `-start` may give back its operands, too."""
    shape = instruction.shape
    if instruction.opcode == "collective-permute-start":
        shape = _CONTEXT.sub("", shape)
    taken, given = computation.sizes(instruction.operands), programs.size_of(shape)
    if instruction.opcode.endswith("-start") and given > taken:
        given -= taken
    return max(taken, given)


def _group(rest: str) -> int | None:
    """The number of devices in a replica group, in any of the three notations."""
    if listed := re.search(r"replica_groups=\{\{([\d,\s]+)\}", rest):
        return listed[1].count(",") + 1
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):
        return int(iota[2])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", mesh[2]) if name in sizes)
    return None


def _names(given: str | Iterable[str] | None, allowed: tuple[str, ...], what: str) -> tuple[str, ...]:
    names = allowed if given is None else (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if name not in allowed:
            raise ValueError(f"{what} must be one of {', '.join(allowed)}: {name!r}.")
    return names
