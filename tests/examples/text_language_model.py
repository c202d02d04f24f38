"""A train script as Flax's lm1b example has it: sentences of many lengths, padded; a mean over tokens that are there.

The README's diff is applied to it.
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
    @nn.compact
    def __call__(self, tokens):
        h = nn.Embed(256, 32)(tokens)
        h = jnp.tanh(nn.Conv(32, (8,), padding="CAUSAL")(h))
        return nn.Dense(256)(h)


def create_train_state(key, learning_rate):
    model = Model()
    params = model.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"]
    tx = optax.sgd(learning_rate, momentum=0.9)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@jax.jit
def train_step(state, tokens):
    weights = (tokens[:, 1:] > 0).astype(jnp.float32)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return (each * weights).sum() / weights.sum()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    new_state = state.apply_gradients(grads=grads)
    return new_state, loss


def sentences():
    """512 sentences of Python's own documentation as bytes [512, LENGTH], 0 where they have ended."""
    text = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    rows = [np.frombuffer(s.strip().encode("ascii", "ignore")[:LENGTH], np.uint8) for s in text.split(". ")[:512]]
    tokens = np.zeros((len(rows), LENGTH), np.int32)
    for row, own in zip(tokens, rows, strict=True):
        row[: len(own)] = own
    return tokens


def main(batch_size):
    """Trains for 8 batches of 64 sentences, in steps of `batch_size`; returns the parameters and the steps counted."""
    tokens = sentences()
    state = create_train_state(jax.random.key(0), 0.5)
    for start in range(0, len(tokens), batch_size):
        state, _ = train_step(state, tokens[start : start + batch_size])
    return state.params, int(state.step)
