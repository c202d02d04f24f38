"""Accelerators that need not be here: devices to compile for, and their memory."""

import dataclasses
import importlib.metadata
import importlib.resources
import importlib.util
import math
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optax_accum._shared import checks
from optax_accum._shared.arrays import Tree
from optax_accum._shared.checks import counted, there_are
from optax_accum.accelerators import _absent as absent

GIB = 1 << 30
GPUS = {  # bytes
    "a100": 85100068864,
    "h100": 84942979072,
    "h200": 151397597184,
    "b200": 191514411008,
    "t4": 15843721216,
}
TPUS = {"v4": 32 * GIB, "v5e": 16 * GIB, "v5p": 95 * GIB, "v6e": 32 * GIB}  # of a chip: Google Cloud's pages of each
FLAT = ("v5e", "v6e")
SHAPES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}

_INSTALL = f"pip install --no-deps {absent.NVIDIA}"
DRIVER = pathlib.Path("/proc/driver/nvidia/version")


@dataclasses.dataclass(frozen=True)
class Target:
    """An accelerator to compile for.

    Attributes:
      name: the name you asked for, or the kind of this machine's devices.
      devices: its devices; of an accelerator that is not here, they compile
        and do not run.
      memory: the bytes of one device, or None if unknown.
    """

    name: str
    devices: tuple[Any, ...]
    memory: int | None

    @property
    def is_absent(self) -> bool:
        """Whether it is not here."""
        return not any(device in self.devices for device in jax.devices())

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.devices[0].platform in ("gpu", "cuda")

    def one(self) -> "Target":
        """Returns its first device alone, to compile a program of one device."""
        return dataclasses.replace(self, devices=self.devices[:1])

    def mesh(self, *names: str, shape: tuple[int, ...] | None = None) -> Mesh:
        """Returns a mesh of all devices.

        It has one axis "data", unless other names and their sizes are
        given.
        """
        names = names or ("data",)
        shape = shape or (len(self.devices),)
        if len(shape) != len(names) or math.prod(shape) != len(self.devices):
            raise ValueError(
                f"A mesh needs a size for each axis, and as many devices as {self.name} has: axes {names}, "
                f"shape={shape}, {counted(len(self.devices), 'device')}."
            )
        return Mesh(np.array(self.devices).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))

    def shapes(self, tree: Tree, spec: PartitionSpec = PartitionSpec(), mesh: Mesh | None = None) -> Tree:  # noqa: B008
        """Returns shapes on this accelerator, to lower a function for it.

        `tree` has arrays or shapes of arrays; `spec` shards each of them.
        """
        sharding = NamedSharding(mesh or self.mesh(), spec)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles `jax.jit(f).lower(*shapes)` with the target's compiler.

        The shapes are those on this accelerator. Raises a ValueError for a
        program that was lowered for other devices, which its figures would
        describe.
        """
        compiled = compiled_for(self, lowered)
        devices = devices_of(compiled)
        if not devices <= set(self.devices):
            kinds = ", ".join(sorted({device.device_kind for device in devices}))
            raise ValueError(
                f"The program must be lowered for its target: it was for {len(devices)} x {kinds}, and {self.name!r} "
                f"is {len(self.devices)} x {self.devices[0].device_kind}. Lower with shapes that lie there: "
                "jax.jit(step).lower(*map(target.shapes, args)), or with those of target.one() for one device."
            )
        return compiled


def compiled_for(target: Target, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program with the compiler of its devices, which may be others than the target's."""
    # To choose among kernels by timing them, XLA would need the GPU.
    untimed = {"xla_gpu_autotune_level": 0} if target.is_gpu else None
    return absent.compiled(lowered, untimed) if target.is_absent else lowered.compile()


def target(name: str | None = None, num_devices: int | None = None) -> Target:
    """Returns an accelerator to compile for, by its name.

    Without a name, it returns the devices that are here.

    The compilers of NVIDIA and of TPUs run on any x86-64 Linux machine.
    They show what a program becomes on the chip: its temporary memory, the
    bytes that move, copies and collectives, but not how long it takes.

    Args:
      name: a GPU (`"t4"`, `"a100"`, `"h100"`, `"h200"`, `"b200"`) or a TPU,
        with its topology (`"v5e:4x4"`, `"v5p:2x2x1"`, `"v6e:2x2"`,
        `"v4:2x2x1"`) or with `num_devices`. None: the devices of
        `jax.devices()`.
      num_devices: the number of GPUs in one host, 1 by default; or of
        chips, for a v5e or v6e without a topology.

    Returns:
      A `Target`, with `devices` for a mesh, and `memory` in bytes.

    Raises:
      ValueError: the name, or the topology, is not known: the known names
        are listed.
      RuntimeError: its compiler is not installed, or JAX did not load it:
        the error says what to do.

    Example:
      >>> from optax_accum.accelerators import target
      >>> here = target()
      >>> here.memory is None or here.memory > 2**30
      True

      On a machine without a GPU, with NVIDIA's compiler installed:

      >>> def temporary(step, params):
      ...     h100 = target("h100")
      ...     step = jax.jit(step, donate_argnums=0)
      ...     lowered = step.lower(h100.shapes(params))
      ...     memory = h100.compile(lowered).memory_analysis()
      ...     return memory.temp_size_in_bytes
    """
    checks.as_positive("num_devices", num_devices)
    if name is None:
        return _here(num_devices)
    if not isinstance(cast(Any, name), str):
        raise TypeError(f'The target must be named by text, such as "h100" or "v5e:4x4": name={name!r}. Pass its name.')
    kind, _, topology = name.lower().partition(":")
    absent.check_absent(name, kind in GPUS)
    if kind in GPUS and not topology:
        return Target(name, _gpus(kind, num_devices or 1), GPUS[kind])
    if kind in TPUS:
        devices = _tpus(f"{kind}:{_topology(kind, topology, num_devices)}")
        return Target(name, devices, TPUS[kind] * len({tuple(d.coords) for d in devices}) // len(devices))
    raise ValueError(
        f"The target must be one of {', '.join(GPUS)}, or a TPU with its topology ({', '.join(TPUS)}; such as "
        f'"v5e:4x4"), or None for the devices that are here: name={name!r}.'
    )


def devices_of(compiled: jax.stages.Compiled) -> set[Any]:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return {device for sharding in shardings for device in getattr(sharding, "device_set", ())}  # some do not say


def _here(num_devices: int | None) -> Target:
    devices = jax.devices()[:num_devices]
    if num_devices and len(devices) < num_devices:
        raise ValueError(
            f"{there_are(len(devices), 'device').capitalize()} here, not num_devices={num_devices}. Pass no more, or "
            'name an accelerator: it need not be here, as "h100".'
        )
    return as_target(devices)


def as_target(devices: Sequence[Any]) -> Target:
    """Devices that are here, with the memory of one."""
    stats = devices[0].memory_stats() or {}
    pages = "SC_PHYS_PAGES" if devices[0].platform == "cpu" else ""
    memory = stats.get("bytes_limit") or (os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if pages else None)
    return Target(devices[0].device_kind, tuple(devices), memory)


def _topology(kind: str, given: str, num_devices: int | None) -> str:
    """A topology such as `4x4`, as given, or of so many chips."""
    if not given:
        if kind not in FLAT or num_devices not in SHAPES:
            raise ValueError(
                f'A TPU needs a topology: "v5e:4x4", "v5p:2x2x1". A v5e or v6e may have num_devices instead, one of '
                f"{', '.join(map(str, SHAPES))}: name={kind!r}, num_devices={num_devices}."
            )
        return SHAPES[num_devices]
    if not re.fullmatch(r"\d+(x\d+)+", given):
        raise ValueError(f'A topology is written as "4x4": name="{kind}:{given}".')
    if num_devices not in (None, math.prod(map(int, re.findall(r"\d+", given)))):
        raise ValueError(f'The topology says how many chips there are: name="{kind}:{given}", {num_devices=}.')
    return given


def _gpus(kind: str, number: int) -> tuple[Any, ...]:
    if not any(map(importlib.util.find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin"))):
        raise RuntimeError(
            f"NVIDIA's compiler is needed for {kind}, and is not installed: {_INSTALL}. (Or, where there is an NVIDIA "
            f"driver, jax[cuda{absent.CUDA}].)"
        )
    if not DRIVER.exists():  # else JAX, before its first use, wants the libraries to run programs with
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    text = (importlib.resources.files("optax_accum.accelerators") / "gpus" / f"{kind}.txtpb").read_text()
    config = absent.known_fields(text)
    return _compile_only("cuda", kind, target_config=config, topology=f"1 x 1 x {number}")


def _tpus(name: str) -> tuple[Any, ...]:
    if not importlib.util.find_spec("libtpu"):
        raise RuntimeError(f"The compiler of TPUs is needed for {name}, and is not installed: {_libtpu()}.")
    if installed := absent.too_old_libtpu():
        raise RuntimeError(
            f"libtpu {installed} is too old for JAX {jax.__version__}: compiling for {name} would crash Python. Run "
            f"{_libtpu()}."
        )
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or libtpu waits minutes for the machine that it is not on
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is taken: two processes may compile at once
    return _compile_only("tpu", name)


def _libtpu() -> str:
    wanted = absent.libtpu_of_jax()
    return "pip install libtpu" + (f"=={wanted}" if wanted else "")


def _compile_only(platform: str, name: str, **options: str) -> tuple[Any, ...]:
    """Devices that compile and do not run. Experimental parts of JAX are used here alone."""
    from jax.experimental import topologies

    try:
        return tuple(topologies.get_topology_desc(name, platform, **options).devices)
    except NotImplementedError as error:
        raise RuntimeError(
            f"JAX {jax.__version__} did not load the compiler for {name} when it was first used; what it said then "
            f"tells why. Where it is older or newer than JAX ({_compilers()}), install that of JAX: {_INSTALL}; or "
            "libtpu. Where a library to run programs with is missing (cuDNN), ask for the target before JAX is used or "
            "set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1."
        ) from error
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"The compiler cannot make the target name={name!r}: {error}") from error


def _compilers() -> str:
    names = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
    compilers = [f"{one.name} {one.version}" for one in importlib.metadata.distributions() if one.name in names]
    return ", ".join(sorted(compilers)) or "none is installed"
