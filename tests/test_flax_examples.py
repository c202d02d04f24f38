"""The README's diffs, applied to scripts as Flax has them: small batches then make the updates of large ones."""

import pathlib
import re

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

ROOT = pathlib.Path(__file__).parent.parent
DIFFS = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.usefixtures("rank_promotion")


def changes(diff):
    """The pairs (old line, new lines) of a diff."""
    return [
        (old, new.replace("\n+", "\n")) for old, new in re.findall(r"^-(.*)\n\+((?:.*\n\+)*.*)$", diff, re.MULTILINE)
    ]


def run(name, batch_size, changes=()):
    source = (ROOT / "tests" / "examples" / f"{name}_digits.py").read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    script = {}
    exec(compile(f"import optax_accum.flax\n{source}", name, "exec"), script)
    return script["main"](batch_size)


@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_one_line_makes_small_batches_into_large_ones(name):
    """The first diff of each kind is one line; the second counts updates instead of micro-steps."""
    one_line, counting = [diff for diff in DIFFS if ("wrt=" in diff) == (name == "nnx")]
    assert len(changes(one_line)) == 1
    assert one_line.count("\n") == 2
    whole, updates = run(name, 64)
    naive, _ = run(name, 16)
    cut, steps = run(name, 16, changes(one_line))
    counted, counts_updates = run(name, 16, changes(counting))
    assert (updates, steps, counts_updates) == (16, 64, 16)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=2e-4), cut, whole)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=2e-4), counted, whole)
    gap = max(np.max(np.abs(a - b)) for a, b in zip(jax.tree.leaves(naive), jax.tree.leaves(whole), strict=True))
    assert gap > 0.05  # what the one line is for
