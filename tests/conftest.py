"""Eight virtual CPU devices, rank promotion raises, 64-bit numbers off; warnings are errors (pyproject.toml)."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest
from hypothesis import settings

settings.register_profile("suite", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("suite")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
    with jax.enable_x64(True):
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


@pytest.fixture
def quickly_compiled():
    """For tests that ask for numbers, not for programs: most of the compiler's optimizations are left out."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
