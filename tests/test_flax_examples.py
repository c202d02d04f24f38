"""The diffs of the README and of docs/flax.md, applied to scripts: small batches then make the updates of large ones."""

import pathlib
import re

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
README, FLAX = (
    re.findall(r"^```diff\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    for page in ("README.md", "docs/flax.md")
)

pytestmark = pytest.mark.usefixtures("rank_promotion")


def changes(diff):
    """The pairs (old line, new lines) of a diff."""
    return [
        (old, new.replace("\n+", "\n")) for old, new in re.findall(r"^-(.*)\n\+((?:.*\n\+)*.*)$", diff, re.MULTILINE)
    ]


def run(name, batch_size, changes=()):
    source = (ROOT / "tests" / "examples" / f"{name}.py").read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    script = {}
    exec(compile(f"import optax_accum.flax\n{source}", name, "exec"), script)
    return script["main"](batch_size)


def gap(a, b):
    return max(np.max(np.abs(a - b)) for a, b in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize(
    ("name", "one_line", "counting"),
    [
        ("optax_digits", README[0], None),
        ("linen_digits", README[1], FLAX[0]),
        ("nnx_digits", README[2], FLAX[1]),
    ],
)
def test_one_line_makes_small_batches_into_large_ones(name, one_line, counting):
    """The first diff of each kind is one line; the second counts updates instead of micro-steps."""
    assert len(changes(one_line)) == 1
    assert one_line.count("\n") == 2
    whole, updates = run(name, 64)
    naive, _ = run(name, 16)
    cut, steps = run(name, 16, changes(one_line))
    assert (updates, steps) == (16, 64)
    assert gap(cut, whole) < 2e-4
    if counting:
        counted, counts_updates = run(name, 16, changes(counting))
        assert counts_updates == 16
        assert gap(counted, whole) < 2e-4
    assert gap(naive, whole) > 0.05  # what the one line is for


def test_where_one_line_is_not_enough():
    """Sentences of many lengths: with one line a mean of means, with three the update of the whole batch."""
    (one_line,) = (change for change in changes(README[3]) if "accumulate_gradients" in change[1])
    whole, updates = run("text_language_model", 64)
    short, _ = run("text_language_model", 16, [one_line])
    full, counted = run("text_language_model", 16, changes(README[3]))
    assert (updates, counted) == (8, 8)
    assert gap(short, whole) > 1e-3
    assert gap(full, whole) < 1e-6
