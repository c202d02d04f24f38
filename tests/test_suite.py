"""The suite itself: what it keeps between runs, and what the README's command runs of it."""

import os
import pathlib

import jax
import jax.numpy as jnp
import pytest

from optax_accum._core import arithmetic
from tests import programs

pytestmark = pytest.mark.quick


# Programs that are kept


@pytest.fixture
def reads(monkeypatch):
    """How many programs have been read from the folder of those that are kept."""
    if not (jax.config.jax_enable_compilation_cache and os.environ.get("JAX_COMPILATION_CACHE_DIR")):
        pytest.skip("no program is kept between runs")
    found = []
    jax.monitoring.register_event_listener(
        lambda event, **_: event == "/jax/compilation_cache/cache_hits" and found.append(event)
    )
    return lambda: len(found)


def window(name):
    """The sum of a window, by a function that JAX has never seen."""

    def micro_step(acc, grads):
        return arithmetic.add(acc, grads, jnp.float32(3), first=False)

    micro_step.__name__ = name
    return float(jax.jit(micro_step)(jnp.float32(2), jnp.float32(5)))


def test_a_program_is_compiled_once_and_a_change_of_the_library_is_another(reads, monkeypatch):
    """The key is the program: of the same name, with the same arguments, another is not taken for it."""
    window("kept")
    before = reads()
    assert window("kept") == 17
    assert reads() == before + 1
    monkeypatch.setattr(arithmetic, "_scale", lambda grad, weight, counts: grad)
    assert window("kept") == 7
    assert reads() in (before + 1, before + 2)  # compiled, or read where an earlier run has tried this


def test_a_program_that_a_killed_process_left_half_written_is_compiled(reads):
    window("half")
    (file,) = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).glob("jit_half-*-cache")
    file.write_bytes(file.read_bytes()[:-100])
    before = reads()
    assert window("half") == 17
    assert reads() == before
    file.unlink()  # JAX would leave it as it is


def test_what_a_test_inspects_is_compiled_anew(reads):
    lowered = lambda: jax.jit(lambda x: x + 1).lower(jnp.float32(1))
    assert programs.compiled(lowered())(jnp.float32(1)) == 2
    before = reads()
    programs.compiled(lowered())
    assert reads() == before
