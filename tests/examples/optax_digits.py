"""A train script with Optax alone, on the digits of scikit-learn. The README's diff is applied to it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

tx = optax.sgd(0.1, momentum=0.9)


@jax.jit
def train_step(params, state, images, labels):
    def loss(params):
        logits = jax.nn.relu(images @ params["in"]) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


def main(batch_size):
    """Trains for 16 batches of 64 rows, in steps of `batch_size`; returns the parameters and the steps made."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images[:1024] / 16).astype(np.float32), labels[:1024]
    keys = jax.random.split(jax.random.key(0))
    params = {"in": jax.random.normal(keys[0], (64, 32)) / 8, "out": jnp.zeros((32, 10))}
    state, steps = tx.init(params), range(0, len(images), batch_size)
    for start in steps:
        rows = slice(start, start + batch_size)
        params, state = train_step(params, state, images[rows], labels[rows])
    return params, len(steps)
