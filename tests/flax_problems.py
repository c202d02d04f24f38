"""Small Flax models, whole and cut, shared by the tests of Linen and NNX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from optax_accum import flax as accum

ROWS = [3, 5, 4]
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 6)).astype("f"), RNG.integers(0, 3, size=12)


class MLP(nn.Module):
    norm: bool = False

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(8)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(3)(nn.relu(x))


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def micro_batches():
    ends = np.cumsum(ROWS)
    return [(X[end - n : end], Y[end - n : end]) for end, n in zip(ends, ROWS, strict=True)]


@functools.cache
def initial(norm):
    model = MLP(norm)
    return model, jax.jit(model.init)(jax.random.key(0), X[:2])


def created(tx, cls=accum.linen.TrainState, norm=False, **kwargs):
    model, variables = initial(norm)
    variables = jax.tree.map(jnp.array, variables)  # a copy: some steps donate it
    if norm:
        kwargs = {"batch_stats": variables["batch_stats"], "momentum": 0.9, **kwargs}
    return cls.create(apply_fn=model.apply, params=variables["params"], tx=tx, **kwargs)


def gradient(state, batch):
    return _gradient(state.apply_fn, state.params, batch)


@functools.partial(jax.jit, static_argnums=0)
def _gradient(apply_fn, params, batch):
    return jax.value_and_grad(lambda params: cross_entropy(apply_fn({"params": params}, batch[0]), batch[1]))(params)


def normalised(state, batch):
    """The gradient and the new statistics, as in Flax's examples."""
    return _normalised(state.apply_fn, {"params": state.params, "batch_stats": state.batch_stats}, batch)


@functools.partial(jax.jit, static_argnums=0)
def _normalised(apply_fn, variables, batch):
    def loss(params):
        logits, new = apply_fn({**variables, "params": params}, batch[0], mutable=["batch_stats"])
        return cross_entropy(logits, batch[1]), new["batch_stats"]

    return jax.grad(loss, has_aux=True)(variables["params"])


def close(got, want, tolerance=1e-6):
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=tolerance), got, want)


def equal(got, want):
    jax.tree.map(assert_array_equal, got, want)


def rows_of(batch):
    """A `weight_fn`: a call counts by its rows."""
    return len(batch[0])


class Net(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x, norm=True):
        x = self.first(x)
        x = self.norm(x) if norm else x
        return self.last(self.drop(nnx.relu(x)))


def nnx_loss(model, batch, norm=False):
    return cross_entropy(model(batch[0], norm), batch[1])


def arrays(tree):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(tree))
