"""Losses of each kind, on a line of their own where they take rows together."""

import jax
import jax.numpy as jnp
import optax


def nll(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ params["w"], batch["label"])


def decay(params):
    return 0.1 * (params["w"] ** 2).sum()


# With a weight


def mean(params, batch):
    return nll(params, batch).mean()


def masked(params, batch):
    return (nll(params, batch) * batch["mask"]).sum() / batch["mask"].sum()  # here


def masked_before(params, batch):
    share = batch["mask"] / batch["mask"].sum()  # here
    return (nll(params, batch) * share).sum()


def masked_means(params, batch):
    total = (nll(params, batch) * batch["mask"]).mean()
    return total / batch["mask"].mean()  # here


def mean_where(params, batch):
    return jnp.mean(nll(params, batch), where=batch["mask"] > 0)  # here


def by_product(params, batch):
    return jnp.vdot(nll(params, batch), batch["mask"]) / jnp.sum(batch["mask"])  # here


def by_reciprocal(params, batch):
    return (nll(params, batch) * batch["mask"]).sum() * batch["mask"].sum() ** -1  # here


def guarded_by_maximum(params, batch):
    total = jnp.where(batch["mask"] > 0, nll(params, batch), 0).sum()
    return total / jnp.maximum(batch["mask"].sum(), 1)  # here


def guarded_by_where(params, batch):
    total, count = (nll(params, batch) * batch["mask"]).sum(), batch["mask"].sum()  # here
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0)


def guarded_by_a_small_number(params, batch):
    total = (nll(params, batch) * batch["mask"]).sum()
    return total / (batch["mask"].sum() + 1e-6)  # here


def with_decay(params, batch):
    return nll(params, batch).mean() + decay(params)


def two_sums_one_count(params, batch):
    count = batch["mask"].sum()  # here
    other = (((batch["x"] @ params["v"])[:, 0] - batch["y"]) ** 2 * batch["mask"]).sum()
    return (nll(params, batch) * batch["mask"]).sum() / count + 0.1 * other / count


def means_of_sequences(params, batch):
    losses = nll(params, batch)[:, None] * batch["tokens"]
    return (losses.sum(1) / jnp.maximum(batch["tokens"].sum(1), 1)).mean()


def all_tokens(params, batch):
    losses = nll(params, batch)[:, None] * batch["tokens"]
    count = batch["tokens"].sum()  # here
    return losses.sum() / count


def groups(params, batch):
    """Of GRPO: rewards are normalised over the answers to one prompt."""
    rewards = batch["y"].reshape(-1, 4)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
    return (nll(params, batch) * advantages.reshape(-1)).mean()


def rows_in_vmap(params, batch):
    one = lambda x, y: ((x @ params["v"])[0] - y) ** 2
    return jax.vmap(one)(batch["x"], batch["y"]).mean()


def clipped_ratios(params, batch):
    """Of PPO, with advantages that come normalised."""
    ratio = jnp.exp(-nll(params, batch) - batch["y"])
    return -jnp.minimum(ratio * batch["y"], jnp.clip(ratio, 0.8, 1.2) * batch["y"]).mean()


# Without


def normalised_rows(params, batch):
    h = batch["x"] @ params["w"]
    h = h - h.mean(0, keepdims=True)  # here
    return (h**2).mean()


def batch_norm(params, batch):
    h = batch["x"] @ params["w"]
    mean = h.mean(0, keepdims=True)  # here
    var = ((h - mean) ** 2).mean(0, keepdims=True)
    return jnp.tanh((h - mean) / jnp.sqrt(var + 1e-5)).mean()


def largest_weight(params, batch):
    weights = batch["mask"] / batch["mask"].max()  # here
    return (nll(params, batch) * weights).mean()


def normalised_advantages(params, batch):
    advantages = (batch["y"] - batch["y"].mean()) / (batch["y"].std() + 1e-6)  # here
    return (nll(params, batch) * advantages).mean()


def log_sum(params, batch):
    return jax.nn.logsumexp(nll(params, batch))  # here


def log_of_a_sum(params, batch):
    total = jnp.exp(nll(params, batch)).sum()
    return jnp.log(total)  # here


def contrastive(params, batch):
    z = batch["x"] @ params["w"]
    logits = z @ z.T  # here
    return -jnp.diag(jax.nn.log_softmax(logits)).mean()


def model_counts(params, batch):
    losses = nll(params, batch)
    count = (losses > 0.5).sum()  # here
    return jnp.where(losses > 0.5, losses, 0).sum() / count.astype(jnp.float32)


def one_row_less(params, batch):
    return nll(params, batch).sum() / (len(batch["x"]) - 1)  # here


def by_class(params, batch):
    classes = jax.nn.one_hot(batch["label"], 5)
    counts = classes.sum(0)  # here
    return ((nll(params, batch)[:, None] * classes).sum(axis=0) / (counts + 1e-6)).mean()


def divided_twice(params, batch):
    total = (nll(params, batch) * batch["mask"]).mean()  # here
    return total / batch["mask"].sum()


def sum_with_decay(params, batch):
    return nll(params, batch).sum() + decay(params)  # here


def sum_and_mean(params, batch):
    total = nll(params, batch).sum()  # here
    return total + (batch["x"] @ params["v"]).mean()


def numbered(params, batch):
    places = jnp.arange(len(batch["x"]))  # here
    return (nll(params, batch) * places.astype(jnp.float32)).mean()


def other_test(params, batch):
    """A test of another sum than the one that divides."""
    loss = nll(params, batch).mean()
    return jnp.where(batch["mask"].sum() > 0, loss, 0)  # here


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1e-3, 1e-3),))


@jax.custom_vjp
def with_own_term(x):
    return x


with_own_term.defvjp(lambda x: (x, x), lambda x, ct: (ct + x,))


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), x), lambda x, ct: (jnp.where(jnp.abs(x) < 1, 2 * ct, 0),))


def clipped_rows(params, batch):
    h = clipped(batch["x"] @ params["v"])  # here
    return (h**2).mean()


def clipped_params(params, batch):
    params = clipped(params["v"])  # here
    return ((batch["x"] @ params) ** 2).mean()


def rows_with_a_term(params, batch):
    h = with_own_term(batch["x"] @ params["v"])  # here
    return (h**2).mean()


def rounded(params, batch):
    layer = jax.checkpoint(lambda x: straight_through(x @ params["v"]))
    return (layer(batch["x"]) ** 2).mean()


def two_terms(params, batch):
    squares = ((batch["x"] @ params["v"])[:, 0] - batch["y"]) ** 2
    return nll(params, batch).mean() + (squares * batch["mask"]).sum() / batch["mask"].sum()
