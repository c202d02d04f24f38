"""Rank promotion raises, 64-bit numbers are off, warnings are errors (pyproject.toml); tests/__init__.py has the rest."""

import contextlib
import os
import shutil

import jax
import pytest
from hypothesis import settings

from tests import programs

settings.register_profile("suite", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("suite")
jax.config.update("jax_numpy_rank_promotion", "raise")

# In bytes. A run of everything in one environment adds about a tenth of it.
MOST_KEPT = 2**30


def pytest_addoption(parser):
    parser.addoption("--sweep", action="store_true", help="run the sweep, too: more cases of what each run looks for")


def pytest_configure(config):
    """Keeps compiled programs in pytest's cache, for its workers, for processes that tests start, and for the next run.

    `--cache-clear` starts without them. JAX finds a program by what it is (by its operations, the compiler's version and
    options, and the processor), so a change of the library, of JAX or of the machine finds none. A folder that
    `JAX_COMPILATION_CACHE_DIR` names already is used instead.
    """
    if hasattr(config, "workerinput") or not hasattr(config, "cache"):
        return
    config.option.cacheclear = False  # it has been cleared; workers would clear it again while others write
    folder = config.cache.mkdir(f"jax-{jax.__version__}")
    # Before JAX 0.10 a program of an earlier run may be taken for another: gradients were wrong until it was cleared.
    if size_of(folder) > MOST_KEPT or jax.__version_info__ < (0, 10):
        shutil.rmtree(folder, ignore_errors=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])


def pytest_collection_modifyitems(config, items):
    """Quick tests come first. The sweep is left out, unless it is asked for: by `--sweep`, its mark, or the name of a test."""
    items.sort(key=lambda item: item.get_closest_marker("quick") is None)
    if not (config.option.sweep or "sweep" in config.option.markexpr or any("::" in each for each in config.args)):
        swept = [item for item in items if item.get_closest_marker("sweep")]
        config.hook.pytest_deselected(items=swept)
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]


def size_of(folder):
    """Returns the bytes of its files; those of which another run just removed one count nothing."""
    total = 0
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


@pytest.fixture
def x64():
    with programs.enable_x64():
        yield


@pytest.fixture
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def rank_promotion():
    """Flax layers add biases to batches."""
    with jax.numpy_rank_promotion("allow"):
        yield
