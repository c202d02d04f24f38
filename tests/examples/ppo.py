"""PPO whose loss normalises the advantages of its minibatch, as purejaxrl's does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import apply_updates

MICRO_BATCHES = 4
schedule = optax.linear_schedule(0.05, 0.01, 8)
tx = optax.adam(schedule)


def minibatches(size=16):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=(128, *shape)).astype("f")
    data = {"x": draw(6), "action": rng.integers(0, 3, 128), "old": -1.1 + 0.1 * draw(), "advantage": draw() + 1}
    data |= {"target": draw()}
    return [{name: leaf[i : i + size] for name, leaf in data.items()} for i in range(0, 128, size)]


def init():
    first, second = jax.random.split(jax.random.key(0))
    params = {"policy": 0.3 * jax.random.normal(first, (6, 3)), "value": 0.3 * jax.random.normal(second, (6,))}
    return params, tx.init(params)


def normalised(advantage):
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8)


def loss_fn(params, batch):
    log_probs = jax.nn.log_softmax(batch["x"] @ params["policy"])
    of_action = jnp.take_along_axis(log_probs, batch["action"][:, None], 1)[:, 0]
    ratio = jnp.exp(of_action - batch["old"])
    advantage = normalised(batch["advantage"])
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
    of_value = ((batch["x"] @ params["value"] - batch["target"]) ** 2).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    return 0.5 * of_value - gain - 0.01 * entropy


@jax.jit
def train_step(carry, batch):
    params, opt_state = carry
    grad_fn = jax.value_and_grad(loss_fn)
    loss, grads = grad_fn(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (apply_updates(params, updates), opt_state), loss


def main(batch_size):
    carry, log = init(), []
    average = carry[0]
    for step, batch in enumerate(minibatches(batch_size), 1):
        carry, loss = train_step(carry, batch)
        average = optax.incremental_update(carry[0], average, 0.1)
        log.append((step, float(loss), float(schedule(step))))
    return average, log
