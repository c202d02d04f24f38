"""A loss against the whole batch's, through every way that computes it micro-batch by micro-batch."""

import jax
import jax.numpy as jnp
import numpy as np

import optax_accum

ROWS = 12


def values(seed=0, rows=ROWS, dtype=jnp.float32):
    """Parameters and a batch: of floats, tokens, labels, and a mask."""
    random = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape), dtype)
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
        "mask": jnp.asarray(random.random(rows) < 0.7, dtype),
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


def of_parts(way, loss, parts, **options):
    """The value and the gradient, by one of the functions that know rows."""
    if way == "value_and_grad":
        return optax_accum.value_and_grad(loss, num_microbatches=parts, **options)
    return jax.value_and_grad(optax_accum.microbatched(loss, parts), **options)


WAYS = ("value_and_grad", "microbatched")


def assert_whole(loss, *args, ways=tuple((way, 5) for way in WAYS), tolerance=1e-10, **options):
    """The value and the gradient of a loss are the whole batch's, by each function and for each number of parts."""
    ways = list(ways)
    funs = [jax.value_and_grad(loss, **options), *(of_parts(way, loss, parts, **options) for way, parts in ways)]
    want, *found = jax.jit(lambda *args: [fun(*args) for fun in funs])(*args)
    assert np.isfinite(jax.tree.leaves(want)[0]).all()
    differences = {way: farthest(got, want) for way, got in zip(ways, found, strict=True)}
    assert max(differences.values()) < tolerance, differences


def couplings(loss, params, batch):
    """The primitives that take rows together."""
    return _names(optax_accum.explain(loss, params, batch).couplings)


def whole(loss, params, batch):
    """Those of them that run once, on all rows."""
    return _names(optax_accum.explain(loss, params, batch).whole)


def _names(found):
    return [name for coupling in found for name in coupling.primitives]
