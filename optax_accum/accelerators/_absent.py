"""How the compiler of an absent accelerator is called, for each version of JAX."""

import importlib.metadata
import importlib.util
import pathlib
import re
import tempfile
import warnings
from typing import Any, cast

import jax

JAX = jax.__version_info__[:3]
# Colab has CUDA 12 with JAX 0.7: where its plugin is installed, messages name that.
CUDA = "12" if JAX < (0, 8, 0) or importlib.util.find_spec("jax_cuda12_plugin") else "13"
NVIDIA = f"jax-cuda{CUDA}-plugin=={jax.__version__} jax-cuda{CUDA}-pjrt=={jax.__version__} " + (
    "nvidia-cuda-nvcc-cu12" if CUDA == "12" else "nvidia-cuda-nvcc nvidia-nvvm"
)
_YOUNG_FIELDS = r"\b(thread_dim_limit_\w|name): \S.*|device_interconnect_info .*"  # of a GpuTargetConfigProto


def check_absent(name: str, gpu: bool) -> None:
    """Raises where JAX cannot compile for an accelerator that this machine lacks."""
    if gpu and (0, 8, 0) <= JAX < (0, 9, 0):
        raise NotImplementedError(
            f"target({name!r}) compiles for a GPU that this machine lacks, which JAX 0.8 cannot: this is JAX "
            f"{jax.__version__}. Install JAX 0.7.2, or 0.9 and later. target() takes this machine's devices."
        )


def known_fields(config: str) -> str:
    """Drops the fields of a GPU's configuration that an older compiler does not know."""
    return config if JAX >= (0, 10, 0) else re.sub(_YOUNG_FIELDS, "", config)


def libtpu_of_jax() -> str | None:
    """The version of libtpu that this JAX names, where an older one would end the process; else None."""
    named = [re.search(r"libtpu\s*==\s*([\d.]+\d)", line) for line in importlib.metadata.requires("jax") or ()]
    return None if JAX >= (0, 10, 0) else next((match[1] for match in named if match), None)


def too_old_libtpu() -> str | None:
    """The version of libtpu that is installed, if it is older than `libtpu_of_jax`."""
    if (wanted := libtpu_of_jax()) is None:
        return None
    try:
        installed = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:  # a nightly one has another name
        return None

    parts = lambda version: [int(part) for part in re.findall(r"\d+", version)[:3]]
    return installed if parts(installed) < parts(wanted) else None


def compiled(lowered: jax.stages.Lowered, options: dict[str, Any] | None) -> Any:
    """Compiles a program for an accelerator that is not here, so that `as_text` shows it."""
    if JAX >= (0, 10, 0):
        return lowered.compile(compiler_options=cast(Any, options))
    with tempfile.TemporaryDirectory() as folder:
        dumped = {**(options or {}), "xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Error writing persistent compilation cache")  # of absent devices
            program = lowered.compile(compiler_options=cast(Any, dumped))
        if program.as_text() is not None:
            return program
        texts = sorted(pathlib.Path(folder).glob("*gpu_after_optimizations.txt"))
        return WithText(program, texts[-1].read_text()) if texts else program


class WithText:
    """A compiled program that has no text, and the text that its compiler wrote to a file."""

    def __init__(self, program: Any, text: str):
        self.program, self.text = program, text

    def as_text(self) -> str:
        return self.text

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)
