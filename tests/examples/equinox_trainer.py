"""A trainer in Equinox with a filtered gradient of a model, cut by hand, as Levanter's `microbatched` has it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.examples import rows

DROPOUT = 0.3
MICRO_BATCHES = 4
schedule = optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 16)
tx = optax.adamw(schedule)


class Model(eqx.Module):
    params: dict
    activation: callable = jnp.tanh
    dropout: eqx.nn.Dropout = eqx.nn.Dropout(DROPOUT)

    def __call__(self, x, key):
        h = self.dropout(self.activation(x @ self.params["first"]), key=key)
        return h @ self.params["second"]


def loss_fn(model, batch, key):
    errors = (model(batch["x"], key) - batch["y"]) ** 2
    return rows.mean(errors, batch["mask"])


def init():
    model = Model(rows.init())
    return model, tx.init(eqx.filter(model, eqx.is_inexact_array)), jax.random.key(0)


def part(batch, i):
    start, stop = (j * len(batch["x"]) // MICRO_BATCHES for j in (i, i + 1))
    return jax.tree.map(lambda leaf: leaf[start:stop], batch)


@eqx.filter_jit
def train_step(carry, batch):
    model, opt_state, key = carry
    key, own = jax.random.split(key)
    grad_fn = eqx.filter_value_and_grad(loss_fn)
    parts = [part(batch, i) for i in range(MICRO_BATCHES)]
    outs = [grad_fn(model, each, own) for each in parts]
    mean = lambda *leaves: sum(leaves) / len(leaves)
    loss, grads = jax.tree.map(mean, *outs)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return (eqx.apply_updates(model, updates), opt_state, key), loss


def main(batch_size):
    carry, log = init(), []
    average = carry[0].params
    for batch in rows.batches(batch_size):
        carry, loss = train_step(carry, batch)
        average = optax.incremental_update(carry[0].params, average, 0.1)
        step = int(carry[1][0].count)
        log.append((step, float(loss), float(schedule(step))))
    return average, log
