"""A train script as Flax's MNIST example has it, on the digits of scikit-learn. The README's diff is applied to it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.avg_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2), strides=(2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(32)(x.reshape(len(x), -1))))


def create_train_state(key, learning_rate, momentum):
    model = CNN()
    params = model.init(key, jnp.ones([1, 8, 8, 1]))["params"]
    tx = optax.sgd(learning_rate, momentum)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@jax.jit
def train_step(state, images, labels):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main(batch_size):
    """Trains for 16 batches of 64 rows, in steps of `batch_size`; returns the parameters and the state."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images[:1024].reshape(-1, 8, 8, 1) / 16).astype(np.float32), labels[:1024]
    state = create_train_state(jax.random.key(0), 0.1, 0.9)
    for start in range(0, len(images), batch_size):
        rows = slice(start, start + batch_size)
        state, _ = train_step(state, images[rows], labels[rows])
    return state.params, state
