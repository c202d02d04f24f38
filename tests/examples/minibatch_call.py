"""A function that calls any gradient function minibatch after minibatch, as EasyDeL's trainers share one."""

import jax
import optax
from flax.training.train_state import TrainState

from tests.examples import rows

DROPOUT = 0.3
MICRO_BATCHES = 4
schedule = optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 16)


def init():
    return TrainState.create(apply_fn=None, params=rows.init(), tx=optax.adamw(schedule)), jax.random.key(0)


def loss_fn(params, batch, key):
    loss = rows.loss(params, batch, key, DROPOUT)
    return loss, {"tokens": batch["mask"].sum()}


def minibatch_call(state, batch, size, grad_fn):
    cut = lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:])
    one = lambda part: grad_fn(state.params, part)
    outs = jax.lax.map(one, jax.tree.map(cut, batch))
    return jax.tree.map(lambda leaf: leaf.mean(0), outs)


@jax.jit
def train_step(carry, batch):
    state, key = carry
    key, own = jax.random.split(key)
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    size = len(batch["x"]) // MICRO_BATCHES
    keyed = lambda params, batch: grad_fn(params, batch, own)
    out = minibatch_call(state, batch, size, keyed)
    (loss, metrics), grads = out
    return (state.apply_gradients(grads=grads), key), loss, metrics


def main(batch_size):
    carry, log = init(), []
    average = carry[0].params
    for batch in rows.batches(batch_size):
        carry, loss, metrics = train_step(carry, batch)
        state, _ = carry
        average = optax.incremental_update(state.params, average, 0.1)
        log.append((int(state.step), float(loss), float(schedule(state.step)), float(metrics["tokens"])))
    return average, log
