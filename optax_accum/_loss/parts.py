"""What a loss returns, taken apart: of `loss, (logits, carry)` the loss, auxiliary outputs, the carry."""

from typing import Any, NamedTuple

import jax

from optax_accum._core.types import Tree
from optax_accum._loss import ratio
from optax_accum._shared.arrays import short


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

        return parts._replace(loss=jax.tree.map(as_float, ratio.as_ratio(parts.loss)))

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
