"""Random losses: the value and the gradient are the whole batch's."""

import jax
import numpy as np
import pytest

from tests.rows import programs
from tests.rows.against import WAYS, farthest, of_parts
from tests.tiers import sweep

PARTS = (2, 3, 5, 6, 12)  # the last but one and the middle leave a remainder where rows are in groups


@pytest.mark.parametrize("number", sweep(range(40), but=range(8)))
def test_random_losses(number, x64):
    writer = programs.Writer(number)
    loss = writer.loss()
    way, parts = WAYS[number % 2], PARTS[number % len(PARTS)]
    funs = [jax.value_and_grad(loss), of_parts(way, loss, parts)]
    want, got = jax.jit(lambda *args: [fun(*args) for fun in funs])(*programs.values())
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(want)):
        pytest.skip("The whole batch's gradient is NaN: a square root of zero.")
    assert farthest(got, want) < 1e-8, (way, parts, writer.pieces)
