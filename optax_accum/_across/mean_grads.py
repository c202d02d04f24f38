"""`mean_grads`: the mean gradient of the window so far, for logs."""

import jax
import jax.numpy as jnp

from optax_accum._across.accumulator import accumulator_of
from optax_accum._core import arithmetic
from optax_accum._core.state import find_state
from optax_accum._core.types import Tree
from optax_accum._space.metrics import totals


def mean_grads(state: Tree) -> Tree:
    """Returns the weighted mean of the gradients in the window so far.

    The tree, and the units, of `acc_grads` in `optax.MultiStepsState`; in
    our state `acc_grads` is a sum. For a log of the window's gradient at
    each update, put `optax.snapshot` first inside the wrapper instead:
    docs/once_per_update.md.

    Args:
      state: an `AccumulationState`, or any optimizer state that holds
        exactly one.

    Returns:
      `sum(w g) / sum(w)`, in the dtypes of the accumulator. Zeros before
      the first micro-step of a window; `()` for `every=1`, which keeps
      nothing.

    Raises:
      ValueError: `state` holds none, or several.

    Guarantees:
      * `reduction="sum"`: the mean as well.
      * The weights add to 0: the sum.
      * Several devices: the mean over all of them. This communicates;
        inside `jax.shard_map` under `check_vma=False` it is the mean of one
        device.

    Example:
      >>> import jax.numpy as jnp, optax, optax_accum
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.1), every=4)
      >>> state = tx.init(jnp.ones(2))
      >>> for value, rows in ((1.0, 16), (5.0, 48)):
      ...     _, state = tx.update(
      ...         jnp.full(2, value), state, weight=rows)
      >>> print(optax_accum.mean_grads(state))
      [4. 4.]
    """
    window = find_state(state)
    total, weight = totals((accumulator_of(window).on_device(window), window.weight), window.weight)
    factor, has_begun = arithmetic.reciprocal(weight), jnp.asarray(window.mini_step) > 0
    return jax.tree.map(lambda leaf: jnp.where(has_begun, arithmetic.scaled(leaf, factor, leaf.dtype), 0), total)
