"""`apply_gradients`: a micro-step that updates the parameters, too."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum._across import outcomes
from optax_accum._across.transformation import rules_of, update
from optax_accum._arguments import callables, checks
from optax_accum._core.leaves import NOT_ARRAYS, NOT_GRADIENTS, check_arrays
from optax_accum._core.state import check_no_other_window, states_in, warn_of_no_window
from optax_accum._core.types import Tree


def apply_gradients(
    tx: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, **extra_args: Any
) -> tuple[Tree, Tree]:
    """Makes a micro-step: `tx.update` and `optax.apply_updates` in one.

        params, state = apply_gradients(tx, grads, state, params)

    The update is applied inside the branch that makes it:

        updates:      params + updates of `inner`
        accumulates:  params

    A micro-step that only accumulates reads and writes the accumulator, but
    neither parameters nor optimizer state nor a tree of zeros, so it costs
    no more than adding. The result equals that of the two calls: bit for
    bit outside `jit`, and up to rounding inside it.

    Args:
      tx: what `accumulate_gradients` returned. For any other transformation
        (a chain that holds one, say) this is `tx.update` followed by
        `optax.apply_updates`.
      grads: the gradients of one micro-batch, a tree like `params`.
      state: the state of `tx`.
      params: the parameters, which are returned in their own dtypes.
      **extra_args: what `tx.update` takes by keyword: `weight`, `flush`,
        and the arguments of the inner optimizer.

    Returns:
      `(params, state)`. Donate them to `jit` in this order
      (`step(params, state, ...) -> (params, state)`): JAX gives donated
      buffers to results of equal shape in order, and in another order the
      compiler copies them.

    Raises:
      TypeError: `params` is a module of NNX.
      ValueError: `params` is None. Otherwise as `accumulate_gradients`.

    Guarantees:
      Known when tracing:

      * An integer parameter (its gradient is a float0): is returned as it
        is, if `inner` leaves it out (`optax.masked`).
      * `tx` does not accumulate: one update. If `weight`, `rows` or `flush`
        is given, a warning, once, that these do nothing.
      * `tx` accumulates, but not as we do (`optax.MultiSteps`,
        `optax.apply_every`), and `weight`, `rows` or `flush` is given: an
        error, because these would be lost.

      Known when running:

      * No update (the window goes on, or is discarded): the same
        parameters, bit for bit.
      * An update: `optax.apply_updates(params, updates)`.

    Example:
      >>> import functools, jax, jax.numpy as jnp, optax, optax_accum
      >>> tx = optax_accum.accumulate_gradients(optax.sgd(0.5), every=2)
      >>> @functools.partial(jax.jit, donate_argnums=(0, 1))
      ... def train_step(params, state, x):
      ...     grads = jax.grad(lambda p: jnp.mean((p - x) ** 2))(params)
      ...     return optax_accum.apply_gradients(tx, grads, state, params)
      >>> params = jnp.array(0.0)
      >>> state = tx.init(params)
      >>> for x in (1.0, 3.0):
      ...     params, state = train_step(params, state, jnp.array([x]))
      ...     print(params)
      0.0
      2.0
    """
    if params is None:
        raise ValueError("apply_gradients returns new parameters and needs the old ones: params=None. Pass params.")
    callables.as_optimizer(tx)
    checks.check_no_module([params], checks.MODULES_ACROSS_CALLS)
    check_arrays("Gradients", grads, NOT_GRADIENTS)
    check_arrays("Parameters", params, NOT_ARRAYS)
    if rules := rules_of(tx):
        return update(rules, outcomes.new_params, grads, state, jax.tree.map(jnp.asarray, params), **extra_args)
    if extra_args.keys() & {"weight", "rows", "flush"}:
        check_no_other_window(state, "apply_gradients with weight, rows or flush")
        if not states_in(state):
            warn_of_no_window()
    updates, state = optax.with_extra_args_support(tx).update(grads, state, params, **extra_args)
    return outcomes.apply_updates(params, updates), state
