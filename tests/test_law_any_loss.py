"""The law within a call, for any loss: nothing is said, and value and gradient are those of the whole batch.

The losses are those of `benchmarks.verify`: sound ones, and those that micro-batches by themselves compute wrongly.
"""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_accum
from benchmarks import _rare_losses, verify
from tests import paths
from tests.tiers import sweep

MAKERS = {name: maker for makers in (verify.SOUND, _rare_losses.SOUND) for name, maker in makers.items()}
for faults in (verify.FAULTS, _rare_losses.FAULTS):
    for kind, makers in faults.items():
        if kind != "mutable state":  # which no whole batch has either
            MAKERS |= {f"{kind}: {maker.__name__.strip('_')}": maker for maker in makers}
del MAKERS["weights: wrong_count"]  # a Ratio says how micro-batches add up, here wrongly
del MAKERS["cancelling"]  # what is left of its gradient is rounding
NARROW = ("bfloat16", "float16")
# One for each way in which rows are coupled, weighed or drawn, and of each dtype. `benchmarks.verify` draws more of each.
EACH = [
    *("masked", "terms", "policy", "groups", "carry", "classes", "normalised before"),
    *("weights: unweighted_terms", "sum: sum_of_tokens", "coupled examples: batch_norm"),
    *("coupled examples: contrastive", "coupled examples: undeclared_groups", "shared key: second_key"),
    *("low-precision sum: narrow_sums", "nonlinear derivative: clipped_inside", "not rows: cut_table"),
]


def largest_difference(ours, whole):
    """The largest difference of an entry, over the largest entry of all: some leaves have a gradient of zero."""
    pairs = list(zip(map(np.float64, jax.tree.leaves(ours)), map(np.float64, jax.tree.leaves(whole)), strict=True))
    return max(np.max(np.abs(a - b), initial=0) for a, b in pairs) / max(np.max(np.abs(b), initial=0) for _, b in pairs)


@pytest.mark.parametrize("name", sweep(MAKERS, but=EACH))
def test_any_loss_has_the_gradient_of_the_whole_batch(name, rank_promotion):
    problem = MAKERS[name](np.random.default_rng([zlib.crc32(name.encode()), 0]))
    args = problem.params, problem.batch, *problem.args
    k, has_aux = problem.options["num_microbatches"], not {"has_aux", "carry_argnum"}.isdisjoint(problem.options)
    of_whole = lambda *args: paths.value_of(problem.fun(*args)[0] if has_aux else problem.fun(*args))
    ours, whole = optax_accum.value_and_grad(problem.fun, k, has_aux=has_aux), jax.value_and_grad(of_whole)
    (value, grads), (whole_value, whole_grads) = jax.jit(lambda *args: (ours(*args), whole(*args)))(*args)
    value = value[0] if has_aux else value
    exact = not any(narrow in problem.name for narrow in NARROW)
    assert np.any([np.any(leaf) for leaf in jax.tree.leaves(whole_grads)])
    assert largest_difference(grads, whole_grads) < (1e-5 if exact else 0.1)
    np.testing.assert_allclose(value, whole_value, rtol=1e-4 if exact else 0.1, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 5, 12])
def test_every_row_alone_and_a_remainder(k):
    """Rows normalised over the batch, and a mask: no micro-batch by itself has this gradient."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((12, 4), (4, 3)))
    mask = jnp.arange(12) % 5 < 2

    def loss(w, batch):
        h = batch["x"] @ w
        h = (h - h.mean(0, keepdims=True)) / (h.std(0, keepdims=True) + 1e-3)
        return jnp.sum(batch["mask"] * jnp.tanh(h).sum(1) ** 2) / jnp.sum(batch["mask"]), h

    whole = jax.value_and_grad(loss, has_aux=True)(w, {"x": x, "mask": mask})
    ours = jax.jit(optax_accum.value_and_grad(loss, k, has_aux=True))(w, {"x": x, "mask": mask})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, whole)


@jax.custom_vjp
def clipped(w):
    return w


clipped.defvjp(lambda w: (w, None), lambda _, ct: (jnp.clip(ct, -0.02, 0.02),))


@pytest.mark.parametrize("where", ["before", "in a scan", "in a checkpoint", "in bfloat16"])
def test_a_rule_for_the_gradient_of_a_parameter_takes_the_whole_of_it(where):
    """A clip of the gradient of each micro-batch would be another gradient."""
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(12, 4)), jnp.float32), jnp.asarray(rng.normal(size=(3, 4, 4)), jnp.float32)

    def loss(w, x):
        layer = lambda h, w: jnp.tanh(h @ clipped(w))
        if where == "in a scan":
            h = jax.lax.scan(lambda h, w: (layer(h, w), None), x, w)[0]
        elif where == "in a checkpoint":
            h = jax.checkpoint(layer)(x, w[0])
        elif where == "in bfloat16":
            h = x @ clipped(w[0].astype(jnp.bfloat16)).astype(jnp.float32)
        else:
            h = layer(x, w[1])
        return jnp.mean(h**2)

    whole = jax.grad(loss)(w, x)
    assert jnp.isclose(jnp.max(jnp.abs(whole)), 0.02, rtol=1e-2)
    np.testing.assert_allclose(jax.jit(optax_accum.value_and_grad(loss, 4))(w, x)[1], whole, atol=1e-4)


def test_a_gradient_that_is_scaled_in_the_end_is_not_measured():
    """Its statistics would be those of the gradient before it is scaled."""

    def loss(w, x):
        each = (x @ w) ** 2
        large = jax.lax.stop_gradient(each > 0.1)
        return jnp.sum(each * large) / jnp.sum(large)

    w, x = jnp.ones(3), jnp.linspace(-1, 1, 24).reshape(8, 3)
    np.testing.assert_allclose(optax_accum.value_and_grad(loss, 2)(w, x)[1], jax.grad(loss)(w, x), rtol=1e-5)
    with pytest.raises(ValueError, match="return Ratio"):
        optax_accum.value_and_grad(loss, 2, statistics=True)(w, x)
