"""What a loss returns: a number, or a `Ratio`, whose denominator only the loss knows; of a pair, `(loss, aux)`, too.

Totals and counts of a `Ratio` are added apart, and divided once.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_accum._arguments import checks
from optax_accum._core import arithmetic, dtypes, tracing
from optax_accum._core.leaves import by_path
from optax_accum._core.types import Tree
from optax_accum._shared.arrays import short

_CONSTANT = (
    "The count of a Ratio must not depend on the parameters in a way that has a derivative: sums of gradients alone "
    "cannot be divided by it. Return jax.lax.stop_gradient(count) if it is a constant of the loss. If it is to be "
    "differentiated, let value_and_grad split the whole batch in one call."
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ratio:
    """A loss as a total and a count, if only the loss knows its denominator.

        loss     = sum_i total_i / sum_i count_i
        gradient = sum_i d(total_i) / sum_i count_i

    It is for calls that do not see the whole batch (`accumulate_gradients`)
    and for counts that the loss computes: tokens left after packing or
    sampling, rows that the model selects. If the batch alone determines how
    much a micro-batch counts, return a mean and pass `weight_fn`. Sums and
    counts are added as they come, and divided once, at the end.

    Within a call it is the number `total / count` of the whole batch, and a
    dict of them is the sum of these, each with its own denominator:

        loss = sum_t (sum_i total_ti / sum_i count_ti)

    All terms share one sum of gradients, so their counts must be known
    first: the part of the forward pass that they depend on runs twice
    (none of it, if they depend on data and keys alone). There is still one
    accumulator, and gradients are added in place.

    Attributes:
      total: a real scalar, the sum over the micro-batch; in float16 it may
        overflow.
      count: a real scalar of at least 32 bits. It may depend on data and
        keys, and on parameters through comparisons and
        `jax.lax.stop_gradient`, but has no derivative.

    Guarantees:
      Known when tracing:

      * A count with a derivative: exact within a call; else an error, with
        what to do.
      * A `weight_fn`, or `weight=`, beside it: an error.
      * Rows that are compared in it (InfoNCE), across calls: an error, as
        for any weight, unless `exact=False`.
      * A dict of Ratios and numbers: an error, with what to do.
      * A dict of Ratios across calls, or in a train step of Flax: an error,
        with what to do.
      * An optimizer that takes a sum (`reduction="sum"`): an error.
      * With `has_aux` or `carry_argnum`: the `Ratio` stands where the loss
        does; `"mean"` of `aux` is weighted by its count, or with a dict of
        them by rows.
      * A `Ratio` in `aux`, or in what `reduce_microbatches` returns: totals
        and counts are added.

      Known when running:

      * Counts that add to zero: a zero loss and a zero gradient; a window
        without an update.
      * A micro-batch whose count is zero, across calls: its total is added,
        unless that is a NaN (0 times the mean of nothing).
      * One term of a dict whose counts add to zero: the term is zero, and
        so is its gradient.
      * `Devices(to="partial")`: each device returns its own quotient; to
        combine them, weight each by its device's count.

    Example:
      Tokens are masked inside the loss, at random:

      >>> import jax, jax.numpy as jnp, optax_accum
      >>> def loss(w, x, key):
      ...     masked = jax.random.bernoulli(key, 0.3, x.shape)
      ...     total = jnp.sum(masked * (x - w) ** 2)
      ...     return optax_accum.Ratio(total, count=masked.sum())
      >>> value_and_grad = optax_accum.value_and_grad(
      ...     loss, num_microbatches=4)
      >>> x, key = jnp.full((64, 8), 3.0), jax.random.key(0)
      >>> value, grad = jax.jit(value_and_grad)(0.0, x, key)
      >>> print(value.round(4), grad.round(4))
      9.0 -6.0
    """

    total: Any
    count: Any

    @staticmethod
    def register(kind: Any, total: str, count: str) -> None:
        """Lets a loss return records of another class in place of a `Ratio`.

        Args:
          kind: the class, such as a `WeightedMetric` of a trainer.
          total: the name of its attribute that holds the sum.
          count: the name of its attribute that holds the count.

        Raises:
          TypeError: `kind` is no class.

        Example:
          >>> import typing, jax.numpy as jnp, optax_accum
          >>> class Metric(typing.NamedTuple):
          ...     unreduced: typing.Any
          ...     weight: typing.Any
          >>> optax_accum.Ratio.register(
          ...     Metric, total="unreduced", count="weight")
          >>> loss = lambda w, x: Metric(jnp.sum(x > 2) * w, jnp.sum(x > 2))
          >>> value_and_grad = optax_accum.value_and_grad(loss, 2)
          >>> value, grad = value_and_grad(3.0, jnp.arange(8.0))
          >>> print(value, grad)
          3.0 1.0
        """
        if not isinstance(kind, type):
            raise TypeError(f"A class is registered, not one of its records: kind={kind!r}. Pass its type.")
        _RECORDS[kind] = total, count

    def checked(self) -> "Ratio":
        """Returns it with a count of the default float dtype.

        Nobody can differentiate that count.
        """
        count = jnp.asarray(checks.as_weight(self.count, name="the count of a Ratio"), checks.default_float())
        return Ratio(self.total, tracing.refuse_differentiation(count, _CONSTANT))


_RECORDS: dict[type, tuple[str, str]] = {}  # classes that count as a Ratio, and their attributes


def as_ratio(loss: Any) -> Any:
    """Turns records of registered classes, one or several in a dict, into Ratios."""
    if type(loss) is dict:
        return {name: as_ratio(term) for name, term in loss.items()}
    names = _attributes(loss)
    for name in names:
        if not hasattr(loss, name):
            raise TypeError(
                f"Ratio.register names attributes of the class: {type(loss).__name__} has no {name!r}. Register it "
                "with the names that it has."
            )
    return Ratio(*(getattr(loss, name) for name in names)) if names else loss


def _attributes(node: Any) -> tuple[str, ...]:
    """The attributes that hold the sum and the count, if the class, or one that it extends, is registered; else ()."""
    return next((_RECORDS[kind] for kind in type(node).__mro__ if kind in _RECORDS), ())


def check_loss(loss: Any) -> None:
    """Raises unless a loss is a real scalar, a Ratio of them, or a dict of one of both."""
    terms = jax.tree.leaves(loss, is_leaf=is_ratio)
    if not any(map(is_ratio, terms)):
        return _check_numbers(loss)
    if not is_ratio(loss) and not (isinstance(loss, dict) and all(map(is_ratio, loss.values()))):
        raise TypeError(
            "A loss of several Ratios is a dict of nothing else: fun returned "
            f"{jax.tree.map(lambda term: type(term).__name__, loss, is_leaf=is_ratio)}. A mean over rows is "
            "Ratio(total=rows * mean, count=rows)."
        )
    return _check_numbers(totals(loss))


def _check_numbers(loss: Any) -> None:
    """Raises unless the loss is a real scalar, or a dict of them."""
    if type(loss) is tuple:
        raise TypeError(
            f"fun must return a real scalar loss, or a dict of them: it returned a tuple of {len(loss)}. If that is "
            "(loss, aux), pass has_aux=True; if it holds gradients, use optax_accum.reduce_microbatches."
        )
    for path, leaf in by_path(loss, "the loss"):
        if leaf.shape or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"fun must return a real scalar loss, or a dict of them: {path} is {short(leaf)}. Reduce it with "
                "jnp.mean, say; with has_aux=True the loss comes first."
            )
    if not (isinstance(loss, dict) and loss) and not hasattr(loss, "dtype"):
        raise TypeError(
            f"fun must return a real scalar loss, or a dict of them: it returned {loss!r}. Return one number; "
            "with has_aux=True, return (loss, aux)."
        )


def check_single(loss: Any) -> None:
    """Raises for a loss of several terms where gradients are added over calls."""
    if isinstance(loss, dict):
        raise TypeError(
            f"Across calls gradients are added, and their sum is divided once: fun returned the terms {sorted(loss)}. "
            "Return their sum, or one Ratio. For terms with denominators of their own let value_and_grad split the "
            "whole batch in one call."
        )


def is_record(node: Any) -> bool:
    """Whether `node` is a Ratio, or a record of a class that counts as one."""
    return is_ratio(node) or bool(_attributes(node))


def is_ratio(term: Any) -> bool:
    return isinstance(term, Ratio)


def checked(loss: Any) -> Any:
    return jax.tree.map(lambda term: term.checked() if is_ratio(term) else term, loss, is_leaf=is_ratio)


def totals(loss: Any) -> Any:
    """Replaces each Ratio in a loss by its total."""
    return jax.tree.map(lambda term: term.total if is_ratio(term) else term, loss, is_leaf=is_ratio)


def as_number(loss: Any) -> Any:
    """A loss as one number: a Ratio is divided, and terms are added."""
    return functools.reduce(operator.add, map(_quotient, jax.tree.leaves(loss, is_leaf=is_ratio)))


def _quotient(term: Any) -> Any:
    if not is_ratio(term):
        return term
    count = jnp.asarray(checks.as_weight(term.count, name="the count of a Ratio"), checks.default_float())
    total = jnp.asarray(term.total)
    return divided(total.astype(dtypes.accumulator_dtype(total.dtype, None)), count)


def kept_from_zero(count: Any) -> jax.Array:
    """The count, and 1 for a count of 0."""
    return jnp.where(count == 0, 1, count)


def reciprocal(count: jax.Array) -> jax.Array:
    """1 / count: 0 for a count of 0; NaN, which shows, for a count that is too large to divide by."""
    is_empty = count == 0
    factor = jnp.where(is_empty, 0, arithmetic.reciprocal(count))
    nan = np.asarray(np.nan, factor.dtype)  # a constant: `jax.debug_nans` sees what an operation returns
    return jnp.where(is_empty | arithmetic.divides(count), factor, nan)


def divided(total: jax.Array, count: jax.Array) -> jax.Array:
    """A sum divided by a count, or 0 where that is 0: one product, which fuses into the optimizer as no select does."""
    return arithmetic.scaled(total, reciprocal(count), total.dtype)


class LossParts(NamedTuple):
    """The parts of the value that `fun` returns."""

    loss: Any  # [], or a dict of terms, each [], or a Ratio, or a dict of them
    second: Tree = None  # auxiliary outputs, or the carry


class Returns(NamedTuple):
    """The form of the value that `fun` returns: a loss alone, or a pair if the user's `option` says so."""

    is_pair: bool = False
    option: str = "has_aux"
    pair: str = "(loss, aux)"

    def parts(self, out: Any) -> LossParts:
        """Takes the result of `fun` apart; a loss that comes with its weight becomes a `Ratio`."""
        parts = self.taken_apart(out)

        def as_float(leaf: Any) -> Any:
            return float(leaf) if type(leaf) is int else leaf  # a term that is switched off, say

        return parts._replace(loss=jax.tree.map(as_float, as_ratio(parts.loss)))

    def taken_apart(self, out: Any) -> LossParts:
        """Takes the result of `fun` apart, and changes nothing in it."""
        if not self.is_pair:
            return LossParts(out)
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(
                f"With {self.option}, fun must return a pair, {self.pair}: it returned {short(out)}. Return that, or "
                "leave out the option."
            )
        return LossParts(*out)

    def joined(self, parts: LossParts) -> Any:
        return tuple(parts) if self.is_pair else parts.loss
