"""Public models, restated small: value and gradient are the whole batch's, in less memory."""

import functools

import jax
import jax.numpy as jnp
import pytest

import optax_accum
from tests import programs
from tests.public_models import MODELS, made
from tests.rows.against import farthest
from tests.tiers import sweep

pytestmark = pytest.mark.usefixtures("rank_promotion")

# Threes with a remainder; each row by itself, where what should be a row may be one number for all.
ROWS, PARTS = 14, (5, 14)
CASES = [(name, parts) for name in MODELS for parts in PARTS]


def wide(tree):
    """In 64 bits, where a fault is no rounding."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )


@functools.cache
def whole(name):
    """The model, and what JAX says of its whole batch."""
    model = made(name, ROWS, width=8)
    model = model._replace(params=wide(model.params), batch=wide(model.batch), args=wide(model.args))
    way = jax.jit(jax.value_and_grad(model.loss, has_aux=model.has_aux))
    return model, way(model.params, model.batch, *model.args)


@pytest.mark.parametrize(("name", "parts"), sweep(CASES, but=[("VAE, learned prior", 5)]))
def test_a_public_model_has_the_gradient_of_the_whole_batch(name, parts, x64):
    model, want = whole(name)
    way = optax_accum.value_and_grad(model.loss, parts, has_aux=model.has_aux)
    assert farthest(jax.jit(way)(model.params, model.batch, *model.args), want) < 1e-10


# How much of the whole batch's memory they take in 16 micro-batches of 4 rows.
MEMORY = {"ViT, class token, dropout": 0.2, "ViT, MAP head": 0.2, "GPT-2": 0.2}


@pytest.mark.sweep
@pytest.mark.parametrize("name", MEMORY)
def test_a_model_of_which_activations_are_most_needs_little_memory(name):
    model = made(name, rows=64, width=16)
    ways = jax.value_and_grad(model.loss), optax_accum.value_and_grad(model.loss, 16)
    lowered = (jax.jit(way).lower(model.params, model.batch, *model.args) for way in ways)
    whole, ours = (programs.compiled(each).memory_analysis().temp_size_in_bytes for each in lowered)
    assert ours < MEMORY[name] * whole
