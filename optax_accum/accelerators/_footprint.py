"""The needs of one step: bytes, as the compiler counts them, and the largest product."""

import dataclasses
import hashlib
import math
import re
import time
from typing import Any

import jax

from optax_accum._shared.checks import counted
from optax_accum.accelerators._collectives import Collectives, count_collectives
from optax_accum.accelerators._programs import Computation, Instruction, ProgramText
from optax_accum.accelerators._targets import Target, compiled_for, devices_of


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The needs of one step on each device, in bytes, as its compiler counts them.

    Attributes:
      arguments: parameters, optimizer state, batch.
      outputs: the results.
      aliased: outputs that take the place of donated arguments.
      temporary: everything between; activations, gradients, their sum.
      code: the program itself.
      seconds: to compile it.
      network: bytes that pass between devices in a step; a loop of unknown length counts once.
      exposed: bytes of these beside which no product runs.
      refused: the compiler stopped: the accelerator has less memory. Then only `temporary` is known.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: float
    code: int
    seconds: float
    network: int = 0
    exposed: int = 0
    refused: bool = False

    @property
    def unaliased(self) -> int:
        """Outputs that need memory of their own."""
        return self.outputs - self.aliased

    @property
    def peak(self) -> float:
        """All that the step holds at once; where the compiler stopped, at least so much."""
        return self.arguments + self.unaliased + self.temporary + self.code


def text_key(lowered: jax.stages.Lowered, target: Target) -> str:
    """A hash of the lowered text and the target; a compiler's options are not in it."""
    of_target = [target.name, *map(str, target.devices)]
    return hashlib.sha256("\n".join([lowered.as_text(), *of_target]).encode()).hexdigest()


def footprint(lowered: jax.stages.Lowered, target: Target) -> Footprint:
    """Compiles a step, and reads its needs from the compiler."""
    start = time.perf_counter()
    try:
        compiled = compiled_for(target, lowered)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Footprint(0, 0, 0, _needed(str(error)), 0, time.perf_counter() - start, refused=True)
    seconds = time.perf_counter() - start
    _check_devices(compiled, target)
    _check_shared(lowered, target)
    memory = _memory(compiled, target)
    text = compiled.as_text() if len(target.devices) > 1 else None  # some compilers give none
    moved = count_collectives(text) if text else Collectives(())
    return Footprint(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        seconds=seconds,
        network=moved.bytes,
        exposed=moved.exposed,
    )


def _needed(message: str) -> float:
    """The bytes in the message of a compiler that ran out of memory; infinity without a number."""
    if not (match := re.search(r"\((\d+(?:\.\d+)?)([KMGT]?)i?B?\) exceeds", message)):
        return math.inf
    return float(match[1]) * 1024 ** " KMGT".index(match[2] or " ")


def _memory(compiled: jax.stages.Compiled, target: Target) -> Any:
    try:
        memory = compiled.memory_analysis()
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        memory = None
    if memory is None:
        raise RuntimeError(
            f"A plan needs the compiler's memory analysis, and that of {target.name} gives none. Plan for a target "
            'whose compiler does: the CPU, target="h100", target="v5e:2x4".'
        )
    return memory


def _check_devices(compiled: jax.stages.Compiled, target: Target) -> None:
    devices = devices_of(compiled)
    if devices == set(target.devices):
        return
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    fewer = f", or plan for a target of {counted(len(devices), 'device')}" if devices < set(target.devices) else ""
    raise ValueError(
        f"The step must be lowered for all devices of the target: it was for {len(devices)} x {kinds}, and target="
        f"{target.name!r} is {len(target.devices)} x {target.devices[0].device_kind}. Let it take its shapes from its "
        f"arguments, and name no other devices{fewer}."
    )


def _check_shared(lowered: jax.stages.Lowered, target: Target) -> None:
    """Raises where several devices would each do all of the work: nothing lies in parts, or is computed in parts."""
    if len(target.devices) == 1 or re.search(_IN_PARTS, lowered.as_text()):
        return
    raise ValueError(
        f"The step must share the rows among the devices of the target: {len(target.devices)} hold and compute all of "
        'them. Pass target.shapes(batch, PartitionSpec("data")), or plan for one device.'
    )


def shards_of(lowered: jax.stages.Lowered, rows: int) -> int | None:
    """The number of shards among which the step's arguments deal `rows`; None where no argument does."""
    text = lowered.as_text()
    sizes = {name: int(size) for name, size in re.findall(r'"(\w+)"=(\d+)', text)}
    (main,) = re.findall(r"func.func public @main\(.*", text)
    shards = {
        parts
        for argument in re.split(r"%arg(?=\d+:)", main)[1:]
        for dim, parts in zip(re.findall(r"(\d+)x", argument.split(">")[0]), _parts(argument, sizes), strict=False)
        if int(dim) == rows and parts > 1
    }
    return min(shards, default=None)  # parameters with as many rows may lie in more parts


def _parts(argument: str, sizes: dict[str, int]) -> list[int]:
    """The number of parts of each dimension of an argument, as Shardy or GSPMD writes them."""
    if by_axes := re.search(r"sdy\.sharding<@\w+, \[(.*?)\]", argument):
        return [math.prod(sizes[axis] for axis in re.findall(r'"(\w+)"', dim)) for dim in by_axes[1].split("}, {")]
    by_parts = re.search(r'sharding = "\{devices=\[([\d,]+)\]', argument)
    return [int(part) for part in by_parts[1].split(",")] if by_parts else []


# A dimension over an axis, or `shard_map`, as Shardy writes it; the same as GSPMD does.
_IN_PARTS = r'<@\w+, \[[^\]]*"|manual_axes=\{"|"\{devices=\[|"\{manual\}"'


def largest_product(lowered: jax.stages.Lowered) -> int:
    """The FLOPs of the largest matrix product or convolution of a step; 0 without any."""
    computations = ProgramText.read(lowered.as_text("hlo"), "largest_product").computations.values()
    return max((_flops(lines, line) for lines in computations for line in lines.values()), default=0)


def _flops(computation: Computation, line: Instruction) -> int:
    """The FLOPs of a product; 0 for another instruction."""
    if line.opcode not in ("dot", "convolution"):
        return 0
    left, right = (_dims(computation[name].shape) for name in line.operands[:2])
    if line.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.rest)
        inner = math.prod(left[int(axis)] for axis in contracted[1].split(",") if axis) if contracted else 1
    else:
        labels = re.search(r"dim_labels=\w+_(\w+)->", line.rest)
        inner = math.prod(right) // right[labels[1].index("o")] if labels else 1
    return 2 * math.prod(_dims(line.shape)) * inner


def _dims(shape: str) -> list[int]:
    match = re.search(r"\[([\d,]*)\]", shape)
    return [int(dim) for dim in match[1].split(",") if dim] if match else []
