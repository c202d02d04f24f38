"""A train script as Flax's lm1b example has it: sentences of many lengths, padded; a mean over tokens that are there.

Its dropout key is folded with `state.step`, and it logs the learning rate of its schedule. The README's diff is applied
to it.
"""

import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

LENGTH = 64


class Model(nn.Module):
    dropout_rate: float

    @nn.compact
    def __call__(self, tokens):
        h = nn.Embed(256, 32)(tokens)
        h = jnp.tanh(nn.Conv(32, (8,), padding="CAUSAL")(h))
        h = nn.Dropout(self.dropout_rate, deterministic=self.dropout_rate == 0)(h)
        return nn.Dense(256)(h)


learning_rate_fn = optax.warmup_cosine_decay_schedule(0.1, 0.5, warmup_steps=4, decay_steps=16)


def create_train_state(key, dropout_rate):
    model = Model(dropout_rate)
    params = model.init({"params": key, "dropout": key}, jnp.zeros((1, LENGTH), jnp.int32))["params"]
    tx = optax.sgd(learning_rate_fn, momentum=0.9)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@jax.jit
def train_step(state, tokens, dropout_key):
    weights = (tokens[:, 1:] > 0).astype(jnp.float32)
    dropout_key = jax.random.fold_in(dropout_key, state.step)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens[:, :-1], rngs={"dropout": dropout_key})
        each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return (each * weights).sum() / weights.sum()

    lr = learning_rate_fn(state.step)
    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    new_state = state.apply_gradients(grads=grads)
    return new_state, {"loss": loss, "learning_rate": lr}


def sentences():
    """512 sentences of Python's own documentation as bytes [512, LENGTH], 0 where they have ended."""
    text = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    rows = [np.frombuffer(s.strip().encode("ascii", "ignore")[:LENGTH], np.uint8) for s in text.split(". ")[:512]]
    tokens = np.zeros((len(rows), LENGTH), np.int32)
    for row, own in zip(tokens, rows, strict=True):
        row[: len(own)] = own
    return tokens


def main(batch_size, dropout_rate=0.0):
    """Trains for 8 batches of 64 sentences, in steps of `batch_size`; returns the state and the log of each step."""
    tokens, log = sentences(), []
    state = create_train_state(jax.random.key(0), dropout_rate)
    for start in range(0, len(tokens), batch_size):
        state, metrics = train_step(state, tokens[start : start + batch_size], jax.random.key(1))
        log.append(metrics)
    return state, log
