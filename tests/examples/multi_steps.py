"""`optax.MultiSteps` behind a config, as in MaxText's distillation and nanodo."""

import jax
import optax
from optax import apply_updates

from tests.examples import rows

DROPOUT = 0.3
schedule = optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 16)
config = {"accumulate": 4}
tx = optax.MultiSteps(optax.adamw(schedule), config["accumulate"])


def init():
    params = rows.init()
    return params, tx.init(params), jax.random.key(0)


@jax.jit
def train_step(carry, batch):
    params, state, key = carry
    key, own = jax.random.split(key)
    value_and_grad = jax.value_and_grad(rows.loss)
    loss, grads = value_and_grad(params, batch, own, DROPOUT)
    updates, state = tx.update(grads, state, params)
    params = apply_updates(params, updates)
    return (params, state, key), loss


def main(batch_size):
    carry, log = init(), []
    average = carry[0]
    for batch in rows.batches(batch_size):
        carry, loss = train_step(carry, batch)
        params, state, _ = carry
        if tx.has_updated(state):
            step = int(state.gradient_step)
            average = optax.incremental_update(params, average, 0.1)
            log.append((step, float(loss), float(schedule(step))))
    return average, log
