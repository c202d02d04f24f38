"""A loss against the whole batch's, through every way that computes it micro-batch by micro-batch."""

import jax
import jax.numpy as jnp
import numpy as np

import optax_accum
from optax_accum._arguments.roles import Roles
from optax_accum._rows.levels import Kind
from optax_accum._within.microbatched import microbatched
from optax_accum._within.splitting import Sizes
from optax_accum._within.traced import traced

ROWS = 12
PARTS = (2, 5, ROWS)  # even, with a remainder, every row alone


def values(seed=0, rows=ROWS):
    """Parameters and a batch: of floats, tokens, labels, and a mask."""
    random = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
    whole = lambda top, *shape: jnp.asarray(random.integers(0, top, shape), jnp.int32)
    params = {
        "w": normal(4, 4) / 2,
        "b": normal(4) / 2,
        "table": normal(7, 4) / 2,
        "layers": {"w": normal(3, 4, 4) / 2, "scale": 1 + normal(3, 4) / 5},
        "out": normal(4, 5),
    }
    batch = {
        "x": normal(rows, 4),
        "y": normal(rows),
        "t": whole(7, rows, 6),
        "label": whole(5, rows),
        "mask": jnp.asarray(random.random(rows) < 0.7, jnp.float32),
    }
    return params, batch


def farthest(got, want):
    """The largest difference, relative to the largest number of its leaf; inf where types differ."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    found = [0.0]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (jnp.shape(a), jnp.result_type(a)) == (jnp.shape(b), jnp.result_type(b))
        a, b = (np.asarray(leaf).astype(np.result_type(leaf.dtype, np.float64)) for leaf in (a, b))
        scale = max(np.abs(b).max(initial=0), 1e-3)
        found.append(float(np.abs(a - b).max(initial=0) / scale))
    return max(found) if np.isfinite(found).all() else np.inf


def both_ways(loss, parts, **options):
    """The value and the gradient, by both functions that know rows."""
    of_function = jax.value_and_grad(microbatched(loss, parts), **options)
    return optax_accum.value_and_grad(loss, parts, **options), of_function


def assert_whole(loss, *args, parts=PARTS, tolerance=2e-6, **options):
    """The value and the gradient of a loss are the whole batch's, by both functions and for each number of parts."""
    want = jax.jit(jax.value_and_grad(loss, **options))(*args)
    assert np.isfinite(jax.tree.leaves(want)[0]).all()
    ways = [way for count in parts for way in both_ways(loss, count, **options)]
    for i, got in enumerate(jax.jit(lambda *args: [way(*args) for way in ways])(*args)):
        assert farthest(got, want) < tolerance, (parts[i // 2], ["value_and_grad", "microbatched"][i % 2])


def couplings(loss, params, batch):
    """The primitives that take rows together, as the room sees them, where the parameters decide what they take."""
    return [equation.name for equation in _levels(loss, params, batch).coupling]


def whole(loss, params, batch):
    """Those of them that run once, on all rows."""
    levels = _levels(loss, params, batch)
    return [equation.name for equation in levels.coupling if levels.kinds[equation] is Kind.WHOLE]


def _levels(loss, params, batch):
    call = Roles(loss, argnums=0, batch_argnums=1).bind((params, batch), {})
    return traced(loss, call, Sizes(2, None, 1), call.params).levels
