"""`python -m optax_accum`: public names; versions, devices and options, as a bug report needs them."""

import argparse
import importlib.metadata
import inspect
import os
import platform
import sys
import types
from typing import Any

import jax

import optax_accum

PACKAGES = (
    "jax",
    "jaxlib",
    "optax",
    "flax",
    "orbax-checkpoint",
    "numpy",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
)
VARIABLES = ("JAX_", "XLA_", "LIBTPU_", "NCCL_", "CUDA_VISIBLE_DEVICES", "TF_CPP_")
OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_disable_jit")


def main() -> int:
    """Prints the public names, and the versions that a bug report needs; returns the exit status.

    That is 141 on a broken pipe.
    """
    argparse.ArgumentParser(prog="python -m optax_accum", description=_ABOUT).parse_args()
    try:
        print(f"{inspect.getdoc(optax_accum)}\n\n{_names()}\n\nFor a bug report:\n\n{_diagnostics()}", flush=True)
    except BrokenPipeError:  # whoever reads has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes there
        return 141
    return 0


_ABOUT = "Prints the public names, and versions, devices and options for a bug report."


def _names() -> str:
    """Returns every public name with the first sentence about it; names in a module are indented."""

    def about(value: Any) -> Any:
        return (inspect.getdoc(value) or "").split("\n")[0]

    lines: list[tuple[str, str]] = []
    for name in sorted({*dir(optax_accum)} - {"__version__"}):
        try:
            value = getattr(optax_accum, name)
        except ImportError as error:  # Flax is not installed
            lines.append((name, str(error)))
            continue
        lines.append((name, about(value)))
        if isinstance(value, types.ModuleType):
            lines += [(f"  {inner}", about(getattr(value, inner))) for inner in value.__all__]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {text}" for name, text in lines)


def _diagnostics() -> str:
    versions = [f"{name} {version}" for name in PACKAGES if (version := _version(name))]
    # All of JAX's variables, and no other: they go into a public report.
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)]
    options = [f"{name}={getattr(jax.config, name, None)}" for name in OPTIONS]
    lines = {
        "optax_accum": optax_accum.__version__,
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "packages": ", ".join(versions),
        "devices": _devices(),
        "options": ", ".join(options),
        "variables": " ".join(variables) or "none",
    }
    return "\n".join(f"  {name}: {value}" for name, value in lines.items())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> str:
    """Returns what JAX runs on; or why it does not, which is what such a report is about."""
    try:
        kinds = [device.device_kind for device in jax.devices()]
    except RuntimeError as error:
        return str(error)
    counted = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    return f"{jax.default_backend()}, {counted}; {jax.process_count()} process(es)"


if __name__ == "__main__":
    sys.exit(main())
