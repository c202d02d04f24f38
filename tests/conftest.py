"""Rank promotion raises, 64-bit numbers are off, warnings are errors (pyproject.toml); tests/__init__.py has the rest."""

import jax
import pytest
from hypothesis import settings

from tests import programs

settings.register_profile("suite", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("suite")
jax.config.update("jax_numpy_rank_promotion", "raise")


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
