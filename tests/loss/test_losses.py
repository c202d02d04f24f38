"""The examples that docs/losses.md leans on: a contrastive loss whose logits are never whole."""

import functools

import jax
import numpy as np
import pytest

from examples import contrastive
from tests import programs

ROWS = 96


@functools.cache
def compiled(way):
    params, batch = contrastive.problem(ROWS)
    return programs.compiled(jax.jit(contrastive.ways(block=24)[way]).lower(params, batch))


@pytest.mark.sweep
def test_the_gradient_is_that_of_whole_logits():
    """Also where the blocks do not divide the rows."""
    args = contrastive.problem(ROWS)
    whole, blocks = compiled("whole")(*args), compiled("and logits in blocks")(*args)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(blocks), strict=True):
        np.testing.assert_allclose(b, a, atol=2e-6 * np.max(np.abs(a)))
    assert max(np.max(np.abs(leaf)) for leaf in jax.tree.leaves(whole)) > 1e-3


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("way", "has"), [("whole", True), ("encoder in micro-batches", True), ("and logits in blocks", False)]
)
def test_no_program_has_all_logits(way, has):
    assert (f"f32[{ROWS},{ROWS}]" in compiled(way).as_text()) == has


@pytest.mark.sweep
def test_the_example_prints_memory_and_errors(capsys):
    contrastive.main(["--rows", "64", "--block", "16"])
    said = capsys.readouterr().out
    assert said.count("MiB of temporary memory") == 3
    assert "64 x 64 logits" in said
