"""A host loop that owns everything, as openpi's does: a counter of steps, an average of parameters, logs, checkpoints."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import apply_updates

from tests.examples import rows

DROPOUT = 0.3
schedule = optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 16)
tx = optax.adamw(schedule)


class TrainState(NamedTuple):
    step: Any
    params: Any
    average: Any
    opt_state: Any


def init():
    params = rows.init()
    return TrainState(jnp.int32(0), params, params, tx.init(params))


@jax.jit
def train_step(key, state, batch):
    key = jax.random.fold_in(key, state.step)
    params, average = state.params, state.average
    value_and_grad = jax.value_and_grad(rows.loss)
    loss, grads = value_and_grad(params, batch, key, DROPOUT)
    updates, opt_state = tx.update(grads, state.opt_state, params)
    params = apply_updates(params, updates)
    average = optax.incremental_update(params, average, 0.1)
    return TrainState(state.step + 1, params, average, opt_state), loss


def main(batch_size):
    state, log, saved = init(), [], []
    for batch in rows.batches(batch_size):
        state, loss = train_step(jax.random.key(0), state, batch)
        step = int(state.step)
        if step % 2 == 0:
            log.append((step, float(loss), float(schedule(step))))
            saved.append(state)
    return saved[-1].average, log
