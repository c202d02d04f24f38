"""What the JAX and the Flax that run the tests can do: marks of tests that need more."""

import importlib.metadata

import jax
import pytest

JAX = jax.__version_info__[:3]


def flax_before(*version):
    return tuple(map(int, importlib.metadata.version("flax").split(".")[:2])) < version


def since(*version, why):
    """Marks what an older JAX cannot do."""
    return pytest.mark.skipif(version > JAX, reason=f"JAX {'.'.join(map(str, version))}: {why}")


needs_references = since(0, 8, 1, why="gradients that are added inside the backward pass")
branches_add_in_place = since(0, 12, 0, why="an older XLA copies what a branch takes and returns")
needs_explicit_outputs = since(0, 9, 2, why="types of results that tell how Explicit axes shard them")
