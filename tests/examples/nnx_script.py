"""A script in Flax NNX: dropout, a schedule whose rate is logged, and an average of the parameters."""

import jax.numpy as jnp
import optax
from flax import nnx

from tests.examples import rows

DROPOUT = 0.3
schedule = optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 16)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(6, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(jnp.tanh(self.first(x))))


def init():
    model = Model(nnx.Rngs(0))
    tx = optax.adamw(schedule)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return model, optimizer


@nnx.jit
def train_step(model, optimizer, batch):
    def loss_fn(model):
        errors = (model(batch["x"]) - batch["y"]) ** 2
        return rows.mean(errors, batch["mask"])

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def main(batch_size):
    model, optimizer = init()
    average, log = nnx.state(model, nnx.Param), []
    for batch in rows.batches(batch_size):
        loss = train_step(model, optimizer, batch)
        params, step = nnx.state(model, nnx.Param), int(optimizer.step[...])
        average = optax.incremental_update(params, average, 0.1)
        log.append((step, float(loss), float(schedule(step))))
    return nnx.to_pure_dict(average), log
