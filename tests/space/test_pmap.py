"""A trainer under `jax.pmap`, as Flax's ImageNet example was for years: `lax.pmean` of gradients and of metrics.

The law: gradients, metrics and logits are those of all devices' rows at once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_accum
from tests.tiers import sweep
from tests.versions import since

DEVICES, EACH, WIDTH, CLASSES = 2, 6, 4, 3
RANDOM = np.random.default_rng(0)
SGD = optax.sgd(0.1, momentum=0.9, nesterov=True)


def normal(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


PARAMS = {"kernel": normal(3, WIDTH), "out": normal(WIDTH, CLASSES)}
BATCHES = [
    {"image": normal(DEVICES * EACH, 3), "label": jnp.asarray(RANDOM.integers(0, CLASSES, DEVICES * EACH))}
    for _ in range(3)
]
DEALT = [jax.tree.map(lambda leaf: leaf.reshape(DEVICES, EACH, *leaf.shape[1:]), batch) for batch in BATCHES]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss(params, batch):
    """A mean over rows, weight decay, and the logits beside."""
    logits = jax.nn.relu(batch["image"] @ params["kernel"]) @ params["out"]
    decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    return cross_entropy(logits, batch["label"]) + 0.5 * 1e-2 * decay, (logits, {"norm": jnp.mean(logits**2)})


def train_step(compute, averaged):
    """Flax's step; `averaged` is `lax.pmean` under `jax.pmap`, and nothing on one device."""

    def step(params, state, batch):
        (value, (logits, aux)), grads = compute(params, batch)
        hits = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        metrics = {"loss": value, "entropy": cross_entropy(logits, batch["label"]), "accuracy": hits, **aux}
        metrics, grads = averaged(metrics), averaged(grads)
        updates, state = SGD.update(grads, state, params)
        return optax.apply_updates(params, updates), state, metrics, logits

    return step


def mapped(fun, in_axes):
    return jax.pmap(fun, axis_name="batch", in_axes=in_axes, devices=jax.devices()[:DEVICES])


@pytest.mark.sweep
@pytest.mark.parametrize("k", [*sweep([1]), 4], ids=["one micro-batch", "a remainder of two rows"])
def test_a_trainer_under_pmap_takes_the_gradient_of_all_rows(k):
    compute = optax_accum.value_and_grad(loss, k, has_aux=True)
    step = mapped(train_step(compute, lambda tree: lax.pmean(tree, "batch")), 0)
    whole = jax.jit(train_step(jax.value_and_grad(loss, has_aux=True), lambda tree: tree))
    want, got = (
        (PARAMS, SGD.init(PARAMS)),
        jax.tree.map(lambda leaf: jnp.stack([leaf] * DEVICES), (PARAMS, SGD.init(PARAMS))),
    )
    for batch, dealt in zip(BATCHES, DEALT, strict=True):
        *want, metrics, logits = whole(*want, batch)
        *got, own, rows = step(*got, dealt)
        for device in range(DEVICES):
            here = jax.tree.map(lambda leaf, device=device: leaf[device], (*got, own))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), here, (*want, metrics))
        np.testing.assert_allclose(rows.reshape(logits.shape), logits, atol=1e-6)


def synchronised(params, batch):
    """Statistics of all devices' rows, within the loss."""
    hidden = batch["image"] @ params["kernel"]
    hidden = hidden - lax.pmean(hidden.mean(0, keepdims=True), "batch")
    return jnp.mean((hidden @ params["out"]) ** 2), {
        "brightness": jnp.mean(batch["image"]),
        "largest": jnp.max(batch["image"]),
    }


def test_aux_of_each_devices_own_rows_needs_no_rule():
    """Without `devices` it is the micro-batches' that are joined, on each device: the largest, too."""
    ours, plain = (
        mapped(fun, (None, 0))(PARAMS, DEALT[0])
        for fun in (
            optax_accum.value_and_grad(synchronised, 3, has_aux=True),
            jax.value_and_grad(synchronised, has_aux=True),
        )
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, plain)


@since(0, 8, 0, why="before, jax.pmap is no jax.shard_map, whose axes devices= takes (test_manual.py)")
def test_with_devices_a_mean_over_them_is_refused_by_name():
    run = optax_accum.value_and_grad(synchronised, 3, has_aux=True, devices="batch")
    with pytest.raises(
        ValueError, match=r"other devices of \('batch',\) \(psum\w*, test_pmap.py:\d+\). Leave that out"
    ):
        mapped(run, (None, 0))(PARAMS, DEALT[0])
