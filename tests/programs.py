"""Programs as users compile them, whatever the suite leaves out to be quick; and for what."""

import contextlib
import functools
import math

import jax
import jax.experimental
from jax.extend import core

from optax_accum import accelerators
from tests import OLD_EMITTERS


def enable_x64():
    """64-bit numbers, for a while."""
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(True)


def quickly(yes):
    """Tells the compiler to leave most of its optimizations out, or not to."""
    jax.config.update("jax_disable_most_optimizations", yes)


@contextlib.contextmanager
def as_shipped():
    """With every optimization, and compiled anew: JAX keeps no program that it compiled sooner than in an eternity."""
    quickly(False)
    shortest = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)
        quickly(True)


def compiled(lowered):
    """Compiles a lowered function for the CPU."""
    with as_shipped():
        return lowered.compile(compiler_options={"xla_cpu_use_fusion_emitters": True} if OLD_EMITTERS else None)


@functools.cache
def target(name):
    """An accelerator whose compiler is installed; "cpu" is the one that is here."""
    return accelerators.target(None if name == "cpu" else name, num_devices=None if ":" in name else 8)


def installed(*names):
    """Those of the accelerators whose compiler is installed: tests are for these only, one says what is missing."""
    return [name for name in names if why_not(name) is None]


def why_not(name):
    """What to install for an accelerator, or None."""
    try:
        target(name)
    except RuntimeError as error:
        return str(error)
    return None


def equations(program):
    """All equations of a traced program, those of the programs inside it, too."""
    for equation in program.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)  # with or without its constants
            if isinstance(inner, core.Jaxpr):
                yield from equations(inner)
