"""A whole context of parameters, batch and key is differentiated, as in Kauldron."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import apply_updates

from tests.examples import rows

DROPOUT = 0.3
schedule = optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 16)
MICRO_BATCHES = 4
tx = optax.MultiSteps(optax.adamw(schedule), MICRO_BATCHES)


class Context(NamedTuple):
    params: Any
    batch: Any
    key: Any


class State(NamedTuple):
    step: Any
    params: Any
    average: Any
    opt_state: Any
    key: Any


def init():
    params = rows.init()
    return State(jnp.int32(0), params, params, tx.init(params), jax.random.key(0))


def forward(context):
    loss = rows.loss(context.params, context.batch, context.key, DROPOUT)
    return loss, {"tokens": context.batch["mask"].sum()}


@jax.jit
def train_step(state, batch):
    params, opt_state = state.params, state.opt_state
    key, own = jax.random.split(state.key)
    grad_fn = jax.value_and_grad(forward, has_aux=True, allow_int=True)
    (loss, aux), grads = grad_fn(Context(params, batch, own))
    grads = grads.params
    updates, opt_state = tx.update(grads, opt_state, params)
    params = apply_updates(params, updates)
    average = optax.incremental_update(params, state.average, 0.1)
    return State(state.step + 1, params, average, opt_state, key), loss, aux


def main(batch_size):
    state, log = init(), []
    for batch in rows.batches(batch_size):
        state, loss, aux = train_step(state, batch)
        step = int(state.step)
        log.append((step, float(loss), float(schedule(step)), float(aux["tokens"])))
    return state.average, log
