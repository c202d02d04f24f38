"""Experimental: how other primitives treat rows.

A micro-batch runs an equation alone only if a rule proves that it
may. JAX's primitives have rules, and those of Equinox's loops; any
other primitive runs once, on all rows: the numbers are right, and no
memory is saved. `explain` names it.

A rule is a function of a `View`: `elementwise`, `leading_axes(2)`, or
one of yours, such as

    lambda view: view.ins[0] != view.params["axis"]

It is trusted: a wrong rule gives wrong gradients. Compare yours with
the gradient of the whole batch, for some numbers of micro-batches.
"""

from optax_accum._core.folds import Fold
from optax_accum._rows.registration import register
from optax_accum._rows.registry import Reduction
from optax_accum._rows.rules import elementwise, leading_axes
from optax_accum._rows.traces import View

__all__ = ["Fold", "Reduction", "View", "elementwise", "leading_axes", "register"]
