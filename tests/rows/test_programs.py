"""Random losses: the value and the gradient are the whole batch's."""

import jax
import numpy as np
import pytest

from tests.rows import programs
from tests.rows.against import farthest, of_parts

PARTS = (2, 3, 5, 6, 12)  # the last but one and the middle leave a remainder where rows are in groups


def assert_the_same(number, jitted):
    writer = programs.Writer(number)
    loss = writer.loss()
    way, parts = ("value_and_grad", "microbatched")[number % 2], PARTS[number % len(PARTS)]
    funs = [jax.value_and_grad(loss), of_parts(way, loss, parts)]
    want, got = (
        jax.jit(lambda *args: [fun(*args) for fun in funs])(*programs.values())
        if jitted
        else [fun(*programs.values()) for fun in funs]
    )
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(want)):
        pytest.skip("The whole batch's gradient is NaN: a square root of zero.")
    assert farthest(got, want) < 1e-8, (way, parts, writer.pieces)


@pytest.mark.parametrize("number", range(20))
def test_random_losses(number, x64):
    assert_the_same(number, jitted=True)


@pytest.mark.sweep
@pytest.mark.parametrize("number", range(20, 70))
def test_more_random_losses(number, x64):
    assert_the_same(number, jitted=True)
