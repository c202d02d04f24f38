"""Programs as users compile them, whatever the suite leaves out to be quick."""

import jax

from tests import OLD_EMITTERS


def quickly(yes):
    """Tells the compiler to leave most of its optimizations out, or not to."""
    jax.config.update("jax_disable_most_optimizations", yes)


def compiled(lowered):
    """Compiles a lowered function with every optimization."""
    quickly(False)
    try:
        return lowered.compile(compiler_options={"xla_cpu_use_fusion_emitters": True} if OLD_EMITTERS else None)
    finally:
        quickly(True)
