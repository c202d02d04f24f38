"""Owns a loss whose denominator only the loss knows: sums and counts are added apart, and divided once."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum._core import arithmetic, checks, tracing
from optax_accum._core.arithmetic import Tree

_CONSTANT = (
    "The count of a Ratio must not depend on the parameters in a way that has a derivative: sums of gradients alone "
    "cannot be divided by it. Return jax.lax.stop_gradient(count) if it is a constant of the loss. If it is to be "
    "differentiated, let microbatched_apply return both as rows, and divide their sums."
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ratio:
    """What a loss returns whose denominator only it knows: a sum, and how much was added up.

        loss = sum_i total_i / sum_i count_i        gradient = sum_i d(total_i) / sum_i count_i

    Where the batch alone says how much a micro-batch counts, a loss is a mean and `weight_fn` says it. A `Ratio` is for
    counts that are made inside the loss: tokens left after packing or sampling there, rows that the model itself lets
    through. Nothing is computed twice: sums and counts are added as they come, and divided once, at the end.

    Attributes:
      total: a real scalar, the sum over the micro-batch; in float16 it may overflow.
      count: a real scalar of at least 32 bits. It may depend on data and keys, and on parameters through comparisons
        and `jax.lax.stop_gradient`, but has no derivative.

    Guarantees:
      | case | result | known when |
      |---|---|---|
      | counts that add to zero | a zero loss and a zero gradient; a window without an update | running |
      | a count with a derivative | an error, with what to do | tracing |
      | a `weight_fn`, or `weight=`, beside it; one in a dict of terms | an error | tracing |
      | an optimizer that takes a sum (`reduction="sum"`) | an error | tracing |
      | with `has_aux` or `carry_argnum` | it stands where the loss does; `"mean"` of `aux` is by rows | tracing |
      | `reduce_to="partial"` | each device's own quotient: weigh it by the device's own count | running |

    Example:
      Tokens are masked inside the loss, at random:

      >>> import jax, jax.numpy as jnp, optax_accum
      >>> def loss(w, x, key):
      ...     masked = jax.random.bernoulli(key, 0.3, x.shape)
      ...     return optax_accum.Ratio(total=jnp.sum(masked * (x - w) ** 2), count=masked.sum())
      >>> value_and_grad = optax_accum.value_and_grad(loss, num_microbatches=4, rng_argnum=2)
      >>> value, grad = jax.jit(value_and_grad)(0.0, jnp.full((64, 8), 3.0), jax.random.key(0))
      >>> print(value, grad)
      9.0 -6.0
    """

    total: Any
    count: Any

    def checked(self) -> "Ratio":
        """Returns it with a count of the default float dtype, which nobody can differentiate."""
        count = jnp.asarray(checks.as_weight(self.count, name="the count of a Ratio"), checks.default_float())
        return Ratio(self.total, tracing.refuse_differentiation(count, _CONSTANT))


def check_loss(loss: Any, shares: Any) -> None:
    """Raises unless a loss is a Ratio of real scalars, or what `checks.check_loss` lets pass."""
    if isinstance(loss, dict) and any(isinstance(term, Ratio) for term in loss.values()):
        raise TypeError(
            f"A Ratio is the whole loss, not one of its terms: fun returned {sorted(loss)}. One sum of gradients is "
            "divided once. Give terms denominators of their own by weight_fn; or let microbatched_apply return rows, "
            "and divide their sums."
        )
    if not isinstance(loss, Ratio):
        return checks.check_loss(loss, shares)
    if shares is not None:
        raise ValueError(
            "A Ratio brings its own denominator: weight_fn weighs losses that are means. Leave out weight_fn, or "
            "return the mean."
        )
    return checks.check_loss(loss.total, None)


def divided(totals: Tree, count: jax.Array) -> Tree:
    """Returns sums divided by a count, [] or with one for each row of leaves [d, ...]; zeros where it is 0.

    One product with the reciprocal: a division, or a select, would not fuse into the optimizer.
    """
    share = jnp.where(count == 0, 0, arithmetic.reciprocal(count))

    def scaled(leaf: jax.Array) -> jax.Array:
        wide = arithmetic.accumulator_dtype(leaf.dtype, None)
        of_each = share.reshape(share.shape + (1,) * (leaf.ndim - share.ndim))
        return (leaf.astype(wide) * of_each.astype(wide)).astype(leaf.dtype)

    return jax.tree.map(scaled, totals)
