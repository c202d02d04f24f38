"""Sizes of memory: parsed, printed, and how much is free on this device."""

import math
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from optax_accum.accelerators._targets import Target

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_OF_A_GPU = 0.75  # the share of its memory that JAX takes; a GPU that is here says so itself
_ROOT = Path("/")  # of the system's files about memory
_CGROUPS = {  # by the controller that /proc/self/cgroup names: version 2 names none
    "": ("sys/fs/cgroup", "memory.max", "memory.current"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def as_bytes(budget: Any) -> int:
    """Parses a budget: bytes, or text such as "80GB" (10^9) or "7.5 GiB" (2^30)."""
    remedy = 'Pass bytes, or text such as "80GB" or "7.5 GiB".'
    size: float = math.nan
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e\d+)?)\s*([kmgt]?)(i?)b?\s*", budget.lower())
        if match and (match[2] or not match[3]):
            size = float(match[1]) * (_BINARY if match[3] else _UNITS)[match[2]]
    elif isinstance(budget, int | float | np.integer | np.floating) and not isinstance(budget, bool):
        size = float(budget) if budget < 2**63 else math.inf
    if not math.isfinite(size):
        raise ValueError(f"The budget must be a size of memory: budget={budget!r}. {remedy}")
    if size < 1:
        raise ValueError(f"The budget must be above zero: budget={budget!r}. {remedy}")
    return int(size)


def as_text(size: float) -> str:
    """A size in decimal units, such as "1.50 GB"; "?" if it is not finite."""
    if not math.isfinite(size):
        return "?"
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((f"{size / unit:.2f} {name}" for unit, name in units if abs(size) >= unit), f"{size:.0f} B")


def memory_of(target: Target, *, here: bool, devices: int) -> int:
    """The memory of one device: of a CPU that is here its share of the free memory, of a GPU the part for JAX."""
    memory = target.memory
    if memory and target.is_gpu and target.is_absent:
        memory = int(_OF_A_GPU * memory)
    if here and target.devices[0].platform == "cpu":
        free = _free()
        memory = (memory or 0) // devices if free is None else max(1, free // devices)
    if not memory:
        raise ValueError(f'Nobody says how much memory {target.name} has. Pass budget=, such as budget="16GB".')
    return memory


def _free() -> int | None:
    """The free memory here, or a container's share of it; None if unknown."""
    by_system = (1024 * int(kB) for kB in re.findall(r"MemAvailable:\s*(\d+) kB", _read("proc/meminfo")))
    return min((*by_system, *_left_by_cgroups()), default=None)


def _left_by_cgroups() -> Generator[int]:
    """Yields the memory left by this process's control group, and by each group around it."""
    for line in _read("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in {*controllers.split(",")} & {*_CGROUPS}:
            mount, *files = _CGROUPS[controller]
            innermost = Path(path.strip("/"))
            for group in (innermost, *innermost.parents):
                yield from _left_by_cgroup(f"{mount}/{group}", *files)


def _left_by_cgroup(folder: str, most: str, used: str) -> Generator[int]:
    """Yields the limit minus the memory in use, page cache not counted; nothing without a limit."""
    limit, current = (_read(f"{folder}/{name}").strip() for name in (most, used))
    if limit.isdecimal() and current.isdecimal():
        dropped = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(f"{folder}/memory.stat"), re.MULTILINE)
        yield max(0, int(limit) - int(current) + (int(dropped[1]) if dropped else 0))


def _read(path: str) -> str:
    try:
        return (_ROOT / path).read_text()
    except OSError:
        return ""
