"""Random losses, and gathers of own rows: the value and the gradient are the whole batch's."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_accum
from tests.rows import against, mixed, programs
from tests.rows.against import WAYS, farthest, of_parts
from tests.tiers import sweep

PARTS = (2, 3, 5, 6, 12)  # the last but one and the middle leave a remainder where rows are in groups

RECOMPUTED = (0.0, 0.5, 4.0)  # how much of a forward pass may run once more


@pytest.mark.parametrize("number", sweep(range(40), but=[7]))
def test_random_losses(number, x64):
    writer = programs.Writer(number)
    loss = writer.loss()
    way, parts = WAYS[number % 2], PARTS[number % len(PARTS)]
    options = {} if way == "microbatched" else {"recompute": RECOMPUTED[number // 2 % len(RECOMPUTED)]}
    funs = [jax.value_and_grad(loss), of_parts(way, loss, parts, **options)]
    want, got = jax.jit(lambda *args: [fun(*args) for fun in funs])(*programs.values())
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(want)):
        pytest.skip("The whole batch's gradient is NaN: a square root of zero.")
    assert farthest(got, want) < 1e-8, (way, parts, options, writer.pieces)


TOGETHER = 8  # losses that are one program


def differences(first):
    """How far the gradients of some losses are from the whole batch's, and what they are made of."""
    mixtures = [mixed.Mixture(number) for number in range(first, first + TOGETHER)]
    args, funs = [mixture.values() for mixture in mixtures], []
    for place, mixture in enumerate(mixtures):
        way, parts = WAYS[(first // TOGETHER + place) % 2], min((2, 3, 5, 12)[place % 4], mixture.n)
        funs.append((jax.value_and_grad(mixture.loss), of_parts(way, mixture.loss, parts)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*All rows run at once")
        found = jax.jit(lambda args: [[fun(*each) for fun in pair] for pair, each in zip(funs, args, strict=True)])(
            args
        )
    return [(mixture, farthest(got, want)) for mixture, (want, got) in zip(mixtures, found, strict=True)]


@pytest.mark.parametrize("first", sweep(range(0, 400, TOGETHER), but=[16]))
def test_random_losses_of_rows_and_parameters(first, rank_promotion):
    for number, (mixture, far) in enumerate(differences(first), start=first):
        assert far < (5e-2 if mixture.is_narrow else 1e-4), (number, mixture.n, mixture.d)


PICKED = {
    "labels": lambda logits, y: logits[jnp.arange(len(y)), y],
    "labels from the end": lambda logits, y: logits[jnp.arange(len(y)), y - 5],
    "beyond the end": lambda logits, y: jnp.nan_to_num(logits.at[jnp.arange(len(y)), y + 3].get(mode="fill")),
    "of each token": lambda logits, y: jnp.stack([logits, 2 * logits], 2)[jnp.arange(len(y)), y].sum(-1),
    "rows last": lambda logits, y: logits.T[y, jnp.arange(len(y))],
}
OTHERS = {
    "of other rows": lambda logits, y: logits[jnp.arange(len(y))[::-1], y],
    "of the next row": lambda logits, y: logits[(jnp.arange(len(y)) + 1) % len(y), y],
    "columns by number": lambda logits, y: logits[y, jnp.arange(len(y)) % 5],
}


@pytest.mark.parametrize(
    "name", [*sweep(PICKED, but=["of each token"]), *sweep(OTHERS, but=["of other rows", "of the next row"])]
)
def test_a_gather_of_own_rows_stays_in_the_loop(name):
    """As most losses are written in JAX; it would keep all logits of all rows."""
    params, batch = against.values()
    pick = (PICKED | OTHERS)[name]
    loss = lambda params, batch: jnp.mean(pick(jnp.tanh(batch["x"] @ params["out"]), batch["label"]) ** 2)
    found = optax_accum.explain(loss, params, batch)
    assert (found.kept_bytes == 0) == (name in PICKED)
    got, want = (jax.jit(f)(params, batch) for f in (optax_accum.value_and_grad(loss, 3), jax.value_and_grad(loss)))
    assert farthest(got, want) < 1e-5
