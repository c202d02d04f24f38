"""Equinox's primitives, by their names: nothing is imported, and nothing is loaded where nobody uses Equinox.

Under `vmap`, its loops (of Diffrax and Optimistix, too) select with `select_if_vmap` and write with `maybe_set`, row by
row. `unvmap_any` asks all rows whether one goes on. In a `scan` of branches (`kind="bounded"`) it is a reduction in
parts, once an iteration. In the predicate of a `while` it couples rows, and the loop runs whole, unless the predicate
has no rows, as with constant steps: that rows which have ended stay as they are depends on how the loop began, and no
equation tells.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_accum._core.folds import MAX, MIN
from optax_accum._rows.registry import FIRST, REST, Reduction, register
from optax_accum._rows.rules import elementwise
from optax_accum._rows.traces import View


def _over_all(equation: Any, values: Sequence[Any], wide: Any, along: Callable[..., jax.Array]) -> jax.Array:
    return along(values[0], axis=None)


def _takes_one_array(view: View) -> bool:
    return len(view.ins) == 1


def _set(view: View) -> bool:
    """Whether `xs.at[i].set(x)` has its rows along other axes than `i`, a scalar index of the first axis."""
    is_first = view.params["i_static"] is None and len(view.ins) == 4 and view.shape_in(3) == ()
    axis = view.outs[0]
    return is_first and bool(axis) and list(view.ins) == [None, axis, axis - 1, None]


def _mapped(view: View) -> bool:
    """Whether a `vmap` of `maybe_set` is over the rows: one of each row, and each with its own arrays."""
    prim, sizes = view.params["prim"], [each.params["__axis_size"] for each in (view.single, view.double)]
    over_rows = sizes[0] * view.rows[1] == sizes[1] * view.rows[0] and sizes[0] != sizes[1]
    alike = all(axis in (None, along) for axis, along in zip(view.ins, view.params["__batch_axes"], strict=True))
    return prim.name == "maybe_set" and over_rows and alike and set(view.outs) == {0}


register("nonbatchable nondifferentiable_backward nontraceable", local=elementwise, linear=FIRST, is_cheap=True)
register("select_if_vmap", local=elementwise, linear=REST, is_cheap=True)
register("maybe_set", local=_set)
register("vprim", local=_mapped)
register("unvmap_any", partial=Reduction(_takes_one_array, MAX, _over_all))
register("unvmap_max", partial=Reduction(_takes_one_array, MAX, _over_all))
register("unvmap_all", partial=Reduction(_takes_one_array, MIN, _over_all))
