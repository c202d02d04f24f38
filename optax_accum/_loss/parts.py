"""What a loss returns, taken apart: of `loss, (logits, carry)` the loss, auxiliary outputs, the carry."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from optax_accum._core.leaves import short
from optax_accum._core.types import Tree
from optax_accum._loss import ratio


class LossParts(NamedTuple):
    """The parts of the value that `fun` returns."""

    loss: Any  # [], or a dict of terms, each [], or a Ratio, or a dict of them
    aux: Tree = None
    carry: Tree = None


class Returns(NamedTuple):
    """The form of the value that `fun` returns: `loss`, `(loss, aux)`, `(loss, carry)` or `(loss, (aux, carry))`."""

    has_aux: bool = False
    has_carry: bool = False
    weight_of: Callable[[Any, Any], Any] | None = None  # `(loss, aux) -> weight` of a mean
    what: str = "loss"  # the name of the first part, for a message

    def parts(self, out: Any) -> LossParts:
        """Takes the result of `fun` apart; a loss that comes with its weight becomes a `Ratio`."""
        parts = self.taken_apart(out)

        def as_float(leaf: Any) -> Any:
            return float(leaf) if type(leaf) is int else leaf  # a term that is switched off, say

        loss = jax.tree.map(as_float, ratio.as_ratio(parts.loss))
        if self.weight_of is not None:
            loss = ratio.from_mean(loss, self._weight(loss, parts.aux))
        return parts._replace(loss=loss)

    def _weight(self, loss: Any, aux: Tree) -> Any:
        assert self.weight_of is not None
        try:
            return self.weight_of(loss, aux)
        except Exception as error:
            if not self.has_aux:
                error.add_note("weight_of gets aux=None here: pass has_aux=True if fun returns (loss, aux).")
            raise

    def taken_apart(self, out: Any) -> LossParts:
        """Takes the result of `fun` apart, and changes nothing in it."""
        if not (self.has_aux or self.has_carry):
            return LossParts(out)
        if not isinstance(out, tuple) or len(out) != 2:
            option = " and ".join(["has_aux"] * self.has_aux + ["carry_argnum"] * self.has_carry)
            second = "aux" if not self.has_carry else "(aux, carry)" if self.has_aux else "carry"
            raise TypeError(
                f"With {option}, fun must return a pair, ({self.what}, {second}): it returned {short(out)}. Return "
                "that, or leave out the option."
            )
        loss, second = out
        if not self.has_carry:
            return LossParts(loss, aux=second)
        if not self.has_aux:
            return LossParts(loss, carry=second)
        if not isinstance(second, tuple) or len(second) != 2:
            raise TypeError(f"With has_aux and carry_argnum, fun returns (loss, (aux, carry)): it returned {out!r}.")
        return LossParts(loss, *second)

    def joined(self, parts: LossParts) -> Any:
        others = (parts.aux, parts.carry)
        if self.has_aux and self.has_carry:
            return parts.loss, others
        return (parts.loss, others[self.has_carry]) if self.has_aux or self.has_carry else parts.loss
