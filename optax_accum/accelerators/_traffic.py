"""The bytes that a compiled program moves through the device's memory."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from optax_accum.accelerators._programs import FUSIONS, Computation, Instruction, ProgramText, Ran, size_of


@dataclasses.dataclass(frozen=True)
class Part:
    """The bytes that one part of a program moves when it runs.

    Attributes:
      within: the branches that must be taken and the loops of unknown
        length that must run, from the outside in, such as
        `("branch 0 of conditional", "iteration of while")`; none for a part
        that always runs.
      bytes: read from and written to the device's memory, trip counts
        included.
      host: those of them that come from the host's memory or go there.
      copies: how many copies of arrays of at least `min_copy` bytes it
        makes, trip counts included.
    """

    within: tuple[str, ...]
    bytes: int
    host: int
    copies: int


NOTHING = Part(("no iteration",), 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What `count_traffic` found; prints as a table.

    Attributes:
      parts: what always runs, then each branch of each conditional, and one
        iteration of each loop of unknown length.
      temporary: bytes of temporary memory, or None where only a text was
        given.
    """

    parts: tuple[Part, ...]
    temporary: int | None

    @property
    def always(self) -> Part:
        """What always runs.

        It runs whichever branches are taken and however often loops of
        unknown length run.
        """
        return self.parts[0]

    @property
    def least(self) -> int:
        """The bytes of the branches that move least: it only accumulates.

        Each conditional takes the branch that moves least. A loop of
        unknown length does not run.
        """
        return self._sum(self.always, min)

    @property
    def most(self) -> int:
        """The bytes of the branches that move most: it updates.

        Each conditional takes the branch that moves most. A loop of unknown
        length runs once.
        """
        return self._sum(self.always, max)

    def _sum(self, part: Part, of: Callable[[list[int]], int]) -> int:
        return part.bytes + sum(of([self._sum(way, of) for way in ways]) for ways in self._inside(part))

    def _inside(self, outer: Part) -> list[list[Part]]:
        """The ways through each conditional and each loop that stand in a part."""
        ways: dict[str, list[Part]] = {}
        for part in self.parts:
            if part.within[:-1] == outer.within and part.within:
                kind, of = part.within[-1].split(" of ")
                ways.setdefault(of, [] if kind != "iteration" else [NOTHING]).append(part)
        return list(ways.values())

    def __str__(self) -> str:
        lines = []
        for part in self.parts:
            where = ", ".join(part.within) or "always"
            lines.append(f"{where:<32} {part.bytes:>16,} bytes, {part.copies} copies")
        temporary = "" if self.temporary is None else f"\n{'temporary memory':<32} {self.temporary:>16,} bytes"
        return "\n".join(lines) + temporary


def count_traffic(compiled: Any, *, min_copy: int = 1 << 20) -> Traffic:
    """Returns the bytes that each part of a compiled program moves.

    One part always runs, and each branch of a conditional is another. On an
    accelerator, an optimizer's step waits for memory, so these bytes are
    its cost. They are summed over operands and results of fused
    instructions; of an indexed array only the part that is read or written
    counts.

    Args:
      compiled: `jax.jit(f).lower(...).compile()`, for a CPU, a GPU or a
        TPU, or the text of its `as_text()`.
      min_copy: the bytes of a copy that counts.

    Returns:
      A `Traffic`: `least` and `most` are the bytes of a run, whichever
      branches it takes; `parts` those of each part.

    Raises:
      TypeError, ValueError: `compiled` is no compiled program.

    Guarantees:
      * A loop of n steps: counts n times.
      * A loop whose length is known only when running: one iteration is a part
        of its own.
      * A conditional inside a branch: a part of its own.
      * A fusion, also an asynchronous one: what goes in and comes out; a
        slice of an operand, if it reads only that.
      * An update of a slice (`dynamic_update_slice`): the slice, written,
        and what it is made of, read.
      * An array in a TPU's vector memory (VMEM): free; its copies from and
        to the device's memory count once.
      * What the hardware's caches save: not known; it counts.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_accum.accelerators import count_traffic
      >>> x = jnp.ones((512, 512))
      >>> step = jax.jit(lambda x: x + 1, donate_argnums=0)
      >>> compiled = step.lower(x).compile()
      >>> count_traffic(compiled).always.bytes // x.nbytes  # read, written
      2

    References:
      The text is XLA's HLO (https://openxla.org/xla/operation_semantics).
    """
    program = ProgramText.read(compiled, "count_traffic")
    parts: dict[tuple[str, ...], Part] = {(): Part((), 0, 0, 0)}
    for ran in program.run():
        cost = _Cost(program, ran)
        old = parts.get(ran.within, Part(ran.within, 0, 0, 0))
        parts[ran.within] = Part(
            ran.within,
            old.bytes + ran.times * cost.bytes,
            old.host + ran.times * cost.host,
            old.copies + ran.times * cost.copies(min_copy),
        )
    memory = None if isinstance(compiled, str) else compiled.memory_analysis()
    return Traffic(tuple(parts.values()), memory and memory.temp_size_in_bytes)


# Instructions that move nothing; of loops, branches and calls, the instructions inside are counted.
_NAMES = ("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "domain", "optimization-barrier")
_CALLS = ("while", "conditional", "call", "async-start", "async-update", "copy-start", "slice-start")
_FREE = frozenset([*_NAMES, *_CALLS, "after-all", "add-dependency", "partition-id", "replica-id"])
_SLICES = ("dynamic-slice", "slice", "gather")
_HOST, _VMEM = "S(5)", "S(1)"  # spaces of memory, as layouts name them


class _Cost:
    """The bytes that one instruction moves."""

    def __init__(self, program: ProgramText, ran: Ran):
        self.program, self.line, self.computation = program, ran.instruction, ran.computation
        self.elsewhere = (_HOST, _VMEM) if program.on_tpu else (_HOST,)

    @property
    def bytes(self) -> int:
        """The bytes that it reads from and writes to the device's memory."""
        opcode = self.line.opcode
        if opcode in _FREE:
            return 0
        if opcode == "copy-done":
            return sum(map(self._size, self._ends()))
        if opcode == "slice-done":  # on a TPU, into its vector memory
            return size_of(self.line.shape)
        if opcode.endswith("-done"):
            return 0
        if opcode in _SLICES:
            return 2 * self._size(self.line.shape)
        if opcode == "dynamic-update-slice":
            return 2 * self._of(self.line.operands[1])
        if fused := self._inside(self.line):
            return self._fused(fused)
        taken, given = sum(map(self._of, self.line.operands)), self._size(self.line.shape)
        return max(given, taken) if opcode.endswith("-start") and given > taken else taken + given

    @property
    def host(self) -> int:
        """The bytes of it that come from the host's memory or go there."""
        ends = self._ends() if self.line.opcode in ("copy", "copy-done") else []
        return max((size_of(shape) for shape in ends if _HOST in shape), default=0)

    def copies(self, least: int) -> int:
        """1 for a copy of at least so many bytes inside the device's memory, else 0."""
        line = fused.root if (fused := self._inside(self.line)) else self.line
        is_copy = line.opcode in ("copy", "copy-done")
        return int(is_copy and all(self._size(shape) >= least for shape in self._ends()))

    def _ends(self) -> list[str]:
        """The shapes that a copy reads and writes."""
        taken = [self.computation[name] for name in self.line.operands]
        if self.line.opcode == "copy-done":
            return re.findall(_ARRAY, taken[0].shape)[:2]
        return [self.line.shape, *(line.shape for line in taken)]

    def _of(self, name: str) -> int:
        return self._size(self.computation[name].shape)

    def _size(self, shape: str) -> int:
        """The bytes of a shape, or of all shapes in a tuple, that lie in the device's memory."""
        arrays = re.findall(_ARRAY, shape)
        return sum(size_of(array) for array in arrays if not any(space in array for space in self.elsewhere))

    def _fused(self, inside: Computation) -> int:
        """The bytes of a fusion: read of its operands, written of its results."""
        names = inside.root.operands if inside.root.opcode == "tuple" else (inside.root.name,)
        written = sum(self._written(inside, name) for name in names)
        return written + sum(self._taken(inside, number, name) for number, name in enumerate(self.line.operands))

    def _written(self, inside: Computation, name: str) -> int:
        """The bytes that a fusion writes of a result: of one that it updates in place, the slice."""
        whole, result = self._size(inside[name].shape), inside.origin(name)
        while fused := self._inside(result):
            inside, result = fused, fused.origin(fused.root.name)
        return inside.sizes(result.operands[1:2]) if whole and result.opcode == "dynamic-update-slice" else whole

    def _taken(self, inside: Computation, number: int, operand: str) -> int:
        """The bytes that a fusion reads of an operand: all, unless it looks at slices of it only."""
        whole = self._of(operand)
        slices = self._slices(inside, inside.parameter(number)) if whole else 0
        return whole if slices is None else min(whole, slices)

    def _slices(self, inside: Computation, value: Instruction) -> int | None:
        """The bytes of the slices that a fusion reads of a value; None where it reads all of it."""
        users = [(line, at) for line in inside.values() for at, name in enumerate(line.operands) if name == value.name]
        read = [self._slice(inside, user, at) for user, at in users]
        return None if value is inside.root or None in read else sum(filter(None, read))

    def _slice(self, inside: Computation, user: Instruction, at: int) -> int | None:
        """The bytes that an instruction in a fusion reads of its operand `at`; None for all."""
        if user.opcode == "bitcast":
            return self._slices(inside, user)
        if fused := self._inside(user):
            return self._slices(fused, fused.parameter(at))
        if at == 0 and user.opcode in (*_SLICES, "dynamic-update-slice"):
            return size_of(user.shape) if user.opcode in _SLICES else 0
        return None

    def _inside(self, line: Instruction) -> Computation | None:
        """The computation of a fusion; None for another instruction."""
        return self.program.computations[line.inlined[0]] if line.opcode in FUSIONS and line.inlined else None


_ARRAY = re.compile(r"\b[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?")
