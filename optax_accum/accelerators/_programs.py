"""The text of a program, compiled or lowered: its computations, their calls, how often each runs."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str  # such as `f32[8,16]{1,0}`, or a tuple of such
    opcode: str
    operands: tuple[str, ...]
    rest: str  # operands and attributes, as they stand

    @functools.cached_property
    def called(self) -> dict[str, list[str]]:
        """The computations that it calls, by attribute."""
        return {key: re.findall(r"%?([\w.\-~]+)", names) for key, names in _CALLED.findall(self.rest)}

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional, in the order of its index; of a flag, first where it is false."""
        of_flag = [*self.called.get("false_computation", ()), *self.called.get("true_computation", ())]
        return self.called.get("branch_computations", of_flag)

    @property
    def inlined(self) -> list[str]:
        """The computations of a call or a fusion."""
        return [name for key in ("to_apply", "calls", "called_computations") for name in self.called.get(key, ())]

    @property
    def runs(self) -> list[str]:
        """All computations that it calls."""
        return [name for names in self.called.values() for name in names]

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product or a convolution, or a kernel in the place of one."""
        kernel = self.opcode == "custom-call" and re.search(_KERNELS, self.rest)
        return self.opcode in ("dot", "convolution") or bool(kernel)


class Computation(dict[str, Instruction]):
    """Instructions by name, in their order; the last is the result."""

    def __init__(self, name: str = ""):
        super().__init__()
        self.name = name

    @property
    def root(self) -> Instruction:
        """The instruction whose value it returns."""
        return next(reversed(self.values()))

    def parameter(self, number: int) -> Instruction:
        return next(one for one in self.values() if one.opcode == "parameter" and one.rest.startswith(f"{number})"))

    def sizes(self, names: tuple[str, ...]) -> int:
        """The bytes of these instructions' results."""
        return sum(size_of(self[name].shape) for name in names)

    def origin(self, name: str) -> Instruction:
        """The instruction that made a value, behind copies, bitcasts and conversions of it."""
        while self[name].opcode in ("copy", "bitcast", "convert") and self[name].operands:
            name = self[name].operands[0]
        return self[name]

    def constant(self, name: str) -> int | None:
        """The integer that an instruction holds; None if it is no constant."""
        line = self.origin(name)
        match = re.match(r"(-?\d+)\)", line.rest) if line.opcode == "constant" else None
        return int(match[1]) if match else None

    def element(self, name: str) -> int | None:
        """The index of the tuple's element that an instruction takes; None for another instruction."""
        line = self.origin(name)
        match = re.search(r"\bindex=(\d+)", line.rest) if line.opcode == "get-tuple-element" else None
        return int(match[1]) if match else None


FUSIONS = ("fusion", "fusion-start")  # and one that runs beside the instructions before its `-done`


class Ran(NamedTuple):
    """An instruction where it runs."""

    instruction: Instruction
    computation: Computation
    within: tuple[str, ...]  # branches that must be taken and loops of unknown length that must run, from outside
    in_loop: bool
    times: int  # the product of the trip counts of the loops around it; one that is not known is 1

    @property
    def in_branch(self) -> bool:
        return any(place.startswith("branch") for place in self.within)

    @property
    def known(self) -> bool:
        """Whether all trip counts are known."""
        return not any(place.startswith("iteration") for place in self.within)


@dataclasses.dataclass(frozen=True)
class ProgramText:
    """The computations of a compiled program, or of one that is yet to be compiled."""

    computations: dict[str, Computation]
    entry: str
    on_tpu: bool

    @classmethod
    def read(cls, compiled: Any, reader: str) -> "ProgramText":
        """Reads `jax.jit(f).lower(...).compile()` or the text of it, or of a lowered one; errors name the `reader`."""
        text = compiled if isinstance(compiled, str) else _text(compiled, reader)
        computations: dict[str, Computation] = {}
        entry, current = "", None
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = computations.setdefault(header[2], Computation(header[2]))
                entry = header[2] if header[1] else entry
            elif current is not None and (match := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))):
                name, shape, opcode, rest = match.groups()
                words = re.findall(r"%?([\w.\-~]+)", rest.split(")", 1)[0])
                current[name] = Instruction(name, shape, opcode, tuple(word for word in words if word in current), rest)
        if not entry:
            raise ValueError(
                f"{reader} reads the text of a compiled program, which has an ENTRY: there is none. "
                "Compile what was lowered: jax.jit(f).lower(...).compile()."
            )
        return cls(computations, entry, ":T(" in text)

    @functools.cached_property
    def multiplying(self) -> frozenset[str]:
        """The computations that hold a matrix product or a convolution, or run one that does."""
        names: set[str] = set()
        for name, computation in self.computations.items():  # a called computation stands before its callers
            if any(line.is_product or not names.isdisjoint(line.runs) for line in computation.values()):
                names.add(name)
        return frozenset(names)

    @functools.cached_property
    def stages(self) -> dict[str, str]:
        """Of TPUs, computations that are a `"Start"`, a `"Step"` or a `"Done"` of one collective that each names."""
        stages = {name: "Step" for name in self.computations if name.startswith("async_collective_fusion")}
        for name, computation in self.computations.items():
            for line in computation.values():
                if end := re.search(r'custom_call_target="AsyncCollective(Start|Done)"', line.rest):
                    stages[name] = end[1]
        return stages

    def stage(self, line: Instruction) -> str:
        """The stage of an asynchronous operation that an instruction is: "Start", "Step", "Done"; "" for none."""
        by_opcode = {"start": "Start", "update": "Step", "done": "Done"}.get(line.opcode.rsplit("-", 1)[-1], "")
        return by_opcode or next((self.stages[name] for name in line.inlined if name in self.stages), "")

    def behind(self, computation: Computation, start: Instruction) -> list[Instruction]:
        """The products between a start and its end; a loop, branch or fusion that holds some is one.

        If a loop carries the started operation to its next iteration, these are the products up to the end of this
        iteration, and then the products of the next iteration, up to the end of the operation.
        """
        lines = list(computation.values())
        handed, products = {start.name}, list[Instruction]()
        if self._has_ended(lines[lines.index(start) + 1 :], handed, products) or computation.root.opcode != "tuple":
            return products
        places = {place for place, name in enumerate(computation.root.operands) if name in handed}
        came = {
            line.name
            for line in lines
            if line.opcode == "get-tuple-element" and computation.element(line.name) in places
        }
        if came:
            self._has_ended(lines[: lines.index(start)], came, products)
        return products

    def _has_ended(self, lines: list[Instruction], handed: set[str], products: list[Instruction]) -> bool:
        """Adds the products among these lines, up to the end of the started operation; whether it ends there."""
        for line in lines:
            if not handed.isdisjoint(line.operands):
                stage = self.stage(line)
                if stage == "Done":
                    return True
                if stage == "Step" or line.opcode == "get-tuple-element":
                    handed.add(line.name)
            if line.is_product or not self.multiplying.isdisjoint(line.runs):
                products.append(line)
        return False

    def run(self, *, into_fusions: bool = False) -> Iterator[Ran]:
        """Yields the instructions that run, from the first to the last."""
        return self._run(self.entry, into_fusions, (), False, 1)

    def _run(self, name: str, into_fusions: bool, within: tuple[str, ...], in_loop: bool, times: int) -> Iterator[Ran]:
        computation = self.computations.get(name, Computation())
        for line in computation.values():
            yield Ran(line, computation, within, in_loop, times)
            if line.opcode == "while":
                trips = self._trips(computation, line)
                place = (*within, f"iteration of {line.name}") if trips is None else within
                for inner in (*line.called.get("body", ()), *line.called.get("condition", ())):
                    iterations = times * (1 if trips is None else trips)
                    yield from self._run(inner, into_fusions, place, True, iterations)
            elif line.opcode == "conditional":
                for number, inner in enumerate(line.branches):
                    place = (*within, f"branch {number} of {line.name}")
                    yield from self._run(inner, into_fusions, place, in_loop, times)
            elif line.opcode in ("call", "async-start", *(*FUSIONS, "custom-call") * into_fusions):
                for inner in line.inlined:
                    yield from self._run(inner, into_fusions, within, in_loop, times)

    def _trips(self, computation: Computation, loop: Instruction) -> int | None:
        """How often a loop iterates, as the compiler notes it, or as its counter says (TPU); None if unknown."""
        if noted := re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', loop.rest):
            return int(noted[1])
        condition, body = (self.computations.get(loop.called.get(key, [""])[0]) for key in ("condition", "body"))
        if not (condition and body and loop.operands):
            return None
        test, end, start = condition.root, body.root, computation.origin(loop.operands[0])
        if not (test.opcode == "compare" and "direction=LT" in test.rest and start.opcode == end.opcode == "tuple"):
            return None
        counter, limit = map(condition.element, test.operands)
        bound = condition.constant(test.operands[1])
        if limit is not None and body.element(end.operands[limit]) == limit:  # carried along unchanged
            bound = computation.constant(start.operands[limit])
        if counter is None or bound is None:
            return None
        first, add = computation.constant(start.operands[counter]), body.origin(end.operands[counter])
        if first is None or add.opcode != "add" or counter not in map(body.element, add.operands):
            return None
        step = next(filter(None, map(body.constant, add.operands)), 0)
        return max(0, math.ceil((bound - first) / step)) if step > 0 else None


def size_of(shape: str) -> int:
    """The bytes of a shape such as `f32[8,16]{1,0}`, or of all shapes in a tuple."""
    total = 0
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape):
        digits = re.match(r"[a-z]+(\d+)", dtype)
        bits = _BITS.get(dtype, int(digits[1]) if digits else 0)
        total += math.ceil(bits * math.prod(int(dim) for dim in dims.split(",") if dim) / 8)
    return total


_BITS = {"pred": 8, "token": 0, "opaque": 0}
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-~]+)\s*(?:(?:\(.*)?->.*)?\{\s*$")  # before it is compiled: `name {`
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-~]+)\s*=\s*(\(.*?\)|\S+)\s+([a-z][\w\-]*)\((.*)$")
# Libraries of products, and kernels that users write.
_KERNELS = r'custom_call_target="[^"]*(?:cublas|cudnn|onednn|triton|mosaic|tpu_custom_call)'
_CALLED = re.compile(
    r"\b(body|condition|to_apply|calls|called_computations|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-~]+)"
)


def _text(compiled: Any, reader: str) -> str:
    try:
        return str(compiled.as_text())
    except AttributeError as error:
        raise TypeError(
            f"{reader} reads a compiled program: compiled={type(compiled).__name__}. Pass "
            "jax.jit(f).lower(...).compile()."
        ) from error
