"""Owns the reading of a compiled program: which collectives stand where. Runs nothing."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

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
      kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`, `"collective-permute"`, ...
      place: `"branch"`: inside a conditional, so it may not run; else `"loop"`: inside a loop; else `"outside"`.
      times: how often it runs when its branch is taken: the product of the trip counts of the loops around it.
      known: whether all these trip counts are known when compiling; those that are not count as 1.
      bytes: of one run, on one device: the larger of what goes in and what comes out.
      group: how many devices take part, or None where the program does not say.
      source: the operation of the user's program that it came from, as the compiler names it.
    """

    kind: str
    place: str
    times: int
    known: bool
    bytes: int
    group: int | None
    source: str


@dataclasses.dataclass(frozen=True)
class Collectives:
    """What `count_collectives` found; prints as a table.

    Attributes:
      operations: the collective operations, in the order of the program.
      count: how many run, trip counts included.
      bytes: how many bytes they move on one device, trip counts included.
    """

    operations: tuple[Collective, ...]

    def select(
        self, kind: str | Iterable[str] | None = None, place: str | Iterable[str] | None = None, min_bytes: int = 0
    ) -> "Collectives":
        """Returns those of the given kinds and places that move at least `min_bytes` in one run."""
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

    def __len__(self) -> int:
        return len(self.operations)

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.operations)

    def __str__(self) -> str:
        if not self.operations:
            return "no collectives"
        places = [place for place in ("outside", "branch", "loop") if self.select(place=place)]
        lines = []
        for place in places:
            here = self.select(place=place)
            for kind in sorted({op.kind for op in here}):
                some = here.select(kind)
                unknown = "" if all(op.known for op in some) else ", in loops of unknown length counted once"
                where = {"outside": "outside", "branch": "in branches", "loop": "in loops"}[place]
                lines.append(f"{kind:<20} {where:<12} {some.count:>6} runs {some.bytes:>14,} bytes{unknown}")
        return "\n".join(lines)


def count_collectives(compiled: Any) -> Collectives:
    """Returns the collectives of a compiled program: by kind, and by whether they stand in loops or in branches.

    Args:
      compiled: `jax.jit(f).lower(...).compile()`, or the text of its `as_text()`.

    Returns:
      A `Collectives`: select by kind and place, then read `count` and `bytes`. `bytes` are those of one device.

    Raises:
      TypeError: `compiled` is neither.
      ValueError: the text is not that of a compiled program.

    Guarantees:
      | case | result |
      |---|---|
      | a collective in a loop of n steps | `times` is n, and n m inside a loop of m steps |
      | a loop whose length is known only when running | `times` is 1, `known` is False |
      | a collective in a branch, in a loop too | `place` is `"branch"`: it may not run |
      | several arrays in one operation, as the compiler combines them | one operation, the bytes of all |
      | an asynchronous pair (`-start`, `-done`) | one operation |
      | a function that is called from several places | its collectives, for each of them |

    Example:
      >>> import jax, jax.numpy as jnp, optax_accum
      >>> optax_accum.sharding.count_collectives(jax.jit(jnp.sum).lower(jnp.ones(8)).compile()).count
      0

    References:
      The text is XLA's HLO (https://openxla.org/xla/operation_semantics).
    """
    text = compiled if isinstance(compiled, str) else _text(compiled)
    computations, entry = _computations(text)
    return Collectives(tuple(_walk(computations, entry, "outside", 1, True)))


@dataclasses.dataclass(frozen=True)
class _Instruction:
    shape: str
    opcode: str
    rest: str  # operands and attributes
    operand_bytes: int


def _text(compiled: Any) -> str:
    try:
        return str(compiled.as_text())
    except AttributeError as error:
        raise TypeError(
            f"count_collectives reads a compiled program: compiled={type(compiled).__name__}. Pass "
            "jax.jit(f).lower(...).compile()."
        ) from error


_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-~]+)\s*(?:\(.*)?->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-~]+)\s*=\s*(\(.*?\)|\S+)\s+([a-z][\w\-]*)\((.*)$")


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Returns the instructions of each computation, and the name of the one that the program starts with."""
    computations: dict[str, list[_Instruction]] = {}
    entry, current, shapes = "", None, {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current, shapes = computations.setdefault(header[2], []), {}
            entry = header[2] if header[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))):
            name, shape, opcode, rest = found.groups()
            shapes[name] = shape
            operands = re.findall(r"%?([\w.\-~]+)", rest.split(")", 1)[0])
            operand_bytes = sum(_bytes(shapes[operand]) for operand in operands if operand in shapes)
            current.append(_Instruction(shape, opcode, rest, operand_bytes))
    if not entry:
        raise ValueError("count_collectives reads the text of a compiled program, which has an ENTRY: there is none.")
    return computations, entry


def _walk(
    computations: dict[str, list[_Instruction]], name: str, place: str, times: int, known: bool
) -> Iterator[Collective]:
    """Yields the collectives of a computation and of those that it calls."""
    for instruction in computations.get(name, ()):
        kind = instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            source = re.search(r'op_name="([^"]*)"', instruction.rest)
            group, moved = _group(instruction.rest), _moved(instruction)
            yield Collective(kind, place, times, known, moved, group, source[1] if source else "")
        called = {key: re.findall(r"%?([\w.\-~]+)", names) for key, names in _CALLED.findall(instruction.rest)}
        if instruction.opcode == "while":
            trips = re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', instruction.rest)
            inside = "loop" if place == "outside" else place
            steps = times * int(trips[1]) if trips else times
            for inner in (*called.get("body", ()), *called.get("condition", ())):
                yield from _walk(computations, inner, inside, steps, known and trips is not None)
        elif instruction.opcode == "conditional":
            branches = ("branch_computations", "true_computation", "false_computation")
            for inner in (inner for key in branches for inner in called.get(key, ())):
                yield from _walk(computations, inner, "branch", times, known)
        elif instruction.opcode in ("call", "fusion", "async-start", "custom-call"):
            for inner in (
                inner for key in ("to_apply", "calls", "called_computations") for inner in called.get(key, ())
            ):
                yield from _walk(computations, inner, place, times, known)


_CALLED = re.compile(
    r"\b(body|condition|to_apply|calls|called_computations|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-~]+)"
)


def _moved(instruction: _Instruction) -> int:
    """Returns the larger of the bytes that go in and that come out; a `-start` gives back what went in, too."""
    out = _bytes(instruction.shape)
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        out -= instruction.operand_bytes
    return max(out, instruction.operand_bytes)


_BITS = {"pred": 8, "token": 0, "opaque": 0}


def _bytes(shape: str) -> int:
    """Returns the size of a shape such as `f32[8,16]{1,0}`, or of all shapes in a tuple."""
    total = 0
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape):
        digits = re.match(r"[a-z]+(\d+)", dtype)
        bits = _BITS.get(dtype, int(digits[1]) if digits else 0)
        total += math.ceil(bits * math.prod(int(dim) for dim in dims.split(",") if dim) / 8)
    return total


def _group(rest: str) -> int | None:
    """Returns the number of devices in a replica group, in any of the three notations."""
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
