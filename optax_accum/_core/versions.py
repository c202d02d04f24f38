"""Versions of JAX: which one this is, and which features older ones lack.

It is compared here, in `compilers`, and in `accelerators._absent`.
"""

import functools
import os

import jax

from optax_accum._core import messages

JAX = jax.__version_info__[:3]
FLOOR, HOST = (0, 7, 2), (0, 10, 0)  # versions that were run, or asked


def text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version[:2] if not version[2:] or not version[2] else version))


if JAX < FLOOR:
    raise ImportError(
        f"optax_accum needs JAX {text(FLOOR)} or later: this is JAX {jax.__version__}. Install a newer one."
    )


def require(what: str, since: tuple[int, ...], remedy: str) -> None:
    if since > JAX:
        raise NotImplementedError(f"{what} needs JAX {text(since)} or later: this is JAX {jax.__version__}. {remedy}")


WITHOUT_XNNPACK = "--xla_cpu_use_xnnpack=false"


@functools.cache
def warn_of_stale_products() -> None:
    """Warns once on a CPU whose XNNPACK packs a matrix once for each address, and so misses an update in place."""
    if JAX >= (0, 8, 2) or WITHOUT_XNNPACK in os.environ.get("XLA_FLAGS", ""):
        return
    if jax.default_backend() == "cpu":
        messages.warn(
            f"JAX {jax.__version__} on a CPU can multiply by old parameters if a step that was compiled with "
            "donate_argnums updates them in place: the gradient is wrong, with this library and without. Set "
            f'os.environ["XLA_FLAGS"] = "{WITHOUT_XNNPACK}" before you use JAX, or install JAX 0.8.2 or later.'
        )
