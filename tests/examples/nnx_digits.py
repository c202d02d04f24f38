"""A train script as Flax's NNX MNIST example has it, on the digits of scikit-learn. The README's diff is applied to it."""

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(128, 32, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.conv(x)), (2, 2), strides=(2, 2))
        return self.out(nnx.relu(self.hidden(x.reshape(len(x), -1))))


def loss_fn(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits


@nnx.jit
def train_step(model, optimizer, metrics, batch):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


def main(batch_size, learning_rate=5e-3):
    """Trains for 16 batches of 64 rows, in steps of `batch_size`; returns the parameters and the optimizer."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images[:1024].reshape(-1, 8, 8, 1) / 16).astype(np.float32), labels[:1024]
    model = CNN(nnx.Rngs(0))
    tx = optax.adamw(learning_rate)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    for start in range(0, len(images), batch_size):
        rows = slice(start, start + batch_size)
        train_step(model, optimizer, metrics, {"image": images[rows], "label": labels[rows]})
    return nnx.to_pure_dict(nnx.state(model, nnx.Param)), optimizer
